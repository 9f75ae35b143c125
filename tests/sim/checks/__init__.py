"""
Checks of each step of a simulated node's session and of its coordinator's mail, under any faults.

Rules of this package: a check sees inputs and outputs, as a store and an agent do. It states a rule
of the protocol in its own words.
"""

from __future__ import annotations

import functools
from typing import Any

from attrs import Factory, define

from elasticlib.rendezvous.node._session import Session
from elasticlib.testing import Tamper
from tests.sim.checks.demand import demand
from tests.sim.checks.outbox import OutboxChecks
from tests.sim.checks.session import SessionChecks
from tests.sim.simulator import SimulatedCluster


@define(eq=False, repr=False)
class Checks:
    """Of all sessions and coordinators of one job."""

    outbox: bool = True
    """True if a coordinator reads only messages of its own nodes."""
    _sessions: dict[str, SessionChecks] = Factory(dict)
    _outboxes: dict[str, OutboxChecks] = Factory(dict)

    def stepped(self, node: str, event: Any, before: Any, after: Any, actions: tuple[Any, ...], now: float) -> None:
        """Check it."""
        if isinstance(after, Session):
            if before is None:
                self._sessions[node] = SessionChecks(functools.partial(demand, f"at {now:.6f} s: {node}"))
                self._sessions[node].begins(after, actions, now)
            elif event is None:
                self._sessions[node].taken(actions, after)
            else:
                self._sessions[node].stepped(event, before, after, actions, now)
        elif self.outbox:
            if before is None or node not in self._outboxes:  # one may be closed before it begins
                self._outboxes[node] = OutboxChecks(functools.partial(demand, f"at {now:.6f} s: mail of {node}"))
            self._outboxes[node].stepped(event, before, after, actions, now)


@define(eq=False, repr=False)
class CheckedCluster(SimulatedCluster):
    """One whose steps are checked."""

    def __attrs_post_init__(self) -> None:
        signed = self.token or not any(isinstance(fault, Tamper) for fault in self.plan)
        self.observer = Checks(outbox=bool(signed))
        super().__attrs_post_init__()
