"""Averages of any length after training, from snapshots of a few power-function averages.

::

    RUN_DIR/snapshots/  images-000200000/  ema-0.05, ema-0.1 ┐
                        images-000400000/  ema-0.05, ema-0.1 ┼─ x_i ─▶ sum of x_i snapshot_i = the average asked for
                        images-000600000/  ema-0.05, ema-0.1 ┘

An average after ``T`` images weights the parameters at time ``t`` by ``t ** gamma``, from 0 to T. The ``x_i`` are the
coefficients whose sum of these profiles is nearest to the requested profile, divided by their sum, so that weights that
do not change are their own average. Source: Karras et al. 2024 (EDM2), section 3.1 and appendix C, and the code
published with it, which divides.
"""

import hashlib
import json
import math
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ddpm_ds.checkpoint.folder import checkpoint_name, images_of, names, put_in_place
from ddpm_ds.checkpoint.manifest import (
    MANIFEST,
    STATE,
    Description,
    Part,
    Span,
    manifest_of,
    read_bytes,
    unusable,
)
from ddpm_ds.checkpoint.reader import Reader, write_tensors
from ddpm_ds.command_line import LONGEST_EMA, SHORTEST_EMA
from ddpm_ds.errors import CheckpointError, OutputError, SpecError
from ddpm_ds.files import sync, temporary_beside, write_file

EMA = "ema"
"""Kind of values of the exponential average, which every checkpoint holds."""
FARTHEST = 0.1
"""Maximum distance between the requested profile and the nearest sum, as a share of the former's norm."""
FILE = "weights.safetensors"


def profile_kind(length: float) -> str:
    """Return the kind of values of the power-function average of a relative length: ``ema-0.05``."""
    return f"{EMA}-{length}"


def length_of(kind: str) -> float | None:
    """Return the relative length of the power-function average that is this kind of values; None for other kinds."""
    match = re.fullmatch(rf"{EMA}-(0\.\d{{1,20}})", kind)
    length = float(match[1]) if match else 0.0
    return length if SHORTEST_EMA <= length <= LONGEST_EMA else None


def average_name(images: int, length: float) -> str:
    """Return the folder name of the average of a relative length that was made after training."""
    return f"{checkpoint_name(images)}-{profile_kind(length)}"


def averaged_kind(kinds: Sequence[str]) -> str | None:
    """Return the kind of values to use as averaged weights: ``ema``, or the only power-function average."""
    lengths = [kind for kind in kinds if length_of(kind) is not None]
    return EMA if EMA in kinds else lengths[0] if len(lengths) == 1 else None


def gamma_of(length: float) -> float:
    """Return the power gamma of the profile whose standard deviation is ``length`` times the training so far.

    ``length`` is sigma_rel of the paper, above 0 and at most 0.28, and its square is
    (gamma + 1) / ((gamma + 2) ** 2 * (gamma + 3)), which falls as gamma rises from 0.
    """
    low, high = 0.0, 1 / length
    while low < (middle := (low + high) / 2) < high:
        if (middle + 1) / ((middle + 2) ** 2 * (middle + 3)) > length**2:
            low = middle
        else:
            high = middle
    return high


def power_decay(gamma: float, images_seen: int, batch_images: int) -> float:
    """Return the weight of the old power-function average in a step that ends at ``images_seen``.

    It is 0 in the first step, so initial weights don't count.
    """
    return float((1 - batch_images / images_seen) ** (gamma + 1))


def combination(
    times: Sequence[float], lengths: Sequence[float], time: float, length: float
) -> tuple[np.ndarray, float]:
    """Return coefficients that combine averages into the average of ``length`` at ``time``, and the remaining distance.

    ``times`` and ``lengths`` describe the given averages. Coefficients are (averages,) float64, by least squares, then
    divided by their sum; the distance between the sum of profiles and the requested profile is a share of the latter's
    norm.
    """
    t, gamma = np.array(times, np.float64) / time, np.array([gamma_of(each) for each in lengths])
    wanted = gamma_of(length)
    products = _inner(t[:, None], gamma[:, None], t, gamma)
    product = _inner(t, gamma, np.ones(1), np.array([wanted]))
    x = np.linalg.lstsq(products, product, rcond=None)[0]
    x /= x.sum()
    norm = (wanted + 1) ** 2 / (2 * wanted + 1)
    return x, math.sqrt(max(0.0, 1 + (x @ products @ x - 2 * x @ product) / norm))


def _inner(t_a: np.ndarray, gamma_a: np.ndarray, t_b: np.ndarray, gamma_b: np.ndarray) -> np.ndarray:
    """Return the inner products of profiles, each with integral 1 (appendix C.2)."""
    exponent = np.where(t_a < t_b, gamma_b, -gamma_a)
    joined = (gamma_a + 1) * (gamma_b + 1) / ((gamma_a + gamma_b + 1) * np.maximum(t_a, t_b))
    return np.asarray(joined * (t_a / t_b) ** exponent)


