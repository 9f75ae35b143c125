"""
The failures of a test's ranks, as one exception and as one text.

Rules of this file: equal failures are reported once. The root cause stands last. A rank that only
lost its peer gets one line.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import frozen

from elasticlib.errors import ProcessFailure
from elasticlib.stacks import ranks_text
from elasticlib.testing.ranks._rank_call import Failure
from elasticlib.workers.child import exception_members, set_exception_members, unpack_exception

_MOST_SHOWN = 4
"""Maximum number of different failures that are shown in full."""


class _GroupError(Exception):
    """Minimal replacement for ``ExceptionGroup``, for Python 3.10 without ``exceptiongroup``."""

    def __init__(self, message: str, exceptions: Sequence[Exception]) -> None:
        super().__init__(message, exceptions)
        self.message, self.exceptions = message, tuple(exceptions)

    def __str__(self) -> str:
        return self.message


def _group() -> Any:
    if found := getattr(builtins, "ExceptionGroup", None):
        return found
    # Before Python 3.11 the class is in a package that pytest installs.
    try:
        return importlib.import_module("exceptiongroup").ExceptionGroup
    except ImportError:
        return _GroupError


ExceptionGroup: Any = _group()


class DirtyWorkerWarning(UserWarning):
    """Warning that a test leaked state into its workers, which were replaced."""


DirtyWorkerWarning.__module__ = "elasticlib.testing"


@frozen
class RankFailure:
    """Failure of one rank."""

    message: str
    """Last line: the class and text of an exception, or how the process ended."""
    file: str
    line: int
    representation: Any
    """Pytest's representation of the exception, or text."""
    error: Exception
    is_secondary: bool = False

    def key(self) -> tuple[str, str, int]:
        """Return a key that is equal for ranks with the same failure."""
        # The message about a lost peer contains its port, which differs.
        return "" if self.is_secondary else self.message, self.file, self.line


def unpacked(failure: Failure) -> RankFailure:
    error = unpack_exception(failure.error)

    # An exception group cannot contain SystemExit, and some exceptions cannot be rebuilt here.
    if not isinstance(error, Exception):
        error = RuntimeError(failure.message)
    return RankFailure(
        failure.message,
        failure.file,
        failure.line,
        failure.representation,
        error,
        failure.is_secondary,
    )


def of_death(failure: ProcessFailure) -> RankFailure:
    message = failure.summary(with_place=False)
    lines = [failure.summary()]
    if failure.traceback:
        lines.append(failure.traceback)
    lines += failure.log_tail
    return RankFailure(message, "", 0, "\n".join(lines), RuntimeError(message))


class RanksFailed(Exception):  # noqa: N818
    """
    Exceptions of a test's ranks, one for each rank that failed, in the order of ranks.

    It is also an instance of the root cause's class: ``except ValueError``, ``except* ValueError``
    and ``pytest.raises(ValueError)`` catch it. It is an ``ExceptionGroup`` too, unless Python
    cannot combine both in one class (``OSError``, ``ImportError``, ``AttributeError``, ...).
    ``failures`` maps each rank to its exception.
    """

    message: str
    exceptions: tuple[Exception, ...]
    failures: Mapping[int, Exception]
    reports: Mapping[int, RankFailure]
    size: int
    root: int
    """Lowest rank whose failure was not caused by another rank."""
    notes: Sequence[str]
    """Lines about the ranks that did not fail."""
    look: Callable[[int], bool | None]
    """
    Opens a debugger on a rank's failure.

    It returns True if the user then wants to stop the tests, and None if the rank is gone.
    """

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""

    def derive(self, excs: Sequence[Exception]) -> Any:
        """Return a plain group of *excs*, for example those that an ``except*`` has not caught."""
        return ExceptionGroup(self.message, excs)


RanksFailed.__module__ = "elasticlib.testing"


