"""`record`: the decorator by which a function writes its exception to the error file that its launcher named."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from typing_extensions import ParamSpec

from elasticlib.errors import ChildFailedError
from elasticlib.workers import _report

P = ParamSpec("P")
R = TypeVar("R")

VARIABLE = "TORCHELASTIC_ERROR_FILE"


def record(function: Callable[P, R]) -> Callable[P, R | None]:
    """
    Have *function* write its exception to ``TORCHELASTIC_ERROR_FILE`` before it goes on to its caller.

    Under `elastic_launch` workers need no decorator; this one serves code that other launchers start. A
    `ChildFailedError` is recorded as its root cause, so that a launcher within a launcher passes it on.
    ``SystemExit`` is not recorded; with status 0 the call returns None. (torch:
    ``torch.distributed.elastic.multiprocessing.errors.record``)
    """

    @functools.wraps(function)
    def recorded(*args: P.args, **kwargs: P.kwargs) -> R | None:
        try:
            return function(*args, **kwargs)
        except SystemExit as stop:
            if stop.code in (None, 0):
                return None
            raise
        except ChildFailedError as error:
            pass_on(error)
            raise
        except Exception as error:
            entry = _report.of_exception(error, b"")
            with_file(lambda path: _report.write_error_file(path, entry))
            raise

    return recorded


def pass_on(error: ChildFailedError) -> None:
    """Write the root cause of *error* to this process' own error file, in place of what is there."""
    _, failure = error.get_first_failure()
    data: dict[str, Any] = dict(failure.error_file_data)
    message = data.get("message")
    if not isinstance(message, dict):
        extra = {"py_callstack": failure.traceback, "timestamp": str(int(failure.timestamp))}
        message = {"message": failure.message, "extraInfo": extra}
    if failure.exitcode != 0:
        message = {**message, "errorCode": failure.exitcode}
    with_file(lambda path: _report.write_json(path, {**data, "message": message}))


def with_file(write: Callable[[str], None]) -> None:
    """Have *write* fill this process' error file, if its launcher named one; a failure is only said."""
    path = os.environ.get(VARIABLE, "")
    if not path or path == os.devnull:
        return
    try:
        write(path)
    except OSError as failure:
        print(f"elasticlib: the error file was not written: {failure}", file=sys.stderr)
