"""DeepSpeed's pipeline engine, extended to train a U-Net by any program.

A program (:mod:`ddpm_ds.pipeline.schedule`) lists the instructions of a rank in a step. In this engine

- a stage's backward is ONE walk of its graph, ``torch.autograd.backward(all outputs, all gradients)``; the stock
  engine walks it once per output tensor, and a U-Net stage has an output per live skip;
- weight gradients may be deferred to a separate pass for several micro-batches (:mod:`ddpm_ds.unet.weight_gradients`);
- ZeRO-2 works: gradients are reduced and partitioned after each backward or weight-gradient pass, accumulated in the
  owner's partition and finished once;
- a boundary's tensors travel as one message and are used in place, and no tensor crosses twice;
- random draws are keyed by the image index, so each stage computes its micro-batch's draws by itself.
"""

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.checkpoint import checkpoint

from ddpm_ds.pipeline import deepspeed_insides as insides
from ddpm_ds.pipeline.cuts import sent_shapes
from ddpm_ds.pipeline.gradients import Gradients
from ddpm_ds.pipeline.graph import Pace, StepGraph
from ddpm_ds.pipeline.messages import Channel, Edge, Kind, StageChannels, Start, at_once, open_p2p_groups, runs_behind
from ddpm_ds.pipeline.module import UnetPipelineModule, forget_peaks, warm_up
from ddpm_ds.pipeline.schedule import (
    KINDS,
    Instruction,
    Program,
    check_programs,
    gradient_passes,
    loaded,
    most_in_flight,
    neighbours,
    posted_before,
    split_passes,
)
from ddpm_ds.schema.layout import Schedule
from ddpm_ds.unet.blocks import Carry, set_context, transformer_blocks
from ddpm_ds.unet.operations import KeyedDropout, arithmetic_dtype, set_image_index
from ddpm_ds.unet.space import Band
from ddpm_ds.unet.weight_gradients import WaitingGradients, weighted_parts


class Objective(Protocol):
    """Training objective: turns a loaded micro-batch into the first layer's input and the last layer's loss."""

    def context(self, micro_batch: Any) -> Tensor | None:
        """Return a micro-batch's encoded text (N, tokens, channels), for ranks whose layers read it, or None."""

    def prepare(self, micro_batch: Any) -> Any:
        """Return a loaded micro-batch prepared for the methods below, on the device of the first or last stage."""

    def inputs(self, prepared: Any) -> Carry:
        """Return the arguments of the first layer, with floating-point ones in fp32."""

    def loss(self, prediction: Tensor, prepared: Any, band: Band | None = None) -> Tensor:
        """Return the mean loss of the micro-batch: a scalar in fp32.

        If the prediction has a ``band`` of the rows, it is that band's part, times the number of ranks that share an
        image, so that their mean is the loss.
        """


class Averages(Protocol):
    """Moving averages of the weights, a part of the step."""

    def begin_step(self, images_seen: int, batch_images: int) -> None:
        """Begin a step that ends at ``images_seen``."""

    def stepping(self) -> contextlib.AbstractContextManager[None]:
        """Surround the optimizer's step, in a CUDA graph too."""

    def end_step(self) -> None:
        """Run the host's work that a CUDA graph cannot hold, once the step is queued."""


@dataclass
class Passage:
    """Pass of a micro-batch through one stage; fields are empty before their first use and after their last."""

    leaves: Carry = ()
    """Received tensors, which accumulate the gradients to send back."""
    unsent: Carry = ()
    """Output that is not sent yet."""
    roots: tuple[GradientEdge | None, ...] = ()
    """Graph edges of the sent tensors, or of the loss."""


