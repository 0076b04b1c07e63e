"""Comparing runs: what differs, with ratios to the first."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from ddpm_ds.cli.main import main
from ddpm_ds.experiments.compare import Compared, find_compared, number, table_rows, terminal
from ddpm_ds.tracking.run_folder import EVENTS, append_event

SLOW = {"train/loss": [0.9, 0.5, 0.4], "perf/images_per_second": [8.0, 128.0, 64.0, 128.0]}
FAST = {"train/loss": [0.9, 0.6, 0.2], "perf/images_per_second": [16.0, 256.0, 128.0, 256.0]}


def run(name: str, settings: Mapping[str, str] | None = None, status: str = "FINISHED", **metrics: float) -> Compared:
    return Compared(name, status, settings or {}, {key.replace("__", "/"): value for key, value in metrics.items()})


def plant(folder: Path, points: Mapping[str, list[float]], *, stages: list[int], ended: str = "FINISHED") -> Path:
    folder.mkdir(parents=True)
    (folder / "identity").write_text(f"identity-of-{folder.name}\n")
    for count in stages:
        params = {"derived.world_size": str(stages[0]), "derived.node": f"node-of-{folder.name}"}
        tags = {"derived.world_size": str(count)}
        append_event(folder / EVENTS, {"start": {"params": params, "tags": tags}})
        (folder / "spec.yaml").write_text(yaml.safe_dump({"unet": {"channels": 8}, "train": {"seed": 3}}))
        (folder / "ds_config.json").write_text(json.dumps({"pipeline": {"stages": count}}))
    if ended:
        append_event(folder / EVENTS, {"finish": ended})
    with (folder / "metrics.jsonl").open("a") as file:
        for place in range(4):
            values = {metric: values[place] for metric, values in points.items() if place < len(values)}
            file.write(json.dumps({"step": 10 * (place + 1), **values}) + "\n")
    (folder / "evaluations.jsonl").write_text(json.dumps({"step": 40, "eval/loss": 0.3}) + "\n")
    (folder / "observations.jsonl").write_text(json.dumps({"step": 20, "flops/stage1_gflops": 2.5}) + "\n")
    return folder


def test_folders_are_compared_without_mlflow_and_the_last_start_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    slow = plant(tmp_path / "slow", SLOW, stages=[1, 2])
    fast = plant(tmp_path / "fast", FAST, stages=[1], ended="")
    assert main(["compare", str(slow), str(fast)]) == 0
    found = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines() if line}
    assert found == {
        "slow": ["fast"],
        "status": ["FINISHED", "RUNNING"],
        "ds_config.pipeline.stages": ["2", "1"],
        "derived.world_size": ["2", "1"],
        "derived.node": ["node-of-slow", "node-of-fast"],
        "train/loss": ["0.4", "(1x)", "0.2", "(0.5x)"],
        "eval/loss": ["0.3", "(1x)", "0.3", "(1x)"],
        # all images over all seconds: three equal intervals of 1, 2 and 1 seconds, say
        "perf/images_per_second": ["96", "(1x)", "192", "(2x)"],
        "flops/stage1_gflops": ["2.5", "(1x)", "2.5", "(1x)"],
    }


def test_the_folder_of_a_sweep_means_its_trials_in_the_order_of_their_start(tmp_path: Path) -> None:
    (tmp_path / "sweep-1").mkdir()
    for name in ("b", "a"):
        plant(tmp_path / f"sweep-1.x-{name}", SLOW, stages=[1])
    assert table_rows(find_compared(tmp_path / "sweep-1"))[0] == ["", "x-b", "x-a"]


def test_only_settings_that_differ_are_shown_the_specs_first_and_none_twice() -> None:
    one = {"ds_config.pipeline.stages": "1", "derived.stages": "1", "derived.precision": "fp32", "same": "1"}
    two = {"ds_config.pipeline.stages": "2", "derived.stages": "2", "train.seed": "2", "same": "1"}
    assert table_rows([run("one", one), run("two", two)])[1:] == [
        ["train.seed", "-", "2"],
        ["ds_config.pipeline.stages", "1", "2"],
        ["derived.precision", "fp32", "-"],
    ]


def test_a_run_without_numbers_is_shown_and_has_no_ratio() -> None:
    rows = table_rows([run("dead", status="FAILED"), run("bad", train__loss=math.nan), run("good", train__loss=2.0)])
    assert rows[1:] == [["status", "FAILED", "FINISHED", "FINISHED"], ["train/loss", "-", "nan", "2"]]
    same = [run("same\x1b[2J", train__loss=1.0)] * 2
    assert table_rows(same)[0] == ["", "same [2J (1)", "same [2J (2)"]


def test_fifty_runs_fit_into_the_width_of_the_terminal() -> None:
    key = "ds_config.zero_optimization.reduce_bucket_size"
    runs = [run(f"trial-{trial:02d}", {key: f"{trial} bytes of a bucket"}, train__loss=1.0) for trial in range(50)]
    text = terminal(runs, width=80)
    assert max(map(len, text.splitlines())) <= 80
    assert all(text.count(f"trial-{trial:02d}") == 1 for trial in range(50))


def test_numbers_have_units() -> None:
    for name, value, written in (
        ("train/loss", 0.031257, "0.03126"),
        ("perf/images_per_second", 12345.6, "12,346"),
        ("usage/step_seconds", 0.01234, "12.34 ms"),
        ("usage/peak_memory_bytes", 3 * 2**29, "1.5 GiB"),
        ("perf/mfu", 0.4321, "43.2%"),
    ):
        assert number(name, value) == written


def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (damaged := tmp_path / "damaged").mkdir()
    (damaged / "spec.yaml").write_text("{")
    run = str(plant(tmp_path / "run", FAST, stages=[1]))
    for words, message in (
        ([str(tmp_path)], "is not the folder of a run; name one that has a spec.yaml"),
        ([run, "--metrics", "perf/mfu"], "no run has this metric"),
        ([run, "--metrics", "train/los"], "use one such as train/loss"),
        ([run, "--metrics", "train/loss,,"], "empty name"),
        ([str(damaged)], "can't be read"),
    ):
        assert main(["compare", *words]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("ddpm-ds: error: ") and message in line
