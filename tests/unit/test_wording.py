"""Counts and durations in words."""

from __future__ import annotations

import pytest

from elasticlib._wording import counted, duration


@pytest.mark.parametrize(
    ("seconds", "digits", "text"),
    [
        (0.0, 0, "0 s"),
        (12.34, 0, "12 s"),
        (12.34, 1, "12.3 s"),
        (59.96, 1, "1 min"),
        (59.6, 0, "1 min"),
        (125.0, 1, "2 min 5 s"),
        (3599.7, 0, "1 h"),
        (4000.0, 0, "1 h 6 min"),
        (360000.0, 0, "100 h"),
    ],
)
def test_a_duration_has_the_units_that_people_read(seconds: float, digits: int, text: str) -> None:
    assert text == duration(seconds, digits)


def test_a_noun_agrees_with_its_number() -> None:
    assert ["0 ranks", "1 rank", "2 ranks"] == [counted(number, "rank") for number in range(3)]
    assert "2 processes" == counted(2, "process", "processes")
