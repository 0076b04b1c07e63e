"""Addresses of MLflow's stores and of the pages of its UI. Does not import MLflow."""

import logging
import os
import re
import shlex
from importlib.metadata import entry_points
from pathlib import Path
from urllib.parse import urlsplit

from ddpm_ds.ground.errors import SpecError, shortened
from ddpm_ds.ground.secret import public_address, without_secrets

SQLITE = "sqlite:///"
LOCAL_UI = "http://127.0.0.1:5000"  # where `mlflow ui` listens
TRAINING_MODE = "workflowType=machine_learning"  # MLflow's UI opens in its mode for language models by default
REASON_CHARACTERS = 400  # kept of an MLflow error, which may end with its fix
SERVERS = ("http", "https", "databricks")  # schemes of tracking URIs
DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
PLUGINS = "mlflow.tracking_store"  # entry points of packages that add schemes
EXAMPLES = ("http://HOST:5000", "sqlite:////FOLDER/mlflow.db", "mysql+pymysql://USER:PASSWORD@HOST:3306/DATABASE")
EXPERIMENT = "MLFLOW_EXPERIMENT_NAME"
DRIVERS = {"MySQLdb": "mysqlclient", "psycopg": "psycopg[binary]", "psycopg2": "psycopg2-binary"}
"""Packages to install for modules of another name."""
MLFLOW = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # the sender retries by itself, and can be woken while it waits
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}
"""Defaults for MLflow's client, with which it soon reports a server that is down."""


def page_of(tracking_uri: str, page: str) -> tuple[str, str | None]:
    """Return the address of a page (``/#/...``) of MLflow's UI, and the command that serves it; None for a server."""
    uri = public_address(tracking_uri)
    if page:
        page += f"{'&' if '?' in page else '?'}{TRAINING_MODE}"
    if uri.startswith(("http://", "https://")):
        return f"{uri.rstrip('/')}{page}", None
    serve = f"mlflow ui --backend-store-uri {shlex.quote(uri)}"  # listens on loopback only
    if uri != tracking_uri:  # keep the secret off the command line
        serve = 'MLFLOW_BACKEND_STORE_URI="$MLFLOW_TRACKING_URI" mlflow ui'
    return f"{LOCAL_UI}{page}", serve


def quiet() -> None:
    """Silence MLflow, and set :data:`MLFLOW` where the user has set nothing else."""
    logging.disable(logging.CRITICAL)
    for name, value in MLFLOW.items():
        os.environ.setdefault(name, value)


def reason(error: BaseException) -> str:
    """Return the first cause of an error, in one line."""
    while cause := error.__cause__ or error.__context__:
        error = cause
    return shortened(" ".join(without_secrets(str(error)).split()), REASON_CHARACTERS) or type(error).__name__


def resolve_uri(output_root: Path | str) -> str:
    """Return the tracking URI of the runs in an output root: ``MLFLOW_TRACKING_URI``, else SQLite in the root."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"{SQLITE}{output_root}/mlflow.db"


def sqlite_file(uri: str) -> Path | None:
    """Return the file of an SQLite tracking URI; None for all others."""
    path = uri.removeprefix(SQLITE).partition("?")[0]
    return Path(path) if uri.startswith(SQLITE) and not path.startswith((":", "file:")) else None


def uri_fault(uri: str) -> str | None:
    """Return why MLflow can't use a tracking URI, with the fix; None if it can."""
    address = public_address(uri)
    named = f"MLFLOW_TRACKING_URI={address}"
    try:
        scheme = urlsplit(uri).scheme
    except ValueError:  # brackets that do not close
        scheme = "unreadable"
    if uri == "databricks" or scheme in SERVERS:
        return None
    if re.fullmatch(r"(.*@)?([\w.-]+|\[[\da-fA-F:]+\]):\d+(/.*)?", uri):
        return f"{named} has no scheme; write http://{address}"
    if len(scheme) < 2 or scheme == "file":
        if os.environ.get("MLFLOW_ALLOW_FILE_STORE", "").lower() in ("true", "1"):
            return None
        path = os.path.abspath(address.removeprefix("file:"))
        file = path if path.endswith(".db") else f"{path}/mlflow.db"
        return f"{named} is a path, and MLflow 3 keeps no runs in folders; write {SQLITE}{file}"
    if scheme == "sqlite":
        store = sqlite_file(uri)
        return f"{named} is a folder; write {SQLITE}{store}/mlflow.db" if store is not None and store.is_dir() else None
    if scheme.partition("+")[0] not in DATABASES:
        known = entry_points(group=PLUGINS, name=scheme)
        return None if known else f"{named} is no store of MLflow's; write {' or '.join(EXAMPLES)}"
    from sqlalchemy import exc, make_url

    try:
        make_url(uri).get_dialect().import_dbapi()
    except ImportError as error:
        package = DRIVERS.get(error.name or "", error.name)
        return f"{named} needs the driver {error.name}, which is not installed; pip install '{package}'"
    except (exc.SQLAlchemyError, ValueError):  # their messages may have parts of a password
        return f"{named} can't be read; write it as {EXAMPLES[-1]}, with %40 for an @ in the password"
    return None


def check_tracking_uri(output_root: Path) -> str:
    """Return the tracking URI of the runs in an output root; raises SpecError if MLflow can't use it."""
    uri = resolve_uri(output_root.resolve())
    if fault := uri_fault(uri):
        raise SpecError(fault)
    return uri


def check_experiment(name: str, output_root: Path) -> None:
    """Check, without asking a server, that the runs of an output root can be logged to an experiment.

    Raises:
        SpecError: MLflow can't use the tracking URI, or the environment names another experiment.
    """
    check_tracking_uri(output_root)
    if (other := os.environ.get(EXPERIMENT, name)) != name:
        raise SpecError(
            f"{EXPERIMENT}={other} differs from logging.experiment = {name}, which counts; give --set "
            f"{shlex.quote(f'logging.experiment={other}')}, or unset {EXPERIMENT}"
        )
