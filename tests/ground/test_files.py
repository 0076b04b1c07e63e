"""Files that are complete or as they were, and what killed writers leave."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddpm_ds.experiments.sweep import LOG, run_command
from ddpm_ds.ground.errors import OutputError
from ddpm_ds.ground.files import open_regular, temporary_beside, until_changed
from ddpm_ds.tracking import run_folder
from ddpm_ds.tracking.run_folder import EVENTS, METRICS, RunFolder
from tests.launching import hanging


def test_the_next_writer_of_an_output_removes_what_killed_ones_left(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    out, killed, running = tmp_path / "out[1].bin", ended.pid, os.getppid()
    names = [f".out[1].bin.writing-{owner}" for owner in (killed, running, "mine")]
    names += [f".other.writing-{killed}", f"out[1].bin.writing-{killed}"]
    for name in names:
        (tmp_path / name).touch()
    folder = tmp_path / "folder"
    (tmp_path / f".folder.writing-{killed}" / "unet").mkdir(parents=True)
    assert temporary_beside(out) == tmp_path / f".out[1].bin.writing-{os.getpid()}"
    assert temporary_beside(folder) == tmp_path / f".folder.writing-{os.getpid()}"
    assert {path.name for path in tmp_path.iterdir()} == set(names[1:])


def place(kind: str, path: Path) -> None:
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(path))
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()


REASONS = {
    "pipe": "it is a named pipe, not a file",
    "socket": "it is a socket, not a file",
    "device": "it is a device, not a file",
    "folder": "Is a directory",
}


@pytest.mark.parametrize("mode", ["rb", "wb", "ab", "ab+"])
@pytest.mark.parametrize("kind", REASONS)
def test_only_regular_files_are_opened_and_nothing_is_waited_for(
    kind: str, mode: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path must be short
    place(kind, Path("it"))
    with hanging(), pytest.raises(OSError) as caught:
        open_regular(Path("it"), mode)
    assert (caught.value.strerror, caught.value.filename) == (REASONS[kind], "it")


OPENED: dict[str, Callable[[Path], Any]] = {
    run_folder.LOCK: run_folder.claim_folder,
    METRICS: lambda run_dir: RunFolder(run_dir).append(METRICS, {}, 1),
    run_folder.RESUMES: lambda run_dir: RunFolder(run_dir).add_resume(run_dir / "images-1", []),
    LOG: lambda run_dir: run_command([sys.executable, "-c", ""], run_dir / LOG, []),
}


@pytest.mark.parametrize("name", OPENED)
def test_a_named_pipe_in_a_run_s_folder_is_one_line(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    refused = pytest.raises(OutputError, match=r"can't be written \(it is a named pipe, not a file\)")
    with hanging(), refused, run_folder.disk_errors_reported(tmp_path):
        OPENED[name](tmp_path)


def test_named_pipes_are_neither_waited_for_nor_written_to(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / EVENTS)
    with hanging():
        with pytest.raises(OSError, match="it is a named pipe, not a file"):
            run_folder.append_event(tmp_path / EVENTS, {"text": "a", "name": "b"})
        assert run_folder.unsent(tmp_path / EVENTS) is None
    os.mkfifo(tmp_path / METRICS)
    with hanging():
        assert RunFolder(tmp_path).points(METRICS) == []


def test_results_from_a_file_are_kept_until_it_changes(tmp_path: Path) -> None:
    file, done = tmp_path / "weights", list[Path]()

    @until_changed
    def work(path: Path) -> str:
        done.append(path)
        return path.read_text()

    file.write_text("one")
    os.utime(file, ns=(1, 1))
    assert [work(file), work(file)] == ["one", "one"] and len(done) == 1
    file.write_text("two")
    assert work(file) == "two" and len(done) == 2
    file.unlink()
    with pytest.raises(OSError):
        work(file)
