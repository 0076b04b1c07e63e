"""Fréchet distances, and Inception's scores by torch-fidelity with random weights, and messages without them."""

import pickle
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch_fidelity
from scipy.linalg import sqrtm
from torch_fidelity.utils import create_feature_extractor

from ddpm_ds.evaluate import inception
from ddpm_ds.evaluate.inception import (
    Gaussian,
    Inception,
    Pixels,
    Unavailable,
    find_inception,
    frechet_distance,
    inception_scores,
    pixel_gaussian,
)
from ddpm_ds.ground.errors import EvaluationError


def generator(seed: int = 1) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(seed))


def gaussian(dims: int, rank: int | None = None) -> Gaussian:
    """A Gaussian at random; with ``rank`` < ``dims`` it is singular."""
    factor = generator().normal(size=(dims, rank or 2 * dims))
    return Gaussian(generator().normal(size=dims), factor @ factor.T / dims)


def test_shifted_and_scaled_gaussians_have_the_distances_of_the_closed_forms() -> None:
    a = gaussian(6)
    assert frechet_distance(a, Gaussian(a.mean + 2.0, a.covariance)) == pytest.approx(6 * 4.0, rel=1e-12)
    # N(m, S) and N(m, 9 S): tr(S + 9 S - 6 S) = 4 tr S
    scaled = frechet_distance(a, Gaussian(a.mean, 9 * a.covariance))
    assert scaled == pytest.approx(4 * np.trace(a.covariance), rel=1e-12)


@pytest.mark.parametrize("ranks", [(None, None), (20, None), (5, 7)])
def test_covariances_that_do_not_commute_as_scipy_has_them(ranks: tuple[int | None, int | None]) -> None:
    a, b = gaussian(20, ranks[0]), gaussian(20, ranks[1])
    turn = np.linalg.qr(generator().normal(size=(20, 20)))[0]
    b = Gaussian(b.mean, turn @ b.covariance @ turn.T)
    # scipy's root of a singular product is bad; a thousandth of nothing makes it regular, and moves each of the 20
    # roots by up to the root of that.
    little = 1e-10
    root = sqrtm((a.covariance + little * np.eye(20)) @ (b.covariance + little * np.eye(20))).real
    expected = ((a.mean - b.mean) ** 2).sum() + np.trace(a.covariance + b.covariance - 2 * root)
    largest = np.sqrt(max(np.linalg.eigvalsh(a.covariance)[-1], np.linalg.eigvalsh(b.covariance)[-1]))
    assert frechet_distance(a, b) == pytest.approx(expected, abs=2 * 20 * largest * np.sqrt(little))
    assert frechet_distance(a, b) == pytest.approx(frechet_distance(b, a), rel=1e-10)


def test_a_set_is_no_distance_from_itself_and_black_is_as_far_from_white_as_their_greys() -> None:
    for count in (30, 2000):  # with fewer images than dimensions, too
        a = pixel_gaussian(generator().integers(0, 256, (count, 1, 8, 8), np.uint8))
        assert 0.0 <= frechet_distance(a, a) < 1e-10
    black, white = (pixel_gaussian(np.full((10, 1, 8, 8), grey, np.uint8)) for grey in (0, 255))
    assert frechet_distance(black, black) == 0.0 and not black.covariance.any()
    assert frechet_distance(black, white) == pytest.approx(64 * 4.0)


def test_pixels_are_fitted_as_numpy_does_in_the_range_minus_one_to_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inception, "CHUNK_IMAGES", 400)
    images = generator().integers(0, 256, (1000, 3, 4, 4), np.uint8)
    vectors = images.reshape(1000, 48) / 127.5 - 1
    fitted = pixel_gaussian(images)
    np.testing.assert_allclose(fitted.mean, vectors.mean(0), atol=1e-12)
    np.testing.assert_allclose(fitted.covariance, np.cov(vectors, rowvar=False), atol=1e-12)


def test_large_images_are_averaged_over_boxes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert inception.LARGEST_SIDE_PIXELS == 32
    monkeypatch.setattr(inception, "LARGEST_SIDE_PIXELS", 8)
    small = generator().integers(0, 256, (40, 3, 8, 8), np.uint8)
    wide = small[:, :, :5]  # one side is averaged and the other kept
    for large, one in ((small.repeat(2, 2).repeat(2, 3), small), (wide.repeat(2, 3), wide)):
        np.testing.assert_allclose(pixel_gaussian(large).covariance, pixel_gaussian(one).covariance, atol=1e-12)
    pair = np.array([[[[0, 255] * 8] * 16]] * 2, np.uint8)  # a fine pattern has the mean of its boxes
    np.testing.assert_allclose(pixel_gaussian(pair).mean, 0.0, atol=1e-12)


@pytest.fixture(autouse=True)
def early_features(monkeypatch: pytest.MonkeyPatch) -> None:
    """The 64 features of the third convolution: the eigenvalues of 2048 x 2048 numbers take a minute."""
    monkeypatch.setattr(inception, "LAYER", "64")


def images(seed: int, count: int, channels: int = 3) -> Pixels:
    """Noise whose brightness and contrast depend on the seed."""
    return generator(seed).integers(20 * seed, 200 + 20 * seed, (count, channels, 8, 8), np.uint8)


@pytest.fixture(scope="module")
def network(weights: Path) -> Inception:
    return find_inception(weights)


