"""How the hosts that share no folder complete a checkpoint together: through a key-value store, and rank 0 decides.

::

    rank 0                                        leader of another folder
    all parts: covered once?   ◀────── parts      its ranks' files are on the disk
    manifest, state            ──────▶            writes them beside its files, and flushes
    all ready?                 ◀────── ready
    ready                      ──────▶            renames the folder
    all placed?                ◀────── placed
    placed                     ──────▶            older checkpoints may go

Until all are ready no name has changed anywhere, and once one has, nothing is left to do that can run out of space.
Older checkpoints go when the new one has its name everywhere. Nothing waits inside the store, whose client the watchdog
uses as well.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from torch.distributed import Store

from ddpm_ds.checkpoint.groups import Groups

POLL_SECONDS = 0.05


class NotSaved(Exception):
    """Why there is no checkpoint; shown to people."""


class CalledOff(NotSaved):
    """Rank 0 has decided that there is no checkpoint."""


class Leaders:
    """This leader's side. Where there is one folder nothing is exchanged, and ``store`` may be None.

    ``seconds`` is what a group is given for its own part: rank 0 waits half as long again, the others for rank 0 to
    have waited for everybody.
    """

    def __init__(self, groups: Groups, store: Store | None, seconds: float) -> None:
        self._groups, self._store = groups, store
        self._seconds = 1.5 * seconds if groups.rank == 0 else 4 * seconds
        self._attempt = 0

    def begin(self, attempt: int) -> None:
        """What follows is about another checkpoint; ``attempt`` is the same number on all ranks."""
        self._attempt = attempt

    def collect(self, topic: str, text: str) -> list[str]:
        """Give ``text`` to rank 0; there, what all leaders have given, elsewhere nothing.

        Raises:
            CalledOff: on rank 0: another leader has a problem, or nothing came from it.
        """
        if self._groups.rank:
            self._at(topic, self._groups.rank).set(text)
            return []
        others = self._groups.leaders[1:]
        return [text, *(self._receive(topic, rank) for rank in others)]

    def publish(self, topic: str, text: str = "") -> str:
        """What rank 0 gives, on every leader.

        Raises:
            CalledOff: on the others: rank 0 has called the checkpoint off.
            NotSaved: on the others: nothing came from rank 0.
        """
        if self._groups.shared:
            return text
        key = self._at(topic)
        if self._groups.rank == 0:
            key.set(text)
            return text
        called_off = self._at("called off")
        self._until(lambda: key.there or called_off.there, "rank 0 has not answered", NotSaved)
        if not key.there:
            raise CalledOff(called_off.text)
        return key.text

    def all_are(self, topic: str) -> None:
        """Meet: goes on when every leader has come here. Raises as :meth:`collect` and :meth:`publish` do."""
        self.collect(topic, "")
        self.publish(topic)

    def forget(self, topic: str) -> None:
        """On rank 0, once all have read it: what it published is needed no more."""
        if self._groups.rank == 0 and not self._groups.shared:
            self._at(topic).delete()

    def fail(self, reason: str) -> None:
        """Tell rank 0 of a problem; on rank 0, call the checkpoint off."""
        if not self._groups.shared:
            with contextlib.suppress(Exception):  # whatever a store raises when rank 0 has gone
                self._at("problem" if self._groups.rank else "called off").set(reason)

    def _receive(self, topic: str, rank: int) -> str:
        key, problem = self._at(topic, rank), self._at("problem")
        self._until(lambda: key.there or problem.there, f"{self._groups.name(rank)} has not answered", CalledOff)
        if problem.there:
            raise CalledOff(problem.text)
        text = key.text
        key.delete()
        return text

    def _until(self, happened: Callable[[], bool], otherwise: str, error: type[NotSaved]) -> None:
        deadline = time.monotonic() + self._seconds
        while not happened():
            if time.monotonic() > deadline:
                raise error(f"{otherwise} for {self._seconds:g} s")
            time.sleep(POLL_SECONDS)

    def _at(self, topic: str, rank: int = 0) -> _Key:
        assert self._store is not None
        return _Key(self._store, f"checkpoint/{self._attempt}/{topic}/{rank}")


class _Key:
    """A place in the store."""

    def __init__(self, store: Store, name: str) -> None:
        self._store, self._name = store, name

    @property
    def there(self) -> bool:
        return bool(self._store.check([self._name]))

    @property
    def text(self) -> str:
        """To be read only when it is there."""
        return self._store.get(self._name).decode()

    def set(self, text: str) -> None:
        self._store.set(self._name, text)

    def delete(self) -> None:
        self._store.delete_key(self._name)
