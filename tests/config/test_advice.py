"""Advice in messages about specs and DeepSpeed JSONs: whoever types it gets what was meant, after one start."""

import copy
import json
import re
import shlex
from pathlib import Path
from typing import Any, get_args

import h5py
import numpy as np
import pytest
from PIL import Image

from ddpm_ds.cli.main import main
from ddpm_ds.config.ds_config import check_ds_config, set_key
from ddpm_ds.config.ds_model import DS_CONFIG
from ddpm_ds.config.ds_model import SYNONYMS as JSON_SYNONYMS
from ddpm_ds.config.spec import RunSpec
from ddpm_ds.config.spec_file import DEFAULT_SPEC, JSON_PREFIX, SYNONYMS, load_spec
from ddpm_ds.ground.errors import MOST_FAULTS, DsConfigError, SpecError
from tests.ds_json import laid_out
from tests.evaluate.planted import UNLABELLED, plant

PATH = Path("x.json")
KEYS = [*DS_CONFIG.all_keys()]
OPTIMIZER = {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}, "scheduler": {"type": "WarmupLR"}}


def faults(config: dict[str, Any], overrides: list[str]) -> list[str]:
    try:
        laid_out(config, load_spec(DEFAULT_SPEC, overrides), world_size=1, stages=None, path=PATH)
    except DsConfigError as error:
        return [line.removeprefix("x.json: ") for line in str(error).splitlines()]
    return []


def block_of(config: dict[str, Any], dotted: str) -> tuple[dict[str, Any], str]:
    *blocks, name = dotted.split(".")
    for block in blocks:
        config = config.setdefault(block, {})
    return config, name


def merge(into: dict[str, Any], values: dict[str, Any]) -> None:
    for name, value in values.items():
        if isinstance(value, dict):
            merge(into.setdefault(name, {}), value)
        else:
            into[name] = value


def follow(config: dict[str, Any], overrides: list[str], message: str, last: bool) -> None:
    """Do what a message says, the first or the last of its alternatives."""
    dotted = message.split()[0]
    block, name = block_of(config, dotted)
    if typed := re.findall(r"--set ('[^']+'|\S+)", message):
        (item,) = shlex.split(typed[-1 if last else 0])
        if item.startswith(JSON_PREFIX):
            key, _, value = item.removeprefix(JSON_PREFIX).partition("=")
            set_key(config, key, value, item)
        else:
            overrides.append(item)
    elif meant := re.search(r"did you mean (\S+)\?", message):
        if meant[1] in KEYS:
            value = block.pop(name)
            place, name = block_of(config, meant[1])
            place.setdefault(name, value)
        else:
            block[name] = json.loads(meant[1])
    elif written := re.search(r"write (\".*) instead", message):
        del block[name]
        merge(config, json.loads("{" + written[1] + "}"))
    elif said := re.search(r"(?:write|use) (\w+)( or set| instead|$)", message):
        block[name] = json.loads(said[1])
    elif "remove it" in message:
        del block[name]
    else:
        choice = re.search(r"should be (?:an? (?:even )?(?:whole )?number from )?(\S+)", message)
        assert choice is not None, f"no advice: {message}"
        block[name] = (
            json.loads(choice[1].rstrip(",;")) if dotted != "bf16.enabled" else False
        )  # only one of two precisions


def zero2(**keys: Any) -> dict[str, Any]:
    usual = {"allgather_partitions": True, "overlap_comm": True, "reduce_bucket_size": 2e8}
    return {"stage": 2, "contiguous_gradients": True, **usual, **keys}


