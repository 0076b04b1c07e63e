"""From files, options and devices to one frozen plan of a run, and the fastest layouts: the planner in one call.

plan_run         from files and options: everything that can be checked before anything is started
decided          the axis over hosts, recomputation and micro-batches in flight, by the memory of this device
cut_and_ordered  cuts by measured times and the order of a planned schedule, by rank 0; nothing is open after it

PyTorch and DeepSpeed are imported when they are needed.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import Field

from ddpm_ds.command_line import MOST_BANDWIDTH, MOST_BYTES, MOST_COUNT, MOST_FLOPS, MOST_PROCESSES, gib
from ddpm_ds.config.ds_config import (
    ResolvedDsConfig,
    check_ds_config,
    leaves_layout_open,
    read_ds_config,
    resolve,
    with_split,
)
from ddpm_ds.config.ds_model import DsConfig
from ddpm_ds.config.spec import RunSpec
from ddpm_ds.config.spec_file import load_spec, spec_overrides
from ddpm_ds.errors import NEEDS_MORE, DsConfigError, LayoutError, UserError
from ddpm_ds.pipeline.cuts import Stage, describe, partition
from ddpm_ds.pipeline.placement import Exchange, Grid, across_hosts, run_exchange
from ddpm_ds.predict.layouts import KINDS, Machine, Workload, kind_of, layouts, machine, machine_like, tensor_splits
from ddpm_ds.schema.layout import AcrossHosts, divisors
from ddpm_ds.schema.types import ALL_SIGMAS, GivenPath
from ddpm_ds.unet.layers import Layer, unet_layers
from ddpm_ds.unet.shards import check_split, split_layers, whole_layers

if TYPE_CHECKING:
    import torch

    from ddpm_ds.observe.device_speed import LayerTimes
    from ddpm_ds.pipeline.schedule import Program  # imports DeepSpeed, which a plan does not need
    from ddpm_ds.predict.decisions import Choice, Plan
    from ddpm_ds.predict.predictor import Predictor

Processes = Annotated[int, Field(ge=1, le=MOST_PROCESSES)]
Bandwidth = Annotated[float, Field(ge=1.0, le=MOST_BANDWIDTH)]
MEMORY_ERROR = 0.1
"""Largest error of predicted memory, as a share (docs/planner.md): between a refusal and a run there are warnings."""


@dataclass(frozen=True)
class RunPlan:
    """Plan of a run for a number of processes, which :func:`decided` and :func:`cut_and_ordered` complete."""

    spec: RunSpec
    spec_path: Path
    ds: ResolvedDsConfig
    ds_path: Path
    layers: tuple[Layer, ...]
    """Layers of the U-Net, split ones as one rank of a tensor group has them."""
    bounds: tuple[int, ...]
    hosts: tuple[str, ...]
    """Host of each global rank; empty while unknown, since hosts may differ in their number of ranks."""
    programs: tuple[Program, ...] | None = None
    """Programs of the ranks of a pipeline, once a planned schedule has been decided."""
    chosen: Choice | None = None
    """The planner's choices; None if the files fixed the layout."""

    @functools.cached_property
    def whole_layers(self) -> tuple[Layer, ...]:
        """Layers of the U-Net, none of them split."""
        return whole_layers(self.layers)

    @property
    def parameters(self) -> int:
        """Trainable parameters of the whole U-Net."""
        return sum(layer.parameters for layer in self.whole_layers)

    @property
    def macs(self) -> int:
        """Multiply-accumulates of one image's forward."""
        return sum(layer.macs for layer in self.whole_layers)

    @property
    def steps(self) -> int:
        """Number of optimizer steps; the last batch is full even if ``train.images`` is not a multiple of the batch."""
        return -(-self.spec.train.images // self.ds.layout.batch_images)

    @functools.cached_property
    def stages(self) -> tuple[Stage, ...]:
        """Stages in the order of the layers, with the costs of all ranks of a tensor group together."""
        return describe(self.whole_layers, self.bounds, self.ds.layout.schedule)

    @functools.cached_property
    def across(self) -> AcrossHosts:
        """Axis that is split over hosts."""
        return across_hosts(self.ds, self.layers, self.bounds, self.hosts)

    @property
    def several_hosts(self) -> bool:
        """Whether processes are known to be on more than one host."""
        return len(set(self.hosts)) > 1

    def grid(self, across: AcrossHosts | None = None) -> Grid:
        """Return the grid of processes, as planned or with another axis across hosts."""
        layout = self.ds.layout
        return Grid(layout.stages, layout.replicas, across or self.across, self.hosts, layout.tensor.size)

    @property
    def exchange(self) -> Exchange:
        """Bytes that a step sends."""
        passes = None
        if self.programs is not None:
            from ddpm_ds.pipeline.schedule import weight_passes  # DeepSpeed, already imported if there are programs

            passes = weight_passes(self.programs, self.ds.layout.schedule)
        return run_exchange(self.ds, self.layers, self.bounds, passes)

    def predictor(self, timed: torch.device | None = None) -> Predictor:
        """Return a predictor of the run on hosts like this one, with times of a device that is ``timed``."""
        return _predictor_here(self.spec, self.ds.config, self.ds.layout.world_size, self.hosts, timed)

    def on_hosts(self, names: Sequence[str]) -> RunPlan:
        """Return the plan with the names of the ranks' hosts; hosts that share a name keep their numbers."""
        return replace(self, hosts=tuple(names)) if len(set(names)) >= len(set(self.hosts)) else self


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

    Overrides that begin with ``ds.`` change the JSON, others the spec. If stages or tensor groups are open, the planner
    chooses for ``device`` (as in ``--device``), and only then imports PyTorch and DeepSpeed. ``hosts`` gives each
    rank's host (:func:`ddpm_ds.pipeline.placement.launched_hosts`), by default a single one.

    Raises:
        SpecError, DsConfigError, LayoutError: in one line.
    """
    spec = load_spec(spec_path, spec_overrides(overrides))
    if spec.sampler.guidance_between != ALL_SIGMAS:
        from ddpm_ds.diffusion.levels import check_guidance  # it imports PyTorch

        check_guidance(spec.sampler, spec.diffusion)
    config, chosen = check_ds_config(read_ds_config(ds_path, overrides), ds_path, spec), None
    names = ("0",) * world_size if hosts is None else tuple(hosts)
    if leaves_layout_open(config, world_size, stages):
        from ddpm_ds.device import choose_device

        choose_device(device)  # before DeepSpeed, whose schedules the planner simulates, is imported
        from ddpm_ds.predict.decisions import choose_layout

        chosen = choose_layout(_predictor_here(spec, config, world_size, names), ds_path, names, stages)
        stages = chosen.stages
        config = config if chosen.tensor is None else with_split(config, chosen.tensor)
    ds = resolve(config, spec, world_size=world_size, stages=stages, path=ds_path)
    layers = unet_layers(spec.unet, spec.data.interface)
    check_split(layers, ds.layout, ds_path)
    layers = split_layers(layers, ds.layout.tensor)
    bounds = partition(layers, ds.layout.stages, ds.planned_partition, ds.layout.schedule)
    return RunPlan(spec, spec_path, ds, ds_path, layers, bounds, names, chosen=chosen)


def decided(plan: RunPlan, device: torch.device) -> RunPlan:
    """Return the plan with the axis over its hosts, and the recomputation and micro-batches in flight for a device."""
    from ddpm_ds.device import memory_bytes
    from ddpm_ds.predict.decisions import fitted

    if plan.ds.config.graphs is True and device.type == "cpu":
        raise DsConfigError("graphs = true needs a GPU; use --set ds.graphs=auto, which takes graphs where they can be")
    job = workload(plan.spec, plan.ds.config, device.type == "cpu", counted=False)
    layout = fitted(job, plan.ds.layout, plan.bounds, memory_bytes(device))
    return replace(plan, ds=replace(plan.ds, layout=replace(layout, across_hosts=plan.across)))


class Need(NamedTuple):
    """Predicted bytes of training, the bytes that there are, and of which device."""

    size: int
    limit: int
    where: str

    @property
    def share(self) -> float:
        return self.size / max(self.limit, 1)


def memory_need(plan: RunPlan, device: torch.device, rank: int) -> Need:
    """Return the memory of the fullest device on the host of a ``rank``, or of the host, whichever is fuller."""
    from ddpm_ds.device import host_memory, memory_bytes
    from ddpm_ds.predict.decisions import fitted
    from ddpm_ds.predict.memory import pipeline_memory

    on_cpu, size = device.type == "cpu", memory_bytes(device)
    job = workload(plan.spec, plan.ds.config, on_cpu, counted=False)
    memory = pipeline_memory(job, fitted(job, plan.ds.layout, plan.bounds, size), plan.bounds)
    here = [number for number, host in enumerate(plan.hosts) if host == plan.hosts[rank]]
    own = [memory[plan.grid().coordinates(number)[0]] for number in here]
    host = Need(sum(one.host + on_cpu * one.total for one in own), host_memory(), "machine")  # CPUs share it
    return host if on_cpu else max(host, Need(max(one.total for one in own), size, "GPU"), key=lambda need: need.share)


def check_memory(
    plan: RunPlan, device: torch.device, rank: int, again: Callable[[Sequence[str], int], RunPlan], *, new: bool
) -> str | None:
    """Check that a run fits the memory of the host of a ``rank``; return a warning if it hardly does.

    ``again`` plans the same run with more overrides and a number of stages. The U-Net of a ``new`` run may change.

    Raises:
        LayoutError: it does not fit; names the first change with which it does.
    """
    need = memory_need(plan, device, rank)
    if need.share <= 1 - MEMORY_ERROR:
        return None
    needs = f"training {plan.spec.name} {NEEDS_MORE} {gib(need.size)}, and this {need.where} has {gib(need.limit)}"
    if need.share <= 1 + MEMORY_ERROR:
        return f"warning      {needs}: it may run out of memory"
    more = f"a {need.where} with {gib(need.size / (1 - MEMORY_ERROR))}"
    for changes, stages in _smaller(plan, on_cpu=device.type == "cpu", new=new):
        try:
            share = memory_need(again(changes, stages), device, rank).share
        except UserError:  # such as channels that the heads do not divide
            continue
        if share <= 1 - MEMORY_ERROR:
            words = [f"-p {stages}"] * (stages != plan.ds.layout.stages) + [f"--set {one}" for one in changes]
            raise LayoutError(f"{needs}; use {' '.join(words)}, or {more}")
    raise LayoutError(f"{needs}; use {more}, or several: ddpm-ds plan names their layouts")


def _smaller(plan: RunPlan, *, on_cpu: bool, new: bool) -> Iterator[tuple[list[str], int]]:
    """Yield overrides and stages of runs that need less memory, the smallest changes first."""
    layout = plan.ds.layout
    counts = [count for count in divisors(layout.stages * layout.replicas) if count >= layout.stages]
    offload = [] if on_cpu else [["ds.zero_optimization.offload_optimizer.device=cpu"]]
    ways: list[list[str]] = [[], ["ds.pipeline.activation_checkpoint_interval=1"]]
    for size, way in itertools.product(reversed(divisors(layout.micro_batch_images)), ways):
        smaller = [f"train.accumulation={layout.micro_batches * layout.micro_batch_images // size}"]
        yield (way if size == layout.micro_batch_images else [*way, *smaller]), layout.stages
    for stages, others, way in itertools.product(counts, [[], *offload], ways):
        yield [*others, *way], stages
    channels = plan.spec.unet.channels // 2 if new else 0
    while channels:
        yield [f"unet.channels={channels}"], layout.stages
        channels //= 2


def cut_and_ordered(plan: RunPlan, device: torch.device) -> RunPlan:
    """Return a decided plan with measured cuts and the order of a planned schedule, where asked for. Collective."""
    from ddpm_ds.pipeline.schedule import Program
    from ddpm_ds.predict.decisions import measured_cuts
    from ddpm_ds.processes.process_group import decided_by_rank_0

    measured = plan.ds.partition == "measured" and plan.ds.layout.stages > 1
    predictor = functools.cache(lambda: plan.predictor(device if measured else None))  # rank 0 alone asks
    if measured:
        bounds = decided_by_rank_0(lambda: measured_cuts(predictor(), plan.ds), tuple[int, ...])
        plan = replace(plan, bounds=bounds)
    if not plan.ds.is_ordered:
        return plan
    order = decided_by_rank_0(lambda: predictor().programs(plan.ds.layout, plan.bounds), tuple[Program, ...])
    return replace(plan, programs=order)


def _predictor_here(
    spec: RunSpec,
    config: DsConfig,
    world_size: int,
    hosts: Sequence[str],
    timed: torch.device | None = None,
) -> Predictor:
    """Return a predictor for hosts like this one, with times of layers that are computed, or ``timed`` on a device."""
    from ddpm_ds.device import described
    from ddpm_ds.observe.device_speed import measured_times
    from ddpm_ds.predict.predictor import Predictor

    sizes = set(Counter(hosts).values())
    nodes = len(set(hosts)) if len(sizes) == 1 else 1  # unknown, or of different sizes
    name, memory = described(int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))
    devices = machine_like(name, memory, half=config.precision != "fp32", devices=world_size, nodes=nodes)
    job = workload(spec, config, devices.is_cpu, counted=False)  # alike on all hosts
    times = measured_times(timed, job.precision) if timed is not None else None
    return Predictor(job, devices, times)


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
    like this machine's, or of a kind in :data:`ddpm_ds.predict.layouts.KINDS`. Given values replace the data sheet's:
    ``device_memory`` in bytes of one device, ``flops`` per second, and in bytes per second ``link_bandwidth`` between
    devices of a node and ``network_bandwidth`` between nodes. ``times`` times the layers of layouts that fit; without
    it times are computed. Nothing is trained, and no other process is needed.

    Raises:
        DsConfigError: the JSON can't be read, or training would refuse it.
        LayoutError: no layout divides devices, layers and batch, or fits; or the devices are unknown.
    """
    config = check_ds_config(read_ds_config(ds_config, overrides), ds_config, spec)
    if device_kind is None:
        from ddpm_ds.device import described

        name, here = described(processes // nodes or 1)
        device_kind, device_memory = kind_of(name), device_memory or here
    if device_kind is None:
        raise LayoutError(f"this machine's GPU is not in the planner's table; use --device-kind {' or '.join(KINDS)}")
    devices = machine(device_kind, half=config.precision != "fp32", devices=processes, nodes=nodes)
    rates = {"flops": flops, "link_bandwidth": link_bandwidth, "network_bandwidth": network_bandwidth}
    given: dict[str, Any] = {"memory_bytes": device_memory, **rates}
    devices = replace(devices, **{name: value for name, value in given.items() if value is not None})
    with _without_accelerator():
        from ddpm_ds.predict.decisions import candidates, search, sort_out
        from ddpm_ds.predict.predictor import Predictor

    job = workload(spec, config, devices.is_cpu, counted=True)
    predictor = Predictor(job, devices)
    among = candidates(predictor, ds_config)
    if times is not None and (fitting := sort_out(predictor, among)[0]):  # only layouts that fit are timed
        among, predictor = fitting, Predictor(job, devices, times(job, devices))
    splits = tensor_splits(job, devices.devices_per_node)
    ways = (layouts(job, processes, offload=False, nodes=nodes, tensor=split) for split in splits)
    return search(predictor, top, among, itertools.chain.from_iterable(ways))


def workload(spec: RunSpec, config: DsConfig, on_cpu: bool, *, counted: bool) -> Workload:
    """Return a run to plan for, whose buckets of aspect are weighed by the images that preparation has ``counted``.

    Raises:
        DataError: the autoencoder or the encoders can't be used, or there are too few images.
    """
    text = spec.data.text
    if spec.data.buckets is None and (text is None or text.stored != "ids"):
        return Workload(spec, config, on_cpu)
    from ddpm_ds.data.prepare import bucket_shares
    from ddpm_ds.data.text import TextEncoders

    elements = TextEncoders.open(text, None).elements if text is not None and text.stored == "ids" else 0
    return Workload(spec, config, on_cpu, bucket_shares(spec.data, spec.bucket_group, counted=counted), elements)


@contextlib.contextmanager
def _without_accelerator() -> Iterator[None]:
    """Keep DeepSpeed from looking for devices during its import; later remove variables that are set inside."""
    before = set(os.environ)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        yield
    finally:
        for name in set(os.environ) - before:
            del os.environ[name]
