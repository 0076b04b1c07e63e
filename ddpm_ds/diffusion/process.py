"""The diffusion process of training: random draws, noise and loss for a micro-batch, on its device."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from ddpm_ds.diffusion.choices import TARGETS
from ddpm_ds.diffusion.condition import Moves
from ddpm_ds.diffusion.levels import NoiseLevel, levels_of
from ddpm_ds.diffusion.spec import DiffusionSpec
from ddpm_ds.ground import keyed
from ddpm_ds.ground.keyed import Draws, Stream
from ddpm_ds.schema.choices import OBJECTIVES


class Diffusion:
    """Forward process and loss of a run; its only state is the tables of :attr:`levels` on `device`.

    All its arguments are on `device`, and nothing waits for it. `index` is the (N,) int64 image index of
    ``ground/keyed.py``, `draws` come from :meth:`draws`. Images and noise are (N, C, H, W) tensors in channels-last
    memory format. An impossible schedule raises SpecError.
    """

    def __init__(self, spec: DiffusionSpec, seed: int, device: torch.device | str) -> None:
        self.spec = spec
        self.seed = seed
        self.levels = levels_of(spec, device)
        self.diffuses = OBJECTIVES[spec.objective].diffuses
        """Whether images are noised."""
        self._channel_weights = torch.tensor(spec.channel_weights, device=device) if spec.channel_weights else None

    def draws(
        self,
        index: Tensor,
        shape: torch.Size | tuple[int, ...],
        more_words: Mapping[int, int] = MappingProxyType({}),
        more_normals: Mapping[int, int] = MappingProxyType({}),
    ) -> Draws:
        """Return all draws of a micro-batch with x_t of `shape` (N, C, H, W), and draws of more streams."""
        words: dict[int, int] = dict.fromkeys((Stream.FLIP, Stream.CROP, Stream.LABEL_DROP), 1)
        normals: dict[int, int] = {Stream.NOISE: math.prod(shape[1:])} if self.diffuses else {}
        if self.spec.noise_offset:
            normals[Stream.NOISE_OFFSET] = shape[1]
        (normals if self.levels.normal else words)[Stream.TIMESTEP] = 1
        return Draws(self.seed, index, {**words, **more_words}, {**normals, **more_normals})

    def moves(self, draws: Draws, stored: tuple[int, ...], size: tuple[int, int] | None, flips: bool) -> Moves:
        """Return the moves of images of a `stored` size: crops to `size` at random places, and mirrors of half."""
        place = None
        if size is not None and stored != size:  # uniform over all places
            rows, columns = (before - cropped + 1 for before, cropped in zip(stored, size, strict=True))
            place = draws.integers(Stream.CROP, rows * columns)  # (N,)
        return Moves(size, place, draws.coins(Stream.FLIP) if flips else None)

    def draw(self, draws: Draws, shape: torch.Size | tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Return t (N,) of :attr:`levels` and noise eps, float32 (N, C, H, W), for images of `shape` (N, C, H, W)."""
        if not self.diffuses:
            t = self.levels.draw(draws)
            return t, t.new_zeros(shape).contiguous(memory_format=torch.channels_last)
        eps = draws.normal(Stream.NOISE).reshape(shape)
        if self.spec.noise_offset:  # Guttenberg 2023, "Diffusion with offset noise"
            offset = draws.normal(Stream.NOISE_OFFSET)[:, :, None, None]  # (N, C, 1, 1)
            eps = torch.add(eps, offset, alpha=self.spec.noise_offset)
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

    def loss(
        self,
        prediction: Tensor,
        x0: Tensor,
        eps: Tensor,
        t: Tensor,
        mask: Tensor | None = None,
        weight: Tensor | None = None,
    ) -> Tensor:
        """Return the loss, a float32 scalar: the mean over images of weight times mean error of weighted channels.

        `weight` (N,) multiplies the weights of the noise levels.
        """
        errors = self.errors(prediction, x0, eps, t)
        if self._channel_weights is not None:
            errors = errors * self._channel_weights
        weights = self.levels.weights(t) if weight is None else self.levels.weights(t) * weight
        return (weights * mean_error(errors, mask)).mean()

    def errors(self, prediction: Tensor, x0: Tensor, eps: Tensor, t: Tensor) -> Tensor:
        """Return the error of each element of the predictions, of any float dtype, (N, H, W, C) float32.

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
        return kinds[self.spec.loss](prediction, target, reduction="none")

    def drop_labels(self, labels: Tensor, draws: Draws, share: float, none_label: int) -> Tensor:
        """Replace a random `share` of labels (N,) by `none_label`. Source: Ho and Salimans 2022, algorithm 1."""
        if share == 0.0:
            return labels
        dropped = draws.uniform(Stream.LABEL_DROP)[:, 0] < share  # (N,)
        return labels.masked_fill(dropped, none_label)


def mean_error(errors: Tensor, mask: Tensor | None, *, by_channel: bool = False) -> Tensor:
    """Return the mean of errors (N, H, W, C) over the elements of each image, (N,), or of each of its channels, (N, C).

    `mask` (N, 1 or C, H, W) is 1 at the elements that count, and 0 elsewhere; where none does the mean is 0.
    """
    first, last = (1, 2) if by_channel else (1, 3)
    if mask is None:
        return errors.flatten(first, last).mean(dim=1)
    counts = mask.permute(0, 2, 3, 1).expand_as(errors).to(errors.dtype)  # (N, H, W, C)
    total = (errors * counts).flatten(first, last).sum(dim=1)
    return total / counts.flatten(first, last).sum(dim=1).clamp(min=1.0)
