"""The courses of rung d: tiny trainings in many layouts, and those that go on from the middle of another."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddpm_ds.checkpoint.folder import checkpoint_name
from ddpm_ds.checkpoint.manifest import Description
from ddpm_ds.checkpoint.reader import Reader
from ddpm_ds.config.spec import RunSpec
from ddpm_ds.data import prepare, writing
from ddpm_ds.tracking.run_folder import checkpoints_of
from tests.launching import REPOSITORY, run_ranks, tiny_spec, write_json
from tests.training.resume_worker import HALFLIFE_IMAGES, RAMPUP_FRACTION, STEPS, Course

WORKER = Path(__file__).with_name("resume_worker.py")
WHOLE = "whole"
BATCH = 8


@dataclass(frozen=True)
class Layout:
    """Stages and replicas, with other choices to go with them."""

    stages: int
    replicas: int
    zero: int
    accumulation: int
    recompute: int = 0
    schedule: str = "1f1b"
    optimizer: str = "AdamW"
    on_host: bool = False
    rounded: bool = False
    """Whether weights have 16 bits alone, and are rounded at random."""
    changes: tuple[str, ...] = ()
    """Changes of the spec."""


LAYOUTS = {
    "1x1": Layout(1, 1, zero=0, accumulation=2),
    "2x1": Layout(2, 1, zero=1, accumulation=2, recompute=1),
    "1x2": Layout(1, 2, zero=2, accumulation=2),
    "2x2": Layout(2, 2, zero=2, accumulation=2),
    "1x4": Layout(1, 4, zero=1, accumulation=1),
    "2x2 folded": Layout(2, 2, zero=2, accumulation=4, recompute=3, schedule="folded"),
}
GRIDS: dict[str, dict[str, tuple[str, ...]]] = {
    "few": {"fp32": ("1x1", "1x2", "2x2 folded"), "fp16": ("1x1", "2x1", "1x2")},
    "many": {"fp32": ("1x1", "2x1", "2x2", "1x4", "2x2 folded"), "fp16": ("1x1", "2x1", "2x2 folded")},
}
"""Layouts by precision; those of fp16 have each ZeRO stage, whose loss scalers differ."""
CALM = {"few": ("1x2", ("1x2", "1x1")), "many": ("2x2", ("2x2", "1x4"))}
"""The layout that begins in fp16 and goes on in fp32, and those in fp32 that it goes on from in fp16."""


def about(spec: RunSpec, data_sha256: dict[str, str], ds_config: dict[str, Any] | None = None) -> Description:
    """What a run says of itself."""
    values, nothing = spec.model_dump(mode="json"), dict[str, Any]()
    return Description.model_construct(spec=values, ds_config=ds_config or nothing, data_sha256=data_sha256)


class Courses:
    """Trains courses into a folder and finds there what became of them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        values = tiny_spec(
            data={"store_root": str(folder / "data")},
            unet={"attention_resolutions": [], "multipliers": [1]},
            optimizer={"learning_rate": 3e-3, "warmup_images": 5 * BATCH},
            train={"images": 2 * STEPS * BATCH, "batch_images": BATCH},
        ).model_dump(mode="json", exclude_defaults=True)
        values["ema"] = {"halflife_images": HALFLIFE_IMAGES, "rampup_fraction": RAMPUP_FRACTION}
        (folder / "spec.yaml").write_text(yaml.safe_dump(values))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(writing, "SHARD_BYTES", 2**14)  # eight files
            prepare.prepare(RunSpec.model_validate(values).data)

    def course(
        self, name: str, layout: Layout, precision: str, sources: Iterable[str] = (), *, overflow: bool | None = None
    ) -> tuple[int, Course]:
        """A course and its number of processes; one with ``sources`` goes on from the middle of each of them."""
        config = json.loads((REPOSITORY / "ds_configs" / "zero2_fp16.json").read_text())
        del config["flops_profiler"]
        config["zero_optimization"]["stage"] = layout.zero
        config["optimizer"]["type"] = layout.optimizer
        if layout.rounded:
            config["optimizer"]["params"]["stochastic_rounding"] = True
        config["pipeline"] |= {"activation_checkpoint_interval": layout.recompute, "schedule": layout.schedule}
        config["pipeline"]["partition"] = "flops"
        config["fp16"] |= {"initial_scale_power": 10, "loss_scale_window": 2, "hysteresis": 2 if layout.zero else 1}
        if precision != "fp16":
            del config["fp16"]
        if precision == "bf16":
            config["bf16"] = {"enabled": True}
        return layout.stages * layout.replicas, Course(
            name,
            spec=str(self._folder / "spec.yaml"),
            ds_config=str(write_json(self._folder / f"{name}.json", config)),
            stages=layout.stages,
            accumulation=layout.accumulation,
            on_host=layout.on_host,
            changes=layout.changes,
            overflow=precision == "fp16" if overflow is None else overflow,
            sources={source: str(self._checkpoint(source, WHOLE, STEPS)) for source in sources},
        )

    def train(self, courses: Iterable[tuple[int, Course]]) -> None:
        """Courses of as many processes are trained one after the other in one start of them."""
        by_processes: dict[int, list[Course]] = {}
        for processes, course in courses:
            by_processes.setdefault(processes, []).append(course)
        for processes, alike in by_processes.items():
            file = write_json(self._folder / "courses.json", [asdict(course) for course in alike])
            done = run_ranks(processes, WORKER, str(file), str(self._folder))
            assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]

    def _checkpoint(self, course: str, source: str, steps: int) -> Path:
        return checkpoints_of(self.run_dir(course, source)) / checkpoint_name(BATCH * steps)

    def run_dir(self, course: str, source: str = WHOLE) -> Path:
        """The folder of a course's checkpoints."""
        return self._folder / course / source

    def end(self, course: str, source: str = WHOLE) -> Reader:
        """The checkpoint at the end of a course."""
        return Reader(self._checkpoint(course, source, 2 * STEPS))

    def half(self, course: str) -> Reader:
        """The checkpoint in the middle of a course."""
        return Reader(self._checkpoint(course, WHOLE, STEPS))

    def reports(self, course: str, source: str = WHOLE) -> list[dict[str, Any]]:
        """What each rank saw."""
        files = sorted(self.run_dir(course, source).glob("rank*.json"))
        return [json.loads(file.read_text()) for file in files]

    def losses(self, course: str, source: str = WHOLE) -> list[float]:
        """The losses of the second half."""
        return [float(loss) for loss in self.reports(course, source)[0]["losses"][-STEPS:]]


