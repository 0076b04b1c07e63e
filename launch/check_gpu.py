"""Prove this machine's GPU, or its CPU: run the product on it, hold what it does to stated limits, write one report.

python launch/check_gpu.py --out report.md
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import xml.etree.ElementTree
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))  # an installed package has no tests, and this program runs them

from ddpm_ds.command_line import OneLineParser, check_writable, free_port  # noqa: E402
from ddpm_ds.errors import LayoutError, SpecError, UserError  # noqa: E402

DESCRIPTION = """\
Run this project on this machine's GPU, or on its CPU, and hold what it does to stated limits: the tests that need a
GPU, training, kernels, compiled layers and benchmarks. Nothing is downloaded. Every check starts
processes of its own, so that one that crashes or hangs costs no other; the report is written anew after each.
"""
EPILOG = """\
exit codes
  0 nothing failed   1 a check failed, crashed or ran out of time   2 bad input, nothing was started
"""
LOG_LINES = 25
"""Of the log of what failed, in the report."""
PACKAGES = ("torch", "deepspeed", "triton", "mlflow", "diffusers", "denoising-diffusion-pytorch")
CONFIGS, SPECS = REPOSITORY / "ds_configs", REPOSITORY / "launch" / "specs"


@dataclass(frozen=True)
class Row:
    """One line of the report's table."""

    name: str
    measured: str
    limit: str
    status: Literal["pass", "fail", "skipped"]


@dataclass
class Outcome:
    """What a check came to."""

    name: str
    rows: list[Row] = field(default_factory=list)
    seconds: float = 0.0
    details: str = ""
    """The last lines of the log of what failed."""

    @property
    def status(self) -> str:
        found = {row.status for row in self.rows}
        return next((status for status in ("fail", "pass") if status in found), "skipped")


class CommandFailed(Exception):
    """A command ended with another code than it should have, or was late."""

    def __init__(self, what: str, log: Path) -> None:
        super().__init__(what)
        self.log = log


@dataclass
class Machine:
    """Where the checks run, and what they share."""

    work: Path
    device: Literal["cpu", "cuda"]
    gpus: int
    deadline: float
    """On the clock of ``time.monotonic``."""
    logs: int = 0

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    def run(self, *words: str | Path, seconds: float, good: Sequence[int] = (0,), **environment: str) -> str:
        """Run a Python program in a process group of its own and return what it printed.

        Raises:
            CommandFailed: its exit code is not a good one, or it took longer than ``seconds``, or than all checks may.
        """
        self.logs += 1
        log = self.work / f"{self.logs:02}.log"
        command = [sys.executable, *map(str, words)]
        path = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
        variables = {"PYTHONPATH": path, "DS_ACCELERATOR": self.device, "PYTHONUNBUFFERED": "1", **environment}
        allowed = min(seconds, max(1.0, self.deadline - time.monotonic()))
        with log.open("w") as file:
            file.write(" ".join(command) + "\n")
            file.flush()
            process = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(allowed)
            except subprocess.TimeoutExpired:
                raise CommandFailed(f"still running after {allowed:.0f} s, and ended", log) from None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if code not in good:
            raise CommandFailed(f"exit code {code}", log)
        return log.read_text(errors="replace")

    def launch(self, script: str, config: Path, *options: str | Path, processes: int = 1, **arguments: Any) -> str:
        """Run a program of ``launch/`` under DeepSpeed's launcher."""
        launcher = ("-m", "deepspeed.launcher.runner", "-q", "--num_gpus", str(processes))
        port = ("--master_port", str(free_port()), "--master_addr", "127.0.0.1")
        return self.run(
            *launcher, *port, REPOSITORY / "launch" / script, "--deepspeed_config", config, *options, **arguments
        )

    def measure(self, what: str, seconds: float) -> Any:
        """What a function of :data:`MEASUREMENTS` returns in a process of its own."""
        out = self.work / f"{what}.json"
        self.run(__file__, "--measure", what, "--out", out, "--device", self.device, seconds=seconds)
        return json.loads(out.read_text())


def judged(name: str, good: bool, measured: str, limit: str) -> Row:
    """A row that passes or fails."""
    return Row(name, measured, limit, "pass" if good else "fail")


