"""The DeepSpeed JSON: every key known, refused or filled, and the batch shared out exactly."""

import copy
import itertools
import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic.fields import FieldInfo

from ddpm_ds.config.ds_config import check_ds_config, read_ds_config
from ddpm_ds.config.ds_model import DS_CONFIG, REFUSED, USUAL
from ddpm_ds.config.spec import RunSpec
from ddpm_ds.config.spec_file import DEFAULT_SPEC, SPECS, load_spec, spec_overrides
from ddpm_ds.ground.errors import DsConfigError, LayoutError, SpecError
from ddpm_ds.schema.layout import BUCKET_ELEMENTS
from ddpm_ds.schema.section import Section
from tests.ds_json import laid_out
from tests.launching import REPOSITORY, error_of

CONFIGS = sorted((REPOSITORY / "ds_configs").glob("*.json"))
MAIN = REPOSITORY / "ds_configs" / "zero2_fp16.json"
REMOVED = object()


def config(**changes: Any) -> dict[str, Any]:
    """The main JSON with changes given as block__key=value, where REMOVED takes the key away."""
    values: dict[str, Any] = copy.deepcopy(read_ds_config(MAIN))
    for key, value in changes.items():
        *blocks, name = key.split("__")
        place = values
        for block in blocks:
            place = place.setdefault(block, {})
        place[name] = value
        if value is REMOVED:
            del place[name]
    return values


def spec(*overrides: str) -> RunSpec:
    """The digits: 64 images a step, warm-up of 6400 images, 128000 images."""
    return load_spec(DEFAULT_SPEC, overrides)


def filled(config: dict[str, Any], *overrides: str, world_size: int = 1, stages: int | None = None) -> Any:
    return laid_out(config, spec(*overrides), world_size=world_size, stages=stages, path=Path("x.json"))


refusal = partial(error_of, (DsConfigError, LayoutError), filled)


def values_of(block: object) -> Iterator[object]:
    yield block
    for value in block.values() if isinstance(block, dict) else block if isinstance(block, list) else ():
        yield from values_of(value)


def fields() -> Iterator[tuple[str, FieldInfo]]:
    for key in DS_CONFIG.all_keys():
        yield key, DS_CONFIG.field_at(key)


def test_defaults_are_those_of_the_installed_deepspeed() -> None:
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig

    compared = 0
    for block, model in {
        "zero_optimization": DeepSpeedZeroConfig,
        "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
        "fp16": DeepSpeedFP16Config,
        "bf16": DeepSpeedBF16Config,
    }.items():
        section = DS_CONFIG.at(block.split("."))
        assert section is not None
        for name, field in section.model_fields.items():
            theirs = model.model_fields[name].default
            if field.default not in ("auto", ()) and not isinstance(field.default, Section):
                assert field.default == theirs, f"{block}.{name}"
                compared += 1
        for name in USUAL.keys() & model.model_fields.keys():
            assert USUAL[name] == model.model_fields[name].default, f"{block}.{name}"
    assert compared > 10


def test_every_field_says_what_it_does_or_why_it_has_one_value() -> None:
    for key, field in fields():
        extra = field.json_schema_extra
        about = field.description or (isinstance(extra, dict) and extra.get("reason")) or DS_CONFIG.at(key.split("."))
        assert about or key.endswith(".enabled"), key


def test_the_committed_tables_are_current() -> None:
    committed = (REPOSITORY / "docs" / "ds_configs.md").read_text()
    assert DS_CONFIG.markdown(3) in committed, "replace the tables by what `ddpm-ds schema ds_config --markdown` prints"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
@pytest.mark.parametrize("name", ["digits", "cifar10", "cifar10_dim64"])
def test_every_config_in_the_repository_fits_every_spec_and_deepspeed_takes_it(path: Path, name: str) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    folded = path.stem.startswith("folded")  # which wants several ranks, and micro-batches for them
    run = load_spec(SPECS / f"{name}.yaml", ["train.accumulation=auto"] if folded else [])
    for world_size in (2, 4) if folded else (1, 2, 4):
        resolved = laid_out(read_ds_config(path), run, world_size=world_size, stages=world_size, path=path)
        assert "auto" not in list(values_of(resolved.for_deepspeed()))
        assert resolved.precision in path.stem and f"zero{resolved.layout.zero_stage}" in path.stem
        taken = DeepSpeedConfig(resolved.for_deepspeed())
        assert taken.zero_optimization_stage == resolved.layout.zero_stage
        assert taken.train_micro_batch_size_per_gpu == resolved.layout.micro_batch_images
        assert taken.gradient_accumulation_steps == resolved.layout.micro_batches


