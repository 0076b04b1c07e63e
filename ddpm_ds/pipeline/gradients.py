"""What an engine does with its gradients: in one flat tensor, parameter by parameter, or as DeepSpeed does."""

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Literal, Protocol

import torch
from deepspeed import comm
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from ddpm_ds.config.ds_config import BUCKET_ELEMENTS
from ddpm_ds.pipeline import deepspeed_insides as insides
from ddpm_ds.pipeline.flat_gradients import FlatGradients, PassKind, Wanted, norm_of, over_stages
from ddpm_ds.pipeline.own_step import OwnStep
from ddpm_ds.unet.tensor_group import is_alike, is_partial
from ddpm_ds.unet.weight_gradients import through_autograd


class Gradients(Protocol):
    """What an engine does with its gradients in a step, and what the host may ask of the step afterwards."""

    @property
    def scale(self) -> Tensor | float:
        """Factor on the loss before the backward."""

    def begin_step(self) -> None:
        """Set the numbers of a step that the host knows: the learning rate of the optimizer's groups."""

    def clear(self) -> None:
        """Forget the gradients of the step before."""

    def gathering(self, phase: int, kind: PassKind) -> AbstractContextManager[None]:
        """Surround a pass that gives gradients."""

    def give(self, weight: Tensor, gradient: Tensor) -> None:
        """Take the gradient of a weight in a weight-gradient pass, in the weight's dtype."""

    def reduce(self) -> None:
        """Finish the step's gradients, averaged over the replicas."""

    def step(self) -> None:
        """Clip and step the optimizer, or skip a step whose gradients are not finite."""

    def end_step(self) -> None:
        """Count the step, and set the learning rate of the next if DeepSpeed's scheduler does."""

    def was_applied(self) -> bool:
        """Return whether the last step was taken."""

    def norm(self) -> float:
        """Return the norm of the last step's gradients over all stages before clipping; not finite if skipped."""

    def skipped_steps(self) -> int:
        """Return the number of skipped steps since the last call."""

    def overflows_at_floor(self) -> int:
        """Return how many steps up to the last overflowed in fp16 although the loss scale could fall no further."""

    def scaler_state(self) -> dict[str, float]:
        """Return the state of the loss scaler; empty unless it moves."""

    def load_scaler_state(self, state: dict[str, float]) -> None:
        """Restore a loss scaler's state, and forget overflows."""


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
        self.scale = 1.0
        self._overflows_at_floor = 0

    def clear(self) -> None:
        insides.forget_offloaded_gradients(self._engine)

    def begin_step(self) -> None:
        self.scale = insides.loss_scale(self._engine)

    def gathering(self, phase: int, kind: PassKind) -> AbstractContextManager[None]:
        return insides.micro_batch_backward(self._engine)

    def give(self, weight: Tensor, gradient: Tensor) -> None:
        through_autograd(weight, gradient)

    def reduce(self) -> None:
        insides.reduce_gradients(self._engine)

    def step(self) -> None:
        with insides.scale_updated_afterwards(self._engine), insides.one_wait(self._engine):
            insides.take_step(self._engine)

    def end_step(self) -> None:
        stuck = not self.was_applied() and self.scale <= insides.scale_settings(self._engine).floor
        self._overflows_at_floor = self._overflows_at_floor + 1 if stuck else 0

    def was_applied(self) -> bool:
        return bool(PipelineEngine.was_step_applied(self._engine))

    def norm(self) -> float:
        return insides.gradient_norm(self._engine, self.scale)

    def skipped_steps(self) -> int:
        return insides.skips(self._engine)

    def overflows_at_floor(self) -> int:
        return self._overflows_at_floor

    def scaler_state(self) -> dict[str, float]:
        return insides.scaler_state(self._engine)

    def load_scaler_state(self, state: dict[str, float]) -> None:
        self._overflows_at_floor = 0
        insides.load_scaler_state(self._engine, state)


class SeparateGradients(OwnStep):
    """Gradients of an optimizer without flat tensors, DeepSpeed's for fp16 and the plain one for fp32, both without
    ZeRO: each parameter keeps its own, and all are handled by foreach.
    """

    def __init__(self, engine: PipelineEngine) -> None:
        super().__init__(engine)
        self._parameters = list(engine.module.parameters())
        self._tensor = engine.module.tensor
        kinds = (self._tensor.counts, is_partial, is_alike)
        self._counted, self._partial, self._alike = ([*filter(kind, self._parameters)] for kind in kinds)
        self._masters = insides.separate_masters(engine)
        sizes = [master.numel() for master in self._masters]
        self._flat = torch.empty(sum(sizes), device=engine.device)  # its memory exists within a step only
        views = self._flat.split(sizes) if sizes else ()
        self._wide = [view.view(master.shape) for view, master in zip(views, self._masters, strict=True)]
        """fp32 gradients; none if the weights are fp32 themselves."""
        self._release()

    def clear(self) -> None:
        pass

    def gathering(self, phase: int, kind: PassKind) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def give(self, weight: Tensor, gradient: Tensor) -> None:
        if weight.grad is None:
            weight.grad = gradient.contiguous()
        else:
            weight.grad.add_(gradient)

    @torch.no_grad()
    def reduce(self) -> None:
        if self._engine.dp_world_size > 1:
            self._average_all()
        if self._tensor.size > 1:
            self._tensor.agree(_gradients_of(self._partial), _gradients_of(self._alike))

    def _average_all(self) -> None:
        """Average all gradients over the replicas, some at a time."""
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

    @torch.no_grad()
    def step(self) -> None:
        gradients = _gradients_of(self._parameters)
        counted = gradients if self._tensor.rank == 0 else _gradients_of(self._counted)
        norm = over_stages(self._engine, norm_of(counted or [gradients[0].flatten()[:0]]))
        with self._unless_invalid(norm) as steps:
            if steps:
                self._step_masters(gradients, self._factor(norm))
        for parameter in self._parameters:
            parameter.grad = None

    def _step_masters(self, gradients: list[Tensor], factor: Tensor | None) -> None:
        """Step the fp32 masters, and cast them into weights of 16 bits."""
        if self._widens:
            self._take(gradients, factor)
            if self._masters:
                torch._foreach_copy_(self._parameters, self._masters)
            return
        if self._wide:
            self._flat.untyped_storage().resize_(self._flat.numel() * self._flat.element_size())
            torch._foreach_copy_(self._wide, gradients)
            gradients = self._wide
        if factor is not None:
            torch._foreach_mul_(gradients, factor)
        if self._wide:
            for master, gradient in zip(self._masters, gradients, strict=True):
                master.grad = gradient
        self._take()
        if self._wide:
            for master in self._masters:
                master.grad = None
            self._release()
            torch._foreach_copy_(self._parameters, self._masters)

    def _release(self) -> None:
        self._flat.untyped_storage().resize_(0)


def _gradients_of(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of parameters."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _average(gradients: list[Tensor], engine: PipelineEngine) -> None:
    """Average gradients over the replicas in one reduction."""
    flat = _flatten_dense_tensors(gradients).to(engine.communication_data_type)
    comm.all_reduce(flat, group=engine.grid.get_data_parallel_group())
    flat.mul_(1.0 / engine.dp_world_size)
    torch._foreach_copy_(gradients, _unflatten_dense_tensors(flat, gradients))
