"""Decisions of the planner: the fastest layouts that fit, and what a run leaves open: stages, cuts, order,
recomputation and micro-batches in flight.

Each is a pure function of a predictor, or of a job and the memory of its devices. Computed times of layers give the
same answer to all processes before they communicate; measured ones differ, so rank 0 decides for all. A search checks
memory first, and simulates only promising layouts.
"""

import itertools
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tqdm import tqdm

from ddpm_ds.config.ds_config import (
    ResolvedDsConfig,
    check_ds_config,
    leaves_space_open,
    leaves_stages_open,
    leaves_tensor_open,
    resolve,
    space_split,
    tensor_split,
    with_split,
)
from ddpm_ds.config.ds_model import changed
from ddpm_ds.ground.errors import DsConfigError, LayoutError, UserError
from ddpm_ds.ground.units import GIB, gib, rounded
from ddpm_ds.pipeline.cuts import partition
from ddpm_ds.pipeline.placement import ACROSS_HOSTS, across_hosts
from ddpm_ds.planning.inputs import NEARLY, Workload, usable
from ddpm_ds.planning.memory import ACTIVATION_SHARE, activation_bytes, layer_bytes, peak_bytes, pipeline_memory
from ddpm_ds.planning.predictor import Prediction, Predictor
from ddpm_ds.schema.layout import WHOLE, AcrossHosts, Layout, Schedule, SpaceSplit, Split, TensorSplit, divisors
from ddpm_ds.schema.section import REMOVED
from ddpm_ds.unet.shards import EVEN_SHARE, busiest_share, can_split, level_of

MOST_MICRO_BATCHES_PER_STAGE = 64
"""Largest number of micro-batches per stage that is tried; more hardly make the bubble smaller."""
LARGEST_GROUP = 8  # largest tensor or space group that is tried
LEAST_GAIN = 0.1  # share of a step that space groups must save where other layouts fit: predictions are no better
INTERVALS = (1, 2, 4)  # numbers of layers per activation checkpoint that are tried
MOST_GROUPED = 48
"""Most layouts with groups of a kind that are tried in the order of lower bounds, then by memory if none fits."""


@dataclass(frozen=True)
class Plan:
    """Result of a search."""

    predictor: Predictor = field(repr=False)  # predictor of the job on its machine
    best: tuple[Prediction, ...]
    """Layouts that differ in stages, schedule, micro-batch or tensor group: those within ``NEARLY`` of the fastest
    step by their memory, least first, then the others by their step."""
    fitting: int
    misfits: int  # number of layouts that don't fit the memory
    fastest_misfit: Prediction | None  # fastest layout that doesn't fit, if it would beat the best
    other_axis: Prediction | None = None  # best layout with the other axis across nodes, if there are several nodes
    in_groups: Prediction | None = None  # fastest layout with tensor groups that fits, if some were looked for
    in_space: Prediction | None = None  # fastest layout with space groups that fits, if some were looked for
    lacking: tuple[str, ...] = ()
    """Sentences on what layouts with groups or without offload lack, if some were tried and none fits."""

    def ds_config(self, number: int = 0) -> dict[str, Any]:
        """Return the DeepSpeed JSON that trains with layout ``number`` of the best; LayoutError if there is none."""
        if number not in range(len(self.best)):
            raise LayoutError(f"number = {number!r} is no layout of the plan; use one from 0 to {len(self.best) - 1}")
        layout = self.best[number].layout
        return ds_config(self.predictor.job, layout, self.predictor.bounds(layout))


def tensor_splits(job: Workload, devices_per_node: int, size: int | None = None) -> Iterator[TensorSplit]:
    """Yield the ways to split a job's layers among tensor groups inside of nodes, or in groups of a ``size``: level 0,
    levels 0 and 1, and so on, each with more layers split.
    """
    levels = len(job.spec.unet.multipliers)
    for members in divisors(devices_per_node, LARGEST_GROUP)[1:] if size is None else [size]:
        divided = {level_of(layer, levels) for layer in job.layers if can_split(layer, members)}
        yield from (TensorSplit(members, tuple(range(level + 1))) for level in range(levels) if level in divided)


