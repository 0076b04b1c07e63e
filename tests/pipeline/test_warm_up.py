"""Layers are warmed up where training will run them, and nothing of it is left."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddpm_ds.pipeline import engine
from ddpm_ds.pipeline.engine import UnetPipelineEngine
from ddpm_ds.pipeline.module import warm_up
from ddpm_ds.unet.layers import unet_layers
from ddpm_ds.unet.model import build_layer
from ddpm_ds.unet.spec import Interface
from ddpm_ds.unet.weight_gradients import WaitingGradients
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


@pytest.mark.parametrize("gradients", [True, False])
def test_memory_in_which_algorithms_were_tried_is_no_peak_of_training(
    gradients: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    monkeypatch.setattr(engine, "warm_up", lambda *_, **how: done.append("tried"))
    monkeypatch.setattr(engine, "forget_peaks", lambda device: done.append(f"forgot {device}"))
    cold: Any = SimpleNamespace(
        phases=1,
        micro_batches=2,
        compiled=False,
        device=torch.device("cuda"),
        own_layers=lambda phase: {},
        module=SimpleNamespace(sized_layers=((),), activation_checkpoint_interval=0),
        _waiting=WaitingGradients(()),
        _warm=set(),
    )
    assert [UnetPipelineEngine.warm_up(cold, 4, gradients=gradients) for _ in range(2)] == [True, False]
    assert done == ["tried", "forgot cuda"]
