"""Hosts that share no folder: each has what its ranks own, together they have a checkpoint, whatever fails where."""

from __future__ import annotations

import errno
import itertools
import math
import multiprocessing
import os
import shutil
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddpm_ds.checkpoint import delivery, groups
from ddpm_ds.checkpoint.delivery import deliver
from ddpm_ds.checkpoint.groups import Gather, Groups, find_groups
from ddpm_ds.checkpoint.manifest import MANIFEST, STATE, Span, read_manifest
from ddpm_ds.checkpoint.reader import Reader
from ddpm_ds.checkpoint.union import BRING_BACK, CompleteCheckpoint, whole
from ddpm_ds.cli.main import main
from tests.checkpoint.saving import KINDS, SHAPES, describe, fragments_of, scalars, total, values_of
from tests.checkpoint.several_hosts import CUTS, Hosts, files
from tests.launching import PATIENCE_SECONDS

ONE, TWO = "images-000000001", "images-000000002"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "POLL_SECONDS", 0.002)


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
        reader = Reader(
            path, checkpoint.manifest, [name for name in checkpoint.manifest.files if (path / name).exists()]
        )
        for kind in KINDS:
            for name, shape in SHAPES.items():
                expected = values_of(kind, name, images, math.prod(shape))
                for start, stop in reader.covered(Span(kind, name, 0, math.prod(shape))):
                    assert reader.read(kind, name, start, stop - start).equal(expected[start:stop])
                    held.update({(kind, name, index): True for index in range(start, stop)})
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
    manifest = read_manifest(hosts.folders[0] / TWO)
    places = {name: (place.host, place.folder) for name, place in manifest.places.items()}
    assert places == {f"rank{rank}.safetensors": ("aabb"[rank], str(hosts.folders[rank])) for rank in range(4)}
    found = hosts.newest()
    assert found is not None and found.path.name == TWO and found.state.images_seen == 2
    check_values(found, hosts, 2)
    assert store.num_keys() - keys == 1, "the last word stays in the store"
    shared = Hosts(tmp_path / "shared", "aaaa")  # says nothing of hosts, so that any version can read it
    assert shared.save(1) == [True] * 4
    assert '"places"' not in (shared.folders[0] / ONE / MANIFEST).read_text()
    assert read_manifest(shared.folders[0] / ONE).places == {}


def test_what_is_missing_is_named_with_the_host_and_folder_that_wrote_it(two: Hosts) -> None:
    (two.folders[2] / TWO / "rank3.safetensors").unlink()
    found = two.newest()
    assert found is not None and found.path.name == ONE
    there = two.folders[2]
    assert two.said == [
        f"checkpoint {TWO} lacks rank3.safetensors, which host b wrote in {there} (where it no longer is); host a has "
        "rank0.safetensors, rank1.safetensors, host b has rank2.safetensors"
    ]
    shutil.rmtree(there)
    error = two.error()
    assert "none of the 2 checkpoints in" in error and f"host b wrote in {there} (where it no longer is)" in error
    assert BRING_BACK not in error, "that host is in the run already"


def test_missing_hosts_are_named_and_a_run_never_starts_anew_for_a_fresh_host(two: Hosts, tmp_path: Path) -> None:
    for present, absent in (("aa", "b"), ("bb", "a")):
        alone = Hosts(tmp_path, present)
        error = alone.error()
        assert f"which host {absent} wrote in" in error and "(a host that is not in this run)" in error
        assert error.endswith(BRING_BACK)
        assert [line.split()[:2] for line in alone.said] == [["checkpoint", TWO], ["checkpoint", ONE]]
    found = Hosts(tmp_path, "cab").newest()
    assert found is not None and found.path.name == TWO and found.here == () and found.state.images_seen == 2
    assert "host a wrote in" in Hosts(tmp_path, "cb").error()
    assert Hosts(tmp_path, "cd").newest() is None, "no host has any"


def test_damage_on_any_host_is_named_and_a_good_copy_elsewhere_will_do(two: Hosts, tmp_path: Path) -> None:
    file = two.folders[2] / TWO / "rank2.safetensors"
    shutil.copytree(two.folders[2] / TWO, tmp_path / "c" / "checkpoints" / TWO)
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    found = two.newest(until=2)
    assert found is not None and found.path.name == ONE and two.newest(until=0) is None
    assert len(two.said) == 1 and two.said[0].startswith("host b: checkpoint ") and file.name in two.said[0]
    (two.folders[0] / ONE / MANIFEST).write_text("{}")
    assert "none of the 2 checkpoints" in two.error() and f"{MANIFEST} is damaged" in "".join(two.said)
    three = Hosts(tmp_path, "acb")
    found = three.newest()
    assert found is not None and found.path.name == TWO and three.said == []


