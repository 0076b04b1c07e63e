"""The marker ``needs_programs``: a test that needs what pip does not install says so, and is skipped without it."""

from __future__ import annotations

import pytest

from tests.conftest import pytest_runtest_setup


def test_what_is_missing_is_named_and_one_of_several_will_do(request: pytest.FixtureRequest) -> None:
    needed = ("sh", "no-such-program", "sh|no-such-program", "no-such-program|none-either")
    request.node.add_marker(pytest.mark.needs_programs(*needed))
    with pytest.raises(pytest.skip.Exception) as skipped:
        pytest_runtest_setup(request.node)
    said = "needs programs that are not installed: no-such-program, no-such-program or none-either"
    assert skipped.value.msg == said
