"""A node of a job whose peers somebody else's handler finds: seats, ends and outcomes are agreed all the same."""

from __future__ import annotations

import select
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest
from attrs import define, evolve, frozen

from elasticlib.errors import (
    ConfigError,
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousStateError,
)
from elasticlib.rendezvous import FailureNote, Final, RankAssignment, RoundEnd
from elasticlib.rendezvous._membership import MembershipEvent
from elasticlib.rendezvous.protocol._messages import Failed, Leave, Stopped, Succeeded, WorkerReport
from elasticlib.rendezvous.third_party._member import HandlerMember

LIMIT = 30.0
T = TypeVar("T")


class DictStore:
    """Store with the needed methods: its keys lie under a prefix of a shared dictionary."""

    def __init__(self, values: dict[str, Any], lock: threading.Lock, prefix: str) -> None:
        self.values, self.lock, self.prefix = values, lock, prefix

    def set(self, key: str, value: bytes) -> None:
        with self.lock:
            self.values[self.prefix + key] = value

    def get(self, key: str) -> bytes:
        with self.lock:
            return bytes(self.values[self.prefix + key])

    def add(self, key: str, amount: int) -> int:
        with self.lock:
            self.values[self.prefix + key] = self.values.get(self.prefix + key, 0) + amount
            return int(self.values[self.prefix + key])

    def check(self, keys: list[str]) -> bool:
        with self.lock:
            return all(self.prefix + key in self.values for key in keys)


@frozen
class Address:
    master_addr: str
    master_port: int


@frozen
class Info:
    store: Any
    rank: int
    world_size: int
    bootstrap_store_info: Any = Address("10.9.8.7", 4321)


class Meeting:
    """A rendezvous as others write them: a round is complete when *size* nodes have come."""

    def __init__(self, size: int, one_store: bool = False) -> None:
        self.size, self.one_store = size, one_store
        self.turned = threading.Condition()
        self.arrived: list[Handler] = []
        self.rounds = 0
        self.closed = False
        self.values: dict[str, Any] = {}
        self.lock = threading.Lock()
        self.shared = False
        self.broken: Exception | None = None


@define(eq=False, slots=False)
class Handler:
    """One node's handle on a meeting."""

    meeting: Meeting
    place: Info | None = None
    shut: bool = False

    @property
    def use_agent_store(self) -> bool:
        return self.meeting.shared

    def next_rendezvous(self) -> Info:
        meeting = self.meeting
        with meeting.turned:
            self.place, found = None, self._found
            meeting.arrived.append(self)
            if len(meeting.arrived) == meeting.size:
                prefix = "" if meeting.one_store else f"{meeting.rounds}/"
                for rank, handler in enumerate(meeting.arrived):
                    store = DictStore(meeting.values, meeting.lock, prefix)
                    handler.place = Info(store, rank, meeting.size)
                meeting.arrived, meeting.rounds = [], meeting.rounds + 1
                meeting.turned.notify_all()
            meeting.turned.wait_for(lambda: found() is not None or meeting.closed)
            if (place := found()) is None:
                raise RendezvousClosedError("the meeting is closed")
            return place

    def _found(self) -> Info | None:
        return self.place

    def num_nodes_waiting(self) -> int:
        if self.meeting.broken is not None:
            raise self.meeting.broken
        return len(self.meeting.arrived)

    def is_closed(self) -> bool:
        return self.meeting.closed

    def set_closed(self) -> None:
        with self.meeting.turned:
            self.meeting.closed = True
            self.meeting.turned.notify_all()

    def shutdown(self) -> bool:
        self.shut = True
        self.set_closed()
        return True


class Cluster:
    """Members of one meeting; `close` them all at the end."""

    def __init__(self) -> None:
        self.members: list[HandlerMember] = []

    def member(self, handler: Any, **options: Any) -> HandlerMember:
        self.members.append(HandlerMember(handler, monitor_interval=0.005, **options))
        return self.members[-1]

    def close(self) -> None:
        for member in self.members:
            if isinstance(handler := member._handler, Handler):
                handler.set_closed()
            member.close()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    yield cluster
    cluster.close()


def take(member: HandlerMember) -> MembershipEvent:
    """Return the next event, which must be the only one."""
    assert select.select([member], [], [], LIMIT)[0], f"no event within {LIMIT:g} s"
    [event] = member.drain()
    return event


def expect(kind: type[T], member: HandlerMember) -> T:
    event = take(member)
    assert isinstance(event, kind), event
    return event


