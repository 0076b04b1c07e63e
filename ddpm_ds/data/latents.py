"""Latents, which an autoencoder of diffusers makes from images; the U-Net learns them instead of pixels.

::

    pixels  uint8 (N, 3, H, W) ──encode, once──▶ latents  float16 (N, C, h, w) ──▶ training
                                                              │ drawn by a sampler
    pixels  uint8 (N, 3, H, W) ◀──────────decode──────────────┘

A mask becomes its means over the pixels of each latent. Latents of a condition, and of mirrored images, are fields of
their own. A latent is (mean of the encoder's posterior - shift) x scale, with shift_factor and scaling_factor of the
autoencoder's config.json, or numbers of the spec. Other modules treat latents as images of another size and number of
channels. Source: Rombach et al. 2022, "High-Resolution Image Synthesis with Latent Diffusion Models".
"""

from __future__ import annotations

import errno
import functools
import hashlib
import importlib.util
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ddpm_ds.data.cache import (
    BUCKETS,
    CONDITION,
    IMAGES,
    MASK,
    TEXTS,
    DatasetCache,
    Images,
    StoredField,
    field_of,
    variant,
)
from ddpm_ds.data.hub import from_hub
from ddpm_ds.data.spec import ConditionSpec, DataSpec
from ddpm_ds.ground.errors import DataError
from ddpm_ds.ground.files import read_bytes, sha256_of, until_changed
from ddpm_ds.ground.formats import open_tensors, parse_json
from ddpm_ds.schema.section import shown
from ddpm_ds.schema.types import MOST_LEVELS, MOST_SIDE, Blocks, Channels, LatentChannels, written

if TYPE_CHECKING:
    import torch
    from torch import Tensor

CONFIG, WEIGHTS = "config.json", "diffusion_pytorch_model.safetensors"
HALF = "diffusion_pytorch_model.fp16.safetensors"
"""Files of an autoencoder's folder; weights in fp16 are read if there are no others."""
PIXELS_AT_ONCE = 2**18
"""Pixels that are encoded or decoded together, at least one image. A common autoencoder has 128 values per pixel."""
MOVED_PIXELS = 2**22
"""Pixels that are encoded before the model moves back from the device to the host, at least one image."""
SMALLEST_ELEMENT_BYTES = 2
MOST_FLOAT16 = 65504.0
CUT_SEED = 0
"""Seed of the rectangles that are cut out before images are encoded, independent of the run's seed."""
AUTOENCODER, PIXELS = "autoencoder", "pixels/"
"""Key of the autoencoder, and prefix of the pixels' files, in the checksums of latents."""
ToPixels = Callable[["Tensor"], "Tensor"]
"""Function from drawn images (N, C, H, W) float32 to uint8 pixels on the same device."""
EXPECTED = f"name a folder that AutoencoderKL.save_pretrained of diffusers has written ({CONFIG}, {WEIGHTS})"
LAYERS = {"down_block_types", "up_block_types", "act_fn", "norm_num_groups", "sample_size", "mid_block_add_attention"}
"""Keys of ``config.json`` that only diffusers reads, to build the layers."""
PATCHES = {"patch_size", "batch_norm_eps", "batch_norm_momentum"}
"""Keys of FLUX.2's about the 2x2 patches of latents that its own transformer reads, and this code does not."""
FLUX_2: dict[str, object] = {"latent_channels": 32, "scaling_factor": 0.6043, "shift_factor": 0.076}
"""Values for FLUX.2's autoencoder, which has no scale: those of a fork of sd-scripts for SDXL on its latents."""
Numbers = float | tuple[float, ...]


class _Config(BaseModel):
    """Content of ``config.json`` without :data:`LAYERS`, with the defaults of diffusers."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False, extra="forbid")

    class_name: Literal["AutoencoderKL", "AutoencoderKLFlux2"] = Field(alias="_class_name")
    in_channels: Literal[3] = 3
    out_channels: Literal[3] = 3
    latent_channels: LatentChannels = 4
    block_out_channels: Annotated[tuple[Channels, ...], Field(min_length=1, max_length=MOST_LEVELS)] = (64,)
    layers_per_block: Blocks = 1
    scaling_factor: Annotated[float, Field(gt=0.0)] = 0.18215
    shift_factor: float | None = None
    latents_mean: None = None
    """Mean and spread by channel, which some pipelines of SDXL read; this code does not."""
    latents_std: None = None
    force_upcast: bool = False
    """Whether activations overflow fp16, as SDXL's do. diffusers' default is true, but SD 1.5's, without it, fit."""
    use_quant_conv: bool = True
    use_post_quant_conv: bool = True


