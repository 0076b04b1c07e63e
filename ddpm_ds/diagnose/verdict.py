"""What shows that a run loses time to something, in plain words and with its numbers.

Where the time of a run went, what took most of what was lost, and the one change to try next. Pure.

All devices' time is shared out. What a traced step measured directly is taken as it is; waiting for other ranks is
explained by simulating the same schedule, one cause after the other::

    equal ranks, free links                                 the bubble
    the measured ranks                                      and imbalance
    with what loading takes on the ranks that load          and what others wait for the loader
    the waiting that is left                                communication

The verdict on a run that is over, from its folder and into it.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ddpm_ds.diagnose.changes import LEAST_GAIN, Change, best_change
from ddpm_ds.errors import UserError
from ddpm_ds.observe.device_speed import Device, measure_device, write_device
from ddpm_ds.observe.finished_run import HOW_TO_TRACE, SUMMARY, FinishedRun, RankFacts, facts_of
from ddpm_ds.pipeline.schedule import PhaseCosts, RankCosts, Schedule
from ddpm_ds.predict.simulate import simulate
from ddpm_ds.predict.whatif import Model, mean, present, reads_data, recomputation_seconds


def evidence(facts: FinishedRun, model: Model, loss: str, share: float) -> str:
    """A clause about a loss that takes ``share`` of all devices' time."""
    return _CLAUSES[loss](facts, model, share)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"


def _count(number: int, what: str) -> str:
    plural = f"{what}es" if what.endswith("h") else f"{what}s"
    return f"{number:,} {what if number == 1 else plural}"


def _bubble(facts: FinishedRun, model: Model, share: float) -> str:
    return (
        f"with {_count(facts.micro_batches, 'micro-batch')} on {_count(facts.stages, 'rank')} ({facts.schedule}) each "
        f"rank has nothing to do for {_ms(share * facts.step_seconds)} of a {_ms(facts.step_seconds)} step, while the "
        "pipeline fills and drains"
    )


def _imbalance(facts: FinishedRun, model: Model, share: float) -> str:
    busy = [
        facts.micro_batches * sum(phase.forward_seconds + phase.backward_seconds for phase in rank.phases)
        for rank in facts.ranks
    ]
    slowest = max(range(facts.stages), key=lambda rank: busy[rank])
    return (
        f"the layers of rank {slowest} take {_ms(busy[slowest])} of a {_ms(facts.step_seconds)} step, those of a rank "
        f"{_ms(mean(busy))} in the mean, and the others wait for it"
    )


def _communication(facts: FinishedRun, model: Model, share: float) -> str:
    messages = sum(phase.activation_bytes + phase.gradient_bytes for rank in facts.ranks for phase in rank.phases)
    size = facts.micro_batches * messages
    reduce = mean([rank.reduce for rank in facts.ranks])
    clause = f"{_ms(share * facts.step_seconds)} of a {_ms(facts.step_seconds)} step go to messages and gradients"
    if facts.stages > 1:
        rate = "" if math.isinf(model.bytes_per_second) else f", as over links of {_rate(model.bytes_per_second)}"
        clause += f": the schedule does not explain that waiting, and {size / 1e6:,.3g} MB cross between stages{rate}"
    if facts.replicas > 1:
        clause += f"; {_ms(reduce)} to the gradients of {facts.replicas} replicas"
    return clause


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e6:,.3g} MB/s"


def _data_wait(facts: FinishedRun, model: Model, share: float) -> str:
    longest = max(range(facts.stages), key=lambda rank: facts.ranks[rank].data_wait)
    return (
        f"rank {longest} waits {_ms(facts.ranks[longest].data_wait)} of a {_ms(facts.step_seconds)} step for the next "
        f"images, with data.workers = {facts.spec.data.workers}, and the others wait for it"
    )


def _transfers(facts: FinishedRun, model: Model, share: float) -> str:
    longest = max(range(facts.stages), key=lambda rank: facts.ranks[rank].load)
    return (
        f"rank {longest} takes {_ms(facts.ranks[longest].load)} of a {_ms(facts.step_seconds)} step to bring images to "
        "its device and to noise them"
    )


