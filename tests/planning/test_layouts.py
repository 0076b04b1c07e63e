"""Layouts of a run, and the kinds of devices that they are planned for."""

import json
from dataclasses import replace
from typing import Any

import pytest

from ddpm_ds.pipeline.cuts import partition
from ddpm_ds.planning.decisions import candidates, ds_config, layouts
from ddpm_ds.planning.inputs import kind_of
from ddpm_ds.planning.memory import pipeline_memory
from ddpm_ds.schema.layout import Layout
from tests.ds_json import laid_out
from tests.launching import tiny_spec
from tests.planning.small import ADAMW, small_job, small_predictor


def test_a_gpu_is_known_by_its_whole_name() -> None:
    for name, kind in {
        "NVIDIA A100-SXM4-80GB": "a100-80",
        "NVIDIA A100-PCIE-40GB": "a100-40",
        "NVIDIA H100 80GB HBM3": "h100",
        "NVIDIA GeForce RTX 4090": "rtx4090",
        "NVIDIA GeForce RTX 5090": "rtx5090",
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "rtxpro6000",
        "NVIDIA RTX A6000": "a6000",
        "NVIDIA B300 SXM6 AC": "b300",
        "AMD Instinct MI300X": "mi300x",
        "NVIDIA A10G": "a10",
        "NVIDIA L40S": "l40s",
        "NVIDIA L4": "l4",
    }.items():
        assert kind_of(name) == kind
    assert not any(map(kind_of, ("NVIDIA L40", "NVIDIA RTX A1000", "NVIDIA RTX 6000 Ada Generation")))


ZERO_1 = {"zero_optimization": {"stage": 1}}
FP16 = {"fp16": {"enabled": True, "hysteresis": 2, "consecutive_hysteresis": True}, "zero_optimization": {"stage": 2}}
"""With a loss scaler that only ZeRO has, which must not rule out training without ZeRO."""
BF16 = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}, **ZERO_1}
OFFLOAD = {"zero_optimization": {"stage": 1, "reduce_bucket_size": 1000, "offload_optimizer": {"device": "cpu"}}}
CUT = {
    "pipeline": {"stages": 2, "partition": [5], "use_reentrant": True},
    "train_micro_batch_size_per_gpu": 1,
}


@pytest.mark.parametrize(
    ("config", "levels", "batch", "devices", "zero_stages"),
    [
        (FP16, 2, 12, 6, {0, 1, 2}),
        (FP16 | {"optimizer": {"type": "AdamW"}}, 2, 12, 6, {1, 2}),  # DeepSpeed's own Adam
        (BF16, 3, 16, 8, {1, 2}),
        (OFFLOAD, 2, 12, 4, {0, 1, 2}),
        (CUT, 1, 16, 2, {0, 1, 2}),
    ],
)
def test_every_candidate_is_shared_without_remainder_and_accepted(
    config: dict[str, Any], levels: int, batch: int, devices: int, zero_stages: set[int]
) -> None:
    unet = {"multipliers": [1] * levels, "blocks_per_level": 2, "attention_resolutions": []}
    job = small_job(tiny_spec(unet=unet, train={"batch_images": batch}), **config)
    predictor = small_predictor(devices, job)
    found = candidates(predictor)
    for layout in found:
        assert layout.stages * layout.replicas == devices
        assert layout.replicas * layout.micro_batches * layout.micro_batch_images == batch
        bounds = predictor.bounds(layout)
        filled = json.loads(json.dumps(ds_config(job, layout, bounds)))
        read = laid_out(filled, job.spec, world_size=devices, stages=None, path="plan.json")
        assert read.layout == layout and (layout.stages == 1 or isinstance(read.partition, list))
        assert partition(job.layers, read.layout.stages, read.planned_partition, layout.schedule) == bounds
    assert len({layout.stages for layout in found}) > 1
    assert {layout.zero_stage for layout in found} == zero_stages
    planned = [layout for layout in found if layout.schedule == "planned"]
    assert all(one.stages > 1 for one in planned)
    fewer = [one for one in planned if one.in_flight != "auto"]
    assert fewer and all(one.in_flight == one.stages == one.most_kept < one.micro_batches for one in fewer)
    assert {replace(one, in_flight="auto", checkpoint_interval=0) for one in fewer} < set(planned)


def test_two_micro_batches_are_kept_for_each_stage_and_three_where_zero_2_reduces_after_each_pass() -> None:
    usual = Layout(4, 2, "planned", 1, 16, 0, 1, False)
    others = (replace(usual, zero_stage=2), replace(usual, zero_stage=2, replicas=1), replace(usual, in_flight=5))
    assert [one.most_kept for one in (usual, *others)] == [8, 12, 8, 5]
    assert "16 micro-batches of 1, 5 in flight, ZeRO-1" in others[-1].words() and "flight" not in usual.words()


def test_a_given_accumulation_is_kept_and_offload_needs_a_host_and_zero() -> None:
    job = small_job(tiny_spec(train={"accumulation": 4}))
    assert {one.micro_batches for one in layouts(job, 2, offload=False)} == {4}
    several = layouts(small_job(), 4, offload=False, nodes=2)
    assert all((one.across_hosts == "auto") == (1 in (one.stages, one.replicas)) for one in several)
    found = {(one.zero_stage, one.offload) for one in layouts(small_job(), 2, offload=True)}
    assert found == {(0, False), (1, False), (2, False), (1, True), (2, True)}


def test_the_json_keeps_what_a_layout_does_not_decide() -> None:
    given: dict[str, Any] = {"gradient_clipping": 0.5, "zero_optimization": {"stage": 2, "reduce_bucket_size": 1000}}
    job = small_job(**given)
    filled = ds_config(job, Layout(2, 1, "1f1b", 2, 8, 1, 2, False), (0, 5, len(job.layers)))
    assert filled.items() >= {"optimizer": ADAMW, **given, "train_micro_batch_size_per_gpu": 2}.items()
    assert filled["pipeline"].items() >= {"stages": 2, "partition": [5], "activation_checkpoint_interval": 1}.items()
    assert job.config.given == {"optimizer": ADAMW, **given}  # what was given is untouched


def test_of_buckets_memory_is_that_of_the_largest_and_time_that_of_the_mean() -> None:
    spec = tiny_spec(unet={"attention_resolutions": []})
    alone, shares = small_job(spec), (((8, 8), 0.5), ((12, 8), 0.25), ((4, 8), 0.25))
    largest = small_job(spec.model_copy(update={"data": spec.data.model_copy(update={"image_size": (12, 8)})}))
    job, layout = replace(alone, sizes=shares), Layout(2, 1, "1f1b", 2, 4, 0, 0, False)
    bounds = small_predictor(2, alone).bounds(layout)
    assert pipeline_memory(job, layout, bounds) == pipeline_memory(largest, layout, bounds)
    assert pipeline_memory(job, layout, bounds) != pipeline_memory(alone, layout, bounds)
    # pixels of the mean image are those of 8x8; so are its multiply-accumulates but for attention's
    one, mean = (small_predictor(2, each).predict(layout) for each in (alone, job))
    assert mean.step_seconds == pytest.approx(one.step_seconds, rel=1e-2)
    wider = replace(alone, sizes=(((12, 8), 1.0),))
    longer = small_predictor(2, wider).predict(layout)
    assert 1.4 * one.pass_seconds < longer.pass_seconds < 1.6 * one.pass_seconds
    assert longer.traffic.within_hosts == 1.5 * one.traffic.within_hosts > 0
