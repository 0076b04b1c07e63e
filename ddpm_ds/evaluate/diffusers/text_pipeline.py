"""Export of a U-Net that reads text: the other parts of its pipeline, in a folder or in a single file.

Text encoders and tokenizers are copied from ``data.text.encoders``, a folder or a name on the Hugging Face hub, and the
autoencoder from ``data.autoencoder``.
"""

import re
import shutil
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from ddpm_ds.data.hub import is_hub_name
from ddpm_ds.data.spec import ConditionSpec, TextSpec
from ddpm_ds.data.text import FilesOfEncoder, TextEncoders, parts_of
from ddpm_ds.evaluate.diffusers.folder import PIPELINES, TEXT_AUTOENCODER, read_weights
from ddpm_ds.evaluate.diffusers.unet import ZERO_SNR, SingleFile, V, original_names, to_diffusers
from ddpm_ds.evaluate.diffusers.unet_config import input_order, unet_spec_from_diffusers, use_of
from ddpm_ds.evaluate.trained import Trained
from ddpm_ds.ground.device import DTYPES
from ddpm_ds.ground.errors import CheckpointError
from ddpm_ds.ground.files import expanded
from ddpm_ds.unet.layers import unet_layers

FilePrecision = Literal["fp32", "fp16"]
ENCODER_WEIGHTS = ("model.safetensors", "model.fp16.safetensors")
NOTHING, OF_IMAGES = [None, None], ("image_encoder", "feature_extractor")
STABLE_CHANNELS = 4
"""Channels of the latents that diffusers' inpainting takes."""
AT_ONCE = 77
"""Tokens that CLIP's encoders read at once."""


def encoders_of(trained: Trained) -> list[FilesOfEncoder]:
    """Return the text encoders with their tokenizers; none if their folder is not on this host.

    Raises CheckpointError: the pipeline of such encoders does not give the text that was learned.
    """
    text = trained.text
    if text is None or not (expanded(text.encoders).exists() or is_hub_name(text.encoders)):
        return []
    parts, unet = parts_of(text), trained.unet_spec.text
    TextEncoders(text, parts, None).check_learned(trained.learned_encoders)
    layer, pools = ("penultimate", True) if len(parts) == 2 else ("last", False)
    fault = None if text.layer == layer else f"data.text.layer is {text.layer}"
    if unet is not None and (unet.pooled_channels is not None) != pools:
        fault = f"unet.text.pooled_channels is {unet.pooled_channels or 'null'}"
    if fault:
        gives = f"the {layer} hidden states {'and a' if pools else 'without'} pooled text"
        count = "two text encoders give" if pools else "one text encoder gives"
        raise CheckpointError(f"{trained.origin} can't be exported: {fault}, and a pipeline's {count} {gives}")
    return parts


def pipeline_of(trained: Trained) -> str | None:
    """Return the name of the pipeline whose parts are at hand; None if some are not, or diffusers has none.

    Raises CheckpointError: the pipeline would give the U-Net another condition.
    """
    use, vae, encoders = use_of(trained.unet_spec, trained.known_data), trained.autoencoder, encoders_of(trained)
    if not encoders or vae is None or (use == "inpaint" and vae.channels != STABLE_CHANNELS):
        return None
    if use == "edit" and not _is_scaled(trained) and (vae.shift or vae.scale != vae.exported_scale):
        fault = "data.condition.scaled is false, and a pipeline's latents are without the shift and scales"
        raise CheckpointError(f"{trained.origin} can't be exported: {fault} of channels, which its autoencoder has")
    return PIPELINES[use][len(encoders) - 1]


def _is_scaled(trained: Trained) -> bool:
    return trained.known_data is not None and (trained.known_data.condition or ConditionSpec()).scaled


def copy_parts(trained: Trained, folder: Path) -> tuple[str | None, dict[str, object]]:
    """Copy text encoders, tokenizers and the autoencoder into ``folder``. Return the name of the pipeline, or None if a
    part is not at hand, and their entries of ``model_index.json``.
    """
    parts: dict[str, object] = {}
    if trained.autoencoder is not None:
        trained.autoencoder.copy_to(folder / TEXT_AUTOENCODER)
        parts[TEXT_AUTOENCODER] = ["diffusers", "AutoencoderKL"]
    for part in encoders_of(trained):
        for source in (part.encoder, part.tokenizer):
            shutil.copytree(source, folder / source.name)
        (kind,) = part.config.architectures
        parts |= {part.encoder.name: ["transformers", kind], part.tokenizer.name: ["transformers", "CLIPTokenizer"]}
    pipeline, text = pipeline_of(trained), trained.text
    use = use_of(trained.unet_spec, trained.known_data)
    if "text_encoder_2" in parts:
        parts |= {"is_cosxl_edit": _is_scaled(trained)} if use == "edit" else dict.fromkeys(OF_IMAGES, NOTHING)
        parts["force_zeros_for_empty_prompt"] = text is not None and text.drop_to == "zeros"
    elif use == "depth":
        parts |= {"prediction_type": "depth", "scale_invariant": True, "shift_invariant": True}
        parts["default_denoising_steps"] = trained.sampler.steps_of(trained.diffusion)
        parts["default_processing_resolution"] = max(trained.picture_shape[1:])
    elif pipeline is not None:
        parts |= {"safety_checker": NOTHING, "feature_extractor": NOTHING, "requires_safety_checker": False}
    return pipeline, parts