def settings(**values: Any) -> list[str]:
    """``--set`` of each value; a double underscore stands for the dot of a key."""
    return [word for key, value in values.items() for word in ("--set", f"{key.replace('__', '.')}={value}")]


def log_points(run_dir: Path) -> list[dict[str, float]]:
    """The metrics of a run, one dictionary for each log point."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def tests(machine: Machine) -> Iterator[Row]:
    """Every test that needs a GPU."""
    files = sorted(
        file for file in (REPOSITORY / "tests").rglob("test_*.py") if "cuda.is_available" in file.read_text()
    )
    report = machine.work / "tests.xml"
    options = ("-q", "-p", "no:cacheprovider", "-o", "addopts=", "-k", "on_cuda or on_a_gpu", f"--junitxml={report}")
    machine.run("-m", "pytest", *options, *files, seconds=240, good=(0, 1))
    suite = next(xml.etree.ElementTree.parse(report).iter("testsuite"))
    count = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    bad = count["failures"] + count["errors"]
    passed = count["tests"] - bad - count["skipped"]
    measured = f"{passed} passed, {bad} failed, {count['skipped']} skipped"
    if bad or passed:
        failed = [case.attrib["name"] for case in suite.iter("testcase") if case.find("failure") is not None]
        yield judged("GPU tests", not bad, ", ".join([measured, *failed[:5]]), "none fails")
    else:
        yield Row("GPU tests", measured, "none fails", "skipped")


def main_job(machine: Machine) -> Iterator[Row]:
    """The README's command, in fp16 and in bf16."""
    images, limit = 12_800, 0.15
    for precision in ("fp16", "bf16") if machine.on_gpu else ("fp16",):
        run = machine.work / f"main-{precision}"
        length = settings(train__images=images)
        config = CONFIGS / f"zero2_{precision}.json"
        machine.launch("train.py", config, *length, "--run-dir", run, "--verbose", seconds=180)
        last = log_points(run)[-1]
        loss, speed = last["train/loss"], last["perf/images_per_second"]
        measured = f"loss {loss:.4f} after {last['progress/images']:,.0f} images, {speed:,.0f} images/s"
        yield judged(f"main job, {precision}", loss <= limit, measured, f"loss <= {limit}")


def kernels(machine: Machine) -> Iterator[Row]:
    """The fused normalisation at the shapes of CIFAR-10's U-Net."""
    if not machine.on_gpu:
        yield Row("fused normalisation", "no GPU", "faster than PyTorch's", "skipped")
        return
    for row in machine.measure("bandwidth", seconds=180):
        yield Row(**row)


def measure_bandwidth(device_name: str) -> list[dict[str, str]]:
    """Rows of what the fused kernels reach of the copy bandwidth, and of what ``"kernels": "auto"`` decides."""
    import torch

    from ddpm_ds.spec_file import load_spec
    from ddpm_ds.unet.kernel_choice import choose_kernels, copy_bandwidth_share, norm_shapes
    from ddpm_ds.unet.layers import unet_layers

    spec, device, rows = load_spec(SPECS / "cifar10.yaml"), torch.device(device_name), []
    layers = unet_layers(spec.unet, image_channels=spec.data.channels, image_size=spec.data.image_size)
    for shape in norm_shapes(layers):
        share = copy_bandwidth_share(shape, device, torch.bfloat16, spec.train.batch_images)
        name = f"fused normalisation, {shape.channels} x {shape.resolution}^2, {shape.embedding}"
        rows.append({"name": name, "measured": f"{share:.0%} of copy bandwidth", "limit": "", "status": "pass"})
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        choice, why = choose_kernels("auto", layers, device, dtype, spec.train.batch_images)
        status = "pass" if choice == "fused" else "fail"
        rows.append({"name": f"kernels auto, {dtype}", "measured": why, "limit": "fused", "status": status})
    return rows


