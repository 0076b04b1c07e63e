"""Numbers and durations in words."""

import pytest

from ddpm_ds.ground.units import about, rounded


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [(2570.4, 3, "2,570"), (123456, 4, "123,500"), (0.01234, 3, "0.0123"), (0.0, 3, "0"), (1.3e9, 2, "1,300,000,000")],
)
def test_a_number_has_one_separator_and_no_exponent(value: float, digits: int, text: str) -> None:
    assert rounded(value, digits) == text


def test_a_duration_is_in_the_unit_that_suits_it() -> None:
    durations = {0.2: "0.2 s", 119: "120 s", 1260: "21 min", 9000: "2.5 h", 4e5: "4.6 days"}
    assert {seconds: about(seconds) for seconds in durations} == {
        seconds: f"about {words}" for seconds, words in durations.items()
    }
