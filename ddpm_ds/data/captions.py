"""Captions of images, and prompts of samples, on their way through the text encoders.

Each distinct caption is encoded once and stored in 16 bits, or is stored as the numbers of its tokens::

    "a cat"    ──encode──▶ tokens (77, C) float16                       ─▶ images.npy, pooled.npy of the text's cache
               ──tokenize▶ numbers (encoders, 77) int32                 ─▶ images.npy, encoded while training

With ``data.text.stored: text`` there is no text cache: training tokenizes the images' captions, whose tags may change.
A text cache is named after the captions and the encoders, so pixels and latents, and images of all sizes, share it.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Self

import numpy as np

from ddpm_ds.data import cache
from ddpm_ds.data.sources.base import Captions, Source, captions_of
from ddpm_ds.data.spec import DataSpec, TagsSpec, TextSpec
from ddpm_ds.data.text import Encoded, TextEncoders
from ddpm_ds.data.writing import Chunk
from ddpm_ds.ground.errors import DataError, shortened
from ddpm_ds.ground.files import open_regular

if TYPE_CHECKING:
    import torch

CHUNK_TEXTS = 64  # texts that are written together
MOST_FLOAT16 = 65504.0
ENCODERS = "encoders"  # key of the encoders in the checksums of encoded text
PROMPTS = "prompts.npz"  # file of the prompts in a run's folder
SHOWN = 60  # maximum characters of a prompt in a message


def known_captions(source: Source, spec: DataSpec) -> Captions | None:
    """Return the captions of a source's images, None without ``data.text``; raises DataError if some have none."""
    captions = captions_of(source)
    if captions is None or not (missing := captions.missing):
        return captions
    assert spec.text is not None
    raise DataError(
        f"data.text: {len(missing):,} of {len(source.labels):,} images of data.source = {spec.source} have no caption, "
        f"first {source.name(missing[0])}; give each a .txt of its name or a text under {spec.text.captions}, name "
        "another key with --set data.text.captions=KEY, or leave these out"
    )


def written(texts: Iterable[str]) -> bytes:
    """Return the content of a file of distinct captions."""
    return b"".join(json.dumps(text).encode() + b"\n" for text in texts)


def texts_of(images: cache.DatasetCache) -> list[str]:
    """Return the distinct captions of a cache of images; raises DataError."""
    with _captions_file(images) as lines:
        return [json.loads(line) for line in lines]


@contextmanager
def _captions_file(images: cache.DatasetCache) -> Iterator[BinaryIO]:
    """Open the file of distinct captions for the body; raises DataError for faults of the file."""
    try:
        with open_regular(images.path / cache.CAPTIONS_FILE) as lines:
            yield lines
    except (OSError, ValueError) as error:
        raise cache.damaged(images.path, f"{cache.CAPTIONS_FILE} can't be read ({error})") from error


class Tags(NamedTuple):
    """Tags of a caption, in the caption's order."""

    first: list[str]
    others: list[str]
    """Tags that are shuffled and dropped."""
    last: list[str]

    @classmethod
    def of(cls, text: str, spec: TagsSpec) -> Self:
        """Split a caption after its prefix, whose first tag has the prefix, as in sd-scripts."""
        text = f"{spec.prefix} {text}"
        parts = text.split(spec.keep_separator, 2) if spec.keep_separator else [text]
        first, *rest = ([tag for each in part.split(spec.separator) if (tag := each.strip())] for part in parts)
        if not rest:
            return cls(first[: spec.keep], first[spec.keep :], [])
        return cls(first, rest[0], rest[1] if rest[1:] else [])

    def joined(self, spec: TagsSpec, draws: Sequence[int] = ()) -> str:
        """Return the caption; ``draws`` in [0, 2^32), two of each other tag, change it: its place, and if it stays."""
        others = self.others
        if len(draws):
            places = [draws[2 * number] if spec.shuffle else 0 for number in range(len(others))]
            order = sorted(range(len(others)), key=places.__getitem__)
            others = [others[number] for number in order if draws[2 * number + 1] >= spec.drop * 2**32]
        return f"{spec.separator} ".join([*self.first, *others, *self.last])


