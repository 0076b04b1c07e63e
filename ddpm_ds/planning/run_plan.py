"""From files, options and devices to one frozen plan of a run, and the fastest layouts: the planner in one call.

::

    read_run ──▶ RunFiles ─┬──────▶ lay_out ──▶ RunDraft ──▶ make_plan ──▶ RunPlan ──▶ with_decisions ──▶ RunPlan
                           └▶ choose ──┘        before anything starts     on the hosts that have met, by rank 0

PyTorch and DeepSpeed are imported when they are needed.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import Field

from ddpm_ds.config.ds_config import (
    ResolvedDsConfig,
    check_ds_config,
    leaves_layout_open,
    read_ds_config,
    resolve,
)
from ddpm_ds.config.ds_model import MOST_SPACE, DsConfig, changed
from ddpm_ds.config.spec import HELD_OUT_QUANTILES, RunSpec
from ddpm_ds.config.spec_file import load_spec, spec_overrides
from ddpm_ds.ground.errors import DsConfigError, LayoutError, UserError
from ddpm_ds.ground.host import processes_on_host
from ddpm_ds.ground.units import (
    MOST_BANDWIDTH,
    MOST_BYTES,
    MOST_COUNT,
    MOST_FLOPS,
    MOST_PROCESSES,
    Precision,
    about,
    gib,
)
from ddpm_ds.pipeline.cuts import Stage, describe, partition
from ddpm_ds.pipeline.placement import Exchange, Grid, across_hosts, run_exchange
from ddpm_ds.planning.inputs import KINDS, Machine, Workload, encoding_ranks, kind_of, layers_for, machine, machine_like
from ddpm_ds.schema.layout import Layout, divisors
from ddpm_ds.schema.types import ALL_SIGMAS, GivenPath
from ddpm_ds.unet.layers import PASSES_PER_STEP, Layer, unet_layers
from ddpm_ds.unet.shards import check_rows, check_split, whole_layers

if TYPE_CHECKING:
    import torch

    from ddpm_ds.observe.device_speed import LayerTimes
    from ddpm_ds.pipeline.schedule import Program  # imports DeepSpeed, which a plan does not need
    from ddpm_ds.planning.decisions import Choice, Plan
    from ddpm_ds.planning.predictor import Predictor

Processes = Annotated[int, Field(ge=1, le=MOST_PROCESSES)]
Bandwidth = Annotated[float, Field(ge=1.0, le=MOST_BANDWIDTH)]
Hosts = Sequence[Hashable]  # name or number of each rank's host; empty if unknown
SAVED_BYTES, SAVED_BYTES_PER_SECOND = 16, 5e8
"""Bytes of a checkpoint for each parameter, and bytes per second that a disk takes, for a forecast."""
FIRST_PICTURE_SECONDS = 30.0  # longest time for the picture before the first step, as predicted
TIMED_LAYERS, TIMED_MACS = 3, 10**9
"""Number of layers that a forecast times, and multiply-accumulates of the images of each."""
MEMORY_ERROR = 0.1
"""Largest error of predicted memory, as a share (docs/planner.md): between a refusal and a run there are warnings."""
MOST_SWAPPING, USE_REPLICAS = 1 / 3, "replicas would be faster"
"""Share of a step for swaps of space groups above which the planner warns, and its words."""


@dataclass(frozen=True)
class RunFiles:
    """Run spec and DeepSpeed JSON of a run, read and checked, with the overrides in them."""

    spec: RunSpec
    spec_path: Path
    config: DsConfig
    ds_path: Path


@dataclass(frozen=True)
class RunDraft:
    """Run as its files and options lay it out on the hosts that a launcher names: enough to refuse a bad one."""

    spec: RunSpec
    spec_path: Path
    ds: ResolvedDsConfig
    ds_path: Path
    layers: tuple[Layer, ...]  # layers of the U-Net, split ones as one rank of a tensor group has them
    bounds: tuple[int, ...]
    stages: tuple[Stage, ...]
    """Stages in the order of the layers, with the costs of all ranks of a tensor group together."""
    grid: Grid  # places of the ranks; without hosts while unknown, since hosts may differ in their number of ranks
    exchange: Exchange  # bytes that a step sends
    encoding_ranks: tuple[int, ...]  # ranks of the pipeline that read encoded text
    chosen: Choice | None  # the planner's choices; None if the files fixed the layout

    @property
    def parameters(self) -> int:
        """Trainable parameters of the whole U-Net."""
        return sum(stage.parameters for stage in self.stages)

    @property
    def macs(self) -> int:
        """Multiply-accumulates of one image's forward."""
        return sum(stage.forward_flops for stage in self.stages) // 2

    @property
    def work(self) -> int:
        """Multiply-accumulates of one image's step, over its three passes: :attr:`macs` if all weights are trained."""
        return round(sum(layer.work for layer in whole_layers(self.layers)))

    @property
    def steps(self) -> int:
        """Number of optimizer steps; the last batch is full even if ``train.images`` is not a multiple of the batch."""
        return -(-self.spec.train.images // self.ds.layout.batch_images)


@dataclass(frozen=True)
class RunPlan(RunDraft):
    """Plan of a run on the ranks that have met: nothing of the layout is open.

    Which buckets of ``job.sizes`` have images is known once they are prepared, after the plan is made.
    """

    job: Workload
    machine: Machine
    programs: tuple[Program, ...] | None  # programs of a pipeline's ranks; None if the schedule's name defines them


def read_run(spec_path: Path, overrides: Sequence[str], ds_path: Path) -> RunFiles:
    """Read and check the files of a run. Overrides that begin with ``ds.`` change the JSON, others the spec.

    SpecError or DsConfigError, in one line, if they are wrong.
    """
    spec = load_spec(spec_path, spec_overrides(overrides))
    if spec.sampler.guidance_between != ALL_SIGMAS:
        from ddpm_ds.diffusion.levels import check_guidance  # it imports PyTorch

        check_guidance(spec.sampler, spec.diffusion.at(spec.data.size))
    return RunFiles(spec, spec_path, check_ds_config(read_ds_config(ds_path, overrides), ds_path, spec), ds_path)


def choose(files: RunFiles, hosts: Hosts, ranks: int, stages: int | None, device: str) -> Choice | None:
    """Return the planner's choices, on a ``--device``, of stages and groups that are open; None if none is."""
    if not leaves_layout_open(files.config, ranks, stages):
        return None
    from ddpm_ds.ground.device import choose_device

    choose_device(device)  # before DeepSpeed, whose schedules the planner simulates, is imported
    from ddpm_ds.planning.decisions import choose_layout

    return choose_layout(predictor_here(files.spec, files.config, hosts, ranks), files.ds_path, hosts, stages)


def lay_out(files: RunFiles, hosts: Hosts, ranks: int, stages: int | None, chosen: Choice | None = None) -> RunDraft:
    """Lay a run out with a number of stages or as ``chosen``; SpecError, DsConfigError or LayoutError, in one line."""
    spec, config = files.spec, files.config
    if chosen is not None:
        stages, config = chosen.stages, changed(config, chosen.keys)
    ds = resolve(config, spec, world_size=ranks, stages=stages, path=files.ds_path)
    layers = unet_layers(spec.unet, spec.data.interface)
    check_split(layers, ds.layout, files.ds_path)
    check_rows(layers, ds.layout, files.ds_path)
    layers = layers_for(spec, spec.data.size, ds.layout.split)
    bounds = partition(layers, ds.layout.stages, ds.planned_partition, ds.layout.schedule)
    places = _places(ds, layers, bounds, hosts)
    return RunDraft(spec, files.spec_path, ds, files.ds_path, layers, bounds, *places, chosen)


def make_plan(draft: RunDraft, hosts: Hosts, machine: Machine) -> RunPlan:
    """Return the plan for the ``hosts`` of the ranks that have met, on a ``machine`` like each of them; only
    :func:`with_decisions` measures. DsConfigError if graphs are asked for on a CPU.
    """
    from ddpm_ds.planning.decisions import fitted

    if draft.ds.config.graphs is True and machine.is_cpu:
        raise DsConfigError("graphs = true needs a GPU; use --set ds.graphs=auto, which takes graphs where they can be")
    if len(set(hosts)) < len(set(draft.grid.hosts)):
        hosts = draft.grid.hosts  # hosts that share a name keep their numbers
    layers, bounds = draft.layers, draft.bounds
    job = workload(draft.spec, draft.ds.config, machine.is_cpu, counted=False)
    layout = fitted(job, draft.ds.layout, bounds, machine.memory_bytes)
    ds = draft.ds.with_layout(**vars(layout) | {"across_hosts": across_hosts(draft.ds, layers, bounds, hosts)})
    files, places = (draft.spec, draft.spec_path, ds, draft.ds_path), _places(ds, layers, bounds, hosts)
    return RunPlan(*files, layers, bounds, *places, draft.chosen, job, machine.on(hosts), None)


def with_decisions(plan: RunPlan, device: torch.device) -> RunPlan:
    """Return the plan with the cuts, by times of layers on the ``device``, and the order of a planned schedule, where
    the JSON asks for them. Collective: rank 0 decides. LayoutError if no measured cuts fit.
    """
    from ddpm_ds.observe.device_speed import LayerSeconds, measured_times
    from ddpm_ds.pipeline.schedule import Program, weight_passes
    from ddpm_ds.planning.decisions import measured_cuts
    from ddpm_ds.planning.predictor import Predictor
    from ddpm_ds.processes.process_group import decided_by_rank_0

    ds, layout, bounds = plan.ds, plan.ds.layout, plan.bounds
    measured, times = ds.partition == "measured" and layout.stages > 1, None
    predictor = Predictor(plan.job, plan.machine, measured_times(device, plan.job.precision) if measured else None)
    if measured:
        bounds, times = decided_by_rank_0(
            lambda: (measured_cuts(predictor, ds), tuple(predictor.layer_times(layout))),
            tuple[tuple[int, ...], tuple[LayerSeconds, ...]],
        )
    programs = decided_by_rank_0(lambda: predictor.programs(layout, bounds), tuple[Program, ...] | None)
    passes = weight_passes(programs, layout.schedule) if programs else None
    stages, grid, exchange, encoding = _places(ds, plan.layers, bounds, plan.grid.hosts, passes)
    cut = replace(plan, bounds=bounds, stages=stages, grid=grid, exchange=exchange, encoding_ranks=encoding)
    return replace(cut, programs=programs, machine=replace(plan.machine, layer_times=times))


def forecast(plan: RunPlan, device: torch.device, seen: int) -> str:
    """Return the line on the time to the first picture and to the end of a run that has ``seen`` some images, and a
    warning if swaps of space groups take most of it.

    Pictures, held-out losses and checkpoints count. On a CPU some layers are timed for a second; every rank calls this.
    """
    spec, end, batch = plan.spec, plan.spec.train.images, plan.ds.layout.batch_images
    step, swapping = _step_seconds(plan, device)
    forward = step / (PASSES_PER_STEP * batch)  # seconds of an image on all devices
    by_time = math.ceil(60 * minutes / step) * batch if (minutes := spec.checkpoint.every_minutes) else end
    tasks = (
        (spec.samples.every_images, forward * spec.samples.count * spec.sampler.evaluations_of(spec.diffusion)),
        (spec.evaluation.every_images, forward * spec.data.held_out_images * len(HELD_OUT_QUANTILES)),
        (min(spec.checkpoint.every_images or end, by_time), SAVED_BYTES * plan.parameters / SAVED_BYTES_PER_SECOND),
    )
    every, picture = spec.samples.every_images or end, tasks[0][1] if spec.samples.every_images else 0.0
    before = 0.0 if seen or picture_seconds(plan) > FIRST_PICTURE_SECONDS else picture

    def seconds(until: int) -> str:
        more = until == end  # everything is due at the end
        regular = sum(((until + more * (every - 1)) // every - seen // every) * each for every, each in tasks if every)
        return about(before + step * (until - seen) / batch + regular)

    first = (seen // every + 1) * every
    line = f"forecast     {f'first picture after {seconds(first)}, ' if first < end else ''}done after {seconds(end)}"
    if swapping <= MOST_SWAPPING * step:
        return line
    taken = f"warning      swaps of space groups take {swapping / step:.0%} of a predicted step"
    return f"{line}\n{taken}; {USE_REPLICAS}: {in_replicas(plan.ds.layout)}"


def in_replicas(layout: Layout) -> str:
    """Return the options with which ranks of space groups become replicas."""
    ranks, batch = layout.data_ranks, layout.batch_images
    more = f" --set train.batch_images={-(-batch // ranks) * ranks}" if batch % ranks else ""
    return f"--set 'ds.pipeline.space={{}}'{more}"


def picture_seconds(plan: RunPlan) -> float:
    """Predict the seconds of a picture by its flops alone, which decide whether one comes before the first step."""
    import torch

    spec, cores = plan.spec, torch.get_num_threads() if plan.machine.is_cpu else 1
    flops = 2 * plan.macs * spec.samples.count * spec.sampler.evaluations_of(spec.diffusion)
    return flops / (plan.machine.flops * plan.machine.devices * cores)


def _step_seconds(plan: RunPlan, device: torch.device) -> tuple[float, float]:
    """Predict a step's seconds, and a rank's for swaps of a space group. On a CPU the data sheet of a core is corrected
    by the heaviest layers' times.
    """
    from ddpm_ds.ground.device import DTYPES
    from ddpm_ds.observe.device_speed import time_layer
    from ddpm_ds.planning.costs import analytic_times, launch_seconds, links, planned_costs
    from ddpm_ds.planning.simulate import simulate

    job, machine, layout = plan.job, plan.machine, plan.ds.layout
    predicted = analytic_times(job, machine, launch_seconds(job, machine, layout))
    taken = expected = 0.0
    if machine.layer_times is None and machine.is_cpu:
        layers = sorted({replace(one, name=""): one for one in plan.layers}.values(), key=lambda one: -one.macs)
        for layer in layers[:TIMED_LAYERS]:
            images = min(layout.micro_batch_images, max(1, TIMED_MACS // layer.macs))
            timed, guess = time_layer(layer, images, device, DTYPES[job.precision][1]), predicted([layer], images)[0]
            taken, expected = taken + timed.forward + timed.backward, expected + guess.forward + guess.backward
    slower = job.mean_macs * (taken / expected if expected else 1.0)
    alone = predicted(job.of(layout).layers, layout.micro_batch_images)
    times = machine.layer_times or [one.times(slower) for one in alone]
    costs, wires = planned_costs(job, machine, layout, plan.bounds, times), links(machine, layout)
    without = planned_costs(job, machine, layout, plan.bounds, times, with_sums=layout.space.size == 1)
    swapping = sum(one.pass_seconds - other.pass_seconds for one, other in zip(costs, without, strict=True))
    step = simulate(layout.schedule, layout.micro_batches, costs, wires, programs=plan.programs).step_seconds
    return step, layout.micro_batches * swapping / layout.stages


def _places(
    ds: ResolvedDsConfig,
    layers: tuple[Layer, ...],
    bounds: tuple[int, ...],
    hosts: Hosts,
    weight_passes: Sequence[Sequence[float]] | None = None,
) -> tuple[tuple[Stage, ...], Grid, Exchange, tuple[int, ...]]:
    layout, across = ds.layout, across_hosts(ds, layers, bounds, hosts)
    return (
        describe(whole_layers(layers), bounds, layout.schedule),
        Grid(layout.stages, layout.data_ranks, across, tuple(hosts), layout.tensor.size, layout.space.size),
        run_exchange(ds, layers, bounds, weight_passes),
        encoding_ranks(layers, bounds, layout.schedule),
    )


def predictor_here(spec: RunSpec, config: DsConfig, hosts: Hosts, world_size: int) -> Predictor:
    """Return a predictor of a run on devices like this one's."""
    from ddpm_ds.planning.predictor import Predictor

    here = machine_here(config.precision, world_size).on(hosts)
    return Predictor(workload(spec, config, here.is_cpu, counted=False), here)


def machine_here(precision: Precision, devices: int) -> Machine:
    """Read this process's device; all ``devices`` of the run are taken to be like it, on one host."""
    from ddpm_ds.ground.device import described
    from ddpm_ds.observe.device_speed import known_swap

    name, memory = described(processes_on_host(devices))
    found = machine_like(name, memory, half=precision != "fp32", devices=devices)
    return replace(found, swap=known_swap(name))


class Need(NamedTuple):
    """Predicted bytes of training, also as a ``share`` of the ``limit`` of the device or host ``where`` they are."""

    share: float
    size: int
    limit: int
    where: str


def memory_need(draft: RunDraft, machine: Machine, rank: int) -> Need:
    """Return the need of the fullest device on a ``rank``'s host, or of the host if it is fuller."""
    from ddpm_ds.ground.device import host_memory
    from ddpm_ds.planning.decisions import fitted
    from ddpm_ds.planning.memory import pipeline_memory

    on_cpu, grid = machine.is_cpu, draft.grid
    job = workload(draft.spec, draft.ds.config, on_cpu, counted=False)
    memory = pipeline_memory(job, fitted(job, draft.ds.layout, draft.bounds, machine.memory_bytes), draft.bounds)
    here = [number for number, host in enumerate(grid.hosts) if host == grid.hosts[rank]]
    own = [memory[grid.coordinates(number)[0]] for number in here]
    needs = [(sum(one.host + on_cpu * one.total for one in own), host_memory(), "machine")]  # CPUs share it
    needs += [] if on_cpu else [(max(one.total for one in own), machine.memory_bytes, "GPU")]
    return max(Need(size / max(limit, 1), size, limit, where) for size, limit, where in needs)


def check_memory(
    draft: RunDraft, machine: Machine, rank: int, again: Callable[[Sequence[str], int], RunDraft], *, new: bool
) -> str | None:
    """Return a warning if a run hardly fits the memory of a ``rank``'s host; LayoutError, with a change that helps,
    if it does not. ``again`` lays the run out with more overrides and stages; a ``new`` U-Net may change.
    """
    need = memory_need(draft, machine, rank)
    if need.share <= 1 - MEMORY_ERROR:
        return None
    needs = f"training {draft.spec.name} needs about {gib(need.size)}, and this {need.where} has {gib(need.limit)}"
    if need.share <= 1 + MEMORY_ERROR:
        return f"warning      {needs}: it may run out of memory"
    more = f"a {need.where} with {gib(need.size / (1 - MEMORY_ERROR))}"
    channels = draft.spec.unet.channels if new else 0
    smaller = _smaller(draft.ds.layout, channels, on_cpu=machine.is_cpu)
    if need.where == "machine" and not machine.is_cpu:  # what lies there may lie on the GPUs
        moved = ["ema.on_host=false"] * draft.spec.ema.on_host
        moved += ["ds.zero_optimization.offload_optimizer.device=none"] * draft.ds.layout.offload
        smaller = iter([([one], draft.ds.layout.stages) for one in moved])
    for changes, stages in smaller:
        try:
            share = memory_need(found := again(changes, stages), machine, rank).share
        except UserError:  # such as channels that the heads do not divide
            continue
        if share <= 1 - MEMORY_ERROR:
            words = [f"-p {stages}"] * (stages != draft.ds.layout.stages) + [f"--set {one}" for one in changes]
            ranks = found.ds.layout.space.size
            sharing = f", so that {ranks} ranks share an image" if ranks > draft.ds.layout.space.size else ""
            raise LayoutError(f"{needs}; use {' '.join(words)}{sharing}, or {more}")
    raise LayoutError(f"{needs}; use {more}, or several: ddpm-ds plan names their layouts")


def _smaller(layout: Layout, channels: int, *, on_cpu: bool) -> Iterator[tuple[list[str], int]]:
    """Yield overrides and stages of runs that need less memory, the smallest changes first; 0 ``channels`` stay."""
    counts = [count for count in divisors(layout.stages * layout.replicas) if count >= layout.stages]
    offload = [[], *([] if on_cpu else [["ds.zero_optimization.offload_optimizer.device=cpu"]])]
    ways: list[list[str]] = [[], ["ds.pipeline.activation_checkpoint_interval=1"]]
    for parts, way in itertools.product(divisors(layout.micro_batch_images), ways):
        smaller = [f"train.accumulation={layout.micro_batches * parts}"] if parts > 1 else []
        yield [*way, *smaller], layout.stages
    for stages, others, way in itertools.product(counts, offload, ways):
        yield [*others, *way], stages
    one_by_one = layout.micro_batches * layout.micro_batch_images
    groups = [size for size in divisors(layout.data_ranks, MOST_SPACE) if size > layout.space.size]
    for size, way in itertools.product(groups if layout.tensor.size == 1 else (), ways):
        images = one_by_one * size // layout.space.size
        yield [f"ds.pipeline.space.size={size}", *way, f"train.accumulation={images}"], layout.stages
    while channels := channels // 2:
        yield [f"unet.channels={channels}"], layout.stages


def plan(
    spec: RunSpec,
    ds_config: GivenPath,
    overrides: Sequence[str] = (),
    *,
    processes: Processes,
    nodes: Processes = 1,
    device_kind: str | None = None,
    device_memory: Annotated[int, Field(ge=1, le=MOST_BYTES)] | None = None,
    flops: Annotated[float, Field(ge=1.0, le=MOST_FLOPS)] | None = None,
    link_bandwidth: Bandwidth | None = None,
    network_bandwidth: Bandwidth | None = None,
    times: Callable[[Workload, Machine], LayerTimes] | None = None,
    top: Annotated[int, Field(ge=1, le=MOST_COUNT)] = 10,
) -> Plan:
    """Return the ``top`` fastest layouts of a run on ``processes`` devices, with the memory and time of each.

    ``ds_config`` is the path of a DeepSpeed JSON; overrides of the form ``ds.block.key=value`` change it. Devices are
    like this machine's, or of a kind in :data:`ddpm_ds.planning.inputs.KINDS`. Given values replace the data sheet's:
    ``device_memory`` in bytes of one device, ``flops`` per second, and in bytes per second ``link_bandwidth`` between
    devices of a node and ``network_bandwidth`` between nodes. ``times`` times the layers of layouts that fit; without
    it times are computed. Nothing is trained, and no other process is needed.

    Raises:
        DsConfigError: the JSON can't be read, or training would refuse it.
        LayoutError: no layout divides devices, layers and batch, or fits; or the devices are unknown.
    """
    config = check_ds_config(read_ds_config(ds_config, overrides), ds_config, spec)
    if here := device_kind is None:
        from ddpm_ds.ground.device import described

        name, memory = described(processes // nodes or 1)
        device_kind, device_memory = kind_of(name), device_memory or memory
    if device_kind is None:
        raise LayoutError(f"this machine's GPU is not in the planner's table; use --device-kind {' or '.join(KINDS)}")
    devices = machine(device_kind, half=config.precision != "fp32", devices=processes, nodes=nodes)
    rates = {"flops": flops, "link_bandwidth": link_bandwidth, "network_bandwidth": network_bandwidth}
    given: dict[str, Any] = {"memory_bytes": device_memory, **rates}
    devices = replace(devices, **{name: value for name, value in given.items() if value is not None})
    before = set(os.environ)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed would look for devices during its import
    try:
        from ddpm_ds.planning.decisions import candidates, layouts, search, sort_out, splits
        from ddpm_ds.planning.predictor import Predictor
    finally:
        for name in set(os.environ) - before:
            del os.environ[name]
    if here or times is not None:
        from ddpm_ds.ground.device import described
        from ddpm_ds.observe.device_speed import known_swap

        devices = replace(devices, swap=known_swap("cpu" if devices.is_cpu else described(1)[0]))
    job = workload(spec, config, devices.is_cpu, counted=True)
    predictor = Predictor(job, devices)
    among = candidates(predictor, ds_config)
    if times is not None and (fitting := sort_out(predictor, among)[0]):  # only layouts that fit are timed
        among, predictor = fitting, Predictor(job, devices, times(job, devices))
    ways = splits(predictor, devices.devices_per_node)
    grouped = (layouts(job, processes, offload=False, nodes=nodes, split=split) for split in ways)
    return search(predictor, top, among, itertools.chain.from_iterable(grouped), assumes=not here)


def workload(spec: RunSpec, config: DsConfig, on_cpu: bool, *, counted: bool) -> Workload:
    """Return a run to plan for. Buckets of aspect are weighed by the images that preparation has ``counted``.

    Raises:
        DataError: the autoencoder or the encoders can't be used, or there are too few images.
    """
    text = spec.data.text
    if spec.data.buckets is None and (text is None or not text.encoded_in_training):
        return Workload(spec, config, on_cpu)
    from ddpm_ds.data.prepare import Recipes
    from ddpm_ds.data.text import TextEncoders

    elements = 0 if text is None or not text.encoded_in_training else TextEncoders.open(text, None).elements
    group = spec.bucket_group
    shares = () if group is None else Recipes(spec.data).shares(group, counted=counted)
    return Workload(spec, config, on_cpu, shares, elements)
