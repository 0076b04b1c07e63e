"""Training of a started run on one process: the engine, the record, and the loop, which steps, logs, validates and
saves, and rolls back or stops if the numbers are bad.
"""

import contextlib
import json
import math
import platform
import signal
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from subprocess import Popen
from typing import NamedTuple

import torch
import torch.distributed as dist
import yaml

from ddpm_ds.config.spec import RunSpec
from ddpm_ds.data.cache import CONSTANTS, Subset
from ddpm_ds.data.captions import PROMPTS
from ddpm_ds.data.loader import MicroBatch, Share, ordered
from ddpm_ds.data.text import TextEncoders
from ddpm_ds.ground.errors import BadNumbersError, LauncherLostError, OutputError, Preempted
from ddpm_ds.ground.units import gib
from ddpm_ds.observe.flops import FlopsProfile
from ddpm_ds.observe.kernels import KernelProfile
from ddpm_ds.observe.observer import Observer, Observers, PauseClock
from ddpm_ds.observe.timeline import Timeline
from ddpm_ds.pipeline.build import build_engine
from ddpm_ds.pipeline.deepspeed_insides import named_builds
from ddpm_ds.pipeline.engine import UnetPipelineEngine
from ddpm_ds.pipeline.messages import barrier
from ddpm_ds.pipeline.schedule import PROGRAMS, written
from ddpm_ds.planning.inputs import layers_for
from ddpm_ds.planning.run_plan import RunPlan, picture_seconds
from ddpm_ds.processes.ranks import for_good
from ddpm_ds.processes.requests import Requests
from ddpm_ds.processes.signals import STOP_SIGNALS, handle
from ddpm_ds.processes.watchdog import Watchdog
from ddpm_ds.schema.layout import Layout
from ddpm_ds.tracking.progress import ProgressLine, activity
from ddpm_ds.tracking.recorder import Recorder, recorded
from ddpm_ds.tracking.run_folder import DS_CONFIG, SPEC, disk_errors_reported
from ddpm_ds.tracking.tracker import RunStart
from ddpm_ds.training.asked import Asked
from ddpm_ds.training.ema import Ema, averages_of
from ddpm_ds.training.held_out_loss import HeldOutLoss
from ddpm_ds.training.meters import Interval, Meter, gather, is_due, metrics
from ddpm_ds.training.objective import Denoising, encoders_of, fields_read, rate_of, replica_batches, rows_read
from ddpm_ds.training.saving import Saver
from ddpm_ds.training.start import Prepared
from ddpm_ds.training.validation import Previews, Validation, prompts_of
from ddpm_ds.unet.shards import whole_layers

OVERFLOWS_AT_FLOOR = 8
"""Optimizer steps in a row that may overflow at the lowest loss scale before the numbers count as bad."""
FLOOR_STEPS = 100
"""Maximum number of steps until the host looks whether they overflow; it looks at each log point too."""
SPIKE_POINTS = 10
"""Number of log points whose mean loss is the reference for ``bad_numbers.spike_factor``."""
REMEDIES = "try a lower optimizer.learning_rate, a longer optimizer.warmup_images or gradient_clipping 1.0"


@dataclass
class Training:
    """State that the training loop works with, on every rank."""

    spec: RunSpec
    macs: int
    engine: UnetPipelineEngine
    batches: Callable[[], Iterator[MicroBatch] | None]
    """Function that opens the micro-batches from the engine's progress on; returns None on a stage without data."""
    saver: Saver
    requests: Requests
    watchdog: Watchdog
    validation: Validation
    observer: Observer
    recorder: Recorder
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=SPIKE_POINTS))


