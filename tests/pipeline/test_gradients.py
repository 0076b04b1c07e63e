"""Flat gradients against DeepSpeed's own way, in one process after the other: every gradient by name, bit for bit.

As a script, with a file of cases and a folder for its reports, this trains each case both ways on real ranks.
"""

from __future__ import annotations

import contextlib
import json
import unittest.mock
from dataclasses import asdict, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from deepspeed.runtime import bf16_optimizer
from rivals.measure import SentBytes
from torch import Tensor

from ddpm_ds.pipeline import deepspeed_insides as insides
from ddpm_ds.pipeline.gradients import SUMMED, _match, norm_of
from ddpm_ds.pipeline.schedule import accumulated, program
from tests.launching import run_ranks, tiny_spec, tiny_text_spec, write_json
from tests.pipeline.batches import global_batch, micro_batches
from tests.pipeline.ladder_worker import (
    DTYPES,
    Case,
    Precision,
    compile_without_code,
    difference,
    report_cases,
    watch_gradients,
)
from tests.pipeline.random_programs import random_programs
from tests.pipeline.test_ladder import GRADIENT_TOLERANCE, LATER, LOSS_TOLERANCE
from tests.pipeline.test_synchronisation import Poisoned

STEPS = 2
WAYS: tuple[Literal["flat", "deepspeed"], ...] = ("flat", "deepspeed")
TO_OWNERS = {"use_multi_rank_bucket_allreduce": False}
WHOLE = {"reduce_scatter": False}
FP32_WIRES = {"communication_data_type": "fp32"}
SPECS = {
    "plain": tiny_spec(unet={"multipliers": [1], "attention_resolutions": []}),
    "text": tiny_text_spec(levels=1),
}
"""Specs by a case's process, with few layers: each way of handling gradients handles all layers alike."""
Row = tuple[Case, dict[str, Any]]
"""A case, and keys of ``zero_optimization`` or of the top level."""

ONE: list[Row] = [
    (Case(1, 1, 1, "fp32", 1, micro_batches=2), {}),
    (Case(1, 1, 2, "bf16", 0, micro_batches=2, fused=True), {}),
    (Case(1, 1, 2, "fp16", 0, micro_batches=2, fp32_accumulation=True), {}),
    (Case(1, 1, 1, "fp16", 0, micro_batches=2, fp32_accumulation=True), {}),
    (Case(1, 1, 1, "bf16", 0, micro_batches=2, fp32_accumulation=True), {}),
    (Case(1, 1, 0, "bf16", 0, micro_batches=2), {}),
    (Case(1, 1, 0, "fp32", 0, micro_batches=2), {}),
    (Case(1, 1, 0, "fp16", 0, micro_batches=2, random_programs=1), {}),
    (Case(1, 1, 2, "fp16", 0, micro_batches=1), {"gradient_clipping": 0.0}),
    (Case(1, 1, 1, "fp16", 0, micro_batches=1), {"gradient_clipping": 100.0}),
    (Case(1, 1, 0, "fp16", 0, micro_batches=1), {"gradient_clipping": 100.0}),
]
BY_TWO: list[Row] = [
    (Case(1, 2, 2, "fp32", 1, micro_batches=2), WHOLE),
    (Case(1, 2, 1, "fp32", 1, micro_batches=2), {}),
    (Case(1, 2, 2, "bf16", 0, micro_batches=2, fused=True, random_programs=5), TO_OWNERS),
    (Case(1, 2, 0, "fp32", 0, micro_batches=2), {}),
]
MORE_BY_TWO: list[Row] = [
    (Case(2, 1, 2, "fp32", 1, reentrant=True, schedule="folded", random_programs=1), {}),
    (Case(1, 2, 2, "fp16", 0, micro_batches=2, fp32_accumulation=True, random_programs=5), {}),
    (Case(2, 1, 2, "fp16", 0, schedule="folded", random_programs=6, process="text", cuts=(4, 8, 14)), {}),
    (Case(2, 1, 1, "fp16", 0, random_programs=2, fixed_scale=128), {}),
    (Case(1, 2, 0, "bf16", 0, micro_batches=2), {}),
    (Case(1, 2, 1, "fp32", 0, micro_batches=2), WHOLE),
    (Case(1, 2, 1, "fp16", 0, micro_batches=2, fp32_accumulation=True), {}),
    (Case(1, 2, 2, "fp16", 0, micro_batches=2), FP32_WIRES),
    (Case(1, 2, 1, "bf16", 0, micro_batches=2, fp32_accumulation=True), {}),
    (Case(1, 2, 0, "fp16", 0, micro_batches=2), {}),
]
BY_FOUR: list[Row] = [
    (Case(2, 2, 2, "fp16", 1, schedule="folded", random_programs=3), TO_OWNERS),
    (Case(1, 4, 2, "fp32", 0), TO_OWNERS),
    (Case(1, 4, 1, "fp32", 0), {}),
    (Case(1, 4, 2, "bf16", 0, fp32_accumulation=True, random_programs=4), {}),
]


