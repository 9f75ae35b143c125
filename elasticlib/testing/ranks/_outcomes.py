"""
Failures of a test on a rank, in the form that is sent to the test's own process.

Rules of this file: any exception can be sent. Its place is the innermost line of user code.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

from elasticlib.stacks import CALLERS, is_users
from elasticlib.testing.ranks._rank_call import Failure, RankCall
from elasticlib.workers.child import is_secondary, pack_exception, qualified_name, text_of_exception


class PartsError(Exception):
    """
    Error of a test in which several parts have failed, such as subtests.

    *parts* has a pair for each part: its identity and its exception. The identity is None for the
    test itself, else ``(message, parameters)`` of a subtest.
    """

    def __init__(self, parts: Sequence[tuple[Any, BaseException]]) -> None:
        super().__init__(parts)
        self.parts = tuple(parts)


def failure(call: RankCall, error: BaseException, representation: Any) -> Failure:
    """Return *error*, whose traceback starts in user code, as a `Failure` to send."""
    name, text = qualified_name(type(error)), text_of_exception(error)
    file, line = place(error.__traceback__, call)
    return Failure(
        error=pack_exception(error, ()),
        kind=name,
        message=f"{name}: {text}" if text else name,
        file=file,
        line=line,
        representation=representation,
        is_secondary=is_secondary(error),
    )


def place(trace: TracebackType | None, call: RankCall) -> tuple[str, int]:
    found = call.file, call.line
    while trace is not None:
        if is_users(trace.tb_frame.f_code.co_filename):
            found = trace.tb_frame.f_code.co_filename, trace.tb_lineno
        trace = trace.tb_next
    return found


CALLERS.add(__file__)
