"""Encoded text as the U-Net reads it: captions of a micro-batch, from 8 bits and some of them dropped, and prompts.

Each rank does this by itself, by the image's index alone, so that text is never sent between stages.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ddpm_ds import keyed
from ddpm_ds.config.text import CrossAttentionSpec, TextSpec
from ddpm_ds.data.text import Encoded, widened
from ddpm_ds.diffusion.condition import Condition
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


def no_text(spec: TextSpec, empty: Encoded) -> Encoded:
    """Return what is read instead of a dropped caption, and instead of a negative prompt that is not given."""
    if spec.drop_to == "empty":
        return empty
    return Encoded(torch.zeros_like(empty.tokens), None if empty.pooled is None else torch.zeros_like(empty.pooled))


def described(pooled: Tensor | None, sizes: Tensor | None) -> Tensor | None:
    """Return pooled text (N, channels) and sizes (N, 6) as one vector, float32; None without them."""
    return None if pooled is None or sizes is None else torch.cat((pooled.float(), sizes.float()), dim=1)


class Prompts:
    """Encoded prompts of images that are drawn, which take them in turn, and what guidance leads away from.

    Args:
        unet: how the U-Net reads them.
        encoded: the prompts.
        against: the encoded negative prompt, or what :func:`no_text` returns, N = 1.
        size: height and width of the images in pixels; they are drawn as images of this size that were not cropped.
        texts: the prompts in words.
    """

    def __init__(
        self,
        unet: CrossAttentionSpec,
        encoded: Encoded,
        against: Encoded,
        *,
        size: tuple[int, int],
        device: torch.device,
        texts: Sequence[str] = (),
    ) -> None:
        self._encoded, self._against, self.texts = encoded.on(device), against.on(device), tuple(texts)
        self._sizes = None
        if unet.pooled_channels is not None:
            self._sizes = torch.tensor([*size, 0.0, 0.0, *size], device=device)

    def __len__(self) -> int:
        return len(self._encoded.tokens)

    def beside(self, condition: Condition | None, index: Tensor) -> tuple[Condition, Condition]:
        """Return what the U-Net takes for the images ``index`` (N,), and what it takes where guidance leads away from:
        the prompt or what is read against it, beside the other ``condition``.
        """
        mine = index % len(self)
        return self._beside(condition, self._encoded, mine), self._beside(condition, self._against, mine * 0)

    def _beside(self, condition: Condition | None, text: Encoded, rows: Tensor) -> Condition:
        condition = condition or Condition(torch.empty(0, 0), ())
        pooled = None if text.pooled is None else text.pooled[rows]
        vector = described(pooled, None if self._sizes is None else self._sizes.expand(len(rows), -1))
        told = condition.told if vector is None else (*condition.told, vector)
        return Condition(condition.channels, told, text.tokens[rows])
