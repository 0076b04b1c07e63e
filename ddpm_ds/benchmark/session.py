"""One benchmark from the plan to the table."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

import torch
from tqdm import tqdm

from ddpm_ds.benchmark.measure import LOSS_TOLERANCE, Spread, check_losses, first_losses, ratios, time_rounds
from ddpm_ds.benchmark.report import Report, RowResult, batch_line, machine, table, versions
from ddpm_ds.benchmark.rows import PipelineEngine, PlainLoop, Row
from ddpm_ds.data.prepare import prepare
from ddpm_ds.pipeline.host_accelerator import use_host_accelerator
from ddpm_ds.train.plan import RunPlan
from ddpm_ds.train.session import check_store, fill_checkpointing, process_group, share_threads


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    rounds: int
    steps_per_round: int
    compared_steps: int


def run_benchmark(
    plan: RunPlan,
    device: torch.device,
    effort: Effort,
    *,
    command: str,
    overrides: Sequence[str],
    json_path: Path | None,
    verbose: bool,
) -> Report:
    """Compare losses, time the rows in turn, print the table and write the JSON.

    Raises:
        UserError: something given is wrong; raised before any process group exists.
        BadNumbersError: the rows' losses differ by more than rounding.
    """
    load_before = os.getloadavg()[0]
    use_host_accelerator()
    share_threads(device)
    store = prepare(plan.spec.data, progress=True)
    check_store(store, plan)

    with process_group():
        config = fill_checkpointing(plan, device)
        rows: list[Row] = [
            PlainLoop(plan, store, device),
            PipelineEngine(plan, store, device, config, verbose=verbose),
        ]
        losses = first_losses(rows, effort.compared_steps)
        differences = check_losses(rows, losses, LOSS_TOLERANCE[plan.ds.precision])
        gc.collect()
        with tqdm(total=effort.rounds, desc="measuring", unit="round", disable=None) as bar:
            seconds = time_rounds(
                rows,
                rounds=effort.rounds,
                steps=effort.steps_per_round,
                synchronize=lambda: torch.cuda.synchronize(device) if device.type == "cuda" else None,
                after_round=bar.update,
            )

    report = Report(
        name=plan.spec.name,
        command=command,
        date=datetime.now().astimezone().isoformat(timespec="seconds"),
        machine=machine(device),
        load_before=load_before,
        versions=versions(),
        spec=str(plan.spec_path),
        overrides=list(overrides),
        deepspeed_config=str(plan.ds_path),
        parameters=plan.parameters,
        batch=batch_line(plan),
        activation_checkpoint_interval=config["pipeline"]["activation_checkpoint_interval"],
        rounds=effort.rounds,
        steps_per_round=effort.steps_per_round,
        rows=[
            RowResult(
                name=row.name,
                images_per_second=plan.ds.layout.batch_images / Spread.of(own).median,
                step_seconds=Spread.of(own),
                ratio=Spread.of(ratios(own, seconds[0])),
                round_step_seconds=own,
                first_losses=own_losses,
                largest_loss_difference=difference,
            )
            for row, own, own_losses, difference in zip(rows, seconds, losses, differences, strict=True)
        ],
    )
    print(table(report), flush=True)
    if json_path is not None:
        json_path.write_text(json.dumps(asdict(report), indent=2) + "\n")
    return report
