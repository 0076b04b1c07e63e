"""What is left to the planner in a run on the devices that are there: the number of stages, and the cuts.

``"stages": "auto"`` is the number of stages with which a step is fastest. Everything else, the schedule, the
micro-batch, ZeRO, is as the JSON and the spec say. Layers' times are computed, so that all processes come to the same
answer before they have met. ``"partition": "measured"`` are the cuts by times that one of them has measured.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpm_ds.config.ds_config import ResolvedDsConfig, resolve
from ddpm_ds.config.spec import RunSpec
from ddpm_ds.device import choose_device
from ddpm_ds.errors import LayoutError
from ddpm_ds.pipeline.cuts import partition
from ddpm_ds.pipeline.placement import across_hosts, launched_hosts
from ddpm_ds.predict.machine import Machine, machine, most_alike, this_machine

if TYPE_CHECKING:
    from ddpm_ds.observe.device_speed import LayerTimes
    from ddpm_ds.predict.layouts import Candidate
    from ddpm_ds.predict.predictor import Predictor
    from ddpm_ds.predict.workload import Workload


@dataclass(frozen=True)
class Choice:
    """A number of stages, and why."""

    stages: int
    why: str


def choose_stages(
    spec: RunSpec,
    config: dict[str, Any],
    path: Path,
    *,
    world_size: int,
    device: str = "auto",
) -> Choice:
    """The planner's choice for ``world_size`` processes on hosts like this one; ``device`` as ``--device`` takes it.

    Raises:
        DsConfigError: the JSON contradicts the spec.
        LayoutError: no number of stages shares the processes, the batch and the layers, or none fits the memory.
    """
    accepted, refusal = [], LayoutError(f"{world_size} processes can't be laid out")
    for stages in (count for count in range(1, world_size + 1) if world_size % count == 0):
        try:
            accepted.append(resolve(config, spec, world_size=world_size, stages=stages, path=path))
        except LayoutError as error:
            refusal = error
    if not accepted:
        raise refusal
    choose_device(device)  # before DeepSpeed, whose streams the planner walks, is imported
    return _fastest(spec, config, path, accepted)


def _fastest(spec: RunSpec, config: dict[str, Any], path: Path, accepted: list[ResolvedDsConfig]) -> Choice:
    from ddpm_ds.predict.costs import analytic_times
    from ddpm_ds.predict.predictor import Predictor
    from ddpm_ds.predict.search import search
    from ddpm_ds.predict.workload import job as job_of

    job = job_of(spec, config, path)
    devices = _devices(job, accepted[0].layout.world_size)
    predictor = Predictor(job, devices, analytic_times(job, devices))
    among = [layout for ds in accepted for layout in _layouts(ds, predictor)]
    first, *others = search(predictor, len(accepted), among).best
    why = f"on {devices.kind} {first.layout.words()} would take {first.step_seconds:.3g} s a step"
    if others:
        why += f", {others[0].layout.words()} {others[0].step_seconds:.3g} s"
    return Choice(first.layout.stages, f"{why}; -p chooses otherwise")


def measured_cuts(
    spec: RunSpec, ds: ResolvedDsConfig, path: Path, times: Callable[[Workload], LayerTimes]
) -> tuple[int, ...]:
    """The bounds that make the slowest rank's layers, as timed, and transfers fastest; in its memory where that works.

    Raises:
        LayoutError: the U-Net can't be cut into so many stages.
    """
    from ddpm_ds.predict.predictor import Predictor
    from ddpm_ds.predict.workload import job as job_of

    job = job_of(spec, ds.as_json(), path)
    predictor = Predictor(job, _devices(job, ds.layout.world_size), times(job))
    layouts = _layouts(ds, predictor)
    if not layouts:
        raise LayoutError(
            f"the U-Net's {len(job.layers)} layers can't be cut into {ds.layout.stages} stages; use fewer"
        )
    best = next((layout for layout in layouts if predictor.fits(layout)), layouts[-1])
    return predictor.bounds(best)


def _devices(job: Workload, world_size: int) -> Machine:
    kind, memory = this_machine(int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))
    return machine(
        kind or most_alike(memory),
        half=job.precision != "fp32",
        devices=world_size,
        nodes=len(set(launched_hosts(world_size))) or 1,
        memory_bytes=memory,
    )


def _layouts(ds: ResolvedDsConfig, predictor: Predictor) -> list[Candidate]:
    """A layout as the planner has it; without and with recomputation where that is left open.

    None where the U-Net can't be cut so.
    """
    from ddpm_ds.predict.layouts import Candidate

    layouts = [
        Candidate(
            stages=ds.layout.stages,
            replicas=ds.layout.replicas,
            schedule=ds.schedule,
            micro_batch_images=ds.layout.micro_batch_images,
            micro_batches=ds.layout.micro_batches,
            checkpoint_interval=interval,
            zero_stage=ds.zero_stage,
            offload="offload_optimizer" in ds.blocks.get("zero_optimization", {}),
        )
        for interval in ((0, 1) if ds.checkpoint_interval == "auto" else (ds.checkpoint_interval,))
    ]
    if not predictor.can_cut(layouts[0]):
        return []
    hosts, layers = launched_hosts(ds.layout.world_size), predictor.job.layers
    if len(set(hosts)) > 1 and min(ds.layout.stages, ds.layout.replicas) > 1:
        bounds = partition(layers, ds.layout.stages, ds.planned_partition, ds.schedule)
        layouts = [replace(layout, across=across_hosts(ds, layers, bounds, hosts)) for layout in layouts]
    return layouts
