"""Which device this process trains on; decided, and told to DeepSpeed, before DeepSpeed is imported."""

from __future__ import annotations

import os

import torch

from ddpm_ds.errors import LayoutError


def choose_device(wanted: str) -> torch.device:
    """This process's device: ``wanted`` is ``auto``, ``cpu`` or ``cuda``; auto obeys ``DS_ACCELERATOR``, else takes
    CUDA where there is any. Sets ``DS_ACCELERATOR``, which DeepSpeed reads when it is imported.

    On CUDA cuDNN is to time its algorithms for each new shape of a convolution and to take the fastest: shapes stay the
    same from step to step. The first time that takes memory and waits for the device.

    Raises:
        LayoutError: CUDA was asked for and there is none, or it has fewer devices than local processes.
    """
    asked_by = "--device" if wanted != "auto" else "DS_ACCELERATOR"
    wanted = wanted if wanted != "auto" else os.environ.get("DS_ACCELERATOR", "auto")
    if wanted not in ("auto", "cpu", "cuda"):
        raise LayoutError(f"{asked_by} = {wanted} has not been tried with this project; use cpu or cuda")
    local_rank, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    devices = torch.cuda.device_count() if wanted != "cpu" else 0
    if wanted == "cuda" and not devices:
        raise LayoutError(f"{asked_by} = cuda, but PyTorch finds no CUDA device; use --device cpu, or mend the driver")
    if not devices:
        os.environ["DS_ACCELERATOR"] = "cpu"
        return torch.device("cpu")
    if local_size > devices:
        raise LayoutError(
            f"{local_size} processes were started on a host with {devices} CUDA devices; "
            f"start {devices} (deepspeed --num_gpus {devices}) or use --device cpu"
        )
    os.environ["DS_ACCELERATOR"] = "cuda"
    torch.cuda.set_device(local_rank)
    torch.backends.cudnn.benchmark = True
    return torch.device("cuda", local_rank)


def wait_for_device(device: torch.device) -> None:
    """Wait until a device has done all it was given, on any stream; only where no receive of a message is posted, which
    would be waited for as well."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def wait_for_stream(device: torch.device) -> None:
    """Wait until a device has done what was given to the current stream; messages that nobody waits for go on."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
