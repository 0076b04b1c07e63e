"""Experiment tracking that training never waits for.

    training ── metrics() ──▶ queue ──▶ writer thread ──▶ pipe ──▶ worker process ──▶ MLflow
                                │                                        │
                              unsent ◀── reader thread ◀── replies ──────┘

MLflow lives in a child process (:mod:`ddpm_ds.tracking.worker`): its import, the making of its database, its
network and its crashes stay outside of the training process. What the worker has not yet reported as sent is kept
here, for a second worker if the first one dies, and for a file in the run folder if nothing helps.

Both processes speak in records, one JSON object per line:

    {"start": {...}}                                                  which run: see ``Tracker.start``
    {"metrics": {name: value}, "step": int, "time": milliseconds}    without a step: seconds since the run began
    {"artifact": path, "folder": name}
    {"image": path, "key": name, "step": int, "time": milliseconds}
    {"text": content, "name": file name}
    {"tags": {name: value}}
    {"register": model name, "folder": of the run's artifacts}
    {"finish": "FINISHED" | "FAILED" | "KILLED", "time": milliseconds}

and the worker replies {"run": ids}, {"sent": count}, {"refused": count} (start not counted) or {"say": line}.

Processes beside training, which may import MLflow: started to find our modules and to keep out of the way.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any, Literal

Record = dict[str, Any]

WORKER = "ddpm_ds.tracking.worker"
WORKERS = 2  # the first, and one more if it dies
UNSENT_FILE = "mlflow_unsent.jsonl"
PARAM_CHARACTERS = 6000  # MLflow's limit for the value of a param


@dataclass(frozen=True)
class RunLink:
    """Where a run is. ``run_id`` is None when the tracker was never reached; ``open_with`` is a URL or a command."""

    run_id: str | None
    experiment_id: str | None
    tracking_uri: str
    open_with: str


def now_ms() -> int:
    """Milliseconds since 1970, the unit of MLflow's times."""
    return time.time_ns() // 1_000_000


def flatten(values: Mapping[str, object], prefix: str = "") -> dict[str, str]:
    """Nested mappings as dotted names (``unet.channels``) and text, values cut to what MLflow takes."""
    flat: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            flat[f"{prefix}{name}"] = text[:PARAM_CHARACTERS]
    return flat


def without_password(text: str) -> str:
    """The same text, with the user and password of every URI in it left out."""
    return re.sub(r"://[^/@\s]+@", "://", text)


def resolve_uri(start: Record) -> str:
    """The tracker of a run: the one asked for, else ``MLFLOW_TRACKING_URI``, else SQLite in the output root."""
    asked_for = start["tracking_uri"] or os.environ.get("MLFLOW_TRACKING_URI")
    return asked_for or f"sqlite:///{start['output_root']}/mlflow.db"


def keep_unsent(start: Record, records: Iterable[Record]) -> str:
    """Append what could not be sent to the run folder's file; returns the line that says so and how to send it."""
    lines = [json.dumps(record) for record in records]
    path, uri = Path(start["run_dir"]) / UNSENT_FILE, without_password(resolve_uri(start))
    what = f"{len(lines)} {'record' if len(lines) == 1 else 'records'} could not be sent to MLflow at {uri}"
    try:
        with path.open("a") as file:
            file.writelines(line + "\n" for line in (json.dumps({"start": start}), *lines))
    except OSError as error:
        return f"{what}, and are lost: {path}: {error.strerror}"
    return f"{what}; to send them: python -m {WORKER} < {shlex.quote(str(path))}"


def print_to_stderr(line: str) -> None:
    """Show a line to the user."""
    print(line, file=sys.stderr, flush=True)


