"""Finished run, read from its folder: layout, device, traced step, and the seconds of each layer."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean, median
from typing import Any

from ddpm_ds.config.ds_config import Layout, tensor_split
from ddpm_ds.config.ds_model import DS_CONFIG
from ddpm_ds.config.spec import RunSpec
from ddpm_ds.errors import OutputError
from ddpm_ds.files import EVALUATIONS, METRICS, SPEC, STAGES, read_json
from ddpm_ds.observe.device_speed import Device, LayerSeconds, read_device
from ddpm_ds.observe.observer import Pauses, read_pauses
from ddpm_ds.pipeline.cuts import Stage
from ddpm_ds.predict.layouts import Workload, rank_stages
from ddpm_ds.predict.simulate import PhaseCosts, RankCosts
from ddpm_ds.tracking.run_folder import RunFolder
from ddpm_ds.unet.layers import PASSES_PER_STEP, Layer

SUMMARY = Path("trace") / "summary.json"
"""File in a run's folder with the summary of the traced steps."""
FIRST_SCALE_POWER = 16
"""Power of two of DeepSpeed's initial loss scale."""
MOST_STARTUP = 0.9
"""Maximum share of a stage's seconds that counts as start-up, which is measured separately and later."""
LEAST_BACKWARD = 0.2
"""Smallest share of a checkpointed backward pass that is not recomputation."""


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
    other_seconds: float = 0.0


@dataclass(frozen=True)
class Overflows:
    """Number of fp16 steps skipped since the run began, and the loss scale."""

    skipped: int = 0
    steps: int = 1
    first_scale: float = 2.0**FIRST_SCALE_POWER
    last_scale: float = 1.0


@dataclass(frozen=True)
class LayerRate:
    """Seconds of a layer's passes: a constant for each micro-batch, plus a part for each image."""

    start: LayerSeconds
    per_image: LayerSeconds

    def seconds(self, images: float) -> LayerSeconds:
        """Return the seconds of the layer's passes of one micro-batch."""
        return LayerSeconds(
            self.start.forward + images * self.per_image.forward,
            self.start.backward + images * self.per_image.backward,
        )


@dataclass(frozen=True)
class FinishedRun:
    """Data of a finished run that a verdict needs."""

    job: Workload
    layout: Layout
    """Layout of the traced step."""
    bounds: tuple[int, ...]
    """First layers of the stages of the traced step, and the end."""
    ranks: tuple[RankFacts, ...]
    """Ranks of one pipeline."""
    step_seconds: float
    """Seconds of a traced step, without checkpoints, sampling and validation; of the run's steps if replayed."""
    peak_flops_per_second: float
    """Flops per second that one device reaches in matrix products; 0 means unknown."""
    overflows: Overflows
    pauses: Pauses
    evaluation_seconds: float
    """Seconds of validation between steps."""
    device: Device
    host_devices: int = 1
    """Number of devices of a host; 1 if unknown."""
    replayed: bool = False
    """Whether steps are CUDA graphs, in which no kernel is launched by the host."""

    @property
    def spec(self) -> RunSpec:
        """Run spec."""
        return self.job.spec

    @property
    def stepping(self) -> float:
        """Share of the run's time spent in steps."""
        return 1 - self.pauses.checkpoint_share - self.pauses.sampling_share

    @property
    def mfu(self) -> float | None:
        """Model flops of a traced step, as a share of what the devices could do meanwhile; None is unknown."""
        flops = 2 * PASSES_PER_STEP * sum(layer.macs for layer in self.job.layers) * self.layout.batch_images
        could = self.peak_flops_per_second * self.layout.world_size * self.step_seconds
        return flops / could if could else None

    @property
    def own_layers(self) -> tuple[Layer, ...]:
        """Layers as the run split them."""
        return self.job.of(self.layout).layers

    @cached_property
    def rates(self) -> list[LayerRate]:
        """Rates of every layer; a stage's seconds, less start-up, are divided among its layers by their flops."""
        rates: dict[int, LayerRate] = {}
        stages = rank_stages(self.own_layers, self.bounds, self.layout.schedule)
        for rank, own in zip(self.ranks, stages, strict=True):
            for phase, stage in zip(rank.phases, own, strict=True):
                rates |= enumerate(self._rates_of(stage, phase), stage.start)
        return [rates[number] for number in range(len(self.own_layers))]

    def _rates_of(self, stage: Stage, phase: PhaseCosts) -> list[LayerRate]:
        own = self.own_layers[stage.start : stage.stop]
        startup_of = (Device() if self.replayed else self.device).startup_of
        starts, whole = [startup_of([layer]) for layer in own], startup_of(own)
        work = sum(layer.macs for layer in own) * self.layout.micro_batch_images

        def rates(measured: float, startup: float) -> tuple[float, float]:
            """Return the share of the layers' start-up that counts, and seconds per multiply-accumulate."""
            share = min(1.0, MOST_STARTUP * measured / startup) if startup else 0.0
            return share, (measured - share * startup) / work

        share, per_mac = rates(phase.forward_seconds, whole.forward)
        forwards = [(share * start.forward, per_mac * layer.macs) for layer, start in zip(own, starts, strict=True)]
        backward = phase.backward_seconds
        if self.layout.checkpoint_interval:  # without the forwards that are computed again, all but the first layer's
            again = forwards[1:] if stage.start == 0 else forwards
            recomputed = math.fsum(start + self.layout.micro_batch_images * per_image for start, per_image in again)
            backward = max(backward - recomputed, LEAST_BACKWARD * backward)
        share, per_mac = rates(backward, whole.backward)
        return [
            LayerRate(LayerSeconds(forward[0], share * start.backward), LayerSeconds(forward[1], per_mac * layer.macs))
            for layer, start, forward in zip(own, starts, forwards, strict=True)
        ]

    def layer_times(self, layers: Sequence[Layer], images: int) -> list[LayerSeconds]:
        """Return the passes of every layer for one micro-batch, without recomputation; ``layers`` may be split in
        another way than the run's, and then take by their multiply-accumulates.
        """
        together = zip(self.rates, layers, self.own_layers, strict=True)
        return [rate.seconds(images * layer.macs / own.macs) for rate, layer, own in together]

    @cached_property
    def recomputation_seconds(self) -> float:
        """Mean seconds of recomputation in a step, over the ranks."""
        if not self.layout.checkpoint_interval:
            return 0.0
        measured = math.fsum(phase.backward_seconds for rank in self.ranks for phase in rank.phases)
        times = self.layer_times(self.own_layers, self.layout.micro_batch_images)
        own = math.fsum(layer.backward for layer in times)
        return self.layout.micro_batches * (measured - own) / self.layout.stages

    @cached_property
    def startup_seconds(self) -> float:
        """Mean seconds over the ranks that a micro-batch's layers take before they compute."""
        return sum(layer.start.forward + layer.start.backward for layer in self.rates) / self.layout.stages


