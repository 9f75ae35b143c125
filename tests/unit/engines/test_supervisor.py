"""Decisions about agents on many machines: one table of situations, and random engines with faults."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from attrs import define, field
from hypothesis import given, settings, strategies as st

from elasticlib.engines._protocol import AgentLost, AgentUp
from elasticlib.engines._supervisor import (
    Action,
    AgentEnded,
    BeginNode,
    CallPhase,
    CallRules,
    OutcomeKind,
    PlaceAll,
    RaiseError,
    Replace,
    ReportWait,
    ReturnResults,
    StopAll,
    Supervisor,
    SupervisorEvent,
)

UP = [AgentUp(0, "a:1"), AgentUp(1, "b:1"), AgentUp(2, "c:1")]
Step = SupervisorEvent | float
"""An event one second later, or a pause in seconds."""


def succeeded(place: int, *ranks: int, agent: int = 0, world: int = 3) -> AgentEnded:
    return AgentEnded(place, OutcomeKind.SUCCEEDED, agent, frozenset(ranks), world)


def ended(place: int, kind: OutcomeKind, why: str = "", *, agent: int = 0, has_cause: bool = False) -> AgentEnded:
    return AgentEnded(place, kind, agent, has_cause=has_cause, why=why)


def lost(place: int, agent: int = 0) -> AgentLost:
    return AgentLost(place, f"h{place} is lost", agent)


def run(rules: CallRules, steps: Sequence[Step]) -> tuple[Supervisor, list[Action]]:
    """Return the supervisor after *steps*, and the actions that follow from the last one."""
    supervisor, now, actions = Supervisor(rules, 0.0), 0.0, list[Action]()
    for step in steps:
        now += step if isinstance(step, float) else 1.0
        actions = supervisor.advance(now) if isinstance(step, float) else supervisor.handle(step, now)
    return supervisor, actions


THREE, TWO_OF_THREE = CallRules(3, 3), CallRules(3, 2)
SITUATIONS: dict[str, tuple[CallRules, list[Step], list[Action]]] = {
    "agents wait for the coordinator's address": (THREE, [UP[1]], []),
    "the coordinator's address begins all": (
        THREE,
        [UP[1], UP[0]],
        [BeginNode(0, "a:1", is_host=True), BeginNode(1, "a:1", is_host=False)],
    ),
    "a late agent begins at once": (THREE, [UP[0], UP[2]], [BeginNode(2, "a:1", is_host=False)]),
    "an engine's endpoint needs no coordinator": (
        CallRules(3, 3, endpoint="head:9"),
        [UP[1]],
        [BeginNode(1, "head:9", is_host=False)],
    ),
    "a machine that cannot be reached at first": (THREE, [UP[0], lost(2)], [RaiseError("h2 is lost")]),
    "a lost agent is replaced after a pause": (THREE, [*UP, lost(1), 1.0], [Replace(1)]),
    "a lost agent is not replaced at once": (THREE, [*UP, lost(1), 0.5], []),
    "an agent that was cut off is replaced": (
        THREE,
        [*UP, ended(1, OutcomeKind.CUT_OFF, "no store"), lost(1), 1.0],
        [Replace(1)],
    ),
    "a replacement begins": (
        THREE,
        [*UP, lost(1), 1.0, AgentUp(1, "d:1", 1)],
        [BeginNode(1, "a:1", is_host=False)],
    ),
    "a replacement that is not placed is retried": (THREE, [*UP, lost(1), 1.0, lost(1, 1), 2.0], [Replace(1)]),
    "the second pause is longer": (THREE, [*UP, lost(1), 1.0, lost(1, 1), 1.5], []),
    "too many losses of one place": (
        CallRules(3, 3, replacements=1),
        [*UP, lost(1), 1.0, lost(1, 1)],
        [RaiseError("h1 is lost")],
    ),
    "the others are enough": (CallRules(3, 2, replacements=0), [*UP, lost(1)], []),
    "the others are not enough any more": (
        CallRules(3, 2, replacements=0),
        [*UP, lost(1), lost(2)],
        [RaiseError("h2 is lost")],
    ),
    "a loss long after the last one starts a new count": (
        CallRules(3, 3, replacements=1),
        [*UP, lost(1), 1.0, AgentUp(1, "b:1", 1), 600.0, lost(1, 1), 1.0],
        [Replace(1)],
    ),
    "the coordinator is lost": (THREE, [*UP, lost(0)], [StopAll("h0 is lost")]),
    "the coordinator is cut off": (THREE, [*UP, ended(0, OutcomeKind.CUT_OFF, "no")], [StopAll("no")]),
    "all start again": (THREE, [*UP, lost(0), 1.0], [PlaceAll()]),
    "nothing counts during the pause": (THREE, [*UP, lost(0), lost(1), lost(2), succeeded(1, 1), 1.0], [PlaceAll()]),
    "the first that is ready hosts the next job": (
        THREE,
        [*UP, lost(0), 1.0, UP[2]],
        [BeginNode(2, "c:1", is_host=True)],
    ),
    "a dead machine is retried after a new start": (THREE, [*UP, lost(0), 1.0, UP[2], lost(0), 1.0], [Replace(0)]),
    "too many new starts": (
        CallRules(3, 3, restarts=0),
        [*UP, lost(0)],
        [RaiseError("h0 is lost; all agents were started again 0 times before")],
    ),
    "all succeed": (THREE, [*UP, succeeded(0, 0), lost(0), succeeded(1, 1), succeeded(2, 2)], [ReturnResults()]),
    "no agent is waited for without need": (
        THREE,
        [*UP, succeeded(0, 0, 1), succeeded(1, 2)],
        [ReturnResults()],
    ),
    "a result is lost after success": (
        THREE,
        [*UP, succeeded(0, 0), lost(1), succeeded(2, 2)],
        [RaiseError("the job succeeded, but the results of 1 of 3 ranks are lost")],
    ),
    "the last result is lost": (
        THREE,
        [*UP, succeeded(0, 0), succeeded(2, 2), lost(1)],
        [RaiseError("the job succeeded, but the results of 1 of 3 ranks are lost: h1 is lost")],
    ),
    "a loss that is seen after success hurts nobody": (
        TWO_OF_THREE,
        [*UP, succeeded(0, 0, world=2), lost(1), succeeded(2, 1, world=2)],
        [ReturnResults()],
    ),
    "a result is not sent": (
        THREE,
        [*UP, succeeded(0, 0), 120.0],
        [RaiseError("the job succeeded, but the results of 2 of 3 ranks are lost: no more results within 120 s")],
    ),
    "a result of a replaced agent counts for nothing": (THREE, [*UP, lost(1), 1.0, succeeded(1, 1)], []),
    "an address of a replaced agent counts for nothing": (THREE, [*UP, lost(1), 1.0, UP[1]], []),
    "a spare ends": (TWO_OF_THREE, [*UP, ended(2, OutcomeKind.UNNEEDED)], []),
    "only spares end": (
        TWO_OF_THREE,
        [*UP, *(ended(place, OutcomeKind.UNNEEDED) for place in range(3))],
        [RaiseError("all agents ended, and none of them has results")],
    ),
    "a failure waits for the other nodes": (THREE, [*UP, ended(0, OutcomeKind.FAILED, "x", has_cause=True)], []),
    "the node with the exception is raised": (
        THREE,
        [
            *UP,
            ended(0, OutcomeKind.FAILED, "x"),
            ended(1, OutcomeKind.FAILED, "x", has_cause=True),
            ended(2, OutcomeKind.FAILED, "x"),
        ],
        [RaiseError("x", 1)],
    ),
    "a failure does not wait for long": (THREE, [*UP, ended(0, OutcomeKind.FAILED, "x"), 5.0], [RaiseError("x", 0)]),
    "a failure and lost nodes": (
        THREE,
        [*UP, ended(0, OutcomeKind.FAILED, "x"), lost(1), lost(2)],
        [RaiseError("x", 0)],
    ),
    "another error is raised at once": (
        THREE,
        [*UP, ended(1, OutcomeKind.ERROR, "no torch")],
        [RaiseError("no torch", 1)],
    ),
    "agents that are never ready": (
        TWO_OF_THREE,
        [UP[0], 600.0],
        [
            RaiseError(
                "1 of 3 agents are ready, and 2 are needed: no more of them were ready within 600 s",
            )
        ],
    ),
    "a replacement that is never placed": (
        THREE,
        [*UP, lost(1), 1.0, 600.0],
        [RaiseError("2 of 3 agents are ready, and 3 are needed: no more of them were ready within 600 s")],
    ),
    "a lack of agents is reported": (
        THREE,
        [UP[0], 29.0],
        [
            ReportWait(
                "1 of 3 agents are ready after 30 s, and 3 are needed (missing: 1, 2): the call fails after 600 s",
            ),
        ],
    ),
    "a lack of agents is reported once": (THREE, [UP[0], 29.0, 30.0], []),
    "agents that are more than enough are not reported": (TWO_OF_THREE, [UP[0], UP[1], 60.0], []),
    "a later lack of agents is reported again": (
        THREE,
        [UP[0], 30.0, UP[1], UP[2], lost(2), 1.0, 28.0, 1.0],
        [
            ReportWait(
                "2 of 3 agents are ready after 30 s, and 3 are needed (missing: 2): the call fails after 600 s",
            ),
        ],
    ),
    "training goes on without a replacement": (TWO_OF_THREE, [*UP, lost(1), 1.0, 6000.0], []),
    "nothing follows an end": (THREE, [*UP, ended(1, OutcomeKind.ERROR, "no"), succeeded(0, 0), lost(2), 600.0], []),
}


@pytest.mark.parametrize("name", SITUATIONS)
def test_situation(name: str) -> None:
    rules, steps, expected = SITUATIONS[name]

    _, actions = run(rules, steps)

    assert expected == actions


@define
class RandomEngine:
    """An engine with faults: it may lose agents, report them late, never place them, or have two at one place."""

    supervisor: Supervisor
    now: float = 0.0
    requested: list[tuple[int, int]] = field(factory=list)
    """(place, agent) of all agents that may exist: an engine may keep those that were replaced."""
    decisions: list[Action] = field(factory=list)
    begun: set[tuple[int, int]] = field(factory=set)

    def carry_out(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case BeginNode(place):
                    self.begun.add((place, self.supervisor.places[place].agent))
                case Replace(place):
                    self.requested.append((place, self.supervisor.places[place].agent))
                case StopAll():
                    self.requested.clear()
                    self.begun.clear()
                case PlaceAll():
                    self.start()
                case RaiseError() | ReturnResults():
                    self.decisions.append(action)

    def start(self) -> None:
        self.requested = [(place, 0) for place in range(self.supervisor.rules.agents)]

    def report(self, event: SupervisorEvent) -> None:
        self.now += 0.1
        self.carry_out(self.supervisor.handle(event, self.now))

    def wait(self) -> None:
        """Let the time of the next deadline pass."""
        self.now = max(self.now, min(self.supervisor.wake_at(), self.now + 1e4))
        self.carry_out(self.supervisor.advance(self.now))


@st.composite
def events(draw: st.DrawFn, engine: RandomEngine) -> SupervisorEvent | None:
    """An event of any agent that may exist, also of a replaced one; None: time passes."""
    if not engine.requested or draw(st.integers(0, 4)) == 0:
        return None
    place, agent = draw(st.sampled_from(engine.requested))
    ranks = frozenset(draw(st.sets(st.integers(0, 2), max_size=2)))
    outcome = AgentEnded(place, draw(st.sampled_from(OutcomeKind)), agent, ranks, 3)
    is_at_work = (place, agent) in engine.begun
    of_kinds: list[SupervisorEvent] = [AgentUp(place, f"h{place}:1", agent), AgentLost(place, "lost", agent)]
    return draw(st.sampled_from([*of_kinds, outcome] if is_at_work else of_kinds))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_random_engine_gets_one_decision_and_never_hangs(data: st.DataObject) -> None:
    least = data.draw(st.integers(1, 3))
    engine = RandomEngine(Supervisor(CallRules(3, least, replacements=2, restarts=2), 0.0))
    engine.start()
    for _ in range(data.draw(st.integers(0, 60))):
        event = data.draw(events(engine))
        if event is None:
            engine.wait()
        else:
            check_stale(engine, event)

    # From now on no agent is placed, and the nodes at work end by their own time limits.
    for _ in range(200):
        if engine.supervisor.phase is CallPhase.OVER:
            break
        for place, agent in sorted(engine.begun):
            engine.report(ended(place, OutcomeKind.ERROR, "timeout", agent=agent))
        engine.wait()

    assert engine.supervisor.phase is CallPhase.OVER
    assert 1 == len(engine.decisions)
    if engine.decisions == [ReturnResults()]:
        assert {0, 1, 2} == engine.supervisor.ranks


def check_stale(engine: RandomEngine, event: SupervisorEvent) -> None:
    """Report *event*; one of an agent that was replaced changes nothing."""
    is_stale = event.agent != engine.supervisor.places[event.place].agent
    before = set(engine.supervisor.ranks), engine.supervisor.phase, list(engine.decisions)
    engine.report(event)
    after = set(engine.supervisor.ranks), engine.supervisor.phase, list(engine.decisions)
    assert not is_stale or before == after
