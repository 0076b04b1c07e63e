"""Two checkpoints, which tests copy before they damage them."""

from pathlib import Path

import pytest

from tests.checkpoint.saving import save


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pristine")
    for images in (1, 2):
        save(folder, images)
    return folder
