"""Estimate of whether a data-set cache is read from memory or from a disk that training waits for."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

from ddpm_ds.command_line import gib
from ddpm_ds.data.cache import DatasetCache, Kind
from ddpm_ds.device import host_memory

HELD = 0.8
"""Share of a host's memory that can hold the files of a cache during training."""
WINDOW = 0.125
"""Share of a host's memory for the images of one window; a run holds two windows."""


@dataclass(frozen=True)
class Residence:
    """Size of a data-set cache, and memory and cores of the host that reads it."""

    kind: Kind
    images: int
    stored_bytes: int
    """Size of the files of images."""
    decoded_bytes: int
    """Size of all decoded images; equal to the files' size unless they are encoded."""
    memory_bytes: int
    """Memory of the host that the process may use."""
    cores: int
    """Processor cores that the process may use."""

    @classmethod
    def of(cls, store: DatasetCache) -> Residence:
        """Return the residence of a cache on this host."""
        meta = store.meta
        return cls(
            meta.kind,
            meta.count,
            stored_bytes=sum((store.path / name).stat().st_size for name in meta.files),
            decoded_bytes=meta.count * math.prod(meta.shape) * meta.dtype.itemsize,
            memory_bytes=host_memory(),
            cores=len(os.sched_getaffinity(0)),
        )

    @property
    def in_memory(self) -> bool:
        """Whether memory holds the files, so that only the first epoch waits for the disk."""
        return self.stored_bytes <= HELD * self.memory_bytes

    @property
    def decoded_in_memory(self) -> bool:
        """Whether memory would hold the files if images were kept as pixels."""
        return self.decoded_bytes <= HELD * self.memory_bytes

    @property
    def window(self) -> int:
        """Largest window, a power of two of images, that memory can hold, for ``data.shuffle_images``."""
        most = WINDOW * self.memory_bytes * self.images / max(1, self.stored_bytes)
        return 2 ** max(0, int(math.log2(max(1.0, most))))

    def scattered(self, shuffle_images: int | None) -> bool:
        """Return whether shuffling so many images together (None: all) makes a run wait for the disk at each."""
        return not self.in_memory and shuffle_images is None

    def notice(self, shuffle_images: int | None) -> str | None:
        """Return a warning for a run that :meth:`scattered` slows down, else None."""
        if not self.scattered(shuffle_images):
            return None
        return (
            f"data.shuffle_images: the {gib(self.stored_bytes)} of images are more than memory holds, and a full "
            f"shuffle reads each from another place on the disk; use {self.window}"
        )

    def remedy(self, shuffle_images: int | None) -> str:
        """Return the advice for faster loading if more loader processes don't help."""
        if self.scattered(shuffle_images):
            return f"data.shuffle_images={self.window}"
        if self.kind == "encoded":
            return "data.store=pixels" if self.decoded_in_memory else "more cores"
        return "more cores" if self.in_memory else "data.store_root on a faster disk"
