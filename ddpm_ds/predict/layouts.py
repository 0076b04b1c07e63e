"""Run to plan for, all its layouts on the given devices, and the DeepSpeed JSON of each."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from ddpm_ds.config.ds_config import (
    BUCKET_ELEMENTS,
    ELEMENT_BYTES,
    AcrossHosts,
    Layout,
    Schedule,
    divisors,
    fp16_needs_zero,
    precision,
)
from ddpm_ds.config.spec import RunSpec
from ddpm_ds.device import DTYPES, Dtype
from ddpm_ds.pipeline.cuts import Stage, describe, stages_of
from ddpm_ds.pipeline.placement import ACROSS_HOSTS
from ddpm_ds.unet.layers import Layer, unet_layers
from ddpm_ds.unet.operations import arithmetic_dtype

MOST_MICRO_BATCHES_PER_STAGE = 64
"""Largest number of micro-batches per stage that is tried; more hardly make the bubble smaller."""
INTERVALS = (1, 2, 4)
"""Numbers of layers per activation checkpoint that are tried."""


@dataclass(frozen=True)
class Workload:
    """Run without its layout: spec, DeepSpeed JSON, and the kind of device that it trains on."""

    spec: RunSpec
    config: Mapping[str, Any]
    """Checked DeepSpeed JSON; a layout replaces some of its keys."""
    on_cpu: bool

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """Layers of the U-Net."""
        data = self.spec.data
        return unet_layers(self.spec.unet, image_channels=data.channels, image_size=data.image_size)

    @cached_property
    def precision(self) -> Dtype:
        """Precision of the weights."""
        return precision(self.config)

    @property
    def stored_bytes(self) -> int:
        """Bytes of a weight, of an element on the wire between stages and of a gradient."""
        return ELEMENT_BYTES[self.precision]

    @cached_property
    def arithmetic_bytes(self) -> int:
        """Bytes of an activation; a CPU may compute half precision in single."""
        return arithmetic_dtype("cpu" if self.on_cpu else "cuda", DTYPES[self.precision][1]).itemsize

    @property
    def accumulated_bytes(self) -> int:
        """Bytes of an element in which ZeRO adds up the gradients of micro-batches."""
        wide = self.config.get("data_types", {}).get("grad_accum_dtype") == "fp32"
        return 4 if wide else self.stored_bytes

    @property
    def flat_gradients(self) -> bool:
        """Whether gradients are flat in layouts without offload."""
        return bool(self.config.get("pipeline", {}).get("gradients", "flat") == "flat")

    @property
    def bucket_elements(self) -> int:
        """Number of gradient elements that ZeRO reduces at a time."""
        given = self.config.get("zero_optimization", {}).get("reduce_bucket_size", "auto")
        return BUCKET_ELEMENTS if given == "auto" else int(given)


def layouts(job: Workload, devices: int, *, offload: bool, nodes: int = 1) -> Iterator[Layout]:
    """Yield all layouts of a job that divide devices, layers and batch without remainder.

    ``offload`` allows Adam's state in host memory; a given ``train.accumulation`` leaves one number of micro-batches.
    """
    batch, wanted, zeros = job.spec.train.batch_images, job.spec.train.accumulation, _zero_choices(job, offload)
    for stages in divisors(devices):
        replicas = devices // stages
        if stages > len(job.layers) or batch % replicas:
            continue
        share, most = batch // replicas, MOST_MICRO_BATCHES_PER_STAGE * stages
        places: Sequence[AcrossHosts | Literal["auto"]] = (
            ACROSS_HOSTS if nodes > 1 and stages > 1 and replicas > 1 else ("auto",)
        )
        schedules: list[tuple[Schedule, int | Literal["auto"]]] = [("1f1b", "auto")]
        if 1 < stages <= len(job.layers) // 2:
            schedules += [("planned", "auto"), ("planned", stages)]  # faster, or with half of the activations
        for (schedule, in_flight), count in itertools.product(schedules, divisors(share, most)):
            if wanted not in ("auto", count) or (in_flight != "auto" and count <= in_flight):
                continue
            for (zero_stage, offloaded), interval, across in itertools.product(zeros, (0, *INTERVALS), places):
                sizes = share // count, count, interval
                yield Layout(stages, replicas, schedule, *sizes, zero_stage, offloaded, across, in_flight)


def ds_config(job: Workload, layout: Layout, bounds: Sequence[int]) -> dict[str, Any]:
    """Return the given DeepSpeed JSON with a layout and its cuts filled in; everything else stays as given."""
    config = copy.deepcopy(dict(job.config))
    config["train_micro_batch_size_per_gpu"] = layout.micro_batch_images
    config["gradient_accumulation_steps"] = layout.micro_batches
    pipeline = config.setdefault("pipeline", {})
    if layout.schedule != "planned" and pipeline.get("replan"):
        pipeline["replan"] = False  # only a planned schedule has it
    pipeline.update(
        stages=layout.stages,
        schedule=layout.schedule,
        in_flight=layout.in_flight,
        partition=[int(cut) for cut in bounds[1:-1]] if layout.stages > 1 else "flops",
        across_hosts=layout.across_hosts,
        activation_checkpoint_interval=layout.checkpoint_interval,
    )
    if layout.zero_stage == 0:
        config["zero_optimization"] = {"stage": 0}
        for name in ("hysteresis", "consecutive_hysteresis"):  # only ZeRO's loss scaler has them
            config.get("fp16", {}).pop(name, None)
        return config
    zero = config.setdefault("zero_optimization", {})
    zero["stage"] = layout.zero_stage
    zero.pop("offload_optimizer", None)
    if layout.offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    return config


def _zero_choices(job: Workload, offload: bool) -> list[tuple[int, bool]]:
    """Return ZeRO stages, each without and with offload, as far as the JSON's other keys allow them."""
    needs_zero = "grad_accum_dtype" in job.config.get("data_types", {}) or fp16_needs_zero(job.config)
    choices = [(stage, False) for stage in ([1, 2] if needs_zero else [0, 1, 2])]
    return choices + ([(1, True), (2, True)] if offload else [])


@functools.lru_cache(maxsize=4096)
def rank_stages(layers: Sequence[Layer], bounds: Sequence[int], schedule: Schedule) -> tuple[tuple[Stage, ...], ...]:
    """Return the stages of each rank by phase: one under 1F1B, two in the fold."""
    stages = describe(layers, bounds, schedule)
    ranks = 1 + max(stage.rank for stage in stages)
    return tuple(tuple(stages[stage] for stage in stages_of(rank, ranks, schedule)) for rank in range(ranks))
