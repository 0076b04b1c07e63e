"""Both kinds of benchmark from the plan to the table: rows on all processes, and with ``--one-device`` rows in one."""

from __future__ import annotations

import argparse
import gc
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import torch
import torch.distributed as dist
from tqdm import tqdm

from ddpm_ds.config.ds_config import Schedule
from ddpm_ds.device import DTYPES, wait_for_device
from ddpm_ds.errors import BadNumbersError, LayoutError
from ddpm_ds.observe.device_speed import matmul_peak
from ddpm_ds.pipeline.messages import all_gather_objects
from ddpm_ds.pipeline.module import forget_peaks
from ddpm_ds.planning import RunPlan
from ddpm_ds.processes.process_group import process_group
from ddpm_ds.train.meters import peak_memory_bytes
from ddpm_ds.unet.operations import arithmetic_dtype
from rivals import measure, unets
from rivals.choice import ONE_DEVICE_ROWS, OTHER_UNETS, ROUNDS, STEPS, TORCH_SCHEDULES, choose
from rivals.deepspeed_rows import OneStageEngine, OurPipeline, StockPipeline, TracedPipeline, ZeroWithoutPipeline
from rivals.measure import Spread
from rivals.pipelining import TorchPipeline
from rivals.report import Report, Result, about, common_lines, recomputing
from rivals.rows import Loop, Probe, Row, Setting, plain_loop

SCHEDULES: dict[str, Schedule] = {name: name for name in get_args(Schedule)}
"""Schedules of this project's rows, by the rows' names."""
WARM_STEPS = 2
"""Steps before the first timed one: one may compile, and the optimizer's state exists from the second on."""


def build_row(name: str, setting: Setting) -> Row:
    """Return the row with a name of :data:`rivals.choice.ROWS`; every process calls this."""
    if name in SCHEDULES:
        return OurPipeline(setting, SCHEDULES[name])
    if name in TORCH_SCHEDULES:
        return TorchPipeline(setting, TORCH_SCHEDULES[name])
    match name:
        case "plain" | "ddp":
            return plain_loop(setting, parallel=name == "ddp")
        case "traced":
            return TracedPipeline(setting)
        case "zero2":
            return ZeroWithoutPipeline(setting)
    return StockPipeline(setting, default_cuts=name == "stock-default", folded=name == "stock-dualpipev")


def build_one_device_row(name: str, setting: Setting, missing: Mapping[str, str]) -> Loop | OneStageEngine:
    """Return the row with a name of :data:`rivals.choice.ONE_DEVICE_ROWS`."""
    match name:
        case "diffusers" | "diffusers-compiled" | "diffusers-randn":
            return unets.diffusers_loop(setting, compiled=name.endswith("compiled"), randn=name.endswith("randn"))
        case "engine" | "engine-eager":
            return OneStageEngine(setting, graphs=name == "engine")
        case "lucidrains" | "lucidrains-randn":
            return unets.lucidrains_loop(setting, randn=name.endswith("randn"))
    copied = "its convolutions' weights are kept channels-last and copied in every forward" if name == "plain" else ""
    own = unets.dim64(setting) if name == "ours-dim64" else setting
    return unets.our_loop(own, unets.switches_of(name, own, missing), copied)


