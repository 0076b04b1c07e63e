"""What a row of the benchmark is: a way of training the same U-Net on the same images with the same noise."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from ddpm_ds.config.ds_config import BUCKET_ELEMENTS


class Row(Protocol):
    """One way of training; each row starts from the same weights and sees the same images in the same order."""

    name: str
    note: str
    """What a reader must know to compare it, or nothing."""
    is_pipeline: bool
    """Whether processes wait for each other within a step: whether it has a bubble."""

    def step(self) -> Tensor:
        """One optimizer step on the next batch; every process calls it, and none need wait for its device.

        Returns this process's part of the batch's mean loss, a scalar: the parts of all processes sum to it.
        """


def with_zero_stage(options: dict[str, Any], stage: int) -> dict[str, Any]:
    """The same under another ZeRO stage; buckets are given, since DeepSpeed's own would take gigabytes."""
    buckets = {"reduce_bucket_size": BUCKET_ELEMENTS, "allgather_bucket_size": BUCKET_ELEMENTS} if stage else {}
    return {**options, "zero_optimization": {**buckets, **options.get("zero_optimization", {}), "stage": stage}}
