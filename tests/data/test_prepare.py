import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import Image

from ddpm_ds.data import decoding, origin, writing
from ddpm_ds.data.origin import SAMPLED_IMAGES
from ddpm_ds.data.prepare import How, Recipes, class_names, prepare
from ddpm_ds.data.sources import open_source
from ddpm_ds.data.sources.files import FolderSource
from ddpm_ds.data.spec import DataSpec
from ddpm_ds.ground.errors import DataError
from tests.launching import PATIENCE_SECONDS, REPOSITORY, wait_for

SpecOf = Callable[..., DataSpec]


@pytest.fixture
def spec(folder: Path, spec_of: SpecOf) -> DataSpec:
    """The spec of twelve pictures, grey."""
    return spec_of(source="folder", path=folder)


# Prepares the spec on its command line with slow reads, noting in a file what it reads, without torch. Waits for a
# line first.
SLOW_PREPARE = """
import os, sys, time, tempfile
from ddpm_ds.data import decoding, prepare, writing
from ddpm_ds.data.sources import files
from ddpm_ds.data.spec import DataSpec

spec, reads, seconds, hosts = DataSpec.model_validate_json(sys.argv[1]), sys.argv[2], float(sys.argv[3]), sys.argv[4]
decoding.CHUNK_IMAGES = 1
writing.SHARD_BYTES = int(sys.argv[5])

class Slow(files.FolderSource):
    def read(self, i):
        with open(reads, "a") as file:
            file.write(f"{os.getpid()} {i}\\n")
        time.sleep(seconds)
        return super().read(i)

files.FolderSource = Slow
prepare.sampled = lambda source: ("", False)  # reads none, and is read by one thread
if hosts == "2":
    os.environ.update(RANK=sys.argv[6], WORLD_SIZE="2", LOCAL_WORLD_SIZE="1")
    tempfile.tempdir = reads + sys.argv[6]
    os.mkdir(tempfile.tempdir)
print("ready", flush=True)
input()
print(len(prepare.prepare(spec)))
assert "torch" not in sys.modules
"""


def slowly(
    count: int, spec: DataSpec, reads: Path, seconds: float, hosts: int = 1, shard_bytes: int = 2**28
) -> list[subprocess.Popen[str]]:
    """``count`` processes that begin to prepare at the same moment."""
    asked = [spec.model_dump_json(), str(reads), str(seconds), str(hosts), str(shard_bytes)]
    processes = [started(SLOW_PREPARE, *asked, str(number)) for number in range(count)]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    return processes


