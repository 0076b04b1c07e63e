"""In which dtype a layer computes; numbers may be stored in a narrower one."""

from __future__ import annotations

import torch

WIDENED_ON_CPU = (
    (torch.float16,)
    if torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    else (torch.float16, torch.bfloat16)
)
"""CPUs without 16-bit arithmetic run convolutions in it 30 to 70 times slower than fp32 ones."""


def arithmetic_dtype(device_type: str, stored: torch.dtype) -> torch.dtype:
    """That of the carry, but on a CPU fp32 for fp16, and for bf16 below AVX-512.

    A layer that widens its input once and narrows its output once costs about what fp32 costs.
    """
    return torch.float32 if device_type == "cpu" and stored in WIDENED_ON_CPU else stored


def widening(device_type: str, stored: torch.dtype) -> str | None:
    """What to tell the user of 16-bit numbers that are widened; None where nothing is."""
    if arithmetic_dtype(device_type, stored) is stored:
        return None
    precision = "fp16" if stored is torch.float16 else "bf16"
    return f"{precision} on a CPU: stored in {precision}, computed in fp32"
