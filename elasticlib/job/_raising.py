"""
The error that a launch raises for its workers: a `ChildFailedError` that is of the worker's own kind, too.

Rules of this file: where an exception cannot be of both kinds, it is a `ChildFailedError`; in a notebook its traceback
goes on with the frames of the worker, which a debugger can enter: their variables are text.
"""

from __future__ import annotations

import builtins
import contextlib
import weakref
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

from elasticlib import _in_notebooks
from elasticlib.errors import ChildFailedError, ProcessFailure
from elasticlib.stacks import ELSEWHERE, Frame, crash_frames, ranks_text, users_frames
from elasticlib.workers.child import exception_members, set_exception_members

_GROUP: type[BaseException] = getattr(builtins, "BaseExceptionGroup", SyntaxError)  # of Python 3.11
_APART = (TimeoutError, SyntaxError, StopIteration, StopAsyncIteration, _GROUP)
"""
Python, or whoever shows them, treats these in ways that an error of a launch must not meet; a `TimeoutError` of
``job.result(5)`` says that the job goes on.
"""
_LONGEST_LINE = 300
"""Characters of a line of a worker's message."""
_CAUSED = "\nThe above exception was the direct cause of the following exception:\n"
"""Python's words between the parts of a traceback."""
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
        return rendered(self)


_Raised.__name__ = _Raised.__qualname__ = ChildFailedError.__name__
_Raised.__module__ = ChildFailedError.__module__


def combined_error(error: ChildFailedError, cause: BaseException | None, raise_as: str) -> _Raised:
    """Return *error* as it is to be raised for the worker's exception *cause*, which it is chained to."""
    found = None
    if raise_as == "both" and isinstance(cause, Exception):
        with contextlib.suppress(Exception):  # a class may forbid what is not its own
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
    except TypeError:  # one that holds more than others, such as an OSError
        found = kind.__new__(kind)
    vars(found).update({name: value for name, value in vars(cause).items() if name != "__notes__"})
    set_exception_members(found, exception_members(cause))
    found._elastic_title, found.failures, found.args = error.name, error.failures, cause.args
    if not hasattr(type(found), "name"):  # else it is part of what the worker's kind has
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


def trace_of(error: BaseException, trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback with which *error* is raised, whose own one is *trace*."""
    if not isinstance(error, ChildFailedError) or _in_notebooks.shell() is None:
        return trace
    _, failure = error.get_first_failure()
    return entered(failure.frames)


# Its traceback.


class _Shown(str):
    """The text of a worker's variable, which a debugger shows as it is."""

    __slots__ = ()
    __repr__ = str.__str__


def entered(frames: Iterable[Frame]) -> TracebackType | None:
    """Return a traceback with *frames*, the innermost last."""
    found: TracebackType | None = None
    for frame in reversed([*frames]):
        code = compile("\n" * (frame.line - 1) + "raise _Worker", frame.file, "exec").replace(co_name=frame.function)
        variables: dict[str, Any] = {name: _Shown(text) for name, text in frame.variables.items()}
        scope = {**variables, "_Worker": _Elsewhere, "__name__": ELSEWHERE}
        # Python makes frames only for code that runs, and a traceback only by raising.
        try:
            exec(code, scope)
        except _Elsewhere as error:
            here = error.__traceback__
            assert here is not None and here.tb_next is not None
            del scope["_Worker"], scope["__builtins__"]
            found = TracebackType(found, here.tb_next.tb_frame, here.tb_next.tb_lasti, frame.line)
    return found


class _Elsewhere(Exception):  # noqa: N818 - nobody sees it
    """Makes a frame."""


# In a notebook.


def rendered(error: ChildFailedError) -> list[str]:
    """Return the lines that a notebook shows: the cell's, then the worker's, then those about the other ranks."""
    rank, failure = error.get_first_failure()
    kind = failure.exception_type or "ChildFailedError"
    lines = [_in_notebooks.heading(kind), *_in_notebooks.stack(users_frames(error.__traceback__))]
    if not failure.process:
        frames = failure.frames or crash_frames(failure.traceback)
        lines += [f"in the worker of {_place(error, rank)}:", *_in_notebooks.stack(frames)]
    lines += _message(failure)
    if not failure.exception_type:
        if failure.hint:
            lines.append(failure.hint)
        lines += failure.log_tail[-3:]
    return [*lines, *_others(error, rank)]


def _place(error: ChildFailedError, rank: int) -> str:
    item = getattr(error, "_elastic_item", None)
    return f"rank {rank}" if item is None else f"rank {rank}, at item {item}"


def _message(failure: ProcessFailure) -> list[str]:
    if not failure.exception_type:
        return [failure.summary(with_place=False)]
    every = failure.message.splitlines() or [failure.exception_type]
    lines = [_shortened(line) for line in every]
    if len(lines) > 4:
        lines[3:] = [f"... {len(lines) - 3} more lines, in print(error)"]
    return lines + _cause(failure.traceback)


def _shortened(line: str) -> str:
    return line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]} ... in print(error)"


def _cause(traceback: str) -> list[str]:
    """Return a line with the exception that the worker's was raised from; [] where there is none."""
    before, found, _ = traceback.rpartition(_CAUSED)
    line = before.rstrip().rpartition("\n")[2].strip()
    return [f"raised from {line[:_LONGEST_LINE]}"] if found and line else []


def _others(error: ChildFailedError, root: int) -> list[str]:
    """Return lines about the other ranks, one for all that say the same, without those that only lost a peer."""
    alike: dict[str, list[int]] = {}
    first = error.failures[root]
    own = first.summary(with_place=False)
    for rank, failure in sorted(error.failures.items()):
        is_consequence = failure.secondary and not first.secondary
        if rank == root or is_consequence:
            continue
        summary = failure.summary(with_place=False)
        text = "the same" if summary == own else summary
        alike.setdefault(text, []).append(rank)

    lines = [f"{ranks_text(ranks)}: {text}" for text, ranks in alike.items()]
    if len(lines) > 4:
        count = sum(map(len, alike.values()))
        lines[3:] = [f"... and {count} ranks in all: error.failures"]
    return lines
