import errno
import importlib
import json
import os
import re
import shutil
import socket
import struct
import warnings
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image
from tqdm import tqdm

from ddpm_ds.data.prepare import prepare
from ddpm_ds.data.sources import OPENERS, open_source
from ddpm_ds.data.sources.arrays import ArraySource
from ddpm_ds.data.sources.base import NETWORK_TIMEOUT_SECONDS, Opener
from ddpm_ds.data.spec import DataSpec
from ddpm_ds.ground.errors import DataError
from ddpm_ds.schema.choices import SOURCES, SourceChoice
from tests.data.reading import at, encoded, line_of, skipped

SpecOf = Callable[..., DataSpec]


def halves(width: int, height: int) -> Image.Image:
    """Left half black, right half white."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[:, width // 2 :] = 255
    return Image.fromarray(pixels)


def in_folder(tmp_path: Path, name: str = "a.png") -> Path:
    path = tmp_path / "pictures" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def test_digits_are_8x8_grey_over_the_full_range(spec_of: SpecOf) -> None:
    source = open_source(spec_of())
    pixels, label = at(source, 0)
    assert (len(source.labels), source.classes) == (1797, tuple("0123456789"))
    assert (pixels.shape, pixels.dtype, label) == ((8, 8, 1), np.uint8, 0)
    assert pixels[0, :, 0].tolist() == [0, 0, 80, 207, 143, 16, 0, 0]  # 0 0 5 13 9 1 0 0, of 16
    assert max(at(source, i)[0].max() for i in range(20)) == 255
    pixels, _ = at(open_source(spec_of()), 0, 16, 3)
    assert pixels.shape == (16, 16, 3) and (pixels[..., 0] == pixels[..., 2]).all()


def test_cifar10_is_downloaded_with_a_bar_where_asked_for_and_by_hand_without_a_network(
    tmp_path: Path, spec_of: SpecOf, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec, fault = spec_of(source="cifar10", image_size=32, channels=3), list[OSError]()

    class Downloaded:
        url, filename = "https://host/c.tar.gz", "c.tar.gz"
        classes, targets, data = ["cat", "dog"], [1, 0], np.stack([COLOUR[0], COLOUR[1]])

        def __init__(self, folder: str, download: bool) -> None:
            assert download and folder == f"{tmp_path}/stores/downloads"
            assert socket.getdefaulttimeout() == NETWORK_TIMEOUT_SECONDS
            for _ in tqdm(range(1)):
                if fault:
                    raise fault[0]

    monkeypatch.setattr("torchvision.datasets.CIFAR10", Downloaded)
    for progress in (False, True):
        source = open_source(spec, progress)
        out, err = capsys.readouterr()
        assert out == "" and ("100%" in err) == progress and socket.getdefaulttimeout() is None
    assert source.classes == ("cat", "dog") and at(source, 0, channels=3)[1] == 1
    assert (at(source, 1, channels=3)[0] == COLOUR[1]).all()
    fault.append(socket.gaierror(-2, "Name or service not known"))
    assert line_of(spec).endswith(
        f"downloaded (Name or service not known); get https://host/c.tar.gz by hand and put it at {tmp_path}"
        "/stores/downloads/c.tar.gz"
    )


def test_folder_is_read_recursively_in_sorted_order_with_subfolders_as_classes(folder: Path, spec_of: SpecOf) -> None:
    halves(8, 8).save(in_folder(folder.parent, "cats/deep/er/x.JPG"))
    halves(8, 8).save(folder / "loose.png")
    halves(8, 8).save(folder / ".hidden.png")
    (folder / "notes.txt").write_text("no image")
    (folder / "empty").mkdir()
    os.symlink(folder, folder / "dogs" / "loop")
    source = open_source(spec_of(source="folder", path=folder))
    assert source.classes == ("cats", "dogs")
    assert source.labels.tolist() == [0] * 7 + [1] * 6 + [2], "the last is in no folder"
    assert [int(at(source, i)[0].mean()) for i in range(6)] == list(range(6))
    (folder.parent / "links").mkdir()
    os.symlink(folder / "dogs", folder.parent / "links" / "hounds")
    assert open_source(spec_of(source="folder", path=folder.parent / "links")).classes == ("hounds",)


def test_an_image_with_damaged_exif_is_taken_as_upright(tmp_path: Path, spec_of: SpecOf) -> None:
    for name in ("a.png", "b.webp", "c.jpg"):
        halves(32, 32).save(in_folder(tmp_path, name), exif=b"Exif\0\0neither II nor MM")
    source = open_source(spec_of(source="folder", path=tmp_path / "pictures"))
    for i in range(3):
        pixels, _ = at(source, i)
        assert pixels[:, 0].max() < 30 < 225 < pixels[:, -1].min()


def test_16_bit_grey_is_scaled_not_clipped(tmp_path: Path, spec_of: SpecOf) -> None:
    grey = Image.fromarray(np.full((8, 8), 0x4000, np.uint16))
    for name in ("a.png", "b.pgm", "c.tif"):
        grey.save(in_folder(tmp_path, name))
    source = open_source(spec_of(source="folder", path=tmp_path / "pictures"))
    assert all((at(source, i)[0] == 0x40).all() for i in range(3))


@pytest.mark.parametrize("broken", ["text", "cut", "empty", "float"])
def test_unreadable_image_is_named_with_a_one_line_reason(tmp_path: Path, spec_of: SpecOf, broken: str) -> None:
    path = in_folder(tmp_path, "cats/a.tif" if broken == "float" else "cats/a.png")
    if broken == "float":
        Image.fromarray(np.ones((8, 8), np.float32)).save(path)
    else:
        Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(path)
        path.write_bytes({"text": b"hello", "cut": path.read_bytes()[:6000], "empty": b""}[broken])
    source = open_source(spec_of(source="folder", path=path.parents[1]))
    name, reason = skipped(source, 0)
    assert name == f"cats/{path.name}" and reason


def test_missing_folder_a_file_and_a_folder_without_images_are_one_line_errors(tmp_path: Path, spec_of: SpecOf) -> None:
    empty, file = tmp_path / "empty", tmp_path / "file"
    empty.mkdir()
    file.touch()
    for path, what in ((tmp_path / "none", "does not exist"), (file, "is not a folder"), (empty, "no image files")):
        line = line_of(spec_of(source="folder", path=path))
        assert f"data.path = {path}" in line and what in line and "--set data.path=FOLDER" in line
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(DataError, match=r"^data.path = .*/loop does not exist"):
        prepare(spec_of(source="folder", path=loop))


def test_a_path_in_a_folder_that_is_closed_to_the_user_is_one_line_that_names_it(
    tmp_path: Path, spec_of: SpecOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up = os.stat

    def closed(path: Any, *rest: Any, **options: Any) -> os.stat_result:
        if str(path).startswith(str(tmp_path / "closed")):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return looked_up(path, *rest, **options)

    monkeypatch.setattr(os, "stat", closed)
    for source in ("folder", "arrays"):
        line = line_of(spec_of(source=source, path=tmp_path / "closed" / "x"))
        assert f"data.path: {tmp_path}/closed/x can't be read (Permission denied)" in line, source


def test_what_would_take_too_much_or_never_end_is_a_bad_image(tmp_path: Path, spec_of: SpecOf) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "endless.png").symlink_to("/dev/zero")
    (tmp_path / "loop.png").symlink_to(tmp_path / "loop.png")
    (tmp_path / "script.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n")
    with (tmp_path / "sparse.webp").open("wb") as file:
        file.write(b"RIFF\0\0\0\0WEBPVP8 ")
        file.truncate(2**40)
    source = open_source(spec_of(source="folder", path=tmp_path))
    expected = {
        "pipe.png": "it is a named pipe, not a file",
        "endless.png": "it is a device, not a file",
        "loop.png": "Too many levels of symbolic links",
        "script.png": "cannot identify image file",
        "sparse.webp": "1,099,511,627,776 bytes, more than 268,435,456; save it smaller",
    }
    found = dict(skipped(source, number) for number in range(len(source.labels)))
    assert found.keys() == expected.keys() and all(reason in found[name] for name, reason in expected.items())


def written(path: Path, **arrays: Any) -> Path:
    np.savez_compressed(path, **arrays) if path.suffix == ".npz" else np.save(path, arrays["images"])
    return path


GREY = np.random.default_rng(1).integers(0, 256, (5, 8, 8), dtype=np.uint8)
COLOUR = np.random.default_rng(2).integers(0, 256, (5, 8, 8, 3), dtype=np.uint8)


@pytest.mark.parametrize(
    ("name", "arrays", "expected"),
    [
        ("a.npy", {"images": GREY}, GREY[..., None]),
        ("a.npy", {"images": COLOUR}, COLOUR),
        ("a.npy", {"images": COLOUR.transpose(0, 3, 1, 2)}, COLOUR),
        ("a.npz", {"images": GREY[..., None], "labels": np.arange(5)}, GREY[..., None]),
        ("a.npz", {"arr_0": COLOUR, "arr_1": np.array([2, 0, 0, 1, 2], np.uint8)}, COLOUR),
    ],
)
def test_arrays_of_any_order_are_read_with_their_labels(
    name: str, arrays: dict[str, Any], expected: npt.NDArray[np.uint8], tmp_path: Path, spec_of: SpecOf
) -> None:
    path = written(tmp_path / name, **arrays)
    source = open_source(spec_of(source="arrays", path=path, channels=expected.shape[3]))
    given = next((arrays[key].tolist() for key in ("labels", "arr_1") if key in arrays), None)
    labels = given or [0] * 5
    for i, (image, label) in enumerate(zip(expected, labels, strict=True)):
        pixels, found = at(source, i, channels=expected.shape[3])
        assert (pixels == image).all() and found == label
    assert source.classes == (tuple(map(str, range(max(labels) + 1))) if given else (".",)) and len(source.labels) == 5


@pytest.mark.parametrize(
    ("name", "arrays", "message"),
    [
        ("a.npy", {"images": GREY.astype(np.float32)}, "images of float32 (5, 8, 8); use uint8"),
        ("a.npy", {"images": GREY[:0]}, "images of uint8 (0, 8, 8)"),
        ("a.npy", {"images": np.zeros((2, 5, 6, 4), np.uint8)}, "images of uint8 (2, 5, 6, 4); use uint8 (N, H, W), "),
        ("a.npy", {"images": np.array([{}])}, "Python objects in dtype"),
        ("a.npz", {"pictures": GREY}, "has no array images or arr_0; use one"),
        ("a.npz", {"images": np.array([{}])}, "Python objects in dtype"),
        ("a.npz", {"images": GREY, "labels": np.arange(4)}, "labels of int64 (4,) for 5 images"),
        ("a.npz", {"images": GREY, "labels": np.arange(5) - 1}, "labels from -1 to 3; number classes from 0"),
        ("a.npz", {"images": GREY, "labels": np.arange(5) / 2}, "labels of float64 (5,) for 5 images"),
    ],
)
def test_arrays_that_are_no_images_are_one_line(
    name: str, arrays: dict[str, Any], message: str, tmp_path: Path, spec_of: SpecOf
) -> None:
    assert message in line_of(spec_of(source="arrays", path=written(tmp_path / name, **arrays)))


def test_arrays_that_are_cut_or_missing_are_one_line(tmp_path: Path, spec_of: SpecOf) -> None:
    for name in ("a.npy", "a.npz"):
        path = written(tmp_path / name, images=GREY)
        whole = path.read_bytes()
        for size in (0, 10, 100, len(whole) - 1):
            path.write_bytes(whole[:size])
            assert f"data.path = {path} can't be read by source arrays (" in line_of(
                spec_of(source="arrays", path=path)
            )
    assert "does not exist" in line_of(spec_of(source="arrays", path=tmp_path / "none.npy"))
    assert "is not a file" in line_of(spec_of(source="arrays", path=tmp_path))


def test_packed_arrays_are_mapped_from_a_file_that_nobody_has_to_remove(tmp_path: Path, spec_of: SpecOf) -> None:
    spec = spec_of(source="arrays", path=written(tmp_path / "a.npz", images=COLOUR))
    source = open_source(spec)
    assert isinstance(source, ArraySource) and isinstance(source.images.base, np.memmap)
    assert not list(spec.store_root.iterdir()) and (source.read(4) == COLOUR[4]).all()


def npy(shape: str = "(5, 8, 8)", descr: str = "'|u1'", header: str | None = None) -> bytes:
    """The bytes of a ``.npy`` file of 320 zeros whose header says this."""
    text = header or f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}"
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(text) + 1) + text.encode() + b"\n" + bytes(320)


FORGED = {
    **{f"shape {shape}": npy(shape) for shape in ("(6, 8, 8)", "(-5, 8, 8)", "(5, -8, -8)", "(0, 8, 8)", "()", "5")},
    **{f"shape {shape}": npy(shape) for shape in ("[5, 8, 8]", "'x'", "None", "(5.0, 8, 8)", "(True, 8, 8)", "(5, 8")},
    "a shape that wraps": npy(f"({2**32}, {2**31}, 2)"),
    "a shape beyond 64 bits": npy(f"({2**63}, 8, 8)"),
    "a shape of many": npy("(" + "1," * 70 + ")"),
    **{f"descr {descr}": npy(descr=descr) for descr in ("'O'", "'|V0'", "'zz'", "5", "None", "[('a', 'O')]", "'S0'")},
    "an expression": npy(header="__import__('os').abort()"),
    "nesting": npy(header="(" * 5000),
    "a long header": npy(header=" " * 20_000),
    "zeros": npy(header="\0" * 50),
}


@pytest.mark.parametrize("forged", FORGED.values(), ids=FORGED)
@pytest.mark.parametrize("place", ["file", "images", "labels"])
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_forged_header_of_an_array_is_one_line(forged: bytes, place: str, tmp_path: Path, spec_of: SpecOf) -> None:
    path = tmp_path / ("a.npy" if place == "file" else "a.npz")
    path.write_bytes(forged)
    if place != "file":
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("images.npy", forged if place == "images" else npy())
            file.writestr("labels.npy", forged if place == "labels" else npy("(5,)"))
    if place == "labels" and forged == npy("()"):
        return  # a number is not taken for labels
    line = line_of(spec_of(source="arrays", path=path))
    assert line.startswith(f"data.path = {path} ") and len(line) < 500


def test_an_array_that_is_there_twice_is_one_line(tmp_path: Path, spec_of: SpecOf) -> None:
    path = written(tmp_path / "a.npz", images=GREY, arr_0=GREY)
    assert "has two arrays images or arr_0; use one" in line_of(spec_of(source="arrays", path=path))
    with warnings.catch_warnings(), zipfile.ZipFile(path, "w") as file:
        warnings.simplefilter("ignore")
        for _ in range(2):
            file.writestr("images.npy", npy())
    assert "it has images twice" in line_of(spec_of(source="arrays", path=path))


def unpacked(path: Path, labels: Any = None, names: Sequence[str] = ("00000/img0.png", "00000/img1.png")) -> Path:
    """A folder like those of EDM's tools."""
    for name, pixels in zip(names, GREY, strict=False):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(encoded(pixels))
    (path / "dataset.json").write_text(labels if isinstance(labels, str) else json.dumps({"labels": labels}))
    return path


