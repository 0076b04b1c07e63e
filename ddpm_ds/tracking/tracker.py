"""Experiment tracking that training never waits for.

    training ── records ──▶ journal ──▶ worker process ──▶ MLflow and logging.trackers
                                              │
       log lines ◀── supervising thread ◀── replies

MLflow lives in a child process (:mod:`ddpm_ds.tracking.worker`): its import, the making of its database, its network
and its crashes stay outside of the training process. The journal is a file in memory, so a record is written down at
once, whatever MLflow and the disk do; a second worker continues where the first one died, and records that MLflow has
not accepted by the end of the run are kept in the run folder, to be sent later. (MLflow's own asynchronous logging
drops what a server does not take at once, and runs in threads of the training process.)

The journal has one JSON object per line:

    {"start": {...}}                                                  which run: see ``Tracker.start``
    {"metrics": {name: value}, "step": int, "time": milliseconds}    without a step: seconds since the run began
    {"artifact": path, "folder": name}
    {"image": path, "key": name, "step": int, "time": milliseconds}
    {"text": content, "name": file name}
    {"numbers": {name: value}, "step": int, "time": milliseconds}    measured once: tags in MLflow, so no charts
    {"tags": {name: value}}
    {"register": model name, "folder": of the run's artifacts}
    {"finish": "FINISHED" | "FAILED" | "KILLED", "time": milliseconds}

and the worker replies {"run": ids}, {"sent": bytes of the journal that MLflow has} or {"log": line}.
"""

from __future__ import annotations

import ctypes
import getpass
import json
import mmap
import os
import shlex
import sqlite3
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import IO, Any, Literal
from urllib.parse import urlsplit

import psutil

from ddpm_ds.errors import SpecError, shortened
from ddpm_ds.files import open_regular
from ddpm_ds.secret import public_address, without_secrets

Record = dict[str, Any]

WORKER = "ddpm_ds.tracking.worker"
COMPUTING_SECONDS = 1.0  # CPU time during a wait from which on the worker counts as at work, and is waited for again
DOWN_SECONDS = 3.0  # longest wait at the end of a run for a tracker that is down
WORKERS = 2  # the first, and one more if it dies
SQLITE = "sqlite:///"
UNSENT_FILE = "mlflow_unsent.jsonl"
LOCAL_UI = "http://127.0.0.1:5000"  # where `mlflow ui` listens
TRAINING_MODE = "workflowType=machine_learning"  # of MLflow's UI, which otherwise opens in the one for language models
USER_TAG = "mlflow.user"
PARAM_CHARACTERS = 6000  # MLflow's limit for the value of a param
REASON_CHARACTERS = 400  # of an error of MLflow's; its fix may stand at its end
SERVERS = ("http", "https", "databricks")  # schemes of tracking URIs
DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
PLUGINS = "mlflow.tracking_store"  # entry points of packages that add schemes
EXAMPLES = ("http://HOST:5000", "sqlite:////FOLDER/mlflow.db", "mysql+pymysql://USER:PASSWORD@HOST:3306/DATABASE")
EXPERIMENT = "MLFLOW_EXPERIMENT_NAME"
DRIVERS = {"MySQLdb": "mysqlclient", "psycopg": "psycopg[binary]", "psycopg2": "psycopg2-binary"}
"""Packages that have another name than their module, by the module's name."""
PUNCH_HOLE = 0x03  # fallocate's FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE: offsets stay, memory is freed
_LIBC = ctypes.CDLL(None)
MLFLOW = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # the worker retries by itself, and can be woken while it waits
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}
"""Default environment of MLflow's client: a server that is down is noticed soon."""


@dataclass(frozen=True)
class RunLink:
    """Location of a run. ``run_id`` is None if MLflow was never reached."""

    run_id: str | None
    tracking_uri: str
    url: str
    """Page of the run, in the mode of MLflow's UI for model training."""
    command: str | None
    """Command that serves the page; None if a server does."""

    @property
    def open_with(self) -> str:
        """Everything needed to see the run, in one line."""
        return self.url if self.command is None else f"{self.command}  and open  {self.url}"


