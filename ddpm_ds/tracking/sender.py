"""Process that sends a run's events to MLflow, in order, until it has them.

Rank 0 starts it with its own process id, before it imports PyTorch, so that MLflow is imported at the same time:

    python -m ddpm_ds.tracking.sender TRAINER

It reads the path of a :class:`~ddpm_ds.tracking.tracker.Tracker`'s event file, and ends when MLflow has the end of the
run. If the trainer dies, the process ends the run as FAILED; records that can't be sent in the next seconds stay in the
file, for the run's next start or ``ddpm-ds send`` (:func:`send_later`). Its replies are lines of JSON:
{"run": ids in MLflow}, {"log": line}, {"sent": number of records, "down": whether MLflow fails}, and
{"metrics": values}, readings of this host, which the trainer appends to its events.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import psutil
from filelock import FileLock
from PIL import Image, UnidentifiedImageError  # here, since threads that import it at once may see it half-imported

from ddpm_ds.ground.errors import OptionError, UserError, print_to_stderr
from ddpm_ds.ground.files import replace_file
from ddpm_ds.ground.options import limited_seconds
from ddpm_ds.processes.ranks import for_good
from ddpm_ds.tracking.address import (
    DATABASES,
    SQLITE,
    check_tracking_uri,
    quiet,
    reason,
    resolve_uri,
    sqlite_file,
)
from ddpm_ds.tracking.run_folder import (
    EVENTS,
    LOCK,
    NOTE_TAG,
    PARENT_TAG,
    START_TAG,
    Record,
    append_event,
    begun,
    bytes_sent,
    cursor_file,
    discard,
    end_killed,
    ending,
    lock,
    note_of,
    place_of,
    records,
    unsent,
)
from ddpm_ds.tracking.tracker import INTERVAL

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

Log = Callable[[str, str], None]
"""Function of (topic, line) that shows one line for each topic."""
POLL_SECONDS = 0.1
FLUSH_SECONDS = 20.0  # after the trainer died; DeepSpeed's launcher kills the rest of a rank after 30
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 60.0
RECORDS_AT_ONCE = 1000
REFUSALS = ("BAD_REQUEST", "INVALID_PARAMETER_VALUE", "INVALID_STATE", "RESOURCE_DOES_NOT_EXIST")
EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development"}  # by which MLflow's UI chooses its mode
DIGEST_CHARACTERS = 36  # MLflow's limit for the digest of a data set


def read_system_metrics(interval: str, reply: Callable[[Record], None], log: Log) -> None:
    """Reply with readings of this host every ``interval`` seconds, by MLflow's classes and names, without end."""
    from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
    from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
    from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
    from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor

    try:
        seconds = limited_seconds(interval)
        psutil.cpu_percent()  # the first call only starts the counter
        monitors = [CPUMonitor(), DiskMonitor(), NetworkMonitor()]
        with suppress(Exception):  # no GPU, or no driver of the right version
            monitors.append(GPUMonitor())
        while True:
            time.sleep(seconds)
            found: dict[str, float] = {}
            for monitor in monitors:
                monitor.collect_metrics()
                found |= monitor.aggregate_metrics()
                monitor.clear_metrics()
            reply({"metrics": {f"system/{name}": value for name, value in found.items()}})
    except OptionError as error:
        log("system", f"no system metrics are read ({INTERVAL}: {error}); training continues")
    except Exception as error:  # no error may reach training
        log("system", f"system metrics are no longer read ({error}); training continues")


