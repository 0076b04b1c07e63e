"""``launch/check_gpu.py``: its report of checks that pass, fail, crash and hang, and a whole run on a CPU."""

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.launching import PATIENCE_SECONDS

check_gpu: Any = importlib.import_module("launch.check_gpu")
Finding = check_gpu.Finding
HANGS = """\
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _logs_beside_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def passes(machine: Any) -> Iterator[Any]:
    yield Finding("a limit", "1 second | of two", "pass", "< 2")
    yield Finding("not here", "one GPU", "skipped")
    yield Finding("speed", "3 images/s")


def fails(machine: Any) -> Iterator[Any]:
    yield Finding("a bound", "3", "fail", "< 2")


def crashes(machine: Any) -> Iterator[Any]:
    yield Finding("before the crash", "done")
    machine.run("dies", "-c", "import os; print('last words', flush=True); os.abort()", seconds=PATIENCE_SECONDS)


def hangs(machine: Any) -> Iterator[Any]:
    machine.run("waits", "-c", HANGS, seconds=1)
    yield Finding("never", "")


def run(folder: Path, *options: str) -> tuple[int, str]:
    out = folder / "report.md"
    code = check_gpu.main(["--device", "cpu", "--out", str(out), *options])
    return code, out.read_text() if out.exists() else ""


def test_each_row_is_in_the_table_and_facts_above_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_gpu, "CHECKS", (passes,))
    code, report = run(tmp_path)
    assert code == 0
    lines = [line for line in report.splitlines() if line.startswith("|")]
    assert lines[2:] == [
        "| a limit | 1 second \\| of two | < 2 | pass |",
        "| not here | one GPU |  | skipped |",
        "| speed | 3 images/s |  | measured |",
    ]
    for fact in ("date", "cores", "Python", "torch", "deepspeed"):
        assert f"- {fact}: " in report


@pytest.mark.parametrize(
    ("check", "row", "detail"),
    [
        (fails, "| a bound | 3 | < 2 | fail |", ""),
        (crashes, "| crashes | dies: exit code -6 |  | fail |", "last words"),
        (hangs, "| hangs | waits: not done after 1 s, and killed |  | fail |", ""),
    ],
)
def test_a_check_that_fails_is_exit_code_1_with_its_log_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check: Any, row: str, detail: str
) -> None:
    monkeypatch.setattr(check_gpu, "CHECKS", (check, passes))
    code, report = run(tmp_path)
    assert code == 1 and row in report and "| a limit |" in report
    assert detail in report.partition(f"## {check.__name__}")[2]
    assert (check is crashes) == ("| before the crash | done |  | measured |" in report)
    for process in map(int, re.findall(r"child (\d+)", report)):
        assert not psutil.pid_exists(process) or psutil.Process(process).status() == psutil.STATUS_ZOMBIE


TESTS = """\
import json, os, pytest

@pytest.mark.parametrize("on", [1, pytest.param(2, marks=pytest.mark.gpu(2))])
def test_of_several_gpus(on):
    with open(os.environ["CHECK_GPU_ROWS"], "a") as rows:
        print(json.dumps({"name": "speed", "measured": f"{on} images/s"}), file=rows)

@pytest.mark.parametrize("which", ["first", "second"])
def test_else(which):
    assert which == "first"

def test_of_several_gpus_that_dies():
    if os.environ.get("DIES"):
        os.abort()
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_some.py").write_text(TESTS)
    (tmp_path / "tests" / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu: needs GPUs")
    monkeypatch.setattr(check_gpu, "TESTS", tmp_path / "tests")
    return check_gpu.Machine(tmp_path, "cpu")


def test_rows_that_tests_measure_come_before_how_the_tests_ended(machine: Any) -> None:
    measured, ended = check_gpu.several(machine)
    assert measured == Finding("speed", "1 images/s")
    assert ended.name == "several GPUs" and ended.result == "pass" and ended.measured.startswith("2 passed")
    (ended,) = check_gpu.tests(machine, "others", "not gpu", "not several_gpus", PATIENCE_SECONDS)
    assert ended.result == "fail" and "; FAILED " in ended.measured and "second" in ended.measured


def test_rows_measured_before_a_test_that_dies_are_kept(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIES", "1")
    found = check_gpu.several(machine)
    assert next(found) == Finding("speed", "1 images/s")
    with pytest.raises(check_gpu.CommandFailed, match="exit code -6"):
        next(found)


def test_the_prediction_of_replicas_says_how_much_of_a_step_waits_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    words = check_gpu.settings(train__batch_images=4, train__accumulation=1)

    def share(processes: int, stage: int) -> float | None:
        own = [*words, *check_gpu.settings(ds__zero_optimization__stage=stage)]
        config = check_gpu.CONFIGS / "zero2_bf16.json"
        prediction, fits = check_gpu.predicted("digits", "digits.yaml", config, own, processes)
        assert fits and re.search(r"predicted [\d.,]+ images/s, [\d.]+ ms a step, [\d.]+ GiB", prediction.measured)
        found = re.search(r", ([\d.]+)% of a step waits for other replicas$", prediction.measured)
        return None if found is None else float(found[1])

    two, four = share(2, 1), share(4, 1)
    assert share(1, 1) is None and two is not None and four is not None and 0 < two < four < 100


def test_only_some_checks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(check_gpu, "CHECKS", (fails, passes))
    code, report = run(tmp_path, "--only", "passes")
    assert code == 0 and "| a limit |" in report and "a bound" not in report
    assert re.search(r"^ +\d+ s  measured  speed: 3 images/s$", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.long
@pytest.mark.launch
def test_all_that_a_cpu_can_run_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_gpu, "CHECKS", check_gpu.CHECKS[1:-1])  # without tests
    code, report = run(tmp_path)
    assert code == 0, report
    rows = ("main job, fp16", "CIFAR-10, plain", "CIFAR-10, 1f1b", "SDXL, 1f1b", "SDXL, compiled, eager", "SD 2, 1f1b")
    for row in rows:
        assert re.search(rf"\| {row} \| .*[\d.,]+ images/s.* \|", report), report
