"""Start and ask processes on hosts, behind an ssh that stays on this machine."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddpm_ds.cluster.probe import Probe
from ddpm_ds.cluster.survey import Conversation, Ended, Failure, PlannedRun, Survey, network_test, survey
from ddpm_ds.errors import SpecError
from ddpm_ds.processes.hosts import ssh, ssh_to
from ddpm_ds.processes.ranks import free_port
from tests.launching import REPOSITORY

SSH = """#!/bin/sh
# Runs the last word as the shell of another host would; hosts named no-* can't be reached.
for word; do host=$before before=$word; done
case $host in
no-*) echo "login banner"; echo "ssh: Could not resolve hostname $host: Name or service not known" >&2; exit 255 ;;
deaf) exec sleep 60 ;;
esac
echo "Welcome to $host"
exec env -i HOME="$HOME" PATH=/usr/bin:/bin sh -c "$word"
"""


@pytest.fixture(autouse=True)
def own_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    program = tmp_path / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(SSH)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    for name in ("PDSH_SSH_ARGS", "PDSH_SSH_ARGS_APPEND"):
        monkeypatch.delenv(name, raising=False)
    yield


def planned(tmp_path: Path, **changes: Any) -> PlannedRun:
    run = PlannedRun(
        python=sys.executable,
        folder=str(REPOSITORY),
        environment={"PYTHONPATH": str(REPOSITORY)},
        travels={},
        spec=str(REPOSITORY / "launch" / "specs" / "digits.yaml"),
        overrides=("train.seed=7",),
        ds_config=None,
        run_dir=str(tmp_path / "runs"),
        checkpoint_bytes=0,
        connect_seconds=1,
    )
    return replace(run, **changes)


def ask(tmp_path: Path, hosts: list[str], port: int | None = None, **changes: Any) -> Survey:
    slots: dict[str, int | None] = dict.fromkeys(hosts, 2)
    run = planned(tmp_path, master_address="127.0.0.1", master_port=port or free_port(), **changes)
    return survey(slots, run, log=lambda line: None)


def test_hosts_say_what_they_are_and_an_unreachable_one_does_not_hold_them_up(tmp_path: Path) -> None:
    odd = "two words; \"quotes\" 'and' $HOME `pwd` \\"
    environment = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": odd}
    seen = ask(tmp_path, ["one", "no-host", "deaf", "two"], environment=environment)
    assert seen.hosts["no-host"].failure == Failure(
        "ssh", "Could not resolve hostname no-host: Name or service not known"
    )
    assert seen.hosts["deaf"].failure == Failure("ssh", "no answer in 3 s")
    assert list(seen.facts) == ["one", "two"] and seen.master == "one"
    facts = seen.facts["two"]
    assert facts.environment["OMP_NUM_THREADS"] == odd
    assert facts.spec.values["train.seed"] == "7"
    assert facts.sources["ddpm_ds/cluster/probe.py"] and facts.versions["torch"]
    two = seen.hosts["two"]
    assert two.run_dir_shared and two.interface == "lo" and not two.port_error
    assert list(tmp_path.iterdir()) == [tmp_path / "bin"]  # the shared folder is left as it was


def test_a_host_without_the_folder_or_the_interpreter_says_so(tmp_path: Path) -> None:
    (failed,) = ask(tmp_path, ["one"], folder=str(tmp_path / "none")).hosts.values()
    assert failed.failure is not None and failed.failure.at == "folder" and "none" in failed.failure.why
    (failed,) = ask(tmp_path, ["one"], python="/none/python").hosts.values()
    assert failed.failure is not None and failed.failure.at == "python"
    (failed,) = ask(tmp_path, ["one"], python="/bin/false").hosts.values()
    assert failed.failure == Failure("ddpm_ds", "exit code 1")


def test_images_may_be_a_file_and_folders_that_can_not_be_looked_up_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "x.npz").touch()
    too_long = "y/" * 2045  # as an absolute path
    for path, missing in ((tmp_path / "x.npz", ""), (tmp_path / "y.npz", str(tmp_path / "y.npz"))):
        overrides = ["data.source=arrays", f"data.path={path}", f"data.store_root={too_long}"]
        facts = Probe().facts(planned(tmp_path).spec, overrides, None, too_long)
        assert facts["images_missing"] == missing and not facts["spec"]["error"]
        assert [disk["exists"] for disk in facts["disks"].values()] == [False, False]


def test_a_port_that_is_taken_is_told(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        seen = ask(tmp_path, ["one", "two"], port=taken.getsockname()[1])
    assert seen.hosts["one"].port_error == "Address already in use" and not seen.hosts["two"].port_error


@pytest.mark.long
def test_the_network_of_hosts_is_tried_and_one_that_leaves_is_named(tmp_path: Path) -> None:
    for hosts, expected in ((["one", "two"], {}), (["one", "no-host"], {"no-host"})):
        run = planned(tmp_path, master_port=free_port())
        network = network_test(hosts, run, "127.0.0.1", "gloo", log=lambda line: None)
        assert set(network.errors) == set(expected)
        assert set(network.all_reduce_seconds) == (set() if expected else set(hosts))
    assert "ssh was lost" in network.errors["no-host"]


def test_a_process_that_leaves_or_is_silent_is_an_error() -> None:
    with closing(Conversation(["sh", "-c", "echo noise; echo 'ddpm-ds-doctor 1'; echo why >&2; exit 3"])) as talk:
        assert talk.next(5) == 1
        with pytest.raises(Ended) as ended:
            talk.next(5)
        assert (ended.value.code, ended.value.last_line) == (3, "why")
    with closing(Conversation(["cat"])) as talk, pytest.raises(Ended, match=r"no answer in 0\.1 s"):
        talk.ask("anything", 0.1)


def test_ssh_is_called_as_pdsh_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    *words, remote = ssh("me@worker-1", ["echo", "a b", "$HOME"])
    assert " ".join(words) == "ssh -o BatchMode=yes -o ConnectTimeout=10 -l me -a -x worker-1"
    assert remote == "echo 'a b' '$HOME'"
    monkeypatch.setenv("PDSH_SSH_ARGS", "-F 'my config' -l%u %h")
    monkeypatch.setenv("PDSH_SSH_ARGS_APPEND", "-p 2222")
    assert ssh_to("you@worker-1") == ["ssh", "-l", "you", "-p", "2222", "-F", "my config", "-lyou", "worker-1"]
    for host in ("-oProxyCommand=reboot", "me@-oProxyCommand=reboot"):
        with pytest.raises(SpecError, match="would be an option of ssh"):
            ssh_to(host)
