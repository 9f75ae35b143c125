"""
The error of a launch: a `ChildFailedError` that is also of the class of the worker's exception.

Rules of this file: if an exception cannot be of both classes, it is a plain `ChildFailedError`.

Python shows an uncaught error of this kind badly. The worker's traceback appears up to four times:
as the worker wrote it, as the cause, in a note of the cause, and in the report. The launcher's
frames appear between them. So an exception hook shows the program's own frames, then the report, each
part once. It leaves the launcher's frames out of other errors of a launch, too: a refused call, an
interrupt. The first error of a launch sets the hook, unless the program has a hook of its own.
Python's hook shows all other errors, and those of a bug in this library.
"""

from __future__ import annotations

import builtins
import contextlib
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from elasticlib.errors import ChildFailedError, ElasticError, InvalidTransitionError
from elasticlib.notebook import ipython_shell, render_worker_error
from elasticlib.stacks import is_ours, is_users
from elasticlib.workers.child import exception_members, set_exception_members

# New in Python 3.11.
_GROUP: type[BaseException] = getattr(builtins, "BaseExceptionGroup", SyntaxError)
_APART = (TimeoutError, SyntaxError, StopIteration, StopAsyncIteration, _GROUP)
"""
Classes that an error of a launch must not have.

Python and tools that show errors treat them specially. A `TimeoutError` of ``job.result(5)`` means
that the job continues.
"""
_both: weakref.WeakKeyDictionary[type, Callable[[], type | None]] = weakref.WeakKeyDictionary()
"""By class of a worker's exception, a weak reference to the combined class, which derives from it."""


class _Raised(ChildFailedError):  # noqa: N818 - it has the other's name
    """The class that is raised, with a display for notebooks. It keeps a ``name`` of the worker's exception."""

    _elastic_item: int | None = None
    """Index of the failed item of `Pool.map`; None for other calls."""

    def __reduce__(self) -> tuple[Any, ...]:
        # The process that reads the copy may not have the class that was made here.
        return ChildFailedError, (self._elastic_title, self.failures)

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows instead of its own traceback."""
        return render_worker_error(self)


_Raised.__name__ = _Raised.__qualname__ = ChildFailedError.__name__
_Raised.__module__ = ChildFailedError.__module__


def combined_error(error: ChildFailedError, cause: BaseException | None, raise_as: str) -> _Raised:
    """
    Return the exception to raise for *error*, with the worker's exception *cause* as its cause.

    *raise_as* ``both``: it is also of the class of *cause*, if that is possible.
    """
    found = None
    if raise_as == "both" and isinstance(cause, Exception):
        # A class may refuse to be derived from or copied.
        with contextlib.suppress(Exception):
            found = _of_both_kinds(error, cause)

    if found is None:
        found = _Raised(error.name, error.failures)
        found._elastic_title = error.name

    found._elastic_ranks = error._elastic_ranks
    found.__cause__ = cause
    return found


def _of_both_kinds(error: ChildFailedError, cause: Exception) -> _Raised | None:
    """Return *error* as an object of both classes, with the attributes of *cause*; None if impossible."""
    kind: Any = _kind(type(cause))
    if kind is None:
        return None

    # No `__init__` is called: it may require any arguments.
    try:
        found = BaseException.__new__(kind)
    # A class with its own memory layout, such as OSError.
    except TypeError:
        found = kind.__new__(kind)

    # A note of the cause holds the worker's traceback, which would be shown twice.
    vars(found).update({name: value for name, value in vars(cause).items() if name != "__notes__"})
    set_exception_members(found, exception_members(cause))
    found._elastic_title, found.failures, found.args = error.name, error.failures, cause.args

    # A `name` in the worker's own class stays unchanged.
    if not hasattr(type(found), "name"):
        vars(found).setdefault("name", error.name)
    return found if isinstance(found, _Raised) else None


def _kind(kind: type[Exception]) -> type | None:
    """Return a class that derives from both; None if there can be none."""
    known = _known_kind(kind)
    if known is not None:
        return known
    if issubclass(kind, (*_APART, ChildFailedError)):
        return None

    made = None
    # The layouts of two classes can conflict, and a class may refuse to have subclasses.
    with contextlib.suppress(Exception):
        made = type(_Raised.__name__, (_Raised, kind), {"__module__": _Raised.__module__})
        _both[kind] = weakref.ref(made)

    return made


def _known_kind(kind: type[Exception]) -> type | None:
    reference = _both.get(kind)
    return None if reference is None else reference()


def set_uncaught_hook() -> None:
    """Set the hook that shows uncaught errors of launches, unless the program or its notebook has its own."""
    if sys.excepthook is sys.__excepthook__ and ipython_shell() is None:
        sys.excepthook = _show


@contextlib.contextmanager
def uncaught_hook() -> Iterator[None]:
    """Set that hook if an error of this library leaves the block."""
    try:
        yield
    except ElasticError:
        set_uncaught_hook()
        raise


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not isinstance(error, ElasticError) or isinstance(error, InvalidTransitionError) or sys.stderr is None:
        sys.__excepthook__(kind, error, trace)
        return
    lines = uncaught_lines(error, trace) if isinstance(error, ChildFailedError) else _lines_of_others(error, trace)
    print("\n".join(lines), file=sys.stderr, flush=True)


def _lines_of_others(error: ElasticError, trace: TracebackType | None) -> list[str]:
    """Return Python's lines for *error*, without frames of the launcher and causes within libraries."""
    shown: Any = traceback.TracebackException(type(error), error, trace, compact=True)
    each = shown
    while each is not None:
        each.stack[:] = [frame for frame in each.stack if not is_ours(frame.filename)]
        each.__cause__, each.__context__ = _of_user(each.__cause__), _of_user(each.__context__)
        each = each.__cause__ or each.__context__
    return "".join(shown.format()).splitlines()


def _of_user(found: Any) -> Any:
    """Return *found* from the user's first frame on; None if it has none."""
    frames = [] if found is None else found.stack
    firsts = [number for number, frame in enumerate(frames) if is_users(frame.filename)]
    if not firsts:
        return None
    found.stack[:] = frames[firsts[0] :]
    return found


def uncaught_lines(error: ChildFailedError, trace: TracebackType | None) -> list[str]:
    """Return the lines that show an uncaught *error* with *trace*, without tracebacks already on the console."""
    frames = [frame for frame in traceback.extract_tb(trace) if not is_ours(frame.filename)]
    stack = traceback.StackSummary.from_list(frames).format()
    head = ["Traceback (most recent call last):", *(part.rstrip("\n") for part in stack)] if stack else []
    kind = f"{ChildFailedError.__module__}.{ChildFailedError.__qualname__}"
    return [*head, f"{kind}: {error.console_text()}", *getattr(error, "__notes__", ())]
