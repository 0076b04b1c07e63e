"""Verdict on a finished run: where its time went, the largest cost with its numbers, and the one change to try.

All devices' time is attributed. Times measured directly in a traced step are used unchanged; waiting for other ranks is
explained by simulating the same schedule, one cause after the other::

    simulated                                    explains
    equal ranks, free links                      the bubble
    the measured ranks                           and the imbalance
    with loading, on the ranks that load         and waiting for the loader of another rank

The waiting that is left is communication. The change is the planner's, with the seconds of a traced step: layouts that
differ from the run's in one respect are searched, with the same batch. Other settings (reading threads, loss scale,
pauses) save the share of the time that they cost.
"""

import json
import math
import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from ddpm_ds.data.sources.base import printable
from ddpm_ds.ground.errors import LayoutError
from ddpm_ds.ground.files import replace_file
from ddpm_ds.ground.units import counted, gib, rounded
from ddpm_ds.observe.device_speed import LayerSeconds
from ddpm_ds.pipeline.cuts import folds
from ddpm_ds.pipeline.placement import sharing
from ddpm_ds.pipeline.schedule import Program
from ddpm_ds.planning.costs import links, update_bytes
from ddpm_ds.planning.decisions import candidates, ds_config, layouts, search, tensor_splits
from ddpm_ds.planning.finished_run import FinishedRun, facts_of, machine_json
from ddpm_ds.planning.inputs import USABLE_MEMORY
from ddpm_ds.planning.memory import peak_bytes
from ddpm_ds.planning.predictor import Prediction, Predictor
from ddpm_ds.planning.simulate import PhaseCosts, RankCosts, order_of, simulate
from ddpm_ds.schema.layout import Layout, SpaceSplit, Split, TensorSplit, divisors
from ddpm_ds.tracking.run_folder import DS_CONFIG, MACHINE, SPEC, VERDICT

LEAST_GAIN, ABOUT, MUCH_MORE = 0.1, 0.01, 0.2
"""Smallest share of an image's time that makes a change worth trying, the difference of shares that are about the same,
and the additional share that another number of stages has to save: its messages are not measured."""
MOST_LAYOUTS = 4  # number of the fastest layouts to choose from
MOST_WORKERS, PAUSE_SHARE = 16, 0.01  # most reading threads, and share of the time that pauses may take, after a change
SLOWEST_LINK, FASTEST_LINK, HALVINGS, ORDERS = 1e3, 1e13, 14, 2
"""Range of bytes per second in which the links' speed is searched, how often it is halved, and the number of searches:
the second takes the planned order for the speed that the first has found."""
USEFUL = "useful work"
MEASURED = {
    "communication": ("send_seconds", "reduce_seconds"),
    "data wait": ("data_wait_seconds",),
    "transfers": ("load_seconds",),
    "optimizer": ("optimizer_seconds",),
}
"""Seconds of a rank's step that a cost takes beside waiting."""
HEALTHY = 0.05  # share below which no cost is worth a change
BAR, LINE, SHOWN_SHARE = 40, 100, 5e-4
"""Characters of a bar for all of the time, and of a line that is no command; and the smallest share that is shown."""
SHOWN = {"low utilisation": "operator start-up", "sampling pauses": "sampling and validation"}
"""Names shown to users for shares whose MLflow tag is less clear."""


@dataclass(frozen=True)
class Change:
    """Change of settings, and its predicted saving."""

    words: str
    gain: float  # share of an image's time that the change saves
    settings: dict[str, Any]  # values by key of the run spec, or of the DeepSpeed JSON after ``ds.``

    @property
    def edit(self) -> str:
        """Change as options of ``ddpm-ds train``."""
        texts = {name: json.dumps(value, separators=(",", ":")).strip('"') for name, value in self.settings.items()}
        return " ".join(f"--set {shlex.quote(f'{name}={text}')}" for name, text in texts.items())


@dataclass(frozen=True)
class Verdict:
    """Findings about a run."""

    shares: dict[str, float]
    """Shares of all devices' time: useful work, then the costs, the largest first; they sum to 1."""
    top: str  # the largest cost
    evidence: str  # its numbers, in a sentence
    change: Change | None  # change to try next; None if none is predicted to save :data:`LEAST_GAIN`
    processes: int

    @property
    def healthy(self) -> bool:
        return self.shares[self.top] < HEALTHY