def rounds_alone(case: Case) -> bool:
    """Whether DeepSpeed rounds a single replica's fp32 sum to 16 bits, for wires that there are not."""
    return case.replicas == 1 and case.fp32_accumulation and case.zero == 1


def tolerance_of_gradients(case: Case) -> float:
    """Relative difference of a gradient in the first step: replicas add up in two orders, each a rounding."""
    if rounds_alone(case):
        return torch.finfo(DTYPES[case.precision]).eps
    return case.replicas * torch.finfo(DTYPES[case.precision]).eps if case.replicas > 2 else 0.0


def check(processes: int, rows: list[Row], folder: Path) -> None:
    file = write_json(folder / "cases.json", [{"case": asdict(case), "keys": keys} for case, keys in rows])
    done = run_ranks(processes, Path(__file__), str(file), str(folder))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = []
    for rank in range(processes):
        for (case, keys), steps in zip(rows, json.loads((folder / f"rank{rank}.json").read_text()), strict=True):
            where = f"rank {rank} of {case} with {keys}"
            for number, step in enumerate(steps):
                allowed = tolerance_of_gradients(case)
                if number:
                    allowed += LATER[case.precision] * GRADIENT_TOLERANCE[case.precision]
                wrong = {name: error for name, error in step["errors"].items() if not error <= allowed}
                found += [f"{where}, step {number}: {name} is off by {error:.1e}" for name, error in wrong.items()]
                moments = allowed + LATER[case.precision] * GRADIENT_TOLERANCE[case.precision]
                if not step["moments"] <= moments:  # which tell whether gradients were unscaled and clipped
                    found.append(f"{where}, step {number}: Adam's first moments are off by {step['moments']:.1e}")
                for flat, deepspeed in (step["losses"], step["norms"]):
                    slack = LATER[case.precision] * LOSS_TOLERANCE[case.precision]
                    if abs(flat - deepspeed) > slack * abs(deepspeed):
                        found.append(f"{where}, step {number}: {flat} instead of {deepspeed}")
                flat, deepspeed = step["sent"]
                if flat > deepspeed + 64:  # the norm of a stage, in the bf16 optimizer
                    found.append(f"{where}, step {number}: sends {flat} bytes instead of {deepspeed}")
    assert not found, "\n".join(found)


@pytest.mark.capability
@pytest.mark.parametrize(
    ("processes", "rows"),
    [
        pytest.param(1, ONE, id="1 process"),
        pytest.param(2, BY_TWO, id="2"),
        pytest.param(2, MORE_BY_TWO, id="2, more", marks=pytest.mark.long),
        pytest.param(4, BY_FOUR, id="4", marks=pytest.mark.long),
    ],
)
def test_every_gradient_has_the_bits_of_deepspeeds_and_no_more_is_sent(
    processes: int, rows: list[Row], tmp_path: Path
) -> None:
    check(processes, rows, tmp_path)