class Reconstruction:
    """Average of a relative ``length`` at the time of a snapshot in ``folder``, by default the last.

    ``at`` is a number of images; later snapshots are not used. Checksums are compared as values are read.

    Raises:
        SpecError: the length is outside of 0.001 to 0.28.
        CheckpointError: snapshots are missing, or too few for this length; from all methods: a snapshot is damaged.
    """

    def __init__(self, folder: Path, length: float, at: int | None = None) -> None:
        if not SHORTEST_EMA <= length <= LONGEST_EMA:
            raise SpecError(f"a relative length of {length} is outside of {SHORTEST_EMA:g} to {LONGEST_EMA:g}; use 0.1")
        there = {images_of(name) or 0: folder / name for name in names(folder)}
        if not there:
            raise CheckpointError(
                f"{folder} holds no snapshot to make averages from; name the folder of a run trained with ema.profiles"
            )
        self.images = max(there) if at is None else at
        if self.images not in there:
            near = sorted(sorted(there, key=lambda images: abs(images - self.images))[:3])
            raise CheckpointError(
                f"--at {self.images} is the time of no snapshot in {folder}; use one of its {len(there)}, such as "
                f"{', '.join(map(str, near))}"
            )
        readers = [Reader(there[images]) for images in sorted(there) if images <= self.images]
        if len(readers) < 2:
            raise CheckpointError(
                f"{folder} holds one snapshot of up to {self.images:,} images, and an average is made from two or "
                "more; name a later one with --at, or train further"
            )
        self.manifest = readers[-1].manifest
        self.path = readers[-1].path
        for reader in readers:
            if not 0 < reader.manifest.images == images_of(reader.path.name):
                raise unusable(reader.path, f"it is of {reader.manifest.images} images")
            if (reader.manifest.parameters, reader.manifest.kinds) != (self.manifest.parameters, self.manifest.kinds):
                raise CheckpointError(f"{reader.path} is of another run than {self.path}; move one of them away")
        self._terms = [(reader, kind) for reader in readers for kind in self.manifest.kinds]
        times = [reader.manifest.images for reader, _ in self._terms]
        lengths = [_length(reader, kind) for reader, kind in self._terms]
        self._coefficients, self.distance = combination(times, lengths, self.images, length)
        if self.distance > FARTHEST:
            raise CheckpointError(
                f"--length {length:g} is outside of what the {len(readers)} snapshots in {folder} can make: its "
                f"profile would be {self.distance:.0%} off, and {FARTHEST:.0%} is the most; use one nearer to "
                f"{' or '.join(f'{each:g}' for each in sorted(set(lengths)))}"
            )
        self.kind = profile_kind(length)
        self.snapshots = len(readers)
        text = json.dumps([[reader.manifest.sha256 for reader in readers], self.kind, "divided by the sum"])
        self.digest = hashlib.sha256(text.encode()).hexdigest()

    def read(self, name: str) -> Tensor:
        """Return a parameter of the average, (elements,) fp32 in host memory, summed in fp64."""
        total = torch.zeros((), dtype=torch.float64)
        for coefficient, (reader, kind) in zip(self._coefficients, self._terms, strict=True):
            total = total + float(coefficient) * reader.read(kind, name).double()
        return total.float()

    def write(self, out: Path) -> None:
        """Write the average alone as a checkpoint in fp32, which appears when it is complete.

        Raises:
            CheckpointError: a value is not finite.
            OutputError: ``out`` exists or can't be written.
        """
        if out.exists():
            raise OutputError(f"{out} exists; name a new folder with --output, or remove it first")
        temporary = temporary_beside(out)
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            temporary.mkdir()
            self._write_files(temporary)
            put_in_place(temporary, out)
        except OSError as error:
            raise OutputError(f"{out} can't be written ({error.strerror}); name a folder that can") from None
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _write_files(self, folder: Path) -> None:
        def values() -> Iterator[memoryview]:
            for span in spans:
                read = self.read(span.name)
                if not read.isfinite().all():
                    raise CheckpointError(
                        f"the average of {span.name} is not finite: a snapshot up to {self.path} has values that are "
                        "not, or were beyond fp16; use earlier ones with --at"
                    )
                yield read.numpy().data

        spans = [Span(self.kind, name, 0, math.prod(shape)) for name, shape in self.manifest.parameters.items()]
        entry = write_tensors(folder / FILE, [(span.key, "F32", (span.length,)) for span in spans], values())
        part = Part(file=FILE, entry=entry, fragments=spans)
        state = read_bytes(self.path, STATE)
        description = Description(**{name: getattr(self.manifest, name) for name in Description.model_fields})
        write_file(folder / STATE, state)
        write_file(folder / MANIFEST, manifest_of(description, state, [part]).dump())
        sync(folder)


def _length(reader: Reader, kind: str) -> float:
    """Return the length of an average in a snapshot."""
    length = length_of(kind)
    if length is None:
        raise unusable(reader.path, f"it holds {kind}, which is no average of a length")
    return length
