"""Hosts that share no folder: each has what its ranks own, together they have a checkpoint, whatever fails where."""

from __future__ import annotations

import errno
import itertools
import math
import os
import shutil
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ddpm_ds.checkpoint.folder import CompleteCheckpoint, Gather, Groups, find_groups
from ddpm_ds.checkpoint.manifest import MANIFEST, STATE, check_headers, read_manifest
from ddpm_ds.checkpoint.reader import Reader
from ddpm_ds.cli.main import main
from ddpm_ds.errors import CheckpointError
from tests.checkpoint.saving import KINDS, SHAPES, describe, fragments_of, scalars, total, values_of
from tests.checkpoint.several_hosts import CUTS, Hosts, files

ONE, TWO = "images-000000001", "images-000000002"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpm_ds.checkpoint.folder.POLL_SECONDS", 0.002)


@pytest.fixture
def two(tmp_path: Path) -> Hosts:
    """Two hosts with two ranks each, and two checkpoints."""
    hosts = Hosts(tmp_path)
    writers = hosts.writers()
    assert all(hosts.save(1, writers)) and all(hosts.save(2, writers))
    return hosts


def check_values(checkpoint: CompleteCheckpoint, hosts: Hosts, images: int) -> None:
    """Every value is what was written, wherever it lies."""
    held = {}
    for rank in map(hosts.names.index, sorted(set(hosts.names))):
        path = hosts.folders[rank] / checkpoint.path.name
        if not path.exists():
            continue
        there = [name for name in checkpoint.manifest.files if (path / name).exists()]
        reader = Reader(path, checkpoint.manifest, there)
        for file in there:
            for span in () if file == STATE else check_headers(path, checkpoint.manifest, file):
                kind, name, start, length, _ = span
                expected = values_of(kind, name, images, math.prod(SHAPES[name]))[start : start + length]
                assert reader.read(kind, name, start, length).equal(expected)
                held.update({(kind, name, index): True for index in range(start, start + length)})
    assert len(held) == len(KINDS) * sum(map(math.prod, SHAPES.values()))


def test_a_checkpoint_and_a_snapshot_of_one_moment_are_written_at_once(tmp_path: Path) -> None:
    saved = Hosts(tmp_path)
    kept = Hosts(tmp_path, store=saved.store)
    kept.folders = [folder.with_name("snapshots") for folder in saved.folders]
    both = [(saved, saved.writers()), (kept, kept.writers(what="snapshot"))]
    for images in (1, 2):
        for rank in range(4):
            for _, writers in both:
                fragments = fragments_of(images, CUTS[rank], CUTS[rank + 1])
                writers[rank].begin(f"rank{rank}", fragments, describe(images), scalars(images))
    for hosts, writers in both:
        assert all([writer.wait() for writer in writers]) and not hosts.said
        for folder in hosts.folders:
            dtypes = {read_manifest(folder / name).dtype for name in (ONE, TWO)}
            assert dtypes == {"F32" if hosts is saved else "F16"}


def test_ranks_that_see_one_folder_find_each_other(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, "abab")

    def find(rank: int, gather: Gather) -> Groups:
        return find_groups(hosts.folders[rank], rank, hosts.names, gather)

    found = hosts.together(find)
    assert [groups.leader_of for groups in found] == [(0, 1, 0, 1)] * 4
    assert [groups.leads for groups in found] == [True, True, False, False] and found[0].leaders == (0, 1)
    assert found[3].name(3) == "rank 3 on host b" and not found[3].shared
    assert files(tmp_path) == []
    hosts.folders = [tmp_path] * 4
    assert [(groups.leader_of, groups.shared) for groups in hosts.together(find)] == [((0, 0, 0, 0), True)] * 4
    hosts.folders = [tmp_path / "missing"] * 4  # or not to be written: then those of a host count as one
    assert hosts.together(find)[2].leader_of == (0, 1, 0, 1)


def test_each_host_has_what_its_ranks_own_and_the_same_manifest(tmp_path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=5), wait_for_workers=False)
    keys = store.num_keys()
    hosts = Hosts(tmp_path, store=store)
    writers = hosts.writers(keep_last=1)
    for images in (1, 2):
        assert hosts.save(images, writers) == [True] * 4 and hosts.said == hosts.failures == []
    for rank, own in ((0, (0, 1)), (2, (2, 3))):
        parts = [f"{TWO}/rank{number}.safetensors" for number in own]
        assert files(hosts.folders[rank]) == sorted([f"{TWO}/{MANIFEST}", f"{TWO}/{STATE}", *parts])
    texts = {(folder / TWO / MANIFEST).read_text() for folder in hosts.folders}
    assert len(texts) == 1
    found = hosts.newest()
    assert found is not None and found.path.name == TWO and found.state.images_seen == 2
    check_values(found, hosts, 2)
    assert store.num_keys() - keys == 1, "the last word stays in the store"


