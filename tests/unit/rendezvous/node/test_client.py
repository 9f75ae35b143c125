"""One node's side: what it reports, when its descriptor is readable, what it leaves behind."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from elasticlib.errors import (
    ElasticError,
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from elasticlib.rendezvous._membership import MembershipEvent
from elasticlib.rendezvous.node import _session_events as events
from elasticlib.rendezvous.node._client import NodeClient
from elasticlib.rendezvous.node._session_liveness import Limits
from elasticlib.rendezvous.protocol._codec import key_of
from elasticlib.rendezvous.protocol._exchange import (
    ANNOUNCEMENT,
    COORDINATOR_HEARTBEAT,
    NOTHING,
    Exchange,
    Posted,
    heartbeat_key,
    key_place,
    mailbox_key,
    report_place,
)
from elasticlib.rendezvous.protocol._messages import (
    Acknowledgement,
    Announcement,
    ContactLost,
    CoordinatorHeartbeat,
    Descriptor,
    Envelope,
    Failed,
    FailureNote,
    Final,
    Join,
    Leave,
    Message,
    NodeHeartbeat,
    Notice,
    RankAssignment,
    Report,
    RoundEnd,
    Stopped,
    Succeeded,
    Terms,
    decode,
    encode,
)
from elasticlib.rendezvous.protocol._operations import Wait
from elasticlib.rendezvous.stores._memory_exchange import MemoryExchange

LIMIT = 15.0
NOTES = (FailureNote(0, 0, 10, 1),)
END = RoundEnd(0, "enough", True)
FINAL = Final(True, "all done")
SEAT = RankAssignment(0, 0, 1, 0, 1, 0, 1, 0, 3, ("127.0.0.1",), 1, "all are there")
HELLO_OF_JOB = Announcement("job", "nonce", "host", Terms(1, 1, 3), 0.0)


class Wares:
    """Offers the same each time, and counts how often it has described them."""

    described = 0

    def describe(self, slots: int, role: str) -> Descriptor:
        self.described += 1
        return Descriptor(slots, role, ("127.0.0.1",), 1)

    def listener(self) -> socket.socket | None:
        return None


class Stage:
    """A coordinator's side, played by the test."""

    def __init__(self, key: bytes | None = None) -> None:
        self.exchange: Exchange = MemoryExchange()
        self.key = key
        self.envelopes: list[Envelope] = []
        self.early: list[Posted] = []
        self.received = 0

    def greet(self, announcement: Announcement = HELLO_OF_JOB) -> None:
        self.write(ANNOUNCEMENT, announcement, nonce="")

    def write(self, key: str, message: Message, nonce: str = "nonce") -> None:
        self.exchange.write({key: encode(message, self.key, key_place("job", nonce, key))})

    def send_notice(self, mailbox: str, index: int, notice: Notice) -> None:
        self.write(mailbox_key(mailbox, index), notice)

    def receive(self, count: int = 1) -> list[Report]:
        """The next *count* reports."""
        while len(self.envelopes) < count:
            posted = self.early or list(self.exchange.receive(LIMIT))
            self.early = []
            assert posted, f"no report within {LIMIT:g} s"
            for entry in posted:
                self.received += 1
                seq = self.received
                place = report_place("job", "nonce", "a", seq) if self.key else ""
                envelope = decode(entry.data, self.key, place)
                assert isinstance(envelope, Envelope)
                assert seq == envelope.seq
                self.envelopes.append(envelope)
        received, self.envelopes = self.envelopes[:count], self.envelopes[count:]
        return [envelope.report for envelope in received]

    def wait_with(self, member: NodeClient) -> None:
        """Ask the member again and again, as its owner does, until there is a report."""
        deadline = time.monotonic() + LIMIT
        while time.monotonic() < deadline:
            assert [] == member.drain()
            if posted := self.exchange.receive(0.01):
                self.early += posted
                return
        raise AssertionError(f"no report within {LIMIT:g} s")


@pytest.fixture
def stage() -> Stage:
    stage = Stage()
    stage.greet()
    return stage


def make(stage: Stage, **options: Any) -> NodeClient:
    dial: Callable[[float], Exchange] = options.pop("dial", lambda timeout: stage.exchange.clone())
    offer, key = options.pop("offer", Wares()), options.pop("key", stage.key)
    return NodeClient(dial, "a", offer, run_id="job", key=key, **options).start()


@pytest.fixture
def member(stage: Stage) -> Iterator[NodeClient]:
    member = make(stage)
    yield member
    member.close()


