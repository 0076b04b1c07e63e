"""WebDataset's tar shards."""

from __future__ import annotations

import contextlib
import gzip
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from ddpm_ds.data.sources import open_source
from ddpm_ds.data.sources.base import UnreadableImage
from ddpm_ds.data.spec import DataSpec
from ddpm_ds.ground.errors import DataError
from tests.data.reading import PICTURES, at, encoded, line_of, shard

SpecOf = Callable[..., DataSpec]
PNG = [encoded(pixels) for pixels in PICTURES]


def sample(key: str, i: int, label: bytes | None = None, kind: str = "cls") -> dict[str, bytes]:
    """The members of an image."""
    return {f"{key}.png": PNG[i]} | ({} if label is None else {f"{key}.{kind}": label})


def test_shards_are_read_in_place_in_the_order_of_their_names_and_members(tmp_path: Path, spec_of: SpecOf) -> None:
    b = (
        sample("deep/b0", 2, b"4\n")
        | {"./notes.txt": b"no image"}
        | sample("a1", 3, b'{"label": 0, "text": "x"}', "json")
    )
    shard(tmp_path / "shards" / "2.tar", b)
    shard(tmp_path / "shards" / "1.tar", {"x.png": PNG[0], "x.cls": b"1", "x.seg.png": b"", ".hidden.png": b""})
    (tmp_path / "shards" / "._1.tar").write_bytes(b"\0\5\x16\7")  # as macOS writes on other file systems
    source = open_source(spec_of(source="webdataset", path=tmp_path / "shards"))
    assert source.classes == tuple("01234") and source.labels.tolist() == [1, 4, 0]
    assert [source.name(i) for i in range(3)] == ["1.tar/x.png", "2.tar/deep/b0.png", "2.tar/a1.png"]
    for i, number in enumerate((0, 2, 3)):
        assert (at(source, i, channels=3)[0] == PICTURES[number]).all()


def test_one_shard_without_labels_is_one_class(tmp_path: Path, spec_of: SpecOf) -> None:
    members = (
        sample("a", 0)
        | sample("b", 1, b'{"text": "a cat"}', "json")
        | {"c.webp": encoded(PICTURES[2], "webp"), "c.image": b""}
    )
    source = open_source(spec_of(source="webdataset", path=shard(tmp_path / "a.tar", members)))
    assert (source.classes, source.labels.tolist()) == ((".",), [0, 0, 0])


@pytest.mark.parametrize(
    ("members", "message"),
    [
        (sample("a", 0, b"1") | sample("b", 1), "1 of 2 images have no label, first a.tar/b.png; give each a .cls"),
        (sample("a", 0, b"cat"), "the label in a.cls is no whole number from 0 to 999,999; write it again"),
        (sample("a", 0, b"1" * 50), "the label in a.cls is no whole number"),
        (sample("a", 0, b'{"label": true}', "json"), "the label in a.json is no whole number"),
        (sample("a", 0, b"[" * 9999, "json"), "the label in a.json is no whole number"),
        ([("a.png", PNG[0]), ("b.png", PNG[1]), ("a.png", PNG[2])], "a.png and a.png are of one key"),
        ([("a.png", PNG[0]), ("a.cls", b"1"), ("a.cls", b"2")], "a.cls and a.cls are of one key"),
        ({"../a.png": PNG[0]}, "../a.png points outside it"),
        ({"/a.png": PNG[0]}, "/a.png points outside it"),
        ({"a.txt": b"text"}, "holds no images (KEY.jpg, KEY.png, KEY.webp, ...) in its shards"),
        ({"a.1.png": PNG[0]}, "the key of a.1.png ends at its first dot; rename it"),
    ],
)
def test_shards_that_are_wrong_are_one_line(
    members: Mapping[str, bytes] | list[tuple[str, bytes]], message: str, tmp_path: Path, spec_of: SpecOf
) -> None:
    line = line_of(spec_of(source="webdataset", path=shard(tmp_path / "a.tar", members)))
    assert message in line and "a.tar" in line


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_in_a_shard_are_one_line(kind: bytes, tmp_path: Path, spec_of: SpecOf) -> None:
    path = shard(tmp_path / "a.tar", {"a.png": b""}, type=kind, linkname="/etc/passwd")
    assert "a.png points outside it, or is a link, a device" in line_of(spec_of(source="webdataset", path=path))


