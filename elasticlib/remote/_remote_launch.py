"""
The client's side of a call on many machines: an engine's events in, the supervisor's decisions out.

Rules of this file: all is checked before the engine starts anything. Whatever ends the call, all agents have been ended
before it returns. One thread waits for events of the engine and puts them into the job's inbox, where requests and
signals arrive too.
"""

from __future__ import annotations

import contextlib
import logging
import math
import secrets
import signal
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from json import dumps
from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen

from elasticlib._clock import monotonic
from elasticlib.engines import (
    Action,
    AgentCommand,
    AgentEnded,
    AgentLost,
    AgentOutput,
    AgentReport,
    AgentResult,
    AgentUp,
    BatchEngine,
    BeginNode,
    CallRules,
    Engine,
    EngineEnds,
    EngineEvent,
    Kind,
    PlaceAll,
    RaiseError,
    Replace,
    ReportWait,
    ReturnResults,
    StopAll,
    Supervisor,
    frame,
)
from elasticlib.errors import ConfigError, SignalException, StartError
from elasticlib.job import Results, shown_ranks, shows_errors_in_cell
from elasticlib.processes import start_thread, wait_readable
from elasticlib.remote._call import JobSettings, error_of_place, merged_results, pack_call, read_outcome
from elasticlib.remote._checked_engine import CheckedPlacement, place_agents
from elasticlib.remote._shown_output import ShownOutput
from elasticlib.remote._workers_of_nodes import AgentRequest, WorkersOfNodes
from elasticlib.spec import Entrypoint, LaunchConfig
from elasticlib.workers import HandledSignals, Inbox, StopRequest, interruption, parse_signals

if TYPE_CHECKING:
    from elasticlib.job import Job

_log = logging.getLogger("elasticlib")
_AGENT = ("-u", "-m", "elasticlib.remote._node")
_MOST_EVENTS = 256
"""Number of events in the inbox from which on the engine's thread waits."""
_END_SECONDS = 10.0
"""Seconds that agents get to end, in addition to the grace of their workers."""
_JOIN_SECONDS = 5.0
"""Seconds that the engine's wait for an event may last after its placement was closed."""
_NOT_SET = {"rdzv_endpoint": "", "node_rank": None, "local_addr": None, "rdzv_backend": "c10d"}
"""Settings that an engine gives, with their defaults."""
_NOT_SET_KEYS = ("is_host", "store_type")
"""Keys of ``rdzv_configs`` that an engine gives."""


@frozen
class _Plan:
    """The checked parts of a call."""

    title: str
    engine: Engine
    rules: CallRules
    config: LaunchConfig
    command: AgentCommand


class RemoteLaunch:
    """A checked launch on the machines of an engine, which can run once."""

    quit_shows_stacks = False
    outlives_program = False
    folder = ""

    def __init__(
        self,
        engine: Engine,
        config: LaunchConfig,
        entrypoint: Entrypoint,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        title: str,
        grace: float,
        is_started: bool,
    ) -> None:
        self.title, self.grace = title, grace
        self.signums = parse_signals(config.signals_to_handle)
        config = evolve(config, shutdown_timeout=grace)
        rules = CallRules(engine.nodes, least_nodes(config, engine, has_token=bool(engine.token)))
        packed = pack_call(config, entrypoint, args, kwargs)
        self._plan = _Plan(title, engine, rules, config, AgentCommand(_AGENT, frame(Kind.CALL, packed)))
        self._output = ShownOutput()
        self._output.watch(title, shown_ranks(config), is_started=is_started)

    def abandon(self) -> None:
        """Release nothing: no agent was started."""

    def __call__(self, job: Job) -> Results:
        """Run the job on all machines, and return the results of all ranks."""
        with HandledSignals(self.signums, job.inbox) as signals, contextlib.ExitStack() as stack:
            workers = WorkersOfNodes(job.inbox)
            stack.callback(workers.end)
            job.attach_elsewhere(workers)
            self._output.begin()
            stack.callback(self._output.end, job.inbox.drain)
            run = _Run(self._plan, job.inbox, workers, self._output, signals)
            stack.callback(run.close)
            return run.to_its_end(self.grace)


