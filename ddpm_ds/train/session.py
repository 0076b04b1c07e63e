"""One training run on one process: prepare, build the engine, train, finish."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ddpm_ds.checkpoint.union import CompleteCheckpoint
from ddpm_ds.config.choices import SOURCES
from ddpm_ds.config.spec import check_picture
from ddpm_ds.data.cache import DatasetCache
from ddpm_ds.data.latents import pixels_of
from ddpm_ds.data.loader import split
from ddpm_ds.data.prepare import prepare
from ddpm_ds.data.residence import Residence
from ddpm_ds.device import DTYPES, limit_memory
from ddpm_ds.errors import BadNumbersError, OutputError, Preempted, SpecError, fault_said
from ddpm_ds.files import VERDICT
from ddpm_ds.observe.device_speed import measure_device
from ddpm_ds.observe.flops import FlopsProfile
from ddpm_ds.observe.kernels import KernelProfile
from ddpm_ds.observe.observer import Observer, Observers, PauseClock, Pauses, read_pauses
from ddpm_ds.observe.timeline import Timeline
from ddpm_ds.pipeline.build import build_engine, use_host_accelerator
from ddpm_ds.pipeline.engine import UnetPipelineEngine
from ddpm_ds.predict import verdict
from ddpm_ds.predict.auto import planned_again
from ddpm_ds.predict.plan import RunPlan, hosts_line, on_hosts
from ddpm_ds.processes.heartbeat import DeviceWork, make_store
from ddpm_ds.processes.process_group import group_timeout, process_group
from ddpm_ds.processes.rendezvous import Rendezvous
from ddpm_ds.processes.requests import Requests
from ddpm_ds.processes.signals import STOP_SIGNALS, ignore
from ddpm_ds.processes.watchdog import Watchdog
from ddpm_ds.tracking.progress import ProgressLine, summary
from ddpm_ds.tracking.recorder import Recorder, recorded
from ddpm_ds.tracking.run_folder import disk_errors_said
from ddpm_ds.tracking.system_metrics import system_metrics
from ddpm_ds.train.agreement import check_alike, check_gpus, check_same_images
from ddpm_ds.train.ema import Ema
from ddpm_ds.train.loop import Run, train
from ddpm_ds.train.objective import Denoising, rate_of, replica_batches
from ddpm_ds.train.rehearsal import Rehearsal
from ddpm_ds.train.resolve import cut_and_ordered, decide, share_threads
from ddpm_ds.train.resume import (
    Claim,
    InitialWeights,
    check_resume,
    claim_run,
    find_checkpoint,
    gather_in,
    images_learned,
    remove_abandoned_points,
)
from ddpm_ds.train.saving import Saver
from ddpm_ds.train.validation import HeldOutLoss, Validation
from ddpm_ds.unet.kernel_choice import check_kernels
from ddpm_ds.unet.model import check_compiler, parameter_shapes
from ddpm_ds.unet.operations import widening


@dataclass(frozen=True)
class Asked:
    """What is asked of a run beside its plan, by the options of ``launch/train.py``."""

    resume: str
    """``auto``, ``never``, or the path of a checkpoint or of a run's folder."""
    steps: int | None
    """Timed steps of a rehearsal; None trains."""
    trace_steps: range
    """Optimizer steps whose timeline is recorded."""
    profile_kernels: range
    """Optimizer steps that PyTorch's profiler records."""
    note: str | None
    parent_run: str | None
    """Id of the MLflow run of which this one is a child."""
    verbose: bool
    """Whether DeepSpeed's own log is shown."""
    start_seconds: float
    """Time for all ranks to meet."""
    hang_seconds: float
    dead_seconds: float
    """Time without a step, and without a sign of life, after which a rank is lost (docs/exit_codes.md)."""
    memory_budget: int | None
    """Most bytes that PyTorch may take of a GPU; None is all of it."""


@dataclass(frozen=True)
class Prepared:
    """Inputs of a run, checked on all ranks before they have a process group."""

    plan: RunPlan
    """Plan decided for the hosts and this device."""
    store: DatasetCache
    claim: Claim
    checkpoint: CompleteCheckpoint | None
    """Checkpoint that the run resumes from; None starts anew."""
    changed: list[str]
    """Settings that have changed since that checkpoint, by dotted key."""
    initial: InitialWeights | None


