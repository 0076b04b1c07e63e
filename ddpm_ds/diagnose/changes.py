"""The one change to try next: all that could lower a cost are predicted, and the best is named."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ddpm_ds.command_line import counted
from ddpm_ds.errors import LayoutError
from ddpm_ds.pipeline.cuts import Schedule, partition, weighted
from ddpm_ds.predict.finished_run import FinishedRun, Method, Setup
from ddpm_ds.predict.whatif import Model

LEAST_GAIN = 0.01
"""Share of an image's time below which a change is not worth trying."""
MUCH_MORE = 0.2
"""How much more of the time a far-reaching change has to save than a simpler one."""
MOST_MICRO_BATCHES = 16
"""Micro-batches per rank that are tried; with so many the bubble is 6 %."""
MOST_WORKERS = 16
PAUSE_SHARE = 0.01
"""Share of the time that pauses may take after a change."""


@dataclass(frozen=True)
class Change:
    """A change of one setting, and what it is predicted to save."""

    words: str
    """What it does, in a sentence."""
    gain: float
    """Share of an image's time that it saves."""
    options: tuple[str, ...] = ()
    """Options of launch/train.py."""
    config: dict[str, Any] = field(default_factory=dict)
    """Keys of the DeepSpeed JSON with their new values."""

    @property
    def edit(self) -> str:
        """The change as it is typed."""
        keys = json.dumps(self.config)[1:-1]
        return " and in the DeepSpeed JSON ".join(part for part in (" ".join(self.options), keys) if part)


Changes = Iterator[Change]


def best_change(model: Model, cost: str) -> Change | None:
    """The change that saves most of what ``cost`` takes; None where none is worth trying.

    Of changes that save about as much, the one that comes first, which is the smallest.
    """
    simple, far = (_best(model, sources.get(cost, ())) for sources in (_SIMPLE, _FAR))
    if far is not None and (simple is None or far.gain > simple.gain + MUCH_MORE):
        return far
    return simple


def _best(model: Model, sources: Sequence[Callable[[Model], Changes]]) -> Change | None:
    worth = [change for source in sources for change in source(model) if change.gain >= LEAST_GAIN]
    most = max((change.gain for change in worth), default=0.0)
    return next((change for change in worth if change.gain > most - LEAST_GAIN), None)


def _saved(model: Model, way: Setup) -> float:
    """Share of an image's time that another way saves, pauses counted in."""
    return stepping(model.facts) * model.gain(way)


def stepping(facts: FinishedRun) -> float:
    """Share of the run's time in which steps are taken."""
    return 1 - facts.pauses.checkpoint_share - facts.pauses.inspection_share


# ---------------------------------------------------------------- how a step is laid out


