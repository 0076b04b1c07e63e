"""Detection and removal of secrets in environment variables, addresses and other programs' messages. Imports no torch.

Only scheme, host, port and path of an address are shown. Messages of MLflow, database drivers and HTTP clients lose
every value that the environment has in secret variables or in other parts of addresses. How users pass secrets:
docs/security.md.
"""

import functools
import json
import os
import re
from collections.abc import Iterator
from urllib.parse import quote, unquote, unquote_plus

SHORTEST = 4
"""Fewest characters of a secret that is looked for in messages: shorter ones are parts of ordinary words."""

_SECRET_NAME = re.compile(
    r"TOKEN|KEY|SECRET|PASS(?:WORD|WD|PHRASE|(?![A-Z]))|_PWD|JWT|AUTH(?!OR)|CREDENTIAL", re.IGNORECASE
)
_NAME_OF_ADDRESS = re.compile(r"_UR[IL]$", re.IGNORECASE)
_ADDRESS_IN_TEXT = re.compile(r"[A-Za-z][\w+.-]*://(?:[^\s/]*:\S*@)?[^\s'\"<>()]*")
_ORDINARY = re.compile(r"true|false|none|[\d.]{,5}", re.IGNORECASE)

# An address is scheme, user, host, port, path, and a rest that is not shown.
_SCHEME = re.compile(r"(?:[A-Za-z][\w+.-]*://|file:(?=/))?")
_USER = re.compile(r"(?:[^/:?#]*:.*@|[^/?#]*@)?", re.DOTALL)  # a password may have any character, a database's also /
_HTTP_PORT = re.compile(r"[\w.-]+:\d+(?:[/?#]|$)")  # of an address without a user, whose path may have an @
_HOST = r"(?:\[[\da-fA-F:.]*\]|[\w.~-]*)(?::\d+(?![^/?#]))?"
_PLACE = re.compile(rf"{_HOST}(?:/[^?#;&]*)?")
_FILE = re.compile(rf"{_HOST}(?:/(?:[^?#;&]|[#;&](?![^/=]*=))*)?")


def public_address(address: str) -> str:
    """Return scheme, host, port and path of an address, such as a tracking URI; its scheme may be missing.

    ``https://me:pw@host:5000/x?api_key=1`` becomes ``https://host:5000/x``.
    """
    return _parts(address)[0]


def without_secrets(text: str, *others: str) -> str:
    """Return another program's message without the environment's secrets and ``others``, and with public addresses."""
    secrets = set(others)
    for name, value in os.environ.items():
        if _SECRET_NAME.search(name):
            secrets.add(value)
            continue
        for address in _addresses(name, value):
            public, user, rest = _parts(address)
            text = text.replace(address, public)
            secrets |= {user.partition(":")[2] if ":" in user else user, rest, *_values(rest)}
    secrets |= {decode(secret) for secret in secrets for decode in (unquote, unquote_plus)}
    known = [bare for secret in secrets if len(bare := secret.strip()) >= SHORTEST and not _ORDINARY.fullmatch(bare)]
    if known:
        patterns = ("".join(map(_character, secret)) for secret in sorted(known, key=len, reverse=True))
        text = re.sub("|".join(patterns), "***", text, flags=re.IGNORECASE)
    return _ADDRESS_IN_TEXT.sub(lambda found: public_address(found[0]), text)


def is_secret(name: str, value: str) -> bool:
    """Return whether an environment variable is secret: by its name, or by an address that is not all public."""
    private = any(public_address(address) != address for address in _addresses(name, value))
    return private or _SECRET_NAME.search(name) is not None


def shown(name: str, value: str) -> str:
    """Return a variable's value, or ``***`` if it is secret."""
    return "***" if is_secret(name, value) else value


def _addresses(name: str, value: str) -> list[str]:
    """Return the addresses in a variable's value. A variable ``..._URL`` is one address, perhaps without a scheme."""
    if _NAME_OF_ADDRESS.search(name) or "://" in _matched(_SCHEME, value):
        return [value]
    return _ADDRESS_IN_TEXT.findall(value)


def _parts(address: str) -> tuple[str, str, str]:
    """Return the public part of an address, its user with the password, and all that follows its path."""
    scheme = _matched(_SCHEME, address)
    after = address.removeprefix(scheme)
    web = scheme.lower() in ("http://", "https://")
    user = "" if web and _HTTP_PORT.match(after) else _matched(_USER, after)
    after = after.removeprefix(user)
    place = _matched(_FILE if not scheme or scheme.startswith(("file:", "sqlite")) else _PLACE, after)
    rest = after.removeprefix(place)
    if scheme and not user and rest.startswith(":"):  # no port follows, so this is a user or a token
        user, place = place, ""
    return scheme + place, user.removesuffix("@"), rest


def _matched(pattern: re.Pattern[str], text: str) -> str:
    """Return the beginning of a text that a pattern, which may be empty, matches."""
    found = pattern.match(text)
    return found[0] if found else ""


def _values(rest: str) -> Iterator[str]:
    """Yield possible secrets in the end of an address, such as ``?token=1#x``; also within ``odbc_connect``."""
    for separators in ("&", "&;", "?#&;"):
        for part in re.split(f"[{separators}]", rest):
            value = part.partition("=")[2] if "=" in part else part.lstrip(":")
            yield value
            if value != rest and (decoded := unquote_plus(value)) != value:
                yield from _values(decoded)


@functools.cache
def _character(one: str) -> str:
    """Return the pattern of one character of a secret: as it is, as in an address, or escaped between quotes."""
    if one.isascii() and one.isalnum():
        return one
    escaped = (json.dumps(one)[1:-1], repr(f"{one}'")[1:-2], f"\\{one}")
    written = [re.escape(way) for way in (quote(one, safe="", errors="surrogateescape"), *escaped, one)]
    written += [r"\+", r"\s*"] if one.isspace() else []  # in an address; in a message that is broken into lines
    return f"(?:{'|'.join(written)})"
