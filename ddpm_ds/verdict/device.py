"""What a verdict has to know of the device that trained: its memory, and what a layer takes before it computes."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import psutil
import torch

from ddpm_ds.checkpoint.consolidate import DTYPES, Dtype
from ddpm_ds.observe.layer_times import LayerSeconds, time_layer
from ddpm_ds.unet.layers import DownsampleLayer, Layer, UpsampleLayer

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