def train(run: Training) -> Interval:
    """Train until the run has ended; return the last interval of the loss curve.

    All ranks raise alike: BadNumbersError by the run's policy, or after a save Preempted and LauncherLostError.
    """
    engine, spec = run.engine, run.spec
    run.validation.before_first_step()
    meter, first = Meter(), True
    batches = meter.timed(run.batches())
    while True:
        before = engine.images_seen
        run.observer.begin_step(engine.global_steps + 1)
        with run.recorder.doing("taking the first step") if first else contextlib.nullcontext():
            meter.step(engine.train_batch(batches), images=engine.train_batch_size())
        run.watchdog.progress()
        run.recorder.step(engine.images_seen)
        if first:  # the loss is on the screen before the first log point
            loss = gather(meter.so_far(), engine).loss
            run.requests.listen()  # all ranks have something to save
            run.recorder.first_loss(loss)
            first = False
        asked, seen, done = run.requests.poll(), engine.images_seen, engine.images_seen >= spec.train.images
        save = asked.save or asked.stop or done or is_due(spec.checkpoint.every_images, before, seen)
        read = save or is_due(spec.logging.log_every_images, before, seen)
        trouble = _scale_floor(engine) if read or engine.global_steps % FLOOR_STEPS == 0 else None
        if read and not trouble:
            interval = gather(meter.read(), engine)  # waits for the device, and for the other ranks
            run.recorder.point(metrics(interval, engine, run.macs), engine.global_steps, fp16=engine.fp16_enabled())
            trouble = _bad_loss(run, interval, done)
        if trouble:
            if spec.bad_numbers.policy == "stop":
                raise BadNumbersError(trouble)
            with run.watchdog.pause():  # a checkpoint is read as fast as the disk is
                what = run.saver.roll_back(trouble, spec.bad_numbers.max_rollbacks)
            run.recorder.rolled_back(what, run.saver.rollbacks, engine.images_seen, engine.global_steps)
            run.recent.clear()
            meter = Meter()
            batches = meter.timed(run.batches())
            continue
        if any(run.validation.due(before, done)):  # before the save: a run that dies in between draws again
            with meter.paused(), run.observer.span("sampling"):
                run.validation.after_step(before, done)
            asked = run.requests.poll()  # a signal may have come meanwhile
            save = save or asked.save or asked.stop
        if save:
            with meter.paused(), run.observer.span("checkpoint"), run.watchdog.pause():  # waits for the one before
                seconds = run.saver.save()
            run.recorder.checkpoint(seconds, engine.global_steps)
            run.requests.saved()
        if done or asked.stop:
            run.observer.finish()
        if done:
            return interval
        if asked.abandoned:
            gone = f"the launcher of {asked.abandoned} is gone: all ranks have saved and stopped after {seen:,} images"
            raise LauncherLostError(f"{gone}; the run can be resumed")
        if asked.stop:
            raise Preempted(f"asked to stop after {seen:,} images")


def _scale_floor(engine: UnetPipelineEngine) -> str | None:
    """Describe the problem if fp16 overflows even at the lowest loss scale, else return None."""
    if not engine.fp16_enabled() or (overflows := engine.gradients.overflows_at_floor()) < OVERFLOWS_AT_FLOOR:
        return None
    where = f"at the lowest loss scale, {float(engine.gradients.scale):g}, after {engine.images_seen:,} images"
    return f"fp16 overflowed in {overflows} steps in a row {where}; {REMEDIES}, or bf16"


def _bad_loss(run: Training, interval: Interval, done: bool) -> str | None:
    """Describe the problem with the last interval's loss, or return None; fp16 skips steps whose loss is not finite."""
    after = f"after {run.engine.images_seen:,} images; {REMEDIES}"
    if done and not math.isfinite(interval.loss):
        return f"train/loss was not finite in any of the last {interval.steps} steps, {after}"
    if interval.non_finite_steps and not run.engine.fp16_enabled():
        return f"train/loss was not finite in {interval.non_finite_steps} of the last {interval.steps} steps, {after}"
    factor = run.spec.bad_numbers.spike_factor
    usual = sum(run.recent) / max(len(run.recent), 1)
    if factor and len(run.recent) == SPIKE_POINTS and interval.loss > factor * usual:
        high = f"train/loss = {interval.loss:.4g} is over {factor:g} times the {usual:.4g} of the points before"
        return f"{high}, {after}"
    if math.isfinite(interval.loss):
        run.recent.append(interval.loss)
    return None


class Ended(NamedTuple):
    """Run that is over and saved, and still recorded; with its last loss and the images since its start."""

    engine: UnetPipelineEngine
    recorder: Recorder
    loss: float
    images: int


