"""``ddpm-ds fit`` with real processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ddpm_ds.config.ds_config import read_ds_config, resolve
from ddpm_ds.config.spec_file import load_spec
from tests.cli.test_fit import fit
from tests.launching import REPOSITORY, write_json
from tests.test_fit import DIGITS

CONFIGS = REPOSITORY / "ds_configs"
MIB = 2**20
WIDE = (
    *("unet.channels=8", "unet.multipliers=[1,1]", "unet.norm_groups=4", "unet.attention_resolutions=[]"),
    *("unet.middle_attention=false", "data.image_size=48", "data.workers=0", "optimizer.warmup_images=0"),
    *("samples.count=2", "train.accumulation=2"),
)
"""Over 4 MiB for an image, so that a limit stands out from what a process takes anyway."""


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.long
@pytest.mark.launch
def test_the_largest_that_fits_a_budget_is_found_and_the_next_one_does_not_fit(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folded = read_ds_config(CONFIGS / "folded_zero2_fp16.json") | {"fp16": {"enabled": False}}
    config, changes = write_json(tmp_path / "folded.json", folded), (*WIDE, f"data.store_root={tmp_path / 'data'}")

    def found(name: str, *options: str) -> dict[str, Any]:
        numbers = tmp_path / f"{name}.json"
        options += ("--processes", "2", "-p", "2", "--accumulation", "4", "--steps", "1", "--json", str(numbers))
        assert fit(*options, *(word for change in changes for word in ("--set", change)), config=config) == 0
        return dict(json.loads(numbers.read_text()))

    seven = max(found("first", "--micro-batch", "7")["trials"][0]["rank_peak_bytes"])
    budget = seven - 6 * MIB  # enough for 5.5 images
    files = ["--out", str(tmp_path / "fit.json"), "--memory-budget", f"{budget}B"]
    layout = found("numbers", "--micro-batch", "4,7", *files)

    assert {one["micro_batch_images"]: not one["why"] for one in layout["trials"]} == {4: True, 7: False}
    for one in layout["trials"]:
        assert (one["micro_batches"], one["batch_images"]) == (4, 4 * one["micro_batch_images"])
        assert (max(one["rank_peak_bytes"]) <= budget) == (not one["why"])
        assert len(one["step_seconds"]) == 1 and len(one["rank_peak_bytes"]) == 2
    said = capfd.readouterr().out
    assert "--set train.batch_images=16" in said and "does not fit: rank" in said
    spec = load_spec(DIGITS, [*WIDE, "train.batch_images=16", "train.accumulation=auto"])
    used = resolve(read_ds_config(tmp_path / "fit.json"), spec, world_size=2, stages=None, path="fit.json").layout
    assert (used.stages, used.micro_batch_images, used.micro_batches) == (2, 4, 4)
