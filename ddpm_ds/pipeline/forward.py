"""Predictions of the whole U-Net through the stages: no rank ever holds more than its own layers.

The first rank gives inputs and takes predictions, so that images and losses are there alone:

    stage 0        give 0, 1, 2 ... ─▶ forward ─▶                          take 0 ◀── prediction
    stage 1                              receive, forward ─▶                         │
    stage S - 1                                      receive, forward ─▶ prediction ─┘

In a fold the last stage is on the first rank, and skips stay on their ranks here too. ``depth`` calls are under way at
a time. A sampler whose micro-batches take turns gives the next input of one while the others are still in the
pipeline, so that no stage waits for a whole round.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from ddpm_ds.pipeline.engine import UnetPipelineEngine
from ddpm_ds.pipeline.folded import FoldedEngine
from ddpm_ds.pipeline.messages import Channel, runs_behind
from ddpm_ds.pipeline.order import Edge
from ddpm_ds.unet.blocks import Carry

Give = Callable[[int], Carry]
Take = Callable[[int, Tensor], None]


class ForwardPipeline:
    """Forward passes of an engine's stages over ``images`` images at a time, without gradients and dropout."""

    def __init__(self, engine: UnetPipelineEngine, images: int) -> None:
        self._engine, self._images = engine, images
        self._way: _Folded | _Straight = (
            _Folded(engine, images) if isinstance(engine, FoldedEngine) else _Straight(engine, images)
        )

    @torch.no_grad()
    def run(
        self, calls: int, give: Give, take: Take, *, depth: int, progress: Callable[[], None] = lambda: None
    ) -> None:
        """Carry ``calls`` micro-batches through the pipeline; collective over its ranks, all with the same ``depth``.

        On the first rank ``give(i)`` returns the arguments of the first layer, ``images`` images of them, and may
        rely on every prediction before number ``i - depth + 1``; ``take(i, prediction)`` gets an fp32 tensor
        (images, C, H, W). Other ranks call neither. ``progress`` is called on every rank after each of its calls.
        """
        engine = self._engine
        engine.module.eval()
        try:
            first = engine.warm_up(self._images, gradients=False)
            by_host = first and runs_behind(engine.device)
            self._way.run(calls, give, take, max(1, min(depth, calls)), progress, by_host=by_host)
        finally:
            engine.module.train()
            engine.be_cautious()


class _Straight:
    """Calls under 1F1B: stage after stage; the last one sends its predictions to the first."""

    def __init__(self, engine: UnetPipelineEngine, images: int) -> None:
        self._engine = engine
        self._channels = engine.stage_channels(0, images)
        self._predictions: Channel | None = None
        if engine.num_stages > 1 and engine.stage_id in (0, engine.loss_stage):
            shape = (images, *engine.module.unet_layers[0].output_shape)
            self._predictions = engine.channel(Edge("predictions", 0, engine.loss_stage, 0), [shape], torch.float32)

    def run(
        self, calls: int, give: Give, take: Take, depth: int, progress: Callable[[], None], *, by_host: bool
    ) -> None:
        self._channels.begin(calls, by_host=by_host, gradients=False)
        if self._predictions is not None:
            self._predictions.by_host = by_host
        if self._engine.is_first_stage():
            self._lead(calls, give, take, min(depth, 2 * self._engine.num_stages), progress)
        else:
            self._follow(calls, progress)
        self._channels.drain()
        if self._predictions is not None:
            self._predictions.drain()

    def _lead(self, calls: int, give: Give, take: Take, depth: int, progress: Callable[[], None]) -> None:
        engine = self._engine
        if self._predictions is None:
            for number in range(calls):
                take(number, engine.walk(0, engine.in_message_dtype(give(number))).float())
                progress()
            return
        self._predictions.start_receiving(calls)
        for number in range(calls + depth):
            if number >= depth:
                take(number - depth, self._predictions.receive()[0])
                progress()
            if number < calls:
                self._send_on(engine.walk(0, engine.in_message_dtype(give(number))))

    def _follow(self, calls: int, progress: Callable[[], None]) -> None:
        engine, activations = self._engine, self._channels.activations_in
        assert activations is not None
        for _ in range(calls):
            outputs = engine.walk(0, engine.unpacked(activations.receive()))
            if self._predictions is not None:
                self._predictions.send([outputs.float()])
            else:
                self._send_on(outputs)
            progress()

    def _send_on(self, outputs: Carry) -> None:
        assert self._channels.activations_out is not None
        self._channels.activations_out.send(self._engine.packed(outputs))


class _Folded:
    """Calls in a fold: down the ranks and up again; each rank keeps emb and its skips in between."""

    def __init__(self, engine: FoldedEngine, images: int) -> None:
        self._engine = engine
        self._down, self._up = (engine.stage_channels(phase, images) for phase in range(engine.phases))
        self._kept: deque[Carry] = deque()
        """Calls that have gone down and not come up: on the last rank h, then emb and the skips."""

    def run(
        self, calls: int, give: Give, take: Take, depth: int, progress: Callable[[], None], *, by_host: bool
    ) -> None:
        engine = self._engine
        # A call that this rank has sent down comes back when the ranks below have done two stages each.
        lead = min(depth, 2 * (engine.num_stages - 1 - engine.stage_id) + 1) - 1
        for channels in (self._down, self._up):
            channels.begin(calls, by_host=by_host, gradients=False)
        for number in range(calls + lead):
            if number < calls:
                self._go_down(number, give)
            if number >= lead:
                self._come_up(number - lead, take)
                progress()
        for channels in (self._down, self._up):
            channels.drain()

    def _go_down(self, number: int, give: Give) -> None:
        engine, channels = self._engine, self._down
        carry = channels.activations_in.receive() if channels.activations_in else engine.in_message_dtype(give(number))
        h, *kept = engine.walk(0, carry)
        if channels.activations_out is None:
            kept.insert(0, h)
        else:
            channels.activations_out.send((h, kept[0]))
        self._kept.append(tuple(kept))

    def _come_up(self, number: int, take: Take) -> None:
        channels, kept = self._up, self._kept.popleft()
        received = channels.activations_in.receive() if channels.activations_in else ()
        outputs = self._engine.walk(1, (*received, *kept))
        if channels.activations_out is None:
            take(number, outputs.float())
        else:
            channels.activations_out.send(outputs[:1])
