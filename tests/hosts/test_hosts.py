"""The hosts that the other tests of this folder run on."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil
import pytest

from tests.hosts.hosts import Host, Hosts
from tests.launching import REPOSITORY

COPY_BYTES = 4 * 2**20
MAKE_AND_WAIT = """
import sys, time
from pathlib import Path
from tests.hosts.hosts import Hosts

with Hosts(Path(sys.argv[1])) as hosts:
    hosts[1].start(["sleep", "3601"])
    print(*hosts.pids(), flush=True)
    time.sleep(600)
"""


def say(host: Host, line: str, timeout: float = 30.0) -> str:
    """What a line of shell prints in the host; it has to succeed."""
    done = host.run(["bash", "-c", line], timeout=timeout)
    assert done.returncode == 0, done.stdout
    return done.stdout.strip()


def wait_for(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30.0
    while not happened():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)


def network_namespaces(pids: Iterable[int]) -> set[str]:
    """The network namespaces of those processes that exist."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/{pid}/ns/net"))
    return found


def test_a_host_is_like_a_machine_of_its_own(hosts: Hosts, tmp_path: Path) -> None:
    one, two = hosts
    expected = ["worker-1", "10.77.0.1", "/sys/class/net/eth0", "/sys/class/net/lo"]
    assert say(one, "hostname; hostname -I; echo /sys/class/net/*").split() == expected
    own = f"own-{os.getpid()}"
    say(one, f"echo here >{tmp_path}/shared; echo here | tee /tmp/{own} /dev/shm/{own} ~/{own}")
    assert say(two, f"cat {tmp_path}/shared; ls /tmp/{own} /dev/shm/{own} ~/{own} 2>/dev/null || true") == "here"
    assert not Path("/tmp", own).exists() and not Path("/dev/shm", own).exists()
    said = say(one, "ssh worker-2 'hostname; echo $HOME; ps ax | grep -c [s]leep || true'").split()
    assert said == ["worker-2", str(two.home), "0"]

    (tmp_path / "version").write_text("1")  # a path or a file can differ on one host
    private = two.private(tmp_path / "checkpoints")
    two.replace_file(tmp_path / "version", "2")
    say(two, f"cp {tmp_path}/version {tmp_path}/checkpoints/seen")
    assert (private / "seen").read_text() == "2"
    assert say(one, f"cat {tmp_path}/version; ls {tmp_path}/checkpoints") == "1"


def test_the_switch_counts_what_passes_and_hosts_that_stall_or_are_killed_are_silent(hosts: Hosts) -> None:
    one, two = hosts
    before = hosts.bytes_sent()[one.name]
    for host in hosts:  # of which only one copy crosses
        copy = f"head -c {COPY_BYTES} /dev/zero | ssh {host.name} wc -c | grep -qx {COPY_BYTES}"
        say(one, f"set -o pipefail; {copy}")
    assert COPY_BYTES < hosts.bytes_sent()[one.name] - before < 1.03 * COPY_BYTES

    sleeper = two.start(["sh", "-c", "sleep 3602 & wait"])
    session = one.start(["ssh", "worker-2", "sleep 3603"])
    wait_for(lambda: len(two.processes("sleep 360[23]")) == 3)  # and a shell
    assert not one.processes("sleep 3602")
    hosts.stall()
    with pytest.raises(subprocess.TimeoutExpired):
        say(one, "ssh worker-2 true", timeout=1.0)
    assert len(one.processes("ssh worker-2")) == 1, "what took too long was killed"
    two.kill()
    assert sleeper.returncode == -signal.SIGKILL and two.processes() == [] and two.name not in hosts.bytes_sent()
    time.sleep(0.2)
    assert session.poll() is None, "nothing said that the connection is gone"
    session.send_signal(signal.SIGTERM)
    assert session.wait(10) == 255


def test_nothing_is_left_of_hosts_whose_maker_was_killed(can_make_hosts: None, tmp_path: Path) -> None:
    mounts = Path("/proc/mounts").read_text()
    command = [sys.executable, "-c", MAKE_AND_WAIT, str(tmp_path / "two")]
    maker = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    assert maker.stdout is not None
    made = network_namespaces(map(int, maker.stdout.readline().split()))
    assert len(made) == 3
    maker.kill()
    maker.communicate()
    wait_for(lambda: not made & network_namespaces(psutil.pids()))
    assert Path("/proc/mounts").read_text() == mounts
    commands = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    assert not any(str(tmp_path) in command for command in commands)
