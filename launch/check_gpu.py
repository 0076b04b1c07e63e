"""Prove a machine's GPUs: run this project on them, hold what it does to stated limits and write one report.

python launch/check_gpu.py --out gpu.md
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.metadata
import json
import os
import platform
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal
from unittest import mock
from xml.etree import ElementTree

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))  # the tests are not part of an installed package

from ddpm_ds.command_line import (  # noqa: E402
    OneLineParser,
    add_overwrite,
    check_outputs,
    file_path,
    number,
    writing,
)
from ddpm_ds.config.spec_file import SPECS  # noqa: E402
from ddpm_ds.errors import EXIT_PREEMPTED, LayoutError, OutputError, SpecError, UserError  # noqa: E402
from ddpm_ds.files import METRICS  # noqa: E402
from ddpm_ds.processes.ranks import free_port  # noqa: E402
from ddpm_ds.processes.supervisor import Processes, rank_environments  # noqa: E402
from ddpm_ds.tracking.run_folder import checkpoints_of  # noqa: E402

CONFIGS, TRAIN, BENCH = (REPOSITORY / name for name in ("ds_configs", "launch/train.py", "launch/bench.py"))
LADDER, GRAPHS = (REPOSITORY / "tests" / "pipeline" / f"test_{name}.py" for name in ("ladder", "graph"))
PACKAGES = ("torch", "deepspeed", "triton", "mlflow", "diffusers", "denoising-diffusion-pytorch")
STEPS_TIMED = 10
LOG_LINES, MOST_LOGS = 60, 3
"""Last lines of a log that the report shows, and how many logs of a check that failed."""

DESCRIPTION = """\
Run this project on this machine's GPUs, or on its CPU with less of everything, and hold what it does to stated limits.
Nothing is downloaded. Each check runs in processes of its own, so that one that crashes or hangs costs no other, and
the report is rewritten after each. A GPU takes up to ten minutes, two CPU cores about five.
"""
EXIT_CODES = """\
exit codes
  0 nothing failed   1 a check failed, crashed or ran out of time   2 bad input, nothing was started
"""

Status = Literal["pass", "fail", "skipped", "measured"]
Metrics = dict[str, float]


@dataclass(frozen=True)
class Finding:
    """Line of the report's table; the status ``measured`` says that the numbers have no limit."""

    name: str
    measured: str
    status: Status
    limit: str = ""


@dataclass
class Outcome:
    """Result of one check."""

    name: str
    rows: list[Finding] = field(default_factory=list)
    seconds: float = 0.0
    details: str = ""
    """Traceback and last lines of the log, if it failed."""

    @property
    def failed(self) -> bool:
        """Whether a row failed, or nothing was found at all."""
        return not self.rows or any(row.status == "fail" for row in self.rows)


class CommandFailed(Exception):
    """A command ended with a wrong exit code, or took too long and was killed."""


@dataclass(frozen=True)
class Machine:
    """Place to run the checks, with a folder for their commands and logs."""

    work: Path
    device: Literal["cpu", "cuda"]
    gpus: int
    deadline: float = float("inf")
    """Time of ``time.monotonic`` when all checks must have ended."""
    stopping: threading.Event = field(default_factory=threading.Event)
    """Set when every command is to be ended."""

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    def run(
        self,
        name: str,
        *words: str | Path,
        seconds: float,
        good: Sequence[int] = (0,),
        ranks: int | None = None,
        **environment: str,
    ) -> None:
        """Run a Python program, on several ranks if it is asked; its output goes to ``name``.log.

        Raises:
            CommandFailed: its exit code is not among ``good``, or it ran for ``seconds`` or until the deadline.
        """
        command = [sys.executable, *map(str, words)]
        path = os.pathsep.join(filter(None, (str(REPOSITORY), str(BENCH.parent), os.environ.get("PYTHONPATH"))))
        ours = {"PYTHONPATH": path, "DS_ACCELERATOR": self.device, "XDG_CACHE_HOME": str(self.work / "cache")}
        given = {**os.environ, **ours, **environment}
        environments = [given] if ranks is None else rank_environments(ranks, free_port(), given)
        begin = time.monotonic()
        ends = min(begin + seconds, self.deadline)
        with (self.work / f"{name}.log").open("w") as log:
            print(shlex.join(command), file=log, flush=True)
            started = Processes(command, environments, cwd=self.work, stdout=log, stderr=subprocess.STDOUT)
            try:
                while (code := started.poll()) is None and time.monotonic() < ends and not self.stopping.is_set():
                    if started.failed is not None:  # others may wait for it
                        code = started.failed[1]
                        break
                    time.sleep(0.02)
            finally:
                started.kill()
        if code is None:
            raise CommandFailed(f"{name}: not done after {time.monotonic() - begin:.0f} s, and killed")
        if code not in good:
            raise CommandFailed(f"{name}: exit code {code}")

    def train(self, name: str, config: Path, *options: str | Path, **how: Any) -> list[Metrics]:
        """Train in the folder ``name``, in one process or on ranks; return the metrics of each log point."""
        folder = self.work / name
        self.run(name, TRAIN, "--deepspeed_config", config, "--run-dir", folder, *options, **how)
        return [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]

    def measure(self, function: Callable[[Path], Any], seconds: float, ranks: int | None = None) -> Any:
        """Return the result of a function of this file, run in a process of its own with the folder of the check."""
        name, out = function.__name__, self.work / f"{function.__name__}.json"
        call = f"check_gpu.{name}(pathlib.Path({str(self.work)!r}))"
        program = f"import json, pathlib; from launch import check_gpu; json.dump({call}, open({str(out)!r}, 'w'))"
        self.run(name, "-c", program, seconds=seconds, ranks=ranks)
        return json.loads(out.read_text())


