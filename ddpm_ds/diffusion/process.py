"""Diffusion process of a run: random draws, noise and loss for a micro-batch, on its device."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ddpm_ds import keyed
from ddpm_ds.config.spec import DiffusionSpec
from ddpm_ds.diffusion.choices import TARGETS
from ddpm_ds.diffusion.levels import NoiseLevel, levels_of
from ddpm_ds.keyed import Draws, Stream


class Diffusion:
    """Forward process and loss of a run; its only state is the tables of :attr:`levels` on `device`.

    All its arguments are on `device`. `index` is the (N,) int64 image index of :mod:`ddpm_ds.keyed`, `draws` are those
    of :meth:`draws`. Nothing waits for the device. Images and noise are (N, C, H, W) tensors in channels-last memory
    format.

    Raises:
        SpecError: the schedule is impossible.
    """

    def __init__(self, spec: DiffusionSpec, seed: int, device: torch.device | str) -> None:
        self.spec = spec
        self.seed = seed
        self.levels = levels_of(spec, device)

    def draws(self, index: Tensor, shape: torch.Size | tuple[int, ...]) -> Draws:
        """Return all draws of a micro-batch whose x_t has a `shape` (N, C, H, W)."""
        words: dict[int, int] = dict.fromkeys((Stream.FLIP, Stream.CROP, Stream.LABEL_DROP), 1)
        normals: dict[int, int] = {Stream.NOISE: math.prod(shape[1:])}
        (normals if self.levels.normal else words)[Stream.TIMESTEP] = 1
        return Draws(self.seed, index, words, normals)

    def prepare(self, images: Tensor, draws: Draws | None, flips: bool, size: tuple[int, int] | None = None) -> Tensor:
        """Convert uint8 images (N, C, H, W) to float32 in [-1, 1], mirroring half of them if `flips`; float16 latents
        only become float32.

        Images larger than `size` (height, width) are cropped to it, each at a random place. `draws` may be None if
        images are neither cropped nor mirrored. Source: DDPM (Ho et al. 2020), section 3.3.
        """
        if size is not None and images.shape[2:] != size:  # uniform over all places
            assert draws is not None
            rows, columns = (stored - cropped + 1 for stored, cropped in zip(images.shape[2:], size, strict=True))
            place = draws.integers(Stream.CROP, rows * columns)  # (N,)
            crops = images.unfold(2, size[0], 1).unfold(3, size[1], 1)  # (N, C, rows, columns, H, W), a view
            each = torch.arange(len(images), device=images.device)
            images = crops[each, :, place // columns, place % columns]  # (N, C, H, W)
        if flips:
            assert draws is not None
            mirrored = draws.coins(Stream.FLIP)  # (N,)
            images = torch.where(mirrored[:, None, None, None], images.flip(-1), images)
        pixels = images.to(torch.float32, memory_format=torch.channels_last)
        if images.is_floating_point():
            return pixels
        # Dividing by 127.5 is exact at 0 and 255; multiplying by 2 / 255 is not.
        return pixels.div_(127.5).sub_(1.0)  # (N, C, H, W)

    def draw(self, draws: Draws, shape: torch.Size | tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Return t (N,) of :attr:`levels` and noise eps, float32 (N, C, H, W), for images of `shape` (N, C, H, W)."""
        eps = draws.normal(Stream.NOISE).reshape(shape)
        return self.levels.draw(draws), eps.contiguous(memory_format=torch.channels_last)  # (N,), (N, C, H, W)

    def level(self, t: Tensor) -> NoiseLevel:
        """Return the noise level of each image, (N, 1, 1, 1) float32."""
        return self.levels.level(t).each()

    def noised(self, x0: Tensor, t: Tensor, eps: Tensor) -> Tensor:
        """Return x_t, float32 (N, C, H, W). Source: DDPM (Ho et al. 2020), eq. 4."""
        level = self.level(t)
        return level.signal * x0 + level.noise * eps

    def perturbed(self, eps: Tensor, index: Tensor) -> Tensor:
        """Return the noise (N, C, H, W) in x_t: `eps` plus `input_perturbation` times noise that is not predicted.

        Source: Ning et al. 2023, algorithm 1.
        """
        gamma = self.spec.input_perturbation
        if gamma == 0.0:
            return eps
        more = keyed.normal(self.seed, Stream.PERTURBATION, index, eps[0].numel()).view_as(eps)
        return torch.add(eps, more, alpha=gamma)

    def loss(self, prediction: Tensor, x0: Tensor, eps: Tensor, t: Tensor) -> Tensor:
        """Return the loss, a float32 scalar: the mean over images of weight times distance."""
        return (self.levels.weights(t) * self.distances(prediction, x0, eps, t)).mean()

    def distances(self, prediction: Tensor, x0: Tensor, eps: Tensor, t: Tensor) -> Tensor:
        """Return the unweighted distance of each prediction from its target, a mean over pixels in float32, (N,);
        `prediction` may have any float dtype.

        Huber is d^2 / 2 for |d| <= delta, else delta (|d| - delta / 2). Source: Huber 1964; DDPM, eq. 14 (l2).
        """
        kinds: dict[str, Callable[..., Tensor]] = {
            "l1": F.l1_loss,
            "l2": F.mse_loss,
            "huber": partial(F.huber_loss, delta=self.spec.huber_delta),
        }
        target = TARGETS[self.spec.objective].target(x0, eps, self.level(t))
        # (N, H, W, C) views: the gradients of PyTorch's losses are contiguous in the order of the dimensions.
        prediction, target = prediction.float().permute(0, 2, 3, 1), target.float().permute(0, 2, 3, 1)
        return kinds[self.spec.loss](prediction, target, reduction="none").flatten(1).mean(dim=1)  # (N,)

    def drop_labels(self, labels: Tensor, draws: Draws, share: float, none_label: int) -> Tensor:
        """Replace a random `share` of labels (N,) by `none_label`. Source: Ho and Salimans 2022, algorithm 1."""
        if share == 0.0:
            return labels
        dropped = draws.uniform(Stream.LABEL_DROP)[:, 0] < share  # (N,)
        return labels.masked_fill(dropped, none_label)
