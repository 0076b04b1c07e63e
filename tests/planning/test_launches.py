"""What the host of a GPU costs: launches of layers, counted, and speeds that were measured and published."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from rivals.measure import CountedOperators, HostCost

from ddpm_ds.config.spec import RunSpec
from ddpm_ds.config.spec_file import load_spec
from ddpm_ds.observe.device_speed import _inputs
from ddpm_ds.planning.costs import DRAWS, launches
from ddpm_ds.planning.decisions import layouts
from ddpm_ds.planning.inputs import LAUNCH_SECONDS, Workload, machine
from ddpm_ds.planning.predictor import Predictor
from ddpm_ds.schema.layout import Layout, TensorSplit
from ddpm_ds.unet import operations
from ddpm_ds.unet.blocks import CarryLayer
from ddpm_ds.unet.model import UNet
from ddpm_ds.unet.operations import FEWEST_CHANNELS
from ddpm_ds.unet.shards import split_layers
from ddpm_ds.unet.tensor_group import TensorGroup
from tests.ds_json import config_of
from tests.launching import REPOSITORY, tiny_spec, tiny_text_spec

SPECS = REPOSITORY / "launch" / "specs"
WITHIN = 1.5
PHOTOS = {spec: ["data.path=photos"] for spec in ("imagenet64", "sdxl")}
"""Options of specs whose images are in a folder."""


SMALL = {"channels": 8, "multipliers": [1, 2, 2, 2], "blocks_per_level": 2}
TEXT = {"context_channels": 8, "blocks": [0, 1, 4, 4], "heads": [1, 1, 2, 2], "pooled_channels": 8}


@pytest.mark.capability
@pytest.mark.parametrize("by_products", [False, True], ids=["together", "by products"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "spec",
    [
        tiny_spec(unet={**SMALL, "attention_resolutions": [4], "dropout": 0.0}),
        tiny_text_spec(unet={**SMALL, "text": TEXT, "attention_resolutions": [], "dropout": 0.0}),
    ],
    ids=["pixels", "text"],
)
def test_predicted_launches_of_layers_equal_counted_ones(
    spec: RunSpec, ranks: int, by_products: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a tenth: what PyTorch copies to make contiguous depends on the shapes. Groups sum nothing here."""
    monkeypatch.setattr(operations, "BY_PRODUCTS", by_products)
    layers = [*split_layers(Workload(spec, config_of(), on_cpu=True).layers, TensorSplit(ranks))]
    sums = sum(layer.sums for layer in layers)
    assert (sums > 0) == (ranks > 1)
    unet, inputs = UNet(layers, seed=0), _inputs(layers[0], 2, torch.device("cpu"), torch.float32)
    for layer, module in zip(layers, unet.layers, strict=True):
        if isinstance(module, CarryLayer) and layer.shards > 1:
            module.split(TensorGroup(0, layer.shards))
    forward, backward, text = HostCost(), HostCost(), spec.unet.text
    context = torch.zeros(2, text.tokens, text.context_channels) if text else None
    with CountedOperators(forward):
        prediction = unet(*inputs, context=context)
    with CountedOperators(backward):
        torch.autograd.backward([prediction], [torch.ones_like(prediction)])
    forwards, backwards = map(sum, zip(*map(launches, layers), strict=True))
    assert forward.launches == pytest.approx(forwards - sums - DRAWS, rel=0.1)
    shapes = [one.weight.shape for one in unet.modules() if isinstance(one, operations.Convolution) and one.stride == 1]
    wide = [kernel == 3 and min(out, channels) >= FEWEST_CHANNELS for out, kernel, _, channels in shapes]
    together = 0 if by_products or ranks > 1 else sum(wide)
    assert backward.launches + 2 * together == pytest.approx(backwards - sums, rel=0.1)


@pytest.mark.parametrize(
    ("spec", "kind", "half", "images", "graphs", "measured"),
    [
        ("cifar10", "h200", True, 128, False, 2344),  # our layers in a plain loop (docs/gpu.md)
        ("cifar10", "h200", True, 128, True, 5670),  # (docs/gpu.md)
        ("sdxl", "h200", True, 2, False, 9.5),  # our engine without graphs, 7.2 to 10.5 (docs/gpu.md)
        ("sdxl", "h200", True, 2, True, 12.4),  # (docs/gpu.md)
        ("imagenet64", "a100-40", True, 32, False, 70),  # EDM, about: 2,500 million images in 13 days on 32
        ("cifar10", "v100", False, 128, False, 236),  # TorchCFM
        ("cifar10", "rtx4090", False, 128, False, 749),  # TorchCFM
    ],
)
def test_speeds_of_gpus_are_near_measured_ones(
    spec: str, kind: str, half: bool, images: int, graphs: bool, measured: float
) -> None:
    given = load_spec(SPECS / f"{spec}.yaml", PHOTOS.get(spec, []))
    optimizer = {"type": "AdamW", "params": {"fused": graphs}}
    job = Workload(given, config_of(bf16={"enabled": half}, optimizer=optimizer, graphs=graphs), on_cpu=False)
    one = Predictor(job, replace(machine(kind, half=half, devices=1, nodes=1), memory_bytes=2**40))
    seconds = one.predict(Layout(1, 1, "1f1b", images, 1, 0, 2 * graphs, False)).step_seconds
    assert graphs == (seconds < sum(map(sum, map(launches, job.layers))) * LAUNCH_SECONDS) or kind != "h200"
    assert abs(math.log(images / seconds / measured)) < math.log(WITHIN)


def test_replicas_have_graphs_and_stages_only_where_they_are_asked_for() -> None:
    spec = load_spec(SPECS / "cifar10.yaml", [])
    blocks: dict[str, Any] = {"bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"fused": True}}}
    replicas, stages = Layout(1, 2, "1f1b", 64, 1, 0, 2, False), Layout(2, 1, "1f1b", 64, 2, 0, 2, False)

    def seconds(layout: Layout, graphs: Any) -> float:
        job = Workload(spec, config_of(**blocks, graphs=graphs), on_cpu=False)
        return Predictor(job, machine("h200", half=True, devices=2, nodes=1)).predict(layout).step_seconds

    assert seconds(replicas, "auto") == seconds(replicas, True) < seconds(replicas, False)
    assert seconds(stages, "auto") == seconds(stages, False) > seconds(stages, True)
    job = Workload(spec, config_of(**blocks | {"bf16": {}, "fp16": {"enabled": True}}), on_cpu=False)
    eager = (replace(replicas, zero_stage=0), replace(stages, zero_stage=1))  # the first without flat gradients
    assert job.is_replayed(replicas) and not any(map(job.is_replayed, eager))


def test_one_gpu_gets_a_layout_whose_steps_are_graphs() -> None:
    spec, blocks = load_spec(SPECS / "digits.yaml", []), {"optimizer": {"type": "AdamW", "params": {"fused": True}}}

    def stages(devices: int, **config: Any) -> set[int]:
        job = Workload(spec, config_of(**blocks | config), on_cpu=False)
        return {layout.zero_stage for layout in layouts(job, devices, offload=False)}

    assert stages(1, bf16={"enabled": True}) == stages(1, graphs=False) == stages(2) == {0, 1, 2}
    assert stages(1) == stages(1, fp16={"enabled": True}) == {1, 2}
