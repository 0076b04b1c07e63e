"""Data sets of Hugging Face's library, made and saved by it."""

import io
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from PIL import Image

from ddpm_ds.data.sources import open_source
from ddpm_ds.data.spec import DataSpec
from tests.data.reading import PICTURES, at, encoded, line_of, skipped

datasets = pytest.importorskip("datasets")

SpecOf = Callable[..., DataSpec]
CLASSES = ("cat", "dog", "eel")
FIRST = [number % 3 for number in range(12)]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let no test reach for the hub, and show the library's bars as before."""
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    yield
    datasets.enable_progress_bars()


def saved(columns: dict[str, Any] | None = None, features: dict[str, Any] | None = None) -> Any:
    """A data set of the twelve pictures; ``columns`` and ``features`` change or remove (None) some."""
    content = {"image": [Image.fromarray(pixels) for pixels in PICTURES], "label": FIRST} | (columns or {})
    kinds = {"image": datasets.Image(), "label": datasets.ClassLabel(names=list(CLASSES))} | (features or {})
    content = {name: values for name, values in content.items() if values is not None}
    kinds = {name: kinds[name] for name in content}
    return datasets.Dataset.from_dict(content, features=datasets.Features(kinds))


def test_what_the_library_saves_is_read_by_split(tmp_path: Path, spec_of: SpecOf, capfd: Any) -> None:
    datasets.disable_progress_bars()
    whole = saved()
    whole.save_to_disk(str(tmp_path / "one"), num_shards=3)
    parts = datasets.DatasetDict({"train": whole, "test": whole.select(range(4, 8))})
    parts.save_to_disk(str(tmp_path / "parts"))
    whole.to_parquet(str(tmp_path / "one.parquet"))
    (tmp_path / "files").mkdir()
    for name, part in parts.items():
        part.to_parquet(str(tmp_path / "files" / f"{name}-00000-of-00001.parquet"))
    for path, split, first, count in (
        ("one", None, 0, 12),
        ("parts", None, 0, 12),
        ("parts", "test", 4, 4),
        ("one.parquet", None, 0, 12),
        ("files", "train", 0, 12),
        ("files", "test", 4, 4),
    ):
        source = open_source(spec_of(source="huggingface", path=tmp_path / path, split=split))
        assert source.classes == CLASSES and source.labels.tolist() == FIRST[first : first + count]
        for i in (0, count - 1):
            pixels, label = at(source, i, channels=3)
            assert (pixels == PICTURES[first + i]).all() and label == FIRST[first + i]
    assert capfd.readouterr() == ("", "")
    kept = {path.relative_to(spec_of().store_root).parts[:2] for path in spec_of().store_root.rglob("*.arrow")}
    assert kept == {("downloads", "huggingface")}


def test_arrow_files_and_folders_of_images_are_read(tmp_path: Path, folder: Path, spec_of: SpecOf) -> None:
    saved().save_to_disk(str(tmp_path / "one"))
    (file,) = (tmp_path / "one").glob("*.arrow")
    source = open_source(spec_of(source="huggingface", path=file))
    assert (at(source, 11, channels=3)[0] == PICTURES[11]).all() and source.classes == CLASSES
    source = open_source(spec_of(source="huggingface", path=folder))
    assert source.classes == ("cats", "dogs") and source.labels.tolist() == [0] * 6 + [1] * 6
    assert [int(at(source, i)[0].mean()) for i in (0, 5, 6)] == [0, 5, 40]
    assert "cats/5.png" in source.name(5) or source.name(5) == "row 5"


