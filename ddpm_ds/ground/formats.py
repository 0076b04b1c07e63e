"""JSON and safetensors from anywhere, read within limits of depth, digits and size."""

import errno
import json
from pathlib import Path
from typing import Any

from ddpm_ds.ground.files import MOST_RECORD_BYTES, open_regular, read_text

DEEPEST = 32
"""Maximum nesting of lists and blocks."""
_TOO_DEEP = f"lists or blocks are more than {DEEPEST} levels deep"
MOST_DIGITS = 40
"""Maximum characters of a number: enough for 64-bit integers and every digit of a float."""


def read_json(path: Path, most: int = MOST_RECORD_BYTES) -> Any:
    """Return the value of a JSON file; raises OSError as :func:`read_text`, ValueError as :func:`parse_json`."""
    return parse_json(read_text(path, most))


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text, limiting the digits of numbers and the depth of nesting.

    Raises ValueError with one line if it is not JSON, has a duplicate key or exceeds a limit.
    """

    def block(pairs: list[tuple[str, object]]) -> dict[str, object]:
        names = [name for name, _ in pairs]
        if twice := next((name for place, name in enumerate(names) if name in names[:place]), None):
            raise ValueError(f"{twice} is given twice in one block")
        return dict(pairs)

    try:
        value = json.loads(
            text,
            object_pairs_hook=block,
            parse_int=lambda number: int(check_digits(number)),
            parse_float=lambda number: float(check_digits(number)),
        )
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except json.JSONDecodeError as error:
        before, found = error.doc[: error.pos].rstrip(), error.doc[error.pos : error.pos + 1]
        if "trailing comma" in error.msg:  # since Python 3.13 the comma's place
            before, found = error.doc[: error.pos + 1], error.doc[error.pos + 1 :].lstrip()[:1]
        if found in ("", "}", "]") or "delimiter" in error.msg:  # the fault stands before the place of the error
            comma = found and before.endswith(",")
            message = f"a comma before {found}; remove it" if comma else error.msg
            raise json.JSONDecodeError(message, error.doc, max(len(before) - 1, 0)) from None
        raise
    level = [value]
    for _ in range(DEEPEST + 1):
        blocks = [block for block in level if isinstance(block, dict | list)]
        level = [item for block in blocks for item in (block.values() if isinstance(block, dict) else block)]
    if level:
        raise ValueError(_TOO_DEEP)
    return value


def open_tensors(path: Path, framework: str = "pt") -> Any:
    """Open a safetensors file for PyTorch or ``"numpy"``, reading names, shapes and types; raises OSError.

    The library checks the header's offsets and sizes against the file; the header's length is limited here.
    """
    from safetensors import SafetensorError, safe_open

    with open_regular(path) as file:
        length = int.from_bytes(file.read(8), "little")
    try:
        if length > MOST_RECORD_BYTES:
            raise SafetensorError
        return safe_open(path, framework)
    except SafetensorError:
        raise OSError(errno.EINVAL, "it is no safetensors file", str(path)) from None


def check_digits(text: str) -> str:
    """Return the text of a number; raises ValueError for too many digits, which could take long to parse."""
    if len(text) > MOST_DIGITS:
        raise ValueError(f"the number {text[:8]}... has more than {MOST_DIGITS} digits")
    return text
