"""Sums, reductions and steps of gradients: in one flat tensor, or parameter by parameter where DeepSpeed has none.

DeepSpeed's optimizers with flat weights handle gradients parameter by parameter: a hook, two copies, a norm and new
views for each. :class:`FlatGradients` takes their place, so that the work of a step on the host does not grow with the
number of parameters::

    gradients of a pass ─▶ bucket ─▶ bucket ─▶ ...          one hook for each, on the parameter that arrives last
        one foreach ──────────┘
                              ▼
    flat sum ─▶ averaged over the replicas ─▶ norm ─▶ fp32 gradient of the own parts ─▶ AdamW ─▶ weights
                   beside the backward              unscaled, clipped        gathered beside the next forward

Weights, fp32 masters and the optimizer's state stay where DeepSpeed puts them: with ``offload_optimizer`` masters and
state are in host memory, the fp32 gradient is copied there a bucket at a time, and AdamW steps there.
"""

import bisect
import contextlib
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from ddpm_ds.pipeline import deepspeed_insides as insides
from ddpm_ds.pipeline.deepspeed_insides import OwnedPiece
from ddpm_ds.pipeline.own_step import OwnStep
from ddpm_ds.pipeline.schedule import PassKind
from ddpm_ds.schema.layout import BUCKET_ELEMENTS
from ddpm_ds.unet.operations import projections_of
from ddpm_ds.unet.tensor_group import shard_of

Wanted = Callable[[int, PassKind], Sequence[nn.Parameter]]
"""Function that returns the parameters that a pass of a phase gives gradients to, in about the order of arrival."""
SUMMED = 2**16
"""Number of squares that a CPU adds up at a time: PyTorch adds them one after the other in fp32, and loses 0.2 % of the
norm of 35 million. A GPU adds up pairs of sums."""


@dataclass(eq=False)
class _Chunk:
    """Equal share of the flat weights, of which each replica owns one part."""

    weights: Tensor
    own: slice
    """Place of this rank's part among all that it owns."""
    gathered: Callable[[], object] | None = None
    """Function that waits for the new weights that are on their way here."""


