"""Folder of a model or a pipeline of diffusers, read without diffusers and without executing code in it. Weights are
one file, or shards with an index, in full precision or in 16 bits.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor
from torch.nn.functional import pad

from ddpm_ds.data.cache import CONSTANTS, FieldFacts
from ddpm_ds.data.latents import Autoencoder
from ddpm_ds.data.spec import DataSpec
from ddpm_ds.data.text import DOWNLOADED as ENCODERS
from ddpm_ds.diffusion.spec import DiffusionSpec
from ddpm_ds.evaluate.diffusers.scheduler import Arguments, process_from_scheduler
from ddpm_ds.evaluate.diffusers.unet import (
    AVERAGED,
    CLASS_EMBEDDING,
    SingleFile,
    from_diffusers,
    stored_names,
    to_diffusers,
)
from ddpm_ds.evaluate.diffusers.unet_config import input_order, unet_spec_from_diffusers
from ddpm_ds.ground.errors import CheckpointError
from ddpm_ds.ground.files import open_regular, sha256_of
from ddpm_ds.ground.formats import open_tensors, read_json
from ddpm_ds.unet.layers import parameter_shapes, unet_layers

INDEX = ".index.json"
WEIGHTS = (
    "diffusion_pytorch_model.safetensors",
    f"diffusion_pytorch_model.safetensors{INDEX}",
    "diffusion_pytorch_model.bin",
    "diffusion_pytorch_model.fp16.safetensors",
    f"diffusion_pytorch_model.fp16.safetensors{INDEX}",
    "diffusion_pytorch_model.safetensors.index.fp16.json",
)
"""Names of a model's weights; the first that exists is read, full precision before 16 bits."""
CONFIG, SCHEDULER_CONFIG = "config.json", "scheduler_config.json"
PIPELINE = "model_index.json"
FIELDS = "fields.json"
"""File of an export that describes its images and conditions; diffusers does not read it."""
AUTOENCODER_FOLDER = "vqvae"
"""Name of the autoencoder's folder in an export, as diffusers' LDMPipeline expects it."""
TEXT_AUTOENCODER = "vae"
"""Name of the autoencoder's folder in a pipeline that reads text."""
USUAL_DROP = 0.1
"""Share of images whose condition InstructPix2Pix drops in training."""
PIPELINES: Mapping[str | None, tuple[str, ...]] = {
    None: ("StableDiffusionPipeline", "StableDiffusionXLPipeline"),
    "inpaint": ("StableDiffusionInpaintPipeline", "StableDiffusionXLInpaintPipeline"),
    "edit": ("StableDiffusionInstructPix2PixPipeline", "StableDiffusionXLInstructPix2PixPipeline"),
    "depth": ("MarigoldDepthPipeline",),
}
"""Pipelines that read text, with one text encoder and with two, by the use of the U-Net's conditions."""
IMPORTED = (
    *(f"{place}{file}" for place in ("", "unet/") for file in (CONFIG, "diffusion_pytorch_model*.safetensors*")),
    *(SCHEDULER_CONFIG, f"scheduler/{SCHEDULER_CONFIG}", PIPELINE),
    *(f"text_encoder/{CONFIG}", f"text_encoder_2/{CONFIG}"),
)
"""Files of a model on the Hugging Face hub that an import reads."""
DRAWN_FROM = (*IMPORTED, f"{AUTOENCODER_FOLDER}/*", f"{TEXT_AUTOENCODER}/*", *ENCODERS, FIELDS, CONSTANTS)
"""Files that drawing reads."""


