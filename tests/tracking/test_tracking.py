"""Tracking: what a run holds in MLflow, and that nothing that happens to the tracker happens to training."""

from __future__ import annotations

import contextlib
import getpass
import json
import math
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from ddpm_ds.processes.ranks import free_port
from ddpm_ds.tracking import tracker as module
from ddpm_ds.tracking.tracker import UNSENT_FILE, RunLink, flatten, keep_unsent
from ddpm_ds.tracking.worker import Worker
from tests.launching import PATIENCE_SECONDS, wait_for
from tests.tracking.stored import history, read_run, start


def unsent(root: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (root / "run" / UNSENT_FILE).read_text().splitlines()]


def send_unsent(root: Path) -> None:
    with (root / "run" / UNSENT_FILE).open() as file:
        Worker(file.fileno()).work()


def test_a_run_holds_params_tags_metrics_and_artifacts(root: Path) -> None:
    (root / "run" / "spec.yaml").write_text("name: digits\n")
    many = {f"derived.{i}": i for i in range(120)}
    tracker = start(
        root,
        params={"unet": {"channels": 32, "multipliers": (1, 2), "classes": None}, "long": "x" * 7000, **many},
        tags={"git.commit": "abc"},
        artifacts=[root / "run" / "spec.yaml"],
        dataset={"name": "digits-8px", "digest": "d" * 64, "source": "/data/digits"},
    )
    before_ms = time.time() * 1000
    for step in range(600):
        tracker.metrics({"train/loss": 1.0 / (step + 1), "train/total_grad_norm": float("nan")}, step)
    tracker.numbers({"perf/mfu": 0.25}, 600)
    tracker.system_metrics({"cpu": 50.0})
    tracker.system_metrics({"cpu": 25.0}, "b")
    after_ms = time.time() * 1000
    tracker.text("the verdict", "verdict.txt")
    journal = os.fstat(tracker._journal)
    wait_for(lambda: os.fstat(tracker._journal).st_blocks * 512 < journal.st_size / 2)  # what is sent takes no memory
    link = tracker.finish("FINISHED", PATIENCE_SECONDS)

    run = read_run(root)
    assert (run.info.status, run.info.run_id, run.info.run_name) == ("FINISHED", link.run_id, "name")
    assert run.data.params["unet.channels"] == "32" and run.data.params["unet.multipliers"] == "[1, 2]"
    assert run.data.params["derived.119"] == "119" and len(run.data.params["long"]) == 6000
    assert run.data.tags["git.commit"] == "abc" and run.data.tags["mlflow.user"] == getpass.getuser()
    assert run.data.tags["perf/mfu"] == "0.25" and "perf/mfu" not in run.data.metrics
    assert run.inputs is not None
    (images,) = (given.dataset for given in run.inputs.dataset_inputs)
    assert (images.name, images.digest) == ("digits-8px", "d" * 36) and "d" * 64 in images.source
    assert history(root, "train/loss") == [(step, 1.0 / (step + 1)) for step in range(600)]
    assert (run.data.metrics["system/cpu"], run.data.metrics["system/b/cpu"]) == (50.0, 25.0)
    client = MlflowClient(link.tracking_uri)
    times = [point.timestamp for point in client.get_metric_history(run.info.run_id, "train/loss")]
    assert before_ms - 1 <= min(times) and max(times) <= after_ms, "the time is that of the call, not of the sending"
    (seconds,) = [point.step for point in client.get_metric_history(run.info.run_id, "system/b/cpu")]
    assert 0 <= seconds <= PATIENCE_SECONDS, "the step is the seconds since the run began"
    assert [file.path for file in client.list_artifacts(run.info.run_id)] == ["spec.yaml", "verdict.txt"]
    assert run.info.artifact_uri.startswith((root / "mlartifacts").as_uri())
    assert link.command == f"mlflow ui --backend-store-uri sqlite:///{root}/mlflow.db"
    page = f"/#/experiments/{run.info.experiment_id}/runs/{link.run_id}?workflowType=machine_learning"
    assert link.url == f"http://127.0.0.1:5000{page}"
    assert {path.name for path in (root / "run").iterdir()} == {"spec.yaml"}


