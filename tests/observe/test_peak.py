"""The measured peak of a device, and how it is remembered."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ddpm_ds.observe import device_speed as peak
from ddpm_ds.observe.device_speed import matmul_peak, shared_peak
from ddpm_ds.unet import operations as arithmetic

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(peak, "SIZES", {"cpu": (32, 256)})
    monkeypatch.setattr(peak, "ENOUGH_SECONDS", 0.02)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_peak_is_that_of_the_size_that_suits_the_device() -> None:
    found = matmul_peak(CPU, torch.float32)
    assert found > 1e8
    assert found > peak._rate(8, CPU, torch.float32)


def test_peak_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "ddpm_ds" / "matmul_peak.json"
    first = shared_peak(CPU, "fp32", cache)
    assert list(json.loads(cache.read_text()).values()) == [first]
    monkeypatch.setattr(peak, "matmul_peak", lambda device, dtype: 1.0)
    monkeypatch.setattr(arithmetic, "WIDENED_ON_CPU", (torch.float16,))
    assert shared_peak(CPU, "fp32", cache) == first
    assert shared_peak(CPU, "fp16", cache) == first  # computed in fp32 here
    assert shared_peak(CPU, "bf16", cache) == 1.0
    monkeypatch.setattr(arithmetic, "WIDENED_ON_CPU", (torch.float16, torch.bfloat16))
    assert shared_peak(CPU, "bf16", cache) == first
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert shared_peak(CPU, "fp32", cache) == 1.0
    assert len(json.loads(cache.read_text())) == 3


@pytest.mark.parametrize("content", ["", "[1]", '{"key": "fast"}', '{"key": null}'])
def test_a_damaged_file_is_written_anew(tmp_path: Path, content: str) -> None:
    cache = tmp_path / "matmul_peak.json"
    cache.write_text(content)
    found = shared_peak(CPU, "fp32", cache)
    assert list(json.loads(cache.read_text()).values()) == [found]


def test_a_folder_that_cannot_be_written_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert shared_peak(CPU, "fp32", tmp_path / "file" / "matmul_peak.json") > 0
