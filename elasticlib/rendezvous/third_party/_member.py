"""
A place in a job through a third-party rendezvous handler.

Rules of this file: this is the agent's side of a thread that makes every call to the handler and
its store, see `_rounds`. The agent notices a call that does not return, and never waits for one.
Handlers are known by their methods, their errors by their names: torch's own classes are never
imported.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
from collections import deque
from typing import Any

from elasticlib._clock import Clock, monotonic
from elasticlib.errors import RendezvousClosedError, RendezvousConnectionError, RendezvousError
from elasticlib.processes import start_thread
from elasticlib.rendezvous._membership import MembershipEvent
from elasticlib.rendezvous._names import node_name
from elasticlib.rendezvous.node._session_events import CloseSession, Seek
from elasticlib.rendezvous.protocol._messages import Close, WorkerReport
from elasticlib.rendezvous.third_party._contract import METHODS as METHODS, ThirdPartyNodeInfo, checked_handler
from elasticlib.rendezvous.third_party._rounds import HandlerCalls, HandlerRounds, Order

BARRIER = 300.0
"""Seconds that a node whose workers succeeded waits for the others."""
SILENCE = 60.0
"""Seconds after which a call to the handler that has not returned counts as lost contact."""
_PARTING = 5.0
"""Seconds that `close` waits for the thread."""


class HandlerMember:
    """
    A node of the job for which *handler* finds peers; fulfils `Membership`.

    *max_restarts* is the job's, as all nodes count restarts alike. *monitor_interval* is the time
    in seconds between two looks at the handler. Peers reach this machine at *local_addr*.
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
        self._offer = ThirdPartyNodeInfo(local_addr)
        self._silence = silence
        self._clock = clock
        self._orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._notices: deque[MembershipEvent | RendezvousError] = deque()
        self._ready = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._calls = HandlerCalls(self._handler, clock)
        rounds = HandlerRounds(
            node=self.node,
            calls=self._calls,
            max_restarts=max_restarts,
            interval=monitor_interval,
            barrier=barrier,
            offer=self._offer,
            orders=self._orders,
            closing=self._closing,
            notify=self._notify,
            clock=clock,
        )
        thread = threading.Thread(target=rounds.run, name="elasticlib-foreign-handler", daemon=True)
        self._thread = start_thread(thread)

    def join(self, slots: int, role: str) -> None:
        """Ask for ranks in the next round. No worker of this node may run any more."""
        self._ask(Seek(slots, role))

    def post(self, report: WorkerReport | Close) -> None:
        """
        Report the state of the workers, or that this node leaves; then the job stays open for a
        successor, unless `Close` came before.
        """
        self._ask(report)

    def guard(self, handle: int) -> None:
        """Do nothing: such handlers never report that contact is lost."""

    def listener(self) -> socket.socket | None:
        """Return the bound socket for the round's worker store; None if the handler's own store serves the workers."""
        return self._offer.listener()

    def fileno(self) -> int:
        """Return a descriptor that is readable when `drain` has something; `close` closes it."""
        return self._ready

    def poll_timeout(self) -> float:
        """Return the seconds until `drain` must be called to notice a handler that does not answer."""
        since = self._calls.since
        if since is None:
            return self._silence
        return max(0.0, since + self._silence - self._clock())

    def drain(self) -> list[MembershipEvent]:
        """
        Return the new events, oldest first; raise a `RendezvousError` when the handler failed or
        does not answer.
        """
        if self._closing.is_set():
            return []
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._ready)
        notices = self._take_notices()
        # Events before an error are returned first; the next call raises it.
        if not notices:
            self._check_answers()
        return notices

    def _take_notices(self) -> list[MembershipEvent]:
        notices: list[MembershipEvent] = []
        while self._notices:
            notice = self._notices.popleft()
            if not isinstance(notice, RendezvousError):
                notices.append(notice)
                continue

            if not notices:
                raise notice
            # Events before it first; the next call raises it.
            self._notices.appendleft(notice)
            os.eventfd_write(self._ready, 1)
            break

        return notices

    def _check_answers(self) -> None:
        since = self._calls.since
        if since is None:
            return
        waited = self._clock() - since
        if waited >= self._silence:
            raise RendezvousConnectionError(f"{type(self._handler).__name__} has not answered for {waited:.3g} s")

    def close(self) -> None:
        """
        Close the member. If the job is decided, the handler is shut down; a handler that does not
        answer is left alone.
        """
        with self._lock:
            if self._closing.is_set():
                return
            self._closing.set()

        self._orders.put(CloseSession())

        # next_rendezvous of a handler cannot be interrupted.
        self._thread.join(0.0 if self._calls.seeking else _PARTING)
        self._offer.drop()
        with self._lock:
            os.close(self._ready)
            self._ready = -1

    def _ask(self, order: Order) -> None:
        if self._closing.is_set():
            raise RendezvousClosedError(f"node {self.node} has closed its rendezvous and cannot send {order!r:.60}")
        self._orders.put(order)

    def _notify(self, notice: MembershipEvent | RendezvousError) -> None:
        self._notices.append(notice)
        with self._lock:
            if self._ready >= 0:
                os.eventfd_write(self._ready, 1)
