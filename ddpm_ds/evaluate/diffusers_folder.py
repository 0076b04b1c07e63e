"""A folder that diffusers has written, or that was written for it: configurations and weights, read without it."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ddpm_ds.diffusion.diffusers_schedule import diffusion_from_scheduler
from ddpm_ds.errors import CheckpointError
from ddpm_ds.spec import DiffusionSpec
from ddpm_ds.unet.diffusers_config import unet_spec_from_diffusers
from ddpm_ds.unet.diffusers_names import from_published, published_shape, stored_names, tensor_names
from ddpm_ds.unet.layers import Layer

WEIGHTS = ("diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.bin")
CONFIG, SCHEDULER_CONFIG = "config.json", "scheduler_config.json"
CHUNK_BYTES = 2**20


class DiffusersFolder:
    """A pipeline (``unet/config.json``, ``scheduler/scheduler_config.json``) or a bare model (both at the root).

    Raises:
        CheckpointError: a file is missing, can't be read, or describes what our U-Net can't express; so do all methods.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        model = path / "unet" if (path / "unet" / CONFIG).is_file() else path
        config = _read_json(model / CONFIG)
        scheduler = path / "scheduler" if (path / "scheduler" / SCHEDULER_CONFIG).is_file() else path
        self._scheduler = scheduler / SCHEDULER_CONFIG
        try:
            self.unet, self.image_channels, self.image_size = unet_spec_from_diffusers(config)
        except ValueError as error:
            raise CheckpointError(f"{model / CONFIG} is no U-Net of ours: {error}") from None
        self.class_rows: int | None = config.get("num_class_embeds")
        """Rows of the class embedding, the last of which is read as "no label"."""
        found = [model / name for name in WEIGHTS if (model / name).is_file()]
        if not found:
            raise CheckpointError(f"{model} holds no weights; it should hold {' or '.join(WEIGHTS)}, in one file")
        self.weights: Path = found[0]

    @staticmethod
    def at(path: Path) -> bool:
        """Whether ``path`` is meant to be such a folder."""
        return (path / "unet" / CONFIG).is_file() or (path / CONFIG).is_file()

    @property
    def has_schedule(self) -> bool:
        return self._scheduler.is_file()

    def diffusion(self, base: DiffusionSpec | None = None) -> DiffusionSpec:
        """The diffusion process; its loss and weighting are those of ``base``."""
        if not self.has_schedule:
            raise CheckpointError(
                f"{self.path} holds no {SCHEDULER_CONFIG}, so its noise schedule is not known; add the one it was "
                f"trained with"
            )
        try:
            return diffusion_from_scheduler(_read_json(self._scheduler), base)
        except ValueError as error:
            raise CheckpointError(f"{self._scheduler} is no diffusion process of ours: {error}") from None

    def tensors(self, layers: Sequence[Layer], shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Tensor]]:
        """Each of our tensors in fp32, by its name in ``shapes``, one at a time."""
        names, read = _open_weights(self.weights)
        try:
            stored = stored_names(names, layers)
        except ValueError as error:
            raise CheckpointError(f"{self.weights} does not fit its {CONFIG}: {error}") from None
        for ours, theirs in tensor_names(layers):
            first, *rest = published_shape(shapes[ours])
            expected = (first // len(theirs), *rest)
            parts = []
            for name in theirs:
                part = read(stored[name])
                if tuple(part.shape) != expected or not part.is_floating_point():
                    what = f"{str(part.dtype).removeprefix('torch.')} of shape {tuple(part.shape)}"
                    raise CheckpointError(
                        f"{self.weights} does not fit its {CONFIG}: {stored[name]} is {what}, not floats of {expected}"
                    )
                parts.append(part.float())
            yield ours, from_published(torch.cat(parts))

    def digest(self) -> str:
        """The sha256 of the file of weights."""
        digest = hashlib.sha256()
        with self.weights.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
        return digest.hexdigest()


def _open_weights(path: Path) -> tuple[Iterable[str], Callable[[str], Tensor]]:
    """The tensors' names in a file, and what reads one of them."""
    try:
        if path.suffix == ".safetensors":
            opened = safe_open(path, framework="pt")
            return opened.keys(), opened.get_tensor
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError):
        raise CheckpointError(f"{path} is damaged, or holds more than tensors; get it again") from None
    if not isinstance(state, dict) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        raise CheckpointError(f"{path} holds something else than tensors by name; it should be a model's state")
    return state.keys(), state.__getitem__


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path} can't be read ({error.strerror})") from None
    except ValueError:
        raise CheckpointError(f"{path} is damaged: it is not JSON") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} is no configuration: it should be a JSON object")
    return values
