"""One training run from the plan to the summary: device, data, engine, tracker, loop, and how each of them ends."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ddpm_ds.checkpoint.consolidate import DTYPES
from ddpm_ds.checkpoint.union import Whole
from ddpm_ds.data.device import on_device
from ddpm_ds.data.loader import micro_batches
from ddpm_ds.data.order import Indices
from ddpm_ds.data.prepare import prepare
from ddpm_ds.data.split import split
from ddpm_ds.data.store import Store
from ddpm_ds.errors import SpecError
from ddpm_ds.observe.observer import Observer
from ddpm_ds.pipeline.build import build_engine
from ddpm_ds.pipeline.engine import UnetPipelineEngine
from ddpm_ds.pipeline.host_accelerator import use_host_accelerator
from ddpm_ds.train import state
from ddpm_ds.train.agreement import check_alike, check_gpus, check_same_images
from ddpm_ds.train.ema import Ema
from ddpm_ds.train.held_out import HeldOutLoss
from ddpm_ds.train.initial_weights import InitialWeights
from ddpm_ds.train.inspection import Inspection
from ddpm_ds.train.loop import Run, train
from ddpm_ds.train.meeting import Meeting
from ddpm_ds.train.node_metrics import node_metrics
from ddpm_ds.train.objective import Denoising
from ddpm_ds.train.peers import Peers
from ddpm_ds.train.plan import RunPlan, hosts_line, on_hosts
from ddpm_ds.train.process import (
    KNOWN_TO_ALL_RANKS,
    check_arithmetic,
    cut_by_time,
    fill_checkpointing,
    process_group,
    share_threads,
)
from ddpm_ds.train.progress import ProgressLine, summary
from ddpm_ds.train.recorder import Recorder
from ddpm_ds.train.requests import Requests
from ddpm_ds.train.resume import check_resume, claim_run, find_checkpoint, gather_in, share_record
from ddpm_ds.train.run_folder import checkpoints_of
from ddpm_ds.train.run_record import Resumed, recorded
from ddpm_ds.train.saving import Saver, gather_objects
from ddpm_ds.train.watchdog import Watchdog
from ddpm_ds.train.watching import judge, observe
from ddpm_ds.unet.arithmetic import widening
from ddpm_ds.unet.model import parameter_shapes


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
    meeting = Meeting(options.start_seconds)
    with meeting.telling():
        check_alike(meeting, plan, device.type)
        line_of_gpus = check_gpus(meeting, device)
        check_arithmetic(plan.config, device)
        plan = on_hosts(planned := plan, meeting.hosts)
        objective = Denoising(plan.spec, device)
        store = prepare(plan.spec.data, progress=local_rank == 0)
        check_store(store, plan)
        check_same_images(meeting, store.meta.sha256)
        config = fill_checkpointing(plan, device)
        line = ProgressLine(plan.spec.train.images) if rank == 0 else None
        gather = gather_in(meeting)
        claim = claim_run(run_dir, rank, meeting.hosts, gather)  # before anything in it is read
        run_dir, say = claim.run_dir, line.say if line is not None else _ignore
        whole = find_checkpoint(run_dir, options.resume, claim.groups, gather, say)
        resumed = _check_resume(whole, plan, config, store, say) if whole is not None else None
        initial = _open_initial_weights(plan) if whole is None else None
        meeting.agree("ready", {})
    if rank == 0 and (line_of_hosts := hosts_line(plan)) not in (None, hosts_line(planned)):
        print(line_of_hosts, flush=True)
    if rank == 0 and line_of_gpus is not None:
        print(line_of_gpus, flush=True)
    if rank == 0 and (line_of_precision := widening(device.type, DTYPES[plan.ds.precision][1])) is not None:
        print(line_of_precision, flush=True)

    with process_group():
        meeting.close()
        places = plan.grid()
        names = [meeting.name(rank, places.coordinates(rank)[0]) for rank in range(dist.get_world_size())]
        with Peers(names, options) as peers:
            with peers.blamed(), peers.watchdog.pause():
                plan = cut_by_time(plan, device)
                engine = build_engine(
                    plan.layers,
                    plan.bounds,
                    config,
                    objective,
                    seed=plan.spec.train.seed,
                    schedule=plan.ds.schedule,
                    verbose=options.verbose,
                )
                ema = Ema(engine, plan.spec.ema)
            labels = {"note": options.note, "parent": options.parent_run}
            chosen = {**config, "kernels": engine.kernels}
            with recorded(plan, chosen, run_dir, device, line, resumed, **labels) as recorder:
                if plan.config["kernels"] == "auto" and device.type == "cuda":
                    recorder.say(engine.why_kernels)
                with peers.blamed(), peers.watchdog.pause():
                    share_record(run_dir, claim.groups, gather_objects)
                    saver = Saver(
                        plan,
                        config,
                        engine,
                        ema,
                        checkpoints_of(run_dir),
                        data_sha256=store.meta.sha256,
                        say=recorder.say,
                        groups=claim.groups,
                        store=peers.store,
                    )
                    if whole is not None:
                        saver.load(whole)
                    elif initial is not None:
                        state.begin_with(engine, ema, initial)
                    observer = observe(plan, config, engine, recorder, run_dir, options)
                _train(plan, store, engine, ema, saver, observer, recorder, run_dir, peers)
        dist.barrier()
    del claim


def _train(
    plan: RunPlan,
    store: Store,
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
        recorder.say(f"the run has seen its {first:,} images before; raise train.images to go on")
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
        with peers.blamed(), node_metrics(peers.store, recorder.tracker):
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


def _check_resume(
    whole: Whole, plan: RunPlan, config: dict[str, Any], store: Store, say: Callable[[str], None]
) -> Resumed:
    """The checkpoint to go on from, checked against this run."""
    changed = check_resume(whole, plan.spec, config, store.meta.sha256)
    say(f"going on from {whole.path}")
    for change in changed:
        say(f"  changed since: {change}")
    return Resumed(whole.path, tuple(changed))


def _ignore(line: str) -> None:
    """Only rank 0 says what is known to all."""


def _open_initial_weights(plan: RunPlan) -> InitialWeights | None:
    path = plan.spec.train.initial_weights
    return None if path is None else InitialWeights(path, parameter_shapes(plan.layers))


def _batches(plan: RunPlan, store: Store, among: Indices, engine: UnetPipelineEngine) -> Iterator[Any] | None:
    """This replica's micro-batches from the engine's progress on, on the stages that read data."""
    if not engine.reads_data:
        return None
    layout = plan.ds.layout
    batches = micro_batches(
        store,
        among=among,
        seed=plan.spec.train.seed,
        batch_images=layout.batch_images,
        micro_batch_images=layout.micro_batch_images,
        replicas=layout.replicas,
        replica=engine.grid.get_data_parallel_id(),
        start_images=engine.next_index,
        workers=plan.spec.data.workers,
        pin_memory=engine.device.type == "cuda",
    )
    return on_device(batches, engine.device)


def check_store(store: Store, plan: RunPlan) -> None:
    """Refuse images that the spec's U-Net does not fit.

    Raises:
        SpecError: the numbers of classes differ, or too many images are held out.
    """
    split(len(store), plan.spec.data.held_out_images)
    classes, asked = len(store.meta.classes), plan.spec.unet.classes
    if asked is not None and asked != classes:
        raise SpecError(f"unet.classes = {asked}, but the images have {classes} classes; --set unet.classes={classes}")
