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


@pytest.mark.long
@pytest.mark.launch
def test_all_that_a_cpu_can_run_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_gpu, "CHECKS", check_gpu.CHECKS[1:])  # no test runs without a GPU
    code, report = run(tmp_path)
    assert code == 0, report
    for row in ("main job, fp16", "CIFAR-10, plain", "CIFAR-10, 1f1b", "SDXL, 1f1b"):
        assert re.search(rf"\| {row} \| .*[\d.,]+ images/s.* \|", report), report
