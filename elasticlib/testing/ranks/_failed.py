"""
The failures of a test's ranks: one exception for whoever catches it, one text for whoever reads it.

Rules of this file: ranks that failed alike are told once; the root cause stands last; a rank that only lost its peer is
a line.
"""

from __future__ import annotations

import builtins
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen

from elasticlib.testing.ranks._blocked import ranks_named
from elasticlib.testing.ranks._call import Failure

_MOST_SHOWN = 4
"""Different failures that are shown whole."""


class _GroupError(Exception):
    """As much of an exception group as is needed where there is none."""

    def __init__(self, message: str, exceptions: Sequence[Exception]) -> None:
        super().__init__(message, exceptions)
        self.message, self.exceptions = message, tuple(exceptions)

    def __str__(self) -> str:
        return self.message


def _group() -> Any:
    if found := getattr(builtins, "ExceptionGroup", None):
        return found
    try:  # before Python 3.11, in a package that pytest brings
        return importlib.import_module("exceptiongroup").ExceptionGroup
    except ImportError:
        return _GroupError


ExceptionGroup: Any = _group()


class DirtyWorkerWarning(UserWarning):
    """A test has left something behind in its ranks, which new ones have replaced."""


DirtyWorkerWarning.__module__ = "elasticlib.testing"


@frozen
class Told:
    """How one rank failed."""

    message: str
    """Its last line: the class and the text of an exception, or how the process ended."""
    file: str
    line: int
    representation: Any
    """Pytest's, or text."""
    error: Exception
    is_secondary: bool = False
    was_debugged: bool = False

    def key(self) -> tuple[str, str, int]:
        """The same for ranks that failed alike."""
        return self.message, self.file, self.line


def told(failure: Failure, error: BaseException) -> Told:
    """Of an exception that a rank has raised; *error* is what came of it here."""
    # A group holds no SystemExit and the like.
    held = error if isinstance(error, Exception) else RuntimeError(failure.message)
    return Told(
        failure.message,
        failure.file,
        failure.line,
        failure.representation,
        held,
        failure.is_secondary,
        failure.was_debugged,
    )


class RanksFailed(ExceptionGroup):  # type: ignore[misc]
    """
    What ranks of a test have raised, one exception for each rank that failed, in the order of ranks.

    It is of the root cause's own class, too, where that can be: ``except ValueError``, ``except* ValueError`` and
    ``pytest.raises(ValueError)`` catch it. ``failures`` has {rank: exception}.
    """

    failures: Mapping[int, Exception]
    told: Mapping[int, Told]
    size: int
    root: int
    """The lowest rank whose failure does not come of another rank's."""
    notes: Sequence[str]
    """What is to be said of the ranks that did not fail."""

    def derive(self, excs: Sequence[Exception]) -> Any:
        """A plain group of *excs*: what is left of it, such as after ``except*``."""
        return ExceptionGroup(self.message, excs)


RanksFailed.__module__ = "elasticlib.testing"


def failed(told: Mapping[int, Told], size: int, notes: Sequence[str] = ()) -> RanksFailed:
    """The error of ranks that failed as *told*, of *size* ranks in all."""
    # The lowest of those that failed by themselves: the same in each run, whoever was first by a moment.
    root = min(told, key=lambda rank: (told[rank].is_secondary, rank))
    kind = _kind(type(told[root].error))
    errors = {rank: each.error for rank, each in sorted(told.items())}
    found: RanksFailed = kind(summary(told, root), list(errors.values()))
    found.failures, found.told, found.size, found.root, found.notes = errors, told, size, root, notes
    return found


_kinds: dict[type, type[RanksFailed]] = {}


def _kind(cause: type[Exception]) -> type[RanksFailed]:
    if cause not in _kinds and len(_kinds) > 256:
        _kinds.clear()  # classes of many functions' own
    if cause not in _kinds:
        made: Any = RanksFailed
        if not issubclass(cause, (ExceptionGroup, StopIteration, StopAsyncIteration)):
            try:
                made = type(
                    "RanksFailed", (RanksFailed, cause), {"__module__": RanksFailed.__module__, "__init__": _ignore}
                )
                made("", [RuntimeError()])
            except Exception:  # its layout, or a rule of its own
                made = RanksFailed
        _kinds[cause] = made
    return _kinds[cause]


def _ignore(self: object, *args: object) -> None:
    """A class of the user's may want other arguments; the group has got its own already."""


def summary(told: Mapping[int, Told], root: int) -> str:
    """One line: who failed first, where and how."""
    alike = [rank for rank, each in told.items() if each.key() == told[root].key()]
    line = told[root].message.splitlines() or [""]
    where = f", line {told[root].line}" if told[root].line else ""
    return f"{ranks_named(alike)}{where}: {line[0]}"


def folded(error: RanksFailed) -> tuple[list[str], list[list[int]]]:
    """Lines about ranks of which there is no more to tell, and the ranks to be shown, equal ones together."""
    together: dict[Any, list[int]] = {}
    for rank, each in error.told.items():
        together.setdefault(each.key(), []).append(rank)
    shown = [ranks for ranks in together.values() if not error.told[ranks[0]].is_secondary or error.root in ranks]
    shown.sort(key=lambda ranks: error.root in ranks)
    lines = [
        f"{ranks_named(ranks)}: {_short(error.told[ranks[0]])}" for ranks in together.values() if ranks not in shown
    ]
    if len(shown) > _MOST_SHOWN:
        left, shown = shown[:-_MOST_SHOWN], shown[-_MOST_SHOWN:]
        lines += [f"{ranks_named(ranks)}: {_short(error.told[ranks[0]])}" for ranks in left]
    return [*lines, *error.notes], shown


def _short(told: Told) -> str:
    lines = told.message.splitlines() or [""]
    return f"{lines[0]}{' (it lost a peer)' if told.is_secondary else ''}"


def text(error: RanksFailed) -> str:
    """All of *error* in plain text."""
    lines, shown = folded(error)
    parts = [summary(error.told, error.root), *(["\n".join(lines)] if lines else [])]
    for ranks in shown:
        parts.append(f"{ranks_named(ranks)} of {error.size}:\n{str(error.told[ranks[0]].representation).rstrip()}")
    return "\n\n".join(parts)
