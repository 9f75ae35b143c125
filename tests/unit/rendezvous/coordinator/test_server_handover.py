"""Rules of the coordinator's server, without a thread, a clock or a store: what it believes of what lies there."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from attrs import Factory, define, evolve
from hypothesis import given, strategies as st

from elasticlib.errors import RendezvousStateError
from elasticlib.rendezvous.coordinator import _places
from elasticlib.rendezvous.coordinator._coordinator import step
from elasticlib.rendezvous.coordinator._garbage import Garbage
from elasticlib.rendezvous.coordinator._handover import Handover, read_handover, write_handover
from elasticlib.rendezvous.coordinator._outbox import Outbox
from elasticlib.rendezvous.coordinator._server_events import Arrived, CloseServer
from elasticlib.rendezvous.coordinator._state import JobState, MessageReceived, Rules, Tick, WakeAt
from elasticlib.rendezvous.protocol._codec import key_of
from elasticlib.rendezvous.protocol._exchange import (
    ANNOUNCEMENT,
    COORDINATOR_HEARTBEAT,
    heartbeat_key,
    key_place,
    mailbox_key,
    mailbox_name,
)
from elasticlib.rendezvous.protocol._messages import (
    LAST_EPOCH,
    Announcement,
    CoordinatorHeartbeat,
    Descriptor,
    Final,
    Join,
    Leave,
    NodeHeartbeat,
    RankAssignment,
    RoundEnd,
    Stopped,
    encode,
)
from elasticlib.rendezvous.protocol._progress import Seen
from tests.unit.rendezvous.coordinator.served import Served

RULES = Rules(1, 2, last_call=0.0, heartbeat=10.0)
KEY = key_of("secret")


@define
class Shell(Served):
    """Nodes whose heartbeats go on for as long as a test wants."""

    rules: Rules = RULES
    key: bytes | None = KEY
    counts: Counter[str] = Factory(Counter)

    def later(self, seconds: float, *alive: str) -> None:
        """Time passes; those nodes go on beating, and have read all."""
        end = self.now + seconds
        while self.now < end:
            self.now += 1.0
            for mailbox in alive:
                self.node_heartbeat(mailbox)
            self.handle(Arrived([]))

    def node_heartbeat(self, mailbox: str, read: int | None = None) -> None:
        self.counts[mailbox] += 1
        known = sum(mailbox_key(mailbox, index) in self.values for index in range(9)) if read is None else read
        node_heartbeat = NodeHeartbeat(self.counts[mailbox], known, self.envelopes[mailbox.rpartition("/")[0]])
        place = key_place("job", self.server.nonce, heartbeat_key(mailbox))
        self.values[heartbeat_key(mailbox)] = encode(node_heartbeat, self.key, place)


def played(key: bytes | None = KEY) -> tuple[Shell, str]:
    """A job whose node *a* has worked in rounds 0 and 1, and its mailbox."""
    shell = Shell(key=key).begin_term()
    mailbox = shell.join("a")
    assert isinstance(shell.notice(mailbox, 0), RankAssignment)
    shell.send(Stopped("a", 0, ()))
    assert isinstance(shell.notice(mailbox, 1), RoundEnd)
    mailbox = shell.join("a", round=0)
    assert 1 == shell.notice(mailbox, 0).round
    return shell, mailbox


# The document.


def edited(data: bytes) -> bytes:
    """Return *data* as an untrusted writer changes it: workers must meet at another address."""
    assert b"10.0.0.1" in data
    return data.replace(b"10.0.0.1", b"10.6.6.6")


def unsigned(data: bytes) -> bytes:
    return data[data.index(b"{") :]


@pytest.mark.parametrize("forge", [edited, unsigned, lambda data: edited(unsigned(data)), lambda data: data[:-1]])
def test_with_a_token_a_forged_document_gives_no_ranks(forge: Any) -> None:
    shell, mailbox = played()
    shell.saved = forge(shell.saved)
    before = dict(shell.values)

    shell.begin_term("another")
    shell.later(5.0, mailbox)

    written = {key: data for key, data in shell.values.items() if before.get(key) != data}
    assert [] == [key for key, data in written.items() if b"10.6.6.6" in data or b'"seat"' in data]
    assert shell.server.is_over()
    assert "closed" == shell.server.state.final.kind
    assert any("sign" in line and "the coordinator's state" in line for line in shell.logs)


def test_a_document_of_another_job_with_the_same_token_is_refused() -> None:
    shell, _ = played()

    shell.begin_term("another", run_id="job-2")

    assert shell.server.is_over()


def test_without_a_token_a_signed_document_is_refused() -> None:
    shell, _ = played()

    shell.begin_term("another", key=None)

    assert any("this node has no token" in line for line in shell.logs)


@pytest.mark.parametrize("key", [KEY, None])
def test_saved_document_is_read_back_unchanged(key: bytes | None) -> None:
    shell, _ = played(key)
    read = read_handover(shell.saved or b"", "job", key, shell.now)

    assert ("nonce", 0, shell.server.state) == (read.nonce, read.epoch, read.state)
    assert shell.saved == write_handover(read, "job", key, shell.now)


@given(st.binary() | st.recursive(st.none() | st.integers() | st.floats() | st.text(), st.lists).map(
    lambda value: json.dumps({"v": 1, "nonce": "n", "epoch": value, "state": value, "mail": value}).encode()
))  # fmt: skip
def test_invalid_document_raises_a_clear_error(data: bytes) -> None:
    with pytest.raises(RendezvousStateError, match="coordinator's state"):
        read_handover(data, "job", None, 0.0)
    with pytest.raises(RendezvousStateError, match="coordinator's state"):
        read_handover(data, "job", KEY, 0.0)


def test_the_epoch_is_that_of_the_heartbeats() -> None:
    shell, _ = played()
    shell.begin_term().begin_term()

    heartbeats = shell.find(COORDINATOR_HEARTBEAT)

    assert isinstance(heartbeats, CoordinatorHeartbeat)
    assert 2 == heartbeats.epoch


# An older one, signed by ourselves.


def set_back(shell: Shell, saved: bytes) -> None:
    """A stranger puts an older document back, and another node is elected."""
    assert saved in shell.saves[:-1]
    shell.saved = saved
    shell.begin_term("another")


def before_round(shell: Shell, number: int) -> bytes:
    """The last document that did not know of this round."""
    documents = [read_handover(data, "job", KEY, 0.0) for data in shell.saves]
    return [data for data, document in zip(shell.saves, documents, strict=True) if document.round < number][-1]


def test_a_join_from_beyond_the_coordinators_memory_ends_the_job() -> None:
    shell, _ = played()
    shell.send(Stopped("a", 1, ()))
    set_back(shell, before_round(shell, 1))

    mailbox = shell.join("a", round=1)

    final = shell.notice(mailbox, 0)
    assert isinstance(final, Final)
    assert (
        "the job's saved state was replaced by an older one: node a has seen round 1, but the saved state has round 0"
        in final.why
    )


def test_a_join_from_a_later_term_ends_the_job() -> None:
    shell, _ = played()
    old = shell.saves[-1]
    shell.begin_term().begin_term().begin_term()
    set_back(shell, old)

    final = shell.notice(shell.join("a", round=1, epoch=3), 0)

    assert isinstance(final, Final)
    assert "node a has seen its term 3, but the saved state has term 1 as the last" in final.why


def test_heartbeat_from_beyond_the_memory_ends_the_job() -> None:
    shell, mailbox = played()
    shell.send(Stopped("a", 1, ()))
    assert isinstance(shell.notice(mailbox, 1), RoundEnd)
    set_back(shell, next(data for data in shell.saves if read_handover(data, "job", KEY, 0.0).round == 1))
    for index in range(2):
        shell.values.pop(mailbox_key(mailbox, index), None)  # the node reads it, and deletes it

    shell.node_heartbeat(mailbox, read=2)
    shell.later(2.0)

    final = shell.notice(mailbox, 2)
    assert isinstance(final, Final)
    assert (
        "the job's saved state was replaced by an older one: node a has read 2 messages, but the saved state has 1"
        in final.why
    )


def test_successor_reads_heartbeats_before_giving_any_node_ranks() -> None:
    shell = Shell(rules=Rules(1, 2, last_call=5.0, heartbeat=10.0)).begin_term()
    a = shell.join("a")
    old = shell.saves[-1]
    b = shell.join("b")
    assert 2 == shell.notice(a, 0).group_world_size
    for mailbox in (a, b):
        shell.node_heartbeat(mailbox, read=1)
        del shell.values[mailbox_key(mailbox, 0)]
    shell.now += 6.0  # so that a could have been seated alone

    set_back(shell, old)

    assert "node a has read 1 message, but the saved state has 0" in shell.server.state.final.why
    assert not any(isinstance(shell.find(key), RankAssignment) for key in shell.values if key.startswith("box/"))


def test_new_leader_that_has_seen_more_than_the_document_ends_the_job() -> None:
    shell, _ = played()
    shell.saved = before_round(shell, 1)

    shell.begin_term("another", Seen("nonce", 0, 1))

    assert "node host has seen round 1, but the saved state has round 0" in shell.server.state.final.why
    assert isinstance(shell.notice(mailbox_name("a", 1), 2), Final)
    assert shell.server.nonce == "nonce"


@pytest.mark.parametrize("spoil", [lambda shell: before_round(shell, 1), lambda shell: edited(shell.saved)])
def test_unknown_nodes_read_the_end_in_the_coordinators_heartbeat(spoil: Any) -> None:
    shell, _ = played()
    shell.begin_term()
    before = shell.find(COORDINATOR_HEARTBEAT)
    shell.saved = spoil(shell)

    shell.begin_term("another", Seen("nonce", 1, 1))
    shell.handle(CloseServer(30.0))  # the node that coordinates has read it, too
    shell.later(5.0)

    heartbeats = shell.find(COORDINATOR_HEARTBEAT, "nonce")
    assert isinstance(before, CoordinatorHeartbeat)
    assert isinstance(heartbeats, CoordinatorHeartbeat)
    assert heartbeats.over.startswith(("the job's saved state was", "the job's saved state cannot be used"))
    assert heartbeats.count > before.count
    assert not shell.server.stopped
    shell.later(30.0)
    assert shell.server.stopped


def test_job_with_lost_state_is_not_started_again_by_its_nodes() -> None:
    """Its restarts would be there again, and its rounds would run beside those that others are in."""
    shell, _ = played()
    shell.saved = None

    shell.begin_term("another", Seen("nonce", 1, 1))

    assert shell.server.is_over()
    assert shell.server.nonce == "nonce"
    heartbeats = shell.find(COORDINATOR_HEARTBEAT, "nonce")
    assert isinstance(heartbeats, CoordinatorHeartbeat)
    assert "state is no longer in the store" in heartbeats.over


@pytest.mark.parametrize("epoch", [-1, LAST_EPOCH, 1 << 62, "9" * 4300, "1e9", "null"])
def test_forged_number_of_takeovers_breaks_no_step(epoch: Any) -> None:
    shell, _ = played(None)
    assert shell.saved is not None
    assert b'"epoch":0' in shell.saved
    shell.saved = shell.saved.replace(b'"epoch":0', b'"epoch":%s' % str(epoch).encode())

    shell.begin_term("another", Seen("nonce", 0, 1))

    heartbeats = shell.find(COORDINATOR_HEARTBEAT, "nonce")
    assert isinstance(heartbeats, CoordinatorHeartbeat)
    assert "the job's saved state cannot be used" in heartbeats.over


@pytest.mark.parametrize("nonce", [b'"\\ud800/1"', b'""', b"7", b"null", b'"' + b"n" * 5000 + b'"'])
def test_nonce_that_no_signature_covers_is_a_destroyed_state(nonce: bytes) -> None:
    shell, _ = played(None)
    assert shell.saved is not None
    shell.saved = shell.saved.replace(b'"nonce":"nonce"', b'"nonce":' + nonce)

    shell.begin_term("another", Seen("nonce", 0, 1))

    assert "the job's saved state cannot be used" in shell.server.state.final.why


@pytest.mark.parametrize("epoch", [0, 1, LAST_EPOCH])
def test_successor_is_accepted_after_any_takeover_a_node_can_have_seen(epoch: int) -> None:
    shell, _ = played()
    shell.saved = None

    shell.begin_term("another", Seen("nonce", epoch, 1))

    heartbeats = shell.find(COORDINATOR_HEARTBEAT, "nonce")
    assert isinstance(heartbeats, CoordinatorHeartbeat)
    assert heartbeats.epoch == min(epoch + 1, LAST_EPOCH)


def test_empty_memory_gives_no_ranks_before_nodes_at_work_can_object() -> None:
    """A node says again who it is with its first heartbeat after a takeover, or hears nothing and stops its workers."""
    empty = Handover("nonce", 0, JobState(Rules(1, 2, heartbeat=10.0)), Outbox(), Garbage())
    state = read_handover(write_handover(empty, "job", KEY, 7.0), "job", KEY, 100.0).state
    assert 110.0 == state.opens_at

    state, _ = step(state, MessageReceived(1, Join("a", Descriptor(1, "trainer", ("a",), 1))), 101.0)
    early, actions = step(state, Tick(), 109.9)
    assert (None, (WakeAt(110.0),)) == (early.round, actions)
    late, _ = step(early, Tick(), 140.0)
    assert late.round is not None


@pytest.mark.parametrize("key", [KEY, None])
def test_with_a_token_no_round_is_opened_from_any_memory_before_that_time(key: bytes | None) -> None:
    """It may be an old one that a stranger put back; without a token he could as well write his own."""
    shell, _ = played()
    old = read_handover(shell.saved, "job", shell.key, 0.0)

    state = read_handover(write_handover(old, "job", key, 7.0), "job", key, 100.0).state

    assert state.round is not None
    assert (110.0 if key else 0.0) == state.opens_at


def test_a_memory_where_no_stranger_writes_opens_a_round_at_once() -> None:
    shell, _ = played()

    assert 0.0 == read_handover(shell.saved, "job", shell.key, 100.0, is_private=True).state.opens_at


def test_state_seen_in_an_earlier_job_of_that_name_is_ignored() -> None:
    shell, _ = played()

    shell.begin_term("another", Seen("earlier", 9, 9))

    assert not shell.server.is_over()


def test_honest_successor_continues_the_job() -> None:
    shell, mailbox = played()
    for epoch in range(3):
        shell.begin_term("another", Seen("nonce", epoch, 1))
        shell.later(11.0, mailbox)
    shell.send(Stopped("a", 1, ()))
    mailbox = shell.join("a", round=1, epoch=3)

    assert not shell.server.is_over()
    assert 2 == shell.notice(mailbox, 0).round


def test_a_node_that_left_is_not_taken_for_one_who_has_seen_more() -> None:
    shell = Shell().begin_term()
    a, b = shell.join("a"), shell.join("b")
    shell.later(2.0, a, b)
    shell.send(Leave("a", "SIGTERM", 0))  # its workers still stop, so that its heartbeats still count
    shell.node_heartbeat(a, read=3)
    shell.node_heartbeat(b)
    shell.later(2.0)

    assert not shell.server.is_over()


# Who is gone.


def keys_of(shell: Shell, node: str) -> list[str]:
    return sorted(key for key in shell.values if f"/{node}/" in key)


def test_a_lost_node_leaves_no_key_behind() -> None:
    shell = Shell().begin_term()
    a, b = shell.join("a"), shell.join("b")
    shell.node_heartbeat(b)
    shell.later(11.0, a)
    assert not any(isinstance(shell.notice(b, index), Final) for index in range(3))
    a = shell.join("a", round=0)

    shell.later(25.0, a)

    assert [] == keys_of(shell, "b")


def test_notices_that_a_lost_node_did_not_read_are_not_kept_forever() -> None:
    shell = Shell().begin_term()
    a, b = shell.join("a"), shell.join("b")
    shell.node_heartbeat(b, read=0)
    shell.later(15.0, a)
    for index in range(2):
        shell.values.pop(mailbox_key(b, index), None)
    shell.later(30.0, a)

    assert [] == keys_of(shell, "b")


def test_leaving_node_has_time_to_read_its_answer_and_leaves_no_key() -> None:
    shell = Shell().begin_term()
    a, b = shell.join("a"), shell.join("b")
    shell.later(1.0, a, b)
    shell.send(Leave("b", "SIGTERM"))
    shell.later(5.0, a)
    assert "left" == shell.notice(b, 0).kind
    shell.later(20.0, a)

    assert [] == keys_of(shell, "b")


def test_a_successor_clears_up_behind_those_who_went_before_its_time() -> None:
    shell = Shell().begin_term()
    a, b = shell.join("a"), shell.join("b")
    shell.later(1.0, a, b)
    shell.send(Leave("b", "SIGTERM"))
    shell.later(1.0, a)
    shell.begin_term("another")

    shell.later(30.0, a)

    assert [] == keys_of(shell, "b")
    assert keys_of(shell, "a")


def test_a_node_that_waits_keeps_its_keys() -> None:
    shell = Shell(rules=Rules(2, 2, last_call=0.0, join_timeout=500.0, heartbeat=10.0)).begin_term()
    a = shell.join("a")

    shell.later(50.0, a)

    assert [heartbeat_key(a)] == keys_of(shell, "a")


def test_document_does_not_grow_with_nodes_that_join_and_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_places, "STEADY", 20.0)  # for so long the exit of each is remembered
    shell = Shell(rules=Rules(1, 2, 3, last_call=0.0, heartbeat=10.0)).begin_term()
    a = shell.join("a")
    sizes, keys = [], []
    for number in range(20):
        b = shell.join(f"b{number}")
        current = shell.server.state.round
        if current.end is not None:
            shell.send(Stopped("a", current.number, ()))
            a = shell.join("a", round=current.number)
        shell.later(5.0, a, b)
        shell.send(Leave(f"b{number}", "SIGTERM"))
        shell.later(1.0, a)
        current = shell.server.state.round
        shell.send(Stopped("a", current.number, ()))
        a = shell.join("a", round=current.number)
        shell.later(25.0, a)
        keys.append(sum("/b" in key for key in shell.values))
        document = read_handover(shell.saves[-1], "job", KEY, 0.0)
        sizes.append(len(write_handover(without_received(document), "job", KEY, 0.0)))

    assert not shell.server.is_over()
    assert 0 == max(keys)
    assert max(sizes[10:]) <= max(sizes[:10]) + 20  # longer numbers


def without_received(document: Handover) -> Handover:
    """Without the numbers of messages, of which those of 4096 nodes are remembered."""
    return evolve(document, state=evolve(document.state, received={}))


# Old messages of nodes that are forgotten.


def test_greeting_is_written_after_an_election() -> None:
    shell = Shell().begin_term()

    assert isinstance(shell.find(ANNOUNCEMENT, ""), Announcement)


def test_forged_read_count_deletes_a_bounded_number_of_keys() -> None:
    """Without a token anybody may write how many notices a node has read."""
    garbage = Garbage()
    garbage.opened("a", "a/1", 10**6)

    garbage.sweep((), 100.0, 10.0)
    keys, _ = garbage.sweep((), 110.0, 10.0)

    assert heartbeat_key("a/1") in keys and mailbox_key("a/1", 10**6) in keys
    assert len(keys) < 1000
