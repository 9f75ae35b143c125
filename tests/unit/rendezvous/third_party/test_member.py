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
from elasticlib.rendezvous._membership import Word
from elasticlib.rendezvous.protocol._messages import Failed, Leave, Stopped, Succeeded
from elasticlib.rendezvous.third_party._member import HandlerMember

LIMIT = 30.0
T = TypeVar("T")


class DictStore:
    """What is asked of a store, with keys under a prefix of a shared dictionary."""

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
        self.came: list[Handler] = []
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
            meeting.came.append(self)
            if len(meeting.came) == meeting.size:
                prefix = "" if meeting.one_store else f"{meeting.rounds}/"
                for rank, handler in enumerate(meeting.came):
                    store = DictStore(meeting.values, meeting.lock, prefix)
                    handler.place = Info(store, rank, meeting.size)
                meeting.came, meeting.rounds = [], meeting.rounds + 1
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
        return len(self.meeting.came)

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


def take(member: HandlerMember) -> Word:
    """The next word, which must be the only one."""
    assert select.select([member], [], [], LIMIT)[0], f"no word within {LIMIT:g} s"
    [word] = member.drain()
    return word


def expect(kind: type[T], member: HandlerMember) -> T:
    word = take(member)
    assert isinstance(word, kind), word
    return word


def assigned(cluster: Cluster, *members: HandlerMember) -> list[RankAssignment]:
    for member in members:
        member.join(1, "trainer")
    return [expect(RankAssignment, member) for member in members]


def pair(cluster: Cluster, meeting: Meeting, **options: Any) -> tuple[HandlerMember, HandlerMember]:
    return cluster.member(Handler(meeting), **options), cluster.member(Handler(meeting), **options)


def note(rank: int = 0, message: str = "boom", age: float = 0.0, secondary: bool = False) -> FailureNote:
    return FailureNote(rank, rank, 10, 1, message, secondary=secondary, age=age)


def test_seats_are_agreed_for_nodes_with_different_slots_and_roles(cluster: Cluster) -> None:
    a, b = pair(cluster, Meeting(2))
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
    members = pair(cluster, Meeting(2), local_addr="127.0.0.1")

    assignments = assigned(cluster, *members)

    for member, assignment in zip(members, assignments, strict=True):
        listener = member.listener()
        assert (listener is not None) == (assignment.group_rank == 0)
        if listener is not None:
            with listener:
                assert (("127.0.0.1",), assignment.master_port) == (
                    assignment.master_addresses,
                    listener.getsockname()[1],
                )


def test_a_handlers_own_store_serves_workers_once_since_it_keeps_their_keys(cluster: Cluster) -> None:
    meeting = Meeting(1)
    meeting.shared = True
    member = cluster.member(Handler(meeting))

    [first] = assigned(cluster, member)
    served_by_the_handler = member.listener() is None
    member.post(Failed(member.node, first.round, (note(),)))
    expect(RoundEnd, member)
    [second] = assigned(cluster, member)
    listener = member.listener()

    assert served_by_the_handler
    assert (("10.9.8.7",), 4321) == (first.master_addresses, first.master_port)
    assert listener is not None
    with listener:
        assert (("127.0.0.1",), listener.getsockname()[1]) == (second.master_addresses, second.master_port)


def test_a_failure_restarts_all_nodes_and_is_counted_once_for_the_job(cluster: Cluster) -> None:
    members = pair(cluster, Meeting(2), max_restarts=2)
    assignments = assigned(cluster, *members)
    members[0].post(Failed(members[0].node, assignments[0].round, (note(3, "out of luck"),)))

    ends = [expect(RoundEnd, member) for member in members]
    again = assigned(cluster, *members)

    assert ends[0] == ends[1]
    assert ends[0].restart
    assert "rank 3" in ends[0].why and "out of luck; restart 1 of 2" in ends[0].why
    assert [(assignments[0].round + 1, 1)] * 2 == [(assignment.round, assignment.restart_count) for assignment in again]


def test_a_store_that_a_node_loses_after_its_success_is_the_cause_for_all(cluster: Cluster) -> None:
    members = pair(cluster, Meeting(2), max_restarts=1)
    assignments = assigned(cluster, *members)
    members[0].post(Succeeded(members[0].node, assignments[0].round))
    members[0].post(Failed(members[0].node, assignments[0].round, (note(0, "the store is gone"),)))

    ends = [expect(RoundEnd, member) for member in members]

    assert [True, True] == ["the store is gone; restart 1 of 1" in end.why for end in ends]


def test_failures_of_several_nodes_at_once_are_one_restart(cluster: Cluster) -> None:
    members = pair(cluster, Meeting(2), max_restarts=1)
    assignments = assigned(cluster, *members)
    for member, assignment in zip(members, assignments, strict=True):
        member.post(Failed(member.node, assignment.round, (note(),)))

    ends = [expect(RoundEnd, member) for member in members]
    again = assigned(cluster, *members)

    assert [True, True] == [end.restart for end in ends]
    assert [1, 1] == [assignment.restart_count for assignment in again]


