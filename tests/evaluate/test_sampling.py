"""Long drawings: going on after an interruption, and sharing by processes."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ddpm_ds.errors import OutputError
from ddpm_ds.evaluate import sampling
from ddpm_ds.evaluate.draw import draw
from ddpm_ds.evaluate.sampling import draw_many
from tests.evaluate.planted import FAST, FAST_SAMPLER, trained_of
from tests.launching import REPOSITORY, free_port, launch, tiny_spec

SCRIPT = REPOSITORY / "launch" / "sample.py"


def contents(out: Path) -> dict[str, bytes]:
    """Every file of an output, which is a file or a folder of files."""
    return {path.name: path.read_bytes() for path in (out.iterdir() if out.is_dir() else [out])}


@pytest.mark.parametrize("name", ["x.npz", "x.png", "pngs"])
def test_what_was_interrupted_goes_on_where_it_was(
    name: str, tmp_path: Path, sample: Callable[..., str], watch_drawing: Callable[..., list[int]]
) -> None:
    arguments = ("--count", 10, "--batch-images", 3, "--labels", "0,1")
    sample(*arguments, "--out", tmp_path / "through" / name)
    watch_drawing(2, KeyboardInterrupt())
    said = sample(*arguments, "--out", tmp_path / name, code=130)
    assert said == "interrupted: 6 of 10 images are kept; the same command goes on from there\n"
    drawn = watch_drawing()
    said = sample(*arguments, "--out", tmp_path / name)
    assert said.startswith("6 of 10 images are there from before\n") and drawn == [6, 7, 8, 9]
    assert contents(tmp_path / name) == contents(tmp_path / "through" / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([name, "through"])


def test_a_killed_process_leaves_what_it_had(planted: Path, tmp_path: Path, sample: Callable[..., str]) -> None:
    out, partial = tmp_path / "x.npz", tmp_path / ".x.npz.partial"
    arguments = ["--count", "60", "--batch-images", "2", "--steps", "12", "--out"]
    command = [sys.executable, "-m", "ddpm_ds.cli.main", "sample", str(planted), *FAST, *arguments, str(out)]
    process = subprocess.Popen(command, cwd=REPOSITORY)
    try:
        wait_until(lambda: len(list(partial.glob("*.npy"))) >= 3, process)
    finally:
        process.kill()
        process.wait()
    assert not out.exists()
    assert re.match(r"\d+ of 60 images are there from before\n", sample(*arguments, out))
    sample(*arguments, tmp_path / "through.npz")
    assert out.read_bytes() == (tmp_path / "through.npz").read_bytes()


def wait_until(condition: Callable[[], bool], *processes: subprocess.Popen[Any], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline and all(process.poll() is None for process in processes)
        time.sleep(0.02)


def test_an_interrupted_drawing_is_not_mixed_with_another(
    tmp_path: Path, sample: Callable[..., str], watch_drawing: Callable[..., list[int]]
) -> None:
    arguments = ("--count", 10, "--batch-images", 3, "--out", tmp_path / "x.npz")
    watch_drawing(1, KeyboardInterrupt())
    sample(*arguments, code=130)
    partial = tmp_path / ".x.npz.partial"
    kept = {path.name: path.read_bytes() for path in partial.iterdir()}
    watch_drawing()
    for change, name in (
        (("--seed", 1), "seed"),
        (("--steps", 4), "sampler.steps"),
        (("--labels", 3), "labels"),
        (("--weights", "raw"), "weights"),
        (("--precision", "bf16"), "precision"),
        (("--first", 1), "first"),
        (("--batch-images", 4), "batch_images"),
    ):
        said = sample(*arguments, *change, code=2)
        assert f"{partial} was drawn with other {name}; remove it, or name another --out" in said
    assert {path.name: path.read_bytes() for path in partial.iterdir()} == kept
    sample(*arguments)


def test_a_drawing_without_a_finished_batch_binds_nobody(
    tmp_path: Path, sample: Callable[..., str], watch_drawing: Callable[..., list[int]]
) -> None:
    for name in ("x.npz", "pngs"):
        watch_drawing(0, KeyboardInterrupt())
        sample("--count", 2, "--out", tmp_path / name, code=130)
        watch_drawing()
        sample("--count", 2, "--seed", 1, "--out", tmp_path / name)


@pytest.mark.parametrize("name", ["x.npz", "x.png"])
def test_a_finished_file_is_there_already_or_refused(
    name: str, planted: Path, tmp_path: Path, sample: Callable[..., str], watch_drawing: Callable[..., list[int]]
) -> None:
    out = tmp_path / name
    sample("--count", 4, "--out", out)
    content, drawn = out.read_bytes(), watch_drawing()
    assert sample("--count", 4, "--out", out, "--batch-images", 2).startswith(f"{out}: already there, 4 images")
    (tmp_path / "moved").symlink_to(planted)
    assert "already there" in sample("--count", 4, "--out", out, run_dir=tmp_path / "moved")
    assert f"{out} was drawn with other count; remove it" in sample("--count", 5, "--out", out, code=2)
    assert "other seed, sampler.eta;" in sample("--count", 4, "--seed", 1, "--eta", 0, "--out", out, code=2)
    assert drawn == [] and out.read_bytes() == content


def test_a_folder_takes_more_images_of_the_same_recipe(
    tmp_path: Path, sample: Callable[..., str], watch_drawing: Callable[..., list[int]]
) -> None:
    out = tmp_path / "pngs"
    sample("--count", 4, "--out", out)
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("*.png")}
    drawn = watch_drawing()
    assert "already there" in sample("--count", 3, "--out", out)
    assert sample("--count", 7, "--batch-images", 5, "--out", out).startswith("4 of 7 images are there from before\n")
    sample("--count", 2, "--first", 20, "--out", out)
    assert drawn == [4, 5, 6, 20, 21] and len(list(out.glob("*.png"))) == 9
    assert {name: (out / name).stat().st_mtime_ns for name in before} == before
    assert "other seed" in sample("--count", 7, "--seed", 1, "--out", out, code=2)


def test_a_full_disk_is_one_line_and_what_is_drawn_is_kept(
    tmp_path: Path, sample: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("--count", 6, "--batch-images", 2, "--out", tmp_path / "x.npz")
    write_file = sampling.write_file

    def full(path: Path, content: bytes) -> None:
        if path.name == "000000004.npy":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_file(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(sampling, "write_file", full)
        said = sample(*arguments, code=2)
    assert f"{tmp_path / '.x.npz.partial'} can't be written (No space left on device)" in said
    assert sample(*arguments).startswith("4 of 6 images are there from before")


def test_a_batch_beyond_the_devices_memory_is_one_line(
    tmp_path: Path, sample: Callable[..., str], watch_drawing: Callable[..., list[int]]
) -> None:
    watch_drawing(0, torch.OutOfMemoryError("CUDA out of memory"))
    said = sample("--count", 6, "--out", tmp_path / "x.npz", code=2)
    assert "--batch-images = 64: the device has no memory for so many images at once; use fewer" in said
    watch_drawing()
    sample("--count", 6, "--batch-images", 2, "--out", tmp_path / "x.npz")


def test_many_images_for_other_programs_are_kept_in_a_store(
    tmp_path: Path, watch_drawing: Callable[..., list[int]]
) -> None:
    weights, store = trained_of(tiny_spec()), tmp_path / "store"

    def many(count: int = 7, batch_images: int = 3, seed: int = 2) -> np.ndarray:
        return draw_many(
            weights,
            FAST_SAMPLER,
            count=count,
            first=1,
            seed=seed,
            labels=range(10),
            batch_images=batch_images,
            store=store,
            progress=False,
        )

    watch_drawing(1, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        many()
    drawn = watch_drawing()
    with pytest.raises(OutputError, match="was drawn with other batch_images"):
        many(batch_images=4)
    images = many()
    assert drawn == [4, 5, 6, 7] and isinstance(images, np.memmap)
    index = torch.arange(1, 8)
    assert images.tolist() == draw(weights, FAST_SAMPLER, index, labels=index % 10, seed=2).tolist()
    assert sorted(path.name for path in store.iterdir()) == ["images.npy", "sampling.json"]
    assert many(batch_images=4).tolist() == images.tolist() and len(drawn) == 4
    with pytest.raises(OutputError, match="was drawn with other seed, count"):
        many(count=8, seed=3)


def start_ranks(*arguments: str) -> list[subprocess.Popen[str]]:
    """Two processes that share a drawing, started as a launcher would."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    return [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), *arguments],
            env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank), "PYTHONPATH": str(REPOSITORY)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]


