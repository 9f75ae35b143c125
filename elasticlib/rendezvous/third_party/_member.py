"""
A place in a job by way of somebody else's rendezvous handler.

Rules of this file: one thread makes every call to the handler and its store; a call that does not return is
noticed by the agent, who never waits for it. Handlers are known by their methods, their errors by their names:
torch's own classes are never imported. What torch's contract leaves open (root cause, agreed end, restarts of
the whole job) the nodes settle among themselves through the round's store, see `_agreement`.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import queue
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias

from attrs import evolve

from elasticlib._clock import Clock, monotonic
from elasticlib.errors import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousTimeoutError,
)
from elasticlib.processes import start_thread
from elasticlib.rendezvous._membership import Word
from elasticlib.rendezvous._names import node_name
from elasticlib.rendezvous.node._session_events import Close, Seek
from elasticlib.rendezvous.protocol._messages import (
    Failed,
    FailureNote,
    Final,
    Join,
    Leave,
    RankAssignment,
    RoundEnd,
    Stopped,
    Succeeded,
    WorkerReport,
)
from elasticlib.rendezvous.third_party._agreement import Agreement, FailureCollection, Past, describe
from elasticlib.rendezvous.third_party._contract import (
    METHODS as METHODS,
    ThirdPartyNodeInfo,
    checked_handler,
    meaning,
)

BARRIER = 300.0
"""Seconds that a node whose workers ended well waits for the others."""
SILENCE = 60.0
"""Seconds after which a call to the handler that has not returned counts as lost contact."""
_PEERS = 300.0
_LINGER = 3.0
_PARTING = 5.0
_SHORTEST = 0.002

_log = logging.getLogger("elasticlib")


_Order: TypeAlias = Seek | WorkerReport | Close


class _Phase(enum.Enum):
    IDLE = "idle"
    RUNNING = "running"
    BARRIER = "barrier"
    """Our workers ended well, others may still run."""
    ENDED = "ended"
    """The round is over, our workers may still run."""
    JUDGED = "judged"
    """The last round is over, our workers are gone; which failure came first is being settled."""
    OVER = "over"


class HandlerMember:
    """
    A node of the job for which *handler* finds peers; fulfils `Membership`.

    *max_restarts* is the job's, as all nodes count restarts alike; *monitor_interval* seconds lie between two
    looks at the handler; *local_addr* is where peers reach this machine.
    """

    def __init__(
        self,
        handler: Any,
        *,
        max_restarts: int = 3,
        monitor_interval: float = 0.1,
        local_addr: str | None = None,
        barrier: float = BARRIER,
        silence: float = SILENCE,
        clock: Clock = monotonic,
    ) -> None:
        self.node = node_name(local_addr)
        self._handler = checked_handler(handler)
        self._max_restarts = max_restarts
        self._interval = monitor_interval
        self._offer = ThirdPartyNodeInfo(local_addr)
        self._barrier = barrier
        self._silence = silence
        self._clock = clock
        self._orders: queue.SimpleQueue[_Order] = queue.SimpleQueue()
        self._words: deque[Word | RendezvousError] = deque()
        self._ready = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._seeking = False
        self._since: float | None = None
        # The thread's own:
        self._phase = _Phase.IDLE
        self._past = Past()
        self._table: Agreement | None = None
        self._failure_collection: FailureCollection | None = None
        self._judges = False
        self._deadline = 0.0
        self._shut = False
        self._last_word: RoundEnd | None = None
        self._thread = start_thread(threading.Thread(target=self._work, name="elasticlib-foreign-handler", daemon=True))

    # What the agent calls.

    def join(self, slots: int, role: str) -> None:
        """Ask for ranks in the next round. No worker of this node may run any more."""
        self._ask(Seek(slots, role))

    def post(self, report: WorkerReport) -> None:
        """Say how the workers are, or that this node goes; then the job stays open for a successor."""
        self._ask(report)

    def guard(self, handle: int) -> None:
        """Nothing: such handlers never say that contact is lost."""

    def listener(self) -> socket.socket | None:
        """The bound socket for the round's worker store; None where the handler's own store serves the workers."""
        return self._offer.listener()

    def fileno(self) -> int:
        """A descriptor that is readable when `drain` has something; it is closed by `close`."""
        return self._ready

    def poll_timeout(self) -> float:
        """Seconds until `drain` must be called to notice a handler that does not answer."""
        since = self._since
        return self._silence if since is None else max(0.0, since + self._silence - self._clock())

    def drain(self) -> list[Word]:
        """What came, oldest first. Raises a `RendezvousError` when the handler failed or does not answer."""
        if self._closing.is_set():
            return []
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._ready)
        words: list[Word] = []
        while self._words:
            word = self._words.popleft()
            if isinstance(word, RendezvousError):
                if words:
                    self._words.appendleft(word)
                    os.eventfd_write(self._ready, 1)
                    return words
                raise word
            words.append(word)
        since = self._since
        if not words and since is not None and self._clock() - since >= self._silence:
            raise RendezvousConnectionError(
                f"{type(self._handler).__name__} has not answered for {self._clock() - since:.3g} s"
            )
        return words

    def close(self) -> None:
        """End it. A handler whose job is decided is shut down; one that does not answer is left alone."""
        with self._lock:
            if self._closing.is_set():
                return
            self._closing.set()
        self._orders.put(Close())
        # Nobody can call a handler back from next_rendezvous.
        self._thread.join(0.0 if self._seeking else _PARTING)
        self._offer.drop()
        with self._lock:
            os.close(self._ready)
            self._ready = -1

    def _ask(self, order: _Order) -> None:
        if self._closing.is_set():
            raise RendezvousClosedError(f"node {self.node} has closed its rendezvous: {order!r:.60} comes too late")
        self._orders.put(order)

    # The thread.

    def _work(self) -> None:
        while not isinstance(order := self._next_order(), Close):
            if self._phase is _Phase.OVER:
                continue
            try:
                self._obey(order)
            except Exception as error:
                self._finish(meaning(error, self._handler))
        if self._shut:
            try:
                self._handler.shutdown()
            except Exception as error:
                _log.warning("%s.shutdown failed: %s", type(self._handler).__name__, error)

    def _next_order(self) -> _Order | None:
        looks = self._phase in (_Phase.RUNNING, _Phase.BARRIER, _Phase.JUDGED)
        try:
            return self._orders.get(timeout=self._interval if looks else None)
        except queue.Empty:
            return None

    def _obey(self, order: _Order | None) -> None:
        match order:
            case None:
                self._look()
            case Seek(slots, role):
                self._seek(slots, role)
            case Failed(round=number, failures=notes) if self._runs(number) or self._awaits_others(number):
                self._end(self._word_on(number, notes), spent=1)
            case Stopped(round=number, failures=notes):
                if self._runs(number):
                    self._end(self._word_on(number, notes), spent=bool(notes))
                self._report_failures(order)
            case Succeeded(round=number) if self._runs(number):
                self._assigned.count_done(1)
                self._phase, self._deadline = _Phase.BARRIER, self._clock() + self._barrier
                self._look()
            case Leave(why=why):
                self._depart(why)
                self._finish(Final(False, why, kind="left"))
            case _:
                pass  # about a round that is over already

    @property
    def _assigned(self) -> Agreement:
        assert self._table is not None, "there is no round yet"
        return self._table

    def _runs(self, number: int) -> bool:
        return self._phase is _Phase.RUNNING and number == self._past.round

    def _awaits_others(self, number: int) -> bool:
        """Whether the workers here ended well: what fails then is the store that this node hosts for the others."""
        return self._phase is _Phase.BARRIER and number == self._past.round

    def _seek(self, slots: int, role: str) -> None:
        self._phase, self._last_word, self._judges = _Phase.IDLE, None, False
        assignment = None
        while assignment is None and not self._closing.is_set():
            self._seeking = True
            try:
                info: Any = self._handler.next_rendezvous()
            finally:
                self._seeking = False
            if self._closing.is_set():
                return
            self._table = Agreement(info.store, int(info.rank), int(info.world_size), self._timed)
            assignment = self._agree(info, self._table, slots, role)
        if assignment is not None:
            self._past = Past(assignment.round, assignment.restart_count, self._assigned.nonce)
            self._phase = _Phase.RUNNING
            self._tell(assignment)

    def _agree(self, info: Any, table: Agreement, slots: int, role: str) -> RankAssignment | None:
        """This node's ranks; None when the handler calls for another round first."""
        shares = bool(getattr(self._handler, "use_agent_store", False))
        join = Join(self.node, self._offer.describe(info, shares=shares, slots=slots, role=role))
        deadline, pause = self._clock() + _PEERS, _SHORTEST
        while self._clock() < deadline:
            if (assignment := table.meet(join, self._past, self._max_restarts)) is not None:
                return assignment
            if self._closing.wait(pause):
                return None
            pause = min(2 * pause, self._interval)
            if self._timed(self._handler.num_nodes_waiting) > 0 or self._timed(self._handler.is_closed):
                return None
        raise RendezvousTimeoutError(
            f"{table.size} nodes came together by {type(self._handler).__name__}, "
            f"but not all of them asked for ranks within {_PEERS:g} s"
        )

    def _look(self) -> None:
        if self._phase is _Phase.JUDGED:
            return self._settle()
        table = self._assigned
        if (word := table.ended()) is not None:
            return self._hear(word)
        if self._phase is _Phase.BARRIER:
            done = table.count_done()
            if done >= table.size:
                return self._conclude(Final(True, f"all {done} nodes succeeded", round=self._past.round))
            if self._clock() >= self._deadline:
                why = f"{done} of {table.size} nodes succeeded, and no other reported a failure for {self._barrier:g} s"
                return self._conclude(Final(True, why, round=self._past.round), linger=0.0)
        elif (waiting := self._timed(self._handler.num_nodes_waiting)) > 0 and not table.count_done():
            # Work that a node has finished is not thrown away for an arrival.
            return self._end(RoundEnd(self._past.round, f"{waiting} nodes wait to join", True))
        if self._timed(self._handler.is_closed) and table.ended() is None:
            self._finish(Final(False, "the rendezvous was closed", kind="closed"))
        return None

    def _word_on(self, number: int, notes: tuple[FailureNote, ...]) -> RoundEnd:
        """How the round ends by these failures of ours."""
        if not notes:
            return RoundEnd(number, f"node {self.node} stopped its workers", True)
        why = describe(self.node, min(notes, key=lambda note: (note.secondary, -note.age)))
        fatal = any(note.fatal for note in notes)
        if self._past.restarts < self._max_restarts and not fatal:
            return RoundEnd(number, f"{why}; restart {self._past.restarts + 1} of {self._max_restarts}", True)
        return RoundEnd(number, f"{why}; {'a restart would fail again' if fatal else 'no restart is left'}", False)

    def _end(self, word: RoundEnd, spent: int = 0) -> None:
        """End the round by our word, which uses up *spent* restarts, or by that of a node which was faster."""
        table = self._assigned
        self._judges = table.end(word)
        if not self._judges:
            deadline = self._clock() + _LINGER
            while (earlier := table.ended()) is None and self._clock() < deadline:
                self._closing.wait(_SHORTEST)
            word, spent = (word, spent) if earlier is None else (earlier, 0)
        self._past = evolve(self._past, restarts=self._past.restarts + spent)
        self._hear(word)

    def _hear(self, word: RoundEnd) -> None:
        self._phase, self._last_word = _Phase.ENDED, word
        self._tell(word)

    def _report_failures(self, stopped: Stopped) -> None:
        """After the last round: say what failed here, and wait for the outcome."""
        word = self._last_word
        if self._phase is _Phase.ENDED and word is not None and not word.restart:
            self._failure_collection = FailureCollection(self._assigned, self._judges, word.why, self._clock())
            self._failure_collection.report_failures(stopped)
            self._phase = _Phase.JUDGED
            self._settle()

    def _depart(self, why: str) -> None:
        """Let nobody wait for this node."""
        if self._phase in (_Phase.RUNNING, _Phase.BARRIER):
            self._assigned.end(RoundEnd(self._past.round, f"node {self.node} left: {why}", True))
        elif self._phase in (_Phase.ENDED, _Phase.JUDGED) and self._last_word is not None:
            if self._judges:
                self._assigned.judge(Final(False, self._last_word.why))
            self._assigned.report_failures(Stopped(self.node, self._past.round, ()))
            self._assigned.count_heard(1)

    def _settle(self) -> None:
        assert self._failure_collection is not None, "no failure was reported yet"
        if (final := self._failure_collection.outcome(self._clock())) is not None:
            self._conclude(final)

    def _conclude(self, final: Final, linger: float = _LINGER) -> None:
        """Finish once all others know it too: this node may be the one whose end takes the store away."""
        self._shut = True
        with contextlib.suppress(RendezvousError):
            table, deadline, pause = self._assigned, self._clock() + linger, _SHORTEST
            heard = table.count_heard(1)
            while heard < table.size and self._clock() < deadline and not self._closing.wait(pause):
                pause = min(2 * pause, self._interval)
                heard = table.count_heard()
        self._finish(final)

    def _finish(self, last: Final | RendezvousError) -> None:
        self._phase = _Phase.OVER
        self._tell(last)

    def _timed(self, call: Callable[[], Any]) -> Any:
        self._since = self._clock()
        try:
            return call()
        finally:
            self._since = None

    def _tell(self, word: Word | RendezvousError) -> None:
        self._words.append(word)
        with self._lock:
            if self._ready >= 0:
                os.eventfd_write(self._ready, 1)
