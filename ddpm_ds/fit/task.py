"""Search task for one layout: the micro-batches to try, and the order in which to try them. Imports no torch."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ddpm_ds.command_line import MOST_BATCH, counted
from ddpm_ds.config.ds_config import divisors, read_ds_config, resolve
from ddpm_ds.config.spec import RunSpec
from ddpm_ds.config.spec_file import load_spec, spec_overrides
from ddpm_ds.errors import LayoutError, SpecError
from ddpm_ds.predict.plan import RunPlan, plan_run


def largest_fitting(sizes: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """Return the largest of the ascending ``sizes`` that fits; None if the first does not.

    The search begins with the first size, and each time goes on to the next that is at least twice as large. Once a
    size does not fit, it bisects. No size is tried twice, and none that is larger than one that did not fit.
    """
    largest, failed = -1, len(sizes)  # places in sizes
    place = 0
    while largest < place < failed:
        if not fits(sizes[place]):
            failed = place
        else:
            largest = place
            place = min(bisect_left(sizes, 2 * sizes[place]), len(sizes) - 1)
    while failed - largest > 1:
        middle = (largest + failed) // 2
        if fits(sizes[middle]):
            largest = middle
        else:
            failed = middle
    return sizes[largest] if largest >= 0 else None


@dataclass(frozen=True)
class TrialLayout:
    """Layout of stages x replicas, with one process for each stage of each replica."""

    stages: int
    replicas: int

    @property
    def processes(self) -> int:
        return self.stages * self.replicas

    def __str__(self) -> str:
        return f"{self.stages}x{self.replicas}"

    def words(self) -> str:
        """Return the layout in words, such as ``2 stages x 1 replica``."""
        return f"{counted(self.stages, 'stage')} x {counted(self.replicas, 'replica')}"


@dataclass(frozen=True)
class Task:
    """Search on one layout: everything that a trial needs except the micro-batch."""

    spec: Path
    overrides: tuple[str, ...]
    ds_config: Path
    layout: TrialLayout
    accumulation: int | None
    """Number of micro-batches per step, so that the batch grows with their size; None keeps ``train.batch_images``."""
    device: str
    """Device type, ``cpu`` or ``cuda``."""
    budget_bytes: int | None
    """Maximum bytes that a process may hold; on CUDA, None means the device's memory."""
    most_bytes: int | None
    """Maximum bytes of a process in the trial that finds out what the smallest micro-batch needs; None skips it."""
    steps: int
    """Number of timed steps, after the warm-up."""
    hang_seconds: float
    """Maximum seconds that a trial may take for a step; after that it counts as hung."""
    sizes: tuple[int, ...] = ()
    """Micro-batches to choose from, ascending; empty means every size with which the batch can still grow."""

    @property
    def candidates(self) -> Sequence[int]:
        return self.sizes or range(1, MOST_BATCH // (self.layout.replicas * (self.accumulation or 1)) + 1)

    def choosing_from(self, asked: Sequence[int]) -> Task:
        """Return the task with its ``sizes`` filled in: those ``asked`` for, or every possible one if none are.

        If the spec's batch is kept, a size is possible if it divides a replica's share of the batch, and the number of
        micro-batches is enough for the schedule.

        Raises:
            UserError: no size is possible, or one that was asked for is not; the message says why.
        """
        train, layout = self.load_spec(1).train, self.layout
        if self.accumulation is not None:
            for size in asked or (1,):
                self._check(size)
            return replace(self, sizes=tuple(asked))
        batch, wanted = train.batch_images, train.accumulation
        if wanted != "auto":
            raise SpecError(
                f"train.accumulation = {wanted} leaves one micro-batch to try; use --set train.accumulation=auto, or "
                f"--accumulation {wanted} to let the batch grow"
            )
        if batch % layout.replicas:
            more = -(-batch // layout.replicas) * layout.replicas
            raise LayoutError(
                f"train.batch_images = {batch} can't be shared by {layout.replicas} replicas; use "
                f"--set train.batch_images={more}, other --layouts or --accumulation"
            )
        share = batch // layout.replicas
        dividing = divisors(share)
        if odd := [size for size in asked if share % size]:
            raise LayoutError(
                f"--micro-batch {odd[0]} does not divide the {share} images of a replica (train.batch_images = "
                f"{batch}, layout {layout}); use some of {','.join(map(str, dividing))}, or --accumulation to let the "
                f"batch grow"
            )
        possible, refusal = [], None
        for size in asked or dividing:
            try:
                self._check(size)
                possible.append(size)
            except LayoutError as error:
                refusal = refusal or error
        if refusal is not None and not possible:
            raise refusal
        return replace(self, sizes=tuple(possible))

    def changes(self, size: int) -> tuple[str, ...]:
        """Return the overrides of the spec for micro-batches of ``size`` images."""
        if self.accumulation is None:
            return tuple(spec_overrides(self.overrides))
        batch = self.layout.replicas * self.accumulation * size
        return (*spec_overrides(self.overrides), f"train.batch_images={batch}", "train.accumulation=auto")

    def load_spec(self, size: int) -> RunSpec:
        """Load the spec of a trial. Raises SpecError."""
        return load_spec(self.spec, self.changes(size))

    def config(self, size: int) -> dict[str, Any]:
        """Return the DeepSpeed JSON with the layout and a micro-batch filled in; everything else stays as given.

        Raises:
            DsConfigError, SpecError: the JSON or the spec can't be read.
        """
        config = read_ds_config(self.ds_config, self.overrides)
        config["train_micro_batch_size_per_gpu"] = size
        if self.accumulation is None:
            share = self.load_spec(size).train.batch_images // self.layout.replicas
            config["gradient_accumulation_steps"] = max(share // size, 1)
        else:
            config["train_batch_size"] = "auto"
            config["gradient_accumulation_steps"] = self.accumulation
        pipeline = config.setdefault("pipeline", {})
        if isinstance(pipeline, dict):  # anything else is refused when it is resolved
            pipeline["stages"] = self.layout.stages
        return config

    def plan(self, size: int, folder: Path) -> RunPlan:
        """Plan the run with micro-batches of ``size`` images, and write its JSON into ``folder``.

        Raises:
            UserError: training would refuse it.
        """
        path = folder / f"ds-{size}.json"
        path.write_text(json.dumps(self.config(size), indent=2) + "\n")
        layout = self.layout
        return plan_run(self.spec, self.changes(size), path, world_size=layout.processes, stages=layout.stages)

    def _check(self, size: int) -> None:
        """Raise an error for a size that training would refuse: SpecError, DsConfigError or LayoutError."""
        spec, layout = self.load_spec(size), self.layout
        resolve(self.config(size), spec, world_size=layout.processes, stages=layout.stages, path=self.ds_config)
