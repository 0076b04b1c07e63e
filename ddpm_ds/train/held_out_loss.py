"""The held-out loss by noise level, of whatever predicts: a pipeline between two steps, or trained weights alone.

The images are read in parts of one size, and each call of the U-Net is one part at one noise level::

    call 0: t10, part 0   call 1: t10, part 1   ...   call P: t20, part 0   ...   call 9 P - 1: t90, part P - 1

Whoever predicts takes any share of the calls, ``unet(*inputs(i))``, and adds each prediction to its sums.
"""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ddpm_ds.config.choices import OBJECTIVES
from ddpm_ds.config.spec import HELD_OUT_QUANTILES, DataSpec, RunSpec
from ddpm_ds.data.cache import DatasetCache
from ddpm_ds.data.loader import Indices, MicroBatch
from ddpm_ds.data.text import TextEncoders, widened
from ddpm_ds.diffusion.levels import levels_of
from ddpm_ds.diffusion.process import mean_error
from ddpm_ds.train.objective import Denoising, Noised, encoded, fields_read
from ddpm_ds.unet.blocks import Carry

NOISE_SEED = 0
"""Seed of the noise, independent of the run's seed: runs are compared on the same noise."""


class _Part(NamedTuple):
    """Held-out images that are one micro-batch."""

    store: DatasetCache
    """Cache in which they are, of one size of images."""
    positions: Indices
    """Their positions there, (n,)."""
    places: Indices
    """Their places among all held-out images, (n,)."""
    counts: npt.NDArray[np.float64]
    """1 for each, or 0 for images that fill it up, (n,)."""


class HeldOutLoss:
    """Loss on the ``positions`` of a data-set cache, up to ``images`` at a time, on the centres of images that are
    cropped in training, and of buckets of aspect at the size of each; ``encoders`` encode text that is stored as the
    numbers of its tokens.

    It is the distance that training minimises, without flips, dropped conditions, weights and perturbed inputs, so that
    runs which differ in those can be compared. Masked pixels don't count.
    """

    def __init__(
        self,
        spec: RunSpec,
        device: torch.device,
        store: DatasetCache,
        positions: Indices,
        encoders: TextEncoders | None = None,
        *,
        images: int,
    ) -> None:
        self._device, self._count, self._encoders = device, len(positions), encoders
        self._objective = Denoising(spec, device, store.meta.statistics, store.constants, seed=NOISE_SEED)
        levels, diffuses = levels_of(spec.diffusion), OBJECTIVES[spec.diffusion.objective].diffuses
        self._quantiles = HELD_OUT_QUANTILES[:: 1 if diffuses else 9]  # all are one in a regression
        self._levels = [levels.quantile(quantile) for quantile in self._quantiles]
        """Timestep or noise level, and stream of the noise, of each percentile."""
        self._fields = sorted(fields_read(spec, first=True, last=True, text=False))
        self._text_fields = sorted(fields_read(spec, first=False, last=False, text=spec.data.text is not None))
        self._channels = channel_names(spec.data)
        self.images = min(images, len(positions))
        """Number of images of each call."""
        self._parts = list(self._micro_batches(store, positions))
        self.calls = len(self._quantiles) * len(self._parts)
        """Number of calls of the U-Net."""
        self._noised: dict[int, tuple[Noised, Tensor]] = {}

    def size(self, call: int) -> tuple[int, int]:
        """Return height and width of the stored images of a call."""
        return self._part(call).store.size

    def inputs(self, call: int) -> Carry:
        """Return the inputs of the U-Net for a call, and remember what they were made of until it is added."""
        part = self._part(call)
        prepared = self._objective.held_out(self._read(part, self._fields), *self._levels[call // len(self._parts)])
        self._noised[call] = prepared, torch.from_numpy(part.counts).to(self._device)
        return self._objective.inputs(prepared)

    def context(self, call: int) -> Tensor | None:
        """Return the encoded first captions of a call; None if the U-Net reads no text."""
        if not self._text_fields:
            return None
        batch = self._read(self._part(call), self._text_fields)
        assert batch.text is not None, "it is among the fields"
        return widened(batch.text, batch.text_scale).to(self._device)

    def zeros(self) -> Tensor:
        """Return the sums of no call."""
        return torch.zeros(len(self._quantiles) + len(self._channels), dtype=torch.float64, device=self._device)

    def add(self, sums: Tensor, call: int, prediction: Tensor) -> None:
        """Add the errors of a call's prediction, fp32 (images, C, H, W), to ``sums``."""
        prepared, counts = self._noised.pop(call)
        errors = self._objective.errors(prediction, prepared)
        sums[call // len(self._parts)] += (mean_error(errors, prepared.mask) * counts).sum()
        if self._channels:
            of_channels = mean_error(errors, prepared.mask, by_channel=True)  # (N, C)
            sums[len(self._quantiles) :] += (of_channels * counts[:, None]).sum(dim=0) / len(self._quantiles)

    def values(self, sums: Tensor) -> dict[str, float]:
        """Return ``eval/loss``, which is the mean of ``validation/loss_t10`` to ``loss_t90``, and these, from the sums
        of all calls; a regression has the first alone. Fields and latents also have ``validation/loss_channel_NAME`` of
        each channel.
        """
        quantiles, found = self._quantiles, (sums / self._count).tolist()
        losses, of_channels = found[: len(quantiles)], found[len(quantiles) :]
        values = {f"validation/loss_t{quantile}": loss for quantile, loss in zip(quantiles, losses, strict=True)}
        values = values if len(quantiles) > 1 else {}
        values |= {
            f"validation/loss_channel_{name}": loss for name, loss in zip(self._channels, of_channels, strict=True)
        }
        return {"eval/loss": sum(losses) / len(losses), **values}

    def _part(self, call: int) -> _Part:
        return self._parts[call % len(self._parts)]

    def _micro_batches(self, store: DatasetCache, positions: Indices) -> Iterator[_Part]:
        """Yield the micro-batches, each of one size; the last one of a size is filled up with images that don't
        count.
        """
        start = 0
        for cache, stored in zip(store.caches, store.by_bucket(positions), strict=True):
            for first in range(0, len(stored), self.images):
                places = np.arange(first, first + self.images)
                counts, places = (places < len(stored)).astype(np.float64), places.clip(max=len(stored) - 1)
                yield _Part(cache, stored[places], start + places, counts)
            start += len(stored)

    def _read(self, part: _Part, names: Sequence[str]) -> MicroBatch:
        """Return the fields of these names of one part."""
        found = {name: torch.from_numpy(part.store.fields[name].read(part.positions)) for name in names}
        images = found.pop("images", torch.empty(len(part.positions), 0))
        labels = torch.from_numpy(part.store.labels[part.positions])
        batch = MicroBatch(images, labels, torch.from_numpy(part.places), **found)
        return batch if self._encoders is None else encoded(batch, self._encoders)


def channel_names(data: DataSpec) -> list[str]:
    """Return the names under which the held-out loss of each channel is tracked, numbers unless each channel is a
    variable of its own; none for pictures, whose channels are colours.
    """
    if data.channels <= 3 and not data.are_fields:
        return []
    names = data.variables if len(data.variables) == data.channels else map(str, range(data.channels))
    return [re.sub(r"[^\w.-]", "_", name, flags=re.ASCII) for name in names]  # MLflow refuses other characters