def _overflows(facts: FinishedRun, model: Model, share: float) -> str:
    found = facts.overflows
    return (
        f"fp16 overflowed in {found.skipped:,} of {_count(found.steps, 'step')}, which were thrown away; the loss "
        f"scale began at {found.first_scale:,.0f} and is {found.last_scale:,.0f}"
    )


def _optimizer(facts: FinishedRun, model: Model, share: float) -> str:
    optimizer, ema = (max(getattr(rank, name) for rank in facts.ranks) for name in ("optimizer", "ema"))
    return (
        f"of a {_ms(facts.step_seconds)} step of {_count(facts.step_images, 'image')} the optimizer takes "
        f"{_ms(optimizer)} and the averaged weights {_ms(ema)}, however few the images"
    )


def _checkpoints(facts: FinishedRun, model: Model, share: float) -> str:
    pauses = facts.pauses
    return f"checkpoints held training up for {pauses.checkpoint_seconds:,.3g} s of {pauses.seconds:,.3g} s"


def _sampling(facts: FinishedRun, model: Model, share: float) -> str:
    pauses, losses = facts.pauses, min(facts.evaluation_seconds, facts.pauses.inspection_seconds)
    return (
        f"training stood still for {pauses.inspection_seconds:,.3g} s of {pauses.seconds:,.3g} s: "
        f"{pauses.inspection_seconds - losses:,.3g} s for samples, {losses:,.3g} s for held-out losses"
    )


def _recomputation(facts: FinishedRun, model: Model, share: float) -> str:
    memory = facts.device.memory_bytes
    has = "" if memory is None else f" of the {_mib(memory)} that its device has"
    return (
        f"activation_checkpoint_interval = {facts.checkpoint_interval} computes activations a second time, "
        f"{_ms(recomputation_seconds(facts))} of a {_ms(facts.step_seconds)} step; to keep them would take "
        f"{_mib(model.activation_bytes(model.now))}{has}"
    )


def _mib(size: int) -> str:
    return f"{size / 2**20:,.3g} MiB" if size < 2**30 else f"{size / 2**30:,.3g} GiB"


def _low_utilisation(facts: FinishedRun, model: Model, share: float) -> str:
    starting = sum(layer.start.forward + layer.start.backward for layer in model.layers) / facts.stages
    passes = mean(
        [sum(phase.forward_seconds + phase.backward_seconds for phase in rank.phases) for rank in facts.ranks]
    )
    reached = "" if facts.mfu is None else f"; the devices reach {facts.mfu:.1%} of their flops"
    return (
        f"of {_ms(passes)} that a micro-batch of {_count(facts.micro_batch_images, 'image')} takes a rank, "
        f"{_ms(starting)} are what its layers take before they compute, however few the images{reached}"
    )


def _other(facts: FinishedRun, model: Model, share: float) -> str:
    return (
        f"{_ms(mean([rank.other for rank in facts.ranks]))} of a {_ms(facts.step_seconds)} step are in no instruction: "
        "Python between them, logging, the delivery of the last messages; --profile-kernels FIRST-LAST shows more"
    )


_CLAUSES: dict[str, Callable[[FinishedRun, Model, float], str]] = {
    "bubble": _bubble,
    "imbalance": _imbalance,
    "communication": _communication,
    "data wait": _data_wait,
    "transfers": _transfers,
    "overflow steps": _overflows,
    "optimizer": _optimizer,
    "checkpoint pauses": _checkpoints,
    "sampling pauses": _sampling,
    "recomputation": _recomputation,
    "low utilisation": _low_utilisation,
    "other": _other,
}

USEFUL = "useful work"
HEALTHY = 0.05
"""Share below which no loss is worth a change."""
BAR = 40
"""Characters of a bar that is all of the time."""
LINE = 112
"""Characters of a line, where it is not a command."""


