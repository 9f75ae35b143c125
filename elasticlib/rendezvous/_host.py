"""
Runs the coordinator: reads the inbox, steps, writes the notices.

Rules of this file: no decision is made here; one thread does all the work and holds all the state; it
waits for the next report or the coordinator's own deadline, and never polls.
"""

from __future__ import annotations

import logging
import threading

from typing_extensions import assert_never

from elasticlib._clock import Clock, monotonic
from elasticlib.errors import RendezvousStateError
from elasticlib.rendezvous._coordinator import Action, Event, Received, Rules, Send, State, Tick, WakeAt, abandon, step
from elasticlib.rendezvous._exchange import Exchange, box_key, inbox_key, post
from elasticlib.rendezvous._messages import Failed, Final, Join, Leave, Stopped, Succeeded, decode, encode

_log = logging.getLogger(__name__)


class Host:
    """The coordinator of one job, at work on *exchange* between `start` and `close`."""

    def __init__(self, exchange: Exchange, rules: Rules, clock: Clock = monotonic) -> None:
        self._exchange = exchange
        self._clock = clock
        self._state = State(rules)
        self._wake_at: float | None = None
        self._next = 1
        self._told: dict[int, int] = {}
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="elasticlib-coordinator", daemon=True)

    def start(self) -> None:
        """Begin to answer; once in the life of a host."""
        self._thread.start()

    def close(self) -> None:
        """Stop answering and end the thread; nodes that wait are not told."""
        if not self._closing and self._thread.ident is not None:
            self._closing = True
            post(self._exchange, b"")
            self._thread.join()

    def _work(self) -> None:
        event: Event | None = Tick()
        try:
            while not self._closing:
                if event is not None:
                    self._wake_at = None
                    self._state, actions = step(self._state, event, self._clock())
                    self._perform(actions)
                event = self._receive()
        except Exception as error:
            _log.exception("the coordinator of the job broke")
            self._give_up(event, f"the coordinator broke: {error!r}")

    def _give_up(self, event: Event | None, why: str) -> None:
        """Tell whoever waits for an answer, and whoever will: nobody must wait for ever."""
        self._state, actions = abandon(self._state, why)
        self._perform(actions)
        known = {action.box for action in actions if isinstance(action, Send)}
        self._wake_at = None
        while not self._closing:
            if isinstance(event, Received) and isinstance(event.report, Join) and event.number not in known:
                final = Final(succeeded=False, why=why, root_node=None, root=None)
                self._perform((Send(event.number, event.report.node, final),))
            event = self._receive()

    def _receive(self) -> Event | None:
        key = inbox_key(self._next)
        patience = None if self._wake_at is None else max(0.0, self._wake_at - self._clock())
        if not self._exchange.wait(key, patience):
            return Tick()
        data = self._exchange.get(key)
        self._exchange.delete(key)
        number, self._next = self._next, self._next + 1
        try:
            report = decode(data or b"")
        except RendezvousStateError as error:
            if not self._closing:
                _log.warning("a report was refused: %s", error)
            return None
        if not isinstance(report, (Join, Failed, Stopped, Succeeded, Leave)):
            _log.warning("a report was refused: a node may not send %s", type(report).__name__)
            return None
        return Received(number, report)

    def _perform(self, actions: tuple[Action, ...]) -> None:
        for action in actions:
            match action:
                case Send(box=box, notice=notice):
                    index = self._told.get(box, 0)
                    self._told[box] = index + 1
                    self._exchange.set(box_key(box, index), encode(notice))
                case WakeAt(when=when):
                    self._wake_at = when
                case _:
                    assert_never(action)
