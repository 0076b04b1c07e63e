"""EDM's augmentation: each image is transformed, in place and colour, as its condition says, by its index alone."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ddpm_ds.config.spec import UnetSpec
from ddpm_ds.diffusion.augmentation import augmented, coloured
from ddpm_ds.keyed import Stream, integers
from ddpm_ds.unet.layers import augmentation_numbers

Shape = tuple[int, int]
"""Height and width."""


def blobs(x: Tensor, y: Tensor) -> Tensor:
    """A smooth picture without symmetry: its brightness at places, in pixels from the centre."""
    parts = ((5.0, -2.0, 4.0), (-4.0, 3.0, 3.0), (1.0, 6.0, 3.5))
    return sum((torch.exp(-((x - a) ** 2 + (y - b) ** 2) / (2 * r**2)) for a, b, r in parts), torch.zeros(())) - 1.0


def places(shape: Shape) -> tuple[Tensor, Tensor]:
    """Places of the pixels to the right and down, (H, W) float64 each."""
    down, right = (torch.arange(side, dtype=torch.float64) - (side - 1) / 2 for side in shape)
    return right.expand(shape), down[:, None].expand(shape)


def rotation(angle: float) -> Tensor:
    return torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]], dtype=torch.float64)


def expected(condition: list[float], stretch_sign: float, shape: Shape) -> tuple[Tensor, Tensor]:
    """The blobs transformed as a condition says, and which pixels come from inside: the paper's matrices, from the
    first to the last, inverted. A stretch and its inverse along the opposite axis have one condition: which of them is
    the sign.
    """
    mirror, turn, size, cos, sin, along, across, right, down = condition
    scaling = 2 ** (0.2 * size) * torch.eye(2, dtype=torch.float64)
    stretch, axis = stretch_sign * math.hypot(along, across), math.atan2(across, along)
    factors = torch.tensor([2 ** (0.2 * stretch), 2 ** (-0.2 * stretch)], dtype=torch.float64)
    stretching = rotation(axis) @ factors.diag() @ rotation(-axis)
    back = (stretching @ rotation(-math.atan2(sin, cos + 1)) @ scaling).inverse()
    x, y = places(shape)
    height, width = shape
    moved = torch.stack((x - right * width / 8, y - down * height / 8))
    x, y = torch.einsum("ij,jhw->ihw", back, moved)
    inside = torch.maximum(x.abs() - width / 2, y.abs() - height / 2) < -1
    return blobs(-x if mirror else x, -y if turn else y), inside


@pytest.mark.parametrize("shape", [(32, 32), (32, 48), (48, 32)])
def test_every_image_is_transformed_as_its_condition_says(shape: Shape) -> None:
    pictures = blobs(*places(shape)).float().expand(400, 1, *shape)
    images, conditions = augmented(pictures, torch.arange(400), 0, 0.7)
    assert conditions.shape == (400, 9) and conditions.dtype == images.dtype == torch.float32
    assert conditions.abs().max(dim=0).values.min() > 0.9, "every transformation was seen"
    for image, condition in zip(images, conditions.double().tolist(), strict=True):
        errors = []
        for sign in (1.0, -1.0):
            wanted, inside = expected(condition, sign, shape)
            errors.append((image[0] - wanted)[inside].abs().max().item() if inside.any() else 0.0)
        # A line replaces a curve that bends by 1 / 3^2 between pixels half a pixel apart, in two directions; twice
        # that for blobs that overlap.
        assert min(errors) < 2 * 2 * 0.5**2 / 8 / 3**2, condition


def test_transformations_happen_as_often_as_asked_and_a_condition_of_zeros_is_the_image_itself() -> None:
    count = 5_000
    generator = torch.Generator().manual_seed(0)
    pictures = torch.rand((count, 1, 8, 8), generator=generator) * 2 - 1
    images, condition = augmented(pictures, torch.arange(count), 3, 0.12)
    made = condition != 0.0
    shares = made.double().mean(dim=0)
    for number, share in enumerate((0.5, 0.06, *(0.12,) * 7)):
        assert abs(shares[number] - share) < 5 * (share * (1 - share) / count) ** 0.5, number
    for pair in ((3, 4), (5, 6), (7, 8)):
        assert torch.equal(made[:, pair[0]], made[:, pair[1]])
    untouched = ~made.any(dim=1)
    assert 0.5 * 0.94 * 0.88**4 - 0.02 < untouched.double().mean() < 0.5 * 0.94 * 0.88**4 + 0.02
    assert torch.equal(images[untouched], pictures[untouched])
    mirrored = made[:, 0] & ~made[:, 1:].any(dim=1)
    assert torch.equal(images[mirrored], pictures[mirrored].flip(3)), "mirroring keeps pixels as they are"
    normal = condition[:, [2, 7, 8]][made[:, [2, 7, 8]]]
    assert abs(normal.mean()) < 0.1 and abs(normal.std() - 1) < 0.1


def recoloured(image: Tensor, condition: list[float]) -> Tensor:
    """An image (C, H, W) with the colours that a condition says: the matrices of StyleGAN2-ADA, appendix B.3, one after
    the other on its channels, float64.
    """
    brightness, contrast, exchanged, *rest = condition
    image = 2 ** (0.5 * contrast) * (image.double() + 0.2 * brightness)
    if not rest:
        return -image if exchanged else image
    cos, sin, saturation = rest
    grey = torch.full((3, 3), 1 / 3, dtype=torch.float64)  # projects on the axis of greys
    axis = torch.tensor([[0.0, -1.0, 1.0], [1.0, 0.0, -1.0], [-1.0, 1.0, 0.0]], dtype=torch.float64) / 3**0.5
    matrix = torch.eye(3, dtype=torch.float64) - 2 * exchanged * grey
    matrix = torch.linalg.matrix_exp(math.atan2(sin, cos + 1) * axis) @ matrix
    matrix = (grey + (torch.eye(3, dtype=torch.float64) - grey) * 2**saturation) @ matrix
    return torch.einsum("ij,jhw->ihw", matrix, image)


@pytest.mark.parametrize("channels", [1, 3])
def test_every_image_has_the_colours_that_its_condition_says(channels: int) -> None:
    pictures = torch.rand((400, channels, 8, 8), generator=torch.Generator().manual_seed(0)) * 2 - 1
    images, conditions = coloured(pictures, torch.arange(400), 0, 0.6)
    unet = UnetSpec(channels=16, multipliers=(1,), colour_augmentation=0.6)
    assert conditions.shape == (400, augmentation_numbers(unet, channels)) == (400, 6 if channels == 3 else 3)
    assert conditions.dtype == images.dtype == torch.float32
    assert conditions.abs().max(dim=0).values.min() > 0.9, "every change was seen"
    for image, picture, condition in zip(images, pictures, conditions.double().tolist(), strict=True):
        wanted = recoloured(picture, condition)
        # A pixel is a sum of four products of a dozen roundings each, of factors that contrast and saturation raise.
        limit = 50 * 2.0**-24 * (1 + 0.2 * abs(condition[0])) * 2 ** (0.5 * condition[1]) * 2 ** max(0.0, condition[-1])
        assert (image - wanted).abs().max() < limit, condition


@pytest.mark.parametrize("channels", [1, 3])
def test_colours_change_as_often_as_asked_and_those_that_stay_are_exact(channels: int) -> None:
    count = 20_000
    pictures = torch.rand((count, channels, 2, 2), generator=torch.Generator().manual_seed(0)) * 2 - 1
    images, condition = coloured(pictures, torch.arange(count), 3, 0.12)
    made = condition != 0.0
    for number, share in enumerate((0.12, 0.12, 0.06, 0.12, 0.12, 0.12)[: condition.shape[1]]):
        assert abs(made[:, number].double().mean() - share) < 5 * (share * (1 - share) / count) ** 0.5, number
    untouched = ~made.any(dim=1)
    assert torch.equal(images[untouched], pictures[untouched])
    normal = condition[:, [0, 1, -1] if channels == 3 else [0, 1]]
    normal = normal[normal != 0.0]
    assert abs(normal.mean()) < 0.1 and abs(normal.std() - 1) < 0.1


@pytest.mark.parametrize("size", [(8, 8), (9, 9), (32, 32), (8, 21), (17, 10)])
def test_an_image_depends_on_its_index_and_the_seed_alone(size: Shape) -> None:
    generator = torch.Generator().manual_seed(1)
    pictures = (torch.rand((12, 3, *size), generator=generator) * 2 - 1).to(memory_format=torch.channels_last)
    index = torch.arange(10**6, 10**6 + 12)
    for change in (augmented, coloured):
        whole = change(pictures, index, 0, 0.6)
        assert whole[0].is_contiguous(memory_format=torch.channels_last) and whole[0].isfinite().all()
        for part in (1, 4, 5):
            parts = zip(*map(change, pictures.split(part), index.split(part), [0] * 12, [0.6] * 12), strict=True)
            for one, many in zip(whole, parts, strict=True):
                assert torch.equal(one, torch.cat(many))
        assert not torch.equal(change(pictures, index, 1, 0.6)[1], whole[1])


def test_nothing_reads_back_from_the_device() -> None:
    for change, numbers in ((augmented, 9), (coloured, 6)):
        images, condition = change(torch.empty(4, 3, 16, 16, device="meta"), torch.arange(4, device="meta"), 0, 0.12)
        assert images.shape == (4, 3, 16, 16) and condition.shape == (4, numbers)


def test_its_draws_are_no_others() -> None:
    index = torch.arange(1000)
    streams = [Stream.AUGMENTATION + 1, Stream.COLOUR + 1, *Stream]
    drawn = torch.stack([integers(0, stream, index, 2**31) for stream in streams])
    assert len(drawn.unique(dim=0)) == len(streams)


@pytest.mark.gpu
def test_on_cuda_it_neither_synchronises_nor_differs() -> None:
    pictures = blobs(*places((24, 40))).float().expand(16, 3, 24, 40)
    index = torch.arange(16)
    on_cpu = (*augmented(pictures, index, 0, 0.7), *coloured(pictures, index, 0, 0.7))
    pictures, index = pictures.cuda(), index.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        on_cuda = (*augmented(pictures, index, 0, 0.7), *coloured(pictures, index, 0, 0.7))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for one, other in zip(on_cuda, on_cpu, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=0.0, atol=1e-4)
