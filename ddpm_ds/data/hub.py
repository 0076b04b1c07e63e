"""Models on the Hugging Face hub: downloaded to its own cache, only the files that are needed, and uploaded."""

import contextlib
import importlib.util
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from ddpm_ds.ground.errors import DataError, OutputError, UserError
from ddpm_ds.ground.secret import public_address, without_secrets

Opened = TypeVar("Opened")
OTHER_FORMATS = ("*.bin", "*.msgpack", "*.onnx*", "*.xml", "*.h5", "*.non_ema*")
HALVES = "*.fp16*"
MAY_NOT = (401, 403)
LOG_IN = "log in with a token that may write there: `hf auth login`, or HF_TOKEN"


def is_hub_name(name: str) -> bool:
    """Return whether a name is of the form ``OWNER/NAME``."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None and name.split("/")[0] not in (".", "..")


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


def check_upload(name: str, *, public: bool, overwrite: bool) -> None:
    """Check that :func:`upload` may change the repository ``name``; raises OutputError."""
    if importlib.util.find_spec("huggingface_hub") is None:
        raise OutputError(f"--push-to-hub {name} needs a package that is missing: pip install 'ddpm_ds[hub]'")
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    with _faults(name, "can't be looked up"):
        HfApi().whoami()
        try:
            found = HfApi().model_info(name)
        except RepositoryNotFoundError:
            return
    if not overwrite:
        raise OutputError(f"--push-to-hub {name} exists; name another, or replace its files with --overwrite")
    if found.private is public:
        there, fix = ("private", "leave out --public") if public else ("public", "say --public")
        raise OutputError(f"--push-to-hub {name} exists and is {there}; {fix}, or change that on its page")


def upload(name: str, folder: Path, message: str, *, public: bool) -> str:
    """Make a repository hold the files of ``folder`` alone; return the commit's address. Raises OutputError."""
    from huggingface_hub import HfApi

    with _faults(name, f"is not uploaded ({folder} is whole; hf upload {name} {shlex.quote(str(folder))} .)"):
        HfApi().create_repo(name, private=not public, exist_ok=True)
        done = HfApi().upload_folder(repo_id=name, folder_path=folder, commit_message=message, delete_patterns="*")
    return public_address(done.commit_url)


@contextlib.contextmanager
def _faults(name: str, what: str) -> Iterator[None]:
    """Turn any error of the body into one line."""
    from huggingface_hub import get_token

    try:
        yield
    except Exception as error:  # huggingface_hub raises many types
        fix = f"; {LOG_IN}" if _status(error) in MAY_NOT else ""
        raise OutputError(f"--push-to-hub {name} {what}: {_reason(error, get_token() or '')}{fix}") from None


def _status(error: Exception) -> int | None:
    """Return the code of an answer of the hub's that an error is about."""
    return getattr(getattr(error, "response", None), "status_code", None)


def _reason(error: Exception, token: str = "") -> str:
    """Return an error of huggingface_hub in one line, without the token, which a server may quote."""
    status, message = _status(error), getattr(error, "server_message", None) or str(error)
    lines = without_secrets(message, token).strip().splitlines() or [type(error).__name__]
    return lines[0] if status is None else f"{status}: {lines[0]}"