def compiled(machine: Machine) -> Iterator[Row]:
    """``"compile": true`` beside eager layers: the same losses, no compilation after the first step, the speed."""
    spec, steps = (SPECS / "cifar10.yaml", 30) if machine.on_gpu else (SPECS / "digits.yaml", 6)
    batch = 128 if machine.on_gpu else 16
    points, logs = {}, {}
    for way in (False, True):
        config = machine.work / f"compile-{way}.json"
        config.write_text(json.dumps({**json.loads((CONFIGS / "zero2_bf16.json").read_text()), "compile": way}))
        run = machine.work / f"compile-{way}"
        options = settings(
            data__source="digits",
            data__workers=0,
            data__held_out_images=0,
            train__images=steps * batch,
            train__batch_images=batch,
            optimizer__warmup_images=0,
            logging__log_every_images=batch,
        )
        logs[way] = machine.launch(
            "train.py", config, "--spec", spec, *options, "--run-dir", run, "--verbose", seconds=240,
            TORCH_LOGS="recompiles", TORCHINDUCTOR_CACHE_DIR=str(machine.work / "inductor"),
        )  # fmt: skip
        points[way] = log_points(run)
    difference = max(
        abs(a["train/loss"] - b["train/loss"]) / a["train/loss"] for a, b in zip(*points.values(), strict=True)
    )
    yield judged("compile, losses", difference <= 0.02, f"{difference:.1e} from eager", "<= 2e-2, relative")
    lines = logs[True].splitlines()
    shown = [number for number, line in enumerate(lines) if " images (" in line]
    late = sum("Recompiling function" in line for line in lines[shown[0] : shown[-1]])
    yield judged("compile, after the first step", late == 0, f"{late} recompilations", "0")
    half = steps // 2
    seconds = {way: sorted(point["perf/step_seconds"] for point in of[-half:])[half // 2] for way, of in points.items()}
    ratio = seconds[False] / seconds[True]
    measured = f"{seconds[True] * 1e3:.1f} ms a step, {ratio:.2f} times eager's speed"
    yield judged("compile, speed", ratio >= 1 or not machine.on_gpu, measured, ">= 1" if machine.on_gpu else "")


def benchmark(machine: Machine) -> Iterator[Row]:
    """``bench.py --one-device`` with the rows that can run here."""
    spec, batch = ("cifar10.yaml", 128) if machine.on_gpu else ("digits.yaml", 16)
    out = machine.work / "one_device.json"
    options = ("--one-device", "--images", str(batch), "--rounds", "3", "--steps-per-round", "5", "--json", out)
    overrides = settings(data__source="digits", data__workers=0)
    config = ("--deepspeed_config", CONFIGS / "zero2_bf16.json", "--spec", SPECS / spec)
    machine.run(REPOSITORY / "launch" / "bench.py", *config, *options, *overrides, seconds=240)
    report = json.loads(out.read_text())
    for row in report["rows"]:
        measured = f"{row['images_per_second']:,.0f} images/s, {row['speed']['median']:.2f} times {row['reference']}'s"
        yield Row(f"one device, {row['row']}", f"{measured}, MFU {row['mfu']:.1%}", "", "pass")
    for row in report["not_run"]:
        yield Row(f"one device, {row['row']}", row["reason"], "", "skipped")


CHECKS: dict[str, Callable[[Machine], Iterable[Row]]] = {
    "tests": tests,
    "main": main_job,
    "kernels": kernels,
    "compile": compiled,
    "bench": benchmark,
}
MEASUREMENTS: dict[str, Callable[[str], Any]] = {"bandwidth": measure_bandwidth}


def run_check(name: str, check: Callable[[Machine], Iterable[Row]], machine: Machine) -> Outcome:
    """One check to its end, whatever that is; rows it has found before it failed are kept."""
    outcome, begin = Outcome(name), time.monotonic()
    first = machine.logs
    try:
        if begin > machine.deadline:
            raise CommandFailed("not begun, the time is over; give more with --minutes", machine.work)
        outcome.rows.extend(check(machine))
    except CommandFailed as error:
        outcome.rows.append(Row(name, str(error), "", "fail"))
    except Exception as error:
        outcome.rows.append(Row(name, f"{type(error).__name__}: {error}", "", "fail"))
        outcome.details = traceback.format_exc()
    if outcome.status == "fail" and machine.logs > first:
        log = machine.work / f"{machine.logs:02}.log"
        outcome.details += "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])
    outcome.seconds = time.monotonic() - begin
    return outcome


def facts(machine: Machine) -> dict[str, str]:
    """What ran the checks: card, driver, versions, processor, commit."""
    import torch

    found = {"date": datetime.datetime.now().astimezone().isoformat(timespec="minutes"), "commit": commit()}
    found["device"] = machine.device
    if machine.on_gpu:
        properties = [torch.cuda.get_device_properties(number) for number in range(machine.gpus)]
        found["cards"] = ", ".join(f"{card.name}, {card.total_memory / 2**30:.0f} GiB" for card in properties)
        found["driver"] = said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        found["CUDA"] = str(torch.version.cuda)
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    found["processor"] = f"{processor()}, {os.cpu_count()} cores"
    found["Python"] = platform.python_version()
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def said(*command: str) -> str:
    """The first line that a program prints, or that it is not known."""
    try:
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return (done.stdout.splitlines() or ["unknown"])[0] if done.returncode == 0 else "unknown"


def commit() -> str:
    changed = said("git", "status", "--porcelain") != "unknown"
    return said("git", "rev-parse", "--short", "HEAD") + (" with changes" if changed else "")


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def markdown(about: dict[str, str], outcomes: Sequence[Outcome]) -> str:
    """The report."""
    lines = ["# Checks of this machine", "", *(f"- {name}: {value}" for name, value in about.items()), ""]
    lines += ["| check | measured | limit | result |", "|---|---|---|---|"]
    for outcome in outcomes:
        for row in outcome.rows:
            cells = (row.name, row.measured, row.limit, row.status)
            lines.append("| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |")
    lines += ["", "Seconds: " + ", ".join(f"{outcome.name} {outcome.seconds:.0f}" for outcome in outcomes)]
    for outcome in outcomes:
        if outcome.details:
            lines += ["", f"## {outcome.name}", "", "```", outcome.details.replace("```", "'''"), "```"]
    return "\n".join(lines) + "\n"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options.

    Raises:
        SpecError: an option is unknown or has a wrong value.
    """
    described = f"checks\n  {', '.join(CHECKS)}\n\n{EPILOG}"
    parser = OneLineParser(prog="python launch/check_gpu.py", description=DESCRIPTION, epilog=described)
    parser.add_argument("--out", type=Path, default=Path("gpu.md"), metavar="FILE", help="the report (gpu.md)")
    parser.add_argument("--work", type=Path, metavar="DIR", help="where runs and logs go (a temporary folder)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: CUDA if any")
    parser.add_argument("--minutes", type=float, default=10.0, metavar="M", help="for all checks together (10)")
    parser.add_argument("--only", metavar="CHECK,...", help="these checks alone, see below")
    parser.add_argument("--measure", choices=MEASUREMENTS, help=argparse.SUPPRESS)  # of Machine.measure
    options = parser.parse_args(arguments)
    options.only = list(CHECKS) if options.only is None else [name.strip() for name in options.only.split(",")]
    for name in options.only:
        if name not in CHECKS:
            raise SpecError(f"--only: {name!r} is no check; checks are {', '.join(CHECKS)}")
    return options


def count_gpus(wanted: str) -> int:
    """How many GPUs are to be used.

    Raises:
        LayoutError: they were asked for and there are none.
    """
    import torch

    found = 0 if wanted == "cpu" else torch.cuda.device_count()
    if wanted == "cuda" and not found:
        raise LayoutError("--device = cuda, but PyTorch finds no CUDA device; use --device cpu, or mend the driver")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks and return the exit code."""
    try:
        options = parse(arguments)
        check_writable("--out", options.out)
        if options.measure is not None:
            options.out.write_text(json.dumps(MEASUREMENTS[options.measure](options.device)))
            return 0
        gpus = count_gpus(options.device)
    except UserError as error:
        print(f"check_gpu: error: {error}", file=sys.stderr)
        return error.exit_code
    work = options.work or Path(tempfile.mkdtemp(prefix="check_gpu-"))
    work.mkdir(parents=True, exist_ok=True)
    work = work.resolve()
    deadline = time.monotonic() + 60 * options.minutes
    machine = Machine(work, "cuda" if gpus else "cpu", gpus, deadline)
    about, outcomes = facts(machine), []
    for name in options.only:
        outcome = run_check(name, CHECKS[name], machine)
        outcomes.append(outcome)
        options.out.write_text(markdown(about, outcomes))
        print(f"{name:12}{outcome.seconds:5.0f} s  {outcome.status}", flush=True)
        for row in outcome.rows:
            print(f"    {row.status:8} {row.name}: {row.measured}", flush=True)
    print(f"report {options.out}, logs {work}")
    return int(any(outcome.status == "fail" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
