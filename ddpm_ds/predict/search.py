"""Search for the fastest layouts that fit: memory is checked first, then only promising layouts are simulated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ddpm_ds.command_line import GIB, gib
from ddpm_ds.config.ds_config import AcrossHosts, Layout, resolve
from ddpm_ds.errors import DsConfigError, LayoutError, UserError
from ddpm_ds.predict.layouts import ds_config, layouts
from ddpm_ds.predict.memory import peak_bytes, pipeline_memory
from ddpm_ds.predict.predictor import Prediction, Predictor


@dataclass(frozen=True)
class Plan:
    """Result of a search."""

    predictor: Predictor = field(repr=False)
    """Predictor of the job on its machine, which knows the details of each layout."""
    best: tuple[Prediction, ...]
    """Fastest layouts first, each differing from those before it in stages, schedule or micro-batch."""
    fitting: int
    """Number of layouts that fit the memory."""
    misfits: int
    """Number of layouts that don't fit the memory."""
    fastest_misfit: Prediction | None
    """Fastest layout that doesn't fit, if it would beat the best."""
    other_axis: Prediction | None = None
    """Best layout with the other axis across nodes, if there are several nodes."""

    def ds_config(self, number: int = 0) -> dict[str, Any]:
        """Return the DeepSpeed JSON that trains with layout ``number`` of the best.

        Raises:
            LayoutError: there is no such layout.
        """
        if number not in range(len(self.best)):
            raise LayoutError(f"number = {number!r} is no layout of the plan; use one from 0 to {len(self.best) - 1}")
        layout = self.best[number].layout
        return ds_config(self.predictor.job, layout, self.predictor.bounds(layout))


def search(predictor: Predictor, top: int, among: Sequence[Layout] | None = None) -> Plan:
    """Return the ``top`` fastest layouts that fit, among all or ``among``.

    Of layouts that differ only in ZeRO, offload or checkpointing, only the best is returned.

    Raises:
        LayoutError: no layout divides devices, layers and batch, or none fits; the message names the nearest.
    """
    fitting, misfits = sort_out(predictor, candidates(predictor) if among is None else among)
    if not fitting:
        raise _nothing(predictor, misfits)
    best, other_axis = _fastest(predictor, fitting, top), None
    if (across := best[0].layout.across_hosts) != "auto":
        other: AcrossHosts = "replicas" if across == "stages" else "stages"
        other_axis = predictor.predict(replace(best[0].layout, across_hosts=other))
    limit = best[0].step_seconds
    known = [layout for layout in misfits if predictor.knows_times(layout)]  # timing others would take long
    faster = (one for one in _fastest(predictor, known, 1, limit) if one.step_seconds < limit)
    return Plan(predictor, best, len(fitting), len(misfits), next(faster, None), other_axis)


def candidates(predictor: Predictor, path: Path | str = "plan", among: Sequence[Layout] | None = None) -> list[Layout]:
    """Return layouts that training accepts; those that recompute have the interval that needs least memory.

    ``path`` is that of the DeepSpeed JSON, for messages. The layouts are all of the job, or ``among``.

    Raises:
        DsConfigError: training would refuse the JSON with every layout.
    """
    chosen: list[Layout] = []
    recomputing: dict[Layout, tuple[int, Layout]] = {}
    refusals: dict[tuple[str, int, bool, int], UserError | None] = {}
    machine = predictor.machine
    if among is None:
        among = [*layouts(predictor.job, machine.devices, offload=not machine.is_cpu, nodes=machine.nodes)]
    for layout in tqdm(among, "cutting the U-Net", unit=" layouts", delay=3, leave=False, disable=None):
        if predictor.cut(layout) is None:
            continue
        kind = (layout.schedule, layout.zero_stage, layout.offload, layout.interval)
        if kind not in refusals:
            refusals[kind] = _refusal(predictor, layout, path)
        if refusals[kind] is not None:
            continue
        if layout.checkpoint_interval:
            like, needs = replace(layout, checkpoint_interval=1), _needs(predictor, layout)
            recomputing[like] = min(recomputing.get(like, (needs, layout)), (needs, layout), key=lambda pair: pair[0])
        else:
            chosen.append(layout)
    if all(refusals.values()):
        for refusal in refusals.values():
            if isinstance(refusal, DsConfigError):
                raise refusal
    return chosen + [layout for _, layout in recomputing.values()]