def micro_batches(model: Model, *, more: bool) -> Changes:
    """More or fewer micro-batches, the nearest number first, the batch left as it is."""
    now = model.now
    share = now.micro_batches * now.micro_batch_images
    fewest, most = 2 * now.stages if now.schedule == "folded" else 1, min(share, MOST_MICRO_BATCHES * now.stages)
    for count in range(now.micro_batches + 1, most + 1) if more else range(now.micro_batches - 1, fewest - 1, -1):
        way = replace(now, micro_batches=count, micro_batch_images=share // count)
        if share % count or not model.fits(way):
            continue
        words = (
            f"{count} micro-batches of {way.micro_batch_images} instead of {now.micro_batches} of "
            f"{now.micro_batch_images} {'keep the pipeline full for longer' if more else 'give each layer more to do'}"
        )
        yield Change(words, _saved(model, way), *_sharing(model, way))


def _sharing(model: Model, way: Setup) -> tuple[tuple[str, ...], dict[str, Any]]:
    """How to ask for the micro-batches of a way."""
    if model.facts.spec.train.accumulation != "auto":
        return (f"--set train.accumulation={way.micro_batches}",), {}
    return (), {
        "train_micro_batch_size_per_gpu": way.micro_batch_images,
        "gradient_accumulation_steps": way.micro_batches,
    }


def schedules(model: Model) -> Changes:
    """The other schedule."""
    now, method = model.now, _method(model)
    other: Schedule = "1f1b" if now.schedule == "folded" else "folded"
    if now.stages == 1 or (other == "folded" and now.micro_batches < 2 * now.stages):
        return
    bounds = _cuts(model, now.stages, method, other)
    if bounds is None or not model.fits(way := replace(now, schedule=other, bounds=bounds)):
        return
    pipeline = {"schedule": other} | ({"partition": method} if method != model.facts.partition else {})
    words = (
        "The folded schedule keeps skips on the rank that makes them, and has a smaller bubble"
        if other == "folded"
        else "The 1f1b schedule has no second visit to each rank"
    )
    yield Change(words, _saved(model, way), config={"pipeline": pipeline})


def partitions(model: Model) -> Changes:
    """Cuts by the layers' times; where they are, or would be, no better, as they were in the traced step."""
    now = model.now
    bounds = _cuts(model, now.stages, "measured", now.schedule)
    if bounds is None or bounds == now.bounds or not model.fits(way := replace(now, bounds=bounds)):
        return
    if model.facts.partition != "measured":
        words, cuts = "Cuts by the layers' measured times give every rank as much to do", "measured"
        yield Change(words, _saved(model, way), config={"pipeline": {"partition": cuts}})
    else:
        words = "These cuts even out what the stages took in the traced step"
        yield Change(words, _saved(model, way), config={"pipeline": {"partition": list(bounds[1:-1])}})


def _method(model: Model) -> Method:
    """How to ask for cuts of another number of stages."""
    given = model.facts.partition
    return "measured" if isinstance(given, tuple) else given


def _cuts(model: Model, ranks: int, method: Method, schedule: Schedule) -> tuple[int, ...] | None:
    """The bounds that a method gives; None where there are none."""
    layers = model.job.layers
    try:
        if method != "measured":
            return partition(layers, ranks, method, schedule)
        seconds = [layer.forward + layer.backward for layer in model.layer_times(model.now.micro_batch_images)]
        return weighted(layers, seconds, ranks, schedule)
    except LayoutError:
        return None


def stages(model: Model) -> Changes:
    """Other numbers of stages on the same processes, micro-batches as large as they are."""
    now, method = model.now, _method(model)
    world = now.stages * now.replicas
    per_step = world * now.micro_batch_images
    for ranks in range(1, world + 1):
        if world % ranks or ranks == now.stages or now.images * ranks % per_step:
            continue
        schedule: Schedule = "1f1b" if ranks == 1 else now.schedule
        count, replicas = now.images * ranks // per_step, world // ranks
        bounds = (0, len(model.job.layers)) if ranks == 1 else _cuts(model, ranks, method, schedule)
        if bounds is None or (schedule == "folded" and count < 2 * ranks):
            continue
        way = replace(now, stages=ranks, schedule=schedule, bounds=bounds, replicas=replicas, micro_batches=count)
        if not model.fits(way):
            continue
        options, config = _sharing(model, way)
        pipeline: dict[str, str] = {"schedule": schedule} if schedule != now.schedule else {}
        pipeline |= {"partition": method} if method != model.facts.partition else {}
        config |= {"pipeline": pipeline} if pipeline else {}
        words = f"{counted(ranks, 'stage')} x {counted(replicas, 'replica')} instead of {now.stages} x {now.replicas}"
        yield Change(words, _saved(model, way), (f"-p {ranks}", *options), config)


def batches(model: Model, *, larger_micro_batches: bool) -> Changes:
    """A batch twice as large, as more micro-batches or as larger ones; learning rate and warm-up are the user's."""
    now = model.now
    way = (
        replace(now, micro_batch_images=2 * now.micro_batch_images)
        if larger_micro_batches
        else replace(now, micro_batches=2 * now.micro_batches)
    )
    if not model.fits(way):
        return
    options, config = _sharing(model, way)
    words = "A batch twice as large, which learns differently: look at optimizer.learning_rate too"
    yield Change(words, _saved(model, way), (f"--set train.batch_images={way.images}", *options), config)


def keep_activations(model: Model) -> Changes:
    """No recomputation."""
    way = replace(model.now, checkpoint_interval=0)
    if model.now.checkpoint_interval and model.fits(way):
        words = "All activations fit the device's memory, so none need be computed again"
        yield Change(words, _saved(model, way), config={"pipeline": {"activation_checkpoint_interval": 0}})


def partition_optimizer(model: Model) -> Changes:
    """ZeRO-1 instead of none."""
    if model.now.zero_stage == 0 and model.now.replicas > 1:
        words = f"With ZeRO-1 each of {model.now.replicas} replicas steps its share of the weights"
        way = replace(model.now, zero_stage=1)
        yield Change(words, _saved(model, way), config={"zero_optimization": {"stage": 1}})


def halve_messages(model: Model) -> Changes:
    """Half precision on GPUs; on a CPU it takes longer to compute than it saves."""
    if model.job.precision == "fp32" and not model.job.on_cpu:
        words = "In bf16 messages are half as long"
        yield Change(words, _saved(model, replace(model.now, element_bytes=2)), config={"bf16": {"enabled": True}})


# ---------------------------------------------------------------- beside a step's layout


def workers(model: Model) -> Changes:
    """As many loader processes as keep up with the steps."""
    now, workers = model.now, model.facts.spec.data.workers
    wait = max(rank.data_wait for rank in model.facts.ranks)
    alone = model.step_seconds(replace(now, data_wait=0.0))
    work = wait if workers == 0 else workers * (alone + wait)
    enough = min(math.ceil(work / alone), MOST_WORKERS)
    if enough <= workers or not wait:
        return
    left = max(0.0, work / enough - alone) / wait
    words = f"With {counted(enough, 'loader')} images are read ahead while the devices compute"
    yield Change(words, _saved(model, replace(now, data_wait=left)), (f"--set data.workers={enough}",))


def loss_scale(model: Model) -> Changes:
    """A scale that does not overflow, or a precision without one."""
    found = model.facts.overflows
    share = stepping(model.facts) * found.skipped / found.steps
    if found.last_scale < found.first_scale:
        power = max(int(math.log2(found.last_scale)), 0)
        words = "A loss scale that begins where it ended overflows in no step at the beginning"
        yield Change(words, share, config={"fp16": {"initial_scale_power": power}})
    else:
        words = "bf16 has fp32's range and needs no loss scale"
        yield Change(words, share, config={"fp16": {"enabled": False}, "bf16": {"enabled": True}})


def rarer_pauses(model: Model) -> Changes:
    """Checkpoints so rare that they take 1 %."""
    spec, share = model.facts.spec.checkpoint, model.facts.pauses.checkpoint_share
    for key, every in (("every_images", spec.every_images), ("every_minutes", spec.every_minutes)):
        if every is not None:
            yield _rarer("Checkpoints", share, f"checkpoint.{key}", every)
            return


def rarer_inspections(model: Model) -> Changes:
    """Samples and validation so rare that each takes 1 %."""
    facts = model.facts
    share = facts.pauses.inspection_share
    losses = min(facts.evaluation_seconds / facts.pauses.seconds, share)
    for what, part, key, every in (
        ("Validation", losses, "evaluation", facts.spec.evaluation.every_images),
        ("Samples", share - losses, "samples", facts.spec.samples.every_images),
    ):
        if every is not None and part:
            yield _rarer(what, part, f"{key}.every_images", every)


def _rarer(what: str, share: float, key: str, every: float) -> Change:
    factor = max(2, math.ceil(share / PAUSE_SHARE))
    words = f"{what} {factor} times as rare"
    return Change(words, share * (1 - 1 / factor), (f"--set {key}={factor * every:.15g}",))


_SIMPLE: dict[str, tuple[Callable[[Model], Changes], ...]] = {
    "bubble": (partial(micro_batches, more=True), schedules),
    "imbalance": (partitions,),
    "communication": (schedules, halve_messages),
    "data wait": (workers,),
    "overflow steps": (loss_scale,),
    "optimizer": (partition_optimizer,),
    "checkpoint pauses": (rarer_pauses,),
    "sampling pauses": (rarer_inspections,),
    "recomputation": (keep_activations,),
    "low utilisation": (partial(micro_batches, more=False),),
}
"""Changes of one setting, by the cost that they may lower."""
_FAR: dict[str, tuple[Callable[[Model], Changes], ...]] = {
    "bubble": (stages, partial(batches, larger_micro_batches=False)),
    "imbalance": (schedules, stages),
    "communication": (stages,),
    "optimizer": (partial(batches, larger_micro_batches=False),),
    "low utilisation": (partial(batches, larger_micro_batches=True),),
}
"""Changes of more than speed: of which rank holds what, or of what a step learns."""
