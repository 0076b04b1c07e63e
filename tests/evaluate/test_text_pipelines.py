"""Pipelines of Stable Diffusion and SDXL: import from folders and single files, and export of what diffusers opens."""

from __future__ import annotations

import functools
import json
import re
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from make_text import write_encoders
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ddpm_ds.cli.main import main
from ddpm_ds.config.spec import RunSpec
from ddpm_ds.config.spec_file import load_spec
from ddpm_ds.data.latents import Autoencoder
from ddpm_ds.data.text import TextEncoders
from ddpm_ds.diffusion.spec import SamplerSpec
from ddpm_ds.evaluate.diffusers.unet import original_names, to_diffusers
from ddpm_ds.evaluate.diffusers.unet_config import unet_spec_from_diffusers
from ddpm_ds.evaluate.sampling import sample
from ddpm_ds.evaluate.trained import load_trained
from ddpm_ds.ground.errors import SpecError, UserError
from ddpm_ds.unet.layers import unet_layers
from ddpm_ds.unet.model import UNet
from tests.autoencoders import save_autoencoder
from tests.evaluate.planted import FAST, plant_alone, refusal
from tests.evaluate.test_diffusers_unet import SD_15, SDXL
from tests.launching import tiny_spec
from tests.model_hub import ModelHub
from tests.unet.variants import randomise

diffusers = pytest.importorskip("diffusers", reason="diffusers, an optional extra, is not installed")
pytest.importorskip("transformers", reason="transformers, an optional extra, is not installed")

KINDS: dict[str, dict[str, Any]] = {
    "sd": {
        "block_out_channels": [32, 64],
        "attention_head_dim": 8,
        "cross_attention_dim": 32,
        "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
        "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
    },
    "sdxl": {
        "block_out_channels": [32, 64, 64],
        "attention_head_dim": [1, 1, 1],
        "cross_attention_dim": 80,
        "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
        "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
        "transformer_layers_per_block": [1, 1, 2],
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 24 + 6 * 256,
    },
}
SCHEDULER = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}


def write_pipeline_of(folder: Path, kind: str, shift_factor: float | None = 0.5) -> Path:
    """A pipeline with random weights, as ``save_pretrained`` writes one."""
    from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

    second = 48 if kind == "sdxl" else None
    write_encoders(folder, ["a", "red", "circle"], width=32, second=second, pooled=24)
    torch.manual_seed(0)
    unet = diffusers.UNet2DConditionModel(sample_size=8, layers_per_block=1, **KINDS[kind])
    randomise(unet, 0)
    sides = {"down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2}
    vae = diffusers.AutoencoderKL(**sides, block_out_channels=[8, 16], norm_num_groups=4, shift_factor=shift_factor)
    parts: dict[str, Any] = {"vae": vae, "unet": unet, "scheduler": diffusers.EulerDiscreteScheduler(**SCHEDULER)}
    parts["text_encoder"] = CLIPTextModel.from_pretrained(folder / "text_encoder")
    parts["tokenizer"] = CLIPTokenizer.from_pretrained(folder / "tokenizer")
    if second is None:
        none = dict.fromkeys(("safety_checker", "feature_extractor"))
        pipeline = diffusers.StableDiffusionPipeline(**parts, **none, requires_safety_checker=False)
    else:
        parts["text_encoder_2"] = CLIPTextModelWithProjection.from_pretrained(folder / "text_encoder_2")
        parts["tokenizer_2"] = CLIPTokenizer.from_pretrained(folder / "tokenizer_2")
        pipeline = diffusers.StableDiffusionXLPipeline(**parts, add_watermarker=False)
    pipeline.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=KINDS)
