"""What a U-Net is trained and validated on, by image indices: a replica's micro-batches, denoising, the learning rate,
and the held-out loss by noise level.

Parts of a step depend only on image indices, so that the first and the last stage draw the same, and a resumed run
continues as if it had never stopped. A pipeline between two steps, or trained weights alone, have a held-out loss. Its
images are read in parts of one size, and each call of the U-Net is one part at one level::

    call 0: t10, part 0   call 1: t10, part 1   ...   call P: t20, part 0   ...   call 9 P - 1: t90, part P - 1

A replica takes any share of the calls, ``unet(*inputs(i))``, and adds each prediction to its sums.
"""

import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ddpm_ds.config.spec import HELD_OUT_QUANTILES, OptimizerSpec, RunSpec
from ddpm_ds.data.cache import DatasetCache, Indices, Subset
from ddpm_ds.data.loader import MicroBatch, Share, micro_batches, on_device
from ddpm_ds.data.spec import ConditionSpec, DataSpec, TextSpec
from ddpm_ds.data.statistics import Statistics
from ddpm_ds.data.text import Encoded, TextEncoders, widened
from ddpm_ds.diffusion.condition import Conditions, Given, Moves, Scale, Text, described, negated
from ddpm_ds.diffusion.levels import levels_of
from ddpm_ds.diffusion.process import Diffusion, mean_error
from ddpm_ds.ground import keyed
from ddpm_ds.ground.keyed import Draws, Stream
from ddpm_ds.schema.choices import OBJECTIVES
from ddpm_ds.unet.blocks import Carry

NOISE_SEED = 0
"""Seed of the noise, independent of the run's seed: runs are compared on the same noise."""


class Noised(NamedTuple):
    """Micro-batch as training needs it, on the device."""

    x0: Tensor
    """(N, C, H, W) fp32, on the U-Net's scale: pixels in [-1, 1], latents, or normalised fields"""
    t: Tensor
    """(N,) int64, or float32 if noise levels are continuous"""
    eps: Tensor
    """(N, C, H, W) fp32"""
    labels: Tensor | None
    """(N,) int64, dropped labels replaced; None in a run without classes"""
    images: Tensor
    """(N,) int64, image indices"""
    mask: Tensor | None = None
    """(N, 1 or C, H, W) uint8, 1 where a pixel counts; None if all do, or where no loss is computed"""
    given: Given | None = None
    """What the condition is made of; None has no condition"""
    text: Tensor | None = None
    """(N, channels + 6) float32, pooled text and sizes of the image; None if the U-Net reads neither"""


