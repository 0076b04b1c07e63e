"""ddpm-ds sweep: trials that are made, run, stopped, gone on with and compared."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest
from mlflow.entities import Run

from ddpm_ds.cli.main import main
from ddpm_ds.config.ds_config import read_ds_config
from ddpm_ds.experiments.sweep import Trial, make_trials, parse_variables, run_command
from ddpm_ds.ground.errors import UserError
from ddpm_ds.tracking.run_folder import NOTE_TAG, PARENT_TAG
from ddpm_ds.tracking.runs import VARIED_TAG, find_run, open_run
from ddpm_ds.tracking.tracker import Tracker
from tests.forking import Forked
from tests.launching import PATIENCE_SECONDS, REPOSITORY, place_empty_store, wait_for
from tests.training.ranks import QUIET, TINY

CONFIG = REPOSITORY / "ds_configs" / "zero2_fp16.json"


def command(root: Path, *words: str) -> list[str]:
    cheap = ["evaluation.every_images=null", "samples.every_images=null", "optimizer.warmup_images=0"]
    changes = (*TINY, f"data.store_root={root / 'data'}", "train.images=400", *cheap)
    overrides = [part for change in changes for part in ("--set", change)]
    files = ["--spec", str(REPOSITORY / "launch" / "specs" / "digits.yaml"), "--deepspeed_config", str(CONFIG)]
    return ["sweep", "--runs", str(root / "runs"), *files, *overrides, *words]


PLAYED = """
import os, pathlib, signal, sys, time
from ddpm_ds.processes.ranks import recorded

def main():
    run_dir = pathlib.Path(sys.argv[sys.argv.index("--run-dir") + 1])
    stop = []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
    print("started", flush=True)
    (run_dir / "begun").touch()
    if run_dir.suffix.endswith("seed-1") and (run_dir / "output.log").read_text().count("started") == 1:
        while not stop:
            time.sleep(0.05)
        return 75
    if run_dir.suffix.endswith("seed-0"):
        print("ddpm_ds: error: too bad; try another", file=sys.stderr)
        return 3
    (run_dir / "events.jsonl").write_text('{}\\n{"finish": "FINISHED", "time": 1}\\n')
    return 0

