"""Names of tensors in single files, those of the code in which Stable Diffusion was published, to diffusers' and back.

A single file holds a whole pipeline: the U-Net under ``model.diffusion_model.``, whose kind is found from names and
shapes, the autoencoder and the text encoders. ComfyUI, A1111 and diffusers' ``from_single_file`` read it.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ddpm_ds.errors import CheckpointError
from ddpm_ds.evaluate.diffusers.text_config import CLASS_NAME
from ddpm_ds.evaluate.diffusers.unet import CLASS_EMBEDDING, tensor_names
from ddpm_ds.files import open_tensors
from ddpm_ds.unet.layers import Layer

UNET = "model.diffusion_model."
BETAS = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
"""Noise schedule of the models that are published so."""
V, ZERO_SNR = "v_pred", "ztsnr"
"""Empty tensors that say that the U-Net predicts v, and that the last timestep is pure noise."""
_HEAD = {
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "conv_in": "input_blocks.0.0",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
}
_BLOCK = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
_PLACE = re.compile(r"(down|up|mid)_blocks?\.(?:(\d+)\.)?(resnets|attentions|downsamplers|upsamplers)\.(\d+)\.")


def original_names(layers: Sequence[Layer]) -> dict[str, str]:
    """Return the original name of each of the diffusers tensors of a U-Net that reads text.

    Raises:
        ValueError: the original code has no such U-Net.
    """
    names = [name for _, theirs in tensor_names(layers) for name in theirs]
    blocks = sum(layer.name.startswith("down.0.block") for layer in layers)
    attended = {name.split(".")[1] for name in names if name.startswith("up_blocks") and ".attentions." in name}
    return {name: UNET + _original(name, blocks, attended) for name in names}


def _original(name: str, blocks: int, attended: set[str]) -> str:
    """Return an original name, for so many residual blocks in an encoder level and the ``attended`` decoder levels."""
    found = _PLACE.match(name)
    if found is None:
        module, _, kind = name.rpartition(".")
        if module not in _HEAD:
            what = "classes" if name == CLASS_EMBEDDING else "the level of a condition"
            raise ValueError(f"the U-Net is told {what}, for which single files have no name")
        return f"{_HEAD[module]}.{kind}"
    side, level, kind, number = found.groups()
    rest = name[found.end() :]
    if kind == "resnets":
        module, _, last = rest.rpartition(".")
        rest = f"{_BLOCK[module]}.{last}"
    if side == "mid":
        return f"middle_block.{1 if kind == 'attentions' else 2 * int(number)}.{rest}"
    first = int(level) * (blocks + 1)
    if kind == "downsamplers":
        return f"input_blocks.{first + blocks + 1}.0.op.{rest.removeprefix('conv.')}"
    if kind == "upsamplers":
        return f"output_blocks.{first + blocks}.{2 if level in attended else 1}.{rest}"
    block = first + int(number)
    place = f"input_blocks.{block + 1}" if side == "down" else f"output_blocks.{block}"
    return f"{place}.{int(kind == 'attentions')}.{rest}"


class SingleFile:
    """Single file with the original names, of which only names and shapes are read at first.

    Raises:
        CheckpointError: it can't be read, or is none of SD 1, SD 2 and SDXL.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = open_tensors(path)
            names = list(self._file.keys())
            shapes = {name: tuple(self._file.get_slice(name).get_shape()) for name in names if name.startswith(UNET)}
        except OSError as error:
            raise CheckpointError(f"{path} can't be read as a single file ({error.strerror})") from None
        self.predicts_v, self.zero_snr = V in names, ZERO_SNR in names
        self._names = [*shapes]
        self.config: dict[str, Any] = self._config({name.removeprefix(UNET): shape for name, shape in shapes.items()})
        """Arguments of the ``UNet2DConditionModel``."""

    def _config(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
        if "input_blocks.0.0.weight" not in shapes:
            why = "a LoRA, a ControlNet and an autoencoder are none, and .ckpt files are not read"
            raise CheckpointError(f"{self.path} holds no {UNET}input_blocks.0.0.weight, so it is no U-Net; {why}")
        try:
            return _config_of(shapes)
        except (LookupError, IndexError, ZeroDivisionError):
            raise CheckpointError(
                f"{self.path} is none of SD 1, SD 2 and SDXL: its U-Net is built differently"
            ) from None

    @property
    def says_prediction(self) -> bool:
        """Whether the file decides what is predicted; models of SD 2 predict either, and most files don't say it."""
        return self.predicts_v or self.config["cross_attention_dim"] != 1024

    def scheduler(self, objective: str) -> dict[str, Any]:
        """Return the arguments of the scheduler, with the given ``objective`` where the file does not say it."""
        v = self.predicts_v or (not self.says_prediction and objective == "v")
        return {**BETAS, "prediction_type": "v_prediction" if v else "epsilon", "rescale_betas_zero_snr": self.zero_snr}

    def tensors(self, layers: Sequence[Layer]) -> dict[str, Tensor]:
        """Return the tensors of the U-Net by diffusers' names; raises ValueError if the names are others."""
        originals = original_names(layers)
        if wrong := set(originals.values()) ^ set(self._names):
            raise ValueError(f"{len(wrong)} tensor names don't match the U-Net, the first is {min(wrong)}")
        return {name: self._file.get_tensor(original) for name, original in originals.items()}


def _config_of(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return diffusers' configuration of a U-Net with tensors of these names; raises LookupError for another kind."""
    widths, depths, counts = [0], [0], [0]
    number = 1
    while any(name.startswith(f"input_blocks.{number}.") for name in shapes):
        block = f"input_blocks.{number}"
        if f"{block}.0.op.weight" in shapes:
            for values in (widths, depths, counts):
                values.append(0)
        else:
            widths[-1], counts[-1] = shapes[f"{block}.0.out_layers.3.weight"][0], counts[-1] + 1
            depths[-1] = _depth(shapes, f"{block}.1")
        number += 1
    middle = _depth(shapes, "middle_block.1")
    last = f"middle_block.1.transformer_blocks.{middle - 1}"
    linear, context = len(shapes["middle_block.1.proj_in.weight"]) == 2, shapes[f"{last}.attn2.to_k.weight"][1]
    added, out = shapes.get("label_emb.0.0.weight"), shapes["out.2.weight"][0]
    if (added is not None) != (linear and len(widths) == 3) or "label_emb.weight" in shapes:
        raise LookupError
    return {
        "_class_name": CLASS_NAME,
        "sample_size": 64 if not linear else 96 if added is None else 128,
        "in_channels": shapes["input_blocks.0.0.weight"][1],
        "out_channels": out,
        "block_out_channels": widths,
        "layers_per_block": counts,
        "down_block_types": ["CrossAttnDownBlock2D" if depth else "DownBlock2D" for depth in depths],
        "up_block_types": ["CrossAttnUpBlock2D" if depth else "UpBlock2D" for depth in reversed(depths)],
        "transformer_layers_per_block": [*(depth or 1 for depth in depths[:-1]), middle],
        "attention_head_dim": [max(1, width // 64) for width in widths] if linear else 8,
        "cross_attention_dim": context,
        "use_linear_projection": linear,
        "upcast_attention": linear and added is None,
        **(
            {
                "addition_embed_type": "text_time",
                "addition_time_embed_dim": 256,
                "projection_class_embeddings_input_dim": added[1],
            }
            if added
            else {}
        ),
    }


def _depth(shapes: Mapping[str, tuple[int, ...]], place: str) -> int:
    """Return the number of transformer blocks at a place."""
    return sum(name.startswith(f"{place}.transformer_blocks.") and name.endswith(".norm1.weight") for name in shapes)
