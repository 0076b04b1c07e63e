"""Rows on DeepSpeed: this project's engines and DeepSpeed's own pipeline engines."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import DualPipeVModule, LayerSpec, PipelineModule
from deepspeed.utils import groups
from torch import Tensor, nn

from ddpm_ds.config.ds_config import ResolvedDsConfig
from ddpm_ds.pipeline.build import build_engine, quiet_deepspeed
from ddpm_ds.schema.layout import BUCKET_ELEMENTS, Schedule
from ddpm_ds.training.objective import Noised
from ddpm_ds.unet.blocks import set_context, transformer_blocks
from ddpm_ds.unet.layers import Layer
from ddpm_ds.unet.model import build_layer
from ddpm_ds.unet.operations import KeyedDropout, set_image_index
from rivals.rows import Setting


def layout_of(grid: object) -> contextlib.AbstractContextManager[object]:
    """Return a context with ``grid`` as DeepSpeed's only layout of the processes."""
    return mock.patch.object(groups, "mpu", grid)


class OurPipeline:
    """Our engine with the given DeepSpeed JSON, under one of its schedules."""

    def __init__(self, setting: Setting, schedule: Schedule, *, graphs: bool = True) -> None:
        plan = setting.under(schedule)
        plan = plan if graphs else replace(plan, ds=plan.ds.with_keys({"graphs": False}))
        how = ("1F1B" if schedule == "1f1b" else schedule) + ("" if graphs else ", eager")
        self.name = f"ddpm_ds {how}, {plan.ds.precision}, ZeRO-{plan.ds.layout.zero_stage}"
        self.comparable = True
        layout = plan.ds.layout
        self._data_ranks, self._graphs = layout.data_ranks, graphs and setting.device.type == "cuda"
        with layout_of(None):
            parts, seed = (plan.layers, plan.bounds, plan.ds, setting.objective()), plan.spec.train.seed
            self._engine = build_engine(*parts, seed=seed, programs=plan.programs, verbose=setting.verbose)
        replica = self._engine.grid.get_data_parallel_id() // layout.space.size
        self._batches = setting.batches(layout.replicas, replica) if self._engine.reads_data else None

    @property
    def note(self) -> str:
        """Reason why steps on a GPU are no graphs, or nothing."""
        return f"eager: {why}" if self._graphs and (why := self._engine.graph.why_eager) else ""

    def step(self) -> Tensor:
        with layout_of(self._engine.mpu):
            return self._engine.train_batch(self._batches) / self._data_ranks


class TupleLayer(nn.Module):
    """Layer as a function from tuple to tuple, which the stock engine needs.

    The images' index, which dropout needs, travels as the first tensor, and encoded text as the second. Tensors are
    contiguous for gloo. The last layer uses embedding and text, since the engine sends gradients of both.
    """

    def __init__(self, layer: Layer, index: int, seed: int, reads_text: bool) -> None:
        super().__init__()
        self.layer = build_layer(layer, index, seed)
        self._dropouts = [part for part in self.layer.modules() if isinstance(part, KeyedDropout)]
        self._readers = transformer_blocks(self.layer.modules())
        self._relayed = 1 + reads_text

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | Tensor:
        (index, *context), carry = inputs[: self._relayed], inputs[self._relayed :]
        context = [one if one.requires_grad else one.requires_grad_() for one in context]  # the engine sends gradients
        set_image_index(self._dropouts, index)
        set_context(self._readers, context[0] if context else None)
        outputs = self.layer(carry)
        if isinstance(outputs, Tensor):
            return outputs + sum(0 * one.flatten()[0] for one in (carry[1], *context))
        return (index, *context, *(tensor.contiguous() for tensor in outputs))


class CutModule(PipelineModule):
    """Pipeline cut at ``bounds``."""

    def __init__(self, bounds: Sequence[int], **options: object) -> None:
        self._bounds = bounds
        super().__init__(**options)

    def _partition_layers(self, method: str = "parameters") -> None:
        self.parts = list(self._bounds)
        self._set_bounds(start=self.parts[self.stage_id], stop=self.parts[self.stage_id + 1])


class FoldedCutModule(DualPipeVModule, CutModule):
    """Pipeline cut at ``bounds`` for ``deepspeed.DualPipeVEngine``, with two stages on each rank."""


class StockPipeline:
    """``deepspeed.PipelineEngine`` or ``DualPipeVEngine``, used as DeepSpeed documents."""

    def __init__(self, setting: Setting, *, folded: bool) -> None:
        plan, seed = setting.plan, setting.plan.spec.train.seed
        bounds, (zero_stage, why) = setting.under("folded" if folded else "1f1b").bounds, stock_zero_stage(plan.ds)
        self.note, self.comparable = why, True
        self._objective, text = setting.objective(), plan.spec.unet.text is not None
        config, sizes = plan.ds.with_layout(checkpoint_interval=0).for_deepspeed(), ("reduce", "allgather")
        buckets = {f"{size}_bucket_size": BUCKET_ELEMENTS for size in sizes if zero_stage}  # its own take gigabytes
        config["zero_optimization"] = {**buckets, **config.get("zero_optimization", {}), "stage": zero_stage}
        with layout_of(None), quiet_deepspeed(setting.verbose):
            module = (FoldedCutModule if folded else CutModule)(
                bounds,
                layers=[LayerSpec(TupleLayer, layer, index, seed, text) for index, layer in enumerate(plan.layers)],
                num_stages=plan.ds.layout.stages,
                loss_fn=self._loss,
            )
            self._engine, *_ = deepspeed.initialize(model=module, config=config)
        cuts = list(map(int, module.parts[1:-1]))
        self.name = f"DeepSpeed {type(self._engine).__name__}, cuts {cuts}, {plan.ds.precision}, ZeRO-{zero_stage}"
        reads_data = self._engine.is_first_stage() or self._engine.is_last_stage()
        self._batches = self._read(setting) if reads_data else None

    def step(self) -> Tensor:
        with layout_of(self._engine.mpu):
            return self._engine.train_batch(self._batches) / dist.get_world_size()

    def _loss(self, prediction: Tensor, target: tuple[Tensor, ...]) -> Tensor:
        x0, t, eps = target
        unread = torch.empty(0, dtype=torch.int64)
        return self._objective.loss(prediction, Noised(x0, t, eps, labels=None, images=unread))

    def _read(self, setting: Setting) -> Iterator[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]:
        """Yield inputs of the first stage and targets of the last; the engine uses its stage's."""
        replica = self._engine.grid.get_data_parallel_id()
        for micro_batch in setting.batches(setting.plan.ds.layout.replicas, replica):
            prepared = self._objective.prepare(micro_batch)
            inputs: list[Tensor] = [micro_batch.index]
            if self._engine.is_first_stage():
                if (context := self._objective.context(micro_batch)) is not None:
                    inputs.append(context.to(next(self._engine.module.parameters()).dtype))
                inputs += self._objective.inputs(prepared)
            yield tuple(inputs), (prepared.x0, prepared.t, prepared.eps)


def stock_zero_stage(ds: ResolvedDsConfig) -> tuple[int, str]:
    """Return the stock engine's ZeRO stage, and why it is not the JSON's; an empty reason if it is."""
    asked, clips = ds.layout.zero_stage, ds.config.gradient_clipping
    if asked == 2:
        return 1, "ZeRO-1, since it refuses ZeRO-2"
    if asked == 0 and (ds.precision == "fp16" or (ds.layout.stages > 1 and clips)):
        return 1, "ZeRO-1, since without ZeRO it forgets the loss scale, and clips by the first stage's norm alone"
    return asked, ""
