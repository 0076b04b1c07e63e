"""Loss on held-out images by noise level, for a pipeline between two steps, or for trained weights alone.

Images are read in parts of one size, and each call of the U-Net is one part at one level::

    call 0: t10, part 0   call 1: t10, part 1   ...   call P: t20, part 0   ...   call 9 P - 1: t90, part P - 1

A replica takes any share of the calls, ``unet(*inputs(i))``, and adds each prediction to its sums.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ddpm_ds.config.spec import HELD_OUT_QUANTILES, RunSpec
from ddpm_ds.data.cache import DatasetCache, Indices
from ddpm_ds.data.loader import MicroBatch
from ddpm_ds.data.spec import DataSpec
from ddpm_ds.data.text import TextEncoders
from ddpm_ds.diffusion.levels import levels_of
from ddpm_ds.diffusion.process import mean_error
from ddpm_ds.schema.choices import OBJECTIVES
from ddpm_ds.training.objective import Denoising, Noised, encoded, fields_read
from ddpm_ds.unet.blocks import Carry

NOISE_SEED = 0
"""Seed of the noise, independent of the run's seed: runs are compared on the same noise."""


class _Part(NamedTuple):
    """Held-out images of one size that are one micro-batch; arrays are (n,)."""

    store: DatasetCache
    positions: Indices
    places: Indices  # among all held-out images
    counts: npt.NDArray[np.float64]  # 1, or 0 for images that only fill the micro-batch up


class HeldOutLoss:
    """Loss on the ``positions`` of a data-set cache, up to ``images`` at a time; ``encoders`` encode stored tokens.

    It is the distance that training minimises, without crops, flips, dropped conditions, weights, perturbed inputs and
    masked pixels.
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
        levels, diffuses = levels_of(spec.diffusion.at(spec.data.size)), OBJECTIVES[spec.diffusion.objective].diffuses
        self._quantiles = HELD_OUT_QUANTILES[:: 1 if diffuses else 9]  # a regression has one level
        self._levels = [levels.quantile(quantile) for quantile in self._quantiles]
        """Timestep or noise level, and stream of the noise, by percentile."""
        self._fields = sorted(fields_read(spec, first=True, last=True, text=False))
        self._text_fields = sorted(fields_read(spec, first=False, last=False, text=spec.data.text is not None))
        self._channels = channel_names(spec.data)
        self.images = min(images, len(positions))
        """Number of images of each call."""
        self._parts: list[_Part] = []  # of one size each, the size's last one filled up with images that don't count
        start = 0
        for cache, stored in zip(store.caches, store.by_bucket(positions), strict=True):
            for first in range(0, len(stored), self.images):
                places = np.arange(first, first + self.images)
                counts, places = (places < len(stored)).astype(np.float64), places.clip(max=len(stored) - 1)
                self._parts.append(_Part(cache, stored[places], start + places, counts))
            start += len(stored)
        self.calls = len(self._quantiles) * len(self._parts)
        """Number of calls of the U-Net."""
        self._noised: dict[int, tuple[Noised, Tensor]] = {}

    def size(self, call: int) -> tuple[int, int]:
        """Return height and width of the stored images of a call."""
        return self._parts[call % len(self._parts)].store.size

    def inputs(self, call: int) -> Carry:
        """Return the inputs of the U-Net for a call; its noised images are kept until :meth:`add`."""
        part, level = self._parts[call % len(self._parts)], self._levels[call // len(self._parts)]
        prepared = self._objective.held_out(self._read(part, self._fields), *level)
        self._noised[call] = prepared, torch.from_numpy(part.counts).to(self._device)
        return self._objective.inputs(prepared)

    def context(self, call: int) -> Tensor | None:
        """Return the encoded first captions of a call; None if the U-Net reads no text."""
        if not self._text_fields:
            return None
        batch = self._read(self._parts[call % len(self._parts)], self._text_fields)
        assert batch.text is not None, "it is among the fields"
        return batch.text.to(self._device)

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
        """Return ``eval/loss`` and, but for a regression, the ``validation/loss_t10`` to ``loss_t90`` that it averages.

        Fields and latents also have ``validation/loss_channel_NAME`` of each channel.
        """
        quantiles, found = self._quantiles, (sums / self._count).tolist()
        losses = found[: len(quantiles)]
        names = [f"t{quantile}" for quantile in quantiles] + [f"channel_{name}" for name in self._channels]
        values = {f"validation/loss_{name}": loss for name, loss in zip(names, found, strict=True)}
        if len(quantiles) == 1:
            del values[f"validation/loss_{names[0]}"]
        return {"eval/loss": sum(losses) / len(losses), **values}

    def _read(self, part: _Part, names: Sequence[str]) -> MicroBatch:
        found = {name: torch.from_numpy(part.store.fields[name].read(part.positions)) for name in names}
        images = found.pop("images", torch.empty(len(part.positions), 0))
        labels = torch.from_numpy(part.store.labels[part.positions])
        batch = MicroBatch(images, labels, torch.from_numpy(part.places), **found)
        return batch if self._encoders is None else encoded(batch, self._encoders)


def channel_names(data: DataSpec) -> list[str]:
    """Return names for the held-out loss of each channel: its variable or number; none for colours of pictures."""
    if data.channels <= 3 and not data.are_fields:
        return []
    names = data.variables if len(data.variables) == data.channels else map(str, range(data.channels))
    return [re.sub(r"[^\w.-]", "_", name, flags=re.ASCII) for name in names]  # MLflow refuses other characters