def test_auto_takes_its_values_from_the_spec() -> None:
    given = config()
    resolved = filled(
        given, "optimizer.betas=[0.8,0.9]", "optimizer.weight_decay=0.1", "optimizer.warmup_images=6401"
    ).as_json()
    assert resolved["train_batch_size"] == 64
    assert resolved["optimizer"]["params"] == {
        "lr": 1e-3,
        "betas": [0.8, 0.9],
        "eps": 1e-8,
        "weight_decay": 0.1,
        "torch_adam": True,
        "fused": True,
    }
    assert resolved["scheduler"]["params"] == {
        "warmup_min_lr": 0.0,
        "warmup_max_lr": 1e-3,
        "warmup_num_steps": 101,
        "warmup_type": "linear",
    }
    assert resolved["zero_optimization"]["reduce_bucket_size"] == BUCKET_ELEMENTS
    assert given == config()  # what was read is left alone


def test_keys_that_are_left_out_are_filled_like_auto() -> None:
    short = {"optimizer": {"type": "AdamW"}, "scheduler": {"type": "WarmupLR"}}
    resolved = filled(short, world_size=2, stages=2)
    assert resolved.config.optimizer.params.lr == 1e-3
    assert resolved.config.scheduler.params.warmup_type == "linear"  # DeepSpeed's own default is log
    assert (resolved.layout.stages, resolved.partition, resolved.layout.schedule) == (2, "measured", "planned")
    assert (resolved.precision, resolved.layout.zero_stage, resolved.layout.checkpoint_interval) == ("fp32", 0, "auto")
    pipeline = resolved.as_json()["pipeline"]
    assert (pipeline["use_reentrant"], pipeline["schedule"], pipeline["in_flight"]) == (False, "planned", "auto")
    assert "in_flight" not in resolved.for_deepspeed()["pipeline"]
    assert filled(short).layout.schedule == "1f1b"


@pytest.mark.parametrize(("interval", "given_to_deepspeed"), [("auto", 0), (3, 3)])
def test_what_memory_and_hosts_decide_stays_auto_until_they_are_known(interval: Any, given_to_deepspeed: int) -> None:
    resolved = filled(config(pipeline__activation_checkpoint_interval=interval))
    assert resolved.layout.checkpoint_interval == interval
    assert resolved.for_deepspeed()["pipeline"]["activation_checkpoint_interval"] == given_to_deepspeed
    assert resolved.layout.across_hosts == resolved.as_json()["pipeline"]["across_hosts"] == "auto"


def test_without_a_warm_up_there_is_no_scheduler() -> None:
    assert "scheduler" not in filled(config(), "optimizer.warmup_images=0").config.given
    message = refusal(config(scheduler__params__warmup_num_steps=10), "optimizer.warmup_images=0")
    assert "warmup_num_steps = 10 contradicts the spec: optimizer.warmup_images / batch is 0" in message


def test_a_decay_of_the_spec_drops_a_warm_up_that_agrees_with_it() -> None:
    for agreeing in (config(), config(scheduler=REMOVED), config(scheduler__params__warmup_num_steps=100)):
        assert "scheduler" not in filled(agreeing, "optimizer.decay=cosine").config.given


def test_deepspeed_has_a_printing_interval_where_it_times() -> None:
    assert "steps_per_print" not in filled(config()).config.given
    assert filled(config(wall_clock_breakdown=True)).config.steps_per_print == 50


