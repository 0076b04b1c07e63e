"""Images being drawn, as a state that any denoiser can drive: the U-Net in one process, or a pipeline of stages."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ddpm_ds import keyed
from ddpm_ds.diffusion.samplers import Sampler
from ddpm_ds.keyed import Stream


class Drawing:
    """Some images being drawn: :meth:`inputs` to the U-Net, its prediction to :meth:`take`, `calls` times.

    All noise is a function of (seed, image index), so an image doesn't depend on the batch it is drawn in. Everything
    stays on the device of `index`, and nothing waits for it. Images are drawn without gradients: ask the U-Net under
    ``torch.no_grad``.

    Under guidance w the U-Net is asked with and without the label, and its prediction is taken to be
    without + w (with - without), for any objective. With w = 1 only the labels are asked for, with w = 0 only "no
    label". Source: Ho and Salimans 2022, eq. 6, whose w is ours - 1.

    Args:
        sampler: how.
        seed: in [0, 2^32).
        index: which images, (N,) int64.
        shape: (C, H, W) of an image.
        labels: (N,) int64 on the device of `index`; None without classes, or to let the U-Net take "no label".
        guidance: w; without labels it has no effect.
        no_label: the label that means none, where there are labels and guidance is not 1.
    """

    def __init__(
        self,
        sampler: Sampler,
        *,
        seed: int,
        index: Tensor,
        shape: tuple[int, int, int],
        labels: Tensor | None,
        guidance: float,
        no_label: int | None,
    ) -> None:
        self.calls = len(sampler.timesteps)
        """Evaluations of the U-Net in all."""
        self._sampler, self._seed, self._index, self._shape = sampler, seed, index, shape
        self._guidance = guidance
        self._guided = labels is not None and guidance not in (0.0, 1.0)
        if labels is not None and guidance != 1.0:
            assert no_label is not None, f"guidance {guidance:g} needs the label that means none"
            none = torch.full_like(labels, no_label)
            labels = torch.cat([labels, none]) if self._guided else none
        self._labels = labels  # (M,)
        self._x = self._noise(Stream.SAMPLE)  # (N, C, H, W)
        self._x0: Tensor | None = None
        self._taken = 0

    def inputs(self) -> tuple[Tensor, ...]:
        """What the U-Net is asked next: x_t (M, C, H, W) float32, t (M,) int64 and, with labels, labels (M,) int64.

        M is N, or 2 N under guidance: all images with their labels, then all without.
        """
        x_t = torch.cat([self._x, self._x]) if self._guided else self._x
        t = torch.full((len(x_t),), self._sampler.timesteps[self._taken], dtype=torch.int64, device=x_t.device)
        return (x_t, t) if self._labels is None else (x_t, t, self._labels)

    def take(self, prediction: Tensor) -> None:
        """Go on with the prediction for :meth:`inputs`, (M, C, H, W) of any float dtype."""
        prediction = prediction.float()
        if self._guided:
            labelled, unlabelled = prediction.chunk(2)
            prediction = unlabelled + self._guidance * (labelled - unlabelled)  # (N, C, H, W)
        sampler, number = self._sampler, self._taken
        needed = sampler.needs_noise(number)
        noise = self._noise(Stream.SAMPLE + 1 + sampler.timesteps[number]) if needed else None
        self._x, self._x0 = sampler.step(number, self._x, prediction, noise=noise, previous_x0=self._x0)
        self._taken += 1

    def images(self) -> Tensor:
        """The images, (N, C, H, W) uint8, once all predictions are taken; a pixel that is not a number is black."""
        assert self._taken == self.calls, f"{self.calls - self._taken} of {self.calls} predictions are still to take"
        # The way back from Diffusion.prepare, which it undoes exactly.
        pixels = self._x.add(1.0).mul_(127.5).round_()
        return pixels.nan_to_num_(nan=0.0).clamp_(0.0, 255.0).to(torch.uint8)

    def _noise(self, stream: int) -> Tensor:
        """Standard normal noise of each image, (N, C, H, W) float32."""
        return keyed.normal(self._seed, stream, self._index, math.prod(self._shape)).unflatten(1, self._shape)