@contextlib.contextmanager
def run_training(
    plan: RunPlan,
    prepared: Prepared,
    watchdog: Watchdog,
    asked: Asked,
    progress: ProgressLine | None,
    files: Mapping[str, str],
    sender: Popen[bytes] | None,
) -> Iterator[Ended | None]:
    """Train a run that has started (:func:`ddpm_ds.training.start.started`) to its end, as :func:`train`. Collective.

    The body finishes the record (:meth:`Recorder.finish`), unless it gets None from a run that had seen all its images
    before. ``progress``, and ``sender``, the child that sends the record, are None on all ranks but 0. ``files`` are
    texts to keep in the run's folder, by file name.
    """
    device, (store, _), doing = prepared.device, prepared.images.trained, partial(activity, progress)
    encoders = encoders_of(plan.spec.data.text, device)
    buckets = store.caches if plan.spec.data.buckets is not None else ()
    other_sizes = [each.size for each in buckets if each.size != plan.spec.data.size]
    empty = store.empty_text or encoders
    objective = Denoising(plan.spec, device, store.meta.statistics, store.constants, empty)
    with watchdog.blamed(), watchdog.pause(), doing("building the pipeline"), named_builds(doing), for_good():
        engine = build_engine(
            plan.layers,
            plan.bounds,
            plan.ds,
            objective,
            seed=plan.spec.train.seed,
            programs=plan.programs,
            others=[layers_for(plan.spec, size, plan.ds.layout.split) for size in other_sizes],
            drawn=not (prepared.checkpoint or prepared.initial),
            verbose=asked.verbose,
        )
        objective.band = rows_read(plan.spec, store, engine.module.band)
        engine.rate = rate_of(plan.spec.optimizer, plan.spec.train.images)
        engine.averages = ema = averages_of(engine, plan.spec.ema)
        if (group := plan.spec.bucket_group) is not None:
            numbers = [engine.module.size_number(each.size) for each in store.caches]
            order, _ = ordered(prepared.images.trained, plan.spec.data.folders, plan.spec.train.seed, group)
            engine.size_of = lambda index: numbers[order.bucket_at(index)]
    recording: contextlib.AbstractContextManager[Recorder] = contextlib.nullcontext(Recorder())
    if progress is not None and sender is not None:
        recording = _recorded(plan, prepared, asked, progress, files, sender)
    with disk_errors_reported(prepared.claim.run_dir), recording as recorder:
        engine.graph.log = recorder.log
        if plan.ds.config.graphs == "auto" and device.type == "cuda":
            engine.graph.log_why_eager()
        if encoders is not None:
            each = gib(encoders.parameters * (2 if device.type == "cuda" else 4))
            ranks = ", ".join(map(str, plan.encoding_ranks))
            recorder.log(f"captions are encoded while training, by encoders of {each} on each of these stages: {ranks}")
        yield _train(plan, prepared, engine, ema, recorder, watchdog, asked, encoders)


def _recorded(
    plan: RunPlan, prepared: Prepared, asked: Asked, line: ProgressLine, files: Mapping[str, str], sender: Popen[bytes]
) -> contextlib.AbstractContextManager[Recorder]:
    """Record the run, on rank 0."""
    store, device, about = prepared.images.trained.cache, prepared.device, prepared.about
    derived: dict[str, object] = {
        **about.layout,
        "parameters": plan.parameters,
        "forward_gflops_per_image": 2 * plan.macs / 1e9,
        "steps": plan.steps,
        "precision": plan.ds.precision,
        "zero_stage": plan.ds.layout.zero_stage,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
    }
    kept: dict[str, str | bytes] = {
        SPEC: yaml.safe_dump(about.spec, sort_keys=False),
        DS_CONFIG: json.dumps(about.ds_config, indent=2) + "\n",
        **files,
    }
    if store.constants is not None:
        kept[CONSTANTS] = (store.path / CONSTANTS).read_bytes()
    if prepared.prompts is not None:
        kept[PROMPTS] = prepared.prompts.content()
    if plan.programs is not None:
        kept[PROGRAMS] = written(plan.programs)
    images = Path(store.meta.folder).name if store.meta.folder else store.meta.source
    start = RunStart(
        plan.spec.logging.experiment,
        prepared.claim.run_dir,
        params={**about.spec, "ds_config": about.ds_config, "derived": derived},
        tags={"world_size": str(plan.ds.layout.world_size), "stage_cuts": json.dumps(plan.bounds[1:-1])},
        dataset={"name": f"{images}-{store.meta.shape[-1]}px", "digest": store.key, "source": str(store.path)},
        parent=asked.parent_run,
    )
    path, changed = prepared.checkpoint.path if prepared.checkpoint else None, prepared.changed
    return recorded(
        start, line, plan.spec, files=kept, checkpoint=path, changed=changed, note=asked.note, sender=sender
    )


