"""Run this project on this machine's GPU and write one table of what it does there.

python launch/check_gpu.py --out gpu.md
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))  # the tests are not part of an installed package

from ddpm_ds.command_line import OneLineParser, add_overwrite, check_outputs, file_path, writing  # noqa: E402
from ddpm_ds.config.spec_file import SPECS  # noqa: E402
from ddpm_ds.errors import LayoutError, UserError  # noqa: E402
from ddpm_ds.files import METRICS  # noqa: E402
from ddpm_ds.processes.supervisor import Processes  # noqa: E402

CONFIGS, TESTS = REPOSITORY / "ds_configs", REPOSITORY / "tests"
PACKAGES = ("torch", "deepspeed", "triton", "diffusers", "denoising-diffusion-pytorch")
LOG_LINES = 60
"""Last lines of a log that the report shows if its command failed."""
LIMITS = (("eager", "plain", 0.95), ("eager", "diffusers-randn", 0.95), ("1f1b", "diffusers-randn", 2.0))
"""A row, another one, and the least speed of the first over that of the second."""

DESCRIPTION = """\
Run the tests that need a GPU, the main job, CIFAR-10's U-Net beside plain loops, and SDXL's U-Net, each beside what the
planner predicts, and write one table. Nothing is downloaded. With --device cpu everything is small.

exit codes: 0 nothing failed, 1 something failed, 2 bad input and nothing was started
"""


@dataclass(frozen=True)
class Finding:
    """Line of the report's table; the result ``measured`` says that the numbers have no limit."""

    name: str
    measured: str
    result: Literal["pass", "fail", "skipped", "measured"] = "measured"
    limit: str = ""


class CommandFailed(Exception):
    """A command ended with a wrong exit code, or took too long and was killed; the end of its log follows."""


def judged(name: str, good: bool, measured: str, limit: str) -> Finding:
    """Return a row that passes or fails."""
    return Finding(name, measured, "pass" if good else "fail", limit)


def settings(**values: Any) -> list[str]:
    """Return a ``--set`` option for each value; two underscores are the dot of a key."""
    return [word for key, value in values.items() for word in ("--set", f"{key.replace('__', '.')}={value}")]


@dataclass(frozen=True)
class Machine:
    """Place to run the checks, with a folder for their commands and logs."""

    work: Path
    device: Literal["cpu", "cuda"]

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    def run(self, name: str, *words: str | Path, seconds: float, good: Sequence[int] = (0,)) -> None:
        """Run a Python program; its output goes to ``name``.log.

        Raises:
            CommandFailed: its exit code is not among ``good``, or it ran for ``seconds``.
        """
        command, log = [sys.executable, *map(str, words)], self.work / f"{name}.log"
        path = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": path, "DS_ACCELERATOR": self.device}
        ends = time.monotonic() + seconds
        with log.open("w") as file:
            print(shlex.join(command), file=file, flush=True)
            started = Processes(command, [environment], cwd=self.work, stdout=file, stderr=subprocess.STDOUT)
            try:
                while (code := started.poll()) is None and time.monotonic() < ends:
                    time.sleep(0.02)
            finally:
                started.kill()
        if code not in good:
            ended = f"not done after {seconds:.0f} s, and killed" if code is None else f"exit code {code}"
            lines = log.read_text(errors="replace").splitlines()
            raise CommandFailed("\n".join([f"{name}: {ended}", lines[0], *lines[1:][-LOG_LINES:]]))


