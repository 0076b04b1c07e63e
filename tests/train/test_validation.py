"""Samples and held-out loss through the pipeline: those of one process, on every layout, and training never notices."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.launching import run_ranks, write_json
from tests.train.validation_worker import Look

WORKER = Path(__file__).with_name("validation_worker.py")
PREDICTION_TOLERANCE = {"fp32": 1e-5, "fp16": 2e-2}
LOSS_TOLERANCE = {"fp32": 1e-5, "fp16": 2e-3}
EDM = {"schedule": "edm", "objective": "v"}
WEIGHTED = {"objective": "v", "weighting": "p2", "zero_terminal_snr": True, "input_perturbation": 0.1}
PIXELS_OFF = {"fp32": 0.01, "fp16": 0.3}
"""Share of the pixels that may round to the neighbouring value."""


@pytest.mark.launch
@pytest.mark.parametrize(
    "looks",
    [
        pytest.param(
            [
                Look(1, 2, zero=1, guidance=3.0, kind="ddpm"),
                Look(2, 1, "fp16", guidance=2.0, kind="ddim"),
                Look(2, 1, schedule="folded", process=WEIGHTED),
                Look(2, 1, schedule="folded", kind="heun", guidance=2.0, process=EDM, between=(0.1, 50.0)),
            ],
            id="2 processes",
        ),
        pytest.param(
            [
                Look(2, 2, "fp16", guidance=2.0, across="replicas"),
                Look(2, 2, count=1, zero=0),
                Look(4, 1, count=20, zero=1),
                Look(2, 2, kind="ddpm", guidance=2.0, schedule="folded", across="replicas"),
                Look(4, 1, "fp16", schedule="folded"),
            ],
            id="4 processes",
            marks=pytest.mark.long,
        ),
    ],
)
def test_what_the_pipeline_draws_and_measures_is_that_of_one_process(looks: list[Look], tmp_path: Path) -> None:
    processes = looks[0].stages * looks[0].replicas
    file = write_json(tmp_path / "cases.json", [asdict(look) for look in looks])
    done = run_ranks(processes, WORKER, str(file), str(tmp_path))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(processes)]
    for number, look in enumerate(looks):
        records = [rank[number] for rank in ranks]
        assert all(record["averages_used"] for record in records), look
        assert all(record["put_back"] for record in records), look
        assert all(record["training"] and record["undisturbed"] for record in records), look
        assert all(record["prediction"] <= PREDICTION_TOLERANCE[look.precision] for record in records), look
        assert records[0]["shape"] == [look.count, 1, 8, 8]
        assert records[0]["pixels"] <= PIXELS_OFF[look.precision], look
        assert look.precision != "fp32" or records[0]["image"] <= 1, look
        expected = records[0]["expected"]
        firsts = [record["held_out"] for record in records if record["held_out"]]
        assert len(firsts) == look.replicas
        for values in firsts:
            assert values == pytest.approx(expected, rel=LOSS_TOLERANCE[look.precision]), look
