"""Process that runs MLflow: reads records from a journal and sends them, in order, until they are accepted.

Rank 0's :class:`~ddpm_ds.tracking.tracker.Tracker`, which documents the records, starts it with three numbers: the
trainer's process id, the journal's file descriptor, and the bytes of the journal that were sent before. When the
trainer dies, the run ends as FAILED after everything that was recorded, and this process ends soon after.

Without arguments it sends the records that a run could not send:

python -m ddpm_ds.tracking.worker < RUN_DIR/mlflow_unsent.jsonl
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from itertools import chain, takewhile
from pathlib import Path
from typing import IO, TYPE_CHECKING

from PIL import Image  # at the top, since two threads that import it at once may see it half-imported

from ddpm_ds.errors import SpecError
from ddpm_ds.files import open_regular
from ddpm_ds.secret import public_address
from ddpm_ds.tracking.mirrors import KINDS, TensorBoard, WeightsAndBiases
from ddpm_ds.tracking.tracker import (
    DATABASES,
    SQLITE,
    UNSENT_FILE,
    Record,
    check_tracking_uri,
    deleted_experiment,
    keep_unsent,
    now_ms,
    print_to_stderr,
    reason,
    resolve_uri,
    sqlite_file,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import DatasetInput, Run

POLL_SECONDS = 0.1
CHUNK_BYTES = 1 << 20
LAST_BYTES = 100  # at the end of a journal, which hold the whole record of the run's end
FLUSH_SECONDS = 20.0  # after the trainer died; DeepSpeed's launcher kills what is left of a rank after 30
LONGEST_PAUSE_SECONDS = 30.0
RECORDS_PER_REQUEST = 1000
START_TAG = "ddpm_ds.start"  # finds the run again when the answer to its creation was lost
PARENT_TAG = "mlflow.parentRunId"  # by which MLflow shows a run under another one
EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development"}  # by which MLflow's UI chooses its mode
DIGEST_CHARACTERS = 36  # MLflow's limit for the digest of a data set
REFUSALS = ("BAD_REQUEST", "INVALID_PARAMETER_VALUE", "INVALID_STATE", "RESOURCE_DOES_NOT_EXIST")


class Journal:
    """Records in the file of this descriptor, which process ``trainer`` writes; None if the file is complete."""

    def __init__(self, file: int, trainer: int | None) -> None:
        self._file, self._trainer = file, trainer

    @property
    def alone(self) -> bool:
        """Whether nobody writes it any more."""
        return self._trainer is None or os.getppid() != self._trainer

    @property
    def ended(self) -> bool:
        """Whether no record will be added."""
        size = os.fstat(self._file).st_size
        return self.alone or b'{"finish"' in os.pread(self._file, LAST_BYTES, max(0, size - LAST_BYTES))

    def read(self, start: int) -> list[tuple[Record, int]]:
        """Return the next records from byte ``start`` on, each with the byte where it ends.

        If the trainer died, its last record is followed by one that ends the run as FAILED.
        """
        died = self._trainer is not None and self.alone  # asked first: what it wrote before is read
        content = b""
        while b"\n" not in content and (chunk := os.pread(self._file, CHUNK_BYTES, start + len(content))):
            content += chunk
        found = []
        for line in content.split(b"\n")[:-1]:
            start += len(line) + 1
            found.append((json.loads(line), start))
        return found or ([({"finish": "FAILED", "time": now_ms()}, start)] if died else [])

    def follow(self, start: int) -> Iterator[Record]:
        """Yield records from byte ``start`` on as they come, until the run's end."""
        while True:
            for record, end in self.read(start):
                yield record
                if "finish" in record:
                    return
                start = end
            time.sleep(POLL_SECONDS)


