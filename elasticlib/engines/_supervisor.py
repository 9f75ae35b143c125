"""
Decisions about the agents of one call on many machines: replace, start all again, give up, done. Pure.

The life of a place, whose agent is started by the engine:

    STARTING -> READY (it listed its address) -> AT_WORK (its node has begun) -> ENDED (its outcome is known)
    STARTING, READY, AT_WORK -> WAITING (lost; another agent is due) -> STARTING
                             -> GONE (lost too often, or not needed any more)

Decisions in each phase:

    phase       agent lost, or cut off from the job     outcome                      after its limit
    RUNNING     give up if it never ran; start all      success: SUCCEEDING          give up: too few agents
                again if it hosted the rendezvous;      worker failed: FAILING
                else replace it, after a pause          other error: give up
    PAUSED      -                                       -                            start all again
    SUCCEEDING  give up if no other can have the        done once the results of     give up: results are missing
                missing results                         all ranks are known
    FAILING     give up after the last agent            give up after the last one   give up with the root cause
    OVER        -                                       -                            -

Rules of this file: time is an argument. The supervisor ends once. An event of an agent that was replaced counts for
nothing. In each phase but OVER, either enough agents are at work, whose nodes have time limits of their own, or
`wake_at` is finite: so it never waits forever. There may be thousands of places, so most events look at their own
one only.
"""

from __future__ import annotations

import enum
import heapq
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

from attrs import define, field, frozen

from elasticlib.engines._protocol import AgentLost, AgentUp


@frozen
class CallRules:
    """Numbers of one call."""

    agents: int
    min_nodes: int
    endpoint: str = ""
    """Endpoint of a rendezvous that no agent hosts; "" if one of them does."""
    start_timeout: float = 600.0
    """Seconds for which fewer than `min_nodes` agents may be ready."""
    remind_after: float = 30.0
    """Same, until a warning."""
    begin_timeout: float = 600.0
    """Seconds from the begin of a node to the first bytes of its agent, which the client watches."""
    replacements: int = 10
    """Number of replacements of one place, if none of them stays ready for `healthy_after`."""
    restarts: int = 3
    """Number of starts of all agents after the first one."""
    pause: float = 1.0
    """Seconds before the first replacement; each further one waits twice as long."""
    longest_pause: float = 60.0
    healthy_after: float = 600.0
    result_timeout: float = 120.0
    """Seconds from an outcome of the job to the outcomes of the other agents, after success."""
    failure_timeout: float = 5.0
    """Same, after a failure: they know of other failures, and one has the worker's own exception."""

    def pause_after(self, losses: int) -> float:
        """Return the seconds from a loss to the next agent, which double with each of *losses*."""
        # Bounded: a float cannot hold each power of two.
        doublings = min(losses - 1, 30)
        return float(min(self.pause * 2**doublings, self.longest_pause))


class OutcomeKind(enum.Enum):
    """Kinds of ends of an agent's node."""

    SUCCEEDED = "succeeded"
    UNNEEDED = "unneeded"
    """The job succeeded, or goes on, without the workers of this node."""
    FAILED = "failed"
    """Workers failed, on this node or on another one."""
    CUT_OFF = "cut off"
    """The node lost the rendezvous, or was stopped from outside."""
    ERROR = "error"
    """Another error, which another try would repeat."""


@frozen
class AgentEnded:
    """The outcome of the node of an agent."""

    place: int
    kind: OutcomeKind
    agent: int = 0
    ranks: frozenset[int] = frozenset()
    """Ranks whose results it has."""
    world: int = 0
    """Number of ranks of the job."""
    has_cause: bool = False
    """True if it has the exception of the worker that failed first."""
    why: str = ""


# Actions: what the shell must do now.


@frozen
class BeginNode:
    """Let the agent at *place* start its node."""

    place: int
    endpoint: str
    is_host: bool


@frozen
class Replace:
    """Start another agent at *place*."""

    place: int


