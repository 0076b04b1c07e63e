"""A training step that does not log lets the host run ahead of the device."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.launching import launch, run_ranks, write_json

WORKER = Path(__file__).with_name("synchronisation_worker.py")
CASES: dict[str, dict[str, Any]] = {
    f"zero{zero}-{precision}{'-fused' if fused else ''}": {
        "stages": 1,
        "replicas": 1,
        "zero": zero,
        "precision": precision,
        "checkpoint": 0,
        "micro_batches": 1,
        "optimizer": {"fused": fused},
        "clippings": [1e-3, 1e6] if zero == 0 and not fused else [1e-3],
    }
    for zero, precision, fused in (
        (0, "fp32", False),
        (2, "fp32", True),
        (0, "bf16", True),
        (1, "bf16", False),
        (0, "fp16", False),
        (2, "fp16", False),
    )
}


def waits(name: str) -> int:
    """How often the host must hear from the device: in fp16 whether to change the loss scale, elsewhere whether to
    step, unless the optimizer decides that itself or, as in fp32 without ZeRO, steps whatever the gradients are."""
    precision = CASES[name]["precision"]
    if precision == "fp16":
        return 1
    return 0 if CASES[name]["optimizer"]["fused"] or name.startswith("zero0-fp32") else 1


def run(folder: Path, cases: list[dict[str, Any]], start: Callable[..., Any], **environment: Any) -> dict[str, Any]:
    """What the worker saw, by case."""
    done = start(1, WORKER, str(write_json(folder / "cases.json", cases)), str(folder), **environment)
    assert done.returncode == 0, done.stderr
    return dict(zip(CASES, json.loads((folder / "rank0.json").read_text()), strict=True))


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(tmp_path_factory.mktemp("synchronisation"), list(CASES.values()), run_ranks)


@pytest.mark.launch
@pytest.mark.parametrize("name", CASES)
def test_a_step_that_does_not_log_waits_for_the_device_as_seldom_as_it_can(reports: dict[str, Any], name: str) -> None:
    found = reports[name]["waits"]
    assert len(found) == waits(name), "\n".join(found)


@pytest.mark.launch
@pytest.mark.parametrize("name", CASES)
def test_every_number_is_as_with_the_stock_waits_also_around_a_step_that_is_skipped(
    reports: dict[str, Any], name: str
) -> None:
    assert reports[name]["differs"] == []


@pytest.mark.launch
@pytest.mark.gpu
def test_on_a_gpu_pytorch_sees_no_other_waits(tmp_path: Path) -> None:
    cases = [{**case, "clippings": []} for case in CASES.values()]
    found = run(tmp_path, cases, launch, DS_ACCELERATOR="cuda")
    assert {name: report["waits"] for name, report in found.items() if len(report["waits"]) != waits(name)} == {}
