"""What is known of a finished run: the traced step, the loss curve's last point, the device; read from its folder."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

from ddpm_ds.config.ds_config import enabled, zero_stage
from ddpm_ds.config.spec import RunSpec
from ddpm_ds.config.spec_file import load_spec
from ddpm_ds.errors import OutputError
from ddpm_ds.observe.device_speed import Device, read_device
from ddpm_ds.observe.observer import Pauses, read_pauses
from ddpm_ds.pipeline.cuts import Schedule
from ddpm_ds.pipeline.schedule import PhaseCosts
from ddpm_ds.unet.layers import PASSES_PER_STEP, Layer, unet_layers

SUMMARY = Path("trace") / "summary.json"
"""In a run's folder: what the traced steps came to."""
HOW_TO_TRACE = "train with --trace-steps FIRST-LAST, or for 22 steps or more: then steps 20 to 22 are"


FIRST_SCALE = 2.0**16
"""The loss scale with which DeepSpeed begins."""
Method = Literal["flops", "measured", "parameters", "uniform"]
"""How the JSON asks for cuts, where it does not list them."""


@dataclass(frozen=True)
class RankFacts:
    """A rank of the pipeline, its replicas averaged, in seconds of a traced step; its parts are disjoint."""

    phases: tuple[PhaseCosts, ...]
    """Of one micro-batch, without waiting."""
    wait: float = 0.0
    """For messages of other stages."""
    send: float = 0.0
    data_wait: float = 0.0
    """For the loader."""
    load: float = 0.0
    """The rest of loading: to the device, noise."""
    reduce: float = 0.0
    optimizer: float = 0.0
    agreement_wait: float = 0.0
    """For other ranks, before gradients are reduced and before the optimizer's step."""
    ema: float = 0.0
    other: float = 0.0


@dataclass(frozen=True)
class Overflows:
    """Steps that fp16 threw away, since the run began."""

    skipped: int = 0
    steps: int = 1
    first_scale: float = FIRST_SCALE
    last_scale: float = 1.0


@dataclass(frozen=True)
class FinishedRun:
    """All that a verdict is made of."""

    spec: RunSpec
    schedule: Schedule
    partition: Method | tuple[int, ...]
    """As the JSON says it, or its cuts."""
    bounds: tuple[int, ...]
    """Of the stages, in layers."""
    replicas: int
    micro_batches: int
    micro_batch_images: int
    precision: Literal["fp32", "fp16", "bf16"]
    zero_stage: int
    checkpoint_interval: int
    """Layers between activations that are kept; 0 keeps all."""
    on_cpu: bool
    ranks: tuple[RankFacts, ...]
    """Of one pipeline."""
    step_seconds: float
    """Of a traced step; without checkpoints and inspections."""
    peak_flops_per_second: float
    """That one device reaches in matrix products; 0 is unknown."""
    overflows: Overflows
    pauses: Pauses
    evaluation_seconds: float
    """Of the inspections between steps, what held-out losses took."""
    device: Device

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """The U-Net."""
        data = self.spec.data
        return unet_layers(self.spec.unet, image_channels=data.channels, image_size=data.image_size)

    @property
    def stages(self) -> int:
        """Ranks of a pipeline."""
        return len(self.ranks)

    @property
    def step_images(self) -> int:
        """Images of an optimizer step."""
        return self.micro_batch_images * self.micro_batches * self.replicas

    @property
    def element_bytes(self) -> int:
        """Of an activation: a CPU computes fp16 layers in fp32."""
        return 4 if self.on_cpu or self.precision == "fp32" else 2

    @property
    def mfu(self) -> float | None:
        """The model's flops of a traced step over what the devices could do meanwhile; None is unknown."""
        flops = 2 * PASSES_PER_STEP * sum(layer.macs for layer in self.layers) * self.step_images
        could = self.peak_flops_per_second * self.stages * self.replicas * self.step_seconds
        return flops / could if could else None


def facts_of(run_dir: Path) -> FinishedRun:
    """Read them from a run's folder.

    Raises:
        OutputError: it is no run's folder, no step of it was traced, or none since its layout has changed, or a file is
            damaged; with what to do.
    """
    if not (run_dir / "spec.yaml").is_file():
        raise OutputError(f"{run_dir} is not the folder of a run; name one that launch/train.py has written")
    if not (run_dir / SUMMARY).is_file():
        raise OutputError(f"{run_dir}: no step was traced; {HOW_TO_TRACE}")
    try:
        return _read(run_dir)
    except (OSError, ValueError, KeyError, TypeError, IndexError, ZeroDivisionError) as error:
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        raise OutputError(f"{run_dir}: its files are damaged ({what}); train it again") from None


