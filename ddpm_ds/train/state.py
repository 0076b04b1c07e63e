"""What a checkpoint holds of an engine, and how it is put back into an engine of any layout.

Each rank gives the pieces that its optimizer owns, addressed by parameter name and offset, so a checkpoint knows
nothing of stages, replicas, ZeRO stage or precision: a rank of another layout reads the pieces that it owns there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ddpm_ds.checkpoint.delivery import Wanted, deliver
from ddpm_ds.checkpoint.fragments import Fragment
from ddpm_ds.checkpoint.groups import Gather
from ddpm_ds.checkpoint.union import Whole
from ddpm_ds.pipeline import deepspeed_insides as insides
from ddpm_ds.pipeline.engine import UnetPipelineEngine
from ddpm_ds.train.ema import Ema
from ddpm_ds.train.initial_weights import InitialWeights

MASTER, EMA = "master", "ema"
MOMENTS = ("exp_avg", "exp_avg_sq")


def fragments(engine: UnetPipelineEngine, ema: Ema) -> list[Fragment]:
    """This rank's share of a checkpoint; without ZeRO the first replica's is everything."""
    if engine.grid.get_data_parallel_id() != 0 and not insides.is_partitioned(engine):
        return []
    states = engine.basic_optimizer.state
    found = []
    for piece in insides.owned_pieces(engine):
        tensors = {MASTER: piece.master, EMA: ema.shadow_of(piece.master)}
        tensors |= {moment: states[piece.master][moment] for moment in MOMENTS if piece.master in states}
        found += [Fragment(kind, piece.name, piece.first, piece.of(tensor)) for kind, tensor in tensors.items()]
    return found


def scalars(engine: UnetPipelineEngine) -> dict[str, Any]:
    """The numbers of a checkpoint: progress, counters, loss scaler, learning rate. The same on all ranks."""
    insides.count_skips(engine)
    optimizer = engine.basic_optimizer
    steps = {int(state["step"]) for state in optimizer.state.values()}
    return {
        "images_seen": engine.images_seen,
        "skipped_images": engine.skipped_images,
        "steps": engine.global_steps,
        "skipped_steps": engine.skipped_steps,
        "optimizer_steps": max(steps, default=0),
        "learning_rate": optimizer.param_groups[0]["lr"],
        "lr_scheduler": engine.lr_scheduler.state_dict() if engine.lr_scheduler is not None else None,
        "loss_scaler": insides.scaler_state(engine),
    }


@torch.no_grad()
def load(engine: UnetPipelineEngine, ema: Ema, whole: Whole, gather: Gather, say: Callable[[str], None]) -> None:
    """Put a checkpoint into the engine, whatever layout and hosts wrote it; collective.

    What other hosts send is announced to ``say`` on rank 0.
    """
    state = whole.state
    moments = [moment for moment in MOMENTS if moment in whole.manifest.kinds]
    wanted: list[Wanted] = []
    targets: list[Tensor] = []
    for piece in insides.owned_pieces(engine):
        tensors: dict[str, Tensor] = {MASTER: piece.master, EMA: ema.shadow_of(piece.master)}
        if moments:
            tensors |= _moments(engine, piece.master, state["optimizer_steps"])
        wanted += [Wanted(kind, piece.name, piece.first, piece.first + piece.length) for kind in tensors]
        targets += [piece.of(tensor) for tensor in tensors.values()]
    for index, start, values in deliver(whole, wanted, gather=gather, device=engine.device, say=say):
        at = start - wanted[index].start
        targets[index][at : at + len(values)].copy_(values)
    if not moments:
        engine.basic_optimizer.state.clear()
    insides.refresh_weights(engine)

    engine.images_seen = state["images_seen"]
    engine.skipped_images = state["skipped_images"]
    engine.global_samples = state["images_seen"]
    engine.global_steps = state["steps"]
    engine.skipped_steps = state["skipped_steps"]
    for group in engine.basic_optimizer.param_groups:
        group["lr"] = state["learning_rate"]
    if engine.lr_scheduler is not None and state["lr_scheduler"] is not None:
        engine.lr_scheduler.load_state_dict(state["lr_scheduler"])
    insides.load_scaler_state(engine, state["loss_scaler"])
    engine.consecutive_overflows_at_floor = 0


@torch.no_grad()
def begin_with(engine: UnetPipelineEngine, ema: Ema, weights: InitialWeights) -> None:
    """Put given weights into a fresh engine, and into their average; a collective over the replicas under ZeRO."""
    for piece in insides.owned_pieces(engine):
        for tensor in (piece.master, ema.shadow_of(piece.master)):
            piece.of(tensor).copy_(weights.read(piece.name, piece.first, piece.length))
    insides.refresh_weights(engine)


def _moments(engine: UnetPipelineEngine, master: Tensor, steps: int) -> dict[str, Tensor]:
    """Adam's state of one of its tensors, made where the optimizer has not stepped yet."""
    state = engine.basic_optimizer.state[master]
    for moment in MOMENTS:
        if moment not in state:
            state[moment] = torch.zeros_like(master)
    (fused,) = {bool(group.get("fused")) for group in engine.basic_optimizer.param_groups}
    state["step"] = torch.tensor(float(steps), device=master.device if fused else "cpu")
    return {moment: state[moment] for moment in MOMENTS}