def verdict(facts: FinishedRun) -> Verdict:
    """Judge a run; of changes that save about the same, name the one with the fewest settings."""
    found, predictor = shares(facts), traced_predictor(facts)
    _, top, *_ = found
    possible = changes(facts, predictor, found)
    most = max((change.gain for change in possible), default=0.0)
    about = [change for change in possible if LEAST_GAIN <= change.gain > most - ABOUT]
    best = min(about, key=lambda change: len(change.settings), default=None)
    evidence = _evidence(facts, top, found[top], predictor.machine.link_bandwidth)
    return Verdict(found, top, evidence, best, predictor.machine.devices)


def conclude(run_dir: Path, startup: Mapping[str, LayerSeconds]) -> Verdict:
    """Judge a run at its end, on rank 0, with the ``startup`` of its layers, and write both; takes up to some seconds.
    OutputError or OSError if no step was traced, or the run's files can't be read or written.
    """
    facts = facts_of(run_dir)
    machine = replace(facts.machine, startup=startup)
    found = verdict(replace(facts, machine=machine))
    replace_file(run_dir / MACHINE, machine_json(machine).encode())
    replace_file(run_dir / VERDICT, text(found, run_dir).encode())
    return found


def text(found: Verdict, run_dir: Path) -> str:
    """Return a table of the shares, and conclusions in a few sentences, with the command to try next."""
    shares = {SHOWN.get(name, name): share for name, share in found.shares.items() if share >= SHOWN_SHARE}
    width = max(map(len, shares))
    lines = ["where the time went", ""]
    lines += [f"  {name:<{width}}  {share:6.1%}  {'#' * round(BAR * share)}".rstrip() for name, share in shares.items()]
    largest = f"largest cost: {SHOWN.get(found.top, found.top)}, {found.shares[found.top]:.1%}"
    if found.healthy:
        lines += ["", f"healthy: no cost takes {HEALTHY:.0%} of the time; {largest}"]
    else:
        lines += ["", textwrap.fill(f"{largest}: {found.evidence}.", LINE, break_on_hyphens=False)]
    if (change := found.change) is None:
        lines.append(f"try next: nothing; no change with the same batch would save {LEAST_GAIN:.0%} of the time")
    else:
        spec, config = (shlex.quote(printable(str(run_dir / name))) for name in (SPEC, DS_CONFIG))
        files = f"--spec {spec} --deepspeed_config {config}"
        lines.append(f"try next: ddpm-ds train {files} --processes {found.processes} {change.edit}")
        faster = f"{change.gain:.0%} less time per image, {1 / (1 - change.gain):.2f} times the images per second"
        lines.append(textwrap.fill(f"{change.words}. Predicted: {faster}.", LINE, break_on_hyphens=False))
    return "\n".join(lines) + "\n"


def tags(found: Verdict) -> dict[str, str]:
    """Return the tags that MLflow shows beside a run."""
    return {
        "verdict.top": "healthy" if found.healthy else found.top,
        "verdict.share": f"{found.shares[found.top]:.1%}",
        "verdict.try": "nothing" if found.change is None else found.change.edit,
    }


# ---------------------------------------------------------------- shares


def shares(facts: FinishedRun) -> dict[str, float]:
    """Return shares of all devices' time: useful work, then the costs, the largest first."""
    times, left = facts.layout.micro_batches, facts.stepping
    again, starting, swapping = facts.recomputation_seconds, times * facts.startup_seconds, facts.mean("swap_seconds")
    step = _waits(facts) | {"other": max(0.0, facts.mean("other_seconds"))}
    for name, measured in MEASURED.items():
        step[name] += facts.mean(*measured)
    step |= {"recomputation": again, "low utilisation": starting, "swaps": swapping}
    step[USEFUL] = times * facts.mean("pass_seconds") - again - starting - swapping
    thrown_away, total = facts.overflows.skipped / facts.overflows.steps, math.fsum(step.values())
    found = {name: left * (1 - thrown_away) * seconds / total for name, seconds in step.items()}
    found["overflow steps"] = left * thrown_away
    found["checkpoint pauses"], found["sampling pauses"] = facts.pauses.checkpoint_share, facts.pauses.sampling_share
    return {USEFUL: found.pop(USEFUL)} | dict(sorted(found.items(), key=lambda cost: -cost[1]))


