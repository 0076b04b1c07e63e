"""The environment that has to travel to other hosts: DeepSpeed's ``.deepspeed_env``, read tolerantly.

DeepSpeed's own reader stops at a blank line or a comment, and pastes what follows ``=`` into a line of the remote
shell, inside double quotes where it holds more than letters. So that is what a value means here: as between double
quotes of a shell, with ``\\``, ``"``, ``$`` and the backquote behind a backslash.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from ddpm_ds.errors import SpecError

ENVIRONMENT_FILE = ".deepspeed_env"
ENVIRONMENT_FILE_VARIABLE = "DS_ENV_FILE"
"""Names another file than ``ENVIRONMENT_FILE``, here as for DeepSpeed."""

_LINE = re.compile(r"(?:export\s+)?(?P<name>[A-Za-z_]\w*)\s*=\s*(?P<value>.*)", re.ASCII)
_VALUE = re.compile(
    r"""'(?P<literal>[^']*)'(?:\s*;)?(?:\s+\#.*)?
    |"(?P<quoted>(?:[^"\\]|\\.)*)"(?:\s*;)?(?:\s+\#.*)?
    |(?P<bare>(?!['"\#])(?:(?!\s+\#).)*?)(?:\s+\#.*)?
    |(?:\#.*)?""",
    re.VERBOSE,
)
_ESCAPED = re.compile(r'\\([\\"$`])')


def read_environment(path: Path) -> dict[str, str]:
    """The variables of a file; blank lines, comments, ``export``, quotes and spaces around ``=`` are understood.

    Raises:
        SpecError: the file can't be read, or a line is no KEY=VALUE, or its value depends on the shell that reads it.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path} can't be read ({error}); mend or delete it") from None
    values = {}
    for number, line in enumerate(map(str.strip, lines), start=1):
        if line and not line.startswith("#"):
            name, value = _assignment(line, f"{path}, line {number}")
            values[name] = value
    return values


def find_environment() -> dict[str, str]:
    """The variables of the user's file, and over them those of the file in the working folder, as DeepSpeed reads them.

    Raises:
        SpecError: see :func:`read_environment`.
    """
    name = os.environ.get(ENVIRONMENT_FILE_VARIABLE, ENVIRONMENT_FILE)
    values: dict[str, str] = {}
    for path in (Path.home() / name, Path(name)):
        if path.is_file():
            values |= read_environment(path)
    return values


def write_environment(path: Path, values: Mapping[str, str]) -> None:
    """Write what DeepSpeed's reader accepts, a line for each variable; it knows no comments.

    Raises:
        SpecError: a name is none of a shell, or a value can't be written so that both readers have it back.
    """
    lines = []
    for name, value in values.items():
        line = f"{name}={re.sub(_NEEDS_ESCAPE, _BACKSLASH, value)}"
        if line.splitlines() != [line] or _assignment(line.strip(), str(path)) != (name, value):
            raise SpecError(f"{name}={value!r} can't be kept in {path}; leave out its quotes, ' #' and outer spaces")
        lines.append(f"{line}\n")
    path.write_text("".join(lines))


_NEEDS_ESCAPE, _BACKSLASH = re.compile(r'[\\"$`]'), r"\\\g<0>"


def _assignment(line: str, where: str) -> tuple[str, str]:
    found = _LINE.fullmatch(line)
    if found is None:
        raise SpecError(f"{where}: {line!r} is not KEY=VALUE; write it as: GLOO_SOCKET_IFNAME=eth0")
    value = _VALUE.fullmatch(found["value"])
    if value is None:
        raise SpecError(f"{where}: the quotes of {line!r} don't close; close them, or put a backslash before each")
    if value["literal"] is not None:
        return found["name"], value["literal"]
    text = value["quoted"] or value["bare"] or ""
    if re.search(r"[$`]", _ESCAPED.sub("", text)):
        raise SpecError(
            f"{where}: {line!r} would be another value in each shell; write it out, or \\$ where the sign is meant"
        )
    return found["name"], _ESCAPED.sub(r"\1", text)
