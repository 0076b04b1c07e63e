"""The predictor of a run on hosts like this one, and the planner's choice of what a run leaves open by it."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ddpm_ds.config.ds_config import precision
from ddpm_ds.config.spec import RunSpec
from ddpm_ds.device import described
from ddpm_ds.observe.device_speed import measured_times
from ddpm_ds.planning.run_plan import workload
from ddpm_ds.predict.decisions import Choice, choose_layout
from ddpm_ds.predict.layouts import machine_like
from ddpm_ds.predict.predictor import Predictor


def layout_here(
    spec: RunSpec, config: Mapping[str, Any], path: Path, *, world_size: int, hosts: Sequence[str], stages: int | None
) -> Choice:
    """Return the planner's stages and split of layers for processes on hosts like this one.

    See :func:`ddpm_ds.predict.decisions.choose_layout`.
    """
    return choose_layout(predictor_here(spec, config, world_size, hosts), path, hosts, stages)


def predictor_here(
    spec: RunSpec,
    config: Mapping[str, Any],
    world_size: int,
    hosts: Sequence[str],
    timed: torch.device | None = None,
) -> Predictor:
    """Return a predictor for processes on hosts like this one, with computed times of layers, or with those of a
    device that is ``timed``.
    """
    sizes = set(Counter(hosts).values())
    nodes = len(set(hosts)) if len(sizes) == 1 else 1  # unknown, or of different sizes
    name, memory = described(int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))
    devices = machine_like(name, memory, half=precision(config) != "fp32", devices=world_size, nodes=nodes)
    job = workload(spec, config, devices.is_cpu, counted=False)  # alike on all hosts
    times = measured_times(timed, job.precision) if timed is not None else None
    return Predictor(job, devices, times)
