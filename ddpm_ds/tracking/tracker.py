"""Experiment tracking that training never waits for.

    training ── events ──▶ RUN_DIR/events.jsonl ──▶ child process ──▶ MLflow
                                                      │
         log lines ◀── listening thread ◀── replies ──┘

MLflow lives in a child process (:mod:`ddpm_ds.tracking.sender`), with its import, its database, its network and its
crashes. An event is a line in a file, so events that MLflow has missed can be sent later. (MLflow's own asynchronous
logging drops events that a server does not take at once, and runs in threads of the training process.)
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Literal

import psutil

from ddpm_ds.ground.errors import print_to_stderr
from ddpm_ds.ground.secret import public_address
from ddpm_ds.processes.hosts import user_name
from ddpm_ds.schema.section import flatten
from ddpm_ds.tracking.address import page_of, resolve_uri
from ddpm_ds.tracking.run_folder import (
    EVENTS,
    KIND_TAG,
    Record,
    append_event,
    discard,
    end_killed,
    now_ms,
    send_command,
    unsent,
)

Status = Literal["FINISHED", "FAILED", "KILLED"]
"""How a run has ended, in MLflow's words."""
DOWN_SECONDS = 3.0  # longest wait at the end of a run for an MLflow that is down
SWITCH = "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING"
INTERVAL = "MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL"


@dataclass(frozen=True)
class RunStart:
    """Start of a run; a second start of an ``identity`` resumes its run, which keeps its params."""

    experiment: str
    run_dir: Path
    """Folder with the events, beside ``mlflow.db`` and ``mlartifacts`` unless ``MLFLOW_TRACKING_URI`` names a store."""
    params: Mapping[str, object]
    """Parameters, which may be nested."""
    tags: Mapping[str, str]
    """Tags, set at every start."""
    name: str = ""
    """Name of the run; empty: the folder's, with today's date unless it begins with one."""
    dataset: Mapping[str, str] | None = None
    """``name`` of the training images, ``digest`` of their content and their ``source``."""
    identity: str | None = None
    parent: str | None = None
    """Identity of the parent run."""
    system_metrics: bool = False
    """Whether to read system metrics of this host, unless the environment forbids it."""

    def record(self) -> Record:
        """Return the content of the ``start`` event."""
        folder = self.run_dir.name
        dated = folder if folder[:8].isdecimal() else f"{folder} {date.today().isoformat()}"
        off = not self.system_metrics or os.environ.get(SWITCH, "true").lower() in ("false", "0")
        return {
            "id": self.identity or uuid.uuid4().hex,
            "time": now_ms(),
            "experiment": self.experiment,
            "run_name": self.name or dated,
            "output_root": str(self.run_dir.parent.resolve()),
            "run_dir": str(self.run_dir.resolve()),
            "params": flatten(self.params),
            "tags": {"mlflow.user": user_name(), **self.tags},
            "dataset": self.dataset,
            "parent": self.parent,
            "system_metrics": None if off else os.environ.get(INTERVAL, "10"),
        }


@dataclass(frozen=True)
class RunLink:
    """Location of a run. ``run_id`` is None if MLflow was never reached."""

    run_id: str | None
    tracking_uri: str
    url: str
    """Page of the run, in the mode of MLflow's UI for model training."""
    command: str | None
    """Command that serves the page; None if a server does."""


