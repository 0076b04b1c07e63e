"""Hosts that share no folder, as folders of one process and threads for their ranks."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed import HashStore, Store

from ddpm_ds.checkpoint.folder import CompleteCheckpoint, Gather, Groups, newest, settle
from ddpm_ds.checkpoint.writer import Writer
from ddpm_ds.errors import CheckpointError
from tests.checkpoint.saving import describe, fragments_of, scalars, total
from tests.launching import PATIENCE_SECONDS

Value = TypeVar("Value")
CUTS = (0, 20, 50, 60, total())
"""What each of four ranks owns."""


class Hosts:
    """A run's ranks on hosts of these names (``"aabb"``: two on a, two on b), each host with a folder of its own."""

    def __init__(self, root: Path, ranks: str = "aabb", store: Store | None = None) -> None:
        self.ranks, self.names = ranks, tuple(ranks)
        self.folders = [root / name / "checkpoints" for name in ranks]
        for folder in self.folders:
            folder.mkdir(parents=True, exist_ok=True)
        self.store = store or HashStore()
        self.said: list[str] = []
        self.failures: list[str] = []
        """What hosts other than that of rank 0 have said."""

    def groups(self, rank: int) -> Groups:
        return Groups(rank, self.names, tuple(map(self.names.index, self.names)))

    def together(self, act: Callable[[int, Gather], Value]) -> list[Value]:
        """What ``act`` gives on every rank; raises the first rank's own error."""
        barrier, values = threading.Barrier(len(self.ranks)), [None] * len(self.ranks)

        def on(rank: int) -> Value:
            def gather(value: Any) -> list[Any]:
                values[rank] = json.loads(json.dumps(value))
                barrier.wait(PATIENCE_SECONDS)
                said: list[Any] = list(values)
                barrier.wait(PATIENCE_SECONDS)
                return said

            try:
                return act(rank, gather)
            except CheckpointError:  # on all ranks alike
                raise
            except BaseException:
                barrier.abort()
                raise

        with ThreadPoolExecutor(len(self.ranks)) as threads:
            outcomes = [threads.submit(on, rank) for rank in range(len(self.ranks))]
        errors = [error for outcome in outcomes if (error := outcome.exception())]
        for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
        return [outcome.result() for outcome in outcomes]

    def writers(self, seconds: float = 60.0, **options: Any) -> list[Writer]:
        return [
            Writer(
                folder,
                self.groups(rank),
                log=self.said.append if rank == 0 else self.failures.append,
                store=self.store,
                time_limit_seconds=seconds,
                **options,
            )
            for rank, folder in enumerate(self.folders)
        ]

    def save(self, images: int, writers: Sequence[Writer] | None = None, **options: Any) -> list[bool]:
        """A checkpoint of all ranks; by new ones unless ``writers`` are given. Whether each says that it is saved."""
        if writers is None:
            self.store = HashStore()
            writers = self.writers(**options)
        for rank, writer in enumerate(writers):
            fragments = fragments_of(images, CUTS[rank], CUTS[rank + 1])
            writer.begin(f"rank{rank}", fragments, describe(images), scalars(images))
        return [writer.wait() for writer in writers]

    def newest(self, until: int | None = None) -> CompleteCheckpoint | None:
        """As after a start: what is left over is settled, then the newest whole checkpoint is found."""

        def look(rank: int, gather: Gather) -> CompleteCheckpoint | None:
            settle(self.folders[rank], self.groups(rank), gather)
            return newest(self.folders[rank], self.groups(rank), gather, self.said.append, until=until)

        found = self.together(look)
        assert len({whole and whole.manifest.sha256 for whole in found}) == 1
        return found[0]

    def error(self) -> str:
        """Why there is none."""
        try:
            found = self.newest()
        except CheckpointError as error:
            assert "\n" not in str(error)
            return str(error)
        raise AssertionError(f"found {found}")


def files(folder: Path) -> list[str]:
    """All that is in it, but for ``latest``."""
    return sorted(
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.name != "latest"
    )
