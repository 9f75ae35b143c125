"""`EndNotice`: the time that an announcement leaves. `StopRequests`: those that wait for workers that ask."""

from __future__ import annotations

import signal

import pytest
from attrs import evolve

from elasticlib.agent import EndNotice
from elasticlib.agent._end_notice import StopRequests
from elasticlib.agent._policy import StopRequested

NOW = 1_790_000_000.0


@pytest.mark.parametrize(
    ("left", "grace"),
    [
        (90.0, 90.0),
        # SIGTERM follows, and has a time of its own.
        (20.0, None),
        (0.0, None),
        (-5.0, None),
        # A person sends it so early.
        (3601.0, None),
    ],
)
def test_a_notice_leaves_the_time_until_the_end(left: float, grace: float | None) -> None:
    assert grace == EndNotice(end_time=NOW + left).grace(NOW, 25.0)


def test_without_an_end_it_leaves_the_shutdown_timeout() -> None:
    assert EndNotice().grace(NOW, 25.0) is None


REQUEST = StopRequested(15, "the machine is reclaimed", grace=30.0, is_notice=True)


@pytest.mark.parametrize(
    ("grace", "left"),
    [
        (30.0, 20.0),
        (None, None),
        # The end was announced wrongly: the usual time is left.
        (10.0, None),
    ],
)
def test_a_kept_request_counts_once_with_the_time_left(grace: float | None, left: float | None) -> None:
    stops = StopRequests(EndNotice(), 25.0)
    kept = evolve(REQUEST, grace=grace)

    assert [] == stops.pass_or_keep(kept, 100.0, has_saved=False)
    assert [] == stops.release_kept(105.0, is_polled=False, has_saved=False)
    assert [evolve(kept, is_polled=True, grace=left)] == stops.release_kept(110.0, is_polled=True, has_saved=False)
    assert [] == stops.release_kept(110.0, is_polled=True, has_saved=False) and stops.poll_timeout() is None


def test_of_two_kept_requests_the_later_counts() -> None:
    stops = StopRequests(EndNotice(), 25.0)
    stops.pass_or_keep(REQUEST, 100.0, has_saved=False)
    stops.pass_or_keep(evolve(REQUEST, reason="time is over"), 101.0, has_saved=False)

    assert ["time is over"] == [each.reason for each in stops.release_kept(102.0, is_polled=False, has_saved=True)]


@pytest.mark.parametrize(("is_polled", "has_saved"), [(True, False), (False, True)])
def test_a_request_that_workers_can_follow_is_not_kept(is_polled: bool, has_saved: bool) -> None:
    stops, request = StopRequests(EndNotice(), 25.0), evolve(REQUEST, is_polled=is_polled)

    assert [request] == stops.pass_or_keep(request, 100.0, has_saved=has_saved)
    assert stops.poll_timeout() is None


@pytest.mark.parametrize(
    ("is_polled", "is_handled", "is_kept"), [(True, False, False), (False, True, False), (False, False, True)]
)
def test_an_announcement_is_kept_unless_workers_ask_or_handle_it(
    is_polled: bool, is_handled: bool, is_kept: bool
) -> None:
    stops = StopRequests(EndNotice(frozenset({10}), NOW + 90.0), 25.0)

    found = stops.of_announcement(10, 100.0, NOW, is_polled=is_polled, is_handled=is_handled)

    made = StopRequested(
        10, grace=90.0, is_polled=is_polled, is_notice=True, is_handled=is_handled, worker_signum=signal.SIGTERM
    )
    assert ([], True) == (found, stops.poll_timeout() is not None) if is_kept else [made] == found


@pytest.mark.parametrize(("signum", "is_notice"), [(10, True), (15, False)])
def test_a_signal_that_stops_the_job_may_announce_the_end(signum: int, is_notice: bool) -> None:
    stops = StopRequests(EndNotice(frozenset({10})), 25.0)

    assert StopRequested(signum, is_polled=True, is_notice=is_notice) == stops.of_signal(signum, is_polled=True)
