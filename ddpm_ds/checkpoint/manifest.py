"""``manifest.json``, which describes a checkpoint, and checks of the files against it. Does not import torch.

A parameter is stored whole, or as the parts of the ranks of a tensor group, each flattened by itself. The values in a
file are a :class:`Span`::

    4.conv2.weight   0 1 2 3 4 5 6 7 8 9 10 11     runs of 2 elements, dealt to 2 ranks in turn
    ~0.2.2           0 1     4 5     8 9           @0: its values 0 1 4 5, @4: 8 9
    ~1.2.2               2 3     6 7     10 11
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import re
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from tqdm import tqdm

from ddpm_ds.ground.errors import CheckpointError
from ddpm_ds.ground.files import MOST_RECORD_BYTES, sha256_of
from ddpm_ds.ground.files import read_bytes as read_file
from ddpm_ds.ground.formats import open_tensors, parse_json
from ddpm_ds.ground.host import processors
from ddpm_ds.ground.version import __version__
from ddpm_ds.unet.shards import Shard

FORMAT = 1
MANIFEST, STATE = "manifest.json", "state.json"
BAR_BYTES = 10**9
"""Bytes below which a check takes about a second and shows no bar."""
_BLANK = "0" * 64

VALUES, NARROW = "F32", "BF16"
"""Data type of all values but codes, as safetensors names it, and that of weights that are trained in 16 bits alone."""
CODES = "U8"
"""Data type of codes of 8 bits (:mod:`ddpm_ds.checkpoint.reader`), which stand beside their blocks' scales."""
EMA, MASTER = "ema", "master"
"""Kinds of values: averaged weights, and the weights that the optimizer steps."""
KINDS = {"ema": EMA, "raw": MASTER}
"""Kinds of values by the names that users give them."""
MOMENTS = {"exp_avg": True, "exp_avg_sq": False}
"""Kinds of Adam's moments, which may be codes, and whether they have signs."""
BLOCK = 256
"""Number of elements that share a scale. A parameter's first block begins at its first element."""
_NUMBER = r"(\d{1,15})"
_KEY = re.compile(rf"([^/]+)/(.+?)(?:~{_NUMBER}\.{_NUMBER}\.{_NUMBER})?@{_NUMBER}")