class Denoising:
    """Implements :class:`ddpm_ds.pipeline.engine.Objective` for a run spec; ``seed`` replaces the spec's.

    ``statistics`` are the data-set cache's, by field, ``constants`` (C, H, W) its constant fields, and ``empty`` the
    encoded empty text of a run with captions, or its encoders.
    """

    def __init__(
        self,
        spec: RunSpec,
        device: torch.device,
        statistics: Mapping[str, Statistics] = MappingProxyType({}),
        constants: npt.NDArray[np.float32] | None = None,
        empty: Encoded | TextEncoders | None = None,
        *,
        seed: int | None = None,
    ) -> None:
        self._spec, self._device, self._empty, data = spec, device, empty, spec.data
        self._diffusion = Diffusion(spec.diffusion, spec.train.seed if seed is None else seed, device)
        self._scale = Scale.of(data.normalise, statistics.get("images"), device)
        self._negated = negated(data, device)[0]
        self._conditions = Conditions(data, device, statistics=statistics.get("condition"), constants=constants)

    @functools.cached_property
    def _text(self) -> Text:
        """Text of training images; ranks that never read it load no encoders."""
        empty, text = self._empty, self._spec.data.text
        assert empty is not None and text is not None, "a run with captions has both"
        if isinstance(empty, TextEncoders):
            empty = empty.encode([""]).rounded()
        return Text(text, empty.on(self._device), self._spec.train.seed)

    def context(self, micro_batch: MicroBatch) -> Tensor | None:
        """Return the encoded captions, (N, tokens, channels), some of them dropped; None in a run without text."""
        batch = micro_batch.each(lambda tensor: tensor.to(self._device, non_blocking=True))
        if batch.text is None:
            return None
        return self._text.context(batch.text, batch.text_scale, batch.index)

    def prepare(self, micro_batch: MicroBatch) -> Noised:
        """Turn stored images into x0, timestep, noise and label, each a function of (seed, image index)."""
        spec, batch = self._spec, micro_batch.each(lambda tensor: tensor.to(self._device, non_blocking=True))
        stored, size = batch.images.shape[2:], self._size(batch)
        draws = self._diffusion.draws(batch.index, (*batch.images.shape[:2], *size), *self._conditions.draws())
        moves = self._diffusion.moves(draws, stored, size, spec.data.horizontal_flips)
        x0, mask = self._moved(batch, moves)
        (t, eps), labels, classes = self._diffusion.draw(draws, x0.shape), None, spec.unet.classes
        if classes is not None:
            labels = self._diffusion.drop_labels(batch.labels, draws, spec.train.label_drop, classes)
        given = Given(batch.condition, batch.vector, draws, moves, trained=True)
        pooled = None if batch.pooled is None else self._text.pooled(batch.pooled, batch.index)
        return Noised(x0, t, eps, labels, batch.index, mask, given, described(pooled, batch.sizes))

    def held_out(self, micro_batch: MicroBatch, time: float, stream: int) -> Noised:
        """Turn stored images into their centres, with the noise of a ``stream`` at a timestep or noise level; nothing
        else is random but rectangles that are cut out.
        """
        spec, batch = self._spec, micro_batch.each(lambda tensor: tensor.to(self._device, non_blocking=True))
        diffusion, moves = self._diffusion, Moves(self._size(batch))
        x0, mask = self._moved(batch, moves)
        t = torch.full_like(batch.index, time, dtype=diffusion.levels.dtype)
        eps = keyed.normal(diffusion.seed, stream, batch.index, x0[0].numel()).view_as(x0)
        eps = eps.contiguous(memory_format=torch.channels_last)
        labels = None if spec.unet.classes is None else batch.labels
        draws = Draws(diffusion.seed, batch.index, {Stream.CUT: 4})
        given = Given(batch.condition, batch.vector, draws, moves, trained=False)
        return Noised(x0, t, eps, labels, batch.index, mask, given, described(batch.pooled, batch.sizes))

    def _size(self, batch: MicroBatch) -> tuple[int, int]:
        data, (height, width) = self._spec.data, batch.images.shape[2:]
        return data.size if data.buckets is None else (height, width)

    def _moved(self, batch: MicroBatch, moves: Moves) -> tuple[Tensor, Tensor | None]:
        """Return x0 and the mask."""
        x0 = self._scale.to_unit(moves.of(moves.signed(batch.images, self._negated)))
        return x0, None if batch.mask is None else moves.of(batch.mask)

    def inputs(self, prepared: Noised) -> tuple[Tensor, ...]:
        """Return (x_t, t[, labels][, level][, vector]), x_t with its condition's channels."""
        x0, t, eps, given = prepared.x0, prepared.t, prepared.eps, prepared.given
        if given is None or given.trained:
            eps = self._diffusion.perturbed(eps, prepared.images)
        x_t = self._diffusion.noised(x0, t, eps)
        labels = () if prepared.labels is None else (prepared.labels,)
        text = () if prepared.text is None else (prepared.text,)
        if given is None:
            return (x_t, t, *labels, *text)
        condition, *others = self._conditions.channels(x0, given)
        return (torch.cat((x_t, condition), dim=1) if condition.shape[1] else x_t, t, *labels, *others, *text)

    def loss(self, prediction: Tensor, prepared: Noised) -> Tensor:
        """Return the mean loss of the micro-batch, an fp32 scalar."""
        return self._diffusion.loss(prediction, prepared.x0, prepared.eps, prepared.t, prepared.mask)

    def errors(self, prediction: Tensor, prepared: Noised) -> Tensor:
        """Return the error of each element, (N, H, W, C) fp32, without weights and mask."""
        return self._diffusion.errors(prediction, prepared.x0, prepared.eps, prepared.t)


def fields_read(spec: RunSpec, *, first: bool, last: bool, text: bool) -> frozenset[str]:
    """Return the fields of the cache that a rank reads, with the ``first`` stage, the ``last``, or layers that read
    ``text``: each is read where it is used, and never sent.
    """
    data, condition = spec.data, spec.data.condition or ConditionSpec()
    pooled = first and spec.unet.text is not None and spec.unet.text.pooled_channels is not None
    stored = None if data.text is None else data.text.stored
    used = {
        "images": first or last,
        "text": text or (pooled and stored == "ids"),
        "text_scale": text and stored == "int8",
        "pooled": pooled and stored != "ids",
        "sizes": pooled,
        "condition": first and condition.kind == "stored",
        "vector": first and condition.vector_size > 0,
        "mask": last and data.mask is not None,
    }
    return frozenset(name for name, reads in used.items() if reads)


