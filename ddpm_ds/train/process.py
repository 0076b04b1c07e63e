"""A process of a run: its group and threads, and what only a process with a device can decide."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import deepspeed
import psutil
import torch
import torch.distributed as dist

from ddpm_ds.checkpoint.consolidate import DTYPES
from ddpm_ds.command_line import on_several_hosts
from ddpm_ds.errors import BadNumbersError, DeviceLostError, HostError, Preempted, UserError
from ddpm_ds.hosts.interface import GLOO_INTERFACE, use_interface_towards
from ddpm_ds.observe.layer_times import cache_file, measured_times
from ddpm_ds.pipeline.collectives import decided_by_rank_0
from ddpm_ds.pipeline.memory import checkpoint_interval
from ddpm_ds.pipeline.partition import describe
from ddpm_ds.planner.auto import measured_cuts
from ddpm_ds.train.meeting import port_taken
from ddpm_ds.train.node_metrics import host_name
from ddpm_ds.train.plan import RunPlan, stage_table
from ddpm_ds.unet.arithmetic import arithmetic_dtype
from ddpm_ds.unet.compiled import check_compiler
from ddpm_ds.unet.kernel_choice import check_kernels

KNOWN_TO_ALL_RANKS = (UserError, BadNumbersError, Preempted)
"""Raised on every rank at the same step, so that all can still act together."""


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """DeepSpeed's process group; destroyed at the end, since gloo aborts a process that leaves with one.

    Raises:
        LayoutError: another job on this host has the port.
        HostError: the hosts' ranks can't connect to each other.
    """
    if os.environ["WORLD_SIZE"] == "1":
        os.environ["MASTER_PORT"] = "0"  # any free one: two runs on one host don't meet
    if on_several_hosts():
        use_interface_towards(os.environ["MASTER_ADDR"])
    try:
        deepspeed.init_distributed(verbose=False)
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise port_taken() from None
    except dist.DistBackendError as error:
        if not on_several_hosts():
            raise
        raise _not_connected(error) from error
    try:
        yield
    except DeviceLostError:  # nothing that needs the device works any more
        raise
    except KNOWN_TO_ALL_RANKS:  # leave together
        dist.barrier()
        dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def _not_connected(error: Exception) -> HostError:
    """Why the ranks of different hosts have no process group, as far as the collectives' library tells."""
    return HostError(
        f"rank {os.environ['RANK']} (host {host_name()}) can't connect to the ranks of other hosts over interface "
        f"{os.environ.get(GLOO_INTERFACE, 'unknown')} ({str(error).splitlines()[0]}); ddpm-ds doctor --hostfile FILE "
        f"tests every pair of hosts, and {GLOO_INTERFACE} or NCCL_SOCKET_IFNAME chooses another interface"
    )


def check_arithmetic(config: dict[str, Any], device: torch.device) -> None:
    """Whether what the JSON says of kernels and compilation can work on a device.

    Raises:
        DsConfigError: it can't.
    """
    check_kernels(config["kernels"], device)
    if config["compile"]:
        check_compiler(device)


def share_threads(device: torch.device) -> None:
    """Give each process on this host its share of the cores, unless the environment has said how many."""
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // int(os.environ["LOCAL_WORLD_SIZE"])))


def cut_by_time(plan: RunPlan, device: torch.device) -> RunPlan:
    """The plan with cuts by the layers' seconds on rank 0's device, where the JSON asks for that."""
    if plan.ds.partition != "measured" or plan.ds.layout.stages == 1:
        return plan
    bounds = decided_by_rank_0(
        lambda: measured_cuts(
            plan.spec,
            plan.ds,
            plan.ds_path,
            lambda job: measured_times(job.layers, device, job.precision, cache_file()),
        )
    )
    plan = replace(plan, bounds=bounds, stages=describe(plan.layers, bounds, plan.ds.schedule))
    if dist.get_rank() == 0:
        print(f"\ncut by the layers' times on this device\n{stage_table(plan)}", flush=True)
    return plan


def fill_checkpointing(plan: RunPlan, device: torch.device) -> dict[str, Any]:
    """The DeepSpeed configuration, with activation checkpointing decided by this device's memory where it is auto."""
    config, layout = plan.config, plan.ds.layout
    if plan.ds.checkpoint_interval == "auto":
        if device.type == "cuda":
            memory = torch.cuda.get_device_properties(device).total_memory
        else:
            memory = psutil.virtual_memory().total // int(os.environ["LOCAL_WORLD_SIZE"])
        interval = checkpoint_interval(
            plan.stages,
            plan.ds.schedule,
            micro_batch_images=layout.micro_batch_images,
            micro_batches=layout.micro_batches,
            element_bytes=arithmetic_dtype(device.type, DTYPES[plan.ds.precision][1]).itemsize,
            device_bytes=memory,
        )
        config["pipeline"] = {**config["pipeline"], "activation_checkpoint_interval": interval}
    return config