def space_splits(predictor: Predictor, devices_per_node: int) -> Iterator[SpaceSplit]:
    """Yield the ways to share images among space groups inside of nodes: the levels that take least time, and those
    that take least memory, of all that can be shared evenly.
    """
    job, alone = predictor.job, Layout(1, 1, "1f1b", 1, 1, 0, 1, offload=False)
    height, levels = job.layers[0].in_size[0], len(job.spec.unet.multipliers)
    for members in divisors(devices_per_node, LARGEST_GROUP)[1:]:
        even = [level for level in range(levels) if busiest_share(height >> level, members) <= EVEN_SHARE]
        ways = [SpaceSplit(members, tuple(range(level + 1))) for level in even]
        fastest = sorted(ways, key=lambda space: predictor.least_seconds(replace(alone, space=space)))
        yield from dict.fromkeys([*fastest[:1], *ways[-1:]])


def splits(predictor: Predictor, devices_per_node: int) -> Iterator[Split]:
    """Yield the ways to split layers, or to share images, among groups of ranks inside of nodes."""
    yield from ((tensor, SpaceSplit()) for tensor in tensor_splits(predictor.job, devices_per_node))
    yield from ((TensorSplit(), space) for space in space_splits(predictor, devices_per_node))


def layouts(job: Workload, devices: int, *, offload: bool, nodes: int = 1, split: Split = WHOLE) -> Iterator[Layout]:
    """Yield all layouts of a job that divide devices, layers and batch without remainder, in groups of a ``split``.

    ``offload`` allows Adam's state in host memory.
    """
    batch, wanted = job.spec.train.batch_images, job.spec.train.accumulation
    groups = devices // math.prod(one.size for one in split)
    needs_zero = job.config.data_types.grad_accum_dtype == "fp32" or job.config.fp16_needs_zero
    # Graphs need flat gradients, which only bf16 has without ZeRO; one device has them in every layout.
    needs_zero |= job.takes_graphs(whole=devices == 1) and job.precision != "bf16"
    zeros = [(stage, False) for stage in ([1, 2] if needs_zero else [0, 1, 2])]
    zeros += [(1, True), (2, True)] if offload and not job.config.is_8bit else []
    for stages in divisors(groups):
        replicas = groups // stages
        if stages > len(job.layers) or batch % replicas:
            continue
        share, most = batch // replicas, MOST_MICRO_BATCHES_PER_STAGE * stages
        places: Sequence[AcrossHosts | Literal["auto"]] = (
            ACROSS_HOSTS if nodes > 1 and stages > 1 and replicas > 1 else ("auto",)
        )
        schedules: list[tuple[Schedule, int | Literal["auto"]]] = [("1f1b", "auto")]
        if 1 < stages <= len(job.layers) // 2:
            schedules += [("planned", "auto"), ("planned", stages)]  # faster, or with half of the activations
        for (schedule, in_flight), count in itertools.product(schedules, divisors(share, most)):
            if wanted not in ("auto", count) or (in_flight != "auto" and count <= in_flight):
                continue
            for (zero_stage, offloaded), interval, across in itertools.product(zeros, (0, *INTERVALS), places):
                sizes = share // count, count, interval
                yield Layout(stages, replicas, schedule, *sizes, zero_stage, offloaded, across, in_flight, *split)