def run_training(
    plan: RunPlan, run_dir: Path, device: torch.device, asked: Asked, progress: ProgressLine | None
) -> None:
    """Train as planned on this process's ``device``; every rank calls this. Rank 0's ``run_dir`` counts.

    ``progress`` is None on all ranks but 0.

    Raises:
        UserError: something given is wrong, here or on another host; raised before anything is trained.
        BadNumbersError: the loss or the loss scale makes it pointless to continue.
        Preempted: the run was asked to stop, and is saved.
        PeerLostError: another rank is gone.
    """
    limit_memory(device, asked.memory_budget)
    use_host_accelerator()
    share_threads(device)
    doing = progress.doing if progress is not None else lambda what: contextlib.nullcontext()
    with doing("waiting for all processes"):
        rendezvous = Rendezvous(asked.start_seconds)
    with rendezvous.telling(), disk_errors_said(run_dir), doing("checking the run's files and images"):
        prepared = _prepare(plan, run_dir, device, asked, rendezvous, progress)
    with process_group(group_timeout(asked.hang_seconds, asked.dead_seconds)):
        rendezvous.close()
        places = prepared.plan.grid()
        names = [rendezvous.name(rank, places.coordinates(rank)[0]) for rank in range(dist.get_world_size())]
        with Watchdog(
            dist.get_rank(),
            names,
            make_store(dist.get_rank(), len(names)),
            dead_seconds=asked.dead_seconds,
            hang_seconds=asked.hang_seconds,
            work=DeviceWork.of(device),
        ) as watchdog:
            with watchdog.blamed(), watchdog.pause(), doing("building the pipeline"):
                plan = cut_and_ordered(prepared.plan, device)
                engine = build_engine(
                    plan.layers,
                    plan.bounds,
                    plan.ds,
                    Denoising(plan.spec, device),
                    seed=plan.spec.train.seed,
                    programs=plan.programs,
                    rate=rate_of(plan.spec),
                    verbose=asked.verbose,
                    doing=doing,
                )
                ema = Ema(engine, plan.spec.ema)
            recording: contextlib.AbstractContextManager[Recorder] = contextlib.nullcontext(Recorder(progress))
            if asked.steps is None:
                recording = recorded(
                    replace(plan, ds=replace(plan.ds, kernels=engine.kernels)),
                    prepared.store,
                    prepared.claim.run_dir,
                    device,
                    progress,
                    prepared.checkpoint.path if prepared.checkpoint else None,
                    prepared.changed,
                    note=asked.note,
                    parent=asked.parent_run,
                )
            with disk_errors_said(run_dir), recording as recorder:
                if plan.ds.kernels == "auto" and device.type == "cuda":
                    recorder.log(engine.why_kernels)
                _train(plan, prepared, engine, ema, recorder, watchdog, asked)
        dist.barrier()


def _prepare(
    plan: RunPlan,
    run_dir: Path,
    device: torch.device,
    asked: Asked,
    rendezvous: Rendezvous,
    progress: ProgressLine | None,
) -> Prepared:
    """Check this rank's files, device and images against those of the others, and claim the run's folder."""
    rank = rendezvous.rank
    check_alike(rendezvous, plan, device.type)
    mixed_gpus = check_gpus(rendezvous, device)
    check_kernels(plan.ds.kernels, device)
    if plan.ds.compile:
        check_compiler(device)
    hosts_planned = hosts_line(plan)
    plan = on_hosts(plan, rendezvous.hosts)
    first_on_host = int(os.environ["LOCAL_RANK"]) == 0
    gather = gather_in(rendezvous)
    store = prepare(
        plan.spec.data,
        progress=first_on_host,
        together=int(os.environ["LOCAL_WORLD_SIZE"]),
        verify=None if first_on_host else False,
        learned=next(filter(None, gather(images_learned(run_dir, asked.resume) if first_on_host else None)), None),
    )
    check_store(store, plan)
    check_same_images(rendezvous, store.meta.sha256)
    plan = decide(plan, device)
    log: Callable[[str], None] = progress.log if progress is not None else lambda line: None
    claim = claim_run(run_dir, rank, rendezvous.hosts, gather)  # before anything in it is read
    checkpoint = find_checkpoint(claim.run_dir, asked.resume, claim.groups, gather, log)
    changed: list[str] = []
    initial = None
    if checkpoint is not None:
        changed = check_resume(checkpoint, plan.spec, plan.ds.as_json(), store.meta.sha256, claim.run_dir)
        log(f"resuming from {checkpoint.path}")
        for change in changed:
            log(f"  changed since: {change}")
    elif plan.spec.train.initial_weights is not None:
        initial = InitialWeights(
            plan.spec.train.initial_weights, parameter_shapes(plan.layers), DTYPES[plan.ds.precision][1]
        )
    rendezvous.agree("ready", {})
    if rank == 0:
        if left := remove_abandoned_points(claim.run_dir, checkpoint, plan.spec, plan.ds.as_json()):
            log(left)
        hosts = hosts_line(plan)
        for notice in (
            hosts if hosts != hosts_planned else None,
            mixed_gpus,
            Residence.of(store).notice(plan.spec.data.shuffle_images),
            widening(device.type, DTYPES[plan.ds.precision][1]),
        ):
            if notice is not None:
                print(notice, flush=True)
    return Prepared(plan, store, claim, checkpoint, changed, initial)


