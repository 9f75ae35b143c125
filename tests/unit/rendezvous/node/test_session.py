"""Rules of a node's session, without a thread, a clock or a store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from attrs import Factory, define, evolve, fields
from hypothesis import assume, given, strategies as st

from elasticlib.errors import RendezvousClosedError, RendezvousConnectionError, RendezvousStateError
from elasticlib.rendezvous.node._identity import NodeIdentity
from elasticlib.rendezvous.node._session import Session
from elasticlib.rendezvous.node._session_events import (
    Action,
    Ask,
    CloseSession,
    Connected,
    ConnectionLost,
    ConnectionThread,
    Denied,
    Describe,
    Disconnect,
    Event,
    OpenConnection,
    OperationDone,
    Refused,
    Seek,
    SendReport,
    SuspendHeartbeats,
)
from elasticlib.rendezvous.node._session_liveness import ATTEMPT, Limits, TimePassed
from elasticlib.rendezvous.node._session_memory import SLICE, search
from elasticlib.rendezvous.protocol._exchange import (
    ANNOUNCEMENT,
    CAUSE,
    COORDINATOR_HEARTBEAT,
    heartbeat_key,
    mailbox_key,
)
from elasticlib.rendezvous.protocol._messages import (
    EPOCH_BITS,
    Acknowledgement,
    Announcement,
    Caution,
    Close as CloseJob,
    ContactLost,
    CoordinatorHeartbeat,
    Descriptor,
    Elaborate,
    Envelope,
    Failed,
    FailureNote,
    Final,
    GivenUp,
    HeartbeatsRead,
    Join,
    Leave,
    Message,
    NodeHeartbeat,
    RankAssignment,
    RoundEnd,
    Stopped,
    StoreGone,
    Succeeded,
    Terms,
    decode,
    encode,
)
from elasticlib.rendezvous.protocol._operations import Delete, Log, Post, Read, Take, Update, Wait
from elasticlib.rendezvous.protocol._progress import Seen
from elasticlib.rendezvous.protocol._shortening import EARLY, ENVELOPE, refers
from elasticlib.rendezvous.protocol._timing import FENCE, INTERVAL, KILL

HEARTBEAT = 10.0
GREETING = Announcement("job", "nonce", "a", Terms(1, 2, 3), HEARTBEAT)
DESCRIPTOR = Descriptor(2, "trainer", ("10.0.0.2",), 4000)
SEAT = RankAssignment(0, 1, 2, 2, 4, 2, 4, 0, 3, ("10.0.0.1",), 29500, "all are there")
FINAL = Final(True, "all workers succeeded", round=0)
BOX = "b/1"
NODE_HEARTBEAT = heartbeat_key(BOX)
NODE_HEARTBEAT_2 = heartbeat_key("b/2")


def key(number: int, mailbox: str = BOX) -> str:
    return mailbox_key(mailbox, number)


def put(message: Message) -> bytes:
    """As it lies in the store of a job without a token."""
    return encode(message)


@define
class Shell:
    """Does what a session asks for, and passes on the results."""

    session: Session = Factory(lambda: Session.begin(NodeIdentity("job", "b", None), Limits(), 100.0)[0])
    now: float = 100.0
    connection: int = 1
    pending: dict[ConnectionThread, Ask] = Factory(dict)
    """Request in progress on each thread."""
    done: list[Action] = Factory(list)
    heartbeats: int = 0

    def handle(self, event: Event) -> list[Action]:
        """The actions that follow."""
        self.session, actions = self.session.step(event, self.now)
        for action in actions:
            if isinstance(action, Ask):
                assert action.thread not in self.pending, f"{action} while {self.pending[action.thread]} is under way"
                assert action.connection == self.connection
                self.pending[action.thread] = action
            if isinstance(action, OpenConnection):
                self.connection, self.pending = action.connection, {}
        self.done += actions
        return list(actions)

    def what(self, thread: ConnectionThread = ConnectionThread.SPEAK) -> Any:
        """Return the operation in progress on the thread; None if there is none."""
        return self.pending[thread].operation if thread in self.pending else None

    def answer(self, result: Any = None, thread: ConnectionThread = ConnectionThread.SPEAK) -> list[Action]:
        """It was done."""
        ask = self.pending.pop(thread)
        return self.handle(OperationDone(ask.connection, ask.number, result))

    def deny(self, too_large: bool = True) -> list[Action]:
        """The store will not do it."""
        ask = self.pending.pop(ConnectionThread.SPEAK)
        return self.handle(Denied(ask.connection, ask.number, "request is too large", too_large))

    def later(self, seconds: float) -> list[Action]:
        self.now += seconds
        return self.handle(TimePassed())

    def greeted(self, greeting: Announcement = GREETING) -> Shell:
        """Contact is there."""
        self.handle(Connected(self.connection))
        self.answer(True)
        self.answer([put(greeting), None])
        return self

    def joined(self) -> Shell:
        """The request to join is in the store, and the first heartbeat acknowledged."""
        self.handle(Seek(2, "trainer"))
        self.answer(DESCRIPTOR)
        self.answer()
        return self.beaten()

    def beaten(self) -> Shell:
        """A heartbeat, which is due, was acknowledged by a coordinator that lives."""
        assert isinstance(self.what(), Update), self.what()
        assert self.what().values, self.what()
        self.heartbeats += 1
        self.answer([put(CoordinatorHeartbeat("nonce", self.heartbeats))])
        return self

    def beats(self, count: int) -> None:
        """So many heartbeats, each when it is due."""
        for _ in range(count):
            self.later(INTERVAL * HEARTBEAT)
            self.beaten()

    def reads_heartbeat(self, message: Message) -> list[Action]:
        """At the next heartbeat, that is what lies where the coordinator's own should be."""
        self.later(INTERVAL * HEARTBEAT)
        return self.answer([put(message)])

    def rejoined(self) -> None:
        """The next request to join is in the store, and a heartbeat acknowledged."""
        self.handle(Seek(2, "trainer"))
        self.answer(DESCRIPTOR)
        self.posted().beaten()

    def deleted(self) -> tuple[str, ...]:
        """Return the keys that are deleted now; none if the session waits for the next notice."""
        if isinstance(self.what(ConnectionThread.WATCH), Take):
            return ()
        delete = self.what(ConnectionThread.WATCH)
        assert isinstance(delete, Delete), delete
        self.answer(None, ConnectionThread.WATCH)
        return tuple(delete.keys)

    def posted(self) -> Shell:
        """The request to join, which is said once more, is in the store."""
        assert isinstance(self.what(), Post), self.what()
        self.answer()
        return self

    def reads(self, message: Message | bytes) -> list[Action]:
        """A notice is found where it is waited for, once what is deleted before is gone."""
        if isinstance(self.what(ConnectionThread.WATCH), Delete):
            self.answer(None, ConnectionThread.WATCH)
        return self.answer(message if isinstance(message, bytes) else put(message), ConnectionThread.WATCH)

    def drain(self) -> tuple[Any, ...]:
        self.session, events = self.session.drain()
        return events

    def envelope(self) -> Envelope:
        """The message that is being posted."""
        post = self.what()
        assert isinstance(post, Post), post
        envelope = decode(post.data)
        assert isinstance(envelope, Envelope)
        return envelope