def ds_config(job: Workload, layout: Layout, bounds: Sequence[int]) -> dict[str, Any]:
    """Return the given DeepSpeed JSON with a layout and its cuts filled in; everything else stays as given."""
    keys: dict[str, Any] = layout.keys | {
        "pipeline.partition": [int(cut) for cut in bounds[1:-1]] if layout.stages > 1 else "auto"
    }
    if layout.zero_stage == 0:
        keys["zero_optimization"] = {"stage": 0}
        if "fp16" in job.config.model_fields_set:  # only ZeRO's loss scaler has these
            keys |= dict.fromkeys(("fp16.hysteresis", "fp16.consecutive_hysteresis"), REMOVED)
    else:
        offload = {"device": "cpu", "pin_memory": True} if layout.offload else REMOVED
        keys |= {"zero_optimization.stage": layout.zero_stage, "zero_optimization.offload_optimizer": offload}
    return changed(job.config, keys).given


def search(
    predictor: Predictor,
    top: int,
    among: Sequence[Layout] | None = None,
    grouped: Iterable[Layout] = (),
    *,
    assumes: bool = True,
) -> Plan:
    """Return the ``top`` best layouts that fit, among all without groups or ``among``, and the ``grouped``.

    Of layouts that differ only in ZeRO, offload or checkpointing, only the best is returned (:class:`Plan`). Grouped
    layouts in space groups are among the best if nothing else fits, or if they save :data:`LEAST_GAIN`; unless it
    ``assumes`` the speed of swaps, only if that was measured or the devices are CPUs.

    Raises:
        LayoutError: no layout divides devices, layers and batch, or none fits; the message names the nearest.
    """
    fitting, misfits = sort_out(predictor, candidates(predictor) if among is None else among)
    limit = max(one.step_seconds for one in _fastest(predictor, fitting, top)) if len(fitting) >= top else math.inf
    grouped = [*grouped]
    (found, too_large), (in_space, too_large_in_space) = (
        _sort_out_groups(predictor, [one for one in grouped if (one.space.size > 1) == shared], limit)
        for shared in (False, True)
    )
    in_groups, shared = (next(iter(_fastest(predictor, one, 1)), None) for one in (found, in_space))
    if not (fitting or found or in_space):
        raise _nothing(predictor, misfits + too_large + too_large_in_space)
    fitting += found
    best, other_axis = _fastest(predictor, fitting, top), None
    least = (1 - LEAST_GAIN) * min((one.step_seconds for one in best), default=math.inf)
    knows = assumes or predictor.machine.is_cpu or predictor.machine.swap is not None
    if shared is not None and (not best or (knows and shared.step_seconds < least)):
        fitting += in_space
        best = _fastest(predictor, fitting, top)
    if (across := best[0].layout.across_hosts) != "auto":
        other: AcrossHosts = "replicas" if across == "stages" else "stages"
        other_axis = predictor.predict(replace(best[0].layout, across_hosts=other))
    resident = [layout for layout in misfits if not layout.offload and all(one.offload for one in fitting)]
    kinds = {"With tensor groups": [] if found else too_large, "Without offload": resident}
    kinds["With space groups"] = [] if in_space else too_large_in_space
    lacking = []
    for kind in filter(kinds.get, kinds):
        nearest, device = _nearest(predictor, kinds[kind])
        lacking.append(f"{kind} nothing fits: {nearest}; devices of {device} would do.")
    limit = min(one.step_seconds for one in best)
    known = [layout for layout in misfits if predictor.knows_times(layout)]  # timing others would take long
    faster = (one for one in _fastest(predictor, known, 1, limit) if one.step_seconds < limit)
    misfit = next(faster, None)
    return Plan(predictor, best, len(fitting), len(misfits), misfit, other_axis, in_groups, shared, tuple(lacking))


def _sort_out_groups(
    predictor: Predictor, grouped: Iterable[Layout], limit: float
) -> tuple[list[Layout], list[Layout]]:
    """Return (fitting, too large): grouped layouts tried, fastest bound first, then, if none fits, by their memory."""
    job, usable_bytes = predictor.job, predictor.machine.usable_bytes
    by_bound = sorted(grouped, key=predictor.least_seconds)
    least = {one: sum(layer_bytes(job, one, one.stages - 1, 0)) / one.stages for one in by_bound}
    found: list[Layout] = []
    misfits: list[Layout] = []

    def try_one(layout: Layout) -> None:
        if predictor.cut(layout) is None or _refusal(predictor, layout, "plan") is not None:
            return
        (found if predictor.fits(layout) else misfits).append(layout)

    for layout in [one for one in by_bound if least[one] <= usable_bytes][:MOST_GROUPED]:
        if found and predictor.least_seconds(layout) > limit:
            break
        try_one(layout)
    if not found:
        for layout in sorted(set(by_bound) - set(misfits), key=lambda one: least[one])[:MOST_GROUPED]:
            try_one(layout)
    return found, misfits


