"""Training of a started run on one process: build the engine, record, train."""

import contextlib
import json
import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from subprocess import Popen
from typing import Any

import torch
import torch.distributed as dist
import yaml

from ddpm_ds.command_line import gib
from ddpm_ds.config.ds_config import TensorSplit
from ddpm_ds.config.spec import RunSpec
from ddpm_ds.data.cache import CONSTANTS, DatasetCache
from ddpm_ds.data.captions import PROMPTS
from ddpm_ds.data.held_out import checksums_of
from ddpm_ds.data.loader import Residence
from ddpm_ds.data.order import BucketOrder
from ddpm_ds.data.text import TextEncoders
from ddpm_ds.errors import BadNumbersError, OutputError, Preempted
from ddpm_ds.files import DS_CONFIG, SPEC
from ddpm_ds.observe.flops import FlopsProfile
from ddpm_ds.observe.kernels import KernelProfile
from ddpm_ds.observe.observer import Observer, Observers, PauseClock
from ddpm_ds.observe.timeline import Timeline
from ddpm_ds.pipeline.build import build_engine
from ddpm_ds.pipeline.engine import UnetPipelineEngine
from ddpm_ds.pipeline.schedule import PROGRAMS, written
from ddpm_ds.planning import RunPlan, replanning
from ddpm_ds.predict.finished_run import RESIDENCE
from ddpm_ds.predict.layouts import encoding_ranks
from ddpm_ds.processes.ranks import for_good
from ddpm_ds.processes.requests import Requests
from ddpm_ds.processes.signals import STOP_SIGNALS, ignore
from ddpm_ds.processes.watchdog import Watchdog
from ddpm_ds.tracking.progress import ProgressLine
from ddpm_ds.tracking.recorder import Recorder, recorded
from ddpm_ds.tracking.run_folder import disk_errors_said
from ddpm_ds.tracking.sender import system_metrics
from ddpm_ds.tracking.tracker import tell
from ddpm_ds.train.ema import Ema, averages_of
from ddpm_ds.train.loop import Rehearsal, Training, train
from ddpm_ds.train.objective import Denoising, HeldOutLoss, encoders_of, rate_of, replica_batches
from ddpm_ds.train.saving import Saver, described
from ddpm_ds.train.start import Asked, Prepared
from ddpm_ds.train.validation import Previews, Validation, prompts_of
from ddpm_ds.unet.layers import Layer, unet_layers
from ddpm_ds.unet.operations import Kernels
from ddpm_ds.unet.shards import split_layers


@dataclass(frozen=True)
class Ended:
    """Run that is over and saved, and still recorded."""

    engine: UnetPipelineEngine
    recorder: Recorder
    loss: float
    """Loss of the last point."""
    images: int
    """Images that this process has trained on, with the other ranks."""


@contextlib.contextmanager
def run_training(
    prepared: Prepared,
    watchdog: Watchdog,
    asked: Asked,
    progress: ProgressLine | None,
    files: Mapping[str, str],
    sender: Popen[bytes] | None,
) -> Iterator[Ended | None]:
    """Train a run that has started (:func:`ddpm_ds.train.start.started`) to its end; every rank enters this.

    The body finishes the record (:meth:`Recorder.finish`); it gets None if there is nothing to finish: the run had seen
    all its images before, or it was a rehearsal.

    ``progress`` is None on all ranks but 0. ``files`` are texts to keep in the run's folder, by file name. ``sender``
    is the child that will send what is recorded; None records nothing.

    Raises:
        BadNumbersError: the loss or the loss scale makes it pointless to continue.
        Preempted: the run was asked to stop, and is saved.
        PeerLostError: another rank is gone.
    """
    plan, device, (store, among) = prepared.plan, prepared.device, prepared.images
    doing = progress.doing if progress is not None else lambda what: contextlib.nullcontext()
    encoders = encoders_of(plan.spec, device)
    if sender is not None:
        tell(sender, {"store": str(prepared.claim.run_dir.parent.resolve())})
    with watchdog.blamed(), watchdog.pause(), doing("building the pipeline"), for_good():
        engine = build_engine(
            plan.layers,
            plan.bounds,
            plan.ds if asked.steps is None else replace(plan.ds, graphs=False),  # each of a few steps is timed
            Denoising(plan.spec, device, store.meta.statistics, store.constants, store.empty_text or encoders),
            seed=plan.spec.train.seed,
            programs=plan.programs,
            rate=rate_of(plan.spec),
            others=_other_layers(plan.spec, store, plan.ds.layout.tensor),
            verbose=asked.verbose,
            doing=doing,
        )
        engine.averages = ema = averages_of(engine, plan.spec.ema)
        if (group := plan.spec.bucket_group) is not None:
            numbers = [engine.module.size_number(each.size) for each in store.caches]
            order = BucketOrder(tuple(map(len, store.by_bucket(among))), plan.spec.train.seed, group)
            engine.size_of = lambda index: numbers[order.bucket_at(index)]
    recording: contextlib.AbstractContextManager[Recorder] = contextlib.nullcontext(Recorder(progress))
    if progress is not None and sender is not None:
        recording = _recorded(prepared, engine.kernels, asked, progress, files, sender)
    with disk_errors_said(prepared.claim.run_dir), recording as recorder:
        if plan.ds.kernels == "auto" and device.type == "cuda":
            recorder.log(engine.why_kernels)
        engine.graph.say = recorder.log
        if plan.ds.graphs == "auto" and asked.steps is None and device.type == "cuda":
            engine.graph.say_why_eager()
        if encoders is not None:
            recorder.log(said_of(encoders, plan))
        yield _train(prepared, engine, ema, recorder, watchdog, asked, encoders)