@dataclass(frozen=True)
class Weights:
    """Files of a model's weights. Every method raises CheckpointError if one is missing or damaged."""

    path: Path
    """The file, or the index of the shards."""
    files: tuple[Path, ...]
    """Files with tensors."""

    @classmethod
    def of(cls, folder: Path) -> Weights:
        """Return the weights of the model in ``folder``."""
        path = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
        if path is None:
            one = f"{WEIGHTS[0]} or {WEIGHTS[2]}"
            raise CheckpointError(f"{folder} holds no weights; it should hold {one}, shards of it, or its fp16 variant")
        if path.suffix != ".json":
            return cls(path, (path,))
        names: list[str] = []
        with contextlib.suppress(OSError, ValueError, TypeError, LookupError, AttributeError):
            names = sorted({str(name) for name in read_json(path)["weight_map"].values()})
        if not names or any(Path(name).name != name or not name.endswith(".safetensors") for name in names):
            raise CheckpointError(f"{path} is damaged: it should map names of tensors to files beside it; get it again")
        for name in names:
            if not (folder / name).is_file():
                raise CheckpointError(f"{path} names {name}, which is not beside it; get that file as well")
        return cls(path, tuple(folder / name for name in names))

    @property
    def digest(self) -> str:
        """SHA-256 that changes whenever a tensor does."""
        first, *more = [sha256_of(file) for file in self.files]
        return hashlib.sha256(" ".join([first, *more]).encode()).hexdigest() if more else first

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name, as they are stored."""
        found: dict[str, Tensor] = {}
        for file in self.files:
            part = read_weights(file)
            if twice := found.keys() & part.keys():
                raise CheckpointError(f"{file} holds {min(twice)}, as another shard of {self.path} does; get it again")
            found |= part
        return found


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file by name; raise CheckpointError if it is damaged or holds anything else."""
    try:
        if path.suffix == ".safetensors":
            file = open_tensors(path)
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        with open_regular(path) as stored:  # torch.save never compresses: a compressed file would grow when read
            if zipfile.is_zipfile(stored):
                parts = zipfile.ZipFile(stored).infolist()
                if sum(part.file_size for part in parts) > os.fstat(stored.fileno()).st_size:
                    raise ValueError("compressed")
        with warnings.catch_warnings(action="ignore"):  # about sparse tensors, which are refused below
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # a forged file can make its reader raise anything
        raise CheckpointError(f"{path} is damaged, or holds more than tensors; get it again") from None
    for name, tensor in state.items() if isinstance(state, dict) else [("", None)]:
        # Sparse, meta and expanded tensors hold fewer values than their shape, and can grow when copied.
        if (
            not (isinstance(name, str) and isinstance(tensor, Tensor))
            or (tensor.layout != torch.strided or tensor.is_meta)
            or tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes()
        ):
            raise CheckpointError(f"{path} holds something other than plain tensors by name; name a model's state")
    return dict(state)


class FieldsFile(BaseModel):
    """Content of ``fields.json`` of an export: images and conditions of its U-Net, for sampling by ddpm_ds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    data: DataSpec
    """Section `data` of the run, without paths."""
    facts: FieldFacts | None

    @classmethod
    def of(cls, data: DataSpec, facts: FieldFacts | None) -> FieldsFile | None:
        """Return the content for a run's data; None for pictures and latents without a condition."""
        if data.condition is None and not data.are_fields:
            return None
        keys = {"source", "image_size", "crop_from", "channels", "values", "normalise", "variables", "condition"}
        keys |= {"mask"} if data.are_fields else set()
        kept = data.model_dump(mode="json", include=keys, exclude={"condition": {"path", "held_out_path"}})
        if data.autoencoder is not None:
            kept["autoencoder"] = AUTOENCODER_FOLDER if data.text is None else TEXT_AUTOENCODER
        return cls(data=DataSpec.model_validate(kept), facts=facts)


class _PipelineArguments(Arguments):
    """Settings of a pipeline, without its parts, which are lists of library and class."""

    class_names: ClassVar = ("pipeline",)
    kind: ClassVar = "setting of a pipeline"
    ignored: ClassVar = (
        *("requires_safety_checker", "add_watermarker", "prediction_type", "scale_invariant", "shift_invariant"),
        *("default_denoising_steps", "default_processing_resolution"),
    )

    force_zeros_for_empty_prompt: bool | None = None
    """A missing value means true for pipelines of SDXL, which have a second text encoder."""
    is_cosxl_edit: bool = False
    """Whether an InstructPix2Pix pipeline of SDXL scales the latents of its image."""


