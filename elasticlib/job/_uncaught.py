"""
How Python shows the error of a launch that nobody catches: the program's own lines, then the report, each thing once.

Python's own way shows the worker's traceback up to four times (as the worker wrote it, as the cause, in a note of the
cause, and in the report), with the launcher's frames between. Who catches the error finds all of it.

Rules of this file: the hook is set with the first error that a launch raises, and only where the program has none of
its own; whatever is not a launch's error goes to Python's.
"""

from __future__ import annotations

import sys
import traceback
from types import TracebackType

from elasticlib import _in_notebooks
from elasticlib.errors import ChildFailedError
from elasticlib.stacks import is_ours


def watch() -> None:
    """Have Python show launches' errors so from now on, unless the program or its notebook has a way of its own."""
    if sys.excepthook is sys.__excepthook__ and _in_notebooks.shell() is None:
        sys.excepthook = _show


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not isinstance(error, ChildFailedError) or sys.stderr is None:
        sys.__excepthook__(kind, error, trace)
        return
    print("\n".join(lines(error, trace)), file=sys.stderr, flush=True)


def lines(error: ChildFailedError, trace: TracebackType | None) -> list[str]:
    """Return what Python shows of *error*, raised with *trace*, without what the console has seen before."""
    frames = [frame for frame in traceback.extract_tb(trace) if not is_ours(frame.filename)]
    stack = traceback.StackSummary.from_list(frames).format()
    head = ["Traceback (most recent call last):", *(part.rstrip("\n") for part in stack)] if stack else []
    kind = f"{ChildFailedError.__module__}.{ChildFailedError.__qualname__}"
    return [*head, f"{kind}: {error.console_text()}", *getattr(error, "__notes__", ())]
