"""Finished run, read from its folder: layout, device, traced step, and the seconds of each layer."""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean, median
from typing import Any

from ddpm_ds.config.ds_config import resolve
from ddpm_ds.config.ds_model import DS_CONFIG
from ddpm_ds.config.spec import RunSpec
from ddpm_ds.ground.errors import DsConfigError, LayoutError, OutputError
from ddpm_ds.ground.formats import read_json
from ddpm_ds.observe.device_speed import LayerSeconds
from ddpm_ds.observe.observer import Pauses, read_pauses
from ddpm_ds.pipeline.cuts import Stage
from ddpm_ds.planning.costs import beside_a_message
from ddpm_ds.planning.inputs import Machine, Workload, rank_stages
from ddpm_ds.planning.simulate import PhaseCosts, RankCosts
from ddpm_ds.schema.layout import Layout
from ddpm_ds.tracking.run_folder import EVALUATIONS, MACHINE, METRICS, SPEC, STAGES, RunFolder
from ddpm_ds.unet.layers import PASSES_PER_STEP, Layer
from ddpm_ds.unet.shards import swaps_of

SUMMARY = Path("trace") / "summary.json"  # file in a run's folder with the summary of the traced steps
LAID_OUT = (
    *("schedule", "pipeline_ranks", "replicas", "tensor_size", "space_size", "micro_batches", "micro_batch_images"),
    *("zero_stage", "precision"),
)
"""Keys of a trace's summary whose values must equal those of the run's last start."""
MOST_STARTUP = 0.9  # maximum share of a stage's seconds that counts as start-up, which is measured separately and later
LEAST_BACKWARD = 0.2  # smallest share of a checkpointed backward pass that is not recomputation


@dataclass(frozen=True)
class RankFacts(RankCosts):
    """Seconds of a traced step on a rank of the pipeline, mean over its replicas; passes are without waiting."""

    wait_seconds: float = 0.0  # seconds waiting for messages of other stages
    send_seconds: float = 0.0
    data_wait_seconds: float = 0.0  # seconds waiting for the loader
    load_seconds: float = 0.0  # seconds of the rest of loading: copy to the device, noise
    agreement_wait_seconds: float = 0.0
    """Seconds waiting for other ranks, before gradients are reduced and before the optimizer's step."""
    other_seconds: float = 0.0
    swap_seconds: float = 0.0  # seconds of passes that wait for swaps with a space group


@dataclass(frozen=True)
class Overflows:
    """Number of fp16 steps skipped since the run began, and the loss scale."""

    skipped: int = 0
    steps: int = 1
    first_scale: float = 2.0**16  # DeepSpeed's, unless the JSON gives another
    last_scale: float = 1.0