def page_of(tracking_uri: str, page: str) -> tuple[str, str | None]:
    """Return the address of a page of MLflow's UI, and the command that serves it; None if a server does.

    ``page`` starts with ``/#/``, and is opened in the mode for model training.
    """
    uri = public_address(tracking_uri)
    served = uri.startswith(("http://", "https://"))
    if page:
        page += f"{'&' if '?' in page else '?'}{TRAINING_MODE}"
    serve = f"mlflow ui --backend-store-uri {shlex.quote(uri)}"  # listens on loopback only
    if uri != tracking_uri:  # what is left out is on no command line
        serve = 'MLFLOW_BACKEND_STORE_URI="$MLFLOW_TRACKING_URI" mlflow ui'
    return f"{uri.rstrip('/') if served else LOCAL_UI}{page}", None if served else serve


def user_name() -> str:
    """Return the login name, or the user's number if there is no name, as in some containers."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # in Python 3.11 and 3.13
        return str(os.getuid())


def now_ms() -> int:
    """Return milliseconds since 1970, the unit of MLflow's times."""
    return time.time_ns() // 1_000_000


def flatten(values: Mapping[str, object], prefix: str = "") -> dict[str, str]:
    """Return nested mappings as dotted names (``unet.channels``) and text, with values cut to MLflow's limit."""
    flat: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            flat[f"{prefix}{name}"] = text[:PARAM_CHARACTERS]
    return flat


def numbers_of(tags: Mapping[str, str]) -> dict[str, float]:
    """Return the numbers among a run's tags: values measured once, with a slash in their names."""
    numbers: dict[str, float] = {}
    for name, value in tags.items():
        with suppress(ValueError):
            numbers |= {name: float(value)} if "/" in name else {}
    return numbers


def reason(error: BaseException) -> str:
    """Return the first cause of an error, in one line."""
    while cause := error.__cause__ or error.__context__:
        error = cause
    return shortened(" ".join(without_secrets(str(error)).split()), REASON_CHARACTERS) or type(error).__name__


