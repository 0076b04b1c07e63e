"""The carry at a boundary between stages: each tensor is sent once.

An encoder layer that pushes makes its output both h and the newest skip. Sent as two, it would cross the
wire twice and its gradient come back in two halves; so the skip is left out and made again from h.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ddpm_ds.unet.layers import Layer

Carry = tuple[Tensor, ...]
"""``(h, emb, *skips)``: h (N, C, H, W), emb (N, E), skips newest last."""


def newest_skip_is_h(layers: Sequence[Layer], cut: int) -> bool:
    """Whether, before layer `cut`, the newest skip and h are one tensor."""
    return layers[cut - 1].pushes


def pack(carry: Carry, newest_skip_is_h: bool) -> Carry:
    """The tensors to send of a carry, in the order of :func:`ddpm_ds.unet.layers.boundary_shapes`."""
    return carry[:-1] if newest_skip_is_h else carry


def unpack(tensors: Carry, newest_skip_is_h: bool) -> Carry:
    """The carry again, from the tensors that were received."""
    return (*tensors, tensors[0]) if newest_skip_is_h else tensors