def test_a_place_gets_the_strides_of_its_gradient_where_the_memory_is_in_the_same_order() -> None:
    flat = torch.zeros(24)
    places = [flat.narrow(0, 0, 12).view(4, 1, 1, 3), flat.narrow(0, 12, 12).view(4, 3)]
    gradients = [torch.ones(12).as_strided((4, 1, 1, 3), (3, 7, 5, 1)), torch.arange(12.0).view(3, 4).t()]
    _match(places, gradients)
    assert places[0].stride() == gradients[0].stride() and places[1].stride() == (3, 1)
    torch._foreach_add_(places, gradients)
    assert torch.equal(flat, torch.cat([gradient.flatten() for gradient in gradients]))


@pytest.mark.launch
@pytest.mark.parametrize("zero", [0, 2])
def test_the_loss_scale_moves_and_steps_are_skipped_as_with_deepspeed(zero: int, tmp_path: Path) -> None:
    """The scale grows every second step, overflows twice, and falls to its floor."""
    file = write_json(tmp_path / "cases.json", [{"scales_of": zero}])
    done = run_ranks(1, Path(__file__), str(file), str(tmp_path))
    assert done.returncode == 0, done.stderr
    ((flat, fused, deepspeed),) = json.loads((tmp_path / "rank0.json").read_text())
    assert flat == deepspeed and fused == deepspeed
    skipped, at_floor = [step["skipped"] for step in flat], [step["at_floor"] for step in flat]
    assert skipped[-1] == len(BAD_STEPS) and max(at_floor) > 1, flat


def test_the_norm_of_millions_of_gradients_is_exact_to_the_sixth_digit() -> None:
    gradients = torch.randn(2**23 + 5, generator=torch.Generator().manual_seed(0))
    assert norm_of(gradients.split(SUMMED)).item() == pytest.approx(gradients.double().norm().item(), rel=1e-6)


@pytest.mark.launch
def test_a_parameter_without_gradient_is_an_error_and_not_a_bucket_without_it(tmp_path: Path) -> None:
    file = write_json(tmp_path / "cases.json", [{"freezes": True}])
    done = run_ranks(1, Path(__file__), str(file), str(tmp_path))
    assert done.returncode == 0, done.stderr
    ((said, shape),) = json.loads((tmp_path / "rank0.json").read_text())
    assert said == f"1 parameters got no gradient, one of shape {tuple(shape)}"


@pytest.mark.launch
def test_weights_are_views_of_one_flat_tensor_without_gaps_and_stay_so(tmp_path: Path) -> None:
    """Which DeepSpeed makes of them again after each of its own steps."""
    precisions = [{"flattens": [zero, precision]} for zero, precision in ((1, "fp32"), (2, "bf16"), (0, "bf16"))]
    done = run_ranks(1, Path(__file__), str(write_json(tmp_path / "cases.json", precisions)), str(tmp_path))
    assert done.returncode == 0, done.stderr
    for before, after, expected in json.loads((tmp_path / "rank0.json").read_text()):
        assert before == after == expected