@dataclass
class Flight:
    """Micro-batch on its way through this rank. The fold has two stages on each rank, so every skip is made and used
    on one rank::

        rank 0        stage 0 ── (h, emb) ─▶ rank 1 ─▶ ... rank P - 1        phase 0, down the U-Net
                        │ emb, skips                          │ turn
                        ▼                                     ▼
        rank 0        stage 2P - 1 ◀── h ── rank 1 ◀─ ... rank P - 1        phase 1, up it; loss on rank 0

    The gradients of the kept embedding and skips are ready after phase 1's backward, which on every rank precedes phase
    0's: phase 0 then walks its graph once, with h, emb and the skips as roots.
    """

    images: Tensor
    """Image index (N,)."""
    passages: tuple[Passage, ...]
    """Passages by phase."""
    prepared: Any = None
    """Loaded micro-batch, until this rank's last forward."""
    context: Tensor | None = None
    """Encoded text (N, tokens, channels) in the arithmetic's dtype, until this rank's last backward; None if unread."""
    kept: Carry = ()
    """Tensors that phase 0 passes to phase 1 on this rank (emb and skips in a fold), as leaves of phase 1's graph."""
    kept_roots: tuple[GradientEdge | None, ...] = ()
    """Graph edges of ``kept`` in phase 0's graph."""


def _edge(tensor: Tensor) -> GradientEdge | None:
    """Return the graph edge of a tensor, which is enough for a backward; None without a graph."""
    return get_gradient_edge(tensor) if tensor.requires_grad else None


def _as_leaves(tensors: Carry) -> Carry:
    """Return tensors detached from their graphs, as leaves that accumulate gradients if the graphs need them."""
    return tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors)


CAUTIOUS_STEPS = 2
"""Steps taken until kernels are loaded and the allocator is at its peak, which it reaches after the first one."""
CAUTIOUS_ORDERS = 64
"""Most orders of image sizes whose first step is cautious, so that a run with ever new orders becomes fast."""