class Worker:
    """Sender of the records in the journal with this file descriptor.

    MLflow has those of its first ``sent`` bytes; the start, which comes first, is needed all the same. ``trainer`` is
    the id of the process that writes the journal, if it still runs, and hears the ``replies``.
    """

    def __init__(self, journal: int, sent: int = 0, trainer: int | None = None, replies: IO[str] | None = None) -> None:
        self._journal, self._sent, self._trainer, self._replies = Journal(journal, trainer), sent, trainer, replies
        self._start: Record = {}
        self._said: set[str] = set()
        self._down = self._ended = False
        self._client: MlflowClient
        self._run: Run

    def work(self) -> None:
        """Send every record; returns when there are no more to come."""
        mirrors = []
        if self._trainer is not None:
            start, _ = self._journal.read(0)[0]
            self._start = start["start"]
            for name in self._start["trackers"]:
                mirrors.append(threading.Thread(target=self._mirror, args=(name, self._sent), daemon=True))
                mirrors[-1].start()
            threading.Thread(target=self._survive_trainer, daemon=True).start()
            self._deliver([start])
        while not self._ended:
            found = self._journal.read(self._sent)
            if not found:
                self._ended = self._trainer is None
                time.sleep(POLL_SECONDS)
                continue
            batch = list(takewhile(lambda one: "metrics" in one[0], found[:RECORDS_PER_REQUEST])) or found[:1]
            self._deliver([record for record, _ in batch])
            last, self._sent = batch[-1]
            self._ended = self._trainer is not None and "finish" in last
            self._reply({"sent": self._sent})
            if self._down and len(batch) == len(found):
                self._down = False
                self._log("up", f"MLflow at {self._uri} answers again; everything has been sent")
        for mirror in mirrors:
            mirror.join()

    def _mirror(self, name: str, sent: int) -> None:
        """Feed a tracker besides MLflow with the start, and with each record after byte ``sent`` when it is written."""
        mirror: TensorBoard | WeightsAndBiases | None = None
        for record in chain([{"start": self._start}], self._journal.follow(sent)):
            try:
                if "start" in record:
                    mirror = KINDS[name](record["start"])
                elif mirror is not None and "finish" in record:
                    mirror.close(record["finish"])
                elif mirror is not None:
                    mirror.send(record)
            except Exception as error:  # whatever it is, training and MLflow must not see it
                self._log(name, f"{name} fails ({reason(error)}); training continues, and MLflow has everything")

    def _survive_trainer(self) -> None:
        """Limit the time that this process outlives the trainer; remaining records are then kept in the run folder."""
        while not self._journal.alone:
            time.sleep(1.0)
        time.sleep(FLUSH_SECONDS)
        if not self._ended:
            self._log("unsent", keep_unsent(self._start, self._journal.follow(self._sent)))
        os._exit(1)

    def _deliver(self, batch: list[Record]) -> None:
        """Retry until MLflow accepts the records, or refuses them for good.

        Refused records of a run are kept in its folder; those of a file that is sent later stay in that file.
        """
        pause = 1.0
        while True:
            try:
                return self._send(batch)
            except Exception as error:  # whatever it is, the trainer must not see it
                refused = isinstance(error, FileNotFoundError) or getattr(error, "error_code", "") in REFUSALS
                if refused and "start" not in batch[0]:
                    kept = "it stays in the file" if self._trainer is None else keep_unsent(self._start, batch)
                    return self._log("refused", f"MLflow refused a record ({reason(error)}): {kept}")
                self._down = True
                self._reply({"down": True})
                training = "" if self._trainer is None else "training continues, "
                self._log("down", f"MLflow at {self._uri} fails ({reason(error)}); {training}it is tried again")
            until = time.monotonic() + pause
            while time.monotonic() < until and not self._journal.ended:
                time.sleep(POLL_SECONDS)
            if self._journal.ended:  # the time left is bounded now, so waste none of it
                time.sleep(1.0)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def _send(self, batch: list[Record]) -> None:
        if "start" in batch[0]:
            self._start = batch[0]["start"]
            return self._open()
        from mlflow.entities import Metric, RunTag

        client, run = self._client, self._run.info.run_id
        match batch[0]:
            case {"metrics": _}:
                points = [(point, item) for point in batch for item in point["metrics"].items()]
                metrics = [Metric(name, value, point["time"], self._step(point)) for point, (name, value) in points]
                client.log_batch(run, metrics=metrics, synchronous=True)
            case {"artifact": path, "folder": folder}:
                client.log_artifact(run, path, folder or None)
            case {"image": path, "key": key, "step": step, "time": at}:
                with Image.open(path) as image:
                    client.log_image(run, image, key=key, step=step, timestamp=at, synchronous=True)
            case {"text": text, "name": name}:
                client.log_text(run, text, name)
            case {"tags": tags} | {"numbers": tags}:
                tags = {name: f"{value:.6g}" if isinstance(value, float) else value for name, value in tags.items()}
                client.log_batch(run, tags=[RunTag(*tag) for tag in tags.items()], synchronous=True)
            case {"register": name, "folder": folder}:
                self._register(name, folder)
            case {"finish": status, "time": at}:
                client.set_terminated(run, status, at)

    def _step(self, point: Record) -> int:
        """Return the record's step; else the seconds since the run began, which continue to rise when it is resumed."""
        return int(point["step"] if "step" in point else (point["time"] - self._run.info.start_time) // 1000)

    def _open(self) -> None:
        """Find or make the run of the start record. Safe to repeat."""
        import mlflow
        from mlflow.entities import Param, RunTag

        start, uri = self._start, resolve_uri(self._start["output_root"])
        mlflow.set_tracking_uri(uri)
        file = sqlite_file(uri)
        folder = Path(start["output_root"]) if file is None else file.parent
        with _one_at_a_time(folder) if uri.startswith("sqlite") else nullcontext():
            if file is not None:
                _make_database(file)
            self._client = client = mlflow.MlflowClient(uri)
            if experiment := client.get_experiment_by_name(start["experiment"]):
                experiment_id = experiment.experiment_id
                if experiment.lifecycle_stage == "deleted":
                    raise SpecError(deleted_experiment(experiment.name, experiment_id, uri))
            else:
                # A server knows where artifacts go; a bare database would have them in the working folder.
                bare = uri.split(":")[0].split("+")[0] in DATABASES
                location = (Path(start["output_root"]) / "mlartifacts").as_uri() if bare else None
                experiment_id = client.create_experiment(start["experiment"], location, EXPERIMENT_TAGS)
            if found := self._find(experiment_id, start["id"]):
                if self._trainer is not None:
                    client.update_run(found.info.run_id, status="RUNNING")
            else:
                tags = {START_TAG: start["id"]}
                found = client.create_run(experiment_id, start["time"], tags, start["run_name"])
            self._run, run_id = found, found.info.run_id
            new = {} if found.data.params else start["params"]
            parent = self._find(experiment_id, start["parent"]) if start.get("parent") else None
            tags = start["tags"] | ({PARENT_TAG: parent.info.run_id} if parent else {})
            params, run_tags = [Param(*param) for param in new.items()], [RunTag(*tag) for tag in tags.items()]
            client.log_batch(run_id, params=params, tags=run_tags, synchronous=True)
            if start.get("dataset"):
                client.log_inputs(run_id, [_dataset_input(**start["dataset"])])
        self._reply({"run": {"run_id": run_id, "experiment_id": experiment_id}})
        if start.get("parent") and parent is None and PARENT_TAG not in found.data.tags:
            self._log(
                "orphan", f"MLflow at {self._uri} does not have the run of {start['run_dir']}; {run_id} stands alone"
            )

    def _find(self, experiment_id: str, identity: str) -> Run | None:
        found = self._client.search_runs([experiment_id], f"tags.`{START_TAG}` = '{identity}'", max_results=1)
        return found[0] if found else None

    def _register(self, name: str, folder: str) -> None:
        """Make a folder of the run's artifacts a new version of a model. Safe to repeat."""
        from mlflow.exceptions import MlflowException

        client, run_id = self._client, self._run.info.run_id
        source = f"{client.get_run(run_id).info.artifact_uri}/{folder}".rstrip("/")
        try:
            client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        known = client.search_model_versions(f"run_id = '{run_id}'")
        same = [version for version in known if (version.name, version.source) == (name, source)]
        version = same[0] if same else client.create_model_version(name, source, run_id, await_creation_for=0)
        line = f"MLflow has version {version.version} of the model {name}: models:/{name}/{version.version}"
        self._log(f"registered {name}", line)

    @property
    def _uri(self) -> str:
        return public_address(resolve_uri(self._start["output_root"]))

    def _reply(self, reply: Record) -> None:
        if self._replies is not None:
            with suppress(OSError):  # the trainer is gone
                self._replies.write(json.dumps(reply) + "\n")

    def _log(self, topic: str, line: str) -> None:
        """Show a line, once for each topic; through the trainer while it lives, so its progress line stays whole."""
        if topic not in self._said:
            self._said.add(topic)
            if self._trainer is not None and os.getppid() == self._trainer:
                self._reply({"log": line})
            else:
                with suppress(OSError):
                    print_to_stderr(line)


def _dataset_input(name: str, digest: str, source: str) -> DatasetInput:
    """Return a run's training images for MLflow, which shows the whole digest beside their location."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    where = json.dumps({"uri": source, "sha256": digest})
    dataset = Dataset(name, digest[:DIGEST_CHARACTERS], "local", where)
    return DatasetInput(dataset, [InputTag("mlflow.data.context", "training")])


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Lock out other workers of the same folder, since two that create one database at once corrupt it."""
    folder.mkdir(parents=True, exist_ok=True)
    with open_regular(folder / ".mlflow.lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _make_database(path: Path) -> None:
    """Make a missing database under a temporary name first, so that a killed process leaves no incomplete one."""
    import mlflow

    if not path.exists():
        new = path.with_name(f".{path.name}.new")
        new.unlink(missing_ok=True)
        mlflow.MlflowClient(f"{SQLITE}{new}").search_experiments(max_results=1)
        new.replace(path)


def main() -> None:
    """Serve the trainer that the arguments name, or send the records in standard input."""
    logging.disable(logging.CRITICAL)
    if len(sys.argv) > 1:
        # Launchers and terminals signal the whole process group; this process ends when the trainer has.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)
        os.nice(5)
        replies = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # MLflow may print
        trainer, journal, sent = map(int, sys.argv[1:])
        Worker(journal, sent, trainer, replies).work()
    else:
        try:
            check_tracking_uri(Path())
            Worker(0).work()
        except SpecError as error:
            print_to_stderr(str(error))
            os._exit(error.exit_code)
        except (OSError, ValueError) as error:  # a pipe, or a damaged file
            print_to_stderr(f"standard input can't be read ({error}); redirect it from RUN_DIR/{UNSENT_FILE}")
            os._exit(2)
        except KeyboardInterrupt:
            os._exit(128 + signal.SIGINT)
    os._exit(0)  # without waiting for threads of MLflow's


if __name__ == "__main__":
    main()
