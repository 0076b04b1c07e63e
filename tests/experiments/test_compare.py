"""Comparing runs: what differs, the ratios, the tables, and the verb on a store of MLflow."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from urllib.parse import parse_qs

import pytest

from ddpm_ds.cli.main import main
from ddpm_ds.experiments.compare import (
    Compared,
    Comparison,
    ComparisonError,
    comparison,
    direction,
    markdown,
    number,
    ratio,
    terminal,
    times,
)
from tests.experiments.planted_runs import PlantedStore, held, losses

SLOW = {"train/loss": [0.9, 0.5, 0.4], "perf/images_per_second": [8.0, 128.0, 64.0, 128.0]}
FAST = {"train/loss": [0.9, 0.6, 0.2], "perf/images_per_second": [16.0, 256.0, 128.0, 256.0]}


def of(compared: Comparison, label: str) -> Compared:
    (one,) = (one for one in compared.runs if one.label == label)
    return one


def test_only_parameters_that_differ_are_there_those_of_the_spec_first() -> None:
    same = {"unet.channels": "64", "ds_config.steps_per_print": "10"}
    one = held("one", SLOW, params={**same, "derived.stages": "1", "train.seed": "1"})
    two = held("two", FAST, params={**same, "derived.stages": "2", "train.seed": "2", "ds_config.fp16.enabled": "true"})
    compared = comparison([one, two])
    assert compared.parameters == ("train.seed", "ds_config.fp16.enabled", "derived.stages")
    assert dict(of(compared, "one").parameters) == {"train.seed": "1", "derived.stages": "1"}


def test_what_the_json_says_is_not_repeated() -> None:
    names = ("ds_config.pipeline.stages", "derived.stages", "derived.world_size")
    runs = [held(stages, SLOW, params=dict.fromkeys(names, stages)) for stages in ("1", "2")]
    assert comparison(runs).parameters == ("ds_config.pipeline.stages", "derived.world_size")


def test_rates_count_by_their_mean_without_the_first_point_and_losses_by_their_last() -> None:
    """Images per second are all images over all seconds: three equal intervals of 1, 2 and 1 seconds, say."""
    compared = comparison([held("slow", SLOW), held("fast", FAST)])
    assert dict(of(compared, "slow").values) == {"train/loss": 0.4, "perf/images_per_second": 96.0}
    assert dict(of(compared, "fast").values) == {"train/loss": 0.2, "perf/images_per_second": 192.0}


def test_ratios_are_to_the_baseline_whose_own_are_one() -> None:
    slow, fast = held("slow", SLOW), held("fast", FAST)
    compared = comparison([slow, fast])
    assert compared.baseline.run is slow
    assert dict(of(compared, "fast").ratios) == {"train/loss": 0.5, "perf/images_per_second": 2.0}
    compared = comparison([slow], baseline=fast)
    assert [one.label for one in compared.runs] == ["slow", "fast"], "the baseline is compared too"
    assert set(of(compared, "fast").ratios.values()) == {1.0}
    assert dict(of(compared, "slow").ratios) == {"train/loss": 2.0, "perf/images_per_second": 0.5}


def test_a_failed_run_is_shown_as_failed_and_is_no_baseline() -> None:
    failed = held("dead", status="FAILED", params={"train.seed": "7"})
    compared = comparison([failed, held("slow", SLOW), held("fast", FAST)])
    assert compared.baseline.label == "slow"
    text = terminal(compared)
    (status,) = (line for line in text.splitlines() if line.startswith("status"))
    assert status.split() == ["status", "FAILED", "FINISHED", "FINISHED"]
    assert "| FAILED |" in markdown(compared)
    assert terminal(comparison([failed]))  # nothing but failures can be looked at


def test_runs_without_a_metric_in_common_are_refused_with_what_to_do() -> None:
    with pytest.raises(ComparisonError, match=r"slow, other have no metric in common among .*--metrics"):
        comparison([held("slow", SLOW), held("other", {"fit/micro_batch": [8.0]})])
    with pytest.raises(ComparisonError, match="empty has no metric among"):
        comparison([held("empty")])
    comparison([held("slow", SLOW), held("fast", FAST), held("begun", status="RUNNING")])


def test_an_unknown_metric_is_refused_with_those_that_are_near() -> None:
    with pytest.raises(ComparisonError, match=r"--metrics train/los: no run has .* train/loss"):
        comparison([held("slow", SLOW)], metrics=["train/los"])
    compared = comparison([held("slow", SLOW), held("fast", FAST)], metrics=["train/loss"])
    assert compared.metrics == ("train/loss",)


def test_runs_of_one_name_are_told_apart_and_trials_go_without_their_sweeps_name() -> None:
    ids = ("a1" * 16, "b2" * 16)
    compared = comparison([held("same", SLOW, id=each) for each in ids])
    assert [one.label for one in compared.runs] == ["same (a1a1a1)", "same (b2b2b2)"]
    trials = [held(f"sweep.lr-0.{digit}", SLOW, tags={"vary.name": "sweep"}, parent="p") for digit in (1, 2)]
    compared = comparison(trials)
    assert [one.label for one in compared.runs] == ["lr-0.1", "lr-0.2"]
    assert compared.parent == "p"
    assert comparison([*trials, held("alone", SLOW)]).parent is None


def test_notes_and_verdicts_are_said_of_each_run() -> None:
    tags = {
        "mlflow.note.content": "first line\nsecond line",
        "verdict.top": "data wait",
        "verdict.share": "34.0%",
        "verdict.try": "--set data.workers=4",
    }
    compared = comparison([held("slow", SLOW, tags=tags), held("fast", FAST, tags={"verdict.top": "healthy"})])
    text = terminal(compared)
    expected = ["slow", "  note     first line", "           second line", "  verdict  data wait, 34.0%"]
    expected += ["  try      --set data.workers=4", "fast", "  verdict  healthy"]
    assert text.splitlines()[-len(expected) :] == expected
    assert "- verdict: data wait, 34.0%\n- try: `--set data.workers=4`\n" in markdown(compared)


@pytest.mark.parametrize("width", [80, 120])
def test_fifty_runs_fit_into_the_width_of_the_terminal(width: int) -> None:
    key = "ds_config.zero_optimization.allgather_bucket_size"
    runs = [held(f"trial-{trial:02d}", SLOW, params={key: f"{trial} bytes of a bucket"}) for trial in range(50)]
    text = terminal(comparison(runs), width)
    assert max(map(len, text.splitlines())) <= width
    for trial in range(50):
        assert text.count(f"trial-{trial:02d}") == 1 + (trial == 0)  # the baseline is named above the table


def test_what_users_wrote_changes_neither_the_terminal_nor_markdown() -> None:
    tags = {"mlflow.note.content": "\x1b[31mred\x1b[0m | <b>*bold*</b>"}
    compared = comparison([held("a|b\x1b[2J", SLOW, tags=tags), held("`c`_d_", FAST)])
    assert "\x1b" not in terminal(compared)
    text = markdown(compared)
    assert r"a\|b" in text and r"\`c\`\_d\_" in text and r"\<b\>\*bold\*\</b\>" in text
    assert {line.replace(r"\|", "").count("|") for line in text.splitlines() if line.startswith("|")} == {5}


@pytest.mark.parametrize(
    ("name", "value", "written"),
    [
        ("train/loss", 0.031257, "0.03126"),
        ("perf/images_per_second", 12345.6, "12,346"),
        ("usage/step_seconds", 0.01234, "12.34 ms"),
        ("usage/step_seconds", 0.0, "0"),
        ("usage/peak_memory_bytes", 3 * 2**29, "1.5 GiB"),
        ("perf/mfu", 0.4321, "43.2%"),
        ("eval/fid", None, "-"),
        ("train/loss", math.nan, "nan"),
    ],
)
def test_numbers_have_units(name: str, value: float | None, written: str) -> None:
    assert number(name, value) == written


def test_directions_and_ratios() -> None:
    names = ("train/loss", "train/loss_scale", "perf/mfu", "train/seen_images")
    assert [direction(name) for name in names] == ["lower", "", "higher", ""]
    assert ratio(1.0, 0.0) is None and ratio(math.nan, 1.0) is None and ratio(None, 1.0) is None
    assert [times(value) for value in (2.0, 0.5, 0.9998, 1234.0)] == ["2.00x", "0.500x", "1.00x", "1,234x"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Path:
    """A store with a sweep of two trials, a lone run and one that shares nothing with them."""
    root = tmp_path_factory.mktemp("runs")
    shutil.copy(empty_store, root / "mlflow.db")
    store = PlantedStore(root)
    sweep = store.run("grid", tags={"kind": "vary"})
    for name, points in (("slow", SLOW), ("fast", FAST)):
        params = {"derived.precision": "fp32" if name == "slow" else "fp16"}
        store.run(f"grid.{name}", points, params=params, tags={"vary.name": "grid"}, parent=sweep)
    store.run("lone", {"train/loss": losses(5)})
    store.run("strange", {"fit/micro_batch": [8.0]})
    return root


def test_the_verb_compares_a_sweeps_trials_and_keeps_the_comparison_with_the_sweep(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert main(["compare", "--runs", str(root), "grid", "--baseline", "grid.fast"]) == 0
    output = capsys.readouterr().out
    assert "derived.precision" in output and "train.batch_images" not in output
    (line,) = (line for line in output.splitlines() if line.startswith("perf/images_per_second"))
    assert line.split() == ["perf/images_per_second", "higher", "96", "(0.500x)", "192", "(1.00x)"]
    assert f"mlflow ui --backend-store-uri sqlite:///{root}/mlflow.db" in output
    (kept,) = (root / "mlartifacts").rglob("comparison/*")
    assert kept.name == "comparison.md" and kept.read_text().startswith("# 2 runs of digits\n")
    assert main(["compare", "--runs", str(root), "lone", "grid.slow", "--markdown", f"{tmp_path}/c.md"]) == 0
    assert (tmp_path / "c.md").read_text().startswith("# 2 runs of digits\n")


def test_bad_input_is_one_line(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, uri, said in (
        (["grid.slaw"], "", "grid.slow"),
        (["grid", "--baseline", "nobody"], "", "nobody"),
        (["lone", "strange"], "", "no metric in common"),
        (["grid", "--metrics", "perf/mfu"], "", "no run has this metric"),
        (["grid", "--metrics", "train/loss,,"], "", "empty name"),
        (["grid", "--markdown", str(tmp_path)], "", "--markdown"),
        (["grid"], "http://127.0.0.1:9", "127.0.0.1:9"),
    ):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        assert main(["compare", "--runs", str(root), *words]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("ddpm-ds: error: ") and said in line


def test_the_address_of_mlflows_comparison_names_exactly_these_runs() -> None:
    runs = [held(name, SLOW, tracking_uri="http://127.0.0.1:5000") for name in ("one", "two")]
    found = comparison(runs).mlflow_page
    assert found is not None
    url, command = found
    assert command is None
    path, query = url.partition("#")[2].split("?")
    given = {name: value for name, (value,) in parse_qs(query).items()}
    assert path == "/compare-runs" and json.loads(given["runs"]) == [run.id for run in runs]
    assert json.loads(given["experiments"]) == ["1"] and given["workflowType"] == "machine_learning"
    assert comparison(runs[:1]).mlflow_page is None
    assert comparison([runs[0], held("elsewhere", SLOW)]).mlflow_page is None, "of two stores"
