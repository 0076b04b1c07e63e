"""The diffusion process of training: random draws, noise and loss for a micro-batch, on its device."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import numpy as np
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
from ddpm_ds.unet.space import Band


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
        band: Band | None = None,
    ) -> Draws:
        """Return all draws of a micro-batch with x_t of `shape` (N, C, H, W), and draws of more streams.

        With a ``band`` the noise has its rows alone, where they can be drawn without the others.
        """
        words: dict[int, int] = dict.fromkeys((Stream.FLIP, Stream.CROP, Stream.LABEL_DROP), 1)
        (channels, height, width), normals = shape[1:], dict[int, int | Sequence[range]]()
        if self.diffuses:
            normals[Stream.NOISE] = channels * height * width
            if band is not None and width % 4 == 0 and not self.spec.multires_noise:
                starts = range(0, channels * height * width, height * width)
                normals[Stream.NOISE] = [range(one + band.first * width, one + band.stop * width) for one in starts]
        if self.spec.noise_offset:
            normals[Stream.NOISE_OFFSET] = channels
        if self.spec.multires_noise:
            grids = coarser_grids(shape[2:])
            normals[Stream.MULTIRES] = channels * sum(map(math.prod, grids))
            words[Stream.MULTIRES_RATIO] = len(grids)
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
        """Return t (N,) of :attr:`levels` and noise eps, float32 (N, C, H, W), for images of `shape` (N, C, H, W); the
        noise has the rows that are drawn.
        """
        t = self.levels.draw(draws, shape[2:])  # (N,)
        if not self.diffuses:
            return t, t.new_zeros(shape).contiguous(memory_format=torch.channels_last)
        eps = draws.normal(Stream.NOISE).reshape(*shape[:2], -1, shape[3])
        if self.spec.noise_offset:  # Guttenberg 2023, "Diffusion with offset noise"
            offset = draws.normal(Stream.NOISE_OFFSET)[:, :, None, None]  # (N, C, 1, 1)
            eps = torch.add(eps, offset, alpha=self.spec.noise_offset)
        if self.spec.multires_noise:
            eps = multires(eps, draws, self.spec.multires_noise * t / self.spec.timesteps)
        return t, eps.contiguous(memory_format=torch.channels_last)  # (N,), (N, C, H, W)

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
        band: Band | None = None,
    ) -> Tensor:
        """Return the loss, a float32 scalar: the mean over images of weight times mean error of weighted channels.

        `weight` (N,) multiplies the weights of the noise levels. If the prediction has a ``band`` of the rows, the loss
        is that band's part, times the number of bands.
        """
        if band is not None:
            x0, eps = band.cut(x0), band.cut(eps)
        errors = self.errors(prediction, x0, eps, t)
        if self._channel_weights is not None:
            errors = errors * self._channel_weights
        weights = self.levels.weights(t) if weight is None else self.levels.weights(t) * weight
        return (weights * mean_error(errors, mask, band=band)).mean()

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


def paired(x0: Tensor, eps: Tensor, group: int) -> Tensor:
    """Return which noise (N, ...) of ``eps`` each image (N, ...) of ``x0`` takes, (N,) int64; all are on the CPU.

    Each ``group`` of consecutive images is assigned its own noises with the greatest sum of cosines, in float64.
    Source: Pooladian et al. 2023 and Tong et al. 2024, "minibatch optimal transport".
    """
    from scipy.optimize import linear_sum_assignment  # SciPy takes long to import

    x, noise = (F.normalize(one.flatten(1).double(), dim=1).unflatten(0, (-1, group)) for one in (x0, eps))
    cosines = (x @ noise.mT).numpy()  # (N / group, group, group)
    places = [linear_sum_assignment(each, maximize=True)[1] + group * number for number, each in enumerate(cosines)]
    return torch.from_numpy(np.concatenate(places))


def coarser_grids(size: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the sizes (H, W) of the grids that hold noise of each ratio, from the whole size to a side of 1."""
    return [tuple(max(1, side >> level) for side in size) for level in range(min(size).bit_length())]


def multires(eps: Tensor, draws: Draws, share: Tensor) -> Tensor:
    """Return noise (N, C, H, W) with noise of sizes / r^i, enlarged and times ``share``^i (N,), for i from 0 until a
    side is 1; each r is between 2 and 4, and each image has the standard deviation 1.

    Source: Whitaker 2023, "Multi-Resolution Noise for Diffusion Model Training"; Ke et al. 2024 (Marigold), section
    3.2, whose share rises with t. Both draw r for a batch and divide by its standard deviation.
    """
    (channels, *size), first, weight = eps.shape[1:], 0, torch.ones_like(share)
    normal, ratios = draws.normal(Stream.MULTIRES), 2.0 + 2.0 * draws.uniform(Stream.MULTIRES_RATIO)  # (N, levels)
    for level, grid in enumerate(coarser_grids(size)):
        count = channels * math.prod(grid)
        coarse = normal[:, first : first + count].unflatten(1, (channels, *grid))  # (N, C, h, w)
        sides = [(side / ratios[:, level] ** level).floor().clamp(min=1.0) for side in size]  # (N,) each
        down, across = map(enlarging, sides, grid, size)
        eps = eps + weight[:, None, None, None] * torch.einsum("nyh,nchw,nxw->ncyx", down, coarse, across)
        weight = weight * share * (torch.minimum(*sides) > 1.0)
        first += count
    return eps / eps.std(dim=(1, 2, 3), keepdim=True)


def enlarging(sides: Tensor, held: int, side: int) -> Tensor:
    """Return matrices (N, side, held) that enlarge the first ``sides`` (N,) of ``held`` pixels to ``side``."""
    near, far = torch.arange(held, device=sides.device), torch.arange(side, device=sides.device)
    place = ((far + 0.5) * (sides[:, None] / side) - 0.5).clamp(min=0.0).minimum(sides[:, None] - 1.0)  # (N, side)
    return (1.0 - (place[:, :, None] - near).abs()).clamp(min=0.0)


def mean_error(errors: Tensor, mask: Tensor | None, *, by_channel: bool = False, band: Band | None = None) -> Tensor:
    """Return the mean of errors (N, H, W, C) over the elements of each image, (N,), or of each of its channels, (N, C).

    `mask` (N, 1 or C, H, W) is 1 at the elements that count, and 0 elsewhere; where none does the mean is 0. If the
    errors have a ``band`` of the rows, it is that band's part of the mean, times the number of bands.
    """
    first, last = (1, 2) if by_channel else (1, 3)
    if mask is None:
        mean = errors.flatten(first, last).mean(dim=1)
        return mean if band is None else mean * (errors.shape[1] * band.group.size / band.height)
    counted = mask.permute(0, 2, 3, 1).expand(*mask.shape[:1], *mask.shape[2:], errors.shape[3]).to(errors.dtype)
    own = counted if band is None else counted[:, band.first : band.stop]  # (N, H, W, C)
    total = (errors * own).flatten(first, last).sum(dim=1)
    mean = total / counted.flatten(first, last).sum(dim=1).clamp(min=1.0)
    return mean if band is None else mean * band.group.size
