"""A run's layout on its processes as numbers: stages, tensor groups, replicas, micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ddpm_ds.ground.units import counted
from ddpm_ds.schema.section import REMOVED

ELEMENT_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
"""Bytes of a weight, a gradient or an element of a message between stages, by precision."""
BUCKET_ELEMENTS = 2**23
"""Elements of ZeRO's buckets set to "auto": large enough for a network, small enough for a CPU's memory."""
Schedule = Literal["1f1b", "folded", "planned"]
"""1F1B in a line; DualPipeV in a fold; or in a fold, an order computed from the run's costs."""
AcrossHosts = Literal["stages", "replicas"]


@dataclass(frozen=True)
class TensorSplit:
    """Layers whose weights are split among the ranks of a tensor group, and the size of a group."""

    size: int = 1
    """Number of ranks of a group; 1 splits nothing."""
    levels: tuple[int, ...] | Literal["all"] = "all"
    """Levels of the U-Net whose layers are split, 0 at full size."""
    layers: tuple[str, ...] = ()
    """Names of the layers that are split instead, or patterns of names, such as ``up.0.*``."""

    def levels_words(self) -> str:
        """Return the levels in words, or "" if they are not numbered."""
        if self.levels == "all" or not self.levels:
            return ""
        first, last = self.levels[0], self.levels[-1]
        return f"level {first}" if first == last else f"levels {first}-{last}"

    @property
    def block(self) -> dict[str, object]:
        """Value of the JSON's ``pipeline.tensor``."""
        if self.size == 1:
            return {"size": 1}
        levels = self.levels if self.levels == "all" else list(self.levels)
        split = {"layers": list(self.layers)} if self.layers else {"levels": levels}
        return {"size": self.size, **split}


@dataclass(frozen=True)
class SpaceSplit:
    """Levels whose rows are shared by the ranks of a space group, and the size of a group."""

    size: int = 1
    """Number of ranks of a group, which are replicas that share each image; 1 shares nothing."""
    levels: tuple[int, ...] | Literal["auto"] = "auto"
    """Levels of the U-Net from 0, full size, on; "auto": down to the lowest whose rows are shared well enough."""

    @property
    def block(self) -> dict[str, object]:
        """Value of the JSON's ``pipeline.space``."""
        if self.size == 1:
            return {"size": 1}
        levels = self.levels if self.levels == "auto" else list(self.levels)
        return {"size": self.size, "levels": levels}


Split = tuple[TensorSplit, SpaceSplit]
"""What groups of ranks share of the layers; at most one of the two kinds of groups has several ranks."""
WHOLE: Split = TensorSplit(), SpaceSplit()
"""Without groups."""


