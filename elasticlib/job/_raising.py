"""
The error that a launch raises for its workers: a `ChildFailedError` that is of the worker's own kind, too.

Rules of this file: where an exception cannot be of both kinds, it is a `ChildFailedError`. Where nobody catches it,
Python's own way shows the worker's traceback up to four times (as the worker wrote it, as the cause, in a note of the
cause, and in the report), with the launcher's frames between. Hence a hook shows the program's own lines, then the
report, each thing once. The hook is set with the first error that a launch raises, and only where the program has none
of its own; whatever is not a launch's error goes to Python's.
"""

from __future__ import annotations

import builtins
import contextlib
import sys
import traceback
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any

from elasticlib.errors import ChildFailedError
from elasticlib.notebook import ipython_shell, render_worker_error
from elasticlib.stacks import is_ours
from elasticlib.workers.child import exception_members, set_exception_members

# New in Python 3.11.
_GROUP: type[BaseException] = getattr(builtins, "BaseExceptionGroup", SyntaxError)
_APART = (TimeoutError, SyntaxError, StopIteration, StopAsyncIteration, _GROUP)
"""
Python, or whoever shows them, treats these in ways that an error of a launch must not meet; a `TimeoutError` of
``job.result(5)`` says that the job goes on.
"""
_both: weakref.WeakKeyDictionary[type, Callable[[], type | None]] = weakref.WeakKeyDictionary()
"""By class of a worker's exception, what refers weakly to that of both kinds, which is a class below it."""


class _Raised(ChildFailedError):  # noqa: N818 - it has the other's name
    """As it is raised: with what shows it in a notebook. A ``name`` that the worker's exception has stays that."""

    _elastic_item: int | None = None
    """Which of the items of `Pool.map` it is about."""

    def __reduce__(self) -> tuple[Any, ...]:
        return ChildFailedError, (self._elastic_title, self.failures)

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in place of its own traceback."""
        return render_worker_error(self)


_Raised.__name__ = _Raised.__qualname__ = ChildFailedError.__name__
_Raised.__module__ = ChildFailedError.__module__


def combined_error(error: ChildFailedError, cause: BaseException | None, raise_as: str) -> _Raised:
    """Return *error* as it is to be raised for the worker's exception *cause*, which it is chained to."""
    found = None
    if raise_as == "both" and isinstance(cause, Exception):
        # A class may forbid what is not its own.
        with contextlib.suppress(Exception):
            found = _of_both_kinds(error, cause)
    if found is None:
        found = _Raised(error.name, error.failures)
        found._elastic_title = error.name
    found._elastic_ranks = error._elastic_ranks
    found.__cause__ = cause
    return found


def _of_both_kinds(error: ChildFailedError, cause: Exception) -> _Raised | None:
    """Return *error* with what *cause* holds. No ``__init__`` is called: it may want any arguments."""
    kind: Any = _kind(type(cause))
    if kind is None:
        return None
    try:
        found = BaseException.__new__(kind)
    # One that holds more than others, such as an OSError.
    except TypeError:
        found = kind.__new__(kind)
    vars(found).update({name: value for name, value in vars(cause).items() if name != "__notes__"})
    set_exception_members(found, exception_members(cause))
    found._elastic_title, found.failures, found.args = error.name, error.failures, cause.args
    # A `name` of the worker's own class stays that.
    if not hasattr(type(found), "name"):
        vars(found).setdefault("name", error.name)
    return found if isinstance(found, _Raised) else None


def _kind(kind: type[Exception]) -> type | None:
    """Return a class that is both; None where there can be none."""
    known = _known_kind(kind)
    if known is not None:
        return known
    if issubclass(kind, (*_APART, ChildFailedError)):
        return None
    made = None
    with contextlib.suppress(Exception):
        made = type(_Raised.__name__, (_Raised, kind), {"__module__": _Raised.__module__})
        _both[kind] = weakref.ref(made)
    return made


def _known_kind(kind: type[Exception]) -> type | None:
    reference = _both.get(kind)
    return None if reference is None else reference()


def show_uncaught() -> None:
    """Have Python show launches' errors so from now on, unless the program or its notebook has a way of its own."""
    if sys.excepthook is sys.__excepthook__ and ipython_shell() is None:
        sys.excepthook = _show


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not isinstance(error, ChildFailedError) or sys.stderr is None:
        sys.__excepthook__(kind, error, trace)
        return
    print("\n".join(uncaught_lines(error, trace)), file=sys.stderr, flush=True)


def uncaught_lines(error: ChildFailedError, trace: TracebackType | None) -> list[str]:
    """Return what Python shows of *error*, raised with *trace*, without what the console has seen before."""
    frames = [frame for frame in traceback.extract_tb(trace) if not is_ours(frame.filename)]
    stack = traceback.StackSummary.from_list(frames).format()
    head = ["Traceback (most recent call last):", *(part.rstrip("\n") for part in stack)] if stack else []
    kind = f"{ChildFailedError.__module__}.{ChildFailedError.__qualname__}"
    return [*head, f"{kind}: {error.console_text()}", *getattr(error, "__notes__", ())]
