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
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import psutil

from tests.launching import REPOSITORY

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PROGRAMS = ("unshare", "nsenter", "ip", "bridge", "mount", "hostname", "sshd", "ssh", "ssh-keygen", "pdsh")
"""Programs that hosts on one machine are made with, and that their tests run in them."""
END_SECONDS = 10.0
BOOT = Path(__file__).with_name("boot.sh")
NETWORK = "10.77.0"
"""Network of the hosts, if a test names no other."""
SWITCH = "[ ! -e /proc/sys/net/ipv6 ] || echo 1 >/proc/sys/net/ipv6/conf/all/disable_ipv6; echo ready; read -r line"
TRAVELS = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
"""What DeepSpeed's launcher sets on every host (``Hosts.environment_file``)."""
UNMETERED = {"MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING": "false"}  # spares each host the process that measures it

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


def why_not() -> str | None:
    """Why hosts can not be made here, where ``PROGRAMS`` are installed: a missing permission; None when they can."""
    if os.geteuid() != 0:
        return "only root can make hosts on one machine"
    attempt = "mount -t tmpfs tmpfs /tmp && ip link add br0 type bridge && ip link add veth0 type veth peer name veth1"
    command = ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "sh", "-c", attempt]
    done = subprocess.run(command, capture_output=True, text=True, env={"PATH": SYSTEM_PATH})
    return f"no namespaces with a bridge here: {done.stderr.strip()}" if done.returncode else None