def _waits(facts: FinishedRun) -> dict[str, float]:
    """Return the seconds that a rank waits, by cause, mean over the ranks; together they are the measured waiting."""
    ranks, measured = facts.ranks, [rank.phases for rank in facts.ranks]
    names = ("forward_seconds", "backward_seconds", "weight_seconds")
    mean = tuple(
        replace(same[0], **{name: fmean(getattr(phase, name) for phase in same) for name in names})
        for same in zip(*measured, strict=True)
    )
    bubble, uneven = _idle(facts, [mean] * len(ranks)), _idle(facts, measured)
    late = max(0.0, _idle(facts, [_with_loading(facts, number) for number in range(len(ranks))]) - uneven)
    reading = facts.mean("data_wait_seconds", "load_seconds")
    for_loader = late * facts.mean("data_wait_seconds") / reading if reading else 0.0
    explained = {
        "bubble": bubble,
        "imbalance": max(0.0, uneven - bubble),
        "data wait": for_loader,
        "transfers": late - for_loader,
        "optimizer": max(rank.optimizer_seconds for rank in ranks) - facts.mean("optimizer_seconds"),
    }
    waited, found = facts.mean("wait_seconds", "agreement_wait_seconds"), math.fsum(explained.values())
    part = min(1.0, waited / found) if found else 0.0
    return {name: part * seconds for name, seconds in explained.items()} | {"communication": max(0.0, waited - found)}


def _idle(facts: FinishedRun, ranks: Sequence[tuple[PhaseCosts, ...]]) -> float:
    """Return the mean seconds that a rank waits in a step on free links."""
    now, costs = facts.layout, list(map(RankCosts, ranks))
    return fmean(simulate(now.schedule, now.micro_batches, costs, programs=order_of(now, costs)).wait_seconds)


def _with_loading(facts: FinishedRun, number: int) -> tuple[PhaseCosts, ...]:
    """Return a rank's phases, with its loading added to the forward of the first."""
    rank = facts.ranks[number]
    if number and (facts.layout.schedule != "1f1b" or number < facts.layout.stages - 1):
        return rank.phases  # without the first layer or the loss it loads nothing
    first, *rest = rank.phases
    each = (rank.data_wait_seconds + rank.load_seconds) / facts.layout.micro_batches
    return replace(first, forward_seconds=first.forward_seconds + each), *rest


# ---------------------------------------------------------------- evidence


def _evidence(facts: FinishedRun, cost: str, share: float, bandwidth: float) -> str:
    """Return a clause with the numbers of a cost, by its share of the time and the links' bytes per second."""
    now, ranks, pauses, overflows = facts.layout, facts.ranks, facts.pauses, facts.overflows
    step = f"a {_seconds(facts.step_seconds)} step"
    lost, stopped = f"{_seconds(share * facts.step_seconds)} of {step}", f"of {rounded(pauses.seconds)} s"
    losses, wires = min(facts.evaluation_seconds, pauses.sampling_seconds), ""

    def slowest(part: str, takes: str, times: int = 1) -> str:
        seconds = [times * getattr(rank, part) for rank in ranks]
        return f"rank {seconds.index(max(seconds))} {takes} {_seconds(max(seconds))} of {step}"

    if now.stages > 1:
        messages = sum(one.activation_bytes + one.gradient_bytes for rank in ranks for one in rank.phases)
        slow = "" if bandwidth >= FASTEST_LINK else f", as over links of {rounded(bandwidth / 1e6)} MB/s"
        wires = f"; {rounded(now.micro_batches * messages / 1e6)} MB cross between stages{slow}"
    wires += f"; {_seconds(facts.mean('reduce_seconds'))} to gradients of replicas" if now.data_ranks > 1 else ""
    reached = "" if facts.mfu is None else f"; the devices reach {facts.mfu:.1%} of their flops"
    return {
        "bubble": f"with {counted(now.micro_batches, 'micro-batch')} on {counted(now.stages, 'rank')} ({now.schedule}) "
        f"each rank has nothing to do for {lost}, while the pipeline fills and drains",
        "imbalance": f"{slowest('pass_seconds', 'computes for', now.micro_batches)}, the mean rank for "
        f"{_seconds(now.micro_batches * facts.mean('pass_seconds'))}, and the others wait",
        "communication": f"{lost} go to messages and gradients{wires}",
        "swaps": f"{lost} are waits for the ranks of a space group, {facts.swaps} in a micro-batch of images of "
        f"{'x'.join(map(str, facts.spec.data.size))}",
        "data wait": f"{slowest('data_wait_seconds', 'waits')} for the next images, with data.workers = "
        f"{facts.spec.data.workers}, from data.store_root = {facts.spec.data.store_root}",
        "transfers": f"{slowest('load_seconds', 'takes')} to bring images to its device and add noise",
        "overflow steps": f"fp16 overflowed in {overflows.skipped:,} of {counted(overflows.steps, 'step')}, which were "
        f"thrown away; the loss scale began at {overflows.first_scale:,.0f} and is {overflows.last_scale:,.0f}",
        "optimizer": f"{slowest('optimizer_seconds', 'takes')} of {counted(now.batch_images, 'image')} for the "
        "optimizer and the averaged weights, however few images",
        "checkpoint pauses": f"checkpoints took {rounded(pauses.checkpoint_seconds)} s {stopped}",
        "sampling pauses": f"samples took {rounded(pauses.sampling_seconds - losses)} s, validation "
        f"{rounded(losses)} s {stopped}",
        "recomputation": f"activation_checkpoint_interval = {now.checkpoint_interval} computes activations a second "
        f"time, {_seconds(facts.recomputation_seconds)} of {step}",
        "low utilisation": f"of the {_seconds(facts.mean('pass_seconds'))} of a rank for a micro-batch of "
        f"{counted(now.micro_batch_images, 'image')}, its layers spend {_seconds(facts.startup_seconds)} before they "
        f"compute{reached}",
        "other": f"{_seconds(facts.mean('other_seconds'))} of {step} are Python between instructions; "
        "--profile-kernels FIRST-LAST shows more",
    }[cost]


