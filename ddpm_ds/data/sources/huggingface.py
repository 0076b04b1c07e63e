"""Data sets of Hugging Face's ``datasets`` library: a folder that it saved, parquet and arrow files, WebDataset's tar
shards, or a hub name. The library downloads and converts; images are read from its memory-mapped Arrow tables.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ddpm_ds.data.sources import base
from ddpm_ds.data.spec import DataSpec
from ddpm_ds.ground.errors import DataError

COLUMNS = {
    "data.image_column": ("images", r"PIL\.Image\.Image|files|(large_)?(binary|string)", "Image"),
    "data.label_column": ("whole numbers or names", r"u?int\d+|(large_)?string", "ClassLabel"),
    "data.text.captions": ("texts", "(list of )?(large_)?string", ""),
}
"""By the key that names a column: words for its content, types that fit, and the usual feature."""
FILES = {".parquet": "parquet", ".arrow": "arrow", ".tar": "webdataset"}  # loaders of the library for single files


@dataclass
class HuggingFaceSource:
    """Images in a column of an Arrow table: each row has an encoded image, or the path of an image file."""

    classes: tuple[str, ...]
    labels: base.Labels = field(repr=False)
    rows: Any = field(repr=False)  # the column, a chunked array
    root: Path  # folder to which paths in the column are relative
    captions: base.Captions | None = field(default=None, repr=False)

    def name(self, i: int, /) -> str:
        value = self.rows[i]
        path = value["path"].as_py() if "path" in getattr(value, "keys", tuple)() else None
        return f"row {i}" + (f" ({base.printable(path)})" if path else "")

    def read(self, i: int, /) -> bytes:
        value = self.rows[i].as_py()
        if isinstance(value, dict):
            value = value.get("path") if value.get("bytes") is None else value["bytes"]
        if isinstance(value, str):
            return base.read_file(self.root / value)
        if value is None:
            raise ValueError("it has no image")
        base.check_size(len(value))
        return bytes(value)


def open_huggingface(spec: DataSpec, progress: bool) -> HuggingFaceSource:
    """Open the data set at ``data.path``, or named ``data.name`` on the hub.

    The library converts other formats than Arrow once, in ``downloads`` of ``store_root``.
    """
    try:
        import datasets
        from huggingface_hub import logging as hub_logging
    except ImportError as error:
        raise DataError(
            "data.source = huggingface needs the datasets library; pip install 'ddpm_ds[huggingface]'"
        ) from error
    (datasets.enable_progress_bars if progress else datasets.disable_progress_bars)()
    datasets.logging.set_verbosity_error()
    hub_logging.set_verbosity_error()
    key = f"data.path = {spec.path}" if spec.name is None else f"data.name = {spec.name}"
    rows = _loaded(datasets, spec.path, spec.name, spec.store_root / "downloads" / "huggingface", key)
    if isinstance(rows, dict):
        wanted = spec.split or ("train" if "train" in rows or len(rows) != 1 else next(iter(rows)))
        if wanted not in rows:
            splits = ", ".join(map(str, rows))
            raise DataError(
                f"data.split = {wanted} is no split of {key}; choose with --set data.split= one of {splits}"
            )
        rows = rows[wanted]
    elif spec.split not in (None, str(rows.split)):
        raise DataError(f"data.split = {spec.split}: {key} is one data set without splits; remove it")
    column = _column(rows, "data.image_column", spec.image_column, key)
    if column is None:
        columns = ", ".join(rows.column_names)
        raise DataError(
            f"{key} has no image column; its columns are {columns}: if one has images, set data.image_column"
        )
    classes, labels = _labels(rows, spec.label_column, key)
    captions = None
    if spec.text is not None:
        named = spec.text.captions
        _column(rows, "data.text.captions", named, key)
        try:
            (texts := rows.data.column(named)).validate(full=True)
            captions = base.Captions(base.captions_in(value.as_py()) for value in texts)
        except ValueError as error:  # Arrow's, of a text that is not UTF-8; a list with a null
            fault = f"has captions in column {named} that can't be read ({base.one_line(error)})"
            raise DataError(f"{key} {fault}") from error
    root = Path() if spec.path is None else spec.path.resolve() if spec.path.is_dir() else spec.path.resolve().parent
    images = rows.data.column(column)
    try:
        images.validate(full=True)  # else reading a row of a forged file could end the process
    except ValueError as error:
        raise DataError(f"{key} can't be read ({base.one_line(error)}); save it again") from error
    if not len(rows) or len(images) != len(rows):
        raise DataError(f"{key} holds {len(rows):,} rows of {len(images):,} in its files; save a whole data set")
    return HuggingFaceSource(classes, labels, images, root, captions)


def _loaded(datasets: Any, path: Path | None, name: str | None, folder: Path, key: str) -> Any:
    """Load a data set, or a dictionary of data sets by split, by way of ``folder``; raises DataError."""
    options = {"cache_dir": str(folder)}
    fix = "give what save_to_disk wrote, a .parquet, .arrow or .tar file or a folder of them with --set data.path=PATH"
    if path is not None and not path.exists():
        raise DataError(f"{key} does not exist; {fix}")
    if path is not None and path.is_file() and path.suffix not in FILES:
        raise DataError(f"{key} is no .parquet, .arrow or .tar file; {fix}")
    try:
        if path is None:
            assert name is not None  # the run spec checks it
            name, _, configuration = name.rpartition("/") if name.count("/") == 2 else (name, "", None)
            fix = "check the name and the network, or bring a folder of it and set data.path"
            return datasets.load_dataset(name, configuration, **options)
        if path.is_file():
            return datasets.load_dataset(FILES[path.suffix], data_files=str(path.resolve()), **options)
        if any((path / each).is_file() for each in ("state.json", "dataset_dict.json")):  # by save_to_disk
            return datasets.load_from_disk(str(path), keep_in_memory=False)
        return datasets.load_dataset(str(path.resolve()), **options)
    except Exception as error:  # from Arrow, any file format or the network
        while isinstance(error.__cause__, Exception):
            error = error.__cause__
        raise DataError(f"{key} can't be loaded ({base.one_line(error)[: base.MOST_REASON]}); {fix}") from error


def _column(rows: Any, option: str, given: str | None, key: str) -> str | None:
    """Return the ``given`` column, which must fit, or else the only usual one, None without; raises DataError."""
    what, pattern, usual = COLUMNS[option]
    kinds = {name: _kind(feature) for name, feature in rows.features.items()}
    if given is None:
        names = [name for name, feature in rows.features.items() if type(feature).__name__ == usual]
        if len(names) > 1:
            raise DataError(f"{key} has {what} in {', '.join(names)}; choose with --set {option}={names[0]}")
        return names[0] if names else None
    fitting = [name for name, kind in kinds.items() if re.fullmatch(pattern, kind)]
    if given not in fitting:
        wrong = f"holds {kinds[given]}, no {what}" if given in kinds else f"is no column, which are {', '.join(kinds)}"
        fix = f"choose with --set {option}= one of {', '.join(fitting)}" if fitting else "convert or rename one"
        raise DataError(f"{option} = {given} of {key} {wrong}; {fix}")
    return given


def _kind(feature: Any) -> str:
    if isinstance(feature, dict):
        return "files" if "bytes" in feature else "struct"
    inner = getattr(feature, "feature", None)
    return str(getattr(feature, "dtype", "")) if inner is None else f"list of {_kind(inner)}"


def _labels(rows: Any, given: str | None, key: str) -> tuple[tuple[str, ...], base.Labels]:
    """Return the names of the classes and the label of each row; raises DataError."""
    column = _column(rows, "data.label_column", given, key)
    if column is None and "label" not in rows.column_names:
        return base.labelled(np.full(len(rows), base.UNLABELLED))
    column = column or _column(rows, "data.label_column", "label", key)
    fix = "name another with --set data.label_column=COLUMN, or mend it"
    names, values = getattr(rows.features[column], "names", None), rows.data.column(column)
    try:
        values.validate(full=True)
        if "string" in str(values.type):
            names, labels = base.numbered(values.to_pylist())
        else:
            labels = values.cast("int64").fill_null(base.UNLABELLED).to_numpy()
    except ValueError as error:  # Arrow's: a number beyond 64 bits, or a text that is not UTF-8
        raise DataError(
            f"{key} has labels in column {column} that can't be read ({base.one_line(error)}); {fix}"
        ) from error
    missing, most = int((labels < 0).sum()), int(labels.max(initial=0))
    none_is_meant = missing == len(labels) and given is None
    if (missing and not none_is_meant) or most >= min(len(names) if names else base.MOST_CLASSES, base.MOST_CLASSES):
        what = f"{missing:,} of {len(labels):,} rows without a label" if missing else f"the label {most}"
        raise DataError(f"{key} has {what} in column {column}; {fix}")
    return base.labelled(labels, names)
