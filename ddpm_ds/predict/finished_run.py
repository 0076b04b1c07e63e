"""Finished run, as used by what-if and the verdict: traced step, layout and device, read from the run's folder."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

from ddpm_ds.config.ds_config import ELEMENT_BYTES, CutMethod, zero_stage
from ddpm_ds.config.spec import RunSpec
from ddpm_ds.config.spec_file import load_spec
from ddpm_ds.data.residence import Residence
from ddpm_ds.errors import OutputError
from ddpm_ds.files import EVALUATIONS, METRICS, read_json, read_points, read_text
from ddpm_ds.observe.device_speed import Device, read_device
from ddpm_ds.observe.observer import Pauses, read_pauses
from ddpm_ds.predict.layouts import Candidate, Workload, offloads
from ddpm_ds.predict.simulate import PhaseCosts, RankCosts
from ddpm_ds.unet.layers import PASSES_PER_STEP

SUMMARY = Path("trace") / "summary.json"
"""File in a run's folder with the summary of the traced steps."""
RESIDENCE = "store.json"
"""File in a run's folder with the residence of the images when the run began; absent in older runs."""

FIRST_SCALE_POWER = 16
"""Power of two of DeepSpeed's initial loss scale."""


@dataclass(frozen=True)
class Setup(Candidate):
    """Layout of a traced step with its cuts, and the other settings that a change may alter."""

    bounds: tuple[int, ...] = ()
    """First layers of the stages, and the end."""
    element_bytes: int = 4
    """Bytes of an element on the wire between stages."""
    data_wait: float = 1.0
    """Share that remains of the traced step's waiting for the loader."""


@dataclass(frozen=True)
class RankFacts(RankCosts):
    """Seconds of a traced step on a rank of the pipeline, its replicas averaged; the parts are disjoint.

    Passes are without waiting.
    """

    wait_seconds: float = 0.0
    """Seconds waiting for messages of other stages."""
    send_seconds: float = 0.0
    data_wait_seconds: float = 0.0
    """Seconds waiting for the loader."""
    load_seconds: float = 0.0
    """Seconds of the rest of loading: copy to the device, noise."""
    agreement_wait_seconds: float = 0.0
    """Seconds waiting for other ranks, before gradients are reduced and before the optimizer's step."""
    ema_seconds: float = 0.0
    other_seconds: float = 0.0

    @property
    def update_seconds(self) -> float:
        """Seconds of the optimizer and the averaged weights."""
        return self.optimizer_seconds + self.ema_seconds


@dataclass(frozen=True)
class Overflows:
    """Number of fp16 steps skipped since the run began, and the loss scale."""

    skipped: int = 0
    steps: int = 1
    first_scale: float = 2.0**FIRST_SCALE_POWER
    last_scale: float = 1.0


@dataclass(frozen=True)
class FinishedRun:
    """Data of a finished run that a verdict needs."""

    job: Workload
    setup: Setup
    """Layout of the traced step."""
    partition: CutMethod | tuple[int, ...]
    """Method of cutting, or the cuts, as in the JSON."""
    ranks: tuple[RankFacts, ...]
    """Ranks of one pipeline."""
    step_seconds: float
    """Seconds of a traced step, without checkpoints, sampling and validation."""
    peak_flops_per_second: float
    """Flops per second that one device reaches in matrix products; 0 means unknown."""
    overflows: Overflows
    pauses: Pauses
    evaluation_seconds: float
    """Seconds of validation between steps."""
    device: Device
    residence: Residence | None = None
    """Where the images were read from; None is unknown."""

    @property
    def spec(self) -> RunSpec:
        """Run spec."""
        return self.job.spec

    @property
    def mfu(self) -> float | None:
        """Model flops of a traced step, as a share of what the devices could do meanwhile; None is unknown."""
        flops = 2 * PASSES_PER_STEP * sum(layer.macs for layer in self.job.layers) * self.setup.images
        could = self.peak_flops_per_second * self.setup.stages * self.setup.replicas * self.step_seconds
        return flops / could if could else None


def facts_of(run_dir: Path) -> FinishedRun:
    """Read a run's folder.

    Raises:
        OutputError: it is no run's folder, no step of it was traced, or none since its layout has changed, or a file is
            damaged; with what to do.
    """
    if not (run_dir / "spec.yaml").is_file():
        raise OutputError(f"{run_dir} is not the folder of a run; name one that launch/train.py has written")
    if not (run_dir / SUMMARY).is_file():
        how = "train with --trace-steps FIRST-LAST, or for 22 steps or more: then steps 20 to 22 are"
        raise OutputError(f"{run_dir}: no step was traced; {how}")
    try:
        return _read(run_dir)
    except (OSError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError) as error:
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        raise OutputError(f"{run_dir}: its files are damaged ({what}); train it again") from None