def candidates(predictor: Predictor, path: Path | str = "plan", among: Sequence[Layout] | None = None) -> list[Layout]:
    """Return layouts that training accepts; layouts that recompute have the interval that needs least memory.

    ``path`` is of the DeepSpeed JSON, for messages; DsConfigError if training would refuse it with every layout.
    """
    chosen: list[Layout] = []
    recomputing: dict[Layout, tuple[int, Layout]] = {}
    refusals: dict[tuple[str, int, bool, int], UserError | None] = {}
    machine, pairs = predictor.machine, predictor.job.spec.diffusion.noise_pairs
    if among is None:
        among = [*layouts(predictor.job, machine.devices, offload=not machine.is_cpu, nodes=machine.nodes)]
    for layout in tqdm(among, "cutting the U-Net", unit=" layouts", delay=3, leave=False, disable=None):
        if predictor.cut(layout) is None or layout.micro_batch_images % pairs:
            continue
        kind = (layout.schedule, layout.zero_stage, layout.offload, layout.interval)
        if kind not in refusals:
            refusals[kind] = _refusal(predictor, layout, path)
        if refusals[kind] is not None:
            continue
        if layout.checkpoint_interval:
            like, needs = replace(layout, checkpoint_interval=1), predictor.needs(layout)
            recomputing[like] = min(recomputing.get(like, (needs, layout)), (needs, layout), key=lambda pair: pair[0])
        else:
            chosen.append(layout)
    wrong = [refusal for refusal in refusals.values() if isinstance(refusal, DsConfigError)]
    if wrong and all(refusals.values()):
        raise wrong[0]
    return chosen + [layout for _, layout in recomputing.values()]


def sort_out(predictor: Predictor, considered: Sequence[Layout]) -> tuple[list[Layout], list[Layout]]:
    """Return the layouts that fit the devices' memory, and those that don't."""
    fitting: list[Layout] = []
    misfits: list[Layout] = []
    for layout in tqdm(considered, "computing memory", unit=" layouts", delay=3, leave=False, disable=None):
        (fitting if predictor.fits(layout) else misfits).append(layout)
    return fitting, misfits


def _fastest(
    predictor: Predictor, among: Sequence[Layout], top: int, limit: float = math.inf
) -> tuple[Prediction, ...]:
    """Predict layouts in the order of lower bounds, until no other can be among the best or below ``limit``.

    With several micro-batches, layouts are left out where ZeRO-1 fits with the same cuts: of ZeRO-2, which averages the
    gradients of each, and of ZeRO-0 where it would add them up in 16 bits.
    """
    fitting, sums = set(among), predictor.job.config.adds_in_fp32

    def is_worse(one: Layout) -> bool:
        like, count = replace(one, zero_stage=1), one.micro_batches
        if one.zero_stage == 1 or count == 1 or like not in fitting:
            return False
        worse = one.zero_stage == 2 or sums(0, count) < sums(1, count)
        return worse and predictor.bounds(like) == predictor.bounds(one)

    among = [one for one in among if not is_worse(one)]

    def kind(layout: Layout) -> tuple[object, ...]:
        groups = layout.tensor.size, layout.space.size
        return layout.stages, layout.schedule, layout.micro_batch_images, *groups

    found, steps, near = list[Prediction](), dict[tuple[object, ...], float](), 0.0
    for bound, layout in sorted(((predictor.lower_bound(one), one) for one in among), key=lambda pair: pair[0]):
        if bound > limit:
            break
        found.append(predictor.predict(layout))
        steps[kind(layout)] = min(steps.get(kind(layout), math.inf), found[-1].step_seconds)
        near = (1 + NEARLY) * min(steps.values())
        if len(steps) >= top:
            limit = min(limit, max(sorted(steps.values())[top - 1], near))
    best: dict[tuple[object, ...], Prediction] = {}
    for one in sorted(found, key=lambda one: (max(one.step_seconds, near), one.peak.total, one.step_seconds)):
        best.setdefault(kind(one.layout), one)
    return tuple(best.values())[:top]


