"""DeepSpeed's own pipeline engine, used as its documentation says: what this project's engine is measured against."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import deepspeed
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import Tensor, nn

from ddpm_ds.pipeline.build import quiet_deepspeed
from ddpm_ds.predict.plan import RunPlan
from ddpm_ds.train.objective import Noised
from ddpm_ds.train.setting import Setting
from ddpm_ds.unet.layers import Layer
from ddpm_ds.unet.model import build_layer
from ddpm_ds.unet.operations import KeyedDropout, set_image_index
from rivals.choice import bounds_of
from rivals.rows import with_zero_stage
from rivals.rows_deepspeed import layout_of


class TupleLayer(nn.Module):
    """A layer of the list from a tuple to a tuple, as the stock engine carries it.

    The images' index, which dropout needs on every stage, goes along as the first tensor. Tensors are made
    contiguous, since gloo refuses others; and the last layer uses the embedding, since the engine sends a gradient
    for every tensor of a stage, and a stage may have no other use for it.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self._dropouts = [part for part in layer.modules() if isinstance(part, KeyedDropout)]

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | Tensor:
        index, *carry = inputs
        set_image_index(self._dropouts, index)
        outputs = self.layer(tuple(carry))
        if isinstance(outputs, Tensor):
            return outputs + 0 * carry[1][0, 0]
        return (index, *(tensor.contiguous() for tensor in outputs))


class TupleLayerSpec(LayerSpec):
    """Builds layer ``index`` of the list with the weights that every row begins with."""

    def __init__(self, layer: Layer, index: int, seed: int) -> None:
        super().__init__(nn.Module)
        self.layer, self.index, self.seed = layer, index, seed

    def build(self, log: bool = False) -> nn.Module:
        return TupleLayer(build_layer(self.layer, self.index, self.seed))


class CutModule(PipelineModule):
    """A pipeline cut at ``bounds``; None leaves the cuts to DeepSpeed, which balances parameters."""

    def __init__(self, bounds: Sequence[int] | None, **options: Any) -> None:
        self._bounds = bounds
        super().__init__(**options)

    def _partition_layers(self, method: str = "parameters") -> None:
        if self._bounds is None:
            super()._partition_layers(method)
        else:
            self.parts = list(self._bounds)
            self._set_bounds(start=self.parts[self.stage_id], stop=self.parts[self.stage_id + 1])


class StockPipeline:
    """``deepspeed.PipelineEngine`` and its ``train_batch`` as they are."""

    def __init__(self, setting: Setting, *, default_cuts: bool) -> None:
        plan = setting.plan
        zero_stage, why = stock_zero_stage(plan)
        crash = "no activation checkpointing, whose default crashes it on several outputs"
        self.note = "; ".join(part for part in (why, crash if setting.checkpoints() else "") if part)
        self.is_pipeline = plan.ds.layout.stages > 1
        self._objective = setting.objective()
        options = with_zero_stage(replace(plan.ds, checkpoint_interval=0).for_deepspeed(), zero_stage)
        with layout_of(None), quiet_deepspeed(setting.verbose):
            module = CutModule(
                None if default_cuts else bounds_of(plan, "1f1b"),
                layers=[TupleLayerSpec(layer, index, plan.spec.train.seed) for index, layer in enumerate(plan.layers)],
                num_stages=plan.ds.layout.stages,
                loss_fn=self._loss,
            )
            self._engine, *_ = deepspeed.initialize(model=module, config=options)
        cuts = list(map(int, module.parts[1:-1]))
        self.name = f"DeepSpeed PipelineEngine, {'its' if default_cuts else 'our'} cuts {cuts}, {plan.ds.precision}, "
        self.name += f"ZeRO-{zero_stage}"
        self._batches = None
        if self._engine.is_first_stage() or self._engine.is_last_stage():
            self._batches = self._read(setting)

    def step(self) -> Tensor:
        with layout_of(self._engine.mpu):
            return self._engine.train_batch(self._batches) / dist.get_world_size()

    def _loss(self, prediction: Tensor, target: tuple[Tensor, ...]) -> Tensor:
        x0, t, eps = target
        return self._objective.loss(prediction, Noised(x0, t, eps, labels=None))

    def _read(self, setting: Setting) -> Iterator[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]:
        """Inputs of the first stage and targets of the last one; the engine takes its own of them."""
        replica = self._engine.grid.get_data_parallel_id()
        for micro_batch in setting.batches(setting.plan.ds.layout.replicas, replica):
            prepared = self._objective.prepare(micro_batch)
            inputs = self._objective.inputs(prepared) if self._engine.is_first_stage() else ()
            yield (micro_batch.index, *inputs), (prepared.x0, prepared.t, prepared.eps)


def stock_zero_stage(plan: RunPlan) -> tuple[int, str]:
    """The ZeRO stage that the stock engine runs under where the JSON asks for another one, and why."""
    asked = plan.ds.zero_stage
    if asked == 2:
        return 1, "ZeRO-1, since it refuses ZeRO-2"
    if asked == 0 and plan.ds.precision == "fp16":
        return 1, "ZeRO-1, since without ZeRO it forgets the loss scale"
    if asked == 0 and plan.ds.layout.stages > 1 and plan.ds.blocks.get("gradient_clipping", 1.0):
        return 1, "ZeRO-1, since without ZeRO it clips by the first stage's norm alone"
    return asked, ""