def score(network: Inception, samples: Pixels, reference: Pixels, cache: Path, *wanted: str) -> dict[str, float]:
    known: Any = SimpleNamespace(images=reference, key="5" * 64)
    return inception_scores(network, samples, known, cache, wanted or ("fid", "kid", "pr"), torch.device("cpu"))


def features(weights: Path, pixels: Pixels) -> Gaussian:
    how = {"cuda": False, "feature_extractor_weights_path": str(weights), "verbose": False}
    (found,) = create_feature_extractor("inception-v3-compat", ["64"], **how)(
        torch.from_numpy(pixels).expand(-1, 3, -1, -1)
    )
    values = found.double().numpy()
    return Gaussian(values.mean(0), np.cov(values, rowvar=False))


def test_fid_is_the_frechet_distance_of_features_of_grey_images_in_three_colours(
    network: Inception, tmp_path: Path
) -> None:
    samples, reference = images(0, 8, channels=1), images(1, 9, channels=1)
    found = score(network, samples, reference, tmp_path, "fid")
    mine, theirs = features(network.weights, samples), features(network.weights, reference)
    # torch-fidelity takes the root of a product that is singular with so few images: each of 64 eigenvalues that
    # should be zero is one of the product's rounding errors, of which it adds the roots.
    rounding = np.finfo(np.float64).eps * np.linalg.norm(mine.covariance) * np.linalg.norm(theirs.covariance)
    assert set(found) == {"fid"}
    assert found["fid"] == pytest.approx(frechet_distance(mine, theirs), rel=1e-5, abs=2 * 64 * np.sqrt(64 * rounding))


@pytest.mark.long
def test_scores_of_equal_sets_distant_sets_and_a_part(network: Inception, tmp_path: Path) -> None:
    near = score(network, images(0, 12), images(0, 12), tmp_path / "near")
    far = score(network, images(0, 12), images(2, 12), tmp_path / "far")
    assert near["fid"] < 1e-2 * far["fid"] and near["kid"] < far["kid"]
    assert (near["precision"], near["recall"]) == (1.0, 1.0) and far["precision"] < 0.5 and far["recall"] < 0.5
    assert set(far) == {"fid", "kid", "kid_std", "precision", "recall"}
    # Samples that are all some of the reference: each looks real, but not everything real is covered.
    both = np.concatenate([images(0, 10), images(2, 10)])
    some = score(network, both[:10], both, tmp_path / "some", "pr")
    assert some["precision"] == 1.0 and some["recall"] < 0.8


class Explosive:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return exec, (f"open({str(self.mark)!r}, 'w')", "")


@pytest.mark.long
def test_features_of_the_reference_are_kept_by_checksum_weights_and_version_and_made_anew_when_damaged(
    network: Inception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, mark = tmp_path / "cache", tmp_path / "executed"
    first = score(network, images(0, 12), images(1, 12), cache)
    kept = list(cache.iterdir())
    name = f"{'5' * 16}-{torch_fidelity.__version__}-{network.digest[:16]}-"
    assert kept and all(path.name.startswith(name) for path in kept)
    elsewhere = images(2, 12)  # whatever it is now, the kept features are those of the checksum
    assert score(network, images(0, 12), elsewhere, cache) == first
    for number, path in enumerate(kept):
        path.write_bytes(pickle.dumps(Explosive(mark)) if number else path.read_bytes()[:500])
    assert score(network, images(0, 12), images(1, 12), cache) == first and not mark.exists()
    monkeypatch.setattr(inception, "version", lambda _: "0.4.99")
    assert score(network, images(0, 12), elsewhere, cache)["fid"] != first["fid"]


@pytest.mark.parametrize("content", ["cut short", "something else", "text", "planted"])
def test_a_wrong_weights_file_is_refused_and_not_executed(weights: Path, tmp_path: Path, content: str) -> None:
    path, mark = tmp_path / "given.pt", tmp_path / "executed"
    if content in ("something else", "planted"):
        torch.save(Explosive(mark) if content == "planted" else {"fc.weight": torch.zeros(3)}, path)
    else:
        path.write_bytes(b"hello" if content == "text" else weights.read_bytes()[:10000])
    with pytest.raises(EvaluationError, match=r"--inception-weights .*given\.pt can't be used") as error:
        find_inception(path)
    assert "\n" not in str(error.value) and not mark.exists()


def test_without_torch_fidelity_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(Unavailable, match=r"pip install 'ddpm_ds\[fid\]'"):
        find_inception(None)


@pytest.mark.parametrize(("silent", "message"), [(False, "refused"), (True, "timed out")])
def test_without_a_network_it_says_what_to_do_and_does_not_hang(
    silent: bool, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inception, "ANSWER_SECONDS", 0.5)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as server:  # takes connections and never answers
        port = server.getsockname()[1] if silent else 1
        url = f"http://127.0.0.1:{port}/weights-inception-2015-12-05-6726825d.pth"
        monkeypatch.setattr("torch_fidelity.feature_extractor_inceptionv3.URL_INCEPTION_V3", url)
        with pytest.raises(Unavailable, match=f"{message}.*--inception-weights") as error:
            find_inception(None)
    assert url in str(error.value) and "\n" not in str(error.value)


def test_weights_that_torch_fidelity_has_downloaded_before_are_found(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "checkpoints").mkdir()
    kept = tmp_path / "checkpoints" / "weights-inception-2015-12-05-6726825d.pth"
    kept.symlink_to(weights)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    assert find_inception(None).weights == kept
    kept.unlink()
    kept.write_bytes(b"cut short")
    with pytest.raises(Unavailable, match="delete them"):
        find_inception(None)
