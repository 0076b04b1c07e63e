"""One training run from the plan to the summary: device, data, engine, tracker, loop, and how each of them ends."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ddpm_ds.checkpoint.reader import Reader
from ddpm_ds.data.loader import micro_batches
from ddpm_ds.data.order import Indices
from ddpm_ds.data.prepare import prepare
from ddpm_ds.data.split import split
from ddpm_ds.data.store import Store
from ddpm_ds.errors import PeerLostError, SpecError
from ddpm_ds.observe.observer import Observer
from ddpm_ds.pipeline.build import build_engine
from ddpm_ds.pipeline.engine import UnetPipelineEngine
from ddpm_ds.pipeline.host_accelerator import use_host_accelerator
from ddpm_ds.train import state
from ddpm_ds.train.ema import Ema
from ddpm_ds.train.held_out import HeldOutLoss
from ddpm_ds.train.initial_weights import InitialWeights
from ddpm_ds.train.inspection import Inspection
from ddpm_ds.train.loop import Run, train
from ddpm_ds.train.node_metrics import node_metrics
from ddpm_ds.train.objective import Denoising
from ddpm_ds.train.plan import RunPlan
from ddpm_ds.train.process import (
    KNOWN_TO_ALL_RANKS,
    cut_by_time,
    fill_checkpointing,
    from_rank_0,
    process_group,
    share_threads,
)
from ddpm_ds.train.progress import ProgressLine, summary
from ddpm_ds.train.recorder import Recorder
from ddpm_ds.train.requests import Requests
from ddpm_ds.train.resume import check_resume, find_checkpoint
from ddpm_ds.train.run_folder import checkpoints_of, claim_folder
from ddpm_ds.train.run_record import Resumed, recorded
from ddpm_ds.train.saving import Saver
from ddpm_ds.train.watchdog import Watchdog, make_store
from ddpm_ds.train.watching import judge, observe
from ddpm_ds.unet.model import parameter_shapes

WAIT_FOR_CULPRIT_SECONDS = 5.0
"""How long a rank whose collective failed looks for the rank that is gone."""


def run_training(plan: RunPlan, run_dir: Path, device: torch.device, options: argparse.Namespace) -> None:
    """Train as planned on this process's ``device``; every rank calls this. Rank 0's ``run_dir`` counts.

    Raises:
        UserError: something given is wrong; raised before any process group exists.
        BadNumbersError: the loss or the loss scale makes going on pointless.
        Preempted: the run was asked to stop, and is saved.
        PeerLostError: another rank is gone.
    """
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    use_host_accelerator()
    share_threads(device)
    objective = Denoising(plan.spec, device)
    store = prepare(plan.spec.data, progress=local_rank == 0)
    check_store(store, plan)
    config = fill_checkpointing(plan, device)
    line = ProgressLine(plan.spec.train.images) if rank == 0 else None
    claim = claim_folder(run_dir) if rank == 0 else None  # before anything in it is read or cleaned up
    resumed = _find_resume(plan, config, store, run_dir, options.resume, line) if line is not None else None
    initial = _open_initial_weights(plan) if rank == 0 and resumed is None else None
    if rank == 0 and device.type == "cpu" and plan.ds.precision == "fp16":
        print("fp16 on a CPU: stored in fp16, computed in fp32", flush=True)

    with process_group():
        run_dir, resumed = from_rank_0((run_dir, resumed))
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
        with recorded(plan, config, run_dir, device, line, resumed, **labels) as recorder:
            saver = Saver(
                plan,
                config,
                engine,
                ema,
                checkpoints_of(run_dir),
                data_sha256=store.meta.sha256,
                say=recorder.say,
            )
            if resumed is not None:
                saver.load(resumed.checkpoint)
            elif (weights := initial or _open_initial_weights(plan)) is not None:
                state.begin_with(engine, ema, weights)
            observer = observe(plan, config, engine, recorder, run_dir, options)
            _train(plan, store, engine, ema, saver, observer, recorder, run_dir, options)
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
    options: argparse.Namespace,
) -> None:
    """The loop, what watches it, and the summary."""
    started, first = time.monotonic(), engine.images_seen
    if first >= plan.spec.train.images:
        recorder.say(f"the run has seen its {first:,} images before; raise train.images to go on")
        recorder.finish("FINISHED")
        return
    requests = Requests(run_dir, plan.spec.checkpoint.every_minutes)
    beside = make_store(dist.get_rank(), dist.get_world_size())
    watchdog = _watch(engine, beside, options)
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
        with node_metrics(beside, recorder.tracker):
            last = train(run)
        seconds = time.monotonic() - started
    except KNOWN_TO_ALL_RANKS:
        _end_well(saver, watchdog, requests)
        raise
    except BaseException as error:
        missing = watchdog.who_is_missing(WAIT_FOR_CULPRIT_SECONDS) if isinstance(error, RuntimeError) else []
        watchdog.stop(failure=type(error).__name__)
        if not missing:
            raise
        names = ", ".join(_rank_name(engine, rank) for rank in missing)
        raise PeerLostError(f"{names} is gone ({str(error).splitlines()[0]}); the run can be resumed") from error
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


def _watch(engine: UnetPipelineEngine, store: dist.Store | None, options: argparse.Namespace) -> Watchdog:
    names = [_rank_name(engine, rank) for rank in range(dist.get_world_size())]
    return Watchdog(
        dist.get_rank(),
        dist.get_world_size(),
        names,
        store,
        dead_seconds=options.dead_seconds,
        hang_seconds=options.hang_seconds,
    )


def _rank_name(engine: UnetPipelineEngine, rank: int) -> str:
    """As a user knows it: ``rank 2 (stage 1)``."""
    return f"rank {rank} (stage {engine.grid._topo.get_coord(rank).pipe})"


def _find_resume(
    plan: RunPlan, config: dict[str, Any], store: Store, run_dir: Path, resume: str, line: ProgressLine
) -> Resumed | None:
    """On rank 0, before any process group: the checkpoint to go on from, checked against this run."""
    checkpoint = find_checkpoint(run_dir, resume, line.say)
    if checkpoint is None:
        return None
    changed = check_resume(Reader(checkpoint), plan.spec, config, store.meta.sha256)
    line.say(f"going on from {checkpoint}")
    for change in changed:
        line.say(f"  changed since: {change}")
    return Resumed(checkpoint, tuple(changed))


def _open_initial_weights(plan: RunPlan) -> InitialWeights | None:
    path = plan.spec.train.initial_weights
    return None if path is None else InitialWeights(path, parameter_shapes(plan.layers))


def _batches(plan: RunPlan, store: Store, among: Indices, engine: UnetPipelineEngine) -> Iterator[Any] | None:
    """This replica's micro-batches from the engine's progress on, on the stages that read data."""
    if not engine.reads_data:
        return None
    layout = plan.ds.layout
    return micro_batches(
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


def check_store(store: Store, plan: RunPlan) -> None:
    """Refuse images that the spec's U-Net does not fit.

    Raises:
        SpecError: the numbers of classes differ, or too many images are held out.
    """
    split(len(store), plan.spec.data.held_out_images)
    classes, asked = len(store.meta.classes), plan.spec.unet.classes
    if asked is not None and asked != classes:
        raise SpecError(f"unet.classes = {asked}, but the images have {classes} classes; --set unet.classes={classes}")
