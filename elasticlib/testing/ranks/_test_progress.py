"""
One test under way: the outcomes of its ranks so far, and when it has to be over.

Rules of this file: nothing here waits, or knows a worker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from attrs import define, field

from elasticlib.errors import ChildFailedError
from elasticlib.processes import Message
from elasticlib.stacks import ranks_text
from elasticlib.testing.ranks import _blocked, _collectives, _failed, _recorder, _told
from elasticlib.testing.ranks._rank_call import RankOutcome

_AFTER_FIRST = 1.0
"""Seconds that ranks have, once another one has failed or skipped, to end by themselves."""
_AFTER_LOST = 10.0
"""The same, once one has lost its peer, whose death the launcher is about to tell."""


@define
class TestProgress:
    """One test under way."""

    size: int
    """How many ranks it has."""
    until: float
    """When it has to be over."""
    outcomes: dict[int, RankOutcome] = field(factory=dict)
    reports: dict[int, _failed.RankFailure] = field(factory=dict)
    notes: list[str] = field(factory=list)
    collectives: dict[int, dict[str, _collectives.At]] = field(factory=dict)
    """By rank and process group, at which collectives ranks were just before the limit."""

    # What happens.

    def hear(self, rank: int, message: Message) -> None:
        """Keep what *rank* says in the midst of the test."""
        if message.get("says") == _recorder.SAYS:
            self.collectives[rank] = _collectives.read(message.get("collectives"))

    def pause(self, seconds: float) -> None:
        """Allow *seconds* more: somebody who looks at a rank in a debugger takes their time."""
        # These were sent for the former limit, which was too early.
        self.collectives.clear()
        self.until += seconds

    def add(self, rank: int, outcome: RankOutcome, now: float) -> None:
        """Take the outcome of *rank*, which ended by itself; after a failure the others have little time."""
        self.outcomes[rank] = outcome
        failure = outcome.failure
        if failure is not None:
            self.reports[rank] = _failed.unpacked(failure)
        # The others may wait for this rank in vain.
        if outcome.kind != "passed":
            is_lost = failure is not None and failure.is_secondary
            self.until = min(self.until, now + (_AFTER_LOST if is_lost else _AFTER_FIRST))

    def add_deaths(self, error: ChildFailedError) -> None:
        """Take the failures of workers that have died, but for those that died of another's."""
        first, _ = error.get_first_failure()
        for rank, failure in error.failures.items():
            if rank == first or not failure.secondary:
                self.outcomes.pop(rank, None)
                self.reports[rank] = _failed.of_death(failure)
        left = [rank for rank in self.missing() if rank not in self.reports]
        if left:
            self.notes.append(f"{ranks_text(left)}: ended, as a rank of the group was gone")

    def add_late(self, late: Mapping[int, str], timeout: float) -> None:
        """Take the stacks of the ranks that have not ended in time, which was *timeout* if none has failed."""
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
        # One failure, though they are at several places: told once, at that of the first.
        own = _blocked.blocked(late[min(late)]).own()
        file, line = ("", 0) if own is None else (own.file, own.line)
        for rank in late:
            self.reports[rank] = _failed.RankFailure(message, file, line, "\n".join(lines), TimeoutError(message))

    # What has come of it.

    def is_complete(self) -> bool:
        return len(self.outcomes) >= self.size

    def missing(self) -> list[int]:
        return [rank for rank in range(self.size) if rank not in self.outcomes]

    def has_stopped(self) -> bool:
        """Return whether some rank has ended in another way than well, so that others may wait for it in vain."""
        return bool(self.reports) or any(each.kind != "passed" for each in self.outcomes.values())

    def failed(self, look: Callable[[int], bool | None]) -> _failed.RanksFailed | None:
        """Return the error of the test; None where it has none."""
        if not self.reports or self._is_cut_short():
            return None
        return _failed.failed(self.reports, self.size, [*self.notes, *self._early()], look)

    def leaks(self) -> dict[int, tuple[str, ...]]:
        """Return by rank the state that the test has left behind."""
        leaks = {rank: each.leaks for rank, each in self.outcomes.items() if each.leaks}
        called = {rank: each.collectives for rank, each in self.outcomes.items() if each.kind == "passed"}
        # In a shared group the next test would meet collectives of this one.
        is_out_of_step = len(called) == self.size and len({*called.values()}) > 1
        if is_out_of_step:
            for rank, count in called.items():
                leaks[rank] = (*leaks.get(rank, ()), _told.left_after(count))
        return leaks

    def _is_cut_short(self) -> bool:
        """Return whether ranks failed for no other reason than that another one has skipped the test."""
        if not self._have_only_lost_peers():
            return False
        return any(each.kind in ("skipped", "xfailed") for each in self.outcomes.values())

    def _early(self) -> list[str]:
        """Name the ranks that had ended by themselves, where the others have but lost a peer."""
        ended = [rank for rank, each in self.outcomes.items() if each.kind == "passed"]
        if not ended or not self._have_only_lost_peers():
            return []
        return [f"{ranks_text(ended)}: ended without a failure"]

    def _have_only_lost_peers(self) -> bool:
        return all(each.is_secondary for each in self.reports.values())