class CaptionTokens(cache.ByPosition):
    """Tokens of the images' captions, (N, encoders, tokens) int32, which are made when they are read."""

    def __init__(self, images: cache.DatasetCache, encoders: TextEncoders) -> None:
        self._images, self._encoders = images, encoders
        self.shape, self.dtype = (len(images), encoders.count, encoders.tokens), np.dtype(np.int32)
        self.image_bytes = self.dtype.itemsize * encoders.count * encoders.tokens
        with _captions_file(images) as lines:
            self._starts = np.cumsum([0, *map(len, lines)])  # (texts + 1,)

    def read(
        self, positions: cache.Indices, out: cache.Images | None = None, draw: cache.Draw | None = None
    ) -> cache.Images:
        rows, spec = cache.chosen(self._images.others[cache.CAPTIONS], positions, draw), self._encoders.spec.tags
        starts, ends = self._starts[rows].tolist(), self._starts[rows + 1].tolist()
        with _captions_file(self._images) as lines:
            file = lines.fileno()
            texts = [json.loads(os.pread(file, end - at, at)) for at, end in zip(starts, ends, strict=True)]
        if spec is not None:
            from ddpm_ds.ground.keyed import Stream  # imports torch

            tags = [Tags.of(text, spec) for text in texts]
            most = max(len(each.others) for each in tags)
            draws = [()] * len(tags) if draw is None or not most else draw(Stream.TAGS, 2 * most).tolist()
            texts = [each.joined(spec, own) for each, own in zip(tags, draws, strict=True)]
        found = self._encoders.ids(texts).numpy()
        if out is None:
            return found
        out[:] = found
        return out


def with_tokens(images: cache.DatasetCache, encoders: TextEncoders) -> cache.DatasetCache:
    """Return a cache of images whose captions are tokenized while training, with the checksum of the encoders."""
    sums = {**images.meta.sha256, f"{cache.TEXTS}{ENCODERS}": encoders.digest}
    meta = images.meta.model_copy(update={"sha256": sums})
    return replace(images, meta=meta, tokens=CaptionTokens(images, encoders))


def text_sources(images: cache.DatasetCache, encoders: TextEncoders) -> dict[str, str]:
    """Return the checksums of captions and encoders, which decide the encoded text."""
    return {cache.CAPTIONS_FILE: images.meta.sha256[cache.CAPTIONS_FILE], ENCODERS: encoders.digest}


def text_fields(encoders: TextEncoders) -> dict[str, cache.StoredField]:
    """Return the fields of one encoded caption, or of the numbers of its tokens."""
    found = {cache.CUT: cache.StoredField(shape=(1,), values="int32")}
    if encoders.spec.stored == "ids":
        return {cache.IMAGES: cache.StoredField(shape=(1, encoders.count, encoders.tokens), values="int32"), **found}
    found[cache.IMAGES] = cache.StoredField(shape=(1, encoders.tokens, encoders.channels), values="float16")
    if encoders.pooled_channels is not None:
        found[cache.POOLED] = cache.StoredField(shape=(encoders.pooled_channels,), values="float16")
    return found


def encoded_texts(encoders: TextEncoders, texts: Sequence[str]) -> Iterator[Chunk]:
    """Yield encoded ``texts``, or their tokens' numbers, in chunks; raises DataError for values above float16."""
    import torch

    for first in range(0, len(texts), CHUNK_TEXTS):
        part = list(texts[first : first + CHUNK_TEXTS])
        fields = {cache.CUT: torch.tensor(encoders.excess(part), dtype=torch.int32)[:, None]}
        if encoders.spec.stored == "ids":
            stored = encoders.ids(part)
        else:
            tokens, pooled = encoders.encode(part).on(torch.device("cpu"))
            if not all(values.abs().amax() <= MOST_FLOAT16 for values in (tokens, pooled) if values is not None):
                raise DataError(
                    f"data.text.encoders = {encoders.spec.encoders} make a value beyond float16 from a caption such as "
                    f"{part[0]!r}; use other encoders"
                )
            stored = tokens.half()
            if pooled is not None:
                fields[cache.POOLED] = pooled.half()
        others = {name: [row.data for row in values.numpy()] for name, values in fields.items()}
        yield Chunk([row.data for row in stored.numpy()], [0] * len(stored), [], others)