def facts_of(run_dir: Path) -> FinishedRun:
    """Read a run's folder.

    Raises:
        OutputError: it is no run's folder, no step of it was traced, or none since its layout has changed, or a file is
            damaged; with what to do.
    """
    if not (run_dir / SPEC).is_file():
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
    run, summary = RunFolder(run_dir), read_json(run_dir / SUMMARY)
    config, points = DS_CONFIG.read(run.ds_config), run.points(METRICS)
    last = points[-1] if points else {}
    job = Workload(run.spec, config, on_cpu=summary["device"] == "cpu")
    layout = _layout(run, job, summary)
    ranks, step_seconds = mean_ranks(summary), summary["step_seconds"]
    own_seconds = [point["usage/step_seconds"] for point in points[len(points) // 2 :] if "usage/step_seconds" in point]
    if replayed := bool(own_seconds and summary.get("graphs")):
        step_seconds = median(own_seconds)
        ranks = tuple(_replayed(rank, summary["step_seconds"], step_seconds) for rank in ranks)
    return FinishedRun(
        job=job,
        layout=layout,
        bounds=run.bounds,
        ranks=ranks,
        step_seconds=step_seconds,
        peak_flops_per_second=summary.get("peak_flops_per_second") or 0.0,
        overflows=Overflows(
            skipped=int(last.get("train/skipped_steps", 0)),
            steps=max(int(last.get("step", 1)), 1),
            first_scale=config.fp16.loss_scale or 2.0**config.fp16.initial_scale_power,
            last_scale=last.get("train/loss_scale", 1.0),
        ),
        pauses=read_pauses(run_dir),
        evaluation_seconds=math.fsum(
            point.get("usage/evaluation_seconds", 0.0) for point in run.points(EVALUATIONS)[:-1]
        ),
        device=read_device(run_dir),
        host_devices=summary.get("host_processes", 1),
        replayed=replayed,
    )


def _replayed(rank: RankFacts, traced: float, replayed: float) -> RankFacts:
    """Return the seconds of a step that is a CUDA graph, from those of a traced one, which the host has launched kernel
    by kernel: all but loading, which is in no graph, are shorter in proportion.
    """
    loading = rank.data_wait_seconds + rank.load_seconds
    factor = max(replayed - loading, 0.0) / (traced - loading) if traced > loading else 1.0

    def shorter(costs: Any, *names: str) -> Any:
        return replace(costs, **{f"{name}_seconds": factor * getattr(costs, f"{name}_seconds") for name in names})

    phases = tuple(shorter(phase, "forward", "backward", "weight") for phase in rank.phases)
    whole: RankFacts = shorter(rank, "reduce", "optimizer", "wait", "send", "agreement_wait", "other")
    return replace(whole, phases=phases)


def _layout(run: RunFolder, job: Workload, summary: Mapping[str, Any]) -> Layout:
    """Return the layout of the traced step.

    Raises:
        ValueError: stages.txt is of another U-Net.
        OutputError: the trace is from before the run was resumed on another layout, ZeRO stage or precision.
    """
    config, bounds = job.config, run.bounds
    if bounds[-1] != len(job.layers):
        raise ValueError(f"{STAGES} has {bounds[-1]} layers, the U-Net {len(job.layers)}")
    layout = Layout(
        stages=summary["pipeline_ranks"],
        replicas=summary["replicas"],
        schedule=summary["schedule"],
        micro_batch_images=summary["micro_batch_images"],
        micro_batches=summary["micro_batches"],
        checkpoint_interval=config.pipeline.activation_checkpoint_interval,
        zero_stage=config.zero_optimization.stage,
        offload=config.offloads,
        in_flight=config.pipeline.in_flight,
        tensor=tensor_split(config),
    )
    unchanged = {"zero_stage": layout.zero_stage, "precision": job.precision, "tensor_size": layout.tensor.size}
    first = [rank for rank in summary["ranks"] if rank["replica"] == rank.get("part", 0) == 0]
    traced = sum(len(rank["phases"]) for rank in first)
    if (traced, layout.micro_batches, layout.micro_batch_images, layout.schedule) != (
        len(bounds) - 1,
        config.gradient_accumulation_steps,
        config.train_micro_batch_size_per_gpu,
        config.pipeline.schedule,
    ) or any(summary.get(name, now) != now for name, now in unchanged.items()):  # older summaries lack some
        raise OutputError(
            f"{run.folder}: the run was traced before it was resumed on another layout, ZeRO stage or precision; "
            "resume with --trace-steps FIRST-LAST, of steps that are still to come"
        )
    return layout


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
