"""``ddpm-ds fit``: what it refuses before anything is started, and what it says of trials."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path

import pytest

from ddpm_ds.cli.fit import _report, add_fit, numbers, table, winner
from ddpm_ds.command_line import OneLineParser
from ddpm_ds.errors import UserError
from ddpm_ds.fit import Found, TriedSize
from ddpm_ds.planning import plan_run
from tests.launching import REPOSITORY, write_json
from tests.test_fit import GIB, task

ZERO = REPOSITORY / "ds_configs" / "zero0_fp32.json"


def fit(*options: str, config: Path = ZERO) -> int:
    """Run the verb."""
    parser = OneLineParser(prog="ddpm-ds")
    add_fit(parser.add_subparsers())
    chosen = parser.parse_args(["fit", "--deepspeed_config", str(config), "--device", "cpu", *options])
    return int(chosen.run(chosen))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--processes 0", "argument --processes: '0' is not a whole number from 1 to 65,536"),
        ("--processes 4 -p 3", "-p 3 does not divide --processes 4; use -p 1 or 2 or 4"),
        (
            "--processes 3 --set ds.pipeline.tensor.size=2",
            "pipeline.tensor.size = 2 does not divide 3 processes; use --processes 4",
        ),
        ("--layouts 2", "argument --layouts: '2' is no layout; write STAGESxREPLICAS, such as 2x1"),
        ("--layouts 2x0", "argument --layouts: '2x0' is no layout"),
        ("--layouts 2x1 -p 2", "argument -p/--pipeline-stages: not allowed with argument --layouts"),
        ("--layouts 2x1 --processes 2", "--layouts has the processes of each layout; leave it or --processes out"),
        ("--memory-budget 4gb", "argument --memory-budget: '4gb' has unknown unit 'gb'; write 4GB"),
        ("--hang-seconds 0", "argument --hang-seconds: '0' is not a time in seconds"),
        ("--hang-seconds nan", "argument --hang-seconds: 'nan' is not a time in seconds"),
        ("--memory-budget 4096TiB", "more than the"),
        (
            "--micro-batch 4,5",
            "--micro-batch 5 is not possible with train.batch_images = 64 in layout 1x1",
        ),
        ("--micro-batch 4,", "argument --micro-batch: '' is not a whole number from 1 to"),
        ("--layouts 1x3 --set train.batch_images=64", "train.batch_images = 64 can't be shared by 3 replicas"),
        ("--layouts 40x1", "stages"),
        ("--set unet.chanels=8", "did you mean unet.channels?"),
        ("--out nowhere/fit.json", "--out nowhere/fit.json can't be written"),
        ("--json .", "--json . can't be written"),
    ],
)
def test_what_is_wrong_is_one_line_before_anything_is_started(
    options: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddpm_ds.fit.run_ranks", lambda *told: pytest.fail("was started"))
    with pytest.raises(UserError) as raised:
        fit(*options.split())
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_a_wrong_json_is_refused_as_training_refuses_it(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.json"
    wrong.write_text('{"optimizer": {"type": "AdamW", "params": {"torch_adam": true}}, "gradient_cliping": 1.0}')
    with pytest.raises(UserError, match=r"wrong\.json: gradient_cliping is unknown; did you mean gradient_clipping"):
        fit(config=wrong)


def test_training_accepts_the_command_that_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without ``--out`` it changes what the JSON says of the batch, which grows."""
    config = write_json(tmp_path / "ds.json", json.loads(ZERO.read_text()) | {"train_batch_size": 64})
    of = task(accumulation=8, config=config)
    size = TriedSize(4, 8, 32, step_seconds=[0.1], rank_peak_bytes=[1])
    options = argparse.Namespace(out=None, json=None, overwrite=False)
    _report(options, [Found(of, (size,))])
    words = shlex.split(capsys.readouterr().out.rpartition("train with it: ")[2])
    overrides = [words[place + 1] for place, word in enumerate(words) if word == "--set"]
    layout = plan_run(of.spec, overrides, config, world_size=1, stages=None).ds.layout
    assert (layout.batch_images, layout.micro_batch_images, layout.micro_batches) == (32, 4, 8)

    options.json = Path("/dev/full")
    with pytest.raises(UserError, match=r"^/dev/full can't be written \(No space left on device\); name a file in"):
        _report(options, [Found(of, (size,))])


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        fit("--help")
    assert left.value.code == 0
    said = capsys.readouterr().out
    assert "the planner expects to be the largest" in said
    assert "exit codes" in said and "--memory-budget 1GiB" in said


def trial(size: int, speed: float, gibibytes: float = 0.0) -> TriedSize:
    """A trial that fits if it has a speed."""
    if not speed:
        return TriedSize(size, 64 // size, 64, "rank 0 ran out of memory")
    return TriedSize(size, 64 // size, 64, "", [64 / speed], [int(gibibytes * GIB), GIB // 8])


ONE = Found(task(replicas=2), (trial(1, 50, 0.5), trial(2, 97, 1), trial(4, 100, 2), trial(8, 0)))
OTHER = Found(task(stages=2), (trial(1, 40, 0.25), trial(2, 60, 0.5), trial(4, 90, 1), trial(8, 50, 1.5)))


def test_the_winner_is_the_layout_with_the_fastest_knee() -> None:
    assert winner([OTHER, ONE]) is ONE
    assert (ONE.knee.micro_batch_images, ONE.largest.micro_batch_images) == (2, 4)


def test_every_trial_has_a_line() -> None:
    lines = table([ONE, OTHER]).splitlines()
    assert len(lines) == 1 + 8
    assert lines[2].split()[:7] == ["1x2", "2", "32", "97", "1.000", "-", "*"]
    assert lines[2].endswith("* within 5% of the fastest") and lines[3].endswith("largest that fits")
    assert lines[4].split()[:3] == ["1x2", "8", "8"] and lines[4].endswith("does not fit: rank 0 ran out of memory")
    assert lines[7].endswith("-  within 5% of the fastest") and lines[8].endswith("largest that could be tried")


def test_the_numbers_are_all_of_them() -> None:
    found = numbers([ONE, OTHER], command="ddpm-ds fit")
    assert found["command"] == "ddpm-ds fit"
    assert found["best"] == {"layout": {"stages": 1, "replicas": 2}, "micro_batch_images": 2}
    first, other = found["layouts"]
    assert first["layout"] == {"stages": 1, "replicas": 2}
    assert (first["largest_micro_batch_images"], first["ended_by_memory"], other["ended_by_memory"]) == (4, True, False)
    assert [one["micro_batch_images"] for one in first["trials"]] == [1, 2, 4, 8]
    assert [one["fits"] for one in first["trials"]] == [True, True, True, False]
