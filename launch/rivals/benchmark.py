"""Benchmark: build all rows, compare their losses, time them in turn, report."""

from __future__ import annotations

import gc
import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from importlib.metadata import version
from typing import Any, get_args

import torch

from ddpm_ds.ground import units
from ddpm_ds.ground.device import described
from ddpm_ds.ground.outputs import writing
from ddpm_ds.ground.version import __version__
from ddpm_ds.pipeline.messages import all_gather_objects, barrier
from ddpm_ds.pipeline.module import forget_peaks
from ddpm_ds.planning.run_plan import RunDraft
from ddpm_ds.processes.process_group import process_group
from ddpm_ds.schema.layout import Schedule
from ddpm_ds.training.meters import peak_memory_bytes
from rivals import measure, rows
from rivals.choice import NAMED, TORCH_SCHEDULES, BenchmarkOptions
from rivals.deepspeed_rows import OurPipeline, StockPipeline
from rivals.measure import HostCost, Spread
from rivals.pipelining import TorchPipeline
from rivals.rows import Row, Setting

Facts = dict[str, Any]
"""JSON values of the report, or of a row, by name."""
SCHEDULES: dict[str, Schedule] = {name: name for name in get_args(Schedule)}
"""Schedules of this project's rows, by the rows' names."""


def build_row(name: str, setting: Setting) -> Row:
    """Return the row with a name of :data:`rivals.choice.ROWS`; every process calls this."""
    kind, _, variant = name.partition("-")
    match kind:
        case "torch":
            return TorchPipeline(setting, TORCH_SCHEDULES[name])
        case "eager":
            return OurPipeline(setting, "1f1b", graphs=False)
        case "stock":
            return StockPipeline(setting, folded=bool(variant))
        case "diffusers":
            return rows.diffusers_loop(setting, variant)
        case "plain":
            return rows.our_loop(setting)
    return OurPipeline(setting, SCHEDULES[name])


def run(
    draft: RunDraft, device: torch.device, names: Sequence[str], not_run: Mapping[str, str], options: BenchmarkOptions
) -> None:
    """Compare the losses of all rows, time them in turn, and print the report; every process calls this.

    BadNumbersError if losses differ by more than rounding. UserErrors come before any process group exists.
    """
    setting = Setting.prepare(draft, device, verbose=options.verbose)
    with process_group():
        found = _measured(setting, names, options)
        barrier()
    if os.environ["RANK"] != "0":
        return
    facts = about(setting, ["diffusers"] if set(names) & set(NAMED) else [], options, not_run)
    print(table(facts, found), flush=True)
    if options.json is not None:
        with writing(options.json, overwrite=options.overwrite) as file:
            file.write((json.dumps({**facts, "rows": found}, indent=2, default=asdict) + "\n").encode())


def _measured(setting: Setting, names: Sequence[str], options: BenchmarkOptions) -> list[Facts]:
    device, images, steps = setting.device, setting.plan.ds.layout.batch_images, options.steps_per_round
    built: list[Row] = []
    losses, peaks = [], []
    for name in names:
        before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        built.append(build_row(name, setting))
        own = []
        for step in range(options.compared_steps):  # which warm it up, too
            if step < 2:
                forget_peaks(device)  # the first step tries algorithms
            own.append(float(built[-1].step()))
        peaks.append(peak_memory_bytes(device) - before if device.type == "cuda" else None)
        losses.append([*map(sum, zip(*all_gather_objects(own, list[float]), strict=True))])
    differences = measure.check_losses(built, losses, measure.tolerance(setting.plan.ds.precision, device))
    gc.collect()
    seconds = measure.time_rounds([row.step for row in built], options.rounds, steps, device)
    found = []
    for place, (name, row) in enumerate(zip(names, built, strict=True)):
        host = HostCost.of(row.step) if options.host else None
        with measure.SentBytes() as sent:
            row.step()
        step_seconds = Spread.of(seconds[place])
        facts = {
            "row": name,
            "name": row.name,
            "note": row.note,
            "images_per_second": images / step_seconds.median,
            "step_seconds": step_seconds,
            "ratio": Spread.of([own / other for own, other in zip(seconds[place], seconds[0], strict=True)]),
            "round_step_seconds": seconds[place],
            "first_losses": losses[place],
            "largest_loss_difference": differences[place],
            "rank_message_bytes": all_gather_objects(sent.message_bytes, int),
            "rank_collective_bytes": all_gather_objects(round(sent.collective_bytes), int),
            "peak_bytes": peaks[place],
            "host": host,
        }
        found.append(facts)
    return found


def about(setting: Setting, packages: Sequence[str], options: BenchmarkOptions, not_run: Mapping[str, str]) -> Facts:
    """Return the facts with which a reader can judge and repeat the numbers."""
    plan, layout = setting.plan, setting.plan.ds.layout
    words = [word for word in sys.argv if not word.startswith(("--local_rank", "--local-rank"))]
    versions = {name: version(name) for name in sorted({"torch", "deepspeed", *packages})}
    return {
        "unet": f"{plan.parameters:,} parameters: {plan.spec.name} with {plan.ds_path}",
        "parameters": plan.parameters,
        "layout": f"{layout.world_size} processes = {layout.stages} stages x {layout.replicas} replicas",
        "batch": f"{layout.batch_images} images = {layout.micro_batch_images} x {layout.micro_batches} micro-batches"
        f" x {layout.replicas} replicas",
        "recomputed": f"{layout.checkpoint_interval} layers at a time" if layout.checkpoint_interval else "nothing",
        "machine": f"{described(1)[0]}, {os.cpu_count()} cores, {torch.get_num_threads()} threads per process",
        "versions": {"ddpm_ds": __version__, "python": platform.python_version(), **versions},
        "times": f"{options.rounds} rounds of {options.steps_per_round} steps, rows in turn: medians (quartiles)",
        "command": shlex.join(["deepspeed", "--num_gpus", os.environ["LOCAL_WORLD_SIZE"], *words]),
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "tolerance": measure.tolerance(plan.ds.precision, setting.device),
        "not_run": [{"row": row, "reason": reason} for row, reason in not_run.items()],
    }


def table(facts: Facts, found: Sequence[Facts]) -> str:
    """Return the report as text, without empty columns."""
    lines = []
    for row in found:
        first, host, difference = row is found[0], row["host"], row["largest_loss_difference"]
        sent = max(map(sum, zip(row["rank_message_bytes"], row["rank_collective_bytes"], strict=True))) / 1e6
        costs = ("operators", "launches", "calls", "waits")
        lines.append(
            {
                "row": row["row"],
                "step ms": row["step_seconds"].as_milliseconds(),
                "images/s": f"{row['images_per_second']:,.4g}",
                "time ratio": "1" if first else row["ratio"].as_ratio(),
                "sent MB": f"{sent:.2f}" if sent else "",
                "peak MB": "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:,.0f}",
                **{cost: "" if host is None else f"{getattr(host, cost):,}" for cost in costs},
                "loss difference": "" if first or difference is None else f"{difference:.1e}",
                "what": row["name"],
            }
        )
    head = [f"{name:11}{facts[name]}" for name in ("unet", "layout", "batch", "recomputed", "machine", "times")]
    head.append(f"{'versions':11}{', '.join(f'{name} {number}' for name, number in facts['versions'].items())}")
    columns = units.table(lines, left=lines[0])
    below = [f"{row['row']}: {row['note']}" for row in found if row["note"]]
    below += [f"{row['row']} did not run: {row['reason']}" for row in facts["not_run"]]
    return "\n\n".join("\n".join(block) for block in (head, columns, below) if block)