def copied(tensors: Mapping[str, Tensor], precision: FilePrecision) -> dict[str, Tensor]:
    """Return copies of tensors for a file, with floats in ``precision``.

    A file takes no views: q, k and v are views of one tensor, and convolutions' weights have permuted dimensions.
    """
    found = {}
    for name, tensor in tensors.items():
        kind = DTYPES[precision][1] if tensor.is_floating_point() else tensor.dtype
        found[name] = tensor.to("cpu", kind, copy=True, memory_format=torch.contiguous_format)
    return found


def of_flow(trained: Trained) -> str | None:
    """Return a note on flow matching, which a single file can't name: the setting of other programs; else None."""
    if trained.diffusion.schedule != "flow":
        return None
    shift = trained.sampler.shift or trained.process.shift
    return f"nothing in it says flow: ComfyUI needs the node ModelSamplingSD3 with shift {shift:g}, others their switch"


def model_spec(trained: Trained) -> dict[str, str]:
    """Return the metadata of a single file by Stability AI's ModelSpec 1.0.1, which has no word for flow matching."""
    text, diffusion = trained.unet_spec.text, trained.diffusion
    assert text is not None
    kind = "stable-diffusion-v2" if text.linear_projection else "stable-diffusion-v1"
    _, height, width = trained.picture_shape
    found: dict[str, str | None] = {
        "sai_model_spec": "1.0.1",
        "architecture": kind if text.pooled_channels is None else "stable-diffusion-xl-v1-base",
        "implementation": "diffusers",
        "title": trained.spec.name if trained.spec else Path(trained.origin).resolve().name,
        "date": datetime.now(UTC).date().isoformat(),
        "resolution": f"{width}x{height}",
        "prediction_type": {"eps": "epsilon", "v": "v"}.get(diffusion.objective),
        "timestep_range": "{},{}".format(*(diffusion.timestep_range or (0, diffusion.timesteps))),
        "encoder_layer": None if trained.text is None else "2" if trained.text.layer == "penultimate" else "1",
    }
    return {f"modelspec.{key}": value for key, value in found.items() if value is not None}


def write_single_file(trained: Trained, path: Path, precision: FilePrecision) -> str:
    """Write a file with the U-Net, the autoencoder and the text encoders under their original names. Return a line that
    names these parts. Raises CheckpointError: there is no text, or readers would build another U-Net.
    """
    text = trained.unet_spec.text
    try:
        if text is None:
            raise ValueError("its U-Net reads no text; export a folder instead")
        names = original_names(trained.layers)
    except ValueError as error:
        raise CheckpointError(f"{trained.origin} can't be a single file: {error}") from None
    order, linear = input_order(trained.unet_spec, trained.known_data), text.linear_projection
    theirs = to_diffusers(trained.unet.layers.state_dict(), trained.layers, linear_projection=linear, order=order)
    tensors, parts = {names[name]: tensor for name, tensor in theirs.items()}, ["unet"]
    if trained.autoencoder is not None:
        vae = trained.autoencoder
        stored = vae.folded(read_weights(vae.weights), vae.exported_scale)
        tensors |= {f"first_stage_model.{name}": tensor for name, tensor in original_autoencoder(stored)}
        parts.append(TEXT_AUTOENCODER)
    encoders = encoders_of(trained)
    for number, part in enumerate(encoders):
        files = [file for file in (part.encoder / name for name in ENCODER_WEIGHTS) if file.is_file()]
        if not files:
            needed = " or ".join(ENCODER_WEIGHTS)
            raise CheckpointError(f"{part.encoder} holds no weights; a single file needs {needed} there")
        # transformers leaves out "text_model." since its version 5.
        whole = ("text_model.", "text_projection.")
        stored = {
            name if name.startswith(whole) else f"text_model.{name}": tensor
            for name, tensor in read_weights(files[0]).items()
            if not name.endswith("position_ids")
        }
        of_xl = len(encoders) == 2
        place = f"conditioner.embedders.{number}." if of_xl else "cond_stage_model."
        if number or (not of_xl and text.linear_projection):  # SDXL's second, and SD 2's
            tensors |= {f"{place}model.{name}": tensor for name, tensor in open_clip(stored)}
        else:
            tensors |= {f"{place}transformer.{name}": tensor for name, tensor in stored.items()}
        parts.append(part.encoder.name)
    says = {V: trained.diffusion.objective == "v", ZERO_SNR: trained.diffusion.zero_terminal_snr}
    tensors |= {name: torch.zeros(0) for name, yes in says.items() if yes}
    save_file(copied(tensors, precision), path, metadata={"format": "pt", **model_spec(trained)})
    _check_kind(trained, path)
    held = f"it holds {', '.join(parts)} by their original names, and is read as this U-Net"
    return "; ".join(filter(None, (held, of_flow(trained))))


