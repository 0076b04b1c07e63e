"""What watches a run, and what is made of it at the end."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch.distributed as dist

from ddpm_ds.diagnose import verdict
from ddpm_ds.diagnose.verdict import VERDICT, conclude
from ddpm_ds.observe.flops import FlopsProfile
from ddpm_ds.observe.kernels import KernelProfile
from ddpm_ds.observe.observer import Observer, Observers, PauseClock
from ddpm_ds.observe.timeline import Timeline
from ddpm_ds.pipeline.engine import UnetPipelineEngine
from ddpm_ds.predict.plan import RunPlan
from ddpm_ds.tracking.recorder import Recorder


def observe(
    plan: RunPlan,
    engine: UnetPipelineEngine,
    recorder: Recorder,
    run_dir: Path,
    options: argparse.Namespace,
) -> Observer:
    """What watches the steps that the JSON and the command line name."""
    flops, precision, macs = plan.ds.blocks.get("flops_profiler", {}), plan.ds.precision, plan.macs
    return Observers(
        [
            FlopsProfile(engine, plan.layers, flops, run_dir / "flops", recorder, steps=plan.steps),
            Timeline(
                engine, options.trace_steps, run_dir / "trace", recorder, precision=precision, macs_per_image=macs
            ),
            KernelProfile(engine, options.profile_kernels, run_dir / "kernels", recorder),
            PauseClock(run_dir if dist.get_rank() == 0 else None),
        ]
    )


def judge(run_dir: Path, recorder: Recorder) -> str | None:
    """Where the run's time went, and what to try next: kept with the run, and returned as text."""
    found = conclude(run_dir, recorder.log)
    if found is None:
        return None
    recorder.artifact(run_dir / VERDICT)
    recorder.tags(verdict.tags(found))
    return verdict.text(found)
