"""What is varied, and the trials that follow."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ddpm_ds.config.ds_config import read_ds_config
from ddpm_ds.errors import UserError
from ddpm_ds.experiments.sweep import DYNAMIC_FP16, Trial, make_trials, parse_variables, plan_trials
from ddpm_ds.pipeline import import_deepspeed
from ddpm_ds.tracking.recorder import parameters
from ddpm_ds.tracking.runs import VARIED_TAG, ExperimentError
from ddpm_ds.tracking.tracker import flatten
from tests.launching import REPOSITORY

SPEC = REPOSITORY / "launch" / "specs" / "digits.yaml"
CONFIGS = REPOSITORY / "ds_configs"


def made_of(*items: str, config: str = "zero2_fp16.json", full: bool = False, processes: int = 1) -> list[Trial]:
    given = read_ds_config(CONFIGS / config)
    return make_trials(parse_variables(items), given, ["train.seed=3"], processes, full=full)


def test_every_value_is_tried_alone_or_in_full() -> None:
    items = ("precision=fp32,fp16,bf16", "processes=1,2")
    alone, full = made_of(*items), made_of(*items, full=True)
    assert [trial.changed for trial in alone] == ["", "precision=fp16", "precision=bf16", "processes=2"]
    assert [trial.name for trial in alone] == ["baseline", "precision-fp16", "precision-bf16", "processes-2"]
    assert [trial.processes for trial in alone] == [1, 1, 1, 2]
    assert [trial.changed for trial in full[:3]] == ["", "processes=2", "precision=fp16"]
    assert len(full) == 6 and full[-1].name == "precision-bf16-processes-2"
    assert full[-1].values == {"precision": "bf16", "processes": "2"}


def test_shorthands_edit_the_json_and_other_names_are_spec_and_json_keys() -> None:
    items = (
        "stages=2",
        "schedule=folded",
        "zero=1",
        "micro_batch_images=8",
        "recompute=2",
        "partition=[3,5,7]",
        "unet.multipliers=[1,2]",
        "ds.gradient_clipping=0.5",
        "ds.fp16.loss_scale=128",
    )
    (trial,) = made_of(*items)
    pipeline: dict[str, Any] = trial.config["pipeline"]
    assert (pipeline["stages"], pipeline["schedule"], pipeline["partition"]) == (2, "folded", [3, 5, 7])
    assert pipeline["activation_checkpoint_interval"] == 2 and trial.config["zero_optimization"]["stage"] == 1
    assert trial.config["train_micro_batch_size_per_gpu"] == 8
    assert trial.config["gradient_clipping"] == 0.5 and trial.config["fp16"]["loss_scale"] == 128
    assert trial.overrides == ("train.seed=3", "train.accumulation=auto", "unet.multipliers=[1,2]")
    assert trial.name == trial.name.replace("/", "") and trial.changed == ""


def test_what_a_sweep_varies_is_always_a_parameter_of_its_trials() -> None:
    names = ["processes", "precision", "schedule", "ds.fp16.loss_scale_window", "unet.multipliers"]
    trial = Trial("one", dict.fromkeys(names, "1"), "", 1, (), {})
    derived = {"world_size": 1, "precision": "fp32", "parameters": 10}
    json_of_run = {"pipeline": {"schedule": "1f1b"}, "fp16": {"loss_scale_window": 500, "hysteresis": 2}}
    settings = flatten({"unet": {"multipliers": (1, 2)}, "ema": {}, "derived": derived, "ds_config": json_of_run})
    assert set(parameters(settings, {VARIED_TAG: " ".join(trial.settings)})) == {
        "derived.world_size",
        "derived.precision",
        "ds_config.pipeline.schedule",
        "ds_config.fp16.loss_scale_window",
        "unet.multipliers",
    }
    assert set(parameters(settings, {})) == {"derived.world_size", "derived.precision"}


@pytest.mark.parametrize("config", sorted(path.name for path in CONFIGS.glob("*.json") if "folded" not in path.name))
def test_any_precision_and_zero_stage_is_legal_from_any_json(config: str) -> None:
    made = made_of("precision=fp32,fp16,bf16", "zero=0,1,2", config=config, full=True, processes=2)
    for trial, plan in zip(made, plan_trials(made, SPEC, CONFIGS / config, stages=2), strict=True):
        assert plan.ds.precision == trial.values["precision"] and plan.ds.layout.zero_stage == int(trial.values["zero"])
        assert {"fp16", "bf16"} & set(trial.config) == {trial.values["precision"]} - {"fp32"}


def test_half_precision_has_the_dynamic_loss_scale_of_the_main_config() -> None:
    assert json.loads((CONFIGS / "zero2_fp16.json").read_text())["fp16"] == DYNAMIC_FP16
    (trial,) = made_of("precision=fp16", config="zero2_bf16.json")
    assert trial.config["fp16"] == DYNAMIC_FP16
    config = read_ds_config(CONFIGS / "zero2_fp16.json")
    config["fp16"] = {"enabled": False, "loss_scale": 64}
    (trial,) = make_trials(parse_variables(["precision=fp16"]), config, [], 1, full=False)
    assert trial.config["fp16"] == {"enabled": True, "loss_scale": 64}  # what a JSON says itself stays
    assert config["fp16"]["enabled"] is False


def test_trials_whose_folders_would_be_the_same_are_told_apart() -> None:
    names = [trial.name for trial in made_of("data.path=null,a/b,a-b")]
    assert names == ["baseline", "data.path-a-b", "data.path-a-b-2"]


def test_the_planner_is_asked_for_stages_elsewhere(tmp_path: Path) -> None:
    import_deepspeed()  # which sets a variable of its own
    before = dict(os.environ)
    (plan,) = plan_trials(made_of("processes=2"), SPEC, CONFIGS / "zero2_fp16.json", stages=None, device="cpu")
    assert plan.ds.layout.world_size == 2 and plan.chosen is not None
    assert dict(os.environ) == before
    with pytest.raises(ExperimentError, match=r"^trial baseline: .* --set unet.channels=33: "):
        plan_trials(
            made_of("processes=2", "unet.channels=33"), SPEC, CONFIGS / "zero2_fp16.json", stages=None, device="cpu"
        )


@pytest.mark.parametrize(
    ("items", "said"),
    [
        (["precison=fp16"], "--vary precison=fp16: precison is unknown; did you mean precision?"),
        (["depth=3"], "known are precision, processes, stages"),
        (["precision"], "write NAME=VALUE,VALUE"),
        (["precision=fp32,"], "write NAME=VALUE,VALUE"),
        (["precision=fp32,fp32"], "a value comes twice"),
        (["precision=fp32", "precision=fp16"], "--vary precision is given twice"),
        (["zero=1,2", "ds.zero_optimization.stage=1,2"], "both set ds.zero_optimization.stage; leave one out"),
        (["precision=fp32,fp16", "ds.fp16.enabled=true"], "both set ds.fp16.enabled; leave one out"),
        (["train.accumulation=4,8", "micro_batch_images=8,4"], "both set train.accumulation; leave one out"),
        (["precision=fp32,fp8"], "--vary precision=fp8: use fp32, fp16, bf16"),
        (["processes=1,0"], "--vary processes=0: '0' is not a whole number from 1 to 65,536"),
        (["logging.experiment=a,b"], "a sweep is one experiment"),
        (["ds.gradient_clipping.value=1"], "gradient_clipping is no block of the JSON"),
        (["ds.fp16=1", "precision=fp16,fp32"], "--vary ds.fp16=1: fp16 should be a block {...}; vary one of its keys"),
    ],
)
def test_a_variable_that_can_not_be_is_said_in_one_line(items: list[str], said: str) -> None:
    with pytest.raises(UserError) as error:
        made_of(*items)
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("item", "said"),
    [
        ("schedule=1f1b,zigzag", 'pipeline.schedule = "zigzag" should be "1f1b" or "folded"'),
        ("ds.pipeline.stages=2,3", "3 stages, which don't divide 2 processes"),
        ("unet.channels=32,33", "--set unet.channels=33: "),
        ("unet.chanels=32", "did you mean unet.channels?"),
        ("zero=0,three", 'zero_optimization.stage = "three" should be 0 or 1 or 2'),
        ("ds.zero_optimisation.stage=1", "zero_optimisation is unknown; did you mean zero_optimization?"),
    ],
)
def test_a_value_that_can_not_be_trained_is_said_in_the_words_of_training(item: str, said: str) -> None:
    with pytest.raises(ExperimentError) as error:
        varied = [item] if "stages" in item else [item, "stages=2"]
        plan_trials(made_of(*varied, processes=2), SPEC, Path("my.json"), stages=None)
    words = str(error.value)
    assert words.startswith("trial ") and said in words and "\n" not in words and "ddpm-ds-" not in words
