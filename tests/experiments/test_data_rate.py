"""``ddpm-ds bench-data``: planted loaders and U-Nets, and one real run of the smallest kind."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from PIL import Image

from ddpm_ds.cli.bench_data import add_bench_data, conclusion, paces, table
from ddpm_ds.command_line import OneLineParser
from ddpm_ds.data import prepare as preparing
from ddpm_ds.data import residence
from ddpm_ds.data.loader import MicroBatch
from ddpm_ds.data.prepare import prepare
from ddpm_ds.errors import LayoutError, SpecError, UserError
from ddpm_ds.experiments import data_rate as data_bench
from ddpm_ds.experiments.data_rate import Feed, Loading, Spread, UnetPace, measure_loading, unet_need
from tests.launching import tiny_spec

CPU = torch.device("cpu")
BATCH = MicroBatch(torch.zeros(10, 1, 8, 8, dtype=torch.uint8), torch.zeros(10).long(), torch.arange(10))


class Clock:
    """Time that passes only where something takes it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(time, "sleep", self.take)

    def take(self, seconds: float) -> None:
        self.now += seconds


def feed_of(monkeypatch: pytest.MonkeyPatch, clock: Clock, seconds_of: dict[int, float]) -> Feed:
    """Micro-batches of 10 images: read on demand without workers, else one after the other and 4 of them ahead."""

    def batches(feed: Feed, workers: int) -> Iterator[MicroBatch]:
        ready = clock.now
        while True:
            ahead = 4 * seconds_of[workers] if workers else 0.0
            ready = max(ready, clock.now - ahead) + seconds_of[workers]
            clock.now = max(clock.now, ready)
            yield BATCH

    monkeypatch.setattr(Feed, "batches", batches)
    return Feed(store=None, micro_batch_images=10, device=CPU)  # type: ignore[arg-type]


def test_rates_and_waits_are_those_that_were_planted(monkeypatch: pytest.MonkeyPatch) -> None:
    """0 workers take 1 ms of each 100 ms step; one takes 50 ms beside it; another 400 ms, so 300 are waited."""
    clock = Clock(monkeypatch)
    feed = feed_of(monkeypatch, clock, {0: 0.001, 1: 0.05, 2: 0.4})
    found = measure_loading(feed, [0, 1, 2], seconds=20.0, rounds=4, needs=100.0)
    assert [loading.workers for loading in found] == [0, 1, 2]
    rates = [loading.images_per_second.median for loading in found]
    assert rates == pytest.approx([10_000, 200, 25], rel=1e-6)
    shares = [loading.wait_share for loading in found]
    assert shares == pytest.approx([0.001 / 0.101, 0.0, 0.3 / 0.4], abs=0.02)
    (unknown,) = measure_loading(feed, [0], seconds=1.0, rounds=1, needs=None)
    assert unknown.wait_share is None and unknown.images_per_second.median == pytest.approx(10_000)


def loading(workers: int, rate: float, share: float) -> Loading:
    return Loading(workers, Spread(rate, 0.9 * rate, 1.1 * rate), share)


NEED = UnetPace(2_000.0, "as --needs says")


def test_table_says_how_many_times_faster_the_loader_is() -> None:
    lines = table([loading(0, 500_000.0, 0.0041), loading(2, 1_000.0, 0.5)], 3072, NEED)
    assert lines == [
        "workers  images/s          (quartiles)   MB/s  x needed  data wait",
        "      0   500,000  (450,000 - 550,000)  1,536       250      0.41%",
        "      2     1,000        (900 - 1,100)      3       0.5     50.00%",
    ]
    assert table([loading(0, 500_000.0, 0.0)], 3072, None)[0].split() == ["workers", "images/s", "(quartiles)", "MB/s"]


@pytest.mark.parametrize(
    ("loadings", "line"),
    [
        ([loading(0, 9000.0, 0.002), loading(1, 9000.0, 0.001)], "data.workers=0 suffices: less than 1% of a step"),
        ([loading(0, 9000.0, 0.2), loading(1, 9000.0, 0.001)], "data.workers=1 suffices"),
        ([loading(0, 9000.0, 0.2), loading(1, 1900.0, 0.009)], "none suffices; with data.workers=1 0.9% of a step"),
        ([loading(0, 9000.0, 0.2), loading(4, 1900.0, 0.3)], "none suffices; with data.workers=0 20.0% of a step"),
    ],
)
def test_conclusion_names_the_fewest_workers_that_suffice(loadings: list[Loading], line: str) -> None:
    found = conclusion(loadings, NEED, "data.store=pixels")
    assert found.startswith(line) and ("suffices: " in found or found.endswith("micro-batches, or data.store=pixels"))


def test_a_u_net_of_any_speed_finds_its_workers() -> None:
    """The slower quartile counts, and workers that make it no faster are not named."""
    loadings = [loading(0, 1000.0, 0.0), loading(1, 900.0, 0.0), loading(4, 4000.0, 0.0)]
    speeds = "up to 900 images/s data.workers=0, up to 3,600 images/s data.workers=4; beyond, more cores"
    assert paces(loadings, "more cores") == f"for a U-Net of another speed: {speeds}"