def why_lost(shell: Shell) -> str:
    """Return why the agent is to stop its workers, its only event."""
    [lost] = shell.drain()
    assert isinstance(lost, ContactLost)
    return lost.why


# finding the job


def test_session_connects_at_once_and_waits_for_the_greeting() -> None:
    _, actions = Session.begin(NodeIdentity("job", "b", None), Limits(), 0.0)
    shell = Shell()

    shell.handle(Connected(1))

    assert (OpenConnection(1, ATTEMPT),) == actions
    assert isinstance(shell.what(), Wait)
    assert ANNOUNCEMENT == shell.what().key


def test_node_keeps_waiting_without_a_coordinator_and_logs_a_warning() -> None:
    shell = Shell()
    shell.handle(Seek(2, "trainer"))
    shell.handle(Connected(1))

    shell.answer(False)
    actions = shell.later(6.0)

    assert isinstance(shell.what(), Wait)
    assert [("warning", True)] == [
        (line.level, "no node coordinates this job yet" in line.text) for line in actions if isinstance(line, Log)
    ]


def test_unreadable_greeting_is_read_again() -> None:
    shell = Shell()
    shell.handle(Connected(1))
    shell.answer(True)

    shell.answer([b"scribble", None])
    assert shell.what() is None
    assert shell.session.speaks_at() == pytest.approx(shell.now + 0.1)
    shell.later(0.2)
    shell.answer(True)
    shell.answer([put(GREETING), None])
    shell.handle(Seek(2, "trainer"))

    assert Describe(2, "trainer") == shell.what()


def test_a_greeting_that_stays_a_scribble_ends_this_nodes_part() -> None:
    shell = Shell()
    shell.handle(Connected(1))
    for _ in range(3):
        shell.answer(True)
        shell.answer([b"scribble", None])
        shell.later(2.0)

    assert isinstance(shell.session.error, RendezvousStateError)
    assert Disconnect(1) in shell.done


def test_node_leaves_a_restarted_job_after_a_new_connection() -> None:
    shell = Shell().greeted()
    shell.handle(ConnectionLost(1, "reset"))

    shell.greeted(evolve(GREETING, nonce="other", host="c"))

    assert isinstance(shell.session.error, RendezvousClosedError)
    assert "job 'job' was restarted on c" in str(shell.session.error)


@pytest.mark.parametrize(
    ("greeting", "token", "why"),
    [
        (encode(GREETING, b"secret", "job//hello"), None, "the job runs with a token, and this node has none"),
        (encode(GREETING), b"secret", "this node has a token, and the job runs without one"),
        (encode(GREETING, b"secret", "job//hello"), b"other", "this node's token is not the job's"),
        (b'{"v":7,"type":"hello"}', None, "speaks version 7 of the protocol, this node version 1"),
    ],
    ids=["only the job has a token", "only the node has a token", "another token", "another version"],
)
def test_a_greeting_of_another_token_or_version_is_named(greeting: bytes, token: bytes | None, why: str) -> None:
    with pytest.raises(RendezvousStateError, match=why):
        NodeIdentity("job", "b", token).announcement(greeting)


def test_an_attempt_that_fails_is_made_again() -> None:
    shell = Shell()

    shell.handle(ConnectionLost(1, "refused", gone=True))
    actions = shell.later(1.0)

    assert [OpenConnection(2, ATTEMPT)] == actions


def test_answers_on_an_abandoned_connection_are_ignored() -> None:
    shell = Shell().greeted().joined()
    old = shell.pending[ConnectionThread.WATCH]
    shell.handle(ConnectionLost(1, "reset"))

    shell.handle(OperationDone(1, old.number, True))
    shell.handle(Connected(1))
    shell.handle(ConnectionLost(1, "again"))
    shell.handle(Refused(1, RendezvousStateError("of the old one")))

    assert 2 == shell.connection
    assert {} == shell.pending
    assert shell.session.error is None


# messages


def test_node_requests_ranks_with_its_own_description() -> None:
    shell = Shell().greeted()

    shell.handle(Seek(2, "trainer"))
    assert Describe(2, "trainer") == shell.what()
    shell.answer(DESCRIPTOR)

    assert Envelope(1, Join("b", DESCRIPTOR)) == shell.envelope()


def test_messages_wait_for_contact_and_go_out_in_order() -> None:
    shell = Shell()
    reports = [Leave("b", "bye", 0), CloseJob("b", "enough")]
    for report in reports:
        shell.handle(SendReport(report))

    shell.greeted()
    envelopes = []
    while shell.what() is not None:
        envelopes.append(shell.envelope())
        shell.answer()

    assert [Envelope(number + 1, report) for number, report in enumerate(reports)] == envelopes


def test_message_is_sent_again_with_its_number_after_connection_loss() -> None:
    shell = Shell().greeted()
    shell.handle(SendReport(Leave("b", "bye")))
    first = shell.envelope()

    shell.handle(ConnectionLost(1, "reset"))
    shell.greeted()

    assert first == shell.envelope()


LONG = "a line of a long text\n" * 950
NOTES = tuple(FailureNote(rank, rank, 1, 1, LONG, "ValueError", LONG, age=9.0 - rank) for rank in range(8))


def failures(shell: Shell) -> list[tuple[int, int]]:
    """Of the message that is being posted: ranks, and characters of each."""
    report = shell.envelope().report
    assert isinstance(report, (Failed, Stopped))
    assert len(shell.what().data) <= ENVELOPE
    return [(note.rank, len(note.message) + len(note.traceback)) for note in report.failures]