def tokens_note(text: TextSpec | None) -> str | None:
    """Return a line on other programs' prompts if captions had more tokens than encoders read at once."""
    if text is None or text.tokens in (None, AT_ONCE):
        return None
    joined = AT_ONCE * (text.tokens // (AT_ONCE - 2))
    return (
        f"captions had {text.tokens} tokens: ComfyUI and A1111 draw with {joined}, whole chunks, and diffusers' "
        f"pipelines cut a prompt to {AT_ONCE}"
    )


def _check_kind(trained: Trained, path: Path) -> None:
    """Refuse a U-Net with other heads, groups or the like than readers assume for its kind."""
    mine, found = trained.unet_spec, unet_spec_from_diffusers(SingleFile(path).config)[0]
    assert mine.text is not None and found.text is not None
    text = found.text.model_copy(update={"tokens": mine.text.tokens})  # their number is not the U-Net's
    found = found.model_copy(update={"dropout": mine.dropout, "text": text})
    if unet_layers(found, trained.interface) == trained.layers:
        return
    pairs = {f"unet.{key}": (value, getattr(found, key)) for key, value in mine if key != "text"}
    pairs |= {f"unet.text.{key}": (value, getattr(text, key)) for key, value in mine.text if key != "upcast_attention"}
    key, (here, there) = next((key, pair) for key, pair in pairs.items() if pair[0] != pair[1])
    fault = f"{key} is {here}, and readers take {there}; export the folder instead"
    raise CheckpointError(f"{trained.origin} can't be a single file: {fault}")


_VAE_PLACE = re.compile(r"(encoder|decoder)\.(down|up|mid)_blocks?\.(?:(\d+)\.)?(\w+)\.(\d+)\.(.*)")
_VAE_NAMES = {
    **{"conv_shortcut": "nin_shortcut", "group_norm": "norm"},
    **{"to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"},
    **{"query": "q", "key": "k", "value": "v", "proj_attn": "proj_out"},
}


def original_autoencoder(stored: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield an autoencoder's tensors by original names, without prefix; attention once had 1x1 convolutions."""
    levels = 1 + max(int(name.split(".")[2]) for name in stored if name.startswith("decoder.up_blocks."))
    for name, tensor in stored.items():
        place = _VAE_PLACE.fullmatch(name)
        if place is None:
            yield name.replace("conv_norm_out", "norm_out"), tensor
            continue
        side, blocks, level, kind, number, rest = place.groups()
        module, _, last = rest.rpartition(".")
        rest = f"{_VAE_NAMES.get(module, module)}.{last}"
        if kind == "attentions":
            image = tensor[:, :, None, None] if tensor.ndim == 2 else tensor
            yield f"{side}.mid.attn_{int(number) + 1}.{rest}", image
        elif blocks == "mid":
            yield f"{side}.mid.block_{int(number) + 1}.{rest}", tensor
        else:
            at = levels - 1 - int(level) if blocks == "up" else int(level)
            within = f"block.{number}" if kind == "resnets" else kind.removesuffix("rs")  # "downsample", "upsample"
            yield f"{side}.{blocks}.{at}.{within}.{rest}", tensor


_OPEN_CLIP = {
    "embeddings.position_embedding.weight": "positional_embedding",
    "embeddings.token_embedding.weight": "token_embedding.weight",
    "final_layer_norm.weight": "ln_final.weight",
    "final_layer_norm.bias": "ln_final.bias",
}
_OPEN_CLIP_LAYER = {"layer_norm1": "ln_1", "layer_norm2": "ln_2", "mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj"}


def open_clip(stored: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors by OpenCLIP's names; it has q, k and v in one tensor, and a transposed projection."""
    for name, tensor in stored.items():
        if name == "text_projection.weight":
            yield "text_projection", tensor.T
            continue
        inside = name.removeprefix("text_model.")
        if inside in _OPEN_CLIP:
            yield _OPEN_CLIP[inside], tensor
            continue
        number, _, rest = inside.removeprefix("encoder.layers.").partition(".")
        module, _, kind = rest.rpartition(".")
        place = f"transformer.resblocks.{number}"
        if module in _OPEN_CLIP_LAYER:
            yield f"{place}.{_OPEN_CLIP_LAYER[module]}.{kind}", tensor
        elif module == "self_attn.out_proj":
            yield f"{place}.attn.out_proj.{kind}", tensor
        elif module == "self_attn.q_proj":
            parts = [stored[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")]
            yield f"{place}.attn.in_proj_{kind}", torch.cat(parts)
