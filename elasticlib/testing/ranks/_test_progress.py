"""
A running test: the outcomes of its ranks so far, and its deadline.

Rules of this file: nothing here waits or uses a worker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from attrs import define, field

from elasticlib.errors import ChildFailedError
from elasticlib.processes import Message
from elasticlib.stacks import ranks_text
from elasticlib.testing.ranks import _blocked, _collectives, _failed, _recorder, _test_report
from elasticlib.testing.ranks._rank_call import RankOutcome

_AFTER_FIRST = 1.0
"""Seconds that ranks have to end after another one has failed or skipped."""
_AFTER_LOST = 10.0
"""The same after a rank has lost its peer: the launcher is about to report the peer's death."""


@define
class TestProgress:
    """Running test."""

    size: int
    """Number of ranks."""
    until: float
    """Deadline on the monotonic clock."""
    outcomes: dict[int, RankOutcome] = field(factory=dict)
    reports: dict[int, _failed.RankFailure] = field(factory=dict)
    notes: list[str] = field(factory=list)
    collectives: dict[int, dict[str, _collectives.At]] = field(factory=dict)
    """Positions just before the deadline, by rank and process group."""

    # Events.

    def hear(self, rank: int, message: Message) -> None:
        """Store the collectives that *rank* reports during the test."""
        if message.get("says") == _recorder.SAYS:
            self.collectives[rank] = _collectives.read(message.get("collectives"))

    def pause(self, seconds: float) -> None:
        """Extend the deadline by *seconds*, which the user has spent in a debugger."""
        # These were sent for the former deadline, which was too early.
        self.collectives.clear()
        self.until += seconds

    def add(self, rank: int, outcome: RankOutcome, now: float) -> None:
        """Store the outcome of *rank*; unless the rank passed, shorten the others' deadline."""
        self.outcomes[rank] = outcome
        failure = outcome.failure
        if failure is not None:
            self.reports[rank] = _failed.unpacked(failure)
        # The others may wait for this rank without end.
        if outcome.kind != "passed":
            is_lost = failure is not None and failure.is_secondary
            self.until = min(self.until, now + (_AFTER_LOST if is_lost else _AFTER_FIRST))

    def add_deaths(self, error: ChildFailedError) -> None:
        """Store the failures of dead workers, except those that another worker's failure caused."""
        first, _ = error.get_first_failure()
        for rank, failure in error.failures.items():
            if rank == first or not failure.secondary:
                # A worker that dies after its outcome has failed.
                self.outcomes.pop(rank, None)
                self.reports[rank] = _failed.of_death(failure)
        left = [rank for rank in self.missing() if rank not in self.reports]
        if left:
            self.notes.append(f"{ranks_text(left)}: ended, as a rank of the group was gone")

    def add_late(self, late: Mapping[int, str], timeout: float) -> None:
        """
        Store the stacks *late* of the ranks that have not ended in time.

        The time was *timeout* seconds, unless another rank has failed before.
        """
        where = _blocked.describe(late)
        if self.has_stopped():
            self.notes += ["did not end after that, and were ended:", *where]
            return

        ended = f"; {ranks_text(self.outcomes)} ended" if self.outcomes else ""
        message = f"timeout of {timeout:g} s: {_blocked.in_short(late)}{ended}"
        lines = [f"The ranks have not ended within {timeout:g} s{ended}. They were at:", "", *where]
        collectives = _collectives.describe({rank: at for rank, at in self.collectives.items() if rank in late})
        if collectives:
            lines += ["", *collectives]
        # One failure for all of them, at the place of the first, even if they are at several.
        own = _blocked.blocked(late[min(late)]).own()
        file, line = ("", 0) if own is None else (own.file, own.line)
        for rank in late:
            self.reports[rank] = _failed.RankFailure(message, file, line, "\n".join(lines), TimeoutError(message))

    # Results.

    def is_complete(self) -> bool:
        return len(self.outcomes) >= self.size

    def missing(self) -> list[int]:
        return [rank for rank in range(self.size) if rank not in self.outcomes]

    def has_stopped(self) -> bool:
        """Return whether a rank has not passed, so that others may wait for it without end."""
        return bool(self.reports) or any(each.kind != "passed" for each in self.outcomes.values())

    def failed(self, look: Callable[[int], bool | None]) -> _failed.RanksFailed | None:
        """Return the error of the test; None if it has not failed."""
        if not self.reports or self._is_cut_short():
            return None
        return _failed.failed(self.reports, self.size, [*self.notes, *self._early()], look)

    def leaks(self) -> dict[int, tuple[str, ...]]:
        """Return descriptions of the state that the test has left behind, by rank."""
        leaks = {rank: each.leaks for rank, each in self.outcomes.items() if each.leaks}
        called = {rank: each.collectives for rank, each in self.outcomes.items() if each.kind == "passed"}
        # In a shared group, collectives of this test would mix with those of the next.
        is_out_of_step = len(called) == self.size and len({*called.values()}) > 1
        if is_out_of_step:
            for rank, count in called.items():
                leaks[rank] = (*leaks.get(rank, ()), _test_report.left_after(count))
        return leaks

    def _is_cut_short(self) -> bool:
        """Return whether ranks failed only because another one has skipped the test."""
        if not self._have_only_lost_peers():
            return False
        return any(each.kind in ("skipped", "xfailed") for each in self.outcomes.values())

    def _early(self) -> list[str]:
        """Return a line that names the ranks that passed, if the others have only lost a peer."""
        ended = [rank for rank, each in self.outcomes.items() if each.kind == "passed"]
        if not ended or not self._have_only_lost_peers():
            return []
        return [f"{ranks_text(ended)}: ended without a failure"]

    def _have_only_lost_peers(self) -> bool:
        return all(each.is_secondary for each in self.reports.values())
