from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import ddpm_ds
from ddpm_ds.config.spec import DataSpec
from ddpm_ds.data.cache import CacheMeta
from ddpm_ds.data.prepare import cache_path, class_names, prepare
from ddpm_ds.data.sources.folder import FolderSource
from ddpm_ds.errors import DataError
from tests.launching import tiny_spec

SpecOf = Callable[..., DataSpec]

# Prepares the spec on its command line with slow reads, noting in a file that it reads. Waits for a line first.
SLOW_PREPARE = """
import os, sys, time, fcntl
from ddpm_ds.data import prepare, sources
from ddpm_ds.data.sources import folder
from ddpm_ds.config.spec import DataSpec

spec, reads, seconds, locks = DataSpec.model_validate_json(sys.argv[1]), sys.argv[2], float(sys.argv[3]), sys.argv[4]
prepare.READ_AHEAD = 1

class Slow(folder.FolderSource):
    def read(self, i):
        with open(reads, "a") as file:
            file.write(f"{os.getpid()}\\n")
        time.sleep(seconds)
        return super().read(i)

def no_locks(file, what):
    raise OSError("Function not implemented")

folder.FolderSource = Slow
if locks == "no":
    fcntl.flock = no_locks
print("ready", flush=True)
input()
print(len(prepare.prepare(spec)))
"""


def slowly(count: int, spec: DataSpec, reads: Path, seconds: float, locks: str = "yes") -> list[subprocess.Popen[str]]:
    """``count`` processes that begin to prepare at the same moment."""
    command = [sys.executable, "-c", SLOW_PREPARE, spec.model_dump_json(), str(reads), str(seconds), locks]
    home = Path(ddpm_ds.__file__).parents[1]
    pipe = subprocess.PIPE
    processes = [
        subprocess.Popen(command, cwd=home, stdin=pipe, stdout=pipe, stderr=pipe, text=True) for _ in range(count)
    ]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    return processes


def lines(file: Path) -> list[str]:
    return file.read_text().split() if file.exists() else []


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def temporaries(spec: DataSpec) -> list[Path]:
    return list(spec.store_root.glob(".*.preparing-*"))


def test_store_path_says_source_size_channels_and_tells_folders_apart(spec_of: SpecOf, tmp_path: Path) -> None:
    def name(**changes: object) -> str:
        return cache_path(spec_of(**changes)).name

    assert name() == "digits-8px-1ch"
    assert name(source="cifar10", image_size=32, channels=3) == "cifar10-32px-3ch"
    one, other = name(source="folder", path=tmp_path / "a"), name(source="folder", path=tmp_path / "b")
    assert one.startswith("folder-8px-1ch-") and len(one) == len("folder-8px-1ch-") + 8
    assert one != other
    assert one == name(source="folder", path=tmp_path / "b" / ".." / "a")


def test_folder_is_prepared_channels_first_with_labels(folder: Path, spec_of: SpecOf) -> None:
    store = prepare(spec_of(source="folder", path=folder, channels=3))
    assert store.images.shape == (12, 3, 8, 8)
    assert store.images[:, 1, 4, 4].tolist() == [*range(6), *range(40, 46)]
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
    tmp_path: Path, spec_of: SpecOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    (tmp_path / "one").mkdir()
    Image.fromarray(pixels).save(tmp_path / "one" / "a.png")
    store = prepare(spec_of(source="folder", path=tmp_path / "one", channels=3))
    assert (store.images[0].transpose(1, 2, 0) == pixels).all()

    def broken(self: object, i: int) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(FolderSource, "read", broken)
    with pytest.raises(KeyError, match="a bug"):
        prepare(spec_of(source="folder", path=tmp_path / "one"))


