"""Verdict on a finished run: where its time went, the largest cost with its numbers, and the one change to try.

All devices' time is attributed. Times measured directly in a traced step are used unchanged; waiting for other ranks is
explained by simulating the same schedule, one cause after the other::

    simulated                                    explains
    equal ranks, free links                      the bubble
    the measured ranks                           and the imbalance
    with loading, on the ranks that load         and waiting for the loader of another rank

The waiting that is left is communication.
"""

import math
import shlex
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from ddpm_ds.command_line import counted, gib
from ddpm_ds.data.sources.base import printable
from ddpm_ds.files import DS_CONFIG, SPEC, VERDICT, replace_file
from ddpm_ds.observe.device_speed import Device, write_device
from ddpm_ds.predict.advice import FASTEST_LINK, Change, best_change, traced_predictor
from ddpm_ds.predict.finished_run import FinishedRun, RankFacts, facts_of
from ddpm_ds.predict.memory import activation_bytes
from ddpm_ds.predict.scheduler import order_of
from ddpm_ds.predict.simulate import PhaseCosts, RankCosts, simulate

USEFUL = "useful work"
HEALTHY = 0.05
"""Share below which no cost is worth a change."""
BAR = 40
"""Characters of a bar that stands for all of the time."""
LINE = 112
"""Characters of a line, unless it is a command."""
SHOWN = {"low utilisation": "kernel start-up", "sampling pauses": "sampling and validation"}
"""Names shown to users for shares whose MLflow tag is less clear."""


@dataclass(frozen=True)
class Verdict:
    """Findings about a run."""

    shares: dict[str, float]
    """Shares of all devices' time: useful work, then the costs, the largest first; they sum to 1."""
    top: str
    """Name of the largest cost."""
    evidence: str
    """Numbers behind the largest cost, in a sentence."""
    change: Change | None
    """Change to try next; None if no change of a setting is predicted to make the run faster."""
    processes: int
    """Processes of the run."""

    @property
    def healthy(self) -> bool:
        """Whether no cost is worth a change."""
        return self.shares[self.top] < HEALTHY


def verdict(facts: FinishedRun) -> Verdict:
    """Judge a run."""
    found, predictor = shares(facts), traced_predictor(facts)
    top = next(name for name in found if name != USEFUL)
    evidence = _evidence(facts, top, found[top], predictor.machine.link_bandwidth)
    return Verdict(found, top, evidence, best_change(facts, predictor, found), predictor.machine.devices)


def conclude(run_dir: Path, device: Device) -> Verdict:
    """Judge a run at its end, on rank 0, whose device is given: write ``verdict.txt``, and return the verdict.

    Takes from some tenths of a second to some seconds, for many ranks.

    Raises:
        OutputError: no step was traced, or the run's files can't be read.
        OSError: a file can't be written.
    """
    found = verdict(replace(facts_of(run_dir), device=device))
    write_device(run_dir, device)
    replace_file(run_dir / VERDICT, text(found, run_dir).encode())
    return found


def text(found: Verdict, run_dir: Path) -> str:
    """Return a table of the shares, and conclusions in a few sentences, with the command to try next."""
    names = {name: SHOWN.get(name, name) for name in found.shares}
    width = max(map(len, names.values()))
    lines = ["where the time went", ""]
    for name, share in found.shares.items():
        lines.append(f"  {names[name]:<{width}}  {share:6.1%}  {'#' * round(BAR * share)}".rstrip())
    largest = f"largest cost: {names[found.top]}, {found.shares[found.top]:.1%}"
    if found.healthy:
        lines += ["", f"healthy: no cost takes {HEALTHY:.0%} of the time; {largest}"]
    else:
        lines += ["", _wrapped(f"{largest}: {found.evidence}.")]
    if found.change is None:
        lines.append("try next: nothing; with the same batch no setting is predicted to make it faster")
    else:
        gain = found.change.gain
        faster = f"{gain:.0%} less time per image, {1 / (1 - gain):.2f} times the images per second"
        files = {"--spec": run_dir / SPEC, "--deepspeed_config": run_dir / DS_CONFIG}
        same = " ".join(f"{option} {shlex.quote(printable(str(path)))}" for option, path in files.items())
        command = f"ddpm-ds train {same} --processes {found.processes} {found.change.edit}"
        lines += [f"try next: {command}", _wrapped(f"{found.change.words}. Predicted: {faster}.")]
    return "\n".join(lines) + "\n"


