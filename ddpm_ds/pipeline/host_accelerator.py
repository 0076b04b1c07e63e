"""DeepSpeed's CPU accelerator, extended so that fp16 runs on any processor and nothing is compiled at run time."""

from __future__ import annotations

import os

import torch
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

from ddpm_ds.errors import LayoutError


class HostAccelerator(CPU_Accelerator):
    """A CPU on which fp16 means fp16 storage with fp32 arithmetic inside each layer (see ``unet/blocks.py``).

    DeepSpeed refuses fp16 on processors without native fp16 products, and it builds a shared-memory
    communication extension at start-up (45 s and a compiler). Neither is wanted here: convolutions in fp32
    between casts cost what fp32 costs, and gloo carries the messages.
    """

    def is_fp16_supported(self) -> bool:
        return True

    def create_op_builder(self, op_name: str) -> object | None:
        if op_name == "ShareMemCommBuilder":
            return None
        return super().create_op_builder(op_name)


def select_device(wanted: str) -> torch.device:
    """Choose CUDA or the host for this process and tell DeepSpeed.

    ``wanted`` is ``auto``, ``cpu`` or ``cuda``; ``DS_ACCELERATOR`` decides where it is ``auto``. Call before
    anything of DeepSpeed that touches a device.

    Raises:
        LayoutError: CUDA was asked for and there is none, or it has fewer devices than local processes.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    asked = "--device" if wanted != "auto" else "DS_ACCELERATOR"
    wanted = wanted if wanted != "auto" else os.environ.get("DS_ACCELERATOR", "auto")
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cuda" and available == 0:
        raise LayoutError(f"{asked} is cuda, but PyTorch finds no CUDA device; use --device cpu or check the driver")
    if wanted == "cuda" or (wanted == "auto" and available):
        if local_size > available:
            raise LayoutError(
                f"{local_size} processes on this host, but {available} CUDA devices; start at most {available} "
                "(deepspeed --num_gpus N) or use --device cpu"
            )
        os.environ["DS_ACCELERATOR"] = "cuda"
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    if wanted not in ("auto", "cpu"):
        raise LayoutError(f"{asked} is {wanted}, which is not tried; use cpu or cuda")
    os.environ["DS_ACCELERATOR"] = "cpu"
    if not isinstance(get_accelerator(), HostAccelerator):
        set_accelerator(HostAccelerator())
    return torch.device("cpu")
