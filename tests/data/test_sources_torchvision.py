"""torchvision's data sets by name. There is no network: the files that torchvision would download are made here."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat
from torchvision import datasets
from tqdm import tqdm

from ddpm_ds.data.prepare import prepare
from ddpm_ds.data.sources import open_source
from ddpm_ds.data.sources.base import NETWORK_TIMEOUT_SECONDS
from ddpm_ds.data.spec import DataSpec
from tests.data.reading import PICTURES, at, encoded, line_of

SpecOf = Callable[..., DataSpec]


@pytest.fixture
def downloads(spec_of: SpecOf, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of downloads, and no network."""

    def no_network(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    folder = spec_of().store_root / "downloads"
    folder.mkdir(parents=True)
    return folder


def mnist(folder: Path) -> None:
    """MNIST's files: eight images for training, four for tests."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for part, numbers in (("train", range(8)), ("t10k", range(8, 12))):
        pixels = PICTURES[numbers.start : numbers.stop, ..., 0]
        header = struct.pack(">IIII", 0x0803, len(numbers), 8, 8)
        (raw / f"{part}-images-idx3-ubyte").write_bytes(header + pixels.tobytes())
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(
            struct.pack(">II", 0x0801, len(numbers)) + bytes(number % 10 for number in numbers)
        )


def test_arrays_of_each_split_are_read(downloads: Path, spec_of: SpecOf) -> None:
    mnist(downloads)
    for split, first in ((None, 0), ("train", 0), ("test", 8)):
        source = open_source(spec_of(source="torchvision", name="MNIST", split=split))
        pixels, label = at(source, 1)
        assert (pixels[..., 0] == PICTURES[first + 1, ..., 0]).all() and label == (first + 1) % 10
        assert source.classes[3] == "3 - three" and len(source.labels) == (8 if first == 0 else 4)
    store = prepare(spec_of(source="torchvision", name="MNIST", split="test"))
    assert (store.meta.source, store.meta.folder, store.labels.tolist()) == ("torchvision", "MNIST", [8, 9, 0, 1])


def test_a_download_shows_its_bar_where_asked_for_and_does_not_wait_for_ever(
    downloads: Path, spec_of: SpecOf, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    timeouts = []

    def download(self: datasets.MNIST) -> None:
        timeouts.append(socket.getdefaulttimeout())
        for _ in tqdm(range(1)):
            mnist(downloads)

    monkeypatch.setattr(datasets.MNIST, "download", download)
    for progress in (False, True):
        open_source(spec_of(source="torchvision", name="MNIST"), progress)
        out, err = capsys.readouterr()
        assert out == "" and ("100%" in err) == progress
    assert timeouts == [NETWORK_TIMEOUT_SECONDS] * 2 and socket.getdefaulttimeout() is None


def test_cifar10_without_network_says_where_to_put_the_archive(downloads: Path, spec_of: SpecOf) -> None:
    line = line_of(spec_of(source="cifar10", image_size=32, channels=3))
    assert "data.source = cifar10" in line and f"put it at {downloads / datasets.CIFAR10.filename}" in line


def test_arrays_with_channels_first_are_read(downloads: Path, spec_of: SpecOf, monkeypatch: pytest.MonkeyPatch) -> None:
    savemat(downloads / "train_32x32.mat", {"X": PICTURES.transpose(1, 2, 3, 0), "y": np.arange(1, 13)[:, None] % 10})
    monkeypatch.setattr(datasets.SVHN, "split_list", {"train": ["", "train_32x32.mat", None]})
    source = open_source(spec_of(source="torchvision", name="SVHN"))
    pixels, label = at(source, 4, channels=3)
    assert (pixels == PICTURES[4]).all() and label == 5 and source.classes == tuple("0123456789")


def test_files_of_each_split_are_read_as_they_are_stored(downloads: Path, spec_of: SpecOf) -> None:
    pets = downloads / "oxford-iiit-pet"
    (pets / "images").mkdir(parents=True)
    (pets / "annotations").mkdir()
    (pets / "annotations" / "trainval.txt").write_text("Birman_1 1 1 1\nPug_2 2 2 1\n")
    (pets / "annotations" / "test.txt").write_text("Pug_3 1 2 1\n")
    for number, name in enumerate(("Birman_1", "Pug_2", "Pug_3")):
        (pets / "images" / f"{name}.jpg").write_bytes(encoded(PICTURES[number]))
    source = open_source(spec_of(source="torchvision", name="OxfordIIITPet"))
    assert source.classes == ("Birman", "Pug") and source.labels.tolist() == [0, 1]
    test = open_source(spec_of(source="torchvision", name="OxfordIIITPet", split="test"))
    assert test.read(0) == encoded(PICTURES[2]) and (at(source, 1, channels=3)[0] == PICTURES[1]).all()
    assert test.name(0).endswith("oxford-iiit-pet/images/Pug_3.jpg")


@pytest.mark.parametrize(
    ("name", "split", "message"),
    [
        ("Cifar100", None, "data.name = Cifar100 is no data set of torchvision; did you mean CIFAR100?"),
        ("vision", None, "is no data set of torchvision"),
        ("ImageFolder", None, "is not downloaded by torchvision; use source folder"),
        ("FakeData", None, "is not downloaded by torchvision"),
        ("MNIST", "val", "data.split = val: the parts of data.name = MNIST are train and test"),
        ("EuroSAT", "train", "data.split = train: data.name = EuroSAT has no parts; remove it"),
        (
            "OxfordIIITPet",
            "train",
            "with data.split = train: Unknown value 'train' for argument split. Valid values are",
        ),
        ("EMNIST", None, "data.name = EMNIST with data.split = None: "),
        ("MNIST", None, "data.name = MNIST can't be downloaded ("),
        ("CIFAR100", None, "by hand and put it at"),
        ("MovingMNIST", None, "can't be downloaded ("),
    ],
)
def test_a_missing_file_is_one_line(
    name: str, split: str | None, message: str, downloads: Path, spec_of: SpecOf, capfd: pytest.CaptureFixture[str]
) -> None:
    line = line_of(spec_of(source="torchvision", name=name, split=split))
    assert message in line and (("download" not in message or "torchvision" in message) or str(downloads) in line)
    assert capfd.readouterr() == ("", "")


def test_data_sets_without_one_class_an_image_are_one_line(downloads: Path, spec_of: SpecOf) -> None:
    (downloads / "MovingMNIST").mkdir()
    np.save(downloads / "MovingMNIST" / "mnist_test_seq.npy", np.zeros((20, 3, 8, 8), np.uint8))
    assert "MovingMNIST is no data set of images with one class each; use one such as CIFAR100" in line_of(
        spec_of(source="torchvision", name="MovingMNIST")
    )
