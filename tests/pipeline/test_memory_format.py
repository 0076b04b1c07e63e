"""Images are channels-last from the first convolution to the loss and back, in every stage and between them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from tests.launching import run_ranks, write_json
from tests.pipeline.ladder_worker import Case

WORKER = Path(__file__).with_name("memory_format_worker.py")
CASES = [
    Case(2, 1, 0, "fp32", 0),
    Case(2, 1, 2, "fp16", 1),
    Case(2, 1, 1, "fp32", 2, reentrant=True),
    Case(2, 1, 2, "fp32", 0, schedule="folded"),
    Case(2, 1, 2, "bf16", 1, schedule="folded"),
]


def test_no_layout_is_converted_in_a_stage_or_on_its_way_to_the_next(tmp_path: Path) -> None:
    file = write_json(tmp_path / "cases.json", [asdict(case) for case in CASES])
    done = run_ranks(2, WORKER, str(file), str(tmp_path))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    for rank in range(2):
        for case, found in zip(CASES, json.loads((tmp_path / f"rank{rank}.json").read_text()), strict=True):
            assert found["seen"] > 100, case
            assert found["others"] == {}, case
