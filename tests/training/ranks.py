"""A tiny run whose ranks are started one by one, so that a test can signal each and see how each one ends."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from ddpm_ds.checkpoint.folder import names
from ddpm_ds.checkpoint.manifest import MOMENTS
from ddpm_ds.checkpoint.reader import Reader
from tests.forking import ONE_THREAD
from tests.launching import CUTS, REPOSITORY, fork_ranks, place_digits, place_empty_store, wait_for

if TYPE_CHECKING:  # it takes seconds, and ranks import this module
    from mlflow import MlflowClient
    from mlflow.entities import Run

TRAIN = REPOSITORY / "launch" / "train.py"
BATCH = 8
TINY = (
    "unet.channels=8",
    "unet.multipliers=[1]",
    "unet.norm_groups=4",
    "unet.attention_resolutions=[]",
    "unet.middle_attention=false",
    "unet.dropout=0.1",
    f"train.batch_images={BATCH}",
    f"logging.log_every_images={2 * BATCH}",
    "train.accumulation=2",
    f"{CUTS}=flops",
    "optimizer.warmup_images=400",
    "ema.halflife_images=400",
    "checkpoint.every_minutes=null",
    "data.held_out_images=5",
    "samples.every_images=80",
    "samples.count=2",
    "sampler.steps=2",
    "evaluation.every_images=80",
)


QUIET = {**ONE_THREAD, "MLFLOW_TRACKING_URI": ""}


def arguments(run_dir: Path, changes: Sequence[str], config: str, options: Sequence[str] = ()) -> list[str]:
    """What follows the script: a tiny run in ``run_dir`` with some values changed."""
    changes = (*TINY, f"data.store_root={run_dir.parent / 'data'}", *changes)
    config_file = str(REPOSITORY / "ds_configs" / config)
    overrides = [part for change in changes for part in ("--set", change)]
    return ["--run-dir", str(run_dir), "--deepspeed_config", config_file, *options, *overrides]


class Ranks:
    """The ranks of one run; whatever is left of them is killed at the end of the ``with`` block."""

    def __init__(
        self,
        run_dir: Path,
        *changes: str,
        options: Sequence[str] = (),
        config: str = "zero2_fp16.json",
        script: Path = TRAIN,
        count: int = 2,
        **environment: str,
    ) -> None:
        self._output = run_dir.with_name(f"{run_dir.name}.output-{time.monotonic_ns()}")
        self._run_dir = run_dir
        layout = [] if "-p" in options else ["-p", str(count)]
        words = arguments(run_dir, changes, config, [*layout, *options])
        place_empty_store(run_dir.parent)
        place_digits(run_dir.parent)
        output, variables = self._output, {**QUIET, **environment}
        self.processes = fork_ranks(count, script, *words, stdout=output, stderr=output, **variables)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    @property
    def said(self) -> str:
        """What all ranks have printed."""
        return self._output.read_text()

    def until(self, happened: Callable[[], bool]) -> None:
        """Wait for something that happens while all ranks are running."""

        def running() -> bool:
            return all(process.poll() is None for process in self.processes)

        wait_for(happened, running=running, output=lambda: self.said, pause=0.005)

    def until_images(self, images: int) -> None:
        """Wait until so many images are in the loss curve."""
        self.until(lambda: any(point["train/seen_images"] >= images for point in points(self._run_dir)))

    def signal(self, rank: int, number: signal.Signals) -> None:
        self.processes[rank].send_signal(number)

    def codes(self, timeout: float = 600.0) -> list[int]:
        """The exit codes, when all have ended."""
        deadline = time.monotonic() + timeout
        return [process.wait(max(deadline - time.monotonic(), 0.1)) for process in self.processes]


def points(run_dir: Path) -> list[dict[str, Any]]:
    """The complete lines of the loss curve."""
    file = run_dir / "metrics.jsonl"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [json.loads(line) for line in lines]


def checkpoints(run_dir: Path) -> list[str]:
    return names(run_dir / "checkpoints")


def end_of(run_dir: Path) -> Reader:
    """The newest checkpoint."""
    return Reader(run_dir / "checkpoints" / checkpoints(run_dir)[-1])


def recorded_losses(run_dir: Path) -> dict[str, float]:
    """The held-out losses that training recorded last."""
    last = json.loads((run_dir / "evaluations.jsonl").read_text().splitlines()[-1])
    return {name: value for name, value in last.items() if name == "eval/loss" or name.startswith("validation/")}


def measured_losses(run_dir: Path, *words: str) -> dict[str, float]:
    """The held-out losses that the verb finds."""
    out = run_dir.with_name(f"measured-{time.monotonic_ns()}")
    words = ("--metrics", "loss", "--device", "cpu", "--out", str(out), *words)
    from ddpm_ds.cli.main import main  # here, since ranks import this module

    with mock.patch.dict(os.environ, QUIET):
        assert main(["evaluate", str(run_dir), *words]) == 0
    (path,) = out.glob("*/scores.json")
    return dict(json.loads(path.read_text())["scores"])


def mlflow_run(run_dir: Path) -> tuple[MlflowClient, Run]:
    """The one MLflow run that the folder was trained as."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{run_dir.parent / 'mlflow.db'}")
    everywhere = [experiment.experiment_id for experiment in client.search_experiments()]
    (run,) = client.search_runs(everywhere, f"attributes.run_name LIKE '{run_dir.name} %'")
    return client, run


def the_same(one: Reader, other: Reader) -> bool:
    """Whether two checkpoints hold the same state, bit for bit, whatever the spec says of lengths and cadences."""
    kinds, parameters = one.manifest.kinds, one.manifest.parameters
    assert (kinds, parameters, one.state) == (other.manifest.kinds, other.manifest.parameters, other.state)
    for kind, name in itertools.product(kinds, parameters):  # what is not trained has no moments
        stored = [bool(reader._spans_of(kind, name)) for reader in (one, other)]
        if stored != [True, True] and (any(stored) or kind not in MOMENTS):
            return False
        if all(stored) and not torch.equal(one.read(kind, name), other.read(kind, name)):
            return False
    return True
