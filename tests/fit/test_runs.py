"""``ddpm-ds fit`` with two real processes, which die of memory."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from ddpm_ds.cli import fit as fit_command
from ddpm_ds.config.ds_config import read_ds_config, resolve
from ddpm_ds.config.spec_file import load_spec
from ddpm_ds.errors import LayoutError, is_out_of_memory
from ddpm_ds.fit import trial as fit_trial
from ddpm_ds.fit.task import Task
from ddpm_ds.fit.trial import TriedSize, run_trial, search, take_part
from ddpm_ds.predict.plan import RunPlan
from tests.cli.test_fit import fit
from tests.launching import REPOSITORY, write_json
from tests.train.ranks import TINY

DIGITS = REPOSITORY / "launch" / "specs" / "digits.yaml"
CONFIGS = REPOSITORY / "ds_configs"
MIB = 2**20
WIDE = (
    *("unet.channels=8", "unet.multipliers=[1,1]", "unet.norm_groups=4", "unet.attention_resolutions=[]"),
    *("unet.middle_attention=false", "data.image_size=48", "data.workers=0", "optimizer.warmup_images=0"),
)
"""Many MiB for an image, so that a limit stands out from what a process takes anyway."""


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def searched(folder: Path, settings: Sequence[str], *options: str, config: Path) -> dict[str, Any]:
    """The numbers of one layout."""
    numbers = folder / "numbers.json"
    changes = [word for value in (*settings, f"data.store_root={folder / 'data'}") for word in ("--set", value)]
    more = ["--steps", "1", "--json", str(numbers)]
    assert fit(*options, *changes, *more, config=config) == 0
    (found,) = json.loads(numbers.read_text())["layouts"]
    return dict(found)


@pytest.mark.long
@pytest.mark.launch
def test_the_largest_that_fits_a_budget_is_found_and_the_next_one_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    before, measured = set(psutil.Process().children()), list[int]()

    def budgeted(task: Task, folder: Path) -> Any:
        """First some trials without a budget, of which the budget is made: room for 5 images."""
        low, high = (run_trial(task, size, None, folder / f"first-{size}").peak_bytes for size in (2, 8))
        budget = low + (high - low) * 7 // 12  # of 5.5 images
        measured.extend([low, high, budget])
        return search(replace(task, budget_bytes=budget), folder)

    monkeypatch.setattr(fit_command, "search", budgeted)
    files = ["--out", str(tmp_path / "fit.json"), "--plot", str(tmp_path / "fit.png")]
    folded = read_ds_config(CONFIGS / "folded_zero2_fp16.json") | {"fp16": {"enabled": False}}
    options = ["--layouts", "2x1", "--accumulation", "4", "--micro-batch", "4,7", *files]
    found = searched(tmp_path, WIDE, *options, config=write_json(tmp_path / "folded.json", folded))

    low, high, budget = measured
    assert high - low > 24 * MIB
    assert {trial["micro_batch_images"]: trial["fits"] for trial in found["trials"]} == {4: True, 7: False}
    assert found["largest_micro_batch_images"] == 4 and found["ended_by_memory"]
    for trial in found["trials"]:
        assert (trial["micro_batches"], trial["batch_images"]) == (4, 4 * trial["micro_batch_images"])
        assert (max(trial["rank_peak_bytes"]) <= budget) == trial["fits"]
        assert not trial["fits"] or (len(trial["step_seconds"]) == 1 and len(trial["rank_peak_bytes"]) == 2)

    knee, said = found["knee_micro_batch_images"], capfd.readouterr().out
    assert f"--set train.batch_images={4 * knee}" in said and "does not fit: rank" in said
    assert (tmp_path / "fit.png").exists()
    spec = load_spec(DIGITS, [*WIDE, f"train.batch_images={4 * knee}"])
    used = resolve(read_ds_config(tmp_path / "fit.json"), spec, world_size=2, stages=None, path="fit.json").layout
    assert (used.stages, used.micro_batch_images, used.micro_batches) == (2, knee, 4)
    started = set(psutil.Process().children()) - before  # the server that forked them
    assert [one for server in started for one in server.children()] == []


def dying(variables: dict[str, str], *others: Any) -> None:
    """Instead of :func:`take_part`: rank 1 is killed when a micro-batch is large, while the other rank waits for it."""
    from ddpm_ds.fit import measure

    measured = measure.measure

    def measure_or_die(plan: RunPlan, *others: Any) -> Any:
        if plan.ds.layout.micro_batch_images >= 4 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return measured(plan, *others)

    measure.measure = measure_or_die  # type: ignore[assignment]
    take_part(variables, *others)


@pytest.mark.long
@pytest.mark.launch
def test_a_process_that_is_killed_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fit_trial, "take_part", dying)
    settings = [
        *TINY,
        "optimizer.warmup_images=0",
        "train.batch_images=24",
        "train.accumulation=auto",
        "data.workers=0",
    ]
    found = searched(tmp_path, settings, "--layouts", "1x2", "--micro-batch", "3,6", config=CONFIGS / "zero1_fp32.json")
    trials = {trial["micro_batch_images"]: trial for trial in found["trials"]}
    assert {size: trial["micro_batches"] for size, trial in trials.items()} == {3: 4, 6: 2}
    assert found["largest_micro_batch_images"] == 3 and found["ended_by_memory"]
    assert trials[6]["why"] == "rank 1 was killed (SIGKILL)"
    assert "does not fit: rank 1 was killed (SIGKILL)\n" in capfd.readouterr().out


def test_a_budget_too_little_for_one_image_is_said_with_what_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = TriedSize(1, 8, 8, False, "rank 0 took 1", [], [1], 0)
    monkeypatch.setattr(fit_command, "search", lambda task, folder: ([nothing], 612 * MIB))
    with pytest.raises(LayoutError) as refused:
        searched(
            tmp_path,
            [*TINY, "train.accumulation=auto"],
            *("--layouts", "1x1,2x1", "--memory-budget", "600MiB"),
            config=CONFIGS / "zero0_fp32.json",
        )
    said = "--memory-budget 0.59 GiB is too little: micro-batch 1 needs 0.60 GiB in layout 1x1; use --memory-budget"
    assert str(refused.value) == f"{said} 625MiB or more, or more stages"


@pytest.mark.parametrize(
    ("error", "memory"),
    [
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
    ],
    ids=str,
)
def test_libraries_that_run_out_of_memory_say_so_in_words_of_their_own(error: Exception, memory: bool) -> None:
    assert is_out_of_memory(error) == memory
