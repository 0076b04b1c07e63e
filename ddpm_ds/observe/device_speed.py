"""How long each layer's forward and backward take on this machine, timed once and remembered.

How many flops a device does per second at most: square matrix products, timed once and remembered.

What a verdict has to know of the device that trained: its memory, and what a layer takes before it computes.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from ddpm_ds.command_line import cache_folder
from ddpm_ds.device import DTYPES, Dtype, wait_for_device
from ddpm_ds.pipeline.build import decided_by_rank_0
from ddpm_ds.unet.layers import DownsampleLayer, EmbedLayer, Layer, UpsampleLayer
from ddpm_ds.unet.model import build_layer
from ddpm_ds.unet.operations import arithmetic_dtype, set_image_index


@dataclass(frozen=True)
class LayerSeconds:
    """Of one micro-batch, on one device."""

    forward: float
    backward: float


LayerTimes = Callable[[int], Sequence[LayerSeconds]]
"""Seconds of every layer, given the images of a micro-batch."""

ENOUGH_SECONDS = 0.2
"""A layer is timed until that much time has gone into it, but at least once."""
MOST_TIMES = 20


def cache_file() -> Path:
    """Where times are remembered."""
    return cache_folder() / "layer_times.json"


def measured_times(
    layers: Sequence[Layer],
    device: torch.device,
    precision: Dtype,
    cache: Path,
    progress: Callable[[Layer, int], None] = lambda layer, images: None,
) -> LayerTimes:
    """Times by measuring: each shape of layer once for each micro-batch, on ``device`` in ``precision``.

    Times are kept in ``cache`` under device, threads, layer, micro-batch, precision and PyTorch's version; a file that
    can't be read is written anew. ``progress`` is called before a layer is timed.
    """
    known = _read(cache)

    def times(images: int) -> list[LayerSeconds]:
        found = []
        for layer in layers:
            key = _key(layer, images, device, precision)
            if key not in known:
                progress(layer, images)
                seconds = time_layer(layer, images, device, DTYPES[precision][1])
                known[key] = [seconds.forward, seconds.backward]
                _write(cache, known)
            found.append(LayerSeconds(*known[key]))
        return found

    return times


def time_layer(layer: Layer, images: int, device: torch.device, dtype: torch.dtype) -> LayerSeconds:
    """Median seconds of a layer's forward and backward, after one that is not counted."""
    module = build_layer(layer, 0, seed=0).to(device=device, dtype=dtype)
    set_image_index(module.modules(), torch.arange(images, device=device))
    inputs = _inputs(layer, images, device, dtype)
    times: list[tuple[float, float]] = []
    begin = time.perf_counter()
    while len(times) < 2 or (len(times) <= MOST_TIMES and time.perf_counter() - begin < ENOUGH_SECONDS):
        for tensor in (*inputs, *module.parameters()):
            tensor.grad = None
        start = _now(device)
        outputs = module(inputs)
        h = outputs if isinstance(outputs, Tensor) else outputs[isinstance(layer, EmbedLayer)]  # emb is what it makes
        middle = _now(device)
        torch.autograd.backward([h], [torch.ones_like(h)])
        times.append((middle - start, _now(device) - middle))
    forwards, backwards = zip(*times[1:], strict=True)
    return LayerSeconds(statistics.median(forwards), statistics.median(backwards))


def _inputs(layer: Layer, images: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """A carry as the layer takes it, with gradients; for the first layer x_t, t and labels."""
    size = layer.in_resolution
    h = torch.randn(images, layer.in_channels, size, size, device=device, dtype=dtype)
    if isinstance(layer, EmbedLayer):
        t = torch.zeros(images, dtype=torch.int64, device=device)
        return (h, t) if layer.classes is None else (h, t, t)
    emb = torch.randn(images, layer.embedding_channels, device=device, dtype=dtype)
    carry = [h, emb]
    if layer.skip_channels:
        carry.append(torch.randn(images, layer.skip_channels, size, size, device=device, dtype=dtype))
    formats = {2: torch.contiguous_format, 4: torch.channels_last}
    return tuple(tensor.contiguous(memory_format=formats[tensor.ndim]).requires_grad_() for tensor in carry)


def _now(device: torch.device) -> float:
    wait_for_device(device)
    return time.perf_counter()


def _key(layer: Layer, images: int, device: torch.device, precision: str) -> str:
    where = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{platform.processor() or platform.machine()} x {torch.get_num_threads()}"
    )
    shape: dict[str, Any] = {name: value for name, value in asdict(layer).items() if name != "name"}
    facts = [where, type(layer).__name__, shape, images, precision, "channels_last", torch.__version__]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def _read(cache: Path) -> dict[str, list[float]]:
    """What is remembered; nothing where the file is missing or damaged."""
    try:
        values = json.loads(cache.read_text())
        return {
            str(key): [float(forward), float(backward)]
            for key, (forward, backward) in values.items()
            if forward > 0 and backward > 0
        }
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _write(cache: Path, known: dict[str, list[float]]) -> None:
    cache.parent.mkdir(parents=True, exist_ok=True)
    written = cache.with_name(f"{cache.name}.{os.getpid()}")
    written.write_text(json.dumps(known))
    os.replace(written, cache)


