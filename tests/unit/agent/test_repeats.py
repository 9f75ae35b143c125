"""Two attempts that fail alike make a third one pointless, where both did so at once or the second got no further."""

from __future__ import annotations

from typing import Any

import pytest

from elasticlib.agent._repeats import Repeats
from elasticlib.errors import Frame, ProcessFailure

LATE = 61.0


def failure(message: str = "ValueError: x", line: int = 5, after: float = 1.0, **more: Any) -> ProcessFailure:
    facts: dict[str, Any] = {"exception_type": "ValueError", "frames": (Frame("a.py", line, "f"),), **more}
    made = ProcessFailure(0, 1, 1, "", message=message, **facts)
    made.happened(after)
    return made


def fatal(*attempts: ProcessFailure, steps: tuple[int | None, ...] = ()) -> list[bool]:
    """Return whether each attempt's failure is marked; attempts begin at 0 and reach *steps*."""
    repeats = Repeats()
    for number, each in enumerate(attempts):
        step = steps[number] if steps else None
        repeats.begin(number, 0.0)
        repeats.marked({0: each}, step)
        repeats.marked({0: each}, step)  # asked again when all workers are gone
    return [each.fatal for each in attempts]


def test_the_second_of_two_alike_is_fatal() -> None:
    assert fatal(failure(), failure()) == [False, True]


@pytest.mark.parametrize(
    "second",
    [
        failure("ValueError: y"),
        failure(line=6),
        failure(exception_type="KeyError"),
        failure(after=LATE),
        failure(secondary=True),
        failure(external=True),
        failure(exception_type=""),
    ],
    ids=["text", "place", "kind", "late", "secondary", "external", "no exception"],
)
def test_anything_else_is_not(second: ProcessFailure) -> None:
    assert fatal(failure(), second) == [False, False]


@pytest.mark.parametrize(
    ("first", "second", "is_fatal"),
    [(7, 7, True), (7, 6, True), (7, 8, False), (None, 7, False), (7, None, False), (None, None, False)],
)
def test_a_late_error_is_fatal_where_the_second_attempt_got_no_further(
    first: int | None, second: int | None, is_fatal: bool
) -> None:
    assert fatal(failure(after=LATE), failure(after=LATE), steps=(first, second)) == [False, is_fatal]


def test_a_late_error_of_others_is_not_fatal_however_far_the_attempts_got() -> None:
    of_others = [failure(after=LATE, external=True), failure(after=LATE, external=True)]
    of_peers = [failure(after=LATE, secondary=True), failure(after=LATE, secondary=True)]

    assert fatal(*of_others, steps=(7, 7)) == fatal(*of_peers, steps=(7, 7)) == [False, False]


def test_a_late_error_at_another_line_is_not_fatal() -> None:
    assert fatal(failure(after=LATE), failure(after=LATE, line=6), steps=(7, 7)) == [False, False]


def test_other_failure_in_between_restarts_the_comparison() -> None:
    assert fatal(failure(), failure("ValueError: y"), failure(), failure()) == [False, False, False, True]
    assert fatal(failure(after=LATE), failure(after=LATE)) == [False, False]


def test_failure_after_an_attempt_that_no_worker_failed_is_not_fatal() -> None:
    repeats = Repeats()
    repeats.begin(0, 0.0)
    repeats.marked({}, None)
    repeats.begin(1, 0.0)
    second = failure()
    repeats.marked({0: second}, None)

    assert not second.fatal
