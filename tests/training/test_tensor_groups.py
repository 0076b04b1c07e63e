"""Checkpoints of real ranks that share layers or images, or have moments in 8 bits: the same run in the same layout,
and every value in any other.

As a script, with a file of courses and a folder, this trains the ranks, or loads what others have saved.
"""

import sys
import unittest.mock
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from deepspeed.runtime import bf16_optimizer
from torch import Tensor

from ddpm_ds.checkpoint.folder import checkpoint_name, whole
from ddpm_ds.checkpoint.manifest import EMA, MASTER, MOMENTS, Description, check_headers
from ddpm_ds.checkpoint.reader import Reader, code_of, consolidate
from ddpm_ds.tracking.run_folder import checkpoints_of
from ddpm_ds.training.ema import averages_of
from ddpm_ds.training.resume import InitialWeights
from ddpm_ds.training.saving import Saver
from ddpm_ds.unet.layers import parameter_shapes
from tests.checkpoint.saving import store_of
from tests.launching import tiny_spec
from tests.pipeline.batches import global_batch, micro_batches
from tests.pipeline.ladder_worker import Case, layers_of, report_cases, run_cases
from tests.training.ranks import the_same

STEPS = 2
WHOLE = "whole"
FEW = {"multipliers": [1], "attention_resolutions": [], "head_channels": 4}
SPEC = tiny_spec(
    unet={**FEW, "time_conditioning": "scale_shift", "dropout": 0.0},
    train={"images": 64, "batch_images": 8},
    ema={"halflife_images": 15, "rampup_fraction": 0.5},
)
"""One level, with attention of several heads in the middle: there is a layer of each kind that is split."""
MIDDLE, END = (checkpoint_name(steps * SPEC.train.batch_images) for steps in (STEPS, 2 * STEPS))

ONE = Case(1, 1, 0, "fp32", 0, micro_batches=2, process="heads")
LAYOUTS = {
    "one": ONE,
    "one, 8 bits": replace(ONE, eight_bit=True),
    "two stages": replace(ONE, stages=2, zero=1),
    "two replicas": replace(ONE, replicas=2, zero=2),
    "two replicas, 8 bits": replace(ONE, replicas=2, zero=2, eight_bit=True),
    "two stages, 8 bits, fp16": replace(ONE, stages=2, zero=1, eight_bit=True, precision="fp16"),
    "shared": replace(ONE, tensor=2),
    "shared, ZeRO-2, fp16": replace(ONE, tensor=2, zero=2, precision="fp16"),
    "some layers, ZeRO-1, fp16": replace(ONE, tensor=2, zero=1, precision="fp16", split=("up.*", "middle.attention")),
    "shared, 8 bits, ZeRO-1": replace(ONE, tensor=2, zero=1, eight_bit=True),
    "shared, 8 bits, fp16": replace(ONE, tensor=2, eight_bit=True, precision="fp16"),
    "shared, two replicas": replace(ONE, tensor=2, replicas=2, zero=2),
    "shared by four": replace(ONE, tensor=4, zero=1),
    "images of two": replace(ONE, space=2, zero=1),
    "images of two, stages": replace(ONE, space=2, stages=2, zero=2),
    "images of four": replace(ONE, space=4),
}
TRAINED = [name for name, case in LAYOUTS.items() if case == ONE or case.eight_bit or 2 in (case.tensor, case.space)]
SOURCES = {
    "one": ["shared", "images of two", "shared, ZeRO-2, fp16", "some layers, ZeRO-1, fp16", "one, 8 bits"],
    "one, 8 bits": ["one, 8 bits", "one", "shared, 8 bits, ZeRO-1", "shared, 8 bits, fp16"],
    "two stages": ["shared", "images of two", "some layers, ZeRO-1, fp16"],
    "two replicas": ["shared, ZeRO-2, fp16", "shared, two replicas"],
    "two replicas, 8 bits": ["two replicas, 8 bits", "one, 8 bits", "shared, 8 bits, ZeRO-1"],
    "two stages, 8 bits, fp16": ["two stages, 8 bits, fp16"],
    "shared": ["shared", "one", "some layers, ZeRO-1, fp16", "shared, two replicas"],
    "shared, ZeRO-2, fp16": ["shared, ZeRO-2, fp16", "one"],
    "some layers, ZeRO-1, fp16": ["some layers, ZeRO-1, fp16", "shared"],
    "shared, 8 bits, ZeRO-1": ["shared, 8 bits, ZeRO-1", "one, 8 bits"],
    "shared, 8 bits, fp16": ["shared, 8 bits, fp16"],
    "shared, two replicas": ["shared, two replicas", "one", "shared"],
    "shared by four": ["shared", "one", "images of two"],
    "images of two": ["images of two", "one", "shared"],
    "images of two, stages": ["images of two, stages", "images of two", "shared, two replicas"],
    "images of four": ["one", "images of two, stages"],
}
"""Checkpoints that each layout loads."""
RESUMED = [name for name in TRAINED if name in SOURCES[name]]
EXCHANGES = [(layout, source) for layout, sources in SOURCES.items() for source in sources if source != layout]


