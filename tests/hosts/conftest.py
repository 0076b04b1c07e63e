"""Hosts for the tests of this folder, where they can be made."""

from collections.abc import Iterator

import pytest

from tests.hosts.hosts import PROGRAMS, Hosts, why_not


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs hosts as needing the programs that make them, and as long."""
    for item in items:
        if "can_make_hosts" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.needs_programs(*PROGRAMS))
            item.add_marker(pytest.mark.long)


@pytest.fixture(scope="session")
def can_make_hosts() -> None:
    if reason := why_not():
        pytest.skip(reason)


@pytest.fixture(scope="module")
def hosts(can_make_hosts: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with Hosts(tmp_path_factory.mktemp("hosts") / "made", visible=tmp_path_factory.getbasetemp()) as hosts:
        yield hosts
