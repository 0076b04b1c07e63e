"""Rows of ``--one-device``: which can run here, from a name to the row, and what each computes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ddpm_ds.data.loader import MicroBatch
from ddpm_ds.device import wait_for_device
from ddpm_ds.errors import BadNumbersError, LayoutError
from ddpm_ds.train.setting import Setting
from rivals.abilities import Abilities, abilities, why_not_here
from rivals.loops import UnetProbe
from rivals.memory import PeakMemory, peak_in_child
from rivals.one_device_choice import COMPILED, ONE_DEVICE_ROWS, ONE_SWITCH, OTHER_UNETS, Switches
from rivals.probes import Difference, check_probes
from rivals.rows import Row
from rivals.rows_one_device import OneStageEngine, OurLoop, Start, engine_switches
from rivals.rows_other_unets import DiffusersLoop, LucidrainsLoop, dim64

WARM_STEPS = 2
"""Steps before the first that is timed: one may compile, and the optimizer's state is there from the second on."""


class OneDeviceRow(Row, Protocol):
    """A row that can be asked what it computes."""

    parameters: int
    macs: int
    """Multiply-accumulates of one image's forward."""

    @property
    def forward_backward(self) -> Callable[[], Tensor] | None:
        """A step without the optimizer; None where there is no such step."""

    def probe(self, micro_batch: MicroBatch) -> UnetProbe:
        """What it makes of ``micro_batch`` without dropout."""


@dataclass(frozen=True)
class Built:
    """A row that is warm."""

    row: OneDeviceRow
    probe: UnetProbe
    difference: Difference | None
    """From the first row of the same U-Net; None for a U-Net of its own."""
    warm_seconds: float
    """Of its last warm step."""
    peak_bytes: int | None


def choose(names: Sequence[str] | None, setting: Setting) -> tuple[Abilities, list[str], dict[str, str]]:
    """What the device can do, the rows that run, and those that don't with the reasons.

    ``names`` None asks for all, but on a CPU for nothing that is compiled.

    Raises:
        LayoutError: none can run.
    """
    asked = list(names or ONE_DEVICE_ROWS)
    named = not set(COMPILED).isdisjoint(names or ())
    able = abilities(setting.device, compiled=named or setting.device.type == "cuda")
    reasons = {name: reason for name in asked if (reason := why_not_here(name, setting, able)) is not None}
    if len(reasons) == len(asked):
        said = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise LayoutError(f"--rows {','.join(asked)} leaves nothing to run: {said}")
    return able, [name for name in asked if name not in reasons], reasons


def build_one_device_row(name: str, start: Start, able: Abilities) -> OneDeviceRow:
    """The row with a name of :data:`rivals.one_device_choice.ONE_DEVICE_ROWS`."""
    fused, compiled = able.why_not_fused is None, able.why_not_compiled is None
    match name:
        case "diffusers" | "diffusers-compiled":
            return DiffusersLoop(start, compiled=name == "diffusers-compiled")
        case "all":
            return OurLoop(start, Switches(True, fused, compiled=compiled, fused_adamw=True))
        case "bare":
            return OurLoop(start, engine_switches(start.setting))
        case "engine":
            return OneStageEngine(start)
        case "lucidrains":
            return LucidrainsLoop(start.setting)
        case "ours-dim64":
            return OurLoop(Start.of(dim64(start.setting)), Switches(True, fused, fused_adamw=True))
    copied = "its convolutions' weights are kept channels-last and copied in every forward" if name == "plain" else ""
    return OurLoop(start, ONE_SWITCH[name], copied)


def build_all(
    names: Iterable[str],
    setting: Setting,
    able: Abilities,
    allowed: float,
    *,
    memory: bool,
    after_row: Callable[[], object],
) -> dict[str, Built]:
    """All rows, compared with each other and warm; they live side by side.

    Raises:
        BadNumbersError: two rows of the same U-Net differ by more than ``allowed``, or an output is not finite.
        LayoutError: they don't fit the device together.
    """
    start = Start.of(setting)
    micro_batch = next(setting.batches(1, 0))
    built: dict[str, Built] = {}
    probes: dict[str, UnetProbe] = {}
    for name in names:
        in_child = peak_in_child(name) if memory and setting.device.type == "cpu" else None
        try:
            row, probe, seconds, peak = _warmed(name, start, able, micro_batch)
        except torch.OutOfMemoryError:
            raise LayoutError(
                f"row {name} no longer fits the device beside {', '.join(built) or 'nothing'}; name fewer rows in "
                f"--rows, or take less than --images {setting.plan.ds.layout.micro_batch_images}"
            ) from None
        difference = None
        if name not in OTHER_UNETS:
            probes[name] = probe
            difference = check_probes(probes, allowed)[name]
        elif not math.isfinite(probe.loss + probe.gradient_norm):
            raise BadNumbersError(f"{name} has loss {probe.loss} and gradients of norm {probe.gradient_norm}")
        built[name] = Built(row, probe, difference, seconds, in_child if peak is None else peak)
        after_row()
    return built


def _warmed(
    name: str, start: Start, able: Abilities, micro_batch: MicroBatch
) -> tuple[OneDeviceRow, UnetProbe, float, int | None]:
    """A row, its outputs, the seconds of a warm step, and what it has added to the GPU's memory at most."""
    device = start.setting.device
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    memory = PeakMemory(device)
    row = build_one_device_row(name, start, able)
    probe = row.probe(micro_batch)
    seconds = 0.0
    for _ in range(WARM_STEPS):
        memory.begin_step()
        begin = time.perf_counter()
        row.step()
        wait_for_device(device)
        seconds = time.perf_counter() - begin
    return row, probe, seconds, memory.bytes() - before if device.type == "cuda" else None
