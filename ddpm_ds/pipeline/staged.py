"""Predictions of the whole U-Net through the stages: no rank ever holds more than its own layers.

The first rank gives inputs and takes predictions, so that images and losses are there alone:

    stage 0        give 0, 1, 2 ... ─▶ forward ─▶                          take 0 ◀── prediction
    stage 1                              receive, forward ─▶                         │
    stage S - 1                                      receive, forward ─▶ prediction ─┘

In a fold the last stage is on the first rank, and skips stay on their ranks here too. ``depth`` calls are under way at
a time. A sampler whose micro-batches take turns gives the next input of one while the others are still in the
pipeline, so that no stage waits for a whole round.

Beside training, consecutive ranks are the stages of a pipeline, and all pipelines have the same weights. The first rank
of a pipeline leads: it calls a :class:`StagedUnet` like the whole, and draws, scores and writes as a single process
does. The others serve its calls::

    stage 0        prediction = unet(x_t, t, ...)    order ─▶ all    parts of x_t ─▶ forward ─▶     ◀── predictions
    stage 1        serve: wait for an order                            receive, forward ─▶               │
    stage S - 1    serve: wait for an order                                receive, forward ─▶ predictions ┘

Orders are messages between hosts, so that no device waits for them.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ddpm_ds.config.spec import Interface, UnetSpec
from ddpm_ds.errors import LayoutError, PeerLostError, UserError, is_out_of_memory
from ddpm_ds.pipeline.cuts import partition
from ddpm_ds.pipeline.messages import Channel, Edge, P2PGroup, StageChannels, open_p2p_groups, runs_behind
from ddpm_ds.unet.blocks import (
    Carry,
    TransformerBlock,
    pack,
    set_context,
    transformer_blocks,
    unpack,
    walk,
)
from ddpm_ds.unet.layers import Layer, TransformerBlockLayer, boundary_shapes, unet_layers
from ddpm_ds.unet.model import UNet

Give = Callable[[int], Carry]
Take = Callable[[int, Tensor], None]
Context = Callable[[int], Tensor | None]


class Stages(Protocol):
    """Stages of a rank: those of an engine that trains, or of a U-Net that only predicts."""

    phases: int
    num_stages: int
    stage_id: int

    @property
    def readers(self) -> Sequence[TransformerBlock]: ...  # its layers that read the encoded text
    @property
    def loss_stage(self) -> int: ...
    @property
    def module(self) -> Any: ...  # its layers, as ddpm_ds.pipeline.module has them
    def is_first_stage(self) -> bool: ...
    def stage_channels(self, phase: int, images: int) -> StageChannels: ...
    def channel(
        self,
        edge: Edge,
        shapes: Sequence[tuple[int, ...]],
        dtype: torch.dtype,
        others: Sequence[Sequence[tuple[int, ...]]] = (),
    ) -> Channel: ...
    def forward_only(self, images: int, sizes: Collection[int]) -> AbstractContextManager[bool]: ...


class ForwardPipeline:
    """Pipelined forward passes of a rank's stages on ``images`` images at a time, without gradients and dropout."""

    def __init__(self, engine: Stages, images: int) -> None:
        self._engine, self._images = engine, images
        self._gives = engine.is_first_stage()
        """Whether this rank gives inputs and takes predictions."""
        self._channels = [engine.stage_channels(phase, images) for phase in range(engine.phases)]
        self._back = StageChannels()
        """Way back of predictions, if the last stage is on another rank than the first."""
        if engine.loss_stage > 0 and engine.stage_id in (0, engine.loss_stage):
            shapes, *others = ([(images, *layers[-1].output_shape)] for layers in engine.module.sized_layers)
            back = engine.channel(Edge("predictions", 0, engine.loss_stage, 0), shapes, torch.float32, others)
            self._back = StageChannels(activations_in=back) if self._gives else StageChannels(activations_out=back)
        self._context: Context = lambda number: None
        self._under_way: deque[Carry] = deque()
        """Tensors that this rank keeps of each unfinished call: in a fold emb and skips, at its turn preceded by h."""

    @torch.no_grad()
    def run(
        self,
        calls: int,
        give: Give,
        take: Take,
        *,
        context: Context = lambda number: None,
        sizes: Sequence[int] = (),
        depth: int,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        """Carry ``calls`` micro-batches through the pipeline; collective over its ranks, all with the same ``depth``.

        On the first rank ``give(i)`` returns the arguments of the first layer, ``images`` images of them, and may
        rely on every prediction before number ``i - depth + 1``; ``take(i, prediction)`` gets an fp32 tensor
        (images, C, H, W). Other ranks call neither. Each rank whose layers read the encoded text calls ``context(i)``,
        (images, tokens, channels), in each of its phases. ``sizes`` has the number of each call's size of images, by
        which the module's ``sized_layers`` are numbered; without it all are 0. ``progress`` is called on every rank
        after each of its calls.
        """
        self._context = context
        try:
            with self._engine.forward_only(self._images, set(sizes) or {0}) as by_host:
                for channels in (*self._channels, self._back):
                    channels.begin(calls, by_host=by_host, gradients=False, sizes=sizes)
                self._run(calls, give, take, max(1, min(depth, calls)), progress)
        finally:
            set_context(self._engine.readers, None)

    def _run(self, calls: int, give: Give, take: Take, depth: int, progress: Callable[[], None]) -> None:
        engine = self._engine
        lead = min(depth, self._most_ahead()) - 1
        for number in range(calls + lead):
            if number < calls:
                self._under_way.append(self._pass(number, 0, give(number) if self._gives else ()))
            if number >= lead:
                outputs = self._under_way.popleft()
                if engine.phases == 2:
                    outputs = self._pass(number - lead, 1, outputs)
                if self._back.activations_in is not None:
                    outputs = self._back.activations_in.receive()
                if self._gives:
                    take(number - lead, outputs[0].float())
                progress()
        for channels in (*self._channels, self._back):
            channels.drain()

    def _most_ahead(self) -> int:
        """Return the maximum number of calls that this rank begins before it finishes the first.

        In a fold a call returns to a rank after the ranks below have computed two stages each.
        """
        engine = self._engine
        if engine.phases == 2:
            return 2 * (engine.num_stages - 1 - engine.stage_id) + 1
        return 2 * engine.num_stages if self._gives and engine.num_stages > 1 else 1

    def _pass(self, number: int, phase: int, carry: Carry) -> Carry:
        """Run a stage of call ``number`` on the inputs, or on received tensors and those kept by phase 0 (``carry``),
        and send its output.

        Returns the tensors that stay on this rank for the next phase, or the prediction.
        """
        engine, channels = self._engine, self._channels[phase]
        if phase or not self._gives:
            received = channels.activations_in.receive() if channels.activations_in else ()
            carry = engine.module.unpacked(phase, received, carry)
        if engine.readers:
            set_context(engine.readers, self._context(number))
        outputs = engine.module.walk(phase, carry)
        if phase == engine.phases - 1 and engine.stage_id == engine.loss_stage:
            if self._back.activations_out is not None:
                self._back.activations_out.send([outputs.float()])
            return (outputs,)
        sent, kept = engine.module.packed(phase, outputs)
        if channels.activations_out is None:
            return (*sent, *kept)
        channels.activations_out.send(sent)
        return kept


class Order(NamedTuple):
    """What the first rank of a pipeline calls."""

    unet: int
    """Number of the U-Net; negative if there are no more calls."""
    images: int = 0
    """Images of a part."""
    parts: int = 0
    tokens: int = 0
    """Tokens of the encoded text that follows; 0 leaves that of the call before."""
    height: int = 0
    width: int = 0


END = Order(-1)


class Pipelines:
    """The place of this process in pipelines of ``stages`` processes that share images; by default it is alone.

    Raises:
        LayoutError: the processes are no whole number of pipelines.
    """

    def __init__(self, stages: int = 1, rank: int = 0, world_size: int = 1) -> None:
        if world_size % stages:
            fewer = max(number for number in range(1, stages) if world_size % number == 0)
            raise LayoutError(
                f"--stages {stages} does not divide the number of processes, {world_size}; start {stages} or a "
                f"multiple (deepspeed --num_gpus {stages} launch/...), or use --stages {fewer}"
            )
        self.stages, self.count = stages, world_size // stages
        """Number of stages of a pipeline, and of pipelines."""
        self.number, self.stage = divmod(rank, stages)
        """Number of this process's pipeline, and of its stage there."""
        self._unets: list[UNet] = []
        self._context: Tensor | None = None

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that scores and writes."""
        return self.number == self.stage == 0

    def connect(self, device: torch.device, patience: timedelta) -> None:
        """Connect the stages of each pipeline, and the pipelines; collective. A rank waits for an order, or for the
        other pipelines, as long as its ``patience``.
        """
        ranks = [range(first, first + self.stages) for first in range(0, self.count * self.stages, self.stages)]
        self._leaders: Any = dist.new_group([own[0] for own in ranks], backend="gloo", timeout=patience)
        if self.stages > 1:
            orders: list[Any] = [dist.new_group(list(own), backend="gloo", timeout=patience) for own in ranks]
            self._leader, self._orders = ranks[self.number][0], orders[self.number]
            self.edges: dict[Edge, P2PGroup] = open_p2p_groups(ranks, 1, device, gradients=False)

    def wait(self, patience: timedelta) -> None:
        """Wait until all pipelines have come here.

        Raises:
            PeerLostError: a process of another pipeline has died.
        """
        if self.count > 1:
            try:
                dist.monitored_barrier(self._leaders, timeout=patience)
            except RuntimeError:
                raise PeerLostError(
                    "another process was lost before it had done its share; what is done is kept, start it again"
                ) from None

    @contextlib.contextmanager
    def at_work(self, unets: Sequence[UNet]) -> Iterator[bool]:
        """Let the U-Nets be called inside this context on the first rank of each pipeline, where it yields True.

        Other ranks serve the calls until that rank leaves the context; then it yields False to them.

        Raises:
            LayoutError: the device of a rank that serves has no memory for so many images.
            PeerLostError: a process of the pipeline has died.
        """
        self._unets = list(unets)
        if self.stage:
            self._serve()
            yield False
            return
        try:
            yield True
        except UserError:
            self._passed_on(END)
            raise
        self._passed_on(END)

    def call(self, unet: "StagedUnet", inputs: Sequence[Tensor], context: Tensor | None) -> Tensor:
        """Return the prediction for ``inputs``, of N images each, and their encoded text; called on first ranks alone.

        They go through the stages in equal parts, up to two for each stage, so that all stages are at work. Text is
        sent only if it is another one than at the call before.
        """
        images = len(inputs[0])
        parts = max(number for number in range(1, 2 * self.stages + 1) if images % number == 0)
        given = list(zip(*(one.chunk(parts) for one in inputs), strict=True))
        tokens = 0 if context is None or context is self._context else context.shape[1]
        order = Order(self._unets.index(unet), images // parts, parts, tokens, *inputs[0].shape[2:])
        self._passed_on(order)
        self._share(unet, order, context)
        unet.expect(order.height, order.width)
        found: list[Tensor] = []
        with _noticing_losses():
            pipeline = ForwardPipeline(unet, order.images)
            pipeline.run(
                parts,
                given.__getitem__,
                lambda _, prediction: found.append(prediction),
                context=self._text_of(order),
                depth=parts,
            )
        return torch.cat(found)

    def total(self, sums: Tensor) -> Tensor:
        """Return the sum of ``sums`` over all pipelines; called on first ranks alone.

        Raises:
            PeerLostError: a process of another pipeline has died.
        """
        sums = sums.cpu()
        if self.count > 1:
            with _noticing_losses():
                dist.all_reduce(sums, group=self._leaders)
        return sums

    def _share(self, unet: "StagedUnet", order: Order, context: Tensor | None) -> None:
        """Give all ranks of the pipeline the text of an order, if it is a new one."""
        if not order.tokens:
            return
        channels = next(
            layer.context_channels for layer in unet.unet_layers if isinstance(layer, TransformerBlockLayer)
        )
        shape = (order.images * order.parts, order.tokens, channels)
        numbers = torch.empty(shape) if context is None else context.float().cpu()
        with _noticing_losses():
            if self.stages > 1:
                dist.broadcast(numbers, src=self._leader, group=self._orders)
        weight = next(unet.parameters())
        self._context = numbers.to(weight.device) if context is None else context

    def _text_of(self, order: Order) -> Callable[[int], Tensor | None]:
        """Return a function of a part's number that returns its text."""
        context = self._context
        return lambda part: None if context is None else context[part * order.images : (part + 1) * order.images]

    def _serve(self) -> None:
        while (order := self._passed_on(END)) != END:
            unet = self._unets[order.unet]
            assert isinstance(unet, StagedUnet)
            self._share(unet, order, None)
            unet.expect(order.height, order.width)
            try:
                with _noticing_losses():
                    pipeline, text = ForwardPipeline(unet, order.images), self._text_of(order)
                    pipeline.run(order.parts, lambda _: (), lambda *_: None, context=text, depth=order.parts)
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                raise LayoutError(
                    f"--batch-images: the device of stage {self.stage} has no memory for {order.images} images at "
                    "once; use fewer"
                ) from None

    def _passed_on(self, order: Order) -> Order:
        """Return the order of the first rank on all ranks of the pipeline."""
        if self.stages == 1:
            return order
        numbers = torch.tensor(order)
        with _noticing_losses():
            dist.broadcast(numbers, src=self._leader, group=self._orders)
        return Order(*numbers.tolist())


class StagedUnet(UNet):
    """The layers of a U-Net that are this rank's stage, cut so that the heaviest stage has the fewest parameters.

    Raises:
        LayoutError: the U-Net has fewer layers than there are stages.
    """

    phases = 1

    def __init__(self, spec: UnetSpec, interface: Interface, pipelines: Pipelines) -> None:
        layers = unet_layers(spec, interface)
        try:
            bounds = partition(layers, pipelines.stages, "parameters")
        except LayoutError as error:
            raise LayoutError(str(error).replace("pipeline.stages =", "--stages")) from None
        first, stop = bounds[pipelines.stage : pipelines.stage + 2]
        super().__init__(layers, 0, range(first, stop))
        self.unet_layers, self.pipelines = layers, pipelines
        self._spec, self._interface = spec, interface
        self._first, self._stop = first, stop
        self.readers = transformer_blocks(self.layers)
        self.num_stages, self.stage_id, self.loss_stage = pipelines.stages, pipelines.stage, pipelines.stages - 1
        self._warm: set[tuple[int, tuple[int, int]]] = set()

    def forward(
        self, x_t: Tensor, t: Tensor, *told: Tensor, images: Tensor | None = None, context: Tensor | None = None
    ) -> Tensor:
        """Predict as the whole U-Net does, in fp32."""
        return self.pipelines.call(self, (x_t, t, *told), context)

    def expect(self, height: int, width: int) -> None:
        """Expect images of this size at the next calls."""
        if (height, width) != self._interface.size:
            self._interface = replace(self._interface, size=(height, width))
            self.unet_layers = unet_layers(self._spec, self._interface)

    # ---------------------------------------------------------------- what ForwardPipeline uses

    @property
    def module(self) -> "StagedUnet":
        """What has this rank's layers."""
        return self

    @property
    def sized_layers(self) -> tuple[Sequence[Layer]]:
        """The list of layers, for images of the one size of a call."""
        return (self.unet_layers,)

    def is_first_stage(self) -> bool:
        """Return whether this rank gives inputs and takes predictions."""
        return self.stage_id == 0

    def stage_channels(self, phase: int, images: int) -> StageChannels:
        """Return the channels for the carry of ``images`` images."""

        def channel(source: int, cut: int) -> Channel | None:
            if not 0 <= source < self.num_stages - 1:
                return None
            shapes = [(images, *shape) for shape in boundary_shapes(self.unet_layers, cut)]
            dtype = next(self.parameters()).dtype
            return self.channel(Edge("activations", 0, source, source + 1), shapes, dtype)

        return StageChannels(
            activations_in=channel(self.stage_id - 1, self._first), activations_out=channel(self.stage_id, self._stop)
        )

    def channel(
        self,
        edge: Edge,
        shapes: Sequence[tuple[int, ...]],
        dtype: torch.dtype,
        others: Sequence[Sequence[tuple[int, ...]]] = (),
    ) -> Channel:
        """Return this rank's end of an edge, which holds all messages of a call."""
        device = next(self.parameters()).device
        return Channel(shapes, dtype, device, self.pipelines.edges[edge], 2 * self.num_stages, others)

    @contextlib.contextmanager
    def forward_only(self, images: int, sizes: Collection[int]) -> Iterator[bool]:
        """Yield whether messages go from host to host: while kernels are loaded and the allocator grows, the first time
        for so many images of their size.
        """
        key = images, self._interface.size
        first = key not in self._warm
        yield first and runs_behind(next(self.parameters()).device)
        self._warm.add(key)

    def walk(self, phase: int, carry: Carry) -> Tensor | Carry:
        """Run this rank's layers."""
        walked: Tensor | Carry = walk(self.layers, carry)
        return walked

    def unpacked(self, phase: int, received: Carry, kept: Carry) -> Carry:
        """Return the carry at the stage's beginning."""
        return unpack(received, self.unet_layers[self._first - 1])

    def packed(self, phase: int, carry: Carry) -> tuple[Carry, Carry]:
        """Return the tensors to send of the carry at the stage's end, and none that stay."""
        return pack(carry, self.unet_layers[self._stop - 1]), ()


@contextlib.contextmanager
def _noticing_losses() -> Iterator[None]:
    """Turn the errors of messages to or from a process that has died into PeerLostError."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        raise PeerLostError(
            "another process was lost in the middle of a batch; what is done is kept, start it again"
        ) from None