def test_unreadable_images_are_left_out_counted_and_named_up_to_a_limit(folder: Path, spec_of: SpecOf) -> None:
    (folder / "cats" / "2.png").write_text("not an image")
    (folder / "dogs" / "0.png").write_bytes(b"")
    refused = spec_of(source="folder", path=folder, max_bad_fraction=0.1)
    with pytest.raises(DataError) as caught:
        prepare(refused)
    message = str(caught.value)
    assert "data.max_bad_fraction = 0.1 is passed: 2 of 12" in message and "first cats/2.png" in message
    assert "\n" not in message and not cache_path(refused).exists() and not temporaries(refused)
    store = prepare(spec_of(source="folder", path=folder, max_bad_fraction=0.2))
    assert (store.meta.skipped, store.meta.count) == (2, 10)
    assert store.images[:, 0, 4, 4].tolist() == [0, 1, 3, 4, 5, 41, 42, 43, 44, 45]  # header rewritten in place
    assert store.labels.tolist() == [0] * 5 + [1] * 5
    report = (store.path / "skipped.txt").read_text().splitlines()
    assert [line.split("\t")[0] for line in report] == ["cats/2.png", "dogs/0.png"]


def test_store_root_that_can_not_be_written_is_one_line(tmp_path: Path, spec_of: SpecOf) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"data.store_root = .*/file can't be written .*--set data.store_root=FOLDER"):
        prepare(spec_of(store_root=tmp_path / "file"))


def test_full_disk_while_writing_is_one_line_and_leaves_nothing(
    spec_of: SpecOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(DataError, match=r"data.store_root = .* can't be written .No space left on device"):
        prepare(spec_of())
    assert not cache_path(spec_of()).exists() and not temporaries(spec_of())


@pytest.mark.parametrize("locks", ["yes", "no"])
def test_processes_that_prepare_the_same_store_at_once_end_with_one_good_store(
    folder: Path, spec_of: SpecOf, tmp_path: Path, locks: str
) -> None:
    spec, reads = spec_of(source="folder", path=folder), tmp_path / "reads"
    for process in slowly(2, spec, reads, 0.05, locks):
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (0, "12\n"), err
    assert len(set(lines(reads))) == (1 if locks == "yes" else 2)  # without locks both work, one's work counts
    assert len(prepare(spec)) == 12  # verifies
    assert not temporaries(spec)


def test_killed_prepare_leaves_no_store_and_the_next_one_cleans_up(
    folder: Path, spec_of: SpecOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, reads = spec_of(source="folder", path=folder), tmp_path / "reads"
    (process,) = slowly(1, spec, reads, 0.3)
    wait_for(lambda: len(lines(reads)) >= 2 or process.poll() is not None)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert not cache_path(spec).exists() and len(temporaries(spec)) == 1
    assert len(prepare(spec)) == 12
    assert not temporaries(spec)

    def no_locks(*_: object) -> None:
        raise OSError("Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_locks)  # then a temporary folder may belong to a living process
    shutil.rmtree(cache_path(spec))
    living = spec.store_root / f".{cache_path(spec).name}.preparing-other"
    living.mkdir()
    assert len(prepare(spec)) == 12 and living.exists()


def test_preparing_digits_does_not_import_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from ddpm_ds.data.prepare import prepare; "
        "from ddpm_ds.config.spec import DataSpec; "
        "prepare(DataSpec(source='digits', image_size=8, channels=1, store_root=Path(sys.argv[1]))); "
        "sys.exit('torch' in sys.modules)"
    )
    home = Path(ddpm_ds.__file__).parents[1]
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=home, timeout=60).returncode == 0


def test_classes_have_the_names_of_the_cache_and_numbers_where_it_has_none(tmp_path: Path) -> None:
    spec = tiny_spec(data={"source": "folder", "path": str(tmp_path / "pictures"), "store_root": str(tmp_path)})
    assert class_names(spec) == [str(label) for label in range(10)]
    cache_path(spec.data).mkdir()
    for names, expected in ((10, ("cat",) * 10), (9, [str(label) for label in range(10)])):
        meta = CacheMeta(
            format=1,
            source="folder",
            folder=None,
            count=0,
            shape=(1, 8, 8),
            classes=("cat",) * names,
            skipped=0,
            sha256={},
        )
        (cache_path(spec.data) / "meta.json").write_text(meta.model_dump_json())
        assert class_names(spec) == expected
    assert not class_names(tiny_spec(unet={"classes": None}, train={"label_drop": 0.0}))
