"""
A simulated node: an agent with its workers, and the sidecar beside it.

Rules of this file: the agent does what the real `agent._policy` says; its shell mirrors `agent._agent`, in which a
stop blocks; the sidecar mirrors `rendezvous.sidecar._bridge`: it lets the heartbeats of a frozen agent rest, kills
workers that outlive the contact, and speaks for an agent that died.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from attrs import Factory, define, field, frozen

from elasticlib.agent import _policy
from elasticlib.rendezvous._membership import MembershipEvent
from elasticlib.rendezvous.node import _session_events as session_events
from elasticlib.rendezvous.protocol._messages import (
    ContactLost,
    Descriptor,
    Failed,
    FailureNote,
    Final,
    Leave,
    RankAssignment,
    Report,
    Stopped,
    Succeeded,
)
from elasticlib.rendezvous.protocol._timing import DEAF, GRACE
from elasticlib.rendezvous.sidecar._launcher_watch import SidecarWatch
from elasticlib.testing import FailWorker
from tests.sim.simulator.common_stop import CommonStop
from tests.sim.simulator.group import CHANNEL, END, WORKERS_FAILED, Group
from tests.sim.simulator.history import AgentEnded, Fenced, Started
from tests.sim.simulator.member import NodeClient
from tests.sim.simulator.timeline import Process, Timeline

if TYPE_CHECKING:
    from tests.sim.simulator.cluster import SimulatedCluster
    from tests.sim.simulator.machine import Machine

PARTING = 2.0
PRESENCE = 7000
"""Port of the socket that all processes of a node hold."""
"""Seconds that a sidecar tries to send what it has still to say."""
LADDER = 30.0
"""Seconds from SIGTERM to SIGKILL."""
CLOSING = 30.0
"""Seconds that the store's host waits for others to read how the job ended."""


@frozen
class Stopping:
    """Event of the agent's queue: its part is over without an outcome."""

    why: str


@frozen
class Answer:
    """Event of the agent's queue: ranks, and the number of the request that it answers."""

    generation: int
    assignment: RankAssignment


