"""Models on the Hugging Face hub: only the needed files are downloaded, to the hub's own cache."""

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
    """Return the result of ``opened`` for the folder of a repository's files that match the patterns ``files``.

    Cached files are enough unless the ``newest`` version is wanted. While ``opened`` raises UserError, more is
    downloaded: first weights in full precision, then fp16. The last error is raised. Raises DataError without a
    repository or network: its message begins with ``key`` (an option, or a key and its value) and ends with
    ``expected``.
    """
    if not is_hub_name(name):
        raise DataError(f"{key} does not exist; {expected}")
    if importlib.util.find_spec("huggingface_hub") is None:
        raise DataError(f"{key} is no folder, and the Hugging Face hub needs a package: pip install 'ddpm_ds[hub]'")
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
            status = getattr(getattr(error, "response", None), "status_code", None)
            message = without_secrets(getattr(error, "server_message", None) or str(error))  # a server may quote one
            reason = (message.strip().splitlines() or [type(error).__name__])[0]
            reason = reason if status is None else f"{status}: {reason}"
            what = f"is no folder, and the Hugging Face hub does not give it ({reason})"
            raise DataError(f"{key} {what}; {expected}") from None
        try:
            return opened(folder)
        except UserError as error:
            fault = error
    assert fault is not None
    raise fault