def test_going_on_with_a_run_appends_and_leaves_its_params_and_a_refused_record_is_set_aside(root: Path) -> None:
    said: list[str] = []
    first = start(root, params={"images": 100}, identity="i", artifacts=[root / "missing.txt"], log=said.append)
    first.metrics({"train/loss": 2.0}, 1)
    run_id = first.finish("KILLED", PATIENCE_SECONDS).run_id
    assert [next(iter(record)) for record in unsent(root)] == ["start", "artifact"]
    assert len(said) == 1 and "refused" in said[0] and "missing.txt" in said[0] and UNSENT_FILE in said[0]

    second = start(root, params={"images": 200}, tags={"resume_count": "1"}, identity="i", log=said.append)
    second.metrics({"train/loss": 1.0}, 2)
    wait_for(lambda: second.run_id)
    assert read_run(root).info.status == "RUNNING"
    assert second.finish("FINISHED", PATIENCE_SECONDS).run_id == run_id

    run = read_run(root)
    assert history(root, "train/loss") == [(1, 2.0), (2, 1.0)]
    assert (run.data.params["images"], run.data.tags["resume_count"]) == ("100", "1")
    assert run.info.status == "FINISHED" and len(said) == 1
    kept = unsent(root)
    send_unsent(root)
    assert unsent(root) == kept, "a record that is refused again stays, and is not added once more"
    (root / "missing.txt").touch()
    send_unsent(root)
    assert [found.path for found in MlflowClient().list_artifacts(read_run(root).info.run_id)] == ["missing.txt"]
    assert read_run(root).info.status == "FINISHED", "what is sent later ends no run anew"


def test_a_tracker_that_is_down_is_named_once_and_caught_up_with(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "place").touch()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{root}/place/mlflow.db")
    said: list[str] = []
    tracker = start(root, log=said.append)
    for step in range(50):
        tracker.metrics({"train/loss": float(step)}, step)
    wait_for(lambda: said)
    time.sleep(1.5)  # at least one more attempt
    assert len(said) == 1 and "File exists" in said[0] and f"{root}/place/mlflow.db" in said[0]

    (root / "new").symlink_to(root)
    (root / "new").replace(root / "place")
    wait_for(lambda: len(said) == 2)
    assert "answers again" in said[1]
    tracker.finish("FINISHED", PATIENCE_SECONDS)
    assert history(root, "train/loss") == [(step, float(step)) for step in range(50)]
    assert read_run(root).info.status == "FINISHED" and len(said) == 2 and not (root / "run" / UNSENT_FILE).exists()


