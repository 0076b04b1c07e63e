"""DeepSpeed's flops profiler, per stage of a pipeline: one forward of one step, written as DeepSpeed prints it.

The stock pipeline engine crashes with the profiler's timers, profiles rank 0 alone, restarts it for every micro-batch
and never prints it. Here each stage's first replica profiles one forward, so that recomputed activations are not
counted as work, and writes its own file.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from deepspeed.profiling.flops_profiler import FlopsProfiler
from deepspeed.runtime.pipe import schedule

from ddpm_ds.pipeline.engine import UnetPipelineEngine
from ddpm_ds.pipeline.partition import stages_of


def profile_flops(engine: UnetPipelineEngine, settings: dict[str, Any], folder: Path) -> None:
    """Profile the first forward of step ``settings["profile_step"]`` into ``folder/flops.stage{i}.txt``.

    ``settings`` is the JSON's ``flops_profiler`` block, whose ``output_file`` goes before ``folder/flops``; nothing
    happens unless it is enabled. Modules are timed one by one, so that step is slower than others.
    """
    if not settings.get("enabled") or engine.grid.get_data_parallel_id() != 0:
        return
    forward = engine.execute[schedule.ForwardPass]
    engine.execute[schedule.ForwardPass] = _profiled(engine, forward, settings, folder)


def _profiled(
    engine: UnetPipelineEngine, forward: Callable[..., None], settings: dict[str, Any], folder: Path
) -> Callable[..., None]:
    step = settings.get("profile_step", 1)
    stages = stages_of(engine.stage_id, engine.num_stages, engine.module.schedule)
    left = set(stages)

    def run(**arguments: Any) -> None:
        stage = stages[arguments.get("phase", 0)]
        if engine.global_steps + 1 < step or stage not in left:
            forward(**arguments)
            return
        left.remove(stage)
        if not left:
            engine.execute[schedule.ForwardPass] = forward
        profiler = FlopsProfiler(engine.module)
        profiler.start_profile()
        forward(**arguments)
        profiler.stop_profile()
        file = Path(f"{settings.get('output_file') or folder / 'flops'}.stage{stage}.txt")
        file.parent.mkdir(parents=True, exist_ok=True)
        profiler.print_model_profile(
            profile_step=step,
            module_depth=settings.get("module_depth", -1),
            top_modules=settings.get("top_modules", 1),
            detailed=settings.get("detailed", True),
            output_file=str(file),
        )
        profiler.end_profile()

    return run
