"""Captions are dropped by key, their pooled text with them, and 8 bits are widened by their scale."""

from __future__ import annotations

import math

import pytest
import torch

from ddpm_ds.config.text import TextSpec
from ddpm_ds.data.text import Encoded
from ddpm_ds.diffusion.condition import Text

EMPTY = Encoded(torch.full((1, 3, 4), 7.0), torch.full((1, 2), 7.0))


@pytest.mark.parametrize(("to", "value"), [("empty", 7.0), ("zeros", 0.0)])
def test_a_share_of_captions_is_dropped_with_their_pooled_text(to: str, value: float) -> None:
    count, drop = 4000, 0.3
    text = Text(TextSpec.model_validate({"encoders": "x", "drop": drop, "drop_to": to}), EMPTY, seed=5)
    index, ones = torch.arange(count), torch.ones(count, 3, 4)
    context = text.context(ones, None, index)
    dropped = (context == value).all(dim=(1, 2))
    assert torch.equal(context[~dropped], ones[~dropped])
    assert torch.equal((text.pooled(torch.ones(count, 2), index) == value).all(dim=1), dropped)
    deviations = (dropped.sum().item() - count * drop) / math.sqrt(count * drop * (1 - drop))
    assert abs(deviations) < 5.0, "which a share of 0.3 exceeds in one of two million draws"
    assert torch.equal(text.context(ones[:7], None, index[7:14]), context[7:14]), "a function of the index alone"


def test_tokens_in_8_bits_are_multiplied_by_their_scale() -> None:
    text = Text(TextSpec(encoders="x", drop=0.0), EMPTY, seed=0)
    tokens, scale = torch.full((2, 3, 4), -5, dtype=torch.int8), torch.tensor([[1.0, 2.0, 0.5]] * 2)
    assert torch.equal(text.context(tokens, scale, torch.arange(2)), -5.0 * scale[:, :, None].expand(2, 3, 4))