def test_unrequested_failure_report_is_short_and_never_repeated() -> None:
    shell = Shell().greeted().joined()
    shell.handle(SendReport(Failed("b", 0, NOTES)))
    assert len(shell.what().data) <= EARLY
    assert [rank for rank, _ in failures(shell)] == [*range(len(failures(shell)))]
    shell.answer()

    shell.handle(SendReport(Stopped("b", 0, NOTES)))

    assert Stopped("b", 0, ()) == shell.envelope().report


@pytest.mark.parametrize("stopped", [True, False])
def test_a_node_with_the_root_cause_sends_all_of_it_on_request(stopped: bool) -> None:
    shell = Shell().greeted().joined()
    shell.reads(SEAT)
    shell.drain()
    shell.handle(SendReport(Failed("b", 0, NOTES)))
    shell.answer()
    if stopped:
        shell.handle(SendReport(Stopped("b", 0, NOTES)))
        shell.answer()

    shell.reads(Elaborate(0))

    assert (0, 2 * len(LONG)) in failures(shell)
    assert isinstance(shell.envelope().report, Failed)
    assert () == shell.drain()


def test_caution_is_logged_here_and_not_passed_to_the_agent() -> None:
    shell = Shell().greeted().joined()
    shell.reads(Caution("node c runs something else"))

    assert [Log("warning", "node c runs something else")] == [it for it in shell.done if isinstance(it, Log)]
    assert () == shell.drain()


def test_later_failures_are_sent_in_full_after_details_are_requested() -> None:
    shell = Shell().greeted().joined()
    shell.reads(Elaborate(0))
    assert shell.what() is None

    shell.handle(SendReport(Stopped("b", 0, NOTES)))

    assert (0, 2 * len(LONG)) in failures(shell)


def test_request_for_failures_of_another_round_is_not_answered() -> None:
    shell = Shell().greeted().joined()
    shell.handle(SendReport(Failed("b", 0, NOTES)))
    shell.answer()

    shell.reads(Elaborate(1))

    assert shell.what() is None


ENDED = Final(False, "a worker failed", "a", NOTES[0])


def test_root_cause_stored_elsewhere_is_read_before_end_is_reported() -> None:
    shell = Shell().greeted().joined()
    shell.reads(refers(ENDED))
    assert () == shell.drain()
    assert Read((CAUSE,)) == shell.what(ConnectionThread.WATCH)

    shell.answer([put(Failed("a", 0, (NOTES[0],)))], ConnectionThread.WATCH)

    assert (ENDED,) == shell.drain()
    assert (key(0),) == shell.deleted()
    assert Acknowledgement("b") == shell.envelope().report


@pytest.mark.parametrize("data", [None, b"", b"{", encode(NodeHeartbeat(1)), encode(Failed("a", 0, NOTES[1:2]))])
def test_end_is_reported_in_brief_if_full_root_cause_is_missing(data: bytes | None) -> None:
    shell = Shell().greeted().joined()
    shell.reads(refers(ENDED))

    shell.answer([data], ConnectionThread.WATCH)

    assert (refers(ENDED),) == shell.drain()
    assert Acknowledgement("b") == shell.envelope().report


def test_a_connection_that_breaks_amid_that_reads_the_end_again() -> None:
    shell = Shell().greeted().joined()
    shell.reads(refers(ENDED))

    shell.handle(ConnectionLost(1, "reset"))
    shell.later(1.0)
    shell.greeted()

    assert () == shell.drain()
    assert key(0) == shell.what(ConnectionThread.WATCH).key
    shell.reads(refers(ENDED))
    shell.answer([put(Failed("a", 0, (NOTES[0],)))], ConnectionThread.WATCH)
    assert (ENDED,) == shell.drain()


def test_request_repeated_after_reconnect_is_unchanged() -> None:
    shell = Shell().greeted()
    shell.handle(Seek(2, "trainer"))
    shell.answer(DESCRIPTOR)
    shell.handle(ConnectionLost(1, "reset"))

    shell.greeted()

    assert Envelope(1, Join("b", DESCRIPTOR)) == shell.envelope()


# a store that is there and refuses


LARGE = tuple(FailureNote(rank, rank, 1, 1, "m" * 9000, traceback="t" * 9000, age=1.0) for rank in range(4))


def test_too_large_message_is_sent_again_shorter_until_accepted() -> None:
    shell = Shell().greeted().joined()
    shell.handle(SendReport(Stopped("b", 0, LARGE)))
    sizes = []
    while len(put(shell.envelope())) > 3000:
        assert shell.envelope().seq == 2
        sizes.append(len(put(shell.envelope())))
        shell.deny()

    assert sizes == sorted(sizes, reverse=True)
    report = shell.envelope().report
    assert isinstance(report, Stopped)
    assert "characters were cut here" in report.failures[0].message
    assert shell.session.error is None


def test_a_message_that_is_refused_in_any_size_ends_the_job() -> None:
    shell = Shell().greeted().joined()
    shell.handle(SendReport(Stopped("b", 0, LARGE)))
    tries = 0
    while shell.session.error is None:
        tries += 1
        shell.deny()

    assert tries < 12
    close = shell.envelope().report
    assert close == CloseJob("b", "the store refused a message of node b: request is too large")
    assert "node b cannot continue: request is too large" in str(shell.session.error)
    shell.deny()
    assert not isinstance(shell.what(), Post)


def test_refusal_for_another_reason_than_size_shortens_nothing() -> None:
    shell = Shell().greeted().joined()
    shell.handle(SendReport(Stopped("b", 0, LARGE)))
    shell.deny(too_large=False)

    assert isinstance(shell.envelope().report, CloseJob)
    assert shell.session.error is not None


# heartbeats


def test_heartbeats_start_with_the_request_and_repeat_each_interval() -> None:
    shell = Shell().greeted()
    assert shell.session.speaks_at() is None
    shell.joined()

    assert shell.session.speaks_at() == pytest.approx(shell.now + INTERVAL * HEARTBEAT)
    for count, read in ((2, 0), (3, 1)):
        shell.later(INTERVAL * HEARTBEAT)
        assert {NODE_HEARTBEAT: put(NodeHeartbeat(count, read, 1))} == shell.what().values
        shell.beaten().reads(SEAT)


