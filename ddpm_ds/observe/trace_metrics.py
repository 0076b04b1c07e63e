"""Sums over recorded steps: seconds of each kind of event, and the metrics of the timeline.

RUN_DIR/trace/summary.json has the circumstances of the trace and for each rank what :func:`rank_seconds` returns.
Checkpoints, samples and validation between steps do not count as part of a step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from ddpm_ds.observe.recording import WAIT_FOR_RANKS, RankTrace
from ddpm_ds.unet.layers import PASSES_PER_STEP

PAUSES = {"checkpoint": ["checkpoint"], "inspection": ["inspection"]}
"""Events between steps, by the name under which their seconds are summed."""
OWN = {
    "data_wait": ["DataWait"],
    "load": ["LoadMicroBatch"],
    "reduce": ["ReduceGrads"],
    "optimizer": ["OptimizerStep"],
    "agreement_wait": [WAIT_FOR_RANKS],  # for other ranks, in ReduceGrads and OptimizerStep
    "ema": ["EMA"],
}
"""Events of a rank as a whole, by the name under which their seconds are summed."""
PHASES = {
    "forward": ["ForwardPass"],
    "backward": ["BackwardPass", "InputGradients", "WeightGradients"],
    "wait": ["RecvActivation", "RecvGrad"],  # for messages
    "send": ["SendActivation", "SendGrad"],
}
"""Events of one phase of a rank, by the name under which their seconds are summed."""
NOTICEABLE = 0.001
"""Share of the time above which a pause is reported; less is only the check whether a pause is due."""


def rank_seconds(trace: RankTrace) -> dict[str, Any]:
    """Sum up one rank's aligned trace: seconds per step, means over the traced steps.

    ``step_seconds`` is the sum of these disjoint parts: the rank's own ``{kind}_seconds`` by :data:`OWN`,
    ``other_seconds`` that are in no event (logging, Python between instructions, waiting until what was sent is
    delivered), and ``{kind}_seconds`` of each of its ``phases`` by :data:`PHASES`. A phase also has its ``stage``,
    seconds per micro-batch of its passes, and the bytes of its messages to the next stage and to the stage before, 0
    where there are none. Seconds of :data:`PAUSES` are given apart from the step's.
    """
    steps = len(trace.steps)
    taken: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    for event in (event for step in trace.steps for event in step.events):
        taken[event.instruction, event.phase].append(event.end - event.start)

    def seconds(kinds: Mapping[str, Sequence[str]], phase: int = 0) -> dict[str, float]:
        return {
            f"{kind}_seconds": sum(sum(taken[name, phase]) for name in names) / steps for kind, names in kinds.items()
        }

    def each(kind: str, phase: int) -> float:
        names = PHASES | {"weights": ["WeightGradients"]}
        forwards = len(taken["ForwardPass", phase])  # one for each micro-batch
        return sum(sum(taken[name, phase]) for name in names[kind]) / max(forwards, 1)

    whole = sum(step.end - step.start for step in trace.steps) / steps
    pauses = seconds(PAUSES)
    return {
        "rank": trace.rank,
        "pipeline_rank": trace.pipeline_rank,
        "replica": trace.replica,
        "step_seconds": whole - sum(pauses.values()),
        **seconds(OWN),
        **pauses,
        "other_seconds": whole - sum(map(sum, taken.values())) / steps,
        "phases": [
            {
                "stage": stage,
                **seconds(PHASES, phase),
                "forward_seconds_per_micro_batch": each("forward", phase),
                "backward_seconds_per_micro_batch": each("backward", phase),
                "weight_seconds_per_micro_batch": each("weights", phase),
                "activation_bytes": activation_bytes,
                "gradient_bytes": gradient_bytes,
            }
            for phase, (stage, (activation_bytes, gradient_bytes)) in enumerate(
                zip(trace.stages, trace.message_bytes, strict=True)
            )
        ],
    }


def timeline_metrics(summary: Mapping[str, Any], macs_per_image: int) -> dict[str, float]:
    """Return the metrics of a trace's summary, by the names that dashboards and comparisons read.

    ``macs_per_image`` are the multiply-accumulates of one image's forward pass through the whole U-Net. Values of a
    rank as a whole, such as waiting for other ranks, are given under the stage that it holds in phase 0.
    """
    ranks, step_seconds = summary["ranks"], summary["step_seconds"]
    values: dict[str, float] = {}
    for number in range(summary["pipeline_ranks"]):
        replicas = [rank for rank in ranks if rank["pipeline_rank"] == number]
        for phases in zip(*(rank["phases"] for rank in replicas), strict=True):
            for kind in PHASES:
                name = f"stage{phases[0]['stage']}/{kind}_seconds"
                values[name] = fmean(phase[f"{kind}_seconds"] for phase in phases)
        own = {kind: fmean(rank[f"{kind}_seconds"] for rank in replicas) for kind in OWN}
        stage = f"stage{replicas[0]['phases'][0]['stage']}"
        values[f"{stage}/wait_seconds"] += own["agreement_wait"]
        values[f"{stage}/load_seconds"] = own["data_wait"] + own["load"]
        for kind in ("reduce", "optimizer", "ema"):
            values[f"{stage}/{kind}_seconds"] = own[kind]

    def phases_of(rank: Mapping[str, Any], *kinds: str) -> float:
        return sum(phase[f"{kind}_seconds"] for phase in rank["phases"] for kind in kinds)

    computing = [phases_of(rank, "forward", "backward") for rank in ranks]
    images = summary["micro_batches"] * summary["micro_batch_images"] * summary["replicas"]
    flops = 2 * macs_per_image * PASSES_PER_STEP * images
    values |= {
        "perf/traced_step_seconds": step_seconds,
        "perf/bubble_fraction": fmean(
            (rank["agreement_wait_seconds"] + phases_of(rank, "wait")) / rank["step_seconds"] for rank in ranks
        ),
        "perf/imbalance": max(computing) / fmean(computing) - 1,
        "perf/mfu": flops / step_seconds / (summary["peak_flops_per_second"] * len(ranks)),
        "perf/data_wait_fraction": max(rank["data_wait_seconds"] / rank["step_seconds"] for rank in ranks),
    }
    for pause in PAUSES:
        share = fmean(
            rank[f"{pause}_seconds"] / (rank["step_seconds"] + sum(rank[f"{kind}_seconds"] for kind in PAUSES))
            for rank in ranks
        )
        if share > NOTICEABLE:
            values[f"perf/{pause}_fraction"] = share
    return values
