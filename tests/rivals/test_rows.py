"""Rows of one process train the same, and other people's loops are those of their users."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from rivals.deepspeed_rows import OurPipeline
from rivals.rows import Loop, Setting, diffusers_loop, our_loop

from ddpm_ds.data.prepare import prepare
from ddpm_ds.planning.run_plan import machine_here, make_plan
from tests.launching import REPOSITORY, drafted

CPU = torch.device("cpu")
TINY = (
    *("unet.channels=8", "unet.norm_groups=4", "train.batch_images=4"),
    *("optimizer.warmup_images=16", "optimizer.learning_rate=0.01"),
)


@pytest.fixture(scope="module")
def store_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


def setting(store_root: Path, config: str = "zero1_fp32.json", *overrides: str) -> Setting:
    spec, path = REPOSITORY / "launch" / "specs" / "digits.yaml", REPOSITORY / "ds_configs" / config
    changes = [*TINY, f"data.store_root={store_root}", *overrides]
    draft = drafted(spec, changes, path, world_size=1, stages=None)
    plan = make_plan(draft, ("0",), machine_here(draft.ds.precision, 1))
    return Setting(plan, prepare(plan.spec.data), CPU)


def losses(row: Loop, steps: int) -> list[float]:
    return [float(row.step()) for _ in range(steps)]


def test_diffusers_trains_as_ours_and_random_draws_are_not_compared(store_root: Path) -> None:
    own = setting(store_root, "zero1_fp32.json", "train.accumulation=2")
    theirs = losses(diffusers_loop(own), 6)
    assert theirs[-1] != theirs[3]  # weights move
    for settings in (own, setting(store_root, "zero1_fp32.json", "train.accumulation=1")):
        assert losses(our_loop(settings), 6) == pytest.approx(theirs, rel=1e-5)
    random = diffusers_loop(own, "randn")
    assert not random.comparable and losses(random, 2) != theirs[:2]


def test_a_compiled_unet_of_diffusers_trains_as_an_eager_one(store_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, compiled = setting(store_root, "zero1_fp32.json"), []

    def compile_without_code(function: Callable[..., Any], **options: Any) -> Any:
        compiled.append(function)
        return compile_function(function, backend="aot_eager")  # building code takes a minute

    compile_function = torch.compile
    monkeypatch.setattr("torch.compile", compile_without_code)
    eager = losses(diffusers_loop(own), 3)
    assert not compiled
    loop = diffusers_loop(own, "compiled")
    assert loop.comparable and "torch.compile" in loop.name
    assert losses(loop, 3) == pytest.approx(eager, rel=1e-5) and len(compiled) == 1


def test_a_row_says_why_its_steps_on_a_gpu_are_no_graphs() -> None:
    row = OurPipeline.__new__(OurPipeline)
    row._engine = cast(Any, SimpleNamespace(graph=SimpleNamespace(why_eager="a layer can't be captured")))
    row._graphs = True
    assert row.note == "eager: a layer can't be captured"
    row._graphs = False
    assert row.note == ""


def test_a_loss_scale_changes_nothing_but_rounding(store_root: Path) -> None:
    seen = "optimizer.epsilon=0.01"  # Adam would hide a wrong scale of the gradients
    wide, narrow = (
        losses(our_loop(setting(store_root, config, seen)), 10) for config in ("zero1_fp32.json", "zero2_fp16.json")
    )
    assert narrow == pytest.approx(wide, rel=2e-3)
