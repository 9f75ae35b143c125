"""Two attempts that fail alike, at once, make a third one pointless; anything else may get better."""

from __future__ import annotations

from typing import Any

import pytest

from elasticlib.agent._repeats import Repeats
from elasticlib.errors import Frame, ProcessFailure


def failure(message: str = "ValueError: x", line: int = 5, after: float = 1.0, **more: Any) -> ProcessFailure:
    facts: dict[str, Any] = {"exception_type": "ValueError", "frames": (Frame("a.py", line, "f"),), **more}
    made = ProcessFailure(0, 1, 1, "", message=message, **facts)
    made.happened(after)
    return made


def fatal(*attempts: ProcessFailure) -> list[bool]:
    """Whether each attempt's failure is marked, where it began at the time 0."""
    repeats = Repeats()
    for number, each in enumerate(attempts):
        repeats.begin(number, 0.0)
        repeats.marked({0: each})
        repeats.marked({0: each})  # asked again when all workers are gone
    return [each.fatal for each in attempts]


def test_the_second_of_two_alike_is_fatal() -> None:
    assert fatal(failure(), failure()) == [False, True]


@pytest.mark.parametrize(
    "second",
    [
        failure("ValueError: y"),
        failure(line=6),
        failure(exception_type="KeyError"),
        failure(after=61.0),
        failure(secondary=True),
        failure(exception_type=""),
    ],
    ids=["text", "place", "kind", "late", "secondary", "no exception"],
)
def test_anything_else_is_not(second: ProcessFailure) -> None:
    assert fatal(failure(), second) == [False, False]


def test_what_came_between_makes_a_new_beginning() -> None:
    assert fatal(failure(), failure("ValueError: y"), failure(), failure()) == [False, False, False, True]
    assert fatal(failure(after=61.0), failure(after=61.0)) == [False, False]


def test_an_attempt_that_failed_by_no_worker_says_nothing() -> None:
    repeats = Repeats()
    repeats.begin(0, 0.0)
    repeats.marked({})
    repeats.begin(1, 0.0)
    second = failure()
    repeats.marked({0: second})

    assert not second.fatal