class UnetPipelineEngine(PipelineEngine):
    """Pipeline engine that runs a program for each rank on the stages of a U-Net; made by :func:`build_engine`."""

    data_iterator: Any
    objective: Objective
    gradients: Gradients
    """Sum and step of the gradients; set by :func:`build_engine`."""
    graph: StepGraph
    """Graph of the steps; set by :func:`build_engine`."""
    averages: Averages | None = None
    """Averages that a step updates."""
    schedule: Schedule = "1f1b"
    """The JSON's schedule; set by :func:`build_engine`."""
    rate: Callable[[int, int], float] | None = None
    """Function from the images before a step and in it to the learning rate; None: DeepSpeed's scheduler sets it."""
    size_of: Callable[[int], int] = staticmethod(lambda index: 0)
    """Function from an image index to the number of its size in ``module.sized_layers``; a micro-batch has one size."""
    ranks_of_image = 1
    """Number of ranks that share each image; set by :func:`build_engine`."""
    compiled = False
    """Whether layers are compiled when they first run; set by :func:`build_engine`."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        module = self.module
        assert isinstance(module, UnetPipelineModule)
        self.phases = module.phases
        """Number of stages that a rank holds."""
        insides.leave_forward_and_timing_to_us(self)
        insides.forget_first_optimizer_step(self)
        module.activation_checkpoint_func = functools.partial(
            checkpoint, use_reentrant=self._config.pipeline["use_reentrant"], preserve_rng_state=False
        )

        self.execute: dict[str, Callable[[Instruction], None]] = {
            "LoadMicroBatch": self._load,
            "ForwardPass": self._forward,
            "SendActivation": self._send_activations,
            "BackwardPass": self._backward,
            "InputGradients": self._backward,
            "WeightGradients": self._weight_gradients,
            "SendGrad": self._send_gradients,
            "ReduceGrads": self._reduce,
            "OptimizerStep": self._step,
        }
        """Functions that execute each instruction; an observer may wrap an entry."""
        self._instructions = dict(self.execute)
        self.receive: Callable[[Channel], Carry] = Channel.receive
        """Function that waits for the next message of a channel, inside a pass; an observer may wrap it."""
        self.pace = Pace(self.device)
        self.images_seen = 0
        """Number of images of all completed steps."""
        self.skipped_images = 0
        """Number of images left out after bad numbers; an image's index counts them too."""
        self.loss_sum = torch.zeros((), device=self.device)
        """Sum of the last batch's micro-batch losses on the last stage; zero elsewhere."""
        self.step_rate = 0.0
        """Learning rate of the last step, whether it was taken or skipped."""
        self._first_image = torch.zeros((), dtype=torch.int64, device=self.device)
        self._offsets: dict[int, Tensor] = {}
        self._dropouts = [part for part in module.modules() if isinstance(part, KeyedDropout)]
        self.readers = transformer_blocks(module.modules())
        """Layers of this rank that read the encoded text."""
        self._flights: dict[int, Flight] = {}  # by the micro-batch's number in this step
        self.programs: tuple[Program, ...] = ()
        """Programs of all ranks of a pipeline; set by :meth:`follow`."""
        self._waiting = WaitingGradients(())
        """Weight gradients that wait for a pass of their own."""
        self._queues: list[WaitingGradients] = []
        """All queues of this rank, which must be empty at the end of a step."""
        self._connected = open_p2p_groups(self.grid.pipe_groups, self.phases, self.device)
        self._channels: list[StageChannels] = []
        self._steps: list[tuple[Instruction, list[Channel]]] = []
        """Instructions of this rank's program, and the channels that post a receive before each."""
        self._cautious_steps = CAUTIOUS_STEPS
        self._orders: set[tuple[int, ...]] = set()
        """Orders of sizes whose first step has been cautious."""
        self._watchers = 0
        self._warm: set[tuple[int, bool, int, bool, int]] = set()
        self._has_stepped = False
        """Whether this process has taken a step, in which the optimizer allocates its moments."""

    def follow(self, programs: Sequence[Program]) -> None:
        """Execute these programs, the same on all ranks, from the next step on; raises as :func:`check_programs`."""
        check_programs(programs, self.module.schedule, self.micro_batches)
        self.graph.forget()
        self.programs = tuple(
            loaded(own) if self.readers and rank == self.stage_id else own for rank, own in enumerate(programs)
        )
        self._waiting = WaitingGradients(split_passes(programs[self.stage_id]))
        parts = [part for layer in self.module.own_layers().values() for part in weighted_parts(layer)]
        for part in parts:
            part.waiting = self._waiting
        self._queues = [self._waiting, *dict.fromkeys(part.beside for part in parts if part.beside is not None)]
        self.gradients.expect(gradient_passes(programs[self.stage_id]))
        self._channels = [self.stage_channels(phase, self.micro_batch_size) for phase in range(self.phases)]
        own, self._steps = self.programs[self.stage_id], []
        for one, passes in zip(own, posted_before(own), strict=True):
            ends = [(self._channels[each.phase], each.name) for each in passes if each.name != "WeightGradients"]
            sources = [end.activations_in if name == "ForwardPass" else end.gradients_in for end, name in ends]
            self._steps.append((one, [channel for channel in sources if channel is not None]))

    def stage_channels(self, phase: int, images: int) -> StageChannels:
        """Return the channels of a stage for the carry of ``images`` images and its gradients."""
        (first, stop), own = self.module.phase_bounds[phase], self.stage_id
        before, after = neighbours(self.module.schedule, self.num_stages, own, phase)

        def channel(kind: Kind, cut: int, source: int | None, target: int | None) -> Channel | None:
            if source is None or target is None or (kind == "gradients" and not self.module.reached(cut)):
                return None
            shapes, *others = (
                [(images, *shape) for shape in sent_shapes(layers, cut, phase=phase, schedule=self.module.schedule)]
                for layers in self.module.sized_layers
            )
            return self.channel(Edge(kind, phase, source, target), shapes, self._message_dtype(), others)

        return StageChannels(
            activations_in=channel("activations", first, before, own),
            activations_out=channel("activations", stop, own, after),
            gradients_in=channel("gradients", stop, after, own),
            gradients_out=channel("gradients", first, own, before),
        )

    def channel(
        self,
        edge: Edge,
        shapes: Sequence[tuple[int, ...]],
        dtype: torch.dtype,
        others: Sequence[Sequence[tuple[int, ...]]] = (),
    ) -> Channel:
        """Return this rank's end of an edge; ``others`` are the shapes for images of other sizes."""
        return Channel(shapes, dtype, self.device, self._connected[edge], most_in_flight(self.programs), others)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Send messages by the hosts, on all ranks alike, so that an observer may wait for the device."""
        self._watchers += 1
        try:
            yield
        finally:
            self._watchers -= 1

    def warm_up(self, images: int, *, gradients: bool, sizes: Collection[int] | None = None) -> bool:
        """Run each layer once on ``images`` images of each of the ``sizes`` (default: all); return False if that was
        done before.

        With ``gradients``, run each kind of backward in the programs too: whole ones, and those that defer weight
        gradients. The first step takes memory for good, so forwards alone are run again after it. On a synchronous
        device such as a CPU, nothing is run unless layers are compiled.
        """
        every = {
            (images, gradients, phase, waits, size)
            for size in (range(len(self.module.sized_layers)) if sizes is None else sizes)
            for phase in range(self.phases)
            for waits in (self._waiting.ways(phase, self.micro_batches) if gradients else {False})
        }
        cold = sorted(every - self._warm)
        self._warm |= every
        for *_, phase, waits, size in cold if runs_behind(self.device) or self.compiled else ():
            self._waiting.open = waits
            warm_up(
                self.module.own_layers(phase),
                self.module.sized_layers[size],
                images,
                gradients=gradients,
                recompute=gradients and self.module.activation_checkpoint_interval > 0,
            )
            self._waiting.clear()
            forget_peaks(self.device)
        return bool(cold)

    @contextlib.contextmanager
    def forward_only(self, images: int, sizes: Collection[int]) -> Iterator[bool]:
        """Allow only forwards, without dropout; yields whether their messages go by the hosts, as the first ones do."""
        self.graph.drop()
        self.gradients.gather_weights()
        self.module.eval()
        try:
            yield self.warm_up(images, gradients=False, sizes=sizes) and runs_behind(self.device)
        finally:
            self.module.train()
            self._cautious_steps = max(self._cautious_steps, 1)  # the next step finds the memory changed

    def _message_dtype(self) -> torch.dtype:
        return next(self.module.parameters()).dtype

    @property
    def loss_stage(self) -> int:
        """Rank of a pipeline that knows the loss."""
        return self.num_stages - 1 if self.phases == 1 else 0

    @property
    def reads_data(self) -> bool:
        """Whether this rank needs the micro-batches."""
        return self._holds_end or bool(self.readers)

    @property
    def _holds_end(self) -> bool:
        """Whether this rank holds the first or the last stage."""
        return self.stage_id in (0, self.loss_stage)

    @property
    def replicas(self) -> int:
        """Number of replicas, which have different images."""
        return self.dp_world_size // self.ranks_of_image

    @property
    def replica(self) -> int:
        """Number of this rank's replica."""
        return self.grid.get_data_parallel_id() // self.ranks_of_image

    def train_batch_size(self) -> int:
        """Return the number of images of a step; DeepSpeed counts an image for each rank that shares it."""
        return int(super().train_batch_size()) // self.ranks_of_image

    @property
    def next_index(self) -> int:
        """Image index of the next batch's first image."""
        return self.images_seen + self.skipped_images

    # ---------------------------------------------------------------- one batch

    def train_batch(self, data_iter: Iterator[object] | None = None) -> Tensor:
        """Take one optimizer step over ``train_batch_size`` images.

        ``data_iter`` yields the micro-batches of this replica and is read only if :attr:`reads_data`. Returns the mean
        loss of this replica's micro-batches on :attr:`loss_stage` and zero elsewhere, without synchronising host and
        device.
        """
        self.data_iterator = data_iter if self.reads_data else None
        self.module.train()
        with self.graph.stream():
            self.warm_up(self.micro_batch_size, gradients=True)
            self.pace.wait()
            self._set_values(self.train_batch_size())
            sizes = tuple(self.sizes_of_step())
            if self.num_stages > 1 and len(self._orders) < CAUTIOUS_ORDERS and sizes not in self._orders:
                self._orders.add(sizes)  # the first step of an order may need memory in new pieces
                self._cautious_steps = max(self._cautious_steps, 1)
            loss = self.graph.step(sizes if self.is_unobserved() else None)
            if loss is None:
                loss = self.execute_program(
                    by_host=runs_behind(self.device) and bool(self._cautious_steps or self._watchers)
                )
            self.pace.mark()
            if self.averages is not None:
                self.averages.end_step()
        self.gradients.end_step()
        every = self.steps_per_print()
        if self.wall_clock_breakdown() and every and self.global_steps % every == 0:
            self.timers.log(list(self.execute), normalizer=every)
        self.images_seen += self.train_batch_size()
        if (self._cautious_steps or not self._has_stepped) and self.was_step_applied():
            self._cautious_steps = max(self._cautious_steps - 1, 0)
            if not self._has_stepped:  # samples drawn before found most of the memory free
                self._has_stepped, self._warm = True, {one for one in self._warm if one[1]}
        return loss

    def _set_values(self, batch_images: int) -> None:
        """Put on the device the numbers that the host knows before a step over ``batch_images`` images."""
        if self.rate is not None:
            for group in self.basic_optimizer.param_groups:
                group["lr"] = self.rate(self.images_seen, self.train_batch_size())
        self.step_rate = self.get_lr()[0]  # DeepSpeed's scheduler sets that of the next step
        self._first_image.fill_(self.next_index)
        self.gradients.begin_step()
        if self.averages is not None:
            self.averages.begin_step(self.images_seen + batch_images, batch_images)

    def execute_program(self, *, by_host: bool, start: Start = at_once) -> Tensor:
        """Execute a step's instructions and return its mean loss; reads no number of the host that changes by step."""
        self.loss_sum = torch.zeros((), device=self.device)
        self.gradients.begin()
        sizes = self.sizes_of_step()
        for channels in self._channels:
            channels.begin(by_host=by_host, start=start, sizes=sizes)
        self._flights.clear()
        timed = self.wall_clock_breakdown()
        for instruction, ahead in self._steps:
            for channel in ahead:
                channel.post()
            if timed:
                self.timers(instruction.name).start()
            self.execute[instruction.name](instruction)
            if timed:
                self.timers(instruction.name).stop()
        self._flights.clear()
        for channels in self._channels:
            channels.drain()
        return self.loss_sum / self.micro_batches

    def sizes_of_step(self) -> list[int]:
        """Return the number of the size of each micro-batch's images in the next step; [] if all have one size."""
        if len(self.module.sized_layers) == 1:
            return []
        first, turn = self.next_index, self.micro_batch_size * self.replicas
        return [self.size_of(first + number * turn) for number in range(self.micro_batches)]

    def is_unobserved(self) -> bool:
        """Return, alike on all ranks, whether the next step may be a graph: unwatched, with no message by the hosts."""
        watched = self._watchers or self.execute != self._instructions or self.receive is not Channel.receive
        return not (watched or self._cautious_steps)

    @contextlib.contextmanager
    def step_withheld(self) -> Iterator[None]:
        """Run steps in this context without a change to weights, averages and the optimizer."""
        self._set_values(0)
        with self.gradients.withheld():
            yield
        self._set_values(self.train_batch_size())

    # ------------------------------------------------------- results of the last step; each waits for the device

    def was_step_applied(self) -> bool:
        """Return whether the last step was taken, or skipped since its gradients were not finite."""
        return self.gradients.was_applied()

    def count_skipped_steps(self) -> int:
        """Bring ``skipped_steps`` up to date and return it; the device skips steps by itself."""
        self.skipped_steps += self.gradients.skipped_steps()
        return int(self.skipped_steps)

    # ---------------------------------------------------------------- instructions

    def _flight(self, instruction: Instruction) -> Flight:
        """Return the flight of an instruction's only micro-batch."""
        (number,) = instruction.micro_batches
        if number not in self._flights:
            if number not in self._offsets:  # micro-batch m of replica r has the positions from (m R + r) n on
                micro = self.micro_batch_size
                first = (number * self.replicas + self.replica) * micro
                self._offsets[number] = torch.arange(first, first + micro, device=self.device)
            images = self._first_image + self._offsets[number]
            self._flights[number] = Flight(images, tuple(Passage() for _ in range(self.phases)))
        return self._flights[number]

    def _begin(self, own: Instruction) -> None:
        """Set the images and the text of the layers' next pass, and whether it defers weight gradients."""
        set_image_index(self._dropouts, self._flight(own).images)
        set_context(self.readers, self._flight(own).context)
        self._waiting.begin(own.phase, *own.micro_batches)

    def _load(self, own: Instruction) -> None:
        flight, micro_batch = self._flight(own), next(self.data_iterator)
        if self.readers and (context := self.objective.context(micro_batch)) is not None:
            dtype = arithmetic_dtype(self.device.type, self._message_dtype())
            flight.context = context.to(dtype)  # once for all layers
        if self._holds_end:
            flight.prepared = self.objective.prepare(micro_batch)

    def _forward(self, own: Instruction) -> None:
        phase = own.phase
        flight, channels = self._flight(own), self._channels[phase]
        passage, ends = flight.passages[phase], phase == self.phases - 1
        self._begin(own)
        if channels.activations_in is not None:
            differentiable = self.module.reached(self.module.phase_bounds[phase][0])
            received = self.receive(channels.activations_in)
            passage.leaves = tuple(leaf.requires_grad_(differentiable) for leaf in received)
        if phase == 0 and self.is_first_stage():
            carry = self.module.own_rows(self.objective.inputs(flight.prepared))
        else:
            carry = self.module.unpacked(phase, passage.leaves, flight.kept)
        outputs = self.module.walk(phase, carry)
        if ends and self.stage_id == self.loss_stage:
            loss = self.objective.loss(outputs, flight.prepared, self.module.band)
            self.loss_sum += loss.detach()
            passage.roots = (_edge(loss),)
        else:
            sent, kept = self.module.packed(phase, outputs)
            passage.roots = tuple(map(_edge, sent))
            if not ends:
                flight.kept_roots, flight.kept = tuple(map(_edge, kept)), _as_leaves(kept)
            if channels.activations_out is not None:
                passage.unsent = sent
            else:
                flight.passages[phase + 1].leaves = _as_leaves(sent)
        if ends:
            flight.prepared = None

    def _send_activations(self, own: Instruction) -> None:
        """Send a stage's output; its memory may be freed, since backward only needs its graph edge."""
        passage = self._flight(own).passages[own.phase]
        channel = self._channels[own.phase].activations_out
        assert channel is not None
        channel.send(passage.unsent)
        passage.unsent = ()

    def _backward(self, own: Instruction) -> None:
        """Walk a stage's graph of one micro-batch once, from all outputs that have a gradient."""
        phase = own.phase
        flight, channels = self._flight(own), self._channels[phase]
        passage = flight.passages[phase]
        gradients: Sequence[Tensor | None]
        if not self.module.reached(self.module.phase_bounds[phase][1]):  # nothing up to here is trained
            gradients = [None] * len(passage.roots)
        elif channels.gradients_in is not None:
            gradients = self.receive(channels.gradients_in)
        elif phase == self.phases - 1:
            scale = self.gradients.scale / self.micro_batches
            gradients = [scale if isinstance(scale, Tensor) else torch.full((), scale, device=self.device)]
        else:
            turned = flight.passages[phase + 1]
            gradients, turned.leaves = [leaf.grad for leaf in turned.leaves], ()
        begin: list[tuple[GradientEdge | None, Tensor | None]] = list(zip(passage.roots, gradients, strict=True))
        passage.roots = ()
        if phase == 0:
            begin += zip(flight.kept_roots, (leaf.grad for leaf in flight.kept), strict=True)
            flight.kept_roots = flight.kept = ()
        pairs = [(root, gradient) for root, gradient in begin if root is not None and gradient is not None]
        self._begin(own)
        with self.gradients.gathering(own.phase, KINDS[own.name]):
            if pairs:
                torch.autograd.backward([root for root, _ in pairs], [gradient for _, gradient in pairs])
        if phase == 0:
            flight.context = None
            set_context(self.readers, None)

    def _weight_gradients(self, own: Instruction) -> None:
        with self.gradients.gathering(own.phase, KINDS[own.name]):
            layers = reversed(self.module.own_layers(own.phase).values())  # as buckets are: few gradients wait
            parts = [part for layer in layers for part in reversed(weighted_parts(layer))]
            self._waiting.compute(parts, own.micro_batches, self.gradients.give)

    def _send_gradients(self, own: Instruction) -> None:
        """Send the gradients of the received tensors, and zeros for emb if the last layers don't use it; nothing if
        nothing before them is trained.
        """
        passage = self._flight(own).passages[own.phase]
        channel = self._channels[own.phase].gradients_out
        if channel is not None:
            channel.send([leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in passage.leaves])
        passage.leaves = ()

    def _reduce(self, _: Instruction) -> None:
        for queue in self._queues:
            queue.check_empty()
        self.gradients.reduce()

    def _step(self, _: Instruction) -> None:
        with contextlib.nullcontext() if self.averages is None else self.averages.stepping():
            self.gradients.step()
