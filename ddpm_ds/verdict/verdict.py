"""Where the time of a run went, what took most of what was lost, and the one change to try next. Pure.

All devices' time is shared out. What a traced step measured directly is taken as it is; waiting for other ranks is
explained by simulating the same schedule, one cause after the other::

    equal ranks, free links                                 the bubble
    the measured ranks                                      and imbalance
    with what loading takes on the ranks that load          and what others wait for the loader
    the waiting that is left                                communication
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ddpm_ds.pipeline.simulate import PhaseCosts, RankCosts, simulate
from ddpm_ds.pipeline.streams import Schedule
from ddpm_ds.verdict.advice import LEAST_GAIN, best_change
from ddpm_ds.verdict.change import Change
from ddpm_ds.verdict.evidence import evidence
from ddpm_ds.verdict.facts import Facts, RankFacts
from ddpm_ds.verdict.whatif import Model, mean, present, reads_data, recomputation_seconds

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


def verdict(facts: Facts) -> Verdict:
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


def shares(facts: Facts, model: Model) -> dict[str, float]:
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


def _step(facts: Facts, model: Model) -> dict[str, float]:
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


def _waits(facts: Facts) -> dict[str, float]:
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


def _with_loading(facts: Facts, rank: int) -> tuple[PhaseCosts, ...]:
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
