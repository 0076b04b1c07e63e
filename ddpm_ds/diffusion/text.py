"""Encoded captions of a micro-batch as the U-Net reads them: from 8 bits, and some of them dropped.

Each rank does this by itself, by the image's index alone, so that text is never sent between stages.
"""

import torch
from torch import Tensor

from ddpm_ds import keyed
from ddpm_ds.config.text import TextSpec
from ddpm_ds.data.text import Encoded
from ddpm_ds.keyed import Stream


class Text:
    """Text of training images.

    Args:
        empty: the encoded empty text, N = 1, on the device; dropped captions become it, or zeros, as the spec says.
        seed: that of the run.
    """

    def __init__(self, spec: TextSpec, empty: Encoded, seed: int) -> None:
        self._spec, self._seed = spec, seed
        self.dropped = no_text(spec, empty)
        """What is read instead of a caption that was dropped, N = 1."""

    def context(self, tokens: Tensor, scale: Tensor | None, index: Tensor) -> Tensor:
        """Return the context (N, tokens, channels) of stored ``tokens``, float16 or int8 with a ``scale`` (N, tokens),
        of the images ``index`` (N,).
        """
        return self._kept(widened(tokens, scale), self.dropped.tokens, index)

    def pooled(self, stored: Tensor, index: Tensor) -> Tensor:
        """Return the pooled text (N, channels) of the same images, dropped where their context is."""
        assert self.dropped.pooled is not None
        return self._kept(stored, self.dropped.pooled, index)

    def _kept(self, stored: Tensor, dropped: Tensor, index: Tensor) -> Tensor:
        if not self._spec.drop:
            return stored
        drops = keyed.uniform(self._seed, Stream.TEXT_DROP, index, 1) < self._spec.drop  # (N, 1)
        return torch.where(drops.view(-1, *[1] * (stored.ndim - 1)), dropped.to(stored.dtype), stored)


def widened(tokens: Tensor, scale: Tensor | None) -> Tensor:
    """Return stored tokens (N, tokens, channels): int8 ones times their ``scale`` (N, tokens), others as they are."""
    return tokens if scale is None else tokens * scale[:, :, None]


def no_text(spec: TextSpec, empty: Encoded) -> Encoded:
    """Return what is read instead of a dropped caption, and instead of a negative prompt that is not given."""
    if spec.drop_to == "empty":
        return empty
    return Encoded(torch.zeros_like(empty.tokens), None if empty.pooled is None else torch.zeros_like(empty.pooled))
