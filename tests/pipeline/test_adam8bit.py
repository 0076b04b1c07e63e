"""AdamW with moments of 8 bits, against one that is written for one parameter at a time.

As a script, with a file of cases and a folder, this trains real ranks and compares their weights.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import sys
import unittest.mock
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime import bf16_optimizer
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ddpm_ds.checkpoint.manifest import BLOCK, MOMENTS
from ddpm_ds.checkpoint.reader import SMALLEST, Code
from ddpm_ds.pipeline import deepspeed_insides as insides
from ddpm_ds.pipeline import own_step
from ddpm_ds.pipeline.deepspeed_insides import OwnedPiece
from ddpm_ds.pipeline.own_step import Adam8bit, OwnStep
from ddpm_ds.predict.costs import EIGHT_BIT_UPDATE
from ddpm_ds.unet.model import parameter_shapes
from tests.launching import run_ranks, tiny_spec, write_json
from tests.pipeline.batches import global_batch, micro_batches
from tests.pipeline.ladder_worker import Case, report_cases
from tests.predict.small import EIGHT_BIT as PLANNED
from tests.predict.small import small_job

SETTINGS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
STEPS = 4
BAD_STEP = 2
"""Step with a loss that is not finite."""


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
    """AdamW of one parameter, of which the elements from ``first`` on are here."""

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

    def difference(self, weights: Tensor) -> float:
        """Largest difference from the weights that the optimizer has."""
        return float((self.weights - weights).abs().max())


# ---------------------------------------------------------------- the code


@pytest.mark.parametrize("signed", [True, False])
def test_the_table_is_the_papers_and_its_error_is_that_of_the_widest_gap(signed: bool) -> None:
    code = Code(signed)
    torch.testing.assert_close(code._numbers, table_of(signed), rtol=1e-6, atol=0)
    assert code.error == pytest.approx(0.45 / (64 if signed else 128), rel=1e-4)
    values = torch.linspace(-1 if signed else 0, 1, 256 * 256).view(-1, 256)
    values[:, 0] = 1.0
    errors = (code.decode(*spread(code.encode(values))) - values).abs()
    assert 0.99 * code.error < errors.max() <= code.error * (1 + 1e-5)


def spread(encoded: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Codes, and scales that fit them."""
    return encoded[0], encoded[1][:, None]


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
    optimizer.own(pieces)
    optimizer.found_inf = torch.zeros(())
    return optimizer, flat, pieces


