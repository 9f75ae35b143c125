"""
The failures of a test's ranks: one exception for whoever catches it, one representation for whoever reads it.

Rules of this file: ranks that failed alike are shown once; the root cause stands last, where pytest's short summary
takes its line from; a rank that only lost its peer is a line. What is shown is made of pytest's own classes, so that it
travels between processes (xdist).
"""

from __future__ import annotations

import builtins
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen

from elasticlib.pytest_plugin._blocked import ranks_named
from elasticlib.pytest_plugin._call import Failure

# Before Python 3.11 it is in a package that pytest brings.
ExceptionGroup: Any = (
    getattr(builtins, "ExceptionGroup", None) or importlib.import_module("exceptiongroup").ExceptionGroup
)
_MOST_SHOWN = 4
"""Different failures that are shown whole."""


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
        return ExceptionGroup(self.message, excs)


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
                made = type("RanksFailed", (RanksFailed, cause), {"__module__": __name__, "__init__": _ignore})
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


def representation(error: RanksFailed, callers: Any = None) -> Any:
    """Pytest's representation of *error*; *callers*: that of the lines in pytest's process that called the ranks."""
    from _pytest._code.code import ExceptionChainRepr, ReprFileLocation

    together: dict[Any, list[int]] = {}
    for rank, each in error.told.items():
        together.setdefault(each.key(), []).append(rank)
    root = error.told[error.root]
    shown = [ranks for ranks in together.values() if not error.told[ranks[0]].is_secondary or error.root in ranks]
    shown.sort(key=lambda ranks: error.root in ranks)
    lines = [
        f"{ranks_named(ranks)}: {_short(error.told[ranks[0]])}" for ranks in together.values() if ranks not in shown
    ]
    if len(shown) > _MOST_SHOWN:
        left, shown = shown[:-_MOST_SHOWN], shown[-_MOST_SHOWN:]
        lines += [f"{ranks_named(ranks)}: {_short(error.told[ranks[0]])}" for ranks in left]
    lines += error.notes
    chain: list[Any] = list(getattr(callers, "chain", ()))
    if lines:
        chain.append((_text(lines), None, None))
    for ranks in shown:
        chain.append((_text([f"{'_ ' * 4}{ranks_named(ranks)} of {error.size}{' _' * 4}", ""]), None, None))
        chain += _chain_of(error.told[ranks[0]])
    last = chain[-1]
    crash = ReprFileLocation(root.file, root.line, summary(error.told, error.root))
    chain[-1] = (last[0], crash, None)
    return ExceptionChainRepr(chain)


def _short(told: Told) -> str:
    lines = told.message.splitlines() or [""]
    return f"{lines[0]}{' (it lost a peer)' if told.is_secondary else ''}"


def _text(lines: Sequence[str]) -> Any:
    from _pytest._code.code import ReprEntryNative, ReprTraceback

    return ReprTraceback([ReprEntryNative([f"{line}\n" for line in lines])], None, "native")


def _chain_of(told: Told) -> list[Any]:
    chain = getattr(told.representation, "chain", None)
    if chain:
        return list(chain)
    trace = getattr(told.representation, "reprtraceback", None)
    if trace is not None:
        return [(trace, told.representation.reprcrash, None)]
    return [(_text(str(told.representation).splitlines()), None, None)]
