"""DeepSpeed's 1F1B pipeline engine, taught to train a U-Net.

The schedule is DeepSpeed's own instruction stream. What is ours is how an instruction is executed:

- a stage's backward is ONE walk of its graph, ``torch.autograd.backward(all outputs, all gradients)``; the stock
  engine walks it once per output tensor, and a U-Net stage has an output per live skip;
- ZeRO-2 works: gradients are reduced and partitioned after each micro-batch's backward, accumulated in the owner's
  partition and finished once;
- a boundary's tensors travel as one message, are used where they were received, and no tensor crosses twice;
- what is random is keyed by the image, so each stage knows its micro-batch from arithmetic alone.

    instruction      stage s                                        touches
    LoadMicroBatch   next micro-batch, noised (first), target (last)  loads[b]
    RecvActivation   one message to leaf tensors                      inputs[b]
    ForwardPass      walk the layers; loss on the last stage          outputs[b]
    SendActivation   one message                                      outputs[b]
    RecvGrad         one message                                      gradients[b]
    BackwardPass     one autograd walk; ZeRO-2 partitions             inputs[b].grad
    SendGrad         one message; the buffer is free again            inputs[b]
    ReduceGrads, OptimizerStep
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor

from ddpm_ds.pipeline import deepspeed_insides as insides
from ddpm_ds.pipeline.boundary import Channel
from ddpm_ds.pipeline.module import UnetPipelineModule, checkpoint_function
from ddpm_ds.unet.carry import Carry, newest_skip_is_h, pack, unpack
from ddpm_ds.unet.layers import boundary_shapes
from ddpm_ds.unet.operations import KeyedDropout, set_image_index


class Objective(Protocol):
    """What is trained: turns a loaded micro-batch into the first layer's input and the last layer's loss."""

    def prepare(self, micro_batch: Any) -> Any:
        """A micro-batch from the loader to what the two methods below need, on the engine's device."""

    def inputs(self, prepared: Any) -> Carry:
        """Arguments of the first layer, in fp32 where they are floating-point."""

    def loss(self, prediction: Tensor, prepared: Any) -> Tensor:
        """Mean loss of the micro-batch: a scalar in fp32."""


INSTRUCTIONS = {
    schedule.OptimizerStep: "_exec_optimizer_step",
    schedule.ReduceGrads: "_exec_reduce_grads",
    schedule.ReduceTiedGrads: "_exec_reduce_tied_grads",
    schedule.LoadMicroBatch: "_exec_load_micro_batch",
    schedule.ForwardPass: "_exec_forward_pass",
    schedule.BackwardPass: "_exec_backward_pass",
    schedule.SendActivation: "_exec_send_activations",
    schedule.RecvActivation: "_exec_recv_activations",
    schedule.SendGrad: "_exec_send_grads",
    schedule.RecvGrad: "_exec_recv_grads",
}
"""The method that executes each instruction."""


