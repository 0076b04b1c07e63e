"""Changes of how a step is laid out: schedule, cuts, stages, micro-batches, batch, recomputation, ZeRO."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ddpm_ds.errors import LayoutError
from ddpm_ds.pipeline.partition import Schedule, partition, weighted
from ddpm_ds.verdict.change import Candidates, Change, counted, saved
from ddpm_ds.verdict.facts import Facts, Method
from ddpm_ds.verdict.whatif import Model, Way

MOST_MICRO_BATCHES = 16
"""Per rank; with so many the bubble is 6 %."""


def micro_batches(facts: Facts, model: Model, *, more: bool) -> Candidates:
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


def _sharing(facts: Facts, way: Way) -> tuple[tuple[str, ...], dict[str, Any]]:
    """How to ask for the micro-batches of a way."""
    if facts.spec.train.accumulation != "auto":
        return (f"--set train.accumulation={way.micro_batches}",), {}
    return (), {
        "train_micro_batch_size_per_gpu": way.micro_batch_images,
        "gradient_accumulation_steps": way.micro_batches,
    }


def schedules(facts: Facts, model: Model) -> Candidates:
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


def partitions(facts: Facts, model: Model) -> Candidates:
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


def _cuts(facts: Facts, model: Model, ranks: int, method: Method, schedule: Schedule) -> tuple[int, ...] | None:
    """The bounds that a method gives; None where there are none."""
    try:
        if method != "measured":
            return partition(facts.layers, ranks, method, schedule)
        return weighted(facts.layers, model.layer_seconds(model.now.micro_batch_images), ranks, schedule)
    except LayoutError:
        return None


def stages(facts: Facts, model: Model) -> Candidates:
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


def batches(facts: Facts, model: Model, *, larger_micro_batches: bool) -> Candidates:
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


def keep_activations(facts: Facts, model: Model) -> Candidates:
    way = replace(model.now, checkpoint_interval=0)
    if model.now.checkpoint_interval and model.fits(way):
        words = "All activations fit the device's memory, so none need be computed again"
        yield Change(words, saved(facts, model, way), config={"pipeline": {"activation_checkpoint_interval": 0}})


def partition_optimizer(facts: Facts, model: Model) -> Candidates:
    if facts.zero_stage == 0 and facts.replicas > 1:
        words = f"With ZeRO-1 each of {facts.replicas} replicas steps its share of the weights"
        way = replace(model.now, zero_stage=1)
        yield Change(words, saved(facts, model, way), config={"zero_optimization": {"stage": 1}})


def halve_messages(facts: Facts, model: Model) -> Candidates:
    """On a CPU, half precision takes longer to compute than it saves."""
    if facts.precision == "fp32" and not facts.on_cpu:
        words = "In bf16 messages are half as long"
        yield Change(words, saved(facts, model, replace(model.now, wire_bytes=2)), config={"bf16": {"enabled": True}})
