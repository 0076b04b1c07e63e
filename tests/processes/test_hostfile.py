"""The hostfile: read as DeepSpeed reads it, with errors that say what to do, and which of its hosts this one is."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from deepspeed.launcher.runner import fetch_hostfile

from ddpm_ds.errors import SpecError
from ddpm_ds.processes.hosts import read_hostfile, this_host
from tests.launching import REPOSITORY


def test_hosts_and_slots_are_those_that_deepspeed_reads(tmp_path: Path) -> None:
    file = tmp_path / "hostfile"
    file.write_text("# two racks\n\nworker-2 slots=4\n  me@10.0.0.1   slots=2 # the old one\n")
    assert list(read_hostfile(file).items()) == [("worker-2", 4), ("me@10.0.0.1", 2)]
    assert read_hostfile(file) == fetch_hostfile(str(file))


def test_the_example_can_be_read() -> None:
    file = REPOSITORY / "launch" / "hostfile.example"
    assert read_hostfile(file) == fetch_hostfile(str(file)) == {"worker-1": 4, "worker-2": 4}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("worker-1 slots=4\nworker-2\n", "line 2: 'worker-2' is not HOST slots=N; write it as: worker-1 slots=4"),
        ("worker-1 slots=4x\n", "line 1: 'worker-1 slots=4x' is not HOST slots=N"),
        ("a slots=1\nb slots=1\na slots=1\n", "line 3: 'a slots=1' names a a second time"),
        ("a slots=0\n", "gives no process to a; delete the line"),
        ("# nobody\n", "names no host; add a line such as"),
        (None, "can't be read"),
    ],
)
def test_what_is_wrong_in_a_hostfile_is_said_with_its_line(text: str | None, said: str, tmp_path: Path) -> None:
    file = tmp_path / "hostfile"
    if text is not None:
        file.write_text(text)
    with pytest.raises(SpecError) as error:
        read_hostfile(file)
    assert said in str(error.value) and str(file) in str(error.value)


def test_this_host_is_known_by_name_and_by_address(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = "192.0.2.7"  # of RFC 5737: no machine's
    own = socket.gethostname()
    assert this_host([elsewhere, f"me@{own}"]) == f"me@{own}"
    assert this_host([elsewhere, "127.0.0.1"]) == "127.0.0.1"
    assert this_host([elsewhere, "localhost"]) == "localhost"
    assert this_host([elsewhere, "no.such.host.invalid"]) is None
    with pytest.raises(SpecError, match="would be an option of ssh"):
        this_host(["-oProxyCommand=touch x"])
    monkeypatch.setattr(socket, "gethostname", lambda: "worker-1.example.org")
    assert this_host([elsewhere, "worker-1"]) == "worker-1"


@pytest.mark.needs_programs("ssh")
def test_this_host_is_known_by_what_ssh_calls_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "config"
    config.write_text("Host first\n  HostName 127.0.0.1\nHost second\n  HostName 192.0.2.8\n")
    monkeypatch.setenv("PDSH_SSH_ARGS", f"-F {config}")
    assert this_host(["second", "me@first"]) == "me@first"
