"""``--one-device`` from the plan to the table: one U-Net in one process under diffusers, our loop and our engine."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime

import torch
from torch import Tensor
from tqdm import tqdm

from ddpm_ds.device import DTYPES, wait_for_device
from ddpm_ds.experiments.data_rate import Spread
from ddpm_ds.observe.device_speed import matmul_peak
from ddpm_ds.predict.plan import RunPlan
from ddpm_ds.processes.process_group import process_group
from ddpm_ds.tracking.run_folder import OUTPUT_ROOT
from ddpm_ds.unet.operations import arithmetic_dtype
from rivals.abilities import versions_of
from rivals.measure import ratios, time_rounds
from rivals.memory import PeakMemory, say_peak
from rivals.one_device_build import Built, build_all, build_one_device_row, choose
from rivals.one_device_choice import groups, rounds_and_steps
from rivals.one_device_report import OneDeviceReport, OneDeviceResult, one_device_table
from rivals.probes import tolerance
from rivals.record import record_one_device
from rivals.report import NotRun, machine, versions
from rivals.rows_one_device import Start
from rivals.session import Outputs, prepare_setting


@dataclass(frozen=True)
class OneDeviceEffort:
    """How much is measured."""

    rounds: int | None
    steps_per_round: int | None
    """None: what fits two minutes, of both."""
    memory: bool
    """Whether each row is trained once more in a child; on a GPU the peak is known without one."""


@dataclass(frozen=True)
class _Steps:
    """What :func:`time_rounds` calls: a row's step, whole or without the optimizer."""

    step: Callable[[], Tensor]


@dataclass(frozen=True)
class _Seconds:
    """Per step, by row and round."""

    rounds: int
    steps: int
    whole: dict[str, list[float]]
    forward_backward: dict[str, list[float]]


def run_one_device(
    plan: RunPlan,
    device: torch.device,
    names: Sequence[str] | None,
    effort: OneDeviceEffort,
    outputs: Outputs,
    *,
    verbose: bool,
) -> None:
    """Compare outputs, time the rows in turn, print the table, write the JSON and the MLflow runs.

    ``names`` None asks for all rows that can run, except on a CPU for those that are compiled.

    Raises:
        UserError: something given is wrong.
        BadNumbersError: the outputs of two rows of the same U-Net differ by more than rounding.
    """
    load_before = os.getloadavg()[0]
    setting = prepare_setting(plan, device, verbose)
    able, names, not_run = choose(names, setting)
    allowed = tolerance(plan.ds.precision, device)
    arithmetic = arithmetic_dtype(device.type, DTYPES[plan.ds.precision][1])
    with process_group():
        peak = matmul_peak(device, arithmetic)
        with tqdm(total=len(names), desc="comparing", unit="row") as bar:
            built = build_all(names, setting, able, allowed, memory=effort.memory, after_row=bar.update)
        seconds = _time(built, device, effort)
        peak = max(peak, matmul_peak(device, arithmetic))  # a neighbour may have been there at first
    report = OneDeviceReport(
        name=plan.spec.name,
        command=outputs.command,
        date=datetime.now().astimezone().isoformat(timespec="seconds"),
        machine=machine(device),
        load_before=load_before,
        versions=versions() | versions_of(names),
        spec=str(plan.spec_path),
        overrides=list(outputs.overrides),
        deepspeed_config=str(plan.ds_path),
        precision=plan.ds.precision,
        images=plan.ds.layout.micro_batch_images,
        dropout=plan.spec.unet.dropout,
        activation_checkpoint_interval=int(setting.plan.ds.checkpoint_interval),
        peak_flops=peak,
        arithmetic=str(arithmetic).removeprefix("torch."),
        tolerance=allowed,
        rounds=seconds.rounds,
        steps_per_round=seconds.steps,
        rows=_results(built, seconds, plan.ds.layout.micro_batch_images, peak),
        not_run=[NotRun(row, reason) for row, reason in not_run.items()],
        engine_over_bare=_engine_over_bare(seconds.whole),
    )
    print(one_device_table(report), flush=True)
    if outputs.json_path is not None:
        outputs.json_path.write_text(json.dumps(asdict(report), indent=2) + "\n")
    if outputs.mlflow:
        print(f"MLflow: {record_one_device(report, plan, OUTPUT_ROOT).open_with}", flush=True)


def measure_one_device_memory(
    plan: RunPlan, device: torch.device, name: str, names: Sequence[str] | None, *, verbose: bool
) -> None:
    """What a child does that :func:`rivals.memory.peak_in_child` starts for row ``name`` of ``names``."""
    setting = prepare_setting(plan, device, verbose)
    able, _, _ = choose(names, setting)
    with process_group():
        start = Start.of(setting)
        memory = PeakMemory(device)
        say_peak(build_one_device_row(name, start, able), memory)


def _time(built: Mapping[str, Built], device: torch.device, effort: OneDeviceEffort) -> _Seconds:
    gc.collect()
    whole = {name: _Steps(one.row.step) for name, one in built.items()}
    parts = {name: _Steps(part) for name, one in built.items() if (part := one.row.forward_backward) is not None}
    once = sum(built[name].warm_seconds for rows in (whole, parts) for name in rows)
    rounds, steps = rounds_and_steps(effort.rounds, effort.steps_per_round, once)
    with tqdm(total=rounds, desc="measuring", unit="round") as bar:
        seconds = time_rounds(
            [*whole.values(), *parts.values()],
            rounds=rounds,
            steps=steps,
            synchronize=lambda: wait_for_device(device),
            after_round=bar.update,
        )
    return _Seconds(
        rounds,
        steps,
        dict(zip(whole, seconds[: len(whole)], strict=True)),
        dict(zip(parts, seconds[len(whole) :], strict=True)),
    )


def _engine_over_bare(seconds: Mapping[str, Sequence[float]]) -> Spread | None:
    if not {"engine", "bare"} <= seconds.keys():
        return None
    return Spread.of(ratios(seconds["engine"], seconds["bare"]))


def _results(built: Mapping[str, Built], seconds: _Seconds, images: int, peak: float) -> list[OneDeviceResult]:
    """A result for each row; ``images`` of a step, ``peak`` flops per second of matrix products."""
    reference = {name: group[0] for group in groups(list(built)) for name in group}
    results = []
    for name, one in built.items():
        whole, part = seconds.whole[name], seconds.forward_backward.get(name, [])
        median = Spread.of(whole).median
        results.append(
            OneDeviceResult(
                row=name,
                name=one.row.name,
                note=one.row.note,
                reference=reference[name],
                parameters=one.row.parameters,
                macs=one.row.macs,
                images_per_second=images / median,
                step_seconds=Spread.of(whole),
                forward_backward_seconds=Spread.of(part) if part else None,
                speed=Spread.of(ratios(seconds.whole[reference[name]], whole)),
                mfu=6 * one.row.macs * images / median / peak,
                peak_bytes=one.peak_bytes,
                loss=one.probe.loss,
                gradient_norm=one.probe.gradient_norm,
                prediction_difference=one.difference.prediction if one.difference is not None else None,
                gradient_norm_difference=one.difference.gradient_norm if one.difference is not None else None,
                round_step_seconds=whole,
                round_forward_backward_seconds=part,
            )
        )
    return results
