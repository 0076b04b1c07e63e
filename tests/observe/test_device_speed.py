"""Layers' times and the peak of a device: measured once, remembered, and measured again where a cache is damaged."""

import json
from pathlib import Path

import pytest
import torch
from torch.multiprocessing.spawn import ProcessExitedException

from ddpm_ds.ground.units import Precision
from ddpm_ds.observe import device_speed
from ddpm_ds.observe.device_speed import (
    known_swap,
    matmul_peak,
    measure_swap,
    measured_times,
    shared_peak,
    startup_times,
)
from ddpm_ds.unet import operations
from ddpm_ds.unet.layers import unet_layers
from ddpm_ds.unet.spec import Interface
from tests.launching import tiny_spec, tiny_text_spec

CPU = torch.device("cpu")
LAYERS = unet_layers(tiny_spec().unet, Interface(channels=1, size=(8, 8)))


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The cache folder; what is measured is measured in a hurry."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(device_speed, "ENOUGH_SECONDS", 0.0)
    monkeypatch.setattr(device_speed, "SIZES", {"cpu": (32, 256)})
    monkeypatch.setattr(device_speed, "PEAK_SECONDS", 0.02)
    return tmp_path / "ddpm_ds"


def test_layers_of_a_unet_with_text_are_timed() -> None:
    spec = tiny_text_spec(unet={"dropout": 0.0})
    layers = unet_layers(spec.unet, spec.data.interface)
    assert min(layer.backward for layer in measured_times(CPU, "fp32")(layers, 1)) > 0
    assert min(layer.forward for layer in startup_times(layers, CPU, "fp16").values()) > 0


def times_with(images: int, precision: Precision = "fp32") -> tuple[list[float], list[str]]:
    """Forward seconds of all layers, and the names of those that were timed for them."""
    timed: list[str] = []
    times = measured_times(CPU, precision, lambda layer, count: timed.append(layer.name))
    return [layer.forward for layer in times(LAYERS, images)], timed


def test_each_shape_is_timed_once_and_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    first, timed = times_with(2)
    assert len(first) == len(LAYERS) and min(first) > 0
    assert 0 < len(timed) < len(LAYERS)  # equal layers are timed once
    assert times_with(2) == (first, [])
    assert times_with(3)[1] == times_with(2, "bf16")[1] == timed and times_with(2) == (first, [])
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another processor's")
    assert times_with(2)[1] == timed


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("damage", ["", "[1, 2]", '{"a": 3}', '{"a": [1, "x"]}', "\x00\xff", None])
def test_a_damaged_cache_is_measured_again_and_one_that_cannot_be_written_is_left(
    cache: Path, damage: str | None
) -> None:
    if damage is None:
        cache.write_text("")
        assert shared_peak(CPU, "fp32") > 0 and times_with(1)[1]
        return
    cache.mkdir()
    for name in ("layer_times.json", "matmul_peak.json"):
        (cache / name).write_text(damage, encoding="latin-1")
    values, timed = times_with(1)
    assert timed and times_with(1) == (values, [])
    peak = shared_peak(CPU, "fp32")
    assert list(json.loads((cache / "matmul_peak.json").read_text()).values()) == [[peak]]


@pytest.mark.usefixtures("alone")
def test_peak_is_measured_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert matmul_peak(CPU, torch.float32) > 1e8
    first = shared_peak(CPU, "fp32")
    monkeypatch.setattr(device_speed, "matmul_peak", lambda device, dtype: 1.0)
    monkeypatch.setattr(operations, "WIDENED_ON_CPU", (torch.float16,))
    assert shared_peak(CPU, "fp32") == first
    assert shared_peak(CPU, "fp16") == first  # computed in fp32 here
    assert shared_peak(CPU, "bf16") == 1.0
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert shared_peak(CPU, "fp32") == 1.0
    assert len(json.loads((cache / "matmul_peak.json").read_text())) == 3


@pytest.mark.launch
def test_a_swap_of_two_processes_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert known_swap("cpu") is None
    measure_swap("cpu", CPU)
    assert (found := known_swap("cpu")) is not None and min(found) > 0

    def dies(*given: object, **options: object) -> None:
        raise ProcessExitedException("killed", 0, 1, 1)

    monkeypatch.setattr(device_speed, "spawn", dies)
    measure_swap("cpu", CPU)
    measure_swap("other", CPU)
    assert known_swap("cpu") == found and known_swap("other") is None, "where no process may start"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    measure_swap("other", torch.device("cuda"))