def pipeline(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pipeline_of(tmp_path_factory.mktemp("pipelines") / request.param, request.param)


def base_spec(folder: Path, **data: Any) -> Path:
    """A base without a U-Net for text, as a user has it."""
    spec = tiny_spec(unet={"classes": None}, train={"label_drop": 0.0}).model_dump(mode="json", exclude_defaults=True)
    spec["data"] = {"source": "folder", "path": "pictures", "image_size": 16, "channels": 4, **data}
    spec["sampler"] = {"clip": "none"}
    path = folder / "base.yaml"
    path.write_text(yaml.safe_dump(spec))
    return path


def import_words(path: Path, base: Path, out: Path, *changes: str) -> list[str]:
    """The command that imports a model, with ``--set`` before each of the ``changes``."""
    sets = [word for change in changes for word in ("--set", change)]
    return ["import", str(path), "--spec", str(base), "--out", str(out), *sets]


def import_of(path: Path, base: Path, out: Path, *changes: str) -> tuple[RunSpec, dict[str, torch.Tensor]]:
    assert main(import_words(path, base, out, *changes)) == 0
    return load_spec(out / "spec.yaml"), load_file(out / "weights.safetensors")


ANY_ENCODERS = "data.text.encoders=x"
"""Names encoders where the model has none."""


def test_a_pipeline_becomes_a_spec_with_its_text_its_noise_and_its_weights(pipeline: Path, tmp_path: Path) -> None:
    spec, weights = import_of(pipeline, base_spec(tmp_path, autoencoder=str(pipeline / "vae")), tmp_path / "out")
    is_xl = (pipeline / "text_encoder_2").is_dir()
    assert spec.unet.text is not None and spec.data.text is not None
    assert spec.data.text.encoders == str(pipeline.resolve())
    assert (spec.data.text.layer, spec.data.text.drop_to) == (("penultimate", "zeros") if is_xl else ("last", "empty"))
    assert spec.unet.text.pooled_channels == (24 if is_xl else None)
    assert spec.data.size == (16, 16), "latents of any size are drawn"
    assert (spec.diffusion.schedule, spec.diffusion.beta_start) == ("scaled_linear", 0.00085)
    layers = unet_layers(spec.unet, spec.data.interface)
    theirs = load_file(pipeline / "unet" / "diffusion_pytorch_model.safetensors")
    back = to_diffusers(weights, layers, linear_projection=is_xl)
    assert back.keys() == theirs.keys() and all(torch.equal(back[name], theirs[name]) for name in theirs)


def test_the_base_keeps_its_comments_and_the_pipeline_its_autoencoder(
    pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, out = tmp_path / "base.yaml", tmp_path / "my out"
    lines = ["# mine", "name: cats", "", "data:                # about data", "  source: folder     # of pictures"]
    lines += [
        "  path: pictures",
        "  image_size: 16  # latents",
        "  channels: 4",
        "",
        "unet:",
        "  channels: 32      # wide",
    ]
    lines += ["  multipliers:", "    - 1", "    - 1  # twice", "  norm_groups: 8", "# rates", "optimizer:"]
    lines += ["  learning_rate: 1e-4", "train: {images: 64, batch_images: 8}", "sampler:", "  clip: none  # latents"]
    base.write_text("\n".join([*lines, "logging:", "  log_every_images: 8"]))
    spec = import_of(pipeline, base, out, "optimizer.learning_rate=2e-5")[0]
    assert spec.data.autoencoder == pipeline.resolve() / "vae"
    text = (out / "spec.yaml").read_text()
    for line in (
        *lines[:10],
        "# rates",
        "  learning_rate: 2.0e-05",
        "  clip: none  # latents",
        "  log_every_images: 8",
    ):
        assert f"\n{line}\n" in f"\n{text}\n", line
    assert "- 1  # twice" not in text and "multipliers: [" in text and "# wide" in text
    assert "beta_end" in text and "ema" not in text and "timesteps" not in text and len(text.splitlines()) < 60
    *_, encode, _, train = capsys.readouterr().out.splitlines()
    assert encode.strip() == f"ddpm-ds prepare --encode --spec '{out}/spec.yaml'"
    assert train.strip().endswith(f"ds_configs/zero2_bf16.json --spec '{out}/spec.yaml'")

    other = shutil.copytree(pipeline / "vae", tmp_path / "other")
    base.write_text(base.read_text().replace("  path:", f"  autoencoder: {other}\n  path:"))
    assert import_of(pipeline, base, tmp_path / "named")[0].data.autoencoder == other
    assert f"data.autoencoder is {other}; its own is {pipeline.resolve()}/vae" in capsys.readouterr().out


@pytest.mark.parametrize("width", [16, 2])
def test_latents_of_another_width_begin_anew_beside_those_that_both_have(
    pipeline: Path, width: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_autoencoder(tmp_path / "vae", latent_channels=width)
    base = base_spec(tmp_path, autoencoder=str(tmp_path / "vae"), channels=width)
    spec, weights = import_of(pipeline, base, tmp_path / "out")
    keep = min(width, 4)
    said = f"its latents have 4 channels, and data.channels is {width}: conv_in and conv_out keep {keep} channels, and"
    assert said in capsys.readouterr().out
    layers = unet_layers(spec.unet, spec.data.interface)
    assert spec.unet.text is not None
    found = to_diffusers(weights, layers, linear_projection=spec.unet.text.linear_projection)
    theirs = load_file(pipeline / "unet" / "diffusion_pytorch_model.safetensors")
    for name, tensor in theirs.items():
        if name == "conv_in.weight":
            assert found[name].shape[:2] == (len(tensor), width)
            assert torch.equal(found[name][:, :keep], tensor[:, :keep]) and not found[name][:, keep:].any()
        elif name.startswith("conv_out."):
            assert len(found[name]) == width
            assert torch.equal(found[name][:keep], tensor[:keep]) and not found[name][keep:].any()
        else:
            assert torch.equal(found[name], tensor)
    UNet(layers, 0).layers.load_state_dict(weights)
    base = base_spec(tmp_path, autoencoder=str(pipeline / "vae"), channels=width)
    line = refusal(capsys, *import_words(pipeline, base, tmp_path / "no"))
    assert f"data.channels = {width}, but the latents of data.autoencoder = {pipeline / 'vae'} have 4" in line


@pytest.mark.parametrize("pipeline", ["sd"], indirect=True)
def test_shards_and_fp16_variants_give_the_same_weights(
    pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = base_spec(tmp_path, autoencoder=str(pipeline / "vae"))
    _, whole = import_of(pipeline, base, tmp_path / "whole")
    unet = diffusers.UNet2DConditionModel.from_pretrained(pipeline / "unet")
    unet.save_pretrained(tmp_path / "shards" / "unet", max_shard_size="200KB")
    assert len(list((tmp_path / "shards" / "unet").glob("*-of-*.safetensors"))) > 1
    for name, options in (("half", {}), ("half shards", {"max_shard_size": "100KB"})):
        unet.half().save_pretrained(tmp_path / name, variant="fp16", **options)
    for name in ("shards", "half", "half shards"):
        _, found = import_of(tmp_path / name, base, tmp_path / f"of {name}", ANY_ENCODERS)
        for key, tensor in whole.items():
            assert torch.equal(found[key], tensor if name == "shards" else tensor.half().float())
    index = tmp_path / "shards" / "unet" / "diffusion_pytorch_model.safetensors.index.json"
    shutil.copyfile(next(index.parent.glob("*.safetensors")), tmp_path / "shards" / "other.safetensors")
    index.write_text(json.dumps({"weight_map": {"conv_in.weight": "../other.safetensors"}}))
    line = refusal(capsys, *import_words(tmp_path / "shards", base, tmp_path / "no", ANY_ENCODERS))
    assert "index.json is damaged: it should map names of tensors to files beside it" in line


def test_original_names_are_those_of_published_files() -> None:
    for config, count, names in (
        (SD_15, 686, ("input_blocks.3.0.op.weight", "output_blocks.2.1.conv.weight", "output_blocks.5.2.conv.bias")),
        (SDXL, 1680, ("output_blocks.2.2.conv.weight", "label_emb.0.2.bias", "output_blocks.8.0.out_layers.3.weight")),
    ):
        found = set(original_names(unet_layers(*unet_spec_from_diffusers(config))).values())
        assert len(found) == count and {f"model.diffusion_model.{name}" for name in names} <= found


SINGLE: dict[str, dict[str, Any]] = {
    "SD 1.5": {"block_out_channels": [32, 64, 64, 64], "attention_head_dim": 8, "cross_attention_dim": 768},
    "SD 2.1": {
        "block_out_channels": [64, 128, 128, 128],
        "attention_head_dim": [1, 2, 2, 2],
        "cross_attention_dim": 1024,
        "use_linear_projection": True,
    },
    "SDXL": {**KINDS["sdxl"], "block_out_channels": [64, 64, 128], "attention_head_dim": [1, 1, 2]},
}


@pytest.mark.parametrize("kind", SINGLE)
def test_a_single_file_has_its_kind_found_and_its_weights_by_name(kind: str, tmp_path: Path) -> None:
    """Read by diffusers under its own translation of the original names."""
    unet = diffusers.UNet2DConditionModel(sample_size=8, layers_per_block=1, **SINGLE[kind])
    unet.save_pretrained(tmp_path / "unet")
    base = base_spec(tmp_path, autoencoder="vae")
    spec, weights = import_of(tmp_path, base, tmp_path / "out", ANY_ENCODERS)
    layers = unet_layers(spec.unet, spec.data.interface)
    state = unet.state_dict()
    originals = {original: state[name] for name, original in original_names(layers).items()}
    path = tmp_path / "single.safetensors"
    more = {"v_pred": torch.zeros(0)} if "2" in kind else {}
    save_file({**originals, "model_ema.decay": torch.zeros(()), **more}, path)
    again, same = import_of(path, base, tmp_path / "again", ANY_ENCODERS)
    assert spec.unet.text is not None and again.unet.text is not None and again.data.text is not None
    wanted = ("penultimate", "zeros") if kind == "SDXL" else ("last", "empty")
    assert (again.data.text.layer, again.data.text.drop_to) == wanted
    changed = {"upcast_attention": kind == "SD 2.1"}
    assert again.unet == spec.unet.model_copy(update={"text": spec.unet.text.model_copy(update=changed)})
    assert same.keys() == weights.keys() and all(torch.equal(same[name], weights[name]) for name in weights)
    assert again.diffusion.schedule == "scaled_linear" and again.diffusion.objective == ("v" if "2" in kind else "eps")

    theirs = diffusers.UNet2DConditionModel.from_single_file(
        str(path), config=str(tmp_path), subfolder="unet", local_files_only=True, low_cpu_mem_usage=False
    )
    assert all(torch.equal(tensor, state[name]) for name, tensor in theirs.state_dict().items())


@pytest.fixture(scope="module")
def originals() -> dict[str, torch.Tensor]:
    """Tensors of a small single file."""
    unet = diffusers.UNet2DConditionModel(sample_size=8, layers_per_block=1, **SINGLE["SD 1.5"])
    config = {"_class_name": type(unet).__name__, "sample_size": 8, "layers_per_block": 1, **SINGLE["SD 1.5"]}
    state = unet.state_dict()
    names = original_names(unet_layers(*unet_spec_from_diffusers(config)))
    return {original: state[name].clone() for name, original in names.items()}


V_SET = "--set diffusion.objective=v"
SAID: dict[str, tuple[list[str], dict[str, str], list[str], tuple[str, bool] | str]] = {
    "nothing": ([], {}, [], ("eps", False)),
    "typed": ([], {}, ["diffusion.objective=v", "diffusion.zero_terminal_snr=true"], ("v", True)),
    "key": (["v_pred"], {}, [], ("v", False)),
    "keys": (["v_pred", "ztsnr"], {}, [], ("v", True)),
    "modelspec v": ([], {"modelspec.prediction_type": "v"}, [], ("v", False)),
    "modelspec eps": ([], {"modelspec.prediction_type": "epsilon"}, [], ("eps", False)),
    "predict_key": ([], {"modelspec.predict_key": "v"}, [], ("v", False)),
    "sd-scripts": ([], {"ss_v_parameterization": "True", "ss_zero_terminal_snr": "True"}, [], ("v", True)),
    "typed against it": ([], {"modelspec.prediction_type": "epsilon"}, ["diffusion.objective=v"], ("v", False)),
    "typed with it": (["ztsnr"], {}, ["diffusion.objective=v"], ("v", True)),
    "only zero SNR": (["ztsnr"], {}, [], f"ztsnr: the last timestep is pure noise, of which .*; {V_SET}"),
    "zero SNR of eps": ([], {"ss_zero_terminal_snr": "True"}, [], f"ss_zero_terminal_snr = True: .*; {V_SET}"),
    "two": (["v_pred"], {"modelspec.prediction_type": "epsilon"}, [], "v_pred and modelspec.prediction_type ="),
    "another": ([], {"modelspec.prediction_type": "x"}, [], 'modelspec.prediction_type = "x": it should be epsilon'),
    "EDM": (["edm_mean", "edm_std"], {}, [], "edm_mean: its noise is EDM's for edm_mean, edm_std"),
    "EDM v": (["edm_vpred.sigma_max"], {}, [], "edm_vpred.sigma_max: its noise is EDM's"),
}


@pytest.mark.parametrize("case", SAID)
def test_what_a_single_file_says_of_its_noise_is_read(
    case: str, originals: dict[str, torch.Tensor], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys, metadata, typed, expected = SAID[case]
    path, base = tmp_path / "single.safetensors", base_spec(tmp_path, autoencoder="vae")
    save_file(originals | {key: torch.zeros(4) for key in keys}, path, metadata=metadata)
    if isinstance(expected, str):
        line = refusal(capsys, *import_words(path, base, tmp_path / "out", ANY_ENCODERS, *typed))
        assert re.search(expected, line) and str(path) in line
        return
    spec, _ = import_of(path, base, tmp_path / "out", ANY_ENCODERS, *typed)
    assert (spec.diffusion.objective, spec.diffusion.zero_terminal_snr) == expected
    assert ("does not name its objective" in capsys.readouterr().out) == (case == "nothing")


PLACES: dict[str, tuple[Callable[[str], str], list[str], str]] = {
    "bare": (lambda name: name.removeprefix("model.diffusion_model."), [], ""),
    "ComfyUI's": (lambda name: name.removeprefix("model."), [], ""),
    "averaged beside": (lambda name: name, ["model_ema.diffusion_modelinput_blocks00weight"], "also holds averaged w"),
    "ControlNet": (
        lambda name: name.replace("model.diffusion", "a"),
        ["zero_convs.0.0.weight"],
        "it holds a ControlNet",
    ),
    "two": (lambda name: name.replace("model.diffusion", "a"), ["b.input_blocks.0.0.weight"], "it holds several"),
    "diffusers'": (lambda name: "down_blocks." + name.rpartition(".")[2], ["conv_in.weight"], "has diffusers' names"),
    "LoRA": (lambda name: "lora", [], "a LoRA, an autoencoder and a text encoder are none"),
}


@pytest.mark.parametrize("case", PLACES)
def test_a_unet_is_found_wherever_a_single_file_has_it(
    case: str, originals: dict[str, torch.Tensor], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named, more, printed = PLACES[case]
    path, base = tmp_path / "single.safetensors", base_spec(tmp_path, autoencoder="vae")
    found = {named(name): tensor.clone() for name, tensor in originals.items()}
    save_file(found | dict.fromkeys(more, torch.zeros(4)), path)
    words = import_words(path, base, tmp_path / "out", ANY_ENCODERS)
    if case in ("bare", "ComfyUI's", "averaged beside"):
        assert main(words) == 0 and printed in capsys.readouterr().out
    else:
        assert printed in refusal(capsys, *words)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"force_zeros_for_empty_prompt": ...}, "zeros"),
        ({"force_zeros_for_empty_prompt": False}, "empty"),
        ({"force_zeros_for_empty_prompt": "no"}, 'force_zeros_for_empty_prompt = "no"'),
        ({"use_full_z_range": True}, "use_full_z_range = true: no such setting of a pipeline is known here"),
    ],
)
@pytest.mark.parametrize("pipeline", ["sdxl"], indirect=True)
def test_a_key_of_a_pipeline_that_is_missing_means_what_it_means_to_diffusers(
    pipeline: Path, tmp_path: Path, change: dict[str, Any], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(pipeline, tmp_path / "copy")
    shutil.copytree(copy / "unet", copy / "unet_ema")
    values = json.loads((copy / "model_index.json").read_text()) | change
    (copy / "model_index.json").write_text(json.dumps({key: each for key, each in values.items() if each is not ...}))
    base = base_spec(tmp_path, autoencoder=str(copy / "vae"))
    if expected not in ("zeros", "empty"):
        assert expected in refusal(capsys, *import_words(copy, base, tmp_path / "out"))
        return
    text = import_of(copy, base, tmp_path / "out")[0].data.text
    assert text is not None and text.drop_to == expected
    assert "for the averaged weights beside it name" in capsys.readouterr().out
    typed, _ = import_of(copy, base, tmp_path / "typed", "data.text.drop_to=empty")
    assert typed.data.text is not None and typed.data.text.drop_to == "empty", "what was typed counts"


def test_a_message_names_only_typed_options(pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = base_spec(tmp_path, autoencoder=str(pipeline / "vae"))
    line = refusal(capsys, *import_words(pipeline, base, tmp_path / "out", "sampler.clip=static"))
    assert "--set sampler.clip=static" in line and "unet." not in line


EPS = {"schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
NOISE: dict[str, dict[str, Any]] = {
    "eps": EPS,
    "v": {**EPS, "objective": "v", "zero_terminal_snr": True},
    "flow": {"schedule": "flow", "objective": "velocity", "shift": 3.0},
}
OPENED = {"sd": diffusers.StableDiffusionPipeline, "sdxl": diffusers.StableDiffusionXLPipeline}


@functools.cache
def imported_spec(pipeline: Path) -> RunSpec:
    """The spec that a pipeline becomes."""
    (folder := pipeline.parent / f"import of {pipeline.name}").mkdir()
    return import_of(pipeline, base_spec(folder, autoencoder=str(pipeline / "vae")), folder / "out")[0]


def checkpoint_of(
    pipeline: Path,
    folder: Path,
    noise: str,
    learned: dict[str, str] | None = None,
    condition: dict[str, Any] | None = None,
    **text: Any,
) -> Path:
    """A checkpoint of a run that began with a pipeline, and has other weights and keys of ``data.text`` since."""
    values = imported_spec(pipeline).model_dump(mode="json")
    values["diffusion"] |= NOISE[noise]
    values["data"]["text"] |= text
    values["data"]["condition"] = condition
    values["train"]["initial_weights"] = None
    spec = RunSpec.model_validate_json(json.dumps(values))
    unet = UNet(unet_layers(spec.unet, spec.data.interface), 0)
    randomise(unet, 7)
    sections: dict[str, Any] = {key: value for key, value in values.items() if isinstance(value, dict)}
    known = {"autoencoder": Autoencoder.open(pipeline / "vae").digest, **(learned or {})}
    return plant_alone(folder, data_sha256=known, unets={"ema": unet}, spec_as=values, **sections)


@pytest.mark.parametrize(("pipeline", "noise"), [("sd", "eps"), ("sd", "v"), ("sdxl", "flow")], indirect=["pipeline"])
def test_an_exported_pipeline_draws_what_the_run_draws_and_is_imported_again(
    pipeline: Path, tmp_path: Path, noise: str
) -> None:
    """Its own encoders make the prompts, and what guidance leads away from, and its autoencoder decodes."""
    checkpoint, hub = checkpoint_of(pipeline, tmp_path, noise), tmp_path / "hub"
    assert main(["export", str(checkpoint), str(hub)]) == 0
    opened = OPENED[pipeline.name].from_pretrained(hub)
    images = opened("a red circle", height=16, width=16, num_inference_steps=3, output_type="np").images
    assert images.shape == (1, 16, 16, 3) and not (images != images).any()
    scheduler = opened.scheduler.config
    name, predicts, spacing = {
        "eps": ("DDIMScheduler", "epsilon", "leading"),
        "v": ("DDIMScheduler", "v_prediction", "trailing"),
        "flow": ("DPMSolverMultistepScheduler", "flow_prediction", scheduler.timestep_spacing),
    }[noise]
    assert (type(opened.scheduler).__name__, scheduler.prediction_type) == (name, predicts)
    assert scheduler.timestep_spacing == spacing and scheduler.get("rescale_betas_zero_snr", False) == (noise == "v")
    if pipeline.name == "sdxl":
        assert opened.config.force_zeros_for_empty_prompt is True
    assert "text-to-image" in (hub / "README.md").read_text()

    again, weights = import_of(hub, base_spec(tmp_path, autoencoder=str(hub / "vae")), tmp_path / "again")
    run, exported = load_trained(checkpoint), load_trained(hub)
    assert again.diffusion.process_values() == run.diffusion.process_values()
    assert scheduler.get("flow_shift", 1.0) == (again.sampler.shift or 1.0) == (3.0 if noise == "flow" else 1.0)
    assert all(torch.equal(weights[name], tensor) for name, tensor in run.unet.layers.state_dict().items())

    sampler = SamplerSpec(kind="ddim", steps=3, guidance=3.0, clip="none", shift=again.sampler.shift)
    drawn = [sample(each, 2, sampler=sampler, prompts=["a red circle", "a"]) for each in (run, exported)]
    assert drawn[0].shape == (2, 3, 32, 32) and (drawn[0].int() - drawn[1].int()).abs().max() <= 1
    with pytest.raises(SpecError, match=r"draws multiples of [48] pixels; use 40x32$"):
        exported.resized((38, 30))
    assert sample(exported.resized((40, 24)), 1, sampler=sampler, prompts="a").shape == (1, 3, 40, 24)
    other = sample(exported, 2, sampler=sampler, prompts=["a red circle", "red red"])
    assert (other[1].int() - drawn[1][1].int()).abs().max() > 5
    shutil.rmtree(checkpoint)
    out = tmp_path / "images.npz"
    words = ["--prompt", "a red circle", "--prompt", "a", *FAST, "--eta", "0", "--guidance", "3", "--clip", "none"]
    assert main(["sample", str(hub), *words, "--out", str(out)]) == 0
    found = torch.from_numpy(np.load(out)["arr_0"]).permute(0, 3, 1, 2)
    assert torch.equal(found, drawn[1])


@pytest.mark.parametrize("pipeline", ["sdxl"], indirect=True)
def test_an_export_of_a_run_with_long_captions_says_what_other_programs_read_of_a_prompt(
    pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = base_spec(tmp_path, autoencoder=str(pipeline / "vae"))
    spec, _ = import_of(pipeline, base, tmp_path / "out", "data.text.tokens=227")
    assert spec.unet.text is not None and spec.unet.text.tokens == 227, "no weight depends on it"
    for tokens, note in (
        (None, ""),
        (77, ""),
        (152, "captions had 152 tokens: ComfyUI and A1111 draw with 154, "),
        (227, "ComfyUI and A1111 draw with 231, whole chunks, and diffusers' pipelines cut"),
    ):
        checkpoint = checkpoint_of(pipeline, tmp_path / str(tokens), "eps", tokens=tokens)
        capsys.readouterr()
        assert main(["export", str(checkpoint), str(tmp_path / f"hub {tokens}"), "--samples", "0"]) == 0
        out = capsys.readouterr().out
        assert (note in out) if note else "captions had" not in out


@pytest.mark.parametrize(("pipeline", "dtype"), [("sd", "fp16"), ("sdxl", "fp32")], indirect=["pipeline"])
def test_a_single_file_is_the_pipeline_for_diffusers(pipeline: Path, tmp_path: Path, dtype: str) -> None:
    checkpoint = checkpoint_of(pipeline, tmp_path, "eps")
    assert main(["export", str(checkpoint), str(tmp_path / "mine"), "--single-file", "--dtype", dtype]) == 0
    assert main(["export", str(checkpoint), str(tmp_path / "hub"), "--dtype", dtype]) == 0
    file = tmp_path / "mine" / "mine.safetensors"
    assert sorted(path.name for path in file.parent.iterdir()) == ["README.md", "mine.safetensors"]
    alone = tmp_path / "new" / "alone.safetensors"
    assert main(["export", str(checkpoint), "--out", str(alone), "--dtype", dtype]) == 0
    there, here = load_file(alone), load_file(file)
    assert there.keys() == here.keys() and all(torch.equal(there[name], here[name]) for name in here)
    assert [*alone.parent.iterdir()] == [alone]
    with safe_open(file, "pt") as opened:
        said = opened.metadata()
    is_xl, date = pipeline.name == "sdxl", said.pop("modelspec.date")
    assert abs((datetime.now(UTC).date() - datetime.fromisoformat(date).date()).days) <= 1
    assert said == {
        **{"format": "pt", "modelspec.sai_model_spec": "1.0.1", "modelspec.implementation": "diffusers"},
        "modelspec.architecture": "stable-diffusion-xl-v1-base" if is_xl else "stable-diffusion-v1",
        **{"modelspec.title": "tiny", "modelspec.resolution": "32x32", "modelspec.prediction_type": "epsilon"},
        **{"modelspec.timestep_range": "0,1000", "modelspec.encoder_layer": "2" if is_xl else "1"},
    }
    kind = OPENED[pipeline.name]
    local = {"local_files_only": True, "low_cpu_mem_usage": False}
    read = kind.from_single_file(str(file), config=str(tmp_path / "hub"), torch_dtype=torch.float32, **local)
    whole = kind.from_pretrained(tmp_path / "hub", **local)
    for part in ("unet", "vae", "text_encoder", *(["text_encoder_2"] if pipeline.name == "sdxl" else [])):
        mine, theirs = getattr(read, part).state_dict(), getattr(whole, part).state_dict()
        assert mine.keys() == theirs.keys(), part
        for name, tensor in theirs.items():
            stored = tensor.half().float() if dtype == "fp16" and tensor.is_floating_point() else tensor
            assert torch.equal(mine[name], stored), (part, name)


@pytest.mark.parametrize("pipeline", ["sdxl"], indirect=True)
def test_export_and_card_say_how_other_programs_learn_of_flow_matching(
    pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = checkpoint_of(pipeline, tmp_path, "flow")
    assert main(["export", str(checkpoint), str(tmp_path / "mine"), "--single-file"]) == 0
    for text in (capsys.readouterr().out, (tmp_path / "mine" / "README.md").read_text()):
        assert "nothing in it says flow: ComfyUI needs the node ModelSamplingSD3 with shift 3, others" in text


def test_what_neither_a_pipeline_nor_a_single_file_can_be_is_refused(
    pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = "last" if pipeline.name == "sdxl" else "penultimate"
    checkpoint = checkpoint_of(pipeline, tmp_path / "text", "eps", layer=other)
    line = refusal(capsys, "export", checkpoint, tmp_path / "hub")
    assert f"data.text.layer is {other}, and a pipeline's" in line
    mine = shutil.copytree(pipeline, tmp_path / "pipeline")
    changed = json.loads((mine / "unet" / "config.json").read_text()) | {"norm_num_groups": 8}
    (mine / "unet" / "config.json").write_text(json.dumps(changed))
    checkpoint = checkpoint_of(mine, tmp_path, "eps")
    line = refusal(capsys, "export", checkpoint, tmp_path / "mine", "--single-file")
    assert "unet.norm_groups is 8, and readers take 32" in line and not (tmp_path / "mine").exists()


@pytest.fixture
def hub(pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelHub:
    made = ModelHub(tmp_path / "cache")
    made.repositories["owner/name"] = pipeline
    monkeypatch.setattr("huggingface_hub.snapshot_download", made.snapshot_download)
    return made


def test_of_a_name_on_the_hub_an_import_downloads_what_it_reads(
    pipeline: Path, hub: ModelHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    base = base_spec(tmp_path, autoencoder=str(pipeline / "vae"))
    spec, weights = import_of(pipeline, base, tmp_path / "of folder")
    again, same = import_of(Path("owner/name"), base, tmp_path / "of name")
    text = again.model_dump()["data"]["text"]
    assert text["encoders"] == "owner/name" and again.diffusion == spec.diffusion
    assert {**text, "encoders": str(pipeline.resolve())} == spec.model_dump()["data"]["text"]
    assert all(torch.equal(same[name], weights[name]) for name in weights)
    read = {"model_index.json", "scheduler/scheduler_config.json", "text_encoder/config.json", "unet/config.json"}
    read |= {"text_encoder_2/config.json"} if pipeline.name == "sdxl" else set()
    assert hub.downloaded("owner/name") == read | {"unet/diffusion_pytorch_model.safetensors"}
    hub.has_network = False
    line = refusal(capsys, *import_words(Path("owner/other"), base, tmp_path / "no"))
    assert "owner/other is no folder, and the Hugging Face hub does not give it (Name or service" in line
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("pipeline", ["sdxl"], indirect=True)
def test_an_export_of_a_run_with_encoders_on_the_hub_is_whole(
    pipeline: Path, hub: ModelHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint = checkpoint_of(pipeline, tmp_path, "eps", encoders="owner/name")
    hub.has_network = False
    line = refusal(capsys, "export", checkpoint, tmp_path / "no")
    assert "data.text.encoders = owner/name is no folder, and the Hugging Face hub" in line
    hub.has_network = True
    assert main(["export", str(checkpoint), str(tmp_path / "mine")]) == 0
    OPENED[pipeline.name].from_pretrained(tmp_path / "mine")
    assert main(["export", str(tmp_path / "mine"), str(tmp_path / "again")]) == 0, "an export, whose encoders go along"
    for part in ("model_index.json", "text_encoder/model.safetensors", "tokenizer/tokenizer.json"):
        assert (tmp_path / "again" / part).read_bytes() == (tmp_path / "mine" / part).read_bytes()


def test_other_encoders_than_those_whose_text_was_learned_are_refused(
    pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec, mine = imported_spec(pipeline).data.text, shutil.copytree(pipeline, tmp_path / "mine")
    assert spec is not None
    digest = TextEncoders.open(spec, torch.device("cpu")).digest
    checkpoint = checkpoint_of(pipeline, tmp_path, "eps", {"text/encoders": digest}, encoders=str(mine))
    out = ["--device", "cpu", "--steps", "1", "--out"]
    assert main(["sample", str(checkpoint), "--prompt", "a", *out, str(tmp_path / "a")]) == 0
    weights = mine / "text_encoder" / "model.safetensors"
    save_file({name: tensor + 1 for name, tensor in load_file(weights).items()}, weights, metadata={"format": "pt"})
    for words in (
        ["sample", checkpoint, "--prompt", "a", *out, tmp_path / "b"],
        ["export", checkpoint, tmp_path / "folder"],
        ["export", checkpoint, tmp_path / "file", "--single-file"],
    ):
        line = refusal(capsys, *words)
        assert "has other encoders or tokenizers than the run learned from" in line
    assert not (tmp_path / "folder").exists()


def of_other_width(path: Path) -> None:
    write_encoders(path, ["a"], width=16, second=24 if (path / "text_encoder_2").is_dir() else None, pooled=24)


def of_other_latents(path: Path) -> None:
    config = json.loads((path / "vae" / "config.json").read_text())
    diffusers.AutoencoderKL.from_config(config, latent_channels=8).save_pretrained(path / "vae")


UNUSABLE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no encoder": (lambda path: shutil.rmtree(path / "text_encoder"), "no text encoder, which prompts need; add tok"),
    "no tokenizer": (lambda path: shutil.rmtree(path / "tokenizer"), "it has no folder tokenizer"),
    "another width": (of_other_width, r"unet.text.context_channels = \d+ of .*, but the encoders at .* have"),
    "other latents": (of_other_latents, "draws latents of 4 channels, and those of vae have 8"),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_a_pipeline_whose_encoders_can_not_be_used_is_one_line(pipeline: Path, tmp_path: Path, name: str) -> None:
    bad = shutil.copytree(pipeline, tmp_path / "bad")
    UNUSABLE[name][0](bad)
    with pytest.raises(UserError, match=UNUSABLE[name][1]) as caught:
        sample(load_trained(bad), 1, prompts="a")
    assert "\n" not in str(caught.value)
