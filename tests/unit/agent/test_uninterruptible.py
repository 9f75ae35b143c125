"""Uninterruptible sleep: which workers, and for how long."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from elasticlib.agent import _uninterruptible


def test_time_counts_from_the_first_look_at_which_a_worker_sleeps() -> None:
    since = _uninterruptible.look({}, [7], 10.0)
    since = _uninterruptible.look(since, [7, 8], 12.0)

    assert {7: 10.0, 8: 12.0} == since


def test_one_look_at_which_it_does_not_sleep_begins_the_time_anew() -> None:
    since = _uninterruptible.look({7: 10.0}, [], 11.0)
    since = _uninterruptible.look(since, [7], 12.0)

    assert {7: 12.0} == since


@given(st.lists(st.sampled_from("DSR"), min_size=1))
def test_a_worker_is_overdue_exactly_when_all_looks_of_that_time_found_it_asleep(states: list[str]) -> None:
    since: dict[int, float] = {}
    for now, state in enumerate(states):
        since = _uninterruptible.look(since, [7] if state == "D" else [], float(now))

    last = len(states) - 1
    assert (7 in _uninterruptible.overdue(since, 3.0, float(last))) == (last >= 3 and set(states[-4:]) == {"D"})


@pytest.mark.parametrize(
    ("argument", "text", "expected"),
    [
        (None, None, 0.0),
        (None, "", 0.0),
        (None, "2.5", 2.5),
        (None, "soon", 0.0),
        (None, "-3", 0.0),
        (None, "nan", 0.0),
        (4.0, "2.5", 4.0),
        (0.0, "2.5", 0.0),
        (-1.0, "2.5", 0.0),
    ],
)
def test_the_argument_beats_the_environment_and_nonsense_means_off(
    argument: float | None, text: str | None, expected: float
) -> None:
    assert expected == _uninterruptible.allowed_time(argument, text)
