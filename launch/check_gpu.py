"""Run this project on this machine's GPU and write one table of its results.

python launch/check_gpu.py --out gpu.md
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import math
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Literal

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))  # the tests are not part of an installed package

from ddpm_ds.cli.options import OVERWRITE, OneLineParser  # noqa: E402
from ddpm_ds.config.spec_file import SPECS  # noqa: E402
from ddpm_ds.ground.errors import LayoutError, UserError  # noqa: E402
from ddpm_ds.ground.options import file_path  # noqa: E402
from ddpm_ds.ground.outputs import check_outputs, writing  # noqa: E402
from ddpm_ds.processes.supervisor import Processes  # noqa: E402
from ddpm_ds.tracking.run_folder import METRICS  # noqa: E402

CONFIGS, TESTS = REPOSITORY / "ds_configs", REPOSITORY / "tests"
PACKAGES = ("torch", "deepspeed", "triton", "diffusers")
Result = Literal["pass", "fail", "skipped", "measured"]
SEVERAL, ROWS, PATIENCE = "several_gpus", "CHECK_GPU_ROWS", "PATIENCE_SECONDS"
"""Word in the names of tests that need several GPUs; variables with the file of the rows that tests measure, and with
the time that ranks have to end."""
LOG_LINES = 60
"""Last lines of a log that the report shows if its command failed."""

DESCRIPTION = """\
Run the tests that need a GPU, the main job, the U-Nets of CIFAR-10, SDXL and Stable Diffusion 2 beside plain loops and
what the planner predicts, and what only several GPUs show; write one table. Nothing is downloaded. With --device cpu
everything is small.

exit codes: 0 nothing failed, 1 something failed, 2 bad input and nothing was started
"""


@dataclass(frozen=True)
class Finding:
    """Row of the report; its result is ``measured`` if the numbers have no limit."""

    name: str
    measured: str
    result: Result = "measured"
    limit: str = ""
    details: str = ""
    """End of the log of a command that failed."""


class CommandFailed(Exception):
    """A command has failed or was killed; the text has the end of its log."""


def settings(**values: object) -> list[str]:
    """Return a ``--set`` option for each value; two underscores are the dot of a key."""
    return [word for key, value in values.items() for word in ("--set", f"{key.replace('__', '.')}={value}")]


@dataclass(frozen=True)
class Machine:
    """Place to run the checks, with a folder for their commands and logs."""

    work: Path
    device: Literal["cpu", "cuda"]

    def run(self, name: str, *words: str | Path, seconds: float, good: Sequence[int] = (0,)) -> list[str]:
        """Run a Python program and return the lines of its output, which ``name``.log keeps.

        CommandFailed if its exit code is not among ``good``, or it was not done after ``seconds``.
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
        lines = log.read_text(errors="replace").splitlines()
        if code not in good:
            ended = f"not done after {seconds:.0f} s, and killed" if code is None else f"exit code {code}"
            raise CommandFailed("\n".join([f"{name}: {ended}", lines[0], *lines[1:][-LOG_LINES:]]))
        return lines


def tests(machine: Machine, name: str, marked: str, chosen: str, seconds: float) -> Iterator[Finding]:
    """Run the tests that pytest's options -m and -k choose; yield what they measure, then how they ended."""
    rows = machine.work / f"{name}.rows"
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=", "-rfEs", "-m", marked, "-k", chosen)
    os.environ[ROWS] = str(rows)
    try:
        lines = machine.run(name, *words, TESTS, seconds=seconds, good=(0, 1, 5))
    finally:  # also of tests that ran before one that hangs
        yield from (Finding(**json.loads(line)) for line in (rows.read_text().splitlines() if rows.exists() else ()))
    notes = [line for line in lines if line.startswith(("FAILED ", "ERROR ", "SKIPPED "))]
    failed = any(not note.startswith("SKIPPED ") for note in notes)
    result: Result = "fail" if failed else "pass" if " passed" in lines[-1] else "skipped"
    yield Finding(name, "; ".join([lines[-1].strip(" ="), *notes[:9]]), result, "none fails")


