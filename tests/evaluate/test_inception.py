"""Inception's scores by torch-fidelity, with weights at random, and what is said where they can't be had."""

from __future__ import annotations

import pickle
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from ddpm_ds.errors import EvaluationError
from ddpm_ds.evaluate import inception
from ddpm_ds.evaluate.inception import Gaussian, Pixels, Unavailable, find_inception, frechet_distance, inception_scores
from tests.evaluate.inception_weights import write_weights

torch_fidelity = pytest.importorskip("torch_fidelity")

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield write_weights(tmp_path_factory.mktemp("inception") / "weights.pt", monkeypatch)


@pytest.fixture(autouse=True)
def early_features(monkeypatch: pytest.MonkeyPatch) -> None:
    """The 64 features of the third convolution: the eigenvalues of 2048 x 2048 numbers take a minute."""
    monkeypatch.setattr(inception, "LAYER", "64")


def images(seed: int, count: int, channels: int = 3) -> Pixels:
    """Noise whose brightness and contrast depend on the seed."""
    generator = np.random.Generator(np.random.Philox(seed))
    return generator.integers(20 * seed, 200 + 20 * seed, (count, channels, 8, 8), np.uint8)


def score(weights: Path, samples: Pixels, reference: Pixels, cache: Path, *wanted: str) -> dict[str, float]:
    return inception_scores(
        find_inception(weights),
        samples,
        reference,
        reference_sha256="5" * 64,
        cache=cache,
        wanted=wanted or ("fid", "kid", "pr"),
        device=CPU,
        progress=False,
    )


def features(weights: Path, pixels: Pixels) -> Gaussian:
    from torch_fidelity.utils import create_feature_extractor

    path = str(weights)
    extractor = create_feature_extractor(
        "inception-v3-compat", ["64"], cuda=False, feature_extractor_weights_path=path, verbose=False
    )
    rgb = torch.from_numpy(pixels).expand(-1, 3, -1, -1)
    (found,) = extractor(rgb)
    values = found.double().numpy()
    return Gaussian(values.mean(0), np.cov(values, rowvar=False))


def test_fid_is_the_frechet_distance_of_features_of_grey_images_in_three_colours(weights: Path, tmp_path: Path) -> None:
    samples, reference = images(0, 24, channels=1), images(1, 30, channels=1)
    found = score(weights, samples, reference, tmp_path, "fid")
    expected = frechet_distance(features(weights, samples), features(weights, reference))
    assert set(found) == {"fid"} and found["fid"] == pytest.approx(expected, rel=1e-3)


def test_scores_of_equal_sets_and_of_sets_apart(weights: Path, tmp_path: Path) -> None:
    near = score(weights, images(0, 20), images(0, 20), tmp_path / "near")
    far = score(weights, images(0, 20), images(2, 20), tmp_path / "far")
    assert near["fid"] < 1e-2 * far["fid"] and near["kid"] < far["kid"]
    assert (near["precision"], near["recall"]) == (1.0, 1.0) and far["precision"] < 0.5 and far["recall"] < 0.5
    assert set(far) == {"fid", "kid", "kid_std", "precision", "recall"}


def test_precision_is_of_the_samples_and_recall_of_the_reference(weights: Path, tmp_path: Path) -> None:
    """Samples that are all some of the reference: each looks real, but not everything real is covered."""
    reference = np.concatenate([images(0, 16), images(2, 16)])
    found = score(weights, reference[:16], reference, tmp_path, "pr")
    assert found["precision"] == 1.0 and found["recall"] < 0.8


def test_features_of_the_reference_are_kept_by_store_weights_and_version(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = score(weights, images(0, 12), images(1, 12), tmp_path)
    kept = {path.name for path in tmp_path.iterdir()}
    digest = find_inception(weights).digest
    assert kept and all(name.startswith(f"{'5' * 16}-{torch_fidelity.__version__}-{digest[:16]}-") for name in kept)
    elsewhere = images(2, 12)  # whatever it is now, the kept features are those of the checksum
    assert score(weights, images(0, 12), elsewhere, tmp_path) == first
    monkeypatch.setattr(inception, "version", lambda _: "0.4.99")
    assert score(weights, images(0, 12), elsewhere, tmp_path)["fid"] != first["fid"]


class Explosive:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return exec, (f"open({str(self.mark)!r}, 'w')", "")


def test_a_damaged_or_planted_cache_is_made_anew_and_not_executed(weights: Path, tmp_path: Path) -> None:
    first = score(weights, images(0, 12), images(1, 12), tmp_path / "cache")
    mark = tmp_path / "executed"
    for number, path in enumerate((tmp_path / "cache").iterdir()):
        path.write_bytes(pickle.dumps(Explosive(mark)) if number else path.read_bytes()[:500])
    assert score(weights, images(0, 12), images(1, 12), tmp_path / "cache") == first and not mark.exists()


@pytest.mark.parametrize("content", ["missing", "cut short", "something else", "planted"])
def test_a_wrong_weights_file_is_refused_and_not_executed(weights: Path, tmp_path: Path, content: str) -> None:
    path, mark = tmp_path / "given.pt", tmp_path / "executed"
    if content == "cut short":
        path.write_bytes(weights.read_bytes()[:10000])
    elif content == "something else":
        torch.save({"fc.weight": torch.zeros(3)}, path)
    elif content == "planted":
        torch.save(Explosive(mark), path)
    with pytest.raises(EvaluationError, match=r"--inception-weights .*given\.pt can't be used") as error:
        find_inception(path)
    assert "\n" not in str(error.value) and not mark.exists()


def test_without_torch_fidelity_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(Unavailable, match=r"pip install 'ddpm_ds\[fid\]'"):
        find_inception(None)


@pytest.fixture
def silent_host() -> Iterator[str]:
    """Takes connections and never answers; returns its address."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        held: list[socket.socket] = []
        threading.Thread(target=lambda: held.append(server.accept()[0]), daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        for connection in held:
            connection.close()


@pytest.mark.parametrize("network", ["none", "silent"])
def test_without_a_network_it_says_so_in_seconds(
    network: str, silent_host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = silent_host if network == "silent" else "127.0.0.1:1"
    url = f"http://{address}/weights-inception-2015-12-05-6726825d.pth"
    monkeypatch.setattr("torch_fidelity.feature_extractor_inceptionv3.URL_INCEPTION_V3", url)
    monkeypatch.setattr(inception, "ANSWER_SECONDS", 1.0)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    begin = time.monotonic()
    with pytest.raises(Unavailable) as error:
        find_inception(None)
    assert time.monotonic() - begin < 5.0
    assert url in str(error.value) and "--inception-weights" in str(error.value) and "\n" not in str(error.value)
    assert ("no answer in 1 s" if network == "silent" else "refused") in str(error.value)


def test_weights_that_torch_fidelity_has_downloaded_before_are_found(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "checkpoints").mkdir()
    kept = tmp_path / "checkpoints" / "weights-inception-2015-12-05-6726825d.pth"
    kept.symlink_to(weights)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    assert find_inception(None).weights == kept and find_inception(None).digest == find_inception(weights).digest
    kept.unlink()
    kept.write_bytes(b"cut short")
    with pytest.raises(Unavailable, match="delete them"):
        find_inception(None)
