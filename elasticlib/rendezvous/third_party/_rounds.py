"""
The rounds of one node of a job for which a third-party rendezvous handler finds peers.

    IDLE --ranks--> RUNNING --our workers ended well--> BARRIER --all others', too--> OVER
                       '--a node ends the round--> ENDED --ranks are asked for--> IDLE
                                                     '--no restart is left--> JUDGED --outcome--> OVER

Rules of this file: one thread makes every call to the handler and its store. torch's contract
leaves root cause, agreed end and restarts of the whole job open. The nodes settle these through the
round's store, see `_agreement`.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from attrs import define, evolve, field

from elasticlib._clock import Clock
from elasticlib.errors import RendezvousError, RendezvousTimeoutError
from elasticlib.rendezvous._membership import MembershipEvent
from elasticlib.rendezvous.node._session_events import CloseSession, Seek
from elasticlib.rendezvous.protocol._messages import (
    Close,
    Failed,
    Final,
    Join,
    Leave,
    RankAssignment,
    RoundEnd,
    Stopped,
    Succeeded,
    WorkerReport,
)
from elasticlib.rendezvous.third_party._agreement import Agreement, FailureCollection, Past, SuccessCount, end_of_round
from elasticlib.rendezvous.third_party._contract import ThirdPartyNodeInfo, meaning

if TYPE_CHECKING:
    from elasticlib.rendezvous.handlers._base import RendezvousHandler

_PEERS = 300.0
"""Seconds for the nodes that the handler brought together to ask for ranks."""
_LINGER = 3.0
"""Seconds that a node waits for others to read the end of a round or of the job."""
_SHORTEST = 0.002
"""Seconds between two looks at first; they double."""

_T = TypeVar("_T")
_log = logging.getLogger("elasticlib")

Order: TypeAlias = Seek | WorkerReport | Close | CloseSession


class _Phase(enum.Enum):
    IDLE = "idle"
    RUNNING = "running"
    BARRIER = "barrier"
    """Our workers ended well, others may still run."""
    ENDED = "ended"
    """The round is over, our workers may still run."""
    JUDGED = "judged"
    """The last round is over, our workers are gone; the root cause is being settled."""
    OVER = "over"


_WITH_LOOKS = (_Phase.RUNNING, _Phase.BARRIER, _Phase.JUDGED)
"""Phases that other nodes may end: the handler and the store are polled."""


@define(eq=False)
class HandlerCalls:
    """The calls to a handler, so that another thread notices one that does not return."""

    handler: RendezvousHandler
    clock: Clock
    seeking: bool = field(init=False, default=False)
    """True while the handler is in `next_rendezvous`, which cannot be interrupted."""
    since: float | None = field(init=False, default=None)
    """Start of a call that must return soon; None if there is none."""

    @property
    def shares_store(self) -> bool:
        """True if workers may use the store of the handler's round; older handlers do not say so."""
        return bool(getattr(self.handler, "use_agent_store", False))

    def next_rendezvous(self) -> Any:
        """Return the handler's next round, however long that takes."""
        self.seeking = True
        try:
            return self.handler.next_rendezvous()
        finally:
            self.seeking = False

    def nodes_waiting(self) -> Any:
        """Return how many nodes wait for the next round."""
        return self.timed(self.handler.num_nodes_waiting)

    def is_closed(self) -> Any:
        """Return whether the job is closed for all."""
        return self.timed(self.handler.is_closed)

    def close(self) -> None:
        """Close the job for all nodes."""
        self.timed(self.handler.set_closed)

    def timed(self, call: Callable[[], Any]) -> Any:
        """Make a call that must return soon."""
        self.since = self.clock()
        try:
            return call()
        finally:
            self.since = None

    def shut_down(self) -> None:
        """Shut the handler down; a failure is logged."""
        try:
            self.handler.shutdown()
        except Exception as error:
            _log.warning("%s.shutdown failed: %s", type(self.handler).__name__, error)