def replica_batches(
    spec: RunSpec,
    images: Subset,
    share: Share,
    device: torch.device,
    *,
    fields: Set[str],
    start_images: int = 0,
    encoders: TextEncoders | None = None,
) -> Iterator[MicroBatch]:
    """Yield the endless micro-batches of a replica on a rank's device, with the :func:`fields_read`.

    See :func:`ddpm_ds.data.loader.micro_batches`. ``encoders`` encode captions that are stored as tokens.
    """
    batches = micro_batches(
        images,
        share,
        fields=fields,
        seed=spec.train.seed,
        group=spec.bucket_group,
        start_images=start_images,
        workers=spec.data.workers,
        pin_memory=device.type == "cuda",
    )
    loaded = on_device(batches, device)
    return loaded if encoders is None else (encoded(batch, encoders) for batch in loaded)


def encoders_of(text: TextSpec | None, device: torch.device) -> TextEncoders | None:
    """Return the encoders of captions that are stored as tokens, loaded at their first use; None if there are none."""
    return TextEncoders.open(text, device) if text is not None and text.stored == "ids" else None


def encoded(batch: MicroBatch, encoders: TextEncoders) -> MicroBatch:
    """Return a micro-batch whose captions, if it has some, are encoded as they would have been stored in 16 bits."""
    if batch.text is None:
        return batch
    tokens, pooled = encoders.encode_ids(batch.text).rounded()
    return batch._replace(text=tokens, pooled=pooled)


def rate_of(optimizer: OptimizerSpec, length: int) -> Callable[[int, int], float] | None:
    """Return a function from the images before a step and in it to its learning rate, for a run of ``length`` images.

    It is the rate at the middle of the step's images: no step of a warm-up or decay has rate 0. None if DeepSpeed
    decides. Source: Loshchilov and Hutter 2017 (SGDR), eq. 5, for one period without restart (cosine); Karras et al.
    2024 (EDM2), eq. 67, and their linear ramp-up (inverse_sqrt).
    """
    decay, warmup, reference = optimizer.decay, optimizer.warmup_images, optimizer.reference_images
    if decay is None:
        return None

    def rate(before: int, batch: int) -> float:
        images = before + batch / 2
        if decay == "cosine":
            progress = (images - warmup) / max(length - warmup, 1)
            wave = (1.0 + math.cos(math.pi * min(max(progress, 0.0), 1.0))) / 2.0
            share = optimizer.decay_to + (1.0 - optimizer.decay_to) * wave
        else:
            assert decay == "inverse_sqrt" and reference is not None, "the spec refuses it"
            share = max(images / reference, 1.0) ** -0.5
        return optimizer.learning_rate * share * (min(images / warmup, 1.0) if warmup else 1.0)

    return rate


class _Part(NamedTuple):
    """Held-out images of one size that are one micro-batch; arrays are (n,)."""

    store: DatasetCache
    positions: Indices
    places: Indices  # among all held-out images
    counts: npt.NDArray[np.float64]  # 1 for each, or 0 for images that fill it up


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
        return self._parts[call % len(self._parts)].store.size

    def inputs(self, call: int) -> Carry:
        """Return the inputs of the U-Net for a call, and remember what they were made of until it is added."""
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
        """Return ``eval/loss``, the mean of ``validation/loss_t10`` to ``loss_t90``, and these but for a regression.

        Fields and latents also have ``validation/loss_channel_NAME`` of each channel.
        """
        quantiles, found = self._quantiles, (sums / self._count).tolist()
        losses = found[: len(quantiles)]
        names = [f"t{quantile}" for quantile in quantiles] + [f"channel_{name}" for name in self._channels]
        values = {f"validation/loss_{name}": loss for name, loss in zip(names, found, strict=True)}
        if len(quantiles) == 1:
            del values[f"validation/loss_{names[0]}"]
        return {"eval/loss": sum(losses) / len(losses), **values}

    def _micro_batches(self, store: DatasetCache, positions: Indices) -> Iterator[_Part]:
        """Yield micro-batches of one size; a size's last one is filled up with images that don't count."""
        start = 0
        for cache, stored in zip(store.caches, store.by_bucket(positions), strict=True):
            for first in range(0, len(stored), self.images):
                places = np.arange(first, first + self.images)
                counts, places = (places < len(stored)).astype(np.float64), places.clip(max=len(stored) - 1)
                yield _Part(cache, stored[places], start + places, counts)
            start += len(stored)

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