class UnetPipelineEngine(PipelineEngine):
    """1F1B over the stages of one U-Net, with ZeRO-0/1/2, fp16, bf16 and fp32.

    Built by :func:`ddpm_ds.pipeline.build.build_engine`, which sets ``objective``.
    """

    objective: Objective

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        module = self.module
        assert isinstance(module, UnetPipelineModule)
        if module.get_tied_weights_and_groups():
            raise RuntimeError("tied layers are not supported: ZeRO-2 frees their gradients before they are shared")
        insides.leave_forward_and_timing_to_us(self)
        insides.tolerate_scale_floor(self)
        insides.forget_first_optimizer_step(self)
        module.activation_checkpoint_func = checkpoint_function(self._config.pipeline["use_reentrant"])

        self.execute: dict[type[schedule.PipeInstruction], Callable[..., None]] = {
            instruction: getattr(self, method) for instruction, method in INSTRUCTIONS.items()
        }
        """What executes each instruction; an observer may wrap an entry."""
        self.images_seen = 0
        """Images of all completed steps."""
        self.skipped_images = 0
        """Positions of the training sequence that are left out, after bad numbers; what is random follows the sum."""
        self.consecutive_overflows_at_floor = 0
        """Optimizer steps in a row that overflowed although the loss scale could fall no further."""
        self.loss_sum = torch.zeros((), device=self.device)
        """Sum of the last batch's micro-batch losses on the last stage; zero elsewhere."""
        self._step_loss_scale = 1.0
        self._dropouts = [part for part in module.modules() if isinstance(part, KeyedDropout)]
        self._connect()

    def _connect(self) -> None:
        """Make the channels to the neighbouring stages."""
        self._forward_group, self._backward_group = _pipeline_groups(self.grid.pp_group)
        layers, micro = self.module.unet_layers, self.micro_batch_size
        activations_in, activations_out = self.activation_channels(micro)
        if activations_in is not None:
            self._activations_in = activations_in
            self._gradients_out = self._channel(self.module.first, self.prev_stage, micro, self._backward_group)
            self.skip_is_h_in = newest_skip_is_h(layers, self.module.first)
        if activations_out is not None:
            self._activations_out = activations_out
            self._gradients_in = self._channel(self.module.stop, self.next_stage, micro, self._backward_group)
            self.skip_is_h_out = newest_skip_is_h(layers, self.module.stop)

    def activation_channels(self, images: int) -> tuple[Channel | None, Channel | None]:
        """Channels for the carry of ``images`` images: from the stage before and to the stage after, where there is."""
        group, module = self._forward_group, self.module
        first = None if self.is_first_stage() else self._channel(module.first, self.prev_stage, images, group)
        last = None if self.is_last_stage() else self._channel(module.stop, self.next_stage, images, group)
        return first, last

    def channel_to(self, stage: int, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> Channel:
        """A channel to any stage of this pipeline, for messages against the direction of the carry."""
        return Channel(shapes, dtype, self.device, int(self.grid.stage_to_global(stage)), self._backward_group)

    def _channel(self, cut: int, stage: int, images: int, group: dist.ProcessGroup) -> Channel:
        shapes = [(images, *shape) for shape in boundary_shapes(self.module.unet_layers, cut)]
        return Channel(shapes, self._wire_dtype(), self.device, int(self.grid.stage_to_global(stage)), group)

    def _wire_dtype(self) -> torch.dtype:
        return next(self.module.parameters()).dtype

    def in_wire_dtype(self, inputs: Carry) -> Carry:
        """The first layer's arguments, those that are floating-point in the dtype of the weights."""
        dtype = self._wire_dtype()
        return tuple(tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in inputs)

    @property
    def next_index(self) -> int:
        """Position in the training sequence of the next batch's first image."""
        return self.images_seen + self.skipped_images

    # ---------------------------------------------------------------- one batch

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """One optimizer step over ``train_batch_size`` images.

        ``data_iter`` yields the micro-batches of this replica; only the first and the last stage read it. Returns
        the mean loss of this replica's micro-batches on the last stage and zero elsewhere, without synchronising
        host and device.
        """
        self.set_dataiterator(data_iter)
        self.module.train()
        self.loss_sum = torch.zeros((), device=self.device)
        self._forwards = 0
        scale = insides.loss_scale(self)
        self._step_loss_scale = scale
        self._exec_schedule(self._train_schedule())
        self._drain()
        self.images_seen += self.train_batch_size()
        self._watch_scale_floor(scale)
        return self.loss_sum / self.micro_batches

    def gradient_norm(self) -> float:
        """Norm of the last step's gradients over all stages before clipping; synchronises host and device."""
        return insides.gradient_norm(self, self._step_loss_scale)

    def loss_scale(self) -> float:
        """The loss scale that the next step will use; 1 in fp32 and bf16."""
        return insides.loss_scale(self)

    def named_gradients(self) -> dict[str, Tensor]:
        """This stage's unscaled, averaged fp32 gradients by parameter name.

        Meant between the schedule's ReduceGrads and OptimizerStep. A collective over the replicas under ZeRO.
        """
        return {
            name: insides.full_gradient(self, parameter, self._step_loss_scale)
            for name, parameter in self.module.named_parameters()
        }

    def _watch_scale_floor(self, scale: float) -> None:
        if not self.fp16_enabled():
            return
        arguments = self.dynamic_loss_scale_args() if self.dynamic_loss_scale() else None
        floor = arguments["min_scale"] if arguments else scale
        stuck = self.optimizer.overflow and scale <= floor
        self.consecutive_overflows_at_floor = self.consecutive_overflows_at_floor + 1 if stuck else 0

    def _drain(self) -> None:
        if not self.is_first_stage():
            self._gradients_out.drain()
        if not self.is_last_stage():
            self._activations_out.drain()

    def _reserve_pipe_buffers(self, num_buffers: int) -> None:
        for name in ("loads", "inputs", "outputs", "gradients", "image_index"):
            held = self.pipe_buffers.setdefault(name, [])
            held.extend([None] * (num_buffers - len(held)))
        self.num_pipe_buffers = num_buffers

    def _exec_schedule(self, pipe_schedule: schedule.PipeSchedule) -> None:
        """Execute an instruction stream; the one place where an instruction runs."""
        self._reserve_pipe_buffers(pipe_schedule.num_pipe_buffers())
        timed = self.wall_clock_breakdown()
        for commands in pipe_schedule.steps():
            for command in commands:
                if timed:
                    self.timers(command.name).start()
                self.execute[type(command)](**command.kwargs)
                if timed:
                    self.timers(command.name).stop()
        every = self.steps_per_print()
        if timed and every and self.global_steps % every == 0:
            self.timers.log([kind.__name__ for kind in self.execute], normalizer=every)

    # ---------------------------------------------------------------- instructions

    def _exec_load_micro_batch(self, buffer_id: int) -> None:
        prepared = self.objective.prepare(next(self.data_iterator))
        self.pipe_buffers["loads"][buffer_id] = prepared
        if self.is_first_stage():
            self.pipe_buffers["inputs"][buffer_id] = self.in_wire_dtype(self.objective.inputs(prepared))

    def _exec_recv_activations(self, buffer_id: int) -> None:
        leaves = self._activations_in.receive()
        self.pipe_buffers["inputs"][buffer_id] = tuple(leaf.requires_grad_() for leaf in leaves)

    def _exec_forward_pass(self, buffer_id: int) -> None:
        index = self._next_image_index()
        self.pipe_buffers["image_index"][buffer_id] = index
        set_image_index(self._dropouts, index)
        inputs = self.pipe_buffers["inputs"][buffer_id]
        carry = inputs if self.is_first_stage() else unpack(inputs, self.skip_is_h_in)
        outputs = self.module(carry)
        if self.is_last_stage():
            loss = self.objective.loss(outputs, self.pipe_buffers["loads"][buffer_id])
            self.loss_sum += loss.detach()
            outputs = (loss,)
        else:
            outputs = pack(outputs, self.skip_is_h_out)
        self.pipe_buffers["loads"][buffer_id] = None
        self.pipe_buffers["outputs"][buffer_id] = outputs

    def _exec_send_activations(self, buffer_id: int) -> None:
        self._activations_out.send(self.pipe_buffers["outputs"][buffer_id])

    def _exec_recv_grads(self, buffer_id: int) -> None:
        self.pipe_buffers["gradients"][buffer_id] = self._gradients_in.receive()

    def _exec_backward_pass(self, buffer_id: int) -> None:
        outputs = self.pipe_buffers["outputs"][buffer_id]
        if self.is_last_stage():
            gradients = (torch.full_like(outputs[0], self._step_loss_scale / self.micro_batches),)
        else:
            gradients = self.pipe_buffers["gradients"][buffer_id]
        set_image_index(self._dropouts, self.pipe_buffers["image_index"][buffer_id])
        with insides.micro_batch_backward(self):
            torch.autograd.backward(outputs, gradients)
        self.pipe_buffers["outputs"][buffer_id] = self.pipe_buffers["gradients"][buffer_id] = None
        if self.is_first_stage():
            self.pipe_buffers["inputs"][buffer_id] = None

    def _exec_send_grads(self, buffer_id: int) -> None:
        # the last layers of a U-Net don't use emb, so its gradient may be missing
        self._gradients_out.send(
            [
                leaf.grad if leaf.grad is not None else torch.zeros_like(leaf)
                for leaf in self.pipe_buffers["inputs"][buffer_id]
            ]
        )
        self.pipe_buffers["inputs"][buffer_id] = None

    def _exec_reduce_tied_grads(self) -> None:
        """Nothing is tied; see ``__init__``."""

    def _exec_reduce_grads(self) -> None:
        if self.zero_optimization_partition_gradients():
            insides.finish_partitioned_gradients(self)
        else:
            super()._exec_reduce_grads()

    def _exec_optimizer_step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        self._force_grad_boundary = True
        try:
            with insides.scale_updated_afterwards(self):
                self._take_model_step(lr_kwargs)
        finally:
            self._force_grad_boundary = False

    def clip_fp32_gradients(self) -> None:
        """Clip by the global norm under ZeRO-0 in fp32, and keep the norm.

        The stock clipping counts the parameters of the first stage alone, and forgets the norm.
        """
        parameters = [parameter for parameter in self.module.parameters() if parameter.grad is not None]
        squared = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters]).square()
        dist.all_reduce(squared, group=self.grid.get_model_parallel_group())
        self._global_grad_norm = squared.sqrt()
        torch.nn.utils.clip_grads_with_norm_(parameters, self.gradient_clipping(), self._global_grad_norm)

    def _next_image_index(self) -> Tensor:
        """Image index of the next micro-batch: number m of replica r takes positions from (m R + r) n on."""
        replicas, micro = self.dp_world_size, self.micro_batch_size
        first = self.next_index + (self._forwards * replicas + self.grid.get_data_parallel_id()) * micro
        self._forwards += 1
        return torch.arange(first, first + micro, device=self.device)


def _pipeline_groups(own_pipeline: list[int]) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """A forward and a backward group over the ranks of this process's pipeline.

    ``new_group`` is collective over all processes, so every process makes the groups of every pipeline.
    """
    pipelines: list[list[int] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(pipelines, [int(rank) for rank in own_pipeline])
    mine: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None
    for ranks in sorted({tuple(ranks) for ranks in pipelines if ranks is not None}):
        forward, backward = dist.new_group(list(ranks)), dist.new_group(list(ranks))
        if dist.get_rank() in ranks:
            assert isinstance(forward, dist.ProcessGroup) and isinstance(backward, dist.ProcessGroup)
            mine = forward, backward
    assert mine is not None
    return mine