AUTO_OPTIMIZER = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}
AUTO_BATCH = {
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}
FP16 = {"loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1}
CPU = {"device": "cpu", "pin_memory": True}
USUAL: dict[str, dict[str, Any]] = {
    "a template for ZeRO-2 whose values a trainer fills": {
        "fp16": {"enabled": "auto", **FP16},
        "bf16": {"enabled": "auto"},
        "optimizer": AUTO_OPTIMIZER,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_num_steps": "auto"}},
        "zero_optimization": zero2(offload_optimizer=CPU, reduce_scatter=True),
        **AUTO_BATCH,
    },
    "a start from log, which has an old name for bf16": {
        "optimizer": {"type": "adamw"},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_type": "log", "warmup_min_lr": 1e-6}},
        "bfloat16": {"enabled": True},
        "amp": {"enabled": False},
    },
    "another optimizer, and no ZeRO": {
        "optimizer": {"type": "Lamb", "params": {"max_coeff": 0.3, "freeze_step": 2}},
        "scheduler": {"type": "CosineAnnealingLR", "params": {"T_max": 5, "eta_min": 1e-5}},
        "zero_optimization": {"stage": 0, "overlap_comm": True, "reduce_bucket_size": 5e8},
        "max_grad_norm": 0.5,
    },
    "nothing but precision": {"fp16": {"enabled": True}, "zero_optimisation": {"stage": 2}},
    "both precisions": {**OPTIMIZER, "fp16": {"enabled": True}, "bf16": {"enabled": True}},
}


@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("name", USUAL)
def test_all_faults_of_a_json_are_named_at_once_and_the_advice_leads_to_one_that_resolves(
    name: str, last: bool
) -> None:
    config, overrides = copy.deepcopy(USUAL[name]), list[str]()
    found = faults(config, overrides)
    assert found
    for message in found:
        follow(config, overrides, message, last)
    assert faults(config, overrides) == []


OFF_OR_ON: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        {"zero_optimization.cpu_offload": True, "zero_optimization.stage": 1},
        {"zero_optimization.offload_optimizer": {"device": "cpu"}},
    ),
    ({"zero_optimization.offload_optimizer": None}, {"zero_optimization.offload_optimizer": None}),
    (
        {"zero_optimization.offload_optimizer.device": None, "zero_optimization.stage": 1},
        {"zero_optimization.offload_optimizer": {"device": "none"}},
    ),
    ({"zero_optimization.stage": False}, {"zero_optimization.stage": 0}),
    ({"zero_optimization.stage": 3}, {"zero_optimization.stage": 2}),
    ({"bfloat16": {"enabled": True}}, {"bf16": {"enabled": True}}),
    ({"fp16": None}, {"fp16": None}),
    ({"fp16.enabled": "False"}, {"fp16.enabled": False}),
    ({"fp16.enabled": "true", "zero_optimization.stage": 1}, {"fp16.enabled": True}),
    ({"compile": {"enabled": False}}, {"compile": False}),
    ({"optimizer.params.max_grad_norm": 0}, {"gradient_clipping": 0}),
    ({"optimizer.params.max_grad_norm": 2.5}, {"gradient_clipping": 2.5}),
    ({"optimizer.params.max_grad_norm": 2.5, "gradient_clipping": 1.0}, {"gradient_clipping": 1.0}),
    ({"tensorboard": {"enabled": True}}, {"tensorboard": None}),
    ({"optimizer.params.torch_adam": False, "optimizer.params.fused": False}, {"optimizer.params.fused": None}),
]


@pytest.mark.parametrize(("given", "meant"), OFF_OR_ON, ids=[json.dumps(given) for given, _ in OFF_OR_ON])
def test_a_switch_that_was_off_stays_off_and_one_that_was_on_stays_on(
    given: dict[str, Any], meant: dict[str, Any]
) -> None:
    config = copy.deepcopy(OPTIMIZER)
    for dotted, value in given.items():
        block, name = block_of(config, dotted)
        block[name] = value
    for last in (False, True):
        changed, overrides = copy.deepcopy(config), list[str]()
        found = faults(changed, overrides)
        assert len(found) == 1
        follow(changed, overrides, found[0], last)
        assert faults(changed, overrides) == []
        for dotted, value in meant.items():
            block, name = block_of(changed, dotted)
            assert block.get(name) == value, found


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"optimzer": {"type": "AdamW"}}, "optimzer is unknown; did you mean optimizer?"),
        ({"optimizer": {"type": "SGD"}}, 'optimizer.type = "SGD" should be "AdamW" or "Adam"'),
        ({**OPTIMIZER, "zero_optimization": {"stage": 3, "reduce_scatter": True}}, "zero_optimization.stage = 3"),
        ({**OPTIMIZER, "zero_optimisation": {"stage": 1}, "fp16": {"hysteresis": 2}}, "zero_optimisation is unknown"),
        (
            {
                **OPTIMIZER,
                "fp16": {"enabled": "yes"},
                "data_types": {"grad_accum_dtype": "fp32"},
                "zero_optimization": {"stage": 1},
            },
            "fp16.enabled",
        ),
        ({**OPTIMIZER, "schedular": {"type": "WarmupLR"}}, "schedular is unknown; did you mean scheduler?"),
    ],
)
def test_what_only_follows_from_a_fault_is_not_named(config: dict[str, Any], message: str) -> None:
    if "schedular" in config:
        config = {name: value for name, value in config.items() if name != "scheduler"}
    found = faults(config, ["optimizer.warmup_images=0"] if "schedular" not in config else [])
    assert len(found) == 1 and found[0].startswith(message)


def test_a_misspelt_key_does_not_hide_a_fault_of_the_right_one() -> None:
    config = {**OPTIMIZER, "train_batchsize": 3, "train_batch_size": "many"}
    assert [message.split()[0] for message in faults(config, [])] == ["train_batchsize", "train_batch_size"]


