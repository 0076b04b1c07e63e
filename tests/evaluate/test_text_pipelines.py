"""Pipelines of Stable Diffusion and SDXL: import from folders and single files, and export of what diffusers opens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from make_text import write_encoders
from safetensors.torch import load_file, save_file

from ddpm_ds.cli.main import main
from ddpm_ds.config.spec import RunSpec
from ddpm_ds.config.spec_file import load_spec
from ddpm_ds.evaluate.diffusers.original import original_names
from ddpm_ds.evaluate.diffusers.unet import to_diffusers
from ddpm_ds.unet.layers import unet_layers
from tests.launching import tiny_spec
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
        "cross_attention_dim": 64,
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


def write_pipeline_of(folder: Path, kind: str) -> Path:
    """A pipeline with random weights, as ``save_pretrained`` writes one."""
    from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

    second = 32 if kind == "sdxl" else None
    write_encoders(folder, ["a", "red", "circle"], width=32, second=second, pooled=24)
    torch.manual_seed(0)
    unet = diffusers.UNet2DConditionModel(sample_size=8, layers_per_block=1, norm_num_groups=8, **KINDS[kind])
    randomise(unet, 0)
    parts: dict[str, Any] = {
        "vae": diffusers.AutoencoderKL(
            down_block_types=["DownEncoderBlock2D"] * 2,
            up_block_types=["UpDecoderBlock2D"] * 2,
            block_out_channels=[8, 16],
            norm_num_groups=4,
            latent_channels=4,
        ),
        "text_encoder": CLIPTextModel.from_pretrained(folder / "text_encoder"),
        "tokenizer": CLIPTokenizer.from_pretrained(folder / "tokenizer"),
        "unet": unet,
        "scheduler": diffusers.EulerDiscreteScheduler(**SCHEDULER),
    }
    if second is None:
        pipeline = diffusers.StableDiffusionPipeline(
            **parts, safety_checker=None, feature_extractor=None, requires_safety_checker=False
        )
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


def import_of(path: Path, base: Path, out: Path, *options: str) -> tuple[RunSpec, dict[str, torch.Tensor]]:
    assert main(["import", str(path), "--spec", str(base), "--out", str(out), *options]) == 0
    return load_spec(out / "spec.yaml"), load_file(out / "weights.safetensors")


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


def test_shards_and_fp16_variants_give_the_same_weights(pipeline: Path, tmp_path: Path) -> None:
    base = base_spec(tmp_path, autoencoder=str(pipeline / "vae"))
    _, whole = import_of(pipeline, base, tmp_path / "whole")
    unet = diffusers.UNet2DConditionModel.from_pretrained(pipeline / "unet")
    unet.save_pretrained(tmp_path / "shards" / "unet", max_shard_size="200KB")
    assert len(list((tmp_path / "shards" / "unet").glob("*-of-*.safetensors"))) > 1
    _, sharded = import_of(tmp_path / "shards", base, tmp_path / "of shards", "--set", "data.text.encoders=x")
    assert all(torch.equal(sharded[name], whole[name]) for name in whole)
    for options in ({}, {"max_shard_size": "100KB"}):
        folder = tmp_path / f"half{len(options)}"
        unet.half().save_pretrained(folder, variant="fp16", **options)
        _, half = import_of(folder, base, tmp_path / f"of {folder.name}", "--set", "data.text.encoders=x")
        assert all(torch.equal(half[name], whole[name].half().float()) for name in whole)
    index = tmp_path / "shards" / "unet" / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"conv_in.weight": "../other.safetensors"}}))
    words = ["--spec", str(base), "--out", str(tmp_path / "no"), "--set", "data.text.encoders=x"]
    assert main(["import", str(tmp_path / "shards"), *words]) == 2
    shutil.rmtree(tmp_path / "shards")


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
    base, words = base_spec(tmp_path, autoencoder="vae"), ("--set", "data.text.encoders=x")
    spec, weights = import_of(tmp_path, base, tmp_path / "out", *words)
    layers = unet_layers(spec.unet, spec.data.interface)
    originals = {original: unet.state_dict()[name] for name, original in original_names(layers).items()}
    path = tmp_path / "single.safetensors"
    save_file(
        {**originals, "model_ema.decay": torch.zeros(()), **({"v_pred": torch.zeros(0)} if "2" in kind else {})}, path
    )
    again, same = import_of(path, base, tmp_path / "again", *words)
    assert spec.unet.text is not None and again.unet.text is not None
    changed = {"upcast_attention": kind == "SD 2.1"}
    assert again.unet == spec.unet.model_copy(update={"text": spec.unet.text.model_copy(update=changed)})
    assert same.keys() == weights.keys() and all(torch.equal(same[name], weights[name]) for name in weights)
    assert again.diffusion.schedule == "scaled_linear" and again.diffusion.objective == ("v" if "2" in kind else "eps")

    theirs = diffusers.UNet2DConditionModel.from_single_file(
        str(path), config=str(tmp_path), subfolder="unet", local_files_only=True, low_cpu_mem_usage=False
    )
    state = unet.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in theirs.state_dict().items())