def test_node_sends_no_heartbeats_while_they_are_suspended() -> None:
    shell = Shell().greeted().joined()

    shell.handle(SuspendHeartbeats(True))
    shell.later(INTERVAL * HEARTBEAT)
    operation = shell.what()
    shell.answer([None])
    shell.handle(SuspendHeartbeats(False))

    assert Read((COORDINATOR_HEARTBEAT,)) == operation
    assert [NODE_HEARTBEAT] == list(shell.what().values)


def test_node_learns_last_read_heartbeat_while_its_own_are_suspended() -> None:
    """Its launcher stands still, so that it writes no other: it must know all the same how long its workers have."""
    shell = Shell().greeted().joined()
    shell.reads(SEAT)
    shell.later(INTERVAL * HEARTBEAT)
    sent = shell.now
    shell.beaten()
    shell.handle(SuspendHeartbeats(True))

    shell.reads_heartbeat(confirm_read("c", count=9))

    assert shell.session.kill_at() == sent + KILL * HEARTBEAT


def test_node_without_acknowledged_heartbeats_is_fenced_and_reconnects() -> None:
    shell = Shell().greeted().joined()

    shell.later(INTERVAL * HEARTBEAT)
    actions = shell.later((FENCE - INTERVAL) * HEARTBEAT + 0.1)

    assert [OpenConnection] == [type(action) for action in actions if not isinstance(action, Log)]
    assert why_lost(shell)
    assert 100.0 + KILL * HEARTBEAT == shell.session.kill_at()


def test_member_leaves_a_restarted_job_after_its_heartbeat_changes() -> None:
    """Its heartbeat is none of ours, so that contact is sought anew: even where any node may coordinate."""
    shell = Shell(Session.begin(NodeIdentity("job", "b", None), Limits(has_election=True), 100.0)[0]).greeted().joined()

    while shell.connection == 1 and shell.now < 200.0:
        shell.later(INTERVAL * HEARTBEAT)
        if shell.connection == 1:
            shell.answer([put(CoordinatorHeartbeat("other", int(shell.now)))])
    shell.greeted(evolve(GREETING, nonce="other"))

    assert isinstance(shell.session.error, RendezvousClosedError)
    assert shell.now < 100.0 + HEARTBEAT


@pytest.mark.parametrize("junk", [b"junk", put(GREETING), put(CoordinatorHeartbeat("other", 7))])
def test_invalid_heartbeat_of_the_coordinator_is_refused_and_named(junk: bytes) -> None:
    shell = Shell().greeted().joined()

    while shell.connection == 1:
        shell.later(INTERVAL * HEARTBEAT)
        if shell.connection == 1:
            shell.answer([junk])

    refusals = [action.text for action in shell.done if isinstance(action, Log) and "refused" in action.text]
    assert refusals[0].startswith("a coordinator's heartbeat was refused: the heartbeat ")
    (lost,) = shell.drain()
    assert isinstance(lost, ContactLost)
    assert "no answer for" not in lost.why
    assert "coordinator" in lost.why


def test_coordinator_heartbeat_reports_waiting_nodes() -> None:
    shell = Shell().greeted().joined()
    shell.reads_heartbeat(CoordinatorHeartbeat("nonce", 7, "for node c", waiting=3))

    assert (3, "for node c") == (shell.session.spares, shell.session.status)


def test_waiting_node_logs_which_node_is_missing_as_far_as_known() -> None:
    shell = Shell().greeted().joined()
    lines = []
    for count, status in enumerate(["", "for node c", "for node c", "for node c"], 2):
        lines += [line.text for line in shell.later(0.3 * HEARTBEAT) if isinstance(line, Log)]
        shell.answer([put(CoordinatorHeartbeat("nonce", count, status))])
    lines += [line.text for line in shell.later(0.3 * HEARTBEAT) if isinstance(line, Log)]

    assert [
        "node b has waited 6 s for job 'job': the job is found, but its coordinator has not reported its nodes yet",
        "node b has waited 15 s for job 'job': for node c",
    ] == lines


# notices


def test_notices_are_read_one_after_the_other_and_deleted() -> None:
    shell = Shell().greeted().joined()
    assert Take(key(0), SLICE) == shell.what(ConnectionThread.WATCH)

    shell.answer(put(SEAT), ConnectionThread.WATCH)

    assert (SEAT,) == shell.drain()
    assert (key(0),) == shell.deleted()
    assert Take(key(1), SLICE) == shell.what(ConnectionThread.WATCH)


def test_node_due_for_next_round_does_not_stop_to_delete_round_end() -> None:
    """Until there are ranks again all nodes are in a hurry, and each deletion is a request."""
    shell = Shell().greeted().joined()
    shell.reads(SEAT)
    shell.deleted()

    shell.reads(RoundEnd(0, "a worker failed", True))

    assert Take(key(2), SLICE) == shell.what(ConnectionThread.WATCH)


def test_a_wait_that_ends_without_a_notice_begins_again() -> None:
    shell = Shell().greeted().joined()

    shell.answer(None, ConnectionThread.WATCH)

    assert Take(key(0), SLICE) == shell.what(ConnectionThread.WATCH)


@pytest.mark.parametrize("junk", [b"rubbish", b"{" * 100_000, put(CoordinatorHeartbeat("nonce", 1))])
def test_a_notice_that_is_none_is_refused_with_a_line_and_deleted(junk: bytes) -> None:
    shell = Shell().greeted().joined()

    actions = shell.reads(junk)

    assert [True] == ["a notice was refused" in line.text for line in actions if isinstance(line, Log)]
    assert () == shell.drain()
    assert (key(0),) == shell.deleted()  # it would be found again and again
    assert Take(key(0), SLICE) == shell.what(ConnectionThread.WATCH)


def test_new_request_to_join_wakes_the_wait_for_the_old_answers() -> None:
    shell = Shell().greeted().joined()
    waits = shell.what(ConnectionThread.WATCH)

    shell.handle(Seek(2, "trainer"))

    assert Describe(2, "trainer") == shell.what()
    shell.answer(DESCRIPTOR)
    assert isinstance(shell.envelope().report, Join)
    assert {waits.key: b""} == shell.what().values
    shell.reads(b"")
    assert Take(key(0, "b/2"), SLICE) == shell.what(ConnectionThread.WATCH)
    shell.answer()
    assert Take(key(0, "b/2"), SLICE) == shell.what(ConnectionThread.WATCH)
    assert Update({NODE_HEARTBEAT_2: put(NodeHeartbeat(2, 0, 2))}, (COORDINATOR_HEARTBEAT,)) == shell.what()