@pytest.mark.parametrize(
    ("dotted", "meant"),
    [
        *((name, key) for name, key in JSON_SYNONYMS.items()),
        *((f"pipeline.{name}", key) for name, key in JSON_SYNONYMS.items()),
        ("fp16.enable", "fp16.enabled"),
        ("lr", "optimizer.params.lr"),
        ("fp16.type", None),  # optimizer and scheduler have one, which is of no use here
        ("fp16.params", None),
        ("pipeline.pipeline_num_layers", None),
    ],
)
def test_an_unknown_key_of_the_json_is_answered_with_a_key_that_it_may_be(dotted: str, meant: str | None) -> None:
    config = copy.deepcopy(OPTIMIZER)
    block, name = block_of(config, dotted)
    block[name] = 1
    with pytest.raises(DsConfigError) as caught:
        check_ds_config(config, PATH)
    assert meant is None or meant in KEYS
    end = "remove it" if meant is None else f"did you mean {meant}?"
    assert str(caught.value).startswith(f"x.json: {dotted} is unknown") and str(caught.value).endswith(end)


def spec_faults(*overrides: str) -> list[str]:
    with pytest.raises(SpecError) as caught:
        load_spec(DEFAULT_SPEC, overrides)
    return str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("dotted", "meant"),
    [
        *((name, key) for name, key in SYNONYMS.items()),
        *((f"train.{name}", key) for name, key in SYNONYMS.items() if "." not in name),
        ("data.channel", "data.channels"),
        ("ema.half_life", "ema.halflife_images"),
        ("channels", "data.channels or data.condition.channels or unet.channels"),
        ("sampler.step", "sampler.steps"),
        ("train.dropout", "unet.dropout"),
    ],
)
def test_an_unknown_key_of_the_spec_is_answered_with_a_key_that_it_may_be(dotted: str, meant: str) -> None:
    for key in meant.partition(" (")[0].split(" or "):
        model: Any = RunSpec
        for name in key.split("."):
            kind = model.model_fields[name].annotation
            model = next(iter(get_args(kind)), kind) if name == "condition" else kind  # may be null
    (message,) = spec_faults(f"{dotted}=1")
    assert message == f"--set {dotted}=1: {dotted} is unknown; did you mean {meant}?"


def test_all_faults_of_a_spec_are_named_at_once(tmp_path: Path) -> None:
    wrong = ["unet.chanels=8", "unet.dropout=2", "train.seed=x", "model.width=3", "nothing"]
    lines = spec_faults(*wrong)
    assert len(lines) == len(wrong) and all(any(f"--set {item}:" in line for line in lines) for item in wrong)
    unfit = ["data.channels=2", "train.accumulation=3", "unet.norm_groups=5", "sampler.eta=1", "train.label_drop=0.1"]
    keys = ["data.channels", "train.batch_images", "unet.norm_groups", "sampler.eta", "train.label_drop"]
    lines = spec_faults(*unfit)
    assert len(lines) == len(keys) and all(any(f": {key} = " in line for line in lines) for key in keys)
    path = tmp_path / "short.yaml"
    path.write_text(DEFAULT_SPEC.read_text().replace("image_size: 8", "image_siez: 8"))
    with pytest.raises(SpecError) as caught:
        load_spec(path)
    assert str(caught.value) == f"{path}: data.image_siez is unknown; did you mean data.image_size?"
    assert len(spec_faults(*(f"unet.a{number}=1" for number in range(3 * MOST_FAULTS)))) == MOST_FAULTS


@pytest.mark.parametrize(
    ("wrong", "advice"),
    [
        (["data.crop_from=4"], ["data.crop_from=null"]),
        (["data.autoencoder=x", "sampler.clip=none", "data.crop_from=16"], ["data.crop_from=null"]),
        (["diffusion.schedule=edm"], ["diffusion.objective=v"]),
        (["diffusion.zero_terminal_snr=true"], ["diffusion.objective=v"]),
        (["sampler.eta=1"], ["sampler.eta=0"]),
        (["optimizer.decay=inverse_sqrt"], ["optimizer.decay=null"]),
        (["train.accumulation=3"], ["train.accumulation=auto"]),
        (["train.label_drop=0.1"], ["train.label_drop=0"]),
        (["samples.count=10000", "data.image_size=128", "unet.attention_resolutions=[]"], ["samples.count=4096"]),
    ],
)
def test_advice_about_a_spec_leads_to_one_that_loads(wrong: list[str], advice: list[str]) -> None:
    (message,) = spec_faults(*wrong)
    for item in advice:
        key, _, value = item.partition("=")
        assert key.rpartition(".")[2] in message and value in message
    load_spec(DEFAULT_SPEC, [*wrong, *advice])


