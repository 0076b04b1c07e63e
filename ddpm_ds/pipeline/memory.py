"""Whether activations fit, which decides if recomputing them is worth its time."""

from __future__ import annotations

from collections.abc import Sequence

from ddpm_ds.pipeline.partition import Schedule, Stage, stages_of
from ddpm_ds.pipeline.streams import held_micro_batches

ACTIVATION_SHARE = 0.5
"""Share of a device's memory that activations may take; beyond it they are recomputed."""


def activation_bytes(
    stages: Sequence[Stage], schedule: Schedule, micro_batch_images: int, micro_batches: int, element_bytes: int
) -> int:
    """Bytes of activations on the fullest rank without checkpointing, at the fullest moment of its schedule."""
    ranks = 1 + max(stage.rank for stage in stages)
    most = 0
    for rank in range(ranks):
        elements = [stages[index].activation_elements for index in stages_of(rank, ranks, schedule)]
        moments = held_micro_batches(schedule, micro_batches=micro_batches, ranks=ranks, rank=rank)
        most = max(most, *(sum(count * size for count, size in zip(held, elements, strict=True)) for held in moments))
    return most * micro_batch_images * element_bytes


def checkpoint_interval(
    stages: Sequence[Stage],
    schedule: Schedule,
    *,
    micro_batch_images: int,
    micro_batches: int,
    element_bytes: int,
    device_bytes: int,
) -> int:
    """What ``"activation_checkpoint_interval": "auto"`` means: 0 where activations fit, else 1."""
    needed = activation_bytes(stages, schedule, micro_batch_images, micro_batches, element_bytes)
    return 0 if needed <= ACTIVATION_SHARE * device_bytes else 1
