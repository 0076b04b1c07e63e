"""``launch/bench.py``, started as by a user."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from rivals import command
from rivals.choice import NAMED, ROWS

from tests.launching import REPOSITORY, run_ranks

BENCH = REPOSITORY / "launch" / "bench.py"
MAIN = REPOSITORY / "ds_configs" / "zero2_fp16.json"
IMAGES = 16
TINY = [
    *("unet.channels=8", "unet.norm_groups=4", "unet.dropout=0.1", "unet.classes=10", "train.label_drop=0.2"),
    *("unet.multipliers=[1]", "unet.attention_resolutions=[]"),
    *(f"train.batch_images={IMAGES}", "train.accumulation=4", "diffusion.loss=huber"),
    *("optimizer.learning_rate=0.03", "optimizer.warmup_images=64"),
    "optimizer.epsilon=0.01",  # with gradients too small to be clipped: Adam would hide a wrong scale of them
]
STEPS = 5
REPLICATED = ("1f1b", "folded", "stock", "stock-dualpipev")
"""One row of each way of adding up gradients over replicas."""


def arguments(config: str, folder: Path, *others: str) -> list[str]:
    return [
        *("--deepspeed_config", str(REPOSITORY / "ds_configs" / config)),
        *("--rounds", "2", "--steps-per-round", "1", "--compared-steps", str(STEPS)),
        *(part for setting in (*TINY, f"data.store_root={folder / 'data'}") for part in ("--set", setting)),
        *others,
    ]


def results(done: subprocess.CompletedProcess[str], file: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    report = json.loads(file.read_text())
    return report, {row["row"]: row for row in report["rows"]}


@pytest.mark.long
@pytest.mark.launch
@pytest.mark.parametrize("processes", [1, 2], ids=["one process", "a space group"])
def test_rows_are_compared_to_the_plain_loop_in_one_process(processes: int, tmp_path: Path) -> None:
    file, space = tmp_path / "result.json", ("--set", f"ds.pipeline.space.size={processes}")
    words = arguments("zero0_fp32.json", tmp_path, *space, "--rows", "1f1b,plain,folded", "--json", str(file), "--host")
    done = run_ranks(processes, BENCH, *words)
    report, found = results(done, file)
    assert list(found) == ["plain", "1f1b"]
    plain, engine = found["plain"], found["1f1b"]
    assert plain["first_losses"][-1] != plain["first_losses"][3]  # weights moved
    assert engine["first_losses"] == pytest.approx(plain["first_losses"], rel=1e-6)
    for row in (plain, engine):
        assert len(row["round_step_seconds"]) == 2 and len(row["first_losses"]) == STEPS
        assert row["images_per_second"] == pytest.approx(IMAGES / row["step_seconds"]["median"])
        assert row["name"] in done.stdout and row["host"]["calls"] > row["host"]["launches"] > 0
    assert f"{engine['ratio']['median']:.3f}" in done.stdout
    assert f"{IMAGES} images = 4 x 4 micro-batches" in done.stdout
    assert report["not_run"] == [{"row": "folded", "reason": "needs 2 stages"}]


@pytest.mark.long
@pytest.mark.launch
@pytest.mark.parametrize(
    ("processes", "config", "rows", "element_bytes", "rounding"),
    [
        (2, "zero2_fp16.json", [name for name in ROWS if name not in NAMED], 2, 1e-2),
        (4, "zero1_fp32.json", ["plain", *REPLICATED], 4, 1e-5),
    ],
)
def test_every_row_trains_the_same_on_two_stages_and_what_it_sends_is_counted(
    processes: int, config: str, rows: list[str], element_bytes: int, rounding: float, tmp_path: Path
) -> None:
    file = tmp_path / "result.json"
    words = arguments(config, tmp_path, "-p", "2", "--rounds", "1", "--rows", ",".join(rows), "--json", str(file))
    done = run_ranks(processes, BENCH, *words)
    _, found = results(done, file)
    assert list(found) == [name for name in rows if name != "plain"]
    reference = found["1f1b"]["first_losses"]
    assert reference[-1] != reference[3]
    for name, row in found.items():
        assert row["first_losses"] == pytest.approx(reference, rel=rounding), name
    line, fold = (found[name]["rank_message_bytes"] for name in ("1f1b", "folded"))
    assert all(0 < folded < straight for folded, straight in zip(fold, line, strict=True))
    if "torch" in found:  # always in fp32
        assert found["torch"]["rank_message_bytes"] == [4 // element_bytes * count for count in line]
    assert found.get("planned", found["folded"])["rank_message_bytes"] == fold
    assert f"plain did not run: runs in one process, and {processes} were started" in done.stdout
    assert ("stock: ZeRO-1, since it refuses ZeRO-2" in done.stdout) == (config == "zero2_fp16.json")


@pytest.mark.parametrize(
    ("processes", "wrong", "said"),
    [
        (1, "--steps-per-round few", "'few' is not a whole number from 1 to"),
        (1, "--json nowhere/result.json", "--json nowhere/result.json can't be written"),
        (1, "--rows 1f1b,fold", "'fold' is no row; rows are plain, 1f1b, eager"),
        (1, "--rows torch,folded", "leaves nothing to run: folded: needs 2 stages; torch: needs 2 stages"),
        (2, "--rows plain", "plain: runs in one process, and 2 were started"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    processes: int, wrong: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, str(processes) if "WORLD_SIZE" in name else "0")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert command.main(["--deepspeed_config", str(MAIN), *wrong.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
