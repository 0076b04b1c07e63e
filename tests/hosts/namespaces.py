"""Namespaces that live as long as a process holds them, and the network devices in them."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence

import psutil

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PROGRAMS = ("unshare", "nsenter", "ip", "bridge", "mount", "hostname", "sshd", "ssh", "ssh-keygen", "pdsh")
"""Programs that hosts on one machine are made with, and that their tests run in them."""
END_SECONDS = 10.0


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
        self._holder = subprocess.Popen(
            ["unshare", *kinds, "--fork", "--kill-child", *command],
            env={"PATH": SYSTEM_PATH},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != "ready\n":
            _, said = self._holder.communicate(timeout=END_SECONDS)
            raise ChildProcessError(f"{' '.join(command)} ended with {self._holder.returncode}: {said}")
        self.pid = psutil.Process(self._holder.pid).children()[0].pid

    def end(self) -> None:
        """Kill everything in it."""
        with contextlib.suppress(ProcessLookupError):
            if self._holder.poll() is None:
                os.kill(self.pid, signal.SIGKILL)
        self._holder.communicate(timeout=END_SECONDS)

    def enter(self, argv: Sequence[str]) -> list[str]:
        """The command that runs ``argv`` in it."""
        return ["nsenter", "-t", str(self.pid), "-m", "-u", "-n", "-p", *argv]

    def call(self, *argv: str) -> str:
        """Run a program of the system in it, and return what it printed."""
        command = ["nsenter", "-t", str(self.pid), "-m", "-n", *argv]
        return subprocess.run(command, env={"PATH": SYSTEM_PATH}, check=True, stdout=subprocess.PIPE, text=True).stdout

    def ip(self, *lines: str) -> None:
        """Run commands of ``ip`` in it."""
        command = ["nsenter", "-t", str(self.pid), "-n", "ip", "-batch", "-"]
        subprocess.run(command, env={"PATH": SYSTEM_PATH}, check=True, input="\n".join(lines), text=True)


class Program(subprocess.Popen[str]):
    """A program in a namespace, for which the process outside only waits."""

    def end(self) -> None:
        """Kill the program and all that it has started, and wait for it."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self.wait(END_SECONDS)
