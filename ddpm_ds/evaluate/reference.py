"""The real images that drawn ones are compared with: those of the prepared store that was learned."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ddpm_ds.checkpoint.manifest import read_manifest
from ddpm_ds.data.prepare import prepare, store_path
from ddpm_ds.data.split import shuffled
from ddpm_ds.data.store import Store
from ddpm_ds.errors import DataError

if TYPE_CHECKING:
    from ddpm_ds.evaluate.trained import Trained


def open_reference(trained: Trained, given: Path | None, progress: bool) -> Store:
    """The store at ``given``, else that of the checkpoint's spec, prepared where it is missing; checksums verified.

    Of a run that has learned crops, the centres of the images.

    Raises:
        DataError: there is none, it is damaged, or it does not hold the images that were learned.
    """
    store = Store.open(given, progress=progress) if given is not None else _own_store(trained, progress)
    if trained.spec is not None:
        if store.meta.sha256 != read_manifest(Path(trained.origin)).data_sha256:
            raise DataError(
                f"{store.path} holds other images than those that {trained.origin} learned; name theirs with "
                "--store DIR"
            )
        store = store.centre(trained.spec.data.image_size)
    if store.meta.shape != trained.image_shape:
        stored, drawn = ("x".join(map(str, shape)) for shape in (store.meta.shape, trained.image_shape))
        raise DataError(f"--store {store.path} has images of {stored}, {trained.origin} draws {drawn}; name another")
    classes = trained.unet_spec.classes
    if classes is not None and classes != len(store.meta.classes):
        raise DataError(
            f"--store {store.path} has {len(store.meta.classes)} classes, {trained.origin} has {classes}; name another"
        )
    return store


def _own_store(trained: Trained, progress: bool) -> Store:
    if trained.spec is None:
        raise DataError(
            f"{trained.origin} is an export, which does not say what it learned; name the prepared store of its images "
            "with --store DIR"
        )
    data = trained.spec.data
    path = store_path(data)
    if not path.exists() and data.path is not None and not data.path.is_dir():
        raise DataError(f"there is neither a prepared store at {path} nor a folder {data.path}; give --store DIR")
    return prepare(data, progress)


def labels_like(store: Store, count: int) -> list[int]:
    """``count`` labels in the proportions of the store, or all of its labels, to be gone through again."""
    return [int(label) for label in store.labels[shuffled(len(store))[:count]]]