def _refusal(predictor: Predictor, layout: Layout, path: Path | str) -> UserError | None:
    config = ds_config(predictor.job, layout, predictor.bounds(layout))
    try:
        spec = predictor.job.spec
        resolve(check_ds_config(config, path, spec), spec, world_size=layout.world_size, stages=None, path=path)
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
    nearest, device = _nearest(predictor, misfits)
    return LayoutError(
        f"nothing fits {devices} devices of {gib(machine.memory_bytes)} ({gib(machine.usable_bytes)} of it usable); "
        f"{nearest}; use more devices, devices of {device} or a smaller train.batch_images"
    )


def _nearest(predictor: Predictor, misfits: Sequence[Layout]) -> tuple[str, str]:
    """Return words about the layout nearest to fitting, and the ``--device-memory`` with which it would, rounded up."""
    kinds: dict[tuple[object, ...], Layout] = {}
    for layout in sorted(misfits, key=predictor.needs):
        kinds.setdefault((layout.stages, layout.schedule, layout.tensor.size, layout.space.size), layout)
    found = [(layout, pipeline_memory(predictor.job, layout, predictor.tightest(layout))) for layout in kinds.values()]
    machine, totals = predictor.machine, [[memory.total for memory in ranks] for _, ranks in found]
    needs, number = min((max(total), number) for number, total in enumerate(totals))
    device = machine.memory_bytes * needs / max(machine.usable_bytes, 1)
    rounded = f"{-(-int(device) * 10 // GIB) / 10}GiB" if device >= GIB else f"{int(device) // 2**20 + 1}MiB"
    over, rank = gib(needs - machine.usable_bytes), totals[number].index(needs)
    return f"the nearest, {found[number][0].words()}, is {over} over on rank {rank}", rounded


class Choice(NamedTuple):
    """What a run leaves open of its layout, by the planner."""

    stages: int
    tensor: TensorSplit | None  # split of the layers, if the JSON leaves it open
    space: SpaceSplit | None  # rows that ranks share, if the JSON leaves them open
    line: str  # the choice and its reason, in a line that begins with what was open

    @property
    def keys(self) -> dict[str, object]:
        """Dotted keys of the JSON that ask for the groups that were open."""
        found = {"pipeline.tensor": self.tensor, "pipeline.space": self.space}
        return {name: one.block for name, one in found.items() if one is not None}


