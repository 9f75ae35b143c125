"""Uninterruptible sleep: which workers, and for how long."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, strategies as st

from elasticlib import records
from elasticlib.agent._worker_watch import UNINTERRUPTIBLE_STATE_TIMEOUT, Watch


class Looks:
    """A watch that allows three seconds, unless told otherwise, and what it was told to see."""

    def __init__(self, argument: float | None = 3.0, text: str | None = None) -> None:
        environment = {} if text is None else {UNINTERRUPTIBLE_STATE_TIMEOUT: text}
        self.reported: list[records.Record] = []
        self.asleep: Iterable[int] = ()
        self.now = 0.0
        self.watch = Watch(
            environment,
            "job",
            self.reported.append,
            uninterruptible_state_timeout=argument,
            read_state=lambda pid: "D" if pid in self.asleep else "S",
            clock=lambda: self.now,
        )

    def look(self, asleep: Iterable[int], now: float) -> set[int]:
        """Find these *asleep* at *now*; those that have slept for too long by then."""
        self.asleep, self.now = asleep, now
        self.watch.look([7, 8])
        return {failure.pid for failure in self.watch.explained({}, {0: 7, 1: 8}).values()}


def test_time_counts_from_the_first_look_at_which_a_worker_sleeps() -> None:
    looks = Looks()
    found = [looks.look([7], 10.0), looks.look([7, 8], 12.0), looks.look([7, 8], 13.0), looks.look([7, 8], 15.0)]

    assert [set(), set(), {7}, {7, 8}] == found


def test_one_look_without_uninterruptible_sleep_restarts_the_time() -> None:
    looks = Looks()
    times = [([7], 10.0), ([], 11.0), ([7], 12.0), ([7], 14.9), ([7], 15.0)]
    found = [looks.look(asleep, now) for asleep, now in times]

    assert [set(), set(), set(), set(), {7}] == found


@given(st.lists(st.sampled_from("DSR"), min_size=1))
def test_worker_is_overdue_exactly_if_all_looks_found_it_asleep(states: list[str]) -> None:
    looks = Looks()
    for now, state in enumerate(states):
        found = looks.look([7] if state == "D" else [], float(now))

        assert bool(found) == ("DDDD" in "".join(states[: now + 1])), "and it stays past help"


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
    looks = Looks(argument, text)

    looks.look([7], 1.0)

    assert ([records.WorkerAsleep(7, expected)] if expected else []) == looks.reported