@pytest.mark.parametrize(
    ("world_size", "stages", "expected"),  # stages, replicas, micro-batch, micro-batches
    [
        (1, None, (1, 1, 64, 1)),
        (2, 2, (2, 1, 8, 8)),
        (3, 3, (3, 1, 4, 16)),
        (4, 2, (2, 2, 4, 8)),
        (4, 1, (1, 4, 16, 1)),
        (4, 4, (4, 1, 4, 16)),
        (32, 32, (32, 1, 1, 64)),  # 4 x 32 micro-batches don't exist: as many as there are images
    ],
)
def test_auto_layout(world_size: int, stages: int | None, expected: tuple[int, ...]) -> None:
    layout = filled(config(), world_size=world_size, stages=stages).layout
    assert (layout.stages, layout.replicas, layout.micro_batch_images, layout.micro_batches) == expected


def test_the_spec_or_the_json_may_ask_for_an_accumulation_or_a_micro_batch() -> None:
    assert filled(config(), "train.accumulation=2").layout.micro_batch_images == 32
    assert filled(config(), "train.accumulation=2", world_size=2, stages=2).layout.micro_batches == 2
    assert filled(config(train_micro_batch_size_per_gpu=16)).layout.micro_batches == 4
    assert filled(config(gradient_accumulation_steps=4)).layout.micro_batch_images == 16


def test_a_list_of_cuts_makes_its_number_of_stages_and_with_the_stages_its_schedule() -> None:
    cuts = config(pipeline__partition=[3, 7, 9])
    for stages, made, schedule in ((None, 4, "1f1b"), (4, 4, "1f1b"), (2, 2, "planned")):
        resolved = filled(cuts, world_size=8, stages=stages)
        assert (resolved.layout.stages, resolved.partition, resolved.layout.schedule) == (made, [3, 7, 9], schedule)


def test_the_json_may_say_how_many_micro_batches_are_in_flight() -> None:
    assert filled(config(pipeline__in_flight=3), world_size=2, stages=2).layout.in_flight == 3
    recorded = filled(config(pipeline__in_flight=3))
    assert recorded.layout.schedule == "1f1b" and filled(recorded.as_json()).as_json() == recorded.as_json()
    for ignored in ({"partition": [8]}, {"stages": 1, "schedule": "folded"}):
        message = refusal(config(pipeline={"in_flight": 3, **ignored}), world_size=2, stages=2)
        assert "pipeline.in_flight = 3 is used only with pipeline.schedule: planned or auto" in message
    assert "pipeline.in_flight = 0 should be a whole number from 1 to 2^20" in refusal(config(pipeline__in_flight=0))


def test_offloaded_optimizers_are_pytorchs_fused_adam() -> None:
    found = filled(config(zero_optimization__offload_optimizer={"device": "cpu"}, optimizer__params=REMOVED))
    params = found.for_deepspeed()["optimizer"]["params"]
    assert params["torch_adam"] is params["fused"] is True
    assert filled(found.as_json()).as_json() == found.as_json()


def test_a_fold_has_two_stages_of_the_unet_on_each_rank() -> None:
    resolved = filled(config(pipeline__schedule="folded", pipeline__partition=[2, 9, 12]), world_size=4)
    assert (resolved.layout.schedule, resolved.layout.stages, resolved.layout.replicas) == ("folded", 2, 2)
    assert filled(config(pipeline__schedule="folded"), world_size=4, stages=4).layout.micro_batches >= 8


def test_the_command_line_wins_over_the_json() -> None:
    assert filled(config(pipeline__stages=2), world_size=4, stages=4).layout.stages == 4


@pytest.mark.parametrize(
    ("changes", "processes", "stages", "words"),
    [
        ({}, 4, 3, ["-p 3", "4 processes", "use 1 or 2 or 4 stages"]),
        ({"pipeline__tensor": {"size": 2}}, 6, 2, ["-p 2", "6 processes in tensor groups of 2; use 1 or 3 stages"]),
        ({"pipeline__partition": [2, 5]}, 4, 2, ["-p 2 needs 1 or 3 cuts"]),
        ({"pipeline__schedule": "1f1b", "pipeline__partition": [2, 5, 9]}, 4, 2, ["-p 2 needs 1 cuts"]),
        ({}, 3, 1, ["train.batch_images = 64", "3 replicas", "batch_images=66"]),
        ({"gradient_accumulation_steps": 4}, 3, 1, ["3 replicas", "batch_images=72"]),
        ({"train_micro_batch_size_per_gpu": 5}, 3, 1, ["3 replicas", "batch_images=75"]),
        ({"train_micro_batch_size_per_gpu": 5, "gradient_accumulation_steps": 4}, 3, 1, ["batch_images=60"]),
        ({"pipeline__schedule": "folded"}, 1, None, ["nothing to fold on one stage", "-p 2"]),
        (
            {"pipeline__schedule": "folded", "gradient_accumulation_steps": 4},
            4,
            4,
            ["needs 8 micro-batches or more", "64 images make 4", "=1f1b"],
        ),
        (
            {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 4},
            1,
            None,
            ["64 images", "4 micro-batches of 8"],
        ),
    ],
)
def test_what_can_not_be_shared_out_is_named_with_its_fix(
    changes: dict[str, Any], processes: int, stages: int | None, words: list[str]
) -> None:
    message = refusal(config(**changes), world_size=processes, stages=stages)
    for word in words:
        assert word in message


