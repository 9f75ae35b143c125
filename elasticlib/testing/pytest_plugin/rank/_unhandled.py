"""
Exceptions that no code of a test can handle: those that end a thread, and those of finalizers.

Rules of this file: the interpreter's own message is still written, because a test may hang after
it. No exception is kept, because its frames hold the test's objects.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import Any

from elasticlib.testing.ranks._rank_call import Unhandled


@contextlib.contextmanager
def collected() -> Iterator[list[Unhandled]]:
    """Collect the unhandled exceptions of the block in the yielded list."""
    found: list[Unhandled] = []
    of_threads, of_finalizers = threading.excepthook, sys.unraisablehook

    def end_of_thread(args: threading.ExceptHookArgs, /) -> None:
        # A thread may end by SystemExit.
        if args.exc_type is not SystemExit:
            name = "<unknown>" if args.thread is None else args.thread.name
            found.append(Unhandled(True, f"Exception in thread {name}", _trace(args)))
        of_threads(args)

    def in_finalizer(args: Any, /) -> None:
        found.append(Unhandled(False, f"{args.err_msg or 'Exception ignored in'}: {_text(args.object)}", _trace(args)))
        of_finalizers(args)

    threading.excepthook, sys.unraisablehook = end_of_thread, in_finalizer
    try:
        yield found
    finally:
        threading.excepthook, sys.unraisablehook = of_threads, of_finalizers


def _trace(args: Any) -> str:
    try:
        return "".join(traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback))
    except Exception as failure:
        return f"{args.exc_type.__name__}: (its traceback cannot be shown: {failure!r})"


def _text(value: object) -> str:
    from _pytest._io.saferepr import saferepr

    return saferepr(value)
