"""``ddpm-ds fit`` with real processes."""

import json
from pathlib import Path

import pytest

from ddpm_ds.config.ds_config import read_ds_config
from ddpm_ds.experiments.fit import Task, try_size
from ddpm_ds.planning.inputs import machine_like
from tests.cli.test_fit import fit
from tests.experiments.test_fit import DIGITS
from tests.launching import REPOSITORY, write_json

CONFIGS = REPOSITORY / "ds_configs"
MIB = 2**20
WIDE = (
    *("unet.channels=8", "unet.multipliers=[1,1]", "unet.norm_groups=4", "unet.attention_resolutions=[]"),
    *("unet.middle_attention=false", "data.image_size=48", "optimizer.warmup_images=0"),
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

    of = Task(DIGITS, changes, config, 2, 1, 2, 4, machine_like("cpu", 2**33, half=False, devices=2), None, 1)
    budget = try_size(of, tmp_path, 7).peak_bytes - 6 * MIB  # enough for 5.5 images
    numbers, words = tmp_path / "numbers.json", [word for change in changes for word in ("--set", change)]
    options = ("--processes", "2", "-p", "2", "--accumulation", "4", "--steps", "1", "--json", str(numbers))
    files = ("--out", str(tmp_path / "fit.json"), "--memory-budget", f"{budget}B")
    assert fit(*options, *files, *words, config=config) == 0

    layout = json.loads(numbers.read_text())
    fitting = [one["micro_batch_images"] for one in layout["trials"] if not one["why"]]
    assert fitting[-1] + 1 in [one["micro_batch_images"] for one in layout["trials"] if one["why"]]
    for one in layout["trials"]:
        assert (max(one["rank_peak_bytes"]) <= budget) == (not one["why"])
        assert len(one["step_seconds"]) == 1 and len(one["rank_peak_bytes"]) == 2
    said = capfd.readouterr().out
    best = layout["best"]
    assert f"--set train.batch_images={4 * best}" in said and "does not fit: rank" in said
    used = read_ds_config(tmp_path / "fit.json")
    assert (used["train_micro_batch_size_per_gpu"], used["gradient_accumulation_steps"]) == (best, 4)
