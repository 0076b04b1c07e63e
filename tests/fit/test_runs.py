"""``ddpm-ds fit`` with two real processes, which die of memory."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from ddpm_ds.config.ds_config import read_ds_config, resolve
from ddpm_ds.config.spec_file import load_spec
from ddpm_ds.errors import LayoutError
from ddpm_ds.fit import task as fit_task
from ddpm_ds.fit.task import Task
from tests.cli.test_fit import fit
from tests.forking import Forked
from tests.launching import REPOSITORY, write_json
from tests.train.ranks import TINY

DIGITS = REPOSITORY / "launch" / "specs" / "digits.yaml"
CONFIGS = REPOSITORY / "ds_configs"
PLANTED = "tests.fit.planted"
MIB = 2**20
WIDE = (
    *("unet.channels=8", "unet.multipliers=[1,1]", "unet.norm_groups=4", "unet.attention_resolutions=[]"),
    *("unet.middle_attention=false", "data.image_size=48", "data.workers=0", "optimizer.warmup_images=0"),
)
"""Many MiB for an image, so that a limit stands out from what a process takes anyway."""


@pytest.fixture(autouse=True)
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setattr(fit_task, "PROGRAM", PLANTED)


def searched(folder: Path, settings: Sequence[str], *options: str, config: Path) -> dict[str, Any]:
    """The numbers of one layout."""
    numbers = folder / "numbers.json"
    changes = [word for value in (*settings, f"data.store_root={folder / 'data'}") for word in ("--set", value)]
    more = ["--steps", "1", "--json", str(numbers)]
    assert fit(*options, *changes, *more, config=config) == 0
    (found,) = json.loads(numbers.read_text())["layouts"]
    return dict(found)


def without_launcher(command: Sequence[str], **options: Any) -> int:
    """Stands for ``supervise``: the launcher's own start takes longer than all trials."""
    count = int(command[command.index("--num_gpus") + 1])
    program, *words = command[command.index("--module") + 1 :]
    script, output = REPOSITORY / f"{program.replace('.', '/')}.py", Path(words[-1]) / "output"
    ranks = []
    for rank in range(count):
        variables = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
        ranks.append(Forked.script([str(script), *words], env=variables, stdout=output, stderr=output))
    code = max(rank.wait() for rank in ranks)
    print(output.read_text())
    return code


@pytest.mark.long
@pytest.mark.launch
def test_the_largest_that_fits_a_budget_is_found_and_the_next_one_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PLANTED", "budget")
    results: list[dict[str, Any]] = []
    begin = Task.start

    def kept(task: Task, folder: Path) -> dict[str, Any]:
        results.append(begin(task, folder))
        return results[-1]

    monkeypatch.setattr(Task, "start", kept)
    files = ["--out", str(tmp_path / "fit.json"), "--plot", str(tmp_path / "fit.png")]
    folded = read_ds_config(CONFIGS / "folded_zero2_fp16.json") | {"fp16": {"enabled": False}}
    options = ["--layouts", "2x1", "--accumulation", "4", "--micro-batch", "4,5,6,7", *files]
    found = searched(tmp_path, WIDE, *options, config=write_json(tmp_path / "folded.json", folded))

    low, high, budget = results[0]["planted"]
    assert high - low > 24 * MIB
    fits = {trial["micro_batch_images"]: trial["fits"] for trial in found["trials"]}
    largest = found["largest_micro_batch_images"]
    assert 4 <= largest <= 6 and found["ended_by_memory"]
    assert fits[largest] and fits[largest + 1] is False  # each in processes of its own
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
    running = [one.info["cmdline"] or () for one in psutil.process_iter(["cmdline"])]
    assert not any(PLANTED in words and "--run-dir" in words for words in running)


@pytest.mark.long
@pytest.mark.launch
def test_a_child_that_is_killed_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PLANTED", "kill")
    monkeypatch.setattr(fit_task, "supervise", without_launcher)
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
    def finding_nothing(command: Sequence[str], **options: Any) -> int:
        trial = {"micro_batch_images": 1, "micro_batches": 8, "batch_images": 8, "fits": False, "why": "rank 0 took 1"}
        trial |= {"step_seconds": [], "rank_peak_bytes": [1], "checkpoint_interval": 0}
        result = {"trials": [trial], "needs_bytes": 612 * MIB, "failure": None, "refused": False}
        (Path(command[command.index("--run-dir") + 1]) / "result.json").write_text(json.dumps(result))
        return 0

    monkeypatch.setattr(fit_task, "supervise", finding_nothing)
    with pytest.raises(LayoutError) as refused:
        searched(
            tmp_path,
            [*TINY, "train.accumulation=auto"],
            *("--layouts", "1x1,2x1", "--memory-budget", "600MiB"),
            config=CONFIGS / "zero0_fp32.json",
        )
    said = "--memory-budget 0.59 GiB is too little: micro-batch 1 needs 0.60 GiB in layout 1x1; use --memory-budget"
    assert str(refused.value) == f"{said} 625MiB or more, or more stages"
