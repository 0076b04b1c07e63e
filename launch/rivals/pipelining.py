"""Rows on ``torch.distributed.pipelining``, with stages of the same layers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

from ddpm_ds.training.objective import Noised
from ddpm_ds.unet.blocks import pack, unpack, walk
from ddpm_ds.unet.layers import Layer, boundary_shapes
from ddpm_ds.unet.model import build_layer
from ddpm_ds.unet.operations import KeyedDropout, set_image_index
from rivals.rows import Optimizer, Setting


class StageModule(nn.Module):
    """Layers ``first`` to ``stop - 1``, from the tensors at the cut before them to those at the cut after them.

    A tensor that is h and the newest skip crosses once, as in our engine. Tensors are contiguous for gloo.
    """

    def __init__(self, layers: Sequence[Layer], first: int, stop: int, seed: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(build_layer(layers[index], index, seed) for index in range(first, stop))
        self._dropouts = [part for part in self.layers.modules() if isinstance(part, KeyedDropout)]
        self._before, self._end = layers[first - 1], layers[stop - 1]

    def forward(self, *received: Tensor, images: Tensor) -> Tensor | tuple[Tensor, ...]:
        """``images`` (N,) int64 are image indices."""
        set_image_index(self._dropouts, images)
        for tensor in received:
            if tensor.requires_grad:  # its gradient is sent as it is, and a split backward leaves it channels-last
                tensor.register_hook(Tensor.contiguous)
        carry = walk(self.layers, unpack(received, self._before))
        if isinstance(carry, Tensor):  # the prediction
            return carry
        return tuple(tensor.contiguous() for tensor in pack(carry, self._end))


class TorchPipeline:
    """PyTorch's pipeline without replicas: 1F1B has our cuts, other schedules have two stages on each rank."""

    comparable, note = True, ""

    def __init__(self, setting: Setting, schedule: str) -> None:
        plan = setting.plan
        layout, single = plan.ds.layout, schedule == "Schedule1F1B"
        self.name = f"torch.distributed.pipelining {schedule.removeprefix('Schedule')}, fp32"
        count = layout.stages * (1 if single else 2)
        bounds = setting.under("1f1b", count).bounds
        self._objective, self._batches = setting.objective(), setting.batches(1, 0)
        self._micro_batches, self._device = layout.micro_batches, setting.device
        own = [dist.get_rank()] if single else [dist.get_rank(), count - 1 - dist.get_rank()]
        self._first, self._last = 0 in own, count - 1 in own
        modules, stages = nn.ModuleList(), []
        for index in own:
            module = StageModule(plan.layers, bounds[index], bounds[index + 1], plan.spec.train.seed)
            modules.append(module.to(setting.device))
            received, sent = (_like_crossing(setting, cut) for cut in bounds[index : index + 2])
            stages.append(PipelineStage(module, index, count, setting.device, input_args=received, output_args=sent))
        self._schedule: Any = getattr(schedules, schedule)(
            stages[0] if single else stages, n_microbatches=self._micro_batches, loss_fn=self._loss, scale_grads=False
        )
        self._optimizer = Optimizer(setting, modules.parameters())
        self._prepared: list[Noised] = []
        """Micro-batches of this step, on the first and on the last stage."""

    def step(self) -> Tensor:
        micro_batches = list(itertools.islice(self._batches, self._micro_batches))
        if self._first or self._last:
            self._prepared = [self._objective.prepare(micro_batch) for micro_batch in micro_batches]
        losses: list[Tensor] = []
        self._schedule.step(
            arg_mbs=[self._objective.inputs(noised) for noised in self._prepared] if self._first else None,
            kwarg_mbs=[{"images": micro_batch.index.to(self._device)} for micro_batch in micro_batches],
            target_mbs=[torch.tensor(number) for number in range(self._micro_batches)] if self._last else None,
            losses=losses if self._last else None,
            return_outputs=False,
        )
        self._optimizer.step(norm_group=dist.group.WORLD)
        if not self._last:
            return torch.zeros((), device=self._device)
        return torch.stack(losses).detach().sum()

    def _loss(self, prediction: Tensor, number: Tensor) -> Tensor:
        """Return a micro-batch's part of the mean loss; a target has to be one tensor, so it is a number."""
        return self._objective.loss(prediction, self._prepared[int(number)]) / self._micro_batches


def _like_crossing(setting: Setting, cut: int) -> tuple[Tensor, ...]:
    """Return meta tensors like a micro-batch's at ``cut``, which may be the U-Net's inputs or its output."""
    layers, images = setting.plan.layers, setting.plan.ds.layout.micro_batch_images
    inside, count = 0 < cut < len(layers), 1 if setting.plan.spec.unet.classes is None else 2
    shapes = boundary_shapes(layers, cut) if inside else (layers[-1 if cut else 0].output_shape,)
    with torch.device("meta"):
        crossing = tuple(torch.empty(images, *shape, requires_grad=cut > 0) for shape in shapes)
        return crossing if cut else (*crossing, *[torch.empty(images, dtype=torch.int64)] * count)
