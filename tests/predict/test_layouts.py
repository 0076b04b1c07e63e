"""Every layout shares devices, layers and batch, and training accepts the JSON of every one."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from ddpm_ds.config.ds_config import resolve
from ddpm_ds.pipeline.cuts import partition
from ddpm_ds.predict.layouts import Candidate, ds_config, layouts
from ddpm_ds.predict.search import candidates
from tests.launching import tiny_spec
from tests.predict.small import ADAMW, small_job, small_predictor


def random_job(seed: int) -> tuple[Any, int]:
    """A job and a number of devices."""
    rng = random.Random(seed)
    unet = {"multipliers": [1] * rng.randint(1, 3), "blocks_per_level": rng.randint(1, 3), "attention_resolutions": []}
    spec = tiny_spec(unet=unet, train={"batch_images": rng.choice([8, 12, 16, 24])})
    config: dict[str, Any] = rng.choice(
        [
            {},
            {
                "fp16": {"enabled": True, "hysteresis": 2, "consecutive_hysteresis": True},
                "zero_optimization": {"stage": 2},
            },
            {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}, "zero_optimization": {"stage": 1}},
            {"zero_optimization": {"stage": 1, "reduce_bucket_size": 1000, "offload_optimizer": {"device": "cpu"}}},
            {"pipeline": {"stages": 2, "partition": [5], "use_reentrant": True}, "train_micro_batch_size_per_gpu": 1},
        ]
    )
    return small_job(spec, **config), rng.choice([2, 4, 6, 8])


@pytest.mark.parametrize("seed", range(8))
def test_every_candidate_is_shared_without_remainder_and_accepted(seed: int) -> None:
    job, devices = random_job(seed)
    predictor = small_predictor(devices, job)
    found = candidates(predictor)
    assert found
    for layout in found:
        assert layout.stages * layout.replicas == devices
        assert layout.replicas * layout.micro_batches * layout.micro_batch_images == job.spec.train.batch_images
        bounds = predictor.bounds(layout)
        config = json.loads(json.dumps(ds_config(job, layout, bounds)))
        read = resolve(config, job.spec, world_size=devices, stages=None, path="plan.json")
        assert (read.layout.stages, read.layout.micro_batches) == (layout.stages, layout.micro_batches)
        assert (read.schedule, read.zero_stage) == (layout.schedule, layout.zero_stage)
        assert read.partition != "measured"
        assert partition(job.layers, read.layout.stages, read.partition, read.schedule) == bounds
        assert read.checkpoint_interval == layout.checkpoint_interval
        assert ("offload_optimizer" in read.blocks["zero_optimization"]) == layout.offload
    assert len({layout.stages for layout in found}) > 1


def test_the_fold_has_two_micro_batches_a_rank_or_more_and_more_than_one_rank() -> None:
    folds = [one for one in layouts(small_job(), 4, offload=False) if one.schedule == "folded"]
    assert folds and all(one.stages > 1 and one.micro_batches >= 2 * one.stages for one in folds)


def test_a_given_accumulation_is_kept() -> None:
    job = small_job(tiny_spec(train={"accumulation": 4}))
    assert {one.micro_batches for one in layouts(job, 2, offload=False)} == {4}


def test_wide_accumulation_asks_for_zero_and_offload_for_a_host() -> None:
    wide = small_job(bf16={"enabled": True}, data_types={"grad_accum_dtype": "fp32"}, zero_optimization={"stage": 1})
    assert {one.zero_stage for one in layouts(wide, 2, offload=False)} == {1, 2}
    found = {(one.zero_stage, one.offload) for one in layouts(small_job(), 2, offload=True)}
    assert found == {(0, False), (1, False), (2, False), (1, True), (2, True)}


def test_the_json_keeps_what_a_layout_does_not_decide() -> None:
    job = small_job(gradient_clipping=0.5, zero_optimization={"stage": 2, "reduce_bucket_size": 1000})
    layout = Candidate(2, 1, "1f1b", 2, 8, 1, 2, False)
    assert ds_config(job, layout, (0, 5, len(job.layers))) == {
        "optimizer": ADAMW,
        "gradient_clipping": 0.5,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 8,
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 1000},
        "pipeline": {
            "stages": 2,
            "schedule": "1f1b",
            "partition": [5],
            "across_hosts": "auto",
            "activation_checkpoint_interval": 1,
        },
    }
    assert job.config["zero_optimization"] == {"stage": 2, "reduce_bucket_size": 1000}  # what was given is untouched


def test_a_loss_scaler_that_only_zero_has_does_not_rule_out_training_without_zero() -> None:
    job = small_job(
        fp16={"enabled": True, "hysteresis": 2, "consecutive_hysteresis": True}, zero_optimization={"stage": 2}
    )
    assert {one.zero_stage for one in candidates(small_predictor(2, job))} == {0, 1, 2}
    assert job.config["fp16"]["hysteresis"] == 2
