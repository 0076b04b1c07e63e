"""Reader of any piece of a checkpoint, however it is split into fragments, and its consolidation into a single file.

Adam's moments may be codes of 8 bits, which are rounded in blocks of a parameter's elements::

    block of a moment ─▶ scale: its element farthest from 0 ─▶ elements / scale ─▶ number of the nearest in a table

Source of the tables: Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization"
(https://arxiv.org/abs/2110.02861): seven powers of ten, each with twice as many numbers as the one below it. Unlike in
the paper, rounding rounded values changes no bit: a scale has the sign of its element, which is then the table's 1, and
a block is 0 if all its elements are below :data:`SMALLEST`. A second moment that is not 0 never becomes 0, since Adam
divides by its root.
"""

import contextlib
import functools
import hashlib
import itertools
import json
import math
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from ddpm_ds.checkpoint.manifest import (
    BLOCK,
    CODES,
    MOMENTS,
    STATE,
    FileEntry,
    Manifest,
    Span,
    blocks_of,
    check_bytes,
    check_headers,
    divides,
    parse_state,
    read_bytes,
    read_manifest,
    readable,
    unusable,
    verify,
)
from ddpm_ds.ground.device import DTYPES
from ddpm_ds.ground.errors import CheckpointError, OutputError
from ddpm_ds.ground.files import sync, temporary_beside
from ddpm_ds.ground.formats import open_tensors
from ddpm_ds.ground.units import Precision
from ddpm_ds.unet.shards import Shard
from ddpm_ds.unet.tensor_group import read_part

POWERS = 7
"""Powers of ten in a table."""
SMALLEST = 2.0**-100
"""Smallest scale that is not taken for 0: products with a table's numbers keep all bits of fp32."""
STORED: dict[str, torch.dtype] = {**dict(DTYPES.values()), CODES: torch.uint8}
"""PyTorch's data types by their names in safetensors files."""
WRITTEN_BYTES = 2**26
"""Bytes that are written at a time, while a second thread adds them to the checksum."""


class Code:
    """Table of the first moment (``signed``) or of the second, on a device."""

    def __init__(self, signed: bool, device: torch.device | str = "cpu") -> None:
        counts = [2**power * (1 if signed else 2) for power in range(POWERS)]
        steps = [(power, (step + 0.5) / count) for power, count in enumerate(counts) for step in range(count)]
        positive = [10.0 ** (power - POWERS + 1) * (0.1 + 0.9 * share) for power, share in steps]
        numbers = torch.tensor(sorted([*positive, *(-one for one in positive if signed), 0.0, 1.0]))
        limits = (numbers[1:] + numbers[:-1]) / 2
        self.error = float(numbers.diff().max()) / 2
        """Largest error of an element, as a share of its block's scale."""
        if not signed:
            limits[0] = 0.0
        self._numbers, self._limits = numbers.to(device), limits.to(device)
        self.zero = int((numbers == 0).nonzero())
        """Code of 0."""

    def encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes (blocks, BLOCK) uint8 and scales (blocks,) fp32 of values (blocks, BLOCK) in fp32."""
        low, high = values.aminmax(dim=1, keepdim=True)
        scales = torch.where(high >= -low, high, low)
        scales.masked_fill_(scales.abs() < SMALLEST, 0.0)
        shares = values / scales.masked_fill(scales == 0.0, float("inf"))
        return torch.bucketize(shares, self._limits, out_int32=True).to(torch.uint8), scales[:, 0]

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Return the fp32 values of codes of any shape; the scales, one for each code, must fit it by broadcasting."""
        return self._numbers.index_select(0, codes.flatten().int()).view(codes.shape).mul_(scales)


@functools.cache
def code_of(moment: str, device: torch.device | str = "cpu") -> Code:
    """Return the table of one of Adam's moments."""
    return Code(MOMENTS[moment], device)


def decoded(moment: str, first: int, codes: Tensor, scales: Tensor) -> Tensor:
    """Return the fp32 values of codes of a parameter's elements from ``first`` on, with the scales of their blocks."""
    return code_of(moment).decode(codes, scales.repeat_interleave(BLOCK)[first % BLOCK :][: len(codes)])


