"""Advice: the one change to try after a run, by the planner with the seconds of a traced step.

Layouts that differ from the run's in one respect are searched, with the same batch. What is beside a step's layout
(loader processes, loss scale, pauses) saves the share of the time that it costs.
"""

import json
import math
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from ddpm_ds.command_line import counted, gib
from ddpm_ds.config.ds_config import Layout
from ddpm_ds.errors import LayoutError
from ddpm_ds.pipeline.cuts import folds
from ddpm_ds.pipeline.schedule import Program
from ddpm_ds.predict.costs import link, shared, update_bytes
from ddpm_ds.predict.decisions import candidates, search
from ddpm_ds.predict.finished_run import FinishedRun
from ddpm_ds.predict.layouts import (
    USABLE_MEMORY,
    Machine,
    ds_config,
    layouts,
    machine_like,
    rank_stages,
    tensor_splits,
)
from ddpm_ds.predict.memory import peak_bytes, pipeline_memory
from ddpm_ds.predict.predictor import Predictor
from ddpm_ds.predict.simulate import simulate
from ddpm_ds.unet.shards import level_of

LEAST_GAIN = 0.01
"""Smallest share of an image's time that makes a change worth trying."""
MUCH_MORE = 0.2
"""Additional share of the time that another number of stages has to save: its messages are not measured."""
MOST_LAYOUTS = 4
"""Number of layouts of which the one with the fewest settings is taken, if they save about the same."""
MOST_WORKERS = 16
PAUSE_SHARE = 0.01
"""Share of the time that pauses may take after a change."""
SLOWEST_LINK, FASTEST_LINK = 1e3, 1e13
"""Range of bytes per second in which the speed of links is searched."""
HALVINGS = 14
ORDERS = 2
"""Number of orders of a planned schedule for which it is searched: for free links, then for those found."""


@dataclass(frozen=True)
class Change:
    """Change of settings, and its predicted saving."""

    words: str
    """Description of the change, in a sentence."""
    gain: float
    """Share of an image's time that the change saves."""
    settings: dict[str, Any]
    """Values by key of the run spec, or of the DeepSpeed JSON after ``ds.``."""

    @property
    def edit(self) -> str:
        """Change as options of ``ddpm-ds train``."""
        options = []
        for name, value in self.settings.items():
            text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
            options.append(f"--set {shlex.quote(f'{name}={text}')}")
        return " ".join(options)


def best_change(facts: FinishedRun, predictor: Predictor, shares: Mapping[str, float]) -> Change | None:
    """Return the change that saves most, by a run's shares of the time; None if none is worth trying.

    Of changes that save about the same, the one with the fewest settings is taken.
    """
    found = changes(facts, predictor, shares)
    most = max((change.gain for change in found), default=0.0)
    about = [change for change in found if LEAST_GAIN <= change.gain > most - LEAST_GAIN]
    return min(about, key=lambda change: len(change.settings), default=None)


def changes(facts: FinishedRun, predictor: Predictor, shares: Mapping[str, float]) -> list[Change]:
    """Return the changes to choose from, some of which may save nothing."""
    before = predictor.simulate(facts.layout, facts.bounds).step_seconds
    near, far = (_fastest_layouts(facts, predictor, before, same_stages=same) for same in (True, False))
    least = MUCH_MORE + max((change.gain for change in near), default=0.0)
    found = [*near, *(change for change in far if change.gain > least), *_in_groups(facts, predictor, before)]
    if skipped := shares["overflow steps"]:
        found.append(_loss_scale(facts, skipped))
    return [*found, *_loading(facts, before, shares["data wait"]), *_pausing(facts)]


