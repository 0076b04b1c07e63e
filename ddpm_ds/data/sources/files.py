"""Image files of a folder and its subfolders."""

import csv
import io
import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ddpm_ds.data.sources import base
from ddpm_ds.data.spec import ALPHA, BESIDE, DataSpec, SourceSpec
from ddpm_ds.ground.errors import DataError, print_once
from ddpm_ds.ground.files import MOST_RECORD_BYTES, open_regular, read_bytes
from ddpm_ds.ground.formats import parse_json

LABELS = "dataset.json"  # file of labels in a folder that EDM's or StyleGAN's tools have written
METADATA = ("metadata.jsonl", "metadata.csv")  # files of captions in any folder, with a line for each image below it
TEXTS = (".txt", ".caption", ".json")
"""Extensions of an image's file of captions, which replace its own extension or follow it; the first file counts."""
MASK = re.compile(r"-(mask|cond)label\.[^./]+$")
"""End of the names that OneTrainer gives to masks and conditions of images."""
REPEATED = re.compile(r"([1-9]\d{0,2})_(.+)")  # sd-scripts' folders of repeats and a caption

_Listed: TypeAlias = dict[str, list[str] | None]  # captions by image


@dataclass
class FolderSource:
    """Image files sorted by their path relative to ``root``; the first folder of a path is the class, unless a
    ``dataset.json``, as the tools of EDM and StyleGAN write it, lists labels.

    Images directly in ``root`` have no class. Names that begin with a dot are skipped.
    """

    classes: tuple[str, ...]
    labels: base.Labels = field(repr=False)
    root: Path
    files: Sequence[str] = field(repr=False)
    captions: base.Captions | None = field(default=None, repr=False)
    parts: npt.NDArray[np.int32] | None = field(default=None, repr=False)
    """Number of each image's source, and of repeats in its folder's name or 0, (N, 2); None if all images are alike."""
    beside: Mapping[str, Sequence[str]] = field(default_factory=dict, repr=False)
    """See :func:`ddpm_ds.data.sources.base.beside_of`."""

    def name(self, i: int, /) -> str:
        return base.printable(self.files[i])

    def read(self, i: int, /) -> bytes:
        return base.read_file(self.root / self.files[i])


def open_folder(spec: DataSpec, progress: bool) -> FolderSource:
    """List the image files under the folder ``data.path``, or under each of ``data.sources``."""
    if not spec.sources:
        return _open_one(spec, 0, progress)
    places = [os.path.join(os.path.realpath(source.path), "") for source in spec.sources]
    for (one, inner), (other, outer) in itertools.permutations(enumerate(places), 2):
        if inner.startswith(outer):
            raise DataError(
                f"data.sources.{one}.path = {spec.sources[one].path} and data.sources.{other}.path = "
                f"{spec.sources[other].path} overlap, so images would be in both; name folders beside each other"
            )
    opened = list[FolderSource]()
    for number in range(len(spec.sources)):
        try:
            opened.append(_open_one(spec, number, progress))
        except DataError as error:
            line = str(error).replace(" with --set data.path=FOLDER", "")
            raise DataError(line.replace("data.path", f"data.sources.{number}.path")) from error
    root = os.path.commonpath(places)
    files = [
        os.path.join(os.path.relpath(place, root), name)
        for place, each in zip(places, opened, strict=True)
        for name in each.files
    ]
    names = (
        each.classes[label] if label < len(each.classes) and each.classes != (".",) else None
        for each in opened
        for label in each.labels.tolist()
    )
    folders, labels = base.numbered(names)
    classes, labels = base.labelled(labels, folders)
    labels[labels < 0] = len(classes)
    captions = None
    if spec.text is not None:
        captions = base.Captions.joined([each.captions for each in opened if each.captions is not None])
    parts = np.concatenate([each.parts for each in opened if each.parts is not None])
    beside = {name: [file for each in opened for file in each.beside[name]] for name in opened[0].beside}
    return FolderSource(classes, labels, Path(root), files, captions, parts, beside)


