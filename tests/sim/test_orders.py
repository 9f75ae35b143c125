"""
The coordinator alone with several nodes, each step chosen by Hypothesis, in no time and on no network.

Reports wait in the inbox and notices in each node's mailbox until a step delivers them, so every order and
delay that a store allows is tried. The invariants are checked after every step; when the faults stop,
the job must end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from attrs import Factory, define, field
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from elasticlib.rendezvous.coordinator._coordinator import step
from elasticlib.rendezvous.coordinator._state import Entry, JobState, MessageReceived, Rules, Send, Tick, WakeAt
from elasticlib.rendezvous.protocol._exchange import mailbox_name
from elasticlib.rendezvous.protocol._messages import (
    Descriptor,
    Failed,
    FailureNote,
    Final,
    Join,
    Leave,
    Notice,
    RankAssignment,
    Report,
    RoundEnd,
    Stopped,
    Succeeded,
)

NAMES = ("node1", "node2", "node10", "node3")
ENOUGH_STEPS = 200
nodes = st.sampled_from(NAMES)
ORDER_IN_A_BOX = ("ranks", "end", "cause", "outcome")
"""A round ends at once; its cause may follow when it is decided."""


def kind_of(notice: Notice) -> str:
    match notice:
        case RankAssignment():
            return "ranks"
        case RoundEnd(decided=decided):
            return "cause" if decided else "end"
    return "outcome"


@define
class Node:
    """An agent as small as can be: it says what befell its workers and obeys notices."""

    name: str
    post: Callable[[int, Report], None]
    seq: int = 0
    ports: int = 1000
    inside: bool = False
    """Joined, and neither left nor told the outcome."""
    mailbox: str = ""
    outbox: deque[Notice] = Factory(deque)
    assignment: RankAssignment | None = None
    workers: bool = False
    failures: tuple[FailureNote, ...] = ()
    succeeded: int = -1
    stopping: RoundEnd | None = None
    leaving: bool = False
    outcomes: list[Final] = Factory(list)

    def join(self, **of_new_sidecar: Any) -> None:
        self.ports += 1
        self.assignment, self.stopping, self.failures, self.inside, self.leaving = None, None, (), True, False
        self.outbox.clear()
        slots = 1 + NAMES.index(self.name)
        role = "trainer" if slots % 2 else "reader"
        self.say(Join(self.name, Descriptor(slots, role, (self.name,), self.ports), **of_new_sidecar))
        self.mailbox = mailbox_name(self.name, self.seq)

    def say(self, report: Report) -> None:
        self.seq += 1
        self.post(self.seq, report)

    def may_fail(self) -> bool:
        return self.workers and not self.failures and not self.stopping and not self.leaving

    def fail(self, secondary: bool) -> None:
        if self.assignment and self.may_fail():
            self.failures = (FailureNote(self.assignment.rank_base, 0, 1, 1, secondary=secondary),)
            self.say(Failed(self.name, self.assignment.round, self.failures))

    def succeed(self) -> None:
        if self.assignment and self.may_fail():
            self.workers, self.succeeded = False, self.assignment.round
            self.say(Succeeded(self.name, self.assignment.round))

    def stop(self) -> None:
        if self.assignment and self.workers and (self.failures or self.stopping or self.leaving):
            self.workers = False
            self.say(Stopped(self.name, self.assignment.round, self.failures))
        elif self.inside and not self.workers and self.stopping and self.stopping.restart:
            self.join()

    def leave(self) -> None:
        if self.inside:
            self.inside, self.leaving = False, self.workers
            self.say(Leave(self.name, "SIGTERM", self.assignment.round if self.assignment and self.workers else None))

    def rejoin(self) -> None:
        """The agent died, its workers with it, and a new one joins under its name."""
        self.workers = False
        self.join()

    def lose_sidecar(self) -> None:
        """Its workers end, and the next sidecar asks for ranks."""
        self.workers = False
        self.seq += 1000
        self.join(after="its sidecar was killed", succeeded=self.succeeded)

    def drain(self) -> None:
        notice = self.outbox.popleft()
        match notice:
            case RankAssignment():
                assert self.assignment is None and not self.workers
                self.assignment, self.workers = notice, self.inside  # who has left starts nothing
            case RoundEnd() if self.assignment is None:
                assert notice.decided  # why the round before ended: this node has left it, and waits
            case RoundEnd():
                assert notice.round == self.assignment.round
                self.stopping = notice
            case Final():
                self.inside = False
                self.stopping = self.stopping or RoundEnd(-1, notice.why, False)
                self.outcomes.append(notice)


@define
class Cluster:
    """Coordinator, inbox, mailboxes and clock."""

    rules: Rules
    state: JobState = field(init=False)
    now: float = 0.0
    wake_at: float | None = None
    inbox: deque[MessageReceived] = Factory(deque)
    past: list[MessageReceived] = Factory(list)
    mailboxes: dict[str, list[Notice]] = Factory(dict)
    nodes: dict[str, Node] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.state = JobState(self.rules)
        self.nodes = {name: Node(name, self.post) for name in NAMES}
        self.feed(Tick())

    def post(self, seq: int, report: Report) -> None:
        self.inbox.append(MessageReceived(seq, report))

    def lose(self, name: str, most: int) -> None:
        """Of what the node has said and nobody has read, *most* messages were not passed on by its sidecar."""
        own = [event for event in self.inbox if event.report.node == name]
        self.inbox = deque(event for event in self.inbox if event not in own[max(0, len(own) - most) :])
        self.nodes[name].lose_sidecar()

    def deliver(self) -> None:
        event = self.inbox.popleft()
        self.past.append(event)
        self.feed(event)

    def feed(self, event: MessageReceived | Tick) -> None:
        self.wake_at = None
        self.state, actions = step(self.state, event, self.now)
        for action in actions:
            match action:
                case WakeAt(when=when):
                    assert when > self.now
                    self.wake_at = when
                case Send(mailbox=mailbox, node=name, notice=notice):
                    self.mailboxes.setdefault(mailbox, []).append(notice)
                    if isinstance(notice, RankAssignment):
                        running = [node.name for node in self.nodes.values() if node.workers]
                        assert not running, f"round {notice.round} starts while workers of {running} run"
                    if self.nodes[name].mailbox == mailbox:
                        self.nodes[name].outbox.append(notice)


class ClusterMachine(RuleBasedStateMachine):
    @initialize(
        least=st.integers(1, 3),
        more=st.integers(0, 3),
        restarts=st.integers(0, 4),
        call=st.sampled_from((0.0, 30.0)),
        departures=st.integers(0, 3),
        long_waits=st.integers(0, 1),
    )
    def begin(self, least: int, more: int, restarts: int, call: float, departures: int, long_waits: int) -> None:
        self.cluster = Cluster(Rules(least, least + more, restarts, last_call=call, join_timeout=600.0))
        self.sealed: dict[int, tuple[dict[str, Entry], tuple[RankAssignment, ...]]] = {}
        self.final: Final | None = None
        self.departures, self.long_waits = departures, long_waits
        for name in NAMES[:least]:
            self.cluster.nodes[name].join()

    # --- what may happen

    @rule(name=nodes)
    def a_node_arrives(self, name: str) -> None:
        node = self.cluster.nodes[name]
        if not node.inside and not node.workers:
            node.join()

    @precondition(lambda self: self.who_runs())
    @rule(data=st.data(), secondary=st.booleans())
    def workers_fail(self, data: st.DataObject, secondary: bool) -> None:
        data.draw(st.sampled_from(self.who_runs())).fail(secondary)

    @precondition(lambda self: self.who_runs())
    @rule(data=st.data())
    def workers_succeed(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.who_runs())).succeed()

    @rule(name=nodes)
    def a_node_continues_stopping(self, name: str) -> None:
        self.cluster.nodes[name].stop()

    @precondition(lambda self: self.departures > 0)
    @rule(name=nodes, anew=st.booleans())
    def a_node_leaves_or_its_agent_is_replaced(self, name: str, anew: bool) -> None:
        node = self.cluster.nodes[name]
        if node.inside:
            self.departures -= 1
            node.rejoin() if anew else node.leave()

    @precondition(lambda self: self.departures > 0)
    @rule(name=nodes, most=st.integers(0, 3))
    def a_sidecar_is_replaced(self, name: str, most: int) -> None:
        if self.cluster.nodes[name].inside:
            self.departures -= 1
            self.cluster.lose(name, most)

    @rule(name=nodes)
    def a_node_takes_a_notice(self, name: str) -> None:
        if self.cluster.nodes[name].outbox:
            self.cluster.nodes[name].drain()

    @rule()
    def everything_under_way_arrives(self) -> None:
        self.calm_down()

    @rule(count=st.integers(1, 8))
    def reports_arrive(self, count: int) -> None:
        for _ in range(min(count, len(self.cluster.inbox))):
            self.cluster.deliver()
            self.check()

    @rule(data=st.data())
    def a_report_arrives_again(self, data: st.DataObject) -> None:
        if self.cluster.past:
            before = self.cluster.state
            mailboxes = {mailbox: list(notices) for mailbox, notices in self.cluster.mailboxes.items()}
            wake_at = self.cluster.wake_at
            self.cluster.feed(data.draw(st.sampled_from(self.cluster.past)))
            if wake_at is None or self.cluster.now < wake_at:
                assert (before, mailboxes) == (self.cluster.state, self.cluster.mailboxes)

    @rule(seconds=st.sampled_from((0.1, 10.0, 29.9, 30.0)))
    def time_passes(self, seconds: float) -> None:
        self.cluster.now += seconds
        self.cluster.feed(Tick())

    @precondition(lambda self: self.long_waits > 0)
    @rule()
    def the_join_time_passes(self) -> None:
        self.long_waits -= 1
        self.cluster.now += self.cluster.rules.join_timeout
        self.cluster.feed(Tick())

    # --- what must hold after every step

    @invariant()
    def check(self) -> None:
        if hasattr(self, "cluster"):
            self.check_rounds()
            self.check_boxes()
            self.check_final()

    def check_rounds(self) -> None:
        cluster = self.cluster
        current = cluster.state.round
        if current is None:
            return
        sealed = (dict(current.entries), current.assignments)
        if current.number not in self.sealed:
            assert len(self.sealed) == current.number, "a round number was left out"
            self.check_seats(sealed)
            former, _ = self.sealed.get(current.number - 1, ({}, ()))
            unfinished = [name for name in former if cluster.nodes[name].succeeded < current.number - 1]
            assert unfinished or not former, "a round that succeeded on all its nodes is repeated"
            self.sealed[current.number] = sealed
        assert sealed == self.sealed[current.number], "a sealed round has changed"
        assert max(self.sealed) == current.number, "a former round is open again"
        assert cluster.state.restarts <= cluster.rules.max_restarts

    def check_seats(self, sealed: tuple[dict[str, Entry], tuple[RankAssignment, ...]]) -> None:
        entries, assignments = sealed
        rules = self.cluster.rules
        assert rules.min_nodes <= len(assignments) <= rules.max_nodes
        ranks: list[int] = []
        for place, (entry, assignment) in enumerate(zip(entries.values(), assignments, strict=True)):
            assert (place, len(assignments)) == (assignment.group_rank, assignment.group_world_size)
            ranks += range(assignment.rank_base, assignment.rank_base + entry.descriptor.slots)
        assert list(range(len(ranks))) == ranks
        first = next(iter(entries.values())).descriptor
        agreed = {
            (assignment.world_size, assignment.master_addresses, assignment.master_port, assignment.restart_count)
            for assignment in assignments
        }
        assert {(len(ranks), first.addresses, first.store_port, self.cluster.state.restarts)} == agreed

    def check_boxes(self) -> None:
        for notices in self.cluster.mailboxes.values():
            if notices and kind_of(notices[0]) == "cause":
                notices = notices[1:]  # of the round before, whose workers this node has stopped
            kinds = [kind_of(notice) for notice in notices]
            expected = [kind for kind in ORDER_IN_A_BOX if kind in kinds]
            assert expected == kinds, "a box holds a notice twice or out of turn"
            rounds = [notice.round for notice in notices if isinstance(notice, (RankAssignment, RoundEnd))]
            assert len(set(rounds)) <= 1, "a box holds notices of two rounds"

    def check_final(self) -> None:
        final = self.cluster.state.final
        if self.final is not None:
            assert final is self.final, "the verdict has changed"
        self.final = final
        for notices in self.cluster.mailboxes.values():
            for notice in notices:
                if isinstance(notice, Final):
                    assert notice == final or (not notice.succeeded and notice.kind in ("left", "closed"))

    # --- what must come in the end

    def teardown(self) -> None:
        if not hasattr(self, "cluster"):
            return
        cluster = self.cluster
        present = [node for node in cluster.nodes.values() if node.inside]
        on_the_way = [event.report for event in cluster.inbox]
        troubled = any(isinstance(report, Leave) or getattr(report, "failures", ()) for report in on_the_way)
        ending = cluster.state.round and cluster.state.round.end and not cluster.state.round.end.restart
        decided = cluster.state.final is not None or bool(ending)
        for _ in range(ENOUGH_STEPS):
            if cluster.state.final and not cluster.inbox and not any(node.outbox for node in cluster.nodes.values()):
                break
            self.go_on()
            self.check()
        assert cluster.state.final is not None, "the job never ends"
        for node in cluster.nodes.values():
            node.stop()
            assert not node.inside, f"{node.name} is never told the verdict"
            assert not node.workers, f"workers of {node.name} are never told to stop"
        if len(present) >= cluster.rules.min_nodes and not troubled and not decided:
            assert cluster.state.final.succeeded, f"enough nodes stayed, but: {cluster.state.final.why}"

    def go_on(self) -> None:
        """Everything that is under way arrives, and no worker fails any more."""
        idle = not self.calm_down() and not self.who_runs()
        for node in self.who_runs():
            node.succeed()
        cluster = self.cluster
        if idle and not cluster.inbox and cluster.wake_at is not None:
            cluster.now = cluster.wake_at
            cluster.feed(Tick())

    def calm_down(self) -> bool:
        """Each report and notice that is under way arrives, and each node obeys; whether there was any."""
        cluster = self.cluster
        busy = bool(cluster.inbox)
        while cluster.inbox:
            cluster.deliver()
            self.check()
        for node in cluster.nodes.values():
            while node.outbox:
                node.drain()
                busy = True
            node.stop()
        return busy

    def who_runs(self) -> list[Node]:
        return [node for node in self.cluster.nodes.values() if node.may_fail()]


TestCluster = ClusterMachine.TestCase
TestCluster.settings = settings(stateful_step_count=50, report_multiple_bugs=False)
