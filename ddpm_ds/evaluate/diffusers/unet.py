"""Tensors of our U-Net by the names in diffusers and in single files, without importing diffusers.

diffusers has separate q, k and v, counts decoder levels from the deepest, stores convolution weights as (out, in, k, k)
instead of (out, k, k, in), and has 1x1 convolutions for some linear layers.

Single files have the names of Stable Diffusion's published code, and hold a whole pipeline: autoencoder, text encoders
and, under ``model.diffusion_model.``, the U-Net, whose kind follows from names and shapes. ComfyUI, A1111 and
diffusers' ``from_single_file`` read them.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ddpm_ds.evaluate.diffusers.scheduler import BETAS, refused
from ddpm_ds.evaluate.diffusers.unet_config import WITH_TEXT
from ddpm_ds.ground.errors import CheckpointError
from ddpm_ds.ground.formats import open_tensors
from ddpm_ds.unet.layers import Layer, TransformerInputLayer, TransformerOutputLayer
from ddpm_ds.unet.names import tensor_names

UNET = "model.diffusion_model."
V, ZERO_SNR = "v_pred", "ztsnr"
"""Names of empty tensors, which say that the U-Net predicts v, and that the last timestep is pure noise."""
EDM = ("edm_mean", "edm_std", "edm_vpred.sigma_max", "edm_vpred.sigma_min")
"""Tensors that only models with EDM's noise have."""
_TRUE = {"True": True, "true": True, "1": True, "False": False, "false": False, "0": False, "None": False}
_PREDICTIONS = {"epsilon": "eps", "eps": "eps", "v": "v", "v_prediction": "v", "v-prediction": "v"}
_METADATA: Mapping[str, Mapping[str, str | bool]] = {
    "modelspec.prediction_type": _PREDICTIONS,
    "modelspec.predict_key": _PREDICTIONS,
    "ss_v_parameterization": {text: "v" if yes else "eps" for text, yes in _TRUE.items()},
    "ss_zero_terminal_snr": _TRUE,
}
"""Keys of a single file's metadata about its noise, and the meanings of their values."""
AVERAGED = "model_ema."
_PARTS = {"time_embed", "label_emb", "input_blocks", "middle_block", "output_blocks", "out"}
FIRST = "input_blocks.0.0.weight"
_HEAD = {
    **{"time_embedding.linear_1": "time_embed.0", "time_embedding.linear_2": "time_embed.2"},
    **{"add_embedding.linear_1": "label_emb.0.0", "add_embedding.linear_2": "label_emb.0.2"},
    **{"conv_in": "input_blocks.0.0", "conv_norm_out": "out.0", "conv_out": "out.2"},
}
_ORIGINAL_BLOCK = {
    **{"norm1": "in_layers.0", "conv1": "in_layers.2", "time_emb_proj": "emb_layers.1"},
    **{"norm2": "out_layers.0", "conv2": "out_layers.3", "conv_shortcut": "skip_connection"},
}
_PLACE = re.compile(r"(down|up|mid)_blocks?\.(?:(\d+)\.)?(resnets|attentions|downsamplers|upsamplers)\.(\d+)\.")
CLASS_EMBEDDING = "class_embedding.weight"
"""diffusers' name of the embedding of classes, a row for each."""
CONV_IN = "conv_in.weight"
"""diffusers' name of the first convolution, (out, in, 3, 3)."""
_OLD_ATTENTION = re.compile(r"(.*\.attentions\.\d+)\.(query|key|value|proj_attn)\.(weight|bias)")
_NEW_ATTENTION = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}


