"""Decisions that only a process with its device can take: threads, recomputation, cuts by time."""

from __future__ import annotations

import os
from dataclasses import replace

import torch
import torch.distributed as dist

from ddpm_ds.device import memory_bytes
from ddpm_ds.observe.device_speed import LayerTimes, measured_times
from ddpm_ds.pipeline.schedule import Program
from ddpm_ds.predict.auto import measured_cuts, planned_order
from ddpm_ds.predict.layouts import Workload
from ddpm_ds.predict.machine import usable
from ddpm_ds.predict.memory import checkpoint_interval, peak_bytes
from ddpm_ds.predict.plan import RunPlan, stage_table
from ddpm_ds.processes.process_group import decided_by_rank_0


def share_threads(device: torch.device) -> None:
    """Give each process on this host its share of the cores, unless the environment sets the number of threads."""
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))


def cut_and_ordered(plan: RunPlan, device: torch.device) -> RunPlan:
    """Return the decided plan with cuts by the layers' seconds on rank 0's device and the order of a planned schedule,
    if the JSON asks for them. Collective.
    """
    measured = plan.ds.partition == "measured" and plan.ds.layout.stages > 1

    def times(job: Workload) -> LayerTimes:
        return measured_times(job.layers, device, job.precision)

    if measured:
        bounds = decided_by_rank_0(lambda: measured_cuts(plan.spec, plan.ds, times), tuple[int, ...])
        plan = replace(plan, bounds=bounds)
        if dist.get_rank() == 0:
            print(f"\ncut by the layers' times on this device\n{stage_table(plan)}", flush=True)
    if not plan.ds.is_ordered:
        return plan

    def ordered() -> tuple[Program, ...]:
        return planned_order(plan.spec, plan.ds, plan.bounds, times if measured else None)

    return replace(plan, programs=decided_by_rank_0(ordered, tuple[Program, ...]))


def decide(plan: RunPlan, device: torch.device) -> RunPlan:
    """Return the plan with the axis split over hosts, and with the recomputation and the number of micro-batches in
    flight that this device's memory needs.
    """
    now, memory = plan.ds.layout, memory_bytes(device)
    interval, in_flight = now.checkpoint_interval, now.in_flight
    job = Workload(plan.spec, plan.ds.blocks, on_cpu=device.type == "cpu")
    if interval == "auto":
        fewest = replace(now, checkpoint_interval=0, in_flight=now.stages if in_flight == "auto" else in_flight)
        interval = checkpoint_interval(job, fewest, plan.bounds, memory)
    if in_flight == "auto" and now.schedule == "planned":
        fullest = peak_bytes(job, replace(now, checkpoint_interval=interval), plan.bounds)
        in_flight = now.most_held if fullest <= usable(memory, on_cpu=job.on_cpu) else now.stages
    ds = plan.ds.with_layout(checkpoint_interval=interval, in_flight=in_flight, across_hosts=plan.across)
    return replace(plan, ds=ds)
