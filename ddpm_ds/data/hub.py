"""Models on the Hugging Face hub: downloaded to its own cache, only the files that are needed, and uploaded."""

import contextlib
import importlib.util
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn, TypeVar

from ddpm_ds.errors import DataError, OutputError, UserError
from ddpm_ds.secret import public_address, without_secrets

Opened = TypeVar("Opened")
OTHER_FORMATS = ("*.bin", "*.msgpack", "*.onnx*", "*.xml", "*.h5", "*.non_ema*")
HALVES = "*.fp16*"
MAY_NOT = (401, 403)
LOG_IN = "log in with a token that may write there: `hf auth login`, or HF_TOKEN"


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
        raise DataError(f"{said} is no folder, and a name on the Hugging Face hub needs: pip install 'ddpm_ds[hub]'")
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
            raise DataError(f"{said} {what}; {expected}") from None
        try:
            return opened(folder)
        except UserError as error:
            fault = error
    assert fault is not None
    raise fault


class Upload:
    """A repository on the Hugging Face hub that one commit makes or overwrites. Its token is neither shown nor kept.

    Raises:
        OutputError: by all: there is no network, the hub refuses the token, or the repository can't be made or written.
            The message says what is left; nothing is changed before :meth:`push`.
    """

    def __init__(self, name: str, *, public: bool, overwrite: bool) -> None:
        """Look up the repository ``name``; one that exists must be ``public`` or private as is asked."""
        self.name, self._public, self._token = name, public, ""
        self._head: str | None = None
        self._files: set[str] = set()
        if importlib.util.find_spec("huggingface_hub") is None:
            self._refuse("needs a package that is missing: pip install 'ddpm_ds[hub]'")
        from huggingface_hub import HfApi, get_token
        from huggingface_hub.errors import RepositoryNotFoundError
        from huggingface_hub.utils import logging, validate_repo_id

        logging.set_verbosity_error()
        with self._faults("is a name that the hub does not take"):
            validate_repo_id(name)
        with self._faults("needs a token, and none can be had"):
            self._token = get_token() or ""
        if not self._token:
            self._refuse(f"needs a token, and there is none; {LOG_IN}")
        self._api = HfApi(token=self._token)
        with self._faults("can't be looked up"):
            if self._api.whoami().get("auth", {}).get("accessToken", {}).get("role") == "read":
                self._refuse(f"is refused: the token may only read; {LOG_IN}")
            try:
                found = self._api.model_info(name)
            except RepositoryNotFoundError:
                return
        if not overwrite:
            self._refuse("exists; name another, or replace its files by a new commit with --overwrite")
        if found.private is public:
            there, fix = ("private", "leave out --public") if public else ("public", "say --public")
            self._refuse(f"exists and is {there}; {fix}, or change that on its page")
        with self._faults("exists, and is not yours to overwrite"):
            self._api.auth_check(name, write=True)
        self._head, self._files = found.sha, {file.rfilename for file in found.siblings or ()}

    @property
    def page(self) -> str:
        """Address of the repository's page."""
        return public_address(f"{self._api.endpoint}/{self.name}")

    def push(self, folder: Path, message: str) -> str:
        """Make the repository hold the files of ``folder`` alone, by one commit; return the commit's address."""
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        files = {file.relative_to(folder).as_posix(): file for file in folder.rglob("*") if file.is_file()}
        gone = sorted(self._files - files.keys() - {".gitattributes"})  # which says how the hub stores the files
        left = f"{self.page} is as it was"
        if self._head is None:
            with self._faults(f"can't be made, so nothing is uploaded; {folder} is whole"):
                self._api.create_repo(self.name, private=not self._public)
            left = f"{self.page} is made, and empty"
        again = f"hf upload {self.name} {shlex.quote(str(folder))} ."
        with self._faults(f"has not taken the files: {left}, and {folder} is whole; to upload it: {again}"):
            # upload_folder makes several commits, between which a model is half there
            done = self._api.create_commit(
                self.name,
                [
                    *(CommitOperationAdd(place, file) for place, file in sorted(files.items())),
                    *map(CommitOperationDelete, gone),
                ],
                commit_message=message,
                parent_commit=self._head,
            )
        return public_address(done.commit_url)

    def _refuse(self, what: str) -> NoReturn:
        raise OutputError(f"--push-to-hub {self.name} {what}")

    @contextlib.contextmanager
    def _faults(self, what: str) -> Iterator[None]:
        """Turn any other error of the body into one line."""
        try:
            yield
        except OutputError:
            raise
        except Exception as error:  # huggingface_hub raises many types
            fix = f"; {LOG_IN}" if _status(error) in MAY_NOT else ""
            self._refuse(f"{what} ({_reason(error, self._token)}){fix}")


def _status(error: Exception) -> int | None:
    """Return the code of an answer of the hub's that an error is about."""
    return getattr(getattr(error, "response", None), "status_code", None)


def _reason(error: Exception, token: str = "") -> str:
    """Return an error of huggingface_hub in one line, without the token, which a server may quote."""
    status, said = _status(error), getattr(error, "server_message", None) or str(error)
    lines = without_secrets(said, token).strip().splitlines() or [type(error).__name__]
    return lines[0] if status is None else f"{status}: {lines[0]}"