def said_of(encoders: TextEncoders, plan: RunPlan) -> str:
    """Return a line about the ranks of a pipeline that encode captions."""
    assert encoders.device is not None
    ranks = encoding_ranks(plan.layers, plan.bounds, plan.ds.layout.schedule)
    each = gib(encoders.parameters * (2 if encoders.device.type == "cuda" else 4))
    where = ", ".join(map(str, ranks))
    return f"captions are encoded while training, by encoders of {each} on each of these stages: {where}"


def _other_layers(spec: RunSpec, store: DatasetCache, tensor: TensorSplit) -> list[tuple[Layer, ...]]:
    """Return the U-Net's layers for images of each bucket of aspect that are not of ``data.image_size``."""
    if spec.data.buckets is None:
        return []
    sizes = [each.size for each in store.caches if each.size != spec.data.size]
    layers = (unet_layers(spec.unet, replace(spec.data.interface, size=size)) for size in sizes)
    return [split_layers(of_size, tensor) for of_size in layers]


def _recorded(
    prepared: Prepared,
    kernels: Kernels,
    asked: Asked,
    line: ProgressLine,
    files: Mapping[str, str],
    sender: Popen[bytes],
) -> contextlib.AbstractContextManager[Recorder]:
    """Return what records the run on rank 0, with the ``kernels`` that were chosen for it."""
    plan, store = prepared.plan, prepared.images.store
    spec, config = plan.spec.model_dump(mode="json"), replace(plan.ds, kernels=kernels).as_json()
    kept: dict[str, str | bytes] = {
        SPEC: yaml.safe_dump(spec, sort_keys=False),
        DS_CONFIG: json.dumps(config, indent=2) + "\n",
        **files,
        RESIDENCE: json.dumps(asdict(Residence.of(store)), indent=2) + "\n",
    }
    if store.constants is not None:
        kept[CONSTANTS] = (store.path / CONSTANTS).read_bytes()
    if prepared.prompts is not None:
        kept[PROMPTS] = prepared.prompts.content()
    if plan.programs is not None:
        kept[PROGRAMS] = written(plan.programs)
    images = Path(store.meta.folder).name if store.meta.folder else store.meta.source
    return recorded(
        prepared.claim.run_dir,
        line,
        plan.spec,
        files=kept,
        settings={**spec, "ds_config": config, "derived": _derived(plan, prepared.device)},
        tags={"world_size": str(plan.ds.layout.world_size), "stage_cuts": json.dumps(plan.bounds[1:-1])},
        dataset={"name": f"{images}-{store.meta.shape[-1]}px", "digest": store.key, "source": str(store.path)},
        checkpoint=prepared.checkpoint.path if prepared.checkpoint else None,
        changed=prepared.changed,
        note=asked.note,
        parent=asked.parent_run,
        sender=sender,
    )


def _derived(plan: RunPlan, device: torch.device) -> dict[str, object]:
    """Return settings that follow from spec, JSON and machine."""
    return {
        **plan.ds.layout.sizes,
        "parameters": plan.parameters,
        "forward_gflops_per_image": 2 * plan.macs / 1e9,
        "steps": plan.steps,
        "precision": plan.ds.precision,
        "zero_stage": plan.ds.layout.zero_stage,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
    }