def gradient_of(step: int, flat: Tensor) -> Tensor:
    """Gradients of which some are ten thousand times others."""
    generator = torch.Generator().manual_seed(100 + step)
    sizes = 10 ** (-4 * torch.rand(len(flat), generator=generator))
    return torch.randn(len(flat), generator=generator) * sizes


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("blocks", [1, 2, 2**14])
def test_it_steps_as_one_parameter_at_a_time(
    cut: tuple[int, int], blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is stepped together: blocks of a chunk, and chunks in the middle of a weight."""
    monkeypatch.setattr(own_step, "CHUNK_BLOCKS", blocks)
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
        assert references[piece.name].difference(piece.of(flat)) < STEPS * 8 * 2**-24 * 4, piece.name
        for number, fragment in enumerate(optimizer.fragments(piece)):
            assert (fragment.scales is None) == (piece.dimensions == 1)
            values = fragment.values
            if fragment.scales is not None:
                code = Code(MOMENTS[fragment.kind])
                each = fragment.scales.repeat_interleave(BLOCK)[piece.first % BLOCK :][: piece.length]
                values = code.decode(values, each)
            torch.testing.assert_close(values, references[piece.name].moments[number], rtol=1e-6, atol=0)
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


def test_launches_are_those_that_the_planner_counts_for_each_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many parameters there are."""
    counts = []
    for blocks in (2**14, 1):
        monkeypatch.setattr(own_step, "CHUNK_BLOCKS", blocks)
        optimizer, flat, _ = optimizer_of(CUTS[0])
        with Launches() as launches:
            optimizer.take([gradient_of(0, flat)], torch.ones(()))
        counts.append((launches.count, len(optimizer._chunks)))
    (few, one), (many, chunks) = counts
    assert one == 1 and (many - few) / (chunks - one) == EIGHT_BIT_UPDATE
    assert few < 2 * EIGHT_BIT_UPDATE, "norms and biases are stepped together"


def test_the_planner_counts_the_bytes_that_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    job = small_job(optimizer=PLANNED)
    monkeypatch.setattr(sys.modules[__name__], "SHAPES", parameter_shapes(job.layers))
    optimizer, _, _ = optimizer_of(CUTS[0])
    held = [*itertools.chain(*optimizer._state.values()), *optimizer._plain.values()]
    assert sum(one.untyped_storage().nbytes() for one in held) == sum(job.moment_bytes)


class Launches(TorchDispatchMode):
    """Counts operators that are neither views nor allocations."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view and "empty" not in str(func)
        return func(*args, **(kwargs or {}))


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


def test_what_is_loaded_is_what_was_saved_and_what_fp32_state_is_rounded_to() -> None:
    (optimizer, flat, pieces), (other, _, _) = optimizer_of(CUTS[2]), optimizer_of(CUTS[2])
    optimizer.take([gradient_of(0, flat)], None)
    for piece, number in itertools.product(pieces, (0, 1)):
        fragment = optimizer.fragments(piece)[number]
        values = fragment.values
        if fragment.scales is not None:
            each = fragment.scales.repeat_interleave(BLOCK)[piece.first % BLOCK :][: piece.length]
            values = Code(MOMENTS[fragment.kind]).decode(values, each)
        other.load(piece, fragment.kind, values)
    other.set_steps(1)
    assert all(map(torch.equal, state_of(optimizer, flat)[1:], state_of(other, flat)[1:]))
    other.set_steps(0)
    assert not any(parts.any() for _, parts in other._state.values()) and not int(other._steps)


# ---------------------------------------------------------------- real ranks


SPEC = tiny_spec(unet={"multipliers": [1], "attention_resolutions": []})
"""The optimizer steps the parameters of all layers alike, so there are few."""
CASES: dict[str, Sequence[Case]] = {
    "1 process": [
        Case(1, 1, 0, "fp32", 0, micro_batches=2),
        Case(1, 1, 0, "fp16", 0, micro_batches=2),
        Case(1, 1, 0, "bf16", 0, micro_batches=2),
        Case(1, 1, 1, "fp16", 0, micro_batches=2, fp32_accumulation=True),
        Case(1, 1, 2, "bf16", 0, micro_batches=2),
    ],
    "2": [
        Case(1, 2, 2, "bf16", 0, micro_batches=2),
        Case(1, 2, 1, "fp32", 0, micro_batches=2),
        Case(1, 2, 0, "bf16", 0, micro_batches=2),
    ],
    "2, more": [
        Case(1, 2, 0, "fp32", 0, micro_batches=2),
        Case(2, 1, 2, "fp32", 1, schedule="folded"),
    ],
}


@pytest.mark.launch
@pytest.mark.parametrize("name", ["1 process", "2", pytest.param("2, more", marks=pytest.mark.long)])
def test_ranks_step_as_one_parameter_at_a_time(name: str, tmp_path: Path) -> None:
    """ZeRO 0 to 2 in three precisions, with a step that is skipped, and twice the same bits."""
    cases = CASES[name]
    processes = cases[0].stages * cases[0].replicas
    file = write_json(tmp_path / "cases.json", [asdict(case) for case in cases])
    done = run_ranks(processes, Path(__file__), str(file), str(tmp_path))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    for rank in range(processes):
        for case, found in zip(cases, json.loads((tmp_path / f"rank{rank}.json").read_text()), strict=True):
            where = f"rank {rank} of {case}"
            assert max(found["differences"].values()) < STEPS * 8 * 2**-24 * found["largest"], where
            assert found["applied"] == [step != BAD_STEP for step in range(STEPS)], where
            assert found["rounded"] and found["plain"] and found["moved"] > 1e-3, where
            assert found["cuts_a_block"] == (case.replicas > 1 and (case.zero > 0 or case.precision == "bf16")), where


def compared(case: Case) -> dict[str, Any]:
    """Train a case, and each owned piece by the reference, from the gradients with which the optimizer steps."""
    engine = replace(case, eight_bit=True).engine(SPEC)
    optimizer, pieces = engine.basic_optimizer, insides.owned_pieces(engine)
    assert isinstance(optimizer, Adam8bit) and optimizer.param_groups[0]["weight_decay"] == 0.1
    first = {one.name: one.of(one.master).clone() for one in pieces}
    references = {one.name: Reference(first[one.name], one.first, one.dimensions > 1) for one in pieces}
    take, masters = optimizer.take, insides.masters(engine)

    def watched(gradients: Sequence[Tensor], factor: Tensor | None) -> None:
        for piece in pieces if not optimizer.found_inf else ():
            (index,) = (number for number, master in enumerate(masters) if master is piece.master)
            wide = piece.of(gradients[index]).float() * (1.0 if factor is None else factor)
            references[piece.name].step(wide, optimizer.param_groups[0] | {"lr": float(rate)})
        take(gradients, factor)

    assert isinstance(engine.gradients, OwnStep)
    rate = engine.gradients._rate
    optimizer.take = watched  # type: ignore[method-assign]
    applied = []
    loss = engine.objective.loss
    for step in range(STEPS):
        factor = float("nan") if step == BAD_STEP else 1.0
        engine.objective.loss = lambda *given, factor=factor: factor * loss(*given)  # type: ignore[method-assign]
        engine.train_batch(micro_batches(engine, global_batch(SPEC, step)))
        applied.append(engine.was_step_applied())
    named = dict(engine.module.named_parameters())
    for piece in pieces:  # the layers have what was stepped
        weights = named[piece.name].detach().flatten()[piece.first : piece.first + piece.length]
        assert torch.equal(weights, piece.of(piece.master).to(weights.dtype)), piece.name
    report = {
        "differences": {one.name: references[one.name].difference(one.of(one.master)) for one in pieces},
        "largest": max(float(one.weights.abs().max()) for one in references.values()),
        "moved": max(references[name].difference(weights) for name, weights in first.items()),
        "applied": applied,
        "rounded": sum(one.dimensions > 1 for one in pieces),
        "plain": sum(one.dimensions == 1 for one in pieces),
        "cuts_a_block": any(
            end % BLOCK and one.dimensions > 1
            for one in pieces
            for end in (one.first, one.first + one.length if one.length < named[one.name].numel() - one.first else 0)
        ),
    }
    engine.destroy()
    return report


if __name__ == "__main__":
    with unittest.mock.patch.object(bf16_optimizer, "see_memory_usage"):
        report_cases(lambda case: compared(Case(**case)))
