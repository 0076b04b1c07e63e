"""The communicators of a pipeline: two ranks each, one for each directed edge, phase and kind of message.

NCCL executes what one communicator is given in the order in which it is given, whoever the messages are for, and does
not look at tags. With a communicator for each edge no message waits for one of another edge
(:mod:`ddpm_ds.pipeline.order` has the model). Each is made by its two ranks alone, so that the time this takes does not
grow with stages or replicas::

    1f1b, a rank in the middle      activations in, activations out, gradients in, gradients out            4
    1f1b, the first and the last    two of these, and predictions, the way back of samples                  3
    folded                          as 1f1b without predictions, once for each phase                        4 or 8

A receive that is posted on a GPU is a kernel that spins until its message comes. Whatever waits for the whole device
waits for it: an allocator that is short of memory, a profiler, code that is compiled, tuned or loaded when it is first
used. Steps in which that may happen send their messages from host to host instead, over gloo.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ddpm_ds.pipeline.boundary import Channel, Wire
from ddpm_ds.pipeline.order import Edge, pipeline_edges

MOST_BLOCKS = 8
"""Thread blocks of NCCL's kernel for a message, each of which holds a multiprocessor while it waits (docs/gpu.md)."""


@dataclass(frozen=True)
class Wires:
    """The channels of one stage; None where it has no neighbour on another rank."""

    activations_in: Channel | None
    activations_out: Channel | None
    gradients_in: Channel | None
    gradients_out: Channel | None

    def begin(self, micro_batches: int, *, by_host: bool, gradients: bool = True) -> None:
        """Begin forward passes of so many micro-batches, and backward passes where there are ``gradients``.

        All ranks send ``by_host`` or none does.
        """
        for channel in (self.activations_in, self.activations_out, self.gradients_in, self.gradients_out):
            if channel is not None:
                channel.by_host = by_host
        for channel in (self.activations_in, self.gradients_in if gradients else None):
            if channel is not None:
                channel.expect(micro_batches)

    def drain(self) -> None:
        """Wait until everything sent has been delivered."""
        for channel in (self.activations_out, self.gradients_out):
            if channel is not None:
                channel.drain()


def runs_behind(device: torch.device) -> bool:
    """Whether a device executes later what it is given, so that a posted receive can hold up all that follows."""
    return device.type == "cuda"


def open_wires(pipelines: Sequence[Sequence[int]], phases: int, device: torch.device) -> dict[Edge, Wire]:
    """Connect this rank's edges of its pipeline; all ranks call this, with the global ranks of all ``pipelines``.

    All ranks make the groups in one order, since PyTorch names a group by their count; a rank that is in a group meets
    the other one there, for all others it is a count and no communication, as long as the default group is not bound to
    a device. NCCL connects two ranks at their first message and holds both until they have met: each edge carries a
    token now, so that they need not meet in the middle of a schedule.
    """
    if dist.group.WORLD is not None and dist.group.WORLD.bound_device_id is not None:
        raise RuntimeError("the default process group is bound to a device; make it with ddpm_ds.train.process")
    own = dist.get_rank()
    host_groups: dict[frozenset[int], Any] = {}
    wires = {}
    for tag, edge in enumerate(pipeline_edges(len(pipelines[0]), phases)):
        for pipeline in pipelines:
            source, target = pair = pipeline[edge.source], pipeline[edge.target]
            if runs_behind(device) and frozenset(pair) not in host_groups:
                host_groups[frozenset(pair)] = dist.new_group(pair, backend="gloo")
            group = _group(pair, device)
            if own not in pair:
                continue
            peer = target if own == source else source
            wires[edge] = Wire(edge, peer, group, host_groups.get(frozenset(pair)), tag)
            token = torch.zeros(1, device=device)
            if own == source:
                dist.send(token, dst=peer, group=group)
            else:
                dist.recv(token, src=peer, group=group)
    return wires


def _group(ranks: Sequence[int], device: torch.device) -> Any:
    """A group of two ranks for messages between their devices; on other ranks a word for no group.

    NCCL's is connected at once, and has no more thread blocks than messages need: one as large as those for collectives
    takes ten times the memory.
    """
    if device.type != "cuda":
        return dist.new_group(ranks)
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = MOST_BLOCKS
    return dist.new_group(ranks, pg_options=options, device_id=device)
