"""Small jobs to plan for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ddpm_ds.config.spec import RunSpec
from ddpm_ds.predict.costs import analytic_times
from ddpm_ds.predict.machine import Machine, machine
from ddpm_ds.predict.predictor import Predictor
from ddpm_ds.predict.workload import Workload, job
from tests.launching import tiny_spec

ADAMW = {"type": "AdamW", "params": {"torch_adam": True}}


def small_job(spec: RunSpec | None = None, **config: Any) -> Workload:
    """A job of the tiny U-Net, or of ``spec``, with a DeepSpeed JSON of these blocks."""
    return job(spec or tiny_spec(), {"optimizer": ADAMW, **config}, Path("ds.json"))


def small_machine(devices: int, *, kind: str = "l4", **rates: Any) -> Machine:
    """Devices of a kind in one node, unless ``nodes`` says otherwise."""
    return machine(kind, half=False, devices=devices, **{"nodes": 1, **rates})


def small_predictor(devices: int, task: Workload | None = None, **rates: Any) -> Predictor:
    """Predicts with computed times."""
    task = task or small_job()
    devices_ = small_machine(devices, **rates)
    return Predictor(task, devices_, analytic_times(task, devices_))