def run_layout(
    plan: RunPlan, device: torch.device, names: Sequence[str], not_run: Mapping[str, str], options: argparse.Namespace
) -> None:
    """Compare the losses of all rows, time them in turn, and publish the report; every process calls this.

    Raises:
        UserError: something given is wrong; raised before any process group exists.
        BadNumbersError: the rows' losses differ by more than rounding.
    """
    setting = Setting.prepare(plan, device, verbose=options.verbose)
    layout = plan.ds.layout
    rounds, steps = options.rounds or ROUNDS["layout"], options.steps_per_round or STEPS["layout"]
    with process_group():
        if options.memory_of is not None:
            measure.print_peak(lambda: build_row(options.memory_of, setting), device)
        else:
            results = _measure_layout(setting, names, rounds, steps, options)
        dist.barrier()
    if options.memory_of is not None or os.environ["RANK"] != "0":
        return
    replicas = f" x {layout.replicas} replicas" if layout.replicas > 1 else ""
    split = f"{layout.micro_batch_images} x {layout.micro_batches} micro-batches{replicas}"
    facts = about(
        setting,
        options.overrides,
        not_run,
        parameters=plan.parameters,
        layout=f"{layout.world_size} processes = {layout.stages} stages x {layout.replicas} replicas",
        batch=f"{layout.batch_images} images = {split}",
        rounds=rounds,
        steps_per_round=steps,
    )
    head = [
        f"U-Net        {plan.parameters:,} parameters: {plan.spec.name} with {plan.ds_path}",
        f"layout       {facts['layout']}",
        f"batch        {facts['batch']}; {recomputing(facts)}",
        *common_lines(facts),
        f"losses       largest relative difference in the first {options.compared_steps} steps",
        "sent         in one step by the rank that sends most; of collectives what a ring of processes sends",
        "bubble       share of a step that a rank spends outside of forward and backward, mean over ranks",
        *(["peak         memory of the fullest rank, in processes that train one row each"] * options.memory),
    ]
    Report(facts, head, results).publish(plan, options)


def _measure_layout(
    setting: Setting, names: Sequence[str], rounds: int, steps: int, options: argparse.Namespace
) -> list[Result]:
    device, images = setting.device, setting.plan.ds.layout.batch_images
    peaks = [all_gather_objects(measure.peak_in_child(name), int) if options.memory else None for name in names]
    rows = [build_row(name, setting) for name in names]
    parts = [[float(row.step()) for _ in range(options.compared_steps)] for row in rows]  # which warms them up, too
    losses = [
        [sum(of_ranks) for of_ranks in zip(*all_gather_objects(part, list[float]), strict=True)] for part in parts
    ]
    differences = measure.check_losses(
        [row.name for row in rows], losses, measure.LOSS_TOLERANCE[setting.plan.ds.precision]
    )
    gc.collect()
    seconds = measure.time_rounds([row.step for row in rows], rounds, steps, lambda: measure.all_done(device))
    observed = [all_gather_objects(measure.observe(row, steps, device), tuple[int, int, float]) for row in rows]
    return [
        layout_result(name, row, images, own, seconds[0], *others)
        for name, row, own, *others in zip(names, rows, seconds, observed, losses, differences, peaks, strict=True)
    ]


def layout_result(
    name: str,
    row: Row,
    images: int,
    seconds: list[float],
    reference: list[float],
    observed: Sequence[tuple[int, int, float]],
    losses: list[float],
    loss_difference: float,
    peaks: list[int] | None,
) -> Result:
    """Return the report of a row.

    ``images`` is the number of images of a batch. By round: ``seconds`` of a step, and those of the first row, the
    ``reference``. By rank: the numbers ``observed`` (:func:`rivals.measure.observe`) and the peak bytes.
    """
    step, ratio = Spread.of(seconds), Spread.of(measure.ratios(seconds, reference))
    messages, collectives, idle = map(list, zip(*observed, strict=True))
    sent = max(map(sum, zip(messages, collectives, strict=True))) / 1e6
    bubble = sum(idle) / len(idle) if row.is_pipeline else None
    first = seconds is reference
    numbers = {
        "row": name,
        "name": row.name,
        "note": row.note,
        "images_per_second": images / step.median,
        "step_seconds": step,
        "ratio": ratio,
        "round_step_seconds": seconds,
        "first_losses": losses,
        "largest_loss_difference": loss_difference,
        "rank_message_bytes": messages,
        "rank_collective_bytes": collectives,
        "bubble": bubble,
        "rank_peak_bytes": peaks,
    }
    cells = {
        "row": name,
        "step ms": step.as_milliseconds(),
        "images/s": f"{images / step.median:,.4g}",
        "time ratio": "1" if first else ratio.as_ratio(),
        "sent MB": f"{sent:.2f}",
        "bubble": "-" if bubble is None else f"{bubble:.1%}",
        "peak MB": "" if peaks is None else f"{max(peaks) / 1e6:.0f}",
        "loss difference": "" if first else f"{loss_difference:.1e}",
        "what": row.name,
    }
    return Result(numbers, cells)


