"""Sums, reductions and steps of gradients: in one flat tensor, or parameter by parameter where DeepSpeed has none.

DeepSpeed's optimizers with flat weights handle gradients parameter by parameter: a hook, two copies, a norm and new
views for each. :class:`FlatGradients` takes their place, so that the work of a step on the host does not grow with the
number of parameters::

    gradients of a pass ─▶ bucket ─▶ bucket ─▶ ...          one hook for each, on the parameter that arrives last
        one foreach ──────────┘ averaged over the replicas under ZeRO-2
                              ▼
    flat sum ─▶ norm ─▶ fp32 gradient of the own partition, unscaled and clipped ─▶ AdamW ─▶ weights

Weights, fp32 masters and the optimizer's state stay where DeepSpeed puts them: with ``offload_optimizer`` masters and
state are in host memory, the fp32 gradient is copied there a bucket at a time, and AdamW steps there.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

import torch
from deepspeed import comm
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from ddpm_ds.pipeline import deepspeed_insides as insides
from ddpm_ds.pipeline.own_step import OwnStep
from ddpm_ds.schema.layout import BUCKET_ELEMENTS

PassKind = Literal["whole", "inputs", "weights"]
"""Parameters that get gradients in a pass: all of a phase, all but the deferred ones, or the deferred ones."""
Wanted = Callable[[int, PassKind], Sequence[nn.Parameter]]
"""Function that returns the parameters that a pass of a phase gives gradients to, in about the order of arrival."""
SUMMED = 2**16
"""Number of squares that a CPU adds up at a time: PyTorch adds them one after the other in fp32, and loses 0.2 % of the
norm of 35 million. A GPU adds up pairs of sums."""


@dataclass
class _Bucket:
    """Parameters whose gradients are added to the sum together."""

    parameters: list[nn.Parameter]
    """In the order of the flat weights, so that the part of each partition is contiguous."""
    slots: list[Tensor]
    """Place of each gradient: in the flat sum, or in the scratch memory from which it is reduced or widened."""
    length: int
    parts: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Range [begin, end) in the scratch memory that each replica owns."""
    runs: list[Tensor] = field(default_factory=list)
    """Contiguous pieces of the flat sum that this rank's part is added to."""
    last: nn.Parameter | None = None
    """Parameter whose gradient arrives last; None before the first pass."""


@dataclass
class _Pass:
    """Buckets of one kind of pass in one phase."""

    buckets: list[_Bucket]
    """In the order in which they are reduced, the same on all replicas."""
    done: int = 0
    """Number of buckets that the running pass has added."""


