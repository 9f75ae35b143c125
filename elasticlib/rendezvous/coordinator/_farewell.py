"""
Nodes whose workers still save when the node that coordinates leaves. Pure.

Rules of this file: a node is waited for until it reports that its workers are gone, or sends no
heartbeats any more. The job has ended by then, so that nothing else depends on these reports.
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import Factory, frozen
from typing_extensions import Self

from elasticlib.rendezvous.coordinator._state import JobState
from elasticlib.rendezvous.protocol._messages import Leave, Report, Stopped, Succeeded


@frozen
class _Saving:
    """A node whose workers may run, with its last heartbeat and the time at which that was read."""

    mailbox: str
    count: int | None
    since: float


@frozen
class Farewell:
    """The nodes that the coordinator waits for before it leaves."""

    _saving: Mapping[str, _Saving] = Factory(dict)

    @classmethod
    def begin(cls, state: JobState, leaver: str, now: float) -> Self:
        """Return the nodes of the last round whose workers may run, besides the *leaver*."""
        current = state.round
        if current is None:
            return cls()
        return cls(
            {
                node: _Saving(entry.mailbox, None, now)
                for node, entry in current.entries.items()
                if node != leaver and node not in current.lost and current.may_run_on(node)
            }
        )

    def __bool__(self) -> bool:
        return bool(self._saving)

    def reported(self, report: Report) -> Self:
        """Return the nodes that are left after a node's *report*."""
        if report.node not in self._saving or not _has_ended(report):
            return self
        return type(self)({node: each for node, each in self._saving.items() if node != report.node})

    def after_heartbeats(self, counts: Mapping[str, int], now: float, timeout: float) -> Self:
        """Return the nodes that are left after their heartbeats were read; silent ones are dropped."""
        saving = {node: _after(each, counts.get(each.mailbox), now) for node, each in self._saving.items()}
        return type(self)({node: each for node, each in saving.items() if now < each.since + timeout})


def _has_ended(report: Report) -> bool:
    """Return whether no worker runs on the node that sent *report*."""
    # A node may leave before its workers have stopped: then its `Leave` names their round.
    if isinstance(report, Leave):
        return report.round is None
    return isinstance(report, (Stopped, Succeeded))


def _after(saving: _Saving, count: int | None, now: float) -> _Saving:
    # Only a change proves that the node lives: a stored heartbeat stays readable after its death.
    return saving if count is None or count == saving.count else _Saving(saving.mailbox, count, now)
