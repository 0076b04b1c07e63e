"""Weights of diffusers in files: one, or shards with an index, in full precision or rounded; read without executing
anything in them.
"""

import hashlib
import os
import warnings
import zipfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ddpm_ds.errors import CheckpointError
from ddpm_ds.files import open_regular, open_tensors, read_json, sha256_of

INDEX = ".index.json"
WEIGHTS = (
    "diffusion_pytorch_model.safetensors",
    f"diffusion_pytorch_model.safetensors{INDEX}",
    "diffusion_pytorch_model.bin",
    "diffusion_pytorch_model.fp16.safetensors",
    f"diffusion_pytorch_model.fp16.safetensors{INDEX}",
    "diffusion_pytorch_model.safetensors.index.fp16.json",
)
"""Names of a model's weights, of which the first that is there is read: full precision before 16 bits."""


@dataclass(frozen=True)
class Weights:
    """Weights of a model."""

    path: Path
    """The file, or the index of the shards."""
    files: tuple[Path, ...]
    """Files with tensors."""

    @classmethod
    def of(cls, folder: Path) -> "Weights":
        """Return the weights of the model in ``folder``; raises CheckpointError if there are none."""
        for path in (folder / name for name in WEIGHTS):
            if path.is_file():
                return cls(path, _shards(path) if path.suffix == ".json" else (path,))
        one = f"{WEIGHTS[0]} or {WEIGHTS[2]}"
        raise CheckpointError(f"{folder} holds no weights; it should hold {one}, shards of it, or its fp16 variant")

    @property
    def digest(self) -> str:
        """SHA-256 that changes whenever a tensor does."""
        first, *more = [sha256_of(file) for file in self.files]
        return hashlib.sha256(" ".join([first, *more]).encode()).hexdigest() if more else first

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name, as they are stored; raises CheckpointError if a file is damaged."""
        found: dict[str, Tensor] = {}
        for file in self.files:
            part = read_weights(file)
            if twice := found.keys() & part.keys():
                raise CheckpointError(f"{file} holds {min(twice)}, as another shard of {self.path} does; get it again")
            found |= part
        return found


def _shards(index: Path) -> tuple[Path, ...]:
    """Return the files of an index, which are beside it."""
    damaged = CheckpointError(f"{index} is damaged: it should map names of tensors to files beside it; get it again")
    try:
        names = {str(name) for name in read_json(index)["weight_map"].values()}
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        raise damaged from None
    if not names or any(Path(name).name != name or not name.endswith(".safetensors") for name in names):
        raise damaged
    for name in sorted(names):
        if not (index.parent / name).is_file():
            raise CheckpointError(f"{index} names {name}, which is not beside it; get that file as well")
    return tuple(index.parent / name for name in sorted(names))


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file by name; raises CheckpointError if it is damaged or holds anything else."""
    try:
        if path.suffix == ".safetensors":
            file = open_tensors(path)
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        _check_archive(path)
        with warnings.catch_warnings(action="ignore"):  # they are about sparse tensors, which are refused below
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # a forged file can make its reader raise anything
        raise CheckpointError(f"{path} is damaged, or holds more than tensors; get it again") from None
    if not isinstance(state, dict) or not all(isinstance(name, str) and _plain(state[name]) for name in state):
        raise CheckpointError(f"{path} holds something other than plain tensors by name; it should be a model's state")
    return state


def _check_archive(path: Path) -> None:
    """Raise ValueError if a file of torch.save would grow when read; torch.save itself never compresses."""
    with open_regular(path) as file:
        if zipfile.is_zipfile(file):
            parts = zipfile.ZipFile(file).infolist()
            if sum(part.file_size for part in parts) > os.fstat(file.fileno()).st_size:
                raise ValueError("compressed")


def _plain(tensor: object) -> bool:
    """Return whether this is a tensor with all of its values in memory. A sparse or meta tensor, or one with a stride
    of 0, could grow to any size when it is copied.
    """
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.is_meta:
        return False
    return tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes()
