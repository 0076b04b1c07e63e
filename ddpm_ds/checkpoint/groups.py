"""Groups of ranks that share a folder of checkpoints, and how they complete a checkpoint together.

::

    host a   rank 0 ┐ RUN_DIR/checkpoints      a group, led by rank 0
             rank 1 ┘
    host b   rank 2 ┐ RUN_DIR/checkpoints      another folder of the same name: a group, led by rank 2
             rank 3 ┘

On a shared file system all ranks are one group. The ranks communicate through a key-value store, and rank 0 decides::

    rank 0                                        other ranks
    all parts: covered once?   ◀────── part       its file is on the disk
                                                  a leader of another folder goes on
    manifest, state            ──────▶            writes them beside the files of its group, and flushes
    all ready?                 ◀────── ready
    ready                      ──────▶            renames the folder
    all placed?                ◀────── placed
    placed                     ──────▶            older checkpoints may go

No folder is renamed before all are ready, and no later operation needs disk space. No call blocks inside the store,
whose client the watchdog also uses. This module does not import torch.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import Store

PROBE = ".probe-"
POLL_SECONDS = 0.05
Gather = Callable[[Any], list[Any]]
"""Collective function from this rank's JSON value to the values of all ranks, by rank."""


@dataclass(frozen=True)
class Groups:
    """Ranks grouped by the folder that they see, and the position of this rank."""

    rank: int
    hosts: tuple[str, ...]
    """Name of the host of every rank."""
    leader_of: tuple[int, ...]
    """Lowest rank that sees the same folder, for every rank."""

    @classmethod
    def one_folder(cls, rank: int = 0, world_size: int = 1) -> Groups:
        """Return the group in which all ranks see one folder; by default a single process."""
        return cls(rank, ("",) * world_size, (0,) * world_size)

    @property
    def leaders(self) -> tuple[int, ...]:
        """Leaders of all groups; rank 0 is always the first."""
        return tuple(sorted(set(self.leader_of)))

    @property
    def leads(self) -> bool:
        """Whether this rank acts for its group."""
        return self.leader_of[self.rank] == self.rank

    @property
    def shared(self) -> bool:
        """Whether all ranks see one folder."""
        return len(self.leaders) == 1

    def name(self, rank: int) -> str:
        """Return a rank's name for users: ``rank 2``, with its host if there are several folders."""
        return f"rank {rank}" if self.shared else f"rank {rank} on host {self.hosts[rank]}"


def find_groups(folder: Path, rank: int, hosts: Sequence[str], gather: Gather) -> Groups:
    """Find which ranks see the same ``folder``; collective. Ranks of one host that can't write there form one group.

    Every rank creates an empty file and looks up the others' files by name. Names are new each time, since a network
    file system may cache a folder's list or the answer for a name.
    """
    token = gather(secrets.token_hex(8))[0]
    probes = [folder / f"{PROBE}{token}-{other}" for other in range(len(hosts))]
    with contextlib.suppress(OSError):
        probes[rank].touch()
    gather(None)
    seen = next((other for other, probe in enumerate(probes) if _is_there(probe)), None)
    marks = [host if mark is None else mark for mark, host in zip(gather(seen), hosts, strict=True)]
    with contextlib.suppress(OSError):
        probes[rank].unlink()
    return Groups(rank, tuple(hosts), tuple(map(marks.index, marks)))


def _is_there(file: Path) -> bool:
    try:
        file.open("rb").close()
    except OSError:
        return False
    return True


class NotSaved(Exception):
    """Error: there is no checkpoint; the reason is shown to users."""


class CalledOff(NotSaved):
    """Error: rank 0 has decided that there is no checkpoint."""


class Completion:
    """One rank's part in completing checkpoints.

    Rank 0 waits for ``seconds``, the others until it must have finished waiting. ``what`` names the writer's output, so
    that writers use different keys.
    """

    def __init__(self, groups: Groups, store: Store, seconds: float, what: str) -> None:
        self._groups, self._store, self._what = groups, store, what
        self._seconds = seconds if groups.rank == 0 else 4 * seconds
        self._answers: list[str] = []  # keys of rank 0's, until all have read them
        self.attempt = 0
        """Number of the checkpoint that all keys in the store belong to, the same on all ranks."""

    def agree(
        self, topic: str, ranks: Sequence[int], text: str = "", answer: Callable[[list[str]], str] = lambda texts: ""
    ) -> str:
        """Send ``text`` to rank 0, which answers the leaders once it has the texts of all ``ranks``; return the answer.

        Ranks that are not leaders wait for no answer.

        Raises:
            CalledOff: on rank 0, another rank has failed or not answered; on others, rank 0 has cancelled the
                checkpoint.
            NotSaved: on others, rank 0 has not answered.
        """
        if self._groups.rank:
            self._store.set(self._key(topic, self._groups.rank), text)
            return self._wait(topic, [0], "called off")[0] if self._groups.leads else ""
        others = [rank for rank in ranks if rank]
        answered = answer([text, *self._wait(topic, others, "problem")])
        for read in (*self._answers, *(self._key(topic, rank) for rank in others)):
            self._store.delete_key(read)
        self._answers = [self._key(topic, 0)]
        self._store.set(self._key(topic, 0), answered)
        return answered

    def fail(self, reason: str) -> None:
        """Report a problem to rank 0; on rank 0, cancel the checkpoint."""
        with contextlib.suppress(Exception):  # the store may raise anything once rank 0 has ended
            self._store.set(self._key("problem" if self._groups.rank else "called off", 0), reason)

    def _wait(self, topic: str, ranks: Sequence[int], trouble: str) -> list[str]:
        """Return the texts of ranks as soon as they exist, polling, since reading a missing key would block."""
        if not ranks:
            return []
        store, keys = self._store, {rank: self._key(topic, rank) for rank in ranks}
        deadline = time.monotonic() + self._seconds
        while not store.check(list(keys.values())):
            if store.check([self._key(trouble, 0)]):
                raise CalledOff(store.get(self._key(trouble, 0)).decode())
            if time.monotonic() > deadline:
                missing = [self._groups.name(rank) for rank, key in keys.items() if not store.check([key])]
                reason = f"{', '.join(missing[:8])}{', ...' * (len(missing) > 8)} gave no answer in {self._seconds:g} s"
                raise NotSaved(reason) if self._groups.rank else CalledOff(reason)
            time.sleep(POLL_SECONDS)
        return [store.get(key).decode() for key in keys.values()]

    def _key(self, topic: str, rank: int) -> str:
        return f"{self._what}/{self.attempt}/{topic}/{rank}"