@dataclass(frozen=True)
class Verdict:
    """What was found."""

    shares: dict[str, float]
    """Of all devices' time: useful work, then the losses, the largest first; they sum to 1."""
    top: str
    """The largest loss."""
    evidence: str
    """Of the largest loss, in a sentence."""
    change: Change | None
    """The one to try next; None where no setting of this project makes the run faster."""
    change_for: str
    """The loss that it lowers: the largest for which there is a change."""

    @property
    def expected_gain(self) -> float | None:
        """Share of an image's time that the change saves."""
        return None if self.change is None else self.change.gain

    @property
    def healthy(self) -> bool:
        """Whether no loss is worth a change."""
        return self.shares[self.top] < HEALTHY


def verdict(facts: FinishedRun) -> Verdict:
    """Judge a run."""
    model = Model(facts)
    found = shares(facts, model)
    losses = [name for name in found if name != USEFUL]
    changes = ((name, best_change(facts, model, name)) for name in losses if found[name] >= LEAST_GAIN)
    lowered, change = next(((name, change) for name, change in changes if change is not None), (losses[0], None))
    return Verdict(
        shares=found,
        top=losses[0],
        evidence=evidence(facts, model, losses[0], found[losses[0]]),
        change=change,
        change_for=lowered,
    )


def shares(facts: FinishedRun, model: Model) -> dict[str, float]:
    """Of all devices' time, the largest loss first after the useful work."""
    step = _step(facts, model)
    total = math.fsum(step.values())
    pauses, thrown_away = facts.pauses, facts.overflows.skipped / facts.overflows.steps
    stepping = 1 - pauses.checkpoint_share - pauses.inspection_share
    found = {name: stepping * (1 - thrown_away) * seconds / total for name, seconds in step.items()}
    found |= {
        "overflow steps": stepping * thrown_away,
        "checkpoint pauses": pauses.checkpoint_share,
        "sampling pauses": pauses.inspection_share,
    }
    useful = found.pop(USEFUL)
    return {USEFUL: useful, **dict(sorted(found.items(), key=lambda item: -item[1]))}


def _step(facts: FinishedRun, model: Model) -> dict[str, float]:
    """Seconds of a step, of a rank in the mean."""
    ranks, times = facts.ranks, facts.micro_batches
    passes = times * mean([sum(_pass_seconds(phase) for phase in rank.phases) for rank in ranks])
    again = recomputation_seconds(facts)
    starting = times * sum(layer.start.forward + layer.start.backward for layer in model.layers) / len(ranks)
    waits = _waits(facts)
    return {
        USEFUL: passes - again - starting,
        "recomputation": again,
        "low utilisation": starting,
        "bubble": waits["bubble"],
        "imbalance": waits["imbalance"],
        "communication": waits["communication"] + mean([rank.send + rank.reduce for rank in ranks]),
        "data wait": waits["data wait"] + mean([rank.data_wait for rank in ranks]),
        "transfers": waits["transfers"] + mean([rank.load for rank in ranks]),
        "optimizer": waits["optimizer"] + mean([_update(rank) for rank in ranks]),
        "other": max(0.0, mean([rank.other for rank in ranks])),
    }


def _waits(facts: FinishedRun) -> dict[str, float]:
    """What a rank waits for in the mean, by cause; together what was measured."""
    schedule, times = facts.schedule, facts.micro_batches
    measured = [rank.phases for rank in facts.ranks]
    equal = [tuple(_mean_phase(same) for same in zip(*measured, strict=True))] * len(measured)
    bubble = _idle(schedule, times, equal)
    uneven = _idle(schedule, times, measured)
    loading = _idle(schedule, times, [_with_loading(facts, rank) for rank in range(facts.stages)])
    updates = [_update(rank) for rank in facts.ranks]
    late, read = max(0.0, loading - uneven), [sum(rank.data_wait for rank in facts.ranks)]
    read.append(sum(rank.load for rank in facts.ranks))
    for_loader = late * read[0] / sum(read) if sum(read) else 0.0
    explained = {
        "bubble": bubble,
        "imbalance": max(0.0, uneven - bubble),
        "data wait": for_loader,
        "transfers": late - for_loader,
        "optimizer": max(updates) - mean(updates),
    }
    waited = mean([rank.wait + rank.agreement_wait for rank in facts.ranks])
    found = math.fsum(explained.values())
    part = min(1.0, waited / found) if found else 0.0
    return {name: part * seconds for name, seconds in explained.items()} | {"communication": max(0.0, waited - found)}


