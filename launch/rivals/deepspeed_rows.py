"""Rows on DeepSpeed: this project's engines, DeepSpeed's own pipeline engine, and ZeRO-2 without a pipeline."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import DualPipeVModule, LayerSpec, PipelineModule
from deepspeed.utils import groups
from torch import Tensor, nn

from ddpm_ds.config.ds_config import BUCKET_ELEMENTS, Schedule
from ddpm_ds.data.loader import MicroBatch
from ddpm_ds.observe.observer import Recording
from ddpm_ds.pipeline import deepspeed_insides as insides
from ddpm_ds.pipeline.build import build_engine, quiet_deepspeed
from ddpm_ds.planning import RunPlan, cut_and_ordered
from ddpm_ds.train.objective import Noised
from ddpm_ds.unet.blocks import set_context, transformer_blocks
from ddpm_ds.unet.layers import Layer
from ddpm_ds.unet.model import UNet, build_layer
from ddpm_ds.unet.operations import KeyedDropout, set_image_index
from rivals.choice import bounds_of, replica_micro_batches
from rivals.rows import SCALES, Probe, Setting, without_dropout
from rivals.unets import comparable_unet


def layout_of(grid: Any | None) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which DeepSpeed's layout of the processes is ``grid``; None means that all are replicas.

    DeepSpeed has one layout for the whole process, that of the pipeline built last, and an engine without a pipeline
    would take its data-parallel group from there.
    """
    return mock.patch.object(groups, "mpu", grid)


def with_zero_stage(config: dict[str, Any], stage: int) -> dict[str, Any]:
    """Return the JSON with another ZeRO stage; buckets are given, since DeepSpeed's own would take gigabytes."""
    buckets = {"reduce_bucket_size": BUCKET_ELEMENTS, "allgather_bucket_size": BUCKET_ELEMENTS} if stage else {}
    return {**config, "zero_optimization": {**buckets, **config.get("zero_optimization", {}), "stage": stage}}


class OurPipeline:
    """This project's engine with the given DeepSpeed JSON, under one of its schedules."""

    def __init__(self, setting: Setting, schedule: Schedule, *, graphs: bool = True) -> None:
        plan = setting.plan if graphs else replace(setting.plan, ds=replace(setting.plan.ds, graphs=False))
        schedule_name = "1F1B" if schedule == "1f1b" else schedule
        self.name = f"ddpm_ds {schedule_name}, {plan.ds.precision}, ZeRO-{plan.ds.layout.zero_stage}"
        self.note = ""
        self.is_pipeline = plan.ds.layout.stages > 1
        self._replicas = plan.ds.layout.replicas
        bounds = bounds_of(plan, schedule)
        plan = replace(plan, ds=plan.ds.with_layout(schedule=schedule), bounds=bounds)
        with layout_of(None):
            plan = cut_and_ordered(plan, setting.device)
            self._engine = build_engine(
                plan.layers,
                plan.bounds,
                plan.ds,
                setting.objective(),
                seed=plan.spec.train.seed,
                programs=plan.programs,
                verbose=setting.verbose,
            )
        replica = self._engine.grid.get_data_parallel_id()
        self._batches = setting.batches(self._replicas, replica) if self._engine.reads_data else None

    def step(self) -> Tensor:
        with layout_of(self._engine.mpu):
            return self._engine.train_batch(self._batches) / self._replicas


