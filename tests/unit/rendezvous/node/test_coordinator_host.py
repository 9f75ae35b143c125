"""The thread that runs the coordinator: what it reads, writes and survives."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from elasticlib.errors import RendezvousConnectionError
from elasticlib.rendezvous.coordinator import _coordinator
from elasticlib.rendezvous.coordinator._server_events import Action, Event
from elasticlib.rendezvous.coordinator._state import Rules
from elasticlib.rendezvous.node._coordinator_host import CoordinatorHost
from elasticlib.rendezvous.protocol._codec import key_of
from elasticlib.rendezvous.protocol._exchange import (
    ANNOUNCEMENT,
    COORDINATOR_HEARTBEAT,
    heartbeat_key,
    key_place,
    mailbox_key,
    mailbox_name,
    report_place,
)
from elasticlib.rendezvous.protocol._messages import (
    Acknowledgement,
    Announcement,
    CoordinatorHeartbeat,
    Descriptor,
    Envelope,
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
    decode,
    encode,
)
from elasticlib.rendezvous.protocol._operations import Receive
from elasticlib.rendezvous.stores._election import LeadershipLost
from elasticlib.rendezvous.stores._memory_exchange import MemoryExchange

LIMIT = 15.0
OFFER = Descriptor(1, "trainer", ("127.0.0.1",), 1)


class Diary:
    """A journal that outlives its keepers; only the last one who loaded it may save."""

    def __init__(self, exchange: MemoryExchange) -> None:
        self.memory = exchange
        self.data: bytes | None = None
        self.keepers = 0
        self.purged = False

    def keeper(self) -> _Keeper:
        return _Keeper(self)


class _Keeper:
    def __init__(self, diary: Diary) -> None:
        self.diary = diary
        self.number = -1

    def load(self) -> bytes | None:
        self.diary.keepers += 1
        self.number = self.diary.keepers
        return self.diary.data

    def save(self, data: bytes) -> None:
        if self.number != self.diary.keepers:
            raise LeadershipLost("another node coordinates")
        self.diary.data = data

    def exchange(self) -> MemoryExchange:
        return self.diary.memory.clone()

    def purge(self) -> None:
        self.diary.purged = True

    def close(self) -> None:
        pass


class HostedJob:
    """An exchange with a host behind it."""

    def __init__(self, rules: Rules, *, key: bytes | None = None, state_log: Any = None, memory: Any = None) -> None:
        self.exchange = memory or MemoryExchange()
        self.key = key
        self.nonce = ""
        self.seqs: dict[str, int] = {}
        self.host = CoordinatorHost(
            self.exchange.clone(), rules, run_id="job", name="host", key=key, state_log=state_log
        )
        self.host.start()
        announcement = self.find(ANNOUNCEMENT, "")
        assert isinstance(announcement, Announcement)
        self.announcement = announcement
        self.nonce = announcement.nonce

    def send(self, report: Report, **others: Any) -> str:
        seq = self.seqs[report.node] = others.get("seq", self.seqs.get(report.node, 0) + 1)
        place = report_place("job", self.nonce, report.node, seq)
        self.exchange.post(encode(Envelope(seq, report), others.get("key", self.key), others.get("place", place)))
        return f"{report.node}/{seq}"

    def join(self, node: str) -> str:
        return self.send(Join(node, OFFER))

    def find(self, key: str, nonce: str | None = None) -> Message:
        assert self.exchange.wait(key, LIMIT), f"nothing at {key} within {LIMIT:g} s"
        data = self.exchange.read([key])[0] or b""
        return decode(data, self.key, key_place("job", self.nonce if nonce is None else nonce, key))

    def read(self, mailbox: str, index: int) -> Notice:
        notice = self.find(mailbox_key(mailbox, index))
        assert isinstance(notice, (RankAssignment, RoundEnd, Final))
        return notice


@pytest.fixture
def hosted() -> Iterator[HostedJob]:
    hosted = HostedJob(Rules())
    yield hosted
    hosted.host.close()


def test_a_join_is_answered_in_the_mailbox_of_its_message(hosted: HostedJob) -> None:
    assert isinstance(hosted.read(hosted.join("a"), 0), RankAssignment)


def test_announcement_describes_the_job_to_joining_nodes(hosted: HostedJob) -> None:
    assert ("job", "host", 1, 3, False) == (
        hosted.announcement.run_id,
        hosted.announcement.host,
        hosted.announcement.terms.min_nodes,
        hosted.announcement.terms.max_restarts,
        hosted.announcement.signed,
    )


def test_notices_of_one_mailbox_are_numbered(hosted: HostedJob) -> None:
    mailbox = hosted.join("a")
    hosted.read(mailbox, 0)
    hosted.send(Succeeded("a", 0))

    assert isinstance(hosted.read(mailbox, 1), Final)


def test_messages_that_were_handled_are_forgotten(hosted: HostedJob) -> None:
    hosted.read(hosted.join("a"), 0)
    hosted.send(Leave("b", "never came"))
    hosted.host.close()

    left = [entry for entry in hosted.exchange.clone().receive(0.0) if entry.data]

    assert [] == left


def test_the_quiet_period_ends_without_another_message() -> None:
    hosted = HostedJob(Rules(1, 2, last_call=0.05))

    assert isinstance(hosted.read(hosted.join("a"), 0), RankAssignment)
    hosted.host.close()


def test_closing_waits_for_those_who_have_not_read_the_end(hosted: HostedJob) -> None:
    mailbox = hosted.join("a")
    hosted.read(mailbox, 0)
    hosted.send(Succeeded("a", 0))
    hosted.read(mailbox, 1)
    closer = threading.Thread(target=hosted.host.close, args=(LIMIT,))
    closer.start()
    closer.join(0.1)
    waits = closer.is_alive()
    hosted.send(Acknowledgement("a"))
    closer.join(LIMIT)

    assert waits
    assert not closer.is_alive()


def test_node_that_left_is_not_waited_for(hosted: HostedJob) -> None:
    hosted.read(hosted.join("a"), 0)
    hosted.send(Leave("a", "signal 15"))
    began = time.monotonic()
    hosted.host.close(LIMIT)

    assert time.monotonic() - began < LIMIT / 2


def test_a_host_that_leaves_a_job_which_a_person_stops_gives_that_end(hosted: HostedJob) -> None:
    mailbox = hosted.join("a")
    hosted.read(mailbox, 0)
    # As a message, its own report could come after its leave.
    hosted.host.abandon("stopped by hand", "b", "stopped")

    final = hosted.read(mailbox, 1)

    assert isinstance(final, Final)
    assert ("stopped by hand", "stopped") == (final.why, final.kind)


def test_a_job_that_is_abandoned_ends_for_everybody(hosted: HostedJob) -> None:
    mailbox = hosted.join("a")
    hosted.read(mailbox, 0)
    hosted.host.abandon("the node that hosts the store left")

    final = hosted.read(mailbox, 1)

    assert isinstance(final, Final)
    assert (False, "closed") == (final.succeeded, final.kind)
    assert "the node that hosts the store left" in final.why


def test_broken_coordinator_notifies_every_node(
    hosted: HostedJob, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mailbox = hosted.join("a")
    hosted.read(mailbox, 0)

    def broken(state: Any, event: Any, now: float) -> Any:
        raise ZeroDivisionError("step")

    with monkeypatch.context() as patch:
        patch.setattr(_coordinator, "step", broken)
        hosted.send(Stopped("a", 0, ()))
        final = hosted.read(mailbox, 1)

    assert isinstance(final, Final)
    assert "the coordinator failed: ZeroDivisionError('step')" in final.why
    assert "failed" in caplog.text


# Liveness.

BRISK = Rules(1, 2, last_call=0.0, heartbeat=0.4)


def test_a_node_whose_heartbeats_stop_is_lost_and_the_others_go_on() -> None:
    hosted = HostedJob(Rules(1, 2, last_call=30.0, heartbeat=0.4))
    a, b = hosted.join("a"), hosted.join("b")
    heartbeats = _Beats(hosted, {a})
    assert isinstance(hosted.read(b, 0), RankAssignment)

    end = hosted.read(a, 1)

    heartbeats.stop()
    assert isinstance(end, RoundEnd)
    assert "b" in end.why
    assert end.restart
    hosted.host.close()


class _Beats:
    """Heartbeats for mailboxes, saying that all was read."""

    def __init__(self, hosted: HostedJob, mailboxes: set[str], **counts: int) -> None:
        self.hosted, self.mailboxes, self.counts = hosted, mailboxes, counts
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.work)
        self.thread.start()

    def work(self) -> None:
        count = 0
        while not self.over.wait(0.05):
            count += 1
            for mailbox in self.mailboxes:
                key = heartbeat_key(mailbox)
                node_heartbeat = NodeHeartbeat(count, self.counts.get("read", 9), self.counts.get("stored", 0))
                place = key_place("job", self.hosted.nonce, key)
                self.hosted.exchange.write({key: encode(node_heartbeat, self.hosted.key, place)})

    def stop(self) -> None:
        self.over.set()
        self.thread.join()


def test_a_removed_heartbeat_of_the_coordinator_is_written_again() -> None:
    hosted = HostedJob(BRISK)
    first = hosted.find(COORDINATOR_HEARTBEAT)
    hosted.exchange.delete([COORDINATOR_HEARTBEAT, ANNOUNCEMENT])
    second = hosted.find(COORDINATOR_HEARTBEAT)

    assert isinstance(first, CoordinatorHeartbeat)
    assert isinstance(second, CoordinatorHeartbeat)
    assert second.count > first.count
    assert isinstance(hosted.find(ANNOUNCEMENT, ""), Announcement)
    hosted.host.close()


def test_removed_message_ends_the_job_with_a_clear_reason() -> None:
    hosted = HostedJob(BRISK)
    mailbox = hosted.join("a")
    hosted.read(mailbox, 0)
    heartbeats = _Beats(hosted, {mailbox}, stored=2)

    final = hosted.read(mailbox, 1)

    heartbeats.stop()
    assert isinstance(final, Final)
    assert "message 2 of node a was removed from the store unread" in final.why
    hosted.host.close()


# With a token.


@pytest.fixture
def signed() -> Iterator[HostedJob]:
    hosted = HostedJob(Rules(1, 2, last_call=0.0), key=key_of("secret"))
    yield hosted
    hosted.host.close()


@pytest.mark.parametrize(
    "forgery",
    [
        {"key": None},
        {"key": key_of("other")},
        {"place": report_place("job", "another nonce", "x", 1)},
        {"place": report_place("other job", "", "x", 1)},
        {"place": ""},
    ],
)
def test_job_with_a_token_refuses_forged_reports(
    signed: HostedJob, forgery: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    signed.send(Join("x", OFFER), **forgery)
    assignment = signed.read(signed.join("a"), 0)

    assert isinstance(assignment, RankAssignment)
    assert 1 == assignment.group_world_size
    assert "a report was refused" in caplog.text


def test_with_a_token_a_message_that_is_played_again_changes_nothing(signed: HostedJob) -> None:
    mailbox = signed.join("a")
    envelope = encode(Envelope(1, Join("a", OFFER)), signed.key, report_place("job", signed.nonce, "a", 1))
    signed.read(mailbox, 0)
    signed.exchange.post(envelope)
    signed.send(Succeeded("a", 0))

    assert isinstance(signed.read(mailbox, 1), Final)


def test_a_heartbeat_of_another_mailbox_keeps_no_dead_node_alive() -> None:
    hosted = HostedJob(Rules(1, 2, last_call=30.0, heartbeat=0.4), key=key_of("secret"))
    a, b = hosted.join("a"), hosted.join("b")
    heartbeats = _Beats(hosted, {a})
    hosted.read(b, 0)
    over = threading.Event()

    def copy() -> None:
        while not over.wait(0.02):
            if (data := hosted.exchange.read([heartbeat_key(a)])[0]) is not None:
                hosted.exchange.write({heartbeat_key(b): data})

    copier = threading.Thread(target=copy)
    copier.start()
    end = hosted.read(a, 1)

    over.set()
    copier.join()
    heartbeats.stop()
    assert isinstance(end, RoundEnd)
    hosted.host.close()


# Taking over.


def test_a_former_holder_changes_nothing_any_more(caplog: pytest.LogCaptureFixture) -> None:
    diary = Diary(MemoryExchange())
    first = HostedJob(Rules(), state_log=diary.keeper(), memory=diary.memory)
    diary.keeper().load()
    saved = diary.data
    mailbox = first.join("a")
    first.host._done.wait(LIMIT)

    assert [None] == diary.memory.read([mailbox_key(mailbox, 0)])
    assert saved == diary.data
    assert "another node coordinates" in caplog.text


def test_id_of_a_job_is_free_again_after_its_end() -> None:
    diary = Diary(MemoryExchange())
    hosted = HostedJob(Rules(), state_log=diary.keeper(), memory=diary.memory)
    mailbox = hosted.join("a")
    hosted.read(mailbox, 0)
    hosted.send(Succeeded("a", 0))
    hosted.read(mailbox, 1)
    hosted.send(Acknowledgement("a"))
    hosted.host.close(LIMIT)

    assert diary.purged


def test_damaged_document_ends_the_job_with_a_clear_message(caplog: pytest.LogCaptureFixture) -> None:
    diary = Diary(MemoryExchange())
    diary.data = b'{"v":1}'
    hosted = HostedJob(Rules(), state_log=diary.keeper(), memory=diary.memory)
    final = hosted.read(hosted.join("a"), 0)

    assert isinstance(final, Final)
    assert "closed" == final.kind
    assert "the coordinator's state in the store is damaged" in caplog.text
    hosted.host.close()


# Its end.


def test_an_ordered_end_is_sent_though_the_host_closes_at_once() -> None:
    memory = MemoryExchange()

    def send(seq: int, report: Report) -> None:
        memory.post(encode(Envelope(seq, report)))

    host = CoordinatorHost(memory.clone(), Rules(1, 1), run_id="job", name="host")
    entered, resumed = threading.Event(), threading.Event()
    do = host._do

    def receive_slowly(action: Action) -> Event | None:
        if isinstance(action, Receive) and host._server.state.round is not None:
            entered.set()
            resumed.wait(LIMIT)
        return do(action)

    host._do = receive_slowly  # type: ignore[method-assign]
    host.start()
    assert memory.wait(ANNOUNCEMENT, LIMIT)
    send(1, Join("a", OFFER))
    assert entered.wait(LIMIT)
    # Both come between the end of a turn and the wait for the next one.
    host.abandon("the node that hosts the store left")
    closer = threading.Thread(target=host.close, args=(LIMIT,))
    closer.start()
    closer.join(0.1)
    resumed.set()
    key = mailbox_key(mailbox_name("a", 1), 1)

    answered = memory.wait(key, LIMIT)

    assert answered
    final = decode(memory.read([key])[0] or b"")
    assert isinstance(final, Final)
    assert "the node that hosts the store left" in final.why
    send(2, Acknowledgement("a"))
    closer.join(LIMIT)
    assert not closer.is_alive()


class Deaf:
    """A journal whose store goes away while its holder tells that it broke."""

    broken = False

    def load(self) -> bytes | None:
        return None

    def save(self, data: bytes) -> None:
        if self.broken:
            raise RendezvousConnectionError("etcd does not answer")

    def exchange(self) -> MemoryExchange:
        raise AssertionError("the host has one")

    def purge(self) -> None:
        raise AssertionError("the job is not over")

    def close(self) -> None:
        pass


def test_leader_that_breaks_and_cannot_notify_nodes_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would stay the leader, and nobody would coordinate."""
    state_log = Deaf()
    host = CoordinatorHost(MemoryExchange(), Rules(1, 1), run_id="job", name="host", state_log=state_log)

    def broken(state: Any, event: Any, now: float) -> Any:
        state_log.broken = True
        raise ZeroDivisionError("step")

    monkeypatch.setattr(_coordinator, "step", broken)

    with pytest.raises(RendezvousConnectionError, match="etcd does not answer"):
        host.run()