def test_a_micro_batch_has_whole_groups_of_images_that_exchange_noises() -> None:
    whole = config(train_micro_batch_size_per_gpu=4)
    for pairs in (1, 2, 4):
        filled(whole, f"diffusion.noise_pairs={pairs}", world_size=2, stages=1)
    message = refusal(whole, "diffusion.noise_pairs=6", world_size=2, stages=1)
    assert "noise_pairs = 6 does not divide the 4 images of a micro-batch; use --set diffusion.noise_pairs=4" in message


def test_a_group_of_a_bucket_has_whole_micro_batches_of_all_replicas() -> None:
    buckets = ("data.image_size=48", "data.buckets.step=8", "unet.attention_resolutions=[]", "unet.dropout=0")
    whole, held = config(train_micro_batch_size_per_gpu=4), "data.held_out_images=0"
    for images in ("null", "8", "24"):
        filled(whole, *buckets, held, f"data.buckets.images={images}", world_size=2, stages=1)
    message = refusal(whole, *buckets, held, "data.buckets.images=12", world_size=2, stages=1)
    assert "data.buckets.images = 12 is no multiple of 8" in message and "--set data.buckets.images=16" in message


@settings(deadline=None)
@given(
    batch=st.integers(1, 96),
    stages=st.integers(1, 6),
    replicas=st.integers(1, 6),
    micro=st.none() | st.integers(1, 16),
    accumulation=st.none() | st.integers(1, 16),
)
def test_a_layout_is_exact_or_refused(
    batch: int, stages: int, replicas: int, micro: int | None, accumulation: int | None
) -> None:
    given_config = config(
        train_micro_batch_size_per_gpu=micro or "auto", gradient_accumulation_steps=accumulation or "auto"
    )
    try:
        layout = filled(given_config, f"train.batch_images={batch}", world_size=stages * replicas, stages=stages).layout
    except LayoutError:
        assert batch % replicas or micro or accumulation
        return
    assert layout.replicas * layout.micro_batches * layout.micro_batch_images == batch == layout.batch_images
    assert layout.stages * layout.replicas == layout.world_size
    assert micro in (None, layout.micro_batch_images) and accumulation in (None, layout.micro_batches)


@pytest.mark.parametrize(
    ("changes", "overrides", "message"),
    [
        (
            {"train_batch_size": 32},
            [],
            "train_batch_size = 32 contradicts the spec: train.batch_images is 64; use --set ds.train_batch_size=auto "
            "or --set train.batch_images=32",
        ),
        (
            {"optimizer__params__betas": [0.8, 0.9]},
            [],
            "optimizer.params.betas = [0.8, 0.9] contradicts the spec: optimizer.betas is [0.9, 0.999]; use --set "
            "ds.optimizer.params.betas=auto or --set 'optimizer.betas=[0.8, 0.9]'",
        ),
        (
            {"scheduler__params__warmup_num_steps": 10},
            [],
            "scheduler.params.warmup_num_steps = 10 contradicts the spec: optimizer.warmup_images / batch is 100; use "
            "--set ds.scheduler.params.warmup_num_steps=auto or --set optimizer.warmup_images=640",
        ),
        (
            {"scheduler": REMOVED},
            [],
            "scheduler is missing, but optimizer.warmup_images = 6400; use --set ds.scheduler.type=WarmupLR or --set "
            "optimizer.warmup_images=0",
        ),
        (
            {"pipeline__use_reentrant": True},
            ["optimizer.train=[up_blocks]"],
            "pipeline.use_reentrant = true loses gradients where optimizer.train leaves out the first layers; use "
            "--set ds.pipeline.use_reentrant=false",
        ),
        (
            {"optimizer__params__stochastic_rounding": True},
            [],
            "optimizer.params.stochastic_rounding = true is used only with optimizer.type: AdamW8bit; remove it, or "
            "use false",
        ),
        (
            {"optimizer": {"type": "AdamW8bit", "params": {"stochastic_rounding": True}}},
            [],
            "optimizer.params.stochastic_rounding = true is used only with bf16.enabled; remove it, or use false",
        ),
    ],
)
def test_what_contradicts_the_spec_is_named_with_both_values(
    changes: dict[str, Any], overrides: list[str], message: str
) -> None:
    assert refusal(config(**changes), *overrides) == f"x.json: {message}"


