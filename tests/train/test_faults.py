"""Faults of one rank: it is killed at any moment, again and again, and the run ends with the weights of one that nobody
disturbed; it alone can't go on, and all end."""

from __future__ import annotations

import contextlib
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import psutil
import pytest

from ddpm_ds.errors import EXIT_PEER_LOST
from ddpm_ds.processes.ranks import EXIT_FILE_VARIABLE, ExitRecord, read_exits
from tests.launching import REPOSITORY, free_port
from tests.train.ranks import QUIET, TRAIN, Ranks, arguments, end_of, mlflow_run, points, the_same

pytestmark = pytest.mark.launch

FAULTY = Path(__file__).with_name("failing_rank.py")
IMAGES_PER_START = 360
"""Training for each kill, longer than it waits."""
CHECKPOINTS = ("checkpoint.every_images=40", "checkpoint.keep_last=2")
LOOKS = ("samples.every_images=160", "evaluation.every_images=160")
START_SECONDS, TRAINING_SECONDS = 8.0, 0.3
"""Random kills come within these times of the start of the processes, and of their first new step."""

Moment = Literal["starting", "training", "writing"]


class Supervised:
    """A run under ``ddpm-ds run``; whatever is left of it is killed at the end of the ``with`` block."""

    def __init__(
        self, run_dir: Path, changes: Sequence[str], *, processes: int, stages: int, config: str, restarts: int
    ) -> None:
        self.run_dir, self.processes = run_dir, processes
        self._output = run_dir.with_name(f"{run_dir.name}.output")
        command = [sys.executable, "-m", "ddpm_ds.cli.main", "run", "--max-restarts", str(restarts), "--"]
        command += ["--num_gpus", str(processes), "--master_addr", "127.0.0.1", "--master_port", str(free_port())]
        command.append(str(TRAIN))
        command += arguments(run_dir, changes, config, ["-p", str(stages)])
        with self._output.open("w") as output:
            variables = {**os.environ, **QUIET}
            self.supervisor = psutil.Popen(command, env=variables, cwd=REPOSITORY, stdout=output, stderr=output)

    def __enter__(self) -> Supervised:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in [*self.supervisor.children(recursive=True), self.supervisor]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self.supervisor.wait()

    @property
    def said(self) -> str:
        """What all processes have printed."""
        return self._output.read_text()

    def ranks(self) -> list[psutil.Process]:
        """The training processes that run."""
        found = []
        for process in self.supervisor.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                if str(TRAIN) in words and any(word.startswith("--local_rank=") for word in words):
                    found.append(process)
        return found

    def until(self, happened: Callable[[], bool], timeout: float = 600.0, pause: float = 0.05) -> bool:
        """Wait for something, looking every ``pause`` seconds; whether it happened before the run was over."""
        deadline = time.monotonic() + timeout
        while self.supervisor.poll() is None:
            if happened():
                return True
            assert time.monotonic() < deadline, self.said[-6000:]
            time.sleep(pause)
        return False

    def writing(self) -> bool:
        """Whether a checkpoint is being written."""
        return any(self.run_dir.glob("checkpoints/.writing-*"))


def kill_one(run: Supervised, moment: Moment, randomness: random.Random) -> None:
    """Kill a rank of this start at some moment."""
    trained = len(points(run.run_dir))
    assert run.until(lambda: len(run.ranks()) == run.processes), run.said[-6000:]
    ranks = run.ranks()
    if moment == "starting":
        time.sleep(randomness.uniform(0, START_SECONDS))
    else:
        assert run.until(lambda: len(points(run.run_dir)) > trained, pause=0.01), run.said[-6000:]
        time.sleep(randomness.uniform(0, TRAINING_SECONDS))
    if moment == "writing":
        assert run.until(run.writing, pause=0.001), run.said[-6000:]
    randomness.choice(ranks).kill()
    assert run.until(lambda: not set(ranks) & set(run.ranks())), run.said[-6000:]