def test_wait_is_woken_by_the_message_before_the_request() -> None:
    shell = Shell().greeted().joined()
    waits = shell.what(ConnectionThread.WATCH)
    shell.handle(SendReport(Stopped("b", 0, ())))
    shell.handle(Seek(2, "trainer"))
    assert {} == shell.what().values  # it was on its way before anybody asked anew
    shell.answer()
    shell.answer(DESCRIPTOR)

    assert {waits.key: b""} == shell.what().values


def test_next_message_wakes_the_connection_after_the_store_refused_one() -> None:
    shell = Shell().greeted().joined()
    waits = shell.what(ConnectionThread.WATCH)
    shell.handle(Seek(2, "trainer"))
    shell.answer(DESCRIPTOR)

    shell.deny()

    assert {waits.key: b""} == shell.what().values


def test_connection_already_woken_is_not_woken_again() -> None:
    shell = Shell().greeted().joined()
    shell.handle(Seek(2, "trainer"))
    shell.answer(DESCRIPTOR)
    shell.answer()  # though nothing came of it yet
    shell.beaten()

    shell.handle(SendReport(Leave("b", "bye")))

    assert {} == shell.what().values


def test_untaken_answers_to_an_old_request_are_dropped_with_a_new_one() -> None:
    shell = Shell().greeted().joined()
    shell.reads(SEAT)
    shell.reads(RoundEnd(0, "a node was lost", True))

    shell.handle(Seek(2, "trainer"))

    assert () == shell.drain()


def test_notice_in_the_mailbox_of_an_old_request_is_ignored() -> None:
    shell = Shell().greeted().joined()

    shell.handle(Seek(2, "trainer"))
    shell.reads(SEAT)

    assert () == shell.drain()


def test_ranks_that_arrive_while_contact_is_lost_are_discarded() -> None:
    shell = Shell().greeted().joined()
    shell.later(FENCE * HEARTBEAT + 0.1)
    shell.drain()
    shell.greeted()
    assert isinstance(shell.what(), Update)

    shell.reads(evolve(SEAT, heartbeat_count=2))

    assert "the ranks of round 0 arrived while contact was lost" == why_lost(shell)


def test_ranks_that_are_taken_after_contact_was_lost_are_none() -> None:
    shell = Shell().greeted().joined()
    shell.reads(SEAT)

    shell.later(FENCE * HEARTBEAT + 0.1)

    assert why_lost(shell)


def confirm_read(last: str, round: int = 0, count: int = 1) -> CoordinatorHeartbeat:
    """The coordinator says which heartbeat of this node it has read: a is 0, b is 1."""
    return CoordinatorHeartbeat("nonce", count, read=HeartbeatsRead(round, f"..a{last}"))


@pytest.mark.parametrize(
    ("heartbeat", "read"),
    [
        (confirm_read("c", count=9), 100.0 + INTERVAL * HEARTBEAT),
        (confirm_read("b", count=9), 100.0),
        (confirm_read(".", count=9), 100.0),
        (confirm_read("", count=9), 100.0),
        (confirm_read("9", count=9), 100.0),  # no such one was sent
        (confirm_read("c", round=1, count=9), 100.0),
        (CoordinatorHeartbeat("nonce", 9), 100.0),
        (confirm_read("c", count=1), 100.0),
    ],
)
def test_the_workers_time_counts_from_the_last_heartbeat_that_was_read(
    heartbeat: CoordinatorHeartbeat, read: float
) -> None:
    """One of its heartbeats that is older than what was read before says nothing."""
    shell = Shell().greeted().joined()
    shell.reads(SEAT)
    shell.later(INTERVAL * HEARTBEAT)
    shell.heartbeats = 5
    shell.beaten()

    shell.reads_heartbeat(heartbeat)

    assert shell.session.kill_at() == read + KILL * HEARTBEAT


def test_ranks_thousands_of_heartbeats_late_are_discarded() -> None:
    """Which of its heartbeats was read would not be clear any more, however often the coordinator says so."""
    shell = Shell().greeted().joined()
    for _ in range(2, 2051):
        shell.later(INTERVAL * HEARTBEAT)
        shell.beaten()
        if isinstance(shell.what(), Post):
            shell.posted()

    shell.reads(evolve(SEAT, heartbeat_count=1))

    assert "the ranks of this node arrived too late" == why_lost(shell)


@pytest.mark.parametrize("heartbeat_count", [0, 1])
def test_stale_ranks_are_passed_on_once_node_heartbeats_are_read_again(heartbeat_count: int) -> None:
    """It was given them for a heartbeat of long ago: they may have been kept from it, and be others' by now."""
    shell = Shell().greeted().joined()
    shell.beats(4)
    shell.reads(evolve(SEAT, heartbeat_count=heartbeat_count))
    assert () == shell.drain()

    shell.reads_heartbeat(confirm_read("b", count=9))
    assert () == shell.drain()
    shell.reads_heartbeat(confirm_read("g", count=12))

    assert (evolve(SEAT, heartbeat_count=heartbeat_count),) == shell.drain()
    assert shell.session.kill_at() == pytest.approx(shell.now - INTERVAL * HEARTBEAT + KILL * HEARTBEAT)


def test_ranks_as_old_as_the_last_heartbeats_are_passed_on_at_once() -> None:
    shell = Shell().greeted().joined()
    shell.beats(2)

    shell.reads(evolve(SEAT, heartbeat_count=2))

    assert (evolve(SEAT, heartbeat_count=2),) == shell.drain()
    assert shell.session.kill_at() == pytest.approx(shell.now - INTERVAL * HEARTBEAT + KILL * HEARTBEAT)


@pytest.mark.parametrize("then", [RoundEnd(0, "a node was lost", True), Final(False, "it failed")])
def test_ranks_too_late_for_an_ended_round_are_none(then: RoundEnd | Final) -> None:
    shell = Shell().greeted().joined()
    shell.beats(4)
    shell.reads(SEAT)

    shell.reads(then)

    lost, event = shell.drain()
    assert isinstance(lost, ContactLost)
    assert "the ranks of this node arrived too late" == lost.why
    assert then == event


