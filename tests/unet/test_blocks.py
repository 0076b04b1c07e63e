"""The modules of the layers: data types, independence of the images in a batch, the sinusoidal embedding."""

from collections import Counter
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ddpm_ds.pipeline.module import warm_up
from ddpm_ds.unet.blocks import sinusoid
from ddpm_ds.unet.layers import BlockLayer, unet_layers
from ddpm_ds.unet.model import compile_layers
from ddpm_ds.unet.operations import EmbeddingProjection
from ddpm_ds.unet.weight_gradients import WaitingGradients, weighted_parts
from tests.unet.variants import VARIANTS, batch, context, interface_of, layers_of, random_unet, rounding


class Operators(TorchDispatchMode):
    """While entered, counts operators by name, and notes those that give fp16."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.half: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name, out = func.overloadpacket.__name__, func(*args, **(kwargs or {}))
        self.counts[name] += 1
        if any(isinstance(one, torch.Tensor) and one.dtype is torch.float16 for one in tree_leaves(out)):
            self.half.add(name)
        return out


def test_on_cpu_nothing_but_copies_and_joins_is_computed_in_fp16() -> None:
    unet = random_unet(layers_of("heads")).half()
    with Operators() as operators:
        unet(*batch("heads"))
    assert operators.half <= {"_to_copy", "cat", "detach"}
    assert random_unet(layers_of("classes")).bfloat16()(*batch("classes")).dtype is torch.bfloat16


@pytest.mark.parametrize("name", ["ddpm", "scale_shift", "dropout", "wide_embedding"])
def test_blocks_compute_together_what_each_does_alone_with_one_projection_each_way(name: str) -> None:
    layers = layers_of(name)
    unet = random_unet(layers)
    blocks = sum(isinstance(layer, BlockLayer) for layer in layers)
    alone: Any = batch(name)
    ways = []
    with Operators() as separately:
        for layer in unet.layers:
            alone = layer(alone)
        ways.append(torch.autograd.grad(alone.square().mean(), [*unet.parameters()]))
    with Operators() as together:
        prediction = unet(*batch(name))
        ways.append(torch.autograd.grad(prediction.square().mean(), [*unet.parameters()]))
    assert (prediction - alone).norm() <= rounding(layers) * alone.norm()
    for expected, found, (parameter, _) in zip(*ways, unet.named_parameters(), strict=True):
        assert (found - expected).norm() <= 2 * rounding(layers) * (expected.norm() + 0.1), parameter
    assert separately.counts["addmm"] - together.counts["addmm"] == blocks - 1
    assert separately.counts["mm"] - together.counts["mm"] == 2 * (blocks - 1)


def test_weight_gradients_of_projections_that_wait_are_one_product_for_all_blocks_and_micro_batches() -> None:
    unet, waiting = random_unet(layers_of("ddpm")), WaitingGradients({(0, 0), (0, 1)})
    parts = [part for layer in unet.layers for part in weighted_parts(layer)]
    for part in parts:
        part.waiting = waiting
    for number in range(2):
        waiting.begin(0, number)
        unet(*batch("ddpm")).square().mean().backward()
    given: list[torch.Tensor] = []
    with Operators() as together:
        waiting.compute(
            [part for part in parts if isinstance(part, EmbeddingProjection)],
            [1, 0],
            lambda weight, _: given.append(weight),
        )
    assert len(given) == len(set(given)) > 1 and together.counts["mm"] == 1


def test_a_micro_batch_in_flight_holds_no_copy_of_the_projections() -> None:
    unet = random_unet(layers_of("wide_embedding"))
    weights = [module.weight for module in unet.modules() if isinstance(module, EmbeddingProjection)]
    held: set[int] = set()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        held.add(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        unet(*batch("wide_embedding"))
    assert weights[0].numel() in held and sum(weight.numel() for weight in weights) not in held


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        pytest.param("classes", {"multipliers": (1, 1), "blocks_per_level": 1}, id="few shapes"),
        *(pytest.param(name, {}, id=name, marks=pytest.mark.long) for name in ("classes", "scale_shift", "text_time")),
    ],
)
def test_code_compiled_for_each_layer_alone_fits_the_walk(
    name: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Tracing takes a second for some shapes of layers."""
    compiled: list[object] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    layers = unet_layers(VARIANTS[name].model_copy(update=changes), interface_of(name))
    unet = random_unet(layers)
    compile_layers([*unet.layers], tmp_path)
    warm_up(dict(enumerate(unet.layers)), layers, 2, gradients=True, recompute=False)
    known = len(compiled)
    unet(*batch(name), context=context(layers)).square().mean().backward()
    assert known == len(compiled) > 0
    torch._dynamo.reset()


def test_sinusoid_runs_from_frequency_1_to_1e_4_with_shift_1_and_is_finite_in_any_width() -> None:
    t = torch.tensor([100])
    sine_first = sinusoid(t, 8, sine_first=True, shift=1)[0]
    ends = torch.tensor([100.0, 0.01]).sin().tolist()
    assert [sine_first[0].item(), sine_first[3].item()] == pytest.approx(ends, abs=1e-5)  # 100 roundings of an fp32 1
    assert torch.equal(sinusoid(t, 8, sine_first=False, shift=1)[0], sine_first.roll(4))
    for channels, shift in product((1, 2, 3, 8), (0, 1)):
        waves = sinusoid(torch.tensor([0, 999]), channels, sine_first=True, shift=shift)
        assert waves.shape == (2, channels) and waves.isfinite().all()
