"""Search for the fastest layouts that fit: memory first, then only those that could be fast are simulated."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ddpm_ds.command_line import GIB, gib
from ddpm_ds.config.ds_config import resolve
from ddpm_ds.errors import LayoutError, UserError
from ddpm_ds.predict.layouts import Candidate, Workload, ds_config, layouts
from ddpm_ds.predict.predictor import Prediction, Predictor


@dataclass(frozen=True)
class Plan:
    """Result of a search."""

    best: tuple[Prediction, ...]
    """Fastest layouts first, each with another number of stages, schedule or micro-batch than those before it."""
    fitting: int
    """Number of layouts that fit the memory."""
    misfits: int
    """Number of layouts that don't fit the memory."""
    tempting: Prediction | None
    """Fastest of the layouts that don't fit, where it would beat the best."""
    turned: Prediction | None = None
    """Best layout with its other axis across nodes, where there are several."""


def search(predictor: Predictor, top: int, among: Sequence[Candidate] | None = None) -> Plan:
    """Return the ``top`` fastest layouts, of all or of ``among``, that fit.

    Of layouts that differ only in ZeRO, offload or checkpointing, the best stands for all.

    Raises:
        LayoutError: no layout divides devices, layers and batch, or none fits; the message names the nearest.
    """
    fitting, misfits = sort_out(predictor, candidates(predictor) if among is None else among)
    if not fitting:
        raise _nothing(predictor, misfits)
    best = _fastest(predictor, fitting, top)
    tempting = _tempting(predictor, misfits, best[0].step_seconds)
    return Plan(best, len(fitting), len(misfits), tempting, _turned(predictor, best[0].layout))


def candidates(predictor: Predictor) -> list[Candidate]:
    """Return layouts that training accepts; of the intervals between kept activations the one that needs
    least memory.
    """
    chosen: list[Candidate] = []
    recomputing: dict[Candidate, tuple[int, Candidate]] = {}
    accepted: dict[tuple[str, int, bool, int], bool] = {}
    machine = predictor.machine
    for layout in layouts(predictor.job, machine.devices, offload=not machine.is_cpu, nodes=machine.nodes):
        if not predictor.can_cut(layout):
            continue
        kind = (layout.schedule, layout.zero_stage, layout.offload, layout.checkpoint_interval)
        if kind not in accepted:
            accepted[kind] = _is_accepted(predictor, layout)
        if not accepted[kind]:
            continue
        if not layout.checkpoint_interval:
            chosen.append(layout)
            continue
        like, needs = replace(layout, checkpoint_interval=1), _needs(predictor, layout)
        if like not in recomputing or needs < recomputing[like][0]:
            recomputing[like] = needs, layout
    return chosen + [layout for _, layout in recomputing.values()]


def sort_out(predictor: Predictor, considered: Sequence[Candidate]) -> tuple[list[Candidate], list[Candidate]]:
    """Return the layouts that fit the devices' memory, and those that don't."""
    fitting: list[Candidate] = []
    misfits: list[Candidate] = []
    for layout in considered:
        (fitting if predictor.fits(layout) else misfits).append(layout)
    return fitting, misfits


def _needs(predictor: Predictor, layout: Candidate) -> int:
    """Return the bytes that the fullest rank holds."""
    return max(memory.total for memory in predictor.memory(layout))


def _fastest(predictor: Predictor, fitting: Sequence[Candidate], top: int) -> tuple[Prediction, ...]:
    """Predict in the order of lower bounds until no other can be among the fastest."""
    best: dict[tuple[int, str, int], Prediction] = {}
    limit = float("inf")
    for bound, layout in sorted(((predictor.lower_bound(one), one) for one in fitting), key=lambda pair: pair[0]):
        if bound > limit:
            break
        prediction = predictor.predict(layout)
        key = (layout.stages, layout.schedule, layout.micro_batch_images)
        if key not in best or _order(prediction) < _order(best[key]):
            best[key] = prediction
        if len(best) >= top:
            limit = sorted(one.step_seconds for one in best.values())[top - 1]
    return tuple(sorted(best.values(), key=_order)[:top])


def _turned(predictor: Predictor, layout: Candidate) -> Prediction | None:
    if layout.across == "auto":
        return None
    return predictor.predict(replace(layout, across="replicas" if layout.across == "stages" else "stages"))


def _order(prediction: Prediction) -> tuple[float, int]:
    """Sort key: the fastest first, and of equally fast ones the one that needs least memory."""
    return prediction.step_seconds, prediction.peak.total


def _tempting(predictor: Predictor, misfits: Sequence[Candidate], limit: float) -> Prediction | None:
    """Return the fastest misfit below ``limit`` seconds, among micro-batches whose layers have been timed.

    Timing others would take long and tell little.
    """
    timed = [(predictor.lower_bound(layout), layout) for layout in misfits if predictor.knows_times(layout)]
    best: Prediction | None = None
    for bound, layout in sorted(timed, key=lambda pair: pair[0]):
        if bound >= limit:
            break
        prediction = predictor.predict(layout)
        if prediction.step_seconds < limit:
            best, limit = prediction, prediction.step_seconds
    return best


def _is_accepted(predictor: Predictor, layout: Candidate) -> bool:
    """Whether training would accept a layout's JSON."""
    job, world_size = predictor.job, layout.stages * layout.replicas
    config = ds_config(job, layout, predictor.bounds(layout))
    try:
        resolve(config, job.spec, world_size=world_size, stages=None, path="plan")
    except UserError:
        return False
    return True


def _nothing(predictor: Predictor, misfits: Sequence[Candidate]) -> LayoutError:
    """Return the error for no layout that fits the memory."""
    job, machine = predictor.job, predictor.machine
    if not misfits:
        return _unshared(job, machine.devices)
    nearest = min(misfits, key=lambda layout: _needs(predictor, layout))
    needs, rank = max((memory.total, -rank) for rank, memory in enumerate(predictor.memory(nearest)))
    device = machine.memory_bytes * needs / machine.usable_bytes
    return LayoutError(
        f"nothing fits {machine.devices} devices of {gib(machine.memory_bytes)} ({gib(machine.usable_bytes)} of it "
        f"usable); the nearest, {nearest.words()}, is {gib(needs - machine.usable_bytes)} over on rank {-rank}; use "
        f"more devices, devices of {_rounded_up(device)} or a smaller train.batch_images"
    )


def _unshared(job: Workload, devices: int) -> LayoutError:
    """Return the error for devices, layers and batch without a common layout, whatever the memory."""
    batch, wanted = job.spec.train.batch_images, job.spec.train.accumulation
    if wanted != "auto":
        return LayoutError(
            f"train.accumulation = {json.dumps(wanted)} and train.batch_images = {batch} leave no layout on "
            f"{devices} devices; use --set train.accumulation=auto or another batch"
        )
    return LayoutError(
        f"--devices {devices} can't share train.batch_images = {batch} and the U-Net's {len(job.layers)} layers; use "
        f"--set train.batch_images={-(-batch // devices) * devices} or another number of devices"
    )


def _rounded_up(size: float) -> str:
    """Return a size as ``--device-memory`` takes it, not smaller."""
    return f"{-(-int(size) * 10 // GIB) / 10}GiB" if size >= GIB else f"{int(size) // 2**20 + 1}MiB"
