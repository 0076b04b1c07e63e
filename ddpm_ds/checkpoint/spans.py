"""Ranges of a parameter's values in the files of a checkpoint, and whether they are all of it, once.

A parameter is stored whole, or as the parts of the ranks of a tensor group, each flattened by itself::

    4.conv2.weight   0 1 2 3 4 5 6 7 8 9 10 11     runs of 2 elements, dealt to 2 ranks in turn
    ~0.2.2           0 1     4 5     8 9           @0: its values 0 1 4 5, @4: 8 9
    ~1.2.2               2 3     6 7     10 11

Does not import torch.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from ddpm_ds.unet.shards import Shard

_NUMBER = r"(\d{1,15})"
_KEY = re.compile(rf"([^/]+)/(.+?)(?:~{_NUMBER}\.{_NUMBER}\.{_NUMBER})?@{_NUMBER}")


class Span(NamedTuple):
    """Range of values of a flattened parameter or of a rank's part of it, or of one kind of their state."""

    kind: str
    """Kind of values: ``master``, ``exp_avg``, ``exp_avg_sq``, ``ema``, ...; no slash."""
    name: str
    """Global name of the parameter."""
    start: int
    """Index of the first value."""
    length: int
    shard: Shard | None = None
    """Part of the parameter whose values these are, and which ``start`` counts; None if it is stored whole."""

    @classmethod
    def of(cls, key: str, length: int) -> Span | None:
        """Return the span of a tensor in a checkpoint's file; None if the key is not one that is written."""
        if (match := _KEY.fullmatch(key)) is None:
            return None
        kind, name, *shard, start = match.groups()
        span = cls(kind, name, int(start), length, None if shard[0] is None else Shard(*map(int, shard)))
        return span if span.key == key else None

    @property
    def stop(self) -> int:
        return self.start + self.length

    @property
    def _place(self) -> str:
        part = "" if self.shard is None else f"~{self.shard.rank}.{self.shard.ranks}.{self.shard.run}"
        return f"{self.name}{part}@{self.start}"

    @property
    def key(self) -> str:
        """Name of this tensor in a checkpoint's file."""
        return f"{self.kind}/{self._place}"

    @property
    def scales_key(self) -> str:
        """Name of the scales of this tensor's blocks, if it holds codes."""
        return f"{self.kind}.scales/{self._place}"

    @property
    def what(self) -> str:
        """Words for the tensor that these values are of."""
        part = "" if self.shard is None else f"part {self.shard.rank + 1} of {self.shard.ranks} of "
        return f"{part}{self.kind} of {self.name}"

    def is_within(self, elements: int) -> bool:
        """Return whether a parameter of so many elements has these values."""
        if self.shard is None:
            return self.stop <= elements
        return divides(self.shard, elements) and self.stop <= elements // self.shard.ranks


def divides(shard: Shard, elements: int) -> bool:
    """Return whether a parameter of so many elements has this part."""
    rank, ranks, run = shard
    return rank < ranks > 1 and run > 0 and elements % (ranks * run) == 0


def check_coverage(parameters: Mapping[str, tuple[int, ...]], fragments: Iterable[Span]) -> tuple[str, ...]:
    """Return the kinds among ``fragments``, each of which covers every parameter exactly once, whole or in parts.

    Raises:
        ValueError: a kind lacks elements, has some twice or is split in several ways, or belongs to an unknown
            parameter.
    """
    spans: dict[tuple[str, str], dict[Shard | None, list[Span]]] = defaultdict(lambda: defaultdict(list))
    for span in fragments:
        if span.name not in parameters:
            raise ValueError(f"{span.kind} of {span.name} was written, but there is no such parameter")
        spans[span.kind, span.name][span.shard].append(span)
    kinds = tuple(sorted({kind for kind, _ in spans}))
    if not kinds:
        raise ValueError("no rank wrote a fragment")
    for kind in kinds:
        for name, shape in parameters.items():
            found = spans[kind, name]
            for end in _ends(Span(kind, name, math.prod(shape), 0), found):
                at = 0
                for span in (*sorted(found[end.shard]), end):
                    if span.start != at:
                        what = "was not written" if span.start > at else "was written twice or beyond its end"
                        raise ValueError(f"{end.what} {what}, from element {min(span.start, at)} on")
                    at = span.stop
    return kinds


def _ends(end: Span, found: Collection[Shard | None]) -> Iterator[Span]:
    """Yield the end of each part that must be there, given that of the whole parameter and the parts that are."""
    first, *others = list(found) or [None]
    if first is None and not others:
        yield end
        return
    if first is None or any(one is None or one[1:] != first[1:] or not divides(one, end.start) for one in found):
        raise ValueError(f"{end.what} was written in several ways, or in parts that it does not have")
    for rank in range(first.ranks):
        yield end._replace(start=end.start // first.ranks, shard=first._replace(rank=rank))