def traced_predictor(facts: FinishedRun) -> Predictor:
    """Return a predictor with the seconds of the traced step, whose layouts may have other numbers of micro-batches.

    Links have the bandwidth with which the run's own layout takes as long as it did, without its waiting for images.
    What fits is what its device has, or at least what the run takes.
    """
    job, now, train = facts.job, facts.layout, facts.spec.train
    free = facts.spec.model_copy(update={"train": train.model_copy(update={"accumulation": "auto"})})
    owned = sum(layer.parameters for layer in facts.own_layers) / (now.replicas if shared(job, now).weight_bytes else 1)
    updating = math.fsum(rank.optimizer_seconds for rank in facts.ranks)
    bandwidth = owned * update_bytes(job, now) / updating if updating else math.inf
    peak = peak_bytes(job, now, facts.bounds)
    machine = Machine(
        kind="cpu" if job.on_cpu else "traced",
        devices=now.world_size,
        nodes=1,
        memory_bytes=max(facts.device.memory_bytes or 0, peak if job.on_cpu else math.ceil(peak / USABLE_MEMORY)),
        flops=math.inf,  # the layers' seconds are known
        memory_bandwidth=bandwidth,
        link_bandwidth=FASTEST_LINK,
        network_bandwidth=FASTEST_LINK,
        host_bandwidth=bandwidth,
        layer_seconds=0.0,
        launch_seconds=0.0,
    )

    def predictor(exponent: float) -> Predictor:
        linked = replace(machine, link_bandwidth=10**exponent)
        return Predictor(replace(job, spec=free), linked, facts.layer_times, now.tensor)

    def step_seconds(exponent: float, order: Sequence[Program] | None) -> float:
        one = predictor(exponent)
        costs, between = one.costs(now, facts.bounds), link(one.machine, now)
        return simulate(now.schedule, now.micro_batches, costs, between, programs=order).step_seconds

    loading = max(rank.data_wait_seconds + rank.load_seconds for rank in facts.ranks)
    modelled = facts.step_seconds - loading - fmean(rank.other_seconds for rank in facts.ranks)
    found = math.log10(FASTEST_LINK)
    for _ in range(ORDERS):
        order = predictor(found).programs(now, facts.bounds)  # making one for each bandwidth would take seconds
        slow, found = math.log10(SLOWEST_LINK), math.log10(FASTEST_LINK)
        for _ in range(HALVINGS if step_seconds(found, order) < modelled else 0):
            middle = (slow + found) / 2
            slow, found = (middle, found) if step_seconds(middle, order) > modelled else (slow, middle)
    return predictor(found)


def _fastest_layouts(facts: FinishedRun, predictor: Predictor, before: float, *, same_stages: bool) -> list[Change]:
    """Return the fastest layouts near the run's, with as many stages or with others; a step took ``before`` seconds."""
    now = facts.layout
    near = [
        one
        for one in layouts(predictor.job, predictor.machine.devices, offload=now.offload)
        if (one.stages == now.stages) == same_stages
        and one.in_flight in ("auto", now.in_flight)
        and facts.job.is_replayed(one) >= facts.replayed  # launches of others are not in the layers' seconds
        and sum(a != b for a, b in zip(_respects(one), _respects(now), strict=True)) <= 1
        and (one.offload, one.zero_stage > 0) >= (now.offload, now.zero_stage > 0)  # other keys may need them
    ]
    try:
        best = search(predictor, MOST_LAYOUTS, candidates(predictor, among=near)).best
    except LayoutError:  # none fits
        return []
    found = (_change(facts, one.layout, predictor.bounds(one.layout), before - one.step_seconds) for one in best)
    return [change for change in found if change.settings]  # the run's own layout is among them


def _in_groups(facts: FinishedRun, predictor: Predictor, before: float) -> Iterator[Change]:
    """Yield the fastest layout in tensor groups that keeps the activations that the run computes again, where these
    don't fit and most of the fullest rank's are of one level; a step took ``before`` seconds.
    """
    job, now, machine = facts.job, facts.layout, predictor.machine
    kept = replace(now, checkpoint_interval=0)
    memory = pipeline_memory(job, kept, facts.bounds)
    rank = max(range(now.stages), key=lambda number: memory[number].total)
    needs = memory[rank].total
    if not now.checkpoint_interval or now.tensor.size > 1 or now.offload or needs <= machine.usable_bytes:
        return
    levels, sizes = len(job.spec.unet.multipliers), Counter[int]()
    for stage in rank_stages(job.layers, facts.bounds, now.schedule)[rank]:
        for layer in job.largest_layers[stage.start : stage.stop]:
            sizes[level_of(layer, levels)] += layer.activation_elements
    ((level, size),) = sizes.most_common(1)
    if size <= sizes.total() / 2:
        return
    # sums cross links that few runs have measured: they are no faster than a data sheet has them
    kind, half = "cpu" if job.on_cpu else "", job.precision != "fp32"
    sheet = machine_like(kind, machine.memory_bytes, half=half, devices=machine.devices, nodes=1)
    slower = replace(machine, link_bandwidth=min(machine.link_bandwidth, sheet.link_bandwidth))
    grouped = [
        one
        for split in tensor_splits(job, math.gcd(facts.host_devices, machine.devices))
        for one in layouts(predictor.job, machine.devices, offload=False, tensor=split)
        if split.levels != "all" and level in split.levels and not one.checkpoint_interval
        if one.zero_stage == now.zero_stage and one.in_flight in ("auto", now.in_flight)
    ]
    among = Predictor(predictor.job, slower, facts.layer_times, now.tensor)
    try:
        (best,) = search(among, 1, [], grouped).best
    except LayoutError:  # none fits
        return
    change = _change(facts, best.layout, among.bounds(best.layout), before - best.step_seconds)
    words = (
        f"{change.words}, keeps all activations in {gib(best.peak.total)} a device; as the run is laid out rank {rank} "
        f"would need {gib(needs)} of {gib(machine.usable_bytes)}, and {size / sizes.total():.0%} of its activations "
        f"are of level {level}"
    )
    yield replace(change, words=words)


