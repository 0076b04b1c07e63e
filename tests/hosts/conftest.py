"""Hosts for the tests of this folder, where they can be made."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hosts.hosts import Hosts
from tests.hosts.namespaces import why_not


@pytest.fixture(scope="session")
def can_make_hosts() -> None:
    """Skips what needs hosts, with the reason, where a program or a permission is missing."""
    if reason := why_not():
        pytest.skip(reason)


@pytest.fixture(scope="module")
def hosts(can_make_hosts: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Two hosts that share the tests' temporary folders."""
    with Hosts(tmp_path_factory.mktemp("hosts") / "two", visible=[tmp_path_factory.getbasetemp()]) as hosts:
        yield hosts
