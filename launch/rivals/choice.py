"""Rows of a benchmark, and why one can't run in a layout. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from ddpm_ds.cli.options import OVERWRITE
from ddpm_ds.cli.train import RankOptions
from ddpm_ds.ground.errors import LayoutError
from ddpm_ds.ground.options import flag, option, positive
from ddpm_ds.pipeline.cuts import PartitionMethod, partition
from ddpm_ds.planning.run_plan import RunDraft
from ddpm_ds.schema.choices import SCHEDULES
from ddpm_ds.schema.layout import Schedule

ROWS = {
    "plain": "ours in a plain PyTorch loop, with the kernels that the engine uses under this JSON",
    "1f1b": "this project's engine under 1F1B",
    "eager": "the same, its steps not replayed as CUDA graphs",
    "folded": "this project's engine under the folded schedule",
    "planned": "this project's engine under an order made for the run, weight gradients in passes of their own",
    "stock": "DeepSpeed's own pipeline engine, skips as a tuple, with this project's cuts",
    "stock-dualpipev": "DeepSpeed's DualPipeVEngine, skips as a tuple, with the cuts of this project's fold",
    "torch": "torch.distributed.pipelining, Schedule1F1B, with this project's cuts, in fp32",
    "torch-zbv": "the same, ScheduleZBVZeroBubble, two stages on each rank",
    "torch-dualpipev": "the same, ScheduleDualPipeV",
    "diffusers": "diffusers' UNet2DModel in a plain PyTorch loop, autocast, AdamW",
    "diffusers-compiled": "the same, its U-Net compiled by torch.compile",
    "diffusers-randn": "as diffusers, with noise, timesteps and flips from torch.randn and the like, as users have it",
}
"""Meanings by name, in the table's order; rows are compared to the first that runs."""
TORCH_SCHEDULES = {
    "torch": "Schedule1F1B",
    "torch-zbv": "ScheduleZBVZeroBubble",
    "torch-dualpipev": "ScheduleDualPipeV",
}
"""PyTorch's schedules, by row."""
NAMED = ("diffusers", "diffusers-compiled", "diffusers-randn")
"""Rows of one process that run only if ``--rows`` names them: 16 bits under autocast take minutes on a CPU."""
READ_TEXT = ("1f1b", "eager", "folded", "planned", "stock")
"""Rows of U-Nets that read text; DeepSpeed's engine relays it, with its gradient, through all stages."""


@dataclass(frozen=True)
class BenchmarkOptions(RankOptions):
    verbose: bool = flag("show DeepSpeed's own log")
    rows: str | None = option("which rows (default: all that can run)", "ROW,...")
    rounds: int = option("turns of each row (%(default)s)", "N", positive, default=15)
    steps_per_round: int = option("steps of each row in a round (%(default)s)", "N", positive, default=20)
    compared_steps: int = option("first steps, whose losses are compared (%(default)s)", "N", positive, default=50)
    host: bool = flag("also count operators, launches, Python calls and waits")
    json: Path | None = option("write every number here", "FILE")
    overwrite: bool = flag(OVERWRITE)


def choose(asked: Sequence[str], plan: RunDraft) -> tuple[list[str], dict[str, str]]:
    """Return the rows that run, and the reasons why others can't; LayoutError if none can."""
    reasons = {name: reason for name in asked if (reason := why_not(name, plan)) is not None}
    if len(reasons) == len(asked):
        why = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise LayoutError(f"--rows {','.join(asked)} leaves nothing to run: {why}")
    return [name for name in asked if name not in reasons], reasons


def why_not(row: str, plan: RunDraft) -> str | None:
    """Return why a row can't run in this layout; None if it can."""
    spec, layout, processes, stages = plan.spec, plan.ds.layout, plan.ds.layout.world_size, plan.ds.layout.stages
    if spec.unet.text is not None and row not in READ_TEXT:
        return "reads no captions"
    alone = 1 if row in NAMED else plan.ds.layout.space.size  # beside a space group its first rank runs the plain loop
    if row in ("plain", *NAMED) and processes > alone:
        return f"runs in one process, and {processes} were started"
    if row in NAMED and find_spec("diffusers") is None:
        return "diffusers is not installed; pip install 'ddpm_ds[bench]'"
    if row in NAMED and spec.unet.dropout:
        return "its dropout draws other masks; use --set unet.dropout=0"
    if row.endswith("randn") and SCHEDULES[spec.diffusion.schedule].continuous:
        return f"its timesteps are whole numbers, unlike diffusion.schedule = {spec.diffusion.schedule}"
    if row in ("folded", "planned", "stock-dualpipev", *TORCH_SCHEDULES) and stages == 1:
        return "needs 2 stages"
    if row in ("folded", "stock-dualpipev", "torch-dualpipev") and layout.micro_batches < 2 * stages:
        return f"needs {2 * stages} micro-batches, and the batch has {layout.micro_batches}"
    if row in TORCH_SCHEDULES and layout.replicas > 1:
        return "has no replicas"
    if row in ("folded", "planned", "stock-dualpipev"):
        try:
            bounds_of(plan, "folded")
        except LayoutError as error:
            return str(error)
    return None


def bounds_of(plan: RunDraft, schedule: Schedule, stages: int | None = None) -> tuple[int, ...]:
    """Return our engine's cuts under ``schedule`` before layers are timed; LayoutError if the U-Net has none."""
    layout = plan.ds.layout
    if (layout.schedule, layout.stages) == (schedule, stages or layout.stages):
        return plan.bounds
    method: PartitionMethod = plan.ds.partition if plan.ds.partition in ("parameters", "uniform") else "flops"
    return partition(plan.layers, stages or layout.stages, method, schedule)
