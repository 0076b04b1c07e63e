"""Two hosts on one machine: a network, PID, UTS and mount namespace and an sshd for each.

    worker-1  eth0 10.77.0.1 ──┬── bridge, in a network namespace of its own: the "switch"
    worker-2  eth0 10.77.0.2 ──┘

The machine's own network is not touched. A host has its own /tmp, /run, /dev/shm, home folder and users; all else is
the machine's. A namespace lives as long as a process that ends when its standard input is closed, even if the test is
killed; none has a name outside, so nothing can be left over.
"""

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from tests.hosts.namespaces import SYSTEM_PATH, Namespace, Program
from tests.launching import REPOSITORY

BOOT = Path(__file__).with_name("boot.sh")
NETWORK = "10.77.0"
SWITCH = "[ ! -e /proc/sys/net/ipv6 ] || echo 1 >/proc/sys/net/ipv6/conf/all/disable_ipv6; echo ready; read -r line"
TRAVELS = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
"""What DeepSpeed's launcher sets on every host (``Hosts.environment_file``)."""
UNMETERED = {"MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING": "false"}
"""Spares each host the process that measures it."""

SSH_CONFIG = """Host *
    StrictHostKeyChecking no
    UserKnownHostsFile /dev/null
    IdentityFile {key}
    IdentitiesOnly yes
    LogLevel ERROR
"""
SSHD_CONFIG = """HostKey {folder}/etc/host_key
AuthorizedKeysFile {key}.pub
PermitRootLogin prohibit-password
PasswordAuthentication no
StrictModes no
UsePAM no
PidFile none
"""


