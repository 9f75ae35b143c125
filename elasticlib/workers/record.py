"""`record`: the decorator by which a function writes its exception to the worker's error file."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import TypeVar

from typing_extensions import ParamSpec

from elasticlib.workers import _report

P = ParamSpec("P")
R = TypeVar("R")


def record(function: Callable[P, R]) -> Callable[P, R | None]:
    """
    Have *function* write its exception to ``TORCHELASTIC_ERROR_FILE`` before it goes on to its caller.

    Under `elastic_launch` workers need no decorator; this one serves code that other launchers start.
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
        except Exception as error:
            try:
                report = _report.of_exception(error, b"")
                _report.write_error_file(os.environ.get("TORCHELASTIC_ERROR_FILE", ""), report)
            except OSError as failure:
                print(f"elasticlib: the error file was not written: {failure}", file=sys.stderr)
            raise

    return recorded
