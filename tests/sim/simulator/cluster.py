"""
A whole job on simulated machines: real decisions, simulated everything else.

    cluster = SimulatedCluster(Rules(2, 3, heartbeat=10.0), nodes=3, plan=FaultPlan([Kill(1, at=5.0)]))
    cluster.run()
    print(cluster.history, cluster.outcomes)

Real in it are the coordinator, each node's judgement of its contact, and each agent's policy. Nothing waits: a
minute of the job takes milliseconds. The same arguments give the same history, always.

Rules of this file: what may be asked for, and wiring; no decision of the job's.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from typing import Any

from attrs import define, evolve, field

from elasticlib.errors import ConfigError
from elasticlib.rendezvous._rdzv_options import HEARTBEAT
from elasticlib.rendezvous.coordinator import _coordinator
from elasticlib.rendezvous.coordinator._server_events import Abandon
from elasticlib.rendezvous.coordinator._state import JobState, Rules
from elasticlib.rendezvous.protocol._codec import key_of
from elasticlib.testing import Fault, FaultPlan, Replay, SetBack, Skew, Tamper
from tests.sim.simulator.adversary import Adversary
from tests.sim.simulator.candidate import Candidate
from tests.sim.simulator.group import Group
from tests.sim.simulator.history import AgentEnded, AgentStarted, Ended, Finalized, Happened, Observer, Record, TookOver
from tests.sim.simulator.host import Host, Outside, Saved, Uplink
from tests.sim.simulator.invariants import InvariantBroken, NoWatch, Watch, over
from tests.sim.simulator.machine import Machine
from tests.sim.simulator.member import FLAP
from tests.sim.simulator.network import Link, Network, Way
from tests.sim.simulator.node import LADDER, PARTING, Node
from tests.sim.simulator.store import Store
from tests.sim.simulator.timeline import Process, Timeline
from tests.sim.simulator.trouble import bring_about
from tests.sim.simulator.trust import Trust

NO_FAULTS = FaultPlan(())
RESTLESS = 200
"""Steps of a node in a second that are too many over a whole job: most make fifteen."""


@define(eq=False, repr=False)
class SimulatedCluster:
    """
    A job on *nodes* machines, to which *plan* happens. `run` it.

    With a *fixed* coordinator it and the store live on the first node's machine; an *elected* one may be any
    node, and the store is elsewhere; a *served* one lives with the store, and is not a node. Workers of a round
    succeed after *work* seconds. *rules* that name no heartbeat get that of real jobs, without which a dead
    machine would be waited for without end. Raises `ConfigError`.
    """

    rules: Rules
    nodes: int = 3
    plan: FaultPlan = NO_FAULTS
    coordinator: str = "fixed"
    seed: int = 0
    work: float = 60.0
    slots: int = 1
    """Workers of each node; a node has one more for each further place if `uneven`."""
    uneven: bool = True
    logic: Any = _coordinator
    """Module or object with the coordinator's functions, which makes the decisions."""
    count_bytes: bool = False
    most_bytes: int = 0
    """Most bytes that the store accepts in one value; 0: no limit."""
    token: str = ""
    """With one, all of the job's own know it; without, whoever can write to the store has a say in the job."""
    observer: Observer | None = None
    """Sees each step of every session and coordinator."""
    history: list[Record] = field(factory=list, init=False)
    timeline: Timeline = field(factory=Timeline, init=False)
    watches: dict[str, Watch] = field(factory=dict, init=False)
    """One for each job: who comes back to a machine whose store is gone, or where all is over, begins another."""
    machines: dict[int, Machine] = field(factory=dict, init=False)
    network: Network = field(init=False)
    state: JobState | None = field(default=None, init=False)
    """The coordinator's last state that counted."""
    store: Store | None = field(default=None, init=False)
    trust: Trust | None = field(default=None, init=False)
    _resets: Network = field(init=False)
    """Carries the ends of processes, with delays of its own: those of messages do not depend on them."""
    members: list[Node] = field(factory=list, init=False)
    _chance: random.Random = field(init=False)
    _tampered: bool = field(default=False, init=False)
    """True if a stranger may write to the store."""
    _hosts: dict[str, Host | Candidate] = field(factory=dict, init=False)
    _coordinators: list[Host] = field(factory=list, init=False)
    _left: int = field(default=0, init=False)
    """Agents that have not ended and faults that have not happened."""

    def __attrs_post_init__(self) -> None:
        self._check()
        if not self.rules.heartbeat:
            self.rules = evolve(self.rules, heartbeat=HEARTBEAT)
        self._chance = random.Random(self.seed)
        self.network = Network(self.timeline, random.Random(self.seed + 1))
        self._resets = Network(self.timeline, random.Random(self.seed + 2))
        self._tampered = any(isinstance(fault, Tamper) for fault in self.plan)
        if self._tampered and self.token:
            self.trust = Trust(self)
        if self.coordinator != "fixed":
            self._build_store(Process("store", self.timeline), Link(-1))
        if self.coordinator == "served":
            self._start_server()
        for fault in sorted(self.plan, key=lambda fault: fault.at):  # stable
            if isinstance(fault, Skew):
                bring_about(fault, self)
            else:
                self._left += 1
                self.timeline.at(fault.at, None, functools.partial(self._happen, fault))
        for number in range(self.nodes):
            # No two machines start a program at the same moment.
            moment = self._chance.random() * 0.05 if number else 0.0
            self._left += 1
            self.timeline.at(moment, None, functools.partial(self._start_agent, number))

    def _check(self) -> None:
        for name, kind in (("rules", Rules), ("plan", FaultPlan)):
            if not isinstance(value := getattr(self, name), kind):
                raise ConfigError(f"{name}={value!r:.80}: give {kind.__name__}(...)")
        if self.coordinator not in ("fixed", "elected", "served"):
            raise ConfigError(f"coordinator={self.coordinator!r}: give one of fixed, elected, served")
        for name in ("nodes", "slots"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name}={value!r:.80}: give a whole number, 1 or more")
        if isinstance(self.work, bool) or not isinstance(self.work, (int, float)) or not 0 <= self.work < math.inf:
            raise ConfigError(f"work={self.work!r:.80}: give a number of seconds, 0 or more")

    # What users ask for.

    @property
    def now(self) -> float:
        """Seconds since the job's start."""
        return self.timeline.now

    @property
    def outcomes(self) -> dict[str, AgentEnded]:
        """Outcome of each agent that has ended, by its name."""
        return {node.name: node.outcome for node in self.members if node.outcome is not None}

    @property
    def running(self) -> list[Group]:
        """The workers that run."""
        return [group for node in self.members for group in node.groups if not group.ended]

    def time_limit(self) -> float:
        """When everything must be over: no wait of any node, one after the other, is longer in total."""
        rules = self.rules
        one = rules.join_limit + rules.last_call + FLAP + 3 * rules.heartbeat + 40.0 + self.work
        return self.plan.last + (len(self.plan) + 3) * one

    def run(self, until: float | None = None) -> SimulatedCluster:
        """
        Let it happen: until that moment, or until every agent has ended and no fault is to come.

        Raises `InvariantBroken` as soon as a rule is broken, and when an agent waits for ever.
        """
        try:
            self._go_on(self.time_limit() if until is None else until, to_the_end=until is None)
            if until is not None:
                self.timeline.now = max(self.timeline.now, until)
                return self
            if self._tampered and not self.token:  # then a stranger can say that it is to wait
                self._end_by_hand()
            over(self.members)
        except InvariantBroken as broken:
            raise InvariantBroken(f"{broken}\n{self.describe()}") from None
        except Exception as error:
            if not self._tampered:
                raise
            what = f"at {self.now:.6f} s: a step raised {error!r:.400}"
            raise InvariantBroken(f"{what}\n{self.describe()}") from error
        return self

    def _go_on(self, limit: float, *, to_the_end: bool) -> None:
        most = self.timeline.steps + RESTLESS * (self.nodes + len(self.plan)) * max(60.0, limit - self.now)
        while (soon := self.timeline.next_at()) is not None and soon <= limit:
            if to_the_end and not self._left and not self.running:
                break
            if self.timeline.steps > most:
                raise InvariantBroken(f"the nodes do not come to rest: {self.timeline.steps} steps in {self.now:g} s")
            self.timeline.step()

    def _end_by_hand(self) -> None:
        """SIGTERM to every agent that is left."""
        for node in self.members:
            if node.agent.alive and node.outcome is None:
                self.timeline.at(self.now, node.agent, node.leave)
        self._go_on(self.now + 3 * LADDER, to_the_end=True)

    def describe(self) -> str:
        """The call that makes it happen again, and what happened."""
        arguments = f"{self.rules!r}, nodes={self.nodes}, plan={self.plan!r}, coordinator={self.coordinator!r}"
        token = f", token={self.token!r}" if self.token else ""
        call = f"SimulatedCluster({arguments}, seed={self.seed}, work={self.work}{token})"
        return "\n".join([call, *(f"  {record}" for record in self.history)])

    # What nodes need.

    @property
    def key(self) -> bytes | None:
        """Of the job's own."""
        return key_of(self.token) if self.token else None

    def watch(self, nonce: str) -> Watch:
        """Return the watch of the job that began with *nonce*."""
        if nonce not in self.watches:
            purged = 0 if self.store is None else self.store.purges
            # Whoever deletes all that a job has in a store makes room for another one of its name.
            if self.coordinator == "elected" and len(self.watches) > purged and not self._tampered:
                raise InvariantBroken(f"at {self.now:.6f} s: a job began anew though nobody had ended it")
            watch = NoWatch if self._tampered and not self.token else Watch
            self.watches[nonce] = watch(self)
            self.state = None
        return self.watches[nonce]

    def started(self, group: Group) -> None:
        """Workers run."""
        group.node.machine.has_workers(group.node)
        self.watch(group.node.member.nonce).started(group)
        if self.trust is not None:
            self.trust.started(group)

    def finished(self, node: Node) -> None:
        """An agent has ended."""
        self._left -= 1
        if (moment := node.machine.next_start(self.now)) is not None:
            self._left += 1
            self.timeline.at(moment, None, lambda: self._start_agent(node.number))

    def leaves(self, node: Node, why: str) -> bool:
        """Return whether the job ends because this node leaves."""
        host = self._hosts.get(node.name)
        if not isinstance(host, Host):
            return False
        if not host.server.is_over():
            host.notify(Abandon(f"node {node.name}, which hosts the job's store, left: {why}", node.name))
        return True

    def end_sidecar(self, node: Node, linger: float) -> None:
        """The sidecar ends, after what it hosts."""
        host = self._hosts.get(node.name)
        end = functools.partial(self.timeline.after, PARTING, node.rendezvous, lambda: self.end_process(node))
        if host is None or (isinstance(host, Host) and host.over):
            end()
            return
        if isinstance(host, Candidate):
            host.on_stopped = end
        # What the member has to say comes first.
        self.timeline.after(0.01, node.rendezvous, lambda: host.close(linger))

    def died(self, node: Node) -> None:
        """An agent was killed."""
        self._left -= node.outcome is None
        self.note_end(node)

    def note_end(self, node: Node) -> None:
        """A process of the node has ended: with the last one, coordinators see the end of their connections to it."""
        if not node.has_ended():
            return
        for host in self._coordinators:
            if not host.over:
                way = Way(self._resets, (node.member.link, host.node.member.link))
                way.send(host.node.rendezvous, functools.partial(host.node_ended, node.name))

    def end_process(self, node: Node) -> None:
        """A sidecar is gone, and with it the store, if it was there."""
        node.rendezvous.alive = False
        if self.store is not None and self.store.process is node.rendezvous:
            self.store.end()
        self.note_end(node)

    # What faults need.

    def _happen(self, fault: Fault) -> None:
        self._left -= 1
        self.history.append(Happened(self.now, fault))
        bring_about(fault, self)

    def join(self, number: int) -> None:
        """Start another agent there."""
        self._left += 1
        self._start_agent(number)

    # Its parts.

    def _build_store(self, process: Process, link: Link) -> Store:
        self.store = store = Store(process, link, self.network, self.count_bytes)
        store.on_save, store.most, store.has_election = self._saved, self.most_bytes, self.coordinator == "elected"
        if any(isinstance(fault, (Replay, SetBack, Tamper)) for fault in self.plan):
            store.adversary = Adversary(store)
        if self.trust is not None:
            store.on_write = self.trust.wrote
        return store

    def _start_server(self) -> None:
        assert self.store is not None
        server = Outside(self, self.store.process, Uplink(self.store.link))
        self.new_host(server, self.store, lambda why: None).start()

    def machine(self, number: int) -> Machine:
        """Return the machine with that number, switched on or not."""
        if number not in self.machines:
            self.machines[number] = Machine(number, Link(number))
        return self.machines[number]

    def _start_agent(self, number: int) -> None:
        machine = self.machine(number)
        if not machine.link.alive:
            machine.link = Link(number)
        name = f"n{number}/{100 + len(machine.nodes)}-{self._chance.getrandbits(32):08x}"
        first = self.coordinator == "fixed" and number == 0
        node = Node(number, name, self, machine, first)
        machine.nodes.append(node)
        self.members.append(node)
        self.history.append(AgentStarted(self.now, name))
        if first and (self.store is None or not self.store.process.alive or not self.store.link.alive):
            store = self._build_store(node.rendezvous, machine.link)
            self._hosts[name] = host = self.new_host(
                node, store, lambda why: self.end_process(node) if node.closes else None
            )
            host.start()
        elif self.coordinator == "elected":
            assert self.store is not None
            self._hosts[name] = candidate = Candidate(node, self.store)
            candidate.start()
        node.start()

    def dialled(self) -> Store:
        """Return the store that answers a connection made now."""
        if self.store is None:
            # Nobody listens yet: a machine that is there refuses.
            nobody = Process("nobody", self.timeline, alive=False)
            return Store(nobody, self.machine(0).link, self.network)
        return self.store

    def new_host(
        self, node: Node | Outside, store: Store, ended: Callable[[str], None], term: int | None = None
    ) -> Host:
        """Make *node* the coordinator from now on, and return its host."""
        self.history.append(TookOver(self.now, node.name))
        host = Host(node, store, f"{self._chance.getrandbits(64):016x}", ended, term)
        self._coordinators.append(host)
        return host

    def _saved(self, saved: Saved) -> None:
        for state in saved.way:
            self.decided(saved.nonce, state)

    def decided(self, nonce: str, state: JobState) -> None:
        """A coordinator's state counts now."""
        watch = self.watch(nonce)
        # Where nobody is left who was in a job that ended, nobody can tell that what it wrote down was put back.
        left = any(node.outcome is None and node.member.nonce == nonce for node in self.members)
        watch.may_forget = self._tampered or (SetBack in map(type, self.plan) and not left)
        before, self.state = self.state, state
        new = watch.decided(state)
        if new is not None:
            assert state.round is not None
            first, nodes = state.round.assignments[0], tuple(new.entries)
            record = Finalized(self.now, first.round, nodes, state.restarts, first.why, first.cause)
            self.history.append(record)
        end = state.round.end if state.round else None
        known = before.round.end if before is not None and before.round else None
        if end is not None and (known is None or known.round != end.round):
            self.history.append(Ended(self.now, end.round, end.why, end.restart))
