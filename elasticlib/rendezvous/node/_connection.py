"""
One connection of a node to its job's store: a thread for each of its two lanes.

Rules of this file: the threads perform what they are asked and tell what came of it; they decide nothing. A
connection that was given up ends when its last call returns, which in a frozen store may take minutes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from attrs import define, field

from elasticlib.errors import ConfigError, RendezvousConnectionError, RendezvousError, RendezvousStateError, StartError
from elasticlib.processes import start_thread
from elasticlib.rendezvous.net._dial import RefusedError
from elasticlib.rendezvous.node import _session_events as events
from elasticlib.rendezvous.node._session_liveness import Tick
from elasticlib.rendezvous.protocol._exchange import Exchange, RequestRefusedError
from elasticlib.rendezvous.protocol._operations import perform

if TYPE_CHECKING:
    from elasticlib.rendezvous.node._client import NodeClient

_log = logging.getLogger("elasticlib")

Dial: TypeAlias = Callable[[float], Exchange]
"""One attempt to connect, of about so many seconds; raises `RendezvousConnectionError`."""


@define(eq=False)
class Connection:
    """A connection from its first attempt to its end; `start` it once."""

    number: int
    client: NodeClient
    """Whose the connection is: it holds `turned` when it calls, and is told what happens without it."""
    dial: Dial
    limit: float
    """Seconds for the attempt to connect."""
    _work: dict[events.Lane, events.Ask] = field(factory=dict)
    _ending: bool = False
    _watch: Exchange | None = None
    _exchange: Exchange | None = None
    _threads: list[threading.Thread] = field(factory=list)

    def start(self) -> None:
        """Begin to connect. Raises `StartError` when no thread can be started."""
        self._run(self._speak, "elasticlib-member")

    def ask(self, ask: events.Ask) -> None:
        """Have it done, unless this connection was given up. Call with `turned` held."""
        if not self._ending:
            self._work[ask.lane] = ask

    def end(self) -> None:
        """Do what was asked, and no more. Call with `turned` held."""
        self._ending = True

    def abandon(self) -> None:
        """Give it up; never blocks. Call with `turned` held."""
        self._ending = True
        self._work.clear()
        if self._watch is not None:
            self._watch.close()

    def join(self, timeout: float) -> None:
        """Wait until the threads have ended, at most *timeout* seconds for each."""
        for thread in self._threads:
            thread.join(timeout)

    def _run(self, work: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=self._guarded, args=(work,), name=name, daemon=True)
        start_thread(thread)
        self._threads.append(thread)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except RendezvousConnectionError as error:
            self.client.tell(events.Lost(self.number, str(error), isinstance(error, RefusedError)))
        except (RendezvousError, ConfigError, StartError) as error:
            self.client.tell(events.Refused(self.number, error))
        except Exception as error:
            _log.exception("a thread of the rendezvous failed")
            self.client.tell(events.Refused(self.number, RendezvousStateError(f"the rendezvous failed: {error!r}")))

    def _speak(self) -> None:
        exchange = self._exchange = self.dial(self.limit)
        try:
            with self.client.turned:
                if not self._ending:  # at once: when the first notice is awaited, its connection is there
                    self._run(self._listen, "elasticlib-notices")
            self.client.tell(events.Connected(self.number))
            self._serve(events.Lane.SPEAK, exchange)
        finally:
            exchange.close()

    def _listen(self) -> None:
        assert self._exchange is not None
        exchange = self._watch = self._exchange.clone()
        try:
            self._serve(events.Lane.WATCH, exchange)
        finally:
            exchange.close()

    def _serve(self, lane: events.Lane, exchange: Exchange) -> None:
        while (ask := self._next(lane)) is not None:
            self.client.tell(self._done(ask, exchange), lane)

    def _done(self, ask: events.Ask, exchange: Exchange) -> events.Event:
        what = ask.operation
        if isinstance(what, events.Describe):
            return events.Answer(self.number, ask.number, self.client.describe(what.slots, what.role))
        try:
            return events.Answer(self.number, ask.number, perform(exchange, what))
        except RequestRefusedError as error:
            return events.Denied(self.number, ask.number, str(error), error.too_large)

    def _idle(self, lane: events.Lane) -> float | None:
        """Return the seconds until the lane has work of its own: only the one that speaks ever has."""
        return self.client.idle() if lane is events.Lane.SPEAK else None

    def _next(self, lane: events.Lane) -> events.Ask | None:
        """What is to be done on the lane, once there is something; None at the end."""
        while True:
            with self.client.turned:
                if (ask := self._work.pop(lane, None)) is not None:
                    return ask
                if self._ending:
                    return None
                idle = self._idle(lane)
                # Without a time of its own it waits until the client has something for it.
                is_early = idle is None or idle > 0
                if is_early:
                    self.client.turned.wait(idle)
            if not is_early:
                self.client.tell(Tick())