@dataclass(frozen=True)
class Autoencoder:
    """Folder and properties of an autoencoder; its weights are not loaded."""

    name: str
    """Value of ``data.autoencoder``."""
    folder: Path
    digest: str
    """SHA-256 of its configuration and weights."""
    channels: int
    """Channels of a latent."""
    factor: int
    """Pixels, each way, in one position of a latent."""
    scale: Numbers
    shift: Numbers
    needs_fp32: bool
    """Whether its activations overflow fp16."""
    kind: str
    """Name of its class in diffusers."""

    @classmethod
    def open(cls, name: Path) -> Autoencoder:
        """Open the autoencoder in folder ``name``, or of that name on the Hugging Face hub; raises DataError."""
        if importlib.util.find_spec("diffusers") is None:
            raise DataError(f"data.autoencoder = {name} needs diffusers: pip install 'ddpm_ds[latents]'")
        try:
            folder = name if name.exists() else _from_hub(name)
            content = parse_json(read_bytes(folder / CONFIG))
            decisive = {key: value for key, value in content.items() if not key.startswith("_")}  # not the version
            others = {key: value for key, value in decisive.items() if key not in LAYERS}
            if content.get("_class_name") == "AutoencoderKLFlux2":
                others = FLUX_2 | {key: value for key, value in others.items() if key not in PATCHES}
            read = {key: value for key, value in others.items() if key in _Config.model_fields or value}
            read["_class_name"] = content.get("_class_name")
            config = _Config.model_validate_json(json.dumps(read), strict=True)
            weights = _checksum(_weights(folder))
        except OSError as error:
            raise _unusable(name, f"{error.filename or name} can't be read ({error.strerror or error})") from None
        except ValidationError as error:
            fault = error.errors()[0]
            key = ".".join(map(str, fault["loc"])) or CONFIG
            value = "" if fault["type"] == "missing" else f" = {shown(fault['input'])}"
            raise _unusable(name, f"{CONFIG} is of another kind ({key}{value}: {fault['msg']})") from None
        except (ValueError, AttributeError) as error:
            raise _unusable(name, f"{CONFIG} is damaged ({error})") from None
        return cls(
            str(name),
            folder,
            hashlib.sha256(f"{json.dumps(decisive, sort_keys=True)} {weights}".encode()).hexdigest(),
            channels=config.latent_channels,
            factor=2 ** (len(config.block_out_channels) - 1),
            scale=config.scaling_factor,
            shift=config.shift_factor or 0.0,
            needs_fp32=config.force_upcast,
            kind=config.class_name,
        )

    def scaled(self, scale: Numbers | None, shift: Numbers | None) -> Autoencoder:
        """Return the autoencoder with another scale or shift of its latents; None keeps its own."""
        if scale is None and shift is None:
            return self
        scale, shift = self.scale if scale is None else scale, self.shift if shift is None else shift
        digest = hashlib.sha256(f"{self.digest} {scale} {shift}".encode()).hexdigest()
        return replace(self, scale=scale, shift=shift, digest=digest)

    @property
    def exported_scale(self) -> float:
        """Scale of the copy that :meth:`copy_to` writes, since pipelines read one number."""
        return 1.0 if isinstance(self.scale, tuple) else self.scale

    @property
    def weights(self) -> Path:
        return _weights(self.folder)

    def copy_to(self, folder: Path) -> None:
        """Write an AutoencoderKL into a new folder; its weights have the shift, which pipelines do not read, and the
        scales of channels.
        """
        folder.mkdir()
        config = parse_json(read_bytes(self.folder / CONFIG))
        if not self.shift and config.get("scaling_factor", 0.18215) == self.scale and self.kind == "AutoencoderKL":
            shutil.copyfile(self.folder / CONFIG, folder / CONFIG)
            shutil.copyfile(self.weights, folder / WEIGHTS)
            return
        from safetensors.torch import load, save

        changes: dict[str, object] = {"shift_factor": None, "use_quant_conv": True, "use_post_quant_conv": True}
        changes |= {"_class_name": "AutoencoderKL", "scaling_factor": self.exported_scale}
        config = {key: value for key, value in (config | changes).items() if key not in PATCHES}
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        tensors = self.folded(load(self.weights.read_bytes()), self.exported_scale)
        (folder / WEIGHTS).write_bytes(save(tensors, metadata={"format": "pt"}))

    def folded(self, tensors: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
        """Return weights of an AutoencoderKL whose latents have one ``scale`` and no shift: both are in the
        convolutions around the latents, (out, in, 1, 1).
        """
        import torch

        found = {name: tensor for name, tensor in tensors.items() if not name.startswith("bn.")}
        if not self.shift and self.scale == scale:
            return found
        one, channels = next(iter(tensors.values())), self.channels
        for name, width in (("quant_conv", 2 * channels), ("post_quant_conv", channels)):
            found.setdefault(f"{name}.weight", torch.eye(width, dtype=one.dtype)[:, :, None, None].contiguous())
            found.setdefault(f"{name}.bias", torch.zeros(width, dtype=one.dtype))
        shift, ratio = (torch.tensor(each, dtype=torch.float64).expand(channels) for each in (self.shift, self.scale))
        ratio = ratio / scale
        names = [f"{name}quant_conv.{kind}" for name in ("", "post_") for kind in ("weight", "bias")]
        quant, before, post, after = (found[name].double() for name in names)
        mean, log_variance = (before[:channels] - shift) * ratio, before[channels:] + 2.0 * ratio.log()
        both = torch.cat((ratio, torch.ones_like(ratio)))[:, None, None, None]
        around = (post / ratio[:, None, None], after + post.sum(dim=(2, 3)) @ shift)
        changed = (quant * both, torch.cat((mean, log_variance)), *around)  # in fp16 the shift would be another
        return found | {name: tensor.float() for name, tensor in zip(names, changed, strict=True)}


def autoencoder_of(data: DataSpec, learned: Mapping[str, str] | None = None) -> Autoencoder | None:
    """Return the autoencoder of ``data``, None if pixels are learned; raises DataError.

    ``learned`` has the checksums of a checkpoint's images, which must be latents of this autoencoder.
    """
    if data.autoencoder is None:
        return None
    found = Autoencoder.open(data.autoencoder).scaled(data.latent_scale, data.latent_shift)
    if found.channels != data.channels:
        raise DataError(
            f"data.channels = {data.channels}, but the latents of data.autoencoder = {found.name} have "
            f"{found.channels}; --set data.channels={found.channels}"
        )
    if max(data.size) * found.factor > MOST_SIDE:
        raise DataError(
            f"data.image_size = {written(data.size)} counts latents, each of {found.factor}x{found.factor} pixels, "
            f"and {MOST_SIDE:,} pixels are the most; use {MOST_SIDE // found.factor} or less"
        )
    if learned is not None and learned.get(AUTOENCODER) != found.digest:
        raise DataError(f"data.autoencoder = {found.name} did not make the latents that were learned; name that one")
    return found


def pixels_of(data: DataSpec) -> DataSpec:
    """Return the spec of the pixels behind latents, ``data`` itself without autoencoder; raises DataError."""
    return data if (found := autoencoder_of(data)) is None else pixels_behind(data, found.factor)


def pixels_behind(latents: DataSpec, factor: int) -> DataSpec:
    """Return the spec of the pixels behind latents that are made of ``factor`` x ``factor`` pixels each."""
    height, width = latents.size
    changes = {"autoencoder": None, "channels": 3, "image_size": (height * factor, width * factor)}
    changes |= {"latent_scale": None, "latent_shift": None}
    return latents.model_copy(update=changes)


def check_steps(data: DataSpec, levels: int) -> None:
    """Raise DataError if the U-Net can't halve the buckets' latents at each level."""
    if data.buckets is None or (autoencoder := autoencoder_of(data)) is None:
        return
    multiple = autoencoder.factor * 2 ** (levels - 1)
    if data.buckets.step % multiple:
        raise DataError(
            f"data.buckets.step = {data.buckets.step} should be a multiple of {multiple} pixels: a latent has "
            f"{autoencoder.factor}, and unet.multipliers halves latents {levels - 1} times"
        )


def sources_of(pixels: DatasetCache, autoencoder: Autoencoder) -> dict[str, str]:
    """Return the checksums of autoencoder and pixels that a cache of latents keeps."""
    return {AUTOENCODER: autoencoder.digest, **{f"{PIXELS}{name}": value for name, value in pixels.meta.sha256.items()}}


def pixels_learned(checksums: Mapping[str, str]) -> dict[str, str]:
    """Return the checksums of the pixels behind images, which may be pixels or latents, from their checksums."""
    of_pixels = {name.removeprefix(PIXELS): value for name, value in checksums.items() if name.startswith(PIXELS)}
    return of_pixels or {name: value for name, value in checksums.items() if not name.startswith((TEXTS, BUCKETS))}


def to_pixels(coder: Coder | None) -> ToPixels:
    """Return the function from drawn images, or a coder's latents, to pixels; NaN becomes black."""
    return _as_bytes if coder is None else coder.decode


def _as_bytes(images: Tensor) -> Tensor:
    """Return pixels in [-1, 1] as uint8, the exact inverse of :meth:`ddpm_ds.diffusion.condition.Scale.to_unit`."""
    import torch

    pixels = images.add(1.0).mul_(127.5).round_()
    return pixels.nan_to_num_(nan=0.0).clamp_(0.0, 255.0).to(torch.uint8)


def _by_channel(numbers: Numbers, latents: Tensor) -> Any:
    """Return numbers for latents (N, C, h, w): one, or a tensor (C, 1, 1) on their device."""
    return latents.new_tensor(numbers)[:, None, None] if isinstance(numbers, tuple) else numbers


class Coder:
    """Autoencoder on a device: in fp16 on CUDA unless it needs fp32, else in fp32.

    After a result that is not finite in fp16 it computes in fp32, and on the CPU once the device has no memory.
    """

    def __init__(self, autoencoder: Autoencoder, device: torch.device) -> None:
        import torch

        self.autoencoder, self._device = autoencoder, device
        halves = device.type == "cuda" and not autoencoder.needs_fp32
        self._dtype = torch.float16 if halves else torch.float32

    @functools.cached_property
    def model(self) -> Any:
        """Model of diffusers, in fp32 or rounded to fp16, loaded at its first use; raises DataError."""
        import diffusers
        import torch

        diffusers.utils.logging.set_verbosity_error()  # the error below replaces its warnings
        diffusers.utils.logging.disable_progress_bar()
        kind, folder = getattr(diffusers, self.autoencoder.kind), self.autoencoder.folder
        options = {"use_safetensors": True, "local_files_only": True, "low_cpu_mem_usage": False}
        try:
            with torch.device("meta"):  # without memory, which a forged configuration could exhaust
                parameters = sum(each.numel() for each in kind.from_config(kind.load_config(folder)).parameters())
            weights = self.autoencoder.weights
            if SMALLEST_ELEMENT_BYTES * parameters > (size := weights.stat().st_size):
                raise ValueError(f"{size:,} bytes for {parameters:,} parameters")
            variant = "fp16" if weights.name == HALF else None
            model, notes = kind.from_pretrained(folder, output_loading_info=True, variant=variant, **options)
        except Exception as error:  # diffusers may raise anything on damaged files
            raise _unusable(self.autoencoder.name, f"{WEIGHTS} is damaged or of another model ({error})") from None
        if wrong := [*notes["missing_keys"], *notes["unexpected_keys"]]:
            raise _unusable(self.autoencoder.name, f"{WEIGHTS} is of another model ({wrong[0]})")
        return model.eval().requires_grad_(False)

    def encode(self, images: Tensor, holes: Tensor | None = None, *, scaled: bool = True) -> Tensor:
        """Return the latents (N, C, h, w) float32 of pixels (N, 3, H, W) uint8, on their device.

        Pixels in ``holes`` (N, 1, H, W), bool, are 0 in [-1, 1]. Latents that are not ``scaled`` are the encoder's.
        """
        pixels = images.float().div_(127.5).sub_(1.0)
        if holes is not None:
            pixels.masked_fill_(holes, 0.0)
        latents = self._mapped(lambda model, part: model.encode(part).latent_dist.mean, pixels, images[0, 0].numel())
        return self.scaled(latents) if scaled else latents

    def scaled(self, latents: Tensor) -> Tensor:
        """Return the encoder's latents (N, C, h, w) on the U-Net's scale."""
        scale, shift = (_by_channel(each, latents) for each in (self.autoencoder.scale, self.autoencoder.shift))
        return latents.sub(shift).mul_(scale)

    def decode(self, latents: Tensor) -> Tensor:
        """Return the pixels (N, 3, H, W) uint8 of latents (N, C, h, w), on their device."""
        scale, shift = (_by_channel(each, latents) for each in (self.autoencoder.scale, self.autoencoder.shift))
        means = latents.float().div(scale).add_(shift)
        pixels = latents[0, 0].numel() * self.autoencoder.factor**2
        return _as_bytes(self._mapped(lambda model, part: model.decode(part).sample, means, pixels))

    def _mapped(self, work: Callable[[Any, Tensor], Tensor], images: Tensor, pixels: int) -> Tensor:
        """Return the float32 results of ``work`` on images of so many ``pixels`` each."""
        import torch

        done: list[Tensor] = []
        parts = images.split(max(1, PIXELS_AT_ONCE // pixels))
        with torch.inference_mode():
            while len(done) < len(parts):
                try:
                    part = parts[len(done)].to(self._device, self._dtype)
                    found = work(self.model.to(self._device, self._dtype), part).float()
                except torch.OutOfMemoryError:
                    if self._device.type == "cpu":
                        raise
                    self._device = torch.device("cpu")
                else:
                    if self._dtype is torch.float32 or found.isfinite().all():
                        done.append(found.to(images.device))
                        continue
                self._dtype = torch.float32
                del self.model  # its weights may be rounded, so it must be loaded again
        self.model.cpu()  # frees the device's memory
        return torch.cat(done)


def condition_of(coder: Coder, spec: ConditionSpec, images: Tensor, given: Tensor) -> Tensor:
    """Return the condition (N, C', h, w) float32 of images (N, 3, H, W) uint8 as a U-Net on latents takes it.

    ``given`` are pictures like ``images``, or the holes (N, 1, H, W) bool that are cut out of them: latents of the cut
    images, and a channel that is 1 in a hole.
    """
    import torch

    if spec.kind == "stored":
        return coder.encode(given, scaled=spec.scaled)
    factor = coder.autoencoder.factor
    return torch.cat((coder.encode(images, given), given[..., ::factor, ::factor].float()), dim=1)


def condition_pixels(coder: Coder, spec: ConditionSpec, condition: Tensor) -> Tensor:
    """Return pixels (N, 3, H, W) uint8 of a result of :func:`condition_of`."""
    latents = condition[:, : coder.autoencoder.channels]
    return coder.decode(latents if spec.scaled else coder.scaled(latents))


def rectangles(drawn: Tensor, cut: tuple[float, float], size: tuple[int, int]) -> Tensor:
    """Return masks, true in a rectangle, (N, 1, H, W); uniform draws (N, 4) make its sides and place, ``cut`` limits
    the share of the sides.
    """
    import torch

    low, high = cut
    inside = []
    for axis, pixels in enumerate(size):
        extent = ((low + (high - low) * drawn[:, axis]) * pixels).round().clamp(min=1.0)  # (N,)
        begin = (drawn[:, 2 + axis] * (pixels - extent + 1.0)).floor()
        along = torch.arange(pixels, device=drawn.device)
        inside.append((along >= begin[:, None]) & (along < (begin + extent)[:, None]))  # (N, pixels)
    return (inside[0][:, :, None] & inside[1][:, None, :])[:, None]


def latent_fields(pixels: DatasetCache, data: DataSpec) -> dict[str, StoredField]:
    """Return all fields of a cache of latents."""
    images = field_of("latents", data.shape)
    found = {name: each for name, each in pixels.meta.fields.items() if name not in (CONDITION, MASK)}
    kinds = {IMAGES: (images, 1)}
    if MASK in pixels.others:
        kinds[MASK] = (StoredField(shape=(1, *data.size), values="uint8"), 1)
    if data.condition is not None:
        shape = (data.interface.condition_channels, *data.size)
        kinds[CONDITION] = (images.model_copy(update={"shape": shape}), data.condition.copies)
    for name, (stored, copies) in kinds.items():
        for mirrored in (False, True)[: 1 + data.horizontal_flips]:
            found |= {variant(name, number, mirrored): stored for number in range(copies)}
    return found


def encoded(
    cache: DatasetCache, coder: Coder, data: DataSpec, numbers: range
) -> Iterator[tuple[slice, dict[str, Images]]]:
    """Yield positions of the images ``numbers`` and the fields that are made of them, in batches; raises DataError."""
    import torch

    together, factor = max(1, MOVED_PIXELS // math.prod(cache.meta.shape[1:])), coder.autoencoder.factor
    spec = data.condition or ConditionSpec()
    for first in range(numbers.start, numbers.stop, together):
        part = slice(first, min(first + together, numbers.stop))
        found: dict[str, Tensor] = {}
        images, given = torch.from_numpy(cache.images[part]), _given(cache, spec, part) if data.condition else []
        for mirrored in (False, True)[: 1 + data.horizontal_flips]:
            turned = (lambda each: each.flip(-1)) if mirrored else (lambda each: each)
            found[variant(IMAGES, 0, mirrored)] = coder.encode(turned(images))
            if MASK in cache.others:
                mask = turned(torch.from_numpy(cache.others[MASK][part])).float()
                found[variant(MASK, 0, mirrored)] = torch.nn.functional.avg_pool2d(mask, factor).round()
            for number, each in enumerate(given):
                found[variant(CONDITION, number, mirrored)] = condition_of(coder, spec, turned(images), turned(each))
        for values in found.values():
            largest = values.abs().amax(dim=(1, 2, 3))  # (n,), NaN if any value is
            beyond = ~(largest <= MOST_FLOAT16)
            if beyond.any():
                which = int(beyond.int().argmax())
                raise DataError(
                    f"data.autoencoder = {coder.autoencoder.name} makes values up to {largest[which]:g} from image "
                    f"{first + which} of {cache.path}, and float16 ends at {MOST_FLOAT16:,.0f}; use another "
                    f"autoencoder, or a smaller scaling_factor in its {CONFIG}"
                )
        yield part, {name: values.numpy() for name, values in found.items()}


def _given(cache: DatasetCache, spec: ConditionSpec, part: slice) -> list[Tensor]:
    """Return what :func:`condition_of` takes for each condition of some images: their second pictures, or holes, which
    are masks or rectangles or everything.
    """
    import torch

    from ddpm_ds.ground.keyed import Draws, Stream

    stored = torch.from_numpy(cache.others[CONDITION][part]) if CONDITION in cache.others else None
    if spec.kind == "stored":
        assert stored is not None, "the source has it"
        return [stored]
    size, positions = cache.size, torch.arange(part.start, part.stop)
    found: list[Tensor] = []
    for number in range(spec.copies):
        drawn = Draws(CUT_SEED, positions * spec.copies + number, {Stream.CUT: 5}).uniform(Stream.CUT)
        holes = rectangles(drawn, spec.cut, size) if stored is None else stored >= 128
        found.append(holes | (drawn[:, 4] < spec.unmasked)[:, None, None, None])
    return found


def _weights(folder: Path) -> Path:
    half = folder / HALF
    return half if half.is_file() and not (folder / WEIGHTS).exists() else folder / WEIGHTS


@until_changed
def _checksum(path: Path) -> str:
    """Return the SHA-256 of weights; raises OSError, with the reason, unless all values are finite."""
    with open_tensors(path) as tensors:
        for name in tensors.keys():  # noqa: SIM118 - it is no dictionary
            tensor = tensors.get_tensor(name)
            if name == "bn.num_batches_tracked":  # of FLUX.2's patches
                continue
            if tensor.element_size() < SMALLEST_ELEMENT_BYTES or not tensor.is_floating_point():
                kind = str(tensor.dtype).removeprefix("torch.")
                raise OSError(errno.EINVAL, f"{name} is {kind}; convert it to fp16 or fp32", str(path))
            if not tensor.isfinite().all():
                raise OSError(errno.EINVAL, f"{name} has a value that is not finite", str(path))
    return sha256_of(path)


def _from_hub(name: Path) -> Path:
    """Return the folder of an autoencoder on the Hugging Face hub, ``OWNER/NAME`` or ``OWNER/NAME/FOLDER``."""
    repository, inside = str(name), Path()
    if len(name.parts) == 3:
        repository, inside = str(name.parent), Path(name.name)
    files = [str(inside / file) for file in (CONFIG, WEIGHTS, HALF)]

    def opened(folder: Path) -> Path:
        for file in (folder / inside / CONFIG, _weights(folder / inside)):
            if not file.is_file():
                raise _unusable(name, f"it has no {inside / file.name}")
        return folder / inside

    return from_hub(repository, files, opened, key=f"data.autoencoder = {name}", expected=EXPECTED)


def _unusable(name: Path | str, what: str) -> DataError:
    return DataError(f"data.autoencoder = {name} can't be used: {what}; {EXPECTED}")
