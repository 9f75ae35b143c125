"""`AgreedStop`: when the workers' calls are counted, and until when they have time."""

from __future__ import annotations

import pytest

from elasticlib.agent._agreed_stop import AgreedStop
from elasticlib.workers.child import StopBoard
from elasticlib.workers.child._should_stop import _Listener, room


class Course:
    """Workers that have made as many calls as given, and a stop at time 100 with 30 s."""

    def __init__(self, *calls: int) -> None:
        memory = memoryview(bytearray(room(len(calls))))
        self.board = StopBoard(memory, 0, len(calls))
        self.sides = [_Listener(memory, 0, rank) for rank in range(len(calls))]
        for rank, count in enumerate(calls):
            self.call(rank, count)
        self.stop = AgreedStop.begin(self.board, 30.0, 100.0)

    def call(self, rank: int, times: int) -> None:
        for _ in range(times):
            self.sides[rank].called()

    def ask(self) -> None:
        self.stop.ask("signal 15", 1e12, range(3), 100.0)


def test_before_the_request_nothing_is_counted() -> None:
    assert Course(1, 1, 1).stop.counted(1000.0) is None


def test_calls_and_their_rate_are_counted_once_after_a_moment() -> None:
    course = Course(4, 5, 0)
    course.ask()
    early = course.stop.counted(100.0)
    course.call(0, 3)

    assert early is None
    assert (7, pytest.approx(100.0), 0) == course.stop.counted(100.03)
    assert course.stop.counted(100.04) is None


def test_calls_are_counted_again_once_a_proposal_is_seen() -> None:
    course = Course(4, 5, 0)
    course.ask()
    course.stop.counted(100.03)
    course.stop.propose(9, 100.1)
    early = course.stop.counted(100.1)
    course.call(1, 2)

    assert early is None
    assert (7, 0.0, 9) == course.stop.counted(100.11)


def test_workers_return_in_the_proposed_call_once_it_is_agreed() -> None:
    course = Course(4, 4)
    course.ask()
    course.stop.propose(6, 100.1)
    course.call(0, 1)
    course.stop.agree(100.2)

    steps = [[course.sides[rank].called() is not None for _ in range(2)] for rank in range(2)]

    assert [[True, True], [False, True]] == steps
    assert course.stop.were_stopped()


def test_a_worker_in_the_proposed_call_has_passed_it_until_it_waits_there() -> None:
    course = Course(4, 5, 0)
    course.ask()
    course.stop.counted(100.03)
    course.call(1, 1)
    # The launcher stood still before this line: the worker had looked before.
    course.stop.propose(6, 100.1)

    assert (7, 0.0, 6) == course.stop.counted(100.11)


def test_nothing_is_agreed_on_once_workers_are_killed() -> None:
    course = Course(4, 4)
    course.ask()
    course.stop.propose(6, 129.0)
    course.stop.agree(130.0)

    course.call(0, 1)
    assert not course.stop.were_stopped()
    course.stop.agree(129.9)
    assert course.sides[0].called() is not None


def test_workers_keep_a_part_of_the_grace_for_their_own_handlers() -> None:
    course = Course(1, 1, 1)
    short = AgreedStop.begin(course.board, 12.0, 0.0)

    assert (125.0, 5.0) == (course.stop.due, course.stop.grace)
    assert (pytest.approx(9.6), pytest.approx(2.4)) == (short.due, short.grace)


def test_stop_falls_due_once() -> None:
    stop = Course(1, 1, 1).stop

    assert [False, True, False] == [stop.falls_due(124.0), stop.falls_due(125.0), stop.falls_due(126.0)]


def test_stop_is_checked_in_time() -> None:
    course = Course(1, 0, 0)
    begun = course.stop.poll_timeout(110.0)
    course.ask()
    requested = course.stop.poll_timeout(100.0)
    course.stop.counted(110.0)
    counted = course.stop.poll_timeout(110.0)
    course.stop.falls_due(125.0)

    assert (15.0, pytest.approx(0.02), 15.0, None) == (begun, requested, counted, course.stop.poll_timeout(126.0))


@pytest.mark.parametrize(
    ("grace", "due", "kept"),
    # A fifth of the time, and 5 s at most, is kept for workers that do not return.
    [(10.0, 118.0, 2.0), (90.0, 125.0, 5.0)],
)
def test_a_later_request_may_leave_less_time_but_not_more(grace: float, due: float, kept: float) -> None:
    stop = Course(1).stop

    stop.shorten(grace, 110.0)

    assert (due, kept) == (stop.due, stop.grace)


def test_a_stop_that_was_due_is_not_due_again() -> None:
    stop = Course(1).stop
    stop.falls_due(125.0)

    stop.shorten(1.0, 130.0)

    assert not stop.falls_due(140.0)
