"""DeepSpeed's CPU accelerator, extended so that fp16 runs on any processor and nothing is compiled at run time."""

from __future__ import annotations

from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator


class HostAccelerator(CPU_Accelerator):
    """A CPU on which fp16 means fp16 storage with fp32 arithmetic inside each layer (see ``unet/blocks.py``).

    DeepSpeed refuses fp16 on processors without native fp16 products, and it builds a shared-memory communication
    extension at start-up, which takes a compiler and most of a minute. Neither is needed: a layer in fp32 between
    two casts costs what fp32 costs, and gloo carries the messages.
    """

    def is_fp16_supported(self) -> bool:
        return True

    def create_op_builder(self, op_name: str) -> object | None:
        if op_name == "ShareMemCommBuilder":
            return None
        return super().create_op_builder(op_name)


def use_host_accelerator() -> None:
    """Make DeepSpeed use it, where DeepSpeed runs on the CPU at all."""
    if get_accelerator().device_name() == "cpu":
        set_accelerator(HostAccelerator())