def sort_out(predictor: Predictor, considered: Sequence[Layout]) -> tuple[list[Layout], list[Layout]]:
    """Return the layouts that fit the devices' memory, and those that don't."""
    fitting: list[Layout] = []
    misfits: list[Layout] = []
    for layout in tqdm(considered, "computing memory", unit=" layouts", delay=3, leave=False, disable=None):
        (fitting if predictor.fits(layout) else misfits).append(layout)
    return fitting, misfits


def _needs(predictor: Predictor, layout: Layout) -> int:
    """Return the bytes on the rank that holds the most."""
    return peak_bytes(predictor.job, layout, predictor.bounds(layout))


def _fastest(
    predictor: Predictor, among: Sequence[Layout], top: int, limit: float = math.inf
) -> tuple[Prediction, ...]:
    """Predict in the order of lower bounds until no other can be among the fastest, or faster than ``limit``."""
    best: dict[tuple[int, str, int], Prediction] = {}
    for bound, layout in sorted(((predictor.lower_bound(one), one) for one in among), key=lambda pair: pair[0]):
        if bound > limit:
            break
        prediction = predictor.predict(layout)
        key = (layout.stages, layout.schedule, layout.micro_batch_images)
        if key not in best or _order(prediction) < _order(best[key]):
            best[key] = prediction
        if len(best) >= top:
            limit = min(limit, sorted(one.step_seconds for one in best.values())[top - 1])
    return tuple(sorted(best.values(), key=_order)[:top])


def _order(prediction: Prediction) -> tuple[float, int]:
    """Return the sort key: seconds first, then memory."""
    return prediction.step_seconds, prediction.peak.total


def _refusal(predictor: Predictor, layout: Layout, path: Path | str) -> UserError | None:
    """Return the error with which training would refuse a layout's JSON, or None if it would accept it."""
    config = ds_config(predictor.job, layout, predictor.bounds(layout))
    try:
        resolve(config, predictor.job.spec, world_size=layout.stages * layout.replicas, stages=None, path=path)
    except UserError as error:
        return error
    return None


def _nothing(predictor: Predictor, misfits: Sequence[Layout]) -> LayoutError:
    """Return the error for no layout that divides devices, layers and batch, or none that fits the memory."""
    job, machine = predictor.job, predictor.machine
    batch, wanted, devices = job.spec.train.batch_images, job.spec.train.accumulation, machine.devices
    if not misfits and wanted != "auto":
        return LayoutError(
            f"train.accumulation = {wanted} and train.batch_images = {batch} leave no layout on {devices} devices; use "
            f"--set train.accumulation=auto or another batch"
        )
    if not misfits:
        return LayoutError(
            f"--processes {devices} can't share train.batch_images = {batch} and the U-Net's {len(job.layers)} layers; "
            f"use --set train.batch_images={-(-batch // devices) * devices} or another number of devices"
        )
    nearest = min(misfits, key=lambda layout: _needs(predictor, layout))
    totals = [memory.total for memory in pipeline_memory(job, nearest, predictor.bounds(nearest))]
    needs, rank = max(totals), totals.index(max(totals))
    device = machine.memory_bytes * needs / max(machine.usable_bytes, 1)
    return LayoutError(
        f"nothing fits {devices} devices of {gib(machine.memory_bytes)} ({gib(machine.usable_bytes)} of it usable); "
        f"the nearest, {nearest.words()}, is {gib(needs - machine.usable_bytes)} over on rank {rank}; use more "
        f"devices, devices of {_rounded_up(device)} or a smaller train.batch_images"
    )


def _rounded_up(size: float) -> str:
    """Format a size for ``--device-memory``, rounded up."""
    return f"{-(-int(size) * 10 // GIB) / 10}GiB" if size >= GIB else f"{int(size) // 2**20 + 1}MiB"
