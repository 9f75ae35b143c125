"""
A simulated node's workers of one round.

Rules of this file: they run or do not; who starts and ends them is the node's business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define

from elasticlib.rendezvous._messages import Seat
from elasticlib.testing._faults import FailWorker
from elasticlib.testing._history import Gone
from elasticlib.testing._timeline import Process

if TYPE_CHECKING:
    from elasticlib.testing._node import Node


@define(eq=False, repr=False)
class Group:
    """A node's workers of one round."""

    node: Node
    seat: Seat
    process: Process
    failed_at: float | None = None
    failure: FailWorker | None = None
    """How it failed, where a fault says so."""
    gone: bool = False

    def end(self, how: str) -> None:
        """None of them runs any more."""
        if not self.gone:
            self.gone = True
            cluster = self.node.cluster
            cluster.note(Gone(cluster.timeline.now, self.node.name, self.seat.round, how))
