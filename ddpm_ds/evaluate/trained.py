"""Trained weights, loaded from a checkpoint of any layout, or from a folder of diffusers without that package."""

import contextlib
import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import numpy as np
import numpy.typing as npt
import torch
from pydantic import AfterValidator, ValidationError
from torch import Tensor

from ddpm_ds.checkpoint.folder import checkpoint_at
from ddpm_ds.checkpoint.manifest import KINDS, MANIFEST, read_manifest
from ddpm_ds.checkpoint.reader import Reader
from ddpm_ds.config.spec import RunSpec
from ddpm_ds.config.spec_file import SPEC
from ddpm_ds.data.cache import CONSTANTS, TEXTS, FieldFacts
from ddpm_ds.data.captions import ENCODERS, EncodedPrompts
from ddpm_ds.data.fields import REGRESSION
from ddpm_ds.data.hub import from_hub, is_hub_name
from ddpm_ds.data.latents import Autoencoder, Coder, ToPixels, autoencoder_of, to_pixels
from ddpm_ds.data.sources.base import map_array
from ddpm_ds.data.spec import DataSpec, TextSpec
from ddpm_ds.data.statistics import Statistics
from ddpm_ds.data.text import parts_of
from ddpm_ds.diffusion.condition import Conditions, Prompts, Scale, no_text
from ddpm_ds.diffusion.spec import DiffusionSpec, SamplerSpec
from ddpm_ds.evaluate.diffusers.folder import DRAWN_FROM, DiffusersFolder
from ddpm_ds.ground.device import DTYPES, usable_device
from ddpm_ds.ground.errors import CheckpointError, SpecError, print_to_stderr
from ddpm_ds.ground.files import expanded
from ddpm_ds.schema.types import FilePath, GivenPath
from ddpm_ds.tracking.run_folder import checkpoints_of
from ddpm_ds.unet.layers import Layer, parameter_shapes, unet_layers
from ddpm_ds.unet.model import UNet
from ddpm_ds.unet.spec import Interface, UnetSpec

if TYPE_CHECKING:
    from ddpm_ds.evaluate.sampling import SpaceRanks

WeightsKind = Literal["ema", "raw"]
"""Kinds of weights in a checkpoint: averaged, and as trained."""
EXPECTED = (
    f"name a checkpoint ({MANIFEST}), a run's folder (checkpoints/), an export (unet/config.json), or OWNER/NAME on "
    "the Hugging Face hub"
)