def to_diffusers(
    state: Mapping[str, Tensor], layers: Sequence[Layer], *, linear_projection: bool = False, order: Sequence[int] = ()
) -> dict[str, Tensor]:
    """Return tensors by diffusers' names from tensors by ours (``4.conv1.weight``), as views.

    The projections around transformer blocks are 1x1 convolutions unless ``linear_projection``. ``order`` has our
    numbers of input channels in diffusers' order, if it is another.
    """
    convolved = set() if linear_projection else _projections(layers)
    found: dict[str, Tensor] = {}
    for ours, theirs in tensor_names(layers):
        tensor = state[ours].permute(0, 3, 1, 2) if state[ours].ndim == 4 else state[ours]
        tensor = tensor[:, :, None, None] if ours in convolved else tensor
        found.update(zip(theirs, tensor.chunk(len(theirs)), strict=True))
    if order:
        found[CONV_IN] = found[CONV_IN][:, list(order)]
    return found


def from_diffusers(
    state: Mapping[str, Tensor], layers: Sequence[Layer], order: Sequence[int] = ()
) -> dict[str, Tensor]:
    """Return tensors by our names from tensors by diffusers' names, present or old; ``order`` as :func:`to_diffusers`.

    Raises ValueError if diffusers' U-Net with these layers has other names.
    """
    stored, projections = stored_names(state, layers), _projections(layers)
    if order:
        state = {**state, CONV_IN: state[CONV_IN][:, sorted(range(len(order)), key=order.__getitem__)]}
    found = {}
    for ours, theirs in tensor_names(layers):
        tensor = torch.cat([state[stored[name]] for name in theirs])
        tensor = tensor.flatten(1) if ours in projections else tensor
        found[ours] = tensor.permute(0, 2, 3, 1).contiguous() if tensor.ndim == 4 else tensor
    return found


def _projections(layers: Sequence[Layer]) -> set[str]:
    """Return the names of the linear weights around transformer blocks."""
    ends = (TransformerInputLayer, TransformerOutputLayer)
    return {f"{index}.projection.weight" for index, layer in enumerate(layers) if isinstance(layer, ends)}


def stored_names(names: Iterable[str], layers: Sequence[Layer]) -> dict[str, str]:
    """Return a file's ``names``, old or present, by diffusers' present names.

    Raises ValueError unless they are exactly the names of diffusers' U-Net with these layers.
    """
    names = list(names)
    stored = {}
    for name in names:
        old = _OLD_ATTENTION.fullmatch(name)  # attention once had `query`, `key`, `value` and `proj_attn`
        stored[f"{old[1]}.{_NEW_ATTENTION[old[2]]}.{old[3]}" if old else name] = name
    wrong = stored.keys() ^ {name for _, theirs in tensor_names(layers) for name in theirs}
    if wrong:
        raise ValueError(f"{len(wrong)} tensor names don't match the U-Net, the first is {min(wrong)}")
    if len(stored) < len(names):
        twice = min(set(names) - set(stored.values()))
        raise ValueError(f"{twice} is there under its present and its old name")
    return stored


def original_names(layers: Sequence[Layer]) -> dict[str, str]:
    """Return the original names of a U-Net with text by diffusers' names.

    Raises ValueError: the original code has no such U-Net.
    """
    names = [name for _, theirs in tensor_names(layers) for name in theirs]
    blocks = sum(layer.name.startswith("down.0.block") for layer in layers)  # in each level of the encoder
    attended = {name.split(".")[1] for name in names if name.startswith("up_blocks") and ".attentions." in name}
    originals = {}
    for name in names:
        found, (module, _, last) = _PLACE.match(name), name.rpartition(".")
        if found is None and module not in _HEAD:
            what = "classes" if name == CLASS_EMBEDDING else "the level of a condition"
            raise ValueError(f"the U-Net takes {what}, for which single files have no name")
        if found is None:
            originals[name] = f"{UNET}{_HEAD[module]}.{last}"
            continue
        side, level, kind, number = found.groups()
        rest, first = name[found.end() :], int(level or 0) * (blocks + 1)
        at, within = first + int(number), int(kind == "attentions")
        if kind == "resnets":
            rest = f"{_ORIGINAL_BLOCK[module[found.end() :]]}.{last}"
        if side == "mid":
            place = f"middle_block.{1 if within else 2 * int(number)}"
        elif kind == "downsamplers":
            place, rest = f"input_blocks.{first + blocks + 1}.0", rest.replace("conv.", "op.")
        elif kind == "upsamplers":
            place = f"output_blocks.{first + blocks}.{2 if level in attended else 1}"
        else:
            place = f"input_blocks.{at + 1}.{within}" if side == "down" else f"output_blocks.{at}.{within}"
        originals[name] = f"{UNET}{place}.{rest}"
    return originals