def test_the_page_that_adds_a_source_adds_one_that_is_prepared(
    tmp_path: Path, folder: Path, spec_of: SpecOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "add_a_source.md").read_text()
    module, entry = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "csv_source.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    choices, openers = dict[str, SourceChoice](), dict[str, Opener]()
    names = {"SOURCES": choices, "OPENERS": openers, "SourceChoice": SourceChoice}
    exec(entry, names | vars(importlib.import_module("csv_source")))
    monkeypatch.setitem(SOURCES, "csv", choices["csv"])
    monkeypatch.setitem(OPENERS, "csv", openers["csv"])
    (folder / "list.csv").write_text("".join(f"cats/{i}.png,cat\n" for i in range(6)) + "dogs/0.png,a dog\n")
    store = prepare(spec_of(source="csv", path=folder / "list.csv", channels=3))
    assert store.meta.classes == ("a dog", "cat") and store.labels.tolist() == [1] * 6 + [0]
    (folder / "empty.csv").touch()
    assert "empty.csv has no rows" in line_of(spec_of(source="csv", path=folder / "empty.csv"))


def test_what_edms_tools_write_has_the_labels_of_its_list(tmp_path: Path, spec_of: SpecOf) -> None:
    names = ("00000/img0.png", "00001/img1.png")
    path = unpacked(tmp_path / "a", [["00001/img1.png", 2], ["./00000\\img0.png", 0]], names)
    source = open_source(spec_of(source="folder", path=path))
    assert source.classes == ("0", "1", "2")
    assert [(source.name(i), at(source, i)[1]) for i in range(2)] == [(names[0], 0), (names[1], 2)]
    path = unpacked(path, None, names)
    source = open_source(spec_of(source="folder", path=path))
    assert source.classes == ("00000", "00001"), "without labels its folders"


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([["00000/img1.png", 2]], "00000/img0.png has no label"),
        ([["00000/img0.png", -1], ["00000/img1.png", 1]], "a label is no whole number from 0"),
        ([["00000/img0.png", 0], ["00000\\img0.png", 0]], "00000/img0.png has two labels"),
        ([["00000/img0.png", 0], ["00000/img1.png", 1], ["..\\a.png", 0]], "points outside its folder (../a.png)"),
        ([[1, 2]], "dataset.json of data.path"),
        ("[" * 10000, "levels deep"),
        ("{", "dataset.json of data.path"),
    ],
)
def test_lists_of_labels_that_are_wrong_are_one_line(
    labels: Any, message: str, tmp_path: Path, spec_of: SpecOf
) -> None:
    path = unpacked(tmp_path / "a", labels)
    assert message in line_of(spec_of(source="folder", path=path))