def take(member: NodeClient, count: int = 1) -> list[MembershipEvent]:
    """Return the next *count* events; a wait ends when the member wants to be asked, as its owner's does."""
    drained: list[MembershipEvent] = []
    while len(drained) < count:
        patience = member.poll_timeout()
        ready = select.select([member], [], [], LIMIT if patience is None else min(LIMIT, patience))[0]
        assert ready or patience is not None, f"nothing within {LIMIT:g} s"
        drained += member.drain()
    return drained


def test_wait_for_a_node_ends_if_it_must_act_sooner(stage: Stage) -> None:
    """Else a node whose store comes a moment after it would not try again before its whole time was over."""
    tried: list[float] = []

    def dial(timeout: float) -> Exchange:
        tried.append(timeout)
        if len(tried) == 1:
            raise RendezvousConnectionError("refused")
        return stage.exchange.clone()

    waiting = threading.Event()
    member = NodeClient(lambda timeout: waiting.wait(LIMIT) and dial(timeout), "a", Wares(), run_id="job").start()
    try:
        before = member.poll_timeout()
        waiting.set()

        assert [member] == select.select([member], [], [], LIMIT)[0]
        member.drain()
        after = member.poll_timeout()
        assert before is not None and after is not None and after <= 1.0 < before
    finally:
        member.close()


def test_connection_for_notices_opens_before_ranks_are_requested(stage: Stage) -> None:
    """Rule: what a round needs besides messages is there before it."""
    cloned = threading.Event()

    class Watched:
        def __getattr__(self, name: str) -> Any:
            if name == "clone":
                cloned.set()
            return getattr(stage.exchange, name)

    member = make(stage, dial=lambda timeout: Watched())
    try:
        assert cloned.wait(LIMIT)
    finally:
        member.close()


class Asks:
    """A session that asks for one operation, whatever happens."""

    unread = ()
    error = final = None
    closed = False

    def __init__(self, ask: events.Ask) -> None:
        self._ask = ask

    def step(self, event: events.Event, now: float) -> tuple[Asks, tuple[events.Action, ...]]:
        return self, (self._ask,)

    def speaks_at(self) -> None:
        return None

    wake_at = kill_at = speaks_at