class DiffusersFolder:
    """Folder of a pipeline (``unet/config.json``, ``scheduler/scheduler_config.json``) or a model (both at the root),
    or a single file with the original names.

    The last row of a class embedding means "no label"; with ``last_label_is_class`` a row of zeros is added for that.
    ``hub_name`` is the repository on the Hugging Face hub from which the folder was copied.

    Every method raises CheckpointError if a file is missing, can't be read, or can't be expressed by our U-Net.
    """

    def __init__(self, path: Path, *, last_label_is_class: bool = False, hub_name: str | None = None) -> None:
        self.path, self.last_label_is_class, self._hub_name = path, last_label_is_class, hub_name
        self.single = SingleFile(path) if path.is_file() else None
        """The single file with the original names, if the path names one."""
        self._model = path / "unet" if (path / "unet" / CONFIG).is_file() else path
        scheduler = path / "scheduler" / SCHEDULER_CONFIG
        self._scheduler = scheduler if scheduler.is_file() else path / SCHEDULER_CONFIG
        config = _read_json(self._model / CONFIG) if self.single is None else self.single.config
        with self._expressed("a U-Net", path if self.single else self._model / CONFIG):
            found = unet_spec_from_diffusers(config, last_label_is_class=last_label_is_class)
        self.unet, self.interface = found
        self.layers = unet_layers(self.unet, self.interface)
        classes = self.unet.classes
        self.class_rows = None if classes is None else classes + (0 if last_label_is_class else 1)
        """Number of rows of the class embedding."""
        self.weights = Weights.of(self._model) if self.single is None else Weights(path, (path,))

    @staticmethod
    @contextlib.contextmanager
    def _expressed(what: str, where: Path) -> Iterator[None]:
        """Turn a ValueError in the body into a CheckpointError about a file."""
        try:
            yield
        except ValueError as error:
            raise CheckpointError(f"{where} is not {what} that ddpm_ds can express: {error}") from None

    @staticmethod
    def at(path: Path) -> bool:
        """Return whether ``path`` looks like a diffusers folder."""
        return (path / "unet" / CONFIG).is_file() or (path / CONFIG).is_file()

    def autoencoder(self) -> Autoencoder | None:
        """Open the autoencoder beside the U-Net; return None if the U-Net draws pixels."""
        channels = self.interface.channels
        for path in (self.path / AUTOENCODER_FOLDER, self.path / TEXT_AUTOENCODER):
            if path.is_dir():
                found = Autoencoder.open(path)
                if found.channels != channels:
                    others = f"those of {path.name} have {found.channels}; put the autoencoder of its latents there"
                    raise CheckpointError(f"{self.path} draws latents of {channels} channels, and {others}")
                return found
        if channels not in (1, 3) and not (self.path / FIELDS).is_file():
            fix = f"add it as {TEXT_AUTOENCODER}/{CONFIG} with its weights"
            what = f"images of {channels} channels, which are latents, and holds no autoencoder"
            raise CheckpointError(f"{self.path} draws {what}; {fix}")
        return None

    def fields(self) -> FieldsFile | None:
        """Return the content of ``fields.json``, or of one for the pipeline's class; None for other pipelines."""
        if not (self.path / FIELDS).is_file():
            return self._of_pipeline()
        try:
            return FieldsFile.model_validate(_read_json(self.path / FIELDS), strict=False)
        except ValidationError as error:
            problem = error.errors()[0]
            key = ".".join(map(str, problem["loc"]))
            raise CheckpointError(f"{self.path / FIELDS}: {key}: {problem['msg']}; export the run again") from None

    def _of_pipeline(self) -> FieldsFile | None:
        index, settings = self._pipeline
        name = index.get("_class_name")
        use = next((use for use, names in PIPELINES.items() if name in names), None)
        if use is None or not self.interface.condition_channels:
            return None
        keys: dict[str, dict[str, object]] = {
            "inpaint": {"kind": "cut_out"},
            "edit": {"kind": "stored", "scaled": settings.is_cosxl_edit, "drop": USUAL_DROP},
            "depth": {"kind": "stored"},
        }
        height, width = self.interface.size
        data = {"source": "folder", "image_size": [height, width], "channels": self.interface.channels}
        data |= {"condition": keys[use], "autoencoder": TEXT_AUTOENCODER}
        return FieldsFile.model_validate({"data": data, "facts": None}, strict=False)

    @functools.cached_property
    def _pipeline(self) -> tuple[Mapping[str, Any], _PipelineArguments]:
        """Content of ``model_index.json``, empty without it, and its settings."""
        index = self.path / PIPELINE
        known = _read_json(index) if index.is_file() else {}
        parts = {key for key, value in known.items() if isinstance(value, list) or key == "_class_name"}
        with self._expressed("of a pipeline", index):
            return known, _PipelineArguments.read({key: known[key] for key in known.keys() - parts})

    def encoding(self) -> dict[str, str]:
        """Return the keys of ``data.text`` that the model decides: none without a text encoder, and ``encoders`` only
        for a folder.
        """
        found, second, zeros = {}, self.single is not None and self.single.is_xl, None
        if self.single is None:
            if not (self.path / "text_encoder" / CONFIG).is_file():
                return {}
            found["encoders"] = self._hub_name or str(self.path.resolve())
            second = (self.path / "text_encoder_2" / CONFIG).is_file()
            zeros = self._pipeline[1].force_zeros_for_empty_prompt
        zeros = second if zeros is None else zeros
        return {**found, "layer": "penultimate" if second else "last", "drop_to": "zeros" if zeros else "empty"}

    @property
    def own_autoencoder(self) -> str | None:
        """Value of ``data.autoencoder`` for the pipeline's own; None if there is none."""
        index = self.path / PIPELINE
        parts = _read_json(index) if index.is_file() else {}
        name = next(
            (name for name in (TEXT_AUTOENCODER, AUTOENCODER_FOLDER) if isinstance(parts.get(name), list)), None
        )
        return None if name is None else f"{self._hub_name or self.path.resolve()}/{name}"

    @property
    def notes(self) -> list[str]:
        """Lines about averaged weights that are not read."""
        if self.single is not None and self.single.has_averaged:
            return [f"{self.path} also holds averaged weights ({AVERAGED}*), which are not read: these are as trained"]
        if (averaged := self.path / "unet_ema").is_dir() and self._model.name == "unet":
            return [f"{self._model} is as trained; for the averaged weights beside it name {averaged}"]
        return []

    @property
    def has_schedule(self) -> bool:
        """Whether the noise schedule is known: a folder may hold it, and all single files share one."""
        return self.single is not None or self._scheduler.is_file()

    def process(
        self, base: DiffusionSpec | None = None, objective: str | None = None
    ) -> tuple[DiffusionSpec, dict[str, float]]:
        """Return the diffusion process of the folder, with the loss and weighting of ``base``, and its sampler's noise
        levels or shift, if it names any. A typed ``objective`` counts before a single file's own.
        """
        if not self.has_schedule:
            fault = "so its noise schedule is not known; add the one it was trained with"
            raise CheckpointError(f"{self.path} holds no {SCHEDULER_CONFIG}, {fault}")
        with self._expressed("a diffusion process", self.path if self.single else self._scheduler):
            if self.single is not None:
                silent = "v" if base is not None and base.objective == "v" else "eps"
                return process_from_scheduler(self.single.scheduler(objective, silent)[0], base)
            return process_from_scheduler(_read_json(self._scheduler), base)

    def tensors(self, data: DataSpec | None = None) -> dict[str, Tensor]:
        """Return the weights of our U-Net in fp32 by global name, checked against the configuration.

        The condition in ``data`` (None: of :meth:`fields`) says the order of the input channels.
        """
        if data is None and (fields := self.fields()) is not None:
            data = fields.data
        order = input_order(self.unet, data) if self.interface.condition_channels else []
        misfit = f"{self.weights.path} does not fit its {CONFIG if self.single is None else 'kind'}: "
        try:
            stored = self.weights.tensors() if self.single is None else self.single.tensors(self.layers)
            names = stored_names(stored, self.layers)
        except ValueError as error:
            raise CheckpointError(f"{misfit}{error}") from None
        if self.last_label_is_class and CLASS_EMBEDDING in stored and stored[CLASS_EMBEDDING].ndim == 2:
            stored[CLASS_EMBEDDING] = pad(stored[CLASS_EMBEDDING], (0, 0, 0, 1))  # a row of zeros after the last
        blank = {name: torch.empty(shape, device="meta") for name, shape in parameter_shapes(self.layers).items()}
        linear = self.unet.text is not None and self.unet.text.linear_projection
        for name, expected in to_diffusers(blank, self.layers, linear_projection=linear).items():
            tensor = stored[names[name]]
            if tensor.shape != expected.shape or not tensor.is_floating_point():
                what = f"{names[name]} is {str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"
                raise CheckpointError(f"{misfit}{what}, not floats of {tuple(expected.shape)}")
        return {name: tensor.float() for name, tensor in from_diffusers(stored, self.layers, order).items()}


def _read_json(path: Path) -> Mapping[str, Any]:
    values = None
    try:
        with contextlib.suppress(ValueError):
            values = read_json(path)
    except OSError as error:
        raise CheckpointError(f"{path} can't be read ({error.strerror})") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} is damaged: it should be a JSON object")
    return values