def failed(
    reports: Mapping[int, RankFailure],
    size: int,
    notes: Sequence[str] = (),
    look: Callable[[int], bool | None] = lambda _: None,
) -> RanksFailed:
    """Return the error for the failed ranks in *reports*, of *size* ranks in all."""
    # The lowest rank that was not stopped by another's failure, because this is the same in each
    # run, unlike the first rank to fail.
    reports = dict(sorted(reports.items()))
    root = min(reports, key=lambda rank: (reports[rank].is_secondary, rank))
    kind = _kind(type(reports[root].error))
    errors = {rank: each.error for rank, each in reports.items()}
    message = summary(reports, root)
    is_group = issubclass(kind, ExceptionGroup) and ExceptionGroup is not _GroupError
    found = kind(message, list(errors.values())) if is_group else kind(message)
    _take_over(found, errors[root])
    if not is_group:
        found.message, found.exceptions = message, tuple(errors.values())
    found.failures, found.reports, found.size, found.root, found.notes = errors, reports, size, root, notes
    found.look = look
    return found


_kinds: dict[type, type[RanksFailed]] = {}


def _kind(cause: type[Exception]) -> type[RanksFailed]:
    if cause not in _kinds and len(_kinds) > 256:
        # Functions may define a class at each call: do not keep them all.
        _kinds.clear()

    if cause not in _kinds:
        # The layout of a class may not allow other bases, or the class may have rules of its own.
        tried: list[tuple[Any, ...]] = [(RanksFailed, ExceptionGroup)]
        if not issubclass(cause, (ExceptionGroup, StopIteration, StopAsyncIteration)):
            tried = [(RanksFailed, ExceptionGroup, cause), (RanksFailed, cause), *tried]
        for bases in tried:
            try:
                made: Any = type("RanksFailed", bases, {"__module__": RanksFailed.__module__, "__init__": _keep})
                made("", [RuntimeError()]) if ExceptionGroup in bases else made("")
            except Exception:
                continue
            _kinds[cause] = made
            break

    return _kinds[cause]


def _take_over(error: RanksFailed, cause: Exception) -> None:
    """Copy the attributes of *cause* to *error*, for code that catches *cause* and reads them."""
    set_exception_members(error, exception_members(cause))
    for name, value in vars(cause).items():
        # The class of the cause may forbid the assignment.
        with contextlib.suppress(AttributeError, TypeError):
            setattr(error, name, value)


def _keep(self: Any, *args: object) -> None:
    """Keep the arguments; replaces the ``__init__`` of a user's class, which may expect others."""
    self.args = args


def summary(reports: Mapping[int, RankFailure], root: int) -> str:
    """Return one line: the ranks with the root cause, its place and its message."""
    alike = [rank for rank, each in reports.items() if each.key() == reports[root].key()]
    line = reports[root].message.splitlines() or [""]
    where = f", line {reports[root].line}" if reports[root].line else ""
    return f"{ranks_text(alike)}{where}: {line[0]}"


def folded(error: RanksFailed) -> tuple[list[str], list[list[int]]]:
    """
    Split the failures into those that get one line and those that are shown in full.

    Returns the lines, and lists of ranks to show; ranks with equal failures are in one list.
    """
    together: dict[Any, list[int]] = {}
    for rank, each in error.reports.items():
        together.setdefault(each.key(), []).append(rank)
    lines: list[str] = []
    shown: list[list[int]] = []
    for ranks in together.values():
        is_root = error.root in ranks
        if is_root or not error.reports[ranks[0]].is_secondary:
            shown.append(ranks)
        else:
            lines.append(_line(ranks, error))

    # Readers look at the end first: the root cause stands last.
    shown.sort(key=lambda ranks: error.root in ranks)
    lines += [_line(ranks, error) for ranks in shown[:-_MOST_SHOWN]]
    return [*lines, *error.notes], shown[-_MOST_SHOWN:]


def _line(ranks: Sequence[int], error: RanksFailed) -> str:
    return f"{ranks_text(ranks)}: {_short(error.reports[ranks[0]])}"


def _short(report: RankFailure) -> str:
    lines = report.message.splitlines() or [""]
    return f"{lines[0]}{' (it lost a peer)' if report.is_secondary else ''}"


def text(error: RanksFailed) -> str:
    lines, shown = folded(error)
    parts = [summary(error.reports, error.root), *(["\n".join(lines)] if lines else [])]
    for ranks in shown:
        parts.append(f"{ranks_text(ranks)} of {error.size}:\n{str(error.reports[ranks[0]].representation).rstrip()}")
    return "\n\n".join(parts)
