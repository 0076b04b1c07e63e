"""The channels of a stage, and the process groups that they use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ddpm_ds.pipeline.boundary import Channel, open_line


@dataclass(frozen=True)
class Lines:
    """The process groups of one phase: of what goes forward along its stages, and of what comes back."""

    forward: dist.ProcessGroup
    backward: dist.ProcessGroup


@dataclass(frozen=True)
class Wires:
    """The channels of one stage; None where it has no neighbour on another rank."""

    activations_in: Channel | None
    activations_out: Channel | None
    gradients_in: Channel | None
    gradients_out: Channel | None

    def expect(self, micro_batches: int) -> None:
        """A step with so many micro-batches begins."""
        for channel in (self.activations_in, self.gradients_in):
            if channel is not None:
                channel.expect(micro_batches)

    def drain(self) -> None:
        """Wait until everything sent has been delivered."""
        for channel in (self.activations_out, self.gradients_out):
            if channel is not None:
                channel.drain()


def open_lines(own_pipeline: Sequence[int], phases: int, device: torch.device) -> list[Lines]:
    """The groups of each phase of the pipeline whose global ranks are given; neighbours meet.

    Collective over all processes. Phase 1 of a fold runs from the last rank to the first.
    """
    lines = []
    for phase in range(phases):
        line = Lines(*_pipeline_groups(own_pipeline))
        open_line(own_pipeline, line.forward, device, up=phase == 1)
        open_line(own_pipeline, line.backward, device, up=phase == 0)
        lines.append(line)
    return lines


def _pipeline_groups(own_pipeline: Sequence[int]) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """A forward and a backward group over the ranks of this process's pipeline.

    ``new_group`` is collective over all processes, so every process makes the groups of every pipeline.
    """
    pipelines: list[list[int] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(pipelines, list(own_pipeline))
    mine: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None
    for ranks in sorted({tuple(ranks) for ranks in pipelines if ranks is not None}):
        forward, backward = dist.new_group(list(ranks)), dist.new_group(list(ranks))
        if dist.get_rank() in ranks:
            assert isinstance(forward, dist.ProcessGroup) and isinstance(backward, dist.ProcessGroup)
            mine = forward, backward
    assert mine is not None
    return mine