class Team:
    """Members of one meeting, at work in a round."""

    def __init__(self, cluster: Cluster, meeting: Meeting | None = None, **options: Any) -> None:
        self.meeting = meeting or Meeting(2)
        self.members = [cluster.member(Handler(self.meeting), **options) for _ in range(self.meeting.size)]
        self.assignments = self.join()

    def join(self) -> list[RankAssignment]:
        for member in self.members:
            member.join(1, "trainer")
        self.assignments = self.each(RankAssignment)
        return self.assignments

    def post(self, place: int, kind: type[WorkerReport], *notes: FailureNote) -> None:
        """The member at this place reports on its round."""
        report = (self.members[place].node, self.assignments[place].round)
        self.members[place].post(Succeeded(*report) if kind is Succeeded else kind(*report, notes))  # type: ignore[call-arg, arg-type]

    def leave(self, place: int) -> None:
        self.members[place].post(Leave(self.members[place].node, "signal 15", self.assignments[place].round))

    def each(self, kind: type[T]) -> list[T]:
        """Return the next event of each member, which must be of this *kind*."""
        return [expect(kind, member) for member in self.members]


def note(rank: int = 0, message: str = "boom", age: float = 0.0, secondary: bool = False) -> FailureNote:
    return FailureNote(rank, rank, 10, 1, message, secondary=secondary, age=age)


def test_seats_are_agreed_for_nodes_with_different_slots_and_roles(cluster: Cluster) -> None:
    meeting = Meeting(2)
    a, b = (cluster.member(Handler(meeting)) for _ in range(2))
    a.join(2, "reader")
    b.join(3, "trainer")

    assignments = sorted(
        (expect(RankAssignment, a), expect(RankAssignment, b)), key=lambda assignment: assignment.role_world_size
    )

    assert [(2, 5, 0, 2), (3, 5, 0, 3)] == [
        (assignment.role_world_size, assignment.world_size, assignment.role_rank_base, assignment.role_world_size)
        for assignment in assignments
    ]
    assert {(0, 0), (1, 2)} == {(assignment.group_rank, assignment.rank_base and 2) for assignment in assignments}
    assert 1 == len(
        {(assignment.round, assignment.master_addresses, assignment.master_port) for assignment in assignments}
    )


def test_rank_0_binds_the_socket_of_the_workers_store(cluster: Cluster) -> None:
    team = Team(cluster, local_addr="127.0.0.1")

    for member, assignment in zip(team.members, team.assignments, strict=True):
        listener = member.listener()
        assert (listener is not None) == (assignment.group_rank == 0)
        if listener is not None:
            with listener:
                place = assignment.master_addresses, assignment.master_port
                assert (("127.0.0.1",), listener.getsockname()[1]) == place


def test_a_handlers_own_store_serves_workers_of_one_round_only(cluster: Cluster) -> None:
    """It keeps their keys."""
    meeting = Meeting(1)
    meeting.shared = True
    team = Team(cluster, meeting)
    [member], [first] = team.members, team.assignments
    served_by_the_handler = member.listener() is None
    team.post(0, Failed, note())
    expect(RoundEnd, member)
    [second] = team.join()
    listener = member.listener()

    assert served_by_the_handler
    assert (("10.9.8.7",), 4321) == (first.master_addresses, first.master_port)
    assert listener is not None
    with listener:
        assert (("127.0.0.1",), listener.getsockname()[1]) == (second.master_addresses, second.master_port)


def test_a_failure_restarts_all_nodes_and_is_counted_once_for_the_job(cluster: Cluster) -> None:
    team = Team(cluster, max_restarts=2)
    number = team.assignments[0].round
    team.post(0, Failed, note(3, "out of luck"))

    first, second = team.each(RoundEnd)

    assert first == second and first.restart
    assert "rank 3" in first.why and "out of luck; restart 1 of 2" in first.why
    assert [(number + 1, 1)] * 2 == [(its.round, its.restart_count) for its in team.join()]


def test_a_store_that_a_node_loses_after_its_success_is_the_cause_for_all(cluster: Cluster) -> None:
    team = Team(cluster, max_restarts=1)
    team.post(0, Succeeded)
    team.post(0, Failed, note(0, "the store is gone"))

    assert [True, True] == ["the store is gone; restart 1 of 1" in end.why for end in team.each(RoundEnd)]


def test_failures_of_several_nodes_at_once_are_one_restart(cluster: Cluster) -> None:
    team = Team(cluster, max_restarts=1)
    for place in (0, 1):
        team.post(place, Failed, note())

    assert [True, True] == [end.restart for end in team.each(RoundEnd)]
    assert [1, 1] == [assignment.restart_count for assignment in team.join()]


def test_restarts_of_different_nodes_spend_one_budget(cluster: Cluster) -> None:
    team = Team(cluster, max_restarts=1)
    team.post(0, Failed, note())
    team.each(RoundEnd)
    team.join()

    team.post(1, Failed, note())

    assert [False, False] == [end.restart for end in team.each(RoundEnd)]


