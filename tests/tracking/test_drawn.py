"""Pictures of fields in colours, and of drawn images beside what they were drawn for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from ddpm_ds.tracking import pictures as pictures_of_drawn
from ddpm_ds.tracking.pictures import GREY, MOST_ROWS, Drawn, coloured, grid


def cells(drawn: Drawn, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, list[str], str]:
    """The first pixel of each cell, (rows, columns, 3), the words below the columns, and the last lines."""
    found: list[Any] = []

    def caught(images: Tensor, title: str, labels: list[str], **how: Any) -> Image.Image:
        columns = how["columns"]
        found[:] = images[:, :, 0, 0].unflatten(0, (-1, columns)), labels[:columns], how["footer"]
        assert labels == labels[:columns] * (len(images) // columns)
        return grid(images, title, labels, **how)

    monkeypatch.setattr(pictures_of_drawn, "grid", caught)
    drawn.picture("two\nlines")
    return found[0], found[1], found[2]


LOW, HIGH = [68, 1, 84], [253, 231, 36]
"""Colours of the lowest value and the highest."""


def test_colours_go_from_the_lowest_value_to_the_highest_and_nan_is_grey() -> None:
    values = torch.tensor([[[-1.0, 10.0, 15.0, 20.0, 99.0, float("nan")]]])
    assert coloured(values, 10.0, 20.0)[0, :, 0].T.tolist() == [LOW, LOW, [32, 144, 140], HIGH, HIGH, [GREY] * 3]
    assert coloured(torch.ones(1, 1, 1), 1.0, 1.0).flatten().tolist() == LOW


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


@pytest.mark.parametrize("count", [3, 40])
def test_a_picture_has_as_many_rows_as_inputs_up_to_a_limit(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    images, given = torch.zeros(count, 1, 8, 8, dtype=torch.uint8), torch.zeros(count, 1, 8, 8)
    found, _, _ = cells(Drawn(images, 1, given), monkeypatch)
    assert found.shape == (min(count, MOST_ROWS), 2, 3)
