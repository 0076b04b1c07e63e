"""The hostfile and ``.deepspeed_env``, read as DeepSpeed does, with errors that say what to do."""

import os
import socket
import subprocess
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from deepspeed.launcher.multinode_runner import PDSHRunner
from deepspeed.launcher.runner import fetch_hostfile

from ddpm_ds.ground.errors import SpecError
from ddpm_ds.processes import hosts
from ddpm_ds.processes.hosts import ENVIRONMENT_FILE, find_environment, read_environment, read_hostfile, this_host
from tests.launching import REPOSITORY


def test_hosts_and_slots_equal_deepspeeds_reading(tmp_path: Path) -> None:
    file = tmp_path / "hostfile"
    file.write_text("# two racks\n\nworker-2 slots=4\n  me@10.0.0.1   slots=2 # the old one\n")
    assert list(read_hostfile(file).items()) == [("worker-2", 4), ("me@10.0.0.1", 2)]
    example = REPOSITORY / "launch" / "hostfile.example"
    assert list(read_hostfile(example).items()) == [("worker-1", 4), ("worker-2", 4)]
    for path in (file, example):
        assert read_hostfile(path) == fetch_hostfile(str(path))


@pytest.mark.parametrize(
    ("read", "text", "said"),
    [
        (read_hostfile, "a slots=4\nworker-2\n", "line 2: 'worker-2' is not HOST slots=N; write it as: worker-1"),
        (read_hostfile, "worker-1 slots=4x\n", "line 1: 'worker-1 slots=4x' is not HOST slots=N"),
        (read_hostfile, "a slots=1\nb slots=1\na slots=1\n", "line 3: 'a slots=1' names a a second time"),
        (read_hostfile, "a slots=0\n", "gives no process to a; delete the line"),
        (read_hostfile, "# nobody\n", "names no host; add a line such as"),
        (read_hostfile, None, "can't be read"),
        (read_environment, "A=1\nNCCL_DEBUG", "line 2: 'NCCL_DEBUG' is not NAME=VALUE; write it as: GLOO"),
        *(
            (read_environment, line, f"line 1: {line!r} is not NAME=VALUE")
            for line in ("2ND=a", "my name=a", "A =b", "export A=b", "# why", "A=b # why", "A='b'", 'A="b', "A=\\$")
        ),
        *((read_environment, f"A={value}", "without export, quotes, $") for value in ("$HOME/bin", "`hostname`")),
        (read_environment, "MY_TOKEN=$hush", "'MY_TOKEN=***' is not NAME=VALUE"),
    ],
)
def test_a_wrong_line_is_named_with_its_file(
    read: Callable[[Path], object], text: str | None, said: str, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    if text is not None:
        file.write_text(text)
    with pytest.raises(SpecError) as error:
        read(file)
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


def test_ssh_is_called_as_pdsh_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    *words, remote = hosts.ssh("me@worker-1", ["echo", "a b", "$HOME"])
    assert " ".join(words) == "ssh -o BatchMode=yes -o ConnectTimeout=10 -l me -a -x worker-1"
    assert remote == "echo 'a b' '$HOME'"
    monkeypatch.setenv("PDSH_SSH_ARGS", "-F 'my config' -l%u %h")
    monkeypatch.setenv("PDSH_SSH_ARGS_APPEND", "-p 2222")
    assert hosts.ssh_to("you@worker-1") == ["ssh", "-l", "you", "-p", "2222", "-F", "my config", "-lyou", "worker-1"]
    for host in ("-oProxyCommand=reboot", "me@-oProxyCommand=reboot"):
        with pytest.raises(SpecError, match="would be an option of ssh"):
            hosts.ssh_to(host)


def test_plain_lines_mean_the_same_here_and_in_the_shell_of_deepspeeds_launcher(tmp_path: Path) -> None:
    file = tmp_path / ENVIRONMENT_FILE
    file.write_text("GLOO_SOCKET_IFNAME=eth0\r\n  EMPTY=\n\nWORDS=a  b\nHARD=a=b#c;&|<>()*?!~%h{d,e}\n")
    values = {"GLOO_SOCKET_IFNAME": "eth0", "EMPTY": "", "WORDS": "a  b", "HARD": "a=b#c;&|<>()*?!~%h{d,e}"}
    assert read_environment(file) == values
    runner = PDSHRunner(Namespace(user_script="", user_args=[]), "")
    for name, value in values.items():
        runner.add_export(name, value)
    exports = "".join(f"export {name}={value}; " for name, value in runner.exports.items())  # as PDSHRunner.get_cmd
    names = " ".join(f'"${name}"' for name in values)
    words = ["sh", "-c", f"{exports} printf '%s\\n' {names}"]
    shell = subprocess.run(words, capture_output=True, text=True, check=True)
    assert shell.stdout.splitlines() == list(values.values())


def test_files_are_found_where_deepspeed_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, here, elsewhere = tmp_path / "home", tmp_path / "here", tmp_path / "elsewhere"
    for folder in (home, here):
        folder.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("DS_ENV_FILE", raising=False)
    monkeypatch.chdir(here)
    assert find_environment() == {}
    (home / ENVIRONMENT_FILE).write_text("A=home\nB=home\n")
    (here / ENVIRONMENT_FILE).write_text("A=here\n")
    assert find_environment() == {"A": "here", "B": "home"}
    elsewhere.write_text("A=elsewhere\n")
    monkeypatch.setenv("DS_ENV_FILE", str(elsewhere))
    assert find_environment() == {"A": "elsewhere"}


@pytest.mark.parametrize(
    ("addresses", "local", "wanted"),
    [
        (["127.0.1.1"], True, "lo"),
        (["127.0.1.1"], False, None),
        (["127.0.1.1", "192.168.7.1"], False, "eth0"),
        (["192.168.7.1"], True, "eth0"),
        ([], False, None),
    ],
)
def test_gloo_does_not_listen_on_loopback_because_debian_calls_a_host_so(
    addresses: list[str], local: bool, wanted: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def getaddrinfo(name: str, port: int, type: int) -> list[Any]:
        if not addresses:
            raise OSError("unknown name")
        return [(socket.AF_INET, type, 0, "", (address, port)) for address in addresses]

    class Probe:
        def __init__(self, *_: object) -> None: ...
        def __enter__(self) -> "Probe":
            return self

        def __exit__(self, *_: object) -> None: ...
        def connect(self, target: tuple[str, int]) -> None:
            self.own = target

        def getsockname(self) -> tuple[str, int]:
            return self.own

    own = {
        "lo": [Namespace(address="127.0.0.1"), Namespace(address="127.0.1.1")],
        "eth0": [Namespace(address="192.168.7.1")],
    }
    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(socket, "socket", Probe)
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: own)
    monkeypatch.delenv(hosts.GLOO_INTERFACE, raising=False)
    found = hosts.use_interface_towards("worker-1", local=local)
    assert os.environ.get(hosts.GLOO_INTERFACE) == wanted and bool(found) == bool(wanted)
    monkeypatch.delenv(hosts.GLOO_INTERFACE, raising=False)
    assert hosts.use_interface_towards("127.0.1.1", local=False) or addresses != ["127.0.1.1"], "a number is meant"
    monkeypatch.delenv(hosts.GLOO_INTERFACE, raising=False)