def test_pieces_of_two_checkpoints_of_one_name_are_not_mixed(two: Hosts, tmp_path: Path) -> None:
    """Each of them is a course of its own, such as after one host went on alone."""
    other = Hosts(tmp_path / "other")
    assert all(other.save(2))
    shutil.rmtree(two.folders[2] / TWO)
    shutil.copytree(other.folders[2] / TWO, two.folders[2] / TWO)
    found = two.newest()
    assert found is not None and found.path.name == ONE and two.said[0].count("lacks") == 1


def test_one_host_alone_says_where_the_rest_is(two: Hosts, capsys: pytest.CaptureFixture[str]) -> None:
    path = two.folders[0] / TWO
    for arguments in (["verify", str(path)], ["consolidate", str(path), str(path.parent / "x")]):
        assert main(["checkpoint", *arguments]) == 2
        said = capsys.readouterr().err
        assert "which lacks rank2.safetensors, rank3.safetensors, which host b wrote in " in said
        assert str(two.folders[2]) in said and said.count("\n") == 1
    assert main(["checkpoint", "list", str(path.parents[1])]) == 0
    assert capsys.readouterr().out.count("; 3 of 5 files here") == 2
    assert main(["checkpoint", "describe", str(path)]) == 0
    assert f"written on   a:{two.folders[0]}, b:{two.folders[2]}" in capsys.readouterr().out
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


def receive(folder: Path, ranks: str, rank: int, bounds: list[int], port: int, outcomes: Any) -> None:
    """One rank of a resumed run, a process: takes what it wants and compares it with what was written."""
    torch.set_num_threads(1)
    delivery.SENT_ELEMENTS = 7
    hosts, count = Hosts(folder, ranks), len(ranks)
    patience = timedelta(seconds=PATIENCE_SECONDS)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=patience)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=patience)

    def gather(value: Any) -> list[Any]:
        values: list[Any] = [None] * count
        dist.all_gather_object(values, value)
        return values

    said: list[str] = []
    found = whole(hosts.folders[rank] / TWO, hosts.groups(rank), gather)
    pieces = fragments_of(2, bounds[rank], bounds[rank + 1])
    wanted = [Span(one.kind, one.name, one.start, len(one.values)) for one in pieces]
    taken = [torch.full_like(one.values, torch.nan) for one in pieces]
    for index, start, values in deliver(found, wanted, gather=gather, device=torch.device("cpu"), log=said.append):
        assert taken[index][start - wanted[index].start :][: len(values)].isnan().all(), "once only"
        taken[index][start - wanted[index].start :][: len(values)] = values
    right = all(values.equal(one.values) for values, one in zip(taken, pieces, strict=True))
    outcomes.put((rank, right, said))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("ranks", "bounds", "said"),
    [
        ("aabb", (0, 20, 50, 60, total()), []),
        ("ba", (0, 50, total()), [f"{TWO}: 0.0 MB of it go from host a, b to host a, b"]),
        ("cabb", (0, 3, 47, 55, total()), [f"{TWO}: 0.0 MB of it go from host a to host b, c"]),
    ],
)
def test_ranks_receive_what_their_host_lacks_and_nothing_else(
    ranks: str, bounds: list[int], said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = Hosts(tmp_path)
    assert all(hosts.save(2))
    (hosts.folders[2] / TWO / STATE).write_text("damaged")  # the other one will do
    shutil.copy(hosts.folders[0] / TWO / "rank0.safetensors", hosts.folders[2] / TWO)  # a second source
    before = files(tmp_path)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")  # threads of this process may hold locks
    context.set_forkserver_preload([__name__])
    outcomes = context.Queue()
    processes = [
        context.Process(target=receive, args=(tmp_path, ranks, rank, bounds, store.port, outcomes), daemon=True)
        for rank in range(len(ranks))
    ]
    for process in processes:
        process.start()
    found = sorted(outcomes.get(timeout=PATIENCE_SECONDS) for _ in processes)
    for process in processes:
        process.join()
    assert found == [(rank, True, said if rank == 0 else []) for rank in range(len(ranks))]
    assert files(tmp_path) == before, "nothing is written"


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