class Sender:
    """Sender of an event file's records, in order, to the runs of MLflow that its starts name.

    ``reply`` receives the ids of run and experiment, how many records are sent, and whether MLflow is down.
    """

    def __init__(self, events: Path, start: Record, log: Log, reply: Callable[[Record], None]) -> None:
        self.place, self._events, self._at = place_of(start), events, bytes_sent(events)
        self._start, self._log, self._reply = start["start"], log, reply
        self._client: MlflowClient
        self._run: Run | None = None  # before its start is sent, and after its end
        self.sent, self.ended_at, self.refused = 0, 0, False

    def advance(self) -> bool:
        """Send the next log points, or one record of another kind; return whether there was one."""
        following = islice(records(self._events, self._at), RECORDS_AT_ONCE)
        batch = list(islice(following, 1))
        if batch and "metrics" in batch[0][0]:
            batch += takewhile(lambda one: "metrics" in one[0], following)
        if batch:
            self._deliver([record for record, _ in batch])
            self._at, self.sent = batch[-1][1], self.sent + len(batch)
            self.ended_at = self._at if "finish" in batch[0][0] else self.ended_at
            with suppress(OSError):  # it is sent again
                replace_file(cursor_file(self._events), json.dumps({"sent": self._at}).encode() + b"\n")
        return bool(batch)

    def _deliver(self, batch: Sequence[Record]) -> None:
        """Send a batch to the run of the last start; a record that MLflow refuses for good is reported and left out."""
        if "start" in batch[0]:
            return self._open(batch[0]["start"], resumes=True)
        if self._run is None:
            if (last := begun(self._events, self._at)) is None:
                return
            self._open(last[0]["start"], resumes=False)
        try:
            self._send(batch)
        except Exception as error:
            gone = isinstance(error, FileNotFoundError | UnidentifiedImageError)
            if not gone and getattr(error, "error_code", "") not in REFUSALS:
                raise
            self.refused = True
            self._log("refused", f"{self.place} refused a record ({reason(error)}) and does not have it")
        if "finish" in batch[0]:
            self._run = None

    def _send(self, batch: Sequence[Record]) -> None:
        """Send some log points, or one record of another kind."""
        from mlflow.entities import Metric, RunTag

        assert self._run is not None
        client, info, run = self._client, self._run.info, self._run.info.run_id
        if batch[0].keys() & {"artifact", "image", "text"}:
            where = urlsplit(info.artifact_uri)
            folders = Path(where.path).parents[1:3]  # of the experiment, and of all
            local = where.scheme in ("", "file") and resolve_uri(self._start["output_root"]).startswith("http")
            if local and not any(os.access(folder, os.W_OK) for folder in folders):
                raise FileNotFoundError(
                    f"the server keeps files in {folders[0]}, a folder that is not on this host; start it with "
                    "--artifacts-destination, not --default-artifact-root, and name a new experiment: "
                    "logging.experiment"
                )
        match batch[0]:
            case {"metrics": _}:
                metrics = []
                for point in batch:  # seconds since the run began also rise when it is resumed
                    step = int(point.get("step", (point["time"] - info.start_time) // 1000))
                    metrics += [Metric(name, at, point["time"], step) for name, at in point["metrics"].items()]
                client.log_batch(run, metrics=metrics, synchronous=True)
            case {"artifact": path, "folder": folder}:
                client.log_artifact(run, path, folder or None)
            case {"image": path, "key": key, "step": step, "time": at}:
                name = rf"images/{re.sub('/', '.', key)}\Wstep\W{step}\Wtimestamp\W{at}\W.*compressed"
                if not any(re.match(name, file.path) for file in client.list_artifacts(run, "images")):
                    with Image.open(path) as image:
                        client.log_image(run, image, key=key, step=step, timestamp=at, synchronous=True)
            case {"text": text, "name": name}:
                client.log_text(run, text, name)
            case {"tags": tags}:
                if NOTE_TAG in tags:  # the result, above a note that may have been edited
                    description = client.get_run(run).data.tags.get(NOTE_TAG, "")
                    tags = tags | {NOTE_TAG: tags[NOTE_TAG] + note_of(description)}
                client.log_batch(run, tags=[RunTag(*tag) for tag in tags.items()], synchronous=True)
            case {"finish": status, "time": at}:
                if not self._join_parent(self._run):
                    line = f"{self.place} does not have the parent of {self._start['run_dir']}; it stands alone"
                    self._log("orphan", line)
                client.set_terminated(run, status, at)

    def _open(self, start: Record, *, resumes: bool) -> None:
        """Find or make the run of a start; one that has ended is set to running if it ``resumes``."""
        from mlflow.entities import Dataset, DatasetInput, InputTag, Param, RunTag

        self._start, uri = start, resolve_uri(start["output_root"])
        with opened_store(Path(start["output_root"])) as client:
            self._client = client
            if experiment := client.get_experiment_by_name(start["experiment"]):
                experiment_id = experiment.experiment_id
            else:
                # A server knows where artifacts go; a bare database would put them into the working folder.
                bare = uri.split(":")[0].split("+")[0] in DATABASES
                location = (Path(start["output_root"]) / "mlartifacts").as_uri() if bare else None
                experiment_id = client.create_experiment(start["experiment"], location, EXPERIMENT_TAGS)
            if run := self._find(experiment_id, start["id"]):
                if resumes:
                    client.update_run(run.info.run_id, status="RUNNING")
            else:
                run = client.create_run(experiment_id, start["time"], {START_TAG: start["id"]}, start["run_name"])
            params = [] if run.data.params else [Param(*param) for param in start["params"].items()]
            edited = {NOTE_TAG} & run.data.tags.keys()  # perhaps
            tags = [RunTag(*tag) for tag in start["tags"].items() if tag[0] not in edited]
            client.log_batch(run.info.run_id, params=params, tags=tags, synchronous=True)
            if data := start.get("dataset"):  # MLflow shows the whole digest beside the location
                where = json.dumps({"uri": data["source"], "sha256": data["digest"]})
                dataset = Dataset(data["name"], data["digest"][:DIGEST_CHARACTERS], "local", where)
                context = InputTag("mlflow.data.context", "training")
                client.log_inputs(run.info.run_id, [DatasetInput(dataset, [context])])
        self._run = run
        self._join_parent(run)
        self._reply({"run": {"run_id": run.info.run_id, "experiment_id": experiment_id}})

    def _join_parent(self, run: Run) -> bool:
        """Make the run a child of its parent, if it has one; return False if MLflow does not have that, or not yet."""
        if self._start.get("parent") is None or PARENT_TAG in run.data.tags:
            return True
        parent = self._find(run.info.experiment_id, self._start["parent"])
        if parent is not None:
            self._client.set_tag(run.info.run_id, PARENT_TAG, parent.info.run_id)
        return parent is not None

    def _find(self, experiment_id: str, identity: str) -> Run | None:
        found = self._client.search_runs([experiment_id], f"tags.`{START_TAG}` = '{identity}'", max_results=1)
        return found[0] if found else None


@contextmanager
def opened_store(output_root: Path) -> Iterator[MlflowClient]:
    """Yield a client of the store for runs in a folder. SQLite is locked meanwhile, and made if it is missing."""
    import mlflow

    uri = resolve_uri(output_root)
    mlflow.set_tracking_uri(uri)
    if not uri.startswith("sqlite"):
        yield mlflow.MlflowClient(uri)
        return
    file = sqlite_file(uri)
    folder = output_root if file is None else file.parent
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".mlflow.lock"):  # two processes that create one database at once corrupt it
        if file is not None and not file.exists():
            new = file.with_name(f".{file.name}.new")  # so that a killed process leaves no incomplete one
            new.unlink(missing_ok=True)
            mlflow.MlflowClient(f"{SQLITE}{new}").search_experiments(max_results=1)
            new.replace(file)
        yield mlflow.MlflowClient(uri)


class Child:
    """This process, beside the trainer with the process id ``trainer``."""

    def __init__(self, trainer: int) -> None:
        self._trainer, self._logged, self._replies = trainer, set[str](), os.dup(1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # MLflow may print

    @property
    def alone(self) -> bool:
        """Whether the trainer has died."""
        return os.getppid() != self._trainer

    def reply(self, record: Record) -> None:
        """Send a record to the trainer, if it lives."""
        with suppress(OSError):
            if not self.alone:  # a process of its loader may have the pipe still, and not read it
                os.write(self._replies, json.dumps(record).encode() + b"\n")

    def log(self, topic: str, line: str) -> None:
        """Show a line for each topic, above the trainer's progress line while the trainer lives."""
        if topic not in self._logged:
            self._logged.add(topic)
            with suppress(OSError):
                print_to_stderr(line) if self.alone else self.reply({"log": line})

    def send(self) -> bool:
        """Send the events of the trainer's run until its end; return whether MLflow has all of them."""
        with for_good():
            import mlflow  # noqa: F401  (here, since threads that import it at once may see it half-imported)
        if not (line := sys.stdin.buffer.readline()):
            return False  # the trainer has left without a run
        events, locked, last = Path(os.fsdecode(line[:-1])), None, None
        while (locked := locked or lock(events)) is None or (last := begun(events)) is None:
            if self.alone:
                return False
            time.sleep(POLL_SECONDS)
        (start, own), down, deadline, pause = last, False, math.inf, FIRST_PAUSE_SECONDS
        if interval := start["start"]["system_metrics"]:
            arguments = interval, self.reply, self.log
            threading.Thread(target=read_system_metrics, args=arguments, daemon=True).start()
        sender = Sender(events, start, self.log, self.reply)
        while sender.ended_at <= own:
            if self.alone and deadline == math.inf:
                deadline = time.monotonic() + FLUSH_SECONDS
                if begun(events) == last and ending(events) is None:  # nor resumed already
                    with suppress(OSError):
                        append_event(events, {"finish": "FAILED"})
            if time.monotonic() > deadline:
                self.log("unsent", unsent(events) or "")
                return False
            try:
                if not sender.advance():
                    time.sleep(POLL_SECONDS)
                    continue
            except Exception as error:  # no error may reach training
                down = True
                self.reply({"down": True})
                self.log("down", f"{sender.place} fails ({reason(error)}); training continues, and it is tried again")
                again = time.monotonic() + pause
                while time.monotonic() < again and not self.alone and ending(events) is None:
                    time.sleep(POLL_SECONDS)
                time.sleep(FIRST_PAUSE_SECONDS * (time.monotonic() < again))
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
                continue
            self.reply({"sent": sender.sent, "down": False})
            if down:
                self.log("up", f"{sender.place} answers again")
            down, pause = False, FIRST_PAUSE_SECONDS
        return not sender.refused


def send_later(run_dir: Path) -> bool:
    """Send the records of a folder's runs that MLflow lacks, and print a line for each file; return whether it has all.

    Raises:
        UserError: there is no run in the folder, or MLflow can't use the tracking URI.
    """
    quiet()
    files = sorted(run_dir.glob("events*.jsonl"), key=lambda file: file.name != EVENTS)  # children find their parent
    if not files:
        raise UserError(f"{run_dir} holds no {EVENTS}; name the folder of a run of this version")
    return all([_send_file(file) for file in files])


def _send_file(events: Path) -> bool:
    def log(line: str) -> None:
        print(f"{events}: {line}")

    try:
        if (locked := lock(events)) is None:
            log("another process sends it; wait for the end of its run")
            return False
        with locked, ExitStack() as claim:
            if (last := begun(events)) is None:
                return True
            if (run := events.with_name(LOCK)).is_file() and (free := lock(run)) is not None:
                claim.enter_context(free)
                end_killed(events)
            check_tracking_uri(Path(last[0]["start"]["output_root"]))
            sender = Sender(events, last[0], lambda _, line: log(line), lambda _: None)
            try:
                while sender.advance():
                    pass
            except Exception as error:  # other files may be sent all the same
                log(f"{sender.place} fails ({reason(error)}); send again when it answers")
                return False
    except OSError as error:
        log(f"it can't be read ({error.strerror}); allow it")
        return False
    log(f"{sender.sent:,} records sent to {sender.place}")
    if not sender.refused and ending(events) is not None:
        discard(events)
    return not sender.refused


def main() -> None:
    """Send the events that the trainer names."""
    quiet()
    # Launchers and terminals signal the whole process group; this process ends when the trainer has.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    os.nice(5)
    child, everything = Child(int(sys.argv[1])), False
    try:
        everything = child.send()
    except OSError as error:
        name = error.filename or EVENTS
        child.log("file", f"{name} can't be read ({error.strerror}), so nothing is sent; training continues")
    os._exit(0 if everything else 1)  # without waiting for threads of MLflow's


if __name__ == "__main__":
    main()