class Namespace:
    """A namespace of ``unshare``, with options ``kinds``, until ``end`` or the end of the process that made it.

    ``command`` runs in it as its first process, with number ``pid`` outside; it prints "ready", then lives until its
    standard input is closed.
    """

    def __init__(self, kinds: Sequence[str], command: Sequence[str]) -> None:
        words, pipe = ["unshare", *kinds, "--fork", "--kill-child", *command], subprocess.PIPE
        self._holder = subprocess.Popen(
            words, env={"PATH": SYSTEM_PATH}, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != "ready\n":
            _, said = self._holder.communicate(timeout=END_SECONDS)
            raise ChildProcessError(f"{' '.join(command)} ended with {self._holder.returncode}: {said}")
        self.pid = psutil.Process(self._holder.pid).children()[0].pid

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self._holder.poll() is None:
                os.kill(self.pid, signal.SIGKILL)
        self._holder.communicate(timeout=END_SECONDS)

    def call(self, *argv: str, lines: Sequence[str] = ()) -> None:
        """Run a program of the system in its network, with ``lines`` as input."""
        command = ["nsenter", "-t", str(self.pid), "-m", "-n", *argv]
        subprocess.run(command, env={"PATH": SYSTEM_PATH}, check=True, input="\n".join(lines), text=True)

    def ip(self, *lines: str) -> None:
        self.call("ip", "-batch", "-", lines=lines)


class Host(Namespace):
    """One of the hosts: its ``name`` is worker-1 or worker-2, its ``port`` the switch's end of its link."""

    def __init__(self, hosts: "Hosts", index: int) -> None:
        self.name, self.address, self.port = f"worker-{index}", f"{hosts.network}.{index}", f"port{index}"
        self.folder = hosts.folder / self.name
        self.home = self.folder / "home"
        self._hosts, self._programs = hosts, list[subprocess.Popen[str]]()
        self._write_files()
        own = ["--net", "--pid", "--uts", "--mount", "--mount-proc"]
        super().__init__(own, ["bash", str(BOOT), self.name, str(self.folder), *map(str, hosts.visible)])
        try:
            veth = f"{self.port} type veth peer name eth0 netns {self.pid}"
            hosts.switch.ip(f"link add {veth}", f"link set {self.port} master br0 up")
            address = f"addr add {self.address}/24 dev eth0"
            self.ip(f"link set eth0 address 02:00:0a:4d:00:0{index}", address, "link set eth0 up")
        except BaseException:
            self.end()
            raise

    def start(self, argv: Sequence[str], env: Mapping[str, str], output: Path) -> subprocess.Popen[str]:
        environment = {
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
        }
        words = ["nsenter", "-t", str(self.pid), "-m", "-u", "-n", "-p", "env", "-C", str(REPOSITORY), *argv]
        with output.open("w") as file:
            streams = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": subprocess.STDOUT}
            variables = {**environment, **TRAVELS, **env}
            program = subprocess.Popen(words, env=variables, text=True, start_new_session=True, **streams)  # type: ignore[call-overload]
        self._programs.append(program)
        return program

    def processes(self, pattern: str = "") -> list[psutil.Process]:
        """Processes of the host whose command lines a regular expression finds."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                outside = os.readlink(f"/proc/{process.pid}/ns/pid") != os.readlink(f"/proc/{self.pid}/ns/pid")
                if outside or process.pid == self.pid or process.status() == psutil.STATUS_ZOMBIE:
                    continue
                if re.search(pattern, " ".join(process.cmdline())):
                    found.append(process)
        return found

    def kill(self) -> None:
        """Power loss: nothing more is sent, then everything in it is killed."""
        self._hosts.switch.ip(f"link delete {self.port}")
        self.end()

    def end(self) -> None:
        super().end()
        for program in self._programs:
            program.wait()
        self._programs.clear()

    def _write_files(self) -> None:
        etc = self.folder / "etc"
        etc.mkdir(parents=True)
        (self.home / ".ssh").mkdir(parents=True)
        shutil.copy(self._hosts.ssh_config, self.home / ".ssh" / "config")
        root = re.compile(r"^(root(?::[^:]*){4}):.*$", re.MULTILINE)
        (etc / "passwd").write_text(root.sub(rf"\1:{self.home}:/bin/bash", Path("/etc/passwd").read_text()))
        (etc / "shadow").write_text("root:*:20000:0:99999:7:::\n")
        names = [f"{self._hosts.network}.{index} worker-{index}\n" for index in (1, 2)]
        if self._hosts.debian:
            names = [f"127.0.1.1 {self.name}\n" if name.endswith(f"{self.name}\n") else name for name in names]
        (etc / "hosts").write_text("".join(["127.0.0.1 localhost\n", *names]))
        (etc / "sshd_config").write_text(SSHD_CONFIG.format(folder=self.folder, key=self._hosts.key))
        make_key(etc / "host_key")


class Hosts(list[Host]):
    """Two hosts and a switch between them; ``with`` makes them, and then ends all that runs in them.

    ``folder`` is for keys, settings and logs; the hosts see it, the repository and ``visible`` although their /tmp is
    their own. Clients use ``ssh_config``, with the key that both hosts accept. As on ``debian``, a host's own name may
    be an address of loopback.
    """

    def __init__(self, folder: Path, visible: Path, network: str = NETWORK, *, debian: bool = False) -> None:
        super().__init__()
        self.network, self.debian = network, debian
        self.folder, self.visible = folder, (folder, REPOSITORY, Path(sys.prefix), visible)
        self.key, self.ssh_config = folder / "key", folder / "ssh_config"
        self.environment_file = folder / "deepspeed_env"

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True)
        make_key(self.key)
        self.ssh_config.write_text(SSH_CONFIG.format(key=self.key))
        self.environment_file.write_text("".join(f"{name}={value}\n" for name, value in TRAVELS.items()))
        self.switch = Namespace(["--net"], ["sh", "-c", SWITCH])
        try:
            self.switch.ip("link add br0 type bridge", "link set br0 up")
            for index in (1, 2):
                self.append(Host(self, index))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for host in self:
            host.end()
        self.switch.end()

    def hostfile(self, path: Path, slots: int = 2, names: Sequence[str] = ("worker-1", "worker-2")) -> Path:
        """Write DeepSpeed's list of hosts, and return ``path``."""
        path.write_text("".join(f"{name} slots={slots}\n" for name in names))
        return path

    def stall(self) -> None:
        """Let the switch drop every frame from now on, without a word to either side."""
        for host in self:
            self.switch.call("bridge", "link", "set", "dev", host.port, "state", "disabled")


def make_key(path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)