def _wrapped(sentences: str) -> str:
    return textwrap.fill(sentences, LINE, break_on_hyphens=False)


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
    step, left = _step(facts), facts.stepping
    thrown_away, total = facts.overflows.skipped / facts.overflows.steps, math.fsum(step.values())
    useful, *costs = ((name, left * (1 - thrown_away) * seconds / total) for name, seconds in step.items())
    costs += [
        ("overflow steps", left * thrown_away),
        ("checkpoint pauses", facts.pauses.checkpoint_share),
        ("sampling pauses", facts.pauses.inspection_share),
    ]
    return dict([useful, *sorted(costs, key=lambda cost: -cost[1])])


def _step(facts: FinishedRun) -> dict[str, float]:
    """Return the seconds of a step by cause, mean over the ranks."""
    times, waits = facts.layout.micro_batches, _waits(facts)
    again, starting = facts.recomputation_seconds, times * facts.startup_seconds

    def own(seconds: Callable[[RankFacts], float]) -> float:
        return fmean(seconds(rank) for rank in facts.ranks)

    return {
        USEFUL: times * own(lambda rank: rank.pass_seconds) - again - starting,
        "recomputation": again,
        "low utilisation": starting,
        "bubble": waits["bubble"],
        "imbalance": waits["imbalance"],
        "communication": waits["communication"] + own(lambda rank: rank.send_seconds + rank.reduce_seconds),
        "data wait": waits["data wait"] + own(lambda rank: rank.data_wait_seconds),
        "transfers": waits["transfers"] + own(lambda rank: rank.load_seconds),
        "optimizer": waits["optimizer"] + own(lambda rank: rank.optimizer_seconds),
        "other": max(0.0, own(lambda rank: rank.other_seconds)),
    }


def _waits(facts: FinishedRun) -> dict[str, float]:
    """Return the seconds that a rank waits, by cause, mean over the ranks; together they are the measured waiting."""
    ranks = facts.ranks
    measured = [rank.phases for rank in ranks]
    equal = [tuple(_mean_phase(same) for same in zip(*measured, strict=True))] * len(measured)
    bubble, uneven = _idle(facts, equal), _idle(facts, measured)
    loading = _idle(facts, [_with_loading(facts, number) for number in range(len(ranks))])
    updates, late = [rank.optimizer_seconds for rank in ranks], max(0.0, loading - uneven)
    waited_for_data = math.fsum(rank.data_wait_seconds for rank in ranks)
    reading = waited_for_data + math.fsum(rank.load_seconds for rank in ranks)
    for_loader = late * waited_for_data / reading if reading else 0.0
    explained = {
        "bubble": bubble,
        "imbalance": max(0.0, uneven - bubble),
        "data wait": for_loader,
        "transfers": late - for_loader,
        "optimizer": max(updates) - fmean(updates),
    }
    waited = fmean(rank.wait_seconds + rank.agreement_wait_seconds for rank in ranks)
    found = math.fsum(explained.values())
    part = min(1.0, waited / found) if found else 0.0
    return {name: part * seconds for name, seconds in explained.items()} | {"communication": max(0.0, waited - found)}


def _idle(facts: FinishedRun, ranks: Sequence[tuple[PhaseCosts, ...]]) -> float:
    """Return the mean seconds that a rank waits in a step on free links."""
    now, costs = facts.layout, list(map(RankCosts, ranks))
    return fmean(simulate(now.schedule, now.micro_batches, costs, programs=order_of(now, costs)).wait_seconds)


