"""``ddpm-ds fit``: refusals before anything starts, and the report of trials."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from ddpm_ds.cli.main import make_parser
from ddpm_ds.experiments.fit import Task, TriedSize
from ddpm_ds.ground.errors import UserError
from tests.launching import REPOSITORY, drafted, place_digits, write_json

ZERO = REPOSITORY / "ds_configs" / "zero0_fp32.json"


def fit(*options: str, config: Path = ZERO) -> int:
    """Run the verb."""
    given = make_parser().parse_args(["fit", "--deepspeed_config", str(config), "--device", "cpu", *options])
    return int(given.verb.start(given))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--processes 0", "argument --processes: '0' is not a whole number from 1 to 65,536"),
        ("--processes 4 -p 3", "3 stages, which don't divide 4 processes"),
        ("--processes 3 --set ds.pipeline.tensor.size=2", "tensor"),
        ("--memory-budget 4gb", "argument --memory-budget: '4gb' has unknown unit 'gb'; write 4GB"),
        ("--memory-budget 4096TiB", "more than the"),
        ("--processes 3 -p 1 --set train.batch_images=64", "train.batch_images = 64 can't be shared by 3 replicas"),
        ("--processes 40 -p 40", "stages"),
        ("--set unet.chanels=8", "did you mean unet.channels?"),
        ("--set ds.gradient_cliping=1.0", "gradient_cliping is unknown; did you mean gradient_clipping"),
        ("--out nowhere/fit.json", "--out nowhere/fit.json can't be written"),
        ("--json .", "--json . can't be written"),
    ],
)
def test_bad_input_is_one_line_before_anything_is_started(
    options: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddpm_ds.experiments.fit.run_ranks", lambda *told: pytest.fail("was started"))
    with pytest.raises(UserError) as raised:
        fit(*options.split())
    assert message in str(raised.value) and "\n" not in str(raised.value)


def attempt(task: Task, folder: Path, size: int) -> TriedSize:
    """Trial that takes no time: 32 images fit, and 16 are the fastest."""
    micro_batches = task.draft(size).ds.layout.micro_batches
    tried = TriedSize(
        size, micro_batches, size * micro_batches, step_seconds=[abs(size - 16) + 1], rank_peak_bytes=[700]
    )
    return replace(tried, why="" if size <= 32 else "rank 0 ran out of memory")


def test_training_accepts_the_command_that_is_printed_and_the_numbers_are_all_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without ``--out`` the command changes the JSON's batch, which grows."""
    config = write_json(tmp_path / "ds.json", json.loads(ZERO.read_text()) | {"train_batch_size": 64})
    place_digits(tmp_path)
    monkeypatch.setattr("ddpm_ds.cli.fit.try_size", attempt)
    out = tmp_path / "numbers.json"
    data = f"data.store_root={tmp_path / 'data'}"
    words = ["--set", data, "--accumulation", "8", "--json", str(out)]
    assert fit(*words, config=config) == 0
    said = capsys.readouterr().out
    assert "does not fit: rank 0 ran out of memory" in said and "largest that fits: 32; fastest of these: " in said
    words = shlex.split(said.rpartition("train with it: ")[2])
    overrides = [words[place + 1] for place, word in enumerate(words) if word == "--set"]
    layout = drafted(Path(words[words.index("--spec") + 1]), overrides, config, world_size=1, stages=None).ds.layout
    numbers = json.loads(out.read_text())
    assert (layout.batch_images, layout.micro_batches) == (8 * numbers["best"], 8)
    assert layout.micro_batch_images == numbers["best"]
    assert {one["micro_batch_images"]: one["why"] for one in numbers["trials"]}[33] == "rank 0 ran out of memory"
    with pytest.raises(UserError, match=r"^/dev/full can't be written \(No space left on device\); name a file in"):
        fit("--set", data, "--json", "/dev/full", config=config)
    monkeypatch.setattr("ddpm_ds.cli.fit.try_size", lambda *words: replace(attempt(*words), why="rank 0 took 1 GiB"))
    with pytest.raises(UserError, match=r"micro-batch 1 does not fit .* a process \(0.0 MiB are needed\); use more"):
        fit("--set", data, config=ZERO)
