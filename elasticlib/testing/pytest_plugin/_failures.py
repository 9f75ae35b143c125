"""
How pytest shows the failures of a test's ranks.

Rules of this file: ranks that failed alike are shown once; the root cause stands last, where pytest's short summary
takes its line from; a rank that only lost its peer is a line. What is shown is made of pytest's own classes, so that it
travels between processes (xdist).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from elasticlib.stacks import ranks_text
from elasticlib.testing.ranks._failed import RanksFailed, Told, folded, summary


def representation(error: RanksFailed, callers: Any = None) -> Any:
    """Pytest's representation of *error*; *callers*: that of the lines in pytest's process that called the ranks."""
    from _pytest._code.code import ExceptionChainRepr, ReprFileLocation

    lines, shown = folded(error)
    root = error.told[error.root]
    chain: list[Any] = list(getattr(callers, "chain", ()))
    if lines:
        chain.append((_text(lines), None, None))
    for ranks in shown:
        chain.append((_text([f"{'_ ' * 4}{ranks_text(ranks)} of {error.size}{' _' * 4}", ""]), None, None))
        chain += _chain_of(error.told[ranks[0]])
    if notes := getattr(error, "__notes__", ()):  # such as an example of Hypothesis
        chain.append((_text([f"E   {line}" for note in notes for line in str(note).splitlines()]), None, None))
    last = chain[-1]
    crash = ReprFileLocation(root.file, root.line, summary(error.told, error.root))
    chain[-1] = (last[0], crash, None)
    return ExceptionChainRepr(chain)


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