def test_tar_shards_are_read_and_a_damaged_one_is_one_line(tmp_path: Path, spec_of: SpecOf) -> None:
    for shard, numbers in (("a", range(2)), ("b", range(2, 5))):
        with tarfile.open(tmp_path / f"{shard}.tar", "w") as tar:
            for number in numbers:
                for kind, content in (("png", encoded(PICTURES[number])), ("cls", b"%d" % number), ("txt", b"a cat")):
                    member = tarfile.TarInfo(f"{number}.{kind}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    text = {"encoders": "none", "captions": "txt"}
    for path, labels in ((tmp_path, [*range(5)]), (tmp_path / "b.tar", [2, 3, 4])):
        source: Any = open_source(spec_of(source="huggingface", path=path, label_column="cls", text=text))
        assert source.labels.tolist() == labels and (at(source, 1, channels=3)[0] == PICTURES[labels[1]]).all()
        assert source.captions.texts == ("", "a cat") and "4.png" in source.name(len(labels) - 1)
    (tmp_path / "b.tar").write_bytes((tmp_path / "b.tar").read_bytes()[:700])
    assert "can't be loaded (" in line_of(spec_of(source="huggingface", path=tmp_path / "b.tar"))


def test_files_that_know_no_features_are_read_by_named_columns(tmp_path: Path, spec_of: SpecOf) -> None:
    files = [encoded(pixels) for pixels in PICTURES]
    (tmp_path / "files").mkdir()
    for number, content in enumerate(files):
        (tmp_path / "files" / f"{number}.png").write_bytes(content)
    columns = {
        "bytes": files,
        "struct": [{"bytes": content, "path": None} for content in files],
        "path": [f"files/{number}.png" for number in range(12)],
        "kind": FIRST,
        "text": ["b", "a", "a"] * 4,
        "ratio": [0.5] * 12,
        "lists": [[1]] * 12,
        "hash": pa.array([2**63] * 12, pa.uint64()),
    }
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pa.table(columns), path)
    spec = {"source": "huggingface", "path": path}
    for column in ("bytes", "struct", "path"):
        source = open_source(spec_of(**spec, image_column=column, label_column="kind"))
        assert (at(source, 5, channels=3)[0] == PICTURES[5]).all()
        assert source.classes == ("0", "1", "2") and source.labels.tolist() == FIRST
    assert open_source(spec_of(**spec, image_column="bytes")).classes == (".",)
    assert "has no image column; its columns are bytes, struct, path, kind, text, ratio, lists, hash" in line_of(
        spec_of(**spec)
    )
    assert "data.image_column = kind of data.path" in line_of(spec_of(**spec, image_column="kind"))
    assert "data.image_column = x of data.path" in line_of(spec_of(**spec, image_column="x"))
    named = open_source(spec_of(**spec, image_column="bytes", label_column="text"))
    assert named.classes == ("a", "b") and named.labels.tolist() == [1, 0, 0] * 4
    fix = "no whole numbers or names; choose with --set data.label_column= one of path, kind, text, hash"
    for column, message in (
        ("ratio", fix),
        ("lists", fix),
        ("x", "is no column, which are bytes"),
        ("hash", "can't be read ("),
    ):
        assert message in line_of(spec_of(**spec, image_column="bytes", label_column=column))


@pytest.mark.parametrize(
    ("columns", "features", "message"),
    [
        ({"image": None}, {}, "has no image column; its columns are label"),
        (
            {"mask": [Image.fromarray(pixels) for pixels in PICTURES]},
            {"mask": datasets.Image()},
            "has images in image, mask; choose with --set data.image_column=image",
        ),
        (
            {"fine": FIRST},
            {"fine": datasets.ClassLabel(num_classes=3)},
            "has whole numbers or names in label, fine; choose with --set data.label_column=label",
        ),
        ({"label": [-1, *FIRST[1:]]}, {}, "has 1 of 12 rows without a label in column label"),
        ({"label": [None, None, *FIRST[2:]]}, {}, "has 2 of 12 rows without a label in column label"),
        ({"label": [None, *"abababababa"]}, {"label": datasets.Value("string")}, "has 1 of 12 rows without a label in"),
        ({"label": [0.5] * 12}, {"label": datasets.Value("float32")}, "float32, no whole numbers or names; convert or"),
        ({"label": [10**6] * 12}, {"label": datasets.Value("int64")}, "has the label 1000000 in column label"),
        ({"image": [], "label": []}, {}, "can't be loaded ("),
    ],
)
def test_ambiguous_columns_are_one_line(
    columns: dict[str, Any], features: dict[str, Any], message: str, tmp_path: Path, spec_of: SpecOf
) -> None:
    saved(columns, features).save_to_disk(str(tmp_path / "a"))
    line = line_of(spec_of(source="huggingface", path=tmp_path / "a"))
    assert message in line and str(tmp_path / "a") in line