@define(eq=False, kw_only=True)
class HandlerRounds:
    """
    The thread's side of a `HandlerMember`: it obeys *orders*, and *tells* the agent their outcome.
    """

    node: str
    calls: HandlerCalls
    max_restarts: int
    interval: float
    """Seconds between two looks."""
    barrier: float
    """Seconds that a node whose workers succeeded waits for the others."""
    offer: ThirdPartyNodeInfo
    orders: queue.SimpleQueue[Order]
    closing: threading.Event
    notify: Callable[[MembershipEvent | RendezvousError], None]
    clock: Clock

    _phase: _Phase = field(init=False, default=_Phase.IDLE)
    _past: Past = field(init=False, factory=Past)
    _table: Agreement | None = field(init=False, default=None)
    """Agreement of the latest round."""
    _failure_collection: FailureCollection | None = field(init=False, default=None)
    _judges: bool = field(init=False, default=False)
    """True if this node ended the round, so that it decides how the job ended."""
    _success_count: SuccessCount | None = field(init=False, default=None)
    _is_decided: bool = field(init=False, default=False)
    """True if the job's end is known to this node, so that the handler must be shut down."""
    _last_end: RoundEnd | None = field(init=False, default=None)

    def run(self) -> None:
        """Obey orders until one to close comes."""
        while not isinstance(order := self._next_order(), CloseSession):
            if self._phase is _Phase.OVER:
                continue
            try:
                self._follow_order(order)
            except Exception as error:
                self._finish(meaning(error, self.calls.handler))
        if self._is_decided:
            self.calls.shut_down()

    def _next_order(self) -> Order | None:
        timeout = self.interval if self._phase in _WITH_LOOKS else None
        try:
            return self.orders.get(timeout=timeout)
        except queue.Empty:
            return None

    def _follow_order(self, order: Order | None) -> None:
        match order:
            case None:
                self._look()
            case Seek(slots, role):
                self._seek(slots, role)
            case Failed(round=number, failures=notes) if self._runs(number) or self._awaits_others(number):
                self._end(end_of_round(self.node, notes, self._past, self.max_restarts), spent=1)
            case Stopped(round=number, failures=notes):
                if self._runs(number):
                    self._end(end_of_round(self.node, notes, self._past, self.max_restarts), spent=bool(notes))
                self._report_failures(order)
            case Succeeded(round=number) if self._runs(number):
                self._assigned.count_done(1)
                self._success_count = SuccessCount(self._assigned, number, self.clock() + self.barrier, self.barrier)
                self._phase = _Phase.BARRIER
                self._look()
            case Close():
                self.calls.close()
            case Leave(why=why, stops=stops):
                if stops:
                    self.calls.close()
                self._depart(why)
                self._finish(Final(False, why, kind="left"))
            case _:
                # It belongs to a round that is over.
                pass

    @property
    def _assigned(self) -> Agreement:
        assert self._table is not None, "no round has started yet"
        return self._table

    def _runs(self, number: int) -> bool:
        return self._phase is _Phase.RUNNING and number == self._past.round

    def _awaits_others(self, number: int) -> bool:
        """
        Return whether the workers here succeeded: a later failure is that of the store which this
        node hosts for others.
        """
        return self._phase is _Phase.BARRIER and number == self._past.round

    # A new round.

    def _seek(self, slots: int, role: str) -> None:
        self._phase, self._last_end, self._judges = _Phase.IDLE, None, False
        assignment = None
        while assignment is None and not self.closing.is_set():
            info = self.calls.next_rendezvous()
            # The handler may have taken minutes, and `close` did not wait for it.
            if self.closing.is_set():
                return
            self._table = Agreement(info.store, int(info.rank), int(info.world_size), self.calls.timed)
            assignment = self._agree(info, self._table, slots, role)

        if assignment is None:
            return

        self._past = Past(assignment.round, assignment.restart_count, self._assigned.nonce)
        self._phase = _Phase.RUNNING
        self.notify(assignment)

    def _agree(self, info: Any, table: Agreement, slots: int, role: str) -> RankAssignment | None:
        join = Join(self.node, self.offer.describe(info, shares=self.calls.shares_store, slots=slots, role=role))
        deadline, pause = self.clock() + _PEERS, _SHORTEST
        while self.clock() < deadline:
            assignment = table.meet(join, self._past, self.max_restarts)
            if assignment is not None:
                return assignment
            if self.closing.wait(pause):
                return None
            pause = min(2 * pause, self.interval)
            # The handler's next call brings in the nodes that wait, or says that the job is closed.
            if self.calls.nodes_waiting() > 0 or self.calls.is_closed():
                return None

        raise RendezvousTimeoutError(
            f"the rendezvous handler {type(self.calls.handler).__name__} reported {table.size} nodes, "
            f"but not all of them asked for ranks within {_PEERS:g} s: check the logs of the other nodes"
        )

    # Looks at other nodes.

    def _look(self) -> None:
        if self._phase is _Phase.JUDGED:
            self._settle()
            return

        end = self._assigned.ended()
        if end is not None:
            self._note_round_end(end)
            return

        is_at_barrier = self._phase is _Phase.BARRIER
        continues = self._look_at_others() if is_at_barrier else self._look_for_arrivals()
        if not continues:
            return

        # The node that ends the round may close the rendezvous next: then that end counts.
        if self.calls.is_closed() and self._assigned.ended() is None:
            self._finish(Final(False, "the rendezvous was closed", kind="closed"))

    def _look_at_others(self) -> bool:
        """
        Finish if the workers of all nodes succeeded, or the time for that is over; return whether
        the round continues.
        """
        assert self._success_count is not None, "no worker here has succeeded yet"
        final = self._success_count.outcome(self.clock())
        if final is None:
            return True
        # After the deadline it has waited for the others long enough.
        self._conclude(final, linger=_LINGER if self._success_count.is_complete else 0.0)
        return False

    def _look_for_arrivals(self) -> bool:
        """End the round if nodes wait to join; return whether the round continues."""
        waiting = self.calls.nodes_waiting()
        # Work that a node has finished is not thrown away for an arrival.
        if waiting <= 0 or self._assigned.count_done():
            return True
        self._end(RoundEnd(self._past.round, f"{waiting} nodes wait to join", True))
        return False

    # The end of a round.

    def _end(self, end: RoundEnd, spent: int = 0) -> None:
        """
        End the round with *end*, which uses *spent* restarts, or with the end of a faster node.
        """
        self._judges = self._assigned.end(end)
        if not self._judges:
            earlier = self._earlier_end()
            if earlier is not None:
                end, spent = earlier, 0
        self._past = evolve(self._past, restarts=self._past.restarts + spent)
        self._note_round_end(end)

    def _earlier_end(self) -> RoundEnd | None:
        """
        Return the end of the round by the node that was faster; None if it died before it published
        that.
        """
        return self._first_of(self._assigned.ended, _LINGER)

    def _note_round_end(self, end: RoundEnd) -> None:
        self._phase, self._last_end = _Phase.ENDED, end
        self.notify(end)

    def _depart(self, why: str) -> None:
        """Leave, so that no node waits for this one."""
        if self._phase in (_Phase.RUNNING, _Phase.BARRIER):
            self._assigned.end(RoundEnd(self._past.round, f"node {self.node} left: {why}", True))
            return

        is_between_rounds = self._phase in (_Phase.ENDED, _Phase.JUDGED)
        if is_between_rounds and self._last_end is not None:
            # The others wait for the outcome of the node that ended the round.
            if self._judges:
                self._assigned.judge(Final(False, self._last_end.why))
            self._assigned.report_failures(Stopped(self.node, self._past.round, ()))
            self._assigned.count_informed(1)

    # The end of the job.

    def _report_failures(self, stopped: Stopped) -> None:
        """Report the failures here after the last round, and wait for the outcome."""
        end = self._last_end
        if self._phase is not _Phase.ENDED or end is None or end.restart:
            return
        self._failure_collection = FailureCollection(self._assigned, self._judges, end.why, self.clock())
        self._failure_collection.report_failures(stopped)
        self._phase = _Phase.JUDGED
        self._settle()

    def _settle(self) -> None:
        assert self._failure_collection is not None, "no failure was reported yet"
        final = self._failure_collection.outcome(self.clock())
        if final is not None:
            self._conclude(final)

    def _conclude(self, final: Final, linger: float = _LINGER) -> None:
        """Finish once all others know the outcome, too: this node's end may take the store away."""
        self._is_decided = True
        with contextlib.suppress(RendezvousError):
            table = self._assigned
            table.count_informed(1)
            self._first_of(lambda: table.count_informed() >= table.size or None, linger)
        self._finish(final)

    def _first_of(self, look: Callable[[], _T | None], seconds: float) -> _T | None:
        """Return the first result of *look* but None; None after *seconds*, or once this node closes."""
        until, pause = self.clock() + seconds, _SHORTEST
        while (found := look()) is None and self.clock() < until and not self.closing.wait(pause):
            pause = min(2 * pause, self.interval)
        return found

    def _finish(self, last: Final | RendezvousError) -> None:
        self._phase = _Phase.OVER
        self.notify(last)