@dataclass(frozen=True)
class FinishedRun:
    """Data of a finished run that a verdict needs."""

    job: Workload
    layout: Layout  # layout of the traced step
    bounds: tuple[int, ...]  # first layers of the stages of the traced step, and the end
    ranks: tuple[RankFacts, ...]  # ranks of one pipeline
    step_seconds: float  # seconds of a traced step without pauses, or of the run's steps if replayed
    peak_flops_per_second: float  # flops per second that one device reaches in matrix products; 0 means unknown
    overflows: Overflows
    pauses: Pauses
    evaluation_seconds: float  # seconds of validation between steps
    machine: Machine  # machine that the run was planned for
    host_devices: int = 1  # number of devices of a host; 1 if unknown
    replayed: bool = False  # whether steps are CUDA graphs, in which no kernel is launched by the host

    @property
    def spec(self) -> RunSpec:
        return self.job.spec

    def mean(self, *parts: str) -> float:
        """Return the mean over the ranks of the sum of these attributes of :class:`RankFacts`."""
        return fmean(math.fsum(getattr(rank, part) for part in parts) for rank in self.ranks)

    @property
    def stepping(self) -> float:
        """Share of the run's time spent in steps."""
        return 1 - self.pauses.checkpoint_share - self.pauses.sampling_share

    @property
    def mfu(self) -> float | None:
        """Model flops of a traced step, as a share of the devices' flops; None is unknown."""
        flops = 2 * PASSES_PER_STEP * sum(layer.work for layer in self.job.layers) * self.layout.batch_images
        could = self.peak_flops_per_second * self.layout.world_size * self.step_seconds
        return flops / could if could else None

    @property
    def own_layers(self) -> tuple[Layer, ...]:
        """Layers, split as the run split them."""
        return self.job.of(self.layout).layers

    @cached_property
    def rates(self) -> list[tuple[LayerSeconds, LayerSeconds]]:
        """Seconds of each layer's passes for each micro-batch, and for each multiply-accumulate.

        A stage's seconds, less start-up, are divided among its layers by their flops.
        """
        stages = itertools.chain(*rank_stages(self.own_layers, self.bounds, self.layout.schedule))
        phases = itertools.chain(*map(self._computing, self.ranks))
        owned = sorted(zip(stages, phases, strict=True), key=lambda one: one[0].start)
        return [rate for stage, phase in owned for rate in self._rates_of(stage, phase)]

    def _computing(self, rank: RankFacts) -> list[PhaseCosts]:
        """Return a rank's passes without their waits for swaps."""
        share = max(0.0, 1 - rank.swap_seconds / (self.layout.micro_batches * rank.pass_seconds))
        return [
            replace(one, forward_seconds=share * one.forward_seconds, backward_seconds=share * one.backward_seconds)
            for one in rank.phases
        ]

    def _rates_of(self, stage: Stage, phase: PhaseCosts) -> list[tuple[LayerSeconds, LayerSeconds]]:
        own, images = self.own_layers[stage.start : stage.stop], self.layout.micro_batch_images
        known, unknown = {} if self.replayed else self.machine.startup, LayerSeconds(0.0, 0.0)
        starts, macs = [known.get(type(layer).__name__, unknown) for layer in own], sum(layer.macs for layer in own)

        def rate(measured: float, startup: float) -> tuple[float, float]:
            """Return the share of the layers' start-up that counts, and seconds per multiply-accumulate."""
            share = min(1.0, MOST_STARTUP * measured / startup) if startup else 0.0
            return share, (measured - share * startup) / (macs * images)

        share, per_mac = rate(phase.forward_seconds, sum(one.forward for one in starts))
        backward = phase.backward_seconds
        if self.layout.checkpoint_interval:  # without the forwards that are computed again, all but the first layer's
            repeated = [*zip(starts, own, strict=True)][stage.start == 0 :]
            again = math.fsum(share * start.forward + images * layer.macs * per_mac for start, layer in repeated)
            backward = max(backward - again, LEAST_BACKWARD * backward)
        share_back, per_mac_back = rate(backward, sum(one.backward for one in starts))
        rest = LayerSeconds(per_mac, per_mac_back)
        return [(LayerSeconds(share * start.forward, share_back * start.backward), rest) for start in starts]

    def layer_times(self, layers: Sequence[Layer], images: int) -> list[LayerSeconds]:
        """Return the passes of every layer, split in any way, for one micro-batch, without recomputation and alone."""
        found, alone = [], 1 / beside_a_message(self.machine, self.layout)
        for (start, rest), layer in zip(self.rates, layers, strict=True):
            macs = images * layer.macs
            took = LayerSeconds(start.forward + macs * rest.forward, start.backward + macs * rest.backward)
            found.append(took.times(alone))
        return found

    @property
    def swaps(self) -> int:
        """Number of swaps of a micro-batch on all ranks of a pipeline."""
        return sum(one.number for one in swaps_of(self.own_layers, self.layout.interval))

    @cached_property
    def recomputation_seconds(self) -> float:
        """Mean seconds of recomputation in a step, over the ranks."""
        if not self.layout.checkpoint_interval:
            return 0.0
        measured = math.fsum(phase.backward_seconds for rank in self.ranks for phase in self._computing(rank))
        times = self.layer_times(self.own_layers, self.layout.micro_batch_images)
        own = math.fsum(layer.backward for layer in times)
        return self.layout.micro_batches * (measured - own) / self.layout.stages

    @cached_property
    def startup_seconds(self) -> float:
        """Mean seconds over the ranks that a micro-batch's layers take before they compute."""
        return sum(start.forward + start.backward for start, _ in self.rates) / self.layout.stages