@dataclass(frozen=True)
class Trained:
    """Trained U-Net with its sampler, data type and origin."""

    unet: UNet
    """U-Net in eval mode, without gradients."""
    unet_spec: UnetSpec
    diffusion: DiffusionSpec
    sampler: SamplerSpec
    """Sampler of the run; for an export the default one, with its sigma_max and sigma_min if it is of edm."""
    interface: Interface
    """Shapes of the U-Net's inputs and prediction."""
    origin: str
    """Folder from which the weights were read, or their name on the Hugging Face hub."""
    digest: str
    """SHA-256 that changes whenever the weights do."""
    weights: str
    """Kind of weights: ``ema``, ``raw`` or ``export``."""
    images_seen: int | None = None
    """Number of images that the weights were trained with, if known."""
    run_dir: Path | None = None
    """Folder of the run, if the checkpoint is in its ``checkpoints``."""
    spec: RunSpec | None = None
    """Spec of the run; None for an export."""
    known_data: DataSpec | None = None
    """Images and conditions; None for an export of pictures or latents without a condition."""
    text: TextSpec | None = None
    """How prompts are encoded; None without text, and for an export without encoders."""
    learned_encoders: str | None = None
    """Checksum of the encoders whose text was learned; None without text, and for an export, which has its own."""
    autoencoder: Autoencoder | None = None
    """Autoencoder that decodes the U-Net's latents; None if it draws pixels."""
    facts: FieldFacts | None = None
    """Scales and names of fields; None for pictures and latents."""
    constants: npt.NDArray[np.float32] | None = field(default=None, repr=False)
    """(C, H, W), channels of the condition that are the same for all images."""
    other_size: tuple[int, int] | None = None
    """Height and width in pixels that :meth:`resized` asked for; None for the size that the U-Net learned."""
    ranks: "SpaceRanks | None" = None
    """Processes that share the rows of each image once the U-Net is :meth:`shared`."""

    @property
    def process(self) -> DiffusionSpec:
        """Diffusion process of images of the size that the U-Net draws."""
        return self.diffusion.at(self.interface.size)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Shape (C, H, W) of the images or latents that the U-Net draws."""
        return self.interface.shape

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(self.unet.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the weights."""
        return next(self.unet.parameters()).dtype

    @property
    def precision(self) -> str:
        """Name of the weights' data type, as ``--precision`` takes it."""
        return next(name for name, (_, dtype) in DTYPES.items() if dtype is self.dtype)

    @property
    def identity(self) -> dict[str, object]:
        """Facts about the weights that requests and reports record."""
        return {key: getattr(self, key) for key in ("origin", "weights", "images_seen", "digest", "precision")}

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Layers of the U-Net."""
        return unet_layers(self.unet_spec, self.interface)

    @functools.cached_property
    def to_pixels(self) -> ToPixels:
        """Function from the U-Net's images or latents to uint8 pixels."""
        return to_pixels(None if self.autoencoder is None else self.coder)

    @functools.cached_property
    def coder(self) -> Coder:
        """Autoencoder on the device, for a U-Net that draws latents."""
        assert self.autoencoder is not None
        return Coder(self.autoencoder, self.device)

    @property
    def data(self) -> DataSpec:
        """Images and conditions; raises SpecError for an export without a file of them."""
        if self.known_data is None:
            raise SpecError(f"{self.origin} is an export without a description of its condition; name the run's folder")
        return self.known_data

    @property
    def is_conditioned(self) -> bool:
        """Whether images are drawn for inputs, since the U-Net takes channels or numbers of each image."""
        condition = None if self.known_data is None else self.known_data.condition
        return condition is not None and (condition.kind is not None or condition.vector_size > 0)

    @property
    def sampler_checks(self) -> dict[str, Any]:
        """Facts about the U-Net for :func:`ddpm_ds.diffusion.spec.check_sampler`."""
        condition = None if self.known_data is None else self.known_data.condition
        text, dropped = self.unet_spec.text is not None, condition is not None and condition.drop > 0.0
        return {
            "classes": self.unet_spec.classes,
            "latents": self.autoencoder is not None,
            "drops": text or dropped,
            "drops_both": text and dropped,
            "unbounded": self.are_fields and self.data.is_unbounded,
        }

    @property
    def are_fields(self) -> bool:
        """Whether the images are fields of floats."""
        return self.known_data is not None and self.known_data.are_fields

    @property
    def channels(self) -> tuple[str, ...]:
        """Names of the channels of fields in their source, or numbers."""
        names = () if self.facts is None else self.facts.fields["images"].channels
        return names or tuple(map(str, range(self.interface.channels)))

    @functools.cached_property
    def conditions(self) -> Conditions:
        """Maker of the images' conditions."""
        statistics = self._statistics("condition")
        return Conditions(self.data, self.device, statistics=statistics, constants=self.constants)

    @functools.cached_property
    def scale(self) -> Scale:
        """Scale of the images."""
        if not self.are_fields:
            return Scale.of(None, None, self.device, pictures=True)
        return Scale.of(self.data.normalise, self._statistics("images"), self.device)

    @functools.cached_property
    def regression(self) -> "Trained | None":
        """Regression, on the same device, whose residuals the U-Net draws; None if it draws whole images."""
        if self.spec is None or (path := self.spec.data.residual_of) is None:
            return None
        found = replace(load_trained(path, device=self.device, dtype=self.dtype), ranks=self.ranks).shared()
        if read_manifest(Path(self.origin)).data_sha256.get(REGRESSION) != found.digest:
            fault = f"has other weights than the residuals that {self.origin} learned; bring those back"
            raise CheckpointError(f"data.residual_of = {path}: {found.origin} {fault}")
        return found

    def prompts(self, known: EncodedPrompts, negative: str | None = None) -> Prompts:
        """Return encoded prompts for a U-Net with text; guidance leads away from ``negative``, or from no text."""
        text, unet = self.text, self.unet_spec.text
        assert text is not None and unet is not None
        against = no_text(text, known.empty)
        if negative is not None:
            against = EncodedPrompts.of(text, [negative], self.device, print_to_stderr, self.learned_encoders).encoded
        size, texts = self.picture_shape[1:], known.texts
        return Prompts(unet, known.encoded, against, size=size, device=self.device, texts=texts, negative=negative)

    def finished(self, images: Tensor) -> Tensor:
        """Return drawn images (N, C, H, W) as outputs: fields as float32 in physical units, others as uint8."""
        return self.scale.to_physical(images) if self.are_fields else self.to_pixels(images)

    def _statistics(self, name: str) -> Statistics | None:
        return None if self.facts is None else self.facts.statistics.get(name)

    @property
    def picture_shape(self) -> tuple[int, int, int]:
        """Shape (C, H, W) of the pixels."""
        if self.autoencoder is None:
            return self.image_shape
        _, height, width = self.image_shape
        return 3, height * self.autoencoder.factor, width * self.autoencoder.factor

    def resized(self, size: tuple[int, int]) -> Self:
        """Return the same U-Net for images of another ``size``, height and width in pixels.

        Raises SpecError: a level can't halve it, or the U-Net has a condition of pixels, which is made for one size.
        """
        asked, factor = "x".join(map(str, size)), 1 if self.autoencoder is None else self.autoencoder.factor
        data, latents = self.known_data, (size[0] // factor, size[1] // factor)
        if data is not None and data.condition is not None and self.autoencoder is None:
            raise SpecError(f"--size {asked}: {self.origin} has a condition of one size (data.condition); leave it out")
        step = factor * 2 ** (len(self.unet_spec.multipliers) - 1)
        near = "x".join(str(max(step, round(side / step) * step)) for side in size)
        if near != asked:
            raise SpecError(f"--size {asked}: {self.origin} draws multiples of {step} pixels; use {near}")
        levels = {"attention_resolutions": (), "attention_levels": self.unet_spec.attended_levels(self.interface.size)}
        inner, data = replace(self.interface, size=latents), data and data.model_copy(update={"image_size": latents})
        unet = self.unet_spec.model_copy(update=levels)
        return replace(self, unet_spec=unet, interface=inner, other_size=size, known_data=data)

    def shared(self) -> "Trained":
        """Return the same U-Net, which :attr:`ranks` compute together; raises SpecError if its rows are too few."""
        return self if self.ranks is None else self.ranks.share(self)


def find_trained(path: Path) -> Path:
    """Return the folder to load for ``path``: a checkpoint, a diffusers folder, or a run's newest good checkpoint."""
    if (path / MANIFEST).is_file() or DiffusersFolder.at(path):
        return path
    if checkpoints_of(path).is_dir():
        return checkpoint_at(path, log=print_to_stderr)
    fault = "holds no weights" if path.is_dir() else "is no folder" if path.exists() else "does not exist"
    raise CheckpointError(f"{path} {fault}; {EXPECTED}")


def _known(dtype: torch.dtype) -> torch.dtype:
    if dtype not in (known := [known for _, known in DTYPES.values()]):
        raise ValueError(f"dtype = {dtype} should be {' or '.join(map(str, known))}")
    return dtype


def load_trained(
    path: GivenPath,
    *,
    weights: WeightsKind = "ema",
    autoencoder: FilePath | None = None,
    device: Annotated[torch.device | str, AfterValidator(usable_device)] = "cpu",
    dtype: Annotated[torch.dtype, AfterValidator(_known)] = torch.float32,
) -> Trained:
    """Load a U-Net from a run's newest checkpoint, from a checkpoint or from an export, on ``device`` in ``dtype``.

    ``OWNER/NAME`` is an export on the Hugging Face hub, which is downloaded. ``weights`` are ``ema``, averaged over
    training, or ``raw``, as trained; an export has one kind, named ``ema``. ``autoencoder`` is the new path of a run's
    autoencoder, if it has moved; an export has its own.

    Raises:
        CheckpointError: there are no such weights, they are damaged, or not finite in ``dtype``.
        DataError: the autoencoder can't be used, or the hub has no such export or can't be reached.
        SpecError: ``autoencoder`` is given for a run on pixels.
    """
    path = expanded(path)
    on_hub = is_hub_name(str(path)) and not path.exists()
    found = path if on_hub else find_trained(path)
    if (found / MANIFEST).is_file():
        moved = None if autoencoder is None else expanded(autoencoder)
        return _load_checkpoint(Reader(found), weights, moved, device, dtype)
    if weights != "ema":
        what = f"{found} is {'no folder here, and on the Hugging Face hub ' if on_hub else ''}an export"
        raise CheckpointError(f"{what}, which has weights of one kind; leave out --weights {weights}")
    if not on_hub:
        return _load_export(found, device, dtype)

    def opened(folder: Path) -> Trained:
        trained = _load_export(folder, device, dtype)
        if trained.text is not None:
            parts_of(trained.text)  # finds them now; their weights are read later
        return replace(trained, origin=str(path))

    return from_hub(str(path), DRAWN_FROM, opened, key=str(path), expected=EXPECTED, newest=True)


def _load_export(found: Path, device: torch.device | str, dtype: torch.dtype) -> Trained:
    folder = DiffusersFolder(found)
    for line in folder.notes:
        print_to_stderr(line)
    decoder, digest, fields, encoding = folder.autoencoder(), folder.weights.digest, folder.fields(), folder.encoding()
    diffusion, levels = folder.process()
    data, facts = (None, None) if fields is None else (fields.data, fields.facts)
    if decoder is not None:
        data = data and data.model_copy(update={"autoencoder": decoder.folder})
        digest = hashlib.sha256(f"{digest} {decoder.digest}".encode()).hexdigest()
    unclipped = decoder is not None or (data is not None and data.is_unbounded)
    return Trained(
        unet=_filled(UNet(folder.layers, 0), folder.tensors().__getitem__, found, device, dtype),
        unet_spec=folder.unet,
        diffusion=diffusion,
        sampler=SamplerSpec(clip="none" if unclipped else "static", **levels),
        interface=folder.interface,
        origin=str(found),
        digest=digest,
        weights="export",
        autoencoder=decoder,
        known_data=data,
        text=TextSpec.model_validate(encoding) if encoding else None,
        facts=facts,
        constants=None if data is None else _constants(data, found),
    )


def _load_checkpoint(
    reader: Reader, weights: WeightsKind, moved: Path | None, device: torch.device | str, dtype: torch.dtype
) -> Trained:
    path, manifest, kind, facts = reader.path, reader.manifest, KINDS[weights], None
    if kind not in manifest.kinds:
        others = ", ".join([name for name, stored in KINDS.items() if stored in manifest.kinds] or manifest.kinds)
        raise CheckpointError(f"checkpoint {path} has no {weights} weights; it has {others}")
    try:
        spec = SPEC.read(manifest.spec)
        if manifest.fields is not None:
            facts = FieldFacts.model_validate(manifest.fields, strict=False)
    except ValidationError as error:
        problem = error.errors()[0]
        what = f"{'.'.join(map(str, problem['loc']))}: {problem['msg'].removeprefix('Value error, ')}"
        fault = f"has a spec that this version can't read ({what}); use the ddpm_ds {manifest.version} that wrote it"
        raise CheckpointError(f"checkpoint {path} {fault}") from None
    if moved is not None:
        if spec.data.autoencoder is None:
            raise SpecError(f"--autoencoder {moved}: {path} has learned pixels; leave it out")
        spec = spec.model_copy(update={"data": spec.data.model_copy(update={"autoencoder": moved})})
    data = spec.data
    layers = unet_layers(spec.unet, data.interface)
    if (shapes := parameter_shapes(layers)) != manifest.parameters:
        wrong = min(shapes.items() ^ manifest.parameters.items())[0]
        raise CheckpointError(f"checkpoint {path} is of another U-Net than its spec: {wrong} differs; use another")
    folder = path.resolve()
    run_dir = folder.parent.parent
    return Trained(
        unet=_filled(UNet(layers, 0), functools.partial(reader.read, kind), path, device, dtype),
        unet_spec=spec.unet,
        diffusion=spec.diffusion,
        sampler=spec.sampler,
        interface=data.interface,
        origin=str(path),
        digest=hashlib.sha256(f"{manifest.sha256} {kind}".encode()).hexdigest(),
        weights=weights,
        images_seen=manifest.images,
        run_dir=run_dir if folder.parent == checkpoints_of(run_dir) else None,
        spec=spec,
        known_data=data,
        text=data.text,
        learned_encoders=manifest.data_sha256.get(f"{TEXTS}{ENCODERS}"),
        autoencoder=autoencoder_of(data, manifest.data_sha256),
        facts=facts,
        constants=_constants(data, path, run_dir),
    )


def _constants(data: DataSpec, *folders: Path) -> npt.NDArray[np.float32] | None:
    """Read the condition's constant channels, if it has some, from the first of ``folders`` that holds them."""
    if data.condition is None or not data.condition.constant_channels:
        return None
    shape = (data.condition.constant_channels, *data.stored_size)
    for file in (folder / CONSTANTS for folder in folders):
        if file.exists():
            with contextlib.suppress(OSError):
                found = map_array(file)
                if found.shape == shape and found.dtype == np.float32:
                    return np.array(found)
            raise CheckpointError(f"{file} is damaged; copy it again from the folder of the run")
    fault = f"lacks its condition's constants, in {CONSTANTS} of the run's folder; copy that file there"
    raise CheckpointError(f"{folders[0]} {fault}")


def _filled(
    unet: UNet, read: Callable[[str], Tensor], path: Path, device: torch.device | str, dtype: torch.dtype
) -> UNet:
    """Return a U-Net with the weights that ``read`` returns by global name."""
    unet.eval().requires_grad_(False).to(device, dtype)
    for name, parameter in unet.layers.named_parameters():
        tensor = read(name)
        parameter.copy_(tensor.view(parameter.shape))
        if not tensor.isfinite().all():
            raise CheckpointError(f"{name} of {path} has values that are not finite; use weights from before")
        if not parameter.isfinite().all():
            raise CheckpointError(f"{name} of {path} has values beyond {str(dtype).removeprefix('torch.')}; use fp32")
    return unet
