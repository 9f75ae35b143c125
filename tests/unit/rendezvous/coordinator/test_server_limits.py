"""What the coordinator does with old heartbeats, and with texts that are too large, without a thread or a clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from attrs import Factory, define, evolve, field

from elasticlib.rendezvous.coordinator._causes import ASKED_EARLY
from elasticlib.rendezvous.coordinator._server import REFUSALS, Server
from elasticlib.rendezvous.coordinator._server_events import (
    Action,
    Arrived,
    Close,
    Event,
    Heard,
    Interrupt,
    Load,
    Loaded,
    Save,
    Stop,
    Unsaved,
)
from elasticlib.rendezvous.coordinator._state import Rules, State
from elasticlib.rendezvous.node._belief import Belief
from elasticlib.rendezvous.protocol._codec import key_of
from elasticlib.rendezvous.protocol._exchange import CAUSE, Posted, heartbeat_key, key_place, mailbox_key, report_place
from elasticlib.rendezvous.protocol._messages import (
    Acknowledgement,
    Descriptor,
    Elaborate,
    Envelope,
    Failed,
    FailureNote,
    Final,
    Join,
    Message,
    NodeHeartbeat,
    RankAssignment,
    Report,
    RoundEnd,
    Stopped,
    Told,
    decode,
    encode,
)
from elasticlib.rendezvous.protocol._operations import Discard, Log, Read, Receive, Write
from elasticlib.rendezvous.protocol._shortening import EARLY, ENVELOPE, SHORT, WHOLE, early, fitting

HEARTBEAT = 10.0
KEY = key_of("secret")
FAILURE = FailureNote(0, 0, 1, 1, "ValueError: no")


@define
class Office:
    """A server, and a store in which everything is done at once."""

    rules: Rules
    key: bytes | None = None
    now: float = 100.0
    values: dict[str, bytes] = Factory(dict)
    logged: list[str] = Factory(list)
    stopped: bool = False
    journaled: bool = False
    most: int = 10**9
    """Bytes of the document that the store takes."""
    refuse: int = 0
    """So many documents more are refused, whatever their size."""
    saved: list[int] = Factory(list)
    document: bytes = b""
    envelopes: Counter[str] = Factory(Counter)
    server: Server = field(init=False)
    _wait: float | None = None
    _posted: int = 0

    def __attrs_post_init__(self) -> None:
        self.server, actions = self._new().begin(self.now)
        self._do(actions)

    def _new(self) -> Server:
        return Server("job", "host", self.key, "nonce", State(self.rules), self.journaled)

    def tell(self, event: Event) -> None:
        self.server, actions = self.server.step(event, self.now)
        self._do(actions)

    def say(self, *reports: Report) -> str:
        """All come at once; the mailbox that the last one opens, if it is a Join."""
        entries, mailbox = [], ""
        for report in reports:
            self.envelopes[report.node] += 1
            seq = self.envelopes[report.node]
            place = report_place("job", "nonce", report.node, seq)
            self._posted += 1
            entries.append(Posted(self._posted, encode(Envelope(seq, report), self.key, place)))
            mailbox = f"{report.node}/{seq}"
        self.tell(Arrived(entries))
        return mailbox

    def join(self, *nodes: str) -> list[str]:
        return [self.say(Join(node, Descriptor(1, "trainer", ("127.0.0.1",), 1))) for node in nodes]

    def node_heartbeat(self, mailbox: str, node_heartbeat: NodeHeartbeat) -> bytes:
        key = heartbeat_key(mailbox)
        return encode(node_heartbeat, self.key, key_place("job", "nonce", key))

    def wait(self, seconds: float, heartbeats: Sequence[tuple[str, Sequence[bytes]]] = ()) -> None:
        """Time passes; each second the next of the values given with a mailbox lies where its heartbeats do."""
        end, turn = self.now + seconds, 0
        while not self.stopped and self.now < end:
            for mailbox, values in heartbeats:
                self.values[heartbeat_key(mailbox)] = values[turn % len(values)]
            turn += 1
            self.now += min(1.0 if self._wait is None else self._wait, end - self.now, 1.0)
            self.tell(Arrived(()))

    def notice(self, mailbox: str, index: int) -> Told | None:
        key = mailbox_key(mailbox, index)
        data = self.values.get(key)
        if data is None:
            return None
        found: Message = decode(data, self.key, key_place("job", "nonce", key))
        assert isinstance(found, (RankAssignment, RoundEnd, Final, Elaborate))
        return found

    def end(self, mailbox: str, index: int) -> Final:
        """The end as the node of that mailbox understands it."""
        found = self.notice(mailbox, index)
        assert isinstance(found, Final)
        return Belief("job", mailbox, self.key, "nonce").whole(found, self.values.get(CAUSE))

    def _do(self, actions: Sequence[Action]) -> None:
        for index, action in enumerate(actions):
            match action:
                case Load():
                    self.tell(Loaded(self.document or None))
                case Save(data) if len(data) > self.most or self.refuse > 0:
                    self.refuse -= 1
                    assert self.server.refused < REFUSALS
                    self.tell(Unsaved("too large", actions[index + 1 :]))
                    return
                case Save(data):
                    self.saved.append(len(data))
                    self.document = data
                case Write(values):
                    self.values.update(values)
                case Read(keys):
                    self.tell(Heard([self.values.get(key) for key in keys]))
                case Receive(timeout):
                    self._wait = timeout
                case Stop():
                    self.stopped = True
                case Log(_, text):
                    self.logged.append(text)
                case Discard() | Interrupt():
                    pass
                case _:
                    raise AssertionError(action)


def living(office: Office, mailbox: str, **said: int) -> tuple[str, list[bytes]]:
    """Heartbeats of a node that lives."""
    return mailbox, [office.node_heartbeat(mailbox, NodeHeartbeat(count, **said)) for count in range(1, 200)]


# Only a higher count is life.


def test_two_heartbeats_of_the_past_in_turn_keep_no_dead_node_alive() -> None:
    office = Office(Rules(1, 2, heartbeat=HEARTBEAT), KEY)
    a, b = office.join("a", "b")
    old = [office.node_heartbeat(b, NodeHeartbeat(count)) for count in (6, 7)]

    office.wait(HEARTBEAT + 2.0, [living(office, a), (b, old)])

    assert office.notice(a, 1) == RoundEnd(0, "node b is lost: no heartbeat for 10 s", True)


def test_an_old_heartbeat_says_nothing_of_messages_either() -> None:
    office = Office(Rules(1, 2, heartbeat=HEARTBEAT), KEY)
    a, b = office.join("a", "b")
    new, old = (
        [office.node_heartbeat(b, NodeHeartbeat(9 + count, said=2)) for count in range(40)],
        office.node_heartbeat(b, NodeHeartbeat(3, said=1)),
    )
    heartbeats = [node_heartbeat for each in new for node_heartbeat in (each, old)]

    office.wait(HEARTBEAT + 3.0, [living(office, a), (b, heartbeats)])

    final = office.notice(a, 1)
    assert isinstance(final, Final)
    assert "message 2 of node b was removed from the store unread" in final.why


def test_old_heartbeats_do_not_keep_a_node_waited_for_after_the_end() -> None:
    office = Office(Rules(1, 1, 0, heartbeat=HEARTBEAT), KEY)
    (a,) = office.join("a")
    office.say(Stopped("a", 0, (FAILURE,)))
    office.wait(3.0, [living(office, a)])
    office.tell(Close(300.0))
    old = [office.node_heartbeat(a, NodeHeartbeat(count)) for count in (1, 2)]

    office.wait(HEARTBEAT + 3.0, [(a, old)])

    assert isinstance(office.notice(a, 2), Final)
    assert office.stopped


# Failures too large to write down.

LONG = "a line of a long text\n" * 950


def stopped(node: str, age: float) -> Stopped:
    notes = (FailureNote(rank, rank, 1, 1, LONG, "ValueError", LONG, age=age) for rank in range(8))
    report = fitting(Stopped(node, 0, tuple(notes)))
    assert isinstance(report, Stopped)
    return report


def asking_office(count: int, first: int) -> tuple[Office, list[str], Stopped]:
    """All have said the beginnings of their failures; and what the node of the root cause knows of its own."""
    office = Office(Rules(count, count, 0, heartbeat=HEARTBEAT), journaled=True)
    names = [f"n{number}" for number in range(count)]
    mailboxes = office.join(*names)
    found = [stopped(name, age=count - abs(number - first)) for number, name in enumerate(names)]
    office.say(*(early(each, None) for each in found))
    return office, mailboxes, found[first]


def failed_office(count: int, key: bytes | None = None, **others: Any) -> tuple[Office, list[str]]:
    office = Office(Rules(count, count, 0, heartbeat=HEARTBEAT), key, journaled=True)
    for name, value in others.items():
        setattr(office, name, value)
    names = [f"n{number}" for number in range(count)]
    mailboxes = office.join(*names)
    office.say(*(stopped(name, age=float(number)) for number, name in enumerate(names)))
    return office, mailboxes


def test_outcome_of_many_large_failures_has_the_whole_root_cause() -> None:
    office, mailboxes = failed_office(100)

    finals = [office.end(mailbox, 2) for mailbox in mailboxes]
    assert all(final == finals[0] for final in finals)
    assert finals[0].root_node == "n99"
    assert finals[0].root is not None
    assert finals[0].root.traceback == LONG
    assert max(office.saved) < 4 * ENVELOPE


def test_a_long_root_cause_lies_in_the_store_once() -> None:
    office, mailboxes = failed_office(100)

    assert max(len(office.values[mailbox_key(mailbox, 2)]) for mailbox in mailboxes) < WHOLE
    assert len(LONG) < len(office.values[CAUSE]) < ENVELOPE


def test_it_is_there_before_anybody_is_told_of_it() -> None:
    office, _ = failed_office(3)

    assert list(office.values).index(CAUSE) < min(
        place for place, key in enumerate(office.values) if key.endswith("/2") and key.startswith("box/")
    )


@pytest.mark.parametrize("key", [None, KEY])
def test_forged_root_cause_is_not_believed_and_costs_only_the_texts(key: bytes | None) -> None:
    office, mailboxes = failed_office(2, key)
    whole, told = office.end(mailboxes[0], 2), office.notice(mailboxes[0], 2)
    assert whole.root is not None
    forged = Failed("n1", 0, (evolve(whole.root, message="his words"),))
    other = encode(forged, office.key, key_place("job", "nonce", mailbox_key(mailboxes[0], 9)))

    for data in (
        None,
        b"",
        b"{",
        encode(forged),
        other,
        encode(NodeHeartbeat(1), office.key, key_place("job", "nonce", CAUSE)),
    ):
        office.values[CAUSE] = data or b""
        assert office.end(mailboxes[0], 2) == told
    assert isinstance(told, Final)
    assert told.root is not None
    assert "characters were cut here" in told.root.traceback


def test_outcome_waits_for_the_whole_root_cause_of_one_node() -> None:
    office, mailboxes, whole = asking_office(50, first=0)

    asked = [office.notice(mailbox, 2) for mailbox in mailboxes]
    assert asked == [Elaborate(0), *[None] * 49]
    office.say(fitting(Failed("n0", 0, whole.failures)))
    finals = [office.end(mailboxes[0], 3), *(office.end(mailbox, 2) for mailbox in mailboxes[1:])]
    assert all(final == finals[0] for final in finals)
    assert finals[0].root is not None
    assert finals[0].root.traceback == LONG


def test_few_nodes_are_asked_for_whole_failures_in_whatever_order() -> None:
    office, mailboxes, whole = asking_office(50, first=49)

    asked = [office.notice(mailbox, 2) == Elaborate(0) for mailbox in mailboxes]
    assert sum(asked) == ASKED_EARLY + 1
    assert asked[-1]
    for node in range(ASKED_EARLY):
        office.say(fitting(Failed(f"n{node}", 0, stopped(f"n{node}", 1.0).failures)))
    assert office.server.state.final is None
    office.say(fitting(Failed("n49", 0, whole.failures)))
    assert office.end(mailboxes[5], 2).root_node == "n49"


def test_root_cause_of_a_lost_node_is_told_as_far_as_it_is_known() -> None:
    office, mailboxes, _ = asking_office(3, first=2)

    office.wait(HEARTBEAT + 2.0, [living(office, mailbox) for mailbox in mailboxes[:2]])

    final = office.end(mailboxes[0], 4)
    assert final.root_node == "n2"
    assert final.root is not None
    assert EARLY // 4 < len(final.root.traceback) + len(final.root.message) < EARLY


def test_a_successor_asks_again_for_the_rest_of_the_root_cause() -> None:
    office, _, whole = asking_office(3, first=2)
    successor = Office(office.rules, journaled=True, document=office.document, envelopes=office.envelopes)
    assert successor.server.state.final is None

    assert "elaborate" in str([each for key, each in successor.values.items() if key.startswith("box/n2/")])
    successor.say(fitting(Failed("n2", 0, whole.failures)))

    assert successor.server.state.final is not None
    assert successor.server.state.final.root is not None
    assert successor.server.state.final.root.traceback == LONG


def test_all_that_comes_at_once_is_saved_once() -> None:
    office, _ = failed_office(10)
    before = len(office.saved)

    office.say(*(Acknowledgement(f"n{number}") for number in range(10)))

    assert len(office.saved) == before + 1


def test_document_grows_by_the_same_size_with_each_node() -> None:
    def size(count: int) -> int:
        return len(failed_office(count)[0].document)

    assert size(40) - size(20) < 20 * 200


def test_a_successor_tells_the_same_notices_in_the_same_mailboxes() -> None:
    office, mailboxes = failed_office(5)
    successor = Office(office.rules, journaled=True, document=office.document)

    assert [office.end(mailbox, 2) for mailbox in mailboxes] == [successor.end(mailbox, 2) for mailbox in mailboxes]
    assert office.values[CAUSE] == successor.values[CAUSE]


def test_refused_document_is_shortened_and_all_nodes_get_the_outcome() -> None:
    office, mailboxes = failed_office(5, most=20_000)

    final = office.end(mailboxes[0], 2)
    assert final.root_node == "n4"
    assert len(office.document) <= 20_000
    assert office.server.state.final is not None
    root = office.server.state.final.root
    assert root is not None
    assert len(root.traceback) <= SHORT


def test_a_document_that_cannot_be_shortened_ends_the_job_with_the_reason() -> None:
    office = Office(Rules(2, 2, heartbeat=HEARTBEAT), journaled=True)
    (a,) = office.join("a")
    office.refuse = 2
    office.join("b")

    final = office.notice(a, 1)
    assert isinstance(final, Final)
    assert final.kind == "closed"
    assert "the store refused the job's state: too large" in final.why


def test_message_longer_than_any_node_writes_is_refused_with_a_line() -> None:
    office = Office(Rules(1, 1, heartbeat=HEARTBEAT))
    office.tell(Arrived([Posted(1, b"x" * (ENVELOPE + 1))]))

    assert ["a report was refused: the inbox holds 65,537 bytes, and a message has at most 65,536"] == office.logged
