"""Requests for images, the folder that gathers drawn images, and their outputs: a folder of PNG files with a grid,
`.npz`, `.npy` and Zarr, and a child run in MLflow. Every output is complete or does not exist.
"""

import contextlib
import hashlib
import io
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from ddpm_ds.data.prepare import class_names
from ddpm_ds.diffusion.spec import SamplerSpec
from ddpm_ds.evaluate.inputs import Inputs
from ddpm_ds.evaluate.trained import Trained
from ddpm_ds.ground.errors import OutputError, print_to_stderr
from ddpm_ds.ground.files import sync, temporary_beside, write_file
from ddpm_ds.ground.version import __version__
from ddpm_ds.tracking.address import check_tracking_uri
from ddpm_ds.tracking.pictures import MOST_ROWS, Drawn, grid_title, picture
from ddpm_ds.tracking.run_folder import RunFolder
from ddpm_ds.tracking.tracker import RunStart, Tracker

GRID = "grid.png"
"""Name of the grid in a folder of PNG files."""


class Request(BaseModel):
    """Requested images and everything that determines their pixels."""

    model_config = ConfigDict(frozen=True)

    origin: str
    """Path of the weights when the request was made; they may have moved since."""
    weights: str
    images_seen: int | None
    digest: str
    """Checksum of the weights."""
    precision: str
    guide: str | None = None
    """Path of the guiding weights; None if guidance uses "no label"."""
    guide_digest: str | None = None
    sampler: SamplerSpec
    """Sampler; its number of steps is filled in."""
    seed: int
    labels: tuple[int, ...] | None
    """Labels that the images take in turn, image i number i modulo their number; None means no labels."""
    first: int = 0
    count: int = 0
    batch_images: int = 0
    """Number of images per batch; another number gives the same images only up to rounding."""
    inputs: str | None = None
    """Checksum of the inputs that images are drawn for; None without inputs."""
    members: int = 1
    """Number of images of each input: image i is one of input i // members."""
    steps_ahead: int = 1
    """Number of successive states of each image."""
    prompts: tuple[str, ...] | None = None
    """Prompts that the images take in turn; None for a U-Net that reads no text."""
    size: tuple[int, int] | None = None
    """Height and width in pixels; None for the size that the U-Net learned."""
    negative: str | None = None
    """Prompt that guidance leads away from; None means no text."""

    @property
    def index(self) -> range:
        """Numbers of the requested images."""
        return range(self.first, self.first + self.count)

    @property
    def batches(self) -> list[range]:
        """Numbers of the images in each batch."""
        size = self.batch_images
        return [self.index[at : at + size] for at in range(0, self.count, size)]

    def labels_of(self, index: Sequence[int]) -> Tensor | None:
        """Return the labels (N,) int64 of the images with the numbers ``index``; None without labels."""
        return None if self.labels is None else torch.tensor([self.labels[i % len(self.labels)] for i in index])

    def by_input(self, images: np.ndarray) -> np.ndarray:
        """Return images (inputs x members, ...) as (inputs, members, ...)."""
        return images.reshape(-1, self.members, *images.shape[1:])

    @property
    def key(self) -> str:
        """Checksum of everything that determines the images, up to rounding."""
        exclude = {"origin", "weights", "images_seen", "guide", "batch_images"}
        return hashlib.sha256(self.model_dump_json(exclude=exclude).encode()).hexdigest()[:8]


@contextlib.contextmanager
def as_output_error(path: Path) -> Iterator[None]:
    """Turn OSErrors of the body into OutputErrors about ``path``."""
    try:
        yield
    except OSError as error:
        fix = "fix that and run the same command again, which keeps the images so far, or name another --out"
        raise OutputError(f"{path} can't be written ({error.strerror or error}); {fix}") from None