def _change(facts: FinishedRun, layout: Layout, bounds: tuple[int, ...], saved_seconds: float) -> Change:
    """Return the change of a run to a layout that saves so much of a step."""
    given, wanted = facts.job.config, ds_config(facts.job, layout, bounds)
    for same in ("across_hosts", *(["partition"] if bounds == facts.bounds else [])):
        del wanted["pipeline"][same]
    settings = dict(_differences(given, wanted, "ds."))
    if facts.spec.train.accumulation not in ("auto", layout.micro_batches):
        settings["train.accumulation"] = layout.micro_batches
    cuts = "" if layout.stages == 1 else f", cut at {', '.join(map(str, bounds[1:-1]))}"
    gain = facts.stepping * saved_seconds / facts.step_seconds
    return Change(f"The planner's {layout.words()}{cuts}", gain, settings)


def _respects(layout: Layout) -> tuple[Any, ...]:
    """Return what a change may alter one of: where layers are, micro-batches, recomputation, ZeRO."""
    place = layout.stages, folds(layout.schedule)
    return place, layout.micro_batch_images, layout.checkpoint_interval, layout.zero_stage


def _differences(given: Mapping[str, Any], wanted: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield the keys of a JSON whose wanted value is another than the given one."""
    for name, value in wanted.items():
        if isinstance(value, Mapping):
            yield from _differences(given.get(name, {}), value, f"{prefix}{name}.")
        elif name not in given or given[name] != value:
            yield f"{prefix}{name}", value


def _loading(facts: FinishedRun, alone: float, share: float) -> Iterator[Change]:
    """Yield as many loader processes as keep up with steps of ``alone`` seconds, or what helps where more don't."""
    workers, residence, shuffle = facts.spec.data.workers, facts.residence, facts.spec.data.shuffle_images
    wait = max(rank.data_wait_seconds for rank in facts.ranks)
    most = MOST_WORKERS if residence is None or not residence.in_memory else min(MOST_WORKERS, residence.cores)
    readers = max(1, workers)  # without workers two threads read, which give as much as one worker (docs/data.md)
    work = readers * (alone + wait)
    enough = min(math.ceil(work / alone), most)
    if residence is not None and (enough <= readers or residence.scattered(shuffle)):
        key, _, value = residence.remedy(shuffle).partition("=")
        if value:
            yield Change("Images are read or decoded many times as fast", share, {key: value})
    elif enough > readers:
        left = max(0.0, work / enough - alone) / wait
        words = f"With {counted(enough, 'loader')} images are read ahead while the devices compute"
        yield Change(words, share * (1 - left), {"data.workers": enough})


def _loss_scale(facts: FinishedRun, share: float) -> Change:
    """Return a loss scale that does not overflow, or a precision without one."""
    found = facts.overflows
    if found.last_scale < found.first_scale:
        power = max(int(math.log2(found.last_scale)), 0)
        words = "A loss scale that begins where it ended overflows in no step at the beginning"
        return Change(words, share, {"ds.fp16.initial_scale_power": power})
    words = "bf16 has fp32's range and needs no loss scale"
    return Change(words, share, {"ds.fp16.enabled": False, "ds.bf16.enabled": True})


def _pausing(facts: FinishedRun) -> Iterator[Change]:
    """Yield checkpoints, samples and validation so seldom that each takes 1 % of the time."""
    inspecting = facts.pauses.inspection_share
    validating = min(facts.evaluation_seconds / facts.pauses.seconds, inspecting) if inspecting else 0.0
    shares = {"checkpoint": facts.pauses.checkpoint_share, "evaluation": validating, "samples": inspecting - validating}
    for part, share in shares.items():
        spec, factor = getattr(facts.spec, part), max(2, math.ceil(share / PAUSE_SHARE))
        key = "every_minutes" if spec.every_images is None else "every_images"
        if share and (every := getattr(spec, key, None)) is not None:
            words = f"{part.capitalize()} {factor} times less often"
            yield Change(words, share * (1 - 1 / factor), {f"{part}.{key}": f"{factor * every:.15g}"})
