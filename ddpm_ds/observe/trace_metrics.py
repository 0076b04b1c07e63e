"""What recorded steps come to: seconds of each kind, and the metrics of the timeline.

RUN_DIR/trace/summary.json is a :class:`TraceSummary`. Seconds of a rank or phase are per step, means over the traced
steps, and disjoint: ``step_seconds`` of a rank is forward, backward, wait and send of its phases, and its own data
wait, load, reduce, optimizer, agreement wait, EMA and other. Checkpoints and inspections between steps are in none.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass

from ddpm_ds.observe.recording import WAIT_FOR_RANKS, RankTrace
from ddpm_ds.pipeline.cuts import Schedule
from ddpm_ds.unet.layers import PASSES_PER_STEP

PAUSES = ("checkpoint", "inspection")
"""Spans that are no part of a training step."""
NOTICEABLE = 0.001
"""Share of the time from which on a pause counts; asking whether it is time for one takes less."""


@dataclass(frozen=True)
class PhaseSeconds:
    """Seconds of one stage on one rank."""

    stage: int
    forward_seconds: float
    backward_seconds: float
    forward_seconds_per_micro_batch: float
    backward_seconds_per_micro_batch: float
    wait_seconds: float
    """Waiting for messages."""
    send_seconds: float
    activation_bytes: int
    """Size of a message to the next stage; 0 where there is none."""
    gradient_bytes: int
    """Size of a message to the stage before, likewise."""


@dataclass(frozen=True)
class RankSeconds:
    """Seconds of one process."""

    rank: int
    pipeline_rank: int
    replica: int
    step_seconds: float
    data_wait_seconds: float
    load_seconds: float
    reduce_seconds: float
    optimizer_seconds: float
    agreement_wait_seconds: float
    """Waiting for other ranks in ReduceGrads and OptimizerStep."""
    ema_seconds: float
    checkpoint_seconds: float
    inspection_seconds: float
    other_seconds: float
    """Time in no event: logging, Python between instructions, waiting until what was sent is delivered."""
    phases: tuple[PhaseSeconds, ...]


@dataclass(frozen=True)
class TraceSummary:
    """What the traced steps come to."""

    schedule: Schedule
    micro_batches: int
    """Micro-batches of a replica's step."""
    micro_batch_images: int
    pipeline_ranks: int
    replicas: int
    device: str
    zero_stage: int
    world_size: int
    first_step: int
    last_step: int
    step_seconds: float
    """Mean over the ranks."""
    peak_flops_per_second: float
    """Peak of one device."""
    clock_error_seconds: float
    """By how much the clocks of two ranks may differ at most."""
    ranks: tuple[RankSeconds, ...]


def rank_seconds(trace: RankTrace) -> RankSeconds:
    """Sum up one rank's aligned trace."""
    steps = len(trace.steps)
    taken: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    for event in (event for step in trace.steps for event in step.events):
        taken[event.instruction, event.phase].append(event.end - event.start)

    def each_step(*names: str, phase: int = 0) -> float:
        return sum(sum(taken[name, phase]) for name in names) / steps

    def each(name: str, phase: int) -> float:
        return sum(taken[name, phase]) / max(len(taken[name, phase]), 1)

    whole = sum(step.end - step.start for step in trace.steps) / steps
    return RankSeconds(
        rank=trace.rank,
        pipeline_rank=trace.pipeline_rank,
        replica=trace.replica,
        step_seconds=whole - each_step(*PAUSES),
        data_wait_seconds=each_step("DataWait"),
        load_seconds=each_step("LoadMicroBatch"),
        reduce_seconds=each_step("ReduceGrads"),
        optimizer_seconds=each_step("OptimizerStep"),
        agreement_wait_seconds=each_step(WAIT_FOR_RANKS),
        ema_seconds=each_step("EMA"),
        checkpoint_seconds=each_step("checkpoint"),
        inspection_seconds=each_step("inspection"),
        other_seconds=whole - sum(map(sum, taken.values())) / steps,
        phases=tuple(
            PhaseSeconds(
                stage=stage,
                forward_seconds=each_step("ForwardPass", phase=phase),
                backward_seconds=each_step("BackwardPass", phase=phase),
                forward_seconds_per_micro_batch=each("ForwardPass", phase),
                backward_seconds_per_micro_batch=each("BackwardPass", phase),
                wait_seconds=each_step("RecvActivation", "RecvGrad", phase=phase),
                send_seconds=each_step("SendActivation", "SendGrad", phase=phase),
                activation_bytes=activation_bytes,
                gradient_bytes=gradient_bytes,
            )
            for phase, (stage, (activation_bytes, gradient_bytes)) in enumerate(
                zip(trace.stages, trace.message_bytes, strict=True)
            )
        ),
    )


def timeline_metrics(summary: TraceSummary, macs_per_image: int) -> dict[str, float]:
    """The metrics of a trace, by the names that dashboards and comparisons read.

    ``macs_per_image`` are the multiply-accumulates of one image's forward pass through the whole U-Net. What belongs to
    a rank as a whole stands under the stage that it holds in phase 0, waiting for other ranks included.
    """
    ranks, mean = summary.ranks, statistics.fmean
    values: dict[str, float] = {}
    for number in range(summary.pipeline_ranks):
        replicas = [rank for rank in ranks if rank.pipeline_rank == number]
        for phases in zip(*(rank.phases for rank in replicas), strict=True):
            for part in ("forward", "backward", "wait", "send"):
                name = f"stage{phases[0].stage}/{part}_seconds"
                values[name] = mean(getattr(phase, f"{part}_seconds") for phase in phases)
        own = f"stage{replicas[0].phases[0].stage}"
        values[f"{own}/wait_seconds"] += mean(rank.agreement_wait_seconds for rank in replicas)
        values[f"{own}/load_seconds"] = mean(rank.data_wait_seconds + rank.load_seconds for rank in replicas)
        for part in ("reduce", "optimizer", "ema"):
            values[f"{own}/{part}_seconds"] = mean(getattr(rank, f"{part}_seconds") for rank in replicas)
    computing = [sum(phase.forward_seconds + phase.backward_seconds for phase in rank.phases) for rank in ranks]
    waiting = [rank.agreement_wait_seconds + sum(phase.wait_seconds for phase in rank.phases) for rank in ranks]
    images = summary.micro_batches * summary.micro_batch_images * summary.replicas
    flops = 2 * macs_per_image * PASSES_PER_STEP * images
    values |= {
        "perf/traced_step_seconds": summary.step_seconds,
        "perf/bubble_fraction": mean(wait / rank.step_seconds for wait, rank in zip(waiting, ranks, strict=True)),
        "perf/imbalance": max(computing) / mean(computing) - 1,
        "perf/mfu": flops / summary.step_seconds / (summary.peak_flops_per_second * len(ranks)),
        "perf/data_wait_fraction": max(rank.data_wait_seconds / rank.step_seconds for rank in ranks),
    }
    for pause in PAUSES:
        share = mean(
            getattr(rank, f"{pause}_seconds") / (rank.step_seconds + rank.checkpoint_seconds + rank.inspection_seconds)
            for rank in ranks
        )
        if share > NOTICEABLE:
            values[f"perf/{pause}_fraction"] = share
    return values