def _idle(schedule: Schedule, micro_batches: int, ranks: Sequence[Sequence[PhaseCosts]]) -> float:
    """Seconds that a rank waits in the mean of a step on free links."""
    costs = [RankCosts(tuple(phases)) for phases in ranks]
    return mean(simulate(schedule, micro_batches, costs, keep_events=False).wait_seconds)


def _mean_phase(same: Sequence[PhaseCosts]) -> PhaseCosts:
    return PhaseCosts(mean([phase.forward_seconds for phase in same]), mean([phase.backward_seconds for phase in same]))


def _with_loading(facts: FinishedRun, rank: int) -> tuple[PhaseCosts, ...]:
    """A rank's phases, what it loads in the forward of the first."""
    own = facts.ranks[rank]
    if not reads_data(present(facts), rank):
        return own.phases
    first, *rest = own.phases
    each = (own.data_wait + own.load) / facts.micro_batches
    return replace(first, forward_seconds=first.forward_seconds + each), *rest


def _pass_seconds(phase: PhaseCosts) -> float:
    return phase.forward_seconds + phase.backward_seconds


def _update(rank: RankFacts) -> float:
    return rank.optimizer + rank.ema


def text(found: Verdict) -> str:
    """A table of the shares, and what to make of it in a few sentences."""
    width = max(map(len, found.shares))
    lines = ["where the devices' time went", ""]
    for name, share in found.shares.items():
        lines.append(f"  {name:<{width}}  {share:6.1%}  {'#' * round(BAR * share)}".rstrip())
    share = found.shares[found.top]
    if found.healthy:
        lines += ["", f"Healthy: no loss takes {HEALTHY:.0%} of the time. The largest is {found.top}, {share:.1%}."]
    else:
        lines += ["", _wrapped(f"The largest loss is {found.top}, {share:.1%} of the time: {found.evidence}.")]
    lines.append(_try(found))
    return "\n".join(lines) + "\n"


def _try(found: Verdict) -> str:
    if found.change is None:
        return "Try next: nothing; no setting is predicted to make it faster."
    gain = found.change.gain
    faster = f"{gain:.0%} less time per image, {1 / (1 - gain):.2f} times the images per second"
    other = (
        "" if found.change_for == found.top else f"Nothing is predicted to lower that. Against {found.change_for}:\n"
    )
    return f"{other}Try next: {found.change.edit}\n{_wrapped(f'{found.change.words}. Predicted: {faster}.')}"


def _wrapped(sentences: str) -> str:
    return textwrap.fill(sentences, LINE, break_on_hyphens=False)


def tags(found: Verdict) -> dict[str, str]:
    """What MLflow shows beside a run."""
    return {
        "verdict.top": "healthy" if found.healthy else found.top,
        "verdict.share": f"{found.shares[found.top]:.1%}",
        "verdict.try": "nothing" if found.change is None else found.change.edit,
    }


VERDICT = "verdict.txt"
"""In a run's folder."""


def conclude(run_dir: Path, say: Callable[[str], None]) -> Verdict | None:
    """Judge a run at its end, on rank 0: measure its device, write ``verdict.txt``, and return what was found.

    Takes some tenths of a second. None, which ``say`` explains, where no step was traced or the run's files can't be
    read or written.
    """
    if not (run_dir / SUMMARY).is_file():
        say(f"no verdict: no step was traced; {HOW_TO_TRACE}")
        return None
    try:
        facts = facts_of(run_dir)
        device = _measured(facts)
        found = verdict(replace(facts, device=device))
        write_device(run_dir, device)
        (run_dir / VERDICT).write_text(text(found))
    except UserError as error:
        say(f"no verdict: {error}")
    except OSError as error:
        say(f"no verdict: {run_dir} can't be written ({error.strerror})")
    else:
        return found
    return None


def _measured(facts: FinishedRun) -> Device:
    device = torch.device("cpu" if facts.on_cpu else "cuda")
    return measure_device(facts.layers, device, facts.precision)
