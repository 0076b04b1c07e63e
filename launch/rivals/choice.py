"""Rows of a benchmark, why one can't run in a layout, and how much is timed. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ddpm_ds.config.ds_config import Schedule
from ddpm_ds.errors import LayoutError
from ddpm_ds.pipeline.cuts import PartitionMethod, partition
from ddpm_ds.planning import RunPlan

ROWS = {
    "plain": "PyTorch without DeepSpeed in one process, in fp32",
    "1f1b": "this project's engine under 1F1B",
    "folded": "this project's engine under the folded schedule",
    "planned": "this project's engine under an order made for the run, weight gradients apart",
    "traced": "the engine of the JSON's schedule, each step traced, which shows what a timeline costs",
    "stock": "DeepSpeed's own pipeline engine, skips as a tuple, with this project's cuts",
    "stock-default": "the same with DeepSpeed's default cuts, by parameters",
    "stock-dualpipev": "DeepSpeed's DualPipeVEngine, skips as a tuple, with the cuts of this project's fold",
    "torch": "torch.distributed.pipelining, Schedule1F1B, with this project's cuts, in fp32",
    "torch-interleaved": "the same, ScheduleInterleaved1F1B, two stages on each rank",
    "torch-zbv": "the same, ScheduleZBVZeroBubble",
    "torch-dualpipev": "the same, ScheduleDualPipeV",
    "ddp": "PyTorch's DistributedDataParallel over all processes, in fp32",
    "zero2": "DeepSpeed's ZeRO-2 over all processes, without a pipeline",
}
"""Names and meanings, in the table's order: the others are compared to the first that runs."""
TORCH_SCHEDULES = {
    "torch": "Schedule1F1B",
    "torch-interleaved": "ScheduleInterleaved1F1B",
    "torch-zbv": "ScheduleZBVZeroBubble",
    "torch-dualpipev": "ScheduleDualPipeV",
}
"""Schedules of PyTorch, by the rows that have them."""
ONE_DEVICE_ROWS = {
    "diffusers": "diffusers' UNet2DModel in a plain PyTorch loop, autocast, AdamW",
    "diffusers-compiled": "the same under torch.compile",
    "diffusers-randn": "diffusers with noise, timesteps and flips by torch.randn and the like, as its users have them",
    "plain": "ours in a plain loop with nothing switched on: contiguous, PyTorch's kernels, eager, AdamW not fused",
    "channels-last": "ours with channels-last alone",
    "fused-kernels": "ours with fused normalisation, and channels-last, which its kernels need",
    "compile": "ours with each layer compiled alone",
    "fused-adamw": "ours with PyTorch's fused AdamW alone",
    "all": "ours with every switch that this device has",
    "bare": "ours in a plain loop with what the engine switches on under this JSON",
    "engine": "this project's pipeline engine with one stage, under this JSON",
    "engine-eager": "the same, its steps not replayed as a CUDA graph",
    "lucidrains": "denoising-diffusion-pytorch's Unet, dim 64, multipliers 1-2-4, of 2023, autocast, AdamW",
    "lucidrains-randn": "the same with noise, timesteps and flips by torch.randn and the like",
    "ours-dim64": "ours of launch/specs/cifar10_dim64.yaml, with every switch but compile",
}
"""Names and meanings of the rows of ``--one-device``, in the table's order."""
OTHER_UNETS = ("lucidrains", "lucidrains-randn", "ours-dim64")
"""Rows with a different U-Net; they are compared with each other only."""
COMPILED = ("diffusers-compiled", "compile")
ROUNDS, STEPS = {"layout": 15, "cuda": 5, "cpu": 3}, {"layout": 20, "cuda": 20, "cpu": 2}
"""Rounds, and steps of a round, if they are not given: on all processes, and of ``--one-device`` by device."""
CPU_IMAGES = 8
"""Images of a step of ``--one-device`` on a CPU, unless ``--images`` says otherwise."""
READ_TEXT = ("1f1b", "folded", "planned", "stock", "stock-default")
"""Rows of U-Nets that read text; those of DeepSpeed's engine relay it, with its gradient, as all that is carried."""
HOST_IMAGES = 2
HOST_SIZES = (
    *("unet.channels=8", "unet.norm_groups=4", "unet.attention_resolutions=[4]"),
    *("data.image_size=8", "data.channels=1", "data.source=digits", "data.workers=0"),
)
"""Images of a step of ``--host``, and the sizes at which all layers of a spec are counted in seconds."""


def choose(asked: Sequence[str], why_not: Callable[[str], str | None]) -> tuple[list[str], dict[str, str]]:
    """Return the rows that run, and those that can't with the reasons.

    Raises:
        LayoutError: none can.
    """
    reasons = {name: reason for name in asked if (reason := why_not(name)) is not None}
    if len(reasons) == len(asked):
        said = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise LayoutError(f"--rows {','.join(asked)} leaves nothing to run: {said}")
    return [name for name in asked if name not in reasons], reasons


def why_not_in_layout(row: str, plan: RunPlan) -> str | None:
    """Return why a row of :data:`ROWS` can't run in this layout; None if it can."""
    layout, processes, stages = plan.ds.layout, plan.ds.layout.world_size, plan.ds.layout.stages
    if plan.spec.unet.text is not None and row not in READ_TEXT:
        return "reads no captions"
    if row == "plain" and processes > 1:
        return f"has one process, and {processes} were started"
    if row in ("folded", "planned", "stock-default", "stock-dualpipev", *TORCH_SCHEDULES) and stages == 1:
        return "needs 2 stages"
    if row in ("folded", "stock-dualpipev", "torch-dualpipev") and layout.micro_batches < 2 * stages:
        return f"needs {2 * stages} micro-batches, and the batch has {layout.micro_batches}"
    if row in ("torch-zbv", "torch-dualpipev") and layout.replicas > 1:
        return "DistributedDataParallel misses the weight gradients of a split backward, so replicas would differ"
    if row in ("folded", "planned", "stock-dualpipev"):
        try:
            bounds_of(plan, "folded")
        except LayoutError as error:
            return str(error)
    if row == "ddp" and processes == 1:
        return "needs 2 processes"
    if row in ("ddp", "zero2") and layout.batch_images % (processes * layout.micro_batch_images):
        size = layout.micro_batch_images
        return f"{layout.batch_images} images don't make micro-batches of {size} on {processes} replicas"
    return None


def bounds_of(plan: RunPlan, schedule: Schedule) -> tuple[int, ...]:
    """Return the cuts of this project's engine under ``schedule``: the plan's, or those that it would have under it.

    Raises:
        LayoutError: the U-Net has no such cuts.
    """
    if plan.ds.layout.schedule == schedule:
        return plan.bounds
    method: PartitionMethod = plan.ds.partition if plan.ds.partition in ("parameters", "uniform") else "flops"
    return partition(plan.layers, plan.ds.layout.stages, method, schedule)


def replica_micro_batches(plan: RunPlan) -> int:
    """Return the micro-batches of a step if every process is a replica; they are as large as in the pipeline."""
    layout = plan.ds.layout
    return layout.batch_images // (layout.world_size * layout.micro_batch_images)
