"""ddpm-ds sweep: trials that are run, stopped, gone on with and compared."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from ddpm_ds.cli.main import main
from ddpm_ds.experiments.sweep import Ending, Sweep, run_command
from ddpm_ds.tracking.runs import find_run, find_runs
from tests.forking import Forked
from tests.launching import PATIENCE_SECONDS, REPOSITORY, place_empty_store, wait_for
from tests.train.ranks import QUIET, TINY

CONFIG = REPOSITORY / "ds_configs" / "zero2_fp16.json"


def command(root: Path, *words: str) -> list[str]:
    """A sweep of tiny runs in ``root/runs``, of 400 images each."""
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
    if run_dir.suffix == ".zero-1" and (run_dir / "output.log").read_text().count("started") == 1:
        while not stop:
            time.sleep(0.05)
        return 75
    if run_dir.suffix == ".zero-0":
        print("ddpm_ds: error: too bad; try another", file=sys.stderr)
        return 3
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
    """A sweep of trainings that take no time; what it says is in ``root/said``."""
    for name, program in (("played", PLAYED), ("sweep", WITH_STAND_INS)):
        (root / f"{name}.py").write_text(program)
    place_empty_store(root / "runs")
    environment = {**os.environ, **QUIET, "RANK": "0", "PYTHONPATH": str(REPOSITORY)}
    words = (str(root / "sweep.py"), str(root / "played.py"), *command(root, *words))
    said = root / "said"
    said.unlink(missing_ok=True)
    return Forked.script(words, env=environment, stdout=said, stderr=said)


def left_running(root: Path) -> list[str]:
    """Command lines of what runs with ``root`` among its arguments."""
    found = []
    for process in psutil.process_iter():
        try:
            line = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if str(root) in line and process.status() != psutil.STATUS_ZOMBIE:
            found.append(line)
    return found


def folder_of(root: Path, trial: str = "") -> Path:
    """The sweep's folder, or a trial's."""
    (found,) = (root / "runs").glob(f"vary-*.{trial}") if trial else (root / "runs").glob("vary-digits-????????")
    return found


def test_a_sweep_is_stopped_and_gone_on_with_whatever_becomes_of_its_trials(tmp_path: Path) -> None:
    words = ["--vary", "zero=2,1,0", "--note", "does sharing pay?"]
    first = start(tmp_path, *words)
    wait_for(lambda: first.poll() is not None or list((tmp_path / "runs").glob("vary-*.zero-1/begun")))
    first.send_signal(signal.SIGTERM)
    code, said = first.wait(PATIENCE_SECONDS), (tmp_path / "said").read_text()
    assert code == 75, said
    assert left_running(tmp_path) == []
    assert "1 of 3 trials are done; the same command continues" in said
    assert find_run(str(folder_of(tmp_path))).status == "KILLED"

    again = start(tmp_path, *words)
    code, said = again.wait(PATIENCE_SECONDS), (tmp_path / "said").read_text()
    assert code == 3, said
    assert "baseline: done before" in said and "zero=1: done after" in said
    failure = "zero=0: exit code 3 (the numbers went bad)"
    assert said.count(failure) == 2 and "    ddpm_ds: error: too bad; try another" in said
    logs = [(folder_of(tmp_path, trial) / "output.log").read_text() for trial in ("baseline", "zero-1", "zero-0")]
    assert [log.count("started") for log in logs] == [1, 2, 1]
    parent = find_run(str(folder_of(tmp_path)))
    assert (parent.status, parent.note, parent.params["vary.zero"]) == ("FAILED", "does sharing pay?", "2,1,0")
    assert parent.artifacts("failed/zero-0") == ["failed/zero-0/output.log"]


@pytest.mark.long
@pytest.mark.launch
def test_trials_are_child_runs_that_are_compared(tmp_path: Path) -> None:
    words = command(tmp_path, "--vary", "optimizer.learning_rate=1e-3", "--note", "how high?")
    done = subprocess.run(
        [sys.executable, "-m", "ddpm_ds.cli.main", *words],
        env={**os.environ, **QUIET},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "train/loss" in done.stdout
    parent = find_run(str(folder_of(tmp_path)))
    assert (parent.status, parent.note) == ("FINISHED", "how high?")
    assert parent.artifacts("comparison") == ["comparison/comparison.md"]
    (trial,) = find_runs(str(folder_of(tmp_path)))
    assert (trial.status, trial.parent, trial.folder) == ("FINISHED", parent.id, folder_of(tmp_path, "baseline"))
    assert (trial.tags["vary.changed"], trial.tags["vary.name"]) == ("baseline", parent.name)
    assert [point.step for point in trial.history("train/loss")] == list(range(2, 51, 2))


def test_of_a_log_only_the_last_start_explains_its_end(tmp_path: Path) -> None:
    log = tmp_path / "output.log"

    def run(program: str) -> Ending:
        return run_command([sys.executable, "-c", program], log, [], lambda: None)

    assert run("import sys; sys.exit('ddpm_ds: error: the first')").said == ("ddpm_ds: error: the first",)
    second = run("print('[2026-11-21 launcher]\\n\\nbut why'); raise SystemExit(76)")
    assert (second.exit_code, second.said, second.stopped) == (76, ("but why",), False)
    assert run("pass").said == () and "the first" in log.read_text()
    assert run("import os; os.kill(os.getpid(), 15)").stopped


def test_nothing_is_started_unless_every_trial_can_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")
    for words, said in (
        (["--vary", "schedule=1f1b,zigzag"], 'trial schedule=zigzag: .*"zigzag" should be'),
        (["--vary", "schedule=1f1b,folded"], "trial schedule=folded: .* nothing to fold on one stage"),
        (["--vary", "stages=1,2", "--processes", "2", "--", "-p", "2"], "-p 2 after -- and --vary stages"),
        (["--vary", "zero=1,2", "--", "--run-dir", "here"], "--run-dir after --: each trial gets its own"),
        (["--vary", "zero=1,2", "--", "--trace-step", "3"], "unrecognized arguments: --trace-step"),
        (["--vary", "zero=1,2", "--", "--trace-steps", "50-51"], "trial baseline has 50 steps"),
        (["--vary", "zero=1,2", "--metrics", "train/loss,"], "'train/loss,' has an empty name"),
        (["--vary", "zero=1,2", "stray"], "stray is no option of sweep"),
        ([], "the following arguments are required: --vary"),
    ):
        assert main(command(tmp_path, *words)) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1 and lines[0].startswith("ddpm-ds: error: "), lines
        assert re.search(said, lines[0]), lines
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "runs").touch()
    assert main(command(tmp_path, "--vary", "zero=1,2")) == 2
    assert "can't be written" in capsys.readouterr().err
    (tmp_path / "runs").unlink()
    monkeypatch.setattr(Sweep, "begin", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    assert main(command(tmp_path, "--vary", "zero=1,2")) == 2
    assert "can't be written (No space left on device)" in capsys.readouterr().err


def test_the_same_command_is_the_same_sweep_and_another_one_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def name(*words: str) -> str:
        assert main(command(tmp_path, *words, "--dry-run")) == 0
        return capsys.readouterr().out.split(",")[0]

    varied = ("--vary", "precision=fp32,fp16", "--vary", "zero=1,2")
    assert name(*varied) == name(*varied, "--note", "again") == name(*varied, "--metrics", "train/loss")
    others = [name(*varied, "--full"), name(*varied[:2]), name(*varied, "--set", "train.seed=4")]
    assert len({name(*varied), *others}) == 4
    assert list(tmp_path.iterdir()) == []


def test_the_trials_are_shown_before_they_are_started(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(command(tmp_path, "--vary", "zero=0,2", "--vary", "processes=1,2", "--full", "--dry-run", "--", "-p", "1"))
        == 0
    )
    out = capsys.readouterr().out
    assert "4 trials" in out and "zero=0, processes=1" in out
    assert "  zero=2 processes=2: 1 stage x 2 replicas, fp16, ZeRO-2, 2 micro-batches of 2, 50 steps" in out
