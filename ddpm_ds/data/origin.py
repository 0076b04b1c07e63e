"""Source of a run's images, opened once, and the checks by which a cache notices that the source has changed."""

import json
import os
import stat
import sys
from functools import cached_property
from hashlib import sha256
from pathlib import Path

import numpy as np

from ddpm_ds.data.buckets import Bucket, Members, Shapes, read_shapes, shapes_of, write_shapes
from ddpm_ds.data.cache import Look, Origin
from ddpm_ds.data.captions import written
from ddpm_ds.data.fields import SAMPLED, FieldSource, open_fields
from ddpm_ds.data.sources import open_source
from ddpm_ds.data.sources.base import WHOLE, Source, beside_of, captions_of, files_below, parts_of, printable, read_file
from ddpm_ds.data.spec import ALPHA, BESIDE, DataSpec
from ddpm_ds.data.writing import lock_of
from ddpm_ds.ground.errors import DataError

SAMPLED_IMAGES, SMALL_BYTES = 64, 2**25
"""A source is recognised by so many images; one with fewer bytes by all."""
LOOKED_AT = 10_000
"""About how many folders, and files, have their sizes and times compared before training: a look at 100,000 files takes
0.3 s on a local disk, but may take minutes over a network."""


class LazySource:
    """Source of the images of ``data``, opened at its first use, which may raise DataError and OSError."""

    def __init__(self, data: DataSpec, progress: bool) -> None:
        self.data, self._progress = data, progress
        masks = () if data.reads_arrays else (each.mask for each in data.folders if each.mask not in (ALPHA, BESIDE))
        others = (*(each.condition for each in data.folders), *masks)
        self.paths = [*(each.path for each in data.folders), *map(Path, dict.fromkeys(filter(None, others)))]

    @cached_property
    def looks(self) -> list[dict[str, Look]]:
        """Sizes and times under each path, taken before it is read; several folders count as one, by absolute names."""
        found = [looks_of(path, self.data.reads_arrays) for path in self.paths]
        if self.data.reads_arrays or len(found) == 1:
            return found
        pairs = zip(map(os.path.realpath, self.paths), found, strict=True)
        return [{os.path.join(path, name): look for path, looks in pairs for name, look in looks.items()}]

    @cached_property
    def fields(self) -> FieldSource:
        """Opened fields, for a source of named arrays."""
        _ = self.looks
        return open_fields(self.data)

    def pictures(self, bucket: Bucket | None) -> Source:
        """Return all pictures, or the ones in a bucket of aspect."""
        return self._pictures if bucket is None else Members(self._pictures, bucket.members_of(self.shapes))

    @cached_property
    def _pictures(self) -> Source:
        _ = self.looks
        return open_source(self.data, self._progress)

    @cached_property
    def shapes(self) -> Shapes:
        """Shapes of all pictures, read from a file that is made again when the pictures change."""
        self.data.store_root.mkdir(parents=True, exist_ok=True)
        content = sampled(self._pictures)[0]
        with lock_of(self._shapes_file):
            if (found := read_shapes(self._shapes_file)) is not None and found[0] == content:
                return found[1]
            shapes = shapes_of(self._pictures, self._progress)
            write_shapes(self._shapes_file, content, shapes)
        return shapes

    @property
    def known_shapes(self) -> Shapes | None:
        """Shapes in the file of an earlier run, or None."""
        return None if (found := read_shapes(self._shapes_file)) is None else found[1]

    @property
    def _shapes_file(self) -> Path:
        return self.data.store_root / f"{self.data.source}-shapes{self.key()}.npz"

    def key(self, buckets: tuple[object, ...] | None = None) -> str:
        """Return the end of a cache's name: a hash of the source's keys and path, empty if its pixels never change.

        ``buckets`` is the key of a bucket of aspect.
        """
        data = self.data
        keys = {key: getattr(data, key) for key in ("name", "split", "image_column", "label_column")}
        if data.text is not None:
            keys |= {"captions": data.text.captions, "missing": "empty" if data.text.missing == "empty" else None}
        keys |= data.named_arrays
        if (condition_path := keys.pop("data.condition.path", None)) is not None:
            keys["data.condition.path"] = os.path.realpath(condition_path)
        if "data.mask" in keys and not data.reads_arrays:
            keys["data.mask"] = _real(str(data.mask))
        named = {key: value for key, value in {**keys, "data.buckets": buckets}.items() if value is not None}
        path = b"" if data.path is None else os.fsencode(os.path.realpath(data.path))  # resolve() fails on link loops
        places = [
            [os.path.realpath(each.path), each.captions, each.caption]
            + [_real(str(given)) for given in (each.mask, each.condition) if given]
            for each in data.sources
        ]
        named |= {"data.sources": places} if places else {}
        if not (path or named):  # the source has pixels, and no files to decode
            return ""
        return f"-{sha256(path + (json.dumps(named).encode() if named else b'')).hexdigest()[:8]}"

    def origin(self, content: str) -> Origin | None:
        """Return the source's state, which a cache keeps with the hash ``content``; None without a path."""
        known = dict(zip(("looks", "condition_looks"), self.looks, strict=False))
        return Origin(content=content, **known) if self.paths else None

    def check_unchanged(self, origin: Origin | None, bucket: Bucket | None, cache: Path) -> None:
        """Refuse a cache if the source has changed since its ``origin``; a source that is gone is no change."""
        data, note = self.data, ""
        if not self.paths or origin is None:
            return
        looks = [
            (before, _look(path / name, data.reads_arrays))
            for path, known in zip(self.paths, (origin.looks, origin.condition_looks), strict=False)
            for name, before in known.items()
        ]
        if all(before == now for before, now in looks):
            return
        if all(now is None or before[0] == now[0] for before, now in looks):
            content = origin.content
            if content.startswith(SAMPLED):
                note = (
                    f"{data.origin} was written after {cache} was made of it; some of its images were "
                    f"compared: if others have changed delete {cache}"
                )
            try:
                whole = data.reads_arrays
                content = self.fields.content(*self.paths) if whole else sampled(self.pictures(bucket))[0]
            except (DataError, OSError) as error:
                note = f"{error}; the images in {cache} are used" if os.path.lexists(self.paths[0]) else ""
            if content == origin.content:
                if note and self._progress:
                    print(note, file=sys.stderr)
                return
        what = "images" if data.text is None else "images or captions"
        raise DataError(
            f"{data.origin} has other {what} than {cache} was prepared from; bring the old ones back, or "
            f"delete {cache} to prepare the new ones"
        )