class Reader:
    """Open checkpoint. A file's checksum is compared before the first value is read from it, unless all are verified.

    All methods raise CheckpointError if a part of the checkpoint is missing, damaged or in another format.
    """

    def __init__(self, path: Path, manifest: Manifest | None = None, *, verified: bool = False) -> None:
        self.path = path
        self.manifest = manifest or read_manifest(path)
        self._verified = set(self.manifest.files) if verified else set[str]()
        self._files: dict[str, Any] = {}
        self._spans: dict[tuple[str, str], dict[Shard | None, list[tuple[Span, str]]]] = {}
        self._check(STATE)
        self.state = parse_state(path, read_bytes(path, STATE))

    def verify(self, progress: bool = False) -> None:
        """Compare the checksums of all files."""
        verify(self.path, self.manifest, progress)
        self._verified.update(self.manifest.files)

    def read(self, kind: str, name: str, start: int = 0, length: int | None = None) -> Tensor:
        """Return ``length`` values (None: up to the end) of flattened parameter ``name``, from ``start`` on.

        The result is a copy, (length,) fp32 in host memory. Only the files that hold the values are checked, and only
        the needed pages read. Raises ValueError if the parameter has no such values.
        """
        elements = self._elements(kind, name)
        length = elements - start if length is None else length
        if not 0 <= start <= start + length <= elements:
            raise ValueError(f"values {start} to {start + length} of {name}, which has {elements}")
        split = next(iter(self._spans_of(kind, name)), None)
        if split is None:
            return self._stored(Span(kind, name, start, length))
        size = split.ranks * split.run  # of a deal to all ranks
        first, last = start // size, -(-(start + length) // size)
        values = torch.empty(last - first, split.ranks, split.run)
        for rank in range(split.ranks):
            shard = split._replace(rank=rank)
            part = self._stored(Span(kind, name, first * split.run, (last - first) * split.run, shard))
            values[:, rank] = part.view(-1, split.run)
        return values.view(-1)[start - first * size :][:length]

    def read_part(self, kind: str, name: str, shard: Shard | None, start: int, length: int) -> Tensor:
        """Return ``length`` values of a rank's part (None: the whole) of a parameter, from the part's ``start`` on.

        A part that is stored as it is asked for is read alone.
        """
        elements = self._elements(kind, name)
        if shard is None or shard not in self._spans_of(kind, name):
            if not (shard is None or divides(shard, elements)):
                raise ValueError(f"{shard} of {name}, which has {elements} values")
            return read_part(partial(self.read, kind, name), shard, start, length)
        if not 0 <= start <= start + length <= elements // shard.ranks:
            raise ValueError(f"values {start} to {start + length} of {shard} of {name}, which has {elements}")
        return self._stored(Span(kind, name, start, length, shard))

    def _elements(self, kind: str, name: str) -> int:
        if kind not in self.manifest.kinds:
            raise unusable(self.path, f"it has no {kind}, only {', '.join(self.manifest.kinds)}")
        if name not in self.manifest.parameters:
            raise unusable(self.path, f"it has no parameter {name}, so it is of another U-Net")
        return math.prod(self.manifest.parameters[name])

    def _stored(self, wanted: Span) -> Tensor:
        """Return values of a parameter or part that is stored as such."""
        values, at = torch.empty(wanted.length), wanted.start
        for span, file in self._spans_of(wanted.kind, wanted.name).get(wanted.shard, []):
            low, high = max(at, span.start), min(wanted.stop, span.stop)
            if low != at or low >= high:
                continue
            self._check(file)
            piece = self._files[file].get_slice(span.key)[low - span.start : high - span.start]
            if piece.dtype is STORED[CODES]:
                blocks, first = blocks_of(low, high - low), span.start // BLOCK
                scales = self._files[file].get_slice(span.scales_key)[blocks.start - first : blocks.stop - first]
                piece = decoded(span.kind, low, piece, scales)
            values.numpy()[low - wanted.start : high - wanted.start] = piece.float().numpy()
            at = high
        if at != wanted.stop:
            self.verify()  # names the file whose header is damaged
            raise unusable(self.path, f"values {at} and following of {wanted.what} are in none of its files")
        return values

    def _check(self, name: str) -> None:
        if name not in self._verified:
            check_bytes(self.path, name, self.manifest)
            self._verified.add(name)

    def _spans_of(self, kind: str, name: str) -> dict[Shard | None, list[tuple[Span, str]]]:
        """Return the fragments of one tensor in order, each with its file, by their part; open all files at first."""
        # A damaged header can hide or invent fragments, but not values, which are read after the checksum is compared.
        if not self._spans:
            for file in [name for name in self.manifest.files if name != STATE]:
                try:
                    spans = check_headers(self.path, self.manifest, file)
                    self._files[file] = open_tensors(self.path / file)
                except (OSError, CheckpointError):
                    check_bytes(self.path, file, self.manifest)  # a wrong checksum is the better error
                    raise
                for span in spans:
                    parts = self._spans.setdefault((span.kind, span.name), {})
                    parts.setdefault(span.shard, []).append((span, file))
            for parts in self._spans.values():
                for found in parts.values():
                    found.sort()
        return self._spans.get((kind, name), {})