@dataclass(frozen=True)
class Layout:
    """Layout of a run on its processes: the values of the JSON's keys that the planner can choose.

    Processes = stages x tensor group x space group x replicas, batch = replicas x micro-batches x micro-batch.
    """

    stages: int
    """Number of ranks of a pipeline. In a folded or planned schedule each has two stages of the U-Net."""
    replicas: int
    schedule: Schedule
    micro_batch_images: int
    micro_batches: int
    checkpoint_interval: int | Literal["auto"]
    """Number of layers per activation checkpoint; 0 keeps all activations."""
    zero_stage: int
    """ZeRO stage; 0 means off."""
    offload: bool
    """Whether Adam's state and the averaged weights are in host memory."""
    across_hosts: AcrossHosts | Literal["auto"] = "auto"
    """Axis that is split over hosts; "auto" is undecided, or makes no difference."""
    in_flight: int | Literal["auto"] = "auto"
    """Most micro-batches that a rank of a planned pipeline holds; "auto" is the usual number."""
    tensor: TensorSplit = TensorSplit()
    space: SpaceSplit = SpaceSplit()

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.stages * self.tensor.size * self.data_ranks

    @property
    def split(self) -> Split:
        """What groups of ranks share of the layers."""
        return self.tensor, self.space

    @property
    def data_ranks(self) -> int:
        """Number of ranks with the same weights, among which gradients are averaged: the ranks of all replicas."""
        return self.replicas * self.space.size

    @property
    def batch_images(self) -> int:
        """Number of images of an optimizer step."""
        return self.replicas * self.micro_batches * self.micro_batch_images

    @property
    def most_kept(self) -> int:
        """Most micro-batches that a rank of a planned pipeline keeps, usually two for each stage, as in DualPipeV.

        If ZeRO-2 reduces gradients after each pass of weight gradients, passes take more micro-batches at once. A
        single stage usually keeps one; if it keeps several, it computes their weight gradients together.
        """
        if self.in_flight != "auto":
            return self.in_flight
        each = 3 if self.zero_stage == 2 and self.data_ranks > 1 else 2
        return 1 if self.stages == 1 else each * self.stages

    @property
    def axis_over_nodes(self) -> AcrossHosts:
        """Axis that is split over nodes, if there are several nodes."""
        if self.across_hosts == "auto":
            return "replicas" if self.stages == 1 else "stages"
        return self.across_hosts

    @property
    def interval(self) -> int:
        """``checkpoint_interval``, which must have been decided."""
        assert self.checkpoint_interval != "auto"
        return self.checkpoint_interval

    @property
    def interval_so_far(self) -> int:
        """``checkpoint_interval``, or 0 while it has not been decided."""
        return 0 if self.checkpoint_interval == "auto" else self.checkpoint_interval

    @property
    def keys(self) -> dict[str, object]:
        """Dotted keys of the JSON that ask for this layout, except ZeRO's."""
        return {
            "train_micro_batch_size_per_gpu": self.micro_batch_images,
            "gradient_accumulation_steps": self.micro_batches,
            "pipeline.stages": self.stages,
            "pipeline.schedule": self.schedule,
            "pipeline.in_flight": self.in_flight,
            "pipeline.across_hosts": self.across_hosts,
            "pipeline.activation_checkpoint_interval": self.checkpoint_interval,
            "pipeline.tensor": self.tensor.block if self.tensor.size > 1 else REMOVED,
            "pipeline.space": self.space.block if self.space.size > 1 else REMOVED,
        }

    @property
    def sizes(self) -> dict[str, int]:
        """Numbers of the layout, by the names under which runs and checkpoints keep them."""
        names = ("world_size", "stages", "replicas", "batch_images", "micro_batch_images", "micro_batches")
        groups = {"tensor_size": self.tensor.size, "space_size": self.space.size}
        return {**{name: getattr(self, name) for name in names}, **groups}

    def processes_words(self, schedule: str = "") -> str:
        """Return stages with words about their ``schedule``, groups of ranks and replicas, for a sentence."""
        sizes = {"tensor": self.tensor.size, "space": self.space.size}
        groups = "".join(f" x {size} {kind} ranks" for kind, size in sizes.items() if size > 1)
        return f"{counted(self.stages, 'stage')}{schedule}{groups} x {counted(self.replicas, 'replica')}"

    def words(self) -> str:
        """Return the layout in a few words, for a sentence."""
        schedule = f" ({self.schedule})" if self.stages > 1 else ""
        recompute = ", recomputing activations" if self.checkpoint_interval else ""
        in_flight = "" if self.in_flight == "auto" else f", {self.in_flight} in flight"
        across = "" if self.across_hosts == "auto" else f", {self.across_hosts} across nodes"
        split = f", {levels} split" if (levels := self.tensor.levels_words()) else ""
        return (
            f"{self.processes_words(schedule)}{split}{across}, "
            f"{counted(self.micro_batches, 'micro-batch')} of {self.micro_batch_images}{in_flight}, "
            f"ZeRO-{self.zero_stage}{' with offload' if self.offload else ''}{recompute}"
        )


def divisors(number: int, most: int | None = None) -> list[int]:
    """Return the divisors of a number, up to ``most``."""
    return [count for count in range(1, min(number, most or number) + 1) if number % count == 0]