def _mean_phase(same: Sequence[PhaseCosts]) -> PhaseCosts:
    return PhaseCosts(
        fmean(phase.forward_seconds for phase in same),
        fmean(phase.backward_seconds for phase in same),
        weight_seconds=fmean(phase.weight_seconds for phase in same),
    )


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
    """Return a clause about a cost that takes ``share`` of all devices' time, with its numbers.

    ``bandwidth`` is that of the links in bytes per second, as found by :func:`traced_predictor`.
    """
    now, ranks = facts.layout, facts.ranks
    step, pauses = f"a {_seconds(facts.step_seconds)} step", facts.pauses

    def longest(part: str) -> tuple[int, str]:
        """Return the rank that takes longest for a part of the step, and its seconds."""
        number = max(range(now.stages), key=lambda rank: getattr(ranks[rank], part))
        return number, _seconds(getattr(ranks[number], part))

    match cost:
        case "bubble":
            return (
                f"with {counted(now.micro_batches, 'micro-batch')} on {counted(now.stages, 'rank')} ({now.schedule}) "
                f"each rank has nothing to do for {_seconds(share * facts.step_seconds)} of {step}, while the pipeline "
                "fills and drains"
            )
        case "imbalance":
            busy = [now.micro_batches * rank.pass_seconds for rank in ranks]
            return (
                f"the layers of rank {busy.index(max(busy))} take {_seconds(max(busy))} of {step}, those of all ranks "
                f"{_seconds(fmean(busy))} on average, and the others wait for it"
            )
        case "communication":
            clause = f"{_seconds(share * facts.step_seconds)} of {step} go to messages and gradients"
            if now.stages > 1:
                messages = sum(one.activation_bytes + one.gradient_bytes for rank in ranks for one in rank.phases)
                slow = "" if bandwidth >= FASTEST_LINK else f", as over links of {bandwidth / 1e6:,.3g} MB/s"
                clause += f"; {now.micro_batches * messages / 1e6:,.3g} MB cross between stages{slow}"
            if now.replicas > 1:
                reduce = fmean(rank.reduce_seconds for rank in ranks)
                clause += f"; {_seconds(reduce)} to the gradients of {now.replicas} replicas"
            return clause
        case "data wait":
            number, wait = longest("data_wait_seconds")
            return f"rank {number} waits {wait} of {step} for the next images, {_slow_reading(facts)}"
        case "transfers":
            number, load = longest("load_seconds")
            return f"rank {number} takes {load} of {step} to bring images to its device and add noise to them"
        case "overflow steps":
            found = facts.overflows
            return (
                f"fp16 overflowed in {found.skipped:,} of {counted(found.steps, 'step')}, which were thrown away; the "
                f"loss scale began at {found.first_scale:,.0f} and is {found.last_scale:,.0f}"
            )
        case "optimizer":
            optimizer, images = longest("optimizer_seconds")[1], counted(now.batch_images, "image")
            return f"of {step} of {images} the optimizer and the averaged weights take {optimizer}, however few images"
        case "checkpoint pauses":
            return f"checkpoints held training up for {pauses.checkpoint_seconds:,.3g} s of {pauses.seconds:,.3g} s"
        case "sampling pauses":
            losses = min(facts.evaluation_seconds, pauses.inspection_seconds)
            return (
                f"of {pauses.seconds:,.3g} s training stood still for {pauses.inspection_seconds - losses:,.3g} s for "
                f"samples and {losses:,.3g} s for validation"
            )
        case "recomputation":
            memory, kept = facts.device.memory_bytes, replace(now, checkpoint_interval=0)
            has = "" if memory is None else f" of the {gib(memory)} that its device has"
            return (
                f"activation_checkpoint_interval = {now.checkpoint_interval} computes activations a second time, "
                f"{_seconds(facts.recomputation_seconds)} of {step}; to keep them would take "
                f"{gib(activation_bytes(facts.job, kept, facts.bounds))}{has}"
            )
        case "low utilisation":
            passes = fmean(rank.pass_seconds for rank in ranks)
            reached = "" if facts.mfu is None else f"; the devices reach {facts.mfu:.1%} of their flops"
            return (
                f"of the {_seconds(passes)} that a rank takes for a micro-batch of "
                f"{counted(now.micro_batch_images, 'image')}, its layers spend {_seconds(facts.startup_seconds)} "
                f"before they compute{reached}"
            )
    other = _seconds(fmean(rank.other_seconds for rank in ranks))
    return f"{other} of {step} are Python between instructions; --profile-kernels FIRST-LAST shows more"


def _slow_reading(facts: FinishedRun) -> str:
    """Return a clause about why images come late: the disk, decoding or too few workers."""
    data, residence = facts.spec.data, facts.residence
    workers = f"with data.workers = {data.workers}"
    if residence is None:
        return workers
    size, memory = gib(residence.stored_bytes), gib(residence.memory_bytes)
    larger = f"{workers}: it is the disk, since the store of {size} is larger than the memory of {memory}"
    if residence.scattered(data.shuffle_images):
        return f"{larger}, and a full shuffle reads each image from another place"
    if residence.kind == "encoded":
        few = f" on {counted(residence.cores, 'core')}"
        return f"{workers}: it is the store, which keeps images encoded, so that they are decoded each time{few}"
    if not residence.in_memory:
        rate = facts.layout.batch_images * residence.stored_bytes / residence.images / facts.step_seconds
        return f"{larger}; it gave {rate / 1e6:,.3g} MB/s; {residence.remedy(data.shuffle_images)} gives more"
    return f"{workers}: it is the workers, since memory of {memory} holds all of the store, {size} of {residence.kind}"


def _seconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"
