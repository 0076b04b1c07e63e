"""Two real ranks that train a few layouts under all observers at once; the tests of this folder share their reports."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.launching import run_ranks, write_json
from tests.pipeline.ladder_worker import Case

LOADER_SECONDS = 0.01
COURSE = [1, 2, 3, 4, 5]
ROLLED_BACK = [1, 2, 2, 3, 1, 2, 3, 4, 5, 6, 5, 6]
"""Back before the traced steps are over, and after they and the profiled ones are."""
CASES: dict[str, tuple[Case, list[int]]] = {
    "linear": (Case(2, 1, 1, "fp32", 0), COURSE),
    "folded": (Case(2, 1, 2, "fp16", 1, schedule="folded", reentrant=True), ROLLED_BACK),
    "replicas": (Case(1, 2, 2, "fp32", 0, micro_batches=1), COURSE),
    "broken": (Case(1, 2, 0, "fp32", 0, micro_batches=1), [4, 5]),
}


@dataclass(frozen=True)
class Observed:
    """What two ranks left of each case."""

    folder: Path
    ranks: list[dict[str, dict[str, Any]]]
    """What each rank reports, by the case's name."""


@pytest.fixture(scope="session")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Observed:
    folder = tmp_path_factory.mktemp("observed")
    entries = [
        {"name": name, "case": asdict(case), "course": course, "loader_seconds": LOADER_SECONDS * (name == "folded")}
        for name, (case, course) in CASES.items()
    ]
    worker, file = Path(__file__).with_name("observed_worker.py"), write_json(folder / "cases.json", entries)
    done = run_ranks(2, worker, str(file), str(folder), XDG_CACHE_HOME=str(folder))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    reports = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]
    return Observed(folder, [dict(zip(CASES, report, strict=True)) for report in reports])
