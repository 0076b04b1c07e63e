"""One training run from the plan to the summary: device, data, engine, tracker, loop, and how each of them ends."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import deepspeed
import psutil
import torch
import torch.distributed as dist
import yaml

import ddpm_ds
from ddpm_ds.data.loader import micro_batches
from ddpm_ds.data.prepare import prepare
from ddpm_ds.data.store import Store
from ddpm_ds.errors import SpecError
from ddpm_ds.observe.flops import profile_flops
from ddpm_ds.pipeline.build import build_engine
from ddpm_ds.pipeline.engine import UnetPipelineEngine
from ddpm_ds.pipeline.host_accelerator import use_host_accelerator
from ddpm_ds.pipeline.memory import checkpoint_interval
from ddpm_ds.train.loop import Run, train
from ddpm_ds.train.objective import Denoising
from ddpm_ds.train.plan import RunPlan, stage_table
from ddpm_ds.train.progress import ProgressLine, summary
from ddpm_ds.train.tracking import Tracker


def run_training(plan: RunPlan, run_dir: Path, device: torch.device, *, verbose: bool) -> None:
    """Train as planned on this process's ``device``; every rank calls this. Rank 0's ``run_dir`` counts.

    Raises:
        UserError: something given is wrong; raised before any process group exists.
        BadNumbersError: the loss or the loss scale makes going on pointless.
    """
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    use_host_accelerator()
    _share_threads(device)
    objective = Denoising(plan.spec, device)
    store = prepare(plan.spec.data, progress=local_rank == 0)
    _check_store(store, plan)
    if rank == 0 and device.type == "cpu" and plan.ds.precision == "fp16":
        print("fp16 on a CPU: stored in fp16, computed in fp32", flush=True)

    with _process_group():
        config = _fill_checkpointing(plan, device)
        engine = build_engine(plan.layers, plan.bounds, config, objective, seed=plan.spec.train.seed, verbose=verbose)
        batches = _batches(plan, store, engine)
        profile_flops(engine, config.get("flops_profiler", {}), run_dir / "flops")
        line = ProgressLine(plan.spec.train.images) if rank == 0 else None
        with _tracked(plan, config, run_dir, device, line) as tracker:
            started = time.monotonic()
            last = train(Run(plan, engine, batches, tracker, line))
            seconds = time.monotonic() - started
        if line is not None and tracker is not None:
            line.close()
            if (run_dir / "flops").exists():
                tracker.artifact(run_dir / "flops")
            print(
                summary(
                    loss=last.loss,
                    images=engine.images_seen,
                    seconds=seconds,
                    steps=engine.global_steps,
                    skipped_steps=engine.skipped_steps,
                    run_dir=run_dir,
                    link=tracker.finish("FINISHED"),
                ),
                flush=True,
            )
        dist.barrier()


@contextlib.contextmanager
def _process_group() -> Iterator[None]:
    """DeepSpeed's process group; destroyed at the end, since gloo aborts a process that leaves with one."""
    deepspeed.init_distributed(verbose=False)
    try:
        yield
    except Exception as error:
        if getattr(error, "exit_code", None) is not None:  # known to all ranks: leave together
            dist.barrier()
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


@contextlib.contextmanager
def _tracked(
    plan: RunPlan, config: dict[str, Any], run_dir: Path, device: torch.device, line: ProgressLine | None
) -> Iterator[Tracker | None]:
    """The run's folder and its MLflow run, on rank 0; ended as FAILED or KILLED when the body raises."""
    if line is None:
        yield None
        return
    run_dir.mkdir(parents=True, exist_ok=True)
    spec_file, config_file = run_dir / "spec.yaml", run_dir / "ds_config.json"
    spec_file.write_text(yaml.safe_dump(plan.spec.model_dump(mode="json"), sort_keys=False))
    config_file.write_text(json.dumps(config, indent=2) + "\n")
    (run_dir / "stages.txt").write_text(stage_table(plan) + "\n")
    tracker = Tracker.start(
        plan.spec.logging.experiment,
        run_dir.name,
        output_root=run_dir.parent,
        run_dir=run_dir,
        params={**plan.spec.model_dump(mode="json"), "ds_config": config, "derived": _derived(plan, device)},
        tags=_tags(plan),
        artifacts=[spec_file, config_file, run_dir / "stages.txt"],
        say=line.say,
    )
    try:
        yield tracker
    except BaseException as error:
        line.close()
        tracker.finish("KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED")
        raise


def _derived(plan: RunPlan, device: torch.device) -> dict[str, object]:
    return {
        **asdict(plan.ds.layout),
        "parameters": plan.parameters,
        "forward_gflops_per_image": 2 * plan.macs / 1e9,
        "steps": plan.steps,
        "precision": plan.ds.precision,
        "zero_stage": plan.ds.zero_stage,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
    }


def _tags(plan: RunPlan) -> dict[str, str]:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(ddpm_ds.__file__).parent), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else "unknown"

    return {
        "git_commit": git("rev-parse", "HEAD"),
        "git_dirty": str(bool(git("status", "--porcelain", "--untracked-files=no"))).lower(),
        "host": platform.node(),
        "mlflow.source.name": "launch/train.py",
        "world_size": str(plan.ds.layout.world_size),
        "stage_cuts": json.dumps(plan.bounds[1:-1]),
        **{f"version.{name}": version(name) for name in ("torch", "deepspeed", "mlflow-skinny")},
        "version.ddpm_ds": ddpm_ds.__version__,
    }


def _batches(plan: RunPlan, store: Store, engine: UnetPipelineEngine) -> Iterator[Any] | None:
    """This replica's micro-batches, on the stages that read data."""
    if not (engine.is_first_stage() or engine.is_last_stage()):
        return None
    layout = plan.ds.layout
    return micro_batches(
        store,
        seed=plan.spec.train.seed,
        batch_images=layout.batch_images,
        micro_batch_images=layout.micro_batch_images,
        replicas=layout.replicas,
        replica=engine.grid.get_data_parallel_id(),
        start_images=engine.images_seen,
        workers=plan.spec.data.workers,
        pin_memory=engine.device.type == "cuda",
    )


def _fill_checkpointing(plan: RunPlan, device: torch.device) -> dict[str, Any]:
    """The DeepSpeed configuration, with activation checkpointing decided by this device's memory where it is auto."""
    config, layout = dict(plan.ds.config), plan.ds.layout
    if plan.ds.checkpoint_interval == "auto":
        if device.type == "cuda":
            memory = torch.cuda.get_device_properties(device).total_memory
        else:
            memory = psutil.virtual_memory().total // int(os.environ["LOCAL_WORLD_SIZE"])
        wide = device.type == "cpu" or plan.ds.precision == "fp32"  # a CPU computes fp16 layers in fp32
        interval = checkpoint_interval(
            plan.stages,
            micro_batch_images=layout.micro_batch_images,
            micro_batches=layout.micro_batches,
            element_bytes=4 if wide else 2,
            device_bytes=memory,
        )
        config["pipeline"] = {**config["pipeline"], "activation_checkpoint_interval": interval}
    return config


def _share_threads(device: torch.device) -> None:
    """Give each process on this host its share of the cores, unless the environment has said how many."""
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (psutil.cpu_count(logical=False) or 1) // int(os.environ["LOCAL_WORLD_SIZE"])))


def _check_store(store: Store, plan: RunPlan) -> None:
    classes, asked = len(store.meta.classes), plan.spec.unet.classes
    if asked is not None and asked != classes:
        raise SpecError(f"unet.classes = {asked}, but the images have {classes} classes; --set unet.classes={classes}")
