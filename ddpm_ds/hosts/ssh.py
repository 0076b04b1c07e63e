"""The ssh of DeepSpeed's pdsh launcher, for one host: the same options, and never a question on the terminal."""

from __future__ import annotations

import contextlib
import getpass
import os
import shlex
import subprocess
from collections.abc import Sequence

from ddpm_ds.errors import SpecError

PDSH_ARGUMENTS = "PDSH_SSH_ARGS"
"""Variable with pdsh's own options of ssh, instead of its usual ones."""
PDSH_MORE_ARGUMENTS = "PDSH_SSH_ARGS_APPEND"
"""Variable with options of ssh that pdsh puts before those."""
USUAL_ARGUMENTS = "-a -x"
"""No forwarding of agent and X11."""


def ssh(host: str, words: Sequence[str], *, connect_seconds: int = 10) -> list[str]:
    """The command line that runs ``words`` on ``host``; each arrives there as it is, whatever it holds.

    ``host`` is a name of ssh's configuration, an address, or USER@ and one of these.

    Raises:
        SpecError: ssh would take ``host`` for an option, or the environment's options can't be read.
    """
    program, *to_host = ssh_to(host)
    asks_nothing = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={connect_seconds}"]
    return [program, *asks_nothing, *to_host, shlex.join(words)]


def ssh_to(host: str) -> list[str]:
    """The command line up to what runs there: ssh, the options that pdsh gives to it, and the host.

    Raises:
        SpecError: see :func:`ssh`.
    """
    if host.startswith("-"):
        raise SpecError(f"host {host!r} would be an option of ssh; correct the hostfile")
    user, _, name = host.rpartition("@")
    options = [word for variable in (PDSH_MORE_ARGUMENTS, PDSH_ARGUMENTS) for word in _words_of(variable)]
    named = any("%h" in option for option in options)
    for sign, value in (("%h", name), ("%u", user or getpass.getuser())):
        options = [option.replace(sign, value) for option in options]
    as_user = ["-l", user] if user else []
    return ["ssh", *as_user, *options, *([] if named else [name])]


def ssh_settings(host: str) -> dict[str, str]:
    """The settings of pdsh's ssh to a host, by their names in small letters; nothing is connected.

    Empty where ssh does not tell them.

    Raises:
        SpecError: see :func:`ssh`.
    """
    program, *to_host = ssh_to(host)
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        told = subprocess.run([program, "-G", *to_host], capture_output=True, text=True, check=True, timeout=10).stdout
        return dict(line.partition(" ")[::2] for line in told.splitlines())
    return {}


def _words_of(variable: str) -> list[str]:
    text = os.environ.get(variable, USUAL_ARGUMENTS if variable == PDSH_ARGUMENTS else "")
    try:
        return shlex.split(text)
    except ValueError as error:
        raise SpecError(f"{variable}={text!r} can't be read ({error}); close its quotes") from None