@pytest.mark.parametrize(
    ("restarts", "root", "reason"),
    [
        (0, note(1, "disk full", age=2.0), "disk full; no restart is left"),
        (
            3,
            evolve(note(1, "in uninterruptible sleep", age=2.0), fatal=True),
            "in uninterruptible sleep; a restart would fail again",
        ),
    ],
    ids=["no restart is left", "fatal"],
)
def test_without_a_restart_all_nodes_name_the_same_root_cause(
    cluster: Cluster, restarts: int, root: FailureNote, reason: str
) -> None:
    team = Team(cluster, max_restarts=restarts)
    lost = note(0, "connection reset", age=5.0, secondary=True)
    team.post(0, Failed, lost, root, note(2, age=1.0))
    ends = team.each(RoundEnd)
    team.post(1, Stopped, note(7, "stopped later"))
    team.post(0, Stopped, lost, root)

    first, second = team.each(Final)

    assert [False, False] == [end.restart for end in ends]
    assert first == second
    assert (False, team.members[0].node, root) == (first.succeeded, first.root_node, first.root)
    assert reason in first.why


def test_the_root_cause_may_lie_on_another_node_than_the_first_failure(cluster: Cluster) -> None:
    """A lost connection is often seen before the death that caused it."""
    team = Team(cluster, max_restarts=0)
    lost, root = note(0, "connection reset", secondary=True), note(1, "out of memory")
    team.post(0, Failed, lost)
    team.each(RoundEnd)
    team.post(0, Stopped, lost)
    early = select.select([team.members[0]], [], [], 0.05)[0]
    team.post(1, Stopped, root)

    first, second = team.each(Final)

    assert [] == early
    assert first == second
    assert (team.members[1].node, root) == (first.root_node, first.root)


def test_a_node_that_leaves_after_the_last_round_holds_nobody_up(cluster: Cluster) -> None:
    team = Team(cluster, max_restarts=0)
    team.post(0, Failed, note())
    team.each(RoundEnd)
    team.leave(1)
    team.post(0, Stopped, note())

    final = expect(Final, team.members[0])

    assert (team.members[0].node, note()) == (final.root_node, final.root)


def test_the_handler_is_shut_down_when_all_nodes_succeeded(cluster: Cluster) -> None:
    team = Team(cluster)
    team.post(0, Succeeded)
    early = select.select([team.members[0]], [], [], 0.05)[0]
    team.post(1, Succeeded)

    finals = team.each(Final)
    for member in team.members:
        member.close()

    assert [] == early
    assert [True, True] == [final.succeeded for final in finals]
    assert [True, True] == [getattr(member._handler, "shut", None) for member in team.members]


def test_a_node_that_succeeded_takes_part_again_when_a_peer_fails(cluster: Cluster) -> None:
    team = Team(cluster)
    team.post(0, Succeeded)
    team.post(1, Failed, note())

    assert [True, True] == [end.restart for end in team.each(RoundEnd)]


def test_waiting_nodes_end_the_round_without_spending_a_restart(cluster: Cluster) -> None:
    team = Team(cluster, Meeting(1))
    number = team.assignments[0].round
    team.meeting.size = 2
    newcomer = cluster.member(Handler(team.meeting))
    newcomer.join(1, "trainer")

    [end] = team.each(RoundEnd)
    [again] = team.join()

    assert (True, "1 nodes wait to join") == (end.restart, end.why)
    assert (number + 1, 2, 0) == (again.round, again.group_world_size, again.restart_count)
    assert again.round == expect(RankAssignment, newcomer).round


def test_an_arrival_does_not_undo_work_that_a_node_has_finished(cluster: Cluster) -> None:
    team = Team(cluster)
    team.post(0, Succeeded)
    select.select([team.members[0]], [], [], 0.02)
    team.meeting.arrived.append(Handler(team.meeting))
    quiet = select.select(team.members, [], [], 0.05)[0]
    team.post(1, Succeeded)

    assert [] == quiet
    assert [True, True] == [final.succeeded for final in team.each(Final)]


def test_node_with_silent_peers_leaves_after_the_barrier(cluster: Cluster) -> None:
    team = Team(cluster, barrier=0.05)
    team.post(0, Succeeded)

    final = expect(Final, team.members[0])

    assert final.succeeded
    assert "1 of 2 nodes succeeded" in final.why


def test_a_closed_rendezvous_ends_running_nodes(cluster: Cluster) -> None:
    team = Team(cluster, Meeting(1))
    team.meeting.closed = True

    [final] = team.each(Final)

    assert (False, "closed") == (final.succeeded, final.kind)