def check_store(store: DatasetCache, plan: RunPlan) -> None:
    """Refuse images that the spec's U-Net does not fit.

    Raises:
        SpecError: the numbers of classes differ, too many images are held out, or pictures of decoded latents would be
            too large.
    """
    try:
        check_picture(plan.spec.samples, pixels_of(plan.spec.data).image_size)
    except ValueError as error:
        raise SpecError(str(error)) from None
    split(len(store), plan.spec.data.held_out_images)
    classes, asked = len(store.meta.classes), plan.spec.unet.classes
    if asked not in (None, classes):
        if store.meta.classes == (".",):
            where = SOURCES[plan.spec.data.source].labels
            raise SpecError(
                f"unet.classes = {asked}, but the images have no labels; {where}, or --set unet.classes=null"
            )
        raise SpecError(f"unet.classes = {asked}, but the images have {classes} classes; --set unet.classes={classes}")


def _train(
    plan: RunPlan,
    prepared: Prepared,
    engine: UnetPipelineEngine,
    ema: Ema,
    recorder: Recorder,
    watchdog: Watchdog,
    asked: Asked,
) -> None:
    """Load the checkpoint, train to the end, then report where the time went and how the run ended."""
    run_dir, groups, store = prepared.claim.run_dir, prepared.claim.groups, prepared.store
    rehearsal, saver = None, None
    if asked.steps is not None:
        rehearsal = Rehearsal(engine, run_dir, asked.steps, int(plan.ds.checkpoint_interval))
    with watchdog.blamed(), watchdog.pause():
        if rehearsal is None:
            saver = Saver(
                plan,
                engine,
                ema,
                run_dir,
                data_sha256=store.meta.sha256,
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
        replan = None
        if plan.ds.replan and plan.ds.schedule == "planned":
            replan = functools.partial(planned_again, plan.spec, plan.ds, plan.bounds)
        observer: Observer = rehearsal or Observers(
            [
                FlopsProfile(engine, plan.layers, flops, run_dir / "flops", recorder, steps=plan.steps),
                Timeline(engine, asked.trace_steps, trace, recorder, precision, macs, replan),
                KernelProfile(engine, asked.profile_kernels, run_dir / "kernels", recorder),
                PauseClock(run_dir if dist.get_rank() == 0 else None),
            ]
        )
    first = engine.images_seen
    if first >= plan.spec.train.images:
        ignore(STOP_SIGNALS)  # it is done already
        recorder.log(f"the run has already seen its {first:,} images; raise train.images to train further")
        recorder.finish("FINISHED")
        return
    requests = Requests(run_dir, plan.spec.checkpoint.every_minutes, watchdog.names)
    among, held_out = split(len(store), plan.spec.data.held_out_images)
    losses = HeldOutLoss(plan.spec, engine, store, held_out) if len(held_out) else None
    validation = Validation(plan.spec, engine, ema, losses, watchdog, recorder)

    def batches() -> Iterator[Any] | None:
        """Return this replica's micro-batches from the engine's progress on, on the stages that read data."""
        if not engine.reads_data:
            return None
        return replica_batches(
            plan,
            store,
            engine.device,
            replicas=plan.ds.layout.replicas,
            replica=engine.grid.get_data_parallel_id(),
            among=among,
            start_images=engine.next_index,
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
            watchdog.stop()
            requests.close(leaving=True)

    ended = rehearsal.ended if rehearsal is not None else lambda: engine.images_seen >= plan.spec.train.images
    run = Run(plan, engine, batches, ema, saver, requests, watchdog, validation, observer, recorder, ended)
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
    if rehearsal is not None:
        return
    pauses, found = Pauses(), None
    with fault_said("time of the pauses", recorder.log):
        pauses = read_pauses(run_dir)
        recorder.observed({"perf/run_seconds": pauses.seconds}, engine.global_steps)
    with fault_said("verdict", recorder.log):
        if dist.get_rank() == 0:
            found = verdict.conclude(run_dir, measure_device(plan.layers, engine.device, precision))
            recorder.artifact(run_dir / VERDICT)
            recorder.tags(verdict.tags(found))
    link = recorder.finish("FINISHED")
    if link is None:
        return
    with fault_said("summary", recorder.log):
        if found is not None:
            print(f"\n{verdict.text(found, run_dir)}", flush=True)
        print(
            summary(
                loss=last.loss,
                images=engine.images_seen - first,
                images_per_second=recorder.images_per_second(),
                pauses=pauses,
                steps=engine.global_steps,
                skipped_steps=engine.skipped_steps,
                run_dir=run_dir,
                link=link,
            ),
            flush=True,
        )
