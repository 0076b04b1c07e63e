"""Predicted memory against the bytes of all tensors of real ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ddpm_ds.predict.layouts import Candidate, ds_config
from ddpm_ds.predict.predictor import Predictor
from tests.launching import run_ranks, tiny_spec, write_json
from tests.predict.small import small_job, small_predictor

SPEC = tiny_spec(
    data={"image_size": 16},
    unet={"channels": 32, "attention_resolutions": [8], "dropout": 0.0, "classes": None},
    train={"label_drop": 0.0},
)
# Two micro-batches under 1F1B: gloo's sends count as under way until a step ends, so its messages add up.
CASES: list[tuple[dict[str, Any], Candidate]] = [
    ({}, Candidate(2, 1, "1f1b", 8, 2, 0, 0, False)),
    ({"fp16": {"enabled": True}}, Candidate(1, 2, "1f1b", 2, 4, 0, 1, False)),
    ({"fp16": {"enabled": True}}, Candidate(2, 1, "folded", 2, 8, 0, 2, False)),
    ({}, Candidate(2, 1, "folded", 4, 4, 0, 1, False)),
    ({}, Candidate(2, 1, "folded", 4, 4, 1, 1, False)),
    ({}, Candidate(1, 2, "1f1b", 4, 2, 2, 2, False)),
]


@pytest.mark.long
@pytest.mark.launch
def test_predicted_memory_is_what_ranks_hold(tmp_path: Path) -> None:
    predictors: list[Predictor] = []
    configs = []
    for precision, layout in CASES:
        job = small_job(SPEC, on_cpu=True, **precision, zero_optimization={"stage": 1, "reduce_bucket_size": 50_000})
        predictors.append(small_predictor(2, job, kind="cpu"))
        configs.append(ds_config(job, layout, predictors[-1].bounds(layout)))
    cases = write_json(tmp_path / "cases.json", {"spec": SPEC.model_dump_json(), "configs": configs})
    done = run_ranks(2, Path(__file__).with_name("held_worker.py"), str(cases), str(tmp_path))
    assert done.returncode == 0, done.stderr
    counted = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    ratios = {
        f"{precision} {layout} rank {rank}": predictor.predict(layout).memory[rank % layout.stages].total
        / counted[rank][number]
        for number, ((precision, layout), predictor) in enumerate(zip(CASES, predictors, strict=True))
        for rank in range(2)
    }
    # What convolutions take while they compute is not predicted: 0 to 7 % of the rest with AVX2, 11 % without.
    wrong = {case: ratio for case, ratio in ratios.items() if not 0.85 < ratio < 1.1}
    assert not wrong