def test_numbers_that_agree_with_the_spec_are_taken() -> None:
    agreeing = config(train_batch_size=64, optimizer__params__lr=0.001, scheduler__params__warmup_num_steps=100)
    assert filled(agreeing).config.given == filled(config()).config.given


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"zero_optimization__stage": 3},
            "zero_optimization.stage = 3 should be 0 or 1 or 2; ZeRO-3 would gather a stage's weights anew for every "
            "micro-batch, so use 2 instead",
        ),
        ({"fp16__enabled": "true"}, 'fp16.enabled = "true" should be true or false'),
        ({"fp16": True}, "fp16 = true should be a block with enabled, loss_scale, "),
        ({"gradient_clipping": float("nan")}, "gradient_clipping = NaN should be a number from 0 to 10^9"),
        (
            {"pipeline__partition": [3, 3]},
            "pipeline.partition = [3, 3] should rise from cut to cut, such as [3, 7]",
        ),
        ({"optimizer": REMOVED}, "optimizer.type is missing"),
        (
            {"optimizer__type": "Muon"},
            'optimizer.type = "Muon" should be "AdamW" or "Adam" or "AdamW8bit"; the spec\'s optimizer section',
        ),
        (
            {"zero_optimization__offload_optimizer": {"device": "cpu"}, "optimizer__params__fused": False},
            "optimizer.params.fused = false, but PyTorch's fused AdamW steps what is offloaded; remove it",
        ),
        (
            {"scheduler__params__warmup_type": "log"},
            'scheduler.params.warmup_type = "log" should be "linear" or "auto"; every warm-up is linear',
        ),
        (
            {"scheduler__type": "WarmupDecayLR"},
            'scheduler.type = "WarmupDecayLR" should be "WarmupLR"',
        ),
        ({"optimizer__params__betas": [0.9, 1]}, "should be [a number >= 0 and < 1, a number >= 0 and < 1]"),
        (
            {"zero_optimization__offload_optimizer": {"pin_memory": True}},
            "zero_optimization.offload_optimizer.device is missing, so that nothing is offloaded",
        ),
        (
            {"zero_optimization": {"stage": 0}},
            "fp16.hysteresis = 2 is ignored without ZeRO; write 1 or set zero_optimization.stage to 1 or 2",
        ),
        (
            {"zero_optimization": {"stage": 0}, "fp16": {"enabled": True}, "optimizer__params": {}},
            "optimizer.params.torch_adam = false, the default, needs ZeRO in fp16, since this project can't read",
        ),
    ],
)
def test_what_deepspeed_would_not_know_ignore_or_break_is_refused_with_the_fix(
    changes: dict[str, Any], message: str
) -> None:
    refused = refusal(config(**changes))
    assert refused.startswith("x.json: ")
    assert message in refused


