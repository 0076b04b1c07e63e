"""``"stages": "auto"`` is the fastest layout that fits, and is the same for training, the benchmark and a dry run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ddpm_ds.config.spec import RunSpec
from ddpm_ds.errors import LayoutError
from ddpm_ds.predict import auto
from ddpm_ds.predict.auto import choose_stages
from ddpm_ds.predict.plan import describe_plan, plan_run
from tests.launching import REPOSITORY, tiny_spec

CONFIG = REPOSITORY / "ds_configs" / "zero0_fp32.json"
DIGITS = REPOSITORY / "launch" / "specs" / "digits.yaml"
LARGE = {"channels": 512, "multipliers": [1, 1], "blocks_per_level": 2}


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes this a machine of processor cores with so many MiB for each process."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("LOCAL_RANK", "0")
    for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"):
        monkeypatch.setenv(name, "4")
    return lambda mib: monkeypatch.setattr(auto, "this_machine", lambda sharing: ("cpu", mib * 2**20))


def chosen(spec: RunSpec, world_size: int, **pipeline: Any) -> int:
    config = json.loads(CONFIG.read_text())
    config["pipeline"] |= pipeline
    return choose_stages(spec, config, CONFIG, world_size=world_size)[0]


def test_what_fits_one_device_is_trained_by_replicas_and_what_does_not_is_cut(processor: Any) -> None:
    processor(8192)
    assert chosen(tiny_spec(), 4) == 1
    large = tiny_spec(unet=LARGE)
    assert chosen(large, 4) == 1
    assert chosen(tiny_spec(), 4, schedule="folded") in (2, 4)  # a fold has two ranks or more
    processor(1536)
    assert chosen(large, 4) > 1


@pytest.mark.parametrize(
    ("mib", "changes", "world_size", "said"),
    [
        (64, {"unet": LARGE}, 4, "nothing fits 4 devices"),
        (8192, {"train": {"batch_images": 3}}, 2, "train.batch_images"),
    ],
)
def test_what_can_not_be_laid_out_is_one_line(
    processor: Any, mib: int, changes: dict[str, Any], world_size: int, said: str
) -> None:
    processor(mib)
    with pytest.raises(LayoutError, match=said) as error:
        chosen(tiny_spec(**changes), world_size, schedule="folded" if world_size == 2 else "1f1b")
    assert "\n" not in str(error.value)


def test_a_dry_run_says_who_has_chosen_and_p_chooses_otherwise(processor: Any) -> None:
    processor(8192)
    plan = plan_run(DIGITS, [], CONFIG, world_size=4, stages=None, device="cpu")
    assert plan.ds.layout.stages == 1
    lines = describe_plan(plan, Path("runs/x")).splitlines()
    assert "layout       4 processes: 1 stage x 4 replicas" in lines
    assert any(line.startswith("stages       on cpu 1 stage x 4 replicas, ") for line in lines)
    assert plan_run(DIGITS, [], CONFIG, world_size=4, stages=4, device="cpu").chosen is None


def test_the_hosts_are_part_of_the_choice(processor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a plan of that number of stages then says what is split over them."""
    processor(1536)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    stages, why = choose_stages(tiny_spec(unet=LARGE), json.loads(CONFIG.read_text()), CONFIG, world_size=4)
    assert stages > 1 and ("across nodes" in why) == (stages == 2)
