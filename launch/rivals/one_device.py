"""``--one-device`` from the plan to the table: one U-Net in one process under diffusers, our loop and our engine."""

from __future__ import annotations

import argparse
import gc
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from tqdm import tqdm

from ddpm_ds.device import DTYPES, wait_for_device
from ddpm_ds.errors import BadNumbersError, LayoutError
from ddpm_ds.experiments.data_rate import Spread
from ddpm_ds.observe.device_speed import matmul_peak
from ddpm_ds.pipeline.module import forget_peaks
from ddpm_ds.predict.plan import RunPlan
from ddpm_ds.processes.process_group import process_group
from ddpm_ds.train.meters import peak_memory_bytes
from ddpm_ds.unet.operations import arithmetic_dtype
from rivals.choice import ONE_DEVICE_ROWS, OTHER_UNETS, ROUNDS, STEPS, choose
from rivals.deepspeed_rows import OneStageEngine
from rivals.loops import Loop, Probe
from rivals.measure import check_probe, ratios, time_rounds, tolerance
from rivals.observation import peak_in_child, print_peak
from rivals.report import Report, Result, about, common_lines, versions
from rivals.rows import Setting
from rivals.unets import (
    PACKAGES,
    DiffusersLoop,
    LucidrainsLoop,
    OurLoop,
    dim64,
    missing_switches,
    switches_of,
    why_not_here,
)

WARM_STEPS = 2
"""Steps before the first that is timed: one may compile, and the optimizer's state is there from the second on."""


def build_row(name: str, setting: Setting, missing: dict[str, str]) -> Loop | OneStageEngine:
    """Return the row with a name of :data:`rivals.choice.ONE_DEVICE_ROWS`."""
    match name:
        case "diffusers" | "diffusers-compiled":
            return DiffusersLoop(setting, compiled=name == "diffusers-compiled")
        case "engine":
            return OneStageEngine(setting)
        case "lucidrains":
            return LucidrainsLoop(setting)
    copied = "its convolutions' weights are kept channels-last and copied in every forward" if name == "plain" else ""
    own = dim64(setting) if name == "ours-dim64" else setting
    return OurLoop(own, switches_of(name, own, missing), copied)


@dataclass(frozen=True)
class Warm:
    """A row that has been compared and has taken some steps."""

    row: Loop | OneStageEngine
    probe: Probe
    reference: str
    """The first row with the same U-Net, to which it is compared."""
    differences: dict[str, float]
    """Differences from that row (:func:`rivals.measure.check_probe`); empty for a U-Net of another kind."""
    peak_bytes: int | None
    """Peak added by this row on a GPU; on a CPU that of a process that trains it alone, None where not asked for."""


def run_one_device(plan: RunPlan, device: torch.device, overrides: Sequence[str], options: argparse.Namespace) -> None:
    """Compare what rows compute, time them in turn, and publish the report.

    Raises:
        UserError: something given is wrong.
        BadNumbersError: the outputs of two rows of the same U-Net differ by more than rounding.
    """
    setting = Setting.prepare(plan, device, verbose=options.verbose)
    missing = missing_switches(setting, options.rows)
    names, not_run = choose(options.rows or list(ONE_DEVICE_ROWS), lambda name: why_not_here(name, setting, missing))
    arithmetic = arithmetic_dtype(device.type, DTYPES[plan.ds.precision][1])
    allowed, images = tolerance(plan.ds.precision, device), plan.ds.layout.micro_batch_images
    rounds, steps = options.rounds or ROUNDS[device.type], options.steps_per_round or STEPS[device.type]
    with process_group():
        if options.memory_of is not None:
            print_peak(lambda: build_row(options.memory_of, setting, missing), device)
            return
        peak = matmul_peak(device, arithmetic)
        warm = warm_rows(names, setting, missing, allowed, memory=options.memory)
        gc.collect()
        parts = {name: part for name, one in warm.items() if (part := one.row.forward_backward) is not None}
        timed = [*(one.row.step for one in warm.values()), *parts.values()]
        with tqdm(total=rounds, desc="measuring", unit="round") as bar:
            seconds = time_rounds(timed, rounds, steps, lambda: wait_for_device(device), bar.update)
        peak = max(peak, matmul_peak(device, arithmetic))  # a neighbour may have been there at first
    whole = dict(zip(warm, seconds, strict=False))
    without_optimizer = dict(zip(parts, seconds[len(warm) :], strict=True))
    over = Spread.of(ratios(whole["engine"], whole["bare"])) if {"engine", "bare"} <= whole.keys() else None
    precision, dropout, dtype = plan.ds.precision, plan.spec.unet.dropout, str(arithmetic).removeprefix("torch.")
    facts = about(
        setting,
        overrides,
        not_run,
        versions=versions(sorted({PACKAGES[name] for name in names if name in PACKAGES})),
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
        f"batch        {images} images; the engine's {setting.recomputing()}",
        *common_lines(facts),
        f"peak         {peak / 1e12:.4g} TFLOP/s: square matrix products in {dtype}, this run",
        f"prediction   and gradient: relative difference, seen before all was timed; allowed {allowed:g}",
        "speed        images/s over those of the first row of the same table",
        "fwd+bwd      a step without its optimizer",
        "MFU          6 flops per multiply-accumulate of a forward, over step time and peak",
    ]
    rows = [one_device_result(name, warm[name], whole, without_optimizer.get(name, []), images, peak) for name in warm]
    remarks = [] if over is None else [f"engine over bare: {over.as_ratio()} of its step time"]
    Report(facts, head, rows, remarks).publish(plan, options)


