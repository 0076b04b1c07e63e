"""Models on the Hugging Face hub, of which only the files that are needed are downloaded, to the hub's own cache."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from ddpm_ds.errors import DataError, UserError

Opened = TypeVar("Opened")
OTHER_FORMATS = ("*.bin", "*.msgpack", "*.onnx*", "*.xml", "*.h5", "*.non_ema*")
HALVES = "*.fp16*"


def is_hub_name(name: str) -> bool:
    """Return whether a name is of the form ``OWNER/NAME``."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None and name.split("/")[0] not in (".", "..")


def from_hub(
    name: str,
    files: Sequence[str],
    opened: Callable[[Path], Opened],
    *,
    said: str,
    expected: str,
    newest: bool = False,
) -> Opened:
    """Return what ``opened`` makes of a repository's folder, which holds the files that fit the patterns ``files``.

    What is in the cache will do unless the ``newest`` version is asked for. While ``opened`` raises UserError, more is
    downloaded: first weights in full precision, then those in fp16.

    Args:
        said: key and value, or option, that a message begins with.
        expected: what should be there instead, for a message.

    Raises:
        DataError: there is no such repository, or no network.
        UserError: that of ``opened``, if the repository does not hold what it needs.
    """
    if not is_hub_name(name):
        raise DataError(f"{said} does not exist; {expected}")
    if importlib.util.find_spec("huggingface_hub") is None:
        raise DataError(f"{said} is no folder, and a name on the Hugging Face hub needs: pip install huggingface_hub")
    import huggingface_hub
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # else it reports each attempt
    full, both = [*OTHER_FORMATS, HALVES], [*OTHER_FORMATS]
    fault: UserError | None = None
    for ignored, cached in [(full, True), (full, False), (both, False)][newest:]:
        get = partial(huggingface_hub.snapshot_download, name, allow_patterns=[*files], ignore_patterns=ignored)
        try:
            folder = Path(get(local_files_only=cached))
        except Exception as error:  # huggingface_hub raises many types
            if cached:
                continue
            reason = str(error).strip().splitlines() or [type(error).__name__]
            what = f"is no folder, and can't be had from the Hugging Face hub ({reason[0]})"
            raise DataError(f"{said} {what}; {expected}") from None
        try:
            return opened(folder)
        except UserError as error:
            fault = error
    assert fault is not None
    raise fault
