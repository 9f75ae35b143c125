"""
Agents in Ray actors, one for each bundle of a placement group, and the server of their rendezvous in one more.

Rules of this file: Ray places and ends actors, and reports their deaths. Each agent has one read in progress; the next
one begins when its bytes have been taken, so that a slow client slows the output and fills no memory. Ray's threads
only put into a queue.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, TimeoutError as LateError
from json import dumps
from typing import Any

from attrs import define, field, frozen

from elasticlib._clock import monotonic, wall_time
from elasticlib.engines._agent_frames import FrameReader, Kind, event_of, frame
from elasticlib.engines._protocol import AgentCommand, AgentLost, EngineEvent
from elasticlib.engines._ray_actor import PipedProgram
from elasticlib.engines._ray_decisions import DrainWatch, waiting_text
from elasticlib.errors import StartError
from elasticlib.processes import start_thread

_log = logging.getLogger("elasticlib")

_SERVER = ("-u", "-m", "elasticlib.remote._store")
_HEAD = "node:__internal_head__"
"""Resource that only Ray's head node has."""
_SERVER_START = 60.0
"""Seconds for the start of the rendezvous' server."""
_LARGE = 2**17
"""Number of bytes from which on a frame is sent to each machine once, not to each agent."""
_LOOK = 1.0
"""Seconds between two looks for nodes that drain."""
_REMIND = 10.0
"""Seconds without any agent after which a warning says for what Ray waits."""


def ray_module(name: str = "ray") -> Any:
    """Return a module of Ray, which is imported only when an engine places agents."""
    return importlib.import_module(name)


def is_connected() -> bool:
    """Return True if this program is connected to a cluster; many calls of Ray would connect it again."""
    return bool(ray_module().is_initialized())


@functools.cache
def _actor_class() -> Any:
    # One thread for each direction: writes stay in order, and a read that waits holds none of them up.
    return ray_module().remote(max_restarts=0, concurrency_groups={"input": 1, "output": 1})(PipedProgram)


def _reading(actor: Any) -> Future[bytes | str]:
    """Begin to read from the program of *actor*."""
    reference = actor.read.options(concurrency_group="output").remote()
    future: Future[bytes | str] = reference.future()
    return future


def _send(actor: Any, data: object) -> None:
    actor.send.options(concurrency_group="input").remote(data)


def reason(error: BaseException) -> str:
    """Return the line of an error of Ray that says most."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:300]


# The rendezvous.


@frozen(eq=False)
class RendezvousServer:
    """A server of jobs on Ray's head node, for as long as this object is referenced and the driver lives."""

    endpoint: str
    ray_job: str
    """The driver's number at Ray, which changes after ``ray.shutdown()``."""
    ended: Future[bytes | str]
    _actor: Any

    def is_usable(self) -> bool:
        """Return True if jobs can still meet at it."""
        return not self.ended.done() and self.ray_job == ray_job()

    def end(self) -> None:
        """End the server."""
        # Ray may be gone, and the server with it.
        with contextlib.suppress(Exception):
            if is_connected():
                ray_module().kill(self._actor)


def ray_job() -> str:
    """Return the driver's number at Ray."""
    return str(ray_module().get_runtime_context().get_job_id())


def start_server(token: str) -> RendezvousServer:
    """Start a server whose jobs have *token*. Raises `StartError`."""
    ray = ray_module()
    heads = [node["NodeID"] for node in ray.nodes() if node["Alive"] and _HEAD in node["Resources"]]
    if not heads:
        raise StartError("Ray lists no head node that is alive: look at `ray status`")

    strategies = ray_module("ray.util.scheduling_strategies")
    options = {
        "num_cpus": 0,
        "scheduling_strategy": strategies.NodeAffinitySchedulingStrategy(heads[0], soft=False),
    }
    actor = _actor_class().options(**options).remote(_SERVER, {})
    _send(actor, f"{token}\n".encode())
    try:
        first = _reading(actor).result(_SERVER_START)
    except Exception as error:
        ray.kill(actor)
        why = f"it did not start within {_SERVER_START:g} s" if isinstance(error, LateError) else reason(error)
        raise StartError(f"cannot host the rendezvous on Ray's head node: {why}") from error

    if isinstance(first, str):
        raise StartError(f"cannot host the rendezvous on Ray's head node: {first}")
    return RendezvousServer(first.decode().strip(), ray_job(), _reading(actor), actor)


# The agents.


