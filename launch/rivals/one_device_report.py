"""What ``--one-device`` found, as JSON and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddpm_ds.command_line import aligned
from ddpm_ds.experiments.data_rate import Spread
from rivals.report import NotRun

HEADER = (
    "row",
    "step ms",
    "fwd+bwd ms",
    "images/s",
    "speed",
    "MFU",
    "peak MB",
    "prediction",
    "gradient",
    "parameters",
    "MACs/image",
    "what",
)


@dataclass(frozen=True)
class OneDeviceResult:
    """One row; lists have an entry per round."""

    row: str
    """As ``--rows`` takes it."""
    name: str
    note: str
    reference: str
    """The row that :attr:`speed` and the differences are relative to."""
    parameters: int
    macs: int
    """Multiply-accumulates of one image's forward."""
    images_per_second: float
    step_seconds: Spread
    forward_backward_seconds: Spread | None
    """Of a step without its optimizer; None for an engine, which has no such step."""
    speed: Spread
    """Images per second over the reference's; above 1 it is faster."""
    mfu: float
    """Flops of forward and backward, 6 per multiply-accumulate, over what the device's matrix products do in a step."""
    peak_bytes: int | None
    """On a GPU what this row added at most; on a CPU of a process that trains it alone, None where not asked for."""
    loss: float
    gradient_norm: float
    prediction_difference: float | None
    """Norm of the difference over the norm, of the compared micro-batch; None for a U-Net of its own."""
    gradient_norm_difference: float | None
    """Relative; None for a U-Net of its own."""
    round_step_seconds: list[float]
    round_forward_backward_seconds: list[float]


@dataclass(frozen=True)
class OneDeviceReport:
    """Everything a reader needs to judge the numbers and to repeat them."""

    name: str
    """Of the spec."""
    command: str
    date: str
    machine: str
    load_before: float
    """Processes that wanted a core in the minute before (Unix load average), this one's start-up included."""
    versions: dict[str, str]
    spec: str
    overrides: list[str]
    deepspeed_config: str
    precision: str
    images: int
    """Of a step, and of its one micro-batch."""
    dropout: float
    activation_checkpoint_interval: int
    peak_flops: float
    """Of square matrix products in the arithmetic of our layers, timed in this run."""
    arithmetic: str
    tolerance: float
    """Largest relative difference of predictions and gradients that was let through."""
    rounds: int
    steps_per_round: int
    rows: list[OneDeviceResult]
    not_run: list[NotRun]
    engine_over_bare: Spread | None
    """Step time of `engine` over that of `bare`, round by round; None where one of them is missing."""

    @property
    def layout(self) -> str:
        """Who works on what."""
        return "one device"


def one_device_table(report: OneDeviceReport) -> str:
    """The report as text."""
    recompute = report.activation_checkpoint_interval
    lines = [
        f"U-Net        {report.name} with {report.deepspeed_config}, {report.precision}, dropout {report.dropout:g}",
        f"batch        {report.images} images; the engine's activation checkpointing "
        f"{f'every {recompute} layers' if recompute else 'off'}",
        f"machine      {report.machine}, load {report.load_before:.1f} before",
        f"versions     {', '.join(f'{name} {number}' for name, number in report.versions.items())}",
        f"peak         {report.peak_flops / 1e12:.4g} TFLOP/s: square matrix products in {report.arithmetic}, this run",
        f"prediction   and gradient: relative difference, seen before all was timed; allowed {report.tolerance:g}",
        f"times        {report.rounds} rounds of {report.steps_per_round} steps, rows in turn: medians (quartiles)",
        "speed        images/s over those of the first row of the same table",
        "fwd+bwd      a step without its optimizer",
        "MFU          6 flops per multiply-accumulate of a forward, over step time and peak",
    ]
    same = [row for row in report.rows if row.prediction_difference is not None]
    other = [row for row in report.rows if row.prediction_difference is None]
    for rows in (same, other):
        lines += ["", *_columns(rows)] if rows else []
    below = [f"{row.row}: {row.note}" for row in report.rows if row.note]
    if report.engine_over_bare is not None:
        below.append(f"engine over bare: {report.engine_over_bare.as_ratio()} of its step time")
    below += [f"{row.row} did not run: {row.reason}" for row in report.not_run]
    return "\n".join([*lines, *([""] if below else []), *below])


def _columns(rows: Sequence[OneDeviceResult]) -> list[str]:
    cells = [HEADER]
    for row in rows:
        first, same = row is rows[0], row.prediction_difference is not None
        cells.append(
            (
                row.row,
                row.step_seconds.as_milliseconds(),
                "-" if row.forward_backward_seconds is None else row.forward_backward_seconds.as_milliseconds(),
                f"{row.images_per_second:,.4g}",
                "1" if first else row.speed.as_ratio(),
                f"{row.mfu:.1%}",
                "" if row.peak_bytes is None else f"{row.peak_bytes / 1e6:,.0f}",
                "" if first or row.prediction_difference is None else f"{row.prediction_difference:.1e}",
                "" if first or row.gradient_norm_difference is None else f"{row.gradient_norm_difference:.1e}",
                "" if same and not first else f"{row.parameters:,}",
                "" if same and not first else f"{row.macs / 1e9:.4g} G",
                row.name,
            )
        )
    columns = [column for column in zip(*cells, strict=True) if any(column[1:])]
    return aligned(list(zip(*columns, strict=True)), left=range(len(columns)))