def test_a_shard_that_ends_early_anywhere_is_one_line(tmp_path: Path, spec_of: SpecOf) -> None:
    whole = shard(tmp_path / "whole.tar", sample("a", 0, b"1") | sample("b", 1, b"0")).read_bytes()
    path = tmp_path / "cut" / "0001.tar"
    path.parent.mkdir()
    end = len(whole.rstrip(b"\0")) // 512 * 512 + 512  # of the last member's content
    for size in (0, 100, 512, 700, 1024, end - 512, end - 100, end, end + 100):
        path.write_bytes(whole[:size])
        line = line_of(spec_of(source="webdataset", path=path.parent))
        assert f"shard {path}" in line and any(each in line for each in ("early", "tar file", "end of data")), size
    path.write_bytes(whole[: end // 1024 * 512] + b"\1" * 512 + whole[end // 1024 * 512 + 512 :])
    assert f"shard {path}" in line_of(spec_of(source="webdataset", path=path))


def test_a_shard_damaged_anywhere_is_an_error_of_a_line_or_of_an_image(tmp_path: Path, spec_of: SpecOf) -> None:
    path = shard(tmp_path / "a.tar", sample("a", 0, b"1") | sample("b", 1, b'{"label": 2}', "json"))
    whole = path.read_bytes()
    for place in range(0, len(whole.rstrip(b"\0")), 3):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        with contextlib.suppress(DataError):
            source = open_source(spec_of(source="webdataset", path=path))
            for i in range(len(source.labels)):
                with contextlib.suppress(UnreadableImage):
                    at(source, i)


@pytest.mark.parametrize("between", [b"", bytes(512), bytes(2**20)])
def test_tar_files_in_one_file_are_refused(between: bytes, tmp_path: Path, spec_of: SpecOf) -> None:
    """As ``cat a.tar b.tar`` writes them: tarfile would end after the first."""
    one = shard(tmp_path / "1", sample("a", 0, b"1")).read_bytes()
    path = tmp_path / "both.tar"
    path.write_bytes(one + between + shard(tmp_path / "2", sample("b", 1, b"0")).read_bytes())
    assert f"shard {path}: it has more behind its end" in line_of(spec_of(source="webdataset", path=path))


@pytest.mark.parametrize("size", [b"\x80" + b"\x7f" * 11, b"\xff" * 12, b"7" * 11 + b"\0", b"\x80\0\0\0\1" + bytes(7)])
@pytest.mark.parametrize("kind", [b"0", b"L", b"x", b"g", b"S", b"D", b"7"])
def test_a_forged_size_in_a_header_is_an_error_of_a_line(
    kind: bytes, size: bytes, tmp_path: Path, spec_of: SpecOf
) -> None:
    member = tarfile.TarInfo("a.png")
    member.type = kind
    header = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    header[124:136], header[148:156] = size, b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    path = shard(tmp_path / "a.tar", sample("b", 0))
    path.write_bytes(header + path.read_bytes())
    with contextlib.suppress(DataError):  # tarfile skips a long name of a negative size
        open_source(spec_of(source="webdataset", path=path))


def test_a_file_that_is_no_shard_is_one_line(tmp_path: Path, spec_of: SpecOf) -> None:
    def message(path: Path) -> str:
        return line_of(spec_of(source="webdataset", path=path))

    whole = shard(tmp_path / "shards" / "a.tar", sample("a", 0)).read_bytes()
    assert "does not exist; give a .tar file or a folder of them" in message(tmp_path / "none")
    (tmp_path / "shards" / "b.tar.gz").write_bytes(gzip.compress(whole))
    assert "b.tar.gz is compressed; decompress it" in message(tmp_path / "shards")
    (tmp_path / "c.tar").write_bytes(gzip.compress(whole))
    assert "c.tar: truncated header; write it again" in message(tmp_path / "c.tar")
    (tmp_path / "d.tar").write_bytes(b"hello" * 1000)
    assert "d.tar: invalid header; write it again" in message(tmp_path / "d.tar")
    (tmp_path / "empty").mkdir()
    assert "holds no .tar files" in message(tmp_path / "empty")
    (tmp_path / "empty" / "e.tar").symlink_to("nowhere")
    assert "e.tar: No such file or directory" in message(tmp_path / "empty")


def test_a_shard_that_changes_after_it_was_listed_costs_its_images(tmp_path: Path, spec_of: SpecOf) -> None:
    path = shard(tmp_path / "a.tar", sample("a", 0) | sample("b", 1))
    source = open_source(spec_of(source="webdataset", path=path))
    path.write_bytes(path.read_bytes()[:1100])
    with pytest.raises(UnreadableImage, match=r"^a.tar/b.png: its shard was cut since it was listed$"):
        at(source, 1)