def warm_rows(
    names: Sequence[str], setting: Setting, missing: dict[str, str], allowed: float, *, memory: bool
) -> dict[str, Warm]:
    """Return all rows, compared with each other and warm; they live side by side.

    ``memory`` asks for peaks on a CPU, each measured in a child; on a GPU they are known without one.

    Raises:
        BadNumbersError: two rows of the same U-Net differ by more than ``allowed``, or an output is not finite.
        LayoutError: they don't fit the device together.
    """
    device, on_gpu = setting.device, setting.device.type == "cuda"
    micro_batch = next(setting.batches(1, 0))
    warm: dict[str, Warm] = {}
    for name in tqdm(names, desc="comparing", unit="row"):
        peak = peak_in_child(name) if memory and not on_gpu else None
        before = torch.cuda.memory_allocated(device) if on_gpu else 0
        try:
            row = build_row(name, setting, missing)
            probe = row.probe(micro_batch)
            for _ in range(WARM_STEPS):
                forget_peaks(device)  # the first step tries algorithms
                row.step()
                wait_for_device(device)
        except torch.OutOfMemoryError:
            raise LayoutError(
                f"row {name} no longer fits the device beside {', '.join(warm) or 'nothing'}; name fewer rows in "
                f"--rows, or take less than --images {setting.plan.ds.layout.micro_batch_images}"
            ) from None
        first = next(other for other in names if (other in OTHER_UNETS) == (name in OTHER_UNETS))
        differences = {}
        if name not in OTHER_UNETS:
            differences = check_probe(name, probe, first, warm[first].probe if first in warm else probe, allowed)
        elif not math.isfinite(probe.loss + probe.gradient_norm):
            raise BadNumbersError(f"{name} has loss {probe.loss} and gradients of norm {probe.gradient_norm}")
        peak = peak_memory_bytes(device) - before if on_gpu else peak
        warm[name] = Warm(row, probe, first, differences, peak)
    return warm


def one_device_result(
    name: str, one: Warm, whole: Mapping[str, list[float]], part: list[float], images: int, peak: float
) -> Result:
    """Return the report of a row.

    ``whole`` are the seconds of a step by row and round, ``part`` those of the same without its optimizer; ``images``
    are those of a step, ``peak`` is in flops per second of matrix products.
    """
    row, reference = one.row, one.reference
    first, other = name == reference, not one.differences
    step, part_step = Spread.of(whole[name]), Spread.of(part) if part else None
    speed, rate = Spread.of(ratios(whole[reference], whole[name])), images / step.median
    mfu = 6 * row.macs * rate / peak
    prediction, gradient = one.differences.get("prediction"), one.differences.get("gradients' norm")
    numbers = {
        "row": name,
        "name": row.name,
        "note": row.note,
        "reference": reference,
        "parameters": row.parameters,
        "macs": row.macs,
        "images_per_second": rate,
        "step_seconds": step,
        "forward_backward_seconds": part_step,
        "speed": speed,
        "mfu": mfu,
        "peak_bytes": one.peak_bytes,
        "loss": one.probe.loss,
        "gradient_norm": one.probe.gradient_norm,
        "prediction_difference": prediction,
        "gradient_norm_difference": gradient,
        "round_step_seconds": whole[name],
        "round_forward_backward_seconds": part,
    }
    cells = {
        "row": name,
        "step ms": step.as_milliseconds(),
        "fwd+bwd ms": "-" if part_step is None else part_step.as_milliseconds(),
        "images/s": f"{rate:,.4g}",
        "speed": "1" if first else speed.as_ratio(),
        "MFU": f"{mfu:.1%}",
        "peak MB": "" if one.peak_bytes is None else f"{one.peak_bytes / 1e6:,.0f}",
        "prediction": "" if first or prediction is None else f"{prediction:.1e}",
        "gradient": "" if first or gradient is None else f"{gradient:.1e}",
        "parameters": f"{row.parameters:,}" if first or other else "",
        "MACs/image": f"{row.macs / 1e9:.4g} G" if first or other else "",
        "what": row.name,
    }
    return Result(numbers, cells, block=int(other))
