"""What is secret, and where it must not stand: no message, no command line, no file that others may read."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from ddpm_ds.secret import is_secret, shown, without_secrets, write_private

ADDRESSES = {
    "failed at https://me:hush@host:5000/x, retry": "failed at https://host:5000/x, retry",
    "postgresql+psycopg2://bob:hush@db/ml": "postgresql+psycopg2://db/ml",
    "mysql+pymysql://bob:hu/sh@db:3306/ml": "mysql+pymysql://db:3306/ml",
    "https://hush@host/": "https://host/",
    "http://me:hu@sh@host/": "http://host/",
    "https://host/x?run=1&api_key=hush&b=2": "https://host/x?run=1&api_key=***&b=2",
    "postgresql://db/ml?user=bob;sslpassword=hush": "postgresql://db/ml?user=bob;sslpassword=***",
    '{"uri": "s3://key:hush@bucket", "other": "me@host"}': '{"uri": "s3://bucket", "other": "me@host"}',
}
SECRET_NAMES = (
    *("MLFLOW_TRACKING_AUTH", "MLFLOW_GATEWAY_KEY", "MLFLOW_TRACKING_PASSWORD", "SSH_PASSPHRASE", "wandb_api_key"),
    *("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "GOOGLE_APPLICATION_CREDENTIALS"),
)
NO_SECRETS = ("sqlite:////a/b@c/mlflow.db", "https://host:5000/#/experiments/1", "me@host:/a", "http://host/a@b", "")


@pytest.mark.parametrize("text", ADDRESSES)
def test_no_address_is_shown_with_its_secrets(text: str) -> None:
    assert without_secrets(text) == ADDRESSES[text] and "hush" not in ADDRESSES[text]
    assert is_secret("MLFLOW_TRACKING_URI", text) and shown("MLFLOW_TRACKING_URI", text) == "***"


@pytest.mark.parametrize("text", NO_SECRETS)
def test_other_text_stays_as_it_is(text: str) -> None:
    assert without_secrets(text) == text and not is_secret("MLFLOW_TRACKING_URI", text)


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_names_of_secrets_are_known(name: str) -> None:
    assert is_secret(name, "hush") and shown(name, "hush") == "***"


@pytest.mark.parametrize("name", ["GIT_AUTHOR_NAME", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS", "MLFLOW_EXPERIMENT_NAME"])
def test_other_names_are_no_secrets(name: str) -> None:
    assert not is_secret(name, "4")


def test_a_private_file_is_its_owners_alone_even_where_it_was_open(tmp_path: Path) -> None:
    file = tmp_path / "private"
    for content in (b"a longer content", b"short"):
        write_private(file, content)
        assert file.read_bytes() == content and stat.S_IMODE(file.stat().st_mode) == 0o600
        os.chmod(file, 0o644)
