"""Faults of one rank: it is killed at any moment, again and again, and the run ends with the weights of one that nobody
disturbed; if it alone can't go on, all end."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import pytest

from ddpm_ds.ground.errors import EXIT_PEER_LOST
from ddpm_ds.processes.ranks import EXIT_FILE_VARIABLE, ExitFile, ExitRecord
from tests.launching import PATIENCE_SECONDS, REPOSITORY, wait_for
from tests.training.ranks import (
    BATCH,
    QUIET,
    TRAIN,
    Ranks,
    arguments,
    checkpoints,
    end_of,
    mlflow_run,
    points,
    the_same,
)

pytestmark = pytest.mark.launch

FAULTY = Path(__file__).with_name("faulty_train.py")
CHANGES = (
    "train.images=720",
    "checkpoint.every_images=40",
    "checkpoint.keep_last=2",
    "samples.every_images=160",
    "evaluation.every_images=160",
)
ON = [pytest.param("cpu", id="cpu"), pytest.param("cuda", id="cuda", marks=pytest.mark.gpu(2))]
START_SECONDS = 8.0
"""A kill at the start comes within this time of the start of the processes."""


class Supervised:
    """Two stages under ``ddpm-ds run``; whatever is left of them is killed at the end of the ``with`` block."""

    def __init__(self, run_dir: Path, changes: Sequence[str], restarts: int) -> None:
        self.run_dir = run_dir
        self._output = run_dir.with_name(f"{run_dir.name}.output")
        command = [sys.executable, "-m", "ddpm_ds.cli.main", "run", "--max-restarts", str(restarts)]
        command += ["--processes", "2", str(TRAIN)]
        command += arguments(run_dir, changes, "zero2_fp16.json", ["-p", "2"])
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
        """Output of all processes."""
        return self._output.read_text()

    def ranks(self) -> list[psutil.Process]:
        """The training processes that run."""
        return self.supervisor.children()

    def until(self, happened: Callable[[], bool], pause: float = 0.05) -> None:
        """Wait for something that happens before the run is over, looking every ``pause`` seconds."""
        wait_for(happened, running=lambda: self.supervisor.poll() is None, output=lambda: self.said, pause=pause)

    def kill_one(self, writing: bool, randomness: random.Random) -> None:
        """Kill a rank of this start as it starts, or when it has trained and a checkpoint is being written."""
        trained = len(points(self.run_dir))
        self.until(lambda: len(self.ranks()) == 2)
        ranks = self.ranks()
        if writing:
            self.until(lambda: len(points(self.run_dir)) > trained, pause=0.01)
            self.until(lambda: any(self.run_dir.glob("checkpoints/.writing-*")), pause=0.001)
        else:
            time.sleep(randomness.uniform(0, START_SECONDS))
        randomness.choice(ranks).kill()
        self.until(lambda: not set(ranks) & set(self.ranks()))


@pytest.mark.long
def test_a_rank_killed_at_the_start_and_one_killed_while_a_checkpoint_is_written_change_nothing(tmp_path: Path) -> None:
    run_dir, undisturbed, randomness = tmp_path / "disturbed", tmp_path / "undisturbed", random.Random(1)
    with Ranks(undisturbed, *CHANGES) as ranks:
        assert ranks.codes() == [0, 0], ranks.said[-4000:]
    with Supervised(run_dir, CHANGES, restarts=2) as run:
        run.kill_one(writing=False, randomness=randomness)
        run.kill_one(writing=True, randomness=randomness)
        assert run.supervisor.wait(PATIENCE_SECONDS) == 0, run.said[-6000:]
        assert "Traceback" not in run.said
    assert the_same(end_of(run_dir), end_of(undisturbed))
    assert [(point["step"], point["train/loss"]) for point in points(run_dir)] == [
        (point["step"], point["train/loss"]) for point in points(undisturbed)
    ]
    client, finished = mlflow_run(run_dir)
    steps = [point.step for point in client.get_metric_history(finished.info.run_id, "train/loss")]
    assert finished.info.status == "FINISHED" and steps == sorted(set(steps)) and len(steps) > 0
    assert not list((run_dir / "checkpoints").glob(".*"))


def faulty(run_dir: Path, fault: str, *changes: str, exits: ExitFile) -> tuple[list[int], list[str]]:
    """Exit codes of two stages of a line, of which the last, which reads images, meets a fault, and what they print."""
    changes, options = (*changes, "ds.pipeline.schedule=1f1b"), ["--hang-seconds", "600"]  # the fault is what ends them
    environment: dict[str, Any] = {"FAULT": fault, EXIT_FILE_VARIABLE: exits.name}
    with Ranks(run_dir, *changes, options=options, script=FAULTY, **environment) as ranks:
        return ranks.codes(), ranks.said.splitlines()


def test_a_checkpoint_that_goes_bad_for_one_rank_ends_all_with_one_line(tmp_path: Path) -> None:
    run_dir, exits = tmp_path / "run", ExitFile()
    with Ranks(run_dir, "train.images=80") as ranks:
        assert ranks.codes() == [0, 0], ranks.said[-4000:]
    codes, lines = faulty(run_dir, "checkpoint", "train.images=160", exits=exits)
    assert codes == [2, 2], lines
    errors = [line for line in lines if "error" in line]
    assert len(errors) == 1 and errors[0].startswith("ddpm_ds: error: checkpoint ") and "were written" in errors[0]
    assert lines[-1] == errors[0] and not any("Traceback" in line or "ending rank" in line for line in lines)
    assert exits.read() == ExitRecord(2, ())


def test_images_that_one_rank_can_not_read_any_more_end_all(tmp_path: Path) -> None:
    exits = ExitFile()
    codes, lines = faulty(tmp_path / "run", "loader", "train.images=800", exits=exits)
    assert codes == [EXIT_PEER_LOST, 1], lines
    assert "OSError: the images are gone" in lines
    named = [line for line in lines if line.endswith("; the run can be resumed")]
    assert len(named) == 1 and "rank 1 (stage 1) " in named[0], lines
    assert exits.read() == ExitRecord(EXIT_PEER_LOST, ("1",), training=True)


def test_a_run_whose_last_checkpoint_does_not_fit_on_the_disk_is_not_done(tmp_path: Path) -> None:
    exits = ExitFile()
    codes, lines = faulty(tmp_path / "run", "disk", "train.images=80", "checkpoint.every_images=40", exits=exits)
    assert codes == [2, 2], lines
    error = "ddpm_ds: error: checkpoint images-000000080 was not saved: "
    errors = [line for line in lines if line.startswith("ddpm_ds: error: ")]
    assert len(set(errors)) == 1 and errors[0].startswith(error), "which a launcher shows once"
    assert str(tmp_path / "run" / "checkpoints") in errors[0]
    assert "make " in errors[0] and not any("Traceback" in line for line in lines), lines
    _, recorded = mlflow_run(tmp_path / "run")
    assert recorded.info.status == "FAILED"


def test_an_error_in_a_report_is_a_line_and_the_run_is_done(tmp_path: Path) -> None:
    options, changes = ["--trace-steps", "2-4"], ["train.images=80", "samples.every_images=40"]
    with Ranks(tmp_path / "run", *changes, options=options, script=FAULTY, FAULT="reports") as ranks:
        assert ranks.codes() == [0, 0], ranks.said[-4000:]
    missing = ["timeline", "time of the pauses", "verdict", str(tmp_path / "run" / "progress.gif"), "summary"]
    said = [line.rpartition("\r")[2] for line in ranks.said.splitlines()]
    lines = [line for line in said if line.startswith("no ") and "ZeroDivisionError" in line]
    assert [line.partition(", because of a bug: ")[0] for line in lines] == [f"no {it}" for it in missing]
    assert all(" in faulty_train.py:" in line for line in lines) and "Traceback" not in ranks.said
    assert mlflow_run(tmp_path / "run")[1].info.status == "FINISHED" and checkpoints(tmp_path / "run")


def test_signals_from_the_last_save_on_do_not_change_that_the_run_is_done(tmp_path: Path) -> None:
    exits, done_already = ExitFile(), {"finish", "destroy_process_group", "record_exit", "exit"}
    moments = done_already | {"check_saved", "read_pauses", "conclude", "summary"}
    for reached in (moments, done_already):
        environment: dict[str, Any] = {"FAULT": "signals", EXIT_FILE_VARIABLE: exits.name}
        with Ranks(tmp_path / "run", "train.images=80", script=FAULTY, **environment) as ranks:
            assert ranks.codes() == [0, 0], ranks.said[-4000:]
        assert {moment for moment in moments if f"signals at {moment}\n" in ranks.said} == reached
        assert mlflow_run(tmp_path / "run")[1].info.status == "FINISHED"
    assert exits.read() == ExitRecord(finished=True, training=True)


@pytest.mark.parametrize("device", ON)
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
def test_a_replica_that_stops_or_dies_ends_the_other_on_several_gpus(
    number: signal.Signals, device: str, tmp_path: Path
) -> None:
    """On GPUs steps are graphs, whose sums over NCCL have no time limit of their own."""
    run_dir, graphs = tmp_path / "run", ["ds.graphs=true"] if device == "cuda" else []
    changes = ("train.images=8000000", "samples.every_images=null", "evaluation.every_images=null", *graphs)
    options = ["-p", "1", "--dead-seconds", "6", "--device", device]
    with Ranks(run_dir, *changes, options=options, DS_ACCELERATOR=device) as ranks:
        ranks.until_images(40 * BATCH)
        assert ("each step is one CUDA graph" in ranks.said) == (device == "cuda")
        ranks.signal(1, number)
        assert ranks.processes[0].wait(PATIENCE_SECONDS) == EXIT_PEER_LOST, ranks.said[-4000:]
        words = r"rank 1 \(stage 0\) has not answered for [\d.]+ s: ending rank 0 \(stage 0\); the run can be resumed"
        assert re.search(words, ranks.said), ranks.said[-4000:]
