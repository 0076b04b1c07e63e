"""A change of a run, and what it is predicted to save.

Changes of how a step is laid out: schedule, cuts, stages, micro-batches, batch, recomputation, ZeRO.

Changes beside a step's layout: loaders, loss scale, and how often a run is saved and looked at.

The one change to try for each way of losing time: all that could help are predicted, the best is named.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ddpm_ds.errors import LayoutError
from ddpm_ds.observe.finished_run import FinishedRun, Method
from ddpm_ds.pipeline.cuts import Schedule, partition, weighted
from ddpm_ds.predict.whatif import Model, Setup


@dataclass(frozen=True)
class Change:
    """A change of one setting, and what it is predicted to save."""

    words: str
    """What it does."""
    gain: float
    """Share of an image's time."""
    options: tuple[str, ...] = ()
    """Of launch/train.py."""
    config: dict[str, Any] = field(default_factory=dict)
    """Keys of the DeepSpeed JSON with their new values."""

    @property
    def edit(self) -> str:
        """As it is typed."""
        keys = json.dumps(self.config)[1:-1]
        return " and in the DeepSpeed JSON ".join(part for part in (" ".join(self.options), keys) if part)


Candidates = Iterator[Change]


def saved(facts: FinishedRun, model: Model, way: Setup) -> float:
    """Share of an image's time that another way saves, pauses counted in."""
    return stepping(facts) * model.gain(way)


def stepping(facts: FinishedRun) -> float:
    """Share of the run's time in which steps are taken."""
    return 1 - facts.pauses.checkpoint_share - facts.pauses.inspection_share


def counted(number: int, what: str) -> str:
    """``1 stage``, ``2 stages``."""
    return f"{number:,} {what}{'s' * (number != 1)}"


MOST_MICRO_BATCHES = 16
"""Per rank; with so many the bubble is 6 %."""


