"""Decisions that only a process with its device can take: threads, recomputation, cuts by time."""

from __future__ import annotations

import os
from dataclasses import replace

import torch
import torch.distributed as dist

from ddpm_ds.device import memory_bytes
from ddpm_ds.observe.device_speed import measured_times
from ddpm_ds.pipeline.cuts import describe
from ddpm_ds.predict.auto import measured_cuts, planned_programs
from ddpm_ds.predict.layouts import Candidate, Workload
from ddpm_ds.predict.memory import checkpoint_interval
from ddpm_ds.predict.plan import RunPlan, stage_table
from ddpm_ds.processes.process_group import decided_by_rank_0


def share_threads(device: torch.device) -> None:
    """Give each process on this host its share of the cores, unless the environment sets the number of threads."""
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))


def cut_and_ordered(plan: RunPlan, device: torch.device) -> RunPlan:
    """Return the decided plan with cuts by the layers' seconds on rank 0's device and the order of a planned schedule,
    where the JSON asks for them. Collective.
    """
    plan = _cut_by_time(plan, device)
    if plan.ds.schedule != "planned":
        return plan
    return replace(plan, programs=decided_by_rank_0(lambda: planned_programs(plan.spec, plan.ds, plan.bounds)))


def _cut_by_time(plan: RunPlan, device: torch.device) -> RunPlan:
    if plan.ds.partition != "measured" or plan.ds.layout.stages == 1:
        return plan
    bounds = decided_by_rank_0(
        lambda: measured_cuts(plan.spec, plan.ds, lambda job: measured_times(job.layers, device, job.precision))
    )
    plan = replace(plan, bounds=bounds, stages=describe(plan.layers, bounds, plan.ds.schedule))
    if dist.get_rank() == 0:
        print(f"\ncut by the layers' times on this device\n{stage_table(plan)}", flush=True)
    return plan


def decide(plan: RunPlan, device: torch.device) -> RunPlan:
    """Return the plan with the axis split over hosts and the recomputation that this device's memory needs."""
    interval = plan.ds.checkpoint_interval
    if interval == "auto":
        job = Workload(plan.spec, plan.ds.blocks, on_cpu=device.type == "cpu")
        interval = checkpoint_interval(job, Candidate.of(plan.ds, 0), plan.bounds, memory_bytes(device))
    return replace(plan, ds=replace(plan.ds, checkpoint_interval=interval, across_hosts=plan.across))
