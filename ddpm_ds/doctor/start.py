"""Start a module of this package on a host as DeepSpeed's pdsh launcher starts training there."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from ddpm_ds.doctor.probe import MARK
from ddpm_ds.hosts.ssh import ssh

REACHED = {"step": "reached"}
"""What a host that ssh has reached says first, before anything is looked for there."""
NO_FOLDER, NO_PYTHON, NO_SSH = 71, 72, 255
"""Exit codes: the working folder or the interpreter is not on the host; ssh's own."""


@dataclass(frozen=True)
class Start:
    """The same on every host: interpreter, working folder and environment."""

    python: str
    folder: str
    environment: Mapping[str, str]
    connect_seconds: int

    def command(self, host: str | None, module: str, *arguments: str) -> list[str]:
        """The command line that runs ``python -m module`` on ``host``; without ssh where that is None: here.

        Raises:
            SpecError: the host is none of ssh.
        """
        words = [self.python, "-u", "-m", module, *arguments]
        if host is None:
            return words
        variables = [f"{name}={value}" for name, value in self.environment.items()]
        reached = shlex.quote(MARK + json.dumps(REACHED))
        script = (
            f"echo {reached}; cd {shlex.quote(self.folder)} || exit {NO_FOLDER}; "
            f"test -x {shlex.quote(self.python)} || exit {NO_PYTHON}; "
            f"exec {shlex.join(['env', *variables, *words])}"
        )
        return ssh(host, ["sh", "-c", script], connect_seconds=self.connect_seconds)

    def local_environment(self) -> dict[str, str]:
        """The environment of what runs here without ssh: this one, as DeepSpeed gives it on a single host."""
        return {**os.environ, "PYTHONPATH": self.environment["PYTHONPATH"]}