def _read(run_dir: Path) -> FinishedRun:
    config = read_json(run_dir / "ds_config.json")
    summary = read_json(run_dir / SUMMARY)
    points = read_points(run_dir / METRICS)
    last = points[-1] if points else {}
    method = config["pipeline"]["partition"]
    job = Workload(load_spec(run_dir / "spec.yaml", []), config, on_cpu=summary["device"] == "cpu")
    fp16 = config.get("fp16", {})
    return FinishedRun(
        job=job,
        setup=_setup(run_dir, job, summary),
        partition=tuple(method) if isinstance(method, list) else method,
        ranks=mean_ranks(summary),
        step_seconds=summary["step_seconds"],
        peak_flops_per_second=summary.get("peak_flops_per_second") or 0.0,
        overflows=Overflows(
            skipped=int(last.get("train/skipped_steps", 0)),
            steps=max(int(last.get("step", 1)), 1),
            first_scale=float(fp16.get("loss_scale") or 2 ** fp16.get("initial_scale_power", FIRST_SCALE_POWER)),
            last_scale=last.get("train/loss_scale", 1.0),
        ),
        pauses=read_pauses(run_dir),
        evaluation_seconds=math.fsum(
            point.get("usage/evaluation_seconds", 0.0) for point in read_points(run_dir / EVALUATIONS)[:-1]
        ),
        device=read_device(run_dir),
        residence=Residence(**read_json(path)) if (path := run_dir / RESIDENCE).exists() else None,
    )


def _setup(run_dir: Path, job: Workload, summary: Mapping[str, Any]) -> Setup:
    """Return the layout of the traced step, with the cuts of stages.txt, since "measured" in the JSON leaves them to
    times.

    Raises:
        ValueError: stages.txt is of another U-Net.
        OutputError: the trace is from before the run was resumed on another layout, ZeRO stage or precision.
    """
    config, pipeline = job.config, job.config["pipeline"]
    rows = re.findall(r"^ *\d+(?: on rank \d+)? +(\d+) ", read_text(run_dir / "stages.txt"), re.MULTILINE)
    bounds = tuple(accumulate(map(int, rows), initial=0))
    if bounds[-1] != len(job.layers):
        raise ValueError(f"stages.txt has {bounds[-1]} layers, the U-Net {len(job.layers)}")
    setup = Setup(
        stages=summary["pipeline_ranks"],
        replicas=summary["replicas"],
        schedule=summary["schedule"],
        micro_batch_images=summary["micro_batch_images"],
        micro_batches=summary["micro_batches"],
        checkpoint_interval=pipeline["activation_checkpoint_interval"],
        zero_stage=zero_stage(config),
        offload=offloads(config),
        in_flight=None if (held := pipeline.get("in_flight", "auto")) == "auto" else held,
        bounds=bounds,
        element_bytes=ELEMENT_BYTES[job.precision],
    )
    unchanged = {"zero_stage": setup.zero_stage, "precision": job.precision}  # older summaries lack the precision
    traced = sum(len(rank["phases"]) for rank in summary["ranks"] if rank["replica"] == 0)
    if (traced, setup.micro_batches, setup.micro_batch_images, setup.schedule) != (
        len(bounds) - 1,
        config["gradient_accumulation_steps"],
        config["train_micro_batch_size_per_gpu"],
        pipeline["schedule"],
    ) or any(summary.get(name, now) != now for name, now in unchanged.items()):
        raise OutputError(
            f"{run_dir}: the run was traced before it was resumed on another layout, ZeRO stage or precision; resume "
            "with --trace-steps FIRST-LAST, of steps that are still to come"
        )
    return setup


def mean_ranks(summary: Mapping[str, Any]) -> tuple[RankFacts, ...]:
    """Return the ranks of one pipeline from a trace's summary."""
    return tuple(
        _mean_rank([one for one in summary["ranks"] if one["pipeline_rank"] == rank])
        for rank in range(summary["pipeline_ranks"])
    )


def _mean_rank(replicas: Sequence[Mapping[str, Any]]) -> RankFacts:
    """Average a rank of the pipeline over all processes that have it."""
    by_phase = ("wait_seconds", "send_seconds")
    own = {name: fmean(math.fsum(phase[name] for phase in one["phases"]) for one in replicas) for name in by_phase}
    names = [field.name for field in fields(RankFacts) if field.name not in ("phases", *by_phase)]
    own |= {name: fmean(replica[name] for replica in replicas) for name in names}
    phases = [
        PhaseCosts(
            fmean(phase["forward_seconds_per_micro_batch"] for phase in same),
            fmean(phase["backward_seconds_per_micro_batch"] for phase in same),
            same[0]["activation_bytes"],
            same[0]["gradient_bytes"],
            fmean(phase.get("weight_seconds_per_micro_batch", 0.0) for phase in same),
        )
        for same in zip(*(replica["phases"] for replica in replicas), strict=True)
    ]
    return RankFacts(tuple(phases), **own)
