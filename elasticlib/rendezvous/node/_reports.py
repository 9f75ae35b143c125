"""
The reports of a node, for every kind of member.

Rules of this file: it makes messages, none longer than a letter may be; how they travel is the member's own business.
"""

from __future__ import annotations

import abc

from elasticlib.rendezvous.protocol._messages import Failed, FailureNote, Report, Stopped, Succeeded
from elasticlib.rendezvous.protocol._shortening import fitting


class Reporter(abc.ABC):
    """The part of `Membership` in which a node says how its workers are."""

    node: str

    @abc.abstractmethod
    def _report(self, report: Report) -> None:
        """Send it on its way; never blocks."""

    def failed(self, round: int, failures: tuple[FailureNote, ...]) -> None:
        """Say at once that workers failed; `stopped` follows when all are gone."""
        self._report(fitting(Failed(self.node, round, failures)))

    def stopped(self, round: int, failures: tuple[FailureNote, ...] = ()) -> None:
        """Say that all workers are gone, with all that failed by themselves."""
        self._report(fitting(Stopped(self.node, round, failures)))

    def succeeded(self, round: int) -> None:
        """Say that all workers ended well; `Final` or `RoundEnd` follows."""
        self._report(Succeeded(self.node, round))
