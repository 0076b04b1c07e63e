"""The one change to try for each way of losing time: all that could help are predicted, the best is named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ddpm_ds.verdict import layout_changes as layout
from ddpm_ds.verdict import run_changes as run
from ddpm_ds.verdict.change import Candidates, Change
from ddpm_ds.verdict.facts import Facts
from ddpm_ds.verdict.whatif import Model

LEAST_GAIN = 0.01
"""Share of an image's time below which a change is not worth trying."""
MUCH_MORE = 0.2
"""By how much a change of more than speed has to save more than a simpler one."""


def best_change(facts: Facts, model: Model, loss: str) -> Change | None:
    """The change that saves most of what is lost to ``loss``; None where none is worth trying.

    Of changes that save about as much, the one that comes first, which is the smallest.
    """
    simple, far = (_best(facts, model, sources.get(loss, ())) for sources in (_SIMPLE, _FAR))
    if far is not None and (simple is None or far.gain > simple.gain + MUCH_MORE):
        return far
    return simple


def _best(facts: Facts, model: Model, sources: Sequence[_Source]) -> Change | None:
    candidates = (change for source in sources for change in source(facts, model))
    worth = [change for change in candidates if change.gain >= LEAST_GAIN]
    most = max((change.gain for change in worth), default=0.0)
    return next((change for change in worth if change.gain > most - LEAST_GAIN), None)


_Source = Callable[[Facts, Model], Candidates]

_SIMPLE: dict[str, tuple[_Source, ...]] = {
    "bubble": (partial(layout.micro_batches, more=True), layout.schedules),
    "imbalance": (layout.partitions,),
    "communication": (layout.schedules, layout.halve_messages),
    "data wait": (run.workers,),
    "overflow steps": (run.loss_scale,),
    "optimizer": (layout.partition_optimizer,),
    "checkpoint pauses": (run.rarer_checkpoints,),
    "sampling pauses": (run.rarer_inspections,),
    "recomputation": (layout.keep_activations,),
    "low utilisation": (partial(layout.micro_batches, more=False),),
}
"""By loss, changes of one setting."""
_FAR: dict[str, tuple[_Source, ...]] = {
    "bubble": (layout.stages, partial(layout.batches, larger_micro_batches=False)),
    "imbalance": (layout.schedules, layout.stages),
    "communication": (layout.stages,),
    "optimizer": (partial(layout.batches, larger_micro_batches=False),),
    "low utilisation": (partial(layout.batches, larger_micro_batches=True),),
}
"""By loss, changes of more than speed: of who holds what, or of what a step learns."""