@pytest.mark.launch
def test_replicas_send_the_gradient_of_a_weight_once_for_each_weight_gradient_pass(tmp_path: Path) -> None:
    """Under ZeRO-2, whose gradients in 16 bits go around a ring of two, so that each rank sends two bytes of each."""
    done = run_ranks(2, Path(__file__), str(write_json(tmp_path / "cases.json", [{"sends": True}])), str(tmp_path))
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        ((elements, sent),) = json.loads((tmp_path / f"rank{rank}.json").read_text())
        in_whole_backwards = sent.pop(0)
        saved = [in_whole_backwards - bytes_sent for bytes_sent in sent]
        assert saved == [2 * elements * (MICRO_BATCHES - MICRO_BATCHES // together) for together in TOGETHER]


@pytest.mark.launch
def test_a_weight_gradient_pass_holds_no_more_gradients_than_a_bucket_and_one(tmp_path: Path) -> None:
    done = run_ranks(1, Path(__file__), str(write_json(tmp_path / "cases.json", [{"holds": True}])), str(tmp_path))
    assert done.returncode == 0, done.stderr
    ((most, largest, everything),) = json.loads((tmp_path / "rank0.json").read_text())
    assert largest <= most <= 2 * largest < everything / 2


# -------------------------------------------------------------------------------- the ranks


def course(case: Case, keys: dict[str, Any]) -> list[dict[str, Any]]:
    """Loss, norm, gradients by name and bytes sent of each step."""
    spec = SPECS[case.process]
    zero = case.resolved(spec.train.batch_images).blocks["zero_optimization"]
    inside = {name: value for name, value in keys.items() if name in {**TO_OWNERS, **WHOLE}}
    tops = {name: value for name, value in keys.items() if name not in inside}
    engine = case.engine(spec, zero_optimization={**zero, **inside}, **tops)
    if case.random_programs is not None:
        engine.follow(random_programs(case.schedule, case.micro_batches, case.stages, case.random_programs))
    sent, steps = SentBytes(), []
    seen = watch_gradients(engine, sent)
    for step in range(STEPS):
        before = sent.collective_bytes
        with sent if case.stages * case.replicas > 1 else contextlib.nullcontext():
            loss = engine.train_batch(micro_batches(engine, global_batch(spec, step))).item()
        gradients = {name: gradient.clone() for name, gradient in seen.items()}
        state = engine.basic_optimizer.state
        moments = torch.cat([state[master]["exp_avg"].flatten() for master in insides.masters(engine)])
        steps.append((loss, engine.gradient_norm(), gradients, sent.collective_bytes - before, moments))
    engine.destroy()
    return [dict(zip(("loss", "norm", "gradients", "sent", "moments"), step, strict=True)) for step in steps]


def compared(case: Case, keys: dict[str, Any]) -> list[dict[str, Any]]:
    """Both ways of a case, step by step; errors of the gradients that differ in a bit."""

    def errors(flat: dict[str, Tensor], deepspeed: dict[str, Tensor]) -> dict[str, float]:
        assert flat.keys() == deepspeed.keys()
        unequal = [name for name, gradient in flat.items() if not torch.equal(gradient, deepspeed[name])]
        return {name: difference(flat[name], deepspeed[name]) for name in unequal}

    ways = (course(replace(case, gradients=way), keys) for way in WAYS)
    return [
        {
            "errors": errors(flat["gradients"], deepspeed["gradients"]),
            "losses": [flat["loss"], deepspeed["loss"]],
            "norms": [flat["norm"], deepspeed["norm"]],
            "sent": [flat["sent"], deepspeed["sent"]],
            "moments": difference(flat["moments"], deepspeed["moments"]),
        }
        for flat, deepspeed in zip(*ways, strict=True)
    ]


BAD_STEPS = (1, 2, 4, 5, 6, 7, 8)


def scales(case: Case) -> list[dict[str, Any]]:
    """Loss scaler, skipped steps and overflows at the floor after each of some steps, of which some overflow."""
    spec = SPECS[case.process]
    fp16 = {"enabled": True, "initial_scale_power": 1, "loss_scale_window": 2, "min_loss_scale": 1}
    engine = case.engine(spec, fp16=fp16)
    objective, poisoned, steps = engine.objective, Poisoned(engine.objective), []
    for step in range(BAD_STEPS[-1] + 2):
        engine.objective = poisoned if step in BAD_STEPS else objective
        engine.train_batch(micro_batches(engine, global_batch(spec, step)))
        scaler = engine.gradients.scaler_state()
        stable = int(scaler["cur_iter"] - scaler["last_overflow_iter"]) - 2  # DeepSpeed does not forget what it grew by
        steps.append(
            {
                "scale": scaler["cur_scale"],
                "hysteresis": scaler.get("cur_hysteresis", 1),
                "stable": stable % 2 if stable > 0 else stable,
                "skipped": engine.count_skipped_steps(),
                "at_floor": engine.gradients.overflows_at_floor(),
            }
        )
    engine.destroy()
    return steps


def froze() -> tuple[str, list[int]]:
    """What is said in a step in which a parameter gets no gradient, and the parameter's shape."""
    case = Case(1, 1, 2, "fp32", 0, micro_batches=1)
    spec = SPECS["plain"]
    engine = case.engine(spec)
    engine.train_batch(micro_batches(engine, global_batch(spec, 0)))
    frozen = list(engine.module.parameters())[5].requires_grad_(False)
    with pytest.raises(RuntimeError) as error:
        engine.train_batch(micro_batches(engine, global_batch(spec, 1)))
    return str(error.value), list(frozen.shape)


def flattened(zero: int, precision: Precision) -> list[list[list[int]]]:
    """Address and place of each parameter, before and after a step, and where they are one after the other."""
    spec = SPECS["plain"]
    engine = Case(1, 1, zero, precision, 0, micro_batches=1).engine(spec)

    def places() -> list[list[int]]:
        return [[one.untyped_storage().data_ptr(), one.storage_offset()] for one in engine.module.parameters()]

    before = places()
    engine.train_batch(micro_batches(engine, global_batch(spec, 0)))
    lengths = [parameter.numel() for parameter in engine.module.parameters()]
    return [before, places(), [[before[0][0], first] for first in accumulate(lengths[:-1], initial=0)]]


MICRO_BATCHES, TOGETHER = 4, (1, 2, 4)
"""Micro-batches of a step, and of a weight-gradient pass."""


def sends() -> tuple[int, list[int]]:
    """How many elements the weights have whose gradients can wait, all those of convolutions and linear layers; and the
    bytes of collectives in a step of whole backwards, and in steps with weight-gradient passes.
    """
    spec = SPECS["plain"]
    engine = Case(1, 2, 2, "bf16", 0, micro_batches=MICRO_BATCHES, fused=True).engine(spec)
    found = []
    for own in (program("1f1b", MICRO_BATCHES, 1, 0), *(accumulated(MICRO_BATCHES, together) for together in TOGETHER)):
        engine.follow([own])
        with SentBytes() as sent:
            engine.train_batch(micro_batches(engine, global_batch(spec, 0)))
        found.append(round(sent.collective_bytes))
    weights = [weight for name, weight in engine.module.named_parameters() if "embedding.weight" not in name]
    engine.destroy()
    return sum(weight.numel() for weight in weights if weight.ndim > 1), found


def holds() -> tuple[int, int, int]:
    """Most elements of gradients that a weight-gradient pass holds before they are added, with buckets of the largest
    gradient; elements of that one, and of all whose gradients wait.
    """
    spec = SPECS["plain"]
    case = Case(1, 1, 2, "bf16", 0, micro_batches=1)
    zero = case.resolved(spec.train.batch_images).blocks["zero_optimization"]
    engine = case.engine(spec, zero_optimization={**zero, "reduce_bucket_size": 1})
    engine.follow([accumulated(1, 1)])
    give, held = engine.gradients.give, []

    def measured(weight: torch.nn.Parameter, gradient: Tensor) -> None:
        waiting = [one.grad.numel() for one in engine.module.parameters() if one.grad is not None]
        held.append(sum(waiting) + gradient.numel())
        give(weight, gradient)

    weights = engine.wanted_gradients(0, "weights")
    with unittest.mock.patch.object(engine.gradients, "give", measured):
        engine.train_batch(micro_batches(engine, global_batch(spec, 0)))
    engine.destroy()
    return max(held), max(weight.numel() for weight in weights), sum(weight.numel() for weight in weights)


def run(case: dict[str, Any]) -> Any:
    if "holds" in case:
        return holds()
    if "sends" in case:
        return sends()
    if "flattens" in case:
        return flattened(*case["flattens"])
    if "freezes" in case:
        return froze()
    if "scales_of" in case:
        own = Case(1, 1, case["scales_of"], "fp16", 0, micro_batches=1)
        return [scales(way) for way in (own, replace(own, fused=True), replace(own, gradients="deepspeed"))]
    return compared(Case(**case["case"]), case["keys"])


if __name__ == "__main__":
    compile_without_code()
    with unittest.mock.patch.object(bf16_optimizer, "see_memory_usage"):  # collects garbage, for seconds
        report_cases(run)
