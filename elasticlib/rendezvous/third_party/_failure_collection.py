"""
Which failure came first on any node, where no coordinator says so: the node that ended the round finds it.

Rules of this file: a failure's time is the judge's own clock less the age that its node told; all nodes take the
judge's word, and a node that gets none in time says what it knows itself.
"""

from __future__ import annotations

from attrs import Factory, define

from elasticlib.rendezvous.protocol._messages import FailureNote, Final, Stopped
from elasticlib.rendezvous.third_party._agreement import Agreement

PATIENCE = 45.0
"""Seconds that a judge waits until the workers of all nodes are gone: more than a stop takes by default."""
_GRACE = 15.0


@define
class FailureCollection:
    """One node's part in it, from when its own workers are gone."""

    table: Agreement
    judges: bool
    why: str
    """Why the round ended, as far as was known then."""
    began: float
    """Seconds of the clock whose time `outcome` is given."""
    _causes: list[tuple[float, str, FailureNote]] = Factory(list)
    _heard: set[int] = Factory(set)

    def report_failures(self, stopped: Stopped) -> None:
        """Tell what happened here."""
        self._hear(self.table.rank, stopped, self.began)
        self.table.report_failures(stopped)

    def outcome(self, now: float) -> Final | None:
        """How the job ended, once that is settled."""
        if self.judges:
            for rank in set(range(self.table.size)) - self._heard:
                if (stopped := self.table.testimony(rank)) is not None:
                    self._hear(rank, stopped, now)
            if len(self._heard) < self.table.size and now < self.began + PATIENCE:
                return None
            final = self._final()
            self.table.judge(final)
            return final
        if (word := self.table.outcome()) is not None:
            return word
        return self._final() if now >= self.began + PATIENCE + _GRACE else None

    def _hear(self, rank: int, stopped: Stopped, now: float) -> None:
        self._heard.add(rank)
        self._causes += [(now - note.age, stopped.node, note) for note in stopped.failures]

    def _final(self) -> Final:
        if not self._causes:
            return Final(False, self.why)
        _, node, note = min(self._causes, key=lambda cause: (cause[2].secondary, cause[0], cause[1], cause[2].rank))
        why = "a restart would fail again" if note.fatal else "no restart is left"
        return Final(False, f"{describe(node, note)}; {why}", node, note)


def describe(node: str, note: FailureNote) -> str:
    """A failure in one line."""
    return f"rank {note.rank} of node {node} failed: {note.message}"