def _batches(
    spec: RunSpec, layout: Layout, images: Subset, engine: UnetPipelineEngine, encoders: TextEncoders | None
) -> Iterator[MicroBatch] | None:
    """Return this replica's micro-batches from the engine's progress on; None on a stage without data."""
    if not engine.reads_data:
        return None
    share = Share(layout.micro_batch_images, engine.replicas, engine.replica)
    last = engine.stage_id == engine.loss_stage
    fields = fields_read(spec, first=engine.is_first_stage(), last=last, text=bool(engine.readers))
    start = engine.next_index
    if (band := rows_read(spec, images.cache, engine.module.band)) is not None:
        images = images._replace(cache=images.cache.rows(band.first, band.stop))
    return replica_batches(spec, images, share, engine.device, fields=fields, start_images=start, encoders=encoders)


def _train(
    plan: RunPlan,
    prepared: Prepared,
    engine: UnetPipelineEngine,
    ema: Ema,
    recorder: Recorder,
    watchdog: Watchdog,
    asked: Asked,
    encoders: TextEncoders | None,
) -> Ended | None:
    """Load the checkpoint and train to the end."""
    spec, run_dir, images = plan.spec, prepared.claim.run_dir, prepared.images
    with watchdog.blamed(), watchdog.pause():
        about, log = prepared.about, recorder.log
        saver = Saver(engine, ema, run_dir, spec.checkpoint, about, log=log, store=watchdog.store)
        if prepared.checkpoint is not None:
            saver.load(prepared.checkpoint)
        elif prepared.initial is not None:
            saver.start_from(prepared.initial)
        flops, precision = plan.ds.config.flops_profiler, plan.ds.precision
        observers = [
            FlopsProfile(engine, whole_layers(plan.layers), flops, run_dir / "flops", recorder, steps=plan.steps),
            Timeline(engine, asked.traced(plan.steps), run_dir / "trace", recorder, precision, plan.work),
            KernelProfile(engine, asked.profile_kernels, run_dir / "kernels", recorder),
            PauseClock(run_dir if dist.get_rank() == 0 else None),
        ]
    if (first := engine.images_seen) >= spec.train.images:
        handle(STOP_SIGNALS, signal.SIG_IGN)  # it is done already
        recorder.log(f"the run has already seen its {first:,} images; raise train.images to train further")
        recorder.finish("FINISHED")
        return None
    requests = Requests(run_dir, spec.checkpoint.every_minutes, watchdog.names)
    losses, drawn_for = None, images.trained
    if len(images.held_out.positions):
        losses = HeldOutLoss(spec, engine.device, *images.held_out, encoders, images=engine.micro_batch_size)
        drawn_for = images.held_out
    prompts, stops = prompts_of(spec, prepared.prompts, engine.device), lambda: requests.poll().stop
    previews, every = Previews(spec, engine, watchdog, drawn_for, prompts, stops), spec.samples.every_images
    measure_every, seconds = spec.evaluation.every_images, picture_seconds(plan)
    validation = Validation(every, measure_every, engine, ema, losses, previews, watchdog, recorder, stops, seconds)
    batches = partial(_batches, spec, plan.ds.layout, images.trained, engine, encoders)
    run = Training(
        spec, plan.work, engine, batches, saver, requests, watchdog, validation, Observers(observers), recorder
    )
    try:
        with watchdog.blamed(), disk_errors_reported(run_dir):
            last = train(run)
    except BadNumbersError:
        with contextlib.suppress(OutputError):  # of a run that is over in any case
            _finish(run)
        raise
    except Preempted:
        _finish(run)
        raise
    _finish(run)
    return Ended(engine, recorder, last.loss, engine.images_seen - first)


def _finish(run: Training) -> None:
    """Let no rank leave before the last checkpoint is on the disk; raises OutputError if it could not be written."""
    try:
        with run.watchdog.pause(), run.recorder.doing("writing the last checkpoint"):
            run.saver.check_saved()
            barrier()
    finally:
        run.engine.graph.drop()  # NCCL would wait for it when its groups are destroyed
        run.watchdog.stop()
        run.requests.close(leaving=True)
