"""The operations that layers are made of: convolution, linear, normalisation, keyed dropout.

Weights follow the dtype of the input, so the layer that holds them decides in which dtype it computes. They
are not drawn on construction: :func:`draw_weights` does that, from a generator of its own.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpm_ds.keyed import Stream, keep_mask


class Convolution(nn.Conv2d):
    """A convolution with bias; at stride 1 it keeps the size of the image."""

    def __init__(
        self,
        channels: int,
        out_channels: int,
        kernel: int = 3,
        *,
        stride: int = 1,
        padding: int | None = None,
        starts_at_zero: bool = False,
    ) -> None:
        super().__init__(channels, out_channels, kernel, stride, kernel // 2 if padding is None else padding)
        self.starts_at_zero = starts_at_zero

    def reset_parameters(self) -> None:
        """Leave the weights undrawn; the inherited method would draw from torch's global generator."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.bias is not None
        return F.conv2d(x, self.weight.to(x.dtype), self.bias.to(x.dtype), self.stride, self.padding)

    def draw(self, generator: torch.Generator) -> None:
        _variance_scaling(self, 1, self.starts_at_zero, generator)


class Linear(nn.Linear):
    """A linear layer with bias. `parts` projections of one input may be fused in it; each is drawn as its own."""

    def __init__(self, channels: int, out_channels: int, *, parts: int = 1, starts_at_zero: bool = False) -> None:
        super().__init__(channels, out_channels)
        self.parts = parts
        self.starts_at_zero = starts_at_zero

    def reset_parameters(self) -> None:
        """Leave the weights undrawn; the inherited method would draw from torch's global generator."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))

    def draw(self, generator: torch.Generator) -> None:
        _variance_scaling(self, self.parts, self.starts_at_zero, generator)


class LabelEmbedding(nn.Embedding):
    """A row per class, and a last row for "no label"."""

    def __init__(self, classes: int, channels: int) -> None:
        super().__init__(classes + 1, channels)

    def reset_parameters(self) -> None:
        """Leave the weights undrawn; the inherited method would draw from torch's global generator."""

    def forward(self, labels: Tensor) -> Tensor:
        return F.embedding(labels, self.weight)

    def draw(self, generator: torch.Generator) -> None:
        """Standard normal, as in ADM (Dhariwal and Nichol 2021)."""
        nn.init.normal_(self.weight, generator=generator)


class GroupNorm(nn.GroupNorm):
    """Group normalisation with scale and shift per channel."""

    def __init__(self, groups: int, channels: int, epsilon: float) -> None:
        super().__init__(groups, channels, epsilon)

    def forward(self, x: Tensor) -> Tensor:
        return F.group_norm(x, self.num_groups, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)


def norm_silu(norm: GroupNorm, x: Tensor, scale: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
    """SiLU of normalised x, first modulated as ``x * (1 + scale) + shift`` where these (N, C, 1, 1) are given."""
    x = norm(x)
    if scale is not None and shift is not None:
        x = x * (1 + scale) + shift
    return F.silu(x)


class KeyedDropout(nn.Module):
    """Dropout whose mask is a function of seed, layer and image, whatever batch the image is in.

    `images` (N,) int64, the images' positions in the training sequence, is set by :func:`set_image_index`
    before each forward, a checkpoint's recomputation included.
    """

    def __init__(self, rate: float, seed: int, layer: int) -> None:
        super().__init__()
        self.rate = rate
        self.seed = seed
        self.stream = Stream.DROPOUT + layer
        self.images: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.rate == 0.0 or not self.training:
            return x
        if self.images is None:
            raise RuntimeError("dropout needs the images' positions: call set_image_index before the forward")
        keep = keep_mask(self.seed, self.stream, self.images, x[0].numel(), self.rate)
        return x * keep.view_as(x) * (1 / (1 - self.rate))


def set_image_index(modules: Iterable[nn.Module], images: Tensor) -> None:
    """Tell every dropout in `modules` which images come next: `images` (N,) int64."""
    for root in modules:
        for module in root.modules():
            if isinstance(module, KeyedDropout):
                module.images = images


def draw_weights(module: nn.Module, generator: torch.Generator) -> None:
    """Draw the weights of `module` as DDPM does, in the order of its submodules.

    Variance scaling (fan_avg, uniform, scale 1), biases and what closes a residual branch at zero.
    """
    for part in module.modules():
        if isinstance(part, Convolution | Linear | LabelEmbedding):
            part.draw(generator)


@torch.no_grad()
def _variance_scaling(layer: Convolution | Linear, parts: int, zero: bool, generator: torch.Generator) -> None:
    assert layer.bias is not None
    layer.bias.zero_()
    for weight in layer.weight.chunk(parts):
        nn.init.xavier_uniform_(weight, gain=0.0 if zero else 1.0, generator=generator)
