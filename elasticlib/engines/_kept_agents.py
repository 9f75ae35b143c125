"""
The ``with`` block of an engine: its agents, and what they keep warm, stay between calls.

Rules of this file: `KeptPlaces` decides. One thread reads the engine's events for the whole block, since no call may
lose those of the next one. A call that ends leaves idle agents only: each other one is replaced by then. The client
sees an ordinary placement.
"""

from __future__ import annotations

import abc
import logging
import queue
import threading
from types import TracebackType

from attrs import evolve
from typing_extensions import Self

from elasticlib.engines._kept_places import AgentRenewal, KeptPlaces
from elasticlib.engines._protocol import AgentCommand, EngineEnds, EngineEvent, Placement
from elasticlib.errors import ConfigError, StartError
from elasticlib.processes import start_thread

_log = logging.getLogger("elasticlib")

_STAYS = "--stays"
"""Option of an agent that waits for another call after its result."""
_END_SECONDS = 2.0
"""Seconds from the end of the agents' input to their own end."""
_BLOCK_HAS_ENDED = "the with block of the engine has ended"
_MOST_EVENTS = 256
"""Number of unread events of a call from which on the engine's thread waits."""


class KeepsAgents(abc.ABC):
    """Base of engines whose ``with`` block keeps the agents from call to call; without it each call has its own."""

    _kept: KeptAgents | None = None

    def __enter__(self) -> Self:
        if self._kept is not None:
            raise ConfigError(f"{self!r} is in a with block already: use another one for calls at the same time")
        self._kept = KeptAgents(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.end()

    def place(self, agents: int, command: AgentCommand) -> Placement:
        """Start *command* on *agents* machines, or let the kept agents run it."""
        kept = self._kept
        return self.start(agents, command) if kept is None else kept.placement(agents, command)

    @abc.abstractmethod
    def start(self, agents: int, command: AgentCommand) -> Placement:
        """Start *command* on *agents* machines, for one call or for all calls of a with block."""

    def is_in_contact(self) -> bool:
        """Return True if agents that were started before can serve another call."""
        return True


class KeptAgents:
    """The agents of a ``with`` block, which serve one call at a time."""

    def __init__(self, engine: KeepsAgents) -> None:
        self._engine = engine
        self._lock = threading.RLock()
        self._group: _Group | None = None
        self._call: KeptPlacement | None = None
        self._is_over = False

    def placement(self, agents: int, command: AgentCommand) -> KeptPlacement:
        """Begin a call. Raises `ConfigError` while another one runs."""
        with self._lock:
            if self._is_over:
                raise StartError(f"the with block of {self._engine!r} has ended: call within it")
            if self._call is not None and not self._call.closed.is_set():
                raise ConfigError(
                    f"a call runs on {self._engine!r} already: wait for its end, or use another engine for calls at "
                    "the same time"
                )
            self._call = KeptPlacement(self._present_group(agents, command), command.payload)
            return self._call

    def _present_group(self, agents: int, command: AgentCommand) -> _Group:
        kept = evolve(command, argv=(*command.argv, _STAYS), payload=b"")
        group = self._group
        if group is not None and group.fits(agents, kept) and self._engine.is_in_contact():
            return group

        self._group = None
        if group is not None:
            group.end()
        self._group = _Group(self._engine.start(agents, kept), agents, kept)
        return self._group

    def end(self) -> None:
        """End all agents, and the call that may run."""
        with self._lock:
            self._is_over = True
            group, self._group = self._group, None
        if group is not None:
            group.end()


class _Group:
    """The agents of one placement of the engine, with the thread that reads their events."""

    def __init__(self, placement: Placement, agents: int, command: AgentCommand) -> None:
        self._placement, self._agents, self._command = placement, agents, command
        self._places = KeptPlaces(agents)
        self._lock = threading.RLock()
        """Held for each decision, and while it is carried out."""
        self._call: KeptPlacement | None = None
        self._failure: Exception | None = None
        self._is_ending = self._is_over = False
        self._all_ended = threading.Event()
        """Set once no agent is left, until the next call begins."""
        try:
            self._thread = start_thread(threading.Thread(target=self._run, name="elasticlib-kept", daemon=True))
        except StartError:
            # No other object knows these agents yet.
            placement.close()
            raise

    def fits(self, agents: int, command: AgentCommand) -> bool:
        """Return True if these agents can run *command*."""
        return self._failure is None and (agents, command) == (self._agents, self._command)

    def end(self) -> None:
        """End the present call, with the time that it gives its workers, and then all agents."""
        try:
            self._stop_call()
            self._placement.stop()
            self._all_ended.wait(_END_SECONDS)
        # The engine may be out of reach, and with it the agents.
        except Exception as error:
            _log.debug("agents are ended at once: %s", error)
        finally:
            self._is_over = True
            self._placement.close()
            self._thread.join()

    def _stop_call(self) -> None:
        with self._lock:
            self._is_ending = True
            call = self._call if self._failure is None else None
        if call is not None:
            call.put(EngineEnds(_BLOCK_HAS_ENDED))
            call.closed.wait()
        self._end_call(StartError(_BLOCK_HAS_ENDED))

    # Calls.

    def begin(self, call: KeptPlacement) -> None:
        """Send *call* to all agents; lost ones are replaced before."""
        with self._lock:
            self._call = call
            # The thread may have ended before this call, which would wait forever.
            if self._failure is not None:
                call.put(self._failure)
                return

            self._all_ended.clear()
            try:
                self._renew(self._places.begin_call())
                for place in range(self._agents):
                    self._placement.send(place, call.payload)
            # Some agents have the call, and others not: the next call starts other ones.
            except Exception as error:
                self._end_call(error)

    def finish(self, call: KeptPlacement) -> None:
        """Replace agents that have not ended *call*."""
        with self._lock:
            self._call = None
            if self._failure is not None or self._is_ending:
                return
            try:
                self._renew(self._places.end_call())
            # The next call starts other agents.
            except Exception as error:
                self._end_call(error)

    def send(self, place: int, data: bytes) -> None:
        """Write *data* to the agent at *place*, unless it has ended the call."""
        with self._lock:
            if self._places.is_at_call(place):
                self._placement.send(place, data)

    def replace(self, place: int, payload: bytes) -> None:
        """Start another agent at *place*, and send it the call."""
        with self._lock:
            if self._failure is None:
                self._places.replace(place)
                self._placement.replace(place)
                self._placement.send(place, payload)

    def _renew(self, places: list[AgentRenewal]) -> None:
        for each in places:
            self._placement.replace(each.place)

    # The thread.

    def _run(self) -> None:
        try:
            while not self._is_over:
                event = self._placement.next_event(1.0)
                if event is not None:
                    self._pass_on(event)
        # The call would wait forever; the next one starts other agents.
        except Exception as error:
            self._end_call(error)
        finally:
            self._all_ended.set()

    def _pass_on(self, event: EngineEvent) -> None:
        with self._lock:
            call, found = self._call, self._places.handle(event)
            if self._places.are_all_lost():
                self._all_ended.set()
            if call is None or self._failure is not None:
                return
            for each in found:
                if isinstance(each, AgentRenewal):
                    self._placement.replace(each.place)
                    self._placement.send(each.place, call.payload)

        # Without the lock: this waits while the call reads slowly.
        for each in found:
            if not isinstance(each, AgentRenewal):
                call.put(each)

    def _end_call(self, error: Exception) -> None:
        """Let the present call raise *error*; no other one gets these agents."""
        with self._lock:
            if self._failure is None:
                self._failure = error
            call = self._call
        if call is not None:
            call.put(error)


class KeptPlacement:
    """One call on kept agents."""

    def __init__(self, group: _Group, payload: bytes) -> None:
        self.payload = payload
        self.closed = threading.Event()
        self._group = group
        self._arrived: queue.SimpleQueue[EngineEvent | Exception | None] = queue.SimpleQueue()
        self._room = threading.Semaphore(_MOST_EVENTS)
        group.begin(self)

    def put(self, event: EngineEvent | Exception) -> None:
        """Add an event; waits while many are unread."""
        if isinstance(event, Exception):
            # It is the last one: the engine's thread may wait for room, and must end.
            self._arrived.put(event)
            self._room.release(_MOST_EVENTS)
        elif not self.closed.is_set():
            self._room.acquire()
            self._arrived.put(event)

    def next_event(self, timeout: float) -> EngineEvent | None:
        """Return the next event; None after *timeout* seconds without one. Raises the error of the engine."""
        try:
            event = self._arrived.get(timeout=max(0.0, timeout))
        except queue.Empty:
            return None
        if isinstance(event, Exception):
            raise event
        self._room.release()
        return event

    def send(self, place: int, data: bytes) -> None:
        """Write *data* to the agent at *place*."""
        self._group.send(place, data)

    def replace(self, place: int) -> None:
        """Start another agent at *place*."""
        self._group.replace(place, self.payload)

    def stop(self) -> None:
        """Do nothing: the client has sent `Kind.STOP`, which ends the call of an agent and leaves it idle."""

    def close(self) -> None:
        """End the call; agents that have not ended it are replaced for the next one."""
        if self.closed.is_set():
            return
        self.closed.set()
        self._group.finish(self)
        # The engine's thread may wait for room, and the client's one for an event.
        self._room.release(_MOST_EVENTS)
        # It wakes a client that waits for an event.
        self._arrived.put(None)
