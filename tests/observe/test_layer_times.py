"""Layers are timed once for each shape and micro-batch; a damaged cache costs no more than measuring again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ddpm_ds.device import Dtype
from ddpm_ds.observe import device_speed as layer_times
from ddpm_ds.observe.device_speed import measured_times, time_layer
from ddpm_ds.unet.layers import Layer, unet_layers
from tests.launching import tiny_spec

CPU = torch.device("cpu")
SPEC = tiny_spec()
LAYERS = unet_layers(SPEC.unet, image_channels=1, image_size=8)


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_times, "ENOUGH_SECONDS", 0.0)


def times_with(cache: Path, images: int, precision: Dtype = "fp32") -> tuple[list[float], list[str]]:
    """Forward seconds of all layers, and the names of those that were timed for them."""
    timed: list[str] = []
    times = measured_times(LAYERS, CPU, precision, cache, lambda layer, count: timed.append(layer.name))
    return [layer.forward for layer in times(images)], timed


def test_each_shape_is_timed_once_and_remembered(tmp_path: Path) -> None:
    cache = tmp_path / "new" / "times.json"
    first, timed = times_with(cache, 2)
    assert len(first) == len(LAYERS) and min(first) > 0
    assert 0 < len(timed) < len(LAYERS)  # equal layers are timed once
    assert times_with(cache, 2) == (first, [])
    assert times_with(cache, 3)[1] == timed
    assert times_with(cache, 2, "bf16")[1] == timed
    assert times_with(cache, 2) == (first, [])


@pytest.mark.parametrize("damage", ["", "{", "[1, 2]", '{"a": 3}', '{"a": [1, "x"]}', "\x00\xff"])
def test_a_damaged_cache_is_measured_again(tmp_path: Path, damage: str) -> None:
    cache = tmp_path / "times.json"
    cache.write_text(damage, encoding="latin-1")
    values, timed = times_with(cache, 1)
    assert timed and times_with(cache, 1) == (values, [])


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_every_layer_can_be_timed(layer: Layer, dtype: torch.dtype) -> None:
    seconds = time_layer(layer, 2, CPU, dtype)
    assert seconds.forward > 0 and seconds.backward > 0