def test_restarts_of_different_nodes_spend_one_budget(cluster: Cluster) -> None:
    members = pair(cluster, Meeting(2), max_restarts=1)
    assignments = assigned(cluster, *members)
    members[0].post(Failed(members[0].node, assignments[0].round, (note(),)))
    for member in members:
        expect(RoundEnd, member)
    assignments = assigned(cluster, *members)

    members[1].post(Failed(members[1].node, assignments[1].round, (note(),)))

    assert [False, False] == [expect(RoundEnd, member).restart for member in members]


def test_without_a_restart_left_all_nodes_name_the_same_root_cause(cluster: Cluster) -> None:
    members = pair(cluster, Meeting(2), max_restarts=0)
    assignments = assigned(cluster, *members)
    root, lost = note(1, "disk full", age=2.0), note(0, "connection reset", age=5.0, secondary=True)
    members[0].post(Failed(members[0].node, assignments[0].round, (lost, root, note(2, age=1.0))))
    ends = [expect(RoundEnd, member) for member in members]
    members[1].post(Stopped(members[1].node, assignments[1].round, (note(7, "stopped later"),)))
    members[0].post(Stopped(members[0].node, assignments[0].round, (lost, root)))

    finals = [expect(Final, member) for member in members]

    assert [False, False] == [end.restart for end in ends]
    assert finals[0] == finals[1]
    assert (False, members[0].node, root) == (finals[0].succeeded, finals[0].root_node, finals[0].root)
    assert "disk full; no restart is left" in finals[0].why


def test_the_root_cause_may_lie_on_another_node_than_the_one_that_ended_the_round(cluster: Cluster) -> None:
    """A lost connection is often seen before the death that caused it."""
    members = pair(cluster, Meeting(2), max_restarts=0)
    assignments = assigned(cluster, *members)
    members[0].post(
        Failed(members[0].node, assignments[0].round, (lost := note(0, "connection reset", secondary=True),))
    )
    for member in members:
        expect(RoundEnd, member)
    members[0].post(Stopped(members[0].node, assignments[0].round, (lost,)))
    early = select.select([members[0]], [], [], 0.05)[0]
    members[1].post(Stopped(members[1].node, assignments[1].round, (root := note(1, "out of memory"),)))

    finals = [expect(Final, member) for member in members]

    assert [] == early
    assert finals[0] == finals[1]
    assert (members[1].node, root) == (finals[0].root_node, finals[0].root)


def test_a_node_that_leaves_after_the_last_round_holds_nobody_up(cluster: Cluster) -> None:
    members = pair(cluster, Meeting(2), max_restarts=0)
    assignments = assigned(cluster, *members)
    members[0].post(Failed(members[0].node, assignments[0].round, (note(),)))
    for member in members:
        expect(RoundEnd, member)
    members[1].post(Leave(members[1].node, "signal 15", assignments[1].round))
    members[0].post(Stopped(members[0].node, assignments[0].round, (note(),)))

    final = expect(Final, members[0])

    assert (members[0].node, note()) == (final.root_node, final.root)


def test_the_end_is_agreed_when_all_nodes_succeeded_and_the_handler_is_shut_down(cluster: Cluster) -> None:
    members = pair(cluster, Meeting(2))
    assignments = assigned(cluster, *members)
    members[0].post(Succeeded(members[0].node, assignments[0].round))
    early = select.select([members[0]], [], [], 0.05)[0]
    members[1].post(Succeeded(members[1].node, assignments[1].round))

    finals = [expect(Final, member) for member in members]
    for member in members:
        member.close()

    assert [] == early
    assert [True, True] == [final.succeeded for final in finals]
    assert [True, True] == [getattr(member._handler, "shut", None) for member in members]


def test_a_node_that_succeeded_takes_part_again_when_a_peer_fails(cluster: Cluster) -> None:
    members = pair(cluster, Meeting(2))
    assignments = assigned(cluster, *members)
    members[0].post(Succeeded(members[0].node, assignments[0].round))
    members[1].post(Failed(members[1].node, assignments[1].round, (note(),)))

    ends = [expect(RoundEnd, member) for member in members]

    assert [True, True] == [end.restart for end in ends]


def test_waiting_nodes_end_the_round_without_spending_a_restart(cluster: Cluster) -> None:
    meeting = Meeting(1)
    member = cluster.member(Handler(meeting))
    [assignment] = assigned(cluster, member)
    meeting.size = 2
    newcomer = cluster.member(Handler(meeting))
    newcomer.join(1, "trainer")

    end = expect(RoundEnd, member)
    [again] = assigned(cluster, member)

    assert (True, "1 nodes wait to join") == (end.restart, end.why)
    assert (assignment.round + 1, 2, 0) == (again.round, again.group_world_size, again.restart_count)
    assert again.round == expect(RankAssignment, newcomer).round


