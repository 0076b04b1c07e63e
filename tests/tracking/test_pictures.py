"""Grids and PNG files as people look at them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageSequence

from ddpm_ds.diffusion.spec import DiffusionSpec, SamplerSpec
from ddpm_ds.tracking.pictures import GREY, grid, grid_title, picture, write_animation, write_png


def test_a_grid_has_the_images_row_by_row_with_thin_grey_between_and_after_them() -> None:
    images = torch.arange(5, dtype=torch.uint8)[:, None, None, None].expand(5, 3, 200, 200) * 10
    pixels = np.array(grid(images))
    assert pixels.shape == (2 + 2 * 202, 2 + 3 * 202, 3)  # two rows of three, 2 pixels around each
    tiles = pixels[2:, 2:].reshape(2, 202, 3, 202, 3)
    for number in range(5):
        row, column = divmod(number, 3)
        assert (tiles[row, :200, column, :200] == 10 * number).all()
    assert (tiles[:, 200:] == GREY).all() and (tiles[..., 200:, :] == GREY).all() and (tiles[1, :, 2] == GREY).all()


@pytest.mark.parametrize(("size", "count", "factor"), [(2, 1, 256), (8, 64, 8), (32, 64, 2), (64, 64, 1), (300, 4, 1)])
def test_images_are_enlarged_by_a_whole_factor_until_the_grid_has_512_pixels(
    size: int, count: int, factor: int
) -> None:
    images = torch.randint(0, 256, (count, 1, size, size), dtype=torch.uint8)
    pixels, cell = np.array(grid(images)), size * factor + 2
    assert pixels.shape[0] >= 512 and pixels.shape[1] == 2 + cell * round(count**0.5)
    assert np.array_equal(pixels[2:cell:factor, 2:cell:factor], images[0, 0])
    assert np.array_equal(pixels[-cell + factor - 1 : -2 : factor, -cell + factor - 1 : -2 : factor], images[-1, 0])


@pytest.mark.parametrize(("height", "width", "across"), [(8, 32, 2), (32, 8, 8), (4, 1000, 1), (1000, 4, 16)])
def test_a_grid_of_rectangles_is_nearly_square(height: int, width: int, across: int) -> None:
    drawn = grid(
        torch.zeros((16, 1, height, width), dtype=torch.uint8), "a title", ["label"] * 16 if across > 1 else []
    )
    factor = -(-512 // max(across * width, 16 // across * height))
    assert drawn.size[0] == 2 + across * (factor * width + 2)


def test_title_and_labels_stand_around_the_images_and_cover_none() -> None:
    images = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8)
    labels = ["cat", "a" * 100, "dog", "cat"]
    plain, labelled = np.array(grid(images)), np.array(grid(images, "", labels))
    titled = np.array(grid(images, "a run\n" + "w" * 500, labels))
    top = titled.shape[0] - labelled.shape[0]
    assert np.array_equal(titled[top + 2 :], labelled[2:]) and titled.shape[1] == plain.shape[1]
    assert all((line != GREY).any() for line in np.split(titled[:top], 2)), "two lines"
    cells = labelled[2:, 2:].reshape(2, -1, 2, 258, 3)
    assert np.array_equal(cells[:, :256, :, :256], plain[2:, 2:].reshape(2, 258, 2, 258, 3)[:, :256, :, :256])
    (cat, long), (dog, again) = cells[:, 256:].transpose(0, 2, 1, 3, 4)
    assert np.array_equal(cat, again) and not np.array_equal(cat, dog)
    assert all((word != GREY).any() for word in (cat, dog, long)) and (long[:, 256:] == GREY).all()


def test_labels_are_smaller_rather_than_cut() -> None:
    images = torch.zeros((24, 3, 16, 16), dtype=torch.uint8)
    square, squash, short = (
        np.array(grid(images, "", [each] * 24)) for each in ("a yellow square", "a yellow squash", "a")
    )
    assert not np.array_equal(square, squash), "they differ at the end alone"
    assert square.shape[0] < short.shape[0], "short ones are as large as before"


def test_the_title_says_which_run_drew_what() -> None:
    made = SamplerSpec(kind="ddim")
    assert grid_title("digits", 128_000, made, DiffusionSpec(), "ema") == (
        "digits, 128,000 images seen\nddim in 50 steps, averaged weights"
    )
    few = DiffusionSpec(timesteps=20)
    assert grid_title("hub", None, made, few, "export") == "hub\nddim in 20 steps, exported weights"


def test_an_animation_goes_from_the_first_picture_to_the_last_in_few_frames(tmp_path: Path) -> None:
    files = [tmp_path / f"{number:03}.png" for number in range(100)]
    for number, file in enumerate(files):
        size = (900, 450) if number else (30, 30)  # a run that was resumed with another number of samples
        write_png(Image.new("RGB", size, (2 * number, 0, 0)), file)
    write_animation(files, tmp_path / "progress.gif")
    with Image.open(tmp_path / "progress.gif") as gif:
        assert gif.size == (720, 360) and gif.info["loop"] == 0
        reds = [np.asarray(frame.convert("RGB"))[180, 360].tolist() for frame in ImageSequence.Iterator(gif)]
    assert len(reds) == 32 and reds[0] == [0, 0, 0] and reds[-1] == [198, 0, 0] and reds == sorted(reds)
    write_animation(files[-1:], tmp_path / "progress.gif")
    with Image.open(tmp_path / "progress.gif") as gif:
        assert len(list(ImageSequence.Iterator(gif))) == 1
    assert not list(tmp_path.glob(".*"))


def test_a_picture_is_written_whole_and_reads_back_the_same(tmp_path: Path) -> None:
    image = torch.randint(0, 256, (3, 9, 7), dtype=torch.uint8)
    write_png(picture(image), tmp_path / "one.png")
    assert np.array_equal(np.array(Image.open(tmp_path / "one.png")), image.permute(1, 2, 0).numpy())
    assert [path.name for path in tmp_path.iterdir()] == ["one.png"]
