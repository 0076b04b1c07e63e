"""The rule for which variables and which parts of an address are secret, and how they are left out. No torch.

Secrets stand neither in messages nor on command lines, and files that hold any are their owner's alone. How a user
hands them on: docs/security.md.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

_NAME = r"TOKEN|KEY|SECRET|PASS(?:WORD|WD|PHRASE)|AUTH(?!OR)|CREDENTIAL"
_SECRET_NAME = re.compile(_NAME, re.IGNORECASE)
# A database's password may hold a slash and any address's an @, so all up to the last @ goes.
_USER = re.compile(r"(?<=://)(?:[^/\s'\"]*|[^/:\s'\"]*:[^\s'\"]*)@")
_PARAMETER = re.compile(rf"([?&;][^=&;\s]*(?:{_NAME})[^=&;\s]*=)[^&;#\s'\"]+", re.IGNORECASE)


def without_secrets(text: str) -> str:
    """Return the text without user and password, and without the values of secret parameters, of every address in it.

    ``https://me:pw@host/x?api_key=1`` becomes ``https://host/x?api_key=***``.
    """
    return _PARAMETER.sub(r"\1***", _USER.sub("", text))


def is_secret(name: str, value: str) -> bool:
    """Return whether an environment variable must not be shown: its name says so, or its value has an address with
    a user, a password or a secret parameter.
    """
    return _SECRET_NAME.search(name) is not None or without_secrets(value) != value


def shown(name: str, value: str) -> str:
    """Return a variable's value as it may be shown: ``***`` where it is secret."""
    return "***" if is_secret(name, value) else value


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only its owner may read, from its first byte on.

    Raises:
        OSError: it can't be written, or belongs to somebody else.
    """
    with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
        os.fchmod(file.fileno(), 0o600)  # it may have been there
        file.truncate()
        file.write(content)
