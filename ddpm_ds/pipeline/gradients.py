"""What an engine does with its gradients: in one flat tensor, parameter by parameter, or as DeepSpeed does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Literal, Protocol

import torch
from deepspeed import comm
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from ddpm_ds.config.ds_config import BUCKET_ELEMENTS
from ddpm_ds.pipeline import deepspeed_insides as insides
from ddpm_ds.pipeline.flat_gradients import FlatGradients, PassKind, Wanted, clipping, over_stages
from ddpm_ds.unet.weight_gradients import through_autograd


class Gradients(Protocol):
    """What an engine does with its gradients."""

    def gathering(self, phase: int, kind: PassKind) -> AbstractContextManager[None]:
        """Surround a pass that gives gradients."""

    def give(self, weight: Tensor, gradient: Tensor) -> None:
        """Take the gradient of a weight in a weight-gradient pass, in the weight's dtype."""

    def reduce(self) -> None:
        """Finish the step's gradients, averaged over the replicas."""

    def stepping(self, scale: float) -> AbstractContextManager[None]:
        """Surround the optimizer's step; ``scale`` is the loss scale of the gradients."""


def gradients_of(engine: PipelineEngine, wanted: Wanted, way: Literal["flat", "deepspeed"]) -> Gradients:
    """Return what an engine does with its gradients, as the resolved ``pipeline.gradients`` says."""
    if way == "deepspeed":
        return DeepSpeedGradients(engine)
    if insides.is_partitioned(engine):
        return FlatGradients(engine, wanted)
    return SeparateGradients(engine)


class DeepSpeedGradients:
    """DeepSpeed's own way: hooks of each parameter, its reductions and its optimizer's step."""

    def __init__(self, engine: PipelineEngine) -> None:
        self._engine = engine

    def gathering(self, phase: int, kind: PassKind) -> AbstractContextManager[None]:
        return insides.micro_batch_backward(self._engine)

    def give(self, weight: Tensor, gradient: Tensor) -> None:
        through_autograd(weight, gradient)

    def reduce(self) -> None:
        insides.reduce_gradients(self._engine)

    @contextlib.contextmanager
    def stepping(self, scale: float) -> Iterator[None]:
        with insides.scale_updated_afterwards(self._engine), insides.one_wait(self._engine):
            yield


class SeparateGradients:
    """Gradients of an optimizer without flat tensors, DeepSpeed's for fp16 and the plain one for fp32, both without
    ZeRO: each parameter keeps its own, and all are handled by foreach.
    """

    def __init__(self, engine: PipelineEngine) -> None:
        self._engine, self._scale = engine, 1.0
        self._parameters = list(engine.module.parameters())
        self._pairs = insides.take_over_separate_step(engine, self._update)
        sizes = [wide.numel() for _, wide in self._pairs]
        self._flat = torch.empty(sum(sizes), device=engine.device)  # its memory exists within a step only
        views = self._flat.split(sizes)
        self._wide = [view.view(wide.shape) for view, (_, wide) in zip(views, self._pairs, strict=True)]
        self._flat.untyped_storage().resize_(0)

    def gathering(self, phase: int, kind: PassKind) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def give(self, weight: Tensor, gradient: Tensor) -> None:
        if weight.grad is None:
            weight.grad = gradient.contiguous()
        else:
            weight.grad.add_(gradient)

    @torch.no_grad()
    def reduce(self) -> None:
        if self._engine.dp_world_size == 1:
            return
        chunk: list[Tensor] = []
        elements = 0
        for parameter in self._parameters:
            if chunk and elements + parameter.numel() > BUCKET_ELEMENTS:
                _average(chunk, self._engine)
                chunk, elements = [], 0
            assert parameter.grad is not None
            chunk.append(parameter.grad)
            elements += parameter.numel()
        _average(chunk, self._engine)

    @contextlib.contextmanager
    def stepping(self, scale: float) -> Iterator[None]:
        self._scale = scale
        yield
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def _update(self) -> None:
        """Clip and step the fp32 masters, or skip a step whose gradients are not finite."""
        narrow: list[Tensor] = [parameter for parameter, _ in self._pairs]
        masters = [master for _, master in self._pairs]
        gradients = [parameter.grad for parameter in narrow if parameter.grad is not None]
        norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)
        norm = over_stages(self._engine, torch.linalg.vector_norm(torch.stack(norms)))
        with insides.unless_invalid(self._engine, norm, self._scale) as steps:
            if steps:
                self._flat.untyped_storage().resize_(self._flat.numel() * self._flat.element_size())
                torch._foreach_copy_(self._wide, gradients)
                factor = clipping(norm, self._engine.gradient_clipping(), self._scale)
                if factor is not None:
                    torch._foreach_mul_(self._wide, factor)
                for master, gradient in zip(masters, self._wide, strict=True):
                    master.grad = gradient
                self._engine.basic_optimizer.step()
                for master in masters:
                    master.grad = None
                self._flat.untyped_storage().resize_(0)
                torch._foreach_copy_(narrow, masters)


def _average(gradients: list[Tensor], engine: PipelineEngine) -> None:
    """Average gradients over the replicas in one reduction."""
    flat = _flatten_dense_tensors(gradients).to(engine.communication_data_type)
    comm.all_reduce(flat, group=engine.grid.get_data_parallel_group())
    flat.mul_(1.0 / engine.dp_world_size)
    torch._foreach_copy_(gradients, _unflatten_dense_tensors(flat, gradients))