minutes = functools.partial(number, lowest=0.0, highest=1e6, what="a number of minutes such as 10")
"""Option type: minutes."""


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Run some calls at the same time and return their results."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(lambda call: call(), calls))


def judged(name: str, good: bool, measured: str, limit: str) -> Finding:
    """Return a row that passes or fails."""
    return Finding(name, measured, "pass" if good else "fail", limit)


def settings(**values: Any) -> list[str | Path]:
    """Return a ``--set`` option for each value; two underscores are the dot of a key."""
    return [word for key, value in values.items() for word in ("--set", f"{key.replace('__', '.')}={value}")]


CIFAR10_SIZED = settings(data__source="digits", optimizer__warmup_images=0)
"""Options that replace CIFAR-10's images by digits of their size and colours: the arithmetic stays, and nothing is
downloaded."""


def run_pytest(machine: Machine, name: str, *words: str | Path, seconds: float) -> Finding:
    """Run some tests and return a row for them, with what they record by ``record_property``."""
    slug = re.sub(r"\W+", "-", name)
    file = machine.work / f"{slug}.xml"
    # addopts may name options of plug-ins that are missing; if CI is set, pytest does not cut differences
    plain = ("-q", "-p", "no:cacheprovider", "-o", "addopts=")
    options = (*plain, "--tb", "short", "--disable-warnings", f"--junitxml={file}")
    machine.run(slug, "-m", "pytest", *options, *words, seconds=seconds, good=(0, 1), CI="true")
    cases = list(ElementTree.parse(file).iter("testcase"))
    failed = [case.get("name", "") for case in cases if {"failure", "error"} & {child.tag for child in case}]
    skipped = [child.get("message", "") for case in cases for child in case if child.tag == "skipped"]
    if len(skipped) == len(cases):
        return Finding(name, skipped[0], "skipped")
    recorded = [f"{of.get('name')} {of.get('value')}" for case in cases for of in case.iter("property")]
    counted = f"{len(cases) - len(failed) - len(skipped)} of {len(cases)} pass, {len(skipped)} skipped"
    return judged(name, not failed, "; ".join([counted, *recorded, *failed[:5]]), "none fails")


def gpu_tests(machine: Machine) -> Iterator[Finding]:
    """Run the tests that need a GPU, except those of gradients and of ranks that share one."""
    if not machine.on_gpu:
        yield Finding("GPU tests", "no GPU", "skipped")
        return
    files = [file for file in sorted((REPOSITORY / "tests").rglob("test_*.py")) if "mark.gpu" in file.read_text()]
    others = sorted(set(files) - {LADDER})
    yield run_pytest(machine, "GPU tests", "-m", "gpu", "-k", "not shared", *others, seconds=240)


