"""Grids and PNG files as people look at them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from ddpm_ds.data.pictures import grid, picture, write_png


def test_a_grid_has_the_images_row_by_row_with_white_between_and_after_them() -> None:
    images = torch.arange(5, dtype=torch.uint8)[:, None, None, None].expand(5, 3, 40, 40) * 10
    pixels = np.array(grid(images))
    assert pixels.shape == (2 * 44, 3 * 44, 3)  # two rows of three, 2 pixels around each
    for number in range(5):
        row, column = divmod(number, 3)
        cell = pixels[row * 44 : (row + 1) * 44, column * 44 : (column + 1) * 44]
        assert (cell[2:-2, 2:-2] == 10 * number).all()
        assert (cell[:2] == 255).all() and (cell[:, -2:] == 255).all()
    assert (pixels[44:, 88:] == 255).all()


def test_small_images_are_enlarged_by_a_whole_factor_and_others_are_left_alone() -> None:
    small = torch.tensor([[0, 100], [200, 50]], dtype=torch.uint8).view(1, 1, 2, 2)
    pixels = np.array(grid(small))
    assert pixels.shape == (36, 36)
    assert (pixels[2:18, 18:34] == 100).all() and (pixels[18:34, 2:18] == 200).all()
    assert np.array(grid(torch.zeros(4, 1, 64, 64, dtype=torch.uint8), columns=4)).shape == (68, 4 * 68)


def test_a_picture_is_written_whole_and_reads_back_the_same(tmp_path: Path) -> None:
    image = torch.randint(0, 256, (3, 9, 7), dtype=torch.uint8)
    write_png(picture(image), tmp_path / "one.png")
    assert np.array_equal(np.array(Image.open(tmp_path / "one.png")), image.permute(1, 2, 0).numpy())
    assert [path.name for path in tmp_path.iterdir()] == ["one.png"]
