"""Writing beside training: complete or not there, whatever fails; and read back the same from any layout."""

import errno
import os
import re
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ddpm_ds.checkpoint import folder, reader
from ddpm_ds.checkpoint import writer as writer_module
from ddpm_ds.checkpoint.folder import names
from ddpm_ds.checkpoint.manifest import Description, read_manifest
from ddpm_ds.checkpoint.reader import Reader
from ddpm_ds.checkpoint.writer import Writer
from ddpm_ds.data.cache import by_field, shard_name
from ddpm_ds.ground import files
from ddpm_ds.ground.files import MOST_RECORD_BYTES
from tests.checkpoint.saving import check, describe, fragments_of, ranks, save, scalars, total
from tests.launching import PATIENCE_SECONDS, wait_for


def left_over(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


def test_begin_does_not_wait_for_the_disk_and_training_may_then_change_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, original = threading.Event(), os.fsync

    def slow(descriptor: int) -> None:
        assert begun.wait(PATIENCE_SECONDS)
        original(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    fragments, description, state = fragments_of(5, 0, total()), describe(5), scalars(5)
    for fragment in fragments:
        fragment.values.requires_grad_()  # parameters are taken without their graph
    writer = Writer(tmp_path, log=print)
    writer.begin("all", fragments, description, state)
    for fragment in fragments:
        fragment.values.detach().fill_(float("nan"))
    state["images_seen"] = description.spec["name"] = 6
    begun.set()
    assert writer.wait()
    check(tmp_path / "images-000000005", 5)
    assert Reader(tmp_path / "images-000000005").manifest.spec["name"] == "test"
    for images, shapes in ((6, {"w": (20,)}), (7, {"w": (50,)}), (8, {"w": (30,)})):  # host memory fits all sizes
        writer.begin("all", fragments_of(images, 0, 50, shapes), describe(images, shapes), scalars(images))
        assert writer.wait()
        check(tmp_path / f"images-{images:09}", images, shapes)


@pytest.mark.parametrize("files", [95_000, 190_000])
def test_a_run_on_images_in_many_files_writes_a_small_manifest(tmp_path: Path, files: int) -> None:
    sums = {shard_name(number): f"{number:064x}" for number in range(files)}
    about = Description.model_validate(describe(2).model_dump() | {"data_sha256": sums})
    writers = ranks(tmp_path, 2, print)
    for rank, writer in enumerate(writers):
        writer.begin(f"rank{rank}", fragments_of(2, 50 * rank, [50, total()][rank]), about, scalars(2))
    assert all([writer.wait() for writer in writers])
    written = tmp_path / "images-000000002"
    check(written, 2)
    assert (written / "manifest.json").stat().st_size < 10_000
    assert read_manifest(written).data_sha256 == by_field(sums), "also what an earlier version wrote file by file"


def test_what_could_not_be_read_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said, written = list[str](), list[Path]()
    monkeypatch.setattr(writer_module, "write_tensors", lambda path, *more: written.append(path))
    writer = Writer(tmp_path, log=said.append)
    large = describe(2).model_copy(update={"spec": {"name": "x" * MOST_RECORD_BYTES}})
    writer.begin("all", fragments_of(2, 0, total()), large, scalars(2))
    assert not writer.wait() and not written
    words = (
        r"^checkpoint images-000000002 was not saved: 16,\d{3},\d{3} bytes, and 16,777,216 can be read \(manifest.json"
    )
    assert re.match(words, said[0]) and len(said) == 1 and left_over(tmp_path) == []


def test_checksums_are_those_of_the_files_in_pieces_of_any_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, size in enumerate((1, 7, 64, 2**26), start=1):
        monkeypatch.setattr(reader, "WRITTEN_BYTES", size)
        save(tmp_path, number)
        check(tmp_path / f"images-{number:09}", number)


class OnDevice(torch.Tensor):
    """A tensor that calls itself one of a CUDA device."""

    is_cuda = True


@pytest.fixture
def page_locked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the page-locked memory that is taken; a stand-in for CUDA, whose copies are late."""
    found, late, make = list[int](), list[Callable[[], object]](), torch.empty

    def empty(*shape: int, pin_memory: bool = False, **options: Any) -> Tensor:
        made = make(*shape, **options)
        if pin_memory:
            found.append(made.nbytes)
        return made

    class Event:
        def record(self, stream: object) -> None: ...

        def synchronize(self) -> None:
            while late:
                late.pop(0)()

    copy = Tensor.copy_

    def copy_(self: Tensor, other: Tensor, non_blocking: bool = False) -> Tensor:
        if non_blocking:
            late.append(lambda: copy(self, other.as_subclass(Tensor)))
            return self
        return copy(self, other)

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(Tensor, "copy_", copy_)
    return found


@pytest.mark.parametrize("staging", [4, 16, 64, 2**28])
def test_values_of_a_device_go_through_two_small_buffers(
    staging: int, page_locked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SDXL's 38.3 GiB would take 64 GiB, if all were page-locked."""
    monkeypatch.setattr(writer_module, "STAGING_BYTES", staging)
    copy = writer_module.HostCopy()
    for count in (3, 7, 5):
        floats = [torch.randn(size) for size in (1, 4, count, 19, 2)]
        codes = [torch.arange(count, dtype=torch.uint8), torch.arange(5, dtype=torch.uint8)]
        pieces = [piece.as_subclass(OnDevice) if place % 3 else piece for place, piece in enumerate(floats + codes)]
        copy.take(pieces)
        wanted = b"".join(piece.numpy().tobytes() for piece in floats + codes)
        assert copy.raw().tobytes() == wanted
    assert page_locked[:2] == [min(staging, 4 * 29 + 8)] * 2 and len(page_locked) <= 4


def test_a_copy_for_which_there_is_no_memory_costs_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    said, make = list[str](), torch.empty

    def empty(count: int, **options: Any) -> Tensor:
        if count and refused:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory")
        return make(count, **options)

    monkeypatch.setattr(torch, "empty", empty)
    writers = ranks(tmp_path, 2, said.append)
    for refused in (True, False):
        for rank in (1, 0):
            refused = refused and rank == 1
            writers[rank].begin(f"rank{rank}", fragments_of(2, 50 * rank, [50, total()][rank]), describe(2), scalars(2))
        assert [writer.wait() for writer in writers] == [not said] * 2 or len(said) == 1
    (line,) = said
    assert line.startswith("checkpoint images-000000002 was not saved: rank 1: the host has no 0.0 MiB left"), line
    check(tmp_path / "images-000000002", 2)


def test_a_slow_rank_is_waited_for_while_its_file_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock stands still until rank 0 may look again at files that have grown: a busy machine changes nothing."""
    said, now, looked = list[str](), [0.0], list[Path]()
    size_of = folder._size_of

    def counted(scratch: Path) -> int:
        looked.append(scratch)
        return size_of(scratch)

    monkeypatch.setattr(folder, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep))
    monkeypatch.setattr(folder, "_size_of", counted)
    first, second = ranks(tmp_path, 2, said.append, time_limit_seconds=10)
    first.begin("rank0", fragments_of(2, 0, 50), describe(2), scalars(2))
    wait_for(lambda: len(looked) == 1)
    growing = looked[0] / "rank1.safetensors"
    for step in range(1, 7):
        growing.write_bytes(b"x" * step)
        now[0] += 11
        wait_for(lambda: len(looked) == 1 + step)  # noqa: B023
    assert not said, "six times as long as it would wait for a file that does not grow"
    second.begin("rank1", fragments_of(2, 50, total()), describe(2), scalars(2))
    assert first.wait() and second.wait() and not said
    check(tmp_path / "images-000000002", 2)


def test_a_straggler_of_an_earlier_start_does_not_write_into_this_one(tmp_path: Path) -> None:
    """A host that was paused, or whose network came back, writes into the folder of its own start."""
    said = list[str]()
    old, new = (ranks(tmp_path, 2, said.append) for _ in range(2))
    old[1].begin(
        "rank1",
        [fragment._replace(values=fragment.values + 1) for fragment in fragments_of(2, 50, total())],
        describe(2),
        scalars(2),
    )
    old[1].wait()
    (left,) = left_over(tmp_path)
    new[0].begin("rank0", fragments_of(2, 0, 50), describe(2), scalars(2))
    wait_for(lambda: left not in left_over(tmp_path) and len(left_over(tmp_path)) == 1)
    old[1]._completion.attempt = 0
    old[1].begin("rank1", [], describe(2), scalars(2))
    new[1].begin("rank1", fragments_of(2, 50, total()), describe(2), scalars(2))
    assert new[0].wait() and new[1].wait() and not said
    check(tmp_path / "images-000000002", 2)


def test_a_folder_that_can_not_be_flushed_is_said_once_and_no_checkpoint_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Some file systems in user space, and of Windows shares, refuse to."""
    fsync, number = os.fsync, errno.EINVAL

    def refuses_folders(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refuses_folders)
    files.print_once.cache_clear()
    assert save(tmp_path, 1) == save(tmp_path, 2) == []
    check(tmp_path / "images-000000002", 2)
    words = "this file system can't flush folders (Invalid argument): a power cut may undo the last change\n"
    assert capsys.readouterr().err == words
    number = errno.EIO
    assert "was not saved: Input/output error" in save(tmp_path, 3)[0], "a disk that fails"


def test_a_rank_whose_part_does_not_come_costs_one_line(tmp_path: Path) -> None:
    save(tmp_path, 1)
    said: list[str] = []
    writer, *_ = ranks(tmp_path, 3, said.append, time_limit_seconds=0.2)
    writer.begin("all", fragments_of(2, 0, total()), describe(2), {})
    writer.begin("all", fragments_of(3, 0, total()), describe(3), {})
    assert len(said) == 1, "a second begin waits for the first"
    assert not writer.wait()
    assert said[:1] == [
        "checkpoint images-000000002 was not saved: rank 1, rank 2 gave no answer in 0.2 s; "
        "images-000000001 stays, only the time since is at risk"
    ]
    assert names(tmp_path) == ["images-000000001"] and left_over(tmp_path) == []


def test_rank_0_reports_the_error_of_another_rank(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("is in the way")
    (line,) = save(tmp_path / "file", 1)
    assert line.startswith("checkpoint images-000000001 was not saved: ") and line.endswith("there is no earlier one")
    (tmp_path / "file").unlink()
    said: list[str] = []
    writers = ranks(tmp_path, 2, said.append)
    for rank, part in enumerate(("stage0", "no-such-folder/stage1")):
        writers[rank].begin(part, fragments_of(2, 50 * rank, 50 if rank == 0 else total()), describe(2), {})
    assert [writer.wait() for writer in writers] == [False, False]
    assert said == [
        "checkpoint images-000000002 was not saved: rank 1: No such file or directory (stage1.safetensors); "
        "there is no earlier one"
    ]
    assert left_over(tmp_path) == []


@pytest.mark.parametrize(
    ("start", "stop", "words"), [(48, 82, "written twice"), (52, 82, "not written"), (50, 50, "not written")]
)
def test_fragments_that_overlap_or_leave_gaps_are_no_checkpoint(
    tmp_path: Path, start: int, stop: int, words: str
) -> None:
    said: list[str] = []
    writers = ranks(tmp_path, 2, said.append)
    writers[0].begin("rank0", fragments_of(1, 0, 50), describe(1), {})
    writers[1].begin("rank1", fragments_of(1, start, stop), describe(1), {})
    assert [writer.wait() for writer in writers] == [False, True]
    assert len(said) == 1 and words in said[0] and "of 2.weight" in said[0]
    assert names(tmp_path) == [] and left_over(tmp_path) == []


def test_a_failing_sync_at_any_moment_keeps_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ENOSPC from every fsync in turn: nothing raises, one line is logged, every checkpoint is whole."""
    original, calls, failing = os.fsync, 0, -1

    def fsync(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls - 1 == failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    assert save(tmp_path / "undisturbed", 1, cuts=()) == []
    syncs, outcomes = calls, set()
    for failing in range(syncs):
        folder = tmp_path / str(failing)
        calls = -1000
        save(folder, 1, cuts=())
        calls = 0
        said = save(folder, 2, cuts=(), keep_last=1)
        assert len(said) == 1 and "No space left on device" in said[0]
        outcomes.add(said[0].split(":")[0])
        for name in (kept := names(folder)):
            check(folder / name, int(name[-1]))
        assert kept and (folder / "latest").read_text().strip() in kept
        assert left_over(folder) in ([], [".latest.tmp"])
    assert outcomes == {
        "checkpoint images-000000002 was not saved",
        "checkpoint images-000000002 is saved, but older ones or `latest` could not be changed",
    }


def test_everything_is_on_the_disk_before_the_name_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By inode: a power cut after the rename finds every file of the checkpoint, after `latest` also the name."""
    fsync, rename = os.fsync, Path.rename
    synced: list[int] = []

    def logged_fsync(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def logged_rename(self: Path, target: Path) -> Path:
        entries = {path.name for path in self.iterdir()}
        assert entries == {"manifest.json", "state.json", "rank0.safetensors", "rank1.safetensors"}
        assert {path.stat().st_ino for path in self.iterdir()} <= set(synced)
        assert synced[-1] == self.stat().st_ino
        synced.clear()
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", logged_fsync)
    monkeypatch.setattr(Path, "rename", logged_rename)
    assert save(tmp_path, 1) == []
    folder, latest = tmp_path.stat().st_ino, (tmp_path / "latest").stat().st_ino
    assert synced == [folder, latest, folder] and (tmp_path / "latest").read_text() == "images-000000001\n"


def test_a_rename_that_fails_gives_the_replaced_checkpoint_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if self.name.startswith(".writing-"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    (said,) = save(tmp_path, 1, cuts=(7,))
    assert "Input/output error; images-000000001 stays" in said
    check(tmp_path / "images-000000001", 1)
    assert left_over(tmp_path) == []


def test_a_folder_that_can_not_be_listed_is_the_reason_why_a_checkpoint_was_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the run would end as if its last checkpoint were there."""
    said: list[str] = []
    writer = Writer(tmp_path, log=said.append)

    def refused(*_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(tmp_path))

    monkeypatch.setattr(Path, "glob", refused)
    writer.begin("all", fragments_of(1, 0, total()), describe(1), scalars(1))
    assert not writer.wait()
    assert said == [writer.why_not] and writer.why_not.startswith(
        "checkpoint images-000000001 was not saved: Permission denied"
    )


def test_leftovers_of_a_slow_rank_are_removed_by_the_next_checkpoint(tmp_path: Path) -> None:
    said: list[str] = []
    writers = ranks(tmp_path, 2, said.append, time_limit_seconds=0.1)
    writers[0].begin("rank0", fragments_of(1, 0, 50), describe(1), {})
    assert not writers[0].wait()
    writers[1].begin("rank1", fragments_of(1, 50, total()), describe(1), {})  # too late: rank 0 has given up
    assert writers[1].wait()
    (left,) = left_over(tmp_path)
    assert re.fullmatch(r"\.writing-images-000000001\.[0-9a-f]{8}\.1", left)
    for rank, start, stop in ((1, 50, total()), (0, 0, 50)):  # rank 0 waits for nobody
        writers[rank].begin(f"rank{rank}", fragments_of(1, start, stop), describe(1), scalars(1))
        assert writers[rank].wait()
    assert left_over(tmp_path) == []
    check(tmp_path / "images-000000001", 1)
