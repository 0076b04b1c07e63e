"""The benchmark as a user starts it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddpm_ds.benchmark import command
from tests.launching import REPOSITORY, launch

BENCH = REPOSITORY / "launch" / "bench.py"
MAIN = REPOSITORY / "ds_configs" / "zero2_fp16.json"
TINY = [
    "unet.channels=8",
    "unet.norm_groups=4",
    "unet.dropout=0.1",
    "unet.classes=10",
    "train.label_drop=0.2",
    "train.batch_images=16",
    "train.accumulation=2",
    "optimizer.learning_rate=0.03",
    "optimizer.warmup_images=64",
    "optimizer.epsilon=0.01",  # with gradients too small to be clipped: Adam would hide a wrong scale of them
    "diffusion.loss=huber",
]


@pytest.mark.launch
@pytest.mark.parametrize(("config", "rounding"), [("zero0_fp32.json", 1e-6), ("zero2_fp16.json", 1e-2)])
def test_both_rows_train_the_same_and_are_timed(config: str, rounding: float, tmp_path: Path) -> None:
    changes = [*TINY, f"data.store_root={tmp_path / 'data'}"]
    file = tmp_path / "result.json"
    done = launch(
        1,
        BENCH,
        *("--deepspeed_config", str(REPOSITORY / "ds_configs" / config)),
        *("--rounds", "3", "--steps-per-round", "2", "--compared-steps", "12", "--json", str(file)),
        *(part for change in changes for part in ("--set", change)),
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    plain, engine = json.loads(file.read_text())["rows"]
    assert plain["first_losses"][-1] != plain["first_losses"][3]  # weights moved
    assert engine["first_losses"] == pytest.approx(plain["first_losses"], rel=rounding)
    assert engine["largest_loss_difference"] <= rounding
    for row in (plain, engine):
        assert len(row["round_step_seconds"]) == 3 and len(row["first_losses"]) == 12
        assert row["images_per_second"] == pytest.approx(16 / row["step_seconds"]["median"])
        assert row["name"] in done.stdout
    assert plain["ratio"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    assert f"{engine['ratio']['median']:.3f}" in done.stdout
    assert "16 images = 8 x 2 micro-batches" in done.stdout


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1" if "WORLD_SIZE" in name else "0")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rounds", "0"], "'0' is not a positive number"),
        (["--steps-per-round", "few"], "'few' is not a positive number"),
        (["--json", "nowhere/result.json"], "--json nowhere/result.json can't be written"),
        (["--set", "unet.chanels=8"], "did you mean unet.channels?"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["--deepspeed_config", str(MAIN), *arguments]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and said in lines[0]


@pytest.mark.usefixtures("one_process")
def test_more_than_one_process_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert command.main(["--deepspeed_config", str(MAIN)]) == 2
    assert "2 were started; use deepspeed --num_gpus 1" in capsys.readouterr().err


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        command.parse(["--help"])
    assert left.value.code == 0
    out = capsys.readouterr().out
    assert "take turns" in out and "exit codes" in out and "--num_gpus 1 launch/bench.py" in out
