"""
The result of a test on its ranks, for pytest's or unittest's report.

Rules of this file: a rank's skip counts only if no rank has failed. Parts of a test are reported
one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attrs import frozen

from elasticlib._wording import counted
from elasticlib.stacks import ranks_text
from elasticlib.testing.ranks import _failed
from elasticlib.testing.ranks._rank_call import RankCall, RankOutcome


@frozen
class TestReport:
    """Result of a test on all its ranks."""

    outcomes: Mapping[int, RankOutcome]
    error: _failed.RanksFailed | None
    output: Mapping[int, str]
    """Output of each rank."""
    leaks: Mapping[int, tuple[str, ...]]
    """Descriptions of the state that the test left behind, by rank."""
    seed: int = 0
    """Seed of rank 0."""

    def stop(self) -> tuple[str, RankOutcome] | None:
        """
        Return the text of a skip or expected failure, and the outcome of the rank that asked for it.

        None if no rank asked for one, or if a rank failed.
        """
        found = {rank: each for rank, each in self.outcomes.items() if each.kind in ("skipped", "xfailed")}
        if self.error is not None or not found:
            return None
        first = found[min(found)]
        alike = [rank for rank, each in found.items() if each.reason == first.reason]
        if len(alike) == len(self.outcomes):
            return first.reason, first
        return f"{ranks_text(alike)}: {first.reason}", first

    def parts(self) -> list[tuple[Any, _failed.RanksFailed]]:
        """Return the failures of each part of the test: see `PartsError`."""
        if self.error is None:
            return []
        parts = self._ranks_by_part(self.error)
        # Failures caused by another rank's failure are redundant beside that one.
        own = [(what, ranks) for what, ranks in parts if not _are_secondary(ranks.values())]
        size, notes, look = self.error.size, self.error.notes, self.error.look
        return [(what, _failed.failed(ranks, size, notes, look)) for what, ranks in own or parts]

    def _ranks_by_part(self, error: _failed.RanksFailed) -> list[tuple[Any, dict[int, _failed.RankFailure]]]:
        """Return each part that has failed, with the failure of each rank in it."""
        found: dict[str, tuple[Any, dict[int, _failed.RankFailure]]] = {}
        for rank, whole in error.reports.items():
            for what, report in self._parts_of(rank) or [(None, whole)]:
                _, ranks = found.setdefault(repr(what), (what, {}))
                ranks.setdefault(rank, report)
        return list(found.values())

    def _parts_of(self, rank: int) -> list[tuple[Any, _failed.RankFailure]]:
        """Return the parts that failed on *rank*; [] if it has reported none."""
        outcome = self.outcomes.get(rank)
        if outcome is None:
            return []
        return [(what, _failed.unpacked(failure)) for what, failure in outcome.parts]

    def leaks_warning(self, call: RankCall) -> _failed.DirtyWorkerWarning | None:
        """Return the warning of the state that the test left behind; None if it left none."""
        if not self.leaks:
            return None
        alike: dict[tuple[str, ...], list[int]] = {}
        for rank, what in sorted(self.leaks.items()):
            alike.setdefault(what, []).append(rank)
        text = "; ".join(f"{ranks_text(ranks)} {_with_and(what)}" for what, ranks in alike.items())
        message = (
            f"{call.test}: {text}. New workers replace these: undo the change at the end of the test "
            "(monkeypatch, try/finally)"
        )
        return _failed.DirtyWorkerWarning(message)


def left_after(collectives: int) -> str:
    where = f"after {counted(collectives, 'collective')}" if collectives else "without a collective"
    return f"left the shared process group {where}, and another rank elsewhere"


def _are_secondary(failures: Iterable[_failed.RankFailure]) -> bool:
    return all(each.is_secondary for each in failures)


def _with_and(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