class DrawnImages:
    """Folder that gathers the images of one request, however often the command stops.

    ::

        FOLDER/
            000000000-64.npy    a finished batch, named by its first image and its size: uint8 (N, C, H, W), or float32
                                for fields, (N, T, C, H, W) with several states of each
            000000064-64.npy
            images.npy          all images, once none is missing; it replaces the batches

    Only the files' names say which images are drawn, so the folder's name has to hold the request's key. Every method
    may raise OutputError: the file system refuses.
    """

    def __init__(self, folder: Path, request: Request) -> None:
        self._folder, self._request = folder, request
        self._whole = folder / "images.npy"

    @property
    def count(self) -> int:
        """Number of images that have been drawn."""
        return self._request.count - sum(map(len, self.missing()))

    def missing(self) -> list[range]:
        """Return the batches that are not drawn yet, each as the numbers of its images."""
        names = set(os.listdir(self._folder)) if self._folder.exists() else set()
        batches = () if self._whole.name in names else self._request.batches
        return [batch for batch in batches if self._path(batch).name not in names]

    def keep(self, batch: range, images: Tensor) -> None:
        """Write the images of a batch."""
        content = io.BytesIO()
        np.save(content, images.numpy())
        with as_output_error(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            write_file(self._path(batch), content.getvalue())

    def images(self) -> np.ndarray:
        """Return all images in order, mapped into memory; none may be missing."""
        with as_output_error(self._folder):
            if not self._whole.exists():
                temporary = self._whole.with_name(".images.npy.tmp")
                first = np.load(self._path(self._request.batches[0]), mmap_mode="r")
                shape = (self._request.count, *first.shape[1:])
                whole = np.lib.format.open_memmap(temporary, mode="w+", dtype=first.dtype, shape=shape)
                for batch in self._request.batches:
                    start = batch.start - self._request.first
                    whole[start : start + len(batch)] = np.load(self._path(batch))
                whole.flush()
                temporary.replace(self._whole)
            for path in self._folder.glob("*-*.npy"):
                path.unlink()
        return np.load(self._whole, mmap_mode="r")

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _path(self, batch: range) -> Path:
        return self._folder / f"{batch.start:09}-{len(batch)}.npy"


def titled_grid(
    trained: Trained,
    sampler: SamplerSpec,
    images: np.ndarray,
    labels: Tensor | None,
    *,
    inputs: Inputs | None = None,
    request: Request | None = None,
    channel: int = 0,
) -> Image.Image:
    """Return a titled grid of images (N, C, H, W), with names of labels (N,) or prompts of the ``request``. Images for
    ``inputs`` stand in rows beside their inputs. A picture of fields shows one ``channel``.
    """
    run = (trained.run_dir or Path(trained.origin)).resolve().name
    title = grid_title(run, trained.images_seen, sampler, trained.diffusion, trained.weights)
    spec = trained.spec
    names = [] if spec is None else [*class_names(spec.data, spec.bucket_group, spec.unet.classes), "no class"]
    classes = [] if labels is None else labels.tolist()
    captions = [names[label] if names else str(label) for label in classes]
    if request is not None and request.prompts is not None:
        captions = [request.prompts[number % len(request.prompts)] for number in request.index]
    channels = trained.channels if trained.are_fields else ()
    if inputs is None or request is None:
        return Drawn(torch.from_numpy(np.array(images)), channels=channels).picture(title, captions, channel)
    members, given = request.members, None if trained.facts is None else trained.facts.fields.get("condition")
    rows = torch.from_numpy(np.array(images[: MOST_ROWS * members]))
    numbers = range(request.first // members, (request.first + len(rows)) // members)
    shown = inputs.shown(numbers), inputs.truth(numbers), channels, () if given is None else given.channels
    return Drawn(rows, members, *shown).picture(title, captions, channel)


def write_zarr(path: Path, trained: Trained, images: np.ndarray, first: int) -> None:
    """Write fields (inputs, members, [steps,] C, H, W) as a new Zarr folder: a variable for each channel, with the
    coordinates of the run's data. Inputs are numbered from ``first`` on.
    """
    import xarray

    assert trained.facts is not None, "only fields are written"
    dims = ["input", "member", "step"][: images.ndim - 3]
    coordinates: dict[str, Any] = {"input": np.arange(first, first + len(images))}
    for axis, pixels in zip(("height", "width"), images.shape[-2:], strict=True):
        found = next((each for each in trained.facts.coordinates if each.along == axis), None)
        dims.append(axis if found is None else found.name)
        if found is not None and len(found.values) == pixels:
            coordinates[found.name] = (found.name, list(found.values), {"units": found.units})
    channels = {name: (dims, images[..., number, :, :]) for number, name in enumerate(trained.channels)}
    with new_output(path) as folder:
        xarray.Dataset(channels, coordinates).to_zarr(folder, mode="w", consolidated=False)


def write_numpy(path: Path, images: np.ndarray, labels: Tensor | None = None) -> None:
    """Write images as ``.npy``, or as ``.npz``: ``arr_0`` are images (N, H, W, C), ``arr_1`` the labels (N,) int64, if
    any. Evaluators read these names and axes, which are guided-diffusion's (Dhariwal and Nichol 2021).
    """
    temporary = temporary_beside(path)
    with as_output_error(path):
        with temporary.open("wb") as file:
            if path.suffix.lower() == ".npy":
                np.save(file, images)
            else:
                np.savez(file, images.transpose(0, 2, 3, 1), *([] if labels is None else [labels.numpy()]))
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)


def write_pngs(path: Path, grid: Image.Image | None, images: Iterable[tuple[int, np.ndarray]]) -> None:
    """Write a new folder of PNG files: the grid, if any, and each picture (C, H, W) uint8 by its number."""
    with new_output(path) as folder:
        if grid is not None:
            grid.save(folder / GRID)
        for number, image in images:
            if image.dtype != np.uint8:
                continue
            picture(torch.from_numpy(np.array(image))).save(folder / f"{number:06}.png")


def check_new(path: Path, *, file: bool = False) -> None:
    """Raise OutputError if ``path`` holds something or is the current folder; a new ``file`` may not exist at all."""
    if file and path.exists():
        raise OutputError(f"{path} exists; name a new file")
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise OutputError(f"{path} exists and is {'not empty' if path.is_dir() else 'no folder'}; name a new folder")
    if path.resolve() == Path.cwd():
        raise OutputError(f"{path.absolute()} is the current folder, which can't be replaced; name a new folder")


@contextlib.contextmanager
def new_output(path: Path, *, file: bool = False) -> Iterator[Path]:
    """Yield a temporary folder, or the path of a ``file``, that becomes ``path`` when the body ends.

    It is removed if the body raises. Raises OutputError: as :func:`check_new`, or the file system refuses.
    """
    check_new(path, file=file)
    path = path.absolute()
    existing = next(folder for folder in path.parents if folder.exists())
    temporary = temporary_beside(existing / path.name)
    written = temporary / path.name if file else temporary
    try:
        temporary.mkdir()
        yield written
        path.parent.mkdir(parents=True, exist_ok=True)
        written.replace(path)  # replaces an empty folder of that name
        sync(path.parent)
    except OSError as error:
        if error.strerror is None:
            raise
        raise OutputError(f"{path} can't be written ({error.strerror}); name one that can") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_recordable(trained: Trained) -> None:
    """Raise SpecError, before any work is done, if MLflow can't record it as a child of the run of ``trained``."""
    if trained.run_dir is not None:
        check_tracking_uri(trained.run_dir.parent)


def record_child(
    trained: Trained,
    kind: Literal["evaluate", "export", "sample"],
    params: Mapping[str, object],
    *,
    metrics: Mapping[str, float] | None = None,
    artifacts: Mapping[Path, str],
) -> None:
    """Record finished work as a child of the run that saved ``trained``, and print its address.

    Weights outside a run's folder have no parent; a line then says that nothing is recorded. The step of ``metrics`` is
    the checkpoint's number of images seen. ``artifacts`` are files and folders, each with its destination.
    """
    if trained.run_dir is None or trained.spec is None:
        print_to_stderr(f"{trained.origin} is not in the folder of a run, so nothing is recorded in MLflow")
        return
    try:
        parent = RunFolder(trained.run_dir).identity()
    except OSError as error:  # such as a copied run without an identity, on a read-only disk
        path = error.filename or trained.run_dir
        print_to_stderr(f"{path} can't be written ({error.strerror}), so nothing is recorded in MLflow")
        return
    checkpoint = Path(trained.origin).name
    tags = {"kind": kind, "checkpoint": checkpoint, "weights": trained.weights, "digest": trained.digest}
    tags |= {"images_seen": str(trained.images_seen), "version.ddpm_ds": __version__}
    tags |= {"mlflow.source.name": f"ddpm-ds {kind}"}
    experiment, name = trained.spec.logging.experiment, f"{kind} {checkpoint}"
    tracker = Tracker(RunStart(experiment, trained.run_dir, params, tags, name, parent=parent))
    if metrics:
        tracker.metrics(metrics, trained.images_seen or 0)
    for path, folder in artifacts.items():
        tracker.artifact(path, folder)
    link = tracker.finish("FINISHED")
    found = f"MLflow run {link.run_id}\nopen with  {f'{link.command}  and open  ' if link.command else ''}{link.url}"
    print(f"MLflow was not reached at {link.tracking_uri}" if link.run_id is None else found)