def test_pictures_that_pillow_can_not_decode_are_left_out_and_named(tmp_path: Path, spec_of: SpecOf) -> None:
    files = {"0.png": encoded(GREY[0]), "1.heic": b"\0\0\0\x18ftypheic", "2.jxl": b"\xff\x0a", "notes.txt": b"no image"}
    root = tmp_path / "pictures"
    root.mkdir()
    for name, content in files.items():
        (root / name).write_bytes(content)
    store = prepare(spec_of(source="folder", path=root, max_bad_fraction=0.9))
    named = [Path(line.split("\t")[0]).name for line in (store.path / "skipped.txt").read_text().splitlines()]
    assert (len(store), named) == (1, ["1.heic", "2.jxl"])


def test_a_folder_of_two_names_is_one_line(folder: Path, spec_of: SpecOf) -> None:
    """One of them would lose all of its images."""
    (folder / "all").symlink_to("dogs")
    line = line_of(spec_of(source="folder", path=folder))
    assert line == f"data.path = {folder}: dogs/ and all/ are the same folder; remove one of them"


def test_a_disk_that_is_full_while_an_array_is_unpacked_is_one_line(
    tmp_path: Path, spec_of: SpecOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfileobj", full)
    with pytest.raises(DataError, match=r"data.store_root = .* can't be written .No space left on device.; choose"):
        prepare(spec_of(source="arrays", path=written(tmp_path / "a.npz", images=GREY)))
