"""The Fréchet distance: closed forms, scipy, and sets of images whose distance is known."""

from __future__ import annotations

import numpy as np
import pytest

from ddpm_ds.evaluate.inception import Array, Gaussian, frechet_distance, pixel_gaussian


def generator() -> np.random.Generator:
    return np.random.Generator(np.random.Philox(1))


def gaussian(dims: int, rank: int | None = None) -> Gaussian:
    """A Gaussian at random; of ``rank`` < ``dims`` it is singular."""
    factor = generator().normal(size=(dims, rank or 2 * dims))
    return Gaussian(generator().normal(size=dims), factor @ factor.T / dims)


def rotation(dims: int) -> Array:
    return np.asarray(np.linalg.qr(generator().normal(size=(dims, dims)))[0], np.float64)


def test_a_shifted_gaussian_is_as_far_as_its_shift_squared() -> None:
    a = gaussian(6)
    assert frechet_distance(a, Gaussian(a.mean + 2.0, a.covariance)) == pytest.approx(6 * 4.0, rel=1e-12)


def test_a_scaled_gaussian() -> None:
    """N(0, S) and N(0, 9 S): tr(S + 9 S - 6 S) = 4 tr S."""
    a = Gaussian(np.zeros(6), gaussian(6).covariance)
    distance = frechet_distance(a, Gaussian(a.mean, 9 * a.covariance))
    assert distance == pytest.approx(4 * np.trace(a.covariance), rel=1e-12)


def test_covariances_that_commute() -> None:
    """The sum of (sqrt a_i - sqrt b_i)^2 over common directions; here with directions that one of them lacks."""
    q, zero = rotation(4), np.zeros(4)
    a, b = np.array([4.0, 1.0, 0.0, 9.0]), np.array([1.0, 1.0, 4.0, 0.0])
    distance = frechet_distance(Gaussian(zero, q * a @ q.T), Gaussian(zero, q * b @ q.T))
    assert distance == pytest.approx(((np.sqrt(a) - np.sqrt(b)) ** 2).sum(), rel=1e-12)


@pytest.mark.parametrize("ranks", [(None, None), (20, None), (5, 7)])
def test_covariances_that_do_not_commute_as_scipy_has_them(ranks: tuple[int | None, int | None]) -> None:
    linalg = pytest.importorskip("scipy.linalg")
    a, b = gaussian(20, ranks[0]), gaussian(20, ranks[1])
    b = Gaussian(b.mean, (turn := rotation(20)) @ b.covariance @ turn.T)
    # scipy's root of a singular product is bad; a thousandth of nothing makes it regular.
    little = 1e-10 * np.eye(20)
    root = linalg.sqrtm((a.covariance + little) @ (b.covariance + little)).real
    expected = ((a.mean - b.mean) ** 2).sum() + np.trace(a.covariance + b.covariance - 2 * root)
    assert frechet_distance(a, b) == pytest.approx(expected, rel=1e-4)
    assert frechet_distance(a, b) == pytest.approx(frechet_distance(b, a), rel=1e-10)


def test_the_distance_of_a_set_to_itself_is_zero_also_with_fewer_images_than_dimensions() -> None:
    for count in (30, 2000):
        a = pixel_gaussian(generator().integers(0, 256, (count, 1, 8, 8), np.uint8))
        assert 0.0 <= frechet_distance(a, a) < 1e-10
    same = pixel_gaussian(np.full((5, 1, 8, 8), 7, np.uint8))
    assert frechet_distance(same, same) == 0.0 and not same.covariance.any()


def test_pixels_are_fitted_as_numpy_does_in_the_range_minus_one_to_one() -> None:
    images = generator().integers(0, 256, (5000, 3, 4, 4), np.uint8)  # more than a chunk
    vectors = images.reshape(5000, 48) / 127.5 - 1
    fitted = pixel_gaussian(images)
    np.testing.assert_allclose(fitted.mean, vectors.mean(0), atol=1e-12)
    np.testing.assert_allclose(fitted.covariance, np.cov(vectors, rowvar=False), atol=1e-12)


def test_two_flat_sets_are_as_far_as_their_greys() -> None:
    black, white = (pixel_gaussian(np.full((10, 1, 8, 8), grey, np.uint8)) for grey in (0, 255))
    assert frechet_distance(black, white) == pytest.approx(64 * 4.0)


def test_large_images_are_averaged_over_boxes_to_32_pixels() -> None:
    small = generator().integers(0, 256, (40, 3, 32, 32), np.uint8)
    large = small.repeat(2, 2).repeat(2, 3)
    assert pixel_gaussian(large).dims == 3 * 32 * 32
    np.testing.assert_allclose(pixel_gaussian(large).covariance, pixel_gaussian(small).covariance, atol=1e-12)
    pair = np.array([[[[0, 255] * 32] * 64]] * 2, np.uint8)  # a fine pattern has the mean of its boxes
    np.testing.assert_allclose(pixel_gaussian(pair).mean, 0.0, atol=1e-12)


def test_a_set_of_half_the_contrast_is_nearer_than_one_of_none() -> None:
    real = generator().integers(0, 256, (500, 1, 8, 8), np.uint8)
    grey = np.full_like(real, 127)
    half = ((real.astype(int) + 127) // 2).astype(np.uint8)
    to_half, to_grey = (frechet_distance(pixel_gaussian(real), pixel_gaussian(other)) for other in (half, grey))
    assert to_half < 0.3 * to_grey
