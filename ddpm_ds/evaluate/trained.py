"""Trained weights, whole and in one process: from a checkpoint of any layout, or from a folder of diffusers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from pydantic import ValidationError
from torch import Tensor

from ddpm_ds.checkpoint.folder import newest_good
from ddpm_ds.checkpoint.manifest import MANIFEST
from ddpm_ds.checkpoint.reader import Reader
from ddpm_ds.errors import CheckpointError
from ddpm_ds.evaluate.diffusers_folder import DiffusersFolder
from ddpm_ds.spec import DiffusionSpec, RunSpec, SamplerSpec, UnetSpec
from ddpm_ds.train.run_folder import checkpoints_of
from ddpm_ds.train.tracking import print_to_stderr
from ddpm_ds.unet.layers import Layer, unet_layers
from ddpm_ds.unet.model import UNet, parameter_shapes

Weights = Literal["ema", "raw"]
KINDS: dict[Weights, str] = {"ema": "ema", "raw": "master"}
"""Kinds of a checkpoint: averaged, and as trained."""


@dataclass(frozen=True)
class Trained:
    """A trained U-Net with what is needed to draw from it and to say where it is from."""

    unet: UNet
    """In eval mode, without gradients."""
    unet_spec: UnetSpec
    diffusion: DiffusionSpec
    sampler: SamplerSpec
    """The run's own; the default one for an export, which does not say how it is drawn from."""
    image_shape: tuple[int, int, int]
    """(C, H, W)"""
    origin: str
    """Path of the folder that the weights were read from."""
    digest: str
    """sha256 that is another one whenever the weights are."""
    weights: Literal["ema", "raw", "export"]
    images_seen: int | None
    """Of a checkpoint: how long it was trained."""
    run_dir: Path | None
    """The run's folder, where the checkpoint lies in ``RUN_DIR/checkpoints``."""
    spec: RunSpec | None
    """The run's spec; None for an export."""


def find_trained(path: Path) -> Path:
    """The folder to load: a checkpoint, a run's newest good one, or a folder of diffusers.

    Raises:
        CheckpointError: it is none of these, or the run has no good checkpoint.
    """
    if (path / MANIFEST).is_file() or DiffusersFolder.at(path):
        return path
    if checkpoints_of(path).is_dir():
        newest = newest_good(checkpoints_of(path), say=print_to_stderr)
        if newest is None:
            raise CheckpointError(f"run {path} has no checkpoint yet; name a run that has saved, or a checkpoint")
        return newest
    what = "holds no weights" if path.is_dir() else "is no folder" if path.exists() else "does not exist"
    raise CheckpointError(
        f"{path} {what}; name a checkpoint ({MANIFEST}), a run's folder (checkpoints/) or an export (unet/config.json)"
    )


def load_trained(
    path: Path,
    *,
    weights: Weights = "ema",
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Trained:
    """The weights of :func:`find_trained`, read one parameter at a time, on ``device`` and in ``dtype``.

    Raises:
        CheckpointError: there are no such weights, they are damaged, or not finite in ``dtype``.
    """
    found = find_trained(path)
    if (found / MANIFEST).is_file():
        return _load_checkpoint(found, weights, device, dtype)
    if weights != "ema":
        raise CheckpointError(f"{found} is an export, which has weights of one kind; leave out --weights {weights}")
    return _load_export(found, device, dtype)


def _load_checkpoint(path: Path, weights: Weights, device: torch.device | str, dtype: torch.dtype) -> Trained:
    reader, kind = Reader(path), KINDS[weights]
    if kind not in reader.kinds:
        others = [name for name, stored in KINDS.items() if stored in reader.kinds]
        raise CheckpointError(f"checkpoint {path} has no {weights} weights; it has {', '.join(others) or 'none'}")
    try:
        spec = RunSpec.model_validate(reader.manifest.spec)
    except ValidationError as error:
        problem = error.errors()[0]
        what = f"{'.'.join(map(str, problem['loc']))}: {problem['msg'].removeprefix('Value error, ')}"
        raise CheckpointError(
            f"checkpoint {path} has a spec that this version can't read ({what}); use the ddpm_ds "
            f"{reader.manifest.version} that wrote it"
        ) from None
    data = spec.data
    layers = unet_layers(spec.unet, image_channels=data.channels, image_size=data.image_size)
    unet = _build(layers, device, dtype)
    shapes = parameter_shapes(layers)
    if shapes != reader.manifest.parameters:
        wrong = min(shapes.items() ^ reader.manifest.parameters.items())[0]
        raise CheckpointError(f"checkpoint {path} is of another U-Net than its spec: {wrong} differs; use another")
    _fill(unet, ((name, reader.read(kind, name).view(shape)) for name, shape in shapes.items()), path)
    folder = path.resolve()
    run_dir = folder.parent.parent if folder.parent == checkpoints_of(folder.parent.parent) else None
    return Trained(
        unet=unet,
        unet_spec=spec.unet,
        diffusion=spec.diffusion,
        sampler=spec.sampler,
        image_shape=(data.channels, data.image_size, data.image_size),
        origin=str(path),
        digest=hashlib.sha256(f"{reader.manifest.sha256} {kind}".encode()).hexdigest(),
        weights=weights,
        images_seen=reader.manifest.images,
        run_dir=run_dir,
        spec=spec,
    )


def _load_export(path: Path, device: torch.device | str, dtype: torch.dtype) -> Trained:
    folder = DiffusersFolder(path)
    channels, size = folder.image_channels, folder.image_size
    diffusion = folder.diffusion()
    layers = unet_layers(folder.unet, image_channels=channels, image_size=size)
    unet = _build(layers, device, dtype)
    _fill(unet, folder.tensors(layers, parameter_shapes(layers)), path)
    return Trained(
        unet=unet,
        unet_spec=folder.unet,
        diffusion=diffusion,
        sampler=SamplerSpec(),
        image_shape=(channels, size, size),
        origin=str(path),
        digest=folder.digest(),
        weights="export",
        images_seen=None,
        run_dir=None,
        spec=None,
    )


def _build(layers: Sequence[Layer], device: torch.device | str, dtype: torch.dtype) -> UNet:
    """A U-Net whose weights are still to be filled in."""
    return UNet(layers, 0).eval().requires_grad_(False).to(device, dtype)


def _fill(unet: UNet, tensors: Iterable[tuple[str, Tensor]], path: Path) -> None:
    """Put tensors by global name into a U-Net."""
    parameters = dict(unet.layers.named_parameters())
    for name, tensor in tensors:
        parameters[name].copy_(tensor)
        if not parameters[name].isfinite().all():
            if tensor.isfinite().all():
                dtype = str(parameters[name].dtype).removeprefix("torch.")
                raise CheckpointError(f"{name} of {path} has values beyond {dtype}; use fp32")
            raise CheckpointError(f"{name} of {path} has values that are not finite; use weights from before")
