"""Rung b of the ladder of trust: bands of rows, each computed by a rank, are the whole image."""

from __future__ import annotations

import queue as queues
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ddpm_ds.config.spec_file import SPECS, load_spec
from ddpm_ds.schema.layout import SpaceSplit
from ddpm_ds.unet.blocks import CarryLayer, ResidualBlock, set_context, transformer_blocks, walk
from ddpm_ds.unet.layers import Layer, unet_layers
from ddpm_ds.unet.operations import Convolution, Kernels, set_image_index, use_kernels
from ddpm_ds.unet.shards import layers_of_rank, row_layers, swaps_of
from ddpm_ds.unet.space import Band, SpaceGroup
from ddpm_ds.unet.spec import Interface, UnetSpec
from ddpm_ds.unet.weight_gradients import WaitingGradients, weighted_parts
from tests.unet.test_layers import saved_by_autograd
from tests.unet.variants import VARIANTS, batch, context, interface_of, random_unet

EXACT = 1e-13
"""Error of fp64 relative to the norm: a few hundred roundings of 1e-16."""


@dataclass
class Mail:
    """Messages between ranks that are threads."""

    boxes: dict[tuple[int, int], queues.Queue[Tensor]] = field(default_factory=dict)
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

    box: queues.Queue[Tensor]
    message: Tensor

    def wait(self) -> None:
        self.message.copy_(self.box.get(timeout=20))


def on_ranks(size: int, run: Callable[[ThreadGroup], Any]) -> tuple[list[Any], Mail]:
    """What every rank of a group returns, each in a thread, and their messages, all of which must have been taken."""
    mail = Mail({(a, b): queues.Queue() for a in range(size) for b in range(size)})
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


def banded(
    layers: Sequence[Layer], space: SpaceSplit, group: SpaceGroup, kernels: Kernels = "reference"
) -> nn.ModuleList:
    """This rank's modules in fp64, of the same weights on all."""
    modules = random_unet(tuple(layers)).double().layers
    for module, own in zip(modules, layers_of_rank(row_layers(layers, space), group.rank), strict=True):
        assert isinstance(module, CarryLayer)
        module.layer = own
        module.share(group)
    use_kernels(modules, kernels)
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


def errors(
    name: str, space: SpaceSplit, size: tuple[int, int] | None = None, kernels: Kernels = "reference"
) -> Iterator[tuple[str, float]]:
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
        own = banded(layers, space, group, kernels)
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


def test_sums_have_the_order_of_ranks_and_the_same_bits_on_all() -> None:
    drawn = torch.randn(5, 2, 7, 3, generator=torch.Generator().manual_seed(1))
    drawn *= 10.0 ** torch.arange(5)[:, None, None, None]

    def run(group: ThreadGroup) -> tuple[Tensor, Tensor]:
        row = drawn[0, :, :1, :1, None].permute(0, 2, 1, 3)[:, :, :0]
        everyone = group.trade(row, row, drawn[group.rank])()[2]
        own = torch.zeros(2, (2, 1, 2, 1, 1)[group.rank], 3, requires_grad=True)
        Band(group, (2, 1, 2, 1, 1)).gathered(own).backward(drawn[group.rank])
        assert own.grad is not None
        return everyone, own.grad

    found, mail = on_ranks(5, run)
    assert all(torch.equal(everyone, drawn) for everyone, _ in found)
    total = drawn[0]
    for part in drawn[1:]:
        total = total + part
    assert torch.equal(torch.cat([own for _, own in found], dim=1), total)
    assert not torch.equal(drawn.flip(0).sum(0), total), "the order can be seen"
    assert len(mail.sent) == 3 * 5 * 4, "one message for each pair and direction"


def test_rows_of_a_norm_travel_in_the_message_of_its_statistics() -> None:
    """Swaps of a block: two forwards and two backwards, each with one message to every other rank."""
    layers = whole_of("bare", (12, 4))[:3]
    space = SpaceSplit(3)

    def run(group: ThreadGroup) -> None:
        own = banded(whole_of("bare", (12, 4)), space, group)[2]
        h = torch.randn(2, 16, 4, 4, dtype=torch.float64).requires_grad_()
        (own((h, torch.randn(2, 64, dtype=torch.float64)))[0]).sum().backward()

    _, mail = on_ranks(3, run)
    assert layers[2].name == "down.0.block.0"
    pairs = [pair[:2] for pair in mail.sent]
    assert sorted(pairs) == sorted((a, b) for a in range(3) for b in range(3) if a != b for _ in range(4))
    statistics, row = 2 * 2 * 2 * 8, 2 * 16 * 4 * 8
    assert {size for a, b, size in mail.sent if abs(a - b) == 1} == {statistics + row}
    assert {size for a, b, size in mail.sent if abs(a - b) == 2} == {statistics}