def test_late_ranks_are_discarded_after_contact_is_lost() -> None:
    shell = Shell().greeted().joined()
    shell.beats(4)
    shell.reads(SEAT)

    shell.later(FENCE * HEARTBEAT + 0.1)
    shell.greeted()
    shell.beaten()
    shell.reads_heartbeat(confirm_read("g", count=9))

    assert why_lost(shell)


def test_unanswered_request_for_ranks_is_sent_again_with_its_number() -> None:
    shell = Shell().greeted().joined()
    requests = []
    while len(requests) < 2 and shell.now < 1000.0:
        shell.later(INTERVAL * HEARTBEAT)
        shell.beaten()
        if isinstance(shell.what(), Post):
            requests.append((shell.heartbeats, shell.envelope()))
            shell.posted()

    assert [
        (heartbeats, Envelope(1, Join("b", DESCRIPTOR, None, -1, 0, pulse=heartbeats - 1))) for heartbeats in (6, 12)
    ] == requests


def test_node_repeats_request_to_new_coordinator_with_all_it_has_seen() -> None:
    shell = Shell().greeted().joined()
    shell.reads(evolve(SEAT, round=4))
    shell.reads_heartbeat(CoordinatorHeartbeat("nonce", (2 << EPOCH_BITS) + 7))

    assert Envelope(1, Join("b", DESCRIPTOR, None, 4, 0, pulse=1)) == shell.envelope()


def test_a_node_that_slept_stops_its_workers_though_its_clock_stood_still() -> None:
    """The heartbeat of the coordinator has gone on by about a heartbeat time (20 ticks) between two looks."""
    shell = Shell().greeted().joined()
    shell.reads(SEAT)

    shell.reads_heartbeat(CoordinatorHeartbeat("nonce", shell.heartbeats + 16))

    assert "its machine was probably suspended" in why_lost(shell)
    kill_at = shell.session.kill_at()
    assert kill_at == pytest.approx(shell.now + (KILL - FENCE) * HEARTBEAT)


def test_node_that_slept_starts_clean_after_a_new_request_for_ranks() -> None:
    shell = Shell().greeted().joined()
    shell.reads_heartbeat(CoordinatorHeartbeat("nonce", 90))
    assert 1 == len(shell.drain())

    shell.handle(Seek(2, "trainer"))
    shell.answer()
    shell.answer(DESCRIPTOR)
    shell.answer()
    shell.answer([put(CoordinatorHeartbeat("nonce", 190))])

    assert () == shell.drain()
    assert shell.session.kill_at() == pytest.approx(shell.now + KILL * HEARTBEAT)


def test_regular_coordinator_heartbeat_stops_no_node() -> None:
    """A node is fenced FENCE after a heartbeat that was read before the first look: that is 15 ticks at most."""
    shell = Shell().greeted().joined()
    for count in (16, 31, 46):
        shell.reads_heartbeat(CoordinatorHeartbeat("nonce", count))

    assert () == shell.drain()


def test_a_new_coordinators_heartbeat_is_counted_from_its_own_beginning() -> None:
    shell = Shell(Session.begin(NodeIdentity("job", "b", None), Limits(has_election=True), 100.0)[0]).greeted().joined()
    for count, slept in (((1 << 32) + 3, 0), ((2 << 32) + 16, 1)):
        shell.reads_heartbeat(CoordinatorHeartbeat("nonce", count))
        assert slept == len(shell.drain()), count
        shell.posted()


def test_node_that_was_given_up_stops_its_workers_and_joins_again() -> None:
    shell = Shell().greeted().joined()
    shell.reads(SEAT)

    shell.reads(GivenUp("no heartbeat for 10 s"))

    [lost] = shell.drain()
    assert ContactLost("the job counts this node as lost: no heartbeat for 10 s", 0.15 * HEARTBEAT) == lost


def test_after_standing_still_a_node_judges_by_the_time_that_it_is() -> None:
    """An answer that lay there when the node woke up is heard by one that has lost contact."""
    shell = Shell().greeted().joined()
    ask = shell.pending[ConnectionThread.WATCH]

    shell.now += 2 * HEARTBEAT
    shell.handle(OperationDone(ask.connection, ask.number, put(SEAT)))

    assert why_lost(shell)


def test_the_end_is_answered_and_nothing_is_fenced_after_it() -> None:
    shell = Shell().greeted().joined()

    shell.reads(FINAL)
    assert Envelope(2, Acknowledgement("b")) == shell.envelope()
    shell.later(10 * HEARTBEAT)

    assert (FINAL,) == shell.drain()
    assert (None, None) == (shell.session.wake_at(), shell.session.kill_at())


# the end


def test_after_the_end_only_a_new_request_to_join_is_awaited() -> None:
    shell = Shell().greeted().joined()
    shell.reads(FINAL)
    shell.answer(None, ConnectionThread.WATCH)
    assert shell.what(ConnectionThread.WATCH) is None

    shell.handle(Seek(2, "trainer"))

    assert isinstance(shell.what(ConnectionThread.WATCH), Take)


def test_closing_session_sends_pending_report_and_disconnects() -> None:
    shell = Shell().greeted().joined()
    waits = shell.what(ConnectionThread.WATCH)
    shell.handle(SendReport(Leave("b", "bye")))

    shell.handle(CloseSession())
    assert Leave("b", "bye") == shell.envelope().report
    assert {} == shell.what().values
    shell.answer()
    assert Update({waits.key: b""}, ()) == shell.what()
    actions = shell.answer()

    assert [Disconnect(1)] == actions
    assert shell.session.left


def test_session_closed_while_connecting_still_sends_pending_report() -> None:
    shell = Shell()
    shell.handle(SendReport(Leave("b", "bye")))
    shell.handle(CloseSession())

    shell.greeted()
    assert Leave("b", "bye") == shell.envelope().report

    assert [Disconnect(1)] == shell.answer()


def test_close_while_connecting_without_messages_ends_at_once() -> None:
    assert [Disconnect(1)] == Shell().handle(CloseSession())


def test_session_closed_without_contact_does_not_reconnect() -> None:
    shell = Shell()
    shell.handle(SendReport(Leave("b", "bye")))
    shell.handle(CloseSession())

    assert [Disconnect(1)] == shell.handle(ConnectionLost(1, "refused"))


