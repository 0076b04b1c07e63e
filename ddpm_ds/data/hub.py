"""Models on the Hugging Face hub: downloaded to its own cache, only the files that are needed."""

import importlib.util
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from ddpm_ds.ground.errors import DataError, UserError
from ddpm_ds.ground.secret import without_secrets

Opened = TypeVar("Opened")
OTHER_FORMATS = ("*.bin", "*.msgpack", "*.onnx*", "*.xml", "*.h5", "*.non_ema*")
HALVES = "*.fp16*"


def is_hub_name(name: str) -> bool:
    """Return whether a name is of the form ``OWNER/NAME``; ``runs/NAME`` is always a run on this host."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None and name.split("/")[0] not in (".", "..", "runs")


def from_hub(
    name: str, files: Sequence[str], opened: Callable[[Path], Opened], *, key: str, expected: str, newest: bool = False
) -> Opened:
    """Return the result of ``opened`` for a repository's folder, which holds the files that fit the patterns ``files``.

    Cached files will do unless the ``newest`` version is asked for. While ``opened`` raises UserError, more is
    downloaded: first weights in full precision, then those in fp16; the last error is raised. Raises DataError without
    a repository or network; its message begins with ``key``, an option or a key and its value, and ends with
    ``expected``.
    """
    if not is_hub_name(name):
        raise DataError(f"{key} does not exist; {expected}")
    if importlib.util.find_spec("huggingface_hub") is None:
        raise DataError(f"{key} is no folder, and a name on the Hugging Face hub needs: pip install 'ddpm_ds[hub]'")
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
            what = f"is no folder, and can't be had from the Hugging Face hub ({_reason(error)})"
            raise DataError(f"{key} {what}; {expected}") from None
        try:
            return opened(folder)
        except UserError as error:
            fault = error
    assert fault is not None
    raise fault


def _reason(error: Exception) -> str:
    """Return an error of huggingface_hub in one line, without a secret that a server may quote."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    message = without_secrets(getattr(error, "server_message", None) or str(error))
    lines = message.strip().splitlines() or [type(error).__name__]
    return lines[0] if status is None else f"{status}: {lines[0]}"