@pytest.mark.parametrize(("space", "size"), [(SpaceSplit(2), None), (SpaceSplit(4, (0, 1)), (24, 8))], ids=str)
def test_swaps_and_bytes_are_counted(space: SpaceSplit, size: tuple[int, int] | None) -> None:
    """Of a walk through the whole U-Net, in fp64: 8 bytes an element or number."""
    layers = whole_of("text", size)

    def run(group: ThreadGroup) -> None:
        own = banded(layers, space, group)
        band = Band(group, row_layers(layers, space)[0].rows.arriving)
        inputs = inputs_of("text", layers)
        walk(own, (band.cut(inputs[0]), *inputs[1:])).sum().backward()

    _, mail = on_ranks(space.size, run)
    for rank in range(space.size):
        counted = swaps_of(layers_of_rank(row_layers(layers, space), rank), 0)
        sent = sum(size for sender, _, size in mail.sent if sender == rank)
        assert sent == 2 * 8 * sum(one.elements + one.statistics for one in counted)


@pytest.mark.parametrize("waits", [False, True], ids=["whole backward", "deferred"])
def test_weight_gradients_are_computed_while_gradients_travel(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In whole backwards; under a planned schedule they have passes of their own. No queue is left with any."""
    events: list[str] = []
    compute = WaitingGradients.compute
    layers, space = whole_of("levels", None), SpaceSplit(2, (0, 1))

    class Noted(SpaceGroup):
        def swap(self, *what: Any) -> Any:
            finish = super().swap(*what)
            events.append("starts")

            def finished() -> Any:
                events.append("ends")
                return finish()

            return finished

    def computed(*what: Any) -> None:
        events.append("weights")
        compute(*what)

    monkeypatch.setattr(WaitingGradients, "compute", computed)
    modules = banded(layers, space, Noted(1, 2))
    queue = WaitingGradients({(0, 0)} if waits else ())
    queue.begin(0, 0)
    parts = [part for module in modules for part in weighted_parts(module)]
    for part in parts:
        part.waiting = queue
    inputs = inputs_of("levels", layers)
    prediction = walk(modules, (Band(Noted(1, 2), (4, 4)).cut(inputs[0]), *inputs[1:]))
    events.clear()
    prediction.sum().backward()
    said = " ".join(events).replace("starts weights ends", "beside").replace("starts ends", "alone").split()
    blocks = sum(bool(module.layer.rows.arriving) for module in modules if isinstance(module, ResidualBlock))
    assert Counter(said)["beside"] == (0 if waits else 2 * blocks + 1) and {*said} <= {"beside", "alone"}
    assert all((part.weight.grad is None) == waits for part in parts if isinstance(part, Convolution))
    for part in parts:
        if part.beside is not None:
            part.beside.check_empty()


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ["heads", "scale_shift", "dropout", "levels", "text_time"])
def test_macs_and_activations_of_a_layer_are_those_of_its_rows(name: str, ranks: int) -> None:
    layers = layers_of_rank(row_layers(whole_of(name, (32, 32)), SpaceSplit(ranks)), 1)
    modules = random_unet(whole_of(name, (32, 32))).layers
    x_t, *others = (part.float() if part.is_floating_point() else part for part in inputs_of(name, layers))
    carry: tuple[Tensor, ...] = (x_t, *others)
    for layer, module in zip(layers, modules, strict=True):
        assert isinstance(module, CarryLayer)
        module.layer = layer
        module.share(SpaceGroup(1, ranks))
        made = layer is not layers[0]
        inputs = tuple(part.requires_grad_(made and part.is_floating_point()) for part in carry)
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            module(inputs)
        assert counter.get_total_flops() == pytest.approx(2 * 2 * layer.macs, rel=0.02), layer.name
        saved, output = saved_by_autograd(module, inputs)
        assert saved / 4 == pytest.approx(2 * layer.activation_elements, rel=0.05), layer.name
        carry = tuple(part.detach() for part in output)


FIELD = unet_layers(
    UnetSpec(channels=128, multipliers=(1, 2, 2, 2, 2), blocks_per_level=4, norm_groups=32),
    Interface(channels=99, size=(512, 640)),
)
"""A field's U-Net of 73 M parameters, with attention in the middle alone."""
SDXL = unet_layers(load_spec(SPECS / "sdxl.yaml", ["data.path=none"]).unet, Interface(channels=4, size=(256, 256)))
"""SDXL's U-Net, 2,567 M, for images of 2048 pixels."""


@pytest.mark.parametrize(
    ("layers", "ranks", "waits", "most"),
    [(FIELD, 2, 211, 0.52), (FIELD, 4, 211, 0.27), (FIELD, 8, 211, 0.15), (SDXL, 2, 241, 0.58), (SDXL, 4, 361, 0.30)],
    ids=["field-2", "field-4", "field-8", "sdxl-2", "sdxl-4, rows for heads"],
)
def test_a_rank_of_a_large_image_keeps_its_share_and_waits_once_for_a_norm_and_its_convolution(
    layers: Sequence[Layer], ranks: int, waits: int, most: float
) -> None:
    shared = row_layers(layers, SpaceSplit(ranks))
    assert sum(one.number for one in swaps_of(shared, 0)) == waits
    kept, whole = (sum(layer.activation_elements for layer in each) for each in (shared, layers))
    assert kept / whole <= most