@pytest.mark.parametrize(
    ("connection", "thread", "woken"),
    [
        (2, events.ConnectionThread.WATCH, 0),
        (2, events.ConnectionThread.SPEAK, 1),
        (1, events.ConnectionThread.WATCH, 1),
    ],
)
def test_thread_that_receives_its_own_result_wakes_no_other_thread(
    connection: int, thread: events.ConnectionThread, woken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule: but one of a connection that was given up wakes whoever has the work now."""
    member = NodeClient(lambda timeout: None, "a", Wares())  # type: ignore[arg-type, return-value]
    ask = events.Ask(2, events.ConnectionThread.WATCH, 7, Wait("key", 1.0))
    requested: list[events.Ask] = []
    calls: list[None] = []
    monkeypatch.setattr(member, "_session", Asks(ask))
    monkeypatch.setattr(member._connections, "_latest", SimpleNamespace(ask=requested.append))
    monkeypatch.setattr(member.turned, "notify_all", lambda: calls.append(None))

    member.deliver(events.OperationDone(connection, 1, None), thread)

    assert ([ask], woken) == (requested, len(calls))


def fails(member: NodeClient) -> Exception:
    deadline = time.monotonic() + LIMIT
    with pytest.raises(ElasticError) as caught:
        while time.monotonic() < deadline:
            select.select([member], [], [], 0.1)
            assert {ContactLost} >= {type(event) for event in member.drain()}
    return caught.value


def test_reports_go_into_the_inbox_in_order(member: NodeClient, stage: Stage) -> None:
    member.join(2, "trainer")
    member.post(Failed(member.node, 3, NOTES))
    member.post(Stopped(member.node, 3, NOTES))
    member.post(Succeeded(member.node, 4))
    member.post(Leave(member.node, "SIGTERM", 4))

    expected: list[Report] = [
        Join("a", Descriptor(2, "trainer", ("127.0.0.1",), 1)),
        Failed("a", 3, NOTES),
        Stopped("a", 3, ()),  # what was said already is not said again
        Succeeded("a", 4),
        Leave("a", "SIGTERM", 4),
    ]
    assert expected == stage.receive(5)


def test_post_of_an_invalid_report_raises_state_error(member: NodeClient) -> None:
    with pytest.raises(RendezvousStateError):
        member.post(Failed(member.node, "x", ()))  # type: ignore[arg-type]


def test_a_notice_makes_the_descriptor_readable_until_it_is_taken(member: NodeClient, stage: Stage) -> None:
    member.join(1, "trainer")
    stage.send_notice("a/1", 0, END)

    assert [END] == take(member)
    deadline = time.monotonic() + LIMIT
    while select.select([member], [], [], 0)[0]:  # an acknowledged heartbeat wakes the owner too, and is no word
        assert time.monotonic() < deadline, "readable with nothing to take"
        assert [] == member.drain()


def test_notices_keep_their_order_and_are_deleted_once_read(member: NodeClient, stage: Stage) -> None:
    member.join(1, "trainer")
    stage.send_notice("a/1", 1, END)
    stage.send_notice("a/1", 0, SEAT)

    assert [SEAT, END] == take(member, 2)
    assert [None] == stage.exchange.read([mailbox_key("a/1", 0)])


def test_the_end_is_confirmed(member: NodeClient, stage: Stage) -> None:
    member.join(1, "trainer")
    stage.send_notice("a/1", 0, FINAL)
    take(member)

    assert [Join, Acknowledgement] == [type(report) for report in stage.receive(2)]
    assert member.is_over()


@pytest.mark.parametrize("joined", [False, True])
def test_close_ends_the_threads_and_frees_the_descriptors(stage: Stage, joined: bool) -> None:
    threads, descriptors = threading.active_count(), sorted(os.listdir("/proc/self/fd"))
    member = make(stage)
    if joined:
        member.join(1, "trainer")
    member.close()
    member.close()

    assert threads == threading.active_count()
    assert descriptors == sorted(os.listdir("/proc/self/fd"))


def test_close_sends_what_still_waits_to_be_sent(stage: Stage) -> None:
    member = make(stage)
    member.join(1, "trainer")
    member.post(Leave(member.node, "SIGTERM"))
    member.close()

    assert [Join, Leave] == [type(report) for report in stage.receive(2)]


def test_a_closed_member_takes_nothing_and_refuses_reports(member: NodeClient) -> None:
    member.close()

    assert [] == member.drain()
    with pytest.raises(RendezvousClosedError, match="node a has closed its rendezvous and cannot send Succeeded"):
        member.post(Succeeded(member.node, 0))


def test_the_descriptor_is_not_inherited(member: NodeClient) -> None:
    assert not os.get_inheritable(member.fileno())


def test_a_node_that_hosts_the_store_ends_the_job_instead_of_leaving(stage: Stage) -> None:
    reasons: list[str] = []
    member = make(stage, on_leave=lambda leave: not reasons.append(leave.why))  # type: ignore[func-returns-value]
    member.join(1, "trainer")
    member.post(Leave(member.node, "SIGTERM"))
    member.post(Succeeded(member.node, 0))

    assert [Join, Succeeded] == [type(report) for report in stage.receive(2)]
    assert ["SIGTERM"] == reasons
    member.close()


# Heartbeats and lost contact.


def decode_beat(stage: Stage, mailbox: str) -> NodeHeartbeat:
    key = heartbeat_key(mailbox)
    assert stage.exchange.wait(key, LIMIT)
    data = stage.exchange.read([key])[0]
    stage.exchange.delete([key])
    node_heartbeat = decode(data or b"", stage.key, key_place("job", "nonce", key))
    assert isinstance(node_heartbeat, NodeHeartbeat)
    return node_heartbeat


class Brittle(MemoryExchange):
    """A connection to a store that can be cut off, frozen or killed."""

    def __init__(self, shelf: Any, state: dict[str, Any]) -> None:
        super().__init__(shelf)
        self.state = state

    def _pass(self) -> None:
        if self.state.get("frozen"):
            self.state["frozen"].wait(LIMIT)
        if self.state.get("dead"):
            raise RendezvousConnectionError("the store went away")

    def write(self, values: Mapping[str, bytes]) -> None:
        self._pass()
        super().write(values)

    def post(self, data: bytes, values: Mapping[str, bytes] = NOTHING) -> None:
        self._pass()
        super().post(data, values)

    def clone(self) -> MemoryExchange:
        return Brittle(self._shelf, self.state)


def brittle(stage: Stage, state: dict[str, Any]) -> Callable[[float], Exchange]:
    def dial(timeout: float) -> Exchange:
        if state.get("dead") or state.get("frozen"):
            raise RendezvousConnectionError("no answer from the store")
        assert isinstance(stage.exchange, MemoryExchange)
        return Brittle(stage.exchange._shelf, state)

    return dial


def until(member: NodeClient, condition: Callable[[], bool]) -> None:
    """Ask the member, as its owner does, until *condition* holds."""
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline
        select.select([member], [], [], 0.1)
        assert [] == member.drain()


@pytest.mark.parametrize("fault", ["dead", "frozen"])
def test_node_without_answers_is_stopped_and_finally_gives_up(stage: Stage, fault: str) -> None:
    stage.greet(Announcement("job", "nonce", "host", Terms(1, 1, 3), 0.5))
    state: dict[str, Any] = {}
    member = make(stage, dial=brittle(stage, state), limits=Limits(reconnect_timeout=0.5))
    member.join(1, "trainer")
    stage.receive()
    state[fault] = threading.Event()
    (lost,) = take(member)

    assert isinstance(lost, ContactLost)
    error = fails(member)
    state[fault].set()
    assert isinstance(error, RendezvousConnectionError)
    assert "contact with the job was lost" in str(error)
    member.close()


def test_a_message_that_a_broken_connection_swallowed_is_sent_again(stage: Stage) -> None:
    state: dict[str, Any] = {}
    member = make(stage, dial=brittle(stage, state))
    member.join(1, "trainer")
    assert [Join] == [type(report) for report in stage.receive()]
    until(member, lambda: member._session.contact.live)
    state["dead"] = True
    member.post(Succeeded(member.node, 0))
    until(member, lambda: not member._session.contact.live)
    state["dead"] = False
    stage.wait_with(member)

    assert [Succeeded("a", 0)] == stage.receive()
    member.close()


def test_paused_node_sends_no_heartbeats(stage: Stage) -> None:
    stage.greet(Announcement("job", "nonce", "host", Terms(1, 1, 3), 0.2))
    member = make(stage)
    member.join(1, "trainer")
    decode_beat(stage, "a/1")
    member.hold(True)
    stage.exchange.wait(heartbeat_key("a/1"), 0.1)  # one may have been on its way
    stage.exchange.delete([heartbeat_key("a/1")])

    assert not stage.exchange.wait(heartbeat_key("a/1"), 0.3)
    member.hold(False)
    decode_beat(stage, "a/1")
    member.close()


# Whose job it is.


def test_error_states_what_was_wrong_if_no_job_is_found(stage: Stage) -> None:
    now = 100.0

    def dial(timeout: float) -> Exchange:
        raise RendezvousConnectionError("node1:29400 refused")

    member = make(stage, dial=dial, limits=Limits(join_timeout=60.0), clock=lambda: now)
    until(member, lambda: "refused" in member._session.contact.trouble)
    now = 161.0
    error = fails(member)

    assert isinstance(error, RendezvousTimeoutError)
    assert "job 'job': the job was not found; gave up after 61 s: node1:29400 refused" in str(error)
    member.close()


def test_a_replayed_greeting_changes_nothing_while_the_coordinator_lives(stage: Stage) -> None:
    stage.greet(Announcement("job", "nonce", "host", Terms(1, 1, 3), 2.0))
    member = make(stage, limits=Limits(has_election=True))
    member.join(1, "trainer")
    stage.receive()
    stage.greet(Announcement("job", "old nonce", "host", Terms(1, 1, 3), 2.0))
    for count in range(1, 4):
        stage.write(COORDINATOR_HEARTBEAT, CoordinatorHeartbeat("nonce", count))
        decode_beat(stage, "a/1")
        assert [] == member.drain()
    member.close()


def test_with_a_token_everything_is_signed_and_nothing_else_is_believed() -> None:
    stage = Stage(key_of("secret"))
    stage.greet()
    member = make(stage)
    member.join(1, "trainer")
    assert [Join] == [type(report) for report in stage.receive()]
    key = mailbox_key("a/1", 0)
    stage.exchange.write({key: encode(FINAL)})  # not signed
    while stage.exchange.read([key])[0] is not None:
        select.select([member], [], [], 0.01)
    stage.exchange.write({key: encode(FINAL, stage.key, key_place("job", "nonce", mailbox_key("b/1", 0)))})  # another's
    while stage.exchange.read([key])[0] is not None:
        select.select([member], [], [], 0.01)
    stage.send_notice("a/1", 0, SEAT)

    assert [SEAT] == take(member)
    member.close()


def test_seeking_node_logs_what_is_wrong_and_the_time_left(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0

    def dial(timeout: float) -> Exchange:
        raise RendezvousConnectionError("node0:29400 cannot be reached (10.0.0.9: timed out)")

    member = make(stage, dial=dial, limits=Limits(join_timeout=60.0), clock=lambda: now)
    member.join(1, "trainer")
    until(member, lambda: "cannot be reached" in member._session.contact.trouble)
    now = 106.0
    member.drain()
    member.close()

    why = "node a has waited 6 s for job 'job': node0:29400 cannot be reached (10.0.0.9: timed out); 54 s left"
    assert [why] == caplog.messages
