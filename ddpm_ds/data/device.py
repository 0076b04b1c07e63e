"""Micro-batches on the device that trains on them: the next one travels while the current one is computed with."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ddpm_ds.data.loader import MicroBatch


def on_device(batches: Iterator[MicroBatch], device: torch.device) -> Iterator[MicroBatch]:
    """The same micro-batches on ``device``, bytes as they are.

    On CUDA each is copied on a stream of its own while the one before is computed with; the current stream waits for
    the copy, the host does not::

        copies        1     2     3           4
        current       .  1111111  2222222222  3333333

    That needs ``batches`` in pinned memory. Elsewhere they are handed through. What is read ahead is one micro-batch;
    an error of ``batches`` is raised where that one was to be read.
    """
    return _copied_ahead(batches, device) if device.type == "cuda" else batches


def _copied_ahead(batches: Iterator[MicroBatch], device: torch.device) -> Iterator[MicroBatch]:
    stream = torch.cuda.Stream(device)

    def copy(batch: MicroBatch) -> tuple[MicroBatch, torch.cuda.Event]:
        with torch.cuda.stream(stream):
            copied = MicroBatch(*(tensor.to(device, non_blocking=True) for tensor in batch))
            return copied, stream.record_event()

    travelling = None
    for batch in batches:
        arriving, travelling = travelling, copy(batch)
        if arriving is not None:
            yield _arrived(*arriving, device)
    if travelling is not None:
        yield _arrived(*travelling, device)


def _arrived(batch: MicroBatch, copied: torch.cuda.Event, device: torch.device) -> MicroBatch:
    """A micro-batch that the current stream may use: it waits for the copy, and keeps the memory until it is done."""
    current = torch.cuda.current_stream(device)
    current.wait_event(copied)
    for tensor in batch:
        tensor.record_stream(current)
    return batch
