"""Old heartbeats and too large texts at the coordinator, without a thread or a clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from attrs import define, evolve

from elasticlib.rendezvous.coordinator._causes import EARLY_REQUESTS
from elasticlib.rendezvous.coordinator._server_events import Arrived, CloseServer
from elasticlib.rendezvous.coordinator._state import Rules
from elasticlib.rendezvous.node._identity import NodeIdentity
from elasticlib.rendezvous.protocol._codec import key_of
from elasticlib.rendezvous.protocol._exchange import CAUSE, Posted, heartbeat_key, key_place, mailbox_key
from elasticlib.rendezvous.protocol._messages import (
    Acknowledgement,
    Elaborate,
    Failed,
    FailureNote,
    Final,
    NodeHeartbeat,
    RoundEnd,
    Stopped,
    encode,
)
from elasticlib.rendezvous.protocol._shortening import EARLY, ENVELOPE, SHORT, WHOLE, early, fitting
from tests.unit.rendezvous.coordinator.served import Served

HEARTBEAT = 10.0
KEY = key_of("secret")
FAILURE = FailureNote(0, 0, 1, 1, "ValueError: no")


@define
class Store(Served):
    """One that answers each second, and nodes whose heartbeats are given."""

    journaled: bool = False

    def __attrs_post_init__(self) -> None:
        self.begin_term()

    def joined(self, *nodes: str) -> list[str]:
        return [self.join(node) for node in nodes]

    def node_heartbeat(self, mailbox: str, node_heartbeat: NodeHeartbeat) -> bytes:
        return encode(node_heartbeat, self.key, key_place("job", "nonce", heartbeat_key(mailbox)))

    def later(self, seconds: float, heartbeats: Sequence[tuple[str, Sequence[bytes]]] = ()) -> None:
        """Time passes; each second the next of the values given with a mailbox lies where its heartbeats do."""
        end, turn = self.now + seconds, 0
        while not self.stopped and self.now < end:
            for mailbox, values in heartbeats:
                self.values[heartbeat_key(mailbox)] = values[turn % len(values)]
            turn += 1
            self.now += min(1.0 if self.wait is None else self.wait, end - self.now, 1.0)
            self.handle(Arrived(()))

    def end(self, mailbox: str, index: int) -> Final:
        """The end as the node of that mailbox understands it."""
        found = self.notice(mailbox, index)
        assert isinstance(found, Final)
        return NodeIdentity("job", mailbox, self.key, "nonce").whole(found, self.values.get(CAUSE))


def living(store: Store, mailbox: str, **fields: int) -> tuple[str, list[bytes]]:
    """Heartbeats of a node that lives."""
    return mailbox, [store.node_heartbeat(mailbox, NodeHeartbeat(count, **fields)) for count in range(1, 200)]


# Only a higher count is life.


def test_two_heartbeats_of_the_past_in_turn_keep_no_dead_node_alive() -> None:
    store = Store(Rules(1, 2, heartbeat=HEARTBEAT), KEY)
    a, b = store.joined("a", "b")
    old = [store.node_heartbeat(b, NodeHeartbeat(count)) for count in (6, 7)]

    store.later(HEARTBEAT + 2.0, [living(store, a), (b, old)])

    assert store.notice(a, 1) == RoundEnd(0, "node b is lost: no heartbeat for 10 s", True)


def test_old_heartbeat_is_ignored_for_stored_messages_as_well() -> None:
    store = Store(Rules(1, 2, heartbeat=HEARTBEAT), KEY)
    a, b = store.joined("a", "b")
    new, old = (
        [store.node_heartbeat(b, NodeHeartbeat(9 + count, stored=2)) for count in range(40)],
        store.node_heartbeat(b, NodeHeartbeat(3, stored=1)),
    )
    heartbeats = [node_heartbeat for each in new for node_heartbeat in (each, old)]

    store.later(HEARTBEAT + 3.0, [living(store, a), (b, heartbeats)])

    final = store.notice(a, 1)
    assert isinstance(final, Final)
    assert "message 2 of node b was removed from the store unread" in final.why


def test_old_heartbeats_do_not_keep_a_node_waited_for_after_the_end() -> None:
    store = Store(Rules(1, 1, 0, heartbeat=HEARTBEAT), KEY)
    a = store.join("a")
    store.send(Stopped("a", 0, (FAILURE,)))
    store.later(3.0, [living(store, a)])
    store.handle(CloseServer(300.0))
    old = [store.node_heartbeat(a, NodeHeartbeat(count)) for count in (1, 2)]

    store.later(HEARTBEAT + 3.0, [(a, old)])

    assert isinstance(store.notice(a, 2), Final)
    assert store.stopped


# Failures too large to write down.

LONG = "a line of a long text\n" * 950


def stopped(node: str, age: float) -> Stopped:
    notes = (FailureNote(rank, rank, 1, 1, LONG, "ValueError", LONG, age=age) for rank in range(8))
    report = fitting(Stopped(node, 0, tuple(notes)))
    assert isinstance(report, Stopped)
    return report


def asking_store(count: int, first: int) -> tuple[Store, list[str], Stopped]:
    """All have said the beginnings of their failures; and what the node of the root cause knows of its own."""
    store = Store(Rules(count, count, 0, heartbeat=HEARTBEAT), journaled=True)
    names = [f"n{number}" for number in range(count)]
    mailboxes = store.joined(*names)
    found = [stopped(name, age=count - abs(number - first)) for number, name in enumerate(names)]
    store.send(*(early(each, None) for each in found))
    return store, mailboxes, found[first]


def failed_store(count: int, key: bytes | None = None, **others: Any) -> tuple[Store, list[str]]:
    store = Store(Rules(count, count, 0, heartbeat=HEARTBEAT), key, journaled=True)
    for name, value in others.items():
        setattr(store, name, value)
    names = [f"n{number}" for number in range(count)]
    mailboxes = store.joined(*names)
    store.send(*(stopped(name, age=float(number)) for number, name in enumerate(names)))
    return store, mailboxes


def test_outcome_of_many_large_failures_has_the_whole_root_cause() -> None:
    store, mailboxes = failed_store(100)

    finals = [store.end(mailbox, 2) for mailbox in mailboxes]
    assert all(final == finals[0] for final in finals)
    assert finals[0].root_node == "n99"
    assert finals[0].root is not None
    assert finals[0].root.traceback == LONG
    assert max(map(len, store.saves)) < 4 * ENVELOPE


def test_a_long_root_cause_lies_in_the_store_once() -> None:
    store, mailboxes = failed_store(100)

    assert max(len(store.values[mailbox_key(mailbox, 2)]) for mailbox in mailboxes) < WHOLE
    assert len(LONG) < len(store.values[CAUSE]) < ENVELOPE


def test_cause_is_written_before_any_node_is_notified() -> None:
    store, _ = failed_store(3)

    assert list(store.values).index(CAUSE) < min(
        place for place, key in enumerate(store.values) if key.endswith("/2") and key.startswith("box/")
    )


@pytest.mark.parametrize("key", [None, KEY])
def test_forged_root_cause_is_not_believed_and_costs_only_the_texts(key: bytes | None) -> None:
    store, mailboxes = failed_store(2, key)
    whole, final = store.end(mailboxes[0], 2), store.notice(mailboxes[0], 2)
    assert whole.root is not None
    forged = Failed("n1", 0, (evolve(whole.root, message="his words"),))
    other = encode(forged, store.key, key_place("job", "nonce", mailbox_key(mailboxes[0], 9)))

    for data in (
        None,
        b"",
        b"{",
        encode(forged),
        other,
        encode(NodeHeartbeat(1), store.key, key_place("job", "nonce", CAUSE)),
    ):
        store.values[CAUSE] = data or b""
        assert store.end(mailboxes[0], 2) == final
    assert isinstance(final, Final)
    assert final.root is not None
    assert "characters were cut here" in final.root.traceback


def test_outcome_waits_for_the_whole_root_cause_of_one_node() -> None:
    store, mailboxes, whole = asking_store(50, first=0)

    notices = [store.notice(mailbox, 2) for mailbox in mailboxes]
    assert notices == [Elaborate(0), *[None] * 49]
    store.send(fitting(Failed("n0", 0, whole.failures)))
    finals = [store.end(mailboxes[0], 3), *(store.end(mailbox, 2) for mailbox in mailboxes[1:])]
    assert all(final == finals[0] for final in finals)
    assert finals[0].root is not None
    assert finals[0].root.traceback == LONG


def test_few_nodes_get_requests_for_whole_failures_in_any_order() -> None:
    store, mailboxes, whole = asking_store(50, first=49)

    requested = [store.notice(mailbox, 2) == Elaborate(0) for mailbox in mailboxes]
    assert sum(requested) == EARLY_REQUESTS + 1
    assert requested[-1]
    for node in range(EARLY_REQUESTS):
        store.send(fitting(Failed(f"n{node}", 0, stopped(f"n{node}", 1.0).failures)))
    assert store.server.state.final is None
    store.send(fitting(Failed("n49", 0, whole.failures)))
    assert store.end(mailboxes[5], 2).root_node == "n49"


def test_root_cause_of_a_lost_node_is_reported_as_far_as_known() -> None:
    store, mailboxes, _ = asking_store(3, first=2)

    store.later(HEARTBEAT + 2.0, [living(store, mailbox) for mailbox in mailboxes[:2]])

    final = store.end(mailboxes[0], 4)
    assert final.root_node == "n2"
    assert final.root is not None
    assert EARLY // 4 < len(final.root.traceback) + len(final.root.message) < EARLY


def test_a_successor_asks_again_for_the_rest_of_the_root_cause() -> None:
    store, _, whole = asking_store(3, first=2)
    successor = Store(store.rules, journaled=True, saved=store.saved, envelopes=store.envelopes)
    assert successor.server.state.final is None

    assert "elaborate" in str([each for key, each in successor.values.items() if key.startswith("box/n2/")])
    successor.send(fitting(Failed("n2", 0, whole.failures)))

    assert successor.server.state.final is not None
    assert successor.server.state.final.root is not None
    assert successor.server.state.final.root.traceback == LONG


def test_messages_that_arrive_at_once_are_saved_once() -> None:
    store, _ = failed_store(10)
    before = len(store.saves)

    store.send(*(Acknowledgement(f"n{number}") for number in range(10)))

    assert len(store.saves) == before + 1


def test_document_grows_by_the_same_size_with_each_node() -> None:
    def size(count: int) -> int:
        return len(failed_store(count)[0].saved or b"")

    assert size(40) - size(20) < 20 * 200


def test_successor_writes_the_same_notices_to_the_same_mailboxes() -> None:
    store, mailboxes = failed_store(5)
    successor = Store(store.rules, journaled=True, saved=store.saved)

    assert [store.end(mailbox, 2) for mailbox in mailboxes] == [successor.end(mailbox, 2) for mailbox in mailboxes]
    assert store.values[CAUSE] == successor.values[CAUSE]


def test_refused_document_is_shortened_and_all_nodes_get_the_outcome() -> None:
    store, mailboxes = failed_store(5, most=20_000)

    final = store.end(mailboxes[0], 2)
    assert final.root_node == "n4"
    assert len(store.saved) <= 20_000
    assert store.server.state.final is not None
    root = store.server.state.final.root
    assert root is not None
    assert len(root.traceback) <= SHORT


def test_a_document_that_cannot_be_shortened_ends_the_job_with_the_reason() -> None:
    store = Store(Rules(2, 2, heartbeat=HEARTBEAT), journaled=True)
    a = store.join("a")
    store.refuse = 2
    store.join("b")

    final = store.notice(a, 1)
    assert isinstance(final, Final)
    assert final.kind == "closed"
    assert "the store refused the job's state: too large" in final.why


def test_message_longer_than_any_node_writes_is_refused_with_a_line() -> None:
    store = Store(Rules(1, 1, heartbeat=HEARTBEAT))
    store.handle(Arrived([Posted(1, b"x" * (ENVELOPE + 1))]))

    assert ["a report was refused: the inbox holds 65,537 bytes, and a message has at most 65,536"] == store.logs