def run_one_device(plan: RunPlan, device: torch.device, overrides: Sequence[str], options: argparse.Namespace) -> None:
    """Compare what rows compute, time them in turn, and publish the report.

    Raises:
        UserError: something given is wrong.
        BadNumbersError: the outputs of two rows of the same U-Net differ by more than rounding.
    """
    setting = Setting.prepare(plan, device, verbose=options.verbose)
    missing = unets.missing_switches(setting, options.rows)
    names, not_run = choose(
        options.rows or list(ONE_DEVICE_ROWS), lambda name: unets.why_not_here(name, setting, missing)
    )
    precision, dropout, images = plan.ds.precision, plan.spec.unet.dropout, plan.ds.layout.micro_batch_images
    arithmetic, allowed = arithmetic_dtype(device.type, DTYPES[precision][1]), measure.tolerance(precision, device)
    rounds, steps = options.rounds or ROUNDS[device.type], options.steps_per_round or STEPS[device.type]
    with process_group():
        if options.memory_of is not None:
            measure.print_peak(lambda: build_one_device_row(options.memory_of, setting, missing), device)
            return
        peak = matmul_peak(device, arithmetic)
        rows, compared = warm_rows(names, setting, missing, allowed, memory=options.memory, host=options.host)
        gc.collect()
        parts = {name: part for name, row in rows.items() if (part := row.forward_backward) is not None}
        timed = [*(row.step for row in rows.values()), *parts.values()]
        seconds = measure.time_rounds(timed, rounds, steps, lambda: wait_for_device(device))
        peak = max(peak, matmul_peak(device, arithmetic))  # a neighbour may have been there at first
    whole = dict(zip(rows, seconds, strict=False))
    without_optimizer = dict(zip(parts, seconds[len(rows) :], strict=True))
    over = Spread.of(measure.ratios(whole["engine"], whole["bare"])) if {"engine", "bare"} <= whole.keys() else None
    dtype = str(arithmetic).removeprefix("torch.")
    facts = about(
        setting,
        overrides,
        not_run,
        packages=sorted({unets.PACKAGES[name] for name in names if name in unets.PACKAGES}),
        layout="one device",
        precision=precision,
        images=images,
        dropout=dropout,
        peak_flops=peak,
        arithmetic=dtype,
        tolerance=allowed,
        rounds=rounds,
        steps_per_round=steps,
        engine_over_bare=over,
    )
    head = [
        f"U-Net        {plan.spec.name} with {plan.ds_path}, {precision}, dropout {dropout:g}",
        f"batch        {images} images; the engine's {recomputing(facts)}",
        *common_lines(facts),
        f"peak         {peak / 1e12:.4g} TFLOP/s: square matrix products in {dtype}, this run",
        f"prediction   and gradient: relative difference, seen before all was timed; allowed {allowed:g}",
        "speed        images/s over those of the first row of the same table",
        "fwd+bwd      a step without its optimizer",
        "MFU          6 flops per multiply-accumulate of a forward, over step time and peak",
    ]
    results = [one_device_result(known, whole, without_optimizer, images, peak) for known in compared]
    remarks = [] if over is None else [f"engine over bare: {over.as_ratio()} of its step time"]
    Report(facts, head, results, remarks).publish(plan, options)


