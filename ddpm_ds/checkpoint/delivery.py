"""Brings every rank the values that it wants of a checkpoint: from its own host's files, and from those of others.

::

    host a, rank 0   wants elements 0 to 9 of ema of 4.conv1.weight; has 0 to 5 ─▶ read
    host b, rank 2   has 6 to 9: reads and sends them              ─▶ received, 64 MB at most at a time

Nothing is written: what a host lacks goes from the files of one into the memory of the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from ddpm_ds.checkpoint.groups import Gather
from ddpm_ds.checkpoint.manifest import BAR_BYTES, unusable
from ddpm_ds.checkpoint.reader import Reader
from ddpm_ds.checkpoint.union import CompleteCheckpoint

SENT_ELEMENTS = 2**24
"""Values that are sent at once."""
ELEMENT_BYTES = 4


class Wanted(NamedTuple):
    """Values of a flattened parameter, or of what is kept of it."""

    kind: str
    name: str
    start: int
    stop: int


class _Transfer(NamedTuple):
    source: int
    target: int
    number: int
    """Of ``wanted`` among what the target wants."""
    wanted: Wanted


def deliver(
    whole: CompleteCheckpoint,
    wanted: Sequence[Wanted],
    *,
    gather: Gather,
    device: torch.device,
    say: Callable[[str], None],
) -> Iterator[tuple[int, int, Tensor]]:
    """All values of ``wanted``, as (its index, first element, values); to be iterated to its end by every rank.

    Values are (length,) fp32, in host memory or on ``device``, which is what the process group sends from. What comes
    from other hosts is announced to ``say`` on rank 0, and shown as a bar on one that receives when it is much.

    Raises:
        CheckpointError: a file is damaged.
    """
    groups = whole.groups
    reader = Reader(whole.path, None if groups.shared else whole.here) if whole.here else None
    needs: list[tuple[int, Wanted]] = []
    for index, want in enumerate(wanted):
        at = want.start
        for start, stop in [(want.start, want.stop)] if groups.shared else _covered(reader, want):
            needs += [(index, want._replace(start=at, stop=start))] if at < start else []
            yield index, start, _read(reader, want._replace(start=start, stop=stop))
            at = stop
        needs += [(index, want._replace(start=at))] if at < want.stop else []
    transfers = [] if groups.shared else _transfers(whole, reader, needs, gather)
    if not transfers:
        return
    receiving = min(transfer.target for transfer in transfers)
    if groups.rank == 0:
        say(_announcement(whole, transfers))
    mine = sum(_bytes(transfer) for transfer in transfers if transfer.target == groups.rank)
    hidden = groups.rank != receiving or mine < BAR_BYTES
    with tqdm(total=mine, desc=f"fetching {whole.path.name}", unit="B", unit_scale=True, disable=hidden) as bar:
        for transfer in transfers:  # in one order on all ranks, so that no two wait for each other
            if transfer.source == groups.rank:
                dist.send(_read(reader, transfer.wanted).to(device), transfer.target)
            elif transfer.target == groups.rank:
                values = torch.empty(transfer.wanted.stop - transfer.wanted.start, device=device)
                dist.recv(values, transfer.source)
                bar.update(_bytes(transfer))
                yield transfer.number, transfer.wanted.start, values


def _transfers(
    whole: CompleteCheckpoint, reader: Reader | None, needs: Sequence[tuple[int, Wanted]], gather: Gather
) -> list[_Transfer]:
    """Who sends what to whom; the same list on all ranks. Of several that have a value the lowest leader sends it."""
    groups = whole.groups
    asked = [
        (target, index, Wanted(*want)) for target, theirs in enumerate(gather(list(needs))) for index, want in theirs
    ]
    if not asked:
        return []
    own = [_covered(reader, want) if groups.leads else [] for _, _, want in asked]
    offers = gather(own)
    transfers = []
    for number, (target, index, want) in enumerate(asked):
        at = want.start
        for start, source, stop in sorted(
            (start, source, stop) for source, offer in enumerate(offers) for start, stop in offer[number]
        ):
            if start > at or stop <= at:
                continue
            for low in range(at, stop, SENT_ELEMENTS):
                piece = want._replace(start=low, stop=min(low + SENT_ELEMENTS, stop))
                transfers.append(_Transfer(source, target, index, piece))
            at = stop
        if at < want.stop:
            what = f"values {at} and following of {want.kind} of {want.name} are in none of the files on any host"
            raise unusable(whole.path, what)
    return transfers


def _covered(reader: Reader | None, want: Wanted) -> list[tuple[int, int]]:
    return reader.covered(want.kind, want.name, want.start, want.stop - want.start) if reader else []


def _read(reader: Reader | None, want: Wanted) -> Tensor:
    assert reader is not None
    return reader.read(want.kind, want.name, want.start, want.stop - want.start)


def _bytes(transfer: _Transfer) -> int:
    return ELEMENT_BYTES * (transfer.wanted.stop - transfer.wanted.start)


def _announcement(whole: CompleteCheckpoint, transfers: Sequence[_Transfer]) -> str:
    hosts = whole.groups.hosts
    sources = ", ".join(sorted({hosts[transfer.source] for transfer in transfers}))
    targets = ", ".join(sorted({hosts[transfer.target] for transfer in transfers}))
    megabytes = sum(map(_bytes, transfers)) / 1e6
    return f"{whole.path.name}: {megabytes:,.1f} MB of it go from host {sources} to host {targets}"
