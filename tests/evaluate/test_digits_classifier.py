"""The reference classifier: it reads real digits, does not read what is none, and is fair about balance."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest

from ddpm_ds.config.spec import DataSpec
from ddpm_ds.data.sources import open_source
from ddpm_ds.evaluate.classifier import DigitsClassifier, Labels, Pixels, Reading


def load(size: int = 8, channels: Literal[1, 3] = 1) -> tuple[Pixels, Labels]:
    source = open_source(DataSpec(source="digits", image_size=size, channels=channels))
    pairs = [source[i] for i in range(len(source))]
    return np.stack([pixels.transpose(2, 0, 1) for pixels, _ in pairs]), np.array([label for _, label in pairs])


@pytest.fixture(scope="module")
def digits() -> tuple[Pixels, Labels]:
    return load()


@pytest.fixture(scope="module")
def classifier(digits: tuple[Pixels, Labels]) -> DigitsClassifier:
    return DigitsClassifier(*digits)


def test_it_reads_real_digits_that_it_has_not_seen(classifier: DigitsClassifier) -> None:
    assert classifier.real_accuracy > 0.97 and 0.95 < classifier.real.top_probability < 1.0
    assert (classifier.trained_on, len(classifier.real.labels)) == (1347, 450)
    assert classifier.real.balance > 0.99 and sum(classifier.real.shares) == pytest.approx(1.0)


def test_it_is_sure_of_nothing_that_is_no_digit(classifier: DigitsClassifier) -> None:
    noise = np.random.Generator(np.random.Philox(0)).integers(0, 256, (300, 1, 8, 8), np.uint8)
    for images in (noise, np.full_like(noise, 127), np.zeros_like(noise)):
        assert classifier.read(images).top_probability < 0.35


def test_one_class_for_all_has_no_balance(classifier: DigitsClassifier, digits: tuple[Pixels, Labels]) -> None:
    images, labels = digits
    sevens = classifier.read(images[labels == 7])
    assert sevens.shares[7] > 0.97 and sevens.balance < 0.1 and len(sevens.shares) == 10


def test_balance_is_the_entropy_relative_to_that_of_equal_shares() -> None:
    none = np.array([], np.int64)
    assert Reading(none, 1.0, (0.1,) * 10).balance == pytest.approx(1.0)
    assert Reading(none, 1.0, (1.0, *[0.0] * 9)).balance == 0.0
    assert Reading(none, 1.0, (0.5, 0.5, *[0.0] * 8)).balance == pytest.approx(np.log(2) / np.log(10))


def test_accuracy_is_the_share_read_as_what_was_asked_for(
    classifier: DigitsClassifier, digits: tuple[Pixels, Labels]
) -> None:
    images, labels = digits
    asked = labels.copy()
    asked[: len(asked) // 2] = (asked[: len(asked) // 2] + 1) % 10
    assert classifier.read(images).accuracy(asked) == pytest.approx(0.5, abs=0.03)


def test_it_is_the_same_each_time(classifier: DigitsClassifier, digits: tuple[Pixels, Labels]) -> None:
    again = DigitsClassifier(*digits)
    assert again.real.top_probability == classifier.real.top_probability


def test_it_reads_digits_that_were_prepared_larger_and_in_colour() -> None:
    assert DigitsClassifier(*load(size=16, channels=3)).real_accuracy > 0.96
