"""Choice of the one change to try next: every change that could lower a cost is predicted, and the best is named."""

from __future__ import annotations

import contextlib
import json
import math
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ddpm_ds.command_line import counted, gib
from ddpm_ds.errors import LayoutError
from ddpm_ds.pipeline.cuts import Schedule, partition, weighted
from ddpm_ds.predict.finished_run import FinishedRun, Setup
from ddpm_ds.predict.whatif import Model

LEAST_GAIN = 0.01
"""Smallest share of an image's time that makes a change worth trying."""
MUCH_MORE = 0.2
"""Additional share of the time that a far-reaching change has to save over a simpler one."""
MOST_MICRO_BATCHES = 16
"""Maximum number of micro-batches per rank that is tried; with it the bubble is 6 %."""
MOST_WORKERS = 16
PAUSE_SHARE = 0.01
"""Share of the time that pauses may take after a change."""


Settings = dict[str, Any]
"""Values by key of the run spec, or of the DeepSpeed JSON after ``ds.``; ``-p`` is the number of stages."""


@dataclass(frozen=True)
class Change:
    """Change of one setting, and its predicted saving."""

    words: str
    """Description of the effect, in a sentence."""
    gain: float
    """Share of an image's time that the change saves."""
    settings: Settings

    @property
    def edit(self) -> str:
        """Change as options of ``ddpm-ds train``."""
        options = []
        for name, value in self.settings.items():
            text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
            options.append(f"-p {text}" if name == "-p" else f"--set {shlex.quote(f'{name}={text}')}")
        return " ".join(options)


Ideas = Iterator[tuple[str, Setup | float, Settings]]
"""Changes before they are predicted: words, the step's new setup or else the gain, and the settings."""


def best_change(model: Model, cost: str) -> Change | None:
    """Return the change that saves most of ``cost``; None if none is worth trying.

    Of changes that save about the same, the first is taken, which is the smallest.
    """
    simple, far = (_best(model, sources.get(cost, ())) for sources in (_SIMPLE, _FAR))
    if far is not None and (simple is None or far.gain > simple.gain + MUCH_MORE):
        return far
    return simple


def _best(model: Model, sources: Sequence[Callable[[Model], Ideas]]) -> Change | None:
    found = []
    for words, way, settings in (idea for source in sources for idea in source(model)):
        if not isinstance(way, Setup):
            found.append(Change(words, way, settings))
        elif model.fits(way):
            found.append(Change(words, stepping(model.facts) * model.gain(way), settings))
    worth = [change for change in found if change.gain >= LEAST_GAIN]
    most = max((change.gain for change in worth), default=0.0)
    return next((change for change in worth if change.gain > most - LEAST_GAIN), None)


def stepping(facts: FinishedRun) -> float:
    """Return the share of the run's time spent in steps."""
    return 1 - facts.pauses.checkpoint_share - facts.pauses.inspection_share


# ---------------------------------------------------------------- how a step is laid out


