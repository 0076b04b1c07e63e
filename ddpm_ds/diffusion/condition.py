"""The U-Net's inputs beside x_t, t and labels: a condition's channels, its noise level, a vector, and encoded text.

All of them are made on the device from stored values, and nothing waits for the device. The stage that makes x_t makes
the condition. Each rank with transformer blocks makes its own text, so that text is never sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from ddpm_ds.data.latents import rectangles
from ddpm_ds.data.spec import ConditionSpec, DataSpec, TextSpec
from ddpm_ds.data.statistics import Statistics
from ddpm_ds.data.text import Encoded
from ddpm_ds.ground.keyed import Draws, Stream
from ddpm_ds.schema.types import Normalise
from ddpm_ds.unet.space import Band
from ddpm_ds.unet.spec import CrossAttentionSpec

LUMA = (0.299, 0.587, 0.114)
"""Share of red, green and blue in a grey value (ITU-R BT.601)."""
REST_SEED = 0
"""Seed of the rectangles cut out of held-out images and for drawn images, independent of the run's seed."""
LEVEL_SCALE = 1000.0
"""The U-Net's input for level 1, pure noise; the sinusoidal embedding is made for numbers of this size."""


@dataclass(frozen=True, eq=False)
class Scale:
    """Scale of stored values: (value - shift) / size. If these are numbers, bytes become [-1, 1] and floats stay."""

    shift: Tensor | float = 0.0
    """(C, 1, 1) float32 on the device, or a number: 127.5 for bytes, 0 for floats."""
    size: Tensor | float = 1.0

    @classmethod
    def of(
        cls, normalise: Normalise, statistics: Statistics | None, device: torch.device | str, *, pictures: bool = False
    ) -> Scale:
        """Return a data set's scale: of bytes for ``pictures``, else by ``normalise``; None keeps the values."""
        if pictures:
            return cls(127.5, 127.5)
        if normalise is None:
            return cls()
        assert statistics is not None, "a cache of normalised fields has them"
        mean, std, low, high = (
            torch.tensor(numbers, dtype=torch.float64)[:, None, None]
            for numbers in (statistics.mean, statistics.std, statistics.low, statistics.high)
        )
        shift, size = (mean, std) if normalise == "statistics" else ((high + low) / 2.0, (high - low) / 2.0)
        return cls(shift.float().to(device), size.float().to(device))

    def to_unit(self, values: Tensor) -> Tensor:
        """Return stored values (N, C, H, W) on the U-Net's scale (DDPM, section 3.3), float32 and channels-last."""
        unit = values.to(torch.float32, memory_format=torch.channels_last)
        if isinstance(self.shift, Tensor):
            return (unit - self.shift) / self.size
        # Dividing by 127.5 is exact at 0 and 255; multiplying by 2 / 255 is not.
        return unit if values.is_floating_point() else unit.div_(127.5).sub_(1.0)

    def to_physical(self, unit: Tensor) -> Tensor:
        """Return values (N, C, H, W) in the units in which they are stored, float32."""
        return unit * self.size + self.shift


