"""The program that proves a GPU: what it reports of checks that pass, fail, crash and hang, and how it ends."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pynvml
import pytest

from tests.forking import PYTHON_PATH, REPOSITORY
from tests.launching import PATIENCE_SECONDS

check_gpu: Any = importlib.import_module("launch.check_gpu")
Finding = check_gpu.Finding
HANGS = """\
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print("child", child.pid, flush=True)
time.sleep(60)
"""


def passes(machine: Any) -> Iterator[Any]:
    yield check_gpu.judged("a limit", 1 < 2, "1 second | of two", "< 2")


def skipped(machine: Any) -> Iterator[Any]:
    yield Finding("not here", "one GPU", "skipped")


def fails(machine: Any) -> Iterator[Any]:
    machine.run("prints", "-c", "print('a clue')", seconds=PATIENCE_SECONDS)
    yield check_gpu.judged("a bound", 3 < 2, "3", "< 2")


def crashes(machine: Any) -> Iterator[Any]:
    yield Finding("before the crash", "done", "pass")
    machine.run("dies", "-c", "import os; print('last words', flush=True); os.abort()", seconds=PATIENCE_SECONDS)


def raises(machine: Any) -> Iterator[Any]:
    yield Finding("a number", {"found": "1"}["missing"], "pass")


def hangs(machine: Any) -> Iterator[Any]:
    machine.run("waits", "-c", HANGS, seconds=1)
    yield Finding("never", "", "pass")


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts checks in the place of the program's own: some to run beside others, some alone."""

    def planted(beside: list[Any], alone: list[Any] | None = None) -> None:
        tables = [{check.__name__: check for check in checks} for checks in (beside, alone or [])]
        for name, table in zip(("BESIDE", "ALONE", "CHECKS"), (*tables, tables[0] | tables[1]), strict=True):
            monkeypatch.setattr(check_gpu, name, table)

    return planted


def run(folder: Path, *options: str) -> tuple[int, str]:
    """The exit code of the program on the CPU, and its report."""
    out = folder / "report.md"
    code = check_gpu.main(["--device", "cpu", "--out", str(out), "--work", str(folder / "work"), *options])
    return code, out.read_text() if out.exists() else ""


def test_nothing_that_failed_is_exit_code_0_and_each_row_is_reported_while_later_checks_run(
    tmp_path: Path, plant: Any
) -> None:
    def measures(machine: Any) -> Iterator[Any]:
        assert "| a limit |" in (tmp_path / "report.md").read_text()
        yield Finding("speed", "3 images/s", "measured")

    plant([passes, skipped], [measures])
    code, report = run(tmp_path)
    assert code == 0
    lines = [line for line in report.splitlines() if line.startswith("|")]
    assert lines[2:] == [
        "| a limit | 1 second \\| of two | < 2 | pass |",
        "| not here | one GPU |  | skipped |",
        "| speed | 3 images/s |  | measured |",
    ]
    for fact in ("date", "commit", "processor", "Python", "torch", "deepspeed"):
        assert f"- {fact}: " in report


@pytest.mark.parametrize(
    ("check", "row", "detail"),
    [
        (fails, r"| a bound | 3 | < 2 | fail |", "a clue"),
        (crashes, r"| crashes | dies: exit code -6 |  | fail |", "last words"),
        (raises, r"| raises | KeyError: 'missing' |  | fail |", 'yield Finding("a number"'),
        (hangs, r"| hangs | waits: not done after \d+ s, and killed |  | fail |", "child "),
    ],
)
def test_a_check_that_fails_is_exit_code_1_with_its_log_and_the_others_run(
    tmp_path: Path, plant: Any, check: Any, row: str, detail: str
) -> None:
    plant([check], [passes])
    code, report = run(tmp_path)
    assert code == 1
    assert re.search(row.replace("|", r"\|"), report) and "| a limit |" in report
    assert detail in report.partition(f"## {check.__name__}")[2]
    assert (check is crashes) == ("| before the crash | done |  | pass |" in report)
    for process in map(int, re.findall(r"child (\d+)", report)):
        assert ends(process)