def micro_batches(model: Model, *, more: bool) -> Ideas:
    """Propose more or fewer micro-batches, the nearest number first, with the same batch."""
    now = model.now
    share = now.micro_batches * now.micro_batch_images
    fewest, most = 2 * now.stages if now.schedule == "folded" else 1, min(share, MOST_MICRO_BATCHES * now.stages)
    why = "keep the pipeline full for longer" if more else "give each layer more to do"
    for count in range(now.micro_batches + 1, most + 1) if more else range(now.micro_batches - 1, fewest - 1, -1):
        if share % count == 0:
            way = replace(now, micro_batches=count, micro_batch_images=share // count)
            instead = f"{now.micro_batches} of {now.micro_batch_images}"
            words = f"{count} micro-batches of {way.micro_batch_images} instead of {instead} {why}"
            yield words, way, _sharing(model, way)


def _sharing(model: Model, way: Setup) -> Settings:
    """Return the settings that give the micro-batches of a setup; the run's JSON has all of its own as numbers."""
    given = model.facts.spec.train.accumulation != "auto"
    return {
        **({"train.accumulation": way.micro_batches} if given else {}),
        "ds.train_micro_batch_size_per_gpu": way.micro_batch_images,
        "ds.gradient_accumulation_steps": way.micro_batches,
    }


def schedules(model: Model) -> Ideas:
    """Propose the planned schedule, or 1F1B instead of it."""
    now = model.now
    if now.stages == 1:
        return
    other: Schedule = "1f1b" if now.schedule == "planned" else "planned"
    words = (
        "An order made for the run, with weight gradients in passes of their own, leaves almost no bubble"
        if other == "planned"
        else "The 1f1b schedule visits each rank once instead of twice"
    )
    if cut := _cut(model, now.stages, other):
        bounds, partitioned = cut
        way = replace(now, schedule=other, bounds=bounds, in_flight=None)
        yield words, way, _scheduled(model, other) | partitioned


def _scheduled(model: Model, schedule: Schedule) -> Settings:
    """Return the settings that change the run's JSON to a schedule with the usual number of micro-batches in flight."""
    pipeline: dict[str, Any] = {"schedule": schedule, "in_flight": "auto"}
    if schedule != "planned":
        pipeline["replan"] = False
    given = model.job.config["pipeline"]
    return {f"ds.pipeline.{name}": value for name, value in pipeline.items() if given.get(name, value) != value}


def partitions(model: Model) -> Ideas:
    """Propose cuts by the layers' times; none if they would be no better than the traced ones."""
    bounds = _measured_bounds(model, model.now.stages, model.now.schedule)
    if bounds is None or bounds == model.now.bounds:
        return
    asked: str | list[int] = "measured"
    words = "Cuts by the layers' measured times give every rank as much to do"
    if model.facts.partition == "measured":
        asked = list(bounds[1:-1])
        words = "These cuts even out what the stages took in the traced step"
    yield words, replace(model.now, bounds=bounds), {"ds.pipeline.partition": asked}


def _cut(model: Model, ranks: int, schedule: Schedule) -> tuple[tuple[int, ...], Settings] | None:
    """Return bounds for another number of stages or schedule, and settings for them; None if there are none.

    They are found by the present method, or by measured times if the JSON lists the cuts.
    """
    given = model.facts.partition
    bounds: tuple[int, ...] | None = None
    if ranks == 1:
        bounds = (0, len(model.job.layers))
    elif isinstance(given, tuple) or given == "measured":
        bounds = _measured_bounds(model, ranks, schedule)
    else:
        with contextlib.suppress(LayoutError):
            bounds = partition(model.job.layers, ranks, given, schedule)
    settings = {"ds.pipeline.partition": "measured"} if isinstance(given, tuple) else {}
    return None if bounds is None else (bounds, settings)


def _measured_bounds(model: Model, ranks: int, schedule: Schedule) -> tuple[int, ...] | None:
    seconds = [layer.forward + layer.backward for layer in model.layer_times(model.now.micro_batch_images)]
    with contextlib.suppress(LayoutError):
        return weighted(model.job.layers, seconds, ranks, schedule)
    return None


def stages(model: Model) -> Ideas:
    """Propose other numbers of stages on the same processes, with micro-batches of the same size."""
    now = model.now
    world = now.stages * now.replicas
    per_step = world * now.micro_batch_images
    for ranks in range(1, world + 1):
        if world % ranks or ranks == now.stages or now.images * ranks % per_step:
            continue
        schedule: Schedule = "1f1b" if ranks == 1 else "planned" if now.stages == 1 else now.schedule
        count, replicas = now.images * ranks // per_step, world // ranks
        cut = _cut(model, ranks, schedule)
        if cut is None or (schedule == "folded" and count < 2 * ranks):
            continue
        bounds, partitioned = cut
        way = replace(now, stages=ranks, replicas=replicas, micro_batches=count, in_flight=None)
        way = replace(way, schedule=schedule, bounds=bounds)
        words = f"{counted(ranks, 'stage')} x {counted(replicas, 'replica')} instead of {now.stages} x {now.replicas}"
        yield words, way, {"-p": ranks, **_sharing(model, way), **_scheduled(model, schedule), **partitioned}


def batches(model: Model, *, part: str) -> Ideas:
    """Propose a batch twice as large, by more micro-batches or by larger ones."""
    way = replace(model.now, **{part: 2 * getattr(model.now, part)})
    words = "A batch twice as large, which learns differently: look at optimizer.learning_rate too"
    computed = {"ds.train_batch_size": "auto"}  # what the run's JSON has as numbers that follow from the batch
    for name in model.job.config.get("scheduler", {}).get("params", {}):
        if name.endswith("_num_steps"):
            computed[f"ds.scheduler.params.{name}"] = "auto"
    yield words, way, {"train.batch_images": way.images, **computed, **_sharing(model, way)}


def keep_activations(model: Model) -> Ideas:
    """Propose no recomputation."""
    if model.now.checkpoint_interval:
        words = "All activations fit the device's memory, so none need be computed again"
        yield words, replace(model.now, checkpoint_interval=0), {"ds.pipeline.activation_checkpoint_interval": 0}


def partition_optimizer(model: Model) -> Ideas:
    """Propose ZeRO-1 instead of none."""
    if model.now.zero_stage == 0 and model.now.replicas > 1:
        words = f"With ZeRO-1 each of {model.now.replicas} replicas steps its share of the weights"
        yield words, replace(model.now, zero_stage=1), {"ds.zero_optimization.stage": 1}


def halve_messages(model: Model) -> Ideas:
    """Propose half precision on GPUs; on a CPU it costs more compute than it saves."""
    if model.job.precision == "fp32" and not model.job.on_cpu:
        yield "In bf16 messages are half as long", replace(model.now, element_bytes=2), {"ds.bf16.enabled": True}


# ---------------------------------------------------------------- beside a step's layout


def workers(model: Model) -> Ideas:
    """Propose as many loader processes as keep up with the steps; more than there are cores only if a disk is slow."""
    now, workers, residence = model.now, model.facts.spec.data.workers, model.facts.residence
    most = MOST_WORKERS if residence is None or not residence.in_memory else min(MOST_WORKERS, residence.cores)
    wait = max(rank.data_wait_seconds for rank in model.facts.ranks)
    alone = model.step_seconds(replace(now, data_wait=0.0))
    readers = max(1, workers)  # without workers two threads read, which give as much as one worker (docs/data.md)
    work = readers * (alone + wait)
    enough = min(math.ceil(work / alone), most)
    if enough <= readers or not wait:
        return
    left = max(0.0, work / enough - alone) / wait
    words = f"With {counted(enough, 'loader')} images are read ahead while the devices compute"
    yield words, replace(now, data_wait=left), {"data.workers": enough}


def windows(model: Model) -> Ideas:
    """Propose to shuffle within windows, if a full shuffle makes each image wait for the disk."""
    residence = model.facts.residence
    if residence is not None and residence.scattered(model.facts.spec.data.shuffle_images):
        window = residence.window
        words = f"Windows of {window:,} images are read in runs of neighbours, which a disk gives many times as fast"
        yield words, replace(model.now, data_wait=0.0), {"data.shuffle_images": window}


def pixels(model: Model) -> Ideas:
    """Propose to keep pixels in memory if they fit and are decoded each time."""
    residence = model.facts.residence
    if residence is not None and residence.kind == "encoded" and residence.decoded_in_memory:
        words = f"Pixels are decoded once, and memory holds the {gib(residence.decoded_bytes)} of them"
        yield words, replace(model.now, data_wait=0.0), {"data.store": "pixels"}


def loss_scale(model: Model) -> Ideas:
    """Propose a loss scale that does not overflow, or a precision without one."""
    found = model.facts.overflows
    share = stepping(model.facts) * found.skipped / found.steps
    if found.last_scale < found.first_scale:
        power = max(int(math.log2(found.last_scale)), 0)
        words = "A loss scale that begins where it ended overflows in no step at the beginning"
        yield words, share, {"ds.fp16.initial_scale_power": power}
    else:
        words = "bf16 has fp32's range and needs no loss scale"
        yield words, share, {"ds.fp16.enabled": False, "ds.bf16.enabled": True}


def rarer_pauses(model: Model, *parts: str) -> Ideas:
    """Propose checkpoints, samples or validation so seldom that each takes 1 % of the time."""
    facts = model.facts
    saving, inspecting = facts.pauses.checkpoint_share, facts.pauses.inspection_share
    validating = min(facts.evaluation_seconds / facts.pauses.seconds, inspecting)
    shares = {"checkpoint": saving, "evaluation": validating, "samples": inspecting - validating}
    names = {"checkpoint": "Checkpoints", "evaluation": "Validation", "samples": "Samples"}
    for part in parts:
        spec, factor = getattr(facts.spec, part), max(2, math.ceil(shares[part] / PAUSE_SHARE))
        key = "every_minutes" if spec.every_images is None else "every_images"
        every = getattr(spec, key, None)
        if every is not None and shares[part]:
            rarer = {f"{part}.{key}": f"{factor * every:.15g}"}
            yield f"{names[part]} {factor} times less often", shares[part] * (1 - 1 / factor), rarer


_SIMPLE: dict[str, tuple[Callable[[Model], Ideas], ...]] = {
    "bubble": (partial(micro_batches, more=True), schedules),
    "imbalance": (partitions,),
    "communication": (schedules, halve_messages),
    "data wait": (windows, workers, pixels),
    "overflow steps": (loss_scale,),
    "optimizer": (partition_optimizer,),
    "checkpoint pauses": (lambda model: rarer_pauses(model, "checkpoint"),),
    "sampling pauses": (lambda model: rarer_pauses(model, "evaluation", "samples"),),
    "recomputation": (keep_activations,),
    "low utilisation": (partial(micro_batches, more=False),),
}
"""Changes of one setting, by the cost that they may lower."""
_FAR: dict[str, tuple[Callable[[Model], Ideas], ...]] = {
    "bubble": (stages, partial(batches, part="micro_batches")),
    "imbalance": (schedules, stages),
    "communication": (stages,),
    "optimizer": (partial(batches, part="micro_batches"),),
    "low utilisation": (partial(batches, part="micro_batch_images"),),
}
"""Changes beyond speed (which rank holds what, or what a step learns), by the cost that they may lower."""