class FlatGradients(OwnStep):
    """Flat gradients of a rank's stages, for ZeRO-1, ZeRO-2 and DeepSpeed's optimizer for bf16.

    Under ZeRO-2 with replicas a rank keeps the sum of its own partition and reduces a bucket as soon as it is complete;
    else it keeps the sum of all its parameters.
    """

    def __init__(self, engine: PipelineEngine, wanted: Wanted) -> None:
        super().__init__(engine)
        self._wanted = wanted
        flat = self._flat = insides.take_over_gradients(engine)
        self._reduces = flat.partitions and flat.replicas > 1
        self._owned = flat.elements // flat.replicas
        device, kept = engine.device, self._owned if self._reduces else flat.elements
        if flat.accumulator is None:
            self._sum = torch.zeros(kept, dtype=flat.dtype, device=device)
        else:
            self._sum = flat.accumulator
        self._keeps = flat.accumulator is not None
        self.own_sum = self._sum if self._reduces else self._sum.narrow(0, flat.replica * self._owned, self._owned)
        """Sum of the own partition's gradients, scaled; valid from a step's ReduceGrads on while its memory is kept."""
        self._tensor = engine.module.tensor
        counted, self._partial, self._alike = map(self._runs, self._tensor.by_spread(flat.places))
        counted = [self.own_sum] if self._tensor.size == 1 else counted or [self.own_sum[:0]]
        self._summed = [part for run in counted for part in run.split(SUMMED if device.type == "cpu" else self._owned)]
        stored = next(iter(flat.places)).dtype
        largest = max(parameter.numel() for parameter in flat.places)
        self._bucket = max(min(flat.bucket, flat.elements), largest)
        packs = self._reduces or stored != flat.dtype
        self._scratch = torch.zeros(self._bucket, dtype=stored, device=device) if packs else None
        self._passes: dict[tuple[int, PassKind], _Pass] = {}
        self._running: _Pass | None = None
        self._hooks: dict[nn.Parameter, torch.utils.hooks.RemovableHandle] = {}

    def _runs(self, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
        """Return the contiguous pieces of the own partition's sum that belong to some parameters."""
        first = self._flat.replica * self._owned
        found: list[tuple[int, int]] = []
        for parameter in sorted(parameters, key=self._flat.places.__getitem__):
            place = self._flat.places[parameter] - first
            start, stop = max(place, 0), min(place + parameter.numel(), self._owned)
            if start >= stop:
                continue
            if found and found[-1][1] == start:
                start = found.pop()[0]
            found.append((start, stop))
        return [self.own_sum[start:stop] for start, stop in found]

    # ---------------------------------------------------------------- passes

    @property
    def precision(self) -> torch.dtype:
        """Type in which gradients are computed."""
        return next(iter(self._flat.places)).dtype

    def keep_memory(self, keep: bool) -> None:
        """Keep the memory of the sum between steps, as addresses in a graph need, or give it back."""
        self._keeps = keep or self._flat.accumulator is not None
        self._release()

    def clear(self) -> None:
        """Allocate the sum, and fill it with zeros."""
        storage = self._sum.untyped_storage()
        if not storage.size():
            storage.resize_(self._sum.numel() * self._sum.element_size())
        self._sum.zero_()

    @contextlib.contextmanager
    def gathering(self, phase: int, kind: PassKind) -> Iterator[None]:
        """Add a pass's gradients to the sum, bucket after bucket; raises RuntimeError if a parameter got none."""
        running = self._passes.get((phase, kind)) or self._planned(phase, kind)
        self._running, running.done = running, 0
        yield
        self._add_ready()
        self._running = None
        if running.done < len(running.buckets):
            missing = [one for one in running.buckets[running.done].parameters if one.grad is None]
            raise RuntimeError(f"{len(missing)} parameters got no gradient, one of shape {tuple(missing[0].shape)}")
        if (phase, kind) not in self._passes:
            self._passes[phase, kind] = running
            last = {bucket.last for one in self._passes.values() for bucket in one.buckets}
            for parameter in self._hooks.keys() - last:  # others need no hook
                self._hooks.pop(parameter).remove()

    def give(self, weight: Tensor, gradient: Tensor) -> None:
        """Take the gradient of a weight in a weight-gradient pass, in the weight's dtype."""
        assert self._running is not None and weight.grad is None
        weight.grad = gradient.contiguous()
        bucket = self._running.buckets[self._running.done]
        if bucket.last is None or bucket.last is weight:
            self._add_ready(weight)

    def _planned(self, phase: int, kind: PassKind) -> _Pass:
        """Return a pass that has not run yet, with a hook on each of its parameters to learn the order of arrival."""
        groups: list[list[nn.Parameter]] = []
        room = 0
        for parameter in self._wanted(phase, kind):
            if parameter.numel() > room:
                groups.append([])
                room = self._bucket
            groups[-1].append(parameter)
            room -= parameter.numel()
            if kind != "weights" and parameter not in self._hooks:
                self._hooks[parameter] = parameter.register_post_accumulate_grad_hook(self._add_ready)
        return _Pass([self._planned_bucket(sorted(group, key=self._flat.places.__getitem__)) for group in groups])

    def _planned_bucket(self, parameters: list[nn.Parameter]) -> _Bucket:
        """Return the bucket of some parameters, which are in the order of the flat weights."""
        places, lengths = [self._flat.places[one] for one in parameters], [one.numel() for one in parameters]
        if self._scratch is None:
            return _Bucket(parameters, _views(self._sum, places, parameters), sum(lengths))
        starts = [*accumulate(lengths, initial=0)]
        bucket = _Bucket(parameters, _views(self._scratch, starts, parameters), starts[-1])
        kept, own = (self._owned, self._flat.replica) if self._reduces else (self._flat.elements, 0)
        runs: list[tuple[int, int]] = []  # [first, stop) in the flat weights, of the own part
        for place, length, start in zip(places, lengths, starts, strict=False):
            for owner in range(place // kept, (place + length - 1) // kept + 1):
                first, stop = max(place, owner * kept), min(place + length, (owner + 1) * kept)
                begin, _ = bucket.parts.get(owner, (start + first - place, 0))
                bucket.parts[owner] = begin, start + stop - place
                if owner == own and runs and runs[-1][1] == first:
                    runs[-1] = runs[-1][0], stop
                elif owner == own:
                    runs.append((first, stop))
        bucket.runs = [self._sum.narrow(0, first - own * kept, stop - first) for first, stop in runs]
        return bucket

    @torch.no_grad()
    def _add_ready(self, arrived: Tensor | None = None) -> None:
        """Add the next buckets whose gradients have all arrived, and no other before them."""
        running = self._running
        while running is not None and running.done < len(running.buckets):
            bucket = running.buckets[running.done]
            gradients: list[Tensor] = []
            for parameter in bucket.parameters:
                if parameter.grad is None:
                    return
                gradients.append(parameter.grad)
            if bucket.last is None:
                bucket.last = arrived  # type: ignore[assignment]
                _match(bucket.slots, gradients)
            if self._scratch is None:
                torch._foreach_add_(bucket.slots, gradients)
            else:
                torch._foreach_copy_(bucket.slots, gradients)
            gradients.clear()
            for parameter in bucket.parameters:
                parameter.grad = None
            if self._scratch is not None:
                self._add(bucket, self._scratch.narrow(0, 0, bucket.length))
            running.done += 1

    def _add(self, bucket: _Bucket, packed: Tensor) -> None:
        """Add this rank's part of a bucket that is in scratch memory."""
        flat = self._flat
        if self._reduces:
            wire = packed.div_(flat.replicas).to(flat.wire)
            if flat.to_owners:
                for owner, (begin, end) in bucket.parts.items():
                    comm.reduce(wire[begin:end], comm.get_global_rank(flat.group, owner), group=flat.group)
            else:
                comm.all_reduce(wire, group=flat.group)
            begin, end = bucket.parts.get(flat.replica, (0, 0))
            packed = wire[begin:end]
        if bucket.runs:
            torch._foreach_add_(bucket.runs, packed.to(flat.dtype).split([run.numel() for run in bucket.runs]))

    # ---------------------------------------------------------------- step

    @torch.no_grad()
    def reduce(self) -> None:
        """Finish the step's gradients, averaged over the replicas."""
        flat = self._flat
        if flat.replicas > 1 and flat.accumulator is not None:
            insides.reduce_accumulated(self._engine)
        elif flat.replicas > 1 and not self._reduces:
            self._scatter()
        self._tensor.agree(self._partial, self._alike)

    @torch.no_grad()
    def _scatter(self) -> None:
        """Average the own partition over the replicas, a bucket at a time."""
        flat = self._flat
        partitions = self._sum.view(flat.replicas, self._owned)
        width = -(-self._bucket // flat.replicas)
        for part, own in zip(partitions.split(width, 1), self.own_sum.split(width), strict=True):
            wire = part.contiguous().div_(flat.replicas).to(flat.wire)
            if flat.scatters:
                average = torch.empty_like(own, dtype=flat.wire)
                comm.reduce_scatter_tensor(average, wire.view(-1), group=flat.group)
            else:
                comm.all_reduce(wire, group=flat.group)
                average = wire[flat.replica]
            own.copy_(average)

    @torch.no_grad()
    def step(self) -> None:
        """Clip and step, or skip a step whose gradients are not finite."""
        norm = norm_of(self._summed)
        if self._flat.replicas > 1:
            norm.square_()
            comm.all_reduce(norm, group=self._flat.group)
            norm.sqrt_()
        norm = over_stages(self._engine, norm)
        with self._unless_invalid(norm) as steps:
            if steps:
                factor = self._factor(norm)
                if self._widens:
                    self._take([self.own_sum], factor)
                elif (host := self._flat.host_gradient) is not None:
                    for own, there in zip(self.own_sum.split(self._bucket), host.split(self._bucket), strict=True):
                        part = own.to(torch.float32, copy=True)
                        there.copy_(part if factor is None else part.mul_(factor))
                    self._take()
                else:
                    gradient = self.own_sum
                    if gradient.dtype is not torch.float32 or not (self._keeps or len(gradient) == len(self._sum)):
                        gradient = gradient.to(torch.float32, copy=True)
                        self._release()
                    self._flat.master.grad = gradient
                    if factor is not None:
                        gradient.mul_(factor)
                    self._take()
                    self._flat.master.grad = None
                insides.refresh_weights(self._engine)
        self._release()

    def _release(self) -> None:
        """Give the memory of the sum back, unless it is DeepSpeed's or a graph's; views of it stay valid."""
        if not self._keeps:
            self._sum.untyped_storage().resize_(0)


def _views(flat: Tensor, firsts: Sequence[int], parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Return views of a flat tensor in the shapes of the parameters, each from its first element on."""
    return [
        flat.narrow(0, first, parameter.numel()).view(parameter.shape)
        for first, parameter in zip(firsts, parameters, strict=False)
    ]


def _match(slots: list[Tensor], gradients: Sequence[Tensor]) -> None:
    """Give slots the strides of their gradients: only tensors of the same strides are handled in one launch."""
    for number, (slot, gradient) in enumerate(zip(slots, gradients, strict=True)):
        if gradient.is_contiguous():
            slots[number] = slot.as_strided(gradient.shape, gradient.stride(), slot.storage_offset())


def norm_of(parts: Sequence[Tensor]) -> Tensor:
    """Return the norm of tensors together, in fp32; on a CPU exact if each has at most :data:`SUMMED` elements."""
    norms = torch._foreach_norm(list(parts), 2, dtype=torch.float32)
    return torch.linalg.vector_norm(torch.stack(norms))


def over_stages(engine: PipelineEngine, norm: Tensor) -> Tensor:
    """Return the norm over all stages and tensor groups from each rank's own."""
    if engine.grid.get_model_parallel_world_size() == 1:
        return norm
    squared = norm.square()
    comm.all_reduce(squared, group=engine.grid.get_model_parallel_group())
    return squared.sqrt_()


class SeparateGradients(OwnStep):
    """Gradients of an optimizer without flat tensors, for fp16 or fp32 without ZeRO: each parameter keeps its own."""

    def __init__(self, engine: PipelineEngine) -> None:
        super().__init__(engine)
        self._parameters = list(engine.module.parameters())
        self._tensor = engine.module.tensor
        self._counted, self._partial, self._alike = self._tensor.by_spread(self._parameters)
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
            chunk, elements = list[Tensor](), 0
            for gradient in _gradients_of(self._parameters):
                if chunk and elements + gradient.numel() > BUCKET_ELEMENTS:
                    _average(chunk, self._engine)
                    chunk, elements = [], 0
                chunk.append(gradient)
                elements += gradient.numel()
            _average(chunk, self._engine)
        if self._tensor.size > 1:
            self._tensor.agree(_gradients_of(self._partial), _gradients_of(self._alike))

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


Gradients = FlatGradients | SeparateGradients
"""Sum and step of an engine's gradients."""


def gradients_of(engine: PipelineEngine, wanted: Wanted) -> Gradients:
    """Return the gradients of an engine, by DeepSpeed's optimizer."""
    if insides.is_partitioned(engine):
        return FlatGradients(engine, wanted)
    return SeparateGradients(engine)


def _gradients_of(parameters: Sequence[Tensor]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _average(gradients: list[Tensor], engine: PipelineEngine) -> None:
    """Average gradients over the replicas in one reduction."""
    flat = _flatten_dense_tensors(gradients).to(engine.communication_data_type)
    comm.all_reduce(flat, group=engine.grid.get_data_parallel_group())
    flat.mul_(1.0 / engine.dp_world_size)
    torch._foreach_copy_(gradients, _unflatten_dense_tensors(flat, gradients))
