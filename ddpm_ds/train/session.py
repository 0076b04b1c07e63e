"""One training run from the plan to the summary: device, data, engine, tracker, loop, and how each of them ends."""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import deepspeed
import psutil
import torch
import torch.distributed as dist

from ddpm_ds.checkpoint.reader import Reader
from ddpm_ds.data.loader import micro_batches
from ddpm_ds.data.order import Indices
from ddpm_ds.data.prepare import prepare
from ddpm_ds.data.split import split
from ddpm_ds.data.store import Store
from ddpm_ds.errors import BadNumbersError, LayoutError, PeerLostError, Preempted, SpecError, UserError
from ddpm_ds.observe import verdict
from ddpm_ds.observe.conclude import VERDICT, conclude
from ddpm_ds.observe.flops import FlopsProfile
from ddpm_ds.observe.kernels import KernelProfile
from ddpm_ds.observe.layer_times import cache_file, measured_times
from ddpm_ds.observe.observer import Observer, Observers
from ddpm_ds.observe.pauses import PauseClock
from ddpm_ds.observe.timeline import Timeline
from ddpm_ds.pipeline.build import build_engine
from ddpm_ds.pipeline.engine import UnetPipelineEngine
from ddpm_ds.pipeline.host_accelerator import use_host_accelerator
from ddpm_ds.pipeline.memory import checkpoint_interval
from ddpm_ds.pipeline.partition import describe
from ddpm_ds.planner.auto import measured_cuts
from ddpm_ds.train import state
from ddpm_ds.train.ema import Ema
from ddpm_ds.train.held_out import HeldOutLoss
from ddpm_ds.train.initial_weights import InitialWeights
from ddpm_ds.train.inspection import Inspection
from ddpm_ds.train.loop import Run, train
from ddpm_ds.train.node_metrics import node_metrics
from ddpm_ds.train.objective import Denoising
from ddpm_ds.train.plan import RunPlan, stage_table
from ddpm_ds.train.progress import ProgressLine, summary
from ddpm_ds.train.recorder import Recorder
from ddpm_ds.train.requests import Requests
from ddpm_ds.train.resume import check_resume, checkpoints_of, claim_folder, find_checkpoint
from ddpm_ds.train.run_record import Resumed, recorded
from ddpm_ds.train.saving import Saver
from ddpm_ds.train.watchdog import Watchdog, make_store
from ddpm_ds.unet.model import parameter_shapes

KNOWN_TO_ALL_RANKS = (UserError, BadNumbersError, Preempted)
"""Raised on every rank at the same step, so that all can still act together."""
WAIT_FOR_CULPRIT_SECONDS = 5.0
"""How long a rank whose collective failed looks for the rank that is gone."""

Value = TypeVar("Value")


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
        run_dir, resumed = _from_rank_0((run_dir, resumed))
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
            observer = _observe(plan, config, engine, recorder, run_dir, options)
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
    found = _judge(run_dir, recorder) if dist.get_rank() == 0 else None
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


def _observe(
    plan: RunPlan,
    config: dict[str, Any],
    engine: UnetPipelineEngine,
    recorder: Recorder,
    run_dir: Path,
    options: argparse.Namespace,
) -> Observer:
    """What watches the steps that the JSON and the command line name."""
    flops, precision, macs = config.get("flops_profiler", {}), plan.ds.precision, plan.macs
    return Observers(
        [
            FlopsProfile(engine, plan.layers, flops, run_dir / "flops", recorder, steps=plan.steps),
            Timeline(
                engine, options.trace_steps, run_dir / "trace", recorder, precision=precision, macs_per_image=macs
            ),
            KernelProfile(engine, options.profile_kernels, run_dir / "kernels", recorder),
            PauseClock(run_dir if dist.get_rank() == 0 else None),
        ]
    )


def _judge(run_dir: Path, recorder: Recorder) -> str | None:
    """Where the run's time went, and what to try next: kept with the run, and returned as text."""
    found = conclude(run_dir, recorder.say)
    if found is None:
        return None
    recorder.artifact(run_dir / VERDICT)
    recorder.tags(verdict.tags(found))
    return verdict.text(found)


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


def cut_by_time(plan: RunPlan, device: torch.device) -> RunPlan:
    """The plan with cuts by the layers' seconds on rank 0's device, where the JSON asks for that."""
    if plan.ds.partition != "measured" or plan.ds.layout.stages == 1:
        return plan
    bounds: tuple[int, ...] = ()
    if dist.get_rank() == 0:
        bounds = measured_cuts(
            plan.spec,
            plan.ds,
            plan.ds_path,
            lambda job: measured_times(job.layers, device, job.precision, cache_file()),
        )
    bounds = _from_rank_0(bounds)
    plan = replace(plan, bounds=bounds, stages=describe(plan.layers, bounds, plan.ds.schedule))
    if dist.get_rank() == 0:
        print(f"\ncut by the layers' times on this device\n{stage_table(plan)}", flush=True)
    return plan


def _open_initial_weights(plan: RunPlan) -> InitialWeights | None:
    path = plan.spec.train.initial_weights
    return None if path is None else InitialWeights(path, parameter_shapes(plan.layers))


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """DeepSpeed's process group; destroyed at the end, since gloo aborts a process that leaves with one.

    Raises:
        LayoutError: another job on this host has the port.
    """
    if os.environ["WORLD_SIZE"] == "1":
        os.environ["MASTER_PORT"] = "0"  # any free one: two runs on one host don't meet
    try:
        deepspeed.init_distributed(verbose=False)
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise LayoutError(
            f"port {os.environ['MASTER_PORT']} is taken, by another run perhaps; give this one its own: "
            "deepspeed --master_port PORT launch/train.py ..."
        ) from None
    try:
        yield
    except KNOWN_TO_ALL_RANKS:  # leave together
        dist.barrier()
        dist.destroy_process_group()
        raise
    dist.destroy_process_group()


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


def fill_checkpointing(plan: RunPlan, device: torch.device) -> dict[str, Any]:
    """The DeepSpeed configuration, with activation checkpointing decided by this device's memory where it is auto."""
    config, layout = dict(plan.ds.config), plan.ds.layout
    if plan.ds.checkpoint_interval == "auto":
        if device.type == "cuda":
            memory = torch.cuda.get_device_properties(device).total_memory
        else:
            memory = psutil.virtual_memory().total // int(os.environ["LOCAL_WORLD_SIZE"])
        wide = device.type == "cpu" or plan.ds.precision == "fp32"  # a CPU computes fp16 layers in fp32
        interval = checkpoint_interval(
            plan.stages,
            plan.ds.schedule,
            micro_batch_images=layout.micro_batch_images,
            micro_batches=layout.micro_batches,
            element_bytes=4 if wide else 2,
            device_bytes=memory,
        )
        config["pipeline"] = {**config["pipeline"], "activation_checkpoint_interval": interval}
    return config


def share_threads(device: torch.device) -> None:
    """Give each process on this host its share of the cores, unless the environment has said how many."""
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // int(os.environ["LOCAL_WORLD_SIZE"])))


def check_store(store: Store, plan: RunPlan) -> None:
    """Refuse images that the spec's U-Net does not fit.

    Raises:
        SpecError: the numbers of classes differ, or too many images are held out.
    """
    split(len(store), plan.spec.data.held_out_images)
    classes, asked = len(store.meta.classes), plan.spec.unet.classes
    if asked is not None and asked != classes:
        raise SpecError(f"unet.classes = {asked}, but the images have {classes} classes; --set unet.classes={classes}")


def _from_rank_0(value: Value) -> Value:
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]
