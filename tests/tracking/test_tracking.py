"""Tracking: what a run holds in MLflow, and that nothing that happens to the tracker happens to training."""

import contextlib
import errno
import getpass
import math
import os
import signal
import sqlite3
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, Mock

import numpy as np
import pytest
from mlflow import MlflowClient
from PIL import Image

from ddpm_ds.cli.main import main
from ddpm_ds.processes.ranks import free_port
from ddpm_ds.schema.section import flatten
from ddpm_ds.tracking import tracker as module
from ddpm_ds.tracking.address import uri_fault
from ddpm_ds.tracking.run_folder import (
    EVENTS,
    LOCK,
    NOTE_TAG,
    PARENT_TAG,
    RESULT,
    RULE,
    START_TAG,
    lock,
    note_of,
    records,
)
from ddpm_ds.tracking.sender import Sender
from ddpm_ds.tracking.tracker import RunStart, Tracker
from tests.launching import PATIENCE_SECONDS, wait_for
from tests.tracking.stored import everything, full_disk, history, read_run, start

pytestmark = pytest.mark.launch


def written(root: Path) -> list[dict[str, Any]]:
    """The events of the run in ``root``."""
    return [record for record, _ in records(root / "run" / EVENTS)]


def start_in_mlflow(root: Path, **changes: Any) -> Tracker:
    """A run that MLflow has already."""
    tracker = start(root, **changes)
    wait_for(lambda: tracker.run_id)
    return tracker


def send(root: Path) -> int:
    return main(["send", str(root / "run")])


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
    after_ms = time.time() * 1000
    tracker.text("the verdict", "verdict.txt")
    link = tracker.finish("FINISHED", PATIENCE_SECONDS)

    run = read_run(root)
    assert (run.info.status, run.info.run_id, run.info.run_name) == ("FINISHED", link.run_id, "name")
    assert run.data.params["unet.channels"] == "32" and run.data.params["unet.multipliers"] == "[1, 2]"
    assert run.data.params["derived.119"] == "119" and len(run.data.params["long"]) == 6000
    assert run.data.tags["git.commit"] == "abc" and run.data.tags["mlflow.user"] == getpass.getuser()
    assert run.inputs is not None
    (images,) = (given.dataset for given in run.inputs.dataset_inputs)
    assert (images.name, images.digest) == ("digits-8px", "d" * 36) and "d" * 64 in images.source
    assert history(root, "train/loss") == [(step, 1.0 / (step + 1)) for step in range(600)]
    client = MlflowClient(link.tracking_uri)
    times = [point.timestamp for point in client.get_metric_history(run.info.run_id, "train/loss")]
    assert before_ms - 1 <= min(times) and max(times) <= after_ms, "the time is that of the call, not of the sending"
    assert [file.path for file in client.list_artifacts(run.info.run_id)] == ["spec.yaml", "verdict.txt"]
    assert run.info.artifact_uri.startswith((root / "mlartifacts").as_uri())
    assert link.command == f"mlflow ui --backend-store-uri sqlite:///{root}/mlflow.db"
    page = f"/#/experiments/{run.info.experiment_id}/runs/{link.run_id}?workflowType=machine_learning"
    assert link.url == f"http://127.0.0.1:5000{page}"
    assert {path.name for path in (root / "run").iterdir()} == {"spec.yaml", EVENTS, "events.sent.json"}