@dataclass(frozen=True)
class Course:
    """A layout that trains, or loads checkpoints of these sources."""

    name: str
    case: dict[str, Any]
    sources: tuple[str, ...] = ()
    weights: str = ""
    """File of initial weights, with which it begins."""


def run_course(course: Course, folder: Path) -> None:
    """Train and save twice, from the beginning or from a checkpoint of the same layout; or save what was loaded."""
    case, rank, ranks = Case(**course.case), dist.get_rank(), dist.get_world_size()
    engine = case.engine(SPEC)
    engine.averages = ema = averages_of(engine, SPEC.ema.model_copy(update={"on_host": case.zero == 1}))
    store = store_of(rank, ranks)
    config, shapes = (
        {"optimizer": {"type": "AdamW8bit" if case.eight_bit else "AdamW"}},
        parameter_shapes(layers_of(SPEC)),
    )
    about = Description(images=0, step=0, spec={}, ds_config=config, layout={}, data_sha256={}, parameters=shapes)

    def saver(source: str) -> Saver:
        there = folder / course.name / source
        dist.barrier()  # savers of one store count their checkpoints anew
        made = Saver(engine, ema, there, SPEC.checkpoint, about, log=print, store=store)
        dist.barrier()  # rank 0 has named this start, by which all ranks find one folder
        return made

    def train(saving: Saver, steps: int) -> None:
        for step in range(engine.global_steps, engine.global_steps + steps):
            engine.train_batch(micro_batches(engine, global_batch(SPEC, step)))
        saving.save()
        saving.check_saved()

    if course.weights:
        saving = saver("weights")
        saving.start_from(InitialWeights(Path(course.weights), about.parameters))
        train(saving, 0)
    for source in course.sources:
        saving = saver(source)
        saving.load(whole(checkpoints_of(folder / source / WHOLE) / MIDDLE))
        train(saving, STEPS if source == course.name else 0)
    if not course.sources:
        saving = saver(WHOLE)
        train(saving, STEPS)
        train(saving, STEPS)
    dist.barrier()
    engine.destroy()


class Courses:
    """Folders that all courses have left."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._run([Course(name, asdict(LAYOUTS[name])) for name in TRAINED])
        weights = folder / "weights.safetensors"
        consolidate(self.middle("shared", WHOLE).path, weights, MASTER)
        initial = {name: str(weights) for name in SOURCES if "fp16" in name}
        self._run([Course(one, asdict(LAYOUTS[one]), tuple(SOURCES[one]), initial.get(one, "")) for one in SOURCES])

    def _run(self, courses: list[Course]) -> None:
        """Courses of as many processes are run in one start of them."""
        for processes in (1, 2, 4):
            alike = [one for one in courses if Case(**one.case).resolved(8).layout.world_size == processes]
            run_cases(processes, Path(__file__), [asdict(course) for course in alike], self._folder)

    def middle(self, name: str, source: str) -> Reader:
        return Reader(checkpoints_of(self._folder / name / source) / MIDDLE)

    @cache  # noqa: B019  (lives as long as the module's tests)
    def values(self, name: str, kind: str) -> dict[str, Tensor]:
        """Each parameter's values of a kind, in the middle of a course from its beginning."""
        reader = self.middle(name, WHOLE)
        return {parameter: reader.read(kind, parameter) for parameter in reader.manifest.parameters}

    def end(self, name: str, source: str) -> Reader:
        return Reader(checkpoints_of(self._folder / name / source) / END)

    def beginning(self, name: str) -> Reader:
        """A layout's checkpoint of initial weights."""
        return Reader(checkpoints_of(self._folder / name / "weights") / checkpoint_name(0))


