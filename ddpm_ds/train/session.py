"""One training run from the plan to the summary: device, data, engine, tracker, loop, and how each of them ends."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ddpm_ds.checkpoint.union import CompleteCheckpoint
from ddpm_ds.data.cache import DatasetCache
from ddpm_ds.data.loader import Indices, split
from ddpm_ds.data.prepare import prepare
from ddpm_ds.device import DTYPES
from ddpm_ds.errors import KNOWN_TO_ALL_RANKS, SpecError
from ddpm_ds.observe.observer import Observer
from ddpm_ds.pipeline.build import build_engine, use_host_accelerator
from ddpm_ds.pipeline.engine import UnetPipelineEngine
from ddpm_ds.predict.plan import RunPlan, hosts_line, on_hosts
from ddpm_ds.processes.process_group import group_timeout, process_group
from ddpm_ds.processes.rendezvous import Rendezvous
from ddpm_ds.processes.requests import Requests
from ddpm_ds.processes.watchdog import Peers, Watchdog
from ddpm_ds.tracking.progress import ProgressLine, summary
from ddpm_ds.tracking.recorder import Recorder, Resumed, recorded
from ddpm_ds.tracking.run_folder import checkpoints_of
from ddpm_ds.tracking.system_metrics import system_metrics
from ddpm_ds.train.agreement import check_alike, check_gpus, check_same_images
from ddpm_ds.train.ema import Ema
from ddpm_ds.train.loop import Run, train
from ddpm_ds.train.objective import Denoising, replica_batches
from ddpm_ds.train.resolve import check_arithmetic, cut_by_time, decide, share_threads
from ddpm_ds.train.resume import InitialWeights, check_resume, claim_run, find_checkpoint, gather_in, share_record
from ddpm_ds.train.saving import Saver, begin_with, gather_objects
from ddpm_ds.train.validation import HeldOutLoss, Inspection
from ddpm_ds.train.watching import judge, observe
from ddpm_ds.unet.model import parameter_shapes
from ddpm_ds.unet.operations import widening


def run_training(plan: RunPlan, run_dir: Path, device: torch.device, options: argparse.Namespace) -> None:
    """Train as planned on this process's ``device``; every rank calls this. Rank 0's ``run_dir`` counts.

    Raises:
        UserError: something given is wrong, here or on another host; raised before anything is trained.
        BadNumbersError: the loss or the loss scale makes going on pointless.
        Preempted: the run was asked to stop, and is saved.
        PeerLostError: another rank is gone.
    """
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    use_host_accelerator()
    share_threads(device)
    rendezvous = Rendezvous(options.start_seconds)
    with rendezvous.telling():
        check_alike(rendezvous, plan, device.type)
        line_of_gpus = check_gpus(rendezvous, device)
        check_arithmetic(plan.ds, device)
        plan = on_hosts(planned := plan, rendezvous.hosts)
        objective = Denoising(plan.spec, device)
        store = prepare(plan.spec.data, progress=local_rank == 0)
        check_store(store, plan)
        check_same_images(rendezvous, store.meta.sha256)
        plan = decide(plan, device)
        line = ProgressLine(plan.spec.train.images) if rank == 0 else None
        gather = gather_in(rendezvous)
        claim = claim_run(run_dir, rank, rendezvous.hosts, gather)  # before anything in it is read
        run_dir, say = claim.run_dir, line.log if line is not None else _ignore
        whole = find_checkpoint(run_dir, options.resume, claim.groups, gather, say)
        resumed = _check_resume(whole, plan, store, say) if whole is not None else None
        initial = _open_initial_weights(plan) if whole is None else None
        rendezvous.agree("ready", {})
    if rank == 0 and (line_of_hosts := hosts_line(plan)) not in (None, hosts_line(planned)):
        print(line_of_hosts, flush=True)
    if rank == 0 and line_of_gpus is not None:
        print(line_of_gpus, flush=True)
    if rank == 0 and (line_of_precision := widening(device.type, DTYPES[plan.ds.precision][1])) is not None:
        print(line_of_precision, flush=True)

    with process_group(group_timeout(options.hang_seconds, options.dead_seconds)):
        rendezvous.close()
        places = plan.grid()
        names = [rendezvous.name(rank, places.coordinates(rank)[0]) for rank in range(dist.get_world_size())]
        with Peers(names, device, options) as peers:
            with peers.blamed(), peers.watchdog.pause():
                plan = cut_by_time(plan, device)
                engine = build_engine(
                    plan.layers,
                    plan.bounds,
                    plan.ds,
                    objective,
                    seed=plan.spec.train.seed,
                    verbose=options.verbose,
                )
                ema = Ema(engine, plan.spec.ema)
            labels = {"note": options.note, "parent": options.parent_run}
            chosen = replace(plan, ds=replace(plan.ds, kernels=engine.kernels))
            with recorded(chosen, run_dir, device, line, resumed, **labels) as recorder:
                if plan.ds.kernels == "auto" and device.type == "cuda":
                    recorder.log(engine.why_kernels)
                with peers.blamed(), peers.watchdog.pause():
                    share_record(run_dir, claim.groups, gather_objects)
                    saver = Saver(
                        plan,
                        engine,
                        ema,
                        checkpoints_of(run_dir),
                        data_sha256=store.meta.sha256,
                        say=recorder.log,
                        groups=claim.groups,
                        store=peers.store,
                    )
                    if whole is not None:
                        saver.load(whole)
                    elif initial is not None:
                        begin_with(engine, ema, initial)
                    observer = observe(plan, engine, recorder, run_dir, options)
                _train(plan, store, engine, ema, saver, observer, recorder, run_dir, peers)
        dist.barrier()
    del claim


def _train(
    plan: RunPlan,
    store: DatasetCache,
    engine: UnetPipelineEngine,
    ema: Ema,
    saver: Saver,
    observer: Observer,
    recorder: Recorder,
    run_dir: Path,
    peers: Peers,
) -> None:
    """The loop, what watches it, and the summary."""
    started, first = time.monotonic(), engine.images_seen
    if first >= plan.spec.train.images:
        recorder.log(f"the run has seen its {first:,} images before; raise train.images to go on")
        recorder.finish("FINISHED")
        return
    requests, watchdog = Requests(run_dir, plan.spec.checkpoint.every_minutes, peers.names), peers.watchdog
    among, positions = split(len(store), plan.spec.data.held_out_images)
    held_out = HeldOutLoss(plan.spec, engine, store, positions) if len(positions) else None
    inspection = Inspection(plan.spec, engine, ema, held_out, watchdog, recorder)
    run = Run(
        plan,
        engine,
        lambda: _batches(plan, store, among, engine),
        ema,
        saver,
        requests,
        watchdog,
        inspection,
        observer,
        recorder,
    )
    try:
        with peers.blamed(), system_metrics(peers.store, recorder.tracker):
            last = train(run)
        seconds = time.monotonic() - started
    except KNOWN_TO_ALL_RANKS:
        _end_well(saver, watchdog, requests)
        raise
    _end_well(saver, watchdog, requests)
    recorder.observed({"perf/run_seconds": seconds}, engine.global_steps)
    found = judge(run_dir, recorder) if dist.get_rank() == 0 else None
    link = recorder.finish("FINISHED")
    if link is not None:
        if found is not None:
            print(f"\n{found}", flush=True)
        print(
            summary(
                loss=last.loss,
                images=engine.images_seen - first,
                seconds=seconds,
                looking_seconds=inspection.seconds,
                steps=engine.global_steps,
                skipped_steps=engine.skipped_steps,
                run_dir=run_dir,
                link=link,
            ),
            flush=True,
        )


def _end_well(saver: Saver, watchdog: Watchdog, requests: Requests) -> None:
    """What all ranks do together at the end: the last checkpoint is on the disk before any of them leaves."""
    with watchdog.pause():
        saver.wait()
        dist.barrier()
    watchdog.stop()
    requests.close()


def _check_resume(whole: CompleteCheckpoint, plan: RunPlan, store: DatasetCache, say: Callable[[str], None]) -> Resumed:
    """The checkpoint to go on from, checked against this run."""
    changed = check_resume(whole, plan.spec, plan.ds.as_json(), store.meta.sha256)
    say(f"going on from {whole.path}")
    for change in changed:
        say(f"  changed since: {change}")
    return Resumed(whole.path, tuple(changed))


def _ignore(line: str) -> None:
    """Only rank 0 says what is known to all."""


def _open_initial_weights(plan: RunPlan) -> InitialWeights | None:
    path = plan.spec.train.initial_weights
    return None if path is None else InitialWeights(path, parameter_shapes(plan.layers))


def _batches(plan: RunPlan, store: DatasetCache, among: Indices, engine: UnetPipelineEngine) -> Iterator[Any] | None:
    """This replica's micro-batches from the engine's progress on, on the stages that read data."""
    if not engine.reads_data:
        return None
    replicas, replica = plan.ds.layout.replicas, engine.grid.get_data_parallel_id()
    first = engine.next_index
    return replica_batches(
        plan, store, engine.device, replicas=replicas, replica=replica, among=among, start_images=first
    )


def check_store(store: DatasetCache, plan: RunPlan) -> None:
    """Refuse images that the spec's U-Net does not fit.

    Raises:
        SpecError: the numbers of classes differ, or too many images are held out.
    """
    split(len(store), plan.spec.data.held_out_images)
    classes, asked = len(store.meta.classes), plan.spec.unet.classes
    if asked is not None and asked != classes:
        raise SpecError(f"unet.classes = {asked}, but the images have {classes} classes; --set unet.classes={classes}")