def _seconds(seconds: float) -> str:
    return f"{rounded(1e3 * seconds)} ms" if seconds < 0.9995 else f"{rounded(seconds)} s"


# ---------------------------------------------------------------- changes


def changes(facts: FinishedRun, predictor: Predictor, shares: Mapping[str, float]) -> list[Change]:
    """Return the changes to choose from, some of which may save nothing."""
    before = predictor.simulate(facts.layout, facts.bounds).step_seconds
    near, far = (_fastest_layouts(facts, predictor, before, same_stages=same) for same in (True, False))
    least = MUCH_MORE + max((change.gain for change in near), default=0.0)
    layouts = [*near, *(change for change in far if change.gain > least), *_in_groups(facts, predictor, before)]
    return [*layouts, *_other_settings(facts, before, shares)]


def traced_predictor(facts: FinishedRun) -> Predictor:
    """Return a predictor with the seconds of the traced step, whose layouts may have other numbers of micro-batches.

    Links have the bandwidth with which the run's own layout takes as long as it did, without waiting for images.
    """
    job, now, train = facts.job, facts.layout, facts.spec.train
    free = facts.spec.model_copy(update={"train": train.model_copy(update={"accumulation": "auto"})})
    owners = now.data_ranks if sharing(job.config, now).weight_bytes else 1
    owned = sum(layer.trained for layer in facts.own_layers) / owners
    updating = math.fsum(rank.optimizer_seconds for rank in facts.ranks)
    bandwidth = owned * update_bytes(job, now) / updating if updating and owned else math.inf
    peak = peak_bytes(job, now, facts.bounds)
    waits = now.micro_batches * facts.swaps / now.stages  # of a rank in a step
    machine = replace(
        facts.machine,
        swap=(facts.mean("swap_seconds") / waits, math.inf) if waits else facts.machine.swap,
        nodes=1,
        memory_bytes=max(facts.machine.memory_bytes, peak if job.on_cpu else math.ceil(peak / USABLE_MEMORY)),
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
        costs, wires = one.costs(now, facts.bounds), links(one.machine, now)
        return simulate(now.schedule, now.micro_batches, costs, wires, programs=order).step_seconds

    loading = max(rank.data_wait_seconds + rank.load_seconds for rank in facts.ranks)
    modelled = facts.step_seconds - loading - facts.mean("other_seconds")
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

    def respects(one: Layout) -> tuple[object, ...]:
        """Return the properties; a change alters one of them."""
        in_step = one.stages, folds(one.schedule)
        return in_step, one.space.size, one.micro_batch_images, one.checkpoint_interval, one.zero_stage

    def of_size(size: int) -> Split:
        return TensorSplit(), replace(now.space, size=size) if size > 1 else SpaceSplit()

    near = [
        one
        for size in divisors(now.space.size)
        for one in layouts(predictor.job, predictor.machine.devices, offload=now.offload, split=of_size(size))
        if (one.stages == now.stages) == same_stages
        and one.in_flight in ("auto", now.in_flight)
        and facts.job.is_replayed(one) >= facts.replayed  # launches of others are not in the layers' seconds
        and sum(a != b for a, b in zip(respects(one), respects(now), strict=True)) <= 1 + (one.space != now.space)
        and (one.offload, one.zero_stage > 0) >= (now.offload, now.zero_stage > 0)  # other keys may need them
    ]
    with suppress(LayoutError):  # none fits
        best = search(predictor, MOST_LAYOUTS, candidates(predictor, among=near)).best
        found = (_change(facts, predictor, one, before) for one in best)
        return [change for change in found if change.settings]  # the run's own layout is among them
    return []


def _in_groups(facts: FinishedRun, predictor: Predictor, before: float) -> Iterator[Change]:
    """Yield the fastest layout in tensor groups that keeps all activations, if the run could not keep them."""
    job, now, machine = facts.job, facts.layout, predictor.machine
    needs = peak_bytes(job, replace(now, checkpoint_interval=0), facts.bounds)
    if not now.checkpoint_interval or now.tensor.size > 1 or now.offload or needs <= machine.usable_bytes:
        return
    # few runs have measured the links that sums cross: take no more than the data sheet's speed
    slower = replace(machine, link_bandwidth=min(machine.link_bandwidth, facts.machine.link_bandwidth))
    grouped = [
        one
        for split in tensor_splits(job, math.gcd(facts.host_devices, machine.devices))
        for one in layouts(predictor.job, machine.devices, offload=False, split=(split, SpaceSplit()))
        if one.zero_stage == now.zero_stage and one.in_flight in ("auto", now.in_flight) and not one.checkpoint_interval
    ]
    among = Predictor(predictor.job, slower, facts.layer_times, now.tensor)
    with suppress(LayoutError):  # none fits
        (best,) = search(among, 1, [], grouped).best
        change, memory = _change(facts, among, best, before), gib(best.peak.total)
        without = f"where the run would need {gib(needs)} of {gib(machine.usable_bytes)}"
        yield replace(change, words=f"{change.words}, keeps all activations in {memory} a device, {without}")


def _change(facts: FinishedRun, predictor: Predictor, best: Prediction, before: float) -> Change:
    """Return the change of a run to a predicted layout; a step took ``before`` seconds."""
    layout, bounds = best.layout, predictor.bounds(best.layout)
    wanted = ds_config(facts.job, layout, bounds)
    for same in ("across_hosts", *(["partition"] if bounds == facts.bounds else [])):
        del wanted["pipeline"][same]
    settings = dict(_differences(facts.job.config.given, wanted, "ds."))
    if layout.space.size < facts.layout.space.size:
        settings["ds.pipeline.space.size"] = layout.space.size
    if facts.spec.train.accumulation not in ("auto", layout.micro_batches):
        settings["train.accumulation"] = layout.micro_batches
    cuts = "" if layout.stages == 1 else f", cut at {', '.join(map(str, bounds[1:-1]))}"
    gain = facts.stepping * (before - best.step_seconds) / facts.step_seconds
    return Change(f"The planner's {layout.words()}{cuts}", gain, settings)


def _differences(given: Mapping[str, Any], wanted: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield the keys of a JSON whose wanted and given values differ, with the wanted value."""
    for name, value in wanted.items():
        if isinstance(value, Mapping):
            yield from _differences(given.get(name, {}), value, f"{prefix}{name}.")
        elif name not in given or given[name] != value:
            yield f"{prefix}{name}", value


def _other_settings(facts: FinishedRun, before: float, shares: Mapping[str, float]) -> Iterator[Change]:
    """Yield changes of settings that are not the layout's; a step took ``before`` seconds."""
    if skipped := shares["overflow steps"]:
        scale = facts.overflows.last_scale
        settings: dict[str, Any] = {"ds.fp16.enabled": False, "ds.bf16.enabled": True}
        words = "bf16 has fp32's range and needs no loss scale"
        if scale < facts.overflows.first_scale:
            settings = {"ds.fp16.initial_scale_power": max(int(math.log2(scale)), 0)}
            words = "A loss scale that begins where this run's ended overflows in no step at the beginning"
        yield Change(words, skipped, settings)
    wait = max(rank.data_wait_seconds for rank in facts.ranks)
    readers = facts.spec.data.workers
    enough = min(math.ceil(readers * (before + wait) / before), MOST_WORKERS)
    if enough > readers:
        left = max(0.0, readers * (before + wait) / enough - before) / wait
        words = f"With {counted(enough, 'thread')} images are read ahead while the devices compute"
        yield Change(words, shares["data wait"] * (1 - left), {"data.workers": enough})
    inspecting = facts.pauses.sampling_share
    validating = min(facts.evaluation_seconds / facts.pauses.seconds, inspecting) if inspecting else 0.0
    pauses = {"checkpoint": facts.pauses.checkpoint_share, "evaluation": validating, "samples": inspecting - validating}
    for part, share in pauses.items():
        spec, factor = getattr(facts.spec, part), max(2, math.ceil(share / PAUSE_SHARE))
        key = "every_minutes" if spec.every_images is None else "every_images"
        if share and (every := getattr(spec, key, None)) is not None:
            words = f"{part.capitalize()} {factor} times less often"
            yield Change(words, share * (1 - 1 / factor), {f"{part}.{key}": f"{factor * every:.15g}"})
