"""Decisions that a run leaves to the planner: stages, cuts, order, recomputation and micro-batches in flight.

Each is a pure function of a predictor, or of a job and the memory of its devices. Computed times of layers give the
same answer to all processes before they communicate; measured ones differ, so rank 0 decides for all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddpm_ds.config.ds_config import Layout, ResolvedDsConfig, divisors, resolve
from ddpm_ds.errors import LayoutError
from ddpm_ds.pipeline.cuts import partition
from ddpm_ds.pipeline.placement import across_hosts
from ddpm_ds.pipeline.schedule import Program
from ddpm_ds.predict.costs import SPLIT_COST, link
from ddpm_ds.predict.finished_run import mean_ranks
from ddpm_ds.predict.layouts import Workload
from ddpm_ds.predict.machine import usable
from ddpm_ds.predict.memory import checkpoint_interval, peak_bytes
from ddpm_ds.predict.predictor import Predictor
from ddpm_ds.predict.scheduler import order_of
from ddpm_ds.predict.search import search
from ddpm_ds.predict.simulate import PhaseCosts


def choose_stages(predictor: Predictor, path: Path | str, hosts: Sequence[str]) -> tuple[int, str]:
    """Return the number of stages with which a step is fastest on the predictor's devices, and the reason.

    ``path`` is that of the DeepSpeed JSON, for messages; ``hosts`` has the host of each global rank.

    Raises:
        DsConfigError: the JSON contradicts the spec.
        LayoutError: no number of stages shares the processes, the batch and the layers, or none fits the memory.
    """
    job, world_size = predictor.job, predictor.machine.devices
    accepted, refusal = [], LayoutError(f"{world_size} processes can't be laid out")
    for stages in divisors(world_size):
        try:
            accepted.append(resolve(dict(job.config), job.spec, world_size=world_size, stages=stages, path=path))
        except LayoutError as error:
            refusal = error
    if not accepted:
        raise refusal
    among = [layout for ds in accepted for layout in _layouts(ds, predictor, hosts)]
    first, *others = search(predictor, len(accepted), among).best
    why = f"on {predictor.machine.kind} {first.layout.words()} would take {first.step_seconds:.3g} s a step"
    if others:
        why += f", {others[0].layout.words()} {others[0].step_seconds:.3g} s"
    return first.layout.stages, f"{why}; -p chooses otherwise"


def measured_cuts(predictor: Predictor, ds: ResolvedDsConfig) -> tuple[int, ...]:
    """Return the bounds that make the slowest rank's layers and transfers fastest, within its memory if possible.

    Raises:
        LayoutError: the U-Net can't be cut into so many stages.
    """
    layouts = _layouts(ds, predictor, ())
    if not layouts:
        count = len(predictor.job.layers)
        raise LayoutError(f"the U-Net's {count} layers can't be cut into {ds.layout.stages} stages; use fewer")
    best = next((layout for layout in layouts if predictor.fits(layout)), None)
    if best is not None:
        predictor.improve(best)
    return predictor.bounds(best or layouts[-1])


def planned_order(predictor: Predictor, layout: Layout, bounds: tuple[int, ...]) -> tuple[Program, ...]:
    """Return the programs of a decided run that :attr:`ddpm_ds.config.ds_config.ResolvedDsConfig.is_ordered`."""
    made = predictor.programs(layout, bounds)
    assert made is not None
    return made


def planned_again(
    predictor: Predictor, layout: Layout, bounds: tuple[int, ...], summary: Mapping[str, Any]
) -> tuple[Program, ...]:
    """Return the programs of a planned schedule by the seconds of a trace's summary.

    Two parts of a backward are not measured, and have their computed share of it: weight gradients in whole backwards,
    and what a pass of weight gradients takes once for all its micro-batches.
    """

    def divided(found: PhaseCosts, expected: PhaseCosts) -> PhaseCosts:
        whole = expected.weight_seconds + expected.weight_pass_seconds
        weights = found.weight_seconds or found.backward_seconds * whole / expected.backward_seconds
        once = weights * expected.weight_pass_seconds / whole if whole else 0.0
        split = SPLIT_COST * weights
        return replace(found, weight_seconds=weights - once, weight_pass_seconds=once, split_seconds=split)

    costs = [
        replace(found, phases=tuple(map(divided, found.phases, own.phases)))
        for found, own in zip(mean_ranks(summary), predictor.costs(layout, bounds), strict=True)
    ]
    made = order_of(layout, costs, link(predictor.machine, layout))
    assert made is not None
    return made


def fitted(job: Workload, layout: Layout, bounds: Sequence[int], memory_bytes: int) -> Layout:
    """Return a layout with the recomputation and the number of micro-batches in flight that a device's memory needs."""
    interval, in_flight = layout.checkpoint_interval, layout.in_flight
    if interval == "auto":
        fewest = replace(layout, checkpoint_interval=0, in_flight=layout.stages if in_flight == "auto" else in_flight)
        interval = checkpoint_interval(job, fewest, bounds, memory_bytes)
    layout = replace(layout, checkpoint_interval=interval)
    if in_flight == "auto" and layout.schedule == "planned":
        fits = peak_bytes(job, layout, bounds) <= usable(memory_bytes, on_cpu=job.on_cpu)
        layout = replace(layout, in_flight=layout.most_held if fits else layout.stages)
    return layout


def _layouts(ds: ResolvedDsConfig, predictor: Predictor, hosts: Sequence[str]) -> list[Layout]:
    """Return a configuration's layouts, with and without recomputation if that is open; none without cuts."""
    intervals = (0, 1) if ds.layout.checkpoint_interval == "auto" else (ds.layout.interval,)
    layouts = [replace(ds.layout, checkpoint_interval=interval) for interval in intervals]
    if predictor.cut(layouts[0]) is None:
        return []
    if len(set(hosts)) > 1 and min(ds.layout.stages, ds.layout.replicas) > 1:
        layers = predictor.job.layers
        bounds = partition(layers, ds.layout.stages, ds.planned_partition, ds.layout.schedule)
        across = across_hosts(ds, layers, bounds, hosts)
        layouts = [replace(layout, across_hosts=across) for layout in layouts]
    return layouts
