"""Untrusted entries in the store: each causes one refusal in the log, and ends no node."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Sequence

import pytest
from attrs import define, evolve
from hypothesis import example, given, strategies as st

from elasticlib._untrusted import Refusals
from elasticlib.rendezvous.coordinator._handover import decode_state
from elasticlib.rendezvous.coordinator._server_events import Arrived
from elasticlib.rendezvous.coordinator._state import Rules
from elasticlib.rendezvous.node._identity import NodeIdentity
from elasticlib.rendezvous.node._session import Session
from elasticlib.rendezvous.node._session_events import (
    Ask,
    Connected,
    Describe,
    Event,
    OpenConnection,
    OperationDone,
    Seek,
)
from elasticlib.rendezvous.node._session_liveness import Limits, TimePassed
from elasticlib.rendezvous.protocol._codec import key_of
from elasticlib.rendezvous.protocol._exchange import (
    ANNOUNCEMENT,
    COORDINATOR_HEARTBEAT,
    Posted,
    mailbox_key,
    mailbox_name,
    report_place,
)
from elasticlib.rendezvous.protocol._messages import (
    Announcement,
    ContactLost,
    CoordinatorHeartbeat,
    Descriptor,
    Envelope,
    Failed,
    FailureNote,
    Join,
    Message,
    Stopped,
    Terms,
    encode,
)
from elasticlib.rendezvous.protocol._operations import Log, Read, Take, Update, Wait
from tests.unit.rendezvous.coordinator.served import Served
from tests.unit.rendezvous.messages import BUILDERS, REPORTS
from tests.unit.untrusted import spoiled, strange

KEY = key_of("secret")
OFFER = Descriptor(1, "trainer", ("127.0.0.1",), 1)
NODES = ("a/1", "b/2")
RULES = Rules(2, 2, last_call=0.0, heartbeat=10.0)


@define
class Desk(Served):
    """A job of two nodes, in whose store a stranger writes."""

    rules: Rules = RULES
    journaled: bool = False
    heartbeats: bytes | None = None
    """Value at the heartbeat key of each node."""

    def __attrs_post_init__(self) -> None:
        self.begin_term()

    def receive(self, *entries: bytes, heartbeats: bytes | None = None) -> None:
        """These lie in the inbox."""
        self.heartbeats = heartbeats
        self.handle(Arrived([Posted(number, data) for number, data in enumerate(entries, 1)]))

    def _found(self, keys: Sequence[str]) -> list[bytes | None]:
        return [self.heartbeats] * len(keys)

    def envelope(self, node: str) -> bytes:
        self.envelopes[node] += 1
        place = report_place("job", self.server.nonce, node, self.envelopes[node])
        return encode(Envelope(self.envelopes[node], Join(node, OFFER)), self.key, place)

    def assignment(self) -> None:
        """Two nodes come, and get their ranks."""
        self.receive(*map(self.envelope, NODES))
        assert all(mailbox_key(mailbox_name(node, self.envelopes[node]), 0) in self.values for node in NODES)


envelopes = st.builds(Envelope, st.integers(1, 2**62), st.one_of(*REPORTS.values()))


@given(st.lists(strange, min_size=1, max_size=3))
@example([b'{"v":1,"type":"letter","seq":1e999,"report":{"v":1,"type":"bye","node":"a"}}'])
@example([b'{"v":1,"type":"letter","seq":1,"report":{"v":1,"type":"bye","node":"\\ud800/1"}}'])
@pytest.mark.parametrize("key", [None, KEY], ids=["open", "signed"])
def test_garbage_is_refused_and_the_nodes_get_ranks_all_the_same(key: bytes | None, entries: list[bytes]) -> None:
    desk = Desk(key=key)
    desk.receive(*entries, heartbeats=entries[0])

    assert sum(bool(entry) for entry in entries) == len(desk.logs)
    desk.assignment()


@given(st.data())
def test_message_without_the_token_is_refused_for_any_content(data: st.DataObject) -> None:
    envelope: Message = data.draw(envelopes)
    entry = data.draw(st.just(encode(envelope)) | spoiled(encode(envelope, KEY, "elsewhere")))
    desk = Desk(key=KEY)
    before = desk.server.state
    desk.receive(entry)

    assert before == evolve(desk.server.state, gathering_since=before.gathering_since)
    assert 1 == len(desk.logs)
    desk.assignment()


@given(st.data())
def test_any_message_breaks_nothing_without_a_token(data: st.DataObject) -> None:
    """The job may end by it, or have other members; its state can be written down and read all the while."""
    desk = Desk(journaled=True)
    for _ in range(data.draw(st.integers(1, 4))):
        message: Message = data.draw(envelopes | st.one_of(*BUILDERS.values()))
        entries = data.draw(st.lists(st.just(encode(message)) | spoiled(encode(message)) | strange, max_size=3))
        desk.receive(
            *entries, *map(desk.envelope, NODES[: data.draw(st.integers(0, 2))]), heartbeats=data.draw(strange)
        )
        desk.now += data.draw(st.sampled_from([0.0, 1.0, 11.0, 700.0]))

        assert desk.saved is not None
        body = json.loads(desk.saved)
        assert decode_state(body["state"].encode(), desk.now)


@given(strange)
def test_many_refusals_are_logged_in_a_few_lines(data: bytes) -> None:
    desk = Desk()
    desk.receive(*[data or b"x"] * 1000, heartbeats=data)

    assert len(desk.logs) <= 10


def state_log() -> bytes:
    """Return a coordinator's saved state: a round, a message on its way, and one that waits."""
    desk = Desk(journaled=True)
    desk.assignment()
    place = Envelope(2, Failed("a/1", 0, (FailureNote(0, 0, 7, 1, "bad\nbatch"),)))
    desk.receive(encode(place))
    desk.receive(encode(Envelope(1, Join("c/3", OFFER))))
    assert desk.saved is not None
    return desk.saved