def test_an_arrival_does_not_undo_work_that_a_node_has_finished(cluster: Cluster) -> None:
    meeting = Meeting(2)
    members = pair(cluster, meeting)
    assignments = assigned(cluster, *members)
    members[0].post(Succeeded(members[0].node, assignments[0].round))
    select.select([members[0]], [], [], 0.02)
    meeting.came.append(Handler(meeting))
    quiet = select.select(members, [], [], 0.05)[0]
    members[1].post(Succeeded(members[1].node, assignments[1].round))

    assert [] == quiet
    assert [True, True] == [expect(Final, member).succeeded for member in members]


def test_a_node_whose_peers_never_say_how_they_ended_leaves_after_the_barrier_and_says_so(cluster: Cluster) -> None:
    members = pair(cluster, Meeting(2), barrier=0.05)
    assignments = assigned(cluster, *members)
    members[0].post(Succeeded(members[0].node, assignments[0].round))

    final = expect(Final, members[0])

    assert final.succeeded
    assert "1 of 2 nodes succeeded" in final.why


def test_a_closed_rendezvous_ends_running_nodes(cluster: Cluster) -> None:
    meeting = Meeting(1)
    member = cluster.member(Handler(meeting))
    assigned(cluster, member)
    meeting.closed = True

    final = expect(Final, member)

    assert (False, "closed") == (final.succeeded, final.kind)


def test_a_node_that_leaves_sends_the_others_to_a_new_round_and_closes_nothing(cluster: Cluster) -> None:
    meeting = Meeting(2)
    members = pair(cluster, meeting)
    assignments = assigned(cluster, *members)
    members[0].post(Leave(members[0].node, "signal 15", assignments[0].round))

    final, end = expect(Final, members[0]), expect(RoundEnd, members[1])
    members[0].close()

    assert (False, "left", True) == (final.succeeded, final.kind, end.restart)
    assert "signal 15" in end.why
    assert not meeting.closed


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

    word = take(member)

    assert final == word


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
    meeting = Meeting(1)
    member = cluster.member(Handler(meeting))
    assigned(cluster, member)
    meeting.broken = error
    select.select([member], [], [], LIMIT)

    with pytest.raises(RendezvousError, match="no route") as raised:
        member.drain()

    assert kind is raised.type


def test_a_handler_that_does_not_answer_is_noticed_and_never_blocks_the_agent(cluster: Cluster) -> None:
    handler, thawed = Handler(Meeting(1)), threading.Event()
    member = cluster.member(handler, silence=0.05)
    assigned(cluster, member)
    handler.num_nodes_waiting = thawed.wait  # type: ignore[method-assign]
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

    with pytest.raises(RendezvousClosedError, match="comes too late"):
        member.join(1, "trainer")


def test_a_store_that_keeps_its_keys_from_round_to_round_gives_no_stale_seat(cluster: Cluster) -> None:
    members = pair(cluster, Meeting(2, one_store=True), max_restarts=20)
    rounds = []
    for _ in range(20):
        assignments = assigned(cluster, *members)
        rounds.append({assignment.round for assignment in assignments})
        members[0].post(Failed(members[0].node, assignments[0].round, (note(),)))
        for member in members:
            expect(RoundEnd, member)

    assert [{number} for number in range(20)] == rounds


@pytest.mark.parametrize("scribble", [b"", b"\x80", b"{}", b'{"v":1,"type":"final"}', b"1 2 3"])
def test_a_scribble_in_the_store_is_a_state_error(cluster: Cluster, scribble: bytes) -> None:
    meeting = Meeting(1)
    member = cluster.member(Handler(meeting))
    assigned(cluster, member)
    nonce = meeting.values["0/elasticlib/call"].decode()
    meeting.values[f"0/elasticlib/{nonce}/ended"] = scribble
    select.select([member], [], [], LIMIT)

    with pytest.raises(RendezvousStateError):
        member.drain()


def test_what_is_no_handler_is_refused_by_the_methods_that_it_lacks() -> None:
    with pytest.raises(ConfigError, match="rdzv_handler=3 is no rendezvous handler: it has no next_rendezvous"):
        HandlerMember(3)


def test_a_failure_that_a_restart_would_only_meet_again_ends_the_job(cluster: Cluster) -> None:
    members = pair(cluster, Meeting(2), max_restarts=3)
    assignments = assigned(cluster, *members)
    stuck = evolve(note(1, "in uninterruptible sleep"), fatal=True)

    members[0].post(Failed(members[0].node, assignments[0].round, (stuck,)))
    ends = [expect(RoundEnd, member) for member in members]
    members[1].post(Stopped(members[1].node, assignments[1].round, ()))
    members[0].post(Stopped(members[0].node, assignments[0].round, (stuck,)))
    finals = [expect(Final, member) for member in members]

    assert [False, False] == [end.restart for end in ends]
    assert [stuck, stuck] == [final.root for final in finals]
    assert "in uninterruptible sleep; a restart would fail again" in finals[0].why
