"""Data sets of Hugging Face's ``datasets`` library: a folder that it saved, parquet and arrow files, WebDataset's tar
shards, or a hub name.

The library only downloads and converts. Images are then read directly from memory-mapped Arrow files, since importing
the library takes seconds, and memory in each process.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ddpm_ds.data.sources import base
from ddpm_ds.data.spec import DataSpec
from ddpm_ds.ground.errors import DataError

SAVED = ("state.json", "dataset_dict.json")
"""Files by which a folder written by ``save_to_disk`` is recognised."""
LABELS = ("u?int", "string")
"""Types of columns of labels; class labels are int64."""
FILES = {".parquet": "parquet", ".arrow": "arrow", ".tar": "webdataset"}
"""Loaders of the library for single files."""


@dataclass
class HuggingFaceSource:
    """Images of a column of Arrow files, by row: encoded ones, or paths of image files."""

    classes: tuple[str, ...]
    labels: base.Labels = field(repr=False)
    files: tuple[str, ...]
    column: str
    root: Path
    """Folder to which paths in the column are relative."""
    captions: base.Captions | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        import pyarrow as pa

        tables = [pa.ipc.open_stream(pa.memory_map(file)).read_all().select([self.column]) for file in self.files]
        self._rows = pa.concat_tables(tables).column(self.column)

    def __len__(self) -> int:
        return len(self._rows)

    def name(self, i: int, /) -> str:
        """Return the row and, if it has one, the name of its file."""
        value = self._rows[i]
        path = value["path"].as_py() if "path" in getattr(value, "keys", tuple)() else None
        return f"row {i}" + (f" ({base.printable(path)})" if path else "")

    def read(self, i: int, /) -> bytes:
        """Read the image of a row, or the file that the row names."""
        value = self._rows[i].as_py()
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

    Other formats are converted to the library's Arrow files, once, in ``downloads`` of ``store_root``.
    """
    try:
        import datasets
        import pyarrow
        from huggingface_hub import logging as hub_logging
    except ImportError as error:
        raise DataError(
            "data.source = huggingface needs the datasets library; pip install 'ddpm_ds[huggingface]'"
        ) from error
    (datasets.enable_progress_bars if progress else datasets.disable_progress_bars)()
    datasets.logging.set_verbosity_error()
    hub_logging.set_verbosity_error()
    key = f"data.path = {spec.path}" if spec.name is None else f"data.name = {spec.name}"
    rows = _loaded(datasets, spec, key)
    if isinstance(rows, dict):
        splits = ", ".join(map(str, rows))
        wanted = spec.split or ("train" if "train" in rows or len(rows) != 1 else next(iter(rows)))
        if wanted not in rows:
            fix = f"choose with --set data.split= one of {splits}"
            raise DataError(f"data.split = {wanted} is no split of {key}; {fix}")
        rows = rows[wanted]
    elif spec.split not in (None, str(rows.split)):
        raise DataError(f"data.split = {spec.split}: {key} is one data set without splits; remove it")
    columns = ", ".join(rows.column_names)
    if (column := spec.image_column) is not None:
        feature = _feature(rows, "data.image_column", column, key)
        holds_files = isinstance(feature, dict) and "bytes" in feature
        if not (isinstance(feature, datasets.Image) or holds_files or _is(feature, "binary", "string")):
            raise DataError(f"data.image_column = {column} of {key} holds no images; its columns are {columns}")
    elif (column := _only(rows, datasets.Image, "images", "data.image_column", key)) is None:
        raise DataError(f"{key} has no column of images; its columns are {columns}: if one is, set data.image_column")
    classes, labels = _labels(datasets, rows, spec, key)
    root = Path() if spec.path is None else spec.path.resolve() if spec.path.is_dir() else spec.path.resolve().parent
    pyarrow.default_memory_pool().release_unused()  # used for conversion
    try:
        files = tuple(file["filename"] for file in rows.cache_files)
        source = HuggingFaceSource(classes, labels, files, column, root, _captions(rows, spec, key))
        source._rows.validate(full=True)  # else reading a row of a forged file could end the process
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise DataError(f"{key} can't be read ({base.one_line(error)}); save it again") from error
    if not len(rows) or len(source) != len(rows):
        raise DataError(f"{key} holds {len(rows):,} rows of {len(source):,} in its files; save a whole data set")
    return source