def gpu_tests(machine: Machine, folder: Path = TESTS) -> Iterator[Finding]:
    """Run the tests that need a GPU."""
    file = machine.work / "tests.xml"
    # addopts may name options of plug-ins that are missing
    words = ("-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "-o", "addopts=", f"--junitxml={file}")
    machine.run("tests", *words, folder, seconds=900, good=(0, 1, 5))
    cases = list(ElementTree.parse(file).iter("testcase"))
    failed = [case.get("name", "") for case in cases if {"failure", "error"} & {child.tag for child in case}]
    skipped = sum(child.tag == "skipped" for case in cases for child in case)
    if skipped == len(cases):
        yield Finding("GPU tests", f"{skipped} need a GPU", "skipped")
        return
    counted = f"{len(cases) - len(failed) - skipped} of {len(cases)} pass, {skipped} skipped"
    yield judged("GPU tests", not failed, "; ".join([counted, *failed[:5]]), "none fails")


def main_job(machine: Machine) -> Iterator[Finding]:
    """Run the README's first command to its loss: on CPUs 0.080 to 0.083, and 0.14 to 0.16 after a twentieth of it."""
    images, limit = (128_000, 0.09) if machine.on_gpu else (6_400, 0.2)
    for precision in ("fp16", "bf16") if machine.on_gpu else ("fp16",):
        folder, name = machine.work / f"main-{precision}", f"main job, {precision}"
        words = ("--deepspeed_config", CONFIGS / f"zero2_{precision}.json", "--run-dir", folder)
        length = settings(train__images=images, logging__log_every_images=images // 40)
        machine.run(folder.name, REPOSITORY / "launch/train.py", *words, *length, seconds=400)
        last = json.loads((folder / METRICS).read_text().splitlines()[-1])
        loss, speed = last["train/loss"], last["perf/images_per_second"]
        words_found = f"loss {loss:.4f} after {images:,} images, {speed:,.0f} images/s"
        yield judged(name, loss <= limit, words_found, f"loss <= {limit}")


def benchmark(machine: Machine, name: str, spec: str, rows: str, options: Sequence[str]) -> Iterator[Finding]:
    """Time some rows of ``launch/bench.py`` in one process, whose losses must be the same, beside what the
    planner predicts of ours, and hold their speeds to :data:`LIMITS`.
    """
    from ddpm_ds.planning import plan_run

    config, file = CONFIGS / "zero2_bf16.json", machine.work / f"{name}.json"
    options = [*options, *settings(train__accumulation=1, optimizer__warmup_images=0, data__workers=0)]
    plan = plan_run(SPECS / spec, options[1::2], config, world_size=1, stages=1)
    layout = plan.ds.with_layout(checkpoint_interval=0).layout
    found = plan.predictor(None).predict(layout)
    speed, memory = layout.batch_images / found.step_seconds, found.peak.total / 2**30
    yield Finding(f"{name}, {plan.parameters:,} parameters", f"predicted {speed:,.4g} images/s, {memory:.2f} GiB")
    words = ["--deepspeed_config", config, "--spec", SPECS / spec, *options, "--rows", rows, "--json", file]
    words += ["--rounds", "3", "--steps-per-round", "10" if machine.on_gpu else "1", "--compared-steps", "5"]
    machine.run(name, REPOSITORY / "launch/bench.py", *words, seconds=600)
    report = json.loads(file.read_text())
    speeds = {row["row"]: row["images_per_second"] for row in report["rows"]}
    for row in report["rows"]:
        memory = "" if row["peak_bytes"] is None else f", {row['peak_bytes'] / 2**30:.2f} GiB"
        step = f"{1e3 * row['step_seconds']['median']:.4g} ms a step"
        yield Finding(f"{name}, {row['row']}", f"{speeds[row['row']]:,.4g} images/s, {step}{memory}")
    for row in report["not_run"]:
        yield Finding(f"{name}, {row['row']}", row["reason"], "skipped")
    for row, other, least in LIMITS:
        if row in speeds and other in speeds:
            ratio = speeds[row] / speeds[other]
            yield judged(f"{name}, {row} beside {other}", ratio >= least, f"{ratio:.2f} times as fast", f">= {least}")


def unets(machine: Machine) -> Iterator[Finding]:
    """Time CIFAR-10's U-Net under the engine and under plain loops, on digits of its images' size and colours."""
    sizes = {"train__batch_images": 128} if machine.on_gpu else {"train__batch_images": 2, "unet__channels": 32}
    rows = "plain,1f1b,eager,diffusers,diffusers-randn,lucidrains,ours-dim64" if machine.on_gpu else "plain,1f1b"
    options = settings(data__source="digits", unet__dropout=0, **sizes)
    yield from benchmark(machine, "CIFAR-10", "cifar10.yaml", rows, options)


def sdxl(machine: Machine) -> Iterator[Finding]:
    """Time the engine with the layers of SDXL's U-Net, on pictures with short captions."""
    options = {"data__path": machine.work / "shapes/pictures", "data__text__encoders": machine.work / "shapes/encoders"}
    options |= {"data__held_out_images": 0, "train__batch_images": 2}
    if machine.on_gpu:
        options |= {"data__image_size": 128, "unet__channels": 320, "unet__multipliers": "[1,2,4]"}
        options |= {"unet__norm_groups": 32, "unet__blocks_per_level": 2, "unet__text__blocks": "[0,2,10]"}
        options |= {"unet__text__middle_blocks": 10, "unet__text__heads": "[5,10,20]"}
    machine.run("shapes", REPOSITORY / "launch/examples/make_text.py", "--count", "96", seconds=100)
    yield from benchmark(machine, "SDXL", "tiny_text.yaml", "1f1b,eager", settings(**options))


CHECKS: tuple[Callable[[Machine], Iterator[Finding]], ...] = (gpu_tests, main_job, unets, sdxl)


def findings(machine: Machine) -> Iterator[tuple[Finding, str]]:
    """Yield the rows of all checks, each with details if it failed; a check that crashes is a row too."""
    for check in CHECKS:
        try:
            for row in check(machine):
                yield row, ""
        except CommandFailed as error:
            yield Finding(check.__name__, str(error).splitlines()[0], "fail"), str(error)
        except Exception as error:  # such as a report without a key
            yield Finding(check.__name__, f"{type(error).__name__}: {error}", "fail"), ""


def facts(machine: Machine) -> dict[str, str]:
    """Return the facts that the numbers depend on: devices, driver, versions, date, commit."""
    import pynvml
    import torch

    found = {"date": datetime.now().astimezone().isoformat(timespec="minutes")}
    with contextlib.suppress(OSError):
        described = ("git", "describe", "--always", "--dirty")
        done = subprocess.run(described, cwd=REPOSITORY, capture_output=True, text=True, check=False)
        found["commit"] = done.stdout.strip() or "unknown"
    if machine.on_gpu:
        cards = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
        found["GPUs"] = ", ".join(f"{card.name} ({card.total_memory / 2**30:.0f} GiB)" for card in cards)
        with contextlib.suppress(pynvml.NVMLError):  # a container may have CUDA's library alone
            pynvml.nvmlInit()
            found["driver"] = str(pynvml.nvmlSystemGetDriverVersion())
        found["CUDA"] = str(torch.version.cuda)
    models = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    found["processor"] = f"{models[0] if models else platform.machine()}, {os.cpu_count()} cores"
    found["Python"] = platform.python_version()
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def markdown(about: Mapping[str, str], rows: Sequence[tuple[Finding, str]]) -> str:
    """Return the report as Markdown."""
    lines = ["# Checks of a machine", "", *(f"- {name}: {value}" for name, value in about.items()), ""]
    lines += ["| check | measured | limit | result |", "|---|---|---|---|"]
    for row, _ in rows:
        cells = (" ".join(cell.split()).replace("|", "\\|") for cell in (row.name, row.measured, row.limit, row.result))
        lines.append(f"| {' | '.join(cells)} |")
    for row, details in rows:
        if details:
            lines += ["", f"## {row.name}", "", "````", details, "````"]
    return "\n".join(lines) + "\n"


def parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, Machine]:
    """Return the options, and the machine that they describe.

    Raises:
        UserError: an option is unknown or has a wrong value, or there is no GPU.
    """
    import torch

    from ddpm_ds.device import check_cuda

    parser = OneLineParser(prog="python launch/check_gpu.py", description=DESCRIPTION)
    parser.add_argument("--out", type=file_path, default=Path("gpu.md"), metavar="FILE", help="the report (gpu.md)")
    add_overwrite(parser)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="default: cuda")
    options = parser.parse_args(arguments)
    check_outputs(options, "out")
    if options.device == "cuda":
        check_cuda(gpus := torch.cuda.device_count())
        if not gpus:
            raise LayoutError("PyTorch finds no CUDA device; write --device cpu, or fix the driver")
    return options, Machine(Path(tempfile.mkdtemp(prefix="check_gpu-")), options.device)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks and return the exit code."""
    try:
        options, machine = parse(arguments)
    except UserError as error:
        print(f"check_gpu: error: {error}", file=sys.stderr)
        return error.exit_code
    about, rows = facts(machine), list[tuple[Finding, str]]()
    for found in findings(machine):
        rows.append(found)
        with writing(options.out, overwrite=True) as file:  # with every row, so that a crash leaves a report
            file.write(markdown(about, rows).encode())
        print(f"{found[0].result:8}  {found[0].name}: {found[0].measured}", flush=True)
    print(f"report {options.out}, runs and logs {machine.work}")
    return int(any(row.result == "fail" for row, _ in rows))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # ends the running command
    sys.exit(main())