def choose_layout(predictor: Predictor, path: Path | str, hosts: Sequence[Hashable], stages: int | None) -> Choice:
    """Return the number of stages, unless ``stages`` or the JSON gives it, and the groups with which a step is fastest.

    ``path`` is that of the DeepSpeed JSON, for messages; ``hosts`` has the host of each global rank.

    Raises:
        DsConfigError: the JSON contradicts the spec.
        LayoutError: no number of stages shares the processes, the batch and the layers, or none fits the memory.
    """
    job, world_size = predictor.job, predictor.machine.devices
    open_stages = stages is None and leaves_stages_open(job.config, world_size)
    open_split, open_space = leaves_tensor_open(job.config), leaves_space_open(job.config)
    found, refusal = [], LayoutError(f"{world_size} processes can't be laid out")
    tensor, space = tensor_split(job.config), space_split(job.config)
    ways, on_host = [(tensor, space)], math.gcd(*Counter(hosts).values())
    if open_split and tensor.size > 1:
        ways = [(one, space) for one in tensor_splits(job, world_size, tensor.size)] or ways
    else:
        ways += [one for one in splits(predictor, on_host) if (open_split if one[0].size > 1 else open_space)]
    for split in reversed(ways):  # so that a refusal names the smallest groups
        ranks = math.prod(one.size for one in split)
        for count in (divisors(world_size // ranks) or [1]) if open_stages else [stages]:
            config = with_split(job.config, split)
            try:
                ds = resolve(config, job.spec, world_size=world_size, stages=count, path=path)
            except LayoutError as error:
                refusal = error
            else:
                found += _layouts(ds, predictor, hosts)
    if not found:
        raise refusal
    grouped = [one for one in found if one.tensor.size > 1 or one.space != space]
    whole = [one for one in found if one not in grouped and predictor.cut(one) is not None]
    first, *others = search(predictor, len(found), whole, grouped, assumes=False).best
    why = f"on {predictor.machine.kind} {first.layout.words()} would take {rounded(first.step_seconds)} s a step"
    if others:  # of the other kind, if there is one
        other = min(others, key=lambda one: (one.layout in grouped) == (first.layout in grouped))
        why += f", {other.layout.words()} {rounded(other.step_seconds)} s"
    keys = ["-p"] * open_stages + ["pipeline.tensor"] * open_split + ["pipeline.space"] * open_space
    line = f"{'stages' if open_stages else 'groups':<12} {why}; {' or '.join(keys)} chooses otherwise"
    chosen = first.layout.tensor if open_split else None, first.layout.space if open_space else None
    return Choice(first.layout.stages, *chosen, line)


def measured_cuts(predictor: Predictor, ds: ResolvedDsConfig) -> tuple[int, ...]:
    """Return the bounds with which the slowest rank is fastest, if possible within its memory; LayoutError if none."""
    among = _layouts(ds, predictor, ())
    if predictor.cut(among[0]) is None:
        count = len(predictor.job.layers)
        raise LayoutError(f"the U-Net's {count} layers can't be cut into {ds.layout.stages} stages; use fewer")
    best = next((layout for layout in among if predictor.fits(layout)), None)
    if best is not None:
        predictor.improve(best)
    return predictor.bounds(best or among[-1])


def fitted(job: Workload, layout: Layout, bounds: Sequence[int], memory_bytes: int) -> Layout:
    """Return a layout with the recomputation and the number of micro-batches in flight that a device's memory needs."""
    interval, in_flight = layout.checkpoint_interval, layout.in_flight
    if interval == "auto":
        fewest = replace(layout, checkpoint_interval=0, in_flight=layout.stages if in_flight == "auto" else in_flight)
        interval = int(activation_bytes(job, fewest, bounds) > ACTIVATION_SHARE * memory_bytes)
    layout = replace(layout, checkpoint_interval=interval)
    if in_flight == "auto" and layout.schedule == "planned":
        fits = peak_bytes(job, layout, bounds) <= usable(memory_bytes, on_cpu=job.on_cpu)
        layout = replace(layout, in_flight=layout.most_kept if fits else layout.stages)
    return layout


def _layouts(ds: ResolvedDsConfig, predictor: Predictor, hosts: Sequence[Hashable]) -> list[Layout]:
    """Return a configuration's layouts, with and without recomputation if that is open."""
    intervals = (0, 1) if ds.layout.checkpoint_interval == "auto" else (ds.layout.interval,)
    found = [replace(ds.layout, checkpoint_interval=interval) for interval in intervals]
    if len(set(hosts)) > 1 and min(ds.layout.stages, ds.layout.data_ranks) > 1:
        layers = predictor.job.layers
        bounds = partition(layers, ds.layout.stages, ds.planned_partition, ds.layout.schedule)
        across = across_hosts(ds, layers, bounds, hosts)
        found = [replace(layout, across_hosts=across) for layout in found]
    return found
