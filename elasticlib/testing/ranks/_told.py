"""
What came of a test on its ranks, for whoever reports it.

Rules of this file: a rank's skip counts only where none has failed; parts of a test are told one by one.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen

from elasticlib._wording import counted
from elasticlib.stacks import ranks_text
from elasticlib.testing.ranks import _failed
from elasticlib.testing.ranks._call import Call, Outcome


@frozen
class Told:
    """What came of a test."""

    outcomes: Mapping[int, Outcome]
    error: _failed.RanksFailed | None
    output: Mapping[int, str]
    """By rank, what it wrote."""
    dirt: Mapping[int, tuple[str, ...]]
    """By rank, what the test left behind."""
    seed: int = 0
    """Of rank 0."""

    def stop(self) -> tuple[str, Outcome] | None:
        """The skip or expected failure that ranks have asked for, with the words for it."""
        found = {rank: each for rank, each in self.outcomes.items() if each.kind in ("skipped", "xfailed")}
        if self.error is not None or not found:
            return None
        rank = min(found)
        alike = [other for other, each in found.items() if each.reason == found[rank].reason]
        everyone = len(alike) == len(self.outcomes)
        return ("" if everyone else f"{ranks_text(alike)}: ") + found[rank].reason, found[rank]

    def parts(self) -> list[tuple[Any, _failed.RanksFailed]]:
        """The failures of each part of the test: see `PartsError`."""
        if self.error is None:
            return []
        found: dict[str, tuple[Any, dict[int, _failed.Told]]] = {}
        for rank, whole in self.error.told.items():
            outcome = self.outcomes.get(rank)
            several = outcome.parts if outcome is not None else ()
            parts = [(what, _failed.unpacked(failure)) for what, failure in several]
            for what, told in parts or [(None, whole)]:
                found.setdefault(repr(what), (what, {}))[1].setdefault(rank, told)
        # What others' failures have brought about stands beside these, and is no news.
        own = [each for each in found.values() if not all(told.is_secondary for told in each[1].values())]
        size, notes, look = self.error.size, self.error.notes, self.error.look
        return [(what, _failed.failed(each, size, notes, look)) for what, each in own or found.values()]

    def warn_of_dirt(self, call: Call) -> None:
        """Say what the test has left behind."""
        alike: dict[tuple[str, ...], list[int]] = {}
        for rank, what in sorted(self.dirt.items()):
            alike.setdefault(what, []).append(rank)
        text = "; ".join(f"{ranks_text(ranks)} {_with_and(what)}" for what, ranks in alike.items())
        message = (
            f"{call.test}: {text}. New workers take the place of these: undo it at the test's end (monkeypatch, "
            "try/finally)"
        )
        warnings.warn_explicit(_failed.DirtyWorkerWarning(message), None, call.file, call.line)


def left_after(collectives: int) -> str:
    """What a test has left in a shared group whose ranks are at different collectives."""
    where = f"after {counted(collectives, 'collective')}" if collectives else "without a collective"
    return f"left the shared process group {where}, and another rank elsewhere"


def _with_and(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