Header = tuple[str, str, tuple[int, ...]]
"""Key, data type and shape of a tensor in a safetensors file."""


def write_tensors(path: Path, tensors: Iterable[Header], values: Iterable[memoryview], **metadata: str) -> FileEntry:
    """Write a safetensors file, streaming its tensors, and flush it to disk.

    The format is the header's length as 8 little-endian bytes, the header in JSON, and the raw tensors without gaps.
    ``tensors`` are (key, dtype, shape) in the order of their ``values``.
    """
    entries: dict[str, object] = {"__metadata__": metadata}
    at = 0
    for key, dtype, shape in tensors:
        end = at + math.prod(shape) * STORED[dtype].itemsize
        entries[key] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the tensors for readers that map the file
    readable(f"header of {path.name}", text)
    digest = hashlib.sha256()
    with path.open("wb") as file, ThreadPoolExecutor(1) as hashing:
        for piece in itertools.chain([memoryview(len(text).to_bytes(8, "little") + text)], values):
            for first in range(0, len(piece), WRITTEN_BYTES):
                part = piece[first : first + WRITTEN_BYTES]
                hashed = hashing.submit(digest.update, part)
                file.write(part)
                hashed.result()
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(bytes=8 + len(text) + at, sha256=digest.hexdigest())


def consolidate(path: Path, out: Path, kind: str = "ema", dtype: Precision = "fp32", *, progress: bool = False) -> None:
    """Write ``kind`` of every parameter of the checkpoint at ``path`` into the safetensors file ``out``.

    Tensors have their global names and full shapes, in layer order. Only one tensor is in host memory at a time;
    ``out`` appears, or is replaced, when it is complete. ``progress`` shows bars on stderr.

    Raises:
        CheckpointError: the checkpoint is damaged, lacks ``kind``, or holds values beyond ``dtype``.
        OutputError: ``out`` can't be written.
    """
    reader = Reader(path)
    parameters = reader.manifest.parameters
    if kind not in reader.manifest.kinds:
        kinds = ", ".join(reader.manifest.kinds)
        raise CheckpointError(f"checkpoint {path} has no {kind} weights, only {kinds}; choose others")
    reader.verify(progress)
    code, torch_dtype = DTYPES[dtype]
    tensors = [(name, code, shape) for name, shape in parameters.items()]
    temporary = temporary_beside(out)

    def converted() -> Iterator[memoryview]:
        with tqdm(parameters, desc=f"writing {out.name}", disable=not progress) as bar:
            for name in bar:
                values = reader.read(kind, name)
                narrower = values.to(torch_dtype)
                if not narrower.isfinite().equal(values.isfinite()):
                    raise CheckpointError(f"{kind} of {name} has values beyond {dtype}; use --dtype bf16 or fp32")
                yield narrower.view(torch.uint8).numpy().data

    try:
        images = str(reader.manifest.images)
        write_tensors(temporary, tensors, converted(), format="pt", kind=kind, images=images)
        temporary.replace(out)
        sync(out.absolute().parent)
    except OSError as error:
        raise OutputError(f"{out} can't be written ({error.strerror}); name a file that can") from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