@frozen
class AgentPlaces:
    """The bundles of a placement group for agents, one each."""

    group: Any
    bundles: Sequence[Mapping[str, float]]
    is_own: bool
    """True if the group ends with the placement."""

    def started(self, place: int, command: AgentCommand) -> Any:
        """Return the actor of an agent at *place*; Ray starts it once the bundle has a machine."""
        bundle = dict(self.bundles[place])
        workers = int(bundle.get("GPU", 0) or bundle.get("CPU", 0))
        strategies = ray_module("ray.util.scheduling_strategies")
        options = {
            "num_cpus": bundle.pop("CPU", 0),
            "num_gpus": bundle.pop("GPU", 0),
            "resources": bundle or None,
            "scheduling_strategy": strategies.PlacementGroupSchedulingStrategy(self.group, place),
        }
        # Fractions of a CPU are less than one worker: the agent counts for itself.
        argv = [*command.argv, *(["--workers", str(workers)] if workers else [])]
        return _actor_class().options(**options).remote(argv, dict(command.environment))


@define(eq=False)
class _RayAgent:
    """One actor, and the program in it."""

    place: int
    number: int
    actor: Any
    reader: FrameReader = field(factory=lambda: FrameReader(greeted=True))
    node: str = ""
    """Ray's id of its machine, once it has started there."""
    address: str = ""
    is_open: bool = True

    def lost(self, why: str) -> AgentLost:
        """Return the event that it is lost."""
        where = f" on {self.address}" if self.address else ""
        return AgentLost(self.place, f"Ray agent {self.place}{where}: {why}", self.number)