def start_child() -> subprocess.Popen[bytes]:
    """Start the sender, which waits for a :class:`Tracker` of this process."""
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(folder or os.getcwd() for folder in sys.path),  # finds the modules we found
        "PYTHONSAFEPATH": "1",  # and none in the working folder besides
        "PYTHONWARNINGS": "ignore",
    }
    command = [sys.executable, "-m", "ddpm_ds.tracking.sender", str(os.getpid())]
    # Ctrl-C reaches the child as well, and would print a traceback of its imports.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=variables)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Tracker:
    """One MLflow run, begun and written from rank 0. No method but :meth:`finish` waits for anything.

    ``log`` shows a line, from another thread. ``sender`` is a child that was started ahead (:func:`start_child`).
    """

    def __init__(
        self,
        start: RunStart,
        log: Callable[[str], None] = print_to_stderr,
        sender: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self._start, self._log = start.record(), log
        kind = start.tags.get(KIND_TAG)
        name = EVENTS if kind is None else f"events-{kind}-{self._start['id']}.jsonl"
        self._events = Path(self._start["run_dir"]) / name
        self._lock = threading.Lock()
        self._begun = self._refused = self._finished = self._closed = False
        end_killed(self._events)  # the start before, which may have been another run
        self._put()
        self._run: dict[str, str] = {}
        self._sent, self._down = 0, False  # by the child's last reply
        self._link: RunLink | None = None
        self._process = sender or start_child()
        assert self._process.stdin is not None
        with suppress(OSError), self._process.stdin as orders:  # if it has died, the listener notices
            orders.write(os.fsencode(self._events) + b"\n")
        self._listener = threading.Thread(target=self._listen, name="tracker", daemon=True)
        self._listener.start()

    @property
    def run_id(self) -> str | None:
        """Id of the run; None until MLflow has answered."""
        return self._run.get("run_id")

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        """Log values at an optimizer step, with the time of this call."""
        self._put({"metrics": {name: float(value) for name, value in values.items()}, "step": step})

    def artifact(self, path: Path, folder: str = "") -> None:
        """Log a file or folder, as it is when it is sent."""
        self._put({"artifact": str(path.resolve()), "folder": folder})

    def image(self, path: Path, key: str, step: int) -> None:
        """Log a picture at an optimizer step; pictures of one ``key`` get a slider over steps."""
        self._put({"image": str(path.resolve()), "key": key, "step": step})

    def text(self, text: str, name: str) -> None:
        """Log text as an artifact file."""
        self._put({"text": text, "name": name})

    def tags(self, values: Mapping[str, str]) -> None:
        """Set tags of the run."""
        self._put({"tags": dict(values)})

    def finish(self, status: Status, timeout_seconds: float = 30.0) -> RunLink:
        """End the run. Waits until all is sent, or the child has done nothing for ``timeout_seconds``, 3 s if MLflow is
        down; the rest can be sent later. A second call only returns the link."""
        if self._link is None:
            finished, done, since = self._put({"finish": status}), None, time.monotonic()
            while self._listener.is_alive():
                finished = finished or self._put({"finish": status})  # again if the disk is full
                seconds = 0  # of the processor, used by the child; on a busy machine MLflow takes long to start
                with suppress(psutil.Error):
                    seconds = int(psutil.Process(self._process.pid).cpu_times().user)
                if (done_now := (self._sent, seconds)) != done:
                    done, since = done_now, time.monotonic()
                if time.monotonic() > since + (min(timeout_seconds, DOWN_SECONDS) if self._down else timeout_seconds):
                    break
                self._listener.join(0.1)
            self._finished = self._closed = True
            self._process.kill()
            self._listener.join(5.0)
            if self._process.wait() == 0:
                discard(self._events)
            elif line := unsent(self._events):
                self._log(line)
            uri, run_id = resolve_uri(self._start["output_root"]), self.run_id
            page = f"/#/experiments/{self._run['experiment_id']}/runs/{run_id}" if run_id else ""
            self._link = RunLink(run_id, public_address(uri), *page_of(uri, page))
        return self._link

    def _put(self, *records: Record) -> bool:
        """Append records, after the start if the disk has not taken that yet; return whether it took them."""
        with self._lock:
            if self._finished:
                return False
            try:
                for record in records if self._begun else ({"start": self._start}, *records):
                    append_event(self._events, record)
                    self._begun, self._finished = True, "finish" in record
            except OSError as error:
                if not self._refused:
                    what = "training continues, and MLflow misses what happens until it can"
                    self._log(f"{self._events} can't be written ({error.strerror}); {what}")
                self._refused = True
                return False
            return True

    def _listen(self) -> None:
        """Read the child's replies until it ends; one that dies is not replaced, since the file keeps everything."""
        assert self._process.stdout is not None
        with self._process.stdout as replies:
            for line in replies:
                with suppress(ValueError):  # cut off by the child's death
                    reply = json.loads(line)
                    if "log" in reply:
                        self._log(reply["log"])
                    if "metrics" in reply:
                        self._put({"metrics": reply["metrics"]})
                    self._run = reply.get("run", self._run)
                    self._sent, self._down = reply.get("sent", self._sent), reply.get("down", self._down)
        code = self._process.wait()
        if code < 0 and not self._closed:
            self._log(
                f"the process that sends to MLflow died (exit code {code}); training continues, and its events are "
                f"kept; to send them: {send_command(self._events)}"
            )