def test_parts_that_version_0_2_wrote_are_read(two: Hosts) -> None:
    """It also wrote down where each part was written."""
    places = {f"rank{rank}.safetensors": {"host": "ab"[rank // 2], "folder": "/data"} for rank in range(4)}
    for folder in {two.folders[0], two.folders[2]}:
        manifest = read_manifest(folder / TWO)
        (folder / TWO / MANIFEST).write_bytes(manifest.model_copy(update={"places": places}).dump())
    assert '"places"' in (two.folders[0] / TWO / MANIFEST).read_text()
    found = two.newest()
    assert found is not None and found.path.name == TWO


def test_what_no_host_has_is_named_and_the_checkpoint_before_is_used(two: Hosts) -> None:
    (two.folders[2] / TWO / "rank3.safetensors").unlink()
    found = two.newest()
    assert found is not None and found.path.name == ONE
    assert [line.split(";")[0] for line in two.said] == [
        f"checkpoint {two.folders[0] / TWO} lacks rank3.safetensors here"
    ]
    shutil.rmtree(two.folders[2])
    error = two.error()
    assert "none of the 2 checkpoints in" in error and f"host b: checkpoint {two.folders[2] / TWO} lacks" in error


def test_a_run_never_starts_anew_for_a_fresh_host_and_says_how_to_bring_it_the_parts(
    two: Hosts, tmp_path: Path
) -> None:
    for present in ("aa", "bb"):
        alone = Hosts(tmp_path, present)
        assert "bring the parts together: rsync -a HOST:" in alone.error()
    fresh = Hosts(tmp_path, "abc")
    error = fresh.error()
    assert (
        f"host c: checkpoint {fresh.folders[2] / TWO} lacks manifest.json here" in error and "rsync -a HOST:" in error
    )
    assert Hosts(tmp_path, "cd").newest() is None, "no host has any"
    for folder in two.folders:  # what the line says
        shutil.copytree(folder / TWO, fresh.folders[2] / TWO, dirs_exist_ok=True)
    found = fresh.newest()
    assert found is not None and found.path.name == TWO


def test_damage_on_any_host_is_named(two: Hosts) -> None:
    file = two.folders[2] / TWO / "rank2.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    found = two.newest(until=2)
    assert found is not None and found.path.name == ONE and two.newest(until=0) is None
    assert len(two.said) == 1 and two.said[0].startswith("host b: checkpoint ") and file.name in two.said[0]
    (two.folders[0] / ONE / MANIFEST).write_text("{}")
    assert "none of the 2 checkpoints" in two.error() and f"{MANIFEST} is damaged" in "".join(two.said)


def test_pieces_of_two_checkpoints_of_one_name_are_not_mixed(two: Hosts, tmp_path: Path) -> None:
    """Each of them is a course of its own, such as after one host went on alone."""
    other = Hosts(tmp_path / "other")
    assert all(other.save(2))
    shutil.rmtree(two.folders[2] / TWO)
    shutil.copytree(other.folders[2] / TWO, two.folders[2] / TWO)
    found = two.newest()
    assert found is not None and found.path.name == ONE and "is not the same on all hosts" in two.said[0]


def test_one_host_alone_says_where_the_rest_is(two: Hosts, capsys: pytest.CaptureFixture[str]) -> None:
    path = two.folders[0] / TWO
    for arguments in (["verify", str(path)], ["consolidate", str(path), str(path.parent / "x")]):
        assert main(["checkpoint", *arguments]) == 2
        said = capsys.readouterr().err
        assert "lacks rank2.safetensors, rank3.safetensors here; if other hosts have them" in said
        assert f"rsync -a HOST:{path}/ {path}/" in said and said.count("\n") == 1
    assert main(["checkpoint", "list", str(path.parents[1])]) == 0
    assert capsys.readouterr().out.count("; 3 of 5 files here") == 2
    for name in ("rank2.safetensors", "rank3.safetensors"):
        shutil.copy(two.folders[2] / TWO / name, path)
    assert main(["checkpoint", "verify", str(path)]) == 0


@pytest.mark.parametrize("host", ["a", "b"])
def test_a_host_whose_disk_fails_at_any_moment_keeps_the_last_checkpoint_everywhere(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ENOSPC from every fsync of one host in turn: one line that names it, and what counts as saved is whole."""
    original, failing, calls = os.fsync, -1, itertools.count()

    def fsync(descriptor: int) -> None:
        if f"/{host}/" in os.readlink(f"/proc/self/fd/{descriptor}") + "/" and next(calls) == failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    hosts = Hosts(tmp_path / "undisturbed")
    writers = hosts.writers()
    assert all(hosts.save(1, writers))
    outcomes = set()
    for turn in range(next(calls)):
        hosts, failing = Hosts(tmp_path / str(turn)), -1
        writers = hosts.writers(seconds=60, keep_last=1)
        assert all(hosts.save(1, writers))
        calls, failing = itertools.count(), turn
        saved = hosts.save(2, writers)
        said = [*hosts.said, *hosts.failures]  # nobody waits for one that has given up, or it would say so
        assert len(said) == 1 and "No space left on device" in said[0], (turn, said)
        outcomes.add((saved[0], f"on host {host}" in said[0]))
        assert saved[0] == saved[2], turn
        found = hosts.newest()
        assert found is not None and found.path.name == (TWO if saved[0] else ONE)
        check_values(found, hosts, found.manifest.images)
        assert hosts.said == [line for line in said if line in hosts.said], "nothing half-written is found later"
    assert outcomes == {(False, True), (True, False)}


def test_a_rank_reads_its_own_hosts_part_and_is_told_how_to_get_one_that_is_elsewhere(two: Hosts) -> None:
    found = two.newest()
    assert found is not None
    reader = Reader(two.folders[0] / TWO, found.manifest, found.here)
    for kind, name, start, values, *_ in fragments_of(2, CUTS[0], CUTS[2]):
        assert reader.read(kind, name, start, len(values)).equal(values)
    kind, name, start, values, *_ = fragments_of(2, CUTS[2], CUTS[3])[0]
    with pytest.raises(CheckpointError, match=r"lacks rank2.safetensors, rank3.safetensors here; .* rsync -a HOST:"):
        reader.read(kind, name, start, len(values))


class Killed(BaseException):
    """Stands for SIGKILL: nothing of ours catches it, nothing is tidied up."""


class Killer:
    """Kills at the ``at``-th change that one host makes to its folder, or to what it says; then the others, or not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, host: str, at: int, *, all_die: bool) -> None:
        self.host, self.at, self.all_die, self.calls, self.dead = host, at, all_die, 0, False
        for target, name in ((os, "fsync"), (Path, "rename"), (Path, "replace"), (Path, "unlink"), (shutil, "rmtree")):
            monkeypatch.setattr(target, name, self._wrapped(getattr(target, name)))
        for name in ("check", "get", "set", "delete_key"):
            monkeypatch.setattr(dist.HashStore, name, self._wrapped(getattr(dist.HashStore, name)))
        monkeypatch.setattr(threading, "excepthook", lambda arguments: None)

    def _wrapped(self, original: Any) -> Any:
        def call(first: Any, *rest: Any, **options: Any) -> Any:
            if threading.current_thread().name.startswith("checkpoint"):
                self._strike(first, rest)
            return original(first, *rest, **options)

        return call

    def _strike(self, first: Any, rest: tuple[Any, ...]) -> None:
        here = self._of_host(first)
        self.calls += here
        self.dead |= here and self.calls == self.at
        if self.dead and (here or self.all_die or (isinstance(first, dist.Store) and self._speaks())):
            raise Killed

    def _of_host(self, first: Any) -> bool:
        if isinstance(first, dist.Store):
            return False
        path = os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else str(first)
        return f"/{self.host}/" in path + "/"

    def _speaks(self) -> bool:
        """Whether this thread is one of the host that died."""
        return threading.current_thread().name.endswith(self.host)


QUICK = {("a", True, True), ("b", False, True)}
"""Cases of the following test that are not left to a long run."""


@pytest.mark.parametrize(
    ("host", "all_die", "again"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.long)
        for case in itertools.product(("a", "b"), (True, False), (True, False))
    ],
)
def test_killed_at_any_moment_one_checkpoint_is_whole_over_the_hosts(
    host: str, all_die: bool, again: bool, tmp_path: Path
) -> None:
    """``all_die``: the other host dies with it, or lives to call the checkpoint off. ``again``: the only checkpoint is
    being replaced by one of its name."""
    at, seconds, news, tries = 1, 0.05, set(), itertools.count()
    while True:
        hosts = Hosts(tmp_path / str(next(tries)), "ab")
        assert all(save_two(hosts, 1))
        before = read_manifest(hosts.folders[0] / ONE)
        with pytest.MonkeyPatch.context() as monkeypatch:
            killer = Killer(monkeypatch, host, at, all_die=all_die)
            save_two(hosts, 1 if again else 2, seconds=seconds)
        found = hosts.newest()
        assert found is not None and not (all_die and any("lacks" in line for line in hosts.said)), at
        check_values(found, hosts, found.manifest.images)
        news.add(new := found.manifest.created > before.created)
        assert all(save_two(hosts, 3)), hosts.said
        if killer.dead:
            at += 1
        elif new:
            break
        else:  # nobody was killed: on a busy machine the ranks have given up by themselves
            seconds *= 2
    assert at > 10 and news == {False, True}


def save_two(hosts: Hosts, images: int, seconds: float = 60.0) -> list[bool]:
    """A checkpoint by two ranks of two hosts, whose threads are named after them."""
    hosts.store = dist.HashStore()
    writers = hosts.writers(seconds, keep_last=1)
    for rank, (one, bounds) in enumerate(zip(writers, ((0, 50), (50, total())), strict=True)):
        one.begin(f"rank{rank}", fragments_of(images, *bounds), describe(images), scalars(images))
        assert one._thread is not None
        one._thread.name += hosts.names[rank]
    return [one.wait() for one in writers]
