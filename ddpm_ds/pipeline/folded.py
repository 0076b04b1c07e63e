"""The folded pipeline: a U-Net is a V and so is DeepSpeed's DualPipeV, so every skip is made and used on one rank.

    rank 0        stage 0 ── (h, emb) ─▶ rank 1 ─▶ ... rank P - 1        phase 0, down the U-Net
                    │ emb, skips                          │ turn
                    ▼                                     ▼
    rank 0        stage 2P - 1 ◀── h ── rank 1 ◀─ ... rank P - 1        phase 1, up it; loss on rank 0

Phase 0 keeps the embedding and skips of a micro-batch and gives them to phase 1 as detached leaves. Their gradients are
ready when phase 1's backward is done, which on every rank comes before phase 0's, and join it: phase 0 has one walk of
its graph with h, emb and the skips as roots.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from deepspeed.runtime.pipe import schedule
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ddpm_ds.pipeline import deepspeed_insides as insides
from ddpm_ds.pipeline.engine import UnetPipelineEngine, edge
from ddpm_ds.pipeline.module import FoldedUnetModule
from ddpm_ds.unet.blocks import Carry
from ddpm_ds.unet.operations import set_image_index


@dataclass
class Flight:
    """Micro-batch on its way through this rank; fields are None or empty after their last use."""

    prepared: Any = None
    """Prepared micro-batch on rank 0, from load to loss."""
    leaves: Carry = ()
    """Tensors that phase 0 received: h, emb; empty on rank 0."""
    down: Carry = ()
    """Outputs of phase 0 not sent yet: h, emb."""
    roots: tuple[GradientEdge | None, ...] = ()
    """Places of phase 0's h, emb, *skips in its graph."""
    kept: Carry = ()
    """Leaves of phase 1: emb, *skips."""
    risen: Tensor | None = None
    """Leaf of phase 1: its first h."""
    up: Tensor | None = None
    """Output of phase 1 not sent yet: h, or on rank 0 the loss."""
    top: GradientEdge | None = None
    """Place of ``up`` in the graph of phase 1."""


class FoldedEngine(UnetPipelineEngine):
    """The schedule of DualPipeV over mirrored stages, with all that the 1F1B engine has."""

    phases = 2

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._flights: dict[int, Flight] = {}
        """Flights by number of the micro-batch in this step."""
        self.execute[schedule.CommitP2P] = self._exec_nothing  # messages go as they are made

    @property
    def loss_stage(self) -> int:
        return 0

    @property
    def turns(self) -> bool:
        """Return whether this rank is the last, where phase 0 becomes phase 1."""
        return self.stage_id == self.num_stages - 1

    def neighbours(self, phase: int) -> tuple[int | None, int | None]:
        before, after = super().neighbours(phase)
        return (before, after) if phase == 0 else (after, before)

    def ends(self, phase: int) -> tuple[int, int]:
        module = self.module
        assert isinstance(module, FoldedUnetModule)
        first, stop = module.phase_bounds[phase]
        return first, stop

    def walk(self, phase: int, carry: Carry) -> Any:
        """Run the layers of one phase."""
        self.module.activate_phase(phase)
        return self.module(carry)

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        insides.forget_offloaded_gradients(self)
        return super().train_batch(data_iter)

    def _reserve_pipe_buffers(self, num_buffers: int) -> None:
        """Reserve nothing: flights replace the buffers."""

    def _flight(self, buffer_id: int) -> tuple[int, Flight]:
        """Return the micro-batch of a buffer of DeepSpeed's, which numbers those of phase 1 after those of phase 0."""
        number = buffer_id % self.micro_batches
        return number, self._flights.setdefault(number, Flight())

    def _exec_load_micro_batch(self, buffer_id: int) -> None:
        _, flight = self._flight(buffer_id)
        flight.prepared = self.objective.prepare(next(self.data_iterator))

    def _exec_forward_pass(self, buffer_id: int, phase: int = 0) -> None:
        number, flight = self._flight(buffer_id)
        set_image_index(self._dropouts, self._image_index(number))
        if phase == 0:
            self._forward_down(flight)
        else:
            self._forward_up(flight)

    def _forward_down(self, flight: Flight) -> None:
        if self.is_first_stage():
            inputs = self.in_message_dtype(self.objective.inputs(flight.prepared))
        else:
            inputs = flight.leaves = self._receive_leaves(phase=0)
        h, *kept = self.walk(0, inputs)
        flight.roots = tuple(map(edge, (h, *kept)))
        flight.kept = tuple(tensor.detach().requires_grad_() for tensor in kept)
        if self.turns:
            flight.risen = h.detach().requires_grad_()
        else:
            flight.down = (h, kept[0])

    def _forward_up(self, flight: Flight) -> None:
        if not self.turns:
            (flight.risen,) = self._receive_leaves(phase=1)
        assert flight.risen is not None
        outputs = self.walk(1, (flight.risen, *flight.kept))
        if self.is_first_stage():
            flight.up, flight.prepared = self._loss(outputs, flight.prepared), None
        else:
            flight.up, _emb = outputs
        flight.top = edge(flight.up)

    def _exec_send_activations(self, buffer_id: int, phase: int = 0) -> None:
        _, flight = self._flight(buffer_id)
        if phase == 0:
            self._send_activations(0, flight.down)
            flight.down = ()
        else:
            assert flight.up is not None
            self._send_activations(1, (flight.up,))
            flight.up = None

    def _exec_backward_pass(self, buffer_id: int, phase: int = 0) -> None:
        number, flight = self._flight(buffer_id)
        index = self._image_index(number)
        if phase == 1:
            (gradient,) = (self._loss_gradient(),) if self.is_first_stage() else self._receive_gradients(phase=1)
            self._backward([(flight.top, gradient)], index)
            flight.top = flight.up = None
            return
        begin = self._down_gradients(flight)
        flight.roots, flight.kept, flight.risen = (), (), None
        self._backward(begin, index)
        if self.is_first_stage():
            del self._flights[number]

    def _down_gradients(self, flight: Flight) -> list[tuple[GradientEdge | None, Tensor | None]]:
        """Return the start of phase 0's backward: the gradients of (h, emb) that came back, and phase 1's of (emb,
        *skips).
        """
        if self.turns:
            assert flight.risen is not None
            back: Sequence[Tensor | None] = [flight.risen.grad]
        else:
            back = self._receive_gradients(phase=0)
        return [
            *zip(flight.roots, back, strict=False),
            *zip(flight.roots[1:], (leaf.grad for leaf in flight.kept), strict=True),
        ]

    def _exec_send_grads(self, buffer_id: int, phase: int = 0) -> None:
        number, flight = self._flight(buffer_id)
        if phase == 1:
            assert flight.risen is not None
            self._send_gradients(1, (flight.risen,))
            flight.risen = None
        else:
            self._send_gradients(0, flight.leaves)
            del self._flights[number]
