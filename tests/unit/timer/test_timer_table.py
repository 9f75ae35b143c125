"""Which timers run, which have expired, and when to look again."""

from __future__ import annotations

import math

import pytest

from elasticlib.timer import TimerRequest
from elasticlib.timer._timer_table import TimerTable, poll_timeout


def ledger(*requests: TimerRequest) -> TimerTable[TimerRequest]:
    made: TimerTable[TimerRequest] = TimerTable()
    made.register(requests)
    return made


def test_a_timer_expires_at_its_deadline_and_not_before() -> None:
    timers = ledger(TimerRequest(7, "step", 10.0))

    assert {} == timers.expired(9.9)
    assert {7: [TimerRequest(7, "step", 10.0)]} == timers.expired(10.0)


def test_a_negative_deadline_releases_that_timer_alone() -> None:
    timers = ledger(TimerRequest(7, "a", 1.0), TimerRequest(7, "b", 2.0), TimerRequest(8, "a", 3.0))

    timers.register([TimerRequest(7, "a", -1)])

    assert {7: [TimerRequest(7, "b", 2.0)], 8: [TimerRequest(8, "a", 3.0)]} == timers.expired(math.inf)


def test_to_release_what_does_not_run_changes_nothing() -> None:
    timers = ledger(TimerRequest(7, "a", 1.0))

    timers.register([TimerRequest(7, "other", -1), TimerRequest(9, "a", -1)])

    assert {7} == timers.workers()


def test_a_second_timer_of_the_same_name_takes_the_firsts_place() -> None:
    timers = ledger(TimerRequest(7, "a", 1.0), TimerRequest(7, "a", 5.0))

    assert {} == timers.expired(4.0)


def test_expired_timers_of_a_worker_are_sorted_by_age() -> None:
    timers = ledger(TimerRequest(7, "late", 3.0), TimerRequest(7, "early", 1.0))

    assert ["early", "late"] == [timer.scope_id for timer in timers.expired(5.0)[7]]


def test_all_timers_of_a_worker_are_cleared_and_no_others() -> None:
    timers = ledger(TimerRequest(7, "a", 1.0), TimerRequest(7, "b", 1.0), TimerRequest(8, "a", 1.0))

    timers.clear({7})

    assert [TimerRequest(8, "a", 1.0)] == list(timers)


@pytest.mark.parametrize(
    ("deadlines", "expected"),
    [((), 30.0), ((105.0,), 5.0), ((200.0, 102.0), 2.0), ((math.inf,), 30.0), ((500.0,), 30.0)],
)
def test_a_server_sleeps_until_the_first_deadline_or_its_longest_sleep(
    deadlines: tuple[float, ...], expected: float
) -> None:
    timers = [TimerRequest(7, str(deadline), deadline) for deadline in deadlines]

    assert expected == poll_timeout(timers, 100.0, 30.0)


@pytest.mark.parametrize(("longest", "expected"), [(30.0, 1.0), (0.5, 0.5)])
def test_timer_still_overdue_after_a_look_does_not_make_server_spin(longest: float, expected: float) -> None:
    assert expected == poll_timeout([TimerRequest(7, "a", 99.0)], 100.0, longest)


def test_a_timer_that_is_overdue_keeps_no_other_from_being_noticed_in_time() -> None:
    overdue, soon = TimerRequest(1, "a", 90.0), TimerRequest(2, "b", 100.25)

    assert 0.25 == poll_timeout([overdue, soon], 100.0, 60.0)
    assert 1.0 == poll_timeout([overdue], 100.0, 60.0)
    assert 0.1 == poll_timeout([overdue, soon], 100.0, 0.1)
