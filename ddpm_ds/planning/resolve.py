"""The door of a run: from files and options to a plan, and from the plan to one in which everything is decided.

plan_run        spec, JSON and options: layout and cuts; no device is opened unless the planner chooses the stages
decided         + the axis over hosts, recomputation and micro-batches in flight, by the memory of this device
cut_and_ordered + cuts by measured times and the order of a planned schedule, by rank 0
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpm_ds.config.ds_config import check_ds_config, leaves_stages_open, precision, read_ds_config, resolve
from ddpm_ds.config.spec import ALL_SIGMAS, RunSpec
from ddpm_ds.config.spec_file import load_spec, spec_overrides
from ddpm_ds.pipeline.cuts import partition
from ddpm_ds.planning.run_plan import RunPlan
from ddpm_ds.predict.machine import machine_like
from ddpm_ds.unet.layers import unet_layers

if TYPE_CHECKING:  # torch and DeepSpeed, which a plan with a given number of stages does not need
    import torch

    from ddpm_ds.pipeline.schedule import Program
    from ddpm_ds.predict.predictor import Predictor


def plan_run(
    spec_path: Path,
    overrides: Sequence[str],
    ds_path: Path,
    *,
    world_size: int,
    stages: int | None,
    device: str = "auto",
    hosts: Sequence[str] | None = None,
) -> RunPlan:
    """Read and check everything that can be checked before anything is started.

    Overrides that begin with ``ds.`` change the JSON, others the spec. If neither ``stages`` nor the JSON gives the
    number of stages, the planner chooses it for ``device`` (as in ``--device``), and only then imports PyTorch and
    DeepSpeed. ``hosts`` gives each rank's host (:func:`ddpm_ds.pipeline.placement.launched_hosts`), by default a single
    one.

    Raises:
        SpecError, DsConfigError, LayoutError: one line each, before anything is started.
    """
    spec = load_spec(spec_path, spec_overrides(overrides))
    if spec.sampler.guidance_between != ALL_SIGMAS:
        from ddpm_ds.diffusion.levels import check_guidance  # it imports PyTorch

        check_guidance(spec.sampler, spec.diffusion)
    config, chosen = read_ds_config(ds_path, overrides), None
    names = ("0",) * world_size if hosts is None else tuple(hosts)
    if stages is None:
        check_ds_config(config, ds_path, spec)
        if leaves_stages_open(config, world_size):
            from ddpm_ds.device import choose_device

            choose_device(device)  # before DeepSpeed, whose schedules the planner simulates, is imported
            from ddpm_ds.predict.decisions import choose_stages

            stages, chosen = choose_stages(_predictor(spec, config, world_size, names), ds_path, names)
    ds = resolve(config, spec, world_size=world_size, stages=stages, path=ds_path)
    layers = unet_layers(spec.unet, image_channels=spec.data.channels, image_size=spec.data.image_size)
    bounds = partition(layers, ds.layout.stages, ds.planned_partition, ds.layout.schedule)
    return RunPlan(spec, spec_path, ds, ds_path, layers, bounds, names, chosen=chosen)


def decided(plan: RunPlan, device: torch.device) -> RunPlan:
    """Return the plan with the axis over its hosts, and the recomputation and micro-batches in flight for a device."""
    from ddpm_ds.device import memory_bytes
    from ddpm_ds.predict.decisions import fitted
    from ddpm_ds.predict.layouts import Workload

    job = Workload(plan.spec, plan.ds.blocks, on_cpu=device.type == "cpu")
    layout = fitted(job, plan.ds.layout, plan.bounds, memory_bytes(device))
    return replace(plan, ds=replace(plan.ds, layout=replace(layout, across_hosts=plan.across)))


def cut_and_ordered(plan: RunPlan, device: torch.device) -> RunPlan:
    """Return a decided plan with cuts by the layers' seconds on rank 0's device and the order of a planned schedule,
    if the JSON asks for them. Collective.

    Raises:
        LayoutError: the U-Net can't be cut into so many stages; on all ranks alike.
    """
    from ddpm_ds.pipeline.schedule import Program
    from ddpm_ds.predict.decisions import measured_cuts, planned_order
    from ddpm_ds.processes.process_group import decided_by_rank_0

    measured = plan.ds.partition == "measured" and plan.ds.layout.stages > 1
    ask = functools.partial(_predictor, plan.spec, plan.ds.blocks, plan.ds.layout.world_size, plan.hosts)
    timed = device if measured else None
    if measured:
        bounds = decided_by_rank_0(lambda: measured_cuts(ask(timed), plan.ds), tuple[int, ...])
        plan = replace(plan, bounds=bounds)
    if not plan.ds.is_ordered:
        return plan
    order = decided_by_rank_0(lambda: planned_order(ask(timed), plan.ds.layout, plan.bounds), tuple[Program, ...])
    return replace(plan, programs=order)


def replanning(plan: RunPlan) -> Callable[[Mapping[str, Any]], tuple[Program, ...]] | None:
    """Return a function from a trace's summary to the programs of a planned schedule; None if the JSON wants none."""
    if not (plan.ds.replan and plan.ds.layout.schedule == "planned"):
        return None
    from ddpm_ds.predict.decisions import planned_again

    predictor = _predictor(plan.spec, plan.ds.blocks, plan.ds.layout.world_size, plan.hosts)
    return functools.partial(planned_again, predictor, plan.ds.layout, plan.bounds)


def _predictor(
    spec: RunSpec,
    config: Mapping[str, Any],
    world_size: int,
    hosts: Sequence[str],
    timed: torch.device | None = None,
) -> Predictor:
    """Return a predictor for processes on hosts like this one, with computed times of layers, or with those of a
    device that is ``timed``.
    """
    from ddpm_ds.device import described
    from ddpm_ds.observe.device_speed import measured_times
    from ddpm_ds.predict.layouts import Workload
    from ddpm_ds.predict.predictor import Predictor

    sizes = set(Counter(hosts).values())
    nodes = len(set(hosts)) if len(sizes) == 1 else 1  # unknown, or of different sizes
    name, memory = described(int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))
    devices = machine_like(name, memory, half=precision(config) != "fp32", devices=world_size, nodes=nodes)
    job = Workload(spec, config, devices.is_cpu)
    times = measured_times(job.layers, timed, job.precision) if timed is not None else None
    return Predictor(job, devices, times)
