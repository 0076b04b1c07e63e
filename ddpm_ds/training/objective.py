"""Training objective of a U-Net by image indices: a replica's micro-batches, denoising, and the learning rate.

Every part of a step depends only on image indices, so that the first and the last stage draw the same numbers, and a
resumed run continues as if it had never stopped.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Set
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ddpm_ds.config.spec import OptimizerSpec, RunSpec
from ddpm_ds.data.cache import IMAGES, DatasetCache, Subset
from ddpm_ds.data.loader import MicroBatch, Share, micro_batches, on_device
from ddpm_ds.data.spec import ConditionSpec, TextSpec
from ddpm_ds.data.statistics import Statistics
from ddpm_ds.data.text import Encoded, TextEncoders
from ddpm_ds.diffusion.condition import Conditions, Given, Moves, Scale, Text, described, negated
from ddpm_ds.diffusion.process import Diffusion, paired
from ddpm_ds.ground import keyed
from ddpm_ds.ground.keyed import Draws, Stream
from ddpm_ds.unet.space import Band


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
    """Arrays that the condition is made from; None if there is no condition"""
    text: Tensor | None = None
    """(N, channels + 6) float32, pooled text and sizes of the image; None if the U-Net reads neither"""
    weight: Tensor | None = None
    """(N,) float32, factor of the loss; None if all are 1"""


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
        self.band: Band | None = None
        """Rows that micro-batches have; None for whole images. See :func:`rows_read`."""

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
        return self._text.context(batch.text, batch.index)

    def prepare(self, micro_batch: MicroBatch) -> Noised:
        """Turn stored images into x0, timestep, noise and label, each a function of (seed, image index)."""
        spec, batch = self._spec, micro_batch.each(lambda tensor: tensor.to(self._device, non_blocking=True))
        stored, size = batch.images.shape[2:], self._size(batch)
        draws = self._diffusion.draws(batch.index, (*batch.images.shape[:2], *size), *self._conditions.draws())
        flips = spec.data.horizontal_flips and spec.data.autoencoder is None  # latents are read mirrored
        moves = self._diffusion.moves(draws, stored, None if self.band else size, flips)
        x0, mask = self._moved(batch, moves)
        (t, eps), labels, classes = self._diffusion.draw(draws, (*x0.shape[:2], *size)), None, spec.unet.classes
        eps = eps if self.band is None else self.band.cut(eps).clone()
        if batch.pairs is not None:
            eps = eps[batch.pairs].contiguous(memory_format=torch.channels_last)
        if classes is not None:
            labels = self._diffusion.drop_labels(batch.labels, draws, spec.train.label_drop, classes)
        given = Given(batch.condition, batch.vector, draws, moves, trained=True, band=self.band)
        pooled = None if batch.pooled is None else self._text.pooled(batch.pooled, batch.index)
        return Noised(x0, t, eps, labels, batch.index, mask, given, described(pooled, batch.sizes), batch.weight)

    def paired(self, micro_batch: MicroBatch) -> MicroBatch:
        """Return a micro-batch, read for an objective on the CPU, with the noise that each image takes.

        A CUDA graph can't hold the assignment, so threads that read ahead make it.
        """
        prepared = self.prepare(MicroBatch(*micro_batch[:3]))
        pairs = paired(prepared.x0, prepared.eps, self._spec.diffusion.noise_pairs)
        return micro_batch._replace(pairs=pairs.pin_memory() if micro_batch.index.is_pinned() else pairs)

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

    def loss(self, prediction: Tensor, prepared: Noised, band: Band | None = None) -> Tensor:
        """Return the mean loss of the micro-batch, an fp32 scalar, or the part of it that a ``band`` of rows has."""
        known = prepared.x0, prepared.eps, prepared.t, prepared.mask, prepared.weight
        return self._diffusion.loss(prediction, *known, band)

    def errors(self, prediction: Tensor, prepared: Noised) -> Tensor:
        """Return the error of each element, (N, H, W, C) fp32, without weights and mask."""
        return self._diffusion.errors(prediction, prepared.x0, prepared.eps, prepared.t)


def fields_read(spec: RunSpec, *, first: bool, last: bool, text: bool) -> frozenset[str]:
    """Return the fields of the cache that a rank reads: each is read where it is used, and never sent.

    The rank holds the ``first`` stage, the ``last``, or layers that read ``text``.
    """
    data, condition = spec.data, spec.data.condition or ConditionSpec()
    pooled = first and spec.unet.text is not None and spec.unet.text.pooled_channels is not None
    encodes = data.text is not None and data.text.encoded_in_training
    used = {
        "images": first or last,
        "text": text or (pooled and encodes),
        "pooled": pooled and not encodes,
        "sizes": pooled,
        "condition": first and data.condition_is_stored,
        "vector": first and condition.vector_size > 0,
        "mask": last and data.is_masked,
    }
    return frozenset(name for name, reads in used.items() if reads)


def rows_read(spec: RunSpec, cache: DatasetCache, band: Band | None) -> Band | None:
    """Return the rows of images that a rank reads, if it has a ``band`` of them; None if it reads whole images.

    It does for work that needs other rows, and where a band would have the shape of a smaller condition.
    """
    data, diffusion, condition = spec.data, spec.diffusion, spec.data.condition or ConditionSpec()
    made = condition.kind is not None and not data.condition_is_stored
    looks = made or diffusion.noise_pairs > 1 or diffusion.input_perturbation > 0.0
    if band is None or looks or data.size != cache.size or cache.buckets:
        return None
    smaller = {stored.shape[2:] for stored in cache.others.values()} - {cache.size}
    return None if (band.stop - band.first, cache.size[1]) in smaller else band


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
    finish = None
    if spec.diffusion.noise_pairs > 1 and IMAGES in fields:
        cache = images.cache
        finish = Denoising(spec, torch.device("cpu"), cache.meta.statistics, cache.constants).paired
    batches = micro_batches(
        images,
        share,
        fields=fields,
        sources=spec.data.folders,
        seed=spec.train.seed,
        group=spec.bucket_group,
        start_images=start_images,
        workers=spec.data.workers,
        pin_memory=device.type == "cuda",
        finish=finish,
    )
    loaded = on_device(batches, device)
    return loaded if encoders is None else (encoded(batch, encoders) for batch in loaded)


def encoders_of(text: TextSpec | None, device: torch.device) -> TextEncoders | None:
    """Return the encoders of captions that training encodes, loaded at their first use; None if there are none."""
    return TextEncoders.open(text, device) if text is not None and text.encoded_in_training else None


def encoded(batch: MicroBatch, encoders: TextEncoders) -> MicroBatch:
    """Return a micro-batch whose captions, if it has some, are encoded as they would have been stored in 16 bits."""
    if batch.text is None:
        return batch
    tokens, pooled = encoders.encode_ids(batch.text).rounded()
    return batch._replace(text=tokens, pooled=pooled)


def rate_of(optimizer: OptimizerSpec, length: int) -> Callable[[int, int], float] | None:
    """Return a function from the images before a step and in it to its learning rate, for a run of ``length`` images.

    It is the rate at the middle of the step's images: no step of a warm-up or decay has rate 0. None if DeepSpeed
    decides. Source: Loshchilov and Hutter 2017 (SGDR), eq. 5, for one period without restart (cosine); Chen et al.
    2021, "REX: Revisiting Budgeted Training", with 0.1 for their 0.5 as others have it (rex); Karras et al. 2024
    (EDM2), eq. 67, and their linear ramp-up (inverse_sqrt).
    """
    decay, warmup, reference = optimizer.decay, optimizer.warmup_images, optimizer.reference_images
    if decay is None:
        return None

    def rate(before: int, batch: int) -> float:
        images = before + batch / 2
        if decay == "inverse_sqrt":
            assert reference is not None, "the spec refuses it"
            share = max(images / reference, 1.0) ** -0.5
        else:
            left = 1.0 - min(max((images - warmup) / max(length - warmup, 1), 0.0), 1.0)
            curve = left / (0.1 + 0.9 * left) if decay == "rex" else (1.0 - math.cos(math.pi * left)) / 2.0
            share = optimizer.decay_to + (1.0 - optimizer.decay_to) * curve
        return optimizer.learning_rate * share * (min(images / warmup, 1.0) if warmup else 1.0)

    return rate