def test_node_that_gave_up_the_search_parts_when_closed() -> None:
    shell = Shell()
    shell.now += 600.0
    shell.handle(ConnectionLost(1, "timed out"))
    assert shell.session.error is not None
    shell.handle(SendReport(Leave("b", "bye")))

    assert [Disconnect(1)] == shell.handle(CloseSession())


def test_a_closed_node_with_a_message_reads_a_damaged_greeting_again() -> None:
    shell = Shell()
    shell.handle(SendReport(Leave("b", "bye")))
    shell.handle(Connected(1))
    shell.answer(True)
    shell.handle(CloseSession())

    shell.answer([b"scribble", None])

    assert shell.session.speaks_at() == pytest.approx(shell.now + 0.1)
    shell.later(0.2)
    shell.answer(True)
    shell.answer([put(GREETING), None])
    assert isinstance(shell.envelope().report, Leave)


def ended(shell: Shell) -> None:
    """Its agent stood still, and asks for ranks before it has read the end."""
    shell.reads(Final(True, "all done"))
    shell.handle(Seek(2, "trainer"))


@pytest.mark.parametrize(
    ("shell", "happens"),
    [
        (Shell().greeted().joined(), lambda shell: shell.handle(CloseSession())),
        (Shell().greeted().joined(), lambda shell: shell.handle(Refused(None, RendezvousStateError("never")))),
        (Shell().greeted().joined(), ended),
        (Shell(), lambda shell: (shell.handle(Seek(2, "trainer")), shell.later(600.0))),
        (Shell(), lambda shell: (shell.later(600.0), shell.handle(Seek(2, "trainer")))),
    ],
    ids=["closed", "failed", "ended", "given up after the request", "given up before it"],
)
def test_node_that_waits_no_longer_logs_no_wait(shell: Shell, happens: Callable[[Shell], object]) -> None:
    happens(shell)

    logged = [action for _ in range(5) for action in shell.later(60.0) if isinstance(action, Log)]

    assert (shell.session.wake_at(), logged) == (None, [])


def test_first_permanent_error_is_kept_when_a_second_one_arrives() -> None:
    shell = Shell()

    shell.handle(Refused(None, RendezvousStateError("first")))
    shell.handle(Refused(None, RendezvousStateError("second")))

    assert "first" == str(shell.session.error)


def test_a_search_that_finds_nothing_ends() -> None:
    shell = Shell()

    shell.later(601.0)

    assert isinstance(shell.session.error, RendezvousConnectionError)
    assert "job 'job'" in str(shell.session.error)


def silent(shell: Shell) -> Shell:
    """The store does not answer for as long as contact is sought."""
    shell.handle(ConnectionLost(shell.connection, "timed out", gone=False))
    shell.later(Limits().reconnect_timeout + 1.0)
    return shell


def refused(shell: Shell) -> Shell:
    """Nobody listens any more where the store was."""
    for _ in range(4):
        shell.handle(ConnectionLost(shell.connection, "refused", gone=True))
        shell.later(1.0)
    return shell


def test_agent_gets_notice_of_lost_store_before_the_error() -> None:
    shell = refused(Shell().greeted().joined())

    assert ["the host of the job's store is gone: refused"] == [
        event.why for event in shell.drain() if isinstance(event, StoreGone)
    ]
    assert isinstance(shell.session.error, RendezvousConnectionError)


@pytest.mark.parametrize("host", ["a", "b"])
def test_silent_store_counts_as_lost_only_on_its_sole_coordinator(host: str) -> None:
    """Elsewhere the job may go on, and repeat what was done here."""
    shell = silent(Shell().greeted(evolve(GREETING, host=host)).joined())

    assert (host == shell.session.identity.node) == any(isinstance(event, StoreGone) for event in shell.drain())
    assert isinstance(shell.session.error, RendezvousConnectionError)


def test_store_is_not_reported_lost_if_another_node_may_coordinate() -> None:
    session, _ = Session.begin(NodeIdentity("job", "b", None), Limits(has_election=True), 100.0)
    shell = refused(silent(Shell(session).greeted(evolve(GREETING, host="b")).joined()))

    assert not any(isinstance(event, StoreGone) for event in shell.drain())


# whatever happens

_events = st.one_of(
    st.just(TimePassed()),
    st.builds(SuspendHeartbeats, st.booleans()),
    st.just(Seek(2, "trainer")),
    st.builds(SendReport, st.sampled_from([Succeeded("b", 0), Failed("b", 0, ()), Stopped("b", 1, ())])),
    st.builds(ConnectionLost, st.integers(0, 3), st.text(max_size=3), st.booleans()),
    st.builds(Connected, st.integers(0, 3)),
)
_values = st.one_of(
    st.none(),
    st.binary(max_size=8),
    st.sampled_from(
        [
            put(each)
            for each in (
                GREETING,
                SEAT,
                FINAL,
                CoordinatorHeartbeat("nonce", 1),
                CoordinatorHeartbeat("nonce", 9),
                RoundEnd(0, "", True),
            )
        ]
    ),
)


@define
class Chance:
    """Answers whatever is asked with something of the right shape."""

    data: st.DataObject

    def to(self, operation: Any) -> Any:
        match operation:
            case Wait():
                return self.data.draw(st.booleans())
            case Take():
                return self.data.draw(_values)
            case Read(keys) | Update(_, keys):
                return [self.data.draw(_values) for _ in keys]
            case Describe():
                return DESCRIPTOR
            case _:
                return None


def facts(session: Session) -> dict[str, str]:
    """All that it knows, as text."""
    return {field.name: repr(getattr(session, field.name)) for field in fields(Session)}


@given(st.data())
def test_no_course_of_events_breaks_it(data: st.DataObject) -> None:
    """One operation at a time on each thread, messages in order, and a step changes nothing in what it was given."""
    shell, chance = Shell(), Chance(data)
    last_seq = 0
    connected = set()
    for _ in range(data.draw(st.integers(1, 40))):
        shell.now += data.draw(st.sampled_from([0.0, 0.1, 1.0, 7.0]))
        session, before = shell.session, facts(shell.session)
        thread = data.draw(st.sampled_from([None, *shell.pending]))
        if thread is None:
            event = data.draw(_events)
            if isinstance(event, Connected):
                # A connection is made once.
                assume(event.connection not in connected)
                connected.add(event.connection)
        else:
            ask = shell.pending.pop(thread)
            event = OperationDone(ask.connection, ask.number, chance.to(ask.operation))
        first = session.step(event, shell.now)[1]
        again = shell.handle(event)

        assert before == facts(session)
        assert [repr(action) for action in first] == [repr(action) for action in again]
        for action in again:
            if isinstance(action, Ask) and isinstance(action.operation, Post):
                envelope = decode(action.operation.data)
                assert isinstance(envelope, Envelope)
                assert envelope.seq in (last_seq, last_seq + 1)
                last_seq = envelope.seq


