"""Layers that ranks compute together: sums, and the work meanwhile. Gradients are on the ladder."""

from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from torch import Tensor

from ddpm_ds.schema.layout import TensorSplit
from ddpm_ds.unet.blocks import CarryLayer, ResidualBlock
from ddpm_ds.unet.shards import split_layers
from ddpm_ds.unet.tensor_group import TensorGroup
from ddpm_ds.unet.weight_gradients import WaitingGradients, weighted_parts
from tests.unet.variants import batch, layers_of, random_unet, split_layer


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What this rank does, while another one has zeros in all its parts."""
    found: list[str] = []
    compute = WaitingGradients.compute

    def start_sum(group: TensorGroup, x: Tensor) -> Callable[[], None]:
        found.append("starts")
        return lambda: found.append("summed")

    def computed(*args: object) -> None:
        found.append("weight gradients")
        compute(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(TensorGroup, "start_sum", start_sum)
    monkeypatch.setattr(WaitingGradients, "compute", computed)
    yield found


def predict(waiting: WaitingGradients | None = None) -> tuple[list[CarryLayer], Tensor]:
    """The split layers of a U-Net with text, and its prediction."""
    layers = split_layers(layers_of("text"), TensorSplit(2))
    split, carry = [], batch("text")
    for layer, module in zip(layers, random_unet(layers).layers, strict=True):
        if layer.shards > 1:
            split.append(split_layer(module, TensorGroup(0, 2)))
        for part in weighted_parts(module):
            part.waiting = waiting
        carry = module(carry)
    assert isinstance(carry, Tensor)
    return split, carry


def test_weight_gradients_are_computed_while_the_gradient_of_the_input_is_summed(events: list[str]) -> None:
    split, prediction = predict()
    blocks = sum(isinstance(module, ResidualBlock) for module in split)
    pieces = blocks + 3 * (len(split) - blocks)
    assert events == ["starts", "summed"] * pieces and 0 < blocks < len(split)
    events.clear()
    prediction.sum().backward()
    joined = " ".join(events).replace("starts weight gradients summed", "beside").replace("starts summed", "alone")
    of_embedding = blocks  # each block was called alone, and projects the embedding itself
    assert Counter(joined.split()) == {"beside": pieces, "alone": of_embedding}
    assert all(part.weight.grad is not None for module in split for part in weighted_parts(module))