def resolve_uri(output_root: Path | str) -> str:
    """Return the tracker of the runs in an output root: ``MLFLOW_TRACKING_URI``, else SQLite in the root."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"{SQLITE}{output_root}/mlflow.db"


def sqlite_file(uri: str) -> Path | None:
    """Return the file of an SQLite tracking URI, which may have options after a question mark; None for all others."""
    path = uri.removeprefix(SQLITE).partition("?")[0]
    return Path(path) if uri.startswith(SQLITE) and not path.startswith((":", "file:")) else None


def uri_fault(uri: str) -> str | None:
    """Return why MLflow can keep nothing at a tracking URI, with the fix, or None; MLflow is not imported."""
    address = public_address(uri)
    named = f"MLFLOW_TRACKING_URI={address}"
    try:
        scheme = urlsplit(uri).scheme
    except ValueError:  # brackets that do not close
        scheme = "unreadable"
    if uri == "databricks" or scheme in SERVERS:
        return None
    if len(scheme) < 2 or scheme == "file":
        if os.environ.get("MLFLOW_ALLOW_FILE_STORE", "").lower() in ("true", "1"):
            return None
        path = os.path.abspath(address.removeprefix("file:"))
        file = path if path.endswith(".db") else f"{path}/mlflow.db"
        return f"{named} is a path, and MLflow 3 keeps no runs in folders; write {SQLITE}{file}"
    if (store := sqlite_file(uri)) is not None and store.is_dir():
        return f"{named} is a folder; write {SQLITE}{store}/mlflow.db"
    if scheme == "sqlite":
        return None
    if scheme.partition("+")[0] not in DATABASES:
        if entry_points(group=PLUGINS, name=scheme):
            return None
        return f"{named} is no store of MLflow's; write {' or '.join(EXAMPLES)}"
    from sqlalchemy import exc, make_url

    try:
        make_url(uri).get_dialect().import_dbapi()
    except ImportError as error:
        package = DRIVERS.get(error.name or "", error.name)
        return f"{named} needs the driver {error.name}, which is not installed; pip install '{package}'"
    except (exc.SQLAlchemyError, ValueError):  # their messages may have parts of a password
        return f"{named} can't be read; write it as {EXAMPLES[-1]}, with %40 for an @ in the password"
    return None


def check_tracking_uri(output_root: Path) -> str:
    """Return the tracking URI of the runs in an output root; raises SpecError if MLflow can keep nothing there."""
    uri = resolve_uri(output_root.resolve())
    if fault := uri_fault(uri):
        raise SpecError(fault)
    return uri


def check_experiment(name: str, output_root: Path) -> None:
    """Check that the runs of an output root can be logged to an experiment, as far as no server has to be asked.

    Raises:
        SpecError: MLflow takes no such tracking URI, the environment names another experiment, or it is deleted.
    """
    uri = check_tracking_uri(output_root)
    if (other := os.environ.get(EXPERIMENT, name)) != name:
        raise SpecError(
            f"{EXPERIMENT}={other}, but logging.experiment = {name} says where runs go; give --set "
            f"{shlex.quote(f'logging.experiment={other}')}, or unset {EXPERIMENT}"
        )
    file = sqlite_file(uri)
    if file is None or not file.is_file():
        return
    found = None
    with suppress(sqlite3.Error), closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True)) as store:
        question = "SELECT experiment_id FROM experiments WHERE name = ? AND lifecycle_stage = 'deleted'"
        found = store.execute(question, [name]).fetchone()
    if found is not None:
        raise SpecError(deleted_experiment(name, str(found[0]), uri))


def deleted_experiment(name: str, experiment_id: str, uri: str) -> str:
    """Return a line on an experiment that takes no runs since it is deleted, with the fix."""
    where = f"env {shlex.quote(f'MLFLOW_TRACKING_URI={uri}')} " if public_address(uri) == uri else ""
    return (
        f"logging.experiment = {name} is deleted in MLflow; name another, or restore it: "
        f"{where}mlflow experiments restore --experiment-id {experiment_id}"
    )


def keep_unsent(start: Record, records: Iterable[Record]) -> str:
    """Append unsent records to a file in the run folder; return a line with the file and how to send it."""
    lines = [json.dumps(record) for record in records]
    path, uri = Path(start["run_dir"]) / UNSENT_FILE, public_address(resolve_uri(start["output_root"]))
    what = f"{len(lines)} {'record' if len(lines) == 1 else 'records'} could not be sent to MLflow at {uri}"
    try:
        with open_regular(path, "ab") as file:
            file.writelines(line.encode() + b"\n" for line in (json.dumps({"start": start}), *lines))
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
        dataset: Mapping[str, str] | None = None,
        trackers: Sequence[str] = (),
        identity: str | None = None,
        parent: str | None = None,
        log: Callable[[str], None] = print_to_stderr,
    ) -> Tracker:
        """Begin a run, or resume the one of this ``identity``, whose params are left as they are.

        ``output_root`` is the folder of ``mlflow.db`` and ``mlartifacts``, unless ``MLFLOW_TRACKING_URI`` names a
        tracker; ``run_dir`` is where records are kept that can't be sent. ``params`` may be nested, ``tags`` are set at
        every start, ``artifacts`` are logged first. ``dataset`` has the ``name`` of the training images, the ``digest``
        of their content and their ``source``. ``trackers`` names those besides MLflow, which have the same names of
        metrics (:mod:`ddpm_ds.tracking.mirrors`). ``parent`` is the identity of the run that this one is a child of.
        ``log`` shows one line to the user, and is called from another thread.
        """
        start = {
            "id": identity or uuid.uuid4().hex,
            "time": now_ms(),
            "experiment": experiment,
            "run_name": run_name,
            "output_root": str(output_root.resolve()),
            "run_dir": str(run_dir.resolve()),
            "params": flatten(params),
            "tags": {USER_TAG: user_name(), **tags},
            "dataset": dataset,
            "trackers": list(trackers),
            "parent": parent,
        }
        tracker = cls(start, log)
        for path in artifacts:
            tracker.artifact(path)
        return tracker

    def __init__(self, start: Record, log: Callable[[str], None]) -> None:
        self._start, self._log = start, log
        self._lock = threading.Lock()
        self._journal = os.memfd_create("journal")
        self._sent = self._freed = os.write(self._journal, _line({"start": start}))  # every worker reads the start
        self._closed = False
        self._run: dict[str, str] = {}
        self._down = False  # the last attempt failed
        self._link: RunLink | None = None
        self._process = self._start_worker()
        self._supervisor = threading.Thread(target=self._supervise, name="tracker", daemon=True)
        self._supervisor.start()

    @property
    def run_id(self) -> str | None:
        """Id of the run; None until MLflow has answered."""
        return self._run.get("run_id")

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        """Log values at an optimizer step, with the time of this call."""
        self._put({"metrics": {name: float(value) for name, value in values.items()}, "step": step, "time": now_ms()})

    def numbers(self, values: Mapping[str, float], step: int) -> None:
        """Log values that are measured once, at this optimizer step: MLflow shows them as tags, not as charts."""
        self._put({"numbers": {name: float(value) for name, value in values.items()}, "step": step, "time": now_ms()})

    def system_metrics(self, values: Mapping[str, float], node: str | None = None) -> None:
        """Log values as ``system/...``, or ``system/<node>/...``, with the time of this call."""
        prefix = f"system/{node}/" if node else "system/"
        self._put({"metrics": {prefix + name: value for name, value in values.items()}, "time": now_ms()})

    def artifact(self, path: Path, folder: str = "") -> None:
        """Log a file or folder, as it is when the worker reaches it."""
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
        """End the run. Waits until all is sent, or the worker has waited for MLflow for about ``timeout_seconds``, 3 s
        for one that is down, and then leaves the rest in ``<run_dir>/mlflow_unsent.jsonl``. A second call only returns
        the link."""
        if self._link is None:
            self._put({"finish": status, "time": now_ms()})
            before, computed = -COMPUTING_SECONDS, self._worker_cpu_seconds()
            while self._supervisor.is_alive() and computed - before >= COMPUTING_SECONDS:
                begin = time.monotonic()
                while self._supervisor.is_alive() and time.monotonic() < begin + (
                    min(timeout_seconds, DOWN_SECONDS) if self._down else timeout_seconds
                ):
                    self._supervisor.join(0.1)
                before, computed = computed, self._worker_cpu_seconds()
            with self._lock:
                self._closed = True
                self._process.kill()
            self._supervisor.join(5.0)
            unsent = os.pread(self._journal, os.fstat(self._journal).st_size - self._sent, self._sent)
            if unsent:
                self._log(keep_unsent(self._start, map(json.loads, unsent.splitlines())))
            os.close(self._journal)
            self._link = self._make_link()
        return self._link

    def _worker_cpu_seconds(self) -> float:
        """Return the CPU seconds that the worker has used; on a busy machine MLflow takes long to start."""
        try:
            times = psutil.Process(self._process.pid).cpu_times()
        except psutil.Error:
            return 0.0
        return float(times.user + times.system)

    def _put(self, record: Record) -> None:
        with self._lock:
            if not self._closed:
                os.write(self._journal, _line(record))

    def _start_worker(self) -> subprocess.Popen[bytes]:
        variables = {
            **MLFLOW,
            **os.environ,
            "PYTHONPATH": os.pathsep.join(folder or os.getcwd() for folder in sys.path),  # finds the modules we found
            "PYTHONSAFEPATH": "1",  # and none in the working folder besides
            "PYTHONWARNINGS": "ignore",
        }
        arguments = [str(number) for number in (os.getpid(), self._journal, self._sent)]
        return subprocess.Popen(
            [sys.executable, "-m", WORKER, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            pass_fds=[self._journal],
            env=variables,
        )

    def _supervise(self) -> None:
        """Read the worker's replies, and replace it once if it dies."""
        for worker in range(1, WORKERS + 1):
            replies: IO[bytes] | None = self._process.stdout
            assert replies is not None
            with replies:
                for line in replies:
                    with suppress(ValueError):  # cut off by the worker's death
                        self._hear(json.loads(line))
            code = self._process.wait()
            with self._lock:
                if code == 0 or self._closed or worker == WORKERS:
                    return
                self._process = self._start_worker()
            self._log(f"the MLflow process died (exit code {code}) and is restarted; training continues")

    def _hear(self, reply: Record) -> None:
        if "log" in reply:
            self._log(reply["log"])
        self._run = reply.get("run", self._run)
        self._sent = reply.get("sent", self._sent)
        self._free_sent()
        self._down = reply.get("down", self._down and "sent" not in reply)

    def _free_sent(self) -> None:
        """Give back the memory of whole pages of records that MLflow has: in weeks, many hosts' make gigabytes."""
        page = mmap.PAGESIZE
        begin, end = -(-self._freed // page) * page, self._sent // page * page
        with self._lock:
            if begin < end and not self._closed and not self._start["trackers"]:  # which may not have read them yet
                _LIBC.fallocate(self._journal, PUNCH_HOLE, ctypes.c_int64(begin), ctypes.c_int64(end - begin))
                self._freed = end

    def _make_link(self) -> RunLink:
        uri, run_id = resolve_uri(self._start["output_root"]), self.run_id
        page = f"/#/experiments/{self._run['experiment_id']}/runs/{run_id}" if run_id else ""
        return RunLink(run_id, public_address(uri), *page_of(uri, page))


def _line(record: Record) -> bytes:
    return json.dumps(record).encode() + b"\n"