def _train(
    prepared: Prepared,
    engine: UnetPipelineEngine,
    ema: Ema,
    recorder: Recorder,
    watchdog: Watchdog,
    asked: Asked,
    encoders: TextEncoders | None,
) -> Ended | None:
    """Load the checkpoint and train to the end."""
    plan, spec, layout = prepared.plan, prepared.plan.spec, prepared.plan.ds.layout
    run_dir, groups, (store, among) = prepared.claim.run_dir, prepared.claim.groups, prepared.images
    rehearsal, saver = None, None
    if asked.steps is not None:
        rehearsal = Rehearsal(engine, run_dir, asked.steps, layout.interval)
    with watchdog.blamed(), watchdog.pause():
        if rehearsal is None:
            saver = Saver(
                engine,
                ema,
                run_dir,
                spec.checkpoint,
                described(plan, checksums_of(store, prepared.held_out.store), store.meta.facts),
                log=recorder.log,
                groups=groups,
                store=watchdog.store,
            )
            if prepared.checkpoint is not None:
                saver.load(prepared.checkpoint)
            elif prepared.initial is not None:
                saver.start_from(prepared.initial)
        flops, precision, macs = plan.ds.blocks.get("flops_profiler", {}), plan.ds.precision, plan.macs
        trace = run_dir / "trace"
        observer: Observer = rehearsal or Observers(
            [
                FlopsProfile(engine, plan.whole_layers, flops, run_dir / "flops", recorder, steps=plan.steps),
                Timeline(engine, asked.trace_steps, trace, recorder, precision, macs, replanning(plan)),
                KernelProfile(engine, asked.profile_kernels, run_dir / "kernels", recorder),
                PauseClock(run_dir if dist.get_rank() == 0 else None),
            ]
        )
    first = engine.images_seen
    if first >= spec.train.images:
        ignore(STOP_SIGNALS)  # it is done already
        recorder.log(f"the run has already seen its {first:,} images; raise train.images to train further")
        recorder.finish("FINISHED")
        return None
    requests = Requests(run_dir, spec.checkpoint.every_minutes, watchdog.names)
    holds_out = len(prepared.held_out.positions) > 0
    losses = None
    if holds_out:
        losses = HeldOutLoss(spec, engine.device, *prepared.held_out, encoders, images=engine.micro_batch_size)
    prompts = prompts_of(spec, prepared.prompts, engine.device)
    previews = Previews(spec, engine, watchdog, *(prepared.held_out if holds_out else prepared.images), prompts)
    validation = Validation(spec, engine, ema, losses, previews, watchdog, recorder)

    def batches() -> Iterator[Any] | None:
        """Return this replica's micro-batches from the engine's progress on, on the stages that read data."""
        if not engine.reads_data:
            return None
        return replica_batches(
            spec,
            layout,
            store,
            engine.device,
            replicas=layout.replicas,
            replica=engine.grid.get_data_parallel_id(),
            among=among,
            start_images=engine.next_index,
            first=engine.is_first_stage(),
            last=engine.stage_id == engine.loss_stage,
            text=bool(engine.readers),
            encoders=encoders,
        )

    def finish() -> None:
        """Let no rank leave before the last checkpoint is on the disk.

        Raises:
            OutputError: it could not be written.
        """
        try:
            with watchdog.pause(), recorder.doing("writing the last checkpoint"):
                if saver is not None:
                    saver.check_saved()
                dist.barrier()
        finally:
            engine.graph.drop()  # NCCL would wait for it when its groups are destroyed
            watchdog.stop()
            requests.close(leaving=True)

    ended = rehearsal.ended if rehearsal is not None else lambda: engine.images_seen >= spec.train.images
    run = Training(spec, macs, engine, batches, saver, requests, watchdog, validation, observer, recorder, ended)
    try:
        with watchdog.blamed(), disk_errors_said(run_dir), system_metrics(watchdog.store, run_dir, recorder.tracker):
            last = train(run)
    except BadNumbersError:
        with contextlib.suppress(OutputError):  # of a run that is over in any case
            finish()
        raise
    except Preempted:
        finish()
        raise
    finish()
    return Ended(engine, recorder, last.loss, engine.images_seen - first) if rehearsal is None else None
