"""A run's folder and its MLflow run: opened with what the run is, ended with how it ended."""

from __future__ import annotations

import contextlib
import json
import platform
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml

import ddpm_ds
from ddpm_ds.errors import Preempted
from ddpm_ds.train.labels import labels
from ddpm_ds.train.plan import RunPlan, stage_table
from ddpm_ds.train.progress import ProgressLine
from ddpm_ds.train.recorder import Recorder
from ddpm_ds.train.run_folder import RunFolder
from ddpm_ds.train.tracking import Tracker


@dataclass(frozen=True)
class Resumed:
    """Where a run goes on from."""

    checkpoint: Path
    changed: tuple[str, ...]
    """What has changed since, by dotted key."""


@contextlib.contextmanager
def recorded(
    plan: RunPlan,
    config: dict[str, Any],
    run_dir: Path,
    device: torch.device,
    line: ProgressLine | None,
    resumed: Resumed | None,
    *,
    note: str | None = None,
    parent: str | None = None,
) -> Iterator[Recorder]:
    """The run's folder and its MLflow run, on rank 0; ended as FAILED or KILLED when the body raises.

    ``note`` is why a run that begins is made; ``parent`` the identity of the run that it is a child of.
    """
    if line is None:
        yield Recorder()
        return
    run_dir.mkdir(parents=True, exist_ok=True)
    folder = RunFolder(run_dir)
    spec_file, config_file = run_dir / "spec.yaml", run_dir / "ds_config.json"
    spec_file.write_text(yaml.safe_dump(plan.spec.model_dump(mode="json"), sort_keys=False))
    config_file.write_text(json.dumps(config, indent=2) + "\n")
    (run_dir / "stages.txt").write_text(stage_table(plan) + "\n")
    tags = _tags(plan) | labels(run_dir, note, line.say)
    if resumed is not None:
        tags["resume_count"] = str(folder.add_resume(resumed.checkpoint, resumed.changed))
    tracker = Tracker.start(
        plan.spec.logging.experiment,
        run_dir.name,
        output_root=run_dir.parent,
        run_dir=run_dir,
        params={**plan.spec.model_dump(mode="json"), "ds_config": config, "derived": _derived(plan, device)},
        tags=tags,
        artifacts=[spec_file, config_file, run_dir / "stages.txt"],
        identity=folder.identity(),
        parent=parent,
        say=line.say,
    )
    recorder = Recorder(line, tracker, folder)
    try:
        yield recorder
    except BaseException as error:
        recorder.finish("KILLED" if isinstance(error, KeyboardInterrupt | Preempted) else "FAILED")
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
