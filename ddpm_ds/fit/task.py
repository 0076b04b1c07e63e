"""Doubling and bisecting, and the knee of a curve of throughput.

What is tried: one layout of a run with micro-batches of any size, as a plan for each size. No torch.
"""

from __future__ import annotations

import copy
import json
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ddpm_ds.config.ds_config import read_ds_config, resolve
from ddpm_ds.config.spec import RunSpec
from ddpm_ds.config.spec_file import load_spec
from ddpm_ds.errors import LayoutError, SpecError
from ddpm_ds.predict.plan import RunPlan, plan_run

KNEE = 0.05
"""Throughput that a smaller micro-batch may lack, as a share of the best."""


def largest_fitting(sizes: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """The largest of ``sizes``, which ascend, that fits; None if the first does not.

    What is larger than a size that does not fit is taken not to fit. Begins with the first size and goes on with the
    next one that is at least twice as large; after the first that does not fit it bisects between. No size is asked
    about twice, nor is one after the first failure that is larger than it.
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


def knee(throughput: Mapping[int, float]) -> int:
    """The smallest micro-batch whose throughput is within :data:`KNEE` of the best."""
    enough = (1 - KNEE) * max(throughput.values())
    return min(size for size, speed in throughput.items() if speed >= enough)


LARGEST = 2**20
"""Images of a micro-batch beyond which no search goes."""
FILE = "task.json"


@dataclass(frozen=True)
class TrialLayout:
    """Stages x replicas, one process each."""

    stages: int
    replicas: int

    @property
    def processes(self) -> int:
        return self.stages * self.replicas

    def __str__(self) -> str:
        return f"{self.stages}x{self.replicas}"

    def words(self) -> str:
        """For a sentence."""
        plural = "s" if self.stages > 1 else ""
        return f"{self.stages} stage{plural} x {self.replicas} replica{'s' if self.replicas > 1 else ''}"


def layouts_of(processes: int) -> list[TrialLayout]:
    """All layouts of so many processes, those with few stages first."""
    return [TrialLayout(stages, processes // stages) for stages in range(1, processes + 1) if processes % stages == 0]


@dataclass(frozen=True)
class FitRequest:
    """What is trained and how, but for the layout and the micro-batch."""

    spec: Path
    overrides: tuple[str, ...]
    ds_config: Path
    accumulation: int | None
    """Micro-batches of a step, whose batch grows with them; None keeps ``train.batch_images``."""

    def changes(self, layout: TrialLayout, size: int) -> tuple[str, ...]:
        """The overrides of the spec with micro-batches of ``size`` images."""
        if self.accumulation is None:
            return self.overrides
        batch = layout.replicas * self.accumulation * size
        return (*self.overrides, f"train.batch_images={batch}", "train.accumulation=auto")

    def spec_of(self, layout: TrialLayout, size: int) -> RunSpec:
        """The spec of a trial. Raises SpecError."""
        return load_spec(self.spec, self.changes(layout, size))

    def config(self, layout: TrialLayout, size: int) -> dict[str, Any]:
        """The DeepSpeed JSON with a layout and a micro-batch filled in; everything else stays as given.

        Raises:
            DsConfigError: the file can't be read.
            SpecError: the spec can't.
        """
        config = copy.deepcopy(read_ds_config(self.ds_config))
        config["train_micro_batch_size_per_gpu"] = size
        if self.accumulation is None:
            share = self.spec_of(layout, size).train.batch_images // layout.replicas
            config["gradient_accumulation_steps"] = max(share // size, 1)
        else:
            config["train_batch_size"] = "auto"
            config["gradient_accumulation_steps"] = self.accumulation
        pipeline = config.setdefault("pipeline", {})
        if isinstance(pipeline, dict):  # else it is refused when it is resolved
            pipeline["stages"] = layout.stages
        return config

    def check(self, layout: TrialLayout, size: int) -> None:
        """Refuse a size that training would refuse. Raises SpecError, DsConfigError, LayoutError."""
        config, spec = self.config(layout, size), self.spec_of(layout, size)
        resolve(config, spec, world_size=layout.processes, stages=layout.stages, path=self.ds_config)


def candidates(job: FitRequest, layout: TrialLayout, asked: Sequence[int]) -> Sequence[int]:
    """The micro-batches that a search may choose from, ascending: those ``asked`` for, or if none are, all.

    With the batch of the spec kept, all are those that a replica's share is a number of, of which the schedule needs
    some.

    Raises:
        UserError: why none is possible, or one that was asked for is not.
    """
    spec, fixed = job.spec_of(layout, 1), job.accumulation is not None
    batch, wanted = spec.train.batch_images, spec.train.accumulation
    if not fixed and wanted != "auto":
        raise SpecError(
            f"train.accumulation = {wanted} leaves one micro-batch to try; use --set train.accumulation=auto, or "
            f"--accumulation {wanted} to let the batch grow"
        )
    if not fixed and batch % layout.replicas:
        more = -(-batch // layout.replicas) * layout.replicas
        raise LayoutError(
            f"train.batch_images = {batch} can't be shared by {layout.replicas} replicas; use "
            f"--set train.batch_images={more}, other --layouts or --accumulation"
        )
    share = batch // layout.replicas
    if fixed:
        job.check(layout, 1)
        return asked or range(1, LARGEST + 1)
    dividing = [size for size in range(1, share + 1) if share % size == 0]
    odd = [size for size in asked if share % size]
    if odd:
        raise LayoutError(
            f"--micro-batch {odd[0]} does not divide the {share} images of a replica (train.batch_images = {batch}, "
            f"layout {layout}); use some of {','.join(map(str, dividing))}, or --accumulation to let the batch grow"
        )
    possible = [size for size in asked or dividing if _is_possible(job, layout, size)]
    if not possible:
        job.check(layout, min(asked or dividing))
    return possible


def _is_possible(job: FitRequest, layout: TrialLayout, size: int) -> bool:
    try:
        job.check(layout, size)
    except LayoutError:
        return False
    return True


@dataclass(frozen=True)
class Task:
    """What the processes of one start are told."""

    job: FitRequest
    layout: TrialLayout
    sizes: tuple[int, ...]
    """Micro-batches to choose from, ascending; none: all numbers."""
    device: str
    """``cpu`` or ``cuda``."""
    budget_bytes: int | None
    """Of a process; None on CUDA is the device's memory."""
    most_bytes: int | None
    """What a process may take to find out what the smallest micro-batch needs."""
    steps: int
    """Timed after a step that is not."""
    hang_seconds: float
    """Time without a step after which a trial has failed."""

    @property
    def candidates(self) -> Sequence[int]:
        return self.sizes or range(1, LARGEST + 1)

    def plan(self, size: int, folder: Path) -> RunPlan:
        """The run with micro-batches of ``size`` images; its JSON is written into ``folder``.

        Raises:
            UserError: training would refuse it.
        """
        path = folder / f"ds-{size}.json"
        path.write_text(json.dumps(self.job.config(self.layout, size), indent=2) + "\n")
        changes = self.job.changes(self.layout, size)
        return plan_run(self.job.spec, changes, path, world_size=self.layout.processes, stages=self.layout.stages)

    def write(self, folder: Path) -> None:
        """As a file for :meth:`read`."""
        (folder / FILE).write_text(json.dumps(asdict(self), default=str))

    @classmethod
    def read(cls, folder: Path) -> Task:
        """What :meth:`write` wrote."""
        values = json.loads((folder / FILE).read_text())
        job, layout = values.pop("job"), TrialLayout(**values.pop("layout"))
        job |= {name: Path(job[name]) for name in ("spec", "ds_config")} | {"overrides": tuple(job["overrides"])}
        return cls(job=FitRequest(**job), layout=layout, **values | {"sizes": tuple(values["sizes"])})