@pytest.fixture(scope="module")
def courses(tmp_path_factory: pytest.TempPathFactory) -> Courses:
    return Courses(tmp_path_factory.mktemp("courses"))


pytestmark = pytest.mark.launch


@pytest.mark.parametrize("name", RESUMED)
def test_stopped_and_resumed_is_never_stopped_bit_for_bit(name: str, courses: Courses) -> None:
    assert the_same(courses.end(name, name), courses.end(name, WHOLE))
    assert courses.end(name, WHOLE).state.steps == 2 * STEPS and courses.end(name, WHOLE).state.skipped_steps == 0
    end, middle = courses.end(name, WHOLE), courses.middle(name, WHOLE)
    assert not all(end.read("exp_avg", one).equal(middle.read("exp_avg", one)) for one in end.manifest.parameters)


@pytest.mark.parametrize(("layout", "source"), EXCHANGES)
def test_any_layout_has_every_value_of_any_other(layout: str, source: str, courses: Courses) -> None:
    """Moments in 8 bits are rounded, the others are the same bits."""
    found, wanted = courses.middle(layout, source), courses.middle(source, WHOLE)
    assert found.manifest.kinds == wanted.manifest.kinds == (EMA, *MOMENTS, MASTER)
    assert found.state.model_dump(exclude={"loss_scaler"}) == wanted.state.model_dump(exclude={"loss_scaler"})
    for kind in found.manifest.kinds:
        for name in found.manifest.parameters:
            values, expected = found.read(kind, name), courses.values(source, kind)[name]
            rounded = LAYOUTS[layout].eight_bit and kind in MOMENTS and len(found.manifest.parameters[name]) > 1
            largest = code_of(kind).error * expected.abs().max() if rounded else 0.0
            assert (values - expected).abs().max() <= largest, (kind, name)


@pytest.mark.parametrize("name", TRAINED)
def test_parts_lie_with_their_ranks_and_what_all_have_alike_with_the_first(name: str, courses: Courses) -> None:
    case, reader = LAYOUTS[name], courses.middle(name, WHOLE)
    files = {file for file in reader.manifest.files if file != "state.json"}
    ranks = case.replicas * case.space if case.zero else 1
    owners = [f"stage{stage}-replica{rank}" for stage in range(case.stages) for rank in range(ranks)]
    if case.tensor > 1:
        owners = [f"{owner}-tensor{rank}" for owner in owners for rank in range(case.tensor)]
    assert files == {f"{owner}.safetensors" for owner in owners}
    parts = {span.shard for file in files for span in check_headers(reader.path, reader.manifest, file)}
    others = set() if case.tensor == 1 else set(range(case.tensor))
    assert {part and part.rank for part in parts} == {None, *others}


@pytest.mark.parametrize("name", [name for name in SOURCES if "fp16" in name])
def test_initial_weights_are_dealt_to_the_ranks(name: str, courses: Courses) -> None:
    reader = courses.beginning(name)
    wanted = courses.middle("shared", WHOLE)
    for kind in (MASTER, EMA):
        for parameter in reader.manifest.parameters:
            assert reader.read(kind, parameter).equal(wanted.read(MASTER, parameter)), (kind, parameter)


if __name__ == "__main__":
    with unittest.mock.patch.object(bf16_optimizer, "see_memory_usage"):
        report_cases(lambda course: run_course(Course(**course), Path(sys.argv[-1])))
