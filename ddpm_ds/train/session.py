"""One training run from the plan to the summary: device, data, engine, tracker, loop, and how each of them ends."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import tempfile
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
from ddpm_ds.errors import OutputError, SpecError
from ddpm_ds.pipeline.build import build_engine
from ddpm_ds.pipeline.engine import UnetPipelineEngine
from ddpm_ds.pipeline.host_accelerator import select_device
from ddpm_ds.pipeline.memory import checkpoint_interval
from ddpm_ds.train.command import run_dir_of
from ddpm_ds.train.loop import Run, train
from ddpm_ds.train.objective import Denoising
from ddpm_ds.train.plan import RunPlan, stage_table
from ddpm_ds.train.progress import summary
from ddpm_ds.train.tracking import Tracker


def run_training(plan: RunPlan, options: argparse.Namespace) -> None:
    """Train as planned on this process's device; every rank calls this.

    Raises:
        UserError: something given is wrong; raised before any process group exists.
        BadNumbersError: the loss or the loss scale makes going on pointless.
    """
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    device = select_device(options.device)
    _share_threads(device)
    objective = Denoising(plan.spec, device)
    store = prepare(plan.spec.data, progress=local_rank == 0)
    _check_store(store, plan)
    run_dir = run_dir_of(plan, options.run_dir)
    if rank == 0:
        _check_output(run_dir)

    with _process_group():
        run_dir = Path(_from_rank_0(str(run_dir)))
        config = _fill_checkpointing(plan, device)
        engine = build_engine(
            plan.layers, plan.bounds, config, objective, seed=plan.spec.train.seed, verbose=options.verbose
        )
        batches = _batches(plan, store, engine)
        with _tracked(plan, config, run_dir, device) as tracker:
            result = train(Run(plan, engine, batches, tracker))
        if tracker is not None:
            link = tracker.finish("FINISHED")
            print(summary(result, run_dir=run_dir, link=link), flush=True)
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
def _tracked(plan: RunPlan, config: dict[str, Any], run_dir: Path, device: torch.device) -> Iterator[Tracker | None]:
    """The run's folder and its MLflow run, on rank 0; ended as FAILED or KILLED when the body raises."""
    if dist.get_rank() != 0:
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
    )
    try:
        yield tracker
    except KeyboardInterrupt:
        tracker.finish("KILLED")
        raise
    except BaseException:
        tracker.finish("FAILED")
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


def _check_output(run_dir: Path) -> None:
    """Refuse a folder that can't be written or that holds another run, leaving nothing behind."""
    if run_dir.exists() and (not run_dir.is_dir() or any(run_dir.iterdir())):
        raise OutputError(f"--run-dir {run_dir} is not an empty folder; name a new one")
    existing = next(folder for folder in (run_dir, *run_dir.absolute().parents) if folder.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise OutputError(
            f"--run-dir {run_dir} can't be written ({error.strerror}: {existing}); name a folder that can"
        ) from None


def _from_rank_0(value: str) -> str:
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]