def sampled(source: Source) -> tuple[str, bool]:
    """Return a hash of names, labels and some images (of a small source all), and whether images are encoded files."""
    digest = sha256(np.asarray(source.labels, np.int64).tobytes())
    for i in range(len(source.labels)):
        digest.update(os.fsencode(source.name(i)) + b"\0")
    if (known := captions_of(source)) is not None:
        digest.update(written(known.texts) + known.table.tobytes())
    if (parts := parts_of(source)) is not None:
        digest.update(parts.tobytes())
    beside = [*beside_of(source).values()]
    count, sizes, encoded = len(source.labels), list[int](), True
    some = np.linspace(0, count - 1, min(count, SAMPLED_IMAGES)).astype(int)
    for part in (some, np.setdiff1d(np.arange(count), some)):
        if part is not some and not 0 < sum(sizes) / max(1, len(sizes)) <= SMALL_BYTES / count:
            break
        for i in part.tolist():
            try:
                content = source.read(i)
                others = [
                    file.encode() if file in (WHOLE, ALPHA) else read_file(Path(file))
                    for file in (files[i] for files in beside)
                ]
            except Exception:  # decoding will report the reason
                continue
            encoded = isinstance(content, bytes)
            content = content if isinstance(content, bytes) else content.tobytes()
            digest.update(b"".join((content, *others)))
            sizes.append(len(content))
    return digest.hexdigest(), encoded


def _real(given: str) -> str:
    """Return the path of a folder of masks or conditions without links."""
    return given if given in (ALPHA, BESIDE) else os.path.realpath(given)


def looks_of(path: Path, whole: bool) -> dict[str, Look]:
    """Return the looks of a path and of folders and files in it, by name; of a ``whole`` folder one for all files."""
    folders, files = [str(path)], list[str]()
    for above, folders_here, files_here in () if whole else os.walk(path):
        folders += (os.path.join(above, name) for name in folders_here)
        files += (os.path.join(above, name) for name in files_here)
    some = [each for every in (folders, files) for each in every[:: max(1, len(every) // LOOKED_AT)]]
    names = (os.path.relpath(each, path) for each in some)
    found = ((name, _look(path / name, whole)) for name in names if printable(name) == name)  # others are no JSON
    return {name: look for name, look in found if look is not None}


def _look(path: Path, whole: bool) -> Look | None:
    """Return the size and time of a path, or of all files in a ``whole`` folder; None if it can't be read."""
    try:
        status = os.stat(path)
        if whole and stat.S_ISDIR(status.st_mode):
            files = files_below(path)
            made = sha256(repr([(name, each.st_size, each.st_mtime_ns) for name, each in files.items()]).encode())
            return sum(each.st_size for each in files.values()), int.from_bytes(made.digest()[:7])
    except OSError:
        return None
    return 0 if stat.S_ISDIR(status.st_mode) else status.st_size, status.st_mtime_ns
