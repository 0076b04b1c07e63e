"""AdamW with moments of 8 bits, against one of a single parameter; real ranks are on the ladder."""

from __future__ import annotations

import functools
import itertools
import math
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from rivals.measure import HostCost
from torch import Tensor, nn

from ddpm_ds.checkpoint.manifest import BLOCK
from ddpm_ds.checkpoint.reader import SMALLEST, Code
from ddpm_ds.pipeline import adam8bit
from ddpm_ds.pipeline.adam8bit import Adam8bit
from ddpm_ds.pipeline.deepspeed_insides import OwnedPiece
from ddpm_ds.planning.costs import EIGHT_BIT_UPDATE
from ddpm_ds.unet.layers import parameter_shapes
from tests.pipeline.ladder_worker import decoded
from tests.planning.small import EIGHT_BIT as PLANNED
from tests.planning.small import small_job

SETTINGS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
STEPS = 4


@functools.cache
def table_of(signed: bool) -> Tensor:
    """The paper's dynamic tree: the larger the power of ten, the more numbers."""
    numbers = [0.0, 1.0]
    for power in range(7):
        edges = torch.linspace(0.1, 1, 2**power * (2 - signed) + 1)
        middles = 10.0 ** (power - 6) * (edges[:-1] + edges[1:]).double() / 2
        numbers += [*middles.tolist(), *((-middles).tolist() if signed else ())]
    return torch.tensor(sorted(numbers))


def rounded(values: Tensor, signed: bool) -> Tensor:
    """One block after rounding, each element by looking at the whole table."""
    largest = max(values.max(), values.min(), key=abs)  # the positive one of two
    if abs(largest) < SMALLEST:
        return torch.zeros_like(values)
    numbers = Code(signed)._numbers
    found = ((values / largest)[:, None] > (numbers[1:] + numbers[:-1]) / 2).sum(1)
    if not signed:
        found[(found == 0) & (values > 0)] = 1
    return numbers[found] * largest


