"""Images are channels-last from the first convolution to the loss and back, in every stage and between them."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.launching import launch, run_ranks, write_json
from tests.pipeline.ladder_worker import Case

WORKER = Path(__file__).with_name("memory_format_worker.py")
CASES = [
    Case(2, 1, 2, "fp16", 1),
    Case(2, 1, 1, "fp32", 2, reentrant=True),
    Case(2, 1, 0, "fp32", 0, schedule="folded"),
]


ON_A_GPU = [
    Case(1, 1, 0, "fp32", 0, kernels="fused"),
    Case(1, 1, 2, "fp16", 1, kernels="fused"),
    Case(1, 1, 2, "bf16", 0, kernels="fused"),
]
"""PyTorch's own normalisation of groups has contiguous images on CUDA."""


def test_no_layout_is_converted_in_a_stage_or_on_its_way_to_the_next(tmp_path: Path) -> None:
    check(run_ranks, 2, CASES, tmp_path)


@pytest.mark.gpu
def test_no_layout_is_converted_on_a_gpu(tmp_path: Path) -> None:
    check(functools.partial(launch, DS_ACCELERATOR="cuda"), 1, ON_A_GPU, tmp_path)


def check(start: Callable[..., CompletedProcess[str]], processes: int, cases: list[Case], folder: Path) -> None:
    """Every rank of every case sees activations, and none in another format."""
    file = write_json(folder / "cases.json", [asdict(case) for case in cases])
    done = start(processes, WORKER, str(file), str(folder))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    for rank in range(processes):
        for case, found in zip(cases, json.loads((folder / f"rank{rank}.json").read_text()), strict=True):
            assert found["seen"] > 100, case
            assert found["others"] == {}, case
