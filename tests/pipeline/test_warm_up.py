"""Layers are warmed up where training will run them, and nothing of it is left."""

import pytest

from ddpm_ds.pipeline.module import warm_up
from ddpm_ds.unet.layers import unet_layers
from ddpm_ds.unet.model import build_layer
from ddpm_ds.unet.spec import Interface
from tests.launching import tiny_spec

LAYERS = unet_layers(tiny_spec().unet, Interface(channels=1, size=(8, 8)))


@pytest.mark.parametrize(("gradients", "recompute", "forwards"), [(False, False, 1), (True, False, 1), (True, True, 2)])
def test_each_layer_runs_forwards_and_once_more_where_backward_recomputes(
    gradients: bool, recompute: bool, forwards: int
) -> None:
    modules = {index: build_layer(layer, index, seed=0) for index, layer in enumerate(LAYERS)}
    ran = dict.fromkeys(modules, 0)
    for index, module in modules.items():

        def count(*_: object, index: int = index) -> None:
            ran[index] += 1

        module.register_forward_pre_hook(count)
    warm_up(modules, LAYERS, 2, gradients=gradients, recompute=recompute)
    assert set(ran.values()) == {forwards}
    assert all(parameter.grad is None for module in modules.values() for parameter in module.parameters())
