"""Predictions of the whole U-Net through the stages: no rank ever holds more than its own layers.

The first rank gives inputs and takes predictions, so that images and losses are only there::

    stage 0        give 0, 1, 2 ... ─▶ forward ─▶                          take 0 ◀── prediction
    stage 1                              receive, forward ─▶                         │
    stage S - 1                                      receive, forward ─▶ prediction ─┘

In a fold the last stage is on the first rank, and skips stay on their ranks here too. ``depth`` calls are under way at
a time. A sampler whose micro-batches take turns gives the next input of one while the others are still in the
pipeline, so that no stage waits for a whole round.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ddpm_ds.pipeline.messages import Edge, StageChannels
from ddpm_ds.unet.blocks import Carry, set_context

if TYPE_CHECKING:
    from ddpm_ds.pipeline.engine import UnetPipelineEngine  # which imports DeepSpeed

Give = Callable[[int], Carry]
Take = Callable[[int, Tensor], None]
Context = Callable[[int], Tensor | None]


class ForwardPipeline:
    """Pipelined forward passes of a rank's stages on ``images`` images at a time, without gradients and dropout."""

    def __init__(self, engine: "UnetPipelineEngine", images: int) -> None:
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

        On the first rank ``give(i)`` returns the arguments of the first layer for ``images`` images, and may rely on
        all predictions before number ``i - depth + 1``; ``take(i, prediction)`` gets an fp32 tensor
        (images, C, H, W). Other ranks call neither. Each rank whose layers read the encoded text calls ``context(i)``,
        (images, tokens, channels), in each of its phases. ``sizes`` has for each call the number of its images' size in
        the module's ``sized_layers``; without it all are 0. Every rank calls ``progress`` after each of its calls.
        """
        self._context, engine = context, self._engine
        most = 2 * engine.num_stages if self._gives and engine.num_stages > 1 else 1  # calls begun before one returns
        if engine.phases == 2:  # after the ranks below have computed two stages each
            most = 2 * (engine.num_stages - 1 - engine.stage_id) + 1
        try:
            with engine.forward_only(self._images, set(sizes) or {0}) as by_host:
                for channels in (*self._channels, self._back):
                    channels.begin(by_host=by_host, sizes=sizes)
                    if channels.activations_in is not None:
                        channels.activations_in.start_receiving(calls)
                lead = max(1, min(depth, calls, most)) - 1
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
        finally:
            set_context(engine.readers, None)

    def _pass(self, number: int, phase: int, carry: Carry) -> Carry:
        """Run a stage of call ``number`` and send its output; return the tensors that stay here, or the prediction.

        ``carry`` has the inputs, or the tensors that phase 0 has left on this rank.
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
