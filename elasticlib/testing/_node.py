"""
A simulated node: an agent with its workers, and the sidecar beside it.

Rules of this file: the agent does what the real `agent._policy` says; its shell mirrors `agent._agent`, in which a
stop blocks; the sidecar mirrors `rendezvous.sidecar._bridge`: it lets the heartbeats of a frozen agent rest, kills
workers that outlive the contact, and speaks for an agent that died.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable

from attrs import Factory, define, field, frozen

from elasticlib.agent import _policy
from elasticlib.rendezvous._membership import Word
from elasticlib.rendezvous.protocol._messages import (
    ContactLost,
    Descriptor,
    Failed,
    FailureNote,
    Final,
    Leave,
    RankAssignment,
    Stopped,
    Succeeded,
)
from elasticlib.rendezvous.protocol._timing import FENCE, GRACE, INTERVAL
from elasticlib.rendezvous.sidecar._watch import SidecarWatch
from elasticlib.testing._faults import FailWorker
from elasticlib.testing._group import CHANNEL, END, Group
from elasticlib.testing._history import AgentEnded, Fenced, Started
from elasticlib.testing._member import NodeClient
from elasticlib.testing._surroundings import Surroundings
from elasticlib.testing._timeline import Process

PARTING = 2.0
"""Seconds that a sidecar tries to send what it has still to say."""
FLAP = 60.0
"""Seconds that a node which lost its store seeks it again."""
LADDER = 30.0
"""Seconds from SIGTERM to SIGKILL."""
DEAF = FENCE - INTERVAL / 2
"""Share after which an agent whose sidecar is silent counts itself as cut off."""
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
    cluster: Surroundings
    agent: Process
    rendezvous: Process
    member: NodeClient
    stubborn: Callable[[], float]
    """How long a worker goes on after SIGTERM, now."""
    closes: bool = False
    outcome: AgentEnded | None = None
    group: Group | None = None
    groups: list[Group] = Factory(list)
    told_success: int | None = None
    """The round whose success it told, if it has begun no later one."""
    descriptor: Descriptor = field(init=False)
    policy: _policy.State = field(init=False)
    _queue: deque[_policy.Event | Stopping | Answer] = Factory(deque)
    _channel: deque[tuple[int, Word | Stopping]] = Factory(deque)
    """What the sidecar has sent and the agent has not read, each with the request that it answers."""
    _generation: int = 0
    """How often the agent has asked for ranks."""
    _vigil: SidecarWatch = field(init=False)
    """Of the sidecar."""
    _busy: bool = False
    _guarded: Group | None = None

    def start(self) -> None:
        """The agent begins."""
        self.member.start()
        self._vigil = SidecarWatch(self.cluster.rules.heartbeat, self.member.clock(), self.member.clock())
        self.policy, actions = _policy.begin()
        self._perform(deque(actions))

    # The agent's process.

    def _soon(self, do: Callable[[], None]) -> None:
        """In the sidecar, which the agent tells something."""
        self.cluster.timeline.after(CHANNEL, self.rendezvous, do)

    def hear(self, event: _policy.Event | Stopping) -> None:
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
                self.cluster.assigned(self, event)
            if isinstance(event, ContactLost):
                self.cluster.note(Fenced(self.cluster.timeline.now, self.name, event.why))
            if isinstance(event, Final):
                self.cluster.told(self, event)
            self.policy, actions = _policy.step(self.policy, event)
            self._perform(deque(actions))

    def _perform(self, actions: deque[_policy.Action]) -> None:
        while actions:
            action = actions.popleft()
            match action:
                case _policy.Join():
                    self._generation += 1
                    self._soon(functools.partial(self._join, self._generation))
                case _policy.Start(assignment):
                    self._start_workers(assignment)
                case _policy.Stop(grace=grace):
                    self._busy = True
                    self._stop_workers(LADDER if grace is None else grace, functools.partial(self._stopped, actions))
                    return
                case _policy.TellFailed(number):
                    self._soon(functools.partial(self.member.report, Failed(self.name, number, self._notes())))
                case _policy.TellStopped(number):
                    self._soon(functools.partial(self._tell_stopped, number, self._notes()))
                case _policy.TellSucceeded(number):
                    self.told_success = number
                    self._soon(functools.partial(self._tell_succeeded, number))
                case _policy.Leave(why, number):
                    self._soon(functools.partial(self._tell_left, why, number))
                case _policy.Finish():
                    self._finish(action)
                    return

    def _finish(self, end: _policy.Finish) -> None:
        if end.signum is not None:
            self._end("left", end.why)
            return
        if end.final is None:
            self._end("succeeded", end.why)
            return
        own = self.group.assignment.round if self.group is not None and end.results else None
        self.cluster.ends(self, own, end.succeeded, end.final)
        unlucky = "replaced" if end.final.succeeded else end.final.kind
        self._end("succeeded" if end.succeeded else unlucky, end.why)

    def _stopped(self, rest: deque[_policy.Action]) -> None:
        self._busy = False
        self._perform(rest)
        self._queue.append(_policy.WorkersGone())
        self._go_on()

    def _start_workers(self, assignment: RankAssignment) -> None:
        if any(isinstance(event, ContactLost) for event in self._queue):
            return  # an agent that was frozen wakes to ranks which others have by now
        timeline = self.cluster.timeline
        process, spawner = Process(f"workers of {self.name}"), Process(f"spawner of {self.name}")
        self.group = group = Group(self, assignment, process, spawner)
        self.groups.append(group)
        self.told_success = None
        ranks = tuple(range(assignment.rank_base, assignment.rank_base + self.descriptor.slots))
        master = (assignment.master_addresses, assignment.master_port)
        self.cluster.note(Started(timeline.now, self.name, assignment.round, assignment.group_rank, ranks, master))
        self.cluster.started(group)
        self._soon(lambda: self._guard(group))
        group.watch_lease(group.spawner)
        timeline.after(self.cluster.work, process, lambda: self._succeed(group))

    def _succeed(self, group: Group) -> None:
        if not group.gone and group.failed_at is None:
            group.end("succeeded")
            timeline = self.cluster.timeline
            # Seen by an agent that is not busy with ordering their stop.
            timeline.after(
                CHANNEL, self.agent, lambda: self.hear(_policy.WorkersSucceeded()) if self._is(group) else None
            )

    def _is(self, group: Group) -> bool:
        return self.group is group and not self._busy

    def fail_workers(self, fault: FailWorker) -> None:
        """A worker fails; its brothers go on."""
        group = self.group
        if (
            group is None
            or group.gone
            or group.failed_at is not None
            or group.process.thaws_at > self.cluster.timeline.now
        ):
            return
        group.failed_at, group.failure = self.agent.clock(self.cluster.timeline.now), fault
        self.tell_agent_of_failure(group)

    def tell_agent_of_failure(self, group: Group) -> None:
        timeline = self.cluster.timeline
        why = _policy.WorkersFailed("a worker failed")
        timeline.after(CHANNEL, self.agent, lambda: self.hear(why) if self._is(group) else None)

    def _notes(self) -> tuple[FailureNote, ...]:
        return () if self.group is None else self.group.notes()

    def _stop_workers(self, grace: float, then: Callable[[], None]) -> None:
        if self.group is None or self.group.gone:
            self.cluster.timeline.after(CHANNEL, self.agent, then)
        else:
            self.group.stop(grace, then)

    def _hasten(self, grace: float) -> None:
        if self.group is not None and not self.group.gone:
            self.group.hasten(grace)

    def leave(self) -> None:
        """SIGTERM to the agent."""
        self.hear(_policy.StopRequested(15))

    def _end(self, kind: str, why: str) -> None:
        timeline = self.cluster.timeline
        self.outcome = AgentEnded(timeline.now, self.name, kind, why)
        self.cluster.note(self.outcome)
        self._queue.clear()
        self._soon(lambda: self.close(CLOSING))
        self.cluster.finished(self)

    # The sidecar.

    def pass_on(self, word: Word) -> None:
        """A word of the member goes to the agent."""
        if isinstance(word, RankAssignment):
            self._vigil = self._vigil.assigned()
        self._send(word)

    def _send(self, word: Word | Stopping) -> None:
        timeline, generation = self.cluster.timeline, self._vigil.generation

        def arrive() -> None:
            self._channel.append((generation, word))
            timeline.after(0.0, self.agent, self._read_channel)

        timeline.after(CHANNEL, None, arrive)

    def _read_channel(self) -> None:
        """Take all that has come."""
        if self.outcome is not None:
            return
        for generation, word in self._channel:
            if isinstance(word, ContactLost) and self._busy:
                self._hasten(word.grace)
            self._queue.append(Answer(generation, word) if isinstance(word, RankAssignment) else word)
        self._channel.clear()
        self._go_on()

    def give_up(self, why: str) -> None:
        """The member's part is over."""
        self._send(Stopping(why))

    def _join(self, generation: int) -> None:
        self._vigil = self._vigil.joins(generation)
        self.member.join()

    def _tell_stopped(self, number: int, notes: tuple[FailureNote, ...]) -> None:
        self._vigil = self._vigil.gone()
        self.member.report(Stopped(self.name, number, notes))

    def _tell_succeeded(self, number: int) -> None:
        self._vigil = self._vigil.gone()
        self.member.report(Succeeded(self.name, number))

    def _tell_left(self, why: str, number: int | None) -> None:
        if not self.cluster.leaves(self, why):
            self.member.report(Leave(self.name, why, number))

    def _guard(self, group: Group) -> None:
        self._guarded = group
        self._watch_over(group)

    def _watch_over(self, group: Group) -> None:
        """Kill the workers when they outlive the contact."""
        due = self.member.kill_at()
        if self._guarded is not group or not self._vigil.running or group.gone or due is None:
            return
        self._judge()
        if not self._vigil.due:
            self.member.at(due, lambda: self._watch_over(group))

    def _judge(self) -> None:
        now, held = self.member.clock(), self._vigil.held
        if self.agent.alive and self.agent.thaws_at <= self.cluster.timeline.now:
            self._vigil = self._vigil.said(now)  # its signs of life come all the time
        self._vigil = self._vigil.judge(now, self.member.kill_at())
        if self._vigil.held is not held:
            self.member.hold(self._vigil.held)
        if self._vigil.due and self._guarded is not None:
            self._guarded.kill()

    def lease_end(self) -> float:
        """Until when this machine's clock may show workers at work."""
        end = self._vigil.lease_end(self.member.kill_at())
        return -math.inf if end is None else end

    def agent_freezes(self, seconds: float) -> None:
        """The agent is stopped for *seconds*: its heartbeats must rest soon, and again be heard when it is back."""
        timeline = self.cluster.timeline

        def fell_silent() -> None:
            self._vigil = self._vigil.said(self.member.clock())
            wake = self._vigil.wake_at(None)
            if wake is not None:
                self.member.at(wake, self._judge)

        timeline.after(CHANNEL, self.rendezvous, fell_silent)
        timeline.after(seconds + CHANNEL, self.rendezvous, self._judge)

    def rendezvous_freezes(self, seconds: float) -> None:
        """The sidecar is stopped: the agent counts itself as cut off."""
        timeline, heartbeat = self.cluster.timeline, self.cluster.rules.heartbeat
        if heartbeat and seconds > DEAF * heartbeat:
            silent = "contact with the job is lost: the sidecar of this node does not answer"
            word = ContactLost(silent, GRACE * heartbeat)
            timeline.after(DEAF * heartbeat, self.agent, lambda: self._send(word))

    def rendezvous_dies(self) -> None:
        """The sidecar was killed: the agent ends its part, quickly."""
        why = "the sidecar of this node ended unexpectedly"
        heartbeat = self.cluster.rules.heartbeat
        self._send(ContactLost(why, GRACE * heartbeat))
        self._send(Stopping(why))

    def spawner_dies(self) -> None:
        """The process that starts the workers was killed, and they with it."""
        if self.group is not None and not self.group.gone:
            self.group.kill()

    def processes(self, *, of_workers: bool = True) -> list[Process]:
        """All that is there of this node."""
        groups = self.groups if of_workers else [group for group in self.groups if not group.gone]
        spawners = [group.spawner for group in groups]
        return [self.agent, self.rendezvous, *spawners, *(group.process for group in groups if of_workers)]

    def agent_dies(self) -> None:
        """The agent was killed: its reaper kills the workers, its sidecar bears witness."""
        timeline, group = self.cluster.timeline, self.group
        self._queue.clear()
        if group is not None and not group.gone:
            timeline.after(END, None, lambda: group.end("died"))
        timeline.after(2 * END, self.rendezvous, self._bear_witness)

    def _bear_witness(self) -> None:
        self._tell_left("its agent died", None)
        self.close(1.0)

    def close(self, linger: float) -> None:
        """Part from the job; then the process ends."""
        if self.closes:
            return
        self.closes = True
        if not self.member.is_over and self.outcome is not None and self.outcome.kind == "lost":
            self._tell_left("its agent ended without leaving the job", None)
        self.member.close()
        self.cluster.part(self, linger)
