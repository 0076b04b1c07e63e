"""Conditions of a U-Net: by hand, by the image alone, and moved as the image is; and its text."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ddpm_ds.config.spec import RunSpec
from ddpm_ds.data.loader import MicroBatch
from ddpm_ds.data.spec import TextSpec
from ddpm_ds.data.statistics import Statistics
from ddpm_ds.data.text import Encoded
from ddpm_ds.diffusion.condition import LEVEL_SCALE, Conditions, Scale, Text
from ddpm_ds.ground.keyed import Draws, Stream, normal
from ddpm_ds.training.objective import Denoising, Noised, fields_read
from tests.launching import tiny_spec, tiny_text_spec

CPU = torch.device("cpu")
COUNT = 64
ABOUT = {
    "images": Statistics(mean=(3.0, -1.0), std=(2.0, 0.5), low=(-5.0, -3.0), high=(5.0, 1.0)),
    "condition": Statistics(mean=(10.0,), std=(4.0,), low=(2.0,), high=(18.0,)),
}


def spec_of(condition: dict[str, Any] | None, fields: bool = True, **sections: dict[str, Any]) -> RunSpec:
    """Fields of two channels, or pictures, of 8x16 pixels, each with a condition."""
    data = {"image_size": [8, 16], "horizontal_flips": False, "condition": condition, "channels": 2 if fields else 3}
    data |= {"source": "arrays", "path": "fields.npz"}
    data |= {"values": "float32", "normalise": "statistics"} if fields else {}
    unet = {"attention_resolutions": [], "attention_levels": [1], "classes": None, **sections.pop("unet", {})}
    sections = {"sampler": {"clip": "none"}, "train": {"label_drop": 0.0}, **sections}
    return tiny_spec(data={**data, **sections.pop("data", {})}, unet=unet, **sections)


def batch_of(spec: RunSpec, coarse: tuple[int, int] = (8, 16), count: int = COUNT, first: int = 0) -> MicroBatch:
    """Random images with what a spec asks for; image i is the same in each batch that has it."""
    generator, data = torch.Generator().manual_seed(1), spec.data
    shape = (first + count, data.channels, *data.stored_size)
    images = torch.randn(shape, generator=generator)
    if not data.are_fields:
        images = (images * 60 + 128).clamp(0, 255).to(torch.uint8)
    whole = MicroBatch(
        images=images,
        labels=torch.zeros(first + count, dtype=torch.int64),
        index=torch.arange(first + count),
        condition=5 + 3 * torch.randn(first + count, 1, *coarse, generator=generator),
        mask=(torch.rand(first + count, 1, *data.stored_size, generator=generator) < 0.5).to(torch.uint8),
        vector=torch.randn(first + count, 2, generator=generator),
    )
    read = fields_read(spec, first=True, last=True, text=False)
    unused: dict[str, Any] = dict.fromkeys({"condition", "mask", "vector"} - read)
    return whole._replace(**unused).each(lambda tensor: tensor[first:])


def inputs_of(spec: RunSpec, batch: MicroBatch, constants: Any = None) -> tuple[Noised, Tensor, tuple[Tensor, ...]]:
    """A prepared micro-batch, its condition's channels, and the U-Net's level and vector."""
    objective = Denoising(spec, CPU, ABOUT, constants)
    prepared = objective.prepare(batch)
    x_t, _, *others = objective.inputs(prepared)
    assert x_t.shape[1] == spec.data.channels + spec.data.interface.condition_channels
    assert others[-1].shape[1:] == (spec.data.interface.numbers,) if spec.data.interface.numbers else True
    return prepared, x_t[:, spec.data.channels :], tuple(others)


STORED: dict[str, Any] = {"kind": "stored", "channels": 1}


def test_fields_and_their_condition_are_normalised_by_statistics_of_their_own_and_back() -> None:
    batch = batch_of(spec_of(STORED))
    prepared, condition, _ = inputs_of(spec_of({**STORED, "normalise": "range"}), batch)
    expected = (batch.images - torch.tensor([3.0, -1.0])[:, None, None]) / torch.tensor([2.0, 0.5])[:, None, None]
    torch.testing.assert_close(prepared.x0, expected)
    assert batch.condition is not None
    torch.testing.assert_close(condition, (batch.condition - 10.0) / 8.0)
    for how in ("statistics", "range"):
        scale = Scale.of(how, ABOUT["images"], CPU)
        torch.testing.assert_close(scale.to_physical(scale.to_unit(batch.images)), batch.images)
    pixels = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16)
    pictures = Scale.of(None, None, CPU, pictures=True)
    assert torch.equal(pictures.to_unit(pixels), pixels / 127.5 - 1.0)
    assert torch.equal(pictures.to_physical(pictures.to_unit(pixels)).round(), pixels.float())


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
def test_a_coarse_condition_is_brought_to_the_size_of_the_image(mode: str) -> None:
    spec = spec_of({**STORED, "resize": mode})
    batch = batch_of(spec, (4, 4))
    _, condition, _ = inputs_of(spec, batch)
    assert batch.condition is not None and condition.shape == (COUNT, 1, 8, 16)
    if mode == "nearest":
        assert torch.equal(condition, batch.condition.repeat_interleave(2, 2).repeat_interleave(4, 3))
        return
    ramp = torch.arange(4.0).expand(COUNT, 1, 4, 4)  # PyTorch's cubic, of -0.75, bends a line a little
    _, condition, _ = inputs_of(spec, batch._replace(condition=ramp))
    line = (torch.arange(16) + 0.5) / 4 - 0.5
    away = (condition[0, 0, 0, 6:10] - line[6:10]).abs().max()
    assert away < 1e-6 if mode == "bilinear" else 0.03 < away < 0.05


def test_a_finer_condition_is_smoothed_as_it_is_made_smaller() -> None:
    spec = spec_of(STORED)
    checkers = (torch.arange(32)[:, None] + torch.arange(64)).remainder(2).float().expand(COUNT, 1, 32, 64)
    _, condition, _ = inputs_of(spec, batch_of(spec)._replace(condition=checkers.clone()))
    torch.testing.assert_close(condition[:, :, 2:-2, 2:-2], torch.full((COUNT, 1, 4, 12), 0.5), rtol=0, atol=0.02)


def test_reduced_is_the_mean_of_blocks_enlarged_and_noised_to_a_level_that_the_unet_reads() -> None:
    plain = {"kind": "reduced", "factor": 4, "resize": "nearest"}
    batch = batch_of(spec_of(plain, fields=False))
    prepared, condition, others = inputs_of(spec_of(plain, fields=False), batch)
    blocks = prepared.x0.unflatten(3, (4, 4)).unflatten(2, (2, 4)).mean((3, 5))  # (N, C, 2, 4)
    torch.testing.assert_close(condition, blocks.repeat_interleave(4, 2).repeat_interleave(4, 3))
    assert others == ()
    spec = spec_of({**plain, "noise": 0.5}, fields=False)
    prepared, noised, (level,) = inputs_of(spec, batch)
    index = batch.index
    expected = Draws(3, index, {Stream.CONDITION_LEVEL: 1}).uniform(Stream.CONDITION_LEVEL)[:, 0] * 0.5
    torch.testing.assert_close(level, LEVEL_SCALE * expected)
    each, drawn = expected[:, None, None, None], normal(3, Stream.CONDITION_NOISE, index, 24).view_as(blocks)
    mixed = (1 - each**2).sqrt() * blocks + each * drawn
    torch.testing.assert_close(noised, mixed.repeat_interleave(4, 2).repeat_interleave(4, 3))
    objective = Denoising(spec, CPU)
    held_out = objective.inputs(objective.held_out(batch, 5, Stream.HELD_OUT + 5))
    torch.testing.assert_close(held_out[0][:, 3:], condition)
    assert (held_out[2] == 0.0).all(), "samples have level 0"


def test_grey_is_the_luma() -> None:
    spec = spec_of({"kind": "grey"}, fields=False)
    prepared, condition, _ = inputs_of(spec, batch_of(spec))
    red, green, blue = prepared.x0.unbind(1)
    torch.testing.assert_close(condition[:, 0], 0.299 * red + 0.587 * green + 0.114 * blue)


def test_a_rectangle_is_cut_out_anywhere_and_marked() -> None:
    spec = spec_of({"kind": "cut_out", "cut": [0.25, 0.5]}, fields=False)
    batch = batch_of(spec, count=2000)
    prepared, condition, _ = inputs_of(spec, batch)
    hole = condition[:, 3:]
    assert torch.equal(condition[:, :3], torch.where(hole == 1.0, 0.0, prepared.x0))
    rows, columns = hole[:, 0].amax(2), hole[:, 0].amax(1)  # (N, H), (N, W)
    assert torch.equal(hole[:, 0], rows[:, :, None] * columns[:, None, :]), "it is a rectangle"
    for inside, (low, high) in ((rows, (2, 4)), (columns, (4, 8))):
        assert (inside.diff(dim=1) == 1.0).sum(1).add(inside[:, 0]).eq(1.0).all(), "in one piece"
        sides = inside.sum(1)
        assert sides.min() == low and sides.max() == high
        assert inside.any(0).all(), "every row and column is cut out sometimes"


def test_constants_and_a_grid_follow_and_are_normalised_over_their_own_pixels() -> None:
    condition = {**STORED, "normalise": "statistics", "constants": ["height", "sea"], "constant_channels": 2}
    spec = spec_of({**condition, "grid_channels": 8})
    constants = np.random.default_rng(0).normal(500.0, 200.0, (2, 8, 16)).astype(np.float32)
    constants[1] = 1.0
    _, found, _ = inputs_of(spec, batch_of(spec), constants)
    assert found.shape == (COUNT, 1 + 2 + 8, 8, 16) and torch.equal(found[0, 1:], found[-1, 1:])
    height, sea, *grid = found[0, 1:].double()
    expected_height = torch.from_numpy((constants[0] - constants[0].mean()) / constants[0].std()).double()
    torch.testing.assert_close(height, expected_height, rtol=1e-5, atol=1e-5)
    assert (sea == 0.0).all(), "a constant of one value says nothing"
    row, column = 3, 11
    for periods, four in enumerate((grid[:4], grid[4:]), start=1):
        down, right = (2 * math.pi * periods * (place + 0.5) / side for place, side in ((row, 8), (column, 16)))
        expected = [math.sin(down), math.cos(down), math.sin(right), math.cos(right)]
        assert [wave[row, column].item() for wave in four] == pytest.approx(expected, abs=1e-6)


def test_image_condition_mask_and_constants_are_cropped_and_mirrored_together() -> None:
    """Each value is the number of its place, so they agree if all of them were moved alike."""
    condition = {**STORED, "constants": ["place"], "constant_channels": 1}
    spec = spec_of(condition, data={"crop_from": [12, 20], "horizontal_flips": True, "normalise": None, "mask": "nan"})
    places = torch.arange(240.0).reshape(1, 1, 12, 20)
    batch = batch_of(spec)._replace(
        images=places.repeat(COUNT, 2, 1, 1),
        condition=places.repeat(COUNT, 1, 1, 1),
        mask=(places.to(torch.int64) % 3 > 0).to(torch.uint8).repeat(COUNT, 1, 1, 1),
    )
    prepared, found, _ = inputs_of(spec, batch, places[0].numpy())
    assert torch.equal(found, prepared.x0), "the condition and the constant are where the image is"
    assert prepared.mask is not None and torch.equal(prepared.mask[:, 0], (prepared.x0[:, 0] % 3 > 0).to(torch.uint8))
    corners = {tuple(image[0, 0, [0, -1]].tolist()) for image in prepared.x0}
    assert len(corners) > 20 and {left < right for left, right in corners} == {True, False}
    objective = Denoising(spec, CPU, ABOUT, places[0].numpy())
    x_t, *_ = objective.inputs(objective.held_out(batch, 0, Stream.HELD_OUT))
    assert torch.equal(x_t[:, 2:], places[:, :, 2:10, 2:18].expand(COUNT, 2, -1, -1)), "held-out ones are the centres"


def test_components_change_their_sign_in_a_mirrored_image() -> None:
    data = {"horizontal_flips": True, "flips_negate": ["wind", 2], "variables": ["heat", "wind"], "normalise": None}
    spec = spec_of(STORED, data=data)
    batch = batch_of(spec)._replace(images=torch.ones(COUNT, 2, 8, 16), condition=torch.ones(COUNT, 1, 8, 16))
    prepared, condition, _ = inputs_of(spec, batch)
    signs = prepared.x0[:, 1, 0, 0]
    assert (prepared.x0[:, 0] == 1.0).all() and 20 < (signs == -1.0).sum() < 44
    assert torch.equal(condition[:, 0, 0, 0], signs)
    assert torch.equal(signs < 0, Draws(3, batch.index, {Stream.FLIP: 1}).uniform(Stream.FLIP)[:, 0] >= 0.5)


def test_a_dropped_condition_is_zeros_and_a_flag_after_the_other_numbers() -> None:
    condition = {**STORED, "grid_channels": 4, "vector": ["hours"], "vector_size": 2, "drop": 0.4}
    spec = spec_of(condition, False)
    batch = batch_of(spec)
    _, found, (vector,) = inputs_of(spec, batch)
    flag = vector[:, 2]
    assert 15 < flag.sum() < 36 and set(flag.tolist()) == {0.0, 1.0}
    assert batch.vector is not None
    assert torch.equal(vector[:, :2], torch.where(flag[:, None] == 1.0, 0.0, batch.vector))
    assert torch.equal((found == 0.0).flatten(1).all(1), flag == 1.0)
    objective = Denoising(spec, CPU, ABOUT)
    *_, quiet = objective.inputs(objective.held_out(batch, 0, Stream.HELD_OUT))
    assert torch.equal(quiet[:, :-1], batch.vector)
    assert (quiet[:, -1] == 0.0).all(), "not dropped"


@pytest.mark.parametrize("kind", ["reduced", "cut_out"])
def test_a_made_condition_depends_on_the_images_index_and_the_seed_alone(kind: str) -> None:
    noise = {"noise": 0.7} if kind == "reduced" else {}
    spec = spec_of({"kind": kind, "drop": 0.3, **noise}, fields=False, data={"horizontal_flips": True})
    _, whole, others = inputs_of(spec, batch_of(spec))
    _, part, others_of_part = inputs_of(spec, batch_of(spec, count=COUNT - 40, first=40))
    assert torch.equal(whole[40:], part)
    assert all(torch.equal(one[40:], other) for one, other in zip(others, others_of_part, strict=True))
    if kind == "reduced":
        level, flag = others
        assert torch.equal(level == 0.0, flag[:, 0] == 1.0), "a dropped condition has no level"
    other = spec.model_copy(update={"train": spec.train.model_copy(update={"seed": 4})})
    assert not torch.equal(inputs_of(other, batch_of(spec))[1], whole)


def test_each_rank_reads_what_it_uses() -> None:
    spec = spec_of({**STORED, "vector": ["hours"], "vector_size": 2}, data={"mask": "nan"})
    assert fields_read(spec, first=True, last=False, text=False) == {"images", "condition", "vector"}
    assert fields_read(spec, first=False, last=True, text=False) == {"images", "mask"}
    assert fields_read(spec, first=True, last=True, text=False) == {"images", "condition", "vector", "mask"}
    assert fields_read(tiny_spec(), first=True, last=True, text=False) == {"images"}


def test_nothing_of_a_condition_waits_for_the_device() -> None:
    spec = spec_of({"kind": "cut_out", "drop": 0.3, "grid_channels": 4}, fields=False, data={"horizontal_flips": True})
    objective = Denoising(spec, torch.device("meta"))  # whose tensors have no values to read
    batch = batch_of(spec).each(lambda tensor: tensor.to("meta"))
    x_t, *_ = objective.inputs(objective.prepare(batch))
    assert x_t.shape == (COUNT, 3 + 4 + 4, 8, 16)


def latent_spec(condition: dict[str, Any]) -> RunSpec:
    """A U-Net on latents with captions and pooled text."""
    data = {"autoencoder": "vae", "channels": 4, "mask": "alpha", "horizontal_flips": True, "image_size": [4, 6]}
    data |= {"text": {"encoders": "x", "drop": 0.1}, "condition": condition}
    return tiny_text_spec(data=data, sampler={"clip": "none"})


@pytest.mark.parametrize("kind", ["stored", "cut_out"])
def test_one_draw_drops_texts_and_conditions_of_latents_and_there_is_no_flag(kind: str) -> None:
    """InstructPix2Pix: text where U < 2 p, the condition where p <= U < 3 p."""
    count, p = 3000, 0.05
    spec = latent_spec({"kind": kind, "drop": 2 * p, **({"path": "second"} if kind == "stored" else {})})
    channels = spec.data.interface.condition_channels
    assert channels == (4 if kind == "stored" else 5) and spec.data.interface.numbers == 0
    objective, index = Denoising(spec, CPU, empty=EMPTY), torch.arange(count)
    images, ones = torch.randn(count, 4, 4, 6).half(), torch.ones(count, channels, 4, 6).half()
    batch = MicroBatch(images, index, index, condition=ones, text=torch.ones(count, 3, 4).half())
    prepared, context = objective.prepare(batch), objective.context(batch)
    x_t, *_ = objective.inputs(prepared)
    assert context is not None and torch.equal(prepared.x0, images.float()), "as it was read"
    drawn = Draws(spec.train.seed, index, {Stream.TEXT_DROP: 1}).uniform(Stream.TEXT_DROP)[:, 0].double()
    assert torch.equal((context == 7.0).all(dim=(1, 2)), drawn < 2 * p)
    dropped = (x_t[:, 4:] == 0.0).all(dim=(1, 2, 3))
    assert torch.equal(dropped, (p <= drawn) & (drawn < 3 * p)) and dropped.sum() > 200
    assert torch.equal(x_t[~dropped, 4:], torch.ones_like(x_t[~dropped, 4:])), "neither moved nor scaled"
    conditions = Conditions(spec.data, CPU)
    at_rest = conditions.at_rest({"condition": ones}, index, Scale())
    without = conditions.dropped(at_rest)
    assert torch.equal(at_rest.channels, ones.float()) and at_rest.others == ()
    assert without is not None and not without.channels.any() and without.others == ()
    assert fields_read(spec, first=True, last=False, text=False) >= {"images", "condition"}
    assert fields_read(spec, first=False, last=True, text=False) == {"images", "mask"}


# Text


EMPTY = Encoded(torch.full((1, 3, 4), 7.0), torch.full((1, 2), 7.0))


@pytest.mark.parametrize(("to", "value"), [("empty", 7.0), ("zeros", 0.0)])
def test_a_share_of_captions_is_dropped_with_their_pooled_text(to: str, value: float) -> None:
    count, drop = 4000, 0.3
    text = Text(TextSpec.model_validate({"encoders": "x", "drop": drop, "drop_to": to}), EMPTY, seed=5)
    index, ones = torch.arange(count), torch.ones(count, 3, 4)
    context = text.context(ones, index)
    dropped = (context == value).all(dim=(1, 2))
    assert torch.equal(context[~dropped], ones[~dropped])
    assert torch.equal((text.pooled(torch.ones(count, 2), index) == value).all(dim=1), dropped)
    deviations = (dropped.sum().item() - count * drop) / math.sqrt(count * drop * (1 - drop))
    assert abs(deviations) < 5.0, "which a share of 0.3 exceeds in one of two million draws"
    assert torch.equal(text.context(ones[:7], index[7:14]), context[7:14]), "a function of the index alone"