def _read(run_dir: Path) -> FinishedRun:
    spec = load_spec(run_dir / "spec.yaml", [])
    config = json.loads((run_dir / "ds_config.json").read_text())
    summary = json.loads((run_dir / SUMMARY).read_text())
    points = _lines(run_dir / "metrics.jsonl")
    last = points[-1] if points else {}
    pipeline, schedule = config["pipeline"], summary["schedule"]
    method, bounds = pipeline["partition"], _bounds(run_dir, spec)
    _check_layout(run_dir, config, len(bounds) - 1, summary)
    return FinishedRun(
        spec=spec,
        schedule=schedule,
        partition=tuple(method) if isinstance(method, list) else method,
        bounds=bounds,
        replicas=summary["replicas"],
        micro_batches=summary["micro_batches"],
        micro_batch_images=summary["micro_batch_images"],
        precision="fp16" if enabled(config, "fp16") else "bf16" if enabled(config, "bf16") else "fp32",
        zero_stage=zero_stage(config),
        checkpoint_interval=pipeline["activation_checkpoint_interval"],
        on_cpu=summary["device"] == "cpu",
        ranks=tuple(
            _mean_rank([one for one in summary["ranks"] if one["pipeline_rank"] == rank])
            for rank in range(summary["pipeline_ranks"])
        ),
        step_seconds=summary["step_seconds"],
        peak_flops_per_second=summary.get("peak_flops_per_second") or 0.0,
        overflows=Overflows(
            skipped=int(last.get("train/skipped_steps", 0)),
            steps=max(int(last.get("step", 1)), 1),
            first_scale=_first_scale(config.get("fp16", {})),
            last_scale=last.get("train/loss_scale", 1.0),
        ),
        pauses=read_pauses(run_dir),
        evaluation_seconds=math.fsum(
            point.get("perf/evaluation_seconds", 0.0) for point in _lines(run_dir / "evaluations.jsonl")[:-1]
        ),
        device=read_device(run_dir),
    )


def _bounds(run_dir: Path, spec: RunSpec) -> tuple[int, ...]:
    """The stages' first layers and the end: those of stages.txt, since times decide where the JSON says measured."""
    rows = re.findall(r"^ *\d+(?: on rank \d+)? +(\d+) ", (run_dir / "stages.txt").read_text(), re.MULTILINE)
    bounds = tuple(accumulate(map(int, rows), initial=0))
    data = spec.data
    layers = unet_layers(spec.unet, image_channels=data.channels, image_size=data.image_size)
    if bounds[-1] != len(layers):
        raise ValueError(f"stages.txt has {bounds[-1]} layers, the U-Net {len(layers)}")
    return bounds


def _check_layout(run_dir: Path, config: Mapping[str, Any], stages: int, summary: Mapping[str, Any]) -> None:
    """Refuse a trace from before the run was resumed on another layout.

    Raises:
        OutputError: the trace has other stages or micro-batches.
    """
    traced = sum(len(rank["phases"]) for rank in summary["ranks"] if rank["replica"] == 0)
    if (traced, summary["micro_batches"], summary["micro_batch_images"], summary["schedule"]) != (
        stages,
        config["gradient_accumulation_steps"],
        config["train_micro_batch_size_per_gpu"],
        config["pipeline"]["schedule"],
    ):
        raise OutputError(
            f"{run_dir}: the run was traced before it was resumed on another layout; go on with --trace-steps "
            "FIRST-LAST, of steps that are still to come"
        )


def _first_scale(fp16: Mapping[str, Any]) -> float:
    """The loss scale of the first step: a fixed one, or where a dynamic one begins."""
    power = fp16.get("initial_scale_power")
    return float(fp16.get("loss_scale") or (FIRST_SCALE if power is None else 2**power))


def _mean_rank(replicas: Sequence[Mapping[str, Any]]) -> RankFacts:
    """A rank of the pipeline from all processes that have it."""

    def mean(values: Sequence[float]) -> float:
        return math.fsum(values) / len(values)

    def own(name: str) -> float:
        return mean([replica[name] for replica in replicas])

    def summed(name: str) -> float:
        return mean([math.fsum(phase[name] for phase in replica["phases"]) for replica in replicas])

    phases = [
        PhaseCosts(
            mean([phase["forward_seconds_per_micro_batch"] for phase in same]),
            mean([phase["backward_seconds_per_micro_batch"] for phase in same]),
            same[0]["activation_bytes"],
            same[0]["gradient_bytes"],
        )
        for same in zip(*(replica["phases"] for replica in replicas), strict=True)
    ]
    return RankFacts(
        tuple(phases),
        wait=summed("wait_seconds"),
        send=summed("send_seconds"),
        data_wait=own("data_wait_seconds"),
        load=own("load_seconds"),
        reduce=own("reduce_seconds"),
        optimizer=own("optimizer_seconds"),
        agreement_wait=own("agreement_wait_seconds"),
        ema=own("ema_seconds"),
        other=own("other_seconds"),
    )


def _lines(file: Path) -> list[dict[str, Any]]:
    """The complete lines of a file of points; a line that was cut off when the disk was full is left out."""
    found = []
    for line in file.read_text().splitlines() if file.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found
