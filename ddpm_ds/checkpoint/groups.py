"""Which ranks of a run see the same folder, such as that of its checkpoints. No torch.

::

    host a   rank 0 ┐ RUN_DIR/checkpoints      a group, led by rank 0
             rank 1 ┘
    host b   rank 2 ┐ RUN_DIR/checkpoints      another folder of the same name: a group, led by rank 2
             rank 3 ┘

On a shared file system all ranks are one group.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROBE = ".probe-"
Gather = Callable[[Any], list[Any]]
"""Collective: takes what this rank says (what JSON can hold) and gives what every rank has said, by rank."""


@dataclass(frozen=True)
class Groups:
    """The ranks by the folder that they see, and where this rank is among them."""

    rank: int
    hosts: tuple[str, ...]
    """Name of the host of every rank."""
    leader_of: tuple[int, ...]
    """For every rank the lowest rank that sees the same folder."""

    @classmethod
    def one_folder(cls, rank: int, world_size: int) -> Groups:
        """All ranks see one folder."""
        return cls(rank, ("",) * world_size, (0,) * world_size)

    @property
    def leaders(self) -> tuple[int, ...]:
        """Of all groups; rank 0 is always the first."""
        return tuple(sorted(set(self.leader_of)))

    @property
    def leads(self) -> bool:
        """Whether this rank acts for its group."""
        return self.leader_of[self.rank] == self.rank

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks of this rank's group."""
        return tuple(rank for rank, leader in enumerate(self.leader_of) if leader == self.leader_of[self.rank])

    @property
    def shared(self) -> bool:
        """Whether there is one folder for all."""
        return len(self.leaders) == 1

    def name(self, rank: int) -> str:
        """A rank as a user knows it: ``rank 2``, with its host where there are several folders."""
        return f"rank {rank}" if self.shared else f"rank {rank} on host {self.hosts[rank]}"


def find_groups(folder: Path, rank: int, hosts: Sequence[str], gather: Gather) -> Groups:
    """Which ranks see the same ``folder``; collective. Ranks of one host that can't write there count as a group.

    Every rank leaves an empty file and looks for those of the others by their names, which are new each time: a network
    file system may answer from its memory of a folder's list, or of a name that it was asked for before.
    """
    if len(hosts) == 1:
        return Groups(rank, tuple(hosts), (rank,))
    token = gather(secrets.token_hex(8))[0]
    probes = [folder / f"{PROBE}{token}-{other}" for other in range(len(hosts))]
    with contextlib.suppress(OSError):
        probes[rank].touch()
    gather(None)
    marks: list[int | str | None] = gather(
        next((other for other, probe in enumerate(probes) if _is_there(probe)), None)
    )
    with contextlib.suppress(OSError):
        probes[rank].unlink()
    marks = [host if mark is None else mark for mark, host in zip(marks, hosts, strict=True)]
    return Groups(rank, tuple(hosts), tuple(map(marks.index, marks)))


def _is_there(file: Path) -> bool:
    try:
        file.open("rb").close()
    except OSError:
        return False
    return True
