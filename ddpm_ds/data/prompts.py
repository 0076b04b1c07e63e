"""Prompts that are encoded once: those of the pictures of a run, which are kept in its folder, and those of samples."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from ddpm_ds.config.text import TextSpec
from ddpm_ds.data.cache import CAPTIONS, POOLED, TEXT, TEXT_SCALE, DatasetCache, Indices
from ddpm_ds.data.captions import texts_of
from ddpm_ds.data.text import Encoded, TextEncoders, widened

if TYPE_CHECKING:
    import torch
    from torch import Tensor

PROMPTS = "prompts.npz"
"""File of the prompts in the folder of a run."""
SHOWN = 60
"""Most characters of a prompt in a message."""


def _read(store: DatasetCache, positions: Indices, name: str) -> Any:
    """Return a field of the images at ``positions`` of a cache and its other buckets of aspect."""
    of_buckets = zip(store.caches, store.by_bucket(positions), strict=True)
    return np.concatenate([cache.fields[name].read(at) for cache, at in of_buckets])


def first_captions(store: DatasetCache, positions: Indices) -> tuple[str, ...]:
    """Return the first captions of the images at ``positions`` of a cache; raises DataError."""
    texts = texts_of(store)
    return tuple(texts[row] for row in _read(store, positions, CAPTIONS)[:, 0])


@dataclass(frozen=True)
class EncodedPrompts:
    """Prompts, and the empty text, as encoders encode them: float16 on the CPU, as the captions of training."""

    texts: tuple[str, ...]
    encoded: Encoded
    empty: Encoded
    """N = 1."""

    @classmethod
    def of(cls, spec: TextSpec, texts: Sequence[str], device: torch.device, log: Callable[[str], None]) -> Self:
        """Encode texts; ``log`` is told which are longer than the encoders read.

        Raises:
            DataError: the encoders can't be used.
        """
        import torch

        encoders = TextEncoders.open(spec, device)
        for text, excess in zip(texts, encoders.excess([*texts]), strict=True):
            if excess:
                begin = text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."
                log(f'the prompt "{begin}" is longer than {encoders.tokens} tokens: its last {excess} are not read')
        return cls.split(texts, encoders.encode([*texts, ""]).rounded().on(torch.device("cpu")))

    @classmethod
    def of_captions(cls, store: DatasetCache, positions: Indices) -> Self:
        """Return the first captions of the images at ``positions`` of a cache, as they are encoded there.

        Raises:
            DataError: they can't be read.
        """
        import torch

        names = [name for name in (TEXT, TEXT_SCALE, POOLED) if name in store.fields]
        found = {name: torch.from_numpy(_read(store, positions, name)) for name in names}
        scale, empty = found.get(TEXT_SCALE), store.empty_text
        assert empty is not None, "the cache has text"
        captions = Encoded(widened(found[TEXT], scale).half(), found.get(POOLED))
        return cls(first_captions(store, positions), captions, empty._replace(tokens=empty.tokens.half()))

    @classmethod
    def split(cls, texts: Sequence[str], whole: Encoded) -> Self:
        """Return prompts from what was encoded of them and, last, of the empty text."""
        tokens, pooled = whole
        last = Encoded(tokens[-1:], None if pooled is None else pooled[-1:])
        return cls(tuple(texts), Encoded(tokens[:-1], None if pooled is None else pooled[:-1]), last)

    @property
    def whole(self) -> tuple[Tensor, ...]:
        """Tokens and, if there is one, pooled text of the prompts and, last, of the empty text."""
        import torch

        pairs = zip(self.encoded, self.empty, strict=True)
        return tuple(torch.cat((one, last)) for one, last in pairs if one is not None and last is not None)

    def content(self) -> bytes:
        """Return the content of a file that :meth:`read` reads."""
        file = io.BytesIO()
        arrays: dict[str, Any] = {name: part.numpy() for name, part in zip(Encoded._fields, self.whole, strict=False)}
        np.savez(file, texts=np.array(self.texts), **arrays)
        return file.getvalue()

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Return the prompts in a file; None if there is none, or it is damaged."""
        import torch

        try:
            with np.load(path) as found:
                pooled = torch.from_numpy(found["pooled"]) if "pooled" in found else None
                texts = tuple(map(str, found["texts"]))
                read = cls.split(texts, Encoded(torch.from_numpy(found["tokens"]), pooled))
        except (OSError, ValueError, KeyError, zipfile.BadZipFile):
            return None
        return read if len(read.encoded.tokens) == len(texts) else None