def _open_one(spec: DataSpec, number: int, progress: bool) -> FolderSource:
    """List the image files under the folder of a source."""
    folder, texts = spec.folders[number], dict[str, str]()
    place = f"data.sources.{number}.path" if spec.sources else "data.path"
    root = base.read_path(spec.model_copy(update={"path": folder.path}), "a folder of images", folder=True)
    every = [*_image_files(str(root), texts)]
    files = [name for name in every if MASK.search(name) is None]
    if progress and folder.mask != BESIDE and (masks := len(every) - len(files)):
        first = base.printable(next(filter(MASK.search, every)))
        print_once(
            f"{place}: {masks:,} masks of OneTrainer, such as {first}, are neither images here nor read; data.mask = "
            f"{BESIDE} reads them"
        )
    if not files:
        raise DataError(
            f"data.path = {root} holds no image files (.png, .jpg, .webp, ...), nor do its subfolders; give a folder "
            "of images with --set data.path=FOLDER"
        )
    key = None if spec.text is None else folder.captions or spec.text.captions
    listed = {} if key is None else _listed_captions(root, texts, key)
    files += sorted(listed.keys() - files)  # reading a missing file fails, which is reported
    labels = _listed_labels(root, files)
    above = [name.partition("/")[0] if "/" in name else None for name in files]
    folders: Sequence[str] | None = None
    if labels is None:
        folders, labels = base.numbered(None if name is None else base.printable(name) for name in above)
    classes, labels = base.labelled(labels, folders)
    labels[labels < 0] = len(classes)
    captions, parts = None, np.zeros((len(files), 2), np.int32)
    parts[:, 0] = number
    if key is not None:
        named = {name: REPEATED.fullmatch(name or root.name) or REPEATED.fullmatch(root.name) for name in {*above}}
        usual = {name: None if found is None else found[2] for name, found in named.items()}
        usual |= {} if folder.caption is None else dict.fromkeys(usual, folder.caption)
        captions = _captions(root, files, texts, listed, key, progress, [usual[name] for name in above])
        if folder.repeats is None:
            repeats = {name: 0 if found is None else int(found[1]) for name, found in named.items()}
            parts[:, 1] = [repeats[name] for name in above]
        if progress and (found := next(filter(None, named.values()), None)) is not None:
            print_once(
                f"{place}: {base.printable(found[0])} is read as {found[1]} repeats, and as the caption "
                f"{base.printable(found[2])} of images without one, unless the spec has others"
            )
    known = parts if spec.sources or parts.any() else None
    return FolderSource(classes, labels, root, files, captions, known, _beside(spec, number, root, files, every))


def _beside(
    spec: DataSpec, number: int, root: Path, files: Sequence[str], every: Sequence[str]
) -> dict[str, list[str]]:
    """Return the files of the images' masks, some among ``every`` image file of the folder, and of their conditions."""
    folder, own = spec.folders[number], spec.sources[number] if spec.sources else SourceSpec(path=root)
    place, found = f"data.sources.{number}", dict[str, list[str]]()
    if spec.is_masked:
        labels = {
            name[: end.start()]: str(root / name) for name in every if (end := MASK.search(name)) and end[1] == "mask"
        }
        if folder.mask == BESIDE:
            found["mask"] = [labels.get(os.path.splitext(name)[0], base.WHOLE) for name in files]
        elif folder.mask in (None, ALPHA):
            found["mask"] = [folder.mask or base.WHOLE] * len(files)
        else:
            found["mask"] = _named_alike(f"{place}.mask" if own.mask else "data.mask", Path(str(folder.mask)), files)
    if folder.condition is not None and spec.condition is not None and spec.condition.kind is not None:
        key = f"{place}.condition" if own.condition else "data.condition.path"
        found["condition"] = _named_alike(key, folder.condition, files)
    return found


def _named_alike(key: str, folder: Path, files: Sequence[str]) -> list[str]:
    """Return the file in a folder that has the name of each image; raises DataError, which names the ``key``."""
    if not folder.is_dir():
        raise DataError(f"{key} = {folder} is no folder; name one with a picture for each image")
    found = {os.path.splitext(name)[0]: str(folder / name) for name in _image_files(str(folder), {})}
    if missing := [name for name in files if os.path.splitext(name)[0] not in found]:
        raise DataError(
            f"{key} = {folder} has no picture for {len(missing):,} of {len(files):,} images, first "
            f"{base.printable(missing[0])}; add one of the same name and size for each"
        )
    return [found[os.path.splitext(name)[0]] for name in files]


def _captions(
    root: Path,
    files: Sequence[str],
    texts: Mapping[str, str],
    listed: _Listed,
    key: str,
    progress: bool,
    usual: Sequence[str | None],
) -> base.Captions:
    """Return the captions of each image: ``listed`` ones, or from a file of its name among ``texts``, or ``usual``."""

    def of(name: str, usual: str | None) -> list[str] | None:
        stem = os.path.splitext(name)[0]
        beside = [texts[at] for end in TEXTS for at in (stem + end, name + end) if at in texts]
        found = listed.get(name)
        for place in beside:
            if found is not None:
                break
            try:
                text = read_bytes(root / place).decode("utf-8-sig")
                found = _texts_of(parse_json(text), key) if place.lower().endswith(".json") else [text.strip()]
            except (OSError, ValueError) as error:
                raise ValueError(f"{base.printable(place)} can't be read ({base.one_line(error)})") from error
        if found is None:
            return None if usual is None else [usual]
        if name not in listed and progress and len(beside) > 1 and not beside[1].lower().endswith(".json"):
            print_once(f"data.text: images have several files of captions; of {', '.join(beside)} the first is read")
        return found

    try:
        return base.Captions(map(of, files, usual))
    except ValueError as error:
        raise DataError(f"data.path = {root}: {error}; write it again") from error


