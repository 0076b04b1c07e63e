"""Detection and removal of secrets in environment variables and addresses. Does not import torch.

Secrets never appear in messages or on command lines, and only its owner can read a file that holds any. How users pass
secrets: docs/security.md.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

_NAME = r"TOKEN|KEY|SECRET|PASS(?:WORD|WD|PHRASE)|AUTH(?!OR)|CREDENTIAL"
_SECRET_NAME = re.compile(_NAME, re.IGNORECASE)
# A password may contain an @, and a database's also a slash, so everything up to the last @ is removed.
_USER = re.compile(r"(?<=://)(?:[^/\s'\"]*|[^/:\s'\"]*:[^\s'\"]*)@")
_PARAMETER = re.compile(rf"([?&;][^=&;\s]*(?:{_NAME})[^=&;\s]*=)[^&;#\s'\"]+", re.IGNORECASE)


def without_secrets(text: str) -> str:
    """Return the text with users, passwords and the values of secret parameters removed from every address.

    ``https://me:pw@host/x?api_key=1`` becomes ``https://host/x?api_key=***``.
    """
    return _PARAMETER.sub(r"\1***", _USER.sub("", text))


def is_secret(name: str, value: str) -> bool:
    """Return whether an environment variable is secret: by its name, or by an address in its value with a user, a
    password or a secret parameter.
    """
    return _SECRET_NAME.search(name) is not None or without_secrets(value) != value


def shown(name: str, value: str) -> str:
    """Return a variable's value, or ``***`` if it is secret."""
    return "***" if is_secret(name, value) else value


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read, even while it is being written.

    Raises:
        OSError: it can't be written, or belongs to somebody else.
    """
    with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
        os.fchmod(file.fileno(), 0o600)  # the file may have existed
        file.truncate()
        file.write(content)