class Tracker:
    """One MLflow run, written from rank 0. No method but :meth:`finish` waits for anything."""

    @classmethod
    def start(
        cls,
        experiment: str,
        run_name: str,
        *,
        output_root: Path,
        run_dir: Path,
        params: Mapping[str, object],
        tags: Mapping[str, str],
        artifacts: Iterable[Path] = (),
        tracking_uri: str | None = None,
        run_id: str | None = None,
        identity: str | None = None,
        parent: str | None = None,
        system_metrics: bool = True,
        say: Callable[[str], None] = print_to_stderr,
    ) -> Tracker:
        """Begin a run, or go on with ``run_id``, whose params are left as they are.

        The tracker is ``tracking_uri``, else the environment's ``MLFLOW_TRACKING_URI``, else
        ``sqlite:///<output_root>/mlflow.db`` with artifacts in ``<output_root>/mlartifacts``. ``params`` may be
        nested. ``identity`` finds the run again; ``parent`` is the identity of the run that this one is a child of.
        ``say`` shows one line to the user; it is called from another thread.
        """
        start = {
            "id": identity or uuid.uuid4().hex,
            "time": now_ms(),
            "experiment": experiment,
            "run_name": run_name,
            "run_id": run_id,
            "tracking_uri": tracking_uri,
            "output_root": str(output_root.resolve()),
            "run_dir": str(run_dir.resolve()),
            "params": flatten(params),
            "tags": dict(tags),
            "parent": parent,
            "system_metrics": system_metrics,
        }
        tracker = cls(start, say)
        for path in artifacts:
            tracker.artifact(path)
        return tracker

    def __init__(self, start: Record, say: Callable[[str], None]) -> None:
        self._start, self._say = start, say
        self._lock = threading.Lock()
        self._unsent: deque[Record] = deque()  # not yet reported as sent, oldest first
        self._refused: list[Record] = []
        self._run: dict[str, str] = {}
        self._link: RunLink | None = None
        self._closed = False
        self._spawn()
        self._supervisor = threading.Thread(target=self._supervise, name="tracker", daemon=True)
        self._supervisor.start()

    @property
    def run_id(self) -> str | None:
        """The run's id, to go on with later; None until the tracker has answered."""
        return self._run.get("run_id")

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        """Log values at an optimizer step, with the time of this call."""
        self._put({"metrics": {name: float(value) for name, value in values.items()}, "step": step, "time": now_ms()})

    def system_metrics(self, values: Mapping[str, float], node: str) -> None:
        """Log system metrics of another host than this one as ``system/<node>/...``, with the time of this call."""
        self._put({"metrics": {f"system/{node}/{name}": value for name, value in values.items()}, "time": now_ms()})

    def artifact(self, path: Path, folder: str = "") -> None:
        """Log a file or folder, as it is when its turn comes."""
        self._put({"artifact": str(path.resolve()), "folder": folder})

    def image(self, path: Path, key: str, step: int) -> None:
        """Log a picture at an optimizer step; those of one ``key`` get a slider over steps."""
        self._put({"image": str(path.resolve()), "key": key, "step": step, "time": now_ms()})

    def text(self, text: str, name: str) -> None:
        """Log text as an artifact file."""
        self._put({"text": text, "name": name})

    def tags(self, values: Mapping[str, str]) -> None:
        """Set tags of the run."""
        self._put({"tags": dict(values)})

    def register(self, name: str, folder: str) -> None:
        """Make a folder of the run's artifacts a version of the registered model ``name``."""
        self._put({"register": name, "folder": folder})

    def finish(self, status: Literal["FINISHED", "FAILED", "KILLED"], timeout_seconds: float = 30.0) -> RunLink:
        """End the run. Waits up to ``timeout_seconds`` until all is sent and then leaves the rest in
        ``<run_dir>/mlflow_unsent.jsonl``. A second call only returns the link."""
        if self._link is None:
            self._put({"finish": status, "time": now_ms()})
            self._supervisor.join(timeout_seconds)
            with self._lock:
                self._closed = True
                self._process.kill()
            self._supervisor.join(5.0)
            if left := [*self._refused, *self._unsent]:
                self._say(keep_unsent(self._start, left))
            self._link = self._make_link()
        return self._link

    def _put(self, record: Record) -> None:
        with self._lock:
            self._unsent.append(record)
            self._queue.put(record)

    def _spawn(self) -> None:
        """Start a worker, to be fed the start and everything unsent."""
        self._queue: SimpleQueue[Record | None] = SimpleQueue()
        for record in ({"start": self._start}, *self._unsent):
            self._queue.put(record)
        self._process = start_side_process(WORKER)
        threading.Thread(target=self._feed, args=(self._process.stdin, self._queue), daemon=True).start()

    @staticmethod
    def _feed(pipe: IO[bytes], queue: SimpleQueue[Record | None]) -> None:
        with suppress(OSError), pipe:  # of a broken pipe the supervisor hears too
            while (record := queue.get()) is not None:
                pipe.write(json.dumps(record).encode() + b"\n")
                pipe.flush()

    def _supervise(self) -> None:
        for worker in range(1, WORKERS + 1):
            process, queue = self._process, self._queue
            assert process.stdout is not None
            with process.stdout:
                for line in process.stdout:
                    with suppress(ValueError):  # cut off by the worker's death
                        self._hear(json.loads(line))
            queue.put(None)
            if process.wait() == 0:
                return
            with self._lock:
                if self._closed or worker == WORKERS:
                    return
                self._spawn()
            self._say(f"the MLflow process died (exit code {process.returncode}) and is restarted; training goes on")

    def _hear(self, reply: Record) -> None:
        if "say" in reply:
            self._say(reply["say"])
        if "run" in reply:
            self._run = reply["run"]
        with self._lock:
            for _ in range(reply.get("sent", 0)):
                self._unsent.popleft()
            for _ in range(reply.get("refused", 0)):
                self._refused.append(self._unsent.popleft())

    def _make_link(self) -> RunLink:
        uri, run_id, experiment_id = (
            without_password(resolve_uri(self._start)),
            self.run_id,
            self._run.get("experiment_id"),
        )
        if not uri.startswith(("http://", "https://")):
            open_with = f"mlflow ui --backend-store-uri {shlex.quote(uri)}"  # listens on loopback only
        else:
            open_with = f"{uri.rstrip('/')}/#/experiments/{experiment_id}/runs/{run_id}" if run_id else uri
        return RunLink(run_id, experiment_id, uri, open_with)


MLFLOW = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # who sends retries by itself and can be woken while it waits
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
"""Environment of MLflow's client where nobody has said otherwise: it answers soon, or says that it can't."""


def start_side_process(module: str, environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Run ``module`` beside this process, whose id is its argument, with pipes to its standard input and output.

    ``environment`` goes before that of this process.
    """
    variables = {
        **MLFLOW,
        **os.environ,
        **(environment or {}),
        "PYTHONPATH": os.pathsep.join(folder or os.getcwd() for folder in sys.path),  # finds the modules we found
        "PYTHONSAFEPATH": "1",  # and none in the working folder besides
        "PYTHONWARNINGS": "ignore",
    }
    command = [sys.executable, "-m", module, str(os.getpid())]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=variables)


def settle_side_process() -> IO[str]:
    """Called first in such a process: leave signals to the trainer and let it go first.

    Returns what to write lines for the trainer to; standard output is silenced, since MLflow may print.
    """
    # Launchers and terminals signal the whole process group; this process ends when the trainer has.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    os.nice(5)
    to_trainer = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return to_trainer
