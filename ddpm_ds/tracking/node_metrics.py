"""System metrics of the hosts other than rank 0's, in the same MLflow run.

    host b   process that reads them ──▶ pipe ──▶ thread of its first rank ──▶ queue in the store on rank 0
    host a   thread of rank 0 ◀── the queue;  ──▶ the tracker, as system/b/...

Only rank 0 talks to MLflow. So the other hosts need no way to the tracking server and no password of it, and the SQLite
file, which must not be written from several hosts, will do as well. Nothing here is waited for by training.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
from collections.abc import Callable, Iterator

import torch.distributed as dist

from ddpm_ds.processes.ranks import host_name
from ddpm_ds.tracking.system_metrics import PACE, SWITCH, switched_on
from ddpm_ds.tracking.tracker import Tracker, print_to_stderr, start_side_process

READER = "ddpm_ds.tracking.system_metrics"
QUEUE = "system_metrics"
SETTINGS = "system_metrics/settings"
POLL_SECONDS = 1.0
LEAVE_SECONDS = 1.0
"""How long the end of training waits for a thread that may wait for the store."""


@contextlib.contextmanager
def node_metrics(
    store: dist.Store | None, tracker: Tracker | None, say: Callable[[str], None] = print_to_stderr
) -> Iterator[None]:
    """Around training, on every rank: read the system metrics of this host and have rank 0 log them.

    Does nothing on a rank that is not the first of its host, nor for a single rank. The environment of rank 0 says
    whether and how often, as for its own host.

    Args:
        store: of ``make_store``.
        tracker: on rank 0.
        say: shows one line to the user; called from another thread.
    """
    rank, first_of_host = int(os.environ["RANK"]), os.environ["LOCAL_RANK"] == "0"
    if store is None or not first_of_host or (rank == 0 and tracker is None):
        yield
        return
    end = Collector(store, tracker).end if tracker is not None else MetricsReader(rank, store, say).end
    try:
        yield
    finally:
        end()


class MetricsReader:
    """On the first rank of another host: a process that reads, and a thread that passes on what it says."""

    def __init__(self, rank: int, store: dist.Store, say: Callable[[str], None]) -> None:
        self._rank, self._store, self._say = rank, store, say
        self._host = host_name()
        self._ending = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name="system metrics", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Read no more."""
        self._ending.set()
        if self._process is not None:
            self._process.kill()
        self._thread.join(LEAVE_SECONDS)

    def _run(self) -> None:
        try:
            if (settings := self._settings()) is not None:
                self._pass_on(settings)
        except dist.DistError:  # rank 0 has gone, with the store
            pass
        except Exception as error:  # whatever it is, training must not see it
            self._say(f"system metrics of {self._host} are no longer read ({error}); training goes on")
        finally:
            if self._process is not None:
                self._process.kill()
                self._process.wait()

    def _settings(self) -> dict[str, str] | None:
        """Rank 0's, when it has written them; None when training ends before, or they say that nothing is read."""
        while not self._store.check([SETTINGS]):
            if self._ending.wait(POLL_SECONDS):
                return None
        settings: dict[str, str] | None = json.loads(self._store.get(SETTINGS))
        return settings

    def _pass_on(self, settings: dict[str, str]) -> None:
        self._process = process = start_side_process(READER, settings)
        if self._ending.is_set():
            return
        assert process.stdin is not None and process.stdout is not None
        with process.stdin, process.stdout:
            for line in process.stdout:
                said = json.loads(line)
                if "say" in said:
                    self._say(f"{self._host}: {said['say']}")
                else:
                    node = {"host": self._host, "rank": self._rank}
                    self._store.queue_push(QUEUE, json.dumps(node | said))
        if process.wait() and not self._ending.is_set():
            raise ChildProcessError(f"exit code {process.returncode}")


class Collector:
    """On rank 0: a thread that hands to the tracker what the other hosts have read."""

    def __init__(self, store: dist.Store, tracker: Tracker) -> None:
        self._store, self._tracker = store, tracker
        self._ranks: dict[str, int] = {}  # of hosts by name
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="system metrics", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Hand over what is there, and no more."""
        self._ending.set()
        self._thread.join(LEAVE_SECONDS)

    def _run(self) -> None:
        settings = {name: os.environ[name] for name in (SWITCH, *PACE) if name in os.environ}
        with contextlib.suppress(dist.DistError):
            self._store.set(SETTINGS, json.dumps(settings if switched_on() else None))
            while not self._ending.wait(POLL_SECONDS):
                self._hand_over()
            self._hand_over()

    def _hand_over(self) -> None:
        for _ in range(self._store.queue_len(QUEUE)):
            said = json.loads(self._store.queue_pop(QUEUE, block=False))
            self._tracker.system_metrics(said["metrics"], self._node(said["host"], said["rank"]))

    def _node(self, host: str, rank: int) -> str:
        """The host's name; of several hosts with one name the second is told from the first by its rank."""
        return host if self._ranks.setdefault(host, rank) == rank else f"{host}-rank{rank}"