def ladder(machine: Machine, processes: int) -> Finding:
    """Compare losses and gradients by name with plain PyTorch: precisions x ZeRO stages x checkpointing."""
    on, unit = ("on_gpus_", "GPU") if machine.on_gpu else ("", "process")
    unit = f"{processes} {unit}" + ("" if processes == 1 else "s" if machine.on_gpu else "es")
    test = f"{LADDER}::test_{on}loss_and_every_gradient_equal_plain_pytorch[{unit}]"
    return run_pytest(machine, f"gradients by name, {unit}", test, seconds=300)


def gradients(machine: Machine) -> Iterator[Finding]:
    """Compare the engine in one process with plain PyTorch, every gradient by name."""
    yield ladder(machine, 1)


def main_job(machine: Machine) -> Iterator[Finding]:
    """Run the README's first command to its loss: on CPUs 0.080 to 0.083, and 0.14 to 0.16 after a twentieth of it."""
    images, limit, precisions = (128_000, 0.09, ("fp16", "bf16")) if machine.on_gpu else (6_400, 0.2, ("fp16",))
    length = settings(train__images=images, logging__log_every_images=images // 40)
    configs = [CONFIGS / f"zero2_{precision}.json" for precision in precisions]
    runs = [
        functools.partial(machine.train, precision, config, *length, ranks=1, seconds=300)
        for precision, config in zip(precisions, configs, strict=True)
    ]
    for precision, points in zip(precisions, together(*runs), strict=True):
        loss, speed = points[-1]["train/loss"], points[-1]["perf/images_per_second"]
        words = f"loss {loss:.4f} after {images:,} images, {speed:,.0f} images/s beside other checks"
        yield judged(f"main job, {precision}", loss <= limit, words, f"loss <= {limit}")


def resume(machine: Machine) -> Iterator[Finding]:
    """Compare a run that is stopped and resumed, also on the CPU, with an uninterrupted one, and sample from it."""
    images, folder = 6400 if machine.on_gpu else 1280, machine.work / "stopped"

    def final_loss(name: str, *words: str | Path, **how: Any) -> float:
        options = (*settings(train__images=images, logging__log_every_images=images // 20), "--trace-steps", "none")
        return machine.train(name, CONFIGS / "zero2_fp16.json", *options, *words, seconds=150, **how)[-1]["train/loss"]

    def ask_to_stop() -> None:
        ends = time.monotonic() + 150
        while not (folder / METRICS).exists() and time.monotonic() < ends and not machine.stopping.is_set():
            time.sleep(0.02)
        folder.mkdir(exist_ok=True)
        (folder / "save_and_stop").touch()

    undisturbed, *_ = together(
        lambda: final_loss("undisturbed"), lambda: final_loss("stopped", good=(EXIT_PREEMPTED,)), ask_to_stop
    )
    (checkpoint,) = checkpoints_of(folder).glob("images-*")
    done, picture = int(checkpoint.name.removeprefix("images-")), machine.work / "samples.png"
    saved = f"saved at {done:,} of {images:,} images"
    yield judged("stop in the middle", 0 < done < images, saved, f"exit code {EXIT_PREEMPTED}")
    sample = ("sample", checkpoint, "--device", machine.device, "--count", "16", "--out", picture)
    ways = {"resumed": lambda: final_loss("stopped")}
    if machine.on_gpu:
        ways["resumed on the CPU"] = lambda: final_loss("on-cpu", "--resume", checkpoint, DS_ACCELERATOR="cpu")
    draw = functools.partial(machine.run, "sample", "-m", "ddpm_ds.cli.main", *sample, seconds=120)
    _, *losses = together(draw, *ways.values())
    yield judged("samples of a checkpoint", picture.exists(), f"{picture.stat().st_size:,} bytes of PNG", "written")
    # a GPU adds in an order that differs from run to run, and rounding grows with the steps
    limit, words = (2e-2, "<= 2e-2, relative") if machine.on_gpu else (0.0, "the same bits")
    for name, loss in zip(ways, losses, strict=True):
        off = abs(loss / undisturbed - 1)
        measured = f"final loss {loss:.6f}, undisturbed {undisturbed:.6f}: {off:.1e} apart"
        yield judged(name, off <= limit, measured, words)


def memory(machine: Machine) -> Iterator[Finding]:
    """Compare the memory that ``fit`` measures and the planner predicts with that of a run with fit's answer."""
    sizes, spec = ("128", "cifar10.yaml") if machine.on_gpu else ("64", "digits.yaml")
    options = ["--spec", SPECS / spec, *(CIFAR10_SIZED if machine.on_gpu else [])]
    answer, trials = machine.work / "fit.json", machine.work / "trials.json"
    fit = ("--deepspeed_config", CONFIGS / "zero2_bf16.json", "--processes", "1", "--micro-batch", sizes)
    machine.run("fit", "-m", "ddpm_ds.cli.main", "fit", *options, *fit, "--out", answer, "--json", trials, seconds=240)
    trial = json.loads(trials.read_text())["trials"][0]
    images, said = trial["batch_images"], {"fit": max(trial["rank_peak_bytes"])}
    length = settings(train__images=3 * images, logging__log_every_images=images)
    points = machine.train("fitted", answer, *options, *length, seconds=120)
    yield judged("fit's answer trains", len(points) == 3, f"{len(points)} steps of {images} images", "3 steps")
    if machine.on_gpu:  # a process on a CPU holds its libraries as well, which the planner does not count
        said["the planner"] = machine.measure(planned_bytes, seconds=60)
    held = points[-1]["usage/peak_memory_bytes"]
    for name, told in said.items():
        words = f"{told / 2**30:.2f} GiB by {name}, {held / 2**30:.2f} GiB held"
        yield judged(f"memory by {name}", 0.8 <= told / held <= 1.25, words, "0.8 to 1.25 of what is held")


def planned_bytes(work: Path) -> int:
    """Return the bytes that the planner predicts for the run that ``memory`` makes."""
    from ddpm_ds.config.ds_config import Layout
    from ddpm_ds.config.spec_file import load_spec
    from ddpm_ds.predict.layouts import Workload
    from ddpm_ds.predict.memory import peak_bytes

    found, path = json.loads((work / "trials.json").read_text()), work / "fit.json"
    trial, config = found["trials"][0], json.loads(path.read_text())
    job = Workload(load_spec(Path(found["spec"])), config, on_cpu=False)
    zero = config["zero_optimization"]["stage"]
    sizes = (trial["micro_batch_images"], trial["micro_batches"], trial["checkpoint_interval"])
    layout = Layout(1, 1, "1f1b", *sizes, zero, offload=False)
    return peak_bytes(job, layout, (0, len(job.layers)))


def one_device(machine: Machine) -> Iterator[Finding]:
    """``bench.py --one-device``: predictions and gradients of all rows but our compiled one, and their speed."""
    names = "diffusers,diffusers-randn,diffusers-compiled,lucidrains,lucidrains-randn"
    names += ",plain,channels-last,fused-kernels,fused-adamw,bare,engine,engine-eager,ours-dim64"
    options: list[str | Path] = ["--spec", SPECS / "cifar10.yaml", *CIFAR10_SIZED, "--steps-per-round", "5"]
    if not machine.on_gpu:
        names, options = "plain,bare,engine", ["--images", "16", "--steps-per-round", "1"]
    options += ["--rows", names, "--rounds", "3", "--json", machine.work / "rows.json"]
    machine.run(
        "bench", BENCH, "--one-device", "--deepspeed_config", CONFIGS / "zero2_bf16.json", *options, seconds=400
    )
    report = json.loads((machine.work / "rows.json").read_text())
    rows, limit = report["rows"], report["tolerance"]
    off = max(row[what] or 0 for row in rows for what in ("prediction_difference", "gradient_norm_difference"))
    words = f"predictions and gradients at most {off:.1e} apart"
    yield judged("one device, the same U-Net", off <= limit, words, f"<= {limit:g}, relative")
    for row in rows:
        words = f"{row['images_per_second']:,.0f} images/s, {row['speed']['median']:.2f} times {row['reference']}"
        yield Finding(f"one device, {row['row']}", f"{words}, MFU {row['mfu']:.1%}", "measured")
    for row in report["not_run"]:
        yield Finding(f"one device, {row['row']}", row["reason"], "skipped")
    if machine.on_gpu:
        yield from engine_speed({row["row"]: row["images_per_second"] for row in rows})


def engine_speed(speeds: dict[str, float]) -> Iterator[Finding]:
    """Hold the engine to plain loops: eagerly to the best of them, and with its step as a CUDA graph to diffusers'."""
    theirs = speeds["diffusers-randn"]
    for row, other, least in (("engine-eager", max(speeds["bare"], theirs), 0.95), ("engine", theirs, 2.0)):
        ratio, of = speeds[row] / other, "the best plain loop" if row == "engine-eager" else "diffusers"
        yield judged(f"{row}, speed", ratio >= least, f"{ratio:.2f} times {of}", f">= {least:g}")


def graphs(machine: Machine) -> Iterator[Finding]:
    """Replay steps as CUDA graphs: in two ranks on one card, whose messages are then in the graphs; and see how much of
    a plain loop's step a GPU computes.
    """
    if not machine.on_gpu:
        yield Finding("CUDA graphs", "no GPU", "skipped")
        return
    test = "test_on_one_gpu_shared_by_two_ranks_replayed_steps_train_as_eager_ones"
    yield run_pytest(machine, "CUDA graphs, two ranks on one GPU", f"{GRAPHS}::{test}", seconds=300)
    share = machine.measure(device_share, seconds=150, ranks=1)
    words = f"the GPU computes for {share['device']:.1f} of {share['step']:.1f} ms of a step of the plain loop `bare`"
    yield Finding("host and device", words, "measured")


def device_share(work: Path) -> dict[str, float]:
    """Return the milliseconds of a step of the bench's row ``bare``, CIFAR-10's sizes in bf16, and of its kernels."""
    import torch
    from rivals.measure import time_rounds
    from rivals.rows import Setting
    from rivals.unets import our_loop, switches_of
    from torch.profiler import ProfilerActivity, profile

    from ddpm_ds.planning import plan_run
    from ddpm_ds.processes.process_group import process_group

    sized = [str(word) for word in CIFAR10_SIZED if word != "--set"]
    plan = plan_run(SPECS / "cifar10.yaml", sized, CONFIGS / "zero2_bf16.json", world_size=1, stages=1)
    setting = Setting.prepare(plan, torch.device("cuda"), verbose=False)
    with process_group():
        row = our_loop(setting, switches_of("bare", setting, ()))
        timed = time_rounds([row.step], 2, STEPS_TIMED, torch.cuda.synchronize)  # a round to warm up
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(STEPS_TIMED):
                row.step()
            torch.cuda.synchronize()
    kernels = sum(event.self_device_time_total for event in profiler.key_averages())
    return {"step": 1e3 * timed[0][-1], "device": 1e-3 * kernels / STEPS_TIMED}


def kernels(machine: Machine) -> Iterator[Finding]:
    """Time the fused normalisation at shapes of CIFAR-10's U-Net in bf16; report what ``"kernels": "auto"`` decides."""
    if not machine.on_gpu:
        yield Finding("fused normalisation", "no GPU", "skipped")
        return
    found = machine.measure(kernel_times, seconds=150)
    for way, (chosen, trial) in found["choices"].items():
        seconds = {kind: trial[f"{kind}_seconds"] for kind in ("fused", "reference")}
        words = ", ".join(f"{kind} {1e3 * of:.3g} ms" for kind, of in seconds.items())
        taken = seconds["fused" if chosen == "fused" else "reference"]
        good = not trial["failure"] and taken <= 1.1 * min(seconds.values())
        yield judged(f"kernels auto, {way}", good, f"{chosen}: {words}", "the faster, within 10%")
    for shape, share in found["shares"].items():
        yield Finding(f"fused normalisation, {shape}", f"{share:.0%} of the copy bandwidth", "measured")
    words = ", ".join(f"{way} {1e3 * seconds:.3g} ms" for way, seconds in found["prepared"].items())
    yield Finding("draws and images of a micro-batch", words, "measured")
    words = ", ".join(f"{way} {1e3 * seconds:.3g} ms" for way, seconds in found["masks"].items())
    yield Finding("dropout masks of all layers", words, "measured")


def kernel_times(work: Path) -> dict[str, dict[str, Any]]:
    """Return the choice and times of both kinds by precision and way of launching, the share of the copy bandwidth by
    shape, and the seconds that a micro-batch takes to prepare and its masks take to be drawn, by our kernels and by
    PyTorch's operations.
    """
    import torch

    from ddpm_ds import keyed
    from ddpm_ds.config.spec_file import load_spec
    from ddpm_ds.data.loader import MicroBatch
    from ddpm_ds.train.objective import Denoising
    from ddpm_ds.unet import model as kernel_choice
    from ddpm_ds.unet.layers import unet_layers
    from ddpm_ds.unet.model import choose_kernels, copy_bandwidth_share, norm_shapes, try_kernels

    spec, device = load_spec(SPECS / "cifar10.yaml"), torch.device("cuda")
    layers = unet_layers(spec.unet, spec.data.interface)
    images, choices, shares = spec.train.batch_images, {}, {}
    for name, dtype in {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}.items():
        for way, captured in {"launched one by one": False, "in CUDA graphs": True}.items():
            chosen, _ = choose_kernels("auto", layers, device, dtype, images, captured=captured)
            trial = try_kernels("auto", layers, device, dtype, images, captured=captured)
            choices[f"{name} {way}"] = chosen, asdict(trial)
    for shape in norm_shapes(layers):
        name = f"{shape.channels} channels at {'x'.join(map(str, shape.size))} px, embedding {shape.embedding}"
        shares[name] = copy_bandwidth_share(shape, device, torch.bfloat16, images)
    index = torch.arange(images, device=device)
    pixels = torch.zeros(images, *spec.data.shape, dtype=torch.uint8, device=device)
    objective, prepared = Denoising(spec, device), {}
    for way, write in {"one kernel": keyed._fused(device), "PyTorch's operations": None}.items():
        with mock.patch.object(keyed, "_fused", return_value=write):
            work_of_way = functools.partial(objective.prepare, MicroBatch(pixels, index, index))
            prepared[way] = kernel_choice.seconds(work_of_way, device)
    masks = {
        way: kernel_choice.mask_seconds(kernel_choice.mask_sizes(layers), device, images, way)
        for way in ("fused", "reference")
    }
    return {"choices": choices, "shares": shares, "prepared": prepared, "masks": masks}


def compiled(machine: Machine) -> Iterator[Finding]:
    """``"compile": true`` beside eager layers: the losses, what is compiled after the first step, and the speed.

    One level, so that there are few shapes: a GPU takes about ten seconds to compile a layer for each.
    """
    steps, channels, attention, options = (30, 128, [32], CIFAR10_SIZED) if machine.on_gpu else (6, 8, [], [])
    spec = SPECS / ("cifar10.yaml" if machine.on_gpu else "digits.yaml")
    small = {"unet__channels": channels, "unet__multipliers": [1], "unet__blocks_per_level": 1}
    small["unet__attention_resolutions"] = attention
    often = {"train__images": steps * 128, "train__batch_images": 128, "logging__log_every_images": 128}
    never = {"samples__every_images": "null", "evaluation__every_images": "null"}
    runs = {}
    for way in ("eager", "compiled"):
        config = machine.work / f"{way}.json"
        given = json.loads((CONFIGS / "zero2_bf16.json").read_text())
        config.write_text(json.dumps({**given, "compile": way == "compiled"}))
        words = ["--spec", spec, *options, *settings(**small, **often, **never), "--trace-steps", "none"]
        runs[way] = machine.train(way, config, *words, seconds=300, TORCH_LOGS="recompiles")
    losses = [[point["train/loss"] for point in points] for points in runs.values()]
    off = max(abs(fast / eager - 1) for eager, fast in zip(*losses, strict=True))
    yield judged("compile, losses", off <= 2e-2, f"at most {off:.1e} from eager in {steps} steps", "<= 2e-2, relative")
    lines = (machine.work / "compiled.log").read_text(errors="replace").splitlines()
    logged = [number for number, line in enumerate(lines) if " images (" in line]  # a line for each step
    late = sum("Recompiling" in line for line in lines[logged[0] : logged[-1]])
    yield judged("compile, after the first step", not late, f"{late} recompilations", "0")
    timed = ([point["usage/step_seconds"] for point in points[steps // 2 :]] for points in runs.values())
    eager, fast = map(statistics.median, timed)
    yield Finding(
        "compile, speed", f"{1e3 * fast:.4g} ms a step, {eager / fast:.2f} times as fast as eager", "measured"
    )


def several(machine: Machine) -> Iterator[Finding]:
    """Pipelines, folds, replicas and tensor groups on several devices: gradients by name, and the benchmark of all
    rows; on one GPU ranks share it, where NCCL lets them, and only gradients are compared.
    """
    if machine.gpus == 1:
        test = "test_on_one_shared_gpu_loss_and_every_gradient_equal_plain_pytorch"
        yield run_pytest(machine, "gradients by name, ranks that share one GPU", f"{LADDER}::{test}", seconds=300)
        return
    processes = 4 if machine.gpus >= 4 else 2
    for count in range(2, processes + 1, 2):
        yield ladder(machine, count)
    options = ["--spec", SPECS / "cifar10.yaml", *CIFAR10_SIZED, *settings(train__accumulation=4 * processes)]
    effort = [3, 3, 20]
    if not machine.on_gpu:
        options, effort = ["--rows", "1f1b,folded"], [1, 1, 3]
    for name, value in zip(("--rounds", "--steps-per-round", "--compared-steps"), effort, strict=True):
        options += [name, str(value)]
    options += ["-p", str(processes), "--json", machine.work / "rows.json"]
    command = [BENCH, "--deepspeed_config", CONFIGS / "zero2_bf16.json", *options]
    machine.run("bench", *command, ranks=processes, seconds=300)
    report = json.loads((machine.work / "rows.json").read_text())
    for row in report["rows"]:
        times = f"{1e3 * row['step_seconds']['median']:.4g} ms a step, {row['ratio']['median']:.2f} of the first row's"
        words = f"{times}, losses at most {row['largest_loss_difference']:.1e} from its"
        yield Finding(f"{processes} processes, {row['row']}", words, "measured")
    for row in report["not_run"]:
        yield Finding(f"{processes} processes, {row['row']}", row["reason"], "skipped")


Check = Callable[[Machine], Iterator[Finding]]
BESIDE: dict[str, Check] = {
    "tests": gpu_tests,
    "gradients": gradients,
    "main": main_job,
    "resume": resume,
    "memory": memory,
}
"""Checks in which nothing is timed: they run at the same time, as far as there are cores."""
ALONE: dict[str, Check] = {
    "bench": one_device,
    "graphs": graphs,
    "kernels": kernels,
    "compile": compiled,
    "several": several,
}
CHECKS = BESIDE | ALONE
CORES = 3
"""Number of cores for a check that runs alongside others."""


def run_checks(names: Sequence[str], machine: Machine) -> Iterator[Outcome]:
    """Run the named checks and yield each outcome as it ends."""
    with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) // CORES)) as pool:
        futures = [pool.submit(run_check, name, machine) for name in BESIDE if name in names]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BaseException:
            machine.stopping.set()
            raise
    yield from (run_check(name, machine) for name in ALONE if name in names)


def run_check(name: str, machine: Machine) -> Outcome:
    """Run one check in a folder of its own and return its outcome; rows found before a failure are kept."""
    outcome, begin, machine = Outcome(name), time.monotonic(), replace(machine, work=machine.work / name)
    machine.work.mkdir()
    try:
        if begin >= machine.deadline:
            raise CommandFailed("not begun: the time is over, give more with --minutes")
        for row in CHECKS[name](machine):
            outcome.rows.append(row)
    except CommandFailed as error:
        outcome.rows.append(Finding(name, str(error), "fail"))
    except Exception as error:  # such as a report without a key
        outcome.rows.append(Finding(name, f"{type(error).__name__}: {error}", "fail"))
        outcome.details = traceback.format_exc()
    if outcome.failed:
        for log in sorted(machine.work.glob("*.log"), key=lambda log: log.stat().st_mtime)[-MOST_LOGS:]:
            lines = log.read_text(errors="replace").splitlines()
            outcome.details += "\n".join([f"{log.name}: {lines[0]}", *lines[1:][-LOG_LINES:], ""])
    outcome.seconds = time.monotonic() - begin
    return outcome


def facts(machine: Machine) -> dict[str, str]:
    """Return the facts that the numbers depend on: devices, driver, versions, date, commit."""
    import pynvml
    import torch

    found = {"date": datetime.now().astimezone().isoformat(timespec="minutes")}
    if shutil.which("git"):
        described = ("git", "describe", "--always", "--dirty")
        done = subprocess.run(described, cwd=REPOSITORY, capture_output=True, text=True, check=False)
        found["commit"] = done.stdout.strip() or "unknown"
    if machine.on_gpu:
        cards = [torch.cuda.get_device_properties(number) for number in range(machine.gpus)]
        found["GPUs"] = ", ".join(f"{card.name} ({card.total_memory / 2**30:.0f} GiB)" for card in cards)
        with contextlib.suppress(pynvml.NVMLError):  # a container may have CUDA's library alone
            pynvml.nvmlInit()
            found["driver"] = str(pynvml.nvmlSystemGetDriverVersion())
        found["CUDA"] = str(torch.version.cuda)
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    models = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    found["processor"] = f"{models[0] if models else platform.machine()}, {os.cpu_count()} cores"
    found["Python"] = platform.python_version()
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def markdown(about: dict[str, str], outcomes: Sequence[Outcome]) -> str:
    """Return the report as Markdown."""
    lines = ["# Checks of a machine", "", *(f"- {name}: {value}" for name, value in about.items()), ""]
    lines += ["| check | measured | limit | result |", "|---|---|---|---|"]
    for row in (row for outcome in outcomes for row in outcome.rows):
        cells = (" ".join(cell.split()).replace("|", "\\|") for cell in (row.name, row.measured, row.limit, row.status))
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "Seconds: " + ", ".join(f"{outcome.name} {outcome.seconds:.0f}" for outcome in outcomes)]
    for outcome in outcomes:
        if outcome.details:
            lines += ["", f"## {outcome.name}", "", "````", outcome.details, "````"]
    return "\n".join(lines) + "\n"


def parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, Machine]:
    """Return the options, and the machine that they describe.

    Raises:
        UserError: an option is unknown or has a wrong value, there is no GPU, or a folder can't be used.
    """
    import torch

    from ddpm_ds.device import check_cuda

    listed = "".join(f"  {name:11}{check.__doc__}\n" for name, check in CHECKS.items())
    parser = OneLineParser(
        prog="python launch/check_gpu.py", description=DESCRIPTION, epilog=f"checks\n{listed}\n{EXIT_CODES}"
    )
    parser.add_argument("--out", type=file_path, default=Path("gpu.md"), metavar="FILE", help="the report (gpu.md)")
    add_overwrite(parser)
    parser.add_argument("--work", type=file_path, metavar="DIR", help="for runs and logs (a new temporary folder)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: CUDA if any")
    parser.add_argument("--minutes", type=minutes, default=10.0, metavar="M", help="time limit of all checks (10)")
    parser.add_argument("--only", default=",".join(CHECKS), metavar="CHECK,...", help="some checks (default: all)")
    options = parser.parse_args(arguments)
    options.only = [name.strip() for name in options.only.split(",")]
    for name in options.only:
        if name not in CHECKS:
            raise SpecError(f"--only: {name!r} is no check; checks are {', '.join(CHECKS)}")
    check_outputs(options, "out")
    gpus = 0 if options.device == "cpu" else torch.cuda.device_count()
    if options.device != "cpu":
        check_cuda(gpus)
    if options.device == "cuda" and not gpus:
        raise LayoutError("--device = cuda, but PyTorch finds no CUDA device; use --device cpu, or fix the driver")
    try:
        work = options.work or Path(tempfile.mkdtemp(prefix="check_gpu-"))
        work.mkdir(parents=True, exist_ok=True)
        used = any(work.iterdir())
    except OSError as error:
        raise OutputError(f"--work {options.work} can't be used ({error.strerror}); name another folder") from None
    if used:
        raise OutputError(f"--work {work} is not empty; its runs would be resumed: name a new folder")
    deadline = time.monotonic() + 60 * options.minutes
    return options, Machine(work.resolve(), "cuda" if gpus else "cpu", gpus, deadline)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks and return the exit code."""
    try:
        options, machine = parse(arguments)
    except UserError as error:
        print(f"check_gpu: error: {error}", file=sys.stderr)
        return error.exit_code
    about, outcomes = facts(machine), list[Outcome]()
    for outcome in run_checks(options.only, machine):
        outcomes = sorted([*outcomes, outcome], key=lambda one: list(CHECKS).index(one.name))
        with writing(options.out, overwrite=True) as file:  # with every check, so that a crash leaves a report
            file.write(markdown(about, outcomes).encode())
        print(f"{outcome.name:10} {outcome.seconds:4.0f} s  {'FAILED' if outcome.failed else 'ok'}", flush=True)
        for row in outcome.rows:
            print(f"    {row.status:8}  {row.name}: {row.measured}", flush=True)
    print(f"report {options.out}, runs and logs {machine.work}")
    return int(any(outcome.failed for outcome in outcomes))


if __name__ == "__main__":
    for ending in (signal.SIGINT, signal.SIGTERM):  # leave through the code that ends running commands
        signal.signal(ending, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