class RayPlacement:
    """The agents of one job."""

    def __init__(self, places: AgentPlaces, command: AgentCommand, on_close: Callable[[], None]) -> None:
        self._places, self._command, self._on_close = places, command, on_close
        self._large: tuple[bytes, Any] | None = None
        """The last large frame, and its reference at Ray."""
        self._arrived: queue.SimpleQueue[Callable[[], list[EngineEvent]]] = queue.SimpleQueue()
        """Returns the events of something that has arrived."""
        self._events: deque[EngineEvent] = deque()
        self._lock = threading.RLock()
        """Held while agents are replaced or lost."""
        self._remind_at: float | None = monotonic() + _REMIND
        self._is_closed = False
        self._ends = threading.Event()
        """Set at the end, for the thread that looks for draining nodes."""
        self._agents = [self._started(place, 0) for place in range(len(places.bundles))]
        # Without this thread a node that drains is lost without a notice.
        with contextlib.suppress(StartError):
            start_thread(threading.Thread(target=self._watch_drains, name="elasticlib-ray-drains", daemon=True))

    def depend_on(self, server: RendezvousServer) -> None:
        """Let the job end with an error when *server* ends."""
        server.ended.add_done_callback(lambda future: self._arrived.put(lambda: _raise_server_lost(future)))

    # Calls of the client.

    def next_event(self, timeout: float) -> EngineEvent | None:
        """Return the next event; None after *timeout* seconds without one. Raises `StartError` without rendezvous."""
        if self._events:
            return self._events.popleft()
        try:
            arrived = self._arrived.get(timeout=max(0.0, timeout))
        except queue.Empty:
            self._remind()
            return None
        self._events.extend(arrived())
        return self._events.popleft() if self._events else None

    def send(self, place: int, data: bytes) -> None:
        """Write *data* to the agent at *place*."""
        with self._lock:
            if self._agents[place].is_open:
                _send(self._agents[place].actor, self._argument(data))

    def _argument(self, data: bytes) -> Any:
        """Return *data* as an argument for actors; a large call, which all agents get, is sent to each machine once."""
        if len(data) < _LARGE:
            return data
        if self._large is None or self._large[0] is not data:
            self._large = data, ray_module().put(data)
        return self._large[1]

    def replace(self, place: int) -> None:
        """Start another agent at *place*, once Ray has a machine for its bundle."""
        with self._lock:
            former = self._agents[place]
            self._kill(former)
            self._agents[place] = self._started(place, former.number + 1)

    def stop(self) -> None:
        """End the standard input of all agents, once all before is sent."""
        with self._lock:
            for agent in self._agents:
                if agent.is_open and is_connected():
                    agent.actor.end_input.options(concurrency_group="input").remote()

    def close(self) -> None:
        """End all actors."""
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
            if was_closed:
                return
            self._ends.set()
            for agent in self._agents:
                self._kill(agent)
        # It wakes a client that waits for an event.
        self._arrived.put(list)
        # Ray itself may be gone.
        with contextlib.suppress(Exception):
            if is_connected():
                self._on_close()

    # Actors.

    def _started(self, place: int, number: int) -> _RayAgent:
        agent = _RayAgent(place, number, self._places.started(place, self._command))
        _node_of(agent.actor).add_done_callback(lambda future: _note_node(agent, future))
        _send(agent.actor, self._argument(self._command.payload))
        self._read(agent)
        return agent

    def _kill(self, agent: _RayAgent) -> None:
        """End the actor of *agent*; also one that has ended its program still has a bundle."""
        with contextlib.suppress(Exception):
            if is_connected():
                ray_module().kill(agent.actor)
        # Once, and through the queue: a read in progress may report the same death.
        lost = self._lose(agent, "it was ended")
        self._arrived.put(lambda: lost)

    def _lose(self, agent: _RayAgent, why: str) -> list[EngineEvent]:
        with self._lock:
            was_open, agent.is_open = agent.is_open, False
        return [agent.lost(why)] if was_open else []

    def _read(self, agent: _RayAgent) -> None:
        _reading(agent.actor).add_done_callback(
            lambda future: self._arrived.put(lambda: self._received(agent, future)),
        )

    def _received(self, agent: _RayAgent, future: Future[bytes | str]) -> list[EngineEvent]:
        """Return the events in the bytes of an agent, and read on."""
        self._remind_at = None
        # It was lost, or replaced, while the read was on its way.
        if not agent.is_open:
            return []
        try:
            data = future.result()
        except Exception as error:
            return self._lose(agent, reason(error))
        if isinstance(data, str):
            return self._lose(agent, data)

        try:
            frames = agent.reader.feed(data)
            events = [event_of(agent.place, agent.number, kind, content) for kind, content in frames]
        except ValueError as error:
            ray_module().kill(agent.actor)
            return self._lose(agent, f"its output cannot be read: {error}")
        self._read(agent)
        return events

    def _remind(self) -> None:
        """Warn once if Ray has started no agent for a while."""
        if self._remind_at is None or monotonic() < self._remind_at:
            return
        self._remind_at = None
        _log.warning(
            "%s",
            waiting_text(
                _state_of(self._places.group),
                self._places.bundles,
                ray_module().available_resources(),
                _REMIND,
            ),
        )

    # Nodes that drain.

    def _watch_drains(self) -> None:
        """Send a notice to the agents of draining nodes, until the end."""
        if not shows_drains():
            _log.warning("this version of Ray does not show the nodes that it drains: their agents get no notice")
            return
        watch = DrainWatch()
        while not self._ends.wait(_LOOK):
            draining = _draining_nodes()
            with self._lock:
                nodes = {(each.place, each.number): each.node for each in self._agents if each.is_open and each.node}
                for notice in watch.notices(nodes, draining, wall_time()):
                    content = dumps({"why": notice.why, "seconds": notice.seconds}).encode()
                    self.send(notice.place, frame(Kind.NOTICE, content))


def _node_of(actor: Any) -> Future[str]:
    future: Future[str] = actor.node.options(concurrency_group="input").remote().future()
    return future


def _note_node(agent: _RayAgent, future: Future[str]) -> None:
    # Without it the agent is lost, which its read reports.
    if future.exception() is None:
        agent.node = future.result()


def shows_drains() -> bool:
    """Return True if this version of Ray shows the nodes that it drains: that interface is Ray's own."""
    try:
        return hasattr(ray_module("ray._private.state").state, "get_draining_nodes")
    except (ImportError, AttributeError):
        return False


def _draining_nodes() -> dict[str, int]:
    """Return the times of the ends of draining nodes, by their ids; none while Ray is out of reach."""
    with contextlib.suppress(Exception):
        if not is_connected():
            return {}
        return dict(ray_module("ray._private.state").state.get_draining_nodes())
    return {}


def _state_of(group: Any) -> str:
    """Return the state of a placement group; "" if Ray does not say."""
    with contextlib.suppress(Exception):
        return str(ray_module("ray.util").placement_group_table(group)["state"])
    return ""


def _raise_server_lost(future: Future[bytes | str]) -> list[EngineEvent]:
    error = future.exception()
    why = reason(error) if error is not None else str(future.result())
    raise StartError(f"the rendezvous on Ray's head node ended: {why}")
