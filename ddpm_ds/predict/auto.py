"""Decisions that a run on the present devices leaves to the planner: the number of stages, and the cuts.

``"stages": "auto"`` is the number of stages with which a step is fastest, by computed times of layers, so that all
processes get the same answer before they communicate. ``"partition": "measured"`` are the cuts by measured times.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddpm_ds.config.ds_config import Layout, ResolvedDsConfig, divisors, precision, resolve
from ddpm_ds.config.spec import RunSpec
from ddpm_ds.errors import LayoutError
from ddpm_ds.observe.device_speed import LayerTimes
from ddpm_ds.pipeline.cuts import partition
from ddpm_ds.pipeline.placement import across_hosts, launched_hosts
from ddpm_ds.pipeline.schedule import Program
from ddpm_ds.predict.costs import APART, link
from ddpm_ds.predict.finished_run import mean_ranks
from ddpm_ds.predict.layouts import Workload
from ddpm_ds.predict.machine import machine, most_alike, this_machine
from ddpm_ds.predict.predictor import Predictor
from ddpm_ds.predict.scheduler import order_of
from ddpm_ds.predict.search import search
from ddpm_ds.predict.simulate import PhaseCosts


def choose_stages(spec: RunSpec, config: dict[str, Any], path: Path, *, world_size: int) -> tuple[int, str]:
    """Return the planner's number of stages for ``world_size`` processes on hosts like this one, and the reason.

    Raises:
        DsConfigError: the JSON contradicts the spec.
        LayoutError: no number of stages shares the processes, the batch and the layers, or none fits the memory.
    """
    accepted, refusal = [], LayoutError(f"{world_size} processes can't be laid out")
    for stages in divisors(world_size):
        try:
            accepted.append(resolve(config, spec, world_size=world_size, stages=stages, path=path))
        except LayoutError as error:
            refusal = error
    if not accepted:
        raise refusal
    predictor = _predictor(spec, config, world_size)
    among = [layout for ds in accepted for layout in _layouts(ds, predictor)]
    first, *others = search(predictor, len(accepted), among).best
    why = f"on {predictor.machine.kind} {first.layout.words()} would take {first.step_seconds:.3g} s a step"
    if others:
        why += f", {others[0].layout.words()} {others[0].step_seconds:.3g} s"
    return first.layout.stages, f"{why}; -p chooses otherwise"


def measured_cuts(spec: RunSpec, ds: ResolvedDsConfig, times: Callable[[Workload], LayerTimes]) -> tuple[int, ...]:
    """Return the bounds that make the slowest rank's timed layers and transfers fastest, within its memory if possible.

    Raises:
        LayoutError: the U-Net can't be cut into so many stages.
    """
    predictor = _predictor(spec, ds.blocks, ds.layout.world_size, times)
    layouts = _layouts(ds, predictor)
    if not layouts:
        count = len(predictor.job.layers)
        raise LayoutError(f"the U-Net's {count} layers can't be cut into {ds.layout.stages} stages; use fewer")
    best = next((layout for layout in layouts if predictor.fits(layout)), None)
    if best is not None:
        predictor.improve(best)
    return predictor.bounds(best or layouts[-1])


def planned_order(
    spec: RunSpec, ds: ResolvedDsConfig, bounds: tuple[int, ...], times: Callable[[Workload], LayerTimes] | None = None
) -> tuple[Program, ...]:
    """Return the programs of a decided run that :attr:`ResolvedDsConfig.is_ordered`.

    ``times`` measures layers; without it their seconds are computed.
    """
    predictor = _predictor(spec, ds.blocks, ds.layout.world_size, times)
    made = predictor.programs(replace(ds.layout, checkpoint_interval=int(ds.layout.checkpoint_interval)), bounds)
    assert made is not None
    return made


def planned_again(
    spec: RunSpec, ds: ResolvedDsConfig, bounds: tuple[int, ...], summary: Mapping[str, Any]
) -> tuple[Program, ...]:
    """Return the programs of a planned schedule by the seconds of a trace's summary.

    Two parts of a backward are not measured, and have their computed share of it: weight gradients in whole backwards,
    and what a pass of weight gradients takes once for all its micro-batches.
    """
    predictor = _predictor(spec, ds.blocks, ds.layout.world_size)
    layout = replace(ds.layout, checkpoint_interval=int(ds.layout.checkpoint_interval))

    def divided(found: PhaseCosts, expected: PhaseCosts) -> PhaseCosts:
        whole = expected.weight_seconds + expected.weight_pass_seconds
        weights = found.weight_seconds or found.backward_seconds * whole / expected.backward_seconds
        once = weights * expected.weight_pass_seconds / whole if whole else 0.0
        apart = APART * weights
        return replace(found, weight_seconds=weights - once, weight_pass_seconds=once, apart_seconds=apart)

    costs = [
        replace(found, phases=tuple(map(divided, found.phases, own.phases)))
        for found, own in zip(mean_ranks(summary), predictor.costs(layout, bounds), strict=True)
    ]
    made = order_of(layout, costs, link(predictor.machine, layout))
    assert made is not None
    return made


def _predictor(
    spec: RunSpec, config: Mapping[str, Any], world_size: int, times: Callable[[Workload], LayerTimes] | None = None
) -> Predictor:
    """Return a predictor for processes on hosts like this one, with the layers' computed times unless given others."""
    kind, memory = this_machine(int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))
    half, nodes = precision(config) != "fp32", len(set(launched_hosts(world_size))) or 1
    devices = machine(kind or most_alike(memory), half=half, devices=world_size, nodes=nodes)
    devices = replace(devices, memory_bytes=memory)
    job = Workload(spec, config, devices.is_cpu)
    return Predictor(job, devices, times(job) if times else None)


def _layouts(ds: ResolvedDsConfig, predictor: Predictor) -> list[Layout]:
    """Return a configuration's layouts, with and without recomputation if that is open; none without cuts."""
    intervals = (0, 1) if ds.layout.checkpoint_interval == "auto" else (ds.layout.checkpoint_interval,)
    layouts = [replace(ds.layout, checkpoint_interval=interval) for interval in intervals]
    if predictor.cut(layouts[0]) is None:
        return []
    hosts, layers = launched_hosts(ds.layout.world_size), predictor.job.layers
    if len(set(hosts)) > 1 and min(ds.layout.stages, ds.layout.replicas) > 1:
        bounds = partition(layers, ds.layout.stages, ds.planned_partition, ds.layout.schedule)
        layouts = [replace(layout, across_hosts=across_hosts(ds, layers, bounds, hosts)) for layout in layouts]
    return layouts