@frozen
class StopAll:
    """Stop all agents: they are started again later."""

    why: str


@frozen
class PlaceAll:
    """Start all agents again, for another job."""


@frozen
class ReportWait:
    """Log why the call waits."""

    why: str


@frozen
class RaiseError:
    """Stop all agents, and raise the error of *place*; None: an error that says *why*."""

    why: str
    place: int | None = None


@frozen
class ReturnResults:
    """Return the results of all ranks."""


SupervisorEvent: TypeAlias = AgentUp | AgentLost | AgentEnded
Action: TypeAlias = BeginNode | Replace | StopAll | PlaceAll | ReportWait | RaiseError | ReturnResults


class CallPhase(enum.Enum):
    """Phases of a call."""

    RUNNING = "running"
    PAUSED = "paused"
    SUCCEEDING = "succeeding"
    FAILING = "failing"
    OVER = "over"


class PlaceState(enum.Enum):
    """States of a place."""

    STARTING = "starting"
    READY = "ready"
    AT_WORK = "at work"
    WAITING = "waiting"
    ENDED = "ended"
    GONE = "gone"


_NAMED = 8
"""Most agents that a report names."""
_HAS_AGENT = frozenset({PlaceState.STARTING, PlaceState.READY, PlaceState.AT_WORK})
_MAY_GET_AGENT = _HAS_AGENT | {PlaceState.WAITING}
_COUNTS_AS_NODE = frozenset({PlaceState.READY, PlaceState.AT_WORK, PlaceState.ENDED})


class _ByState:
    """The numbers of the places, by state."""

    def __init__(self, places: int) -> None:
        self._numbers = {state: set[int]() for state in PlaceState}
        self._numbers[PlaceState.STARTING].update(range(places))

    def move(self, number: int, former: PlaceState, state: PlaceState) -> None:
        """Note that the place *number* is in another state."""
        self._numbers[former].discard(number)
        self._numbers[state].add(number)

    def count(self, *states: PlaceState) -> int:
        """Return the number of places in one of *states*."""
        return sum(len(self._numbers[state]) for state in states)

    def numbers(self, *states: PlaceState) -> list[int]:
        """Return the places in one of *states*, in their order."""
        return sorted(number for state in states for number in self._numbers[state])


def _note_state(place: _PlacedAgent, _: Any, state: PlaceState) -> PlaceState:
    place.by_state.move(place.number, place.state, state)
    return state


@define
class _PlacedAgent:
    """One place, and its present agent."""

    number: int
    by_state: _ByState
    state: PlaceState = field(default=PlaceState.STARTING, on_setattr=_note_state)
    agent: int = 0
    has_been_ready: bool = False
    ready_since: float = 0.0
    losses: int = 0
    """Losses in a row: each soon after the agent was ready, or before."""
    due: float = math.inf
    """Time of the next replacement."""

    def is_from(self, event: SupervisorEvent) -> bool:
        """Return True if *event* is one of the present agent."""
        return self.state in _HAS_AGENT and event.agent == self.agent


class _Replacements:
    """The places that get another agent after a pause, by time."""

    def __init__(self, places: Sequence[_PlacedAgent]) -> None:
        self._places = places
        self._planned: list[tuple[float, int]] = []
        """Heap of (time, number of the place); one that waits no longer may still be in it."""

    def plan(self, place: _PlacedAgent) -> None:
        """Plan an agent for *place* at its `due`."""
        heapq.heappush(self._planned, (place.due, place.number))

    def pop_due(self, now: float) -> list[_PlacedAgent]:
        """Return the places that get another agent *now*, in their order."""
        due = []
        while self.next_due() <= now:
            due.append(heapq.heappop(self._planned)[1])
        return [self._places[number] for number in sorted(due)]

    def next_due(self) -> float:
        """Return the time of the next replacement; infinite without one."""
        while self._planned and not self._is_wanted():
            heapq.heappop(self._planned)
        return self._planned[0][0] if self._planned else math.inf

    def _is_wanted(self) -> bool:
        due, number = self._planned[0]
        place = self._places[number]
        return place.state is PlaceState.WAITING and place.due == due