@dataclass
class _Bucket:
    """Gradients of a pass that are added to the sum of one chunk together."""

    chunk: int
    parameters: list[nn.Parameter]
    slots: list[Tensor]
    """Place of each gradient in the sum, or in the memory in which it is packed."""
    ranges: list[tuple[int, int] | None]
    """First and last element, plus 1, of each gradient that lie in this chunk; None for all of them."""
    runs: list[tuple[int, int]]
    """The same of the chunk, for all gradients together."""
    done: list[nn.Parameter] = field(default_factory=list)
    """Parameters whose gradients are needed no more after this bucket."""
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

    The flat weights are cut into chunks, and each chunk into a part for each replica::

        flat weights   │ a0 a1 a2 │ b0 b1 b2 │ c0 c1 c2 │     replica 1 owns a1 b1 c1

    So one reduce-scatter averages the gradients of a chunk while the backward goes on, and one all-gather brings its
    new weights while the next step's first layers run. Under ZeRO-2 a chunk is reduced in each pass, and a rank keeps
    the sum of its own parts; else in the last pass that adds to it, from the sum of all parameters.
    """

    def __init__(self, engine: PipelineEngine, wanted: Wanted) -> None:
        super().__init__(engine)
        self._wanted = wanted
        flat = self._flat = insides.take_over_gradients(engine)
        device, stored = engine.device, flat.weights.dtype
        self._replicas = Replicas(flat.group)
        count, largest = flat.replicas, max(parameter.numel() for parameter in flat.places)
        self._size = min(-(-max(flat.bucket, largest) // count) * count, len(flat.weights))  # of a chunk
        starts = range(0, len(flat.weights), self._size)
        self._chunks = [
            _Chunk(part, slice(start // count, (start + len(part)) // count))
            for start, part in zip(starts, flat.weights.split(self._size), strict=True)
        ]
        owned = len(flat.weights) // count
        self._reduces = flat.partitions and count > 1
        kept = owned if self._reduces else len(flat.weights)
        self._sum = torch.zeros(kept, dtype=flat.dtype, device=device) if flat.accumulator is None else flat.accumulator
        self.own_sum = self._sum if kept == owned else torch.zeros(owned, dtype=flat.dtype, device=device)
        """Sum of the own gradients, scaled; valid from a step's ReduceGrads on while its memory is kept."""
        self._keeps = False
        self._tensor = engine.module.tensor
        counted, self._partial, self._alike = (
            [self.own_sum[place] for place in self._places(group)] for group in self._tensor.by_spread(flat.places)
        )
        counted = [self.own_sum] if self._tensor.size == 1 else counted or [self.own_sum[:0]]
        self._summed = [part for run in counted for part in run.split(SUMMED if device.type == "cpu" else owned)]
        self._packed = None
        if stored != flat.dtype and not self._reduces:
            self._packed = torch.zeros(self._size, dtype=stored, device=device)
        pairs = range(2) if count > 1 and (self._reduces or flat.wire != flat.dtype) else ()
        self._wires = [torch.zeros(self._size, dtype=flat.wire, device=device) for _ in pairs]
        self._free = deque[Tensor]()
        """Memory for chunks that travel in another type than that of the sum."""
        self._under_way = deque[tuple[Tensor, Callable[[], object]]]()
        """Averages in the order in which they began: the memory of each, and the function that finishes it."""
        self._new = flat.master.detach()  # own parts of the new weights
        self._casts = count > 1 and (flat.master.dtype != stored or flat.master.device != device)
        if self._casts:
            self._new = torch.zeros(owned, dtype=stored, device=device)
        self._stepped = self._by_rate()
        """Tensors that the optimizer steps, and the place of each among all that this rank owns."""
        self._stale = False
        """Whether other replicas have newer weights of their parts."""
        self._passes: dict[tuple[int, PassKind], _Pass] = {}
        self._additions: Counter[int] = Counter()
        self._left = self._additions
        """Number of passes of this step that will still add to a chunk."""
        self._begun = set[int]()
        """Chunks whose sum this step has begun: its first gradients are copied, and need no zeros to be added to."""
        self._running: _Pass | None = None
        self._hooks: dict[nn.Parameter, torch.utils.hooks.RemovableHandle] = {}
        self._arriving: list[_Chunk] = []  # in the order of the layers that need them
        if count > 1:
            with torch.no_grad():
                for chunk in self._chunks:  # DeepSpeed gave this rank other parts
                    flat.master[chunk.own].copy_(chunk.weights.chunk(count)[flat.replica])
            self.refresh_weights()
            self._wait_in_layers(engine.module.own_layers().values())

    def _wait_in_layers(self, layers: Collection[nn.Module]) -> None:
        """Let each layer wait for its weights before it first runs in a step; one computes all projections of emb."""
        projections = [one for layer in layers for one in projections_of(layer)]
        for layer in layers:
            together = projections if projections_of(layer) else ()
            parameters = [*layer.parameters(), *(one for part in together for one in part.parameters())]
            trained = [one for one in parameters if one.requires_grad]
            numbers = dict.fromkeys(number for one in trained for number, *_ in self._cut(one))
            chunks = [self._chunks[number] for number in numbers]
            self._arriving += [chunk for chunk in chunks if chunk not in self._arriving]
            layer.register_forward_pre_hook(lambda module, inputs, chunks=chunks: _wait(chunks))

    def _cut(self, parameter: nn.Parameter) -> Iterator[tuple[int, int, int]]:
        """Yield the chunks of a parameter, and its first and last element, plus 1, in each."""
        place, count = self._flat.places[parameter], parameter.numel()
        for number in range(place // self._size, (place + count - 1) // self._size + 1):
            start = number * self._size
            yield number, max(start - place, 0), min(start + self._size - place, count)

    def _pieces(self, parameter: nn.Parameter) -> Iterator[tuple[int, int, int]]:
        """Yield the first and last element, plus 1, of what this rank owns of a parameter, and its place there."""
        flat = self._flat
        for number, first, stop in self._cut(parameter):
            own = self._chunks[number].own
            begin = number * self._size + flat.replica * (own.stop - own.start) - flat.places[parameter]
            first, stop = max(first, begin), min(stop, begin + own.stop - own.start)
            if first < stop:
                yield first, stop, own.start + first - begin

    def owned(self) -> list[OwnedPiece]:
        """Return the pieces of this stage's parameters that this rank steps."""
        stepped, found = sorted(self._stepped, key=lambda step: step[1].start), []
        begins = [where.start for _, where in stepped]
        for name, one in self._engine.module.named_parameters():
            for first, stop, place in self._pieces(one) if one.requires_grad else ():
                master, where = stepped[bisect.bisect(begins, place) - 1]
                about = one.dim(), shard_of(one)
                found.append(OwnedPiece(name, first, stop - first, master, place - where.start, *about))
        return found

    def _places(self, parameters: Iterable[nn.Parameter]) -> list[slice]:
        """Return the contiguous places among all that this rank owns of some parameters."""
        found: list[slice] = []
        pieces = [(place, place + stop - first) for one in parameters for first, stop, place in self._pieces(one)]
        for start, stop in sorted(pieces):
            if found and found[-1].stop == start:
                start = found.pop().start
            found.append(slice(start, stop))
        return found

    def _by_rate(self) -> list[tuple[Tensor, slice]]:
        """Return the flat master, or if parameters have other rates the pieces of it that the optimizer steps then."""
        flat, rates = self._flat, self._engine.module.rates
        if {*rates.values()} <= {1.0}:
            return [(flat.master, slice(0, len(flat.master)))]
        alike = {rate: self._places(one for one in rates if rates[one] == rate) for rate in sorted(set(rates.values()))}
        steps = [(flat.master.detach()[place], place, rate) for rate, places in alike.items() for place in places]
        insides.group_by_rate(self._engine, [(piece, rate) for piece, _, rate in steps])
        if (host := flat.host_gradient) is not None:
            for piece, place, _ in steps:
                piece.grad = host[place]
        return [step[:2] for step in steps]

    # ---------------------------------------------------------------- passes

    @property
    def precision(self) -> torch.dtype:
        """Type in which gradients are computed."""
        return self._flat.weights.dtype

    def keep_memory(self, keep: bool) -> None:
        """Keep the memory of the sum between steps, as addresses in a graph need, or give it back."""
        self._keeps = keep
        self._release(self._sum, self.own_sum)

    def expect(self, passes: Counter[tuple[int, PassKind]]) -> None:
        """Prepare for steps that have so many passes of each kind of a phase."""
        self._passes = {key: self._planned(*key) for key in passes}
        self._additions = Counter()
        for key, own in self._passes.items():
            for bucket in own.buckets:
                self._additions[bucket.chunk] += passes[key]

    @torch.no_grad()
    def begin(self) -> None:
        """Begin a step's sum, and let the weights of other replicas come."""
        for tensor in (self._sum, self.own_sum):
            _take_memory(tensor)
        if self._reduces:
            self._sum.zero_()
        self._begun.clear()
        self._left, self._free = self._additions.copy(), deque(self._wires)
        if self._replicas.size > 1:
            self._gather()

    @contextlib.contextmanager
    def gathering(self, phase: int, kind: PassKind) -> Iterator[None]:
        """Add a pass's gradients to the sum, bucket after bucket; raises RuntimeError if a parameter got none."""
        running = self._running = self._passes[phase, kind]
        running.done = 0
        yield
        self._add_ready()
        self._running = None
        if running.done < len(running.buckets):
            missing = [one for one in running.buckets[running.done].parameters if one.grad is None]
            raise RuntimeError(f"{len(missing)} parameters got no gradient, one of shape {tuple(missing[0].shape)}")
        if all(bucket.last is not None for one in self._passes.values() for bucket in one.buckets):
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
        found: dict[int, list[tuple[int, int, nn.Parameter]]] = {}
        last: dict[int, int] = {}  # by chunk: when its last gradient arrives
        for order, parameter in enumerate(self._wanted(phase, kind)):
            for number, first, stop in self._cut(parameter):
                found.setdefault(number, []).append((first, stop, parameter))
                last[number] = order
            if kind != "weights" and parameter not in self._hooks:
                self._hooks[parameter] = parameter.register_post_accumulate_grad_hook(self._add_ready)
        order_of = sorted(found, key=last.__getitem__)
        planned = _Pass([self._planned_bucket(number, found[number], turn % 2) for turn, number in enumerate(order_of)])
        missing = set[nn.Parameter]()
        for bucket in reversed(planned.buckets):
            bucket.done = [one for one in bucket.parameters if one not in missing]
            missing.update(bucket.parameters)
        return planned

    def _planned_bucket(self, number: int, parts: list[tuple[int, int, nn.Parameter]], buffer: int) -> _Bucket:
        """Return the bucket of parts of some parameters that lie in a chunk."""
        places, start = self._flat.places, number * self._size
        parts.sort(key=lambda part: places[part[2]])
        target = self._wires[buffer] if self._reduces else self._packed
        if target is None:
            target = self._sum.narrow(0, start, min(self._size, len(self._sum) - start))
        bucket = _Bucket(number, [], [], [], [])
        for first, stop, parameter in parts:
            begin, whole = places[parameter] + first - start, stop - first == parameter.numel()
            slot = target.narrow(0, begin, stop - first)
            bucket.parameters.append(parameter)
            bucket.slots.append(slot.view(parameter.shape) if whole else slot)
            bucket.ranges.append(None if whole else (first, stop))
            end = begin + stop - first
            joined = bucket.runs.pop()[0] if bucket.runs and bucket.runs[-1][1] == begin else begin
            bucket.runs.append((joined, end))
        return bucket

    @torch.no_grad()
    def _add_ready(self, arrived: Tensor | None = None) -> None:
        """Add the next buckets whose gradients have all arrived, and no other before them."""
        running = self._running
        while running is not None and running.done < len(running.buckets):
            bucket = running.buckets[running.done]
            gradients: list[Tensor] = []
            for parameter, part in zip(bucket.parameters, bucket.ranges, strict=True):
                if parameter.grad is None:
                    return
                gradients.append(parameter.grad if part is None else parameter.grad.reshape(-1)[part[0] : part[1]])
            if bucket.last is None:
                bucket.last = arrived  # type: ignore[assignment]
                _match(bucket.slots, gradients)
            self._add(bucket, gradients, running.done % 2)
            gradients.clear()
            for parameter in bucket.done:
                parameter.grad = None
            running.done += 1

    def _add(self, bucket: _Bucket, gradients: list[Tensor], buffer: int) -> None:
        """Add gradients to the sum of a chunk, or to the own part of it over all replicas."""
        chunk = self._chunks[bucket.chunk]
        if self._reduces:
            self._finish(wire := self._wires[buffer])
            if bucket.runs != [(0, len(chunk.weights))]:
                wire.zero_()
            torch._foreach_copy_(bucket.slots, gradients)
            self._average(chunk, wire)
            return
        sums, begins = self._sum_of(bucket.chunk), bucket.chunk not in self._begun
        self._begun.add(bucket.chunk)
        if begins and bucket.runs != [(0, len(sums))]:
            sums.zero_()
            begins = False
        if self._packed is not None:
            torch._foreach_copy_(bucket.slots, gradients)
            for start, stop in bucket.runs:
                (sums[start:stop].copy_ if begins else sums[start:stop].add_)(self._packed[start:stop])
        else:
            (torch._foreach_copy_ if begins else torch._foreach_add_)(bucket.slots, gradients)
        self._left[bucket.chunk] -= 1
        if self._replicas.size > 1 and not self._left[bucket.chunk]:
            self._average_sum(bucket.chunk)

    def _sum_of(self, number: int) -> Tensor:
        """Return the sum of all gradients of a chunk."""
        return self._sum.narrow(0, number * self._size, len(self._chunks[number].weights))

    # ---------------------------------------------------------------- replicas

    def _average_sum(self, number: int) -> None:
        """Begin to average the sum of a chunk over the replicas; it is complete."""
        del self._left[number]
        chunk, summed = self._chunks[number], self._sum_of(number)
        wire = summed
        if self._wires:
            self._finish(wire := self._free.popleft() if self._free else self._under_way[0][0])
            wire[: len(summed)].copy_(summed)
            if summed.nbytes >= wire.nbytes:
                self._free.append(summed.view(wire.dtype))  # for the next chunk
        self._average(chunk, wire)

    def _average(self, chunk: _Chunk, memory: Tensor) -> None:
        """Begin to average gradients of a chunk over the replicas, for the own part of it."""
        wire, own = memory[: len(chunk.weights)], self.own_sum[chunk.own]
        part = wire.chunk(self._replicas.size)[self._flat.replica]
        averaged = self._replicas.average(wire, part)

        def finish() -> None:
            averaged()
            if self._reduces:
                own.add_(part)
            else:
                own.copy_(part)

        self._under_way.append((memory, finish))

    def _finish(self, memory: Tensor | None = None) -> None:
        """Finish averages in their order until none uses ``memory`` any more; without it, all."""
        while self._under_way and (memory is None or any(one is memory for one, _ in self._under_way)):
            self._under_way.popleft()[1]()

    def join(self) -> None:
        """Wait for all that is under way, as at the end of a graph; the wait is the device's, not the host's."""
        self._finish()
        _wait(self._arriving)

    def _gather(self) -> None:
        """Begin to gather the weights of all chunks, those of the first layers first."""
        for chunk in self._arriving:
            chunk.gathered = self._replicas.gather(self._new[chunk.own], chunk.weights)
        self._stale = False

    @torch.no_grad()
    def gather_weights(self) -> None:
        """Gather weights that other replicas have stepped, for use outside a step; collective."""
        if self._stale:
            self._gather()
            _wait(self._arriving)

    @torch.no_grad()
    def refresh_weights(self) -> None:
        """Cast this rank's masters into its weights; :meth:`gather_weights` or the next step brings the others'."""
        if self._replicas.size == 1:
            if self._flat.master.data_ptr() != self._flat.weights.data_ptr():
                self._flat.weights.copy_(self._flat.master)
            return
        if self._casts:
            self._new.copy_(self._flat.master)
        self._stale = True

    # ---------------------------------------------------------------- step

    @torch.no_grad()
    def reduce(self) -> None:
        """Finish the step's gradients, averaged over the replicas."""
        for number in range(len(self._chunks)) if not self._reduces else ():
            if number not in self._begun:  # nothing but padding
                self._sum_of(number).zero_()
            if self._replicas.size > 1 and (number in self._left or number not in self._additions):
                self._average_sum(number)
        if self._replicas.size > 1:
            self._finish()
            if not self._reduces:
                self._release(self._sum)
        self._tensor.agree(self._partial, self._alike)

    @torch.no_grad()
    def step(self) -> None:
        """Clip and step, or skip a step whose gradients are not finite."""
        norm = norm_of(self._summed)
        if self._flat.replicas > 1:
            norm.square_()
            dist.all_reduce(norm, group=self._flat.group)
            norm.sqrt_()
        norm = over_stages(self._engine, norm)
        with self._unless_invalid(norm) as steps:
            if steps:
                factor = self._factor(norm)
                if self._widens:
                    self._take([self.own_sum[place] for _, place in self._stepped], factor)
                elif (host := self._flat.host_gradient) is not None:
                    for own, there in zip(self.own_sum.split(self._size), host.split(self._size), strict=True):
                        part = own.to(torch.float32, copy=True)
                        there.copy_(part if factor is None else part.mul_(factor))
                    self._take()
                else:
                    gradient = self.own_sum
                    if gradient.dtype is not torch.float32:
                        gradient = gradient.to(torch.float32)
                        self._release(self.own_sum)
                    if factor is not None:
                        gradient.mul_(factor)
                    for piece, place in self._stepped:
                        piece.grad = gradient[place]
                    self._take()
                    for piece, _ in self._stepped:
                        piece.grad = None
                self.refresh_weights()
        self._release(self._sum, self.own_sum)

    def end_step(self) -> None:
        """Count the step; a graph has refreshed the weights without the host."""
        super().end_step()
        self._stale = self._replicas.size > 1

    def _release(self, *sums: Tensor) -> None:
        """Give the memory of sums back, unless it is DeepSpeed's or a graph's; views of it stay valid."""
        for one in sums if not self._keeps else ():
            if one is not self._flat.accumulator:
                one.untyped_storage().resize_(0)


class Replicas:
    """Ranks that hold the same stages, and sums and copies among them that run beside other work.

    On a GPU NCCL averages. Gloo has no reduce-scatter that sends each value once, so there each rank sends every other
    its part, and adds up in fp32, in the order of the ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self.size = group, dist.get_world_size(group)

    def average(self, whole: Tensor, part: Tensor) -> Callable[[], object]:
        """Begin to average ``whole`` (size x n,) over the ranks. Its own ``part`` (n,) has the averages after a call of
        the returned function; until then nothing else may change ``whole``.
        """
        if whole.is_cuda:
            work = dist.reduce_scatter_tensor(part, whole, dist.ReduceOp.AVG, group=self._group, async_op=True)
            return work.wait  # type: ignore[union-attr]
        received = torch.empty_like(whole)
        work = dist.all_to_all_single(
            received.view(torch.uint8), whole.view(torch.uint8), group=self._group, async_op=True
        )

        def finish() -> None:
            work.wait()  # type: ignore[union-attr]
            part.copy_(received.view(self.size, -1).mean(0, dtype=torch.float32))

        return finish

    def gather(self, part: Tensor, whole: Tensor) -> Callable[[], object]:
        """Begin to copy the ``part`` (n,) of each rank into ``whole`` (size x n,), for which the function waits."""
        work = dist.all_gather_into_tensor(whole, part, group=self._group, async_op=True)
        return work.wait  # type: ignore[union-attr]


def _wait(chunks: Iterable[_Chunk]) -> None:
    """Wait for the new weights of chunks."""
    for chunk in chunks:
        if chunk.gathered is not None:
            chunk.gathered()
            chunk.gathered = None


def _take_memory(tensor: Tensor) -> None:
    """Take the memory of a tensor that gave it back."""
    storage = tensor.untyped_storage()
    if not storage.size():
        storage.resize_(tensor.numel() * tensor.element_size())


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
    """Return the norm over all stages and tensor groups from each rank's own.

    Every rank adds up in the order of the ranks. A reduction would have an order of its own in each replica: replicas
    would clip differently, and without ZeRO nothing would bring their weights together again.
    """
    ranks = engine.grid.get_model_parallel_world_size()
    if ranks == 1:
        return norm
    norms = norm.new_empty(ranks)
    dist.all_gather_into_tensor(norms, norm.view(1), group=engine.grid.get_model_parallel_group())
    return torch.linalg.vector_norm(norms)


class SeparateGradients(OwnStep):
    """Gradients of an optimizer without flat tensors, for fp16 or fp32 without ZeRO: each parameter keeps its own."""

    def __init__(self, engine: PipelineEngine) -> None:
        super().__init__(engine)
        self._parameters = engine.module.in_flat_order()
        if rates := engine.module.rates:
            self._parameters.sort(key=rates.__getitem__)
        self._tensor = engine.module.tensor
        self._counted, self._partial, self._alike = self._tensor.by_spread(self._parameters)
        self._masters = insides.separate_masters(engine, self._parameters)
        if {*rates.values()} - {1.0}:
            factors = [rates[one] for one in self._parameters]
            insides.group_by_rate(engine, [*zip(self._masters or self._parameters, factors, strict=True)])
        sizes = [master.numel() for master in self._masters]
        self._flat = torch.empty(sum(sizes), device=engine.device)  # its memory exists within a step only
        views = self._flat.split(sizes) if sizes else ()
        self._wide = [view.view(master.shape) for view, master in zip(views, self._masters, strict=True)]
        """fp32 gradients; none if the weights are fp32 themselves."""
        self._release()

    def owned(self) -> list[OwnedPiece]:
        masters = dict(zip(self._parameters, self._masters or self._parameters, strict=True))
        return [
            OwnedPiece(name, 0, one.numel(), masters[one], 0, one.dim(), shard_of(one))
            for name, one in self._engine.module.named_parameters()
            if one.requires_grad
        ]

    def expect(self, passes: Counter[tuple[int, PassKind]]) -> None:
        pass

    def begin(self) -> None:
        if not self._engine.module.rates:  # nothing here is trained, and the optimizer steps a placeholder
            self._parameters[0].grad = torch.zeros_like(self._parameters[0])

    def gather_weights(self) -> None:
        pass

    @torch.no_grad()
    def refresh_weights(self) -> None:
        if self._masters:
            torch._foreach_copy_(self._parameters, self._masters)

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
            self.refresh_weights()
            return
        if self._wide:
            _take_memory(self._flat)
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
            self.refresh_weights()

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
    dist.all_reduce(flat, group=engine.grid.get_data_parallel_group())
    flat.mul_(1.0 / engine.dp_world_size)
    torch._foreach_copy_(gradients, _unflatten_dense_tensors(flat, gradients))
