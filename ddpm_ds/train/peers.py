"""The other ranks of a run, from the process group to the end: their names, a store beside the collectives, a watch."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from types import TracebackType

import torch
import torch.distributed as dist

from ddpm_ds.errors import PeerLostError, UserError
from ddpm_ds.train.heartbeat import DeviceWork, make_store
from ddpm_ds.train.process import KNOWN_TO_ALL_RANKS
from ddpm_ds.train.watchdog import Watchdog

WAIT_FOR_CULPRIT_SECONDS = 5.0
"""How long a rank whose collective failed looks for the rank that is gone."""


class Peers:
    """All ranks, watched for as long as the ``with`` block lasts; collective.

    A UserError that leaves the block ends all ranks with its line, said once, and its exit code: a file that goes bad
    while it is read is known to the rank that reads it, and the others would wait for that one.

    Args:
        names: of all ranks, as a user knows them.
        device: of this rank.
        options: of the command line; its ``dead_seconds`` and ``hang_seconds``.
    """

    def __init__(self, names: Sequence[str], device: torch.device, options: argparse.Namespace) -> None:
        self.names = names
        self.store = make_store(dist.get_rank(), dist.get_world_size())
        """A key-value store on rank 0, None for a single rank."""
        self.watchdog = Watchdog(
            dist.get_rank(),
            dist.get_world_size(),
            names,
            self.store,
            dead_seconds=options.dead_seconds,
            hang_seconds=options.hang_seconds,
            work=DeviceWork.of(device),
        )

    def __enter__(self) -> Peers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, UserError):
            self.watchdog.fail(f"ddpm_ds: error: {error}", error.exit_code)
        known = error is None or isinstance(error, KNOWN_TO_ALL_RANKS)
        self.watchdog.stop(failure=None if known else type(error).__name__)

    @contextlib.contextmanager
    def blamed(self) -> Iterator[None]:
        """Where what all ranks do together fails: tell the others, and find the rank that is gone.

        Raises:
            PeerLostError: instead of the error of a collective, where a rank is gone.
        """
        try:
            yield
        except (UserError, *KNOWN_TO_ALL_RANKS):
            raise
        except BaseException as error:
            missing = self.watchdog.who_is_missing(WAIT_FOR_CULPRIT_SECONDS) if isinstance(error, RuntimeError) else []
            self.watchdog.stop(failure=type(error).__name__)
            if not missing:
                raise
            gone = ", ".join(self.names[rank] for rank in missing)
            raise PeerLostError(f"{gone} is gone ({str(error).splitlines()[0]}); the run can be resumed") from error