@define
class _Shortage:
    """The time in which fewer agents than `min_nodes` are ready."""

    _rules: CallRules
    _since: float | None = None
    """Time of its begin; None if there are enough."""
    _is_reported: bool = False

    def begin(self, now: float) -> None:
        """Note that there are too few, if that is not known."""
        if self._since is None:
            self._since = now

    def end(self) -> None:
        """Note that there are enough."""
        self._since, self._is_reported = None, False

    def report(self) -> None:
        """Note that the user gets a report."""
        self._is_reported = True

    def report_at(self) -> float:
        """Return when the user gets a report; infinite if there are enough, or the user has one."""
        return math.inf if self._since is None or self._is_reported else self._since + self._rules.remind_after

    def limit(self) -> float:
        """Return when the call fails; infinite if there are enough."""
        return math.inf if self._since is None else self._since + self._rules.start_timeout


@define(eq=False)
class Supervisor:
    """The decisions of one call; *now* is in monotonic seconds."""

    rules: CallRules
    now: float
    phase: CallPhase = CallPhase.RUNNING
    places: list[_PlacedAgent] = field(init=False)
    _by_state: _ByState = field(init=False)
    _replacements: _Replacements = field(init=False)
    coordinator: int | None = None
    """Place whose agent hosts the rendezvous; None if that is open, or another program."""
    endpoint: str = ""
    restarts: int = 0
    ranks: set[int] = field(factory=set)
    world: int = 0
    _cause: AgentEnded | None = None
    _shortage: _Shortage = field(init=False)
    _limit: float = math.inf
    """End of the phases PAUSED, SUCCEEDING and FAILING."""

    def __attrs_post_init__(self) -> None:
        self._make_places([0] * self.rules.agents)
        self.endpoint = self.rules.endpoint
        # The nodes' order is that of the places, and so rank 0 is on the first of them.
        self.coordinator = None if self.endpoint else 0
        self._shortage = _Shortage(self.rules, self.now)

    def _make_places(self, losses: Sequence[int]) -> None:
        """Let an agent start at each place, with the *losses* of its former ones."""
        self._by_state = _ByState(len(losses))
        self.places = [_PlacedAgent(number, self._by_state, losses=each) for number, each in enumerate(losses)]
        self._replacements = _Replacements(self.places)

    # Inputs.

    def handle(self, event: SupervisorEvent, now: float) -> list[Action]:
        """Return the actions for *event*."""
        self.now = now
        place = self.places[event.place]
        # In a pause all agents are ended, so that their losses are expected.
        if self.phase in (CallPhase.OVER, CallPhase.PAUSED) or not place.is_from(event):
            return []

        match event:
            case AgentUp():
                actions = self._on_ready(event, place)
            case AgentLost():
                actions = self._on_lost(event.place, event.why)
            case AgentEnded():
                actions = self._on_outcome(event, place)

        self._count_nodes()
        return actions

    def advance(self, now: float) -> list[Action]:
        """Return the actions that are due by *now*."""
        self.now = now
        match self.phase:
            case CallPhase.RUNNING:
                return self._due_while_running()
            case CallPhase.PAUSED if now >= self._limit:
                return self._start_again()
            case CallPhase.SUCCEEDING if now >= self._limit:
                return self._miss_results(f"no more results within {self.rules.result_timeout:g} s")
            case CallPhase.FAILING if now >= self._limit:
                return self._raise_cause()
            case _:
                return []

    def wake_at(self) -> float:
        """Return the time of the next call of `advance`; infinite if only an event can change anything."""
        if self.phase is CallPhase.OVER:
            return math.inf
        if self.phase is not CallPhase.RUNNING:
            return self._limit
        return min(self._shortage.limit(), self._shortage.report_at(), self._replacements.next_due())

    # Agents that start.

    def _on_ready(self, event: AgentUp, place: _PlacedAgent) -> list[Action]:
        place.state, place.has_been_ready, place.ready_since = PlaceState.READY, True, self.now
        if not self.endpoint and self.coordinator is None:
            self.coordinator = event.place
        if event.place == self.coordinator:
            self.endpoint = event.address
        if not self.endpoint:
            return []

        return [self._begin(number) for number in self._by_state.numbers(PlaceState.READY)]

    def _begin(self, number: int) -> BeginNode:
        self.places[number].state = PlaceState.AT_WORK
        return BeginNode(number, self.endpoint, is_host=number == self.coordinator)

    # Agents that are lost.

    def _on_lost(self, number: int, why: str) -> list[Action]:
        place = self.places[number]
        if self.phase is not CallPhase.RUNNING:
            place.state = PlaceState.GONE
            return self._after_outcome(why)

        # An agent that never ran would fail again: a wrong host name, or no elasticlib there.
        if not place.has_been_ready and self.restarts == 0:
            return self._give_up(why)
        if number == self.coordinator:
            return self._pause(why)
        return self._wait_for_replacement(place, why)

    def _wait_for_replacement(self, place: _PlacedAgent, why: str) -> list[Action]:
        was_healthy = place.state is not PlaceState.STARTING and self._has_been_ready_long(place)
        place.losses = 1 if was_healthy else place.losses + 1
        if place.losses <= self.rules.replacements:
            place.state, place.due = PlaceState.WAITING, self.now + self.rules.pause_after(place.losses)
            self._replacements.plan(place)
            return []

        place.state = PlaceState.GONE
        return self._give_up_if_too_few(why)

    def _has_been_ready_long(self, place: _PlacedAgent) -> bool:
        return self.now - place.ready_since >= self.rules.healthy_after

    def _give_up_if_too_few(self, why: str) -> list[Action]:
        """Give up if no agent, or fewer than `min_nodes`, can be at work again."""
        possible = self._by_state.count(*_MAY_GET_AGENT)
        ended = self._by_state.count(PlaceState.ENDED)
        if possible and possible + ended >= self.rules.min_nodes:
            return []
        return self._give_up(why)

    def _pause(self, why: str) -> list[Action]:
        """Stop all agents and start them again later: the rendezvous is gone."""
        self.restarts += 1
        if self.restarts > self.rules.restarts:
            return self._give_up(f"{why}; all agents were started again {self.rules.restarts} times before")
        self.phase, self._limit = CallPhase.PAUSED, self.now + self.rules.pause_after(self.restarts)
        return [StopAll(why)]

    def _start_again(self) -> list[Action]:
        self.phase, self._limit = CallPhase.RUNNING, math.inf
        # The first agent that is ready hosts the next rendezvous: the machine of the former host may be gone.
        self.coordinator, self.endpoint = None, ""
        self._make_places([place.losses for place in self.places])
        self._shortage = _Shortage(self.rules, self.now)
        return [PlaceAll()]

    # Outcomes.

    def _on_outcome(self, event: AgentEnded, place: _PlacedAgent) -> list[Action]:
        # Its node may have ended only because the coordinator's machine was lost, or it was
        # stopped.
        if event.kind is OutcomeKind.CUT_OFF:
            return self._on_lost(event.place, event.why)

        place.state = PlaceState.ENDED
        if self.phase is not CallPhase.RUNNING:
            self._note(event)
            return self._after_outcome(event.why)

        match event.kind:
            case OutcomeKind.SUCCEEDED:
                return self._succeed(event)
            case OutcomeKind.FAILED:
                return self._fail(event)
            case OutcomeKind.UNNEEDED:
                return self._give_up_if_too_few("all agents ended, and none of them has results")
            case _:
                return self._give_up(event.why, event.place)

    def _note(self, event: AgentEnded) -> None:
        """Remember the results of *event*, or the error if it is nearer to the root cause."""
        if event.kind is OutcomeKind.SUCCEEDED:
            self.ranks |= event.ranks
            self.world = max(self.world, event.world)
        if event.kind is OutcomeKind.FAILED and (self._cause is None or event.has_cause):
            self._cause = event

    def _succeed(self, event: AgentEnded) -> list[Action]:
        # An agent that had not begun takes no part in the job that succeeded.
        for number in self._by_state.numbers(PlaceState.STARTING, PlaceState.READY, PlaceState.WAITING):
            self.places[number].state = PlaceState.GONE
        self.phase, self._limit = CallPhase.SUCCEEDING, self.now + self.rules.result_timeout
        self._note(event)
        return self._after_outcome("")

    def _fail(self, event: AgentEnded) -> list[Action]:
        self.phase, self._limit = CallPhase.FAILING, self.now + self.rules.failure_timeout
        self._note(event)
        return self._after_outcome("")

    def _after_outcome(self, why: str) -> list[Action]:
        """Return what follows after an outcome, or a loss, in SUCCEEDING or FAILING."""
        is_last = not self._by_state.count(PlaceState.AT_WORK)
        if self.phase is CallPhase.FAILING:
            return self._raise_cause() if is_last else []

        if len(self.ranks) >= self.world:
            self.phase = CallPhase.OVER
            return [ReturnResults()]
        return self._miss_results(why) if is_last else []

    def _miss_results(self, why: str) -> list[Action]:
        count = self.world - len(self.ranks)
        text = f"the job succeeded, but the results of {count} of {self.world} ranks are lost"
        return self._give_up(f"{text}: {why}" if why else text)

    def _raise_cause(self) -> list[Action]:
        assert self._cause is not None
        return self._give_up(self._cause.why, self._cause.place)

    def _give_up(self, why: str, place: int | None = None) -> list[Action]:
        self.phase = CallPhase.OVER
        return [RaiseError(why, place)]

    # Time.

    def _due_while_running(self) -> list[Action]:
        if self.now >= self._shortage.limit():
            ready, least = self._by_state.count(*_COUNTS_AS_NODE), self.rules.min_nodes
            return self._give_up(
                f"{ready} of {self.rules.agents} agents are ready, and {least} are needed: no more of them "
                f"were ready within {self.rules.start_timeout:g} s"
            )
        due = self._replacements.pop_due(self.now)
        for place in due:
            place.state, place.agent, place.due = PlaceState.STARTING, place.agent + 1, math.inf
        return [*self._due_reports(), *(Replace(place.number) for place in due)]

    def _due_reports(self) -> list[Action]:
        if self.now < self._shortage.report_at():
            return []
        self._shortage.report()
        missing = self._by_state.numbers(PlaceState.STARTING, PlaceState.WAITING)
        return [_report_of_shortage(self.rules, self._by_state.count(*_COUNTS_AS_NODE), missing)]

    def _count_nodes(self) -> None:
        """Note the time since which too few agents are ready."""
        is_enough = self._by_state.count(*_COUNTS_AS_NODE) >= self.rules.min_nodes and self._has_begun()
        if is_enough:
            self._shortage.end()
        else:
            self._shortage.begin(self.now)

    def _has_begun(self) -> bool:
        # Without an endpoint, agents that are ready wait for the coordinator's one.
        return self._by_state.count(PlaceState.AT_WORK) > 0


def _report_of_shortage(rules: CallRules, ready: int, missing: Sequence[int]) -> ReportWait:
    names = ", ".join(map(str, missing[:_NAMED])) + (", ..." if len(missing) > _NAMED else "")
    return ReportWait(
        f"{ready} of {rules.agents} agents are ready after {rules.remind_after:g} s, and {rules.min_nodes} are needed "
        f"(missing: {names}): the call fails after {rules.start_timeout:g} s"
    )
