"""MLflow's registry of models: a version is a folder of a run's artifacts.

The process in which MLflow lives: takes records as JSON lines and sends them, in order, until they are accepted.

Rank 0's :class:`~ddpm_ds.tracking.tracker.Tracker` (which documents the records) starts it with its own process id.
When that process dies, the run ends as FAILED after everything that was said, and this process ends soon after.

Without a process id it sends what a run had to leave behind:

    python -m ddpm_ds.tracking.worker < RUN_DIR/mlflow_unsent.jsonl
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpm_ds.tracking.tracker import Record

if TYPE_CHECKING:
    from mlflow import MlflowClient
import fcntl
import json
import logging
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING

from ddpm_ds.processes.ranks import NODE_ID
from ddpm_ds.tracking.system_metrics import samples, switched_on
from ddpm_ds.tracking.tracker import (
    keep_unsent,
    now_ms,
    print_to_stderr,
    resolve_uri,
    settle_side_process,
    without_password,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run


def register(client: MlflowClient, run_id: str, record: Record) -> str:
    """Make the folder of a register record a new version; returns a line that says which. Safe to repeat."""
    from mlflow.exceptions import MlflowException

    name = record["register"]
    source = f"{client.get_run(run_id).info.artifact_uri}/{record['folder']}".rstrip("/")
    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    known = client.search_model_versions(f"run_id = '{run_id}'")
    same = [version for version in known if (version.name, version.source) == (name, source)]
    version = same[0] if same else client.create_model_version(name, source, run_id, await_creation_for=0)
    return f"MLflow has version {version.version} of the model {name}: models:/{name}/{version.version}"


FLUSH_SECONDS = 20.0  # after the trainer died; DeepSpeed's launcher kills what is left of a rank after 30
LONGEST_PAUSE_SECONDS = 30.0
METRICS_PER_REQUEST, PARAMS_PER_REQUEST = 1000, 100  # MLflow's limits; that for params holds for tags too
START_TAG = "ddpm_ds.start"  # finds the run again when the answer to its creation was lost
PARENT_TAG = "mlflow.parentRunId"  # by which MLflow shows a run under another one
REFUSALS = ("BAD_REQUEST", "INVALID_PARAMETER_VALUE", "INVALID_STATE", "RESOURCE_DOES_NOT_EXIST")
DATABASES = ("sqlite", "postgresql", "mysql", "mssql")


def reason(error: BaseException) -> str:
    """The first cause of an error, in one line."""
    while cause := error.__cause__ or error.__context__:
        error = cause
    return without_password(" ".join(str(error).split())[:200]) or type(error).__name__


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Hold back other workers of the same output root: two that make one database at once spoil it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".mlflow.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def find_run(client: MlflowClient, start: Record, uri: str) -> Run:
    """The run of a start record: gone on with, found, or made with its params and tags. Safe to repeat."""
    from mlflow.entities import Param, RunTag
    from mlflow.exceptions import MlflowException

    run, params = None, []
    if start["run_id"]:
        try:
            client.update_run(start["run_id"], status="RUNNING")
            run = client.get_run(start["run_id"])
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
    if run is None:
        params = [Param(name, value) for name, value in start["params"].items()]
        if experiment := client.get_experiment_by_name(start["experiment"]):
            experiment_id = experiment.experiment_id
        else:
            # A server knows where artifacts go; a bare database would have them in the working folder.
            bare = uri.split(":")[0].split("+")[0] in DATABASES
            location = (Path(start["output_root"]) / "mlartifacts").as_uri() if bare else None
            experiment_id = client.create_experiment(start["experiment"], location)
        found = client.search_runs([experiment_id], f"tags.`{START_TAG}` = '{start['id']}'", max_results=1)
        tags = {START_TAG: start["id"]}
        if found:
            run = found[0]
            client.update_run(run.info.run_id, status="RUNNING")
            params = [] if run.data.params else params
        else:
            run = client.create_run(experiment_id, start["time"], tags, start["run_name"])
    tags = start["tags"] | parent_tag(client, run.info.experiment_id, start.get("parent"))
    run_tags = [RunTag(name, value) for name, value in tags.items()]
    for begin in range(0, max(len(params), len(run_tags)), PARAMS_PER_REQUEST):
        part = slice(begin, begin + PARAMS_PER_REQUEST)
        client.log_batch(run.info.run_id, params=params[part], tags=run_tags[part], synchronous=True)
    return run


def parent_tag(client: MlflowClient, experiment_id: str, parent: str | None) -> dict[str, str]:
    """The tag of a child of the run with the identity ``parent``; empty where there is no such run."""
    if parent is None:
        return {}
    found = client.search_runs([experiment_id], f"tags.`{START_TAG}` = '{parent}'", max_results=1)
    return {PARENT_TAG: found[0].info.run_id} if found else {}


class Worker:
    """Reads records in one thread and sends them in another.

    ``parent`` is the process id of the trainer that they come from and that hears ``replies``, if any.
    """

    def __init__(self, parent: int | None, replies: IO[str] | None) -> None:
        self._parent, self._replies = parent, replies
        self._records: deque[Record] = deque()  # not accepted yet, oldest first
        self._refused: list[Record] = []
        self._changed = threading.Condition()
        self._ending = threading.Event()  # the trainer will say nothing more
        self._unfinished = False  # a start was read and its finish was not
        self._said: set[str] = set()
        self._down = False
        self._start: Record = {}
        self._client: MlflowClient
        self._run: Run

    def read(self) -> None:
        """Take in records until the trainer is gone. Never waits for MLflow, so that nothing said is lost with it."""
        tail = b""
        try:
            while True:
                if select.select([0], [], [], 1.0)[0]:
                    if not (chunk := os.read(0, 1 << 16)):
                        break
                    *lines, tail = (tail + chunk).split(b"\n")
                    for line in lines:
                        self._take(json.loads(line))
                elif self._parent is not None and os.getppid() != self._parent:
                    break  # a loader process forked from the trainer may still hold the pipe open
        finally:
            if self._parent is not None:
                threading.Timer(FLUSH_SECONDS, self._give_up).start()
            if self._unfinished:
                self._take({"finish": "FAILED", "time": now_ms()})
            self._end()

    def _take(self, record: Record) -> None:
        with self._changed:
            self._unfinished = "start" in record or (self._unfinished and "finish" not in record)
            self._records.append(record)
            self._changed.notify()
        if "finish" in record and self._parent is not None:
            self._end()

    def _end(self) -> None:
        with self._changed:
            self._ending.set()
            self._changed.notify()

    def _give_up(self) -> None:
        with self._changed:
            left = [record for record in (*self._refused, *self._records) if "start" not in record]
        if self._start:
            self._say("unsent", keep_unsent(self._start, left))
        os._exit(1)

    def work(self) -> None:
        """Send every record; returns when there are no more to come."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._records or self._ending.is_set())
                if not self._records:
                    return
                batch = self._next_batch()
            answer = self._until_answered(batch)
            with self._changed:
                for _ in batch:
                    self._records.popleft()
                all_sent = not self._records
            self._reply({answer: sum("start" not in record and "system" not in record for record in batch)})
            if self._down and all_sent:
                self._down = False
                self._say("up", f"MLflow at {self._uri} answers again; everything has been sent")

    def _next_batch(self) -> list[Record]:
        """As many metrics records as one request takes, or the one record of another kind that is next."""
        batch: list[Record] = []
        room = METRICS_PER_REQUEST
        for record in islice(self._records, METRICS_PER_REQUEST):
            room -= len(record.get("metrics", ()))
            if batch and (room < 0 or "metrics" not in record):
                break
            batch.append(record)
            if "metrics" not in record:
                break
        return batch

    def _until_answered(self, batch: list[Record]) -> str:
        """Try until the records are taken ("sent"), or MLflow says that they never will be ("refused")."""
        pause = 1.0
        while True:
            try:
                self._send(batch)
                return "sent"
            except Exception as error:  # whatever it is, the trainer must not see it
                refused = isinstance(error, FileNotFoundError) or getattr(error, "error_code", "") in REFUSALS
                if refused and "start" not in batch[0]:
                    self._refused.extend(batch)
                    self._say("refused", f"MLflow at {self._uri} refused a record ({reason(error)})")
                    return "refused"
                self._down = True
                self._say("down", f"MLflow at {self._uri} fails ({reason(error)}); training goes on, it is tried again")
            if self._ending.wait(pause):
                time.sleep(1.0)  # the time left is bounded now, so waste none of it
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def _send(self, batch: list[Record]) -> None:
        record = batch[0]
        if "start" in record:
            self._start = record["start"]
            self._open()
        elif "metrics" in record:
            from mlflow.entities import Metric

            metrics = [
                Metric(name, value, point["time"], self._step(point))
                for point in batch
                for name, value in point["metrics"].items()
            ]
            self._client.log_batch(self._run.info.run_id, metrics=metrics, synchronous=True)
        elif "artifact" in record:
            self._client.log_artifact(self._run.info.run_id, record["artifact"], record["folder"] or None)
        elif "image" in record:
            from PIL import Image

            with Image.open(record["image"]) as image:
                self._client.log_image(
                    self._run.info.run_id,
                    image,
                    key=record["key"],
                    step=record["step"],
                    timestamp=record["time"],
                    synchronous=True,
                )
        elif "text" in record:
            self._client.log_text(self._run.info.run_id, record["text"], record["name"])
        elif "tags" in record:
            from mlflow.entities import RunTag

            tags = [RunTag(name, value) for name, value in record["tags"].items()]
            self._client.log_batch(self._run.info.run_id, tags=tags, synchronous=True)
        elif "register" in record:
            self._say(f"registered {record['register']}", register(self._client, self._run.info.run_id, record))
        elif "finish" in record:
            self._client.set_terminated(self._run.info.run_id, record["finish"], record["time"])

    def _step(self, point: Record) -> int:
        """That of the record; without one the seconds since the run began, which go on rising when it is resumed."""
        return int(point["step"] if "step" in point else (point["time"] - self._run.info.start_time) // 1000)

    def _open(self) -> None:
        import mlflow

        uri = resolve_uri(self._start)
        mlflow.set_tracking_uri(uri)
        with one_at_a_time(Path(self._start["output_root"])) if uri.startswith("sqlite") else nullcontext():
            self._client = mlflow.MlflowClient(uri)
            self._run = find_run(self._client, self._start, uri)
        run_id, asked_for = self._run.info.run_id, self._start["run_id"]
        if asked_for not in (None, run_id):
            self._say("new", f"MLflow at {self._uri} has no run {asked_for}; {run_id} is a new run")
        self._reply({"run": {"run_id": run_id, "experiment_id": self._run.info.experiment_id}})
        if self._start.get("parent") and PARENT_TAG not in self._client.get_run(run_id).data.tags:
            self._say(
                "orphan",
                f"MLflow at {self._uri} does not have the run of {self._start['run_dir']}; {run_id} stands alone",
            )
        if self._parent is not None and self._start.get("system_metrics", True) and switched_on():
            threading.Thread(target=self._sample_system, daemon=True).start()

    def _sample_system(self) -> None:
        """System metrics of this host; queued like other metrics, so that an outage costs no samples."""
        prefix = f"system/{node}/" if (node := os.environ.get(NODE_ID)) else "system/"
        try:
            for sample in samples(self._ending, lambda line: self._say("gpus", line)):
                values = {prefix + name: value for name, value in sample.items()}
                self._take({"metrics": values, "time": now_ms(), "system": True})
        except Exception as error:
            self._say("system", f"system metrics are no longer read ({reason(error)}); training goes on")

    @property
    def _uri(self) -> str:
        return without_password(resolve_uri(self._start))

    def _reply(self, reply: Record) -> None:
        if self._replies is not None:
            with suppress(OSError):  # the trainer is gone
                self._replies.write(json.dumps(reply) + "\n")

    def _say(self, topic: str, line: str) -> None:
        """Once for each topic; through the trainer while it lives, so that its progress line stays whole."""
        if topic not in self._said:
            self._said.add(topic)
            if self._parent is not None and os.getppid() == self._parent:
                self._reply({"say": line})
            else:
                with suppress(OSError):
                    print_to_stderr(line)


def main() -> None:
    """Serve the process whose id is the first argument, or send the records in standard input."""
    parent = int(sys.argv[1]) if len(sys.argv) > 1 else None
    logging.disable(logging.CRITICAL)
    worker = Worker(parent, None if parent is None else settle_side_process())
    threading.Thread(target=worker.read, daemon=True).start()
    worker.work()
    os._exit(0)  # without waiting for threads of MLflow's


if __name__ == "__main__":
    main()