JOURNAL = state_log()
INNER = json.loads(JOURNAL)["state"].encode()


@given(
    strange
    | spoiled(JOURNAL)
    | spoiled(INNER).map(lambda state: json.dumps(json.loads(JOURNAL) | {"state": state.decode()}).encode())
)
def test_coordinator_can_take_over_any_document(data: bytes) -> None:
    """An unreadable document ends the job. A readable one is used, saved and read again."""
    desk = Desk(saved=data, journaled=True)
    for wait in (0.0, 3.0, 11.0, 700.0):
        desk.now += wait
        desk.receive(encode(Envelope(3, Stopped("a/1", 0, ()))), encode(Envelope(1, Join("d/4", OFFER))))

    assert desk.saved is not None
    assert decode_state(json.loads(desk.saved)["state"].encode(), desk.now)


def test_saved_state_of_a_coordinator_is_taken_over() -> None:
    desk = Desk(saved=JOURNAL, journaled=True)

    assert [] == desk.logs
    assert {"a/1", "b/2", "c/3"} == desk.server.state.received.keys()


def found(key: str) -> st.SearchStrategy[bytes | None]:
    """Return the values that a node may find at *key*."""
    good = st.one_of(*BUILDERS.values()).map(encode)
    if key == ANNOUNCEMENT:
        good = st.just(encode(Announcement("job", "nonce", "host", Terms(1, 2, 3), 10.0)))
    if key == COORDINATOR_HEARTBEAT:
        good = st.integers(0, 2**40).map(lambda count: encode(CoordinatorHeartbeat("nonce", count, "")))
    return st.none() | good | good.flatmap(spoiled) | strange


@given(st.data())
def test_any_data_that_a_node_finds_breaks_nothing(data: st.DataObject) -> None:
    """Its part may end by it, with an error that says why."""
    now, requests, refusals = 100.0, list[Ask](), Counter[str]()
    session, actions = Session.begin(NodeIdentity("job", "b/2", None), Limits(), now)
    waiting: list[Event] = [Connected(1), Seek(1, "trainer")]
    for _ in range(40):
        for action in actions:
            if isinstance(action, OpenConnection):
                requests, waiting = [], [*waiting, Connected(action.connection)]
            if isinstance(action, Ask):
                requests.append(action)
            if isinstance(action, Log):
                refusals[action.text.partition(" was refused")[0]] += 1
        if waiting:
            event = waiting.pop(0)
        elif requests:
            ask, result = requests.pop(0), None
            match ask.operation:
                case Describe():
                    result = OFFER
                case Wait():
                    result = data.draw(st.booleans())
                case Take(key):
                    result = data.draw(found(key))
                case Read(keys) | Update(_, keys):
                    result = [data.draw(found(key)) for key in keys]
            event = OperationDone(ask.connection, ask.number, result)
        else:
            event = TimePassed()
        now += data.draw(st.sampled_from([0.0, 0.05, 1.0]))
        session, actions = session.step(event, now)
        session, received = session.drain()

        assert session.error is None or "node" in str(session.error) or "job" in str(session.error)
        assert all(encode(each) for each in received if not isinstance(each, ContactLost))
        waits = (session.wake_at(), session.speaks_at(), session.kill_at())
        assert all(each is None or each - now < threading.TIMEOUT_MAX for each in waits)
    assert all(count <= Refusals().most for count in refusals.values())
