"""What a CPU computes in when it stores 16-bit numbers."""

from __future__ import annotations

import pytest
import torch

from ddpm_ds.unet import operations as arithmetic
from ddpm_ds.unet.operations import arithmetic_dtype, widening

BOTH = (torch.float16, torch.bfloat16)


def test_fp16_is_widened_on_every_cpu_and_bf16_below_avx512(monkeypatch: pytest.MonkeyPatch) -> None:
    has_avx512 = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    assert (BOTH[:1] if has_avx512 else BOTH) == arithmetic.WIDENED_ON_CPU
    for widened in (BOTH[:1], BOTH):
        monkeypatch.setattr(arithmetic, "WIDENED_ON_CPU", widened)
        for dtype in (*BOTH, torch.float32):
            assert arithmetic_dtype("cpu", dtype) is (torch.float32 if dtype in widened else dtype)
            assert arithmetic_dtype("cuda", dtype) is dtype
            assert (widening("cpu", dtype) is not None) == (dtype in widened)
            assert widening("cuda", dtype) is None
    assert widening("cpu", torch.bfloat16) == "bf16 on a CPU: stored in bf16, computed in fp32"
