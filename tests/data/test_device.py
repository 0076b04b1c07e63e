"""The next micro-batch travels while the current one is computed with, and it is the same one."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ddpm_ds.data.cache import DatasetCache
from ddpm_ds.data.loader import MicroBatch, on_device
from tests.data.reading import loaded

CUDA = torch.device("cuda", 0)


def micro_batch(number: int) -> MicroBatch:
    index = torch.arange(4) + 4 * number
    return MicroBatch(torch.full((4, 1, 8, 8), number, dtype=torch.uint8), index % 10, index)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Calls of CUDA's streams, in the order of the host; there is no device."""
    calls: list[str] = []
    inside = ["current"]

    def stream(name: str) -> Any:
        return SimpleNamespace(
            name=name,
            record_event=lambda: calls[-1].split()[-1],
            wait_event=lambda event: calls.append(f"{name} waits for {event}"),
        )

    @contextmanager
    def within(stream: Any) -> Iterator[None]:
        inside.append(stream.name)
        yield
        inside.pop()

    def say(words: str, tensor: Tensor) -> None:
        if tensor.dtype == torch.uint8:  # the images; labels and index go with them
            calls.append(f"{words} {int(tensor.flatten()[0])}")

    def copy(tensor: Tensor, device: torch.device, non_blocking: bool) -> Tensor:
        assert device == CUDA and non_blocking
        say(f"{inside[-1]} copies", tensor)
        return tensor.clone()

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream("side"))
    monkeypatch.setattr(torch.cuda, "stream", within)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream(inside[-1]))
    monkeypatch.setattr(Tensor, "to", copy)
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: say(f"{stream.name} keeps", tensor))
    return calls


def test_next_micro_batch_is_copied_before_the_current_one_is_handed_out(calls: list[str]) -> None:
    def read(count: int) -> Iterator[MicroBatch]:
        for number in range(count):
            calls.append(f"read {number}")
            yield micro_batch(number)
        raise OSError(5, "Input/output error")

    given = micro_batch(0)
    assert next(on_device(iter([given]), torch.device("cpu"))) is given
    batches = on_device(read(3), CUDA)
    assert calls == []
    for number, batch in enumerate(islice(batches, 2)):
        calls.append(f"compute {number}")
        assert all(torch.equal(found, given) for found, given in zip(batch[:3], micro_batch(number)[:3], strict=True))
    assert calls == [
        "read 0",
        "side copies 0",
        *("read 1", "side copies 1", "current waits for 0", "current keeps 0", "compute 0"),
        *("read 2", "side copies 2", "current waits for 1", "current keeps 1", "compute 1"),
    ]
    with pytest.raises(OSError, match="Input/output error"):
        next(batches)


@pytest.mark.gpu
def test_micro_batches_on_cuda_are_those_of_the_cpu_and_nothing_waits(digits: DatasetCache) -> None:
    expected = list(islice(loaded(digits, 64), 40))
    batches = on_device(map(checked_pinned, loaded(digits, 64, pin_memory=True)), CUDA)
    next_ones: list[MicroBatch] = [next(batches)]
    busy = torch.randn(4096, 4096, device=CUDA)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in islice(batches, 39):
            busy = busy @ busy * 1e-3  # the device is behind the host, so that copies overtake
            next_ones.append(batch.each(lambda tensor: tensor + 0))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for found, batch in zip(next_ones, expected, strict=True):
        assert found.images.device.type == "cuda"
        assert all(torch.equal(one.cpu(), other) for one, other in zip(found[:3], batch[:3], strict=True))


def checked_pinned(batch: MicroBatch) -> MicroBatch:
    assert all(tensor.is_pinned() for tensor in batch[:3])
    return batch
