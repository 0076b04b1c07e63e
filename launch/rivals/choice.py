"""Which rows a benchmark has, and why one can't run here. No torch."""

from __future__ import annotations

from ddpm_ds.errors import LayoutError
from ddpm_ds.pipeline.cuts import PartitionMethod, Schedule, partition
from ddpm_ds.predict.plan import RunPlan

ROWS = {
    "plain": "PyTorch without DeepSpeed in one process, in fp32",
    "1f1b": "this project's engine under 1F1B",
    "folded": "this project's engine under the folded schedule",
    "traced": "the engine of the JSON's schedule, each step traced, which shows what a timeline costs",
    "stock": "DeepSpeed's own pipeline engine, skips as a tuple, with this project's cuts",
    "stock-default": "the same with DeepSpeed's default cuts, by parameters",
    "torch": "torch.distributed.pipelining, Schedule1F1B, with this project's cuts, in fp32",
    "ddp": "PyTorch's DistributedDataParallel over all processes, in fp32",
    "zero2": "DeepSpeed's ZeRO-2 over all processes, without a pipeline",
}
"""Names and meanings, in the table's order: the first that runs is what the others are compared to."""


def why_not(row: str, plan: RunPlan) -> str | None:
    """Why ``row`` can't run in this layout; None where it can."""
    layout = plan.ds.layout
    processes, stages = layout.world_size, layout.stages
    if row == "plain" and processes > 1:
        return f"has one process, and {processes} were started"
    if row in ("folded", "stock-default", "torch") and stages == 1:
        return "needs 2 stages"
    if row == "folded":
        return _why_not_folded(plan)
    if row == "ddp" and processes == 1:
        return "needs 2 processes"
    if row in ("ddp", "zero2") and layout.batch_images % (processes * layout.micro_batch_images):
        return (
            f"{layout.batch_images} images don't make micro-batches of {layout.micro_batch_images} on {processes} "
            f"replicas"
        )
    return None


def bounds_of(plan: RunPlan, schedule: Schedule) -> tuple[int, ...]:
    """The cuts of this project's engine under ``schedule``: the plan's, or such as the plan would have under it.

    Raises:
        LayoutError: the U-Net has no such cuts.
    """
    if plan.ds.schedule == schedule:
        return plan.bounds
    method: PartitionMethod = plan.ds.partition if plan.ds.partition in ("parameters", "uniform") else "flops"
    return partition(plan.layers, plan.ds.layout.stages, method, schedule)


def replica_micro_batches(plan: RunPlan) -> int:
    """Micro-batches of a step where every process is a replica, of as many images as in the pipeline."""
    layout = plan.ds.layout
    return layout.batch_images // (layout.world_size * layout.micro_batch_images)


def _why_not_folded(plan: RunPlan) -> str | None:
    layout = plan.ds.layout
    if layout.micro_batches < 2 * layout.stages:
        return f"needs {2 * layout.stages} micro-batches, and the batch has {layout.micro_batches}"
    try:
        bounds_of(plan, "folded")
    except LayoutError as error:
        return str(error)
    return None
