"""Trackers beside MLflow: the same names, a resumed run that goes on, and a failure that only they have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ddpm_ds.errors import SpecError
from ddpm_ds.files import append_line
from ddpm_ds.tracking import address, trackers
from ddpm_ds.tracking.address import check_trackers
from ddpm_ds.tracking.run_folder import RunFolder, now_ms
from ddpm_ds.tracking.trackers import KINDS
from tests.launching import PATIENCE_SECONDS
from tests.tracking.stored import history, start

WANDB = """
import json, pathlib

class Run:
    def __init__(self, **options):
        self.file = pathlib.Path(options["dir"]) / "wandb.jsonl"
        self.summary = self.config = self
        self.note("init", [options["id"], options["resume"], options["config"]])
    def note(self, what, value):
        with self.file.open("a") as file:
            file.write(json.dumps([what, value], default=str) + "\\n")
    def define_metric(self, name, step_metric): pass
    def log(self, values):
        if values.get("train/loss") == 3.0 and not self.file.with_name("full").exists():
            self.file.with_name("full").touch()
            raise OSError("no room")
        self.note("log", values)
    def update(self, values, allow_val_change=False): self.note("update", values)
    def finish(self, exit_code): self.note("finish", exit_code)

Image = str
Settings = dict
init = lambda **options: Run(**options)
"""
"""As much of wandb's interface as is used, which writes down what it hears."""


def record(root: Path, tracker: str, steps: range, said: list[str]) -> None:
    """Record a process of the run, which has a loss of its step's number."""
    (root / "run" / "system_metrics").mkdir(exist_ok=True)
    picture, identity = root / "run" / "picture.png", RunFolder(root / "run").identity()
    Image.fromarray(np.full((16, 16), 200, np.uint8)).save(picture)
    run = start(root, params={"unet.channels": 8}, trackers=[tracker], identity=identity, log=said.append)
    for step in steps:
        run.metrics({"train/loss": float(step), "eval/loss": 0.5}, step)
    run.numbers({"perf/mfu": 0.25}, steps[-1])
    of_host = b'{"metrics": {"system/cpu": 50.0}, "time": %d}' % now_ms()
    append_line(root / "run" / "system_metrics" / "a.jsonl", of_host)
    run.image(picture, "eval/samples_ema", steps[-1])
    run.finish("FINISHED", PATIENCE_SECONDS)


def test_wandb_hears_what_mlflow_hears_and_is_sent_again_what_it_fails_at(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "packages").mkdir()
    (root / "packages" / "wandb.py").write_text(WANDB)
    monkeypatch.syspath_prepend(str(root / "packages"))
    said: list[str] = []
    for steps in (range(1, 3), range(2, 5)):
        record(root, "wandb", steps, said)
    lines = (root / "run" / "wandb.jsonl").read_text().splitlines()
    heard: list[list[Any]] = [json.loads(line) for line in lines]
    identity = RunFolder(root / "run").identity()
    assert [value for what, value in heard if what == "init"] == [[identity, "allow", {"unet.channels": "8"}]] * 2
    logged = [value for what, value in heard if what == "log"]
    assert [(value["step"], value["train/loss"]) for value in logged if "train/loss" in value] == [
        *((step, float(step)) for step in (1, 2, 2, 3, 4)),
    ]
    assert sum("eval/samples_ema" in value for value in logged) == sum("system/cpu" in value for value in logged) == 2
    assert heard.count(["update", {"perf/mfu": 0.25}]) == heard.count(["finish", 0]) == 2
    failed, caught_up = "wandb fails (no room); training continues, and it is tried again", "wandb answers again"
    assert said == [failed, f"{caught_up}; everything has been sent"]
    assert [loss for _, loss in history(root, "train/loss")] == [1.0, 2.0, 2.0, 3.0, 4.0]


@pytest.mark.long
def test_tensorboard_has_the_curves_and_pictures_of_a_resumed_run(root: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    said: list[str] = []
    for steps in (range(1, 3), range(3, 5)):
        record(root, "tensorboard", steps, said)
    read = events.EventAccumulator(str(root / "run" / trackers.TENSORBOARD_FOLDER)).Reload()
    assert read.Tags()["scalars"] == ["train/loss", "eval/loss", "perf/mfu", "system/cpu"]
    assert [(point.step, point.value) for point in read.Scalars("train/loss")] == [(step, step) for step in range(1, 5)]
    assert [(picture.step, picture.width) for picture in read.Images("eval/samples_ema")] == [(2, 16), (4, 16)]
    assert said == []


@pytest.mark.long
def test_wandb_itself_takes_the_records_offline(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    said: list[str] = []
    for steps in (range(1, 3), range(2, 5)):
        record(root, "wandb", steps, said)
    assert said == []
    files = list((root / "run" / "wandb").glob(f"offline-run-*/run-{RunFolder(root / 'run').identity()}.wandb"))
    assert len(files) == 2 and all(b"train/loss" in file.read_bytes() for file in files)


def test_a_tracker_that_is_not_installed_is_refused_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "find_spec", lambda name: None)
    check_trackers([])
    for name in KINDS:
        with pytest.raises(SpecError, match=rf"logging.trackers has {name}, .*; pip install 'ddpm_ds\[{name}\]'"):
            check_trackers([name])