@dataclass(frozen=True, eq=False)
class Moves:
    """Crops of the images of a micro-batch to ``size`` (height, width), and their mirroring."""

    size: tuple[int, int] | None = None
    """None keeps them whole."""
    place: Tensor | None = None
    """(N,) int64, numbers of the places of the crops, row by row; None crops the centre."""
    mirrored: Tensor | None = None
    """(N,) bool; None mirrors none."""

    def of(self, images: Tensor) -> Tensor:
        """Return moved images, (N, C, H, W)."""
        if self.size is not None and images.shape[2:] != self.size:
            height, width = self.size
            if self.place is None:
                top, left = (images.shape[2] - height) // 2, (images.shape[3] - width) // 2
                images = images[:, :, top : top + height, left : left + width]
            else:
                columns = images.shape[3] - width + 1
                crops = images.unfold(2, height, 1).unfold(3, width, 1)  # (N, C, rows, columns, H, W), a view
                each = torch.arange(len(images), device=images.device)
                images = crops[each, :, self.place // columns, self.place % columns]  # (N, C, H, W)
        if self.mirrored is not None:
            images = torch.where(self.mirrored[:, None, None, None], images.flip(-1), images)
        return images

    def signed(self, images: Tensor, negated: Tensor | None) -> Tensor:
        """Return images whose ``negated`` channels, (C,) bool, change their sign where they are mirrored."""
        if self.mirrored is None or negated is None:
            return images
        return torch.where((self.mirrored[:, None] & negated)[:, :, None, None], -images, images)


class Given(NamedTuple):
    """Values from which the condition of a micro-batch is made."""

    stored: Tensor | None
    """(N, c, h, w), as it is stored, or the pixels (N, 1, H, W), bool, that are cut out; None without either"""
    vector: Tensor | None
    """(N, K) float32 of the data"""
    draws: Draws
    moves: Moves
    trained: bool
    """Whether conditions are dropped and noised, as in training alone"""
    band: Band | None = None
    """Rows that the images have; a stored condition of their size has these too. None for whole images"""


class Condition(NamedTuple):
    """The U-Net's inputs from the conditions of images, beside x_t, t and labels."""

    channels: Tensor
    """(N, C', H, W) float32, which follow the channels of x_t"""
    others: tuple[Tensor, ...]
    """Level (N,) and vector (N, K) float32, as far as the U-Net has them"""
    context: Tensor | None = None
    """(N, tokens, channels), the encoded text; None for a U-Net that reads none"""

    def each(self, change: Callable[[Tensor], Tensor]) -> Condition:
        """Return the condition with changed channels, level and vector."""
        return self._replace(channels=change(self.channels), others=tuple(map(change, self.others)))

    def followed_by(self, other: Condition) -> Condition:
        """Return the inputs of these images, then of the ``other`` images."""
        others = (torch.cat(pair) for pair in zip(self.others, other.others, strict=True))
        context = None
        if self.context is not None and other.context is not None:
            context = torch.cat((self.context, other.context))
        return Condition(torch.cat((self.channels, other.channels)), tuple(others), context)


class Conditions:
    """Maker of the conditions of images.

    Args:
        data: section of the images and their condition.
        statistics: of a stored condition, if it is normalised.
        constants: channels (C, H, W) of the stored size that all images share.
    """

    def __init__(
        self,
        data: DataSpec,
        device: torch.device,
        *,
        statistics: Statistics | None = None,
        constants: npt.NDArray[np.float32] | None = None,
    ) -> None:
        self.spec = data.condition or ConditionSpec()
        self._latents = data.autoencoder is not None
        self._text_drop = 0.0 if data.text is None else data.text.drop
        self._is_stored = data.condition_is_stored
        self._size, self._shape, self._of_pictures = data.stored_size, data.shape, not data.are_fields
        self._scale = Scale.of(self.spec.normalise, statistics, device) if self.spec.kind == "stored" else Scale()
        self._negated = negated(data, device)[1]
        self._luma = torch.tensor(LUMA, device=device)[:, None, None]
        waves: list[Tensor] = []  # sine and cosine of the position downwards, then to the right, of 1, 2, ... periods
        for periods in range(1, self.spec.grid_channels // 4 + 1):
            for axis, pixels in enumerate(self._size):
                angle = 2.0 * math.pi * periods * (torch.arange(pixels) + 0.5) / pixels
                waves += [wave[:, None] if axis == 0 else wave[None, :] for wave in (angle.sin(), angle.cos())]
        fixed = [torch.stack([wave.expand(self._size) for wave in waves])] if waves else []
        if constants is not None:
            fixed.insert(0, _normalised(constants, self.spec.normalise))
        self._fixed = torch.cat(fixed)[None].to(device) if fixed else None  # (1, C, H, W)

    def draws(self) -> tuple[dict[int, int], dict[int, int]]:
        """Return the words and the normal draws of each stream that the condition of an image needs in training."""
        words: dict[int, int] = {Stream.CUT: 4} if self.spec.kind == "cut_out" and not self._is_stored else {}
        normals: dict[int, int] = {}
        if self.spec.drop:
            words[self._drop_stream] = 1
        if self.spec.noise:
            words[Stream.CONDITION_LEVEL] = 1
            normals[Stream.CONDITION_NOISE] = math.prod(self._shape) // self.spec.factor**2
        return words, normals

    @property
    def _drop_stream(self) -> Stream:
        """Stream of the draw that drops conditions; with captions it drops these too."""
        return Stream.TEXT_DROP if self._text_drop else Stream.CONDITION_DROP

    def channels(self, x0: Tensor, given: Given) -> tuple[Tensor, ...]:
        """Return ``(condition[, level][, vector])`` of clean images x0 (N, C, H, W), as far as the U-Net has them.

        The condition's channels (N, C', H, W) are float32, C' = 0 without a condition;
        :class:`ddpm_ds.unet.blocks.Embed` takes the level (N,) and the vector (N, K).
        """
        draws, spec, level = given.draws, self.spec, None
        parts = []
        match "stored" if self._is_stored else spec.kind:
            case "stored":
                assert given.stored is not None, "the stage that makes x_t reads it"
                unit = self._scale.to_unit(given.moves.signed(given.stored, self._negated))
                by_rows = given.band is not None and unit.shape[2:] == x0.shape[2:]
                parts.append(given.moves.of(unit if by_rows or self._latents else self._resized(unit, self._size)))
            case "reduced":
                small = F.avg_pool2d(x0, spec.factor)
                if spec.noise:
                    level = torch.zeros_like(x0[:, 0, 0, 0])
                    if given.trained:
                        level = draws.uniform(Stream.CONDITION_LEVEL)[:, 0] * spec.noise  # (N,)
                        noise, share = draws.normal(Stream.CONDITION_NOISE), level[:, None, None, None]
                        # Images of variance 1 keep it.
                        small = (1.0 - share.square()).sqrt() * small + share * noise.reshape(small.shape)
                parts.append(self._resized(small, x0.shape[2:]))
            case "grey":
                parts.append((x0 * self._luma).sum(dim=1, keepdim=True))
            case "cut_out":
                hole = given.stored  # (N, 1, H, W)
                if hole is None:
                    hole = rectangles(draws.uniform(Stream.CUT), spec.cut, self._shape[1:])
                parts += [x0 * ~hole, hole.float()]
        if self._fixed is not None:
            parts.append(given.moves.of(self._fixed.expand(len(x0), -1, -1, -1)))
        if given.band is not None:
            parts = [given.band.cut(part) for part in parts]
        condition, vector = torch.cat(parts, dim=1) if parts else x0[:, :0], given.vector
        if spec.drop:
            dropped = torch.zeros_like(x0[:, 0, 0, 0], dtype=torch.bool)
            if given.trained:  # InstructPix2Pix: text below 2 p, the condition from p to 3 p
                drawn = draws.uniform(self._drop_stream)[:, 0] - self._text_drop / 2.0
                dropped = drawn.remainder(1.0) < spec.drop  # (N,)
            condition = condition.masked_fill(dropped[:, None, None, None], 0.0)
            level = None if level is None else level.masked_fill(dropped, 0.0)
            flag = dropped.float()[:, None]
            if not self._latents:
                vector = flag if vector is None else torch.cat((vector.masked_fill(dropped[:, None], 0.0), flag), dim=1)
        level = None if level is None else LEVEL_SCALE * level
        return (condition, *(one for one in (level, vector) if one is not None))

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the fields that the conditions of drawn images are made from."""
        made = () if self.spec.kind is None else ("condition",) if self._is_stored else ("images",)
        return (*made, "vector") if self.spec.vector_size else made

    def at_rest(self, fields: Mapping[str, Tensor], index: Tensor, scale: Scale) -> Condition:
        """Return the conditions of images to draw: whole, without noise, and not mirrored.

        ``fields`` are stored values of :attr:`reads`, on the device, and ``scale`` is the images' scale.
        Rectangles are cut out by ``index`` (N,); a field ``hole`` (N, 1, H, W), bool, cuts out these pixels instead.
        """
        moves = Moves(self._shape[1:])
        x0 = torch.zeros(1, device=index.device).expand(len(index), *self._shape)
        if "images" in fields:
            x0 = scale.to_unit(moves.of(fields["images"]))
        draws = Draws(REST_SEED, index, {Stream.CUT: 4})
        stored = fields.get("hole", fields.get("condition"))
        channels, *others = self.channels(x0, Given(stored, fields.get("vector"), draws, moves, trained=False))
        return Condition(channels, tuple(others))

    def shown(self, condition: Condition, scale: Scale) -> Tensor | None:
        """Return a condition's own channels, (N, c, H, W) in stored units, or None; ``scale`` is the images'."""
        if self.spec.kind is None:
            return None
        count = {"stored": self.spec.channels, "grey": 1}.get(self.spec.kind) or self._shape[0]
        unscaled = self.spec.kind == "stored" and (not self._of_pictures or self.spec.normalise is not None)
        return (self._scale if unscaled else scale).to_physical(condition.channels[:, :count])

    def dropped(self, condition: Condition) -> Condition | None:
        """Return dropped conditions: zeros, and the flag; None if training drops none."""
        if not self.spec.drop:
            return None
        zeros = condition.each(torch.zeros_like)
        if not self._latents:
            zeros.others[-1][:, -1] = 1.0
        return zeros

    def _resized(self, images: Tensor, size: tuple[int, ...]) -> Tensor:
        """Return images (N, C, h, w) of a ``size`` (height, width); an image that becomes smaller is smoothed."""
        if images.shape[2:] == size:
            return images
        mode = self.spec.resize
        if mode == "nearest":
            return F.interpolate(images, size, mode=mode)
        smaller = images.shape[2] > size[0] or images.shape[3] > size[1]
        return F.interpolate(images, size, mode=mode, align_corners=False, antialias=smaller)


def negated(data: DataSpec, device: torch.device | str) -> tuple[Tensor | None, Tensor | None]:
    """Return masks, (C,) bool, of the channels of image and stored condition whose sign a mirror changes, or None."""
    condition = data.condition or ConditionSpec()
    found = []
    for first, count, names in (
        (0, data.channels, data.variables),
        (data.channels, condition.channels, condition.variables),
    ):
        signs = [
            first + number in data.flips_negate or (len(names) == count and names[number] in data.flips_negate)
            for number in range(count)
        ]
        found.append(torch.tensor(signs, device=device) if any(signs) else None)
    return found[0], found[1]


def _normalised(constants: npt.NDArray[np.float32], normalise: Normalise) -> Tensor:
    """Return constants (C, H, W) normalised by the statistics of their own pixels; a channel of one value becomes 0."""
    values = torch.from_numpy(np.array(constants)).double()
    if normalise is None:
        return values.float()
    low, high = values.amin((1, 2), keepdim=True), values.amax((1, 2), keepdim=True)
    if normalise == "statistics":
        shift, size = values.mean((1, 2), keepdim=True), values.std((1, 2), keepdim=True, correction=0)
    else:
        shift, size = (high + low) / 2.0, (high - low) / 2.0
    return ((values - shift) / torch.where(high > low, size, 1.0)).float()


class Text:
    """Text of training images.

    Args:
        empty: the encoded empty text, N = 1, on the device; dropped captions become it, or zeros, as the spec says.
        seed: of the run.
    """

    def __init__(self, spec: TextSpec, empty: Encoded, seed: int) -> None:
        self._spec, self._seed = spec, seed
        self.dropped = no_text(spec, empty)
        """Encoded text in the place of a dropped caption, N = 1."""

    def context(self, tokens: Tensor, index: Tensor) -> Tensor:
        """Return the context (N, tokens, channels) of stored ``tokens``, of the images ``index`` (N,)."""
        return self._kept(tokens, self.dropped.tokens, index)

    def pooled(self, stored: Tensor, index: Tensor) -> Tensor:
        """Return the pooled text (N, channels) of the same images, dropped where their context is."""
        assert self.dropped.pooled is not None
        return self._kept(stored, self.dropped.pooled, index)

    def _kept(self, stored: Tensor, dropped: Tensor, index: Tensor) -> Tensor:
        if not self._spec.drop:
            return stored
        drops = Draws(self._seed, index, {Stream.TEXT_DROP: 1}).uniform(Stream.TEXT_DROP) < self._spec.drop  # (N, 1)
        return torch.where(drops.view(-1, *[1] * (stored.ndim - 1)), dropped.to(stored.dtype), stored)


def no_text(spec: TextSpec, empty: Encoded) -> Encoded:
    """Return the encoded text that replaces a dropped caption and a missing negative prompt."""
    if spec.drop_to == "empty":
        return empty
    return Encoded(torch.zeros_like(empty.tokens), None if empty.pooled is None else torch.zeros_like(empty.pooled))


def described(pooled: Tensor | None, sizes: Tensor | None) -> Tensor | None:
    """Return pooled text (N, channels) and sizes (N, 6) as one vector, float32; None without them."""
    return None if pooled is None or sizes is None else torch.cat((pooled.float(), sizes.float()), dim=1)


class Prompts:
    """Encoded prompts, which drawn images take in turn, and the text that guidance leads away from.

    Args:
        unet: how the U-Net reads them.
        encoded: the prompts.
        against: the encoded negative prompt, or the result of :func:`no_text`, N = 1.
        size: height and width of the images in pixels; they are drawn as images of this size that were not cropped.
        texts: the prompts in words.
        negative: the negative prompt in words; None is no text.
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
        negative: str | None = None,
    ) -> None:
        self._encoded, self._against = encoded.on(device), against.on(device)
        self.texts, self.negative = tuple(texts), negative
        self._sizes = None
        if unet.pooled_channels is not None:
            self._sizes = torch.tensor([*size, 0.0, 0.0, *size], device=device)

    def __len__(self) -> int:
        return len(self._encoded.tokens)

    def beside(
        self, condition: Condition | None, index: Tensor, dropped: Condition | None = None
    ) -> tuple[Condition, ...]:
        """Return the inputs of images with the prompts ``index`` (N,), and with what guidance leads away from; then the
        latter with a ``dropped`` condition, if there is one.
        """
        mine = index % len(self)
        others = [self._beside(each, self._against, mine * 0) for each in (condition, dropped)]
        return (self._beside(condition, self._encoded, mine), *others[: 1 if dropped is None else 2])

    def _beside(self, condition: Condition | None, text: Encoded, rows: Tensor) -> Condition:
        condition = condition or Condition(torch.empty(0, 0), ())
        pooled = None if text.pooled is None else text.pooled[rows]
        vector = described(pooled, None if self._sizes is None else self._sizes.expand(len(rows), -1))
        others = condition.others if vector is None else (*condition.others, vector)
        return Condition(condition.channels, others, text.tokens[rows])
