"""Rung c: on real processes, the loss and every gradient by name equal plain PyTorch's, in every way of training."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from ddpm_ds.pipeline.placement import Grid
from tests.launching import on_a_shared_gpu
from tests.pipeline.ladder_worker import Case, Precision, layers_of, run_cases, spec_of
from tests.unet.variants import narrowing, rounding

WORKER = Path(__file__).with_name("ladder_worker.py")

LAYERS = layers_of(spec_of(compiled=False))
# An fp32 walk forwards and backwards rounds its sums. In 16 bits each layer rounds h and its branch, there and back; a
# loss or a norm, which adds up thousands of values, rounds with the walk forwards alone.
GRADIENT_TOLERANCE: dict[Precision, float] = {
    "fp32": 2 * rounding(LAYERS),
    "fp16": narrowing(2 * 2 * len(LAYERS), torch.float16),
    "bf16": narrowing(2 * 2 * len(LAYERS), torch.bfloat16),
}
LOSS_TOLERANCE: dict[Precision, float] = {
    "fp32": rounding(LAYERS),
    "fp16": narrowing(len(LAYERS), torch.float16),
    "bf16": narrowing(len(LAYERS), torch.bfloat16),
}
LATER = {"fp32": 10, "fp16": 1, "bf16": 2}
"""Growth of an error by a step: Adam divides by the gradient's own size, so a weight whose gradient is mostly rounding
moves as far as any other. In 16 bits the stored weight rounds such moves away."""
EIGHT_BITS = 2.0**-5
"""Growth of a moment's error by rounding to 8 bits: each of the largest numbers by 1 / 128 of the block's largest."""
SMALL_BYTES = 128
"""Messages for overflow, norm and padding, which the planner does not count."""


LEVEL: dict[str, Any] = {"train": ("conv_in.weight", "down_blocks.1", "mid_"), "rates": (("mid_", 0.5), ("conv", 2.0))}
ROUNDED: dict[str, Any] = {"eight_bit": True, "rounded": True}

BY_TWO = [
    Case(2, 1, 0, "fp32", 0, process="edm"),
    Case(1, 2, 2, "fp16", 1, micro_batches=2, fused=True, growing_scale=True),
    Case(1, 2, 2, "bf16", 0, micro_batches=2, eight_bit=True),
    Case(2, 1, 2, "fp32", 1, reentrant=True, schedule="folded", random_programs=1, eight_bit=True),
    Case(2, 1, 1, "fp16", 0, random_programs=2, fixed_scale=128, process="stored"),
    Case(2, 1, 0, "fp32", 0, schedule="folded", process="flow"),
    Case(2, 1, 1, "fp32", 2, schedule="folded", process="rectangles"),
    # text: cuts inside of transformers, intervals that begin before, at and after an entry
    Case(2, 1, 2, "fp32", 2, schedule="folded", random_programs=13, process="caption", cuts=(4, 9, 13)),
    # masked latents with 9 channels
    Case(2, 1, 1, "fp32", 0, process="cut"),
    # micro-batches of three sizes
    Case(2, 1, 2, "fp16", 2, schedule="folded", random_programs=21, process="buckets", cuts=(4, 8, 14)),
    # frozen parts: all but the last layer, the first, one level, and attention; a rank that trains nothing
    Case(2, 1, 1, "fp32", 2, schedule="folded", process="flow", train=("conv_out",)),
    Case(1, 2, 2, "fp32", 1, micro_batches=2, process="flow", train=("conv_in", "time_emb"), rates=(("bias", 3.0),)),
    Case(2, 1, 1, "fp16", 0, schedule="folded", random_programs=2, process="weighted", **LEVEL),
    Case(2, 1, 2, "fp32", 2, schedule="folded", random_programs=13, process="text", cuts=(9, 15, 20), train=("attn",)),
    Case(1, 1, 1, "fp32", 0, process="heads", random_programs=31, tensor=2, train=("time", "resnets.0", "to_[qkv]")),
    # weights of 16 bits, rounded at random
    Case(2, 1, 1, "bf16", 0, schedule="folded", random_programs=3, process="text", train=("attn", "norm"), **ROUNDED),
    # layers that two ranks compute together
    Case(1, 1, 2, "fp16", 1, micro_batches=2, process="caption", tensor=2),
    Case(1, 1, 1, "bf16", 0, micro_batches=2, process="heads", tensor=2, offload=True),
    Case(1, 1, 0, "fp32", 2, process="buckets", tensor=2, split=("up.*", "middle.block.0")),
    # images that two ranks share
    Case(1, 1, 1, "fp32", 1, micro_batches=2, space=2),
    Case(1, 1, 2, "fp16", 0, micro_batches=2, process="caption", space=2),
    Case(1, 1, 0, "fp32", 2, process="reduced", space=2, levels=(0,)),
    Case(1, 1, 0, "fp32", 0, compile=True, process="heads", random_programs=8, space=2),
    Case(1, 1, 2, "fp16", 0, micro_batches=2, process="cut", space=2),
    Case(1, 1, 1, "fp32", 0, process="cut", tensor=2),
]
BY_FOUR = [
    Case(2, 2, 2, "bf16", 1, schedule="folded", random_programs=10, process="reduced"),
    Case(2, 2, 1, "fp32", 1, across="replicas", process="weighted"),
    Case(4, 1, 2, "fp32", 3),
    Case(4, 1, 1, "fp32", 2, offload=True, micro_batches=8, schedule="folded", random_programs=4),
    Case(2, 1, 1, "fp16", 0, schedule="folded", process="heads", random_programs=3, tensor=2),
    Case(1, 2, 2, "fp32", 1, across="replicas", micro_batches=2, tensor=2),
    # images that two or four ranks share, with uneven rows and a level that each computes whole
    Case(2, 1, 1, "fp32", 1, schedule="folded", random_programs=3, process="stored", space=2),
    Case(1, 1, 2, "fp16", 1, micro_batches=2, process="uneven", space=4, levels=(0, 1)),
    Case(1, 1, 1, "bf16", 0, process="heads", space=4, levels=(0,)),
    Case(1, 2, 0, "fp32", 0, across="replicas", micro_batches=2, process="text", space=2),
]
"""The core: each value of every factor but the compiler, and the pairs whose code meets."""

SOME: tuple[tuple[int, Precision, int], ...] = ((0, "fp32", 0), (1, "fp16", 0), (2, "fp32", 2), (2, "fp16", 1))
ONE_PROCESS = [
    Case(1, 1, 1, "bf16", 1, micro_batches=1, process="text", train=("attn",), **ROUNDED),
    Case(1, 1, 0, "fp32", 0, micro_batches=2, process="text", train=("up_blocks.0",)),
    Case(1, 1, 2, "fp32", 0, micro_batches=2, process="stored"),
    Case(1, 1, 0, "fp16", 1, micro_batches=2, process="regression"),
    *(Case(1, 1, *ways, micro_batches=2) for ways in (*SOME, (0, "fp16", 0))),
    *(Case(1, 1, *ways, micro_batches=2, eight_bit=True) for ways in ((0, "fp32", 0), (0, "bf16", 0), (1, "fp16", 0))),
    Case(1, 1, 0, "fp32", 0, compile=True, process="edm", random_programs=8),
    Case(1, 1, 2, "fp16", 1, compile=True, random_programs=9),
    Case(1, 1, 0, "fp32", 5, micro_batches=2, process="text"),
    Case(1, 1, 1, "fp32", 0, compile=True, process="text", random_programs=17),
    Case(1, 1, 2, "bf16", 0, process="buckets"),
    Case(1, 1, 0, "fp16", 0, micro_batches=2, process="cut"),
    Case(1, 1, 0, "fp32", 0, compile=True, process="buckets"),
]
MORE_BY_TWO = [
    *(Case(2, 1, 0, kind, 0, process="edm", train=("conv_out", "up_blocks.1")) for kind in ("fp32", "fp16", "bf16")),
    Case(2, 1, 1, "bf16", 0, process="edm", train=("conv_out",), rates=(("bias", 0.5),), **ROUNDED),
    Case(1, 1, 0, "fp32", 1, process="heads", tensor=2, train=("up_blocks",), eight_bit=True),
    Case(1, 1, 1, "fp32", 0, process="edm", random_programs=31, space=2, train=("time_emb", "conv1.weight", "norm2")),
    Case(2, 1, 0, "fp16", 0, fixed_scale=128, process="flow", rates=(("up_blocks", 0.25),)),
    Case(1, 2, 1, "fp32", 0, eight_bit=True, process="edm", train=("blocks",), rates=(("conv1", 0.25),)),
    Case(2, 1, 1, "fp32", 0, offload=True, process="flow", train=("blocks",), rates=(("attentions", 0.25),)),
    Case(
        1, 2, 1, "fp32", 0, compile=True, process="edm", random_programs=8, train=("time.*weight", "conv_in", "conv2")
    ),
    Case(1, 2, 2, "bf16", 0, micro_batches=2, **ROUNDED),
    Case(1, 2, 2, "fp32", 1),
    *(Case(1, 2, *ways, micro_batches=2, eight_bit=True) for ways in ((0, "fp32", 0), (1, "fp32", 0), (0, "bf16", 0))),
    Case(2, 1, 0, "fp32", 0),
    Case(2, 1, 1, "fp16", 0, random_programs=2, fixed_scale=128),
    Case(2, 1, 1, "fp32", 1, process="edm"),
    Case(2, 1, 1, "fp16", 0, schedule="folded", process="weighted"),
    Case(2, 1, 2, "fp16", 0, schedule="folded", process="stored"),
    Case(2, 1, 1, "fp16", 1, schedule="folded"),
    Case(2, 1, 2, "fp32", 1, process="weighted"),
    Case(2, 1, 1, "fp32", 1, process="stored"),
    Case(2, 1, 2, "fp16", 0, process="rectangles"),
    Case(2, 1, 1, "fp32", 0, process="buckets"),
    Case(1, 2, 2, "fp32", 1, process="buckets"),
    Case(2, 1, 0, "fp16", 0, fixed_scale=128),
    Case(1, 2, 2, "fp16", 1, micro_batches=2, fused=True),
    Case(2, 1, 0, "fp32", 0, schedule="folded", process="reduced"),
    Case(2, 1, 1, "fp16", 1, random_programs=14, process="caption", cuts=(14,)),
    Case(2, 1, 2, "fp32", 1, schedule="folded", random_programs=11, process="regression"),
    Case(1, 2, 2, "bf16", 0, process="cut"),
    Case(1, 2, 1, "bf16", 0, micro_batches=2, process="reduced"),
    *(Case(2, 1, *ways, schedule="folded") for ways in SOME if ways != (1, "fp16", 0)),
    Case(1, 2, 2, "fp16", 1, micro_batches=2, compile=True, fused=True),
    Case(2, 1, 1, "fp32", 2, reentrant=True, schedule="folded", compile=True, random_programs=12),
    Case(2, 1, 0, "bf16", 0, fused=True),
    *(Case(2, 1, *ways, schedule="folded", process="text", cuts=(9, 15, 20)) for ways in (*SOME, (0, "bf16", 1))),
    *(Case(2, 1, *ways, process="text", cuts=(14,)) for ways in (*SOME, (2, "bf16", 2))),
    Case(2, 1, 1, "fp32", 2, reentrant=True, schedule="folded", process="text", random_programs=18),
    Case(2, 1, 2, "fp32", 2, schedule="folded", random_programs=13, process="text", cuts=(9, 15, 20)),
    Case(2, 1, 1, "fp16", 1, random_programs=14, process="text", cuts=(21,)),
    Case(1, 1, 2, "fp16", 1, micro_batches=2, process="text", tensor=2),
    *(
        Case(1, 1, *ways, micro_batches=2, process="heads", tensor=2)
        for ways in (*SOME, (0, "fp16", 0), (1, "bf16", 1))
    ),
    Case(1, 1, 1, "fp32", 0, process="heads", random_programs=31, tensor=2),
    Case(1, 1, 1, "fp16", 1, tensor=2),
    Case(1, 1, 2, "fp32", 3, tensor=2, process="text", split=("up.*",)),
    Case(1, 1, 0, "fp16", 2, tensor=2, reentrant=True, process="heads"),
    Case(1, 1, 0, "fp32", 0, compile=True, process="heads", random_programs=8, tensor=2),
    Case(1, 1, 1, "fp32", 0, compile=True, process="text", random_programs=17, tensor=2),
    *(Case(1, 1, *ways, micro_batches=2, space=2) for ways in (*SOME, (0, "fp16", 1), (0, "bf16", 0), (2, "bf16", 1))),
    *(Case(1, 1, *ways, process="text", micro_batches=2, space=2) for ways in SOME),
    Case(1, 1, 1, "fp32", 0, process="edm", random_programs=31, space=2),
    Case(1, 1, 1, "fp32", 2, compile=True, process="text", random_programs=17, space=2),
    Case(1, 1, 2, "fp16", 1, compile=True, micro_batches=2, process="reduced", space=2, levels=(0,)),
    Case(1, 1, 2, "fp16", 2, process="stored", reentrant=True, space=2, levels=(0,)),
    Case(1, 1, 1, "bf16", 0, process="reduced", micro_batches=2, offload=True, space=2),
    Case(1, 1, 2, "fp32", 0, process="weighted", micro_batches=2, eight_bit=True, space=2),
    Case(1, 1, 0, "fp32", 0, process="regression", space=2, levels=(0,)),
]
MORE_BY_FOUR = [
    Case(4, 1, 0, "fp32", 0, process="stored"),
    Case(2, 2, 2, "fp16", 0, growing_scale=True),
    Case(2, 2, 0, "bf16", 0, across="replicas", process="flow"),
    Case(2, 2, 2, "fp32", 0, offload=True, across="replicas"),
    Case(2, 2, 2, "bf16", 1, fp32_accumulation=True),
    Case(2, 2, 2, "fp16", 1, schedule="folded", random_programs=3, process="edm"),
    Case(4, 1, 0, "fp32", 1, random_programs=10, process="rectangles"),
    Case(4, 1, 1, "bf16", 3, micro_batches=8, schedule="folded", process="text", cuts=(4, 6, 10, 15, 20, 27, 31)),
    Case(2, 2, 2, "fp32", 2, reentrant=True, process="text", cuts=(14,)),
    Case(2, 2, 0, "fp32", 0, schedule="folded", process="buckets"),
    Case(4, 1, 1, "fp16", 2, micro_batches=8, schedule="folded", process="stored"),
    Case(2, 2, 0, "fp16", 1, across="replicas"),
    Case(2, 2, 2, "fp16", 1, schedule="folded", random_programs=3),
    Case(4, 1, 2, "fp32", 1, reentrant=True, micro_batches=1),
    Case(2, 2, 2, "fp32", 0, micro_batches=2, offload=True, wall_clock=True, random_programs=6),
    Case(2, 2, 1, "fp16", 0, offload=True, schedule="folded", across="replicas"),
    Case(4, 1, 0, "fp32", 0, micro_batches=8, schedule="folded"),
    Case(2, 2, 2, "fp16", 0, fp32_accumulation=True, across="replicas"),
    Case(2, 2, 2, "bf16", 0, fp32_accumulation=True, schedule="folded"),
    Case(1, 4, 2, "bf16", 0, random_programs=5),
    Case(2, 2, 0, "fp16", 0, schedule="folded", growing_scale=True, random_programs=7),
    *(Case(4, 1, *ways, process="text", random_programs=19, cuts=(9, 15, 26)) for ways in SOME),
    *(Case(4, 1, *ways, micro_batches=8, schedule="folded", process="text", random_programs=20) for ways in SOME),
    *(Case(2, 1, *ways, schedule="folded", process="text", random_programs=22, tensor=2) for ways in SOME),
    *(Case(1, 2, *ways, process="heads", tensor=2) for ways in (*SOME, (0, "bf16", 0), (2, "bf16", 1))),
    Case(2, 1, 2, "fp32", 1, schedule="folded", tensor=2, random_programs=15),
    Case(2, 1, 0, "fp32", 2, reentrant=True, process="text", tensor=2),
    Case(1, 2, 1, "fp32", 0, tensor=2, split=("down.*",)),
    Case(1, 2, 0, "fp16", 0, tensor=2),
    Case(1, 1, 2, "fp32", 0, tensor=4),
    Case(1, 2, 2, "fp32", 1, across="replicas", process="text", tensor=2),
    Case(1, 2, 2, "fp32", 1, across="replicas", micro_batches=2, process="caption", tensor=2),
    *(Case(2, 1, *ways, space=2) for ways in SOME),
    *(Case(2, 1, *ways, schedule="folded", process="text", random_programs=22, space=2) for ways in SOME),
    *(Case(2, 1, *ways, schedule="folded", process="flow", random_programs=22, space=2) for ways in SOME[2:]),
    *(Case(1, 1, *ways, process="uneven", space=4, levels=(0, 1)) for ways in (*SOME, (1, "bf16", 0), (0, "bf16", 2))),
    *(Case(1, 2, *ways, process="reduced", space=2) for ways in (*SOME, (0, "fp16", 0))),
    Case(2, 1, 2, "bf16", 0, schedule="folded", random_programs=5, process="edm", space=2),
    Case(2, 1, 0, "fp32", 2, reentrant=True, process="text", cuts=(14,), space=2, levels=(0,)),
    Case(1, 1, 2, "fp32", 1, process="text", space=4, levels=(0,)),
    Case(1, 1, 1, "fp32", 0, process="heads", space=4, levels=(0, 1), random_programs=8),
]
"""Other combinations of the same factors."""
ONE_GPU = [
    *(Case(1, 1, zero, "bf16", checkpoint, micro_batches=2) for zero in (0, 1, 2) for checkpoint in (0, 1)),
    *(Case(1, 1, 2, precision, 1, micro_batches=2, kernels="fused") for precision in GRADIENT_TOLERANCE),
]
"""What one GPU has besides: bf16, which a CPU takes long for, and the fused normalisation."""


ON: dict[str, Callable[[], dict[str, str]]] = {
    "CPUs": dict,
    # TF32 rounds to ten bits, by which two ways of adding up the same products differ
    "GPUs": lambda: {"DS_ACCELERATOR": "cuda", "NVIDIA_TF32_OVERRIDE": "0"},
    "one shared GPU": lambda: {"NVIDIA_TF32_OVERRIDE": "0", **on_a_shared_gpu()},
}
LAUNCHES: list[tuple[str, int, list[Case], str, tuple[Any, ...]]] = [
    ("CPUs", 2, BY_TWO, "2 processes", ()),
    ("CPUs", 4, BY_FOUR, "4 processes", ()),
    ("CPUs", 1, ONE_PROCESS, "1 process", (pytest.mark.long,)),
    ("CPUs", 2, MORE_BY_TWO, "2 processes, more", (pytest.mark.long,)),
    ("CPUs", 4, MORE_BY_FOUR, "4 processes, more", (pytest.mark.long,)),
    ("GPUs", 1, [*ONE_PROCESS, *ONE_GPU], "1 GPU", (pytest.mark.gpu,)),
    ("GPUs", 2, [*BY_TWO, *MORE_BY_TWO], "2 GPUs", (pytest.mark.gpu(2),)),
    ("GPUs", 4, [*BY_FOUR, *MORE_BY_FOUR], "4 GPUs", (pytest.mark.gpu(4),)),
    ("one shared GPU", 2, BY_TWO, "2 ranks of one GPU", (pytest.mark.gpu,)),
    ("one shared GPU", 4, BY_FOUR, "4 ranks of one GPU", (pytest.mark.gpu,)),
]


@pytest.mark.parametrize(
    ("on", "processes", "cases"),
    [pytest.param(*launch, id=name, marks=marks) for *launch, name, marks in LAUNCHES],
)
def test_loss_and_every_gradient_equal_plain_pytorch(
    on: str, processes: int, cases: list[Case], tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """No full product. Each ZeRO stage meets fp32 and fp16, and ZeRO-0 and ZeRO-2 meet bf16. Each schedule meets every
    ZeRO stage, recomputation, offloading, random programs, the compiler, replicas and a diffusion other than DDPM's.
    The largest difference of a gradient in each precision is recorded."""
    reports = run_cases(processes, WORKER, [asdict(case) for case in cases], tmp_path, **ON[on]())
    largest: dict[str, float] = {}
    differences = []
    for number, case in enumerate(cases):
        ranks = [report[number] for report in reports]
        differences += [f"{case}: {difference}" for difference in compare(case, ranks)]
        errors = [error for rank in ranks for error in rank[0]["errors"].values()]
        largest[case.precision] = max(largest.get(case.precision, 0.0), *errors)
    for precision, error in largest.items():
        record_property(precision, f"{error:.1e}")
    assert not differences, "\n".join(differences)


QUANTITIES = {"moment_errors": "Adam's first moment", "errors": "gradient"}


def compare(case: Case, ranks: list[list[dict[str, Any]]]) -> list[str]:
    """The differences of one case, each with the step, the stage and the name of the gradient."""
    found = []
    grid = Grid(case.stages, case.replicas * case.space, case.across, (0,) * len(ranks), case.tensor)
    for rank, records in enumerate(ranks):
        where = records[0]["coordinates"]
        if tuple(where) != grid.coordinates(rank):
            found.append(f"rank {rank} is stage, replica and part {where} instead of {grid.coordinates(rank)}")
        graphs = [records[0]["graphs"][case.reentrant], *(record["graphs"][1] for record in records)]
        if len(set(graphs)) > 1:  # reentrant checkpoints need more than layers do that are warmed up alone
            found.append(f"rank {rank} compiled {graphs} graphs up to each step")
        if case.compile and not graphs[0]:
            found.append(f"rank {rank} compiled nothing")
        for record in records:
            if record["contexts"][0] > record["most_kept"] or record["contexts"][-1]:
                found.append(f"rank {rank} holds text of {record['contexts']} micro-batches, not {record['most_kept']}")
        if not records[0]["farthest"] <= GRADIENT_TOLERANCE[case.precision]:
            found.append(f"rank {rank} has predictions that are off by {records[0]['farthest']:.1e}")
        if case.fixed_scale and (scales := {record["loss_scale"] for record in records}) != {case.fixed_scale}:
            found.append(f"rank {rank} scaled the loss by {scales} instead of {case.fixed_scale}")
    for step, records in enumerate(zip(*ranks, strict=True)):
        for stage in range(case.stages):
            if len({record["whole"] for record in records if record["stage"] == stage}) > 1:
                found.append(f"step {step}, stage {stage}: whole parameters have not the same bits on all ranks")
        slack = LATER[case.precision] if step else 1
        named = set()
        for record in records:
            where = f"step {step}, stage {record['stage']}"
            for quantity, expected in (("loss", "expected_loss"), ("gradient_norm", "expected_gradient_norm")):
                if not math.isclose(record[quantity], record[expected], rel_tol=slack * LOSS_TOLERANCE[case.precision]):
                    found.append(f"{where}: {quantity} {record[quantity]} instead of {record[expected]}")
            allowed = slack * GRADIENT_TOLERANCE[case.precision]
            wider = {"moment_errors": allowed + EIGHT_BITS * case.eight_bit, "errors": allowed}
            named |= record["errors"].keys()
            for what, limit in wider.items():
                for name, error in record[what].items():
                    if not error <= limit:
                        found.append(
                            f"{where}: {QUANTITIES[what]} of {name} is off by {error:.1e}, more than {limit:.1e}"
                        )
        for stage in sorted({record["stage"] for record in records}):
            # replicas sum other parts of the gradients in their tensor groups, which differ in size
            same = [record for record in records if record["stage"] == stage]
            for kind, name in enumerate(("messages", "collectives")):
                planned = [record["expected_sent"][kind] for record in same]
                sent = [(record["sent"] or record["expected_sent"])[kind] for record in same]
                if not math.isclose(fmean(sent), fmean(planned), rel_tol=0, abs_tol=SMALL_BYTES):
                    found.append(f"step {step}, stage {stage}: sends {sent} bytes of {name} instead of {planned}")
        for rank, record in enumerate(records):
            if not record["unchanged"]:
                found.append(f"step {step}: rank {rank} changed parameters that are not trained")
            if record["swaps"][0] != record["swaps"][1]:
                found.append(
                    f"step {step}: rank {rank} swaps {record['swaps'][0]} times instead of {record['swaps'][1]}"
                )
        missing = set(records[0]["names"]) - named
        if missing:
            found.append(f"step {step}: no stage has the gradients of {sorted(missing)}")
    return found