class SingleFile:
    """Single file with the original names; only names and shapes are read at first.

    Raises CheckpointError: it can't be read, or is none of SD 1, SD 2 and SDXL.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = open_tensors(path)
            self._all, self._metadata = set(self._file.keys()), self._file.metadata() or {}
            prefix = self._prefix()
            inside = {name.removeprefix(prefix): name for name in self._all if name.startswith(prefix)}
            self._names = {name: stored for name, stored in inside.items() if name.partition(".")[0] in _PARTS}
            shapes = {name: tuple(self._file.get_slice(stored).get_shape()) for name, stored in self._names.items()}
        except OSError as error:
            raise CheckpointError(f"{path} can't be read as a single file ({error.strerror})") from None
        self.has_averaged = any(name.startswith(AVERAGED) and name.count(".") == 1 for name in self._all)
        """Whether averaged weights, which are not read, are beside those as trained."""
        try:
            self.config = _config_of(shapes)
            """Arguments of the ``UNet2DConditionModel``."""
        except (LookupError, ValueError, ZeroDivisionError):
            raise CheckpointError(f"{path} is none of SD 1, SD 2 and SDXL: its U-Net is built differently") from None

    def _prefix(self) -> str:
        places = sorted(name.removesuffix(FIRST) for name in self._all if name.endswith(FIRST))
        places = [place for place in places if place in ("", UNET) or place.endswith(".")]
        of_control = any("zero_convs." in name or "input_hint_block." in name for name in self._all)
        if UNET in places or (len(places) == 1 and not of_control):
            return UNET if UNET in places else places[0]
        why = f"it holds no {UNET}{FIRST}; a LoRA, an autoencoder and a text encoder are none, .ckpt files are not read"
        if of_control:
            why = "it holds a ControlNet (zero_convs, input_hint_block); name the model that this was trained for"
        elif places:
            why = f"it holds several ({', '.join(place + FIRST for place in places)}); keep one"
        elif "conv_in.weight" in self._all and any("down_blocks." in name for name in self._all):
            why = "its U-Net has diffusers' names; name a folder with it as unet/diffusion_pytorch_model.safetensors"
            why += " beside its config.json"
        raise CheckpointError(f"{self.path} is no single file with a U-Net: {why}")

    @property
    def is_xl(self) -> bool:
        """Whether it is of SDXL's kind, which reads a pooled text."""
        return "addition_embed_type" in self.config

    def scheduler(self, typed: str | None = None, silent: str = "eps") -> tuple[dict[str, object], bool]:
        """Return the arguments of the scheduler, and whether the file names its objective. A ``typed`` objective counts
        before the file's; ``silent`` counts if the file names none.

        Raises ValueError: the file contradicts itself, or our process can't express it.
        """
        if edm := sorted(self._all.intersection(EDM)):
            raise ValueError(f"{edm[0]}: its noise is EDM's for {', '.join(edm)}, with a scale that ours has not")
        says: dict[str, str | bool] = {V: "v"} if V in self._all else {}
        says |= {ZERO_SNR: True} if ZERO_SNR in self._all else {}
        for key, meanings in _METADATA.items():
            if (text := self._metadata.get(key)) is not None:
                if text not in meanings:
                    raise refused(key, text, f"it should be {', '.join(meanings)}")
                says[f"{key} = {text}"] = meanings[text]
        predicts = {value: key for key, value in says.items() if isinstance(value, str)}
        if len(predicts) > 1 and typed is None:
            fix = f"--set diffusion.objective={' or '.join(sorted(predicts))} says which is right"
            raise ValueError(f"{' and '.join(predicts.values())} contradict each other; {fix}")
        objective = typed or next(iter(predicts), silent)
        zero_snr = next((key for key, value in says.items() if value is True), None)
        if zero_snr and objective == "eps":
            fix = "--set diffusion.objective=v if the model predicts v"
            raise ValueError(f"{zero_snr}: the last timestep is pure noise, of which eps can't be learned; {fix}")
        theirs = {"eps": "epsilon", "v": "v_prediction"}.get(objective, "sample")
        noise = {**BETAS, "beta_schedule": "scaled_linear", "prediction_type": theirs}
        return {**noise, "rescale_betas_zero_snr": bool(zero_snr)}, bool(predicts)

    def tensors(self, layers: Sequence[Layer]) -> dict[str, Tensor]:
        """Return the tensors of the U-Net by diffusers' names; raise ValueError if the file has other names."""
        originals = {name: original.removeprefix(UNET) for name, original in original_names(layers).items()}
        if wrong := set(originals.values()) ^ set(self._names):
            raise ValueError(f"{len(wrong)} tensor names don't match the U-Net, the first is {min(wrong)}")
        return {name: self._file.get_tensor(self._names[original]) for name, original in originals.items()}


