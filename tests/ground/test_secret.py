"""What is secret, and that no message shows it."""

import json
import os
from collections.abc import Callable
from functools import partial
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpm_ds.ground.secret import is_secret, public_address, shown, without_secrets

PUBLIC = {
    "https://me:hush@host:5000/x?run=1&api_key=hush#hush": "https://host:5000/x",
    "https://hush@host/": "https://host/",
    "http://me:hu@sh@host/": "http://host/",
    "https://host;jwt=hush": "https://host",
    "https://me:hush/x": "https://",
    "http://HUSH:x": "http://",
    "me:hush@host:5000/x": "host:5000/x",
    "hush@host": "host",
    "host:5000/?sig=hush": "host:5000/",
    "postgresql+psycopg2://bob:hush@db/ml": "postgresql+psycopg2://db/ml",
    "mysql+pymysql://bob:12/hu'sh \n?@db:3306/ml": "mysql+pymysql://db:3306/ml",
    "postgresql://db/ml?user=bob;sslpassword=hush": "postgresql://db/ml",
    "mssql+pyodbc:///?odbc_connect=DRIVER%3Dx%3BPWD%3Dhush": "mssql+pyodbc:///",
    "mssql://host/ml;pwd=hush": "mssql://host/ml",
    "sqlite+pysqlcipher://:hu/sh@//a/mlflow.db": "sqlite+pysqlcipher:////a/mlflow.db",
    "sqlite:////a/mlflow.db?key=hush": "sqlite:////a/mlflow.db",
    "sqlite:////a/mlflow.db#token=hush": "sqlite:////a/mlflow.db",
    "databricks://scope:hush": "databricks://",
    "databricks://hush:x": "databricks://",
    "databricks-uc://hush:x": "databricks-uc://",
}
SECRET_NAMES = (
    *("MLFLOW_TRACKING_AUTH", "MLFLOW_GATEWAY_KEY", "MLFLOW_TRACKING_PASSWORD", "SSH_PASSPHRASE", "wandb_api_key"),
    *("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "GOOGLE_APPLICATION_CREDENTIALS", "DB_PASS", "DB_PWD", "NCCL_JWT"),
)
NO_SECRETS = (
    *("sqlite:////a/b@c/mlflow.db", "sqlite:////a#b;c/d e/mlflow.db", "/data/a:b@c/mlruns", "file:/data/x", "mlruns"),
    *("http://host/a@b", "https://host:5000/users/me@there", "http://[::1]:5000/x", "localhost:5000", "databricks", ""),
)


@pytest.mark.parametrize("address", PUBLIC)
def test_of_an_address_only_scheme_host_port_and_path_are_shown(address: str) -> None:
    assert public_address(address) == PUBLIC[address] and "hush" not in PUBLIC[address]
    assert is_secret("MLFLOW_TRACKING_URI", address) and shown("MLFLOW_TRACKING_URI", address) == "***"
    assert "://" not in address or is_secret("ANY", address)


@pytest.mark.parametrize("address", NO_SECRETS)
def test_an_address_without_secrets_stays_as_it_is(address: str) -> None:
    assert public_address(address) == address and not is_secret("MLFLOW_TRACKING_URI", address)


PLACES: dict[str, Callable[[str], str]] = {
    "https://{}@host:5000/x": partial(quote, safe=""),
    "https://me:{}@host:5000/x": partial(quote, safe=""),
    "https://host:5000/x?token={}": quote_plus,
    "https://host:5000/x;jwt={}#y": quote_plus,
    "https://host:5000/#token={}": quote_plus,
    "host:5000/x?sig={}": quote_plus,
    "me:{}@host:5000": str,
    "mysql+pymysql://bob:{}@host:3306/ml": str,
    "postgresql://bob:{}@host/ml?sslmode=require": partial(quote, safe=""),
    "postgresql://host/ml?password={}": quote_plus,
    "sqlite:////a/mlflow.db?key={}": str,
    "mssql+pyodbc:///?odbc_connect={}": lambda secret: quote_plus(f"DRIVER=x;PWD={quote_plus(secret)};UID=me"),
}
"""Templates of addresses with the place of a secret, and how it is written there."""


@pytest.mark.parametrize("place", PLACES)
@given(st.text("'\"@/?#&;:=%+ \n\\aé1", max_size=6), st.text("'\"@/?#&;:=%+ \n\\aé1", max_size=6))
@settings(deadline=None, max_examples=15, database=None)
def test_a_secret_is_found_in_every_place_of_an_address_and_in_what_others_say(
    place: str, before: str, after: str
) -> None:
    secret = f"{before}HUSH{after}"
    written = PLACES[place](secret)
    address = place.replace("{}", written)
    assert "HUSH" not in public_address(address)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", address)
        patch.setenv("NCCL_TOKEN", secret)
        quoted = (quote(secret), quote_plus(secret), repr(secret), json.dumps(secret))
        for said in (address, repr(address), f"'{address}/api'", written, secret, " ".join(secret.split()), *quoted):
            assert "HUSH" not in without_secrets(f"it failed ({said}); see http://docs/x")


def test_what_others_say_stays_readable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "postgresql://bob:hush@db/ml?connect_timeout=30&x=true&sslkey=hidden")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    text = "bob's 30 s at db, true or false: see https://docs/x, or ftp://you:pw@there/a"
    assert without_secrets(text) == text.replace("you:pw@", "")
    assert without_secrets(f"{os.environ['MLFLOW_TRACKING_URI']} fails: hush, hidden") == (
        "postgresql://db/ml fails: ***, ***"
    )
    assert without_secrets("{'uri': 's3://key:hush@bucket', 'other': 'me@host'}") == (
        "{'uri': 's3://bucket', 'other': 'me@host'}"
    )


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_names_of_secrets_are_known(name: str) -> None:
    assert is_secret(name, "hush") and shown(name, "hush") == "***"
    for other in ("GIT_AUTHOR_NAME", "OLDPWD", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS", "MLFLOW_EXPERIMENT_NAME"):
        assert not is_secret(other, "4")
