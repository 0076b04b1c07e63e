from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ddpm_ds.schema.layout import TensorSplit
from ddpm_ds.unet.blocks import transformer_blocks
from ddpm_ds.unet.layers import BlockLayer, unet_layers
from ddpm_ds.unet.model import build_layer
from ddpm_ds.unet.shards import split_layers
from ddpm_ds.unet.spec import Interface, UnetSpec
from ddpm_ds.unet.tensor_group import TensorGroup
from ddpm_ds.unet.weight_gradients import weighted_parts
from tests.unet.variants import VARIANTS, batch, layers_of, random_unet, split_layer


def test_list_of_layers_is_encoder_middle_decoder() -> None:
    spec = UnetSpec(channels=8, multipliers=(1, 2), blocks_per_level=1, attention_resolutions=(4,), norm_groups=4)
    layers = unet_layers(spec, Interface(channels=1, size=(8, 8)))
    rows = [(layer.name, layer.in_channels, layer.skip_channels, layer.output_shape, layer.pushes) for layer in layers]
    assert rows == [
        ("embed", 1, 0, (1, 8, 8), False),
        ("conv_in", 1, 0, (8, 8, 8), True),
        ("down.0.block.0", 8, 0, (8, 8, 8), True),
        ("down.0.downsample", 8, 0, (8, 4, 4), True),
        ("down.1.block.0", 8, 0, (16, 4, 4), False),
        ("down.1.attention.0", 16, 0, (16, 4, 4), True),
        ("middle.block.0", 16, 0, (16, 4, 4), False),
        ("middle.attention", 16, 0, (16, 4, 4), False),
        ("middle.block.1", 16, 0, (16, 4, 4), False),
        ("up.1.block.0", 16, 16, (16, 4, 4), False),
        ("up.1.attention.0", 16, 0, (16, 4, 4), False),
        ("up.1.block.1", 16, 8, (16, 4, 4), False),
        ("up.1.attention.1", 16, 0, (16, 4, 4), False),
        ("up.1.upsample", 16, 0, (16, 8, 8), False),
        ("up.0.block.0", 16, 8, (8, 8, 8), False),
        ("up.0.block.1", 8, 8, (8, 8, 8), False),
        ("out", 8, 0, (1, 8, 8), False),
    ]


class CountedGroup(TensorGroup):
    """The first rank of a tensor group whose other ranks add zeros; counts the elements that are summed."""

    def __init__(self, size: int) -> None:
        super().__init__(0, size)
        self.summed = 0

    def start_sum(self, x: Tensor) -> Callable[[], object]:
        self.summed += x.numel()
        return super().start_sum(x)


SPLIT = ("heads", "scale_shift", "text", "text_time")
"""Variants that between them have every kind of layer that can be split."""


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", VARIANTS)
def test_a_layer_lists_the_parameters_of_its_module_whole_and_as_a_part(name: str, ranks: int) -> None:
    for layer in split_layers(layers_of(name), TensorSplit(ranks)):
        module = build_layer(layer, 0, 0, TensorGroup(0, layer.shards))
        weights = {part.weight for part in weighted_parts(module)}
        built = [(name, tuple(one.shape), one in weights) for name, one in module.named_parameters()]
        assert [(one.name, one.own_shape(layer.shards), one.uses > 0) for one in layer.listed] == built, layer.name


@pytest.mark.parametrize(
    ("name", "shards"),
    [
        *((name, 1) for name in VARIANTS),
        *(pytest.param(name, 2, marks=() if name in SPLIT else pytest.mark.long) for name in VARIANTS),
    ],
)
def test_macs_activations_and_sums_of_a_layer_are_those_of_its_module(name: str, shards: int) -> None:
    layers = split_layers(layers_of(name), TensorSplit(shards))
    carry, images = batch(name), 2
    for layer, module in zip(layers, random_unet(layers).layers, strict=True):
        group = CountedGroup(layer.shards)
        if layer.shards > 1:
            split_layer(module, group)

        made = layer is not layers[0]  # not read from the data
        inputs = tuple(tensor.requires_grad_(made and tensor.is_floating_point()) for tensor in carry)
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # the only one it knows on CPU
            module(inputs)
        assert counter.get_total_flops() == pytest.approx(2 * layer.macs * images, rel=0.02), layer.name

        group.summed = 0
        saved, output = saved_by_autograd(module, inputs)
        assert saved / 4 == pytest.approx(layer.activation_elements * images, rel=0.02), layer.name
        forward, backward = layer.summed_elements
        assert group.summed == forward * images, layer.name
        if layer.shards > 1:
            group.summed = 0
            wanted = [*module.parameters(), *(one for one in inputs if one.requires_grad)]
            total = sum((one.sum() for one in output), torch.zeros(()))  # of a carry, or of the prediction's images
            torch.autograd.grad(total, wanted, allow_unused=True)
            embedding = layer.embedding_channels * isinstance(layer, BlockLayer)
            assert group.summed == (backward + embedding) * images, layer.name
        carry = tuple(tensor.detach() for tensor in output)


@pytest.mark.parametrize("name", ["heads", "text"])
def test_two_ranks_have_half_of_a_split_layers_weights_and_fewer_activations(name: str) -> None:
    whole, split = layers_of(name), split_layers(layers_of(name), TensorSplit(2))
    pairs = [(one, own) for one, own in zip(whole, split, strict=True) if own.shards > 1]
    assert {type(one) for one, _ in pairs} >= {BlockLayer}
    assert all(2 * own.weights == one.weights and 2 * own.macs == one.macs for one, own in pairs)
    kept, all_kept = (sum(pair[side].activation_elements for pair in pairs) for side in (1, 0))
    assert kept <= 0.85 * all_kept


def test_layers_are_split_by_level_or_by_name_if_their_groups_or_heads_divide() -> None:
    layers = layers_of("heads")

    def split(**asked: Any) -> list[str]:
        return [layer.name for layer in split_layers(layers, TensorSplit(**asked)) if layer.shards > 1]

    every = split(size=2)
    assert {layer.name for layer in layers if isinstance(layer, BlockLayer)} < set(every) and split(size=1) == []
    assert split(size=2, levels=(0,)) == [name for name in every if name.startswith(("down.0", "up.0"))]
    assert split(size=2, levels=(2,)) == [name for name in every if name.startswith(("down.2", "middle", "up.2"))]
    assert split(size=2, layers=("up.*.block.1",)) == ["up.2.block.1", "up.1.block.1", "up.0.block.1"]
    assert split(size=3) == []


def saved_by_autograd(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[int, tuple[Tensor, ...]]:
    """Bytes that autograd keeps of a forward, weights and the encoded text aside, and the output of the forward."""
    others = [block.context for block in transformer_blocks([module]) if block.context is not None]
    weights = {tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), *others)}
    kept: dict[int, Tensor] = {}  # by storage, which holding on to the tensor keeps from being used again

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage().data_ptr()
        if storage not in weights:
            kept[storage] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = module(inputs)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values()), output
