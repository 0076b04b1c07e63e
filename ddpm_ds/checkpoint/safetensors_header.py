"""The header of a safetensors file, written by hand so that the tensors after it can be streamed.

Eight bytes little-endian length, JSON, then the raw tensors without gaps, in the header's order.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

ELEMENT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


def header(tensors: Iterable[tuple[str, str, tuple[int, ...], int]], metadata: Mapping[str, str]) -> bytes:
    """The bytes before the first tensor; ``tensors`` are (key, dtype, shape, elements) in the order of their bytes."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    at = 0
    for key, dtype, shape, elements in tensors:
        end = at + elements * ELEMENT_BYTES[dtype]
        entries[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # readers that map the file want aligned tensors
    return len(text).to_bytes(8, "little") + text