def ends(process: int) -> bool:
    """Whether a process that was killed is gone in time; one that nobody waits for stays as a zombie."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(process).status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.05)
                continue
        return True
    return False


def test_a_check_for_which_no_time_is_left_fails(tmp_path: Path, plant: Any) -> None:
    plant([passes])
    code, report = run(tmp_path, "--minutes", "0")
    assert code == 1 and "not begun: the time is over, give more with --minutes" in report


def test_a_signal_ends_what_runs(tmp_path: Path) -> None:
    options = ["--device", "cpu", "--only", "gradients", "--work", str(tmp_path / "work")]
    command = [sys.executable, str(REPOSITORY / "launch" / "check_gpu.py"), *options, "--out", str(tmp_path / "out.md")]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": PYTHON_PATH}) as program:
        while program.poll() is None and not list(tmp_path.glob("work/gradients/*.log")):
            time.sleep(0.05)
        started = psutil.Process(program.pid).children(recursive=True)
        program.send_signal(signal.SIGTERM)
        assert program.wait(PATIENCE_SECONDS) == 128 + signal.SIGTERM
    assert started and all(ends(process.pid) for process in started)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--only", "tests,nonsense"], "--only: 'nonsense' is no check; checks are tests, gradients, main"),
        (["--device", "cuda"], "--device = cuda, but PyTorch finds no CUDA device; use --device cpu"),
        (["--out", "nowhere/report.md"], "--out nowhere/report.md can't be written"),
        (["--work", "full"], "--work full is not empty; its runs would be resumed: name a new folder"),
        (["--work", "full/file"], "--work full/file can't be used (File exists); name another folder"),
        (["--minutes", "nan"], "argument --minutes: 'nan' is not a number of minutes such as 10"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert run(tmp_path, *options)[0] == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1
    assert output.err.startswith("check_gpu: error: ") and said in output.err


def test_a_gpu_that_cuda_can_not_use_is_one_line_and_not_checked_as_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert run(tmp_path, "--device", "auto")[0] == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1 and "but CUDA does not start" in output.err


@pytest.mark.parametrize("answers", [True, False])
def test_gpus_are_described_without_programs_that_may_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    def start() -> None:
        if not answers:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    card = SimpleNamespace(name="NVIDIA H100", total_memory=80 * 2**30)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda number: card)
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: (2, 28, 9))
    monkeypatch.setattr(pynvml, "nvmlInit", start)
    monkeypatch.setattr(pynvml, "nvmlSystemGetDriverVersion", lambda: "580.159.04")
    monkeypatch.setenv("PATH", str(tmp_path))
    found = check_gpu.facts(check_gpu.Machine(tmp_path, "cuda", 2))
    assert found["GPUs"] == "NVIDIA H100 (80 GiB), NVIDIA H100 (80 GiB)" and found["NCCL"] == "2.28.9"
    assert found.get("driver") == ("580.159.04" if answers else None) and "commit" not in found


SKIPPED = """
import pytest

@pytest.mark.skip(reason="needs 2 GPUs")
def test_is_skipped(): ...
"""
MIXED = (
    SKIPPED
    + """
def test_passes(record_property):
    record_property("fp32", "1e-6")

def test_fails():
    assert False
"""
)


@pytest.mark.parametrize(
    ("tests", "row"),
    [
        (SKIPPED, Finding("some", "needs 2 GPUs", "skipped")),
        (MIXED, Finding("some", "1 of 3 pass, 1 skipped; fp32 1e-6; test_fails", "fail", "none fails")),
    ],
    ids=["skipped", "failing"],
)
def test_a_row_of_tests_counts_them_and_names_those_that_fail(tmp_path: Path, tests: str, row: Any) -> None:
    (tmp_path / "test_planted.py").write_text(tests)
    machine = check_gpu.Machine(tmp_path, "cpu", 0)
    assert check_gpu.run_pytest(machine, "some", tmp_path / "test_planted.py", seconds=PATIENCE_SECONDS) == row


@pytest.mark.long
@pytest.mark.launch
def test_one_device_is_measured_on_a_cpu(tmp_path: Path) -> None:
    code, report = run(tmp_path, "--only", "bench,kernels")
    assert code == 0, report
    assert re.search(r"\| one device, the same U-Net \| .* \| <= [\d.e-]+, relative \| pass \|", report)
    assert re.search(r"\| one device, engine \| [\d,]+ images/s, .* \|  \| measured \|", report)
    assert "| fused normalisation | no GPU |  | skipped |" in report
