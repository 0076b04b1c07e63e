"""State of a micro-batch on a rank between instructions.

The fold has two stages on each rank, so every skip is made and used on one rank::

    rank 0        stage 0 ── (h, emb) ─▶ rank 1 ─▶ ... rank P - 1        phase 0, down the U-Net
                    │ emb, skips                          │ turn
                    ▼                                     ▼
    rank 0        stage 2P - 1 ◀── h ── rank 1 ◀─ ... rank P - 1        phase 1, up it; loss on rank 0

Phase 0 keeps the embedding and skips of a micro-batch and passes them to phase 1 as detached leaves. Their gradients
are ready after phase 1's backward, which on every rank precedes phase 0's: phase 0 then walks its graph once, with h,
emb and the skips as roots.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ddpm_ds.unet.blocks import Carry


@dataclass
class Passage:
    """Pass of a micro-batch through one stage; fields are empty before their first use and after their last."""

    leaves: Carry = ()
    """Received tensors, which accumulate the gradients to send back."""
    unsent: Carry = ()
    """Output that is not sent yet."""
    roots: tuple[GradientEdge | None, ...] = ()
    """Graph edges of the sent tensors, or of the loss."""


@dataclass
class Flight:
    """Micro-batch on its way through this rank."""

    images: Tensor
    """Image index (N,)."""
    passages: tuple[Passage, ...]
    """Passages by phase."""
    prepared: Any = None
    """Loaded micro-batch, until this rank's last forward."""
    context: Tensor | None = None
    """Encoded text (N, tokens, channels) in the arithmetic's dtype, until this rank's last backward; None has none."""
    kept: Carry = ()
    """Tensors that phase 0 passes to phase 1 on this rank (emb and skips in a fold), as leaves of phase 1's graph."""
    kept_roots: tuple[GradientEdge | None, ...] = ()
    """Graph edges of ``kept`` in phase 0's graph."""


def edge(tensor: Tensor) -> GradientEdge | None:
    """Return the graph edge of a tensor, which is enough for a backward; None without a graph."""
    return get_gradient_edge(tensor) if tensor.requires_grad else None


def as_leaves(tensors: Carry) -> Carry:
    """Return tensors detached from their graphs, as leaves that accumulate gradients."""
    return tuple(tensor.detach().requires_grad_() for tensor in tensors)