class Host:
    """One of the hosts: its ``name`` is worker-1 or worker-2, its ``port`` the switch's end of its link."""

    def __init__(self, hosts: "Hosts", index: int) -> None:
        self.name, self.address = f"worker-{index}", f"{NETWORK}.{index}"
        self.folder = hosts.folder / self.name
        self.home = self.folder / "home"
        self.port = f"port{index}"
        self._mac = f"02:00:0a:4d:00:0{index}"
        self._hosts = hosts
        self._programs: list[Program] = []
        self._files = 0
        self._write_files()
        own = ["--net", "--pid", "--uts", "--mount", "--mount-proc"]
        visible = map(str, hosts.visible)
        self._inside = Namespace(own, ["bash", str(BOOT), self.name, str(self.folder), *visible])
        try:
            self._plug_in()
        except BaseException:
            self.end()
            raise

    def environment(self, **changes: str) -> dict[str, str]:
        """The whole environment of a program in the host."""
        return {
            "PATH": f"{Path(sys.executable).parent}:{SYSTEM_PATH}",
            "HOME": str(self.home),
            "USER": "root",
            "SHELL": "/bin/bash",
            "LANG": "C.UTF-8",
            "PDSH_RCMD_TYPE": "ssh",
            "PDSH_SSH_ARGS": f"-F {self._hosts.ssh_config}",
            "DS_ENV_FILE": str(self._hosts.environment_file),
            "MLFLOW_TRACKING_URI": "",
            "PYTHONPATH": str(REPOSITORY),
            **TRAVELS,
            **changes,
        }

    def start(self, argv: Sequence[str], env: Mapping[str, str] | None = None, output: Path | None = None) -> Program:
        """Start a program in the repository; both its streams go to ``output``, or to a file in the host's folder."""
        with (output or self._new_file("output")).open("w") as file:
            program = Program(
                self._inside.enter(["env", "-C", str(REPOSITORY), *argv]),
                env=self.environment(**(env or {})),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._programs.append(program)
        return program

    def run(
        self, argv: Sequence[str], env: Mapping[str, str] | None = None, timeout: float = 60.0
    ) -> subprocess.CompletedProcess[str]:
        """Run a program to its end, or kill it with all that it started; ``stdout`` has both streams."""
        output = self._new_file("output")
        program = self.start(argv, env, output)
        try:
            code = program.wait(timeout)
        except subprocess.TimeoutExpired as error:
            program.end()
            raise subprocess.TimeoutExpired(argv, timeout, output.read_text()[-4000:]) from error
        return subprocess.CompletedProcess(argv, code, output.read_text(), "")

    def processes(self, pattern: str = "") -> list[psutil.Process]:
        """Processes of the host whose command lines a regular expression finds."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                outside = os.readlink(f"/proc/{process.pid}/ns/pid") != os.readlink(f"/proc/{self._inside.pid}/ns/pid")
                if outside or process.pid == self._inside.pid or process.status() == psutil.STATUS_ZOMBIE:
                    continue
                if re.search(pattern, " ".join(process.cmdline())):
                    found.append(process)
        return found

    def kill(self) -> None:
        """Power loss: nothing more is sent, then everything in it is killed."""
        self._hosts.switch.ip(f"link delete {self.port}")
        self.end()

    def end(self) -> None:
        """Kill everything in it."""
        self._inside.end()
        for program in self._programs:
            program.wait()
        self._programs.clear()

    def _plug_in(self) -> None:
        veth = f"{self.port} type veth peer name eth0 netns {self._inside.pid}"
        self._hosts.switch.ip(f"link add {veth}", f"link set {self.port} master br0 up")
        address = f"addr add {self.address}/24 dev eth0"
        self._inside.ip(f"link set eth0 address {self._mac}", address, "link set eth0 up")

    def _new_file(self, kind: str) -> Path:
        self._files += 1
        return self.folder / f"{kind}-{self._files}"

    def _write_files(self) -> None:
        etc = self.folder / "etc"
        etc.mkdir(parents=True)
        (self.home / ".ssh").mkdir(parents=True)
        shutil.copy(self._hosts.ssh_config, self.home / ".ssh" / "config")
        root = re.compile(r"^(root(?::[^:]*){4}):.*$", re.MULTILINE)
        (etc / "passwd").write_text(root.sub(rf"\1:{self.home}:/bin/bash", Path("/etc/passwd").read_text()))
        (etc / "shadow").write_text("root:*:20000:0:99999:7:::\n")
        names = [f"{NETWORK}.{index} worker-{index}\n" for index in (1, 2)]
        (etc / "hosts").write_text("".join(["127.0.0.1 localhost\n", *names]))
        (etc / "sshd_config").write_text(SSHD_CONFIG.format(folder=self.folder, key=self._hosts.key))
        make_key(etc / "host_key")


class Hosts:
    """Makes two hosts and a switch between them; ``with`` removes them and ends all that runs in them.

    ``folder`` is for keys, settings and logs; the hosts see it, the repository and ``visible`` although their /tmp is
    their own. Clients use ``ssh_config``, with the key that both hosts accept.
    """

    def __init__(self, folder: Path, visible: Sequence[Path] = ()) -> None:
        self.folder = folder
        self.visible = (folder, REPOSITORY, Path(sys.prefix), *visible)
        self.key, self.ssh_config = folder / "key", folder / "ssh_config"
        self.environment_file = folder / "deepspeed_env"
        self._hosts: list[Host] = []

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True)
        make_key(self.key)
        self.ssh_config.write_text(SSH_CONFIG.format(key=self.key))
        self.environment_file.write_text("".join(f"{name}={value}\n" for name, value in TRAVELS.items()))
        self.switch = Namespace(["--net"], ["sh", "-c", SWITCH])
        try:
            self.switch.ip("link add br0 type bridge", "link set br0 up")
            for index in (1, 2):
                self._hosts.append(Host(self, index))
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def __getitem__(self, index: int) -> Host:
        return self._hosts[index]

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts)

    def hostfile(self, path: Path, slots: int = 2, names: Sequence[str] | None = None) -> Path:
        """Write DeepSpeed's list of all hosts, or of those with ``names``, and return ``path``."""
        names = [host.name for host in self._hosts] if names is None else names
        path.write_text("".join(f"{name} slots={slots}\n" for name in names))
        return path

    def stall(self) -> None:
        """Let the switch drop every frame from now on, without a word to either side."""
        for host in self._hosts:
            self.switch.call("bridge", "link", "set", "dev", host.port, "state", "disabled")

    def _end(self) -> None:
        for host in self._hosts:
            host.end()
        self.switch.end()
        self._hosts.clear()


def make_key(path: Path) -> None:
    """An ed25519 key without a password, and its public half beside it."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)