def test_a_deleted_experiment_is_said_once_with_what_restores_it_and_training_goes_on(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{root}/mlflow.db?timeout=30&key=hush")
    client = MlflowClient(f"sqlite:///{root}/mlflow.db")
    client.delete_experiment(deleted := client.create_experiment("experiment", (root / "mlartifacts").as_uri()))
    said: list[str] = []
    tracker = start(root, log=said.append)
    tracker.metrics({"train/loss": 1.0}, 1)
    wait_for(lambda: said)
    time.sleep(1.5)  # at least one more attempt
    assert len(said) == 1 and "logging.experiment = experiment is deleted" in said[0]
    assert f"restore it: mlflow experiments restore --experiment-id {deleted}); training continues" in said[0]
    client.restore_experiment(deleted)
    link = tracker.finish("FINISHED", PATIENCE_SECONDS)
    assert history(root, "train/loss") == [(1, 1.0)] and "hush" not in f"{said} {link}"
    assert link.command == 'MLFLOW_BACKEND_STORE_URI="$MLFLOW_TRACKING_URI" mlflow ui'


def test_the_end_of_a_run_does_not_wait_for_a_tracker_that_is_down(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://user:secret@{address}/")
    monkeypatch.setattr(module, "COMPUTING_SECONDS", math.inf)
    said: list[str] = []
    tracker = start(root, log=said.append)
    wait_for(lambda: said)
    assert "Connection refused" in said[0] and address in said[0]
    link = tracker.finish("FINISHED", timeout_seconds=math.inf)  # or this never ends
    assert link == RunLink(None, f"http://{address}/", f"http://{address}", None)
    assert len(unsent(root)) == 2 and "could not be sent" in said[-1] and "secret" not in repr(said)


def test_a_tracker_that_hangs_holds_up_nothing_and_what_is_unsent_can_be_sent_later(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    said: list[str] = []
    tracker = start(root, params={"a": 1}, log=said.append)
    tracker._process.send_signal(signal.SIGSTOP)  # nobody reads the journal
    tracker.text("x" * 3_000_000, "longer_than_a_pipe_and_than_what_is_read_at_once.txt")
    for step in range(1000):
        tracker.metrics({"train/loss": float(step), "train/lr": 0.1}, step)
    link = tracker.finish("FINISHED", timeout_seconds=0.1)
    assert link.run_id is None and link.open_with == address
    assert len(unsent(root)) == 1 + 1 + 1000 + 1
    assert "1002 records could not be sent" in said[-1] and address in said[-1]

    command = said[-1].split("to send them: python ")[1].split(" < ")
    monkeypatch.delenv("MLFLOW_TRACKING_URI")  # the file does not hold the environment's tracker, nor its password
    with (root / "run" / UNSENT_FILE).open() as file:
        subprocess.run([sys.executable, *command[0].split()], stdin=file, check=True, timeout=PATIENCE_SECONDS)
    assert history(root, "train/loss") == [(step, float(step)) for step in range(1000)]
    assert read_run(root).info.status == "FINISHED" and read_run(root).data.params == {"a": "1"}
    piped = subprocess.run([sys.executable, *command[0].split()], input="", capture_output=True, text=True)
    assert piped.returncode == 2 and piped.stderr.count("\n") == 1 and UNSENT_FILE in piped.stderr
    monkeypatch.setenv("MLFLOW_TRACKING_URI", str(root))
    refused = subprocess.run([sys.executable, *command[0].split()], input="", capture_output=True, text=True)
    assert refused.returncode == 2 and refused.stderr.endswith(f"write sqlite:///{root}/mlflow.db\n")


TRAINER = """
import os, sys, time
from pathlib import Path
from ddpm_ds.tracking.tracker import Tracker

root = Path(sys.argv[1])
tracker = Tracker.start("experiment", "name", output_root=root, run_dir=root / "run", params={}, tags={})
for step in range(100):
    tracker.metrics({"train/loss": float(step)}, step)
loader = os.fork()  # holds every pipe open, as a loader process does
if loader:
    print(loader, flush=True)
    while not tracker.run_id:
        time.sleep(0.01)
    assert "mlflow" not in sys.modules
    print("started", flush=True)
time.sleep(1000)
"""


def test_a_trainer_that_dies_leaves_a_failed_run_with_everything_it_said(root: Path) -> None:
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(root)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert trainer.stdout is not None
    try:
        loader = int(trainer.stdout.readline())
        assert trainer.stdout.readline() == "started\n"
        os.kill(loader, signal.SIGSTOP)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # as launchers and terminals do
            os.killpg(trainer.pid, number)
        trainer.wait(PATIENCE_SECONDS)
        wait_for(lambda: read_run(root).info.status == "FAILED")
        assert history(root, "train/loss") == [(step, float(step)) for step in range(100)]
    finally:
        with contextlib.suppress(ProcessLookupError):  # all of them have left
            os.killpg(trainer.pid, signal.SIGKILL)
        trainer.stdout.close()


def test_after_the_trainer_the_worker_lives_no_longer_than_its_flush(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_port()}")
    options = {"id": "x", "time": 0, "experiment": "e", "run_name": "n", "params": {}, "tags": {}, "trackers": []}
    paths = {"output_root": str(root), "run_dir": str(root / "run")}
    lines = [json.dumps({"start": options | paths}), json.dumps({"metrics": {"a": 1.0}, "step": 1, "time": 1})]
    journal = root / "journal"
    journal.write_text("".join(line + "\n" for line in lines) + '{"metr')  # killed while it wrote
    nobody = str(os.getpid())  # not the parent of what runs in the shell's stead
    with journal.open() as file:
        program = "import ddpm_ds.tracking.worker as w; w.FLUSH_SECONDS = 0.5; w.main()"
        worker = subprocess.run(
            ["sh", "-c", '"$@"; exit $?', "sh", sys.executable, "-c", program, nobody, "0", str(len(lines[0]) + 1)],
            stdin=file,
            text=True,
            capture_output=True,
            timeout=PATIENCE_SECONDS,
        )
    assert worker.returncode == 1 and "2 records could not be sent" in worker.stderr
    assert [next(iter(record)) for record in unsent(root)] == ["start", "metrics", "finish"]
    assert unsent(root)[-1]["finish"] == "FAILED"


def test_a_worker_that_dies_is_replaced_once_and_training_goes_on(root: Path) -> None:
    said: list[str] = []
    tracker = start(root, params={"a": 1}, log=said.append)
    for step in range(300):
        if step in (100, 200):
            wait_for(lambda: tracker.run_id)
            tracker._process.kill()
            tracker._process.wait()
        if step == 101:
            wait_for(lambda: said)
        tracker.metrics({"train/loss": float(step)}, step)
        if step == 150:
            wait_for(lambda: tracker._sent == os.fstat(tracker._journal).st_size)
    link = tracker.finish("FINISHED", PATIENCE_SECONDS)

    assert link.run_id == read_run(root).info.run_id, "the second worker goes on with the run of the first"
    sent = history(root, "train/loss")
    left = [record["step"] for record in unsent(root) if "metrics" in record]
    assert [step for step, _ in sent][:151] == list(range(151)) and len(sent) == len({step for step, _ in sent})
    assert {step for step, _ in sent} | set(left) == set(range(300)), "sent or in the file, never lost"
    assert len(said) == 2 and "died" in said[0] and UNSENT_FILE in said[1]


def test_params_are_flat_text() -> None:
    nested = {"a": {"b": {"c": 1e-4}, "empty": {}}, "list": [1, {"x": True}], "path": Path("p"), "text": "as it is"}
    flat = {"a.b.c": "0.0001", "a.empty": "{}", "list": '[1, {"x": true}]', "path": '"p"', "text": "as it is"}
    assert flatten(nested) == flat


def test_a_full_or_missing_run_folder_is_said_in_one_line(tmp_path: Path) -> None:
    options = {"run_dir": str(tmp_path / "gone"), "output_root": str(tmp_path)}
    line = keep_unsent(options, [{"finish": "FAILED", "time": 1}])
    assert "1 record could not be sent" in line and "No such file" in line and "\n" not in line


@pytest.mark.long
def test_two_runs_make_one_store_whole_although_a_killed_worker_has_left_half_of_one(root: Path) -> None:
    database = root / "mlflow.db"
    database.rename(root / ".mlflow.db.new").write_bytes(b"half")
    said: list[str] = []
    trackers = [start(root, log=said.append) for _ in range(2)]
    wait_for(database.exists)
    with contextlib.closing(sqlite3.connect(database)) as opened:
        opened.execute("select count(*) from runs")  # nobody sees a database without its tables
    ids = {tracker.finish("FINISHED", PATIENCE_SECONDS).run_id for tracker in trackers}
    assert said == [] and len(ids) == 2 and None not in ids
    assert len(MlflowClient(f"sqlite:///{database}").search_experiments()) == 2, "theirs and MLflow's own"
    assert sorted(path.name for path in root.glob("*mlflow.db*")) == ["mlflow.db"]
