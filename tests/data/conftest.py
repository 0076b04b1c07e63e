from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ddpm_ds.data.cache import DatasetCache
from ddpm_ds.data.prepare import prepare
from ddpm_ds.data.spec import DataSpec


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twelve 10x8 colour images in two class folders; image k of class c is filled with value 40 c + k."""
    root = tmp_path / "pictures"
    for label, name in enumerate(("cats", "dogs")):
        (root / name).mkdir(parents=True)
        for k in range(6):
            Image.fromarray(np.full((8, 10, 3), 40 * label + k, np.uint8)).save(root / name / f"{k}.png")
    return root


@pytest.fixture
def spec_of(tmp_path: Path) -> Callable[..., DataSpec]:
    """Data specs that store under the test's own folder."""

    def make(**changes: object) -> DataSpec:
        given = {"source": "digits", "image_size": 8, "channels": 1, "store_root": tmp_path / "stores"} | changes
        return DataSpec.model_validate(given)

    return make


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> DatasetCache:
    """The prepared digits, 1797 images of 1x8x8."""
    root = tmp_path_factory.mktemp("stores")
    return prepare(DataSpec(source="digits", image_size=8, channels=1, store_root=root))
