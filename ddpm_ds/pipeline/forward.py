"""Predictions of the whole U-Net through the stages: no stage ever holds more than its own layers.

The first stage gives inputs and takes predictions, so that what is drawn or measured lives there alone:

    stage 0        give 0, 1, 2 ... ─▶ forward ─▶                          take 0 ◀── prediction
    stage 1                              receive, forward ─▶                         │
    stage S - 1                                      receive, forward ─▶ prediction ─┘

``depth`` calls are under way at a time. A sampler whose micro-batches take turns gives the next input of one while the
others are still in the pipeline, so that no stage waits for a whole round.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ddpm_ds.pipeline.boundary import Channel
from ddpm_ds.pipeline.engine import UnetPipelineEngine
from ddpm_ds.unet.carry import Carry, pack, unpack


class ForwardPipeline:
    """Forward passes of an engine's stages over ``images`` images at a time, without gradients and dropout."""

    def __init__(self, engine: UnetPipelineEngine, images: int) -> None:
        self._engine = engine
        self._activations_in, self._activations_out = engine.activation_channels(images)
        first = engine.module.unet_layers[0]
        self._predictions: Channel | None = None
        if engine.num_stages > 1 and (engine.is_first_stage() or engine.is_last_stage()):
            peer = engine.num_stages - 1 if engine.is_first_stage() else 0
            self._predictions = engine.channel_to(peer, [(images, *first.output_shape)], torch.float32)

    @torch.no_grad()
    def run(
        self,
        calls: int,
        give: Callable[[int], Carry],
        take: Callable[[int, Tensor], None],
        *,
        depth: int,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        """Carry ``calls`` micro-batches through the pipeline; collective over its stages.

        On the first stage ``give(i)`` returns the arguments of the first layer, ``images`` images of them, and may
        rely on every prediction before number ``i - depth + 1``; ``take(i, prediction)`` gets an fp32 tensor
        (images, C, H, W). Other stages call neither. ``progress`` is called on every stage after each of its calls.
        """
        module = self._engine.module
        module.eval()
        try:
            if self._engine.is_first_stage():
                self._lead(calls, give, take, max(1, min(depth, 2 * self._engine.num_stages, calls)), progress)
            else:
                for _ in range(calls):
                    self._follow()
                    progress()
        finally:
            module.train()
        for channel in (self._activations_out, self._predictions):
            if channel is not None:
                channel.drain()

    def _lead(
        self,
        calls: int,
        give: Callable[[int], Carry],
        take: Callable[[int, Tensor], None],
        depth: int,
        progress: Callable[[], None],
    ) -> None:
        """The first stage's part: keep ``depth`` calls under way."""
        if self._predictions is None:
            for number in range(calls):
                take(number, self._walk(self._stored(give(number)))[0].float())
                progress()
            return
        for number in range(calls + depth):
            if number >= depth:
                take(number - depth, self._predictions.receive()[0])
                progress()
            if number < calls:
                self._send_on(self._walk(self._stored(give(number))))

    def _follow(self) -> None:
        """One call of another stage."""
        assert self._activations_in is not None
        outputs = self._walk(unpack(self._activations_in.receive(), self._engine.skip_is_h_in))
        if self._predictions is not None:
            self._predictions.send([outputs[0].float()])
        else:
            self._send_on(outputs)

    def _send_on(self, outputs: Carry) -> None:
        assert self._activations_out is not None
        self._activations_out.send(pack(outputs, self._engine.skip_is_h_out))

    def _walk(self, carry: Carry) -> Carry:
        outputs = self._engine.module(carry)
        return (outputs,) if isinstance(outputs, Tensor) else outputs

    def _stored(self, inputs: Carry) -> Carry:
        """Inputs in the dtype of the weights."""
        return self._engine.in_wire_dtype(inputs)