@define(eq=False, repr=False)
class Node:
    """One agent and its two processes beside it, from its start to its end."""

    number: int
    name: str
    cluster: SimulatedCluster
    machine: Machine
    hosts_store: bool
    """True for the node on whose machine a fixed coordinator and the store run."""
    timeline: Timeline = field(init=False)
    agent: Process = field(init=False)
    rendezvous: Process = field(init=False)
    member: NodeClient = field(init=False)
    closes: bool = False
    outcome: AgentEnded | None = None
    group: Group | None = None
    groups: list[Group] = Factory(list)
    stops: list[CommonStop] = Factory(list)
    """One for each of the groups."""
    reported_success: int | None = None
    """The round whose success it told, if it has begun no later one."""
    descriptor: Descriptor = field(init=False)
    policy: _policy.AgentState = field(init=False)
    _ports: Iterator[int] = Factory(lambda: itertools.count(20000))
    _queue: deque[_policy.Event | Stopping | Answer] = Factory(deque)
    _channel: deque[tuple[int, MembershipEvent | Stopping]] = Factory(deque)
    """Messages of the sidecar that the agent has not read, each with the request it answers."""
    _generation: int = 0
    """Number of times that the agent has asked for ranks."""
    _watch: SidecarWatch = field(init=False)
    """Of the sidecar."""
    _busy: bool = False
    _guarded: Group | None = None
    _looks_at: float = math.inf
    """When the sidecar looks whether it must kill them."""

    def __attrs_post_init__(self) -> None:
        self.timeline, machine = self.cluster.timeline, self.machine
        self.agent = Process(f"agent {self.name}", self.timeline, machine.skew, machine.drift)
        self.rendezvous = Process(f"rendezvous {self.name}", self.timeline, machine.skew, machine.drift)
        self.member = NodeClient(
            self.name, self.rendezvous, machine.link, self.cluster, self._describe, self._pass_on,
            lambda why: self._send(Stopping(why)), self.cluster.key, self._look_sooner,
        )  # fmt: skip

    def start(self) -> None:
        """The agent begins."""
        self.member.start()
        now = self.rendezvous.clock()
        self._watch = SidecarWatch(self.cluster.rules.heartbeat, now, now)
        self.policy, actions = _policy.begin()
        self._perform(deque(actions))

    def _describe(self) -> Descriptor:
        cluster, number = self.cluster, self.number
        slots = cluster.slots + (number % 3 if cluster.uneven else 0)
        role = "reader" if cluster.uneven and number % 2 else "trainer"
        index = number if cluster.rules.fixed_places else None
        port = next(self._ports)
        offer = Descriptor(slots, role, (f"10.0.0.{number}",), port, index, self.hosts_store, presence_port=PRESENCE)
        self.descriptor = offer
        return self.descriptor

    # The agent's process.

    def _soon(self, do: Callable[[], None]) -> None:
        """In the sidecar, which the agent tells something."""
        self.timeline.after(CHANNEL, self.rendezvous, do)

    def handle(self, event: _policy.Event | Stopping) -> None:
        """Something happened, as the agent sees it."""
        if self.outcome is None:
            self._queue.append(event)
            self._go_on()

    def _go_on(self) -> None:
        while self._queue and not self._busy and self.outcome is None:
            event = self._queue.popleft()
            if isinstance(event, Stopping):
                self._busy = True
                self._stop_workers(LADDER, functools.partial(self._end, "lost", event.why))
                return
            if isinstance(event, Answer):
                if event.generation < self._generation:
                    continue  # to a request that was given up
                event = event.assignment
                self.cluster.watch(self.member.nonce).assigned(self, event)
            if isinstance(event, ContactLost):
                self.cluster.history.append(Fenced(self.timeline.now, self.name, event.why))
            if isinstance(event, Final):
                self.cluster.watch(self.member.nonce).received_final(self, event)
            self.policy, actions = _policy.step(self.policy, event)
            self._perform(deque(actions))

    def _perform(self, actions: deque[_policy.Action]) -> None:
        while actions:
            action = actions.popleft()
            match action:
                case _policy.AskForRanks():
                    self._generation += 1
                    self._soon(functools.partial(self._join, self._generation))
                case _policy.Start(assignment):
                    self._start_workers(assignment)
                case _policy.WantStop() | _policy.AskWorkers() | _policy.Propose() | _policy.Agree():
                    self.stops[-1].perform(action)
                case _policy.StopWorkers(grace=grace):
                    self._busy = True
                    self._stop_workers(LADDER if grace is None else grace, functools.partial(self._stopped, actions))
                    return
                case _policy.ReportFailed(number):
                    self._soon(functools.partial(self._send_report, Failed(self.name, number, self._notes())))
                case _policy.ReportStopped(number):
                    self._soon(functools.partial(self._report_end, Stopped(self.name, number, self._notes())))
                case _policy.ReportSucceeded(number):
                    self.reported_success = number
                    self._soon(functools.partial(self._report_end, Succeeded(self.name, number)))
                case _policy.LeaveJob(why, number):
                    self._soon(functools.partial(self._report_leave, why, number))
                case _policy.Finish():
                    self._finish(action)
                    return

    def _finish(self, end: _policy.Finish) -> None:
        kind = "succeeded" if end.stop is None else "left"
        if end.stop is None and end.final is not None:
            own = self.group.assignment.round if self.group is not None and end.results else None
            self.cluster.watch(self.member.nonce).ends(self, own, end.succeeded, end.final)
            unlucky = "replaced" if end.final.succeeded else end.final.kind
            kind = "succeeded" if end.succeeded else unlucky
        self._end(kind, end.why)

    def _stopped(self, rest: deque[_policy.Action]) -> None:
        self._busy = False
        self._perform(rest)
        self._queue.append(_policy.WorkersGone(self.group is not None and self.group.succeeded))
        self._go_on()

    def _start_workers(self, assignment: RankAssignment) -> None:
        if any(isinstance(event, ContactLost) for event in self._queue):
            return  # an agent that was frozen wakes to ranks which others have by now
        self.group = group = Group(self, assignment)
        self.groups.append(group)
        self.stops.append(CommonStop(group, lambda report: self._soon(lambda: self._send_report(report))))
        self.reported_success = None
        ranks = tuple(range(assignment.rank_base, assignment.rank_base + self.descriptor.slots))
        master = (assignment.master_addresses, assignment.master_port)
        self.cluster.history.append(
            Started(self.timeline.now, self.name, assignment.round, assignment.group_rank, ranks, master)
        )
        self.cluster.started(group)
        self._soon(lambda: self._guard(group))
        group.watch_lease(group.spawner)
        self.timeline.after(self.cluster.work, group.process, lambda: self._succeed(group))

    def _succeed(self, group: Group) -> None:
        if not group.ended and group.failed_at is None:
            group.end("succeeded")
            self.notify_agent(group, _policy.WorkersSucceeded())

    def notify_agent(self, group: Group, event: _policy.Event) -> None:
        """Report *event* of the workers to the agent, unless it is ordering their stop by then."""

        def see() -> None:
            if self.group is group and not self._busy:
                self.handle(event)

        self.timeline.after(CHANNEL, self.agent, see)

    def fail_workers(self, fault: FailWorker) -> None:
        """A worker fails; its brothers go on. Once all have ended well, it is the store that they shared."""
        group = self.group
        if group is None or group.failed_at is not None or group.process.frozen:
            return
        loses_store = group.succeeded and group.assignment.group_rank == 0
        if not group.ended or loses_store:
            group.failed_at, group.failure = self.agent.clock(), fault
            self.notify_agent(group, _policy.WorkerStoreLost() if loses_store else WORKERS_FAILED)

    def _notes(self) -> tuple[FailureNote, ...]:
        return () if self.group is None else self.group.notes()

    def _stop_workers(self, grace: float, then: Callable[[], None]) -> None:
        if self.working is None:
            self.timeline.after(CHANNEL, self.agent, then)
        else:
            self.working.stop(grace, then)

    def leave(self) -> None:
        """SIGTERM to the agent."""
        self.handle(_policy.StopRequested(15))

    def notice(self) -> None:
        """SIGTERM to the agent, whose workers ask whether they should stop."""
        self.handle(_policy.StopRequested(15, is_polled=self.working is not None))

    def _end(self, kind: str, why: str) -> None:
        self.outcome = AgentEnded(self.timeline.now, self.name, kind, why)
        self.cluster.history.append(self.outcome)
        self._queue.clear()
        self._soon(lambda: self.close(CLOSING))
        self.cluster.finished(self)

    @property
    def working(self) -> Group | None:
        """Its workers, if any run."""
        return None if self.group is None or self.group.ended else self.group

    # The sidecar.

    def _pass_on(self, event: MembershipEvent) -> None:
        """A word of the member goes to the agent."""
        if isinstance(event, RankAssignment):
            self._watch = self._watch.assigned()
        self._send(event)

    def _send(self, event: MembershipEvent | Stopping) -> None:
        generation = self._watch.generation

        def arrive() -> None:
            self._channel.append((generation, event))
            self.timeline.after(0.0, self.agent, self._read_channel)

        self.timeline.after(CHANNEL, None, arrive)

    def _read_channel(self) -> None:
        """Take all that has come."""
        if self.outcome is not None:
            return
        for generation, event in self._channel:
            if isinstance(event, ContactLost) and self._busy and self.working is not None:
                self.working.end_in(event.grace, "killed")  # sooner
            self._queue.append(Answer(generation, event) if isinstance(event, RankAssignment) else event)
        self._channel.clear()
        self._go_on()

    def _join(self, generation: int) -> None:
        self._watch = self._watch.joins(generation)
        self.member.handle(session_events.Seek(1, ""))

    def _send_report(self, report: Report) -> None:
        self.member.handle(session_events.SendReport(report))

    def _report_end(self, report: Stopped | Succeeded) -> None:
        self._watch = self._watch.gone()
        self._send_report(report)

    def _report_leave(self, why: str, number: int | None, *, lost: bool = False) -> None:
        if not self.cluster.leaves(self, why):
            self._send_report(Leave(self.name, why, number, lost))

    def _guard(self, group: Group) -> None:
        self._guarded, self._looks_at = group, math.inf
        self._watch_over(group)

    def _look_sooner(self) -> None:
        """Look at the workers at their time to be killed, if that is sooner than before."""
        due = self.member.session.kill_at()
        if due is not None and due < self._looks_at and self._guarded is not None and self._watch.running:
            group, self._looks_at = self._guarded, due
            self.rendezvous.at(due, lambda: self._watch_over(group))

    def _watch_over(self, group: Group) -> None:
        """Kill the workers when they outlive the contact."""
        due = self.member.session.kill_at()
        if self._guarded is not group or not self._watch.running or group.ended or due is None:
            return
        self._judge()
        if not self._watch.due:
            self._looks_at = due
            self.rendezvous.at(due, lambda: self._watch_over(group))

    def _judge(self) -> None:
        now, paused = self.rendezvous.clock(), self._watch.paused
        if self.agent.alive and not self.agent.frozen:
            self._watch = self._watch.after_message(now)  # its signs of life come all the time
        self._watch = self._watch.judge(now, self.member.session.kill_at())
        if self._watch.paused is not paused:
            self.member.handle(session_events.SuspendHeartbeats(self._watch.paused))
        if self._watch.due and self._guarded is not None:
            self._guarded.kill()

    def lease_end(self) -> float:
        """Until when this machine's clock may show workers at work."""
        end = self._watch.lease_end(self.member.session.kill_at())
        return -math.inf if end is None else end

    def agent_freezes(self, seconds: float) -> None:
        """The agent is stopped for *seconds*: its heartbeats must rest soon, and again be heard when it is back."""

        def fell_silent() -> None:
            self._watch = self._watch.after_message(self.rendezvous.clock())
            wake = self._watch.wake_at(None)
            if wake is not None:
                self.rendezvous.at(wake, self._judge)

        self.timeline.after(CHANNEL, self.rendezvous, fell_silent)
        self.timeline.after(seconds + CHANNEL, self.rendezvous, self._judge)

    def rendezvous_freezes(self, seconds: float) -> None:
        """The sidecar is stopped: the agent counts itself as cut off."""
        heartbeat = self.cluster.rules.heartbeat
        if heartbeat and seconds > DEAF * heartbeat:
            silent = "contact with the job is lost: the sidecar of this node does not answer"
            loss = ContactLost(silent, GRACE * heartbeat)
            self.timeline.after(DEAF * heartbeat, self.agent, lambda: self._send(loss))

    def rendezvous_dies(self) -> None:
        """The sidecar was killed: the agent ends its part, quickly."""
        why = "the sidecar of this node ended unexpectedly"
        heartbeat = self.cluster.rules.heartbeat
        self._send(ContactLost(why, GRACE * heartbeat))
        self._send(Stopping(why))

    def has_ended(self) -> bool:
        """Return whether no process of the node is left."""
        agent_lives = self.agent.alive and self.outcome is None
        return not (agent_lives or self.rendezvous.alive) and all(group.ended for group in self.groups)

    def processes(self, *, of_workers: bool = True) -> list[Process]:
        """All that is there of this node."""
        groups = self.groups if of_workers else [group for group in self.groups if not group.ended]
        spawners = [group.spawner for group in groups]
        return [self.agent, self.rendezvous, *spawners, *(group.process for group in groups if of_workers)]

    def agent_dies(self) -> None:
        """The agent was killed: its reaper kills the workers, its sidecar bears witness."""
        group = self.working
        self._queue.clear()
        if group is not None:
            self.timeline.after(END, None, lambda: group.end("died"))
        self.timeline.after(2 * END, self.rendezvous, self._bear_witness)

    def _bear_witness(self) -> None:
        self._report_leave("its agent died", None, lost=True)
        self.close(1.0)

    def close(self, linger: float) -> None:
        """Part from the job; then the process ends."""
        if self.closes:
            return
        self.closes = True
        if not self.member.is_over and self.outcome is not None and self.outcome.kind == "lost":
            self._report_leave("its agent ended without leaving the job", None, lost=True)
        self.member.handle(session_events.CloseSession())
        self.cluster.end_sidecar(self, linger)