def warnings_of(text: cache.DatasetCache) -> list[str]:
    """Return a warning about captions that were cut, if there are some."""
    cut = text.others[cache.CUT][:]
    if not (cuts := int((cut > 0).sum())):
        return []
    tokens = text.meta.shape[2 if text.meta.stored[cache.IMAGES].values == "int32" else 1]
    return [
        f"{cuts:,} of {len(text):,} captions have more than {tokens} tokens and are cut, as by diffusers' pipelines; "
        f"the longest loses {cut.max():,}"
    ]


def _read_field(images: cache.DatasetCache, positions: cache.Indices, name: str) -> cache.Images:
    """Return a field of the images at ``positions`` among the images of all buckets of aspect."""
    of_buckets = zip(images.caches, images.by_bucket(positions), strict=True)
    return np.concatenate([bucket.fields[name].read(at) for bucket, at in of_buckets])


def first_captions(
    images: cache.DatasetCache, positions: cache.Indices, tags: TagsSpec | None = None
) -> tuple[str, ...]:
    """Return the first captions of the images at ``positions`` of a cache, with all tags; raises DataError."""
    texts = texts_of(images)
    found = (texts[row] for row in _read_field(images, positions, cache.CAPTIONS)[:, 0])
    return tuple(text if tags is None else Tags.of(text, tags).joined(tags) for text in found)


@dataclass(frozen=True)
class EncodedPrompts:
    """Encoded prompts, and the encoded empty text: float16 on the CPU, as the captions of training."""

    texts: tuple[str, ...]
    whole: Encoded  # encoded texts and, last, the empty text

    @property
    def encoded(self) -> Encoded:
        """The encoded texts."""
        return self.whole.each(lambda part: part[:-1])

    @property
    def empty(self) -> Encoded:
        """The encoded empty text, N = 1."""
        return self.whole.each(lambda part: part[-1:])

    @classmethod
    def of(
        cls,
        spec: TextSpec,
        texts: Sequence[str],
        device: torch.device,
        log: Callable[[str], None],
        learned: str | None = None,
    ) -> Self:
        """Encode texts and ``log`` the cut ones; raises DataError, also for encoders other than ``learned``."""
        import torch

        encoders = TextEncoders.open(spec, device)
        encoders.check_learned(learned)
        for text, excess in zip(texts, encoders.excess([*texts]), strict=True):
            if excess:
                line = f'the prompt "{shortened(text, SHOWN)}" is longer than {encoders.tokens} tokens'
                log(f"{line}: its last {excess} are not read")
        return cls(tuple(texts), encoders.encode([*texts, ""]).rounded().on(torch.device("cpu")))

    @classmethod
    def of_captions(cls, images: cache.DatasetCache, positions: cache.Indices) -> Self:
        """Return the first captions, and their encoded text, of the images at ``positions``; raises DataError."""
        import torch

        empty = images.empty_text
        assert empty is not None, "the cache has text"
        tokens, pooled = torch.from_numpy(_read_field(images, positions, cache.TEXT)), empty.pooled
        if pooled is not None:
            pooled = torch.cat((torch.from_numpy(_read_field(images, positions, cache.POOLED)), pooled))
        return cls(first_captions(images, positions), Encoded(torch.cat((tokens, empty.tokens)), pooled))

    def content(self) -> bytes:
        """Return the content of the file that :meth:`read` reads."""
        file = io.BytesIO()
        arrays: dict[str, Any] = {name: part.numpy() for name, part in self.whole._asdict().items() if part is not None}
        np.savez(file, texts=np.array(self.texts), **arrays)
        return file.getvalue()

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Return the prompts in a file; None if there is none, or it is damaged."""
        import torch

        try:
            with np.load(path) as found:
                pooled = torch.from_numpy(found["pooled"]) if "pooled" in found else None
                read = cls(tuple(map(str, found["texts"])), Encoded(torch.from_numpy(found["tokens"]), pooled))
        except (OSError, ValueError, KeyError, zipfile.BadZipFile):
            return None
        return read if len(read.whole.tokens) == len(read.texts) + 1 else None
