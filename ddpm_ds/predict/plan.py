"""Plan of the whole run, made before anything is started: spec, configuration, layers, stages."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ddpm_ds.command_line import aligned, counted
from ddpm_ds.config.ds_config import (
    ELEMENT_BYTES,
    AcrossHosts,
    ResolvedDsConfig,
    check_ds_config,
    leaves_stages_open,
    read_ds_config,
    resolve,
)
from ddpm_ds.config.spec import ALL_SIGMAS, HELD_OUT_QUANTILES, RunSpec
from ddpm_ds.config.spec_file import load_spec, spec_overrides
from ddpm_ds.pipeline.cuts import Stage, describe, folds, partition
from ddpm_ds.pipeline.placement import Exchange, Grid, across_hosts, run_exchange, traffic
from ddpm_ds.secret import public_address
from ddpm_ds.unet.layers import PASSES_PER_STEP, Layer, unet_layers

if TYPE_CHECKING:
    from ddpm_ds.pipeline.schedule import Program  # imports DeepSpeed, which a plan does not need

MOST_HOSTS = 3
"""Maximum hosts named in a cell of the table of stages."""


@dataclass(frozen=True)
class RunPlan:
    """Consistent plan of a run for a number of processes."""

    spec: RunSpec
    spec_path: Path
    ds: ResolvedDsConfig
    ds_path: Path
    layers: tuple[Layer, ...]
    bounds: tuple[int, ...]
    hosts: tuple[str, ...]
    """Host of each global rank; empty while unknown, since hosts may differ in their number of ranks."""
    programs: tuple[Program, ...] | None = None
    """Programs of the ranks of a pipeline, once a planned schedule has been decided."""
    chosen: str | None = None
    """Reason for the number of stages, if the planner chose it."""

    @property
    def parameters(self) -> int:
        """Trainable parameters of the whole U-Net."""
        return sum(layer.parameters for layer in self.layers)

    @property
    def macs(self) -> int:
        """Multiply-accumulates of one image's forward."""
        return sum(layer.macs for layer in self.layers)

    @property
    def steps(self) -> int:
        """Number of optimizer steps; the last batch is full even if ``train.images`` is not a multiple of the batch."""
        return -(-self.spec.train.images // self.ds.layout.batch_images)

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """Stages in the order of the layers."""
        return describe(self.layers, self.bounds, self.ds.layout.schedule)

    @cached_property
    def across(self) -> AcrossHosts:
        """Axis that is split over hosts."""
        return across_hosts(self.ds, self.layers, self.bounds, self.hosts)

    @property
    def several_hosts(self) -> bool:
        """Whether processes are known to be on more than one host."""
        return len(set(self.hosts)) > 1

    def grid(self, across: AcrossHosts | None = None) -> Grid:
        """Return the grid of processes, as planned or with another axis across hosts."""
        return Grid(self.ds.layout.stages, self.ds.layout.replicas, across or self.across, self.hosts)

    @property
    def exchange(self) -> Exchange:
        """Bytes that a step sends."""
        if self.programs is None:
            return run_exchange(self.ds, self.layers, self.bounds)
        from ddpm_ds.pipeline.schedule import weight_passes  # DeepSpeed, already imported if there are programs

        return run_exchange(self.ds, self.layers, self.bounds, weight_passes(self.programs, self.ds.layout.schedule))


def plan_run(
    spec_path: Path,
    overrides: Sequence[str],
    ds_path: Path,
    *,
    world_size: int,
    stages: int | None,
    device: str = "auto",
    hosts: Sequence[str] | None = None,
) -> RunPlan:
    """Read and check everything that can be checked before anything is started.

    Overrides that begin with ``ds.`` change the JSON, others the spec. If neither ``stages`` nor the JSON gives the
    number of stages, the planner chooses it for ``device`` (as in ``--device``), and only then imports PyTorch and
    DeepSpeed. ``hosts`` gives each rank's host (:func:`ddpm_ds.pipeline.placement.launched_hosts`), by default a single
    one.

    Raises:
        SpecError, DsConfigError, LayoutError: one line each, before anything is started.
    """
    spec = load_spec(spec_path, spec_overrides(overrides))
    if spec.sampler.guidance_between != ALL_SIGMAS:
        from ddpm_ds.diffusion.levels import check_guidance  # it imports PyTorch

        check_guidance(spec.sampler, spec.diffusion)
    config, chosen = read_ds_config(ds_path, overrides), None
    check_ds_config(config, ds_path, spec)
    if stages is None and leaves_stages_open(config, world_size):
        from ddpm_ds.device import choose_device

        choose_device(device)  # before DeepSpeed, whose schedules the planner simulates, is imported
        from ddpm_ds.predict.auto import choose_stages

        stages, chosen = choose_stages(spec, config, ds_path, world_size=world_size)
    ds = resolve(config, spec, world_size=world_size, stages=stages, path=ds_path)
    layers = unet_layers(spec.unet, image_channels=spec.data.channels, image_size=spec.data.image_size)
    bounds = partition(layers, ds.layout.stages, ds.planned_partition, ds.layout.schedule)
    names = ("0",) * world_size if hosts is None else tuple(hosts)
    return RunPlan(spec, spec_path, ds, ds_path, layers, bounds, names, chosen=chosen)


def on_hosts(plan: RunPlan, names: Sequence[str]) -> RunPlan:
    """Return the plan with the names of the ranks' hosts; hosts that share a name keep their numbers."""
    return replace(plan, hosts=tuple(names)) if len(set(names)) >= len(set(plan.hosts)) else plan


def stage_table(plan: RunPlan) -> str:
    """Return the stages as a table: layers, parameters, forward flops, bytes sent per step."""
    header = ["stage", "layers", "first", "last", "parameters", "forward GFLOP/image", "share", "sent MB/step"]
    grid, layout = plan.grid() if plan.several_hosts else None, plan.ds.layout
    rows = [[*header, "host"] if grid else header]
    for stage in plan.stages:
        sent = stage.sent_elements * layout.batch_images // layout.replicas * ELEMENT_BYTES[plan.ds.precision]
        row = [
            f"{stage.index} on rank {stage.rank}" if folds(plan.ds.layout.schedule) else str(stage.index),
            str(stage.layers),
            stage.first_layer,
            stage.last_layer,
            f"{stage.parameters:,}",
            f"{stage.forward_flops / 1e9:.4f}",
            f"{stage.forward_flops / (2 * plan.macs):.1%}",
            f"{sent / 1e6:.2f}",
        ]
        if grid:
            names = list(dict.fromkeys(map(str, grid.hosts_of(stage.rank))))
            few = len(names) <= MOST_HOSTS
            row.append(", ".join(names) if few else f"{names[0]} ... {names[-1]} ({len(names)})")
        rows.append(row)
    return "\n".join(aligned(rows, left={2, 3, len(header)}))


def hosts_line(plan: RunPlan) -> str | None:
    """Return a line on the bytes that cross hosts in a step, for both axes across hosts; None for one host."""
    if not plan.hosts:
        return "hosts        of different sizes: placement and traffic are known once the ranks have met"
    if not plan.several_hosts:
        return None
    sizes, wires = list(Counter(plan.hosts).values()), traffic(plan.grid(), plan.exchange)
    equal = len(set(sizes)) == 1
    each = f"{len(sizes)} x {counted(sizes[0], 'process')}" if equal else f"{' + '.join(map(str, sizes))} processes"
    kinds = (("activations", wires.activations), ("gradients", wires.gradients), ("weights", wires.weights))
    named = [f"{_megabytes(size)} of {name}" for name, size in kinds if size]
    whole = f"{_megabytes(wires.between_hosts)} a step, {' and '.join(named)}," if named[1:] else f"{named[0]} a step"
    most = f"{'each' if len(set(wires.sent.values())) == 1 else 'the busiest'} sends {_megabytes(wires.busiest)}"
    line = f"hosts        {each}, {plan.across} across hosts: {whole} between them, {most}"
    if min(plan.ds.layout.stages, plan.ds.layout.replicas) == 1:
        return line
    other: AcrossHosts = "replicas" if plan.across == "stages" else "stages"
    return f"{line}; {other} across would be {_megabytes(traffic(plan.grid(other), plan.exchange).between_hosts)}"


def _megabytes(size: float) -> str:
    return f"{size / 1e6:,.4g} MB"


def describe_plan(plan: RunPlan, run_dir: Path) -> str:
    """Return the text that every run prints first, and ``--dry-run`` prints alone."""
    spec, data, layout, ds = plan.spec, plan.spec.data, plan.ds.layout, plan.ds
    match ds.layout.checkpoint_interval:
        case "auto":
            recompute = "only if memory is short"
        case 0:
            recompute = "off"
        case interval:
            recompute = f"every {counted(interval, 'layer')}"
    steps = spec.sampler.steps_of(spec.diffusion)
    levels, held_out = len(HELD_OUT_QUANTILES), spec.data.held_out_images
    drawn = spec.samples.count * spec.sampler.evaluations_of(spec.diffusion)
    tracker = public_address(os.environ.get("MLFLOW_TRACKING_URI", "")) or run_dir.parent
    lines = [
        f"run          {spec.name}: {plan.spec_path} with {plan.ds_path}",
        f"data         {data.source}, {data.image_size}x{data.image_size}x{data.channels}"
        + (f", cropped from {data.crop_from}x{data.crop_from}" if data.crop_from else "")
        + (f", latents of {data.autoencoder}" if data.autoencoder else ""),
        f"U-Net        {plan.parameters:,} parameters in {len(plan.layers)} layers, "
        f"{2 * plan.macs / 1e9:.4f} GFLOP forward per image",
        f"precision    {ds.precision}, ZeRO-{ds.layout.zero_stage}, activation checkpointing {recompute}",
        f"layout       {counted(layout.world_size, 'process')}: {counted(layout.stages, 'stage')} x "
        f"{counted(layout.replicas, 'replica')}{f', schedule {ds.layout.schedule}' if layout.stages > 1 else ''}",
        *([f"stages       {plan.chosen}"] if plan.chosen else []),
        *([line] if (line := hosts_line(plan)) else []),
        f"batch        {counted(layout.batch_images, 'image')} = {counted(layout.micro_batches, 'micro-batch')} of "
        f"{layout.micro_batch_images} x {counted(layout.replicas, 'replica')}",
        f"length       {counted(spec.train.images, 'image')} = {counted(plan.steps, 'step')}, "
        f"logged every {counted(spec.logging.log_every_images, 'image')}",
        _regular(
            "samples",
            f"{counted(spec.samples.count, 'image')} by {spec.sampler.kind} in {counted(steps, 'step')}",
            spec.samples.every_images,
            drawn,
        ),
        _regular(
            "validation",
            f"{counted(held_out, 'held-out image')} at {levels} noise levels",
            spec.evaluation.every_images,
            held_out * levels,
        ),
        f"outputs      {run_dir}; MLflow in {tracker}",
        "",
        stage_table(plan),
    ]
    return "\n".join(lines)


def _regular(name: str, what: str, every_images: int | None, forwards: int) -> str:
    """Return a line about a regular task, and the compute of its forward passes relative to training."""
    if not (every_images and forwards):
        return f"{name:<13}off"
    share = forwards / (PASSES_PER_STEP * every_images)
    return f"{name:<13}{what}, every {every_images:,} images ({share:.1%} of the computing)"
