"""Rung b of the ladder of trust: bands of rows, each computed by a rank, are the whole image."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddpm_ds.schema.layout import SpaceSplit
from ddpm_ds.unet.blocks import CarryLayer, set_context, transformer_blocks, walk
from ddpm_ds.unet.layers import Layer, unet_layers
from ddpm_ds.unet.operations import set_image_index
from ddpm_ds.unet.shards import layers_of_rank, row_layers
from ddpm_ds.unet.space import Band, SpaceGroup
from tests.unet.variants import VARIANTS, batch, context, interface_of, random_unet

EXACT = 1e-13
"""Error of fp64 relative to the norm: a few hundred roundings of 1e-16."""


@dataclass
class Mail:
    """Messages between ranks that are threads."""

    boxes: dict[tuple[int, int], queue.Queue[Tensor]] = field(default_factory=dict)
    sent: list[tuple[int, int, int]] = field(default_factory=list)
    """Sender, receiver and bytes of each message."""


class ThreadGroup(SpaceGroup):
    """Rank that is a thread of this process."""

    def __init__(self, rank: int, size: int, mail: Mail) -> None:
        super().__init__(rank, size, group=object())  # type: ignore[arg-type]
        self.mail = mail

    def post(self, sends: Mapping[int, Tensor], received: Mapping[int, Tensor]) -> Sequence[Any]:
        for rank, message in sends.items():
            self.mail.sent.append((self.rank, rank, len(message)))
            self.mail.boxes[self.rank, rank].put(message.clone())
        return [Arrival(self.mail.boxes[rank, self.rank], message) for rank, message in received.items()]


@dataclass
class Arrival:
    """Message to wait for."""

    box: queue.Queue[Tensor]
    message: Tensor

    def wait(self) -> None:
        self.message.copy_(self.box.get(timeout=20))


def on_ranks(size: int, run: Callable[[ThreadGroup], Any]) -> tuple[list[Any], Mail]:
    """What every rank of a group returns, each in a thread, and their messages, all of which must have been taken."""
    mail = Mail({(a, b): queue.Queue() for a in range(size) for b in range(size)})
    found: dict[int, Any] = {}

    def call(rank: int) -> None:
        try:
            found[rank] = run(ThreadGroup(rank, size, mail))
        except BaseException as error:
            found[rank] = error

    threads = [threading.Thread(target=call, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in range(size):
        if isinstance(found[rank], BaseException):
            raise found[rank]
    assert all(box.empty() for box in mail.boxes.values()), "a message was not taken"
    return [found[rank] for rank in range(size)], mail


def whole_of(name: str, size: tuple[int, int] | None) -> tuple[Layer, ...]:
    interface = interface_of(name)
    return unet_layers(VARIANTS[name], replace(interface, size=size or interface.size))


def banded(layers: Sequence[Layer], space: SpaceSplit, group: SpaceGroup) -> nn.ModuleList:
    """This rank's modules in fp64, of the same weights on all."""
    modules = random_unet(tuple(layers)).double().layers
    for module, own in zip(modules, layers_of_rank(row_layers(layers, space), group.rank), strict=True):
        assert isinstance(module, CarryLayer)
        module.layer = own
        module.share(group)
    set_image_index(modules, torch.tensor([7, 8]))
    set_text(modules, layers)
    return modules


def set_text(modules: nn.ModuleList, layers: Sequence[Layer]) -> None:
    text = context(tuple(layers))
    set_context(transformer_blocks(modules), None if text is None else text.double())


def inputs_of(name: str, layers: Sequence[Layer]) -> tuple[Tensor, ...]:
    x_t, t, *others = batch(name)
    generator = torch.Generator().manual_seed(5)
    x_t = torch.randn(2, x_t.shape[1], *layers[0].in_size, generator=generator)
    return tuple(part.double() if part.is_floating_point() else part for part in (x_t, t, *others))


def difference(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm().clamp(min=1e-300)).item()


def weights_like(prediction: Tensor) -> Tensor:
    return torch.randn(prediction.shape, generator=torch.Generator().manual_seed(9), dtype=prediction.dtype)


def errors(name: str, space: SpaceSplit, size: tuple[int, int] | None = None) -> Iterator[tuple[str, float]]:
    """Errors of the prediction and of every gradient, by name."""
    layers = whole_of(name, size)
    modules = random_unet(layers).double().layers
    set_image_index(modules, torch.tensor([7, 8]))
    set_text(modules, layers)
    inputs = inputs_of(name, layers)
    expected = walk(modules, inputs)
    of = weights_like(expected)
    (expected * of).sum().backward()

    def run(group: ThreadGroup) -> tuple[Tensor, dict[str, Tensor | None]]:
        own = banded(layers, space, group)
        band = Band(group, row_layers(layers, space)[0].rows.arriving)
        prediction = walk(own, (band.cut(inputs[0]), *inputs[1:]))
        (prediction * band.cut(of)).sum().backward()
        return prediction.detach(), {name: part.grad for name, part in own.named_parameters()}

    found, _ = on_ranks(space.size, run)
    yield "prediction", difference(torch.cat([prediction for prediction, _ in found], dim=2), expected)
    for name, parameter in modules.named_parameters():
        parts = [gradients[name] for _, gradients in found]
        assert parameter.grad is not None
        yield name, difference(torch.stack(parts).sum(0), parameter.grad)


CASES: list[tuple[str, SpaceSplit, tuple[int, int] | None]] = [
    *((name, SpaceSplit(2), None) for name in VARIANTS),
    # bands of other heights, an odd one in the middle
    ("heads", SpaceSplit(4, (0, 1)), (24, 8)),
    ("symmetric", SpaceSplit(4), (40, 8)),
    ("dropout", SpaceSplit(3), (28, 6)),
    # levels that each rank computes whole, below rows that begin in the middle of theirs
    ("ddpm", SpaceSplit(4, (0,)), (16, 16)),
    ("levels", SpaceSplit(3, (0,)), (20, 8)),
    ("symmetric", SpaceSplit(3, (0,)), (22, 4)),
    ("text_time", SpaceSplit(2, (0,)), None),
    ("bare", SpaceSplit(5), (8, 4)),
    # rows exchanged for heads
    ("text_time", SpaceSplit(4, (0, 1)), (16, 8)),
    ("text", SpaceSplit(4), (24, 4)),
]


@pytest.mark.parametrize(("name", "space", "size"), CASES, ids=str)
def test_ranks_that_share_the_rows_are_one(name: str, space: SpaceSplit, size: tuple[int, int] | None) -> None:
    wrong = {what: error for what, error in errors(name, space, size) if not error < EXACT}
    assert not wrong
