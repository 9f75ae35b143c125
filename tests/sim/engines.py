"""
Calls on thousands of machines in simulated time: the real `Supervisor`, and an engine, agents and a job with faults.

The job is a model: nodes that have begun work until its end, if there are `min_nodes` of them; each then has one rank.
The engine loses agents, reports losses late, never places some replacements, lets replaced agents go on, and loses
outcomes after the success. Equal arguments give equal histories.

Rules of this file: the model knows the truth, which the supervisor does not. What must hold of each decision is checked
where it is carried out, by `InvariantBroken`.
"""

from __future__ import annotations

import heapq
import itertools
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence

from attrs import define, frozen

from elasticlib.engines import (
    Action,
    AgentEnded,
    AgentLost,
    AgentUp,
    BeginNode,
    CallRules,
    OutcomeKind,
    PlaceAll,
    RaiseError,
    Replace,
    ReturnResults,
    StopAll,
    Supervisor,
)
from tests.sim.simulator import InvariantBroken

JOIN_TIMEOUT = 600.0
"""Seconds for which nodes at work wait for others."""
LEASE = 60.0
"""Seconds after which an agent without its client ends."""
LONGEST = 1e5
"""Simulated seconds after which a call counts as hung."""


@frozen
class EngineFaults:
    """Shares of agents, losses or calls for which something goes wrong."""

    lost: float = 0.05
    """Of agents: lost at work."""
    late: float = 0.3
    """Of losses: reported up to a minute late."""
    cut_off: float = 0.3
    """Of losses: the agent reports that it was cut off, and the engine reports its end up to a minute later."""
    never_placed: float = 0.1
    """Of replacements: the engine is silent about them."""
    twins: float = 0.2
    """Of lost agents: they go on beside their replacements, until their lease is over."""
    host_lost: float = 0.3
    """Of calls: the agent that hosts the rendezvous is lost."""
    outcome_lost: float = 0.1
    """Of calls: one agent is lost between the success and its outcome."""
    fails: float = 0.1
    """Of calls: a worker fails for good."""


@define(eq=False)
class _Agent:
    place: int
    number: int
    job: int
    """Number of the start of all agents."""
    is_up: bool = False
    is_at_work: bool = False
    is_reported_lost: bool = False

    @property
    def address(self) -> str:
        return f"h{self.place}.{self.number}.{self.job}:1"


@frozen
class CallEnd:
    """The end of a call, and what it took."""

    decision: ReturnResults | RaiseError
    at: float
    """Simulated seconds."""
    events: int
    actions: Counter[str]
    computed: float
    """Real seconds in the supervisor."""

    @property
    def kind(self) -> str:
        """Return the decision in a word or two, for counts."""
        return "results" if isinstance(self.decision, ReturnResults) else _without_numbers(self.decision.why)


def _without_numbers(text: str) -> str:
    return re.sub(r"\d+", "N", text.partition(":")[0])