class Reference:
    """AdamW of one parameter's elements from ``first`` on."""

    def __init__(self, weights: Tensor, first: int, rounds: bool) -> None:
        self.weights, self.steps = weights.clone(), 0
        self.wide = torch.zeros(2, -(-len(weights) // BLOCK) * BLOCK)  # a CPU rounds the end of odd tensors otherwise
        self.moments = self.wide[:, : len(weights)]
        ends = [0, *range(BLOCK - first % BLOCK, len(weights), BLOCK), len(weights)]
        self.blocks = list(itertools.pairwise(ends)) if rounds else []

    def step(self, gradient: Tensor, settings: dict[str, Any]) -> None:
        (beta1, beta2), (first, second) = settings["betas"], self.moments
        self.steps += 1
        gradient = nn.functional.pad(gradient, (0, self.wide.shape[1] - len(gradient)))
        for moment, new, beta in zip(self.wide, (gradient, gradient**2), (beta1, beta2), strict=True):
            moment.lerp_(new, torch.tensor(1 - beta))
        rate, wide = settings["lr"] / (1 - beta1**self.steps), math.sqrt(1 - beta2**self.steps)
        self.weights.mul_(1 - settings["lr"] * settings["weight_decay"])
        self.weights.sub_(first / (second.sqrt() / wide + settings["eps"]) * rate)
        for (begin, end), signed in itertools.product(self.blocks, (True, False)):
            part = self.moments[1 - signed][begin:end]
            part.copy_(rounded(part, signed))


# ---------------------------------------------------------------- the code


@pytest.mark.parametrize("signed", [True, False])
def test_the_table_is_the_papers_and_its_error_is_that_of_the_widest_gap(signed: bool) -> None:
    code = Code(signed)
    torch.testing.assert_close(code._numbers, table_of(signed), rtol=1e-6, atol=0)
    assert code.error == pytest.approx(0.45 / (64 if signed else 128), rel=1e-4)
    values = torch.linspace(-1 if signed else 0, 1, 256 * 256).view(-1, 256)
    values[:, 0] = 1.0
    codes, scales = code.encode(values)
    errors = (code.decode(codes, scales[:, None]) - values).abs()
    assert 0.99 * code.error < errors.max() <= code.error * (1 + 1e-5)


@pytest.mark.parametrize("signed", [True, False])
def test_rounding_again_changes_no_bit_whatever_the_size(signed: bool) -> None:
    code, generator = Code(signed), torch.Generator().manual_seed(0)
    values = torch.randn(80, BLOCK, generator=generator) * torch.logspace(-45, 34, 80)[:, None]
    values[0] = 0.0
    values[1, :-1] = 0.0
    values = values if signed else values.abs()
    codes, scales = code.encode(values)
    again = code.encode(code.decode(codes, scales[:, None]))
    assert torch.equal(codes, again[0]) and torch.equal(scales, again[1])
    assert (scales[0], int((codes[0] != code.zero).sum())) == (0.0, 0)
    assert int((scales == 0).sum()) > 5, "blocks whose products would lose bits are 0"


def test_a_second_moment_never_becomes_0_since_adam_divides_by_it() -> None:
    values = torch.full((1, BLOCK), 1e-12)
    values[0, 7], values[0, 8] = 1.0, 0.0
    codes, scales = Code(False).encode(values)
    assert (Code(False).decode(codes, scales[:, None])[0] == 0).nonzero().tolist() == [[8]]


# ---------------------------------------------------------------- the step


SHAPES = {"a.weight": (30, 40), "a.bias": (30,), "b.weight": (7, 11), "norm": (50,), "c.weight": (256, 3), "d": (5, 3)}
CUTS = [(0, 1_000_000), (1290, 1_000_000), (100, 2000), (700, 710), (1215, 1290)]
"""First and last element of the partition that a rank owns: all, from a weight's or a norm's middle, or a part of one
block or of a norm and a weight."""


def owned(cut: tuple[int, int]) -> tuple[Tensor, list[OwnedPiece]]:
    """The flat weights of a partition, with a few elements of padding, and the pieces of parameters in it."""
    at, pieces = 0, []
    total = sum(map(math.prod, SHAPES.values()))
    low, high = cut[0], min(cut[1], total)
    flat = torch.randn(high - low + 5, generator=torch.Generator().manual_seed(1))
    for name, shape in SHAPES.items():
        first, last = max(at, low), min(at + math.prod(shape), high)
        if first < last:
            pieces.append(OwnedPiece(name, first - at, last - first, flat, first - low, len(shape)))
        at += math.prod(shape)
    return flat, pieces


def optimizer_of(cut: tuple[int, int]) -> tuple[Adam8bit, Tensor, list[OwnedPiece]]:
    flat, pieces = owned(cut)
    optimizer = Adam8bit([flat], **SETTINGS)
    optimizer.own(pieces, SHAPES, seed=3)
    optimizer.found_inf = torch.zeros(())
    return optimizer, flat, pieces


def gradient_of(step: int, flat: Tensor) -> Tensor:
    """Gradients, some of them ten thousand times larger than others."""
    generator = torch.Generator().manual_seed(100 + step)
    sizes = 10 ** (-4 * torch.rand(len(flat), generator=generator))
    return torch.randn(len(flat), generator=generator) * sizes


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("blocks", [1, 2, 2**14])
def test_it_steps_as_one_parameter_at_a_time(
    cut: tuple[int, int], blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is stepped together: blocks of a chunk, and chunks in the middle of a weight."""
    monkeypatch.setattr(adam8bit, "CHUNK_BLOCKS", blocks)
    optimizer, flat, pieces = optimizer_of(cut)
    references = {one.name: Reference(one.of(flat), one.first, one.dimensions > 1) for one in pieces}
    padding = flat[-5:].clone()
    for step in range(STEPS):
        gradient = gradient_of(step, flat)
        optimizer.take([gradient.half()], torch.tensor(0.5))
        for piece in pieces:
            references[piece.name].step(piece.of(gradient.half().float()) * 0.5, SETTINGS)
    for piece in pieces:
        # a rounding of each operation, in fp32, of steps of about the learning rate
        off = (references[piece.name].weights - piece.of(flat)).abs().max()
        assert off < STEPS * 8 * 2**-24 * 4, piece.name
        for fragment, moment in zip(optimizer.fragments(piece), references[piece.name].moments, strict=True):
            assert (fragment.scales is None) == (piece.dimensions == 1)
            torch.testing.assert_close(decoded(piece, fragment), moment, rtol=1e-6, atol=0)
    factor = (1 - SETTINGS["lr"] * SETTINGS["weight_decay"]) ** STEPS
    torch.testing.assert_close(flat[-5:], padding * factor)


def test_without_rounding_it_is_pytorchs_adamw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "a.weight", (1200,))
    for name in ("b.weight", "c.weight", "d"):
        monkeypatch.setitem(SHAPES, name, (math.prod(SHAPES[name]),))
    optimizer, flat, _ = optimizer_of(CUTS[0])
    weights = torch.nn.Parameter(flat[:-5].clone())
    adam = torch.optim.AdamW([weights], **SETTINGS)
    for step in range(STEPS):
        gradient = gradient_of(step, flat)
        weights.grad = gradient[:-5].clone()
        optimizer.take([gradient], None)
        adam.step()
    torch.testing.assert_close(flat[:-5], weights.detach(), rtol=1e-6, atol=1e-6)


def test_each_chunk_takes_as_many_launches_as_the_planner_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many parameters there are."""
    counts = []
    for blocks in (2**14, 1):
        monkeypatch.setattr(adam8bit, "CHUNK_BLOCKS", blocks)
        optimizer, flat, _ = optimizer_of(CUTS[0])
        step = functools.partial(optimizer.take, [gradient_of(0, flat)], torch.ones(()))
        counts.append((HostCost.of(step).launches, len(optimizer._chunks)))
    (few, one), (many, chunks) = counts
    assert one == 1 and (many - few) / (chunks - one) == EIGHT_BIT_UPDATE
    assert few < 2 * EIGHT_BIT_UPDATE, "norms and biases are stepped together"


def test_the_planner_counts_the_bytes_that_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    job = small_job(optimizer=PLANNED)
    monkeypatch.setattr(sys.modules[__name__], "SHAPES", parameter_shapes(job.layers))
    optimizer, _, _ = optimizer_of(CUTS[0])
    held = [*itertools.chain(*optimizer._state.values()), *optimizer._plain.values()]
    assert sum(one.untyped_storage().nbytes() for one in held) == sum(job.moment_bytes)


def state_of(optimizer: Adam8bit, flat: Tensor) -> list[Tensor]:
    parts = [part for state in optimizer._state.values() for part in state]
    return [one.clone() for one in (flat, optimizer._steps, *parts, *optimizer._plain.values())]


@pytest.mark.parametrize("steps", [0, 2])
def test_a_skipped_step_changes_no_bit(steps: int) -> None:
    optimizer, flat, _ = optimizer_of(CUTS[0])
    for step in range(steps):
        optimizer.take([gradient_of(step, flat)], None)
    before = state_of(optimizer, flat)
    optimizer.found_inf.fill_(1.0)
    optimizer.take([torch.full_like(flat, float("nan"))], torch.tensor(float("nan")))
    assert all(map(torch.equal, before, state_of(optimizer, flat)))


def test_moments_that_were_saved_and_fp32_moments_load_alike() -> None:
    (optimizer, flat, pieces), (other, _, _) = optimizer_of(CUTS[2]), optimizer_of(CUTS[2])
    optimizer.take([gradient_of(0, flat)], None)
    for piece, number in itertools.product(pieces, (0, 1)):
        fragment = optimizer.fragments(piece)[number]
        other.load(piece, fragment.kind, decoded(piece, fragment))
    other.set_steps(1)
    assert all(map(torch.equal, state_of(optimizer, flat)[1:], state_of(other, flat)[1:]))
    other.set_steps(0)
    assert not any(parts.any() for _, parts in other._state.values()) and not int(other._steps)


# ---------------------------------------------------------------- weights of 16 bits


def test_random_rounding_is_up_with_the_probability_that_makes_the_mean_exact() -> None:
    value, draws = torch.tensor(1.001), 2**16
    values = value.repeat(draws // BLOCK, BLOCK)
    adam8bit.round_at_random(values, 0, torch.arange(len(values)))
    up = float((values == 1.0078125).float().mean())
    assert {*values.flatten().tolist()} == {1.0, 1.0078125}
    assert int(value.view(torch.int32)) % 2**16 / 2**16 == pytest.approx(0.128006, abs=5e-7)
    assert up == pytest.approx(0.128006, abs=5 * math.sqrt(0.128 * 0.872 / draws))
    negative = -value.repeat(draws // BLOCK, BLOCK)
    adam8bit.round_at_random(negative, 0, torch.arange(len(values)))
    assert torch.equal(negative, -values), "by the same bits"
    exact = torch.tensor([[0.0, -0.0, 1.0, float("inf"), -(2.0**-130), 3.0e38]]).bfloat16().float()
    kept = exact.clone()
    adam8bit.round_at_random(kept, 0, torch.zeros(1, dtype=torch.int64))
    assert torch.equal(kept, exact), "what is a bf16 already stays"


def narrow_weights(cut: tuple[int, int], steps: int = STEPS, seed: int = 3) -> dict[str, dict[int, float]]:
    """The weights of bf16 that some steps on gradients by element leave, by parameter and element."""
    flat, pieces = owned(cut)
    flat = flat.bfloat16()
    pieces = [replace(piece, master=flat) for piece in pieces]
    optimizer = Adam8bit([flat], **SETTINGS)
    optimizer.own(pieces, SHAPES, seed)
    optimizer.found_inf = torch.zeros(())
    low, total = cut[0], sum(map(math.prod, SHAPES.values()))
    whole = torch.randn(total + 5, generator=torch.Generator().manual_seed(1))
    flat.copy_(whole[low : low + len(flat)])
    for step in range(steps):
        gradient = torch.randn(total + 5, generator=torch.Generator().manual_seed(50 + step))
        optimizer.take([gradient[low : low + len(flat)].bfloat16()], None)
    return {one.name: dict(enumerate(one.of(flat).tolist(), one.first)) for one in pieces}


def test_roundings_are_keyed_by_seed_step_and_element_whatever_a_rank_owns(monkeypatch: pytest.MonkeyPatch) -> None:
    """After one step, since then the moments of blocks that are cut differ."""
    whole = narrow_weights(CUTS[0], steps=1)
    monkeypatch.setattr(adam8bit, "CHUNK_BLOCKS", 2)
    for cut in CUTS:
        for name, values in narrow_weights(cut, steps=1).items():
            differing = sum(values[element] != whole[name][element] for element in values)
            assert differing <= 2, (name, cut)  # which the last bits of fp32 decided, where vectors end elsewhere
    others = narrow_weights(CUTS[0], steps=1, seed=4)
    assert sum(others[name][at] != whole[name][at] for name in whole for at in whole[name]) > 100


def test_weights_of_16_bits_follow_fp32_masters_within_what_random_roundings_add_up_to() -> None:
    """Steps of 1e-3 are a tenth of the distance between neighbours at 1: rounded to the nearest all would vanish."""
    steps, size, rate = 100, 200, 1e-3
    masters, narrow = torch.ones(size, BLOCK), torch.ones(size * BLOCK, dtype=torch.bfloat16)
    settings: dict[str, Any] = {**SETTINGS, "lr": rate, "weight_decay": 0.0}
    ends = []
    for flat in (masters.flatten(), narrow):
        optimizer = Adam8bit([flat], **settings)
        optimizer.own([OwnedPiece("a", 0, len(flat), flat, 0, 2)], ["a"], 0)
        optimizer.found_inf = torch.zeros(())
        for _ in range(steps):
            optimizer.take([torch.ones(len(flat), dtype=flat.dtype)], None)
        ends.append(flat.float())
    assert ends[0].mean() == pytest.approx(1 - steps * rate, abs=1e-3)
    ulp = 2.0**-8  # below 1; a rounding's variance is at most a quarter of its square
    deviation = ulp / 2 * math.sqrt(steps / ends[1].numel())
    assert float((ends[1] - ends[0]).mean()) == pytest.approx(0, abs=6 * deviation + 1e-5)
    assert (ends[1] - ends[0]).abs().max() < 6 * ulp / 2 * math.sqrt(steps)
    assert len({*map(tuple, ends[1].view(size, BLOCK).tolist())}) == size, "blocks are rounded by other bits"
