"""How many flops a device does per second at most: square matrix products, timed once and remembered."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from pathlib import Path

import torch
import torch.distributed as dist

from ddpm_ds.checkpoint.consolidate import DTYPES, Dtype
from ddpm_ds.device import wait_for_device
from ddpm_ds.observe.layer_times import cache_file
from ddpm_ds.pipeline.collectives import decided_by_rank_0
from ddpm_ds.unet.arithmetic import arithmetic_dtype

SIZES = {"cpu": (512, 1024), "cuda": (4096, 8192)}
"""Rows of the matrices; a device reaches its peak on large ones, if they fit its caches."""
ENOUGH_SECONDS = 0.15
"""That much time goes into each size."""


def peak_file() -> Path:
    """Where peaks are remembered, beside the layers' times."""
    return cache_file().with_name("matmul_peak.json")


def shared_peak(device: torch.device, precision: Dtype, cache: Path) -> float:
    """Flops per second of one device, the mean over all ranks'; collective, each rank gets the same.

    Rank 0 looks into ``cache``. What is not there is measured on all ranks at once, so that processes on one CPU share
    it as they do in training.
    """
    dtype = arithmetic_dtype(device.type, DTYPES[precision][1])
    key = _key(device, dtype)
    known = decided_by_rank_0(lambda: _read(cache).get(key))
    if known is not None:
        return known
    peaks: list[float] = [0.0] * dist.get_world_size()
    dist.barrier()
    dist.all_gather_object(peaks, matmul_peak(device, dtype))
    peak = sum(peaks) / len(peaks)
    if dist.get_rank() == 0:
        _write(cache, key, peak)
    return peak


def matmul_peak(device: torch.device, dtype: torch.dtype) -> float:
    """The fastest of some products of square matrices, in flops per second; fp32 on CUDA as convolutions do it, in
    TF32 where they may."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    matmul.allow_tf32 = torch.backends.cudnn.allow_tf32
    try:
        return max(_rate(size, device, dtype) for size in SIZES[device.type])
    finally:
        matmul.allow_tf32 = before


def _rate(size: int, device: torch.device, dtype: torch.dtype) -> float:
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.mm(a, b)  # the first one chooses a kernel
    fastest = float("inf")
    end = time.perf_counter() + ENOUGH_SECONDS
    while True:
        wait_for_device(device)
        begin = time.perf_counter()
        torch.mm(a, b, out=out)
        wait_for_device(device)
        now = time.perf_counter()
        fastest = min(fastest, now - begin)
        if now > end:
            return 2 * size**3 / fastest


def _key(device: torch.device, dtype: torch.dtype) -> str:
    """Device, or processor with threads and processes of this host, what is computed in, and PyTorch's version."""
    where = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{platform.processor() or platform.machine()} x {torch.get_num_threads()} "
        f"x {os.environ.get('LOCAL_WORLD_SIZE', '1')}"
    )
    facts = [where, str(dtype), torch.__version__]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _read(cache: Path) -> dict[str, float]:
    """What is remembered; nothing where the file is missing or damaged."""
    try:
        return {str(key): float(peak) for key, peak in json.loads(cache.read_text()).items() if peak > 0}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _write(cache: Path, key: str, peak: float) -> None:
    """Remember; a folder that can't be written costs a third of a second in the next run."""
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        written = cache.with_name(f"{cache.name}.{os.getpid()}")
        written.write_text(json.dumps(_read(cache) | {key: peak}))
        os.replace(written, cache)
    except OSError:
        pass
