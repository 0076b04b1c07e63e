"""Planted runs, prepared digits, and what stands in for MLflow, for all tests of this folder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_fidelity.feature_extractor_inceptionv3 as inception
from torch import Tensor

from ddpm_ds.data.cache import DatasetCache
from ddpm_ds.data.prepare import prepare
from ddpm_ds.data.spec import DataSpec
from ddpm_ds.evaluate import outputs, sampling, scores
from ddpm_ds.evaluate.inception import Inception, Unavailable, find_inception
from ddpm_ds.evaluate.sampling import Setup, draw
from ddpm_ds.tracking.tracker import RunLink, RunStart
from tests.evaluate.planted import UNLABELLED, plant


@pytest.fixture(scope="session")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose U-Net has 10 classes."""
    run_dir = tmp_path_factory.mktemp("runs") / "classes"
    plant(run_dir)
    return run_dir


@pytest.fixture(scope="session")
def without_classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose U-Net has no classes."""
    run_dir = tmp_path_factory.mktemp("runs") / "plain"
    plant(run_dir, **UNLABELLED)
    return run_dir


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> DatasetCache:
    """The real digits, prepared."""
    return prepare(DataSpec(source="digits", image_size=8, channels=1, store_root=tmp_path_factory.mktemp("data")))


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of random weights that torch-fidelity takes for Inception's, which are a download; for comparing programs
    their features are as good as any."""
    network, path = inception.FeatureExtractorInceptionV3, tmp_path_factory.mktemp("inception") / "weights.pt"
    with pytest.MonkeyPatch.context() as patch, torch.random.fork_rng():
        patch.setattr(inception, "load_state_dict_from_url", lambda *_, **__: {})
        patch.setattr(network, "load_state_dict", lambda *_: None)
        torch.manual_seed(0)
        state = network("inception-v3-compat", ["64"]).state_dict()
    torch.save(state, path)
    return path


@pytest.fixture
def watch_drawing(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """Lists the images that are drawn from now on; batches beyond the first few can be made to fail."""

    def watch(batches: int = 0, error: BaseException | None = None) -> list[int]:
        drawn: list[int] = []
        calls = iter(range(10**6))

        def watched(setup: Setup, index: Tensor, **options: Any) -> Tensor:
            if error is not None and next(calls) >= batches:
                raise error
            drawn.extend(index.tolist())
            return draw(setup, index, **options)

        monkeypatch.setattr(sampling, "draw", watched)
        return drawn

    return watch


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes Inception's weights, which are a download, unavailable unless a file is named."""

    def find(weights: Path | None) -> Inception:
        if weights is None:
            raise Unavailable("there is no network here")
        return find_inception(weights)

    monkeypatch.setattr(scores, "find_inception", find)


class FakeTracker:
    """Takes what would go to MLflow."""

    def __init__(self, start: RunStart) -> None:
        self.kind, self.run_dir, self.params = start.tags["kind"], start.run_dir, start.params
        self.logged: dict[str, float] = {}
        self.artifacts: list[tuple[str, str]] = []
        self.status = ""

    def metrics(self, values: dict[str, float], step: int) -> None:
        self.logged |= values

    def artifact(self, path: Path, folder: str) -> None:
        assert path.exists()
        self.artifacts.append((path.name, folder))

    def finish(self, status: str) -> RunLink:
        self.status = status
        return RunLink("the-id", "uri", "page", "mlflow ui")


@pytest.fixture
def trackers(monkeypatch: pytest.MonkeyPatch) -> list[FakeTracker]:
    """The children that are recorded from now on, which MLflow does not get."""
    made: list[FakeTracker] = []

    def begin(start: RunStart) -> FakeTracker:
        made.append(FakeTracker(start))
        return made[-1]

    monkeypatch.setattr(outputs, "Tracker", begin)
    return made