class TracedPipeline(OurPipeline):
    """This project's engine under the JSON's schedule, every step recorded as a timeline is."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting, setting.plan.ds.layout.schedule)
        self.name += ", traced"
        self._recording = Recording(self._engine, 0)

    def step(self) -> Tensor:
        self._recording.begin_step(self._recording.step + 1)
        return super().step()


class OneStageEngine(OurPipeline):
    """Our 1F1B engine with one stage, with the weights of the other rows of ``--one-device``."""

    forward_backward = None

    def __init__(self, setting: Setting, *, graphs: bool) -> None:
        super().__init__(setting, "1f1b", graphs=graphs)
        self.name += ", 1 stage" if graphs else ", 1 stage, no graph"
        self.note = self._engine.why_kernels
        self.parameters, self.macs = setting.plan.parameters, setting.plan.macs
        self._objective = setting.objective()
        weights = comparable_unet(setting).layers.state_dict()
        with torch.no_grad():
            for piece in insides.owned_pieces(self._engine):
                values = weights[piece.name].flatten()[piece.first : piece.first + piece.length]
                piece.of(piece.master).copy_(values)
        insides.refresh_weights(self._engine)

    def probe(self, micro_batch: MicroBatch) -> Probe:
        """Return prediction, loss and gradient norm of ``micro_batch``; this is a step, so the weights move once."""
        engine = self._engine
        with layout_of(engine.mpu), without_dropout(engine.module):
            with torch.no_grad():
                inputs = self._objective.inputs(self._objective.prepare(micro_batch))
                prediction: Tensor = engine.module(inputs)
            for _ in range(SCALES):  # an engine that overflows halves its loss scale and leaves the weights alone
                loss = engine.train_batch(iter([micro_batch]))
                norm = engine.gradient_norm()
                if math.isfinite(norm) or not engine.fp16_enabled():
                    break
        engine.images_seen = 0
        return Probe(prediction.float().cpu(), float(loss), norm)


class ZeroWithoutPipeline:
    """Whole U-Net on every process under ZeRO-2, which partitions gradients and optimizer state among them."""

    is_pipeline = False

    def __init__(self, setting: Setting) -> None:
        plan = setting.plan
        self.name = f"DeepSpeed ZeRO-2 without pipeline, {plan.ds.precision}"
        self.note = setting.unchecked()
        self._objective, self._device = setting.objective(), setting.device
        self._replicas, self._micro_batches = dist.get_world_size(), replica_micro_batches(plan)
        self._batches = setting.batches(self._replicas, dist.get_rank())
        config = with_zero_stage(plan.ds.for_deepspeed(), 2)
        config.pop("pipeline", None)
        config["gradient_accumulation_steps"] = self._micro_batches
        with layout_of(None), quiet_deepspeed(setting.verbose):
            unet = UNet(plan.layers, plan.spec.train.seed)
            self._engine, *_ = deepspeed.initialize(model=unet, config=config)

    def step(self) -> Tensor:
        loss_sum = torch.zeros((), device=self._device)
        with layout_of(None):
            for micro_batch in itertools.islice(self._batches, self._micro_batches):
                prepared = self._objective.prepare(micro_batch)
                images = micro_batch.index.to(self._device)
                prediction = self._engine(*self._objective.inputs(prepared), images=images)  # (N, C, H, W)
                loss = self._objective.loss(prediction, prepared)
                self._engine.backward(loss)
                self._engine.step()
                loss_sum += loss.detach()
        return loss_sum / (self._micro_batches * self._replicas)


class TupleLayer(nn.Module):
    """Layer of the list as a function from tuple to tuple, which the stock engine needs.

    The images' index, which dropout needs on every stage, travels as the first tensor, and encoded text, if the U-Net
    reads any, as the second. Tensors are made contiguous, since gloo refuses others. The last layer uses the embedding
    and the text, since the engine sends a gradient for every tensor that a stage received, and the last stage may not
    use them otherwise.
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
    """Pipeline cut at ``bounds``; None leaves the cuts to DeepSpeed, which balances parameters."""

    def __init__(self, bounds: Sequence[int] | None, **options: Any) -> None:
        self._bounds = bounds
        super().__init__(**options)

    def _partition_layers(self, method: str = "parameters") -> None:
        if self._bounds is None:
            super()._partition_layers(method)
        else:
            self.parts = list(self._bounds)
            self._set_bounds(start=self.parts[self.stage_id], stop=self.parts[self.stage_id + 1])


class FoldedCutModule(DualPipeVModule, CutModule):
    """The same for ``deepspeed.DualPipeVEngine``, with two stages on each rank."""


class StockPipeline:
    """``deepspeed.PipelineEngine``, or ``DualPipeVEngine``, and its ``train_batch`` as they are, used as DeepSpeed's
    documentation says.
    """

    def __init__(self, setting: Setting, *, default_cuts: bool = False, folded: bool = False) -> None:
        plan, seed = setting.plan, setting.plan.spec.train.seed
        zero_stage, why = stock_zero_stage(plan)
        crash = "no activation checkpointing, whose default crashes it on several outputs"
        self.note = "; ".join(part for part in (why, crash if plan.ds.layout.checkpoint_interval else "") if part)
        self.is_pipeline = plan.ds.layout.stages > 1
        self._objective, text = setting.objective(), plan.spec.unet.text is not None
        config = with_zero_stage(plan.ds.with_layout(checkpoint_interval=0).for_deepspeed(), zero_stage)
        with layout_of(None), quiet_deepspeed(setting.verbose):
            module = (FoldedCutModule if folded else CutModule)(
                None if default_cuts else bounds_of(plan, "folded" if folded else "1f1b"),
                layers=[LayerSpec(TupleLayer, layer, index, seed, text) for index, layer in enumerate(plan.layers)],
                num_stages=plan.ds.layout.stages,
                loss_fn=self._loss,
            )
            self._engine, *_ = deepspeed.initialize(model=module, config=config)
        cuts = list(map(int, module.parts[1:-1]))
        self.name = f"DeepSpeed {type(self._engine).__name__}, {'its' if default_cuts else 'our'} cuts {cuts}, "
        self.name += f"{plan.ds.precision}, ZeRO-{zero_stage}"
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
        """Yield inputs of the first stage and targets of the last; the engine uses those that its stage needs."""
        replica = self._engine.grid.get_data_parallel_id()
        for micro_batch in setting.batches(setting.plan.ds.layout.replicas, replica):
            prepared = self._objective.prepare(micro_batch)
            inputs: list[Tensor] = [micro_batch.index]
            if self._engine.is_first_stage():
                if (context := self._objective.context(micro_batch)) is not None:
                    inputs.append(context.to(next(self._engine.module.parameters()).dtype))
                inputs += self._objective.inputs(prepared)
            yield tuple(inputs), (prepared.x0, prepared.t, prepared.eps)


def stock_zero_stage(plan: RunPlan) -> tuple[int, str]:
    """Return the ZeRO stage that the stock engine runs under, and the reason if the JSON asks for another one."""
    asked, clips = plan.ds.layout.zero_stage, plan.ds.blocks.get("gradient_clipping", 1.0)
    if asked == 2:
        return 1, "ZeRO-1, since it refuses ZeRO-2"
    if asked == 0 and plan.ds.precision == "fp16":
        return 1, "ZeRO-1, since without ZeRO it forgets the loss scale"
    if asked == 0 and plan.ds.layout.stages > 1 and clips:
        return 1, "ZeRO-1, since without ZeRO it clips by the first stage's norm alone"
    return asked, ""