def least_nodes(config: LaunchConfig, engine: Engine | BatchEngine, *, has_token: bool = False) -> int:
    """
    Return the minimum number of nodes. Raises `ConfigError` for settings that the engine gives itself.

    With *has_token* these include the token.
    """
    nodes, most = engine.nodes, config.max_nodes
    # The second is the default of a launch: nobody gave a number.
    if config.min_nodes == "all" or (config.min_nodes, most) == (1, 1):
        least = nodes
    elif most != nodes:
        raise ConfigError.of_setting("max_nodes", f"{most} differs from the {nodes} nodes of {engine!r}: leave it out")
    else:
        least = config.min_nodes

    not_set = {**_NOT_SET, "token": None} if has_token else _NOT_SET
    for name, default in not_set.items():
        if getattr(config, name) != default:
            raise ConfigError.of_setting(
                name, f"{getattr(config, name)!r} cannot be combined with on={engine!r}, which sets it: leave it out"
            )
    for key in _NOT_SET_KEYS:
        if key in config.rdzv_configs:
            raise ConfigError.of_setting(
                "rdzv_configs", f"{config.rdzv_configs!r} has {key}, which the engine sets: leave it out"
            )
    return least


@frozen
class _Received:
    """An event of a placement."""

    placement: CheckedPlacement
    event: EngineEvent
    handled: Callable[[], None] = lambda: None
    """Makes room for another event."""


@frozen
class _EngineFailed:
    """An error of the engine itself."""

    error: BaseException


class _Events:
    """The thread that waits for events of one placement."""

    def __init__(self, placement: CheckedPlacement, inbox: Inbox) -> None:
        self._placement, self._inbox = placement, inbox
        self._room = threading.Semaphore(_MOST_EVENTS)
        self._is_over = False
        self._thread = start_thread(threading.Thread(target=self._run, name="elasticlib-engine", daemon=True))

    def _run(self) -> None:
        try:
            while not self._is_over:
                self._pass_on(self._placement.next_event(1.0))
        # Without this thread the job would wait forever.
        except BaseException as error:
            self._inbox.put(_EngineFailed(error))

    def _pass_on(self, event: EngineEvent | None) -> None:
        if event is not None:
            self._room.acquire()
            self._inbox.put(_Received(self._placement, event, self._room.release), may_wait=True)

    def refuse(self) -> None:
        """Let the thread end after its next event: the end of a placement is one, which it must not wait for twice."""
        self._is_over = True

    def end(self) -> None:
        """End the thread; later events are lost."""
        self.refuse()
        # The thread may wait for room, which nobody makes any more.
        self._room.release(_MOST_EVENTS)
        self._thread.join(_JOIN_SECONDS)
        if self._thread.is_alive():
            _log.warning(
                "%s.next_event() did not return within %g s after close(): let it return after its timeout",
                self._placement.name,
                _JOIN_SECONDS,
            )


class _Agents:
    """The agents of a placement: those that live, and the outcomes that they have sent."""

    def __init__(self, count: int, patience: float) -> None:
        self._patience = patience
        """Seconds from the begin of a node to the first sign of its agent."""
        self.living = dict.fromkeys(range(count), 0)
        """Numbers of the agents that have not ended, by place."""
        self.results: dict[int, bytes] = {}
        """Outcomes by place, as the agents have packed them."""
        self._silent: dict[int, float] = {}
        """Times by which agents whose nodes were to begin must send something, by place; the earliest first."""

    def begun(self, place: int, now: float) -> None:
        """Note that the node at *place* was to begin."""
        self._silent.pop(place, None)
        self._silent[place] = now + self._patience

    def received(self, place: int, number: int) -> None:
        """Note that an agent has sent something, or is lost."""
        if self.living.get(place) == number:
            self._silent.pop(place, None)

    def silence_ends(self) -> float:
        """Return the time at which `pop_silent` may name an agent; infinite if none is silent."""
        return next(iter(self._silent.values()), math.inf)

    def pop_silent(self, now: float) -> AgentLost | None:
        """Return the loss of an agent that has sent nothing in time; None if there is none."""
        if now < self.silence_ends():
            return None
        place = next(iter(self._silent))
        del self._silent[place]
        why = f"agent {place} has sent nothing for {self._patience:g} s since its node was to begin"
        return AgentLost(place, why, self.living[place])

    def replaced(self, place: int, number: int) -> None:
        """Note another agent, with this *number*, at *place*."""
        self.living[place] = number
        # The outcome of the former agent does not count for the next one.
        self.results.pop(place, None)

    def ended(self, event: AgentResult, present: int) -> AgentEnded | AgentLost:
        """Return the outcome of an agent, and keep it for the node if the agent is the *present* one of its place."""
        try:
            outcome = read_outcome(event.data)
        except (ValueError, KeyError, TypeError) as error:
            return AgentLost(event.place, f"the outcome of agent {event.place} cannot be read: {error}", event.agent)
        if event.agent == present:
            self.results[event.place] = event.data
        return outcome.of_agent(event.place, event.agent)