# what it has seen


def test_join_states_how_far_the_job_has_progressed() -> None:
    shell = Shell().greeted().joined()
    shell.reads(evolve(SEAT, round=4))
    shell.reads_heartbeat(CoordinatorHeartbeat("nonce", (2 << EPOCH_BITS) + 7))
    shell.posted()
    shell.handle(Seek(2, "trainer"))
    shell.answer()  # the thread that watches is woken
    shell.answer(DESCRIPTOR)

    assert Envelope(2, Join("b", DESCRIPTOR, None, 4, 2, pulse=(2 << EPOCH_BITS) + 7)) == shell.envelope()
    assert Seen("nonce", 2, 4, (2 << EPOCH_BITS) + 7) == shell.session.seen


@pytest.mark.parametrize(
    ("beside", "pulse"),
    [
        (put(CoordinatorHeartbeat("nonce", 17)), 17),
        (put(CoordinatorHeartbeat("other", 17)), 0),
        (b"scribble", 0),
        (None, 0),
    ],
)
def test_joining_node_names_the_heartbeat_beside_the_greeting(beside: bytes | None, pulse: int) -> None:
    shell = Shell()
    shell.handle(Connected(1))
    shell.answer(True)
    shell.answer([put(GREETING), beside])
    shell.handle(Seek(2, "trainer"))
    shell.answer(DESCRIPTOR)

    assert Envelope(1, Join("b", DESCRIPTOR, None, pulse=pulse)) == shell.envelope()


def test_new_coordinator_gets_the_request_again() -> None:
    """Its term is noticed by a heartbeat that follows a heartbeat, wherever its first one was read."""
    shell = Shell().greeted().joined()
    shell.handle(ConnectionLost(1, "reset"))
    shell.handle(Connected(shell.connection))
    shell.answer(True)
    shell.answer([put(GREETING), put(CoordinatorHeartbeat("nonce", (1 << EPOCH_BITS) + 1))])
    shell.answer([put(CoordinatorHeartbeat("nonce", (1 << EPOCH_BITS) + 2))])

    assert Envelope(1, Join("b", DESCRIPTOR, None, pulse=(1 << EPOCH_BITS) + 1)) == shell.envelope()


@pytest.mark.parametrize("number", [3, 4])
def test_ranks_in_a_round_that_is_not_above_the_last_are_refused(number: int) -> None:
    shell = Shell().greeted().joined()
    shell.reads(evolve(SEAT, round=4))
    shell.reads(RoundEnd(4, "a worker failed", True))
    shell.handle(Seek(2, "trainer"))
    shell.drain()
    shell.reads(b"")
    shell.answer()
    shell.answer(DESCRIPTOR)
    shell.answer()

    actions = shell.reads(evolve(SEAT, round=number))
    assert [True] == [
        f"ranks of round {number}, but this node already got those of round 4" in line.text
        for line in actions
        if isinstance(line, Log)
    ]
    assert () == shell.drain()
    assert key(0, "b/2") in shell.deleted()
    assert key(0, "b/2") == shell.what(ConnectionThread.WATCH).key  # whatever it replaced is written again
    shell.reads(evolve(SEAT, round=5))
    assert (evolve(SEAT, round=5),) == shell.drain()


def test_heartbeat_with_the_end_of_the_job_ends_the_session() -> None:
    shell = Shell().greeted().joined()
    shell.reads_heartbeat(CoordinatorHeartbeat("nonce", 9, over="the job's saved state was replaced by an older one"))

    assert isinstance(shell.session.error, RendezvousClosedError)
    assert "job 'job' has ended: the job's saved state was replaced by an older one" in str(shell.session.error)


def test_success_before_a_request_for_ranks_is_sent_with_it() -> None:
    """By a sidecar that replaces a node that may not have passed it on: the request says that all are gone."""
    shell = Shell().greeted()
    shell.handle(SendReport(Stopped("b", 3, ())))
    shell.handle(SendReport(Succeeded("b", 4)))
    shell.handle(Seek(2, "trainer"))
    shell.answer(DESCRIPTOR)

    envelope = shell.envelope()
    assert isinstance(envelope.report, Join)
    assert (1, 4) == (envelope.seq, envelope.report.succeeded)


# what it leaves behind


def test_old_mailboxes_are_deleted_with_the_first_new_notice() -> None:
    shell = Shell().greeted().joined()
    shell.reads(SEAT)
    assert (key(0),) == shell.deleted()
    shell.rejoined()
    shell.reads(b"")
    assert () == shell.deleted()  # by which it was woken

    shell.reads(evolve(SEAT, round=1))
    assert (key(1), key(0, "b/2"), NODE_HEARTBEAT) == shell.deleted()
    shell.reads(RoundEnd(1, "a worker failed", True))
    shell.reads(FINAL)
    assert (key(1, "b/2"), key(2, "b/2")) == shell.deleted()


def test_failed_deletions_are_repeated_by_the_next_connection() -> None:
    shell = Shell().greeted().joined()
    shell.reads(SEAT)
    shell.deleted()
    shell.rejoined()
    shell.reads(b"")
    shell.reads(evolve(SEAT, round=1))
    shell.handle(ConnectionLost(shell.connection, "reset"))
    shell.greeted()

    assert (key(1), key(0, "b/2"), NODE_HEARTBEAT) == shell.deleted()


@pytest.mark.parametrize(
    ("known", "text"),
    [
        (("", "", ""), ""),
        (("c10d at a:1", "", ""), " (c10d at a:1)"),
        (("", "b", "unused"), " (coordinated by node b)"),
        (("", "", "nobody"), " (nobody)"),
        (("c10d at a:1", "", "nobody"), " (c10d at a:1; nobody)"),
    ],
)
def test_text_names_where_job_was_searched_as_far_as_known(known: tuple[str, str, str], text: str) -> None:
    assert text == search(*known)
