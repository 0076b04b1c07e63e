"""The folder of checkpoints: names, keep rules, replacing, what a run leaves behind, and cleaning up."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpm_ds.checkpoint import manifest as manifest_module
from ddpm_ds.checkpoint.folder import agreed, check_shared, checkpoint_name, clean, names, newest, to_delete
from ddpm_ds.checkpoint.reader import Reader
from ddpm_ds.ground.errors import CheckpointError, NoCheckpointError, OutputError
from tests.checkpoint.saving import check, newest_good, save


def named(*images: int) -> list[str]:
    return [checkpoint_name(count) for count in images]


@pytest.mark.parametrize(
    ("images", "keep_last", "keep_every", "kept"),
    [
        ([10, 20, 30], None, 10, [10, 20, 30]),
        ([10, 20, 30], 2, None, [20, 30]),
        ([10, 20, 30], 5, None, [10, 20, 30]),
        ([10, 20, 30, 40, 50], 1, 20, [20, 40, 50]),
        ([10, 25, 30, 41, 59, 60], 1, 20, [25, 41, 60]),
        ([10, 70], 1, 20, [70]),
        ([5], 1, 20, [5]),
        ([], 1, 20, []),
    ],
)
def test_keep_rules(images: list[int], keep_last: int | None, keep_every: int | None, kept: list[int]) -> None:
    deleted = [name for name in named(*images) if name not in named(*kept)]
    assert to_delete(named(*images), keep_last, keep_every) == deleted


@given(st.sets(st.integers(1, 500), min_size=1), st.integers(1, 4), st.integers(1, 100))
def test_keep_rules_applied_at_every_checkpoint_keep_what_they_keep_at_the_end(
    images: set[int], keep_last: int, keep_every: int
) -> None:
    everything, present = named(*sorted(images)), list[str]()
    for name in everything:
        present.append(name)
        gone = to_delete(present, keep_last, keep_every)
        present = [kept for kept in present if kept not in gone]
        assert present[-1] == name
    assert present == [name for name in everything if name not in to_delete(everything, keep_last, keep_every)]


def test_names_are_sorted_and_the_newest_is_none_without_any_and_an_error_if_all_are_damaged(tmp_path: Path) -> None:
    said: list[str] = []
    complete = ["images-000000020", "images-000000100", "images-1000000000000"]
    for name in (*reversed(complete), "images-x", ".writing-images-000000030.1"):
        (tmp_path / "other" / name).mkdir(parents=True)
    (tmp_path / "other" / "images-000000040").write_text("")
    assert names(tmp_path / "other") == complete and names(tmp_path / "missing") == []
    assert newest_good(tmp_path / "missing", said.append) is None
    save(tmp_path, 1)
    (tmp_path / "latest").write_text("images-000000009\n")  # a hint that nothing depends on
    assert newest_good(tmp_path, print) == tmp_path / "images-000000001"
    (tmp_path / "images-000000001" / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"none of the 1 checkpoints in .* can be used"):
        newest_good(tmp_path, said.append)
    assert len(said) == 1


def test_checkpoints_beyond_the_one_written_are_set_aside_and_never_count_for_the_keep_rules(tmp_path: Path) -> None:
    for images in (10, 20, 30):
        save(tmp_path, images)
    (said,) = save(tmp_path, 15, keep_last=1)  # resumed from 10: 20 and 30 are of another course, or damaged
    assert said.endswith("renamed to abandoned-images-000000020, abandoned-images-000000030")
    assert names(tmp_path) == named(15) and newest_good(tmp_path, print) == tmp_path / named(15)[0]
    save(tmp_path, 20)
    assert len(save(tmp_path, 18)) == 1  # abandoned a second time under the same name
    assert names(tmp_path) == named(15, 18)


def test_clean_removes_what_killed_processes_left_and_undoes_or_finishes_a_replacing(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / "images-000000001" / "rank0.safetensors").write_bytes(b"damaged")
    assert save(tmp_path, 1, cuts=(3, 9)) == []  # replaces one of the same number of images
    check(tmp_path / "images-000000001", 1)
    for name in (".writing-images-000000002.7", ".deleting-images-000000000"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank0.safetensors").write_text("half")
    clean(tmp_path)
    clean(tmp_path / "missing")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["images-000000001", "latest"]
    (tmp_path / "images-000000001").rename(tmp_path / ".replaced-images-000000001")
    clean(tmp_path)
    check(tmp_path / "images-000000001", 1)
    (tmp_path / ".replaced-images-000000001").mkdir()
    clean(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["images-000000001", "latest"]


@pytest.mark.parametrize(
    ("folders", "words"),
    [
        ("here here here", ""),
        ("here here there", "here of host a is not seen on b; name a --run-dir that all hosts share"),
        ("missing missing missing", "can't be written; make it writable, or name another --run-dir"),
    ],
)
def test_hosts_that_see_other_folders_are_named_on_all_ranks(folders: str, words: str, tmp_path: Path) -> None:
    """Each rank is a thread with a folder of its own; one folder that can't be written is its own line."""
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    barrier, values = threading.Barrier(3), dict[int, Any]()

    def look(rank: int) -> str:
        def gather(value: Any) -> list[Any]:
            values[rank] = value
            barrier.wait()
            found = [values[other] for other in range(3)]
            barrier.wait()
            return found

        try:
            check_shared(tmp_path / folders.split()[rank], rank, ["a", "a", "b"], gather)
        except OutputError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(3) as ranks:
        lines = list(ranks.map(look, range(3)))
    assert all(words.removeprefix("here") in line and bool(line) == bool(words) for line in lines), lines
    assert not [*(tmp_path / "here").iterdir(), *(tmp_path / "there").iterdir()]


def test_what_rank_0_finds_is_what_all_ranks_go_on_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is hashed once for all ranks, and again by a rank that sees another one, in a stale cache for example."""
    save(tmp_path, 3)
    hashed, sha256_of = list[str](), manifest_module.sha256_of

    def noted(path: Path, bar: Any = None) -> str:
        hashed.append(path.name)
        return sha256_of(path, bar)

    monkeypatch.setattr(manifest_module, "sha256_of", noted)
    answers: list[Any] = []

    def gather(value: Any) -> list[Any]:
        answers.append(value)
        return answers[:1]

    found = [agreed(partial(newest, tmp_path, print), rank, gather) for rank in range(2)]
    assert found[0] == found[1] is not None and found[1].verified
    for name in found[1].manifest.parameters:
        Reader(found[1].path, found[1].manifest, verified=True).read("ema", name)
    assert sorted(hashed) == sorted(found[1].manifest.files)
    file = tmp_path / checkpoint_name(3) / "rank0.safetensors"
    os.utime(file, (0, 0))
    there = agreed(partial(newest, tmp_path, print), 1, gather)
    assert there is not None and not there.verified
    Reader(there.path, there.manifest, verified=there.verified).read("ema", "0.conv.weight")
    assert hashed.count(file.name) == 2
    file.write_bytes(b"damaged")
    for one in (found[1], there):
        with pytest.raises(CheckpointError, match="has 7 bytes"):
            Reader(one.path, one.manifest, verified=one.verified).read("ema", "0.conv.weight")
    answers.clear()
    for rank in range(2):
        with pytest.raises(NoCheckpointError, match="none of the 1 checkpoints"):
            agreed(partial(newest, tmp_path, lambda line: None), rank, gather)