def _texts_of(block: object, key: str) -> list[str] | None:
    """Return the captions under ``key`` in an image's JSON."""
    return base.captions_in(block.get(key)) if isinstance(block, dict) else None


def _listed_captions(root: Path, texts: Mapping[str, str], key: str) -> _Listed:
    """Return the result of :func:`_texts_of` for each image in the :data:`METADATA` files among ``texts``."""
    found: _Listed = {}
    for place in texts.values():
        if os.path.basename(place) not in METADATA:
            continue
        folder, line, rows = os.path.dirname(place), 0, place.endswith(".csv")
        lines: Any = ()
        try:
            with open_regular(root / place) as file:
                text = io.TextIOWrapper(file, "utf-8-sig", newline="")
                limited = iter(partial(text.readline, MOST_RECORD_BYTES), "")
                lines = csv.DictReader(limited, strict=True) if rows else limited
                for content in lines:
                    line += 1
                    if not rows and not content.strip():
                        continue
                    block = {name: text or None for name, text in content.items()} if rows else parse_json(content)
                    if not isinstance(block, dict) or not isinstance(block.get("file_name"), str):
                        keys = f", but {', '.join(map(str, block))}" if isinstance(block, dict) and block else ""
                        raise ValueError(f"it has no file_name{keys}")
                    name = os.path.join(folder, _name_of(block["file_name"]))
                    if name in found:
                        raise ValueError(f"{base.printable(name)} is named twice, and several captions are a list")
                    found[name] = _texts_of(block, key)
        except (OSError, ValueError, csv.Error) as error:
            line = lines.reader.line_num if rows and lines else line
            raise DataError(
                f"data.path: {root / place}, line {line}: {base.one_line(error)}; write it again"
            ) from error
    return found


def _listed_labels(root: Path, names: list[str]) -> base.Labels | None:
    """Return the labels (N,) in a ``dataset.json``, None without one, and add the images that it lists to ``names``."""
    if not os.path.exists(root / LABELS):
        return None
    try:
        listed = parse_json(base.read_file(root / LABELS))["labels"]
        if listed is None:
            return None
        known, numbers = set(names), dict[str, int]()
        for given, number in listed:
            name = given if given in known else _name_of(given)
            if name in numbers:
                raise ValueError(f"{base.printable(name)} has two labels")
            if type(number) is not int or not 0 <= number < base.MOST_CLASSES:
                raise ValueError("a label is no whole number from 0")
            numbers[name] = number
        if (missing := next((name for name in names if name not in numbers), None)) is not None:
            raise ValueError(f"{base.printable(missing)} has no label")
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{LABELS} of data.path = {root}: {base.one_line(error)}; write it again") from error
    names += sorted(numbers.keys() - known)
    return np.array([numbers[name] for name in names], np.int64)


def _name_of(given: str) -> str:
    """Return a relative path with slashes; raises ValueError if it leaves its folder."""
    name = given.replace("\\", "/").removeprefix("./")
    if name.startswith("/") or ".." in name.split("/"):
        raise ValueError(f"it points outside its folder ({base.printable(name)})")
    return name


def _image_files(root: str, texts: dict[str, str]) -> Iterator[str]:
    """Yield the relative paths of image files, sorted, and add files that may have captions to ``texts``."""
    visited: dict[str, str] = {}
    waiting = [""]  # the last one comes next; a folder ends with a slash
    while waiting:
        path = waiting.pop()
        if path and not path.endswith("/"):
            yield path
            continue
        folder = os.path.join(root, path)
        first = visited.setdefault(os.path.realpath(folder), path)
        if first != path and path.startswith(first):  # a link to a folder above
            continue
        if first != path:
            raise DataError(
                f"data.path = {root}: {base.printable(path)} and {base.printable(first)} are the same folder; "
                "remove one of them"
            )
        try:
            with os.scandir(folder) as entries:
                found = [
                    (entry.name, os.path.isdir(entry) if entry.is_symlink() else entry.is_dir())  # a link may be broken
                    for entry in entries
                    if not entry.name.startswith(".")
                ]
        except OSError as error:
            raise DataError(
                f"data.path: {error.filename} can't be listed ({error.strerror}); allow it or move it elsewhere"
            ) from error
        found.sort(reverse=True)
        waiting += [path + name + "/" * is_folder for name, is_folder in found if is_folder or base.is_image(name)]
        for name, is_folder in found:
            stem, extension = os.path.splitext(name)
            if not is_folder and (extension.lower() in TEXTS or name in METADATA):
                texts[path + stem + extension.lower()] = path + name