def blocks_of(first: int, length: int) -> range:
    """Return the blocks of a parameter that hold ``length`` elements from ``first`` on."""
    return range(first // BLOCK, -(-(first + length) // BLOCK))


FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$")]
"""Name without folders, which can't lead out of its own."""
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Counter = Annotated[int, Field(ge=0, lt=2**53)]
"""Number of images, steps or bytes, small enough for a float to hold exactly."""
Counted = Annotated[int, Field(ge=-1, lt=2**53)]
"""Step count of DeepSpeed, which begins at -1."""
Amount = Annotated[float, Field(ge=0.0, le=2.0**53)]
Shape = Annotated[tuple[Annotated[int, Field(ge=1, le=2**32)], ...], Field(max_length=8)]


def _by_field(checksums: dict[str, str]) -> dict[str, str]:
    from ddpm_ds.data.cache import by_field  # imports numpy

    return by_field(checksums)


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class SchedulerState(_Record):
    """State of DeepSpeed's learning-rate schedulers."""

    last_batch_iteration: Counted


class ScalerState(_Record):
    """State of the dynamic loss scaler; empty outside fp16."""

    cur_scale: Amount = 1.0
    cur_iter: Counted = 0
    last_overflow_iter: Counted = -1
    cur_hysteresis: Counted = 1


class State(_Record):
    """``state.json``: the scalars of a run, which all ranks share."""

    images_seen: Counter
    skipped_images: Counter
    """Images left out by rollbacks."""
    steps: Counter
    skipped_steps: Counter
    optimizer_steps: Counter
    """Steps that Adam has taken."""
    learning_rate: Annotated[float, Field(ge=0.0, le=1e6)]
    lr_scheduler: SchedulerState | None
    loss_scaler: ScalerState
    rollbacks: Counter


class Description(_Record):
    """Facts about a checkpoint, known to the run that writes it."""

    images: Counter
    """Number of images seen."""
    step: Counter
    """Number of optimizer steps taken."""
    spec: dict[str, Any]
    ds_config: dict[str, Any]
    layout: dict[str, Any]
    """Processes, stages, replicas and batch."""
    data_sha256: Annotated[dict[str, str], AfterValidator(_by_field)]
    """Checksums of the data-set cache, one for each field."""
    parameters: dict[str, Shape]
    """Shape of every parameter by global name, in the order of the layers."""
    fields: dict[str, Any] | None = None
    """Scales and names of the fields that the run learns; None for pictures and latents."""


class FileEntry(_Record):
    """Size and checksum of a file as written."""

    bytes: Counter
    sha256: Sha256


class Part(_Record):
    """Record, for rank 0, of a rank's file that is safely on disk."""

    file: str
    entry: FileEntry
    fragments: list[Span]
    """Fragments in the order of the file."""


class Manifest(Description):
    """``manifest.json``: the last file of a checkpoint to be written."""

    sha256: Sha256 = _BLANK
    """Checksum of ``manifest.json`` itself, computed with zeros in place of this value."""
    format: int
    version: str
    created: datetime
    kinds: tuple[str, ...]
    """Kinds of values saved for every parameter, such as ``master``, ``exp_avg``, ``exp_avg_sq`` and ``ema``."""
    files: dict[FileName, FileEntry]
    """Every other file of the checkpoint."""

    @model_validator(mode="after")
    def _whole(self) -> Manifest:
        if STATE not in self.files or MANIFEST in self.files or len(self.files) < 2 or not self.kinds:
            raise ValueError("no files")
        return self

    @property
    def total_bytes(self) -> int:
        """Size of all files but ``manifest.json``."""
        return sum(entry.bytes for entry in self.files.values())

    def dump(self) -> bytes:
        """Return the bytes of ``manifest.json``."""
        values = {"sha256": _BLANK, **self.model_dump(mode="json", exclude={"sha256"})}
        blank = readable(MANIFEST, (json.dumps(values, indent=2) + "\n").encode())
        return blank.replace(_BLANK.encode(), hashlib.sha256(blank).hexdigest().encode(), 1)


def manifest_of(description: Description, state: bytes, parts: Iterable[Part]) -> Manifest:
    """Return the manifest of all ranks' files and ``state.json``; raises ValueError unless they are complete."""
    parts = sorted(parts, key=lambda part: part.file)
    files = {part.file: part.entry for part in parts}
    if len(files) != len(parts):
        raise ValueError("two ranks wrote parts of one name")
    fragments = [fragment for part in parts for fragment in part.fragments]
    kinds = check_coverage(description.parameters, fragments)
    files[STATE] = FileEntry(bytes=len(state), sha256=hashlib.sha256(state).hexdigest())
    return Manifest(
        **dict(description),
        format=FORMAT,
        version=__version__,
        created=datetime.now(UTC),
        kinds=kinds,
        files=dict(sorted(files.items())),
    )


def readable(name: str, content: bytes) -> bytes:
    """Return the content of a file to be written; raises OSError if it would be too large to be read."""
    if len(content) > MOST_RECORD_BYTES:
        raise OSError(errno.EFBIG, f"{len(content):,} bytes, and {MOST_RECORD_BYTES:,} can be read", name)
    return content


def unusable(checkpoint: Path, what: str) -> CheckpointError:
    """Return the error for a checkpoint in which something is wrong."""
    return CheckpointError(
        f"checkpoint {checkpoint} is unusable: {what}; use another of the run (ddpm-ds checkpoint list RUN_DIR)"
    )


def read_manifest(checkpoint: Path) -> Manifest:
    """Return a checkpoint's manifest; raises CheckpointError if a byte is damaged, or its format is another."""
    raw = read_bytes(checkpoint, MANIFEST)
    try:
        values = parse_json(raw)
        if hashlib.sha256(raw.replace(values["sha256"].encode(), _BLANK.encode(), 1)).hexdigest() != values["sha256"]:
            raise ValueError("checksum")
        if values["format"] == FORMAT:
            return Manifest.model_validate_json(raw)
    except (ValueError, KeyError, TypeError, AttributeError):  # errors that a flipped byte can cause
        raise unusable(checkpoint, f"{MANIFEST} is damaged") from None
    raise unusable(
        checkpoint,
        f"its format is {values['format']}, this version reads format {FORMAT}; use the ddpm_ds "
        f"{values.get('version', 'version')} that wrote it",
    )


@contextlib.contextmanager
def reading(checkpoint: Path, name: str) -> Iterator[None]:
    """Raise the OSErrors of reading a checkpoint's file as CheckpointError."""
    try:
        yield
    except OSError as error:
        raise unusable(checkpoint, f"{name} can't be read ({error.strerror})") from None


def read_bytes(checkpoint: Path, name: str) -> bytes:
    """Return the bytes of a small file of a checkpoint; raises CheckpointError."""
    with reading(checkpoint, name):
        return read_file(checkpoint / name)


def parse_state(checkpoint: Path, text: bytes) -> State:
    """Parse the text of ``state.json``; raises CheckpointError if a scalar is missing or out of range."""
    try:
        return State.model_validate_json(text)
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(map(str, problem["loc"])) or "it"
        raise unusable(checkpoint, f"{STATE} is damaged, {key}: {problem['msg']}") from None


def check_headers(checkpoint: Path, manifest: Manifest, name: str) -> list[Span]:
    """Return the fragments in one file, without reading values; raises CheckpointError if it has something else."""
    with reading(checkpoint, name):
        file = open_tensors(checkpoint / name, "numpy")
    found, scales, expected = [], {}, {}
    for key in file.keys():  # noqa: SIM118 - not a mapping
        piece = file.get_slice(key)
        shape, dtype = piece.get_shape(), piece.get_dtype()
        span = Span.of(key, math.prod(shape))
        if span is not None and span.kind.endswith(".scales") and dtype == VALUES:
            scales[key] = shape
            continue
        coded = span is not None and span.kind in MOMENTS and dtype == CODES
        known = span is not None and span.kind in manifest.kinds and span.name in manifest.parameters
        narrow = span is not None and span.kind in KINDS.values() and dtype == NARROW
        known = known and (coded or narrow or dtype == VALUES) and len(shape) == 1
        if span is None or not known or not span.is_within(math.prod(manifest.parameters[span.name])):
            raise unusable(checkpoint, f"{name} holds something other than the checkpoint's values in fp32")
        found.append(span)
        if coded:
            expected[span.scales_key] = [len(blocks_of(span.start, span.length))]
    if scales != expected:
        raise unusable(checkpoint, f"{name} holds 8-bit codes without their scales, or other scales")
    return found


def verify(checkpoint: Path, manifest: Manifest, progress: bool) -> None:
    """Raise CheckpointError if a file differs from the manifest; ``progress`` shows a bar for a big checkpoint."""
    if missing := [name for name in manifest.files if not (checkpoint / name).exists()]:
        raise unusable(checkpoint, f"it lacks {', '.join(missing)}")
    hidden = not progress or manifest.total_bytes < BAR_BYTES
    shown = tqdm(
        total=manifest.total_bytes, desc=f"checking {checkpoint.name}", unit="B", unit_scale=True, disable=hidden
    )
    with shown as bar, ThreadPoolExecutor(processors()) as pool:
        deque(pool.map(lambda name: check_bytes(checkpoint, name, manifest, bar), manifest.files), 0)  # raises errors


def check_bytes(checkpoint: Path, name: str, manifest: Manifest, bar: tqdm[NoReturn] | None = None) -> None:
    """Raise CheckpointError if a file has changed since it was written; advances ``bar`` by its bytes."""
    path, expected = checkpoint / name, manifest.files[name]
    with reading(checkpoint, name):
        size = path.stat().st_size
        digest = sha256_of(path, bar) if size == expected.bytes else None
    if digest is None:
        raise unusable(checkpoint, f"{name} has {size:,} bytes, {expected.bytes:,} were written")
    if digest != expected.sha256:
        raise unusable(checkpoint, f"{name} has another checksum than {MANIFEST} says")


class Span(NamedTuple):
    """Range of values of a flattened parameter or of a rank's part of it, or of one kind of their state."""

    kind: str
    """Kind of values: ``master``, ``exp_avg``, ``exp_avg_sq``, ``ema``, ...; no slash."""
    name: str
    """Global name of the parameter."""
    start: int
    """Index of the first value."""
    length: int
    shard: Shard | None = None
    """Part of the parameter, in which ``start`` counts; None if the parameter is stored whole."""

    @classmethod
    def of(cls, key: str, length: int) -> Span | None:
        """Return the span of a tensor in a checkpoint's file; None if the key is not one that is written."""
        if (match := _KEY.fullmatch(key)) is None:
            return None
        kind, name, *shard, start = match.groups()
        span = cls(kind, name, int(start), length, None if shard[0] is None else Shard(*map(int, shard)))
        return span if span.key == key else None

    @property
    def stop(self) -> int:
        return self.start + self.length

    @property
    def key(self) -> str:
        """Name of this tensor in a checkpoint's file."""
        part = "" if self.shard is None else f"~{self.shard.rank}.{self.shard.ranks}.{self.shard.run}"
        return f"{self.kind}/{self.name}{part}@{self.start}"

    @property
    def scales_key(self) -> str:
        """Name of the scales of this tensor's blocks, if it holds codes."""
        return self._replace(kind=f"{self.kind}.scales").key

    @property
    def what(self) -> str:
        """Words for the tensor that has these values."""
        part = "" if self.shard is None else f"part {self.shard.rank + 1} of {self.shard.ranks} of "
        return f"{part}{self.kind} of {self.name}"

    def is_within(self, elements: int) -> bool:
        """Return whether a parameter of this many elements has these values."""
        if self.shard is None:
            return self.stop <= elements
        return divides(self.shard, elements) and self.stop <= elements // self.shard.ranks


def divides(shard: Shard, elements: int) -> bool:
    """Return whether a parameter of this many elements has this part."""
    rank, ranks, run = shard
    return rank < ranks > 1 and run > 0 and elements % (ranks * run) == 0


def check_coverage(parameters: Mapping[str, tuple[int, ...]], fragments: Iterable[Span]) -> tuple[str, ...]:
    """Return the kinds among ``fragments``.

    Raises ValueError unless the fragments of each kind have every element of every parameter once, whole or in parts;
    both of Adam's moments may lack a parameter, which is not trained then.
    """
    spans: dict[tuple[str, str], dict[Shard | None, list[Span]]] = defaultdict(lambda: defaultdict(list))
    for span in fragments:
        if span.name not in parameters:
            raise ValueError(f"{span.kind} of {span.name} was written, but there is no such parameter")
        spans[span.kind, span.name][span.shard].append(span)
    kinds = tuple(sorted({kind for kind, _ in spans}))
    if not kinds:
        raise ValueError("no rank wrote a fragment")
    for kind in kinds:
        for name, shape in parameters.items():
            found = spans[kind, name]
            if kind in MOMENTS and not any(spans[moment, name] for moment in MOMENTS):
                continue
            for end in _ends(Span(kind, name, math.prod(shape), 0), found):
                at = 0
                for span in (*sorted(found[end.shard]), end):
                    if span.start != at:
                        what = "was not written" if span.start > at else "was written twice or beyond its end"
                        raise ValueError(f"{end.what} {what}, from element {min(span.start, at)} on")
                    at = span.stop
    return kinds


def _ends(end: Span, found: Collection[Shard | None]) -> Iterator[Span]:
    """Yield the end of each part of a parameter, given the ``end`` of the whole and the parts ``found``."""
    first, *others = list(found) or [None]
    if first is None and not others:
        yield end
        return
    if first is None or any(one is None or one[1:] != first[1:] or not divides(one, end.start) for one in found):
        raise ValueError(f"{end.what} was written in several ways, or in parts that it does not have")
    for rank in range(first.ranks):
        yield end._replace(start=end.start // first.ranks, shard=first._replace(rank=rank))
