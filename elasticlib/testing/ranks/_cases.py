"""
One unittest test on one rank: the rank makes its own case, and unittest runs it.

Rules of this file: suites may expect a new process for each test. So the variables, the working
directory and the process group are restored after each test. A test has failed if any part of it
has.
"""

from __future__ import annotations

import contextlib
import os
import sys
import unittest
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from elasticlib.stacks import CALLERS, is_users
from elasticlib.testing.ranks._outcomes import PartsError

__unittest = True


class _Result(unittest.TestResult):
    """Test result that collects the failures of a test as exceptions."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[tuple[Any, BaseException]] = []
        self.reason: str | None = None
        """Reason for a skip."""

    def _add(self, what: Any, info: Any) -> None:
        error: BaseException = info[1]
        if isinstance(error, SystemExit):
            if error.code in (None, 0):
                return
            reason = _skip_of(error.code)
            if reason is not None:
                self.reason = reason
                return

        trace = _own_part(info[2], isinstance(error, AssertionError))
        self.parts.append((what, error.with_traceback(trace)))

    def addError(self, test: Any, err: Any) -> None:
        self._add(None, err)

    def addFailure(self, test: Any, err: Any) -> None:
        self._add(None, err)

    def addExpectedFailure(self, test: Any, err: Any) -> None:
        # The tests' own process knows that the failure was expected.
        self._add(None, err)

    def addUnexpectedSuccess(self, test: Any) -> None:
        pass

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        if err is not None:
            message = None if type(subtest._message) is object else str(subtest._message)
            self._add((message, {name: _portable(value) for name, value in subtest.params.items()}), err)

    def addSkip(self, test: Any, reason: str) -> None:
        # A skipped subtest does not skip the test.
        if not hasattr(test, "test_case"):
            self.reason = reason


class Missing:
    """Stand-in for a class attribute that cannot be sent to the ranks; reading it raises."""

    def __init__(self, name: str, kind: str, why: str) -> None:
        self._text = f"the class attribute {name!r}, a {kind}, cannot be sent to the ranks ({why}): create it in setUp"

    def __get__(self, case: object, kind: type) -> Any:
        raise AttributeError(self._text)


def run_case(kind: Any, name: str, file_name: str, attributes: Mapping[str, Any]) -> None:
    """
    Run the test *name* of the class *kind*, with *attributes* added to the class.

    Raises `PartsError` if it fails, and ``unittest.SkipTest``.
    """
    result = _Result()
    with _put_back(kind, attributes):
        case = kind(name)
        case.rank, case.file_name = int(os.environ["RANK"]), file_name
        try:
            case.run(result)
        finally:
            _end_group(kind, case, has_failed=bool(result.parts))

    if result.parts:
        raise PartsError(result.parts)
    if result.reason is not None:
        raise unittest.SkipTest(result.reason)


@contextlib.contextmanager
def _put_back(kind: Any, attributes: Mapping[str, Any]) -> Iterator[None]:
    variables, folder = dict(os.environ), os.getcwd()
    former = {name: vars(kind)[name] for name in attributes if name in vars(kind)}
    for name, value in attributes.items():
        setattr(kind, name, value)
    try:
        yield
    finally:
        # The next test of the class must find the attributes of its definition.
        for name in attributes:
            if name in former:
                setattr(kind, name, former[name])
            elif name in vars(kind):
                delattr(kind, name)

        if os.environ != variables:
            for name in os.environ.keys() - variables.keys():
                del os.environ[name]
            os.environ.update(variables)

        os.chdir(folder)


def _end_group(kind: Any, case: Any, *, has_failed: bool) -> None:
    dist: Any = sys.modules.get("torch.distributed")
    has_group = dist is not None and dist.is_available() and dist.is_initialized()
    if not has_group or not kind.makes_group() or not case.destroy_pg_upon_exit:
        return
    # NCCL's destruction would wait for the other ranks: the worker is replaced instead.
    may_wait = has_failed and "nccl" in dist.get_backend()
    if not may_wait:
        dist.destroy_process_group()


def _skip_of(code: object) -> str | None:
    """Return the reason of a skip by torch's decorators from its exit *code*; None for others."""
    torchs: Any = sys.modules.get("torch.testing._internal.common_distributed")
    for skip in getattr(torchs, "TEST_SKIPS", {}).values():
        if skip.exit_code == code:
            return str(skip.message)
    return None


def _own_part(trace: TracebackType | None, is_assertion: bool) -> TracebackType | None:
    """Return *trace* from the first frame of user code, without unittest's frames at its end."""
    frames = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next

    frames = frames[_first_of_user(frames) :]

    # The frames of assertEqual and similar methods do not help the reader.
    while is_assertion and len(frames) > 1 and "__unittest" in frames[-1].tb_frame.f_globals:
        frames.pop()
    found: TracebackType | None = None
    for each in reversed(frames):
        found = TracebackType(found, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return found


def _first_of_user(frames: Sequence[TracebackType]) -> int:
    return next((index for index, each in enumerate(frames) if is_users(each.tb_frame.f_code.co_filename)), 0)


def _portable(value: Any) -> Any:
    """Return *value* if it has a basic type, else its repr, for the tests' own process."""
    return value if isinstance(value, (str, int, float, bool, type(None))) else _ParameterText(repr(value))


class _ParameterText:
    """Text in place of a subtest's parameter."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


CALLERS.add(__file__)