def test_adam_in_8_bits_needs_none_of_pytorchs_settings_and_deepspeed_is_not_asked_for_it() -> None:
    plain = config(optimizer={"type": "AdamW8bit"}, zero_optimization={"stage": 0}, fp16__hysteresis=1)
    for changed in (plain, config(optimizer__type="adamw8bit", graphs=True)):
        found = filled(changed)
        assert found.config.optimizer.type == "AdamW8bit"
        assert set(found.eight_bit_settings) == {"lr", "betas", "eps", "weight_decay"}
        given = found.for_deepspeed()
        assert "optimizer" not in given and given["zero_allow_untested_optimizer"] is True
    assert not filled(config()).eight_bit_settings and "optimizer" in filled(config()).for_deepspeed()
    kept = filled(config(optimizer__params__stochastic_rounding=False)).for_deepspeed()["optimizer"]["params"]
    assert "stochastic_rounding" not in kept
    rounded = {"type": "AdamW8bit", "params": {"stochastic_rounding": True}}
    given = filled(config(optimizer=rounded, fp16=REMOVED, bf16={"enabled": True})).for_deepspeed()
    assert given["bf16"] == {
        "enabled": True,
        "bf16_master_weights_and_grads": True,
        "bf16_optimizer_states": True,
    }


def test_every_key_misspelt_is_refused() -> None:
    for key in DS_CONFIG.all_keys():
        with pytest.raises(DsConfigError, match=r"is unknown; did you mean|should be a block"):
            check_ds_config(config(**{f"{key}x".replace(".", "__"): 1}), "x.json")


def test_a_refused_key_is_refused_with_its_reason_and_ignored_where_it_changes_nothing() -> None:
    without = check_ds_config(config(), "x.json")
    values = itertools.cycle([False, None, 0, {}, {"enabled": False, "other": 1}, {"device": "none"}, {"a": False}])
    for name, reason in REFUSED.items():
        on = False if USUAL.get(name) is True else 12345
        for block in ("", "zero_optimization__", "fp16__"):
            key = "optimizer__params__max_grad_norm" if "." in name else block + name
            dotted = re.escape(key.replace("__", "."))
            with pytest.raises(DsConfigError, match=f"{dotted} = {json.dumps(on)} is refused: {reason}; "):
                check_ds_config(config(**{key: on}), "x.json")
            if "." not in name:
                assert check_ds_config(config(**{key: USUAL.get(name, next(values))}), "x.json") == without, name


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", ["not JSON in line 1"]),
        ('{"a": 1,\n "a": 2}', ["a is given twice in one block"]),
        ("[]", ["holds [] instead of a block"]),
        ('{"a": [1,\n\n]}', ["not JSON in line 1: a comma before ]; remove it"]),
        ('{"a": {\n"b": 1,\n}}', ["not JSON in line 2: a comma before }; remove it"]),
        ('{"a": 1\n\n"b": 2}', ["not JSON in line 1: Expecting ',' delimiter"]),
        ('{"a": 1,\nb: 2}', ["not JSON in line 2"]),
        ('{"fp16": {"enabled": true}} // comment', ["not JSON in line 1"]),
    ],
)
def test_a_bad_file_is_one_line(tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(DsConfigError) as caught:
        read_ds_config(path)
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_values_of_the_json_are_set_like_those_of_the_spec(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"pipeline": {"stages": 2}, "gradient_clipping": 1.0}')
    changes = ["unet.channels=8", "ds.pipeline.schedule=1f1b", "ds.pipeline.partition=[3]", "ds.fp16.enabled=true"]
    pipeline = {"stages": 2, "schedule": "1f1b", "partition": [3]}
    assert read_ds_config(file, changes) == {"pipeline": pipeline, "gradient_clipping": 1.0, "fp16": {"enabled": True}}
    assert spec_overrides(changes) == ["unet.channels=8"]
    for bad, words in (
        ("ds.gradient_clipping.value=1", "--set ds.gradient_clipping.value=1: gradient_clipping is no block"),
        ("ds.pipeline.schedule", "write ds.block.key=value"),
    ):
        with pytest.raises(DsConfigError, match=words):
            read_ds_config(file, [bad])
    with pytest.raises(SpecError, match="this command reads no DeepSpeed JSON"):
        load_spec(DEFAULT_SPEC, ["ds.fp16.enabled=true"])


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(DsConfigError, match="no such DeepSpeed config; examples are in ds_configs"):
        read_ds_config(tmp_path / "missing.json")
    with pytest.raises(DsConfigError, match="can't be read as a DeepSpeed config"):
        read_ds_config(tmp_path)