def test_a_data_set_of_which_no_row_has_a_label_is_one_class(tmp_path: Path, spec_of: SpecOf) -> None:
    saved({"label": [-1] * 12}).save_to_disk(str(tmp_path / "a"))
    source = open_source(spec_of(source="huggingface", path=tmp_path / "a"))
    assert source.classes == (".",) and not source.labels.any()
    assert "12 of 12 rows without" in line_of(spec_of(source="huggingface", path=tmp_path / "a", label_column="label"))


@pytest.mark.parametrize("column", ["label", "image"])
def test_forged_offsets_of_texts_are_one_line(column: str, tmp_path: Path, spec_of: SpecOf) -> None:
    """Python would raise SystemError on a text of negative length, or end."""
    text = datasets.Value("string")
    names = ["a" * 17, "b" * 19, "c" * 23] * 4
    paths = [{"bytes": encoded(pixels), "path": name} for pixels, name in zip(PICTURES, names, strict=True)]
    saved({"label": names, "image": paths}, {"label": text}).save_to_disk(str(tmp_path / "a"))
    (file,) = (tmp_path / "a").glob("*.arrow")
    offsets = np.cumsum([0, *map(len, names)], dtype=np.int32)
    content, at_first = file.read_bytes(), file.read_bytes().find(offsets.tobytes())
    place = at_first if column == "image" else content.rfind(offsets.tobytes())
    forged = offsets.copy()
    forged[5] = -(2**20)
    file.write_bytes(content[:place] + forged.tobytes() + content[place + forged.nbytes :])
    assert "can't be read (" in line_of(spec_of(source="huggingface", path=tmp_path / "a"))


def test_missing_broken_or_other_splits_are_one_line(tmp_path: Path, spec_of: SpecOf) -> None:
    def message(**keys: Any) -> str:
        return line_of(spec_of(source="huggingface", **keys))

    saved().save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"a": saved(), "b": saved()}).save_to_disk(str(tmp_path / "parts"))
    one, parts = tmp_path / "one", tmp_path / "parts"
    assert "data.split = test: data.path = " in message(path=one, split="test")
    for split in (None, "test"):
        assert "is no split of data.path" in message(path=parts, split=split) and "one of a, b" in message(path=parts)
    assert "does not exist; give what save_to_disk wrote" in message(path=tmp_path / "none")
    (tmp_path / "a.csv").write_text("a,b")
    assert "is no .parquet, .arrow or .tar file" in message(path=tmp_path / "a.csv")
    (tmp_path / "empty").mkdir()
    assert "can't be loaded (" in message(path=tmp_path / "empty")
    saved().to_parquet(str(tmp_path / "a.parquet"))
    content = (tmp_path / "a.parquet").read_bytes()
    for kept in (0, 10, len(content) // 2, len(content) - 1):
        (tmp_path / "a.parquet").write_bytes(content[:kept])
        assert f"data.path = {tmp_path}/a.parquet can't be loaded (" in message(path=tmp_path / "a.parquet")
    (file,) = one.glob("*.arrow")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert "can't be loaded (" in message(path=one)


def test_a_name_without_network_is_one_line(spec_of: SpecOf) -> None:
    for name in ("owner/pictures", "owner/pictures/small"):
        line = line_of(spec_of(source="huggingface", name=name))
        assert f"data.name = {name} can't be loaded (" in line and "bring a folder of it and set data.path" in line


def test_without_the_library_the_extra_is_named(spec_of: SpecOf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install 'ddpm_ds[huggingface]'" in line_of(spec_of(source="huggingface", name="a/b"))


def test_rows_without_an_image_or_with_a_broken_one_are_named(tmp_path: Path, spec_of: SpecOf) -> None:
    content = [{"bytes": b"hello", "path": "a.png"}, {"bytes": None, "path": "none.png"}, None]
    content += [{"bytes": encoded(np.zeros((8, 8, 3), np.uint8)), "path": None}]
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pa.table({"image": pa.array(content, kind)}), path)
    source = open_source(spec_of(source="huggingface", path=path, image_column="image"))
    for i, name in enumerate(("row 0 (a.png)", "row 1 (none.png)", "row 2")):
        found, reason = skipped(source, i)
        assert found == name and reason
    assert not at(source, 3)[0].any()