@pytest.mark.launch
def test_a_lost_process_ends_the_other_and_two_new_ones_draw_the_same_file_as_one(
    planted: Path, tmp_path: Path, sample: Callable[..., str]
) -> None:
    out, partial = tmp_path / "x.npz", tmp_path / ".x.npz.partial"
    arguments = ["--steps", "12", "--count", "99", "--batch-images", "2", "--out"]
    ranks = start_ranks(str(planted), *FAST, *arguments, str(out))

    def kept(rank: int) -> set[str]:
        return {path.name for path in partial.glob("*.npy") if int(path.stem) // 2 % 2 == rank}

    try:
        wait_until(lambda: bool(kept(0) and kept(1)), *ranks)
        ranks[1].kill()
        ranks[1].wait()
        lost = kept(1)
        _, said = ranks[0].communicate(timeout=120)
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    assert ranks[0].returncode == 76 and "ddpm_ds: error: another process was lost" in said
    assert len(kept(0)) == 25 and kept(1) == lost and not out.exists()

    done = launch(2, SCRIPT, str(planted), *FAST, *arguments, str(out))
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"\d+ of 99 images are there from before", done.stdout)) == 1
    assert done.stdout.count("99 images by ddim in 12 steps") == 1 and not partial.exists()
    sample(*arguments, tmp_path / "one.npz")
    assert out.read_bytes() == (tmp_path / "one.npz").read_bytes()


@pytest.mark.launch
def test_two_processes_fill_a_folder_as_one_does(planted: Path, tmp_path: Path, sample: Callable[..., str]) -> None:
    arguments = ("--count", "11", "--batch-images", "3", "--labels", "0,1", "--out")
    for process in start_ranks(str(planted), *FAST, *arguments, str(tmp_path / "two")):
        _, said = process.communicate(timeout=120)
        assert process.returncode == 0, said
    sample(*arguments, tmp_path / "one")
    assert len(contents(tmp_path / "one")) == 12 and contents(tmp_path / "two") == contents(tmp_path / "one")


@pytest.mark.launch
def test_two_processes_say_an_error_once(planted: Path, tmp_path: Path) -> None:
    done = launch(2, SCRIPT, str(planted), "--labels", "11", "--out", str(tmp_path / "x.png"))
    assert done.returncode == 2
    assert (done.stdout + done.stderr).count("ddpm_ds: error: --labels 11 is out of range") == 1
    assert not any(tmp_path.iterdir())
