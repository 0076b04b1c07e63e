"""Grids, animations and PNG files; fields in colours, and drawn images beside their inputs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageSequence
from torch import Tensor

from ddpm_ds.diffusion.spec import DiffusionSpec, SamplerSpec
from ddpm_ds.tracking import pictures
from ddpm_ds.tracking.pictures import GREY, MOST_ROWS, Drawn, coloured, grid, grid_title, write_animation, write_png

LOW, HIGH = [68, 1, 84], [253, 231, 36]
"""Colours of the lowest value and the highest."""


def test_a_grid_has_the_images_row_by_row_with_thin_grey_between_and_after_them() -> None:
    images = torch.arange(5, dtype=torch.uint8)[:, None, None, None].expand(5, 3, 200, 200) * 10
    pixels = np.array(grid(images))
    assert pixels.shape == (2 + 2 * 202, 2 + 3 * 202, 3)  # two rows of three, 2 pixels around each
    tiles = pixels[2:, 2:].reshape(2, 202, 3, 202, 3)
    for number in range(5):
        row, column = divmod(number, 3)
        assert (tiles[row, :200, column, :200] == 10 * number).all()
    assert (tiles[:, 200:] == GREY).all() and (tiles[..., 200:, :] == GREY).all() and (tiles[1, :, 2] == GREY).all()


@pytest.mark.parametrize(
    ("size", "count", "columns", "factor"),
    [
        *(((2, 2), 1, 1, 256), ((8, 8), 64, 8, 8), ((32, 32), 64, 8, 2), ((300, 300), 4, 2, 1)),
        *(((8, 32), 16, 2, 8), ((32, 8), 16, 8, 8), ((4, 1000), 16, 1, 1), ((1000, 4), 16, 16, 1)),
    ],
)
def test_a_grid_is_nearly_square_and_its_images_are_enlarged_by_a_whole_factor_to_512_pixels(
    size: tuple[int, int], count: int, columns: int, factor: int
) -> None:
    images = torch.randint(0, 256, (count, 1, *size), dtype=torch.uint8)
    pixels, (height, width) = np.array(grid(images)), (side * factor + 2 for side in size)
    assert max(pixels.shape) >= 512 and pixels.shape == (2 + height * count // columns, 2 + width * columns)
    assert np.array_equal(pixels[2:height:factor, 2:width:factor], images[0, 0])
    assert np.array_equal(pixels[-height + factor - 1 : -2 : factor, -width + factor - 1 : -2 : factor], images[-1, 0])


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
    square, squash = (
        np.array(grid(images[:, :, :16].repeat(6, 1, 1, 1), "", [label] * 24)) for label in ("square", "squash")
    )
    assert not np.array_equal(square, squash), "labels are smaller rather than cut"


def test_the_title_says_which_run_drew_what() -> None:
    made = SamplerSpec(kind="ddim")
    expected = "digits, 128,000 images seen\nddim in 50 steps, averaged weights"
    assert grid_title("digits", 128_000, made, DiffusionSpec(), "ema") == expected
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
    assert not list(tmp_path.glob(".*"))


def test_colours_go_from_the_lowest_value_to_the_highest_and_nan_is_grey() -> None:
    values = torch.tensor([[[-1.0, 10.0, 15.0, 20.0, 99.0, float("nan")]]])
    assert coloured(values, 10.0, 20.0)[0, :, 0].T.tolist() == [LOW, LOW, [32, 144, 140], HIGH, HIGH, [GREY] * 3]
    assert coloured(torch.ones(1, 1, 1), 1.0, 1.0).flatten().tolist() == LOW


def cells(drawn: Drawn, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, list[str], str]:
    """The first pixel of each cell, (rows, columns, 3), the words below the columns, and the last lines."""
    found: list[Any] = []

    def caught(images: Tensor, title: str, labels: list[str], **how: Any) -> Image.Image:
        columns = how["columns"]
        found[:] = images[:, :, 0, 0].unflatten(0, (-1, columns)), labels[:columns], how["footer"]
        assert labels == labels[:columns] * (len(images) // columns)
        return grid(images, title, labels, **how)

    monkeypatch.setattr(pictures, "grid", caught)
    drawn.picture("two\nlines")
    return found[0], found[1], found[2]


def test_a_row_has_input_members_mean_spread_and_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two inputs with two members each of pictures of one value."""
    values = torch.tensor([10, 30, 100, 100], dtype=torch.uint8)
    images = values[:, None, None, None].expand(4, 3, 8, 8).contiguous()
    given, truths = (torch.tensor(each)[:, None, None, None].expand(2, 3, 8, 8) for each in ([5.0, 50.0], [20.0, 90.0]))
    found, words, _ = cells(Drawn(images, 2, given, truths), monkeypatch)
    assert words == ["input", "member 1", "member 2", "mean", "spread", "truth"]
    assert found[:, [0, 1, 2, 3, 5], 0].tolist() == [[5, 10, 30, 20, 20], [50, 100, 100, 100, 90]]
    assert found[:, 4].tolist() == [HIGH, LOW]  # spread of 14 and of 0


def test_fields_share_a_range_of_colours_and_inputs_have_one_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    images = torch.tensor([[250.0, 1.0], [300.0, 2.0]])[:, :, None, None].expand(2, 2, 8, 8)
    truths, given = images.flip(0), torch.tensor([[1e4], [2e4]])[:, :, None, None].expand(2, 1, 8, 8)
    drawn = Drawn(images, 1, given, truths, ("t2m", "u"), ("coarse",))
    found, words, footer = cells(drawn, monkeypatch)
    assert words == ["input", "drawn", "truth"] and found.tolist() == [[LOW, LOW, HIGH], [HIGH, HIGH, LOW]]
    assert footer.splitlines() == ["t2m: 250 to 300", "input coarse: 1e+04 to 2e+04"]
    many = Drawn(torch.zeros(40, 1, 8, 8, dtype=torch.uint8), 1, torch.zeros(40, 1, 8, 8))
    assert cells(many, monkeypatch)[0].shape == (MOST_ROWS, 2, 3)
