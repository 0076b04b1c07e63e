"""How long each layer's forward and backward take on this machine, timed once and remembered."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddpm_ds.checkpoint.consolidate import DTYPES, Dtype
from ddpm_ds.command_line import cache_folder
from ddpm_ds.device import wait_for_device
from ddpm_ds.unet.layers import EmbedLayer, Layer
from ddpm_ds.unet.model import build_layer
from ddpm_ds.unet.operations import set_image_index


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