def warm_rows(
    names: Sequence[str], setting: Setting, missing: Mapping[str, str], allowed: float, *, memory: bool, host: bool
) -> tuple[dict[str, Loop | OneStageEngine], list[dict[str, Any]]]:
    """Build all rows in this process, compare what they compute and warm them up; return them and their first numbers.

    With ``memory``, peaks on a CPU are measured too, each in a child process; on a GPU they need none. With ``host``
    the operators, launches, Python calls and waits of a step are counted.

    Raises:
        BadNumbersError: two rows of the same U-Net differ by more than ``allowed``, or an output is not finite.
        LayoutError: they don't fit the device together.
    """
    device, on_gpu = setting.device, setting.device.type == "cuda"
    micro_batch = next(setting.batches(1, 0))
    rows: dict[str, Loop | OneStageEngine] = {}
    references: dict[bool, tuple[str, Probe]] = {}
    compared = []
    for name in tqdm(names, desc="comparing", unit="row"):
        peak = measure.peak_in_child(name) if memory and not on_gpu else None
        before = torch.cuda.memory_allocated(device) if on_gpu else 0
        try:
            row = build_one_device_row(name, setting, missing)
            probe = row.probe(micro_batch)
            for _ in range(WARM_STEPS):
                forget_peaks(device)  # the first step tries algorithms
                row.step()
                wait_for_device(device)
        except torch.OutOfMemoryError:
            raise LayoutError(
                f"row {name} no longer fits the device beside {', '.join(rows) or 'nothing'}; name fewer rows in "
                f"--rows, or take less than --images {setting.plan.ds.layout.micro_batch_images}"
            ) from None
        first, reference = references.setdefault(name in OTHER_UNETS, (name, probe))
        differences = {}
        if name not in OTHER_UNETS:
            differences = measure.check_probe(name, probe, first, reference, allowed)
        elif not math.isfinite(probe.loss + probe.gradient_norm):
            raise BadNumbersError(f"{name} has loss {probe.loss} and gradients of norm {probe.gradient_norm}")
        rows[name] = row
        cost = measure.HostCost.of(row.step) if host else None
        compared.append(
            {
                "row": name,
                "host": cost,
                "name": row.name,
                "note": row.note,
                "reference": first,
                "parameters": row.parameters,
                "macs": row.macs,
                "peak_bytes": peak_memory_bytes(device) - before if on_gpu else peak,
                "loss": probe.loss,
                "gradient_norm": probe.gradient_norm,
                "prediction_difference": differences.get("prediction"),
                "gradient_norm_difference": differences.get("gradients' norm"),
            }
        )
    return rows, compared


def one_device_result(
    known: Mapping[str, Any],
    whole: Mapping[str, list[float]],
    without_optimizer: Mapping[str, list[float]],
    images: int,
    peak: float,
) -> Result:
    """Return the report of a row, whose numbers from :func:`warm_rows` are ``known``.

    ``whole`` has the seconds of a step by row and round, ``without_optimizer`` those of a step without its optimizer.
    ``images`` is the number of images of a step, ``peak`` the flops per second of matrix products.
    """
    name, reference, memory = known["row"], known["reference"], known["peak_bytes"]
    prediction, gradient = known["prediction_difference"], known["gradient_norm_difference"]
    of_its_own = name == reference or prediction is None
    part = without_optimizer.get(name, [])
    step, part_step = Spread.of(whole[name]), Spread.of(part) if part else None
    speed, rate = Spread.of(measure.ratios(whole[reference], whole[name])), images / step.median
    mfu = 6 * known["macs"] * rate / peak
    numbers = {
        **known,
        "images_per_second": rate,
        "step_seconds": step,
        "forward_backward_seconds": part_step,
        "speed": speed,
        "mfu": mfu,
        "round_step_seconds": whole[name],
        "round_forward_backward_seconds": part,
    }
    host: measure.HostCost | None = known["host"]
    kinds = ("operators", "launches", "calls", "waits")
    counts = {} if host is None else {kind: getattr(host, kind) for kind in kinds}
    cells = {
        "row": name,
        **{count: f"{number:,}" for count, number in counts.items()},
        "step ms": step.as_milliseconds(),
        "fwd+bwd ms": "-" if part_step is None else part_step.as_milliseconds(),
        "images/s": f"{rate:,.4g}",
        "speed": "1" if name == reference else speed.as_ratio(),
        "MFU": f"{mfu:.1%}",
        "peak MB": "" if memory is None else f"{memory / 1e6:,.0f}",
        "prediction": "" if of_its_own else f"{prediction:.1e}",
        "gradient": "" if of_its_own else f"{gradient:.1e}",
        "parameters": f"{known['parameters']:,}" if of_its_own else "",
        "MACs/image": f"{known['macs'] / 1e9:.4g} G" if of_its_own else "",
        "what": known["name"],
    }
    return Result(numbers, cells, block=int(prediction is None))
