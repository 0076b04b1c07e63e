"""Whether activations fit, which decides if recomputing them is worth its time."""

from __future__ import annotations

from collections.abc import Sequence

from ddpm_ds.pipeline.partition import Stage

ACTIVATION_SHARE = 0.5
"""Share of a device's memory that activations may take; beyond it they are recomputed."""


def activation_bytes(stages: Sequence[Stage], micro_batch_images: int, micro_batches: int, element_bytes: int) -> int:
    """Bytes of activations on the fullest stage without checkpointing.

    Under 1F1B stage ``s`` of ``S`` holds at most ``S - s`` micro-batches at a time.
    """
    return max(
        stage.activation_elements * micro_batch_images * min(len(stages) - stage.index, micro_batches) * element_bytes
        for stage in stages
    )


def checkpoint_interval(
    stages: Sequence[Stage],
    *,
    micro_batch_images: int,
    micro_batches: int,
    element_bytes: int,
    device_bytes: int,
) -> int:
    """What ``"activation_checkpoint_interval": "auto"`` means: 0 where activations fit, else 1."""
    needed = activation_bytes(stages, micro_batch_images, micro_batches, element_bytes)
    return 0 if needed <= ACTIVATION_SHARE * device_bytes else 1