JSON = {**OPTIMIZER, "train_micro_batch_size_per_gpu": 64, "gradient_accumulation_steps": 1}
PICTURES = "prepare --spec digits --set data.source=folder --set data.channels=3 "
NUMBERS = "prepare --spec digits --set data.source=hdf5 --set data.path=f.h5 "
FIELDS = f"{NUMBERS} --set data.values=float32 --set sampler.clip=none --set data.variables=[t] "
DRY = "train --dry-run --deepspeed_config zero0_fp32 --processes 2 "
DRAW = "sample run --count 1 --steps 2 --device cpu --overwrite --out new.npz "
LEADS_ON = [
    ("prepare", ""),
    ("plan --spec digits --processes 1", ""),
    ("train --dry-run", ""),
    ("train --dry-run --deepspeed_config json --processes 2 -p 1", ""),
    ("train --dry-run --deepspeed_config zero0_fp32 --processes 3 -p 1", ""),
    ("train --dry-run --deepspeed_config zero0_fp32 --processes 2 --set ds.pipeline.tensor.size=3", ""),
    (PICTURES, ""),
    ("prepare --spec digits --set data.store_root=f.h5", ""),
    (NUMBERS, "--set data.values=float32"),
    (f"{NUMBERS} --set data.variables=[t]", "sampler.clip = static"),
    (f"{FIELDS} --set data.variables=[]", ""),
    (f"{FIELDS} --set data.variables=[t,t2]", ""),
    (f"{FIELDS} --set data.image_size=16 --set unet.attention_resolutions=[]", ""),
    (f"{FIELDS} --set data.path=none.h5", "pictures"),
    (f"{DRY} --set ds.zero_optimization.stage=1 --set ds.zero_optimization.offload_optimizer.pin_memory=true", ""),
    (f"""{DRY} --set 'ds.pipeline.tensor={{"size": 2, "layers": ["nothing"]}}'""", ""),
    (f"""{DRY} --set 'ds.pipeline.tensor={{"size": 2, "layers": ["embed"]}}'""", ""),
    ("train --dry-run --deepspeed_config zero0_fp32 --nodes 2 --processes 1", "--run-dir DIR"),
    (f"{DRAW} --prompt x", ""),
    (f"{DRAW} --labels 1", ""),
    (f"{DRAW} --variance small", ""),
    ("sample run --count 1 --steps 2 --out old.npz", ""),
    ("sample damaged", ""),
    ("evaluate run --members 4", "--dataset DIR"),
    ("evaluate run --metrics loss --count 30", "held out no image"),
]
"""Commands that are refused, and how one that obeys is refused for another reason; "" if it ends well."""
FILLED = {"FOLDER": "pictures", "FILE": "pictures", "[NAME,...]": "[t]", "HOST": "localhost", "RUN_DIR": "run"}
WAY = re.compile(r"--[\w-]+(?: (?!to |or |of |and )(?:'[^']*'|\S*\[[^]]*\]|[^\s,;'-][^\s,;]*))?")


def ways_out(command: str, said: str) -> list[str]:
    """Commands that do what a refusal says, each in one of its ways."""
    found = []
    for way in re.split(r",? or ", said.rpartition("; ")[2]):
        if own := re.search(r"ddpm-ds (\w+ [^`;)]+)", way.removeprefix("ddpm-ds: error: ")):
            found.append(own[1])
        elif "leave it out" in way:
            found.append(re.sub(re.escape(said.split()[2].rstrip(":")) + r" \S+", "", command))
        elif options := WAY.findall(way):
            found.append(f"{command} {' '.join(options)}")
    for placeholder, value in FILLED.items():
        found = [way.replace(placeholder, value) for way in found]
    return found


@pytest.mark.parametrize(("command", "then"), LEADS_ON, ids=[command for command, _ in LEADS_ON])
def test_each_way_out_of_a_refusal_leads_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str, then: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    (tmp_path / "pictures").mkdir()
    Image.new("RGB", (8, 8)).save("pictures/1.png")
    with h5py.File("f.h5", "w") as file:
        file["t"], file["t2"] = np.random.default_rng(0).normal(size=(2, 20, 8, 8))
    plant(tmp_path / "run", **UNLABELLED)
    plant(tmp_path / "damaged")
    for manifest in (tmp_path / "damaged").rglob("manifest.json"):
        manifest.write_text("{")
    (tmp_path / "old.npz").touch()
    (tmp_path / "json").write_text(json.dumps(JSON))
    assert main(shlex.split(command)) == 2
    said = capsys.readouterr().err.strip()
    ways = ways_out(command, said)
    assert ways, said
    for way in ways:
        ended = main(shlex.split(way))
        assert (ended, then in capsys.readouterr().err) == (2 if then else 0, True), (said, way)