class _Run:
    """One run of a call: the placements, and what their agents have sent."""

    def __init__(
        self, plan: _Plan, inbox: Inbox, workers: WorkersOfNodes, output: ShownOutput, signals: HandledSignals
    ) -> None:
        self._plan, self._inbox, self._workers, self._output, self._signals = plan, inbox, workers, output, signals
        self._agents = _Agents(0, 0.0)
        self._unhandled: deque[object] = deque()
        """Items of the inbox in their order: one that ends the call must not hide those behind it."""
        self._placement: CheckedPlacement | None = None
        self._events: _Events | None = None
        self._has_begun = False

    # The life of a placement.

    def _place_all(self) -> None:
        plan, rules = self._plan, self._plan.rules
        self._settings = JobSettings(
            endpoint="",
            is_host=False,
            run_id=f"{plan.config.run_id or plan.title}-{secrets.token_hex(4)}",
            token=plan.engine.token or plan.config.token or secrets.token_hex(16),
            min_nodes=rules.min_nodes,
            max_nodes=rules.agents,
            cell_shows_errors=shows_errors_in_cell(plan.config),
        )
        self._placement = place_agents(plan.engine, rules.agents, plan.command, self._signals, plan.title)
        self._agents = _Agents(rules.agents, rules.begin_timeout)
        self._events = _Events(self._placement, self._inbox)

    def close(self) -> None:
        """End all agents of the present placement at once."""
        placement, self._placement = self._placement, None
        events, self._events = self._events, None
        with contextlib.ExitStack() as stack:
            if events is not None:
                events.refuse()
                stack.callback(events.end)
            if placement is not None:
                placement.close()

    def _stop_all(self, grace: float) -> None:
        """Stop all agents, with *grace* for their workers; another signal ends them at once."""
        placement = self._placement
        if placement is None:
            return
        try:
            for place in self._agents.living:
                placement.send(place, frame(Kind.STOP, dumps(grace).encode()))
            placement.stop()
        except SignalException:
            raise
        # The outcome of the job, which is known by now, counts more.
        except Exception as error:
            _log.warning("%s cannot stop the agents, and ends them at once: %r", placement.name, error)
        else:
            self._wait_for_ends(placement, grace + _END_SECONDS)
        self.close()
        for item in self._unhandled:
            if isinstance(item, int):
                # The program gets it, unless the job ends with an error.
                self._inbox.put(item)
        self._unhandled.clear()

    def _wait_for_ends(self, placement: CheckedPlacement, seconds: float) -> None:
        """Wait for the ends of all agents, until another signal or for some *seconds*."""
        limit = monotonic() + seconds
        while self._agents.living:
            item = self._next(limit)
            match item:
                case int():
                    self._unhandled.appendleft(item)
                    return
                case _EngineFailed(error):
                    _log.warning("%s.next_event() raised while agents ended: %r", placement.name, error)
                    return
                case _Received():
                    self._receive(item)
                case None if monotonic() >= limit:
                    names = ", ".join(map(str, self._agents.living))
                    _log.warning("no AgentLost of agents %s within %g s of their stop: ends them", names, seconds)
                    return

    def _stop_soon(self, grace: float) -> None:
        """Stop all agents, and do not wait for a stream that takes no output."""
        self._output.hurry()
        self._stop_all(grace)

    # The loop.

    def to_its_end(self, grace: float) -> Results:
        """Return the results of all ranks, or raise the error of the job."""
        self._place_all()
        # An engine that hosts the rendezvous has its endpoint by now.
        self._supervisor = Supervisor(evolve(self._plan.rules, endpoint=self._plan.engine.endpoint), monotonic())
        decision = None
        while decision is None:
            decision = self._turn(grace)
        return self._conclude(decision, grace)

    def _turn(self, grace: float) -> RaiseError | ReturnResults | None:
        """Handle the next item that arrives by the supervisor's next deadline, and what is due then."""
        item = self._next(min(self._supervisor.wake_at(), self._output.look(), self._agents.silence_ends()))
        self._check_stop(item, grace)
        decision = self._decision(self._handle(item), grace)
        if decision is not None:
            return decision
        return self._decision(self._supervisor.advance(monotonic()), grace)

    def _check_stop(self, item: object, grace: float) -> None:
        """Stop all agents and raise, if *item* asks for the end of the job."""
        match item:
            case int():
                self._stop_soon(grace)
                raise interruption(item, f"it ran job {self._plan.title!r} on {self._plan.engine!r}")
            case StopRequest(why, own_grace):
                self._stop_soon(grace if own_grace is None else own_grace)
                raise SignalException(why, signal.SIGTERM)
            case _Received(event=EngineEnds(why)):
                self._stop_soon(grace)
                raise StartError(why)
            case _EngineFailed(error):
                self.close()
                raise error

    def _next(self, until: float) -> object:
        """Return the next item of the inbox; None if none arrives by the time *until*."""
        if not self._unhandled:
            wait_readable([self._inbox], None if until == math.inf else max(0.0, until - monotonic()))
            self._unhandled.extend(self._inbox.drain())
        if self._unhandled:
            return self._unhandled.popleft()
        silent = self._agents.pop_silent(monotonic())
        return _Received(self._placement, silent) if self._placement is not None and silent is not None else None

    def _handle(self, item: object) -> list[Action]:
        if isinstance(item, AgentRequest) and self._placement is not None:
            self._workers.send(item, self._agents.living, self._placement.send)
        if not isinstance(item, _Received):
            return []
        event = self._receive(item)
        if event is None:
            return []
        actions = self._supervisor.handle(event, monotonic())
        if isinstance(event, AgentLost):
            self._report_loss(event, actions)
        return actions

    def _report_loss(self, lost: AgentLost, actions: Sequence[Action]) -> None:
        """Log a loss after which the call goes on; an error that ends it has the same text."""
        is_expected = lost.place in self._agents.results
        if not is_expected and not any(isinstance(action, RaiseError) for action in actions):
            _log.warning("%s; the job goes on", lost.why)

    def _receive(self, received: _Received) -> AgentUp | AgentLost | AgentEnded | None:
        """Note an event, and return it for the supervisor."""
        # Agents of a placement that has ended count no more.
        if received.placement is not self._placement:
            return None

        event = received.event
        if not isinstance(event, (AgentUp, EngineEnds)):
            self._agents.received(event.place, event.agent)
        if isinstance(event, AgentOutput):
            # Agents wait for a slow stream; this thread, which hears of signals, does not.
            self._output.show(event.data, received.handled)
            return None

        received.handled()
        match event:
            case AgentReport():
                self._note_report(event)
                return None
            case EngineEnds():
                # The call stops already.
                return None
            case AgentResult():
                return self._agents.ended(event, self._supervisor.places[event.place].agent)
            case AgentLost() if self._agents.living.get(event.place) == event.agent:
                del self._agents.living[event.place]
                # The last status of a node counts after its end.
                self._workers.note_loss(event.place, is_expected=event.place in self._agents.results)
        return event

    def _note_report(self, event: AgentReport) -> None:
        if self._agents.living.get(event.place) != event.agent:
            return
        note = self._workers.note_answer if event.is_answer else self._workers.note_report
        try:
            note(event.place, event.data)
        except (ValueError, KeyError, TypeError) as error:
            _log.warning("a report of agent %s cannot be read: %s", event.place, error)

    def _decision(self, actions: Sequence[Action], grace: float) -> RaiseError | ReturnResults | None:
        """Carry out *actions*; return the one that ends the call."""
        for action in actions:
            match action:
                case BeginNode():
                    self._begin(action)
                case Replace(place):
                    assert self._placement is not None
                    self._placement.replace(place)
                    self._agents.replaced(place, self._supervisor.places[place].agent)
                case StopAll(why):
                    _log.warning("all nodes start again: %s", why)
                    self._stop_all(grace)
                    self._agents = _Agents(0, 0.0)
                case PlaceAll():
                    self._place_all()
                case ReportWait(why):
                    _log.warning("%s", why)
                case RaiseError() | ReturnResults():
                    return action
        return None

    def _begin(self, action: BeginNode) -> None:
        assert self._placement is not None
        if not self._has_begun:
            self._output.expect()
        self._has_begun = True
        settings = evolve(self._settings, endpoint=action.endpoint, is_host=action.is_host)
        self._agents.begun(action.place, monotonic())
        self._placement.send(action.place, frame(Kind.BEGIN, settings.packed()))

    # The end.

    def _conclude(self, decision: RaiseError | ReturnResults, grace: float) -> Results:
        """Stop all agents, and return or raise the outcome of the call."""
        if self._has_begun and self._may_have_workers():
            self._stop_all(grace)
        # Before, no agent has anything to stop, and one that still connects would only delay the error.
        self.close()
        if isinstance(decision, ReturnResults):
            return merged_results(self._agents.results.values())
        if decision.place is None:
            raise StartError(decision.why)

        error = error_of_place(self._agents.results, decision.place, self._plan.config.raise_as)
        raise error from error.__cause__

    def _may_have_workers(self) -> bool:
        """Return True if enough nodes have begun for a round."""
        begun = [place for place in self._supervisor.places if place.has_been_ready]
        return len(begun) >= self._plan.rules.min_nodes