def machine_json(machine: Machine) -> str:
    """Return the text of :data:`ddpm_ds.tracking.run_folder.MACHINE`."""
    return f"{json.dumps(asdict(machine), indent=2)}\n"


def _machine(path: Path) -> Machine:
    record = read_json(path)
    startup = {kind: LayerSeconds(**seconds) for kind, seconds in record["startup"].items()}
    times = record["layer_times"] and tuple(LayerSeconds(**seconds) for seconds in record["layer_times"])
    swap = record["swap"] and tuple(record["swap"])
    return Machine(**record | {"startup": startup, "layer_times": times, "swap": swap})


def facts_of(run_dir: Path) -> FinishedRun:
    """Read a run's folder; OutputError if it is none, has no traced step of its layout, or a file is damaged."""
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
    ranks = tuple(
        _mean([one for one in summary["ranks"] if one["pipeline_rank"] == rank])
        for rank in range(summary["pipeline_ranks"])
    )
    step_seconds = summary["step_seconds"]
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
        machine=_machine(run_dir / MACHINE),
        host_devices=summary.get("host_processes", 1),
        replayed=replayed,
    )


def _replayed(rank: RankFacts, traced: float, replayed: float) -> RankFacts:
    """Scale a traced rank's seconds to a replayed step; loading, which no graph has, stays."""
    loading = rank.data_wait_seconds + rank.load_seconds
    factor = max(replayed - loading, 0.0) / (traced - loading) if traced > loading else 1.0

    def shorter(costs: Any, *names: str) -> Any:
        return replace(costs, **{f"{name}_seconds": factor * getattr(costs, f"{name}_seconds") for name in names})

    phases = tuple(shorter(phase, "forward", "backward", "weight") for phase in rank.phases)
    whole: RankFacts = shorter(rank, "reduce", "optimizer", "wait", "send", "agreement_wait", "other", "swap")
    return replace(whole, phases=phases)


def _layout(run: RunFolder, job: Workload, summary: Mapping[str, Any]) -> Layout:
    """Return the layout of the traced step; OutputError if the run was resumed on another one since."""
    bounds, stages, replicas = run.bounds, summary["pipeline_ranks"], summary["replicas"]
    if bounds[-1] != len(job.layers):
        raise ValueError(f"{STAGES} has {bounds[-1]} layers, the U-Net {len(job.layers)}")
    traced = sum(len(rank["phases"]) for rank in summary["ranks"] if rank["replica"] == rank["part"] == 0)
    with suppress(DsConfigError, LayoutError):  # the JSON is for another number of ranks
        world_size = stages * replicas * summary["tensor_size"] * summary["space_size"]
        layout = resolve(job.config, job.spec, world_size=world_size, stages=None, path=run.folder).layout
        now = vars(layout) | layout.sizes | {"precision": job.precision, "pipeline_ranks": layout.stages}
        if traced == len(bounds) - 1 and all(summary[name] == now[name] for name in LAID_OUT):
            return replace(layout, across_hosts="auto")
    raise OutputError(
        f"{run.folder}: the run was traced before it was resumed on another layout, ZeRO stage or precision; "
        "resume with --trace-steps FIRST-LAST of later steps"
    )


def _mean(replicas: Sequence[Mapping[str, Any]]) -> RankFacts:
    """Return a rank of one pipeline: the mean of the processes that have it in a trace's summary."""
    names = [field.name for field in fields(RankFacts) if field.name != "phases"]
    own = {
        name: fmean(one[name] if name in one else math.fsum(phase[name] for phase in one["phases"]) for one in replicas)
        for name in names
    }
    phases = []
    for same in zip(*(replica["phases"] for replica in replicas), strict=True):
        forward, backward, weights = (
            fmean(phase[f"{kind}_seconds_per_micro_batch"] for phase in same)
            for kind in ("forward", "backward", "weight")
        )
        phases.append(PhaseCosts(forward, backward, same[0]["activation_bytes"], same[0]["gradient_bytes"], weights))
    return RankFacts(tuple(phases), **own)