def _config_of(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, object]:
    """Return diffusers' configuration of a U-Net with these tensors; raise LookupError for a kind that none has."""

    def depth(place: str) -> int:
        """Count the transformer blocks at a place."""
        first = f"{place}.transformer_blocks."
        return sum(name.startswith(first) and name.endswith(".norm1.weight") for name in shapes)

    widths, depths, counts, number = [0], [0], [0], 1
    while any(name.startswith(f"input_blocks.{number}.") for name in shapes):
        block = f"input_blocks.{number}"
        if f"{block}.0.op.weight" in shapes:
            for values in (widths, depths, counts):
                values.append(0)
        else:
            widths[-1], counts[-1] = shapes[f"{block}.0.out_layers.3.weight"][0], counts[-1] + 1
            depths[-1] = depth(f"{block}.1")
        number += 1
    middle = depth("middle_block.1")
    last = f"middle_block.1.transformer_blocks.{middle - 1}"
    linear, context = len(shapes["middle_block.1.proj_in.weight"]) == 2, shapes[f"{last}.attn2.to_k.weight"][1]
    added, out = shapes.get("label_emb.0.0.weight"), shapes["out.2.weight"][0]
    if (added is not None) != (linear and len(widths) == 3) or "label_emb.weight" in shapes:
        raise LookupError
    found: dict[str, object] = {
        "_class_name": WITH_TEXT,
        "sample_size": 64 if not linear else 96 if added is None else 128,
        "in_channels": shapes["input_blocks.0.0.weight"][1],
        "out_channels": out,
        "block_out_channels": widths,
        "layers_per_block": counts,
        "down_block_types": ["CrossAttnDownBlock2D" if blocks else "DownBlock2D" for blocks in depths],
        "up_block_types": ["CrossAttnUpBlock2D" if blocks else "UpBlock2D" for blocks in reversed(depths)],
        "transformer_layers_per_block": [*(blocks or 1 for blocks in depths[:-1]), middle],
        "attention_head_dim": [max(1, width // 64) for width in widths] if linear else 8,
        "cross_attention_dim": context,
        "use_linear_projection": linear,
        "upcast_attention": linear and added is None,
    }
    if added:
        found |= {"addition_embed_type": "text_time", "addition_time_embed_dim": 256}
        found["projection_class_embeddings_input_dim"] = added[1]
    return found