class SimulatedCall:
    """One call of *rules* with *faults*."""

    def __init__(self, rules: CallRules, faults: EngineFaults, seed: int, work: float = 3600.0) -> None:
        self.rules, self.faults, self.work = rules, faults, work
        self.random = random.Random(seed)
        self.supervisor = Supervisor(rules, 0.0)
        self.now = 0.0
        self.end: ReturnResults | RaiseError | None = None
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._job = -1
        self._agents: dict[int, _Agent] = {}
        """Present agents by place."""
        self._working: set[_Agent] = set()
        """Nodes of the job, also of agents that were replaced."""
        self._results: dict[int, frozenset[int]] = {}
        """Ranks by place, of present agents."""
        self._events, self._actions, self._computed = 0, Counter[str](), 0.0
        self._short_since: float | None = 0.0
        self._place_all()

    def run(self) -> CallEnd:
        """Run the call to its end. Raises `InvariantBroken`."""
        while self.end is None:
            self._step()
        return CallEnd(self.end, self.now, self._events, self._actions, self._computed)

    # Time.

    def _later(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + seconds, next(self._order), act))

    def _step(self) -> None:
        """Go on to what is next: an event of the model, or a deadline of the supervisor."""
        wake = self.supervisor.wake_at()
        due = self._queue[0][0] if self._queue else float("inf")
        self._check(min(due, wake) < LONGEST, "the call hangs")
        if wake <= due:
            self.now = max(self.now, wake)
            self._call_supervisor(lambda: self.supervisor.advance(self.now))
        else:
            self.now, _, act = heapq.heappop(self._queue)
            act()

    def _call_supervisor(self, call: Callable[[], Sequence[Action]]) -> None:
        began = time.perf_counter()
        actions = call()
        self._computed += time.perf_counter() - began
        for action in actions:
            self._carry_out(action)

    def _report(self, event: AgentUp | AgentLost | AgentEnded, job: int) -> None:
        """Let the supervisor handle an event, unless its agent was stopped with all others."""
        if job != self._job or self.end is not None:
            return
        self._events += 1
        is_stale = event.agent != self.supervisor.places[event.place].agent
        before = len(self.supervisor.ranks), self.supervisor.phase
        self._note_result(event, is_stale=is_stale)
        self._call_supervisor(lambda: self.supervisor.handle(event, self.now))
        after = len(self.supervisor.ranks), self.supervisor.phase
        self._check(not is_stale or before == after, f"an event of a replaced agent counts: {event}")

    def _note_result(self, event: AgentUp | AgentLost | AgentEnded, *, is_stale: bool) -> None:
        if isinstance(event, AgentEnded) and event.kind is OutcomeKind.SUCCEEDED and not is_stale:
            self._results[event.place] = event.ranks

    def _check(self, is_right: bool, why: str) -> None:
        if not is_right:
            raise InvariantBroken(f"{self.now:.1f} s: {why}")

    # Decisions.

    def _carry_out(self, action: Action) -> None:
        self._check(self.end is None, f"{action} after the end")
        self._actions[type(action).__name__] += 1
        match action:
            case BeginNode():
                self._begin(action)
            case Replace(place):
                self._replace(place)
            case StopAll():
                self._stop_all()
            case PlaceAll():
                self._place_all()
            case RaiseError():
                self.end = action
            case ReturnResults():
                self._check_results()
                self.end = action

    def _begin(self, action: BeginNode) -> None:
        agent = self._agents[action.place]
        self._check(agent.is_up and not agent.is_at_work, f"{action} of an agent that is not ready")
        host = self.supervisor.coordinator
        expected = self.rules.endpoint or self._agents[-1 if host is None else host].address
        self._check(action.endpoint == expected, f"{action}: the endpoint is {expected}")
        agent.is_at_work = True
        self._working.add(agent)
        if self.random.random() < self.faults.lost and action.place != host:
            self._later(self.random.uniform(0, self.work), lambda: self._lose(agent))

    def _replace(self, place: int) -> None:
        former = self._agents[place]
        self._check(former.is_reported_lost, f"agent {place} is replaced, and was not lost")
        self._results.pop(place, None)
        is_silent = self.random.random() < self.faults.never_placed
        self._start(place, former.number + 1, is_silent=is_silent)

    def _stop_all(self) -> None:
        # Events of stopped agents that are on their way are those of an older job.
        self._job += 1
        self._working.clear()
        self._results.clear()

    def _place_all(self) -> None:
        self._job += 1
        for place in range(self.rules.agents):
            self._start(place, 0)
        job = self._job
        self._later(self.work, lambda: self._finish(job))
        self._later(JOIN_TIMEOUT, lambda: self._check_nodes(job))
        if self.random.random() < self.faults.host_lost:
            self._later(self.random.uniform(0, self.work), lambda: self._lose_host(job))

    # The model.

    def _start(self, place: int, number: int, *, is_silent: bool = False) -> None:
        agent = self._agents[place] = _Agent(place, number, self._job)
        if not is_silent:
            self._later(self.random.expovariate(0.5), lambda: self._bring_up(agent))

    def _bring_up(self, agent: _Agent) -> None:
        agent.is_up = True
        self._report(AgentUp(agent.place, agent.address, agent.number), agent.job)

    def _lose(self, agent: _Agent) -> None:
        """Lose an agent, which leaves the job at once or later, and report it at once or later."""
        stays = self.random.uniform(0, LEASE) if self.random.random() < self.faults.twins else 0.0
        self._later(stays, lambda: self._working.discard(agent))
        delay = self.random.uniform(0, 60) if self.random.random() < self.faults.late else 0.01
        if self.random.random() < self.faults.cut_off:
            self._later(delay, lambda: self._report_cut(agent))
            delay += self.random.uniform(0, 60)
        self._later(delay, lambda: self._report_loss(agent))

    def _report_cut(self, agent: _Agent) -> None:
        agent.is_reported_lost = True
        cut = AgentEnded(agent.place, OutcomeKind.CUT_OFF, agent.number, why=f"agent {agent.place} is cut off")
        self._report(cut, agent.job)

    def _report_loss(self, agent: _Agent) -> None:
        agent.is_reported_lost = True
        self._report(AgentLost(agent.place, f"agent {agent.place} is lost", agent.number), agent.job)

    def _lose_host(self, job: int) -> None:
        host = self.supervisor.coordinator
        if job == self._job and host is not None and self._agents[host].is_at_work:
            self._working.discard(self._agents[host])
            self._report_loss(self._agents[host])

    def _check_nodes(self, job: int) -> None:
        """End all nodes at work if others have not come in time."""
        if job != self._job or self.end is not None:
            return
        is_short = len(self._working) < self.rules.min_nodes
        since, self._short_since = self._short_since, (self._short_since or self.now) if is_short else None
        if is_short and since is not None and self.now - since >= JOIN_TIMEOUT:
            self._end_all(OutcomeKind.ERROR, "too few nodes joined")
            return
        self._later(60.0, lambda: self._check_nodes(job))

    def _finish(self, job: int) -> None:
        """End the job, once enough nodes are at work."""
        if job != self._job or self.end is not None:
            return
        if len(self._working) < self.rules.min_nodes:
            self._later(10.0, lambda: self._finish(job))
        elif self.random.random() < self.faults.fails:
            self._end_all(OutcomeKind.FAILED, "a worker failed")
        else:
            self._succeed()

    def _succeed(self) -> None:
        nodes = sorted(self._working, key=lambda agent: (agent.place, agent.number))
        self._working.clear()
        victim = self.random.choice(nodes) if self.random.random() < self.faults.outcome_lost else None
        for rank, agent in enumerate(nodes):
            outcome = AgentEnded(agent.place, OutcomeKind.SUCCEEDED, agent.number, frozenset({rank}), len(nodes))
            self._end(agent, None if agent is victim else outcome)

    def _end_all(self, kind: OutcomeKind, why: str) -> None:
        nodes, self._working = sorted(self._working, key=lambda agent: (agent.place, agent.number)), set()
        for number, agent in enumerate(nodes):
            self._end(agent, AgentEnded(agent.place, kind, agent.number, has_cause=number == 0, why=why))

    def _end(self, agent: _Agent, outcome: AgentEnded | None) -> None:
        """Report the *outcome* of an agent, if it has one, and then its end."""
        after = self.random.expovariate(1.0)
        if outcome is not None:
            self._later(after, lambda: self._report(outcome, agent.job))
        self._later(after + 0.1, lambda: self._report_loss(agent))

    def _check_results(self) -> None:
        found = sorted(itertools.chain.from_iterable(self._results.values()))
        self._check(found == list(range(self.supervisor.world)) and bool(found), "results are missing, or twofold")