def micro_batches(facts: FinishedRun, model: Model, *, more: bool) -> Candidates:
    """More or fewer of them, the nearest number first, the batch left as it is."""
    now = model.now
    share = now.micro_batches * now.micro_batch_images
    fewest, most = 2 * now.ranks if now.schedule == "folded" else 1, min(share, MOST_MICRO_BATCHES * now.ranks)
    for count in range(now.micro_batches + 1, most + 1) if more else range(now.micro_batches - 1, fewest - 1, -1):
        if share % count:
            continue
        way = replace(now, micro_batches=count, micro_batch_images=share // count)
        if not model.fits(way):
            continue
        words = (
            f"{count} micro-batches of {way.micro_batch_images} instead of {now.micro_batches} of "
            f"{now.micro_batch_images} {'keep the pipeline full for longer' if more else 'give each layer more to do'}"
        )
        yield Change(words, saved(facts, model, way), *_sharing(facts, way))


def _sharing(facts: FinishedRun, way: Setup) -> tuple[tuple[str, ...], dict[str, Any]]:
    """How to ask for the micro-batches of a way."""
    if facts.spec.train.accumulation != "auto":
        return (f"--set train.accumulation={way.micro_batches}",), {}
    return (), {
        "train_micro_batch_size_per_gpu": way.micro_batch_images,
        "gradient_accumulation_steps": way.micro_batches,
    }


def schedules(facts: FinishedRun, model: Model) -> Candidates:
    """The other schedule."""
    now = model.now
    other: Schedule = "1f1b" if now.schedule == "folded" else "folded"
    if now.ranks == 1 or (other == "folded" and now.micro_batches < 2 * now.ranks):
        return
    method: Method = "measured" if isinstance(facts.partition, tuple) else facts.partition
    bounds = _cuts(facts, model, now.ranks, method, other)
    if bounds is None or not model.fits(way := replace(now, schedule=other, bounds=bounds)):
        return
    pipeline = {"schedule": other} | ({"partition": method} if method != facts.partition else {})
    words = (
        "The folded schedule keeps skips on the rank that makes them, and has a smaller bubble"
        if other == "folded"
        else "The 1f1b schedule has no second visit to each rank"
    )
    yield Change(words, saved(facts, model, way), config={"pipeline": pipeline})


def partitions(facts: FinishedRun, model: Model) -> Candidates:
    """Cuts by the layers' times; where they are, or would be, no better, as they were in the traced step."""
    now = model.now
    bounds = _cuts(facts, model, now.ranks, "measured", now.schedule)
    if bounds is None or bounds == now.bounds or not model.fits(way := replace(now, bounds=bounds)):
        return
    gain = saved(facts, model, way)
    if facts.partition != "measured":
        words = "Cuts by the layers' measured times give every rank as much to do"
        yield Change(words, gain, config={"pipeline": {"partition": "measured"}})
    else:
        words = "These cuts even out what the stages took in the traced step"
        yield Change(words, gain, config={"pipeline": {"partition": list(bounds[1:-1])}})


def _cuts(facts: FinishedRun, model: Model, ranks: int, method: Method, schedule: Schedule) -> tuple[int, ...] | None:
    """The bounds that a method gives; None where there are none."""
    try:
        if method != "measured":
            return partition(facts.layers, ranks, method, schedule)
        return weighted(facts.layers, model.layer_seconds(model.now.micro_batch_images), ranks, schedule)
    except LayoutError:
        return None


def stages(facts: FinishedRun, model: Model) -> Candidates:
    """Other numbers of stages on the same processes, micro-batches as large as they are."""
    now = model.now
    world = now.ranks * now.replicas
    per_step = world * now.micro_batch_images
    method: Method = "measured" if isinstance(facts.partition, tuple) else facts.partition
    for ranks in range(1, world + 1):
        if world % ranks or ranks == now.ranks or now.images * ranks % per_step:
            continue
        schedule: Schedule = "1f1b" if ranks == 1 else now.schedule
        count = now.images * ranks // per_step
        bounds = (0, len(facts.layers)) if ranks == 1 else _cuts(facts, model, ranks, method, schedule)
        if bounds is None or (schedule == "folded" and count < 2 * ranks):
            continue
        way = replace(now, schedule=schedule, bounds=bounds, replicas=world // ranks, micro_batches=count)
        if not model.fits(way):
            continue
        options, config = _sharing(facts, way)
        pipeline: dict[str, str] = {"schedule": schedule} if schedule != now.schedule else {}
        pipeline |= {"partition": method} if method != facts.partition else {}
        words = (
            f"{counted(ranks, 'stage')} x {counted(world // ranks, 'replica')} instead of {now.ranks} x {now.replicas}"
        )
        yield Change(
            words,
            saved(facts, model, way),
            (f"-p {ranks}", *options),
            config | ({"pipeline": pipeline} if pipeline else {}),
        )


def batches(facts: FinishedRun, model: Model, *, larger_micro_batches: bool) -> Candidates:
    """A batch twice as large, as more micro-batches or as larger ones; learning rate and warm-up are the user's."""
    now = model.now
    way = replace(
        now,
        micro_batches=now.micro_batches * (1 if larger_micro_batches else 2),
        micro_batch_images=now.micro_batch_images * (2 if larger_micro_batches else 1),
    )
    if not model.fits(way):
        return
    options, config = _sharing(facts, way)
    words = "A batch twice as large, which learns differently: look at optimizer.learning_rate too"
    yield Change(words, saved(facts, model, way), (f"--set train.batch_images={way.images}", *options), config)


def keep_activations(facts: FinishedRun, model: Model) -> Candidates:
    way = replace(model.now, checkpoint_interval=0)
    if model.now.checkpoint_interval and model.fits(way):
        words = "All activations fit the device's memory, so none need be computed again"
        yield Change(words, saved(facts, model, way), config={"pipeline": {"activation_checkpoint_interval": 0}})


def partition_optimizer(facts: FinishedRun, model: Model) -> Candidates:
    if facts.zero_stage == 0 and facts.replicas > 1:
        words = f"With ZeRO-1 each of {facts.replicas} replicas steps its share of the weights"
        way = replace(model.now, zero_stage=1)
        yield Change(words, saved(facts, model, way), config={"zero_optimization": {"stage": 1}})


def halve_messages(facts: FinishedRun, model: Model) -> Candidates:
    """On a CPU, half precision takes longer to compute than it saves."""
    if facts.precision == "fp32" and not facts.on_cpu:
        words = "In bf16 messages are half as long"
        yield Change(words, saved(facts, model, replace(model.now, wire_bytes=2)), config={"bf16": {"enabled": True}})


MOST_WORKERS = 16
PAUSE_SHARE = 0.01
"""What pauses may take after a change."""


def workers(facts: FinishedRun, model: Model) -> Candidates:
    """As many loader processes as keep up with the steps."""
    now, workers = model.now, facts.spec.data.workers
    wait = max(rank.data_wait for rank in facts.ranks)
    alone = model.step_seconds(replace(now, data_wait=0.0))
    work = wait if workers == 0 else workers * (alone + wait)
    enough = min(math.ceil(work / alone), MOST_WORKERS)
    if enough <= workers or not wait:
        return
    left = max(0.0, work / enough - alone) / wait
    words = f"With {counted(enough, 'loader')} images are read ahead while the devices compute"
    gain = saved(facts, model, replace(now, data_wait=left))
    yield Change(words, gain, (f"--set data.workers={enough}",))


def loss_scale(facts: FinishedRun, model: Model) -> Candidates:
    """A scale that does not overflow, or a precision without one."""
    found = facts.overflows
    share = stepping(facts) * found.skipped / found.steps
    if found.last_scale < found.first_scale:
        power = max(int(math.log2(found.last_scale)), 0)
        words = "A loss scale that begins where it ended overflows in no step at the beginning"
        yield Change(words, share, config={"fp16": {"initial_scale_power": power}})
    else:
        words = "bf16 has fp32's range and needs no loss scale"
        yield Change(words, share, config={"fp16": {"enabled": False}, "bf16": {"enabled": True}})


def rarer_checkpoints(facts: FinishedRun, model: Model) -> Candidates:
    spec, share = facts.spec.checkpoint, facts.pauses.checkpoint_share
    factor = _factor(share)
    gain, words = share * (1 - 1 / factor), f"Checkpoints {factor} times as rare"
    if spec.every_images is not None:
        yield Change(words, gain, (f"--set checkpoint.every_images={factor * spec.every_images}",))
    elif spec.every_minutes is not None:
        yield Change(words, gain, (f"--set checkpoint.every_minutes={factor * spec.every_minutes:g}",))


def rarer_inspections(facts: FinishedRun, model: Model) -> Candidates:
    """Of samples and held-out losses."""
    share = facts.pauses.inspection_share
    losses = min(facts.evaluation_seconds / facts.pauses.seconds, share)
    for part, key, every, what in (
        (losses, "evaluation", facts.spec.evaluation.every_images, "Held-out losses"),
        (share - losses, "samples", facts.spec.samples.every_images, "Samples"),
    ):
        if every is not None and part:
            factor = _factor(part)
            words = f"{what} {factor} times as rare"
            yield Change(words, part * (1 - 1 / factor), (f"--set {key}.every_images={factor * every}",))


def _factor(share: float) -> int:
    """How much rarer pauses have to be to take no more than they should."""
    return max(2, math.ceil(share / PAUSE_SHARE))


LEAST_GAIN = 0.01
"""Share of an image's time below which a change is not worth trying."""
MUCH_MORE = 0.2
"""By how much a change of more than speed has to save more than a simpler one."""


def best_change(facts: FinishedRun, model: Model, loss: str) -> Change | None:
    """The change that saves most of what is lost to ``loss``; None where none is worth trying.

    Of changes that save about as much, the one that comes first, which is the smallest.
    """
    simple, far = (_best(facts, model, sources.get(loss, ())) for sources in (_SIMPLE, _FAR))
    if far is not None and (simple is None or far.gain > simple.gain + MUCH_MORE):
        return far
    return simple


def _best(facts: FinishedRun, model: Model, sources: Sequence[_Source]) -> Change | None:
    candidates = (change for source in sources for change in source(facts, model))
    worth = [change for change in candidates if change.gain >= LEAST_GAIN]
    most = max((change.gain for change in worth), default=0.0)
    return next((change for change in worth if change.gain > most - LEAST_GAIN), None)


_Source = Callable[[FinishedRun, Model], Candidates]

_SIMPLE: dict[str, tuple[_Source, ...]] = {
    "bubble": (partial(micro_batches, more=True), schedules),
    "imbalance": (partitions,),
    "communication": (schedules, halve_messages),
    "data wait": (workers,),
    "overflow steps": (loss_scale,),
    "optimizer": (partition_optimizer,),
    "checkpoint pauses": (rarer_checkpoints,),
    "sampling pauses": (rarer_inspections,),
    "recomputation": (keep_activations,),
    "low utilisation": (partial(micro_batches, more=False),),
}
"""By loss, changes of one setting."""
_FAR: dict[str, tuple[_Source, ...]] = {
    "bubble": (stages, partial(batches, larger_micro_batches=False)),
    "imbalance": (schedules, stages),
    "communication": (stages,),
    "optimizer": (partial(batches, larger_micro_batches=False),),
    "low utilisation": (partial(batches, larger_micro_batches=True),),
}
"""By loss, changes of more than speed: of who holds what, or of what a step learns."""