sys.exit(recorded(main))
"""
"""Stands for launch/train.py: one trial waits for a signal when it is started first, and one always fails."""

WITH_STAND_INS = """
import pathlib, sys
from ddpm_ds.experiments import sweep
sweep.TRAIN = ("-m", "ddpm_ds.cli.main", "run", sys.argv.pop(1))
from ddpm_ds.cli.main import main
sys.exit(main())
"""


def start(root: Path, *words: str) -> Forked:
    """A sweep of trainings that take no time; what it says is in ``root/message``."""
    (root / "played.py").write_text(PLAYED)
    (root / "sweep.py").write_text(WITH_STAND_INS)
    place_empty_store(root / "runs")
    environment = {**os.environ, **QUIET, "RANK": "0", "PYTHONPATH": str(REPOSITORY)}
    words, message = (str(root / "sweep.py"), str(root / "played.py"), *command(root, *words)), root / "message"
    message.unlink(missing_ok=True)
    return Forked.script(words, env=environment, stdout=message, stderr=message)


def left_running(root: Path) -> list[str]:
    running = psutil.process_iter(["cmdline", "status"])
    lines = [" ".join(one.info["cmdline"] or ()) for one in running if one.info["status"] != psutil.STATUS_ZOMBIE]
    return [line for line in lines if str(root) in line]


def folder_of(root: Path, trial: str = "") -> Path:
    (found,) = (root / "runs").glob(f"sweep-*.{trial}" if trial else "sweep-digits-????????")
    return found


def recorded(folder: Path, artifacts: str = "") -> tuple[Run, list[str]]:
    """The run of a folder in MLflow, and the files among its artifacts."""
    with find_run(folder) as (client, run):
        return run, [file.path for file in client.list_artifacts(run.info.run_id, artifacts)]


SEED = "train.seed"


def test_a_sweep_is_stopped_and_gone_on_with_whatever_becomes_of_its_trials(tmp_path: Path) -> None:
    words = ["--vary", f"{SEED}=2,1,0", "--note", "does sharing pay?"]
    first = start(tmp_path, *words)
    wait_for(lambda: first.poll() is not None or list((tmp_path / "runs").glob("sweep-*seed-1/begun")))
    first.send_signal(signal.SIGTERM)
    code, message = first.wait(PATIENCE_SECONDS), (tmp_path / "message").read_text()
    assert code == 75 and left_running(tmp_path) == [], message
    assert "1 of 3 trials are done; the same command continues" in message
    assert recorded(folder_of(tmp_path))[0].info.status == "KILLED"

    again = start(tmp_path, *words)
    code, message = again.wait(PATIENCE_SECONDS), (tmp_path / "message").read_text()
    assert code == 3, message
    assert f"{SEED}=2: 1 stage" in message and "(done)" in message and f"{SEED}=1: done" in message
    assert message.count(f"{SEED}=0: exit code 3") == 2 and "    ddpm_ds: error: too bad; try another" in message
    logs = [(folder_of(tmp_path, f"{SEED}-{seed}") / "output.log").read_text() for seed in (2, 1, 0)]
    assert [log.count("started") for log in logs] == [1, 2, 1]
    output = f"failed/{folder_of(tmp_path, SEED + '-0').name}"
    parent, files = recorded(folder_of(tmp_path), output)
    assert (parent.info.status, parent.data.params["vary"]) == ("FAILED", f"{SEED}=2,1,0")
    assert (parent.data.tags[NOTE_TAG], files) == ("does sharing pay?", [f"{output}/output.log"])


@pytest.mark.long
@pytest.mark.launch
def test_trials_are_child_runs_that_are_compared(tmp_path: Path) -> None:
    words = command(tmp_path, "--vary", "optimizer.learning_rate=1e-3", "--note", "how high?")
    program, environment = [sys.executable, "-m", "ddpm_ds.cli.main", *words], {**os.environ, **QUIET}
    done = subprocess.run(program, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "train/loss" in done.stdout and (folder_of(tmp_path) / "comparison.txt").read_text() in done.stdout
    parent, files = recorded(folder_of(tmp_path))
    assert (parent.info.status, parent.data.tags[NOTE_TAG]) == ("FINISHED", "how high?")
    assert files == ["comparison.txt"]
    folder = folder_of(tmp_path, "optimizer.learning-rate-1e-3")
    with find_run(folder) as (_, run):
        tags = run.data.tags
    assert (tags[PARENT_TAG], tags["sweep.values"]) == (parent.info.run_id, "optimizer.learning_rate=1e-3")
    assert open_run(folder).status == "FINISHED" and open_run(folder).metrics["step"] == list(range(2, 51, 2))


def made_of(*items: str, processes: int = 1, folder: Path = Path("runs/sweep-x")) -> list[Trial]:
    spec, overrides = REPOSITORY / "launch" / "specs" / "digits.yaml", ["train.seed=3"]
    options = {"processes": processes, "stages": 1, "device": "cpu"}
    return make_trials(parse_variables(items), folder, spec, CONFIG, overrides, **options)  # type: ignore[arg-type]


def test_every_combination_of_values_is_a_trial(tmp_path: Path) -> None:
    other = str(REPOSITORY / "ds_configs" / "zero0_fp32.json")
    found = made_of("processes=1,2", "unet.channels=32,64", "ds.gradient_clipping=0.5", folder=tmp_path / "sweep-x")
    combinations = [(1, 32), (1, 64), (2, 32), (2, 64)]
    assert [(len(trial.draft.grid.hosts), trial.draft.spec.unet.channels) for trial in found] == combinations
    assert found[0].run_dir.name == "sweep-x.processes-1-unet.channels-32-ds.gradient-clipping-0.5"
    trial = found[-1]
    trial.prepare(["train.seed=3"])
    config = read_ds_config(trial.run_dir / "asked_ds_config.json", [])
    assert config["gradient_clipping"] == 0.5 and trial.draft.spec.train.seed == 3
    labels = json.loads((trial.run_dir / "tags.json").read_text())
    assert labels[VARIED_TAG].split()[1:] == ["unet.channels", "ds_config.gradient_clipping"]
    precisions = [trial.draft.ds.precision for trial in made_of(f"deepspeed_config={CONFIG},{other}")]
    assert precisions == ["fp16", "fp32"]
    same = [trial.run_dir.name for trial in made_of("data.path=a/b,a-b", "data.source=folder")]
    assert same == [f"sweep-x.data.path-a-b-data.source-folder{number}" for number in ("", "-2")]


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (["precision=fp16"], "precision=fp16: precision can't be varied; use processes, deepspeed_config, a key"),
        (["processes"], "write NAME=VALUE,VALUE"),
        (["processes=1,1"], "comes twice"),
        (["processes=1,0"], "trial processes=0: '0' is not a whole number from 1 to 65,536"),
        (["unet.chanels=32"], "did you mean unet.channels?"),
        (["ds.pipeline.schedule=1f1b,folded"], "trial ds.pipeline.schedule=folded: "),
        ([f"train.seed={','.join(map(str, range(1001)))}"], "makes 1,001 trials, and 1,000 are the most"),
    ],
)
def test_a_variable_or_a_value_that_can_not_be_is_one_line(items: list[str], message: str) -> None:
    with pytest.raises(UserError) as error:
        made_of(*items)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_nothing_is_started_unless_every_trial_can_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")
    varied = ["--vary", "train.seed=1,2"]
    for words, printed in (
        ([*varied, "--", "--run-dir", "here"], "run_dir after --: the sweep sets it; leave it out"),
        ([*varied, "--", "--trace-step", "3"], "unrecognized arguments: --trace-step"),
        ([*varied, "stray"], "stray is no option of sweep"),
        ([], "the following arguments are required: --vary"),
    ):
        assert main(command(tmp_path, *words)) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("ddpm-ds: error: ") and printed in line
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(Tracker, "__init__", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    assert main(command(tmp_path, *varied)) == 2
    assert "can't be written (No space left on device)" in capsys.readouterr().err


def test_the_trials_are_shown_before_they_are_started_and_the_same_command_is_the_same_sweep(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def shown(*words: str) -> list[str]:
        assert main(command(tmp_path, *words, "--dry-run", "--", "-p", "1")) == 0
        return capsys.readouterr().out.splitlines()

    varied = ("--vary", f"{SEED}=1,2", "--vary", "processes=1,2")
    first, *trials = shown(*varied)
    assert first.endswith("4 trials") and len(trials) == 4
    assert trials[-1] == f"  {SEED}=2 processes=2: 1 stage x 2 replicas, fp16, ZeRO-2, 2 micro-batches of 2, 50 steps"
    assert shown(*varied, "--note", "again")[0] == first
    assert len({first, shown(*varied[:2])[0], shown(*varied, "--set", "train.seed=4")[0]}) == 3
    assert list(tmp_path.iterdir()) == []


def test_of_a_log_only_the_last_start_explains_its_end(tmp_path: Path) -> None:
    for fault in ("first", "last"):
        program = f"import sys; sys.exit('ddpm_ds: error: the {fault}')"
        found = run_command([sys.executable, "-c", program], tmp_path / "output.log", [])
        assert found == (1, (f"ddpm_ds: error: the {fault}",))