SIZES = {"cpu": (512, 1024), "cuda": (4096, 8192)}
"""Rows of the matrices; a device reaches its peak on large ones, if they fit its caches."""
PEAK_SECONDS = 0.15
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
    key = _peak_key(device, dtype)
    known = decided_by_rank_0(lambda: _read_peak(cache).get(key))
    if known is not None:
        return known
    peaks: list[float] = [0.0] * dist.get_world_size()
    dist.barrier()
    dist.all_gather_object(peaks, matmul_peak(device, dtype))
    peak = sum(peaks) / len(peaks)
    if dist.get_rank() == 0:
        _write_peak(cache, key, peak)
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
    end = time.perf_counter() + PEAK_SECONDS
    while True:
        wait_for_device(device)
        begin = time.perf_counter()
        torch.mm(a, b, out=out)
        wait_for_device(device)
        now = time.perf_counter()
        fastest = min(fastest, now - begin)
        if now > end:
            return 2 * size**3 / fastest


def _peak_key(device: torch.device, dtype: torch.dtype) -> str:
    """Device, or processor with threads and processes of this host, what is computed in, and PyTorch's version."""
    where = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{platform.processor() or platform.machine()} x {torch.get_num_threads()} "
        f"x {os.environ.get('LOCAL_WORLD_SIZE', '1')}"
    )
    facts = [where, str(dtype), torch.__version__]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _read_peak(cache: Path) -> dict[str, float]:
    """What is remembered; nothing where the file is missing or damaged."""
    try:
        return {str(key): float(peak) for key, peak in json.loads(cache.read_text()).items() if peak > 0}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _write_peak(cache: Path, key: str, peak: float) -> None:
    """Remember; a folder that can't be written costs a third of a second in the next run."""
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        written = cache.with_name(f"{cache.name}.{os.getpid()}")
        written.write_text(json.dumps(_read_peak(cache) | {key: peak}))
        os.replace(written, cache)
    except OSError:
        pass


FILE = Path("trace") / "device.json"
"""In a run's folder."""
FEW_PIXELS = 2
"""Height and width of an image on which a layer has next to nothing to compute."""


@dataclass(frozen=True)
class Device:
    """Of one rank; None and empty are unknown."""

    memory_bytes: int | None = None
    startup: dict[str, LayerSeconds] = field(default_factory=dict)
    """By kind of layer: what a pass takes however few the images, for launches, Python and the weights' way."""

    def startup_of(self, layers: Sequence[Layer]) -> LayerSeconds:
        """What one micro-batch's passes through ``layers`` take however few its images."""
        own = [self.startup.get(type(layer).__name__, LayerSeconds(0.0, 0.0)) for layer in layers]
        return LayerSeconds(sum(one.forward for one in own), sum(one.backward for one in own))


def measure_device(layers: Sequence[Layer], device: torch.device, precision: Dtype) -> Device:
    """Time the smallest layer of each kind on one tiny image; takes a tenth of a second or two."""
    smallest: dict[str, Layer] = {}
    for layer in sorted(layers, key=lambda layer: layer.parameters):
        smallest.setdefault(type(layer).__name__, layer)
    sharing = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        memory = psutil.virtual_memory().total // sharing
    return Device(
        memory_bytes=memory,
        startup={
            kind: time_layer(_on_few_pixels(layer), 1, device, DTYPES[precision][1]) for kind, layer in smallest.items()
        },
    )


def _on_few_pixels(layer: Layer) -> Layer:
    size_in = 2 * FEW_PIXELS if isinstance(layer, DownsampleLayer) else FEW_PIXELS
    size_out = 2 * FEW_PIXELS if isinstance(layer, UpsampleLayer) else FEW_PIXELS
    return replace(layer, in_resolution=size_in, out_resolution=size_out)


def write_device(run_dir: Path, device: Device) -> None:
    """Keep it with a run."""
    file = run_dir / FILE
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(asdict(device), indent=2) + "\n")


def read_device(run_dir: Path) -> Device:
    """That of a run's folder, nothing known where the file is missing.

    Raises:
        ValueError, KeyError, TypeError: the file is damaged.
    """
    file = run_dir / FILE
    if not file.is_file():
        return Device()
    values = json.loads(file.read_text())
    startup = {kind: LayerSeconds(**seconds) for kind, seconds in values.pop("startup").items()}
    return Device(**values, startup=startup)
