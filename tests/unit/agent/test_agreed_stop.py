"""`AgreedStop`: which ranks are waited for, and until when."""

from __future__ import annotations

import pytest

from elasticlib.agent._agreed_stop import AgreedStop
from elasticlib.workers.child import StopBoard
from elasticlib.workers.child._should_stop import _Listener, room


class Course:
    """Three ranks, of which *callers* have made as many calls as given, and a stop at time 100 with 30 s."""

    def __init__(self, *calls: int) -> None:
        memory = memoryview(bytearray(room(len(calls))))
        self.board = StopBoard(memory, 0, len(calls))
        self.sides = [_Listener(memory, 0, rank) for rank in range(len(calls))]
        for side, count in zip(self.sides, calls, strict=True):
            for _ in range(count):
                side.called()
        self.stop = AgreedStop.begin(self.board, 30.0, 100.0)

    def see(self, rank: int) -> None:
        """Let the rank see the request, as its next call does before it waits."""
        side = self.sides[rank]
        side._calls += 1
        side._memory[side._row + 8] = side._calls

    def ask(self) -> None:
        self.stop.ask("signal 15", 130.0, range(3))


def test_calls_are_counted_once_all_listeners_have_come() -> None:
    course = Course(4, 5, 0)
    course.ask()
    running = {0, 1, 2}

    before = course.stop.counted(running)
    course.see(0)
    half = course.stop.counted(running)
    course.see(1)

    assert [None, None, 6, None] == [before, half, course.stop.counted(running), course.stop.counted(running)]


def test_a_rank_that_has_ended_is_not_waited_for() -> None:
    course = Course(4, 5, 0)
    course.ask()
    course.see(0)

    assert 5 == course.stop.counted({0, 2})


@pytest.mark.parametrize("calls", [(0, 0, 0), (3, 0, 0)])
def test_where_nobody_is_left_to_wait_for_no_call_is_common(calls: tuple[int, int, int]) -> None:
    course = Course(*calls)
    course.ask()

    assert 0 == course.stop.counted(set())


def test_before_the_request_nothing_is_counted() -> None:
    assert Course(1, 1, 1).stop.counted({0, 1, 2}) is None


def test_workers_keep_a_part_of_the_grace_for_their_own_handlers() -> None:
    course = Course(1, 1, 1)

    assert (125.0, 5.0) == (course.stop.due, course.stop.grace)
    assert (9.6, 2.4) == (
        pytest.approx(AgreedStop.begin(course.board, 12.0, 0.0).due),
        pytest.approx(AgreedStop.begin(course.board, 12.0, 0.0).grace),
    )


def test_it_falls_due_once() -> None:
    stop = Course(1, 1, 1).stop

    assert [False, True, False] == [stop.falls_due(124.0), stop.falls_due(125.0), stop.falls_due(126.0)]


def test_it_is_looked_at_often_until_all_have_come() -> None:
    course = Course(1, 0, 0)
    begun = course.stop.poll_timeout(110.0)
    course.ask()
    asked = course.stop.poll_timeout(110.0)
    course.see(0)
    course.stop.counted({0, 1, 2})
    counted = course.stop.poll_timeout(110.0)
    course.stop.falls_due(125.0)

    assert (15.0, 15.0, None) == (begun, counted, course.stop.poll_timeout(126.0))
    assert asked is not None and asked < 0.1