def _loaded(datasets: Any, spec: DataSpec, key: str) -> Any:
    """Load a data set, or a dictionary of data sets by split, with the library; raises DataError."""
    path, name, options = spec.path, spec.name, {"cache_dir": str(spec.store_root / "downloads" / "huggingface")}
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
        if any((path / each).is_file() for each in SAVED):
            return datasets.load_from_disk(str(path), keep_in_memory=False)
        return datasets.load_dataset(str(path.resolve()), **options)
    except Exception as error:  # from Arrow, any file format or the network
        while isinstance(error.__cause__, Exception):
            error = error.__cause__
        raise DataError(f"{key} can't be loaded ({base.one_line(error)[: base.MOST_REASON]}); {fix}") from error


def _only(rows: Any, kind: type, what: str, option: str, key: str) -> str | None:
    """Return the name of the only column of a ``kind``, None without one; raises DataError for several."""
    names = [name for name, feature in rows.features.items() if isinstance(feature, kind)]
    if len(names) > 1:
        raise DataError(f"{key} has {what} in {', '.join(names)}; choose with --set {option}={names[0]}")
    return names[0] if names else None


def _labels(datasets: Any, rows: Any, spec: DataSpec, key: str) -> tuple[tuple[str, ...], base.Labels]:
    """Return the names of the classes and the label of each row; raises DataError."""
    column = spec.label_column or _only(rows, datasets.ClassLabel, "labels", "data.label_column", key) or "label"
    if spec.label_column is None and column not in rows.column_names:
        return base.labelled(np.full(len(rows), base.UNLABELLED))
    feature = _feature(rows, "data.label_column", column, key)
    if not _is(feature, *LABELS):
        others = ", ".join(name for name, other in rows.features.items() if _is(other, *LABELS))
        raise DataError(
            f"data.label_column = {column} of {key} holds {getattr(feature, 'dtype', 'lists')}, no whole numbers or "
            f"names; {f'choose with --set data.label_column= one of {others}' if others else 'convert or rename it'}"
        )
    fix = "name another with --set data.label_column=COLUMN, or mend it"
    names, values = getattr(feature, "names", None), rows.data.column(column)
    try:
        values.validate(full=True)
        if _is(feature, "string"):
            texts = values.to_pylist()
            labels = np.full(len(texts), base.UNLABELLED)
            names, labels[[text is not None for text in texts]] = base.numbered(
                text for text in texts if text is not None
            )
        else:
            labels = values.cast("int64").fill_null(base.UNLABELLED).to_numpy()
    except ValueError as error:  # Arrow's: a number beyond 64 bits, or a text that is not UTF-8
        raise DataError(
            f"{key} has labels in column {column} that can't be read ({base.one_line(error)}); {fix}"
        ) from error
    missing, most = int((labels < 0).sum()), int(labels.max(initial=0))
    none_is_meant = missing == len(labels) and spec.label_column is None
    if (missing and not none_is_meant) or most >= min(len(names) if names else base.MOST_CLASSES, base.MOST_CLASSES):
        what = f"{missing:,} of {len(labels):,} rows without a label" if missing else f"the label {most}"
        raise DataError(f"{key} has {what} in column {column}; {fix}")
    return base.labelled(labels, names)


def _captions(rows: Any, spec: DataSpec, key: str) -> base.Captions | None:
    """Return the captions in the column that the spec names, of texts or lists of texts; raises DataError."""
    if spec.text is None:
        return None
    column = spec.text.captions
    feature = _feature(rows, "data.text.captions", column, key)
    if not _is(getattr(feature, "feature", feature), "string"):
        kinds = {name: getattr(other, "feature", other) for name, other in rows.features.items()}
        texts = ", ".join(name for name, kind in kinds.items() if _is(kind, "string"))
        fix = f"choose one of {texts}" if texts else "bring a column of captions"
        raise DataError(f"data.text.captions = {column} of {key} holds no texts; {fix}")
    values = rows.data.column(column)
    try:
        values.validate(full=True)
        return base.Captions(base.captions_in(value.as_py()) for value in values)
    except ValueError as error:  # Arrow's, of a text that is not UTF-8; a list with a null
        raise DataError(f"{key} has captions in column {column} that can't be read ({base.one_line(error)})") from error


def _feature(rows: Any, option: str, column: str, key: str) -> Any:
    """Return the feature type of a column that the key ``option`` names; raises DataError if there is none."""
    if column not in rows.column_names:
        columns = ", ".join(rows.column_names)
        raise DataError(f"{option} = {column} is no column of {key}; its columns are {columns}")
    return rows.features[column]


def _is(feature: Any, *kinds: str) -> bool:
    """Return whether a column holds one of these ``kinds``, such as "int" and "uint" of any size."""
    return re.fullmatch(rf"(large_)?({'|'.join(kinds)})\d*", str(getattr(feature, "dtype", ""))) is not None
