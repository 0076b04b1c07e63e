"""What only a process with its device can decide of a plan, after which nothing in it is open.

decided          the axis over hosts, recomputation and micro-batches in flight, by the memory of this device
cut_and_ordered  cuts by measured times and the order of a planned schedule, by rank 0
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from ddpm_ds.device import memory_bytes
from ddpm_ds.errors import DsConfigError
from ddpm_ds.pipeline.schedule import Program
from ddpm_ds.planning.predictor_here import predictor_here
from ddpm_ds.planning.run_plan import RunPlan, workload
from ddpm_ds.predict.decisions import fitted, measured_cuts, planned_again, planned_order
from ddpm_ds.predict.predictor import Predictor
from ddpm_ds.processes.process_group import decided_by_rank_0


def decided(plan: RunPlan, device: torch.device) -> RunPlan:
    """Return the plan with the axis over its hosts, and the recomputation and micro-batches in flight for a device.

    Raises:
        DsConfigError: the JSON asks for what a CPU has not.
    """
    if plan.ds.graphs is True and device.type == "cpu":
        raise DsConfigError("graphs = true needs a GPU; use --set ds.graphs=auto, which takes graphs where they can be")
    job = workload(plan.spec, plan.ds.as_json(), device.type == "cpu", counted=False)
    layout = fitted(job, plan.ds.layout, plan.bounds, memory_bytes(device))
    return replace(plan, ds=replace(plan.ds, layout=replace(layout, across_hosts=plan.across)))


def cut_and_ordered(plan: RunPlan, device: torch.device) -> RunPlan:
    """Return a decided plan with cuts by the layers' seconds on rank 0's device and the order of a planned schedule,
    if the JSON asks for them. Collective.

    Raises:
        LayoutError: the U-Net can't be cut into so many stages; on all ranks alike.
    """
    measured = plan.ds.partition == "measured" and plan.ds.layout.stages > 1
    predictor = functools.cache(lambda: _predictor_of(plan, device if measured else None))  # rank 0 alone asks
    if measured:
        bounds = decided_by_rank_0(lambda: measured_cuts(predictor(), plan.ds), tuple[int, ...])
        plan = replace(plan, bounds=bounds)
    if not plan.ds.is_ordered:
        return plan
    order = decided_by_rank_0(lambda: planned_order(predictor(), plan.ds.layout, plan.bounds), tuple[Program, ...])
    return replace(plan, programs=order)


def replanning(plan: RunPlan) -> Callable[[Mapping[str, Any]], tuple[Program, ...]] | None:
    """Return a function from a trace's summary to the programs of a planned schedule; None if the JSON wants none."""
    if not (plan.ds.replan and plan.ds.layout.schedule == "planned"):
        return None
    return functools.partial(planned_again, _predictor_of(plan), plan.ds.layout, plan.bounds)


def _predictor_of(plan: RunPlan, timed: torch.device | None = None) -> Predictor:
    return predictor_here(plan.spec, plan.ds.as_json(), plan.ds.layout.world_size, plan.hosts, timed)
