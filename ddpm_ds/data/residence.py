"""Where the images of a data-set cache are when they are read: in memory, or on a disk that is waited for."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

from ddpm_ds.command_line import gib
from ddpm_ds.data.cache import DatasetCache, Kind
from ddpm_ds.device import host_memory

HELD = 0.8
"""Share of a host's memory that can hold the files of a cache, beside what training takes."""
WINDOW = 0.125
"""Share of a host's memory that the images of a window take; a run holds two windows."""


@dataclass(frozen=True)
class Residence:
    """A data-set cache and the host that reads it."""

    kind: Kind
    images: int
    stored_bytes: int
    """Size of the files of images."""
    decoded_bytes: int
    """Size of all images as they are read; that of the files unless they are encoded."""
    memory_bytes: int
    """Memory of the host, or of the part of it that the process may use."""
    cores: int
    """Processor cores that the process may use."""

    @classmethod
    def of(cls, store: DatasetCache) -> Residence:
        """Return where a store is, on this host."""
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
        """Largest power of two of images of which memory holds windows, for ``data.shuffle_images``."""
        most = WINDOW * self.memory_bytes * self.images / max(1, self.stored_bytes)
        return 2 ** max(0, int(math.log2(max(1.0, most))))

    def scattered(self, shuffle_images: int | None) -> bool:
        """Whether a run that shuffles so many images together, None for all, waits for a disk with each of them."""
        return not self.in_memory and shuffle_images is None

    def notice(self, shuffle_images: int | None) -> str | None:
        """Return a line for such a run, None for others."""
        if not self.scattered(shuffle_images):
            return None
        return (
            f"data.shuffle_images: the {gib(self.stored_bytes)} of images are more than memory holds, and a full "
            f"shuffle reads each from another place on the disk; use {self.window}"
        )

    def remedy(self, shuffle_images: int | None) -> str:
        """Return what makes images come faster where more loader processes don't."""
        if self.scattered(shuffle_images):
            return f"data.shuffle_images={self.window}"
        if self.kind == "encoded":
            return "data.store=pixels" if self.decoded_in_memory else "more cores"
        return "more cores" if self.in_memory else "data.store_root on a faster disk"