def gpu_tests(machine: Machine) -> Iterator[Finding]:
    """Run the tests that need a GPU, but for those of :func:`several`."""
    yield from tests(machine, "GPU tests", "gpu", f"not {SEVERAL}", seconds=900)


def several(machine: Machine) -> Iterator[Finding]:
    """Run what only several GPUs show, in ten minutes, or on a CPU its rehearsal."""
    marked, seconds, each = ("gpu", 600, 100) if machine.device == "cuda" else ("not gpu", 3600, 900)
    os.environ[PATIENCE] = str(each)
    yield from tests(machine, "several GPUs", marked, SEVERAL, seconds)


def main_job(machine: Machine) -> Iterator[Finding]:
    """Run README's first command: its loss on CPUs is 0.080 to 0.083, and after a twentieth of it 0.14 to 0.16."""
    images, limit = (128_000, 0.09) if machine.device == "cuda" else (6_400, 0.2)
    for precision in ("fp16", "bf16") if machine.device == "cuda" else ("fp16",):
        folder = machine.work / f"main-{precision}"
        words = ("--deepspeed_config", CONFIGS / f"zero2_{precision}.json", "--run-dir", folder)
        length = settings(train__images=images, logging__log_every_images=images // 40)
        machine.run(folder.name, REPOSITORY / "launch/train.py", *words, *length, seconds=400)
        last = json.loads((folder / METRICS).read_text().splitlines()[-1])
        loss, speed = last["train/loss"], last["perf/images_per_second"]
        found = f"loss {loss:.4f} after {images:,} images, {speed:,.0f} images/s"
        result: Result = "pass" if loss <= limit else "fail"
        yield Finding(f"main job, {precision}", found, result, f"loss <= {limit}")


def predicted(name: str, spec: str, config: Path, options: Sequence[str], processes: int = 1) -> tuple[Finding, bool]:
    """Return what the planner predicts of replicas that nothing is recomputed on, and whether they fit."""
    from ddpm_ds.ground.device import described
    from ddpm_ds.planning.run_plan import lay_out, predictor_here, read_run

    hosts = ("0",) * processes
    draft = lay_out(read_run(SPECS / spec, options[1::2], config), hosts, processes, 1)
    layout = draft.ds.with_layout(checkpoint_interval=0).layout
    planner = predictor_here(draft.spec, draft.ds.config, hosts, processes)
    found, unlinked = planner.predict(layout), replace(planner.machine, link_bandwidth=math.inf)
    waits = 1 - type(planner)(planner.job, unlinked).predict(layout).step_seconds / found.step_seconds
    rate, memory = layout.batch_images / found.step_seconds, found.peak.total / 2**30
    what = f"predicted {rate:,.4g} images/s, {1e3 * found.step_seconds:.4g} ms a step, {memory:.2f} GiB"
    what += f", {waits:.1%} of a step waits for other replicas" if processes > 1 else ""
    fits = found.peak.total <= (device_bytes := described(processes)[1])
    what += "" if fits else f", which would not fit {device_bytes / 2**30:.0f} GiB"
    return Finding(f"{name}, {draft.parameters:,} parameters", what, "measured" if fits else "skipped"), fits


def benchmark(
    machine: Machine, name: str, spec: str, rows: str, options: Sequence[str], published: str = ""
) -> Iterator[Finding]:
    """Time rows of ``launch/bench.py``, which checks that losses are equal, beside rates of others."""
    config, file = CONFIGS / "zero2_bf16.json", machine.work / f"{name}.json"
    options = [*options, *settings(train__accumulation=1, optimizer__warmup_images=0)]
    prediction, fits = predicted(name, spec, config, options)
    yield prediction
    if not fits:
        return
    files = ("--deepspeed_config", config, "--spec", SPECS / spec, "--json", file)
    steps = ("--rounds", "3", "--steps-per-round", "10" if machine.device == "cuda" else "1", "--compared-steps", "5")
    machine.run(name, REPOSITORY / "launch/bench.py", *files, *options, "--rows", rows, *steps, seconds=600)
    report = json.loads(file.read_text())
    for row in report["rows"]:
        peak = "" if row["peak_bytes"] is None else f", {row['peak_bytes'] / 2**30:.2f} GiB"
        step = f"{1e3 * row['step_seconds']['median']:.4g} ms a step"
        note = f" ({row['note']})" if row["note"] else ""
        rate = f"{row['images_per_second']:,.4g} images/s, {step}{peak}{note}"
        yield Finding(f"{name}, {row['row']}", rate, limit=published)
    for row in report["not_run"]:
        yield Finding(f"{name}, {row['row']}", row["reason"], "skipped")


def unets(machine: Machine) -> Iterator[Finding]:
    """Time CIFAR-10's U-Net under the engine and in plain loops, on digits enlarged to 32x32x3."""
    options, rows = settings(data__source="digits", unet__dropout=0), "plain,1f1b"
    if machine.device == "cuda":
        options += settings(train__batch_images=128)
        rows += ",eager,diffusers,diffusers-compiled,diffusers-randn"
    else:
        options += settings(train__batch_images=2, unet__channels=32)
    yield from benchmark(machine, "CIFAR-10", "cifar10.yaml", rows, options)


WIDE: dict[str, object] = {"unet__channels": 320, "unet__norm_groups": 32, "unet__blocks_per_level": 2}
SDXL: dict[str, object] = {"data__image_size": 128, "train__batch_images": 2, "unet__multipliers": "[1,2,4]"}
SDXL |= {"unet__text__blocks": "[0,2,10]", "unet__text__middle_blocks": 10, "unet__text__heads": "[5,10,20]", **WIDE}
SD2: dict[str, object] = {"data__image_size": 64, "train__batch_images": 16, "unet__multipliers": "[1,2,4,4]"}
SD2 |= {"unet__text__blocks": "[1,1,1,0]", "unet__text__middle_blocks": 1, "unet__text__heads": "[5,10,20,20]", **WIDE}
"""Settings of ``tiny_text.yaml`` that make its U-Net as large as those of Stable Diffusion XL and 2."""
MLPERF = "MLPerf v4.0, 16 images each on 64 GPUs: 110 images/s on an H100, 30.8 on an L40S"
"""Published rates of a GPU that trains Stable Diffusion 2 on latents of 512 pixels."""


def with_text(machine: Machine, large: dict[str, object], **others: object) -> list[str]:
    """Encode pictures with short captions, and return the settings that train on them; ``large`` ones only on GPUs."""
    shapes = machine.work / "shapes"
    found: dict[str, object] = {"data__path": shapes / "pictures", "data__text__encoders": shapes / "encoders"}
    found |= {"data__held_out_images": 0, "train__batch_images": 2}
    found |= (large if machine.device == "cuda" else {}) | others
    if not shapes.exists():
        machine.run("shapes", REPOSITORY / "launch/examples/make_text.py", "--count", "96", seconds=100)
    words, spec = settings(**found), SPECS / "tiny_text.yaml"
    machine.run("encode", "-m", "ddpm_ds.cli.main", "prepare", "--encode", "--spec", spec, *words, seconds=100)
    return words


def sdxl(machine: Machine) -> Iterator[Finding]:
    """Time the engine with SDXL's layers: steps as graphs and eager ones, with compiled layers and without."""
    for name, compiled in (("SDXL", "false"), ("SDXL, compiled", "true")):
        words = [*with_text(machine, SDXL), *settings(ds__compile=compiled)]
        yield from benchmark(machine, name, "tiny_text.yaml", "1f1b,eager", words)


def sd2(machine: Machine) -> Iterator[Finding]:
    """Time the engine with the layers of Stable Diffusion 2, beside published rates."""
    yield from benchmark(machine, "SD 2", "tiny_text.yaml", "1f1b", with_text(machine, SD2), MLPERF)


CHECKS: tuple[Callable[[Machine], Iterator[Finding]], ...] = (gpu_tests, main_job, unets, sdxl, sd2, several)


def findings(machine: Machine, chosen: Sequence[str] = ()) -> Iterator[Finding]:
    """Yield the rows of the ``chosen`` checks, or of all; a check that crashes gives a row too."""
    for check in (check for check in CHECKS if check.__name__ in chosen or not chosen):
        try:
            yield from check(machine)
        except CommandFailed as error:
            yield Finding(check.__name__, str(error).splitlines()[0], "fail", details=str(error))
        except Exception as error:  # such as a report without a key
            yield Finding(check.__name__, f"{type(error).__name__}: {error}", "fail")


def facts(machine: Machine) -> dict[str, str]:
    """Return date, devices and versions, by name."""
    import torch

    found = {"date": datetime.now().astimezone().isoformat(timespec="minutes")}
    if machine.device == "cuda":
        cards = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
        found["GPUs"] = ", ".join(f"{card.name} ({card.total_memory / 2**30:.0f} GiB)" for card in cards)
        found["CUDA"] = str(torch.version.cuda)
    found |= {"cores": str(os.cpu_count()), "Python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def markdown(about: Mapping[str, str], rows: Sequence[Finding]) -> str:
    """Return the report as Markdown."""
    logs: list[str] = []
    lines = ["# Checks of a machine", "", *(f"- {name}: {value}" for name, value in about.items()), ""]
    lines += ["| check | measured | limit | result |", "|---|---|---|---|"]
    for row in rows:
        cells = (" ".join(cell.split()).replace("|", "\\|") for cell in (row.name, row.measured, row.limit, row.result))
        lines.append(f"| {' | '.join(cells)} |")
        logs += ["", f"## {row.name}", "", "````", row.details, "````"] if row.details else []
    return "\n".join(lines + logs) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks and return the exit code."""
    import torch

    from ddpm_ds.ground.device import check_cuda

    parser = OneLineParser(prog="python launch/check_gpu.py", description=DESCRIPTION)
    parser.add_argument("--out", type=file_path, default=Path("gpu.md"), metavar="FILE", help="the report (gpu.md)")
    parser.add_argument("--overwrite", action="store_true", help=OVERWRITE)
    names = [check.__name__ for check in CHECKS]
    parser.add_argument("--only", choices=names, nargs="+", default=(), help="these checks")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="default: cuda")
    try:
        options = parser.parse_args(arguments)
        check_outputs(overwrite=options.overwrite, out=options.out)
        if options.device == "cuda":
            check_cuda(gpus := torch.cuda.device_count())
            if not gpus:
                raise LayoutError("PyTorch finds no CUDA device; write --device cpu, or fix the driver")
    except UserError as error:
        print(f"check_gpu: error: {error}", file=sys.stderr)
        return error.exit_code
    machine = Machine(Path(tempfile.mkdtemp(prefix="check_gpu-")), options.device)
    os.environ.setdefault("DS_ACCELERATOR", machine.device)  # for the planner
    about, rows, begin = facts(machine), list[Finding](), time.monotonic()
    for found in findings(machine, options.only):
        rows.append(found)
        with writing(options.out, overwrite=True) as file:  # with every row, so that a crash leaves a report
            file.write(markdown(about, rows).encode())
        print(f"{time.monotonic() - begin:5.0f} s  {found.result:8}  {found.name}: {found.measured}", flush=True)
    print(f"report {options.out}, runs and logs {machine.work}")
    return int(any(row.result == "fail" for row in rows))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # ends the running command
    sys.exit(main())