def test_going_on_with_a_run_appends_and_leaves_its_params_and_a_refused_record_is_left_out(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []
    first = start(root, params={"images": 100}, identity="i", artifacts=[root / "missing.txt"], log=said.append)
    first.metrics({"train/loss": 2.0}, 1)
    run_id = first.finish("KILLED", PATIENCE_SECONDS).run_id
    assert len(said) == 1 and "refused" in said[0] and "missing.txt" in said[0]
    assert said[0].endswith("and does not have it")

    second = start(root, params={"images": 200}, tags={"resume_count": "1"}, identity="i", log=said.append)
    second.metrics({"train/loss": 1.0}, 2)
    wait_for(lambda: second.run_id)
    assert read_run(root).info.status == "RUNNING"
    assert second.finish("FINISHED", PATIENCE_SECONDS).run_id == run_id

    run = read_run(root)
    assert history(root, "train/loss") == [(1, 2.0), (2, 1.0)]
    assert (run.data.params["images"], run.data.tags["resume_count"]) == ("100", "1")
    assert run.info.status == "FINISHED" and len(said) == 1
    before = everything(root)
    (root / "run" / "events.sent.json").unlink()
    assert send(root) == 1 and "refused a record" in capsys.readouterr().out and everything(root) == before
    (root / "missing.txt").touch()
    (root / "run" / "events.sent.json").unlink()
    assert send(root) == 0
    assert [found.path for found in MlflowClient().list_artifacts(read_run(root).info.run_id)] == ["missing.txt"]


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
    assert read_run(root).info.status == "FINISHED" and len(said) == 2


def test_a_deleted_experiment_gets_one_line_and_its_run_once_it_is_restored(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{root}/mlflow.db?timeout=30&key=hush")
    client = MlflowClient(f"sqlite:///{root}/mlflow.db")
    client.delete_experiment(deleted := client.create_experiment("experiment", (root / "mlartifacts").as_uri()))
    said: list[str] = []
    tracker = start(root, log=said.append, sender=module.start_child())  # as if it was started ahead
    tracker.metrics({"train/loss": 1.0}, 1)
    wait_for(lambda: said)
    assert len(said) == 1 and f"experiment {deleted}" in said[0].lower() and "training continues" in said[0]
    client.restore_experiment(deleted)
    link = tracker.finish("FINISHED", PATIENCE_SECONDS)
    assert history(root, "train/loss") == [(1, 1.0)] and "hush" not in f"{said} {link}"
    assert link.command == 'MLFLOW_BACKEND_STORE_URI="$MLFLOW_TRACKING_URI" mlflow ui'


def test_a_tracker_that_hangs_holds_up_nothing_and_unsent_records_can_be_sent_later(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    address = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    said: list[str] = []
    tracker = start(root, params={"a": 1}, log=said.append)
    os.kill(tracker._process.pid, signal.SIGSTOP)  # nobody reads the events
    tracker.text("x" * 3_000_000, "longer_than_a_pipe_and_than_what_is_read_at_once.txt")
    for step in range(1000):
        tracker.metrics({"train/loss": float(step), "train/lr": 0.1}, step)
    link = tracker.finish("FINISHED", timeout_seconds=0.1)
    assert link.run_id is None and link.url == address and link.command is None
    assert said == [f"not sent: 1,003 records to MLflow at {address}; to send them: ddpm-ds send {root}/run"]

    assert send(root) == 1 and f"MLflow at {address} fails" in capsys.readouterr().out
    monkeypatch.setenv("MLFLOW_TRACKING_URI", str(root))
    assert send(root) == 2 and capsys.readouterr().err.endswith(f"write sqlite:///{root}/mlflow.db\n")
    assert main(["send", str(root)]) == 2 and "holds no events.jsonl; name the folder" in capsys.readouterr().err
    monkeypatch.delenv("MLFLOW_TRACKING_URI")  # the file does not hold the environment's tracker, nor its password
    assert send(root) == 0 and "1,003 records sent to MLflow" in capsys.readouterr().out
    assert history(root, "train/loss") == [(step, float(step)) for step in range(1000)]
    assert read_run(root).info.status == "FINISHED" and read_run(root).data.params == {"a": "1"}
    assert send(root) == 0 and "0 records sent" in capsys.readouterr().out


def test_sending_everything_again_changes_nothing(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = root / "run" / "picture.png"
    Image.fromarray(np.full((16, 16), 200, np.uint8)).save(picture)
    for images in (100, 200):
        tracker = start(
            root,
            params={"images": images},
            tags={"images": str(images), NOTE_TAG: "why"},
            artifacts=[picture],
            dataset={"name": "digits-8px", "digest": "d" * 64, "source": "/data/digits"},
            identity="i",
        )
        for number, step in enumerate((1, 2, 3, 2)):  # a rollback
            tracker.metrics({"train/loss": float(images + number), "train/total_grad_norm": math.nan}, step)
            tracker.image(picture, "eval/samples_ema", number)
        tracker.text("went back", "rollbacks/1.txt")
        tracker.metrics({"train/rollbacks": 1.0}, 2)
        tracker.finish("KILLED" if images == 100 else "FINISHED", PATIENCE_SECONDS)
    client = MlflowClient(f"sqlite:///{root}/mlflow.db")
    client.set_tag(read_run(root).info.run_id, NOTE_TAG, "why, and what was learned")
    before = everything(root)
    assert len(before["points"]["train/loss"]) == 8 and len(before["files"]) == 18
    assert before["params"] == {"images": "100"} and before["tags"]["images"] == "200"

    (root / "run" / "events.sent.json").unlink()
    assert send(root) == 0 and f"{len(written(root))} records sent" in capsys.readouterr().out
    assert everything(root) == before


def test_a_description_has_the_newest_result_above_a_note_that_was_edited(root: Path) -> None:
    client = MlflowClient(f"sqlite:///{root}/mlflow.db")
    for loss, before in (("0.2", "why"), ("0.1", f"{RESULT} 0.2{RULE}why and how")):
        tracker = start_in_mlflow(root, tags={NOTE_TAG: "why"}, identity="i")
        run_id = str(tracker.run_id)
        assert client.get_run(run_id).data.tags[NOTE_TAG] == before
        tracker.tags({NOTE_TAG: f"{RESULT} {loss}{RULE}"})
        tracker.finish("FINISHED", PATIENCE_SECONDS)
        described = client.get_run(run_id).data.tags[NOTE_TAG]
        assert described == f"{RESULT} {loss}{RULE}{before.removeprefix(f'{RESULT} 0.2{RULE}')}"
        client.set_tag(run_id, NOTE_TAG, f"{described} and how")
    assert (
        note_of("no --- result") == "no --- result"
        and note_of(f"{RESULT} without a rule") == f"{RESULT} without a rule"
    )


@pytest.mark.parametrize(("folder", "name"), [("digits", "digits 2026-01-02"), ("20251231-235959-digits", None)])
def test_the_name_of_a_run_has_its_date(folder: str, name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "date", Mock(today=lambda: date(2026, 1, 2)))
    assert RunStart("", Path("runs", folder), {}, {}).record()["run_name"] == (name or folder)


@pytest.mark.parametrize("by", ["the next start", "the verb"])
def test_what_a_dead_child_has_not_sent_is_sent_later(root: Path, by: str) -> None:
    said: list[str] = []
    tracker = start(root, identity="i", log=said.append)
    for step in range(300):
        if step == 200:
            wait_for(lambda: tracker.run_id)
            tracker._process.kill()
            wait_for(lambda: said)
        tracker.metrics({"train/loss": float(step)}, step)
    link = tracker.finish("KILLED", PATIENCE_SECONDS)
    assert len(said) == 2 and "died (exit code -9); training continues" in said[0] and said[1].startswith("not sent: ")
    assert all(line.endswith(f"to send them: ddpm-ds send {root}/run") for line in said)
    if by == "the verb":
        assert send(root) == 0 and read_run(root).info.status == "KILLED"
    else:
        assert start(root, identity="i").finish("FINISHED", PATIENCE_SECONDS).run_id == link.run_id
        assert read_run(root).info.status == "FINISHED"
    assert history(root, "train/loss") == [(step, float(step)) for step in range(300)]


def test_two_senders_never_send_together(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with lock(root / "run" / EVENTS) or pytest.fail("nobody else has it"):
        tracker = start(root)
        tracker.metrics({"train/loss": 1.0}, 1)
        assert send(root) == 1 and "another process sends it" in capsys.readouterr().out
        time.sleep(1)  # in which the child would have begun
        assert tracker.run_id is None and not (root / "run" / "events.sent.json").exists()
    wait_for(lambda: tracker.run_id)
    assert lock(root / "run" / EVENTS) is None, "the child has it now"
    tracker.finish("FINISHED", PATIENCE_SECONDS)
    assert history(root, "train/loss") == [(1, 1.0)]


def test_a_full_disk_gets_one_line_and_events_go_on_when_there_is_room(root: Path) -> None:
    said: list[str] = []
    tracker, file = start(root, log=said.append), root / "run" / EVENTS
    for step in range(4):
        with full_disk(file.stat().st_size + 10) if step in (1, 2) else contextlib.nullcontext():
            tracker.metrics({"train/loss": float(step)}, step)
    tracker.finish("FINISHED", PATIENCE_SECONDS)
    assert history(root, "train/loss") == [(0, 0.0), (3, 3.0)] and read_run(root).info.status == "FINISHED"
    why = f"{os.strerror(errno.ENOSPC)}); training continues, and MLflow misses what happens until it can"
    assert said == [f"{file} can't be written ({why}"]


@pytest.mark.parametrize("kind", [None, "evaluate"])
def test_a_start_that_a_full_disk_refused_comes_before_the_next_event(
    root: Path, kind: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of a child run is removed when all is sent."""
    full, append = OSError(errno.ENOSPC, "full"), module.append_event
    monkeypatch.setattr(module, "append_event", Mock(side_effect=[full, full, *[DEFAULT] * 4], wraps=append))
    tracker = start(root, tags={} if kind is None else {"kind": kind}, artifacts=[root / "mlflow.db"])
    tracker.metrics({"train/loss": 1.0}, 1)
    tracker.finish("FINISHED", PATIENCE_SECONDS)
    assert history(root, "train/loss") == [(1, 1.0)] and read_run(root).info.status == "FINISHED"
    assert {path.name for path in (root / "run").iterdir()} == ({EVENTS, "events.sent.json"} if kind is None else set())


def test_a_run_that_was_killed_is_so_in_mlflow_when_its_folder_is_taken_again(root: Path) -> None:
    """The second run is another one, as after a start that saved nothing; ``send`` does the same for the last one."""
    for identity, killed in (("one", True), ("two", False), ("three", True)):
        tracker = start_in_mlflow(root, identity=identity)
        if killed:
            tracker._process.kill()
            tracker._process.wait()
        else:
            tracker.finish("FINISHED", PATIENCE_SECONDS)
    (root / "run" / LOCK).touch()
    assert send(root) == 0
    client = MlflowClient(f"sqlite:///{root}/mlflow.db")
    (experiment,) = (one for one in client.search_experiments() if one.name == "experiment")
    ends = {run.data.tags[START_TAG]: run.info.status for run in client.search_runs([experiment.experiment_id])}
    assert ends == {"one": "KILLED", "two": "FINISHED", "three": "KILLED"}


def test_a_child_finds_its_parent_when_it_begins_or_however_late_that_comes(root: Path) -> None:
    said, client = list[str](), MlflowClient(f"sqlite:///{root}/mlflow.db")
    for name in ("sweep", "second"):
        (root / name).mkdir()
    first = start_in_mlflow(root, identity="first", parent="parent", log=said.append)
    parent = start_in_mlflow(root, identity="parent", run_dir=root / "sweep")
    second = start_in_mlflow(root, identity="second", parent="parent", run_dir=root / "second", log=said.append)
    assert client.get_run(str(second.run_id)).data.tags[PARENT_TAG] == parent.run_id
    for tracker in (first, second, parent):
        tracker.finish("FINISHED", PATIENCE_SECONDS)
    assert client.get_run(str(first.run_id)).data.tags[PARENT_TAG] == parent.run_id and said == []


SERVER = "http://tracker:5000"


@pytest.mark.parametrize(
    ("uri", "files", "kept"),
    [
        (SERVER, "file:///nowhere/mlruns/1/id/artifacts", False),
        (SERVER, "{root}/1/id/artifacts", True),  # a folder that both hosts have
        (SERVER, "mlflow-artifacts:/1/id/artifacts", True),
        ("sqlite:///x/mlflow.db", "file:///nowhere/1/id/artifacts", True),
    ],
)
def test_files_of_a_server_that_keeps_them_in_its_own_folder_are_refused(
    uri: str, files: str, kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    sender = Sender(tmp_path / EVENTS, {"start": {"output_root": str(tmp_path)}}, Mock(), Mock())
    sender._client = Mock()
    sender._run = Mock(info=Mock(artifact_uri=files.replace("{root}", str(tmp_path))))
    message = r"in /nowhere/mlruns/1, a folder that is not on this host; start"
    for record in ({"artifact": "x", "folder": ""}, {"text": "x", "name": "x"}):
        with contextlib.nullcontext() if kept else pytest.raises(FileNotFoundError, match=message):
            sender._send([record])
    assert len(sender._client.method_calls) == 2 * kept


@pytest.mark.parametrize(
    "address", ["localhost:5000", "127.0.0.1:5000", "tracker.example.org:5000/ml", "me:hush@tracker:80", "[::1]:5000"]
)
def test_an_address_without_a_scheme_is_refused_with_what_to_write(address: str) -> None:
    said = str(uri_fault(address))
    assert "has no scheme; write http://" in said and "hush" not in said
    assert uri_fault(said.rpartition("write ")[2]) is None


TRAINER = """
import os, sys, time
from pathlib import Path
from ddpm_ds.tracking.tracker import RunStart, Tracker

root = Path(sys.argv[1])
tracker = Tracker(RunStart("experiment", root / "run", params={}, tags={}))
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


def test_a_trainer_that_dies_leaves_a_failed_run_with_all_its_records(root: Path) -> None:
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


def test_after_the_trainer_the_child_lives_no_longer_than_its_flush_and_leaves_the_rest_in_the_file(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_port()}")
    tracker = start(root)
    os.kill(tracker._process.pid, signal.SIGSTOP)
    tracker.metrics({"a": 1.0}, 1)
    tracker._closed = True
    tracker._process.kill()
    with (root / "run" / EVENTS).open("a") as file:
        file.write('{"metr')  # killed while it wrote
    program = "import ddpm_ds.tracking.sender as s; s.FLUSH_SECONDS = 0.5; s.main()"
    nobody = str(os.getpid())  # not the parent of what runs in the shell's stead
    words = ["sh", "-c", '"$@"; exit $?', "sh", sys.executable, "-c", program, nobody]
    child = subprocess.run(
        words, input=f"{root / 'run' / EVENTS}\n", text=True, capture_output=True, timeout=PATIENCE_SECONDS
    )
    assert child.returncode == 1 and "not sent: 4 records to MLflow" in child.stderr
    assert [next(iter(record), None) for record in written(root)] == ["start", "metrics", None, "finish"]
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert send(root) == 0 and history(root, "a") == [(1, 1.0)] and read_run(root).info.status == "FAILED"


def test_params_are_flat_text() -> None:
    nested = {"a": {"b": {"c": 1e-4}, "empty": {}}, "list": [1, {"x": True}], "path": Path("p"), "text": "as it is"}
    flat = {"a.b.c": "0.0001", "a.empty": "{}", "list": '[1, {"x": true}]', "path": '"p"', "text": "as it is"}
    assert flatten(nested) == flat


@pytest.mark.long
def test_two_runs_make_one_store_whole_although_a_killed_child_has_left_half_of_one(root: Path) -> None:
    database = root / "mlflow.db"
    database.rename(root / ".mlflow.db.new").write_bytes(b"half")
    said: list[str] = []
    for name in ("a", "b"):
        (root / name).mkdir()
    trackers = [start(root, run_dir=root / name, log=said.append) for name in ("a", "b")]
    wait_for(database.exists)
    with contextlib.closing(sqlite3.connect(database)) as opened:
        opened.execute("select count(*) from runs")  # nobody sees a database without its tables
    ids = {tracker.finish("FINISHED", PATIENCE_SECONDS).run_id for tracker in trackers}
    assert said == [] and len(ids) == 2 and None not in ids
    assert len(MlflowClient(f"sqlite:///{database}").search_experiments()) == 2, "theirs and MLflow's own"
    assert sorted(path.name for path in root.glob("*mlflow.db*")) == ["mlflow.db"]