def end_undisturbed(run_dir: Path, moments: Sequence[Moment], *, stages: int, replicas: int, config: str) -> None:
    """Train a run twice, once with a kill at each of ``moments``; they end alike."""
    processes, randomness = stages * replicas, random.Random(len(moments))
    changes = (f"train.images={IMAGES_PER_START * (len(moments) + 1)}", *CHECKPOINTS, *LOOKS)
    undisturbed = run_dir.with_name("undisturbed")
    with Ranks(undisturbed, *changes, config=config, count=processes, options=["-p", str(stages)]) as ranks:
        assert ranks.codes(1500) == [0] * processes, ranks.said[-4000:]
    restarts = len(moments)  # several kills in a row may come before a new checkpoint
    with Supervised(run_dir, changes, processes=processes, stages=stages, config=config, restarts=restarts) as run:
        for moment in moments:
            kill_one(run, moment, randomness)
        run.until(lambda: False, timeout=1500)
        assert run.supervisor.wait() == 0, run.said[-6000:]
        assert "Traceback" not in run.said
    assert the_same(end_of(run_dir), end_of(undisturbed))
    assert [(point["step"], point["train/loss"]) for point in points(run_dir)] == [
        (point["step"], point["train/loss"]) for point in points(undisturbed)
    ]
    client, finished = mlflow_run(run_dir)
    steps = [point.step for point in client.get_metric_history(finished.info.run_id, "train/loss")]
    assert finished.info.status == "FINISHED" and steps == sorted(set(steps)) and len(steps) > 0
    assert not list((run_dir / "checkpoints").glob(".*"))


@pytest.mark.parametrize(
    ("stages", "replicas", "moments"),
    [
        pytest.param(2, 1, ["writing"], id="while a checkpoint is written"),
        pytest.param(2, 2, ["starting"], id="at the start"),
    ],
)
@pytest.mark.long
def test_a_killed_rank_changes_nothing(stages: int, replicas: int, moments: list[Moment], tmp_path: Path) -> None:
    run_dir = tmp_path / "disturbed"
    end_undisturbed(run_dir, moments, stages=stages, replicas=replicas, config="zero2_fp16.json")


def faulty(run_dir: Path, fault: str, *changes: str, exits: Path) -> tuple[list[int], list[str]]:
    """Exit codes of two stages, of which the last meets a fault, and the lines that they print."""
    exits.touch()
    options = ["--hang-seconds", "600"]  # so that nothing but the fault ends them in time
    environment: dict[str, Any] = {"FAULT": fault, EXIT_FILE_VARIABLE: str(exits)}
    with Ranks(run_dir, *changes, options=options, script=FAULTY, **environment) as ranks:
        return ranks.codes(), ranks.said.splitlines()


def test_a_checkpoint_that_goes_bad_for_one_rank_ends_all_with_one_line(tmp_path: Path) -> None:
    run_dir, exits = tmp_path / "run", tmp_path / "exits"
    with Ranks(run_dir, "train.images=80") as ranks:
        assert ranks.codes() == [0, 0], ranks.said[-4000:]
    codes, lines = faulty(run_dir, "checkpoint", "train.images=160", exits=exits)
    assert codes == [2, 2], lines
    errors = [line for line in lines if "error" in line]
    assert len(errors) == 1 and errors[0].startswith("ddpm_ds: error: checkpoint ") and "were written" in errors[0]
    assert lines[-1] == errors[0] and not any("Traceback" in line or "ending rank" in line for line in lines)
    assert read_exits(exits) == ExitRecord(2, ())


def test_images_that_one_rank_can_not_read_any_more_end_all(tmp_path: Path) -> None:
    exits = tmp_path / "exits"
    codes, lines = faulty(tmp_path / "run", "loader", "train.images=800", exits=exits)
    assert codes == [EXIT_PEER_LOST, 1], lines
    assert "OSError: the images are gone" in lines
    named = [line for line in lines if line.endswith("; the run can be resumed")]
    assert len(named) == 1 and "rank 1 (stage 1) " in named[0], lines
    assert read_exits(exits) == ExitRecord(EXIT_PEER_LOST, ("1",))
