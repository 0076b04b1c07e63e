"""Delivery of a checkpoint's values to the ranks that need them, from their own host's files and from those of others.

::

    host a, rank 0   wants elements 0 to 9 of ema of 4.conv1.weight; has 0 to 5 ─▶ read
    host b, rank 2   has 6 to 9: reads and sends them              ─▶ received, 64 MB at most at a time

Nothing is written: values that a host lacks go from the files of one host into the memory of the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from ddpm_ds.checkpoint.groups import Gather
from ddpm_ds.checkpoint.manifest import BAR_BYTES, Span, unusable
from ddpm_ds.checkpoint.reader import Reader
from ddpm_ds.checkpoint.union import CompleteCheckpoint

SENT_ELEMENTS = 2**24
"""Largest number of values sent at once."""


class _Transfer(NamedTuple):
    source: int
    target: int
    number: int
    """Index of the values among those that the target wants."""
    values: Span


def deliver(
    whole: CompleteCheckpoint,
    wanted: Sequence[Span],
    *,
    gather: Gather,
    device: torch.device,
    log: Callable[[str], None],
) -> Iterator[tuple[int, int, Tensor]]:
    """Yield all values of ``wanted`` as (index in ``wanted``, first element, values); all ranks must exhaust it.

    Values are (length,) fp32, in host memory or on ``device``, from which the process group sends. Values from other
    hosts are announced through ``log`` on rank 0; a rank that receives many shows a bar.

    Raises:
        CheckpointError: a file is damaged.
    """
    groups = whole.groups
    reader = Reader(whole.path, whole.manifest, whole.here)
    needs: list[tuple[int, Span]] = []
    for index, want in enumerate(wanted):
        at = want.start
        for start, stop in (*reader.covered(want), (want.stop, want.stop)):
            if at < start:
                needs.append((index, want.part(at, start)))
            if start < stop:
                yield index, start, reader.read(*want.part(start, stop))
            at = stop
    transfers = _transfers(whole, reader, needs, gather)
    if not transfers:
        return
    if groups.rank == 0:
        sources = ", ".join(sorted({groups.hosts[one.source] for one in transfers}))
        targets = ", ".join(sorted({groups.hosts[one.target] for one in transfers}))
        megabytes = sum(4 * one.values.length for one in transfers) / 1e6
        log(f"{whole.path.name}: {megabytes:,.1f} MB of it go from host {sources} to host {targets}")
    mine = sum(4 * one.values.length for one in transfers if one.target == groups.rank)
    hidden = groups.rank != min(one.target for one in transfers) or mine < BAR_BYTES
    with tqdm(total=mine, desc=f"fetching {whole.path.name}", unit="B", unit_scale=True, disable=hidden) as bar:
        for source, target, number, piece in transfers:  # in the same order on all ranks, which avoids deadlock
            if source == groups.rank:
                dist.send(reader.read(*piece).to(device), target)
            elif target == groups.rank:
                values = torch.empty(piece.length, device=device)
                dist.recv(values, source)
                bar.update(values.nbytes)
                yield number, piece.start, values


def _transfers(
    whole: CompleteCheckpoint, reader: Reader, needs: Sequence[tuple[int, Span]], gather: Gather
) -> list[_Transfer]:
    """Plan the transfers, equal on all ranks; if several leaders have a value, the lowest sends it."""
    asked = [
        (target, index, Span(*want)) for target, theirs in enumerate(gather(list(needs))) for index, want in theirs
    ]
    if not asked:
        return []
    offers = gather([reader.covered(want) if whole.groups.leads else [] for _, _, want in asked])
    transfers = []
    for number, (target, index, want) in enumerate(asked):
        at = want.start
        for start, source, stop in sorted(
            (start, source, stop) for source, offer in enumerate(offers) for start, stop in offer[number]
        ):
            if start > at or stop <= at:
                continue
            for low in range(at, stop, SENT_ELEMENTS):
                piece = want.part(low, min(low + SENT_ELEMENTS, stop))
                transfers.append(_Transfer(source, target, index, piece))
            at = stop
        if at < want.stop:
            what = f"values {at} and following of {want.kind} of {want.name} are in none of the files on any host"
            raise unusable(whole.path, what)
    return transfers