def test_a_node_that_leaves_sends_the_others_to_a_new_round(cluster: Cluster) -> None:
    team = Team(cluster)
    team.leave(0)

    final, end = expect(Final, team.members[0]), expect(RoundEnd, team.members[1])
    team.members[0].close()

    assert (False, "left", True) == (final.succeeded, final.kind, end.restart)
    assert "signal 15" in end.why
    assert not team.meeting.closed


class RendezvousGracefulExitError(Exception):
    """As a foreign library names its own."""


class RendezvousTimeoutError(Exception):
    """As a foreign library names its own."""


class SpecialClosedError(RendezvousClosedError):
    """Derived from one that is known."""


@pytest.mark.parametrize(
    ("error", "final"),
    [
        (RendezvousGracefulExitError("enough"), Final(True, "enough")),
        (RendezvousTimeoutError("too late"), Final(False, "too late", kind="timeout")),
        (SpecialClosedError("shut"), Final(False, "shut", kind="closed")),
    ],
)
def test_orderly_ends_of_a_handler_are_known_by_the_names_of_their_errors(
    cluster: Cluster, error: Exception, final: Final
) -> None:
    handler = Handler(Meeting(1))
    handler.next_rendezvous = raiser(error)  # type: ignore[method-assign]
    member = cluster.member(handler)
    member.join(1, "trainer")

    event = take(member)

    assert final == event


def raiser(error: Exception) -> Callable[[], Any]:
    def raise_it() -> None:
        raise error

    return raise_it


foreign_connection_error = type("RendezvousConnectionError", (Exception,), {})


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (foreign_connection_error("no route"), RendezvousConnectionError),
        (RendezvousStateError("no route"), RendezvousStateError),
        (KeyError("no route"), RendezvousError),
    ],
)
def test_other_errors_of_a_handler_are_raised_to_the_agent(
    cluster: Cluster, error: Exception, kind: type[RendezvousError]
) -> None:
    team = Team(cluster, Meeting(1))
    [member] = team.members
    team.meeting.broken = error
    select.select([member], [], [], LIMIT)

    with pytest.raises(RendezvousError, match="no route") as raised:
        member.drain()

    assert kind is raised.type


def test_handler_that_does_not_answer_is_noticed_and_blocks_no_agent(cluster: Cluster) -> None:
    thawed = threading.Event()
    [member] = Team(cluster, Meeting(1), silence=0.05).members
    member._handler.num_nodes_waiting = thawed.wait  # type: ignore[method-assign]
    with pytest.raises(RendezvousConnectionError, match="Handler has not answered for"):
        while not member.drain():
            select.select([member], [], [], member.poll_timeout())

    thawed.set()


def test_closing_does_not_wait_for_a_handler_that_seeks_peers(cluster: Cluster) -> None:
    handler, begun, thawed = Handler(Meeting(1)), threading.Event(), threading.Event()

    def seek() -> Info:
        begun.set()
        thawed.wait(LIMIT)
        raise RendezvousClosedError("thawed")

    handler.next_rendezvous = seek  # type: ignore[method-assign]
    member = cluster.member(handler)
    member.join(1, "trainer")
    begun.wait(LIMIT)
    member.close()

    assert member._thread.is_alive()
    assert [] == member.drain()
    thawed.set()


def test_reports_after_closing_are_refused(cluster: Cluster) -> None:
    member = cluster.member(Handler(Meeting(1)))
    member.close()

    with pytest.raises(RendezvousClosedError, match="has closed its rendezvous and cannot send Seek"):
        member.join(1, "trainer")


def test_store_with_keys_of_earlier_rounds_gives_no_stale_ranks(cluster: Cluster) -> None:
    team = Team(cluster, Meeting(2, one_store=True), max_restarts=20)
    rounds = []
    for _ in range(20):
        rounds.append({assignment.round for assignment in team.assignments})
        team.post(0, Failed, note())
        team.each(RoundEnd)
        team.join()

    assert [{number} for number in range(20)] == rounds


@pytest.mark.parametrize("scribble", [b"", b"\x80", b"{}", b'{"v":1,"type":"final"}', b"1 2 3"])
def test_a_scribble_in_the_store_is_a_state_error(cluster: Cluster, scribble: bytes) -> None:
    team = Team(cluster, Meeting(1))
    [member], values = team.members, team.meeting.values
    nonce = values["0/elasticlib/call"].decode()
    values[f"0/elasticlib/{nonce}/ended"] = scribble
    select.select([member], [], [], LIMIT)

    with pytest.raises(RendezvousStateError):
        member.drain()


def test_refusal_of_an_invalid_handler_names_its_missing_methods() -> None:
    with pytest.raises(ConfigError, match="rdzv_handler=3 is not a rendezvous handler: it lacks next_rendezvous"):
        HandlerMember(3)