def started(code: str, *arguments: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    words = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(words, cwd=REPOSITORY, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def reads_in(file: Path) -> list[tuple[int, int]]:
    """Processes and the images that they have read, in order."""
    lines = file.read_text().splitlines() if file.exists() else []
    return [(int(process), int(image)) for process, image in map(str.split, lines)]


def temporaries(spec: DataSpec) -> list[Path]:
    return list(spec.store_root.glob(".*.preparing"))


def check_whole(spec: DataSpec) -> None:
    """Check that the cache is whole, and that nothing begun is left."""
    store = prepare(spec, How(verify=True))
    assert store.images[:][:, 0, 4, 4].tolist() == [*range(6), *range(40, 46)]
    assert store.labels.tolist() == [0] * 6 + [1] * 6
    assert not temporaries(spec) and not list(store.path.glob(".*"))


def test_folder_is_prepared_channels_first_with_labels(folder: Path, spec_of: SpecOf) -> None:
    store = prepare(spec_of(source="folder", path=folder, channels=3))
    assert store.images.shape == (12, 3, 8, 8)
    assert store.images[:][:, 1, 4, 4].tolist() == [*range(6), *range(40, 46)]
    assert store.labels.tolist() == [0] * 6 + [1] * 6
    assert (store.meta.classes, store.meta.folder) == (("cats", "dogs"), str(folder))
    assert sorted(file.name for file in store.path.iterdir()) == ["images.npy", "labels.npy", "meta.json"]
    images = store.path / "images.npy"
    made = images.stat().st_mtime_ns
    folder.rename(folder.with_name("moved"))  # a second time the source is not read
    again = prepare(spec_of(source="folder", path=folder, channels=3))
    assert (again.path, images.stat().st_mtime_ns) == (store.path, made)
    images.write_bytes(images.read_bytes()[:-1] + b"x")  # and damage is not repaired in silence
    with pytest.raises(DataError, match=r"images.npy has another checksum .*; delete .* and prepare again"):
        prepare(spec_of(source="folder", path=folder, channels=3))


def test_pixels_keep_their_places_and_bugs_of_a_source_are_not_swallowed(
    folder: Path, spec_of: SpecOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / "cats" / "0.png")
    store = prepare(spec_of(source="folder", path=folder, channels=3))
    assert (store.images[0].transpose(1, 2, 0) == pixels).all()
    monkeypatch.setattr(FolderSource, "read", Mock(side_effect=KeyError("a bug")))
    with pytest.raises(KeyError, match="a bug"):
        prepare(spec_of(source="folder", path=folder))


def test_unreadable_images_are_left_out_counted_and_named_up_to_a_limit(
    folder: Path, spec_of: SpecOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third call finds all files written, as a host does if the others had the unreadable images."""
    (folder / "cats" / "2.png").write_text("not an image")
    (folder / "dogs" / "a\nb\t.png").write_bytes(b"")
    refused = spec_of(source="folder", path=folder, max_bad_fraction=0.1)
    tolerant = spec_of(source="folder", path=folder, max_bad_fraction=0.2)
    with pytest.raises(DataError, match=r"fraction = 0.1, but 2 of 13 [^\n]* first cats/2.png[^\n]*$"):
        prepare(refused)
    assert not Recipes(refused).of().path.exists() and not temporaries(refused)
    interrupted(tolerant, monkeypatch)
    with pytest.raises(DataError, match=r"data.max_bad_fraction = 0.1, but 2 of 13 images"):
        prepare(refused)
    store = prepare(tolerant)
    assert (store.meta.skipped, store.meta.count) == (2, 11)
    assert store.images[:][:, 0, 4, 4].tolist() == [0, 1, 3, 4, 5, *range(40, 46)]  # header rewritten in place
    assert store.labels.tolist() == [0] * 5 + [1] * 6
    report = (store.path / "skipped.txt").read_text().splitlines()
    assert [line.split("\t")[0] for line in report] == ["cats/2.png", r"dogs/a\nb\t.png"]


def interrupted(spec: DataSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepare images until all their files are written, but not the cache."""
    with monkeypatch.context() as patch:
        patch.setattr(writing, "_describe", Mock(side_effect=OSError(5, "as if killed here")))
        with pytest.raises(DataError, match="as if killed here"):
            prepare(spec)


def test_preparation_prints_its_classes_with_their_numbers_of_images(
    folder: Path, spec_of: SpecOf, capfd: pytest.CaptureFixture[str]
) -> None:
    def line(path: Path = folder) -> str:
        shutil.rmtree(spec_of().store_root, ignore_errors=True)
        prepare(spec_of(source="folder", path=path, max_bad_fraction=0.2), How(progress=True))
        return capfd.readouterr().err.splitlines()[-1].partition(": ")[2]

    (folder / "cats" / "2.png").write_text("not an image")
    assert line() == "11 images, 1 left out (skipped.txt) in 2 classes: cats 5, dogs 6"
    assert line(folder / "dogs") == "6 images without classes"
    for number in range(20):
        shutil.copytree(folder / "dogs", folder / f"e{number:02}\n")
    assert line().endswith(r" in 22 classes: 5 to 6 each, cats 5, dogs 6, e00\n 6, ..., e19\n 6")


def test_pictures_beside_class_folders_have_no_class_and_that_is_said_before_each_training(
    folder: Path, spec_of: SpecOf, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("loose.png", "new.png"):
        shutil.copy(folder / "dogs" / "0.png", folder / name)
    spec = spec_of(source="folder", path=folder)
    for first in (True, False):
        store, err = prepare(spec, How(progress=True)), capfd.readouterr().err
        assert f"{folder}: 2 images are in no folder, 12 in 2 class folders; with unet.classes the 2 are" in err
        assert ("14 images in 2 classes: cats 6, dogs 6, 2 in none" in err) == first
    assert store.meta.classes == ("cats", "dogs")
    assert store.labels.tolist() == [0] * 6 + [1] * 6 + [2] * 2, "the U-Net's label for none is the number of classes"
    prepare(spec_of(source="folder", path=folder / "dogs"), How(progress=True))
    assert "no folder" not in capfd.readouterr().err, "without class folders no image lacks one"


def test_store_root_that_can_not_be_written_is_one_line(
    tmp_path: Path, spec_of: SpecOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    longest = Path(*["y" * 255] * 16)  # exists, and is too long for anything in it
    for root, line in ((tmp_path / "file", ".*--set data.store_root=FOLDER"), (longest, r"\(File name too long")):
        with pytest.raises(DataError, match=rf"data.store_root = .* can't be written {line}"):
            prepare(spec_of(store_root=root))


def test_full_disk_is_one_line_before_and_while_writing_and_finished_files_are_kept(
    spec: DataSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "SHARD_BYTES", 4 * 64)  # three files
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=12 * 64 - 1))
        with pytest.raises(DataError, match=r"data.store_root = .* has .* free, and the images need .*free some, or"):
            prepare(spec)
        assert not temporaries(spec)
    full = [None, None, OSError(28, "No space left on device")]  # two for each file
    with monkeypatch.context() as patch:
        patch.setattr(writing, "sync", Mock(side_effect=full))
        with pytest.raises(DataError, match=r"data.store_root = .* can't be written .No space left on device"):
            prepare(spec)
    (kept,) = temporaries(spec)
    assert not Recipes(spec).of().path.exists() and (kept / "shard.0.json").exists()
    before = (kept / "images.npy").stat().st_ino
    store = prepare(spec)
    assert store.meta.shards == (4, 4, 4) and (store.path / "images.npy").stat().st_ino == before
    names = ["images.1.npy", "images.2.npy", "images.npy", "labels.npy", "meta.json"]
    assert sorted(file.name for file in store.path.iterdir()) == names and not temporaries(spec)


@pytest.mark.parametrize("hosts", [1, 2])
def test_processes_that_prepare_the_same_store_at_once_end_with_one_good_store(
    spec: DataSpec, tmp_path: Path, hosts: int
) -> None:
    """On one host each image is read once; each of two hosts, which share no locks, begins with its own files."""
    reads = tmp_path / "reads"
    for process in slowly(2, spec, reads, 0.1, hosts, shard_bytes=2 * 64):
        out, err = process.communicate(timeout=PATIENCE_SECONDS)
        assert (process.returncode, out) == (0, "12\n"), err
    found = reads_in(reads)
    assert len({process for process, _ in found}) == 2  # they share the work
    if hosts == 1:
        assert sorted(image for _, image in found) == list(range(12))
    else:
        first = {process: image for process, image in reversed(found)}
        assert sorted(first.values()) == [0, 2], "the files of a host have its number"
    check_whole(spec)


def test_killed_prepare_leaves_no_cache_and_the_next_one_keeps_finished_files(spec: DataSpec, tmp_path: Path) -> None:
    reads = tmp_path / "reads"
    (process,) = slowly(1, spec, reads, 0.3, shard_bytes=2 * 64)
    wait_for(lambda: len(reads_in(reads)) >= 6 or process.poll() is not None)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == -signal.SIGKILL
    assert not Recipes(spec).of().path.exists() and len(temporaries(spec)) == 1
    reads.unlink()
    (process,) = slowly(1, spec, reads, 0.0, shard_bytes=2 * 64)
    out, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert (process.returncode, out) == (0, "12\n"), err
    assert [image for _, image in reads_in(reads)] == list(range(4, 12))
    check_whole(spec)


def test_finished_files_of_other_images_are_not_used(
    folder: Path, spec: DataSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(spec, monkeypatch)
    (folder / "dogs" / "0.png").write_bytes((folder / "dogs" / "5.png").read_bytes())
    assert prepare(spec).images[6][0, 4, 4] == 45 and not temporaries(spec)


@pytest.mark.parametrize(
    ("times", "line"),
    [
        (1, r"data.max_bad_fraction = 0.01, but 1 of 12"),
        (9, r"data.store_root = .* can't be written \(No such file or directory\)"),
    ],
)
def test_a_process_whose_work_another_has_given_up_meets_the_same_fault(
    times: int, line: str, folder: Path, spec_of: SpecOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It finds its folder removed, which is no fault of ``data.store_root`` unless it happens again and again."""
    write, left = writing._Shards._write_shard, [*range(times)]

    def without_folder(shards: writing._Shards, number: int) -> writing.Record:
        if left:
            left.pop()
            shutil.rmtree(shards.folder)
        return write(shards, number)

    (folder / "cats" / "2.png").write_text("not an image")
    monkeypatch.setattr(writing._Shards, "_write_shard", without_folder)
    with pytest.raises(DataError, match=line):
        prepare(spec_of(source="folder", path=folder))


def test_threads_decode_the_same_pixels_and_stop_with_their_reader(
    folder: Path, spec_of: SpecOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "cats" / "2.png").write_text("not an image")
    for number in range(100):
        shutil.copy(folder / "dogs" / f"{number % 6}.png", folder / "cats" / f"copy-{number}.png")
    spec = spec_of(source="folder", path=folder, max_bad_fraction=0.1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(1))
    one = prepare(spec)
    monkeypatch.setattr(decoding, "CHUNK_IMAGES", 5)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(3))
    many = prepare(spec.model_copy(update={"store_root": tmp_path / "many"}))
    assert many.meta == one.meta  # checksums and skipped images among it
    source, reads, closed = open_source(spec), list[int](), threading.Event()

    class Stopping(threading.Event):
        def set(self) -> None:
            super().set()
            closed.set()

    def read(i: int) -> bytes:
        reads.append(i)
        assert i < 5 or closed.wait(PATIENCE_SECONDS)  # later chunks begin, and wait for the end
        return (folder / "dogs" / "0.png").read_bytes()

    monkeypatch.setattr(source, "read", read)
    monkeypatch.setattr(decoding, "threading", SimpleNamespace(Event=Stopping))
    chunks = decoding.Decoding(source, (1, 8, 8), threads=2).chunks(range(112))
    assert len(next(chunks).images) == 5
    chunks.close()  # type: ignore[attr-defined]
    assert len(reads) <= 5 + 2, "each thread ends with its image"


def test_classes_have_the_names_of_the_cache_and_numbers_where_it_has_none(folder: Path, spec_of: SpecOf) -> None:
    spec = spec_of(source="folder", path=folder)
    assert class_names(spec, None, 2) == ["0", "1"] and not class_names(spec, None, None)
    prepare(spec)
    assert class_names(spec, None, 2) == ("cats", "dogs") and class_names(spec, None, 3) == ["0", "1", "2"]
    gone = spec_of(channels=4, autoencoder=folder / "gone")
    assert class_names(gone, None, 2) == ["0", "1"]


@pytest.mark.parametrize("change", ["replaced", "grown", "sorted anew"])
def test_a_replaced_source_gets_a_line_and_a_resumed_run_keeps_its_own(
    change: str, folder: Path, spec: DataSpec
) -> None:
    before = prepare(spec)
    if change == "sorted anew":
        (folder / "dogs").rename(folder / "wolves")
    for file in [*folder.glob("*/*")] if change == "replaced" else [folder / "cats" / "new.png"] * (change == "grown"):
        Image.new("L", (8, 8), 200).save(file)
    with pytest.raises(
        DataError, match=rf"^data.path = {spec.path} has other images than .* or delete {before.path} to"
    ):
        prepare(spec)
    assert prepare(spec, learned=before.meta.sha256).meta == before.meta == prepare(spec, How(verify=False)).meta
    shutil.rmtree(before.path)  # what the line says
    assert prepare(spec).meta != before.meta


def test_a_picture_of_a_large_source_that_changes_its_size_is_noticed(
    folder: Path, spec_of: SpecOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the content of few is compared."""
    monkeypatch.setattr(origin, "SMALL_BYTES", 0)
    monkeypatch.setattr(origin, "SAMPLED_IMAGES", 2)
    prepare(spec := spec_of(source="folder", path=folder))
    (picture := folder / "cats" / "3.png").write_bytes(picture.read_bytes() + b"x")
    with pytest.raises(DataError, match="has other images than"):
        prepare(spec)


def test_any_picture_of_a_small_source_that_changes_is_noticed_and_a_copy_is_none(folder: Path, spec: DataSpec) -> None:
    """Though its file keeps its size, and only some are read of a large source."""
    for number in range(SAMPLED_IMAGES + 8):
        Image.new("L", (8, 8), number).save(folder / f"{number:03}.bmp")
    made = prepare(spec)
    for path in folder.glob("*.bmp"):
        before = path.read_bytes()
        path.write_bytes(before[:-1] + b"x")
        with pytest.raises(DataError, match="has other images than"):
            prepare(spec)
        path.write_bytes(before)
    copied = folder.rename(folder.with_name("copied"))
    shutil.copytree(copied, folder, copy_function=shutil.copy)  # with times of now
    assert prepare(spec).meta == made.meta
    shutil.rmtree(folder)
    assert prepare(spec).meta == made.meta, "the source may be gone"


@pytest.mark.parametrize("damage", ["bytes", "record", "labels", "pipe"])
def test_a_file_of_a_killed_preparation_that_has_changed_is_written_again(
    damage: str, spec: DataSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = prepare(spec).meta
    shutil.rmtree(Recipes(spec).of().path)
    interrupted(spec, monkeypatch)
    (begun,) = temporaries(spec)
    images, record = begun / "images.npy", begun / "shard.0.json"
    if damage == "bytes":
        images.write_bytes(images.read_bytes()[:-1] + b"x")
    elif damage == "pipe":
        record.unlink()
        os.mkfifo(record)
    else:
        record.write_text("{" if damage == "record" else record.read_text().replace('"labels":[0,', '"labels":['))
    assert prepare(spec).meta == expected == prepare(spec, How(verify=True)).meta and temporaries(spec) == []


def test_each_file_of_a_folder_of_3000_has_a_look(tmp_path: Path) -> None:
    names = {f"{number}.png" for number in range(3000)}
    for name in names:
        (tmp_path / name).touch()
    assert origin.looks_of(tmp_path, whole=False).keys() == names | {"."}