def bench(*arguments: object) -> None:
    parser = OneLineParser(prog="ddpm-ds")
    add_bench_data(parser.add_subparsers(required=True))
    options = parser.parse_args(["bench-data", *map(str, arguments)])
    options.run(options)


def test_digits_are_measured_as_they_are_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr(data_bench, "WAITS", range(2, 4))
    numbers = tmp_path / "numbers.json"
    small = [f"--set=data.store_root={tmp_path}", "--set=unet.channels=8", "--set=data.crop_from=12"]
    bench(*small, "--workers=1,0", "--seconds=0.2", "--rounds=2", "--micro-batch=16", "--device=cpu", "--json", numbers)
    out = capsys.readouterr().out
    assert "digits-12px-1ch: 1,797 of 1x12x12, uint8" in out and "micro-batches of 16 for one replica on cpu" in out
    assert "digits, forward and backward of 16 in fp32" in out and "store    pixels, 0.2 MiB, in " in out
    assert "of memory, full shuffle\n" in out and "\nfor a U-Net of another speed: up to " in out
    found = json.loads(numbers.read_text())
    assert [line["workers"] for line in found["workers"]] == [0, 1]
    for line in found["workers"]:
        assert line["images_per_second"]["median"] > 1000 and 0.0 <= line["wait_share"] < 1.0
    assert found["needs"]["images_per_second"] > 10 and found["shape"] == [1, 12, 12]


def test_a_cache_that_memory_does_not_hold_is_said_with_the_windows_to_read_it_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr(residence, "host_memory", lambda: 2**16)
    quick = [f"--set=data.store_root={tmp_path}", "--workers=0", "--seconds=0.1", "--rounds=1", "--no-model"]
    bench(*quick)
    out = capsys.readouterr().out
    assert "pixels, 0.1 MiB, too large for 0.1 MiB of memory, full shuffle" in out
    assert "another place on the disk; use 64\n" in out
    bench(*quick, "--set=data.shuffle_images=128")
    out = capsys.readouterr().out
    assert "memory, windows of 128 images" in out and "another place" not in out
    assert "; beyond, data.store_root on a faster disk" in out


def test_preparation_is_measured_and_nothing_is_prepared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    photos, numbers = tmp_path / "photos", tmp_path / "numbers.json"
    photos.mkdir()
    for number in range(3):
        Image.new("RGB", (40, 30), (number, 0, 0)).save(photos / f"{number}.png")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(2))
    monkeypatch.setattr(preparing, "FEW_IMAGES", 2)
    folder = ["--set=data.source=folder", f"--set=data.path={photos}", f"--set=data.store_root={tmp_path / 'stores'}"]
    bench(*folder, "--preparation", "--seconds=0.2", "--json", numbers)
    out, found = capsys.readouterr().out, json.loads(numbers.read_text())
    assert "source       folder: 3 images of 1x8x8, 0.0 MiB as pixels\n1 core       " in out
    assert "\n2 cores      " in out and " x 2 x one core\npreparation  0 s\n" in out
    assert found["one_core_images_per_second"] > 10 and found["cores"] == 2 and found["plan"]["images"] == 3
    assert not (tmp_path / "stores").exists()
    bench(f"--set=data.store_root={tmp_path}", "--preparation", "--seconds=0.1")  # its pixels are only copied
    assert "\n2 cores" not in capsys.readouterr().out


def test_a_step_that_would_take_long_is_of_few_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = tiny_spec(data={"store_root": str(tmp_path)})
    feed = Feed(prepare(spec.data), 64, CPU)
    monkeypatch.setattr(data_bench, "LONG_STEP_SECONDS", math.inf)  # of a busy machine too
    assert "of 64 in fp32" in unet_need(spec, feed, "fp32", 0.01).words
    monkeypatch.setattr(data_bench, "LONG_STEP_SECONDS", 1e-9)
    assert "of 8 in fp32" in unet_need(spec, feed, "fp32", 0.01).words
    error = torch.OutOfMemoryError("CUDA out of memory")
    monkeypatch.setattr(data_bench, "wait_for_device", Mock(side_effect=error))
    with pytest.raises(LayoutError, match="--micro-batch = 64: the device has no memory"):
        unet_need(spec, feed, "fp32", 0.01)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["--workers=0,some"],
            "argument --workers: 'some' is not a number of workers from 0 to 1,024; ddpm-ds bench-data --help",
        ),
        (["--seconds=0"], "argument --seconds: '0' is not a time in seconds"),
        (["--needs=many"], "argument --needs: 'many' is not a number above 0"),
        (["--needs=5", "--no-model"], "argument --no-model: not allowed with argument --needs"),
    ],
)
def test_wrong_options_are_one_line(arguments: list[str], line: str) -> None:
    with pytest.raises(SpecError) as caught:
        bench(*arguments)
    assert str(caught.value).startswith(line)


def test_a_file_that_could_not_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"--json .*missing.* can't be written"):
        bench("--json", tmp_path / "missing" / "numbers.json")
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    with pytest.raises(UserError, match=r"--json .*numbers.* can't be written"):
        bench("--json", tmp_path / "numbers.json")
