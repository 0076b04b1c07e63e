"""What a rank holds of a micro-batch between the instructions that work on it.

The fold has two stages on each rank, so every skip is made and used on one rank::

    rank 0        stage 0 ── (h, emb) ─▶ rank 1 ─▶ ... rank P - 1        phase 0, down the U-Net
                    │ emb, skips                          │ turn
                    ▼                                     ▼
    rank 0        stage 2P - 1 ◀── h ── rank 1 ◀─ ... rank P - 1        phase 1, up it; loss on rank 0

Phase 0 keeps the embedding and skips of a micro-batch and gives them to phase 1 as detached leaves. Their gradients are
ready when phase 1's backward is done, which on every rank comes before phase 0's, and join it: phase 0 has one walk of
its graph with h, emb and the skips as roots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ddpm_ds.unet.blocks import Carry


@dataclass
class Passage:
    """Pass of a micro-batch through one stage; fields are empty before their first use and after their last."""

    leaves: Carry = ()
    """Received tensors, which gather the gradients to send back."""
    unsent: Carry = ()
    """Output that is not sent yet."""
    roots: tuple[GradientEdge | None, ...] = ()
    """Places in the graph of what is sent, or of the loss."""


@dataclass
class Flight:
    """Micro-batch on its way through this rank."""

    images: Tensor
    """Image index (N,)."""
    passages: tuple[Passage, ...]
    """By phase."""
    prepared: Any = None
    """Loaded micro-batch, until this rank's last forward."""
    kept: Carry = ()
    """What phase 0 leaves to phase 1 on this rank (emb and skips in a fold), as leaves of phase 1's graph."""
    kept_roots: tuple[GradientEdge | None, ...] = ()
    """Places of ``kept`` in phase 0's graph."""


def edge(tensor: Tensor) -> GradientEdge | None:
    """Return the place of a tensor in its graph, which is enough for a backward; None where there is no graph."""
    return get_gradient_edge(tensor) if tensor.requires_grad else None


def as_leaves(tensors: Carry) -> Carry:
    """Return tensors cut off from their graphs, which gather gradients."""
    return tuple(tensor.detach().requires_grad_() for tensor in tensors)
