"""First weights: drawn once for each stage, on one replica, and never more of them in a host's memory than needed.

As a script, with a file of cases and a folder, this builds engines and modules on two processes, and writes what each
process drew and had.
"""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ddpm_ds.pipeline import module as pipeline_module
from ddpm_ds.pipeline.build import quiet_deepspeed
from ddpm_ds.pipeline.engine import UnetPipelineEngine
from ddpm_ds.pipeline.module import UnetPipelineModule
from ddpm_ds.unet.blocks import CarryLayer
from ddpm_ds.unet.layers import Layer, unet_layers
from ddpm_ds.unet.model import UNet, build_layer
from ddpm_ds.unet.spec import Interface, UnetSpec
from tests.pipeline.ladder_worker import DTYPES, Case, layers_of, report_cases, run_cases, spec_of

SEED = 5
LARGE = UnetSpec(channels=256, multipliers=(1, 1, 1, 1), blocks_per_level=5)
"""355 MB of weights in fp32, in 56 layers of 9 MB at most."""


def large_layers() -> tuple[Layer, ...]:
    return unet_layers(LARGE, Interface(channels=3, size=(32, 32)))


class HostBytes(TorchDispatchMode):
    """Notes the most bytes that tensors on the host had together."""

    def __init__(self) -> None:
        super().__init__()
        self.most, self._alive = 0, dict[StorageWeakRef, int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.device.type == "cpu":
            storage = result.untyped_storage()
            self._alive[StorageWeakRef(storage)] = storage.nbytes()
        self._alive = {one: size for one, size in self._alive.items() if not one.expired()}
        self.most = max(self.most, sum(self._alive.values()))
        return result


def weight_bytes(layers: tuple[Layer, ...]) -> int:
    return 4 * sum(layer.parameters for layer in layers)


def largest(layers: tuple[Layer, ...]) -> int:
    return max(weight_bytes((layer,)) for layer in layers)


def drawn_layers(build: Callable[[], UnetPipelineEngine]) -> tuple[UnetPipelineEngine, list[int]]:
    """What ``build`` builds, and the layers that this process drew; the weights of others begin as NaN."""
    drew = []

    def noted(layer: Layer, index: int, *given: Any, drawn: bool, **how: Any) -> CarryLayer:
        built = build_layer(layer, index, *given, drawn=drawn, **how)
        if drawn:
            drew.append(index)
        else:
            with torch.no_grad():
                torch._foreach_add_(list(built.parameters()), float("nan"))
        return built

    with patch.object(pipeline_module, "build_layer", noted):
        return build(), drew


def run(values: dict[str, Any]) -> dict[str, Any]:
    if not values:
        layers = large_layers()
        middle = len(layers) // 2
        with HostBytes() as host, quiet_deepspeed(False):
            module = UnetPipelineModule(layers, (0, middle, len(layers)), SEED, dtype=torch.bfloat16)
        own = layers[module.first : module.stop]
        assert {one.dtype for one in module.parameters()} == {torch.bfloat16}
        return {"most": host.most, "own": weight_bytes(own) // 2, "layer": largest(own)}
    case, spec = Case.of(values), spec_of(compiled=False)
    engine, drew = drawn_layers(lambda: case.engine(spec))
    whole = UNet(layers_of(spec), spec.train.seed).layers.to(DTYPES[case.precision])
    wrong = [name for name, one in engine.module.named_parameters() if not one.equal(whole.get_parameter(name))]
    owned = [piece.of(piece.master) for piece in engine.gradients.owned()]
    return {"drew": drew, "wrong": wrong, "finite": all(one.isfinite().all() for one in owned)}


CASES = [
    Case(1, 2, 0, "fp32", 0, micro_batches=2),
    Case(1, 2, 0, "fp16", 0, micro_batches=2),
    Case(1, 2, 1, "bf16", 0, micro_batches=2),
    Case(1, 2, 2, "fp32", 0, micro_batches=2),
]


@pytest.mark.launch
def test_one_replica_draws_and_a_rank_has_its_own_layers_and_one_more(tmp_path: Path) -> None:
    *engines, modules = zip(*run_cases(2, Path(__file__), [*map(asdict, CASES), {}], tmp_path), strict=True)
    for case, ranks in zip(CASES, engines, strict=True):
        every = list(range(len(layers_of(spec_of(compiled=False)))))
        assert [one["drew"] for one in ranks] == [every, []], case
        assert all(not one["wrong"] and one["finite"] for one in ranks), (case, ranks)
    for rank in modules:  # a layer in fp32, and a weight that is drawn, beside layers that are finished
        assert rank["own"] < rank["most"] <= rank["own"] + 2 * rank["layer"] < weight_bytes(large_layers()) / 2, rank


def test_on_a_device_the_host_has_one_weight_at_a_time() -> None:
    layers = large_layers()
    with HostBytes() as host:
        for index, layer in enumerate(layers):
            build_layer(layer, index, SEED, device="meta")
    assert 0 < host.most <= largest(layers) < weight_bytes(layers) / 10


if __name__ == "__main__":
    report_cases(run)
