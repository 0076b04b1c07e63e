"""The weights that a run begins with, where `train.initial_weights` names a file of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ddpm_ds.errors import SpecError

DTYPES = ("F64", "F32", "F16", "BF16")
SOURCES = "`ddpm-ds import` and `ddpm-ds checkpoint consolidate` write such files"


class InitialWeights:
    """An open safetensors file of whole tensors, of any float dtype, by the global names of a U-Net's parameters.

    ``shapes`` are the shapes of all parameters by global name; names and shapes are checked at once.

    Raises:
        SpecError: the file can't be read, or is of another U-Net; one line.
    """

    def __init__(self, path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.path, self._shapes = path, dict(shapes)
        try:
            with path.open("rb"):  # or else safetensors would say it in other words
                self._file = safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else "it is no safetensors file"
            raise SpecError(f"train.initial_weights = {path} can't be read ({reason}); {SOURCES}") from None
        found = set(self._file.keys())
        for wrong, what in ((self._shapes.keys() - found, "lacks"), (found - self._shapes.keys(), "also has")):
            if wrong:
                raise self._of_another_unet(f"it {what} {min(wrong)}")
        for name, shape in self._shapes.items():
            piece = self._file.get_slice(name)
            if tuple(piece.get_shape()) != shape:
                raise self._of_another_unet(f"{name} is {tuple(piece.get_shape())}, not {shape}")
            if piece.get_dtype() not in DTYPES:
                raise self._of_another_unet(f"{name} is {piece.get_dtype()}, no float")

    def read(self, name: str, first: int = 0, length: int | None = None) -> Tensor:
        """``length`` values (to the end when None) of flattened parameter ``name``, from ``first`` on.

        (length,) fp32 in host memory, a copy; only the rows that hold them are read.
        """
        shape = self._shapes[name]
        stop = math.prod(shape) if length is None else first + length
        if not 0 <= first <= stop <= math.prod(shape):
            raise ValueError(f"values {first} to {stop} of {name}, which has {math.prod(shape)}")
        if first == stop:
            return torch.empty(0)
        row = math.prod(shape[1:])
        low = first // row
        rows = self._file.get_slice(name)[low : math.ceil(stop / row)]
        return rows.flatten()[first - low * row : stop - low * row].to(torch.float32, copy=True)

    def _of_another_unet(self, what: str) -> SpecError:
        return SpecError(
            f"train.initial_weights = {self.path} is of another U-Net than the section unet: {what}; use the spec "
            f"that came with it, or null"
        )
