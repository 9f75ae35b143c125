"""
The calls of ``should_stop`` that a simulated node's workers make, and the call in which they return.

Rules of this file: it mirrors `agent._agreed_stop` and the memory that workers share with their agent. Workers of
different nodes call at different speeds, as if nothing kept them in step: that is harder than a training.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from attrs import define, field
from typing_extensions import assert_never

from elasticlib.agent import _policy
from elasticlib.rendezvous.protocol._messages import CallsCounted, Report, StopWanted

if TYPE_CHECKING:
    from tests.sim.simulator.group import Group

GRACE = 30.0
"""Seconds from a notice to SIGKILL."""
KEPT = 5.0
"""Of these, for workers that do not return in time."""
SAMPLE, VISIBLE = 0.02, 0.002
"""Seconds over which calls are counted, and after which all workers know a proposal."""
_SLOWEST = 50.0
"""Calls per second of the first node's workers; each further node's are faster by as much."""
Action: TypeAlias = _policy.WantStop | _policy.AskWorkers | _policy.Propose | _policy.Agree


@define(eq=False, repr=False)
class CommonStop:
    """The calls of the workers of one round on one node."""

    group: Group
    _send_report: Callable[[Report], None]
    """Sends a report to the coordinator."""
    returned_in: int | None = None
    """The call in which they have returned."""
    _rate: float = field(init=False)
    _base: int = 0
    _since: float = field(init=False)
    """When they had made that many."""
    _proposed: int = 0
    """The call in which they wait."""
    _is_due: bool = False

    def __attrs_post_init__(self) -> None:
        node = self.group.node
        self._rate, self._since = _SLOWEST * (1 + node.number), node.timeline.now

    def perform(self, action: Action) -> None:
        """Do what the agent's policy says."""
        match action:
            case _policy.WantStop(stop):
                self._begin(GRACE)
                self._send_report(StopWanted(self._node, self._round, stop.why, GRACE))
            case _policy.AskWorkers(request):
                self._begin(request.left)
                self._count_in(SAMPLE, self._rate)
            case _policy.Propose(call):
                self._base, self._since, self._proposed = self._calls(), self.group.node.timeline.now, call
                self._count_in(VISIBLE, 0.0)
            case _policy.Agree():
                # Workers that have passed the proposed call return in their next one, alone.
                call = max(self._proposed, self._base + 1)
                self._return_at(self._since + (call - self._base) / self._rate, call)
            case _:
                assert_never(action)

    @property
    def _node(self) -> str:
        return self.group.node.name

    @property
    def _round(self) -> int:
        return self.group.assignment.round

    def _calls(self) -> int:
        """Return how many calls are over: workers that have not passed the proposed one wait in it."""
        made = self._base + int((self.group.node.timeline.now - self._since) * self._rate)
        waits = self._base < self._proposed <= made
        return self._proposed - 1 if waits else made

    def _begin(self, grace: float) -> None:
        """Begin the time that the workers have, unless it has begun."""
        if self._is_due:
            return
        self._is_due, node = True, self.group.node
        node.timeline.after(grace - KEPT, node.agent, self._fall_due)

    def _fall_due(self) -> None:
        if not self.group.ended:
            self.group.node.handle(_policy.StopDue(KEPT))

    def _count_in(self, seconds: float, rate: float) -> None:
        node, proposed = self.group.node, self._proposed

        def count() -> None:
            if not self.group.ended:
                self._send_report(CallsCounted(self._node, self._round, self._calls(), rate, proposed))

        node.timeline.after(seconds, node.agent, count)

    def _return_at(self, moment: float, call: int) -> None:
        group = self.group

        def return_workers() -> None:
            is_at_work = not group.ended and group.failed_at is None
            if is_at_work:
                self.returned_in = call
                group.end("returned")
                group.node.notify_agent(group, _policy.WorkersSucceeded(stopped=True))

        group.node.timeline.at(moment, group.process, return_workers)