def sources_of(grid: str, layout: str, precision: str) -> list[str]:
    """The layouts that a layout goes on from, itself and the next one: each is gone on from elsewhere, and back."""
    names = GRIDS[grid][precision]
    return [layout, names[(names.index(layout) + 1) % len(names)]]


def train_all(folder: Path, grid: str) -> Courses:
    """Every layout and precision never stopped; then each going on from others, and a few more changes."""
    courses = Courses(folder)
    both = [(layout, precision) for precision, layouts in GRIDS[grid].items() for layout in layouts]
    whole = [courses.course(f"{name}-{precision}", LAYOUTS[name], precision) for name, precision in both]
    calm, others = CALM[grid]
    whole.append(courses.course("calm-fp16", LAYOUTS[calm], "fp16", overflow=False))
    again = []
    for name, precision in both:
        sources = [f"{source}-{precision}" for source in sources_of(grid, name, precision)]
        again.append(courses.course(f"resumed-{name}-{precision}", LAYOUTS[name], precision, sources))
    again.append(courses.course("to-fp32", LAYOUTS["1x1"], "fp32", ["calm-fp16"]))
    from_fp32 = [f"{other}-fp32" for other in others]
    again.append(courses.course("to-fp16", LAYOUTS[calm], "fp16", from_fp32, overflow=False))
    courses.train(whole)
    courses.train(again)  # in other processes: what goes on has nothing but what was saved
    return courses
