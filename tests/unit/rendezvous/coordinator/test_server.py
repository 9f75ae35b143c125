"""Rules of the coordinator's server, without a thread, a clock or a store."""

from __future__ import annotations

from typing import Any

from attrs import Factory, define, evolve, fields
from hypothesis import given, strategies as st

from elasticlib.rendezvous.coordinator._server import Server
from elasticlib.rendezvous.coordinator._server_events import (
    Abandon,
    Action,
    Arrived,
    CloseServer,
    Destroyed,
    Event,
    HeartbeatsFetched,
    Interrupt,
    Load,
    Loaded,
    NodeEnded,
    OperationFailed,
    Purge,
    Save,
    ServerStopped,
    WatchNodes,
)
from elasticlib.rendezvous.coordinator._state import JobState, Presence, Rules
from elasticlib.rendezvous.protocol._exchange import (
    ANNOUNCEMENT,
    COORDINATOR_HEARTBEAT,
    Posted,
    heartbeat_key,
    mailbox_key,
)
from elasticlib.rendezvous.protocol._heartbeats_read import HeartbeatsRead
from elasticlib.rendezvous.protocol._messages import (
    Acknowledgement,
    CoordinatorHeartbeat,
    Descriptor,
    Envelope,
    Final,
    Join,
    Leave,
    NodeHeartbeat,
    RankAssignment,
    Report,
    Stopped,
    Succeeded,
    decode,
    encode,
)
from elasticlib.rendezvous.protocol._operations import ClearForeign, Discard, Log, Read, Receive, Write
from elasticlib.rendezvous.protocol._timing import INTERVAL, LOOK

HEARTBEAT = 10.0
OFFER = Descriptor(1, "trainer", ("127.0.0.1",), 1)
OFFER_WITH_PRESENCE = evolve(OFFER, presence_port=7000)
PRESENCE = Presence("b", "127.0.0.1", 7000)
ASKS = (Load, Receive, Read, ServerStopped)


def server(*, journaled: bool = False, rules: Rules | None = None, name: str = "a") -> Server:
    return Server("job", name, None, f"nonce of {name}", JobState(rules or Rules(heartbeat=HEARTBEAT)), journaled)


@define
class Shell:
    """Does what a server asks for, when it is told what comes of it."""

    server: Server = Factory(server)
    now: float = 100.0
    posted: int = 0
    sent: dict[str, int] = Factory(dict)
    values: dict[str, bytes] = Factory(dict)
    saved: bytes | None = None
    done: tuple[Action, ...] = ()
    """Actions of the last step, and those that followed an answer without heartbeats."""
    answers: bool = True
    """True if requests for heartbeats are answered; the answer contains none."""

    def begin(self) -> Shell:
        self.server, actions = self.server.begin(self.now)
        return self._perform(actions)

    def handle(self, event: Event) -> Shell:
        self.server, actions = self.server.step(event, self.now)
        return self._perform(actions)

    def _perform(self, actions: tuple[Action, ...]) -> Shell:
        self.done = ()
        while True:
            for action in actions:
                if isinstance(action, Write):
                    self.values.update(action.values)
                if isinstance(action, Save):
                    self.saved = action.data
            self.done += actions
            if not (self.answers and actions and isinstance(read := actions[-1], Read)):
                return self
            self.done = self.done[:-1]
            self.server, actions = self.server.step(HeartbeatsFetched([None for _ in read.keys]), self.now)

    def send(self, *reports: Report) -> Shell:
        """Letters come, each the next of its node."""
        entries = []
        for report in reports:
            self.posted += 1
            self.sent[report.node] = seq = self.sent.get(report.node, 0) + 1
            entries.append(Posted(self.posted, encode(Envelope(seq, report))))
        return self.handle(Arrived(entries))

    def later(self, seconds: float) -> Shell:
        """The wait for messages ends."""
        self.now += seconds
        return self.handle(Arrived(()))

    def notice(self, node: str, index: int, seq: int = 1) -> Any:
        return decode(self.values[mailbox_key(f"{node}/{seq}", index)])

    def kinds(self) -> list[type[Action]]:
        return [type(action) for action in self.done]


def test_server_writes_a_greeting_and_waits_for_messages() -> None:
    shell = Shell().begin()

    assert [Write, Receive] == shell.kinds()
    assert {ANNOUNCEMENT, COORDINATOR_HEARTBEAT} == set(shell.values)


def test_messages_are_discarded_only_after_their_outcome_is_written() -> None:
    shell = Shell().begin().send(Join("b", OFFER))

    assert [Write, Write, Discard, Receive] == shell.kinds()
    assert isinstance(shell.notice("b", 0), RankAssignment)


def test_decision_is_saved_before_any_node_is_notified() -> None:
    shell = Shell(server(journaled=True)).begin()
    assert [Load] == shell.kinds()
    shell.handle(Loaded(None))
    assert [Save, Write, Receive] == shell.kinds()

    shell.send(Join("b", OFFER))

    assert [Save, Write, Write, Discard, Receive] == shell.kinds()


def test_successor_continues_from_the_saved_state_of_its_predecessor() -> None:
    first = Shell(server(journaled=True)).begin().handle(Loaded(None)).send(Join("b", OFFER))

    second = Shell(server(journaled=True, name="c")).begin().handle(Loaded(first.saved))

    assert "nonce of a" == second.server.nonce
    assert first.notice("b", 0) == second.notice("b", 0)
    assert decode(second.values[COORDINATOR_HEARTBEAT]).count > decode(first.values[COORDINATOR_HEARTBEAT]).count  # type: ignore[union-attr]


def test_damaged_saved_state_ends_the_job_for_all_joining_nodes() -> None:
    for event in (Destroyed("it has no end"), Loaded(b"scribble"), Loaded(b"[]"), Loaded(b'{"nonce":1}')):
        shell = Shell(server(journaled=True)).begin().handle(event)
        assert [Log, Save] == shell.kinds()[:2], event

        shell.send(Join("b", OFFER))

        final = shell.notice("b", 0)
        assert isinstance(final, Final)
        assert "the job's saved state cannot be used" in final.why


def test_a_message_that_is_none_is_refused_with_a_line() -> None:
    shell = Shell().begin()

    shell.handle(Arrived([Posted(1, b"scribble"), Posted(2, b""), Posted(3, encode(NodeHeartbeat(1, 0, 0)))]))

    assert [Log, Log, Write, Discard, Receive] == shell.kinds()


def test_heartbeats_are_read_in_time_and_unread_notices_written_again() -> None:
    shell = Shell().begin().send(Join("b", OFFER))
    shell.answers = False

    shell.later(LOOK * HEARTBEAT)
    assert Read((heartbeat_key("b/1"),)) == shell.done[-1]
    shell.now += 3 * INTERVAL * HEARTBEAT
    shell.handle(HeartbeatsFetched([encode(NodeHeartbeat(1, 0, 1))]))

    assert {mailbox_key("b/1", 0), ANNOUNCEMENT, COORDINATOR_HEARTBEAT} == {
        key for each in shell.done if isinstance(each, Write) for key in each.values
    }


def heartbeat_in(shell: Shell) -> CoordinatorHeartbeat:
    heartbeat = decode(shell.values[COORDINATOR_HEARTBEAT])
    assert isinstance(heartbeat, CoordinatorHeartbeat)
    return heartbeat


def test_coordinator_reports_the_heartbeats_read_after_each_look() -> None:
    shell = Shell(answers=False).begin().send(Join("b", OFFER))
    shell.handle(HeartbeatsFetched([None]))
    assert HeartbeatsRead(0, "..") == heartbeat_in(shell).read
    read_counts = []
    for count in (1, 2):
        shell.later(LOOK * HEARTBEAT)
        shell.handle(HeartbeatsFetched([encode(NodeHeartbeat(count, 0, 1))]))
        read_counts.append(heartbeat_in(shell).read)

    assert [HeartbeatsRead.of(0, [1]), HeartbeatsRead.of(0, [2])] == read_counts


def test_coordinators_heartbeat_counts_the_time_in_which_it_looked() -> None:
    """However often it says that it lives; for a time in which it stood still, and blames nobody, it counts one."""
    shell, counts = Shell().begin(), []
    for seconds in (0.0, *[0.011 * HEARTBEAT] * 10, 0.5 * HEARTBEAT, 0.6 * HEARTBEAT, LOOK * HEARTBEAT):
        shell.now += seconds
        shell.server._looks = evolve(shell.server._looks, due_at=shell.now)
        shell.later(0.0)
        counts.append(heartbeat_in(shell).count)

    assert [1, 1, 3, 13, 14, 16] == [counts[0], counts[1], *counts[10:]]


def test_a_job_is_abandoned_for_all_but_for_the_node_that_leaves() -> None:
    shell = Shell(server(rules=Rules(2, 2, heartbeat=HEARTBEAT))).begin().send(Join("a", OFFER), Join("b", OFFER))

    shell.handle(Abandon("a, which hosts the store, left", "a"))
    assert [Interrupt] == shell.kinds()
    shell.handle(Arrived(()))
    shell.handle(CloseServer(30.0))
    assert [Interrupt] == shell.kinds()
    shell.handle(Arrived(()))
    assert ServerStopped not in shell.kinds()
    shell.send(Acknowledgement("b"))

    assert [ServerStopped] == shell.kinds()[-1:]


def test_server_does_not_wait_for_a_leaving_node_that_sends_a_message() -> None:
    """Its wish for ranks may come in after the word that it goes."""
    shell = Shell().begin()
    shell.handle(Abandon("a, which hosts the store, left", "a"))
    shell.handle(Arrived(()))

    shell.send(Join("a", OFFER))
    shell.handle(CloseServer(30.0))
    shell.handle(Arrived(()))

    assert [ServerStopped] == shell.kinds()[-1:]


def test_silent_node_that_was_sent_the_end_is_not_waited_for() -> None:
    shell = Shell().begin().send(Join("b", OFFER)).send(Succeeded("b", 0))
    assert shell.server.is_over()
    shell.handle(CloseServer(1000.0))
    shell.handle(Arrived(()))

    for _ in range(40):
        shell.later(LOOK * HEARTBEAT)
        if isinstance(shell.done[-1], ServerStopped):
            break

    assert isinstance(shell.done[-1], ServerStopped)
    assert shell.now - 100.0 <= 2 * HEARTBEAT


def over_with_limit(limit: float) -> Shell:
    """A job that is over, whose coordinator stops without a request after *limit* s."""
    made = server()
    made.closes_after = limit
    shell = Shell(made).begin().send(Join("b", OFFER)).send(Succeeded("b", 0))
    assert shell.server.is_over() and not shell.server.stopped
    return shell


def test_coordinator_with_a_limit_stops_once_all_nodes_have_read_the_end() -> None:
    shell = over_with_limit(1000.0).send(Acknowledgement("b"))

    assert isinstance(shell.done[-1], ServerStopped)


def test_coordinator_with_a_limit_stops_when_it_is_over() -> None:
    shell = over_with_limit(HEARTBEAT / 4)

    shell.later(HEARTBEAT / 8)
    assert not shell.server.stopped
    shell.later(HEARTBEAT / 8)

    assert shell.server.stopped


def test_last_heartbeat_of_a_dead_node_is_not_a_sign_of_life_after_end() -> None:
    """It is told the end no more, and a coordinator that is closed then waits for nobody."""
    shell = Shell(answers=False).begin().send(Join("b", OFFER)).send(Succeeded("b", 0))
    written: list[set[str]] = []
    for _ in range(60):
        shell.later(LOOK * HEARTBEAT)
        if isinstance(read := shell.done[-1], Read):
            shell.handle(HeartbeatsFetched([encode(NodeHeartbeat(7, 0, 2)) for _ in read.keys]))
        written.append({key for each in shell.done if isinstance(each, Write) for key in each.values})

    assert {ANNOUNCEMENT, COORDINATOR_HEARTBEAT} == set().union(*written[30:])
    shell.handle(CloseServer(1000.0))
    shell.handle(Arrived(()))
    assert isinstance(shell.done[-1], ServerStopped)


def test_late_node_with_unknown_read_count_still_gets_the_final() -> None:
    """He was seated, counted as lost, and sleeps until all that was for him is deleted: he asks for his seat again."""

    def send(*envelopes: Envelope) -> None:
        shell.handle(Arrived([Posted(number, encode(envelope)) for number, envelope in enumerate(envelopes)]))

    def look(*heartbeats: tuple[str, NodeHeartbeat]) -> None:
        shell.later(LOOK * HEARTBEAT)
        if isinstance(read := shell.done[-1], Read):
            known = {heartbeat_key(mailbox): encode(node_heartbeat) for mailbox, node_heartbeat in heartbeats}
            shell.handle(HeartbeatsFetched([known.get(key) for key in read.keys]))

    shell = Shell(server(rules=Rules(1, 2, last_call=0.0, heartbeat=HEARTBEAT)), answers=False).begin()
    look()
    send(Envelope(1, Join("b", OFFER)), Envelope(1, Join("c", OFFER)))
    assert isinstance(shell.notice("b", 0), RankAssignment)
    for count in range(40):
        look(("c/1", NodeHeartbeat(count, 1, 1)))
    send(Envelope(2, Stopped("c", 0, ())), Envelope(3, Join("c", OFFER)))
    assert isinstance(shell.notice("c", 0, seq=3), RankAssignment)
    for count in range(20):
        look(("c/3", NodeHeartbeat(count, 1, 3)))
    shell.handle(Abandon("an operator wants it"))
    shell.handle(Arrived(()))
    assert "" == shell.server._outbox.mailbox_of("b")
    shell.values.clear()

    send(Envelope(1, Join("b", OFFER)))
    shell.handle(CloseServer(1000.0))
    shell.handle(Arrived(()))
    look(("b/1", NodeHeartbeat(9, 1, 1)))

    final = shell.notice("b", 1)
    assert isinstance(final, Final)
    assert "an operator wants it" in final.why
    assert mailbox_key("b/1", 0) not in shell.values


def test_successor_sends_the_end_to_a_node_with_unknown_read_count() -> None:
    first = Shell(server(journaled=True, rules=Rules(2, 2, heartbeat=HEARTBEAT))).begin().handle(Loaded(None))
    first.send(Join("b", OFFER)).handle(Abandon("an operator wants it"))
    first.handle(Arrived(())).handle(Arrived([Posted(2, encode(Envelope(2, Acknowledgement("b"))))]))
    first.handle(Arrived([Posted(3, encode(Envelope(1, Join("b", OFFER))))]))  # somebody wrote it again

    second = Shell(server(journaled=True, name="c"), answers=False).begin()
    second.handle(Loaded(first.server._document(first.now)))
    while (read := second.done[-1]) and not isinstance(read, Read):
        second.later(LOOK * HEARTBEAT)
    second.handle(HeartbeatsFetched([encode(NodeHeartbeat(9, 1, 2)) for _ in read.keys]))

    assert (heartbeat_key("b/1"),) == read.keys
    assert "an operator wants it" in second.notice("b", 1).why


def test_nothing_interrupts_a_server_that_does_not_wait() -> None:
    shell = Shell()

    assert () == shell.handle(Abandon("early")).done
    shell.begin()

    assert Receive(0.0) == shell.done[-1]


def test_the_last_to_coordinate_deletes_the_job() -> None:
    shell = Shell(server(journaled=True)).begin().handle(Loaded(None))
    shell.send(Join("b", OFFER)).send(Succeeded("b", 0)).send(Acknowledgement("b"))

    shell.handle(CloseServer(30.0))
    shell.handle(Arrived(()))

    assert [Purge, ServerStopped] == shell.kinds()[-2:]


def test_broken_server_notifies_every_node() -> None:
    shell = Shell().begin().send(Join("b", OFFER))

    shell.handle(OperationFailed("the coordinator failed: ZeroDivisionError()"))

    assert [Write, Receive] == shell.kinds()
    assert "ZeroDivisionError" in shell.notice("b", 1).why


def test_broken_server_sends_possibly_unwritten_notices_again() -> None:
    """Nodes read in order: without it the end would lie behind a gap until they are reminded."""
    shell = Shell(server(journaled=True)).begin().handle(Loaded(None))
    shell.send(Join("b", OFFER))

    shell.handle(OperationFailed("the coordinator's state in the store was changed by another writer"))

    (write,) = (action for action in shell.done if isinstance(action, Write))
    assert [mailbox_key("b/1", index) for index in (0, 1)] == list(write.values)


def test_a_store_that_workers_share_is_cleared_once_all_have_stopped() -> None:
    shell = Shell(server(rules=Rules(heartbeat=HEARTBEAT, shared_store=True, max_restarts=1))).begin()
    shell.send(Join("b", OFFER))

    shell.send(Stopped("b", 0, ()))

    kinds = shell.kinds()
    shell.send(Join("b", OFFER))
    assert ClearForeign in (*kinds, *shell.kinds())


# whatever happens

_reports = st.one_of(
    st.sampled_from([Join(name, OFFER_WITH_PRESENCE) for name in "abc"]),
    st.sampled_from([Succeeded(name, number) for name in "abc" for number in range(2)]),
    st.sampled_from([Stopped(name, number, ()) for name in "abc" for number in range(2)]),
    st.sampled_from([Acknowledgement(name) for name in "abc"]),
)
_entries = st.lists(
    st.one_of(
        st.binary(max_size=6),
        st.builds(lambda seq, report: encode(Envelope(seq, report)), st.integers(1, 9), _reports),
    ),
    max_size=4,
)


def facts(server: Server) -> dict[str, str]:
    """All that it knows, as text."""
    return {field.name: repr(getattr(server, field.name)) for field in fields(Server)}


@given(st.data(), st.booleans(), st.integers(1, 3))
def test_no_course_of_events_breaks_it(data: st.DataObject, journaled: bool, nodes: int) -> None:
    """It always asks for exactly one thing to wait for, last; a step changes nothing in what it was given."""
    shell = Shell(server(journaled=journaled, rules=Rules(nodes, 3, heartbeat=HEARTBEAT)), answers=False).begin()
    request = shell.done[-1]
    for _ in range(data.draw(st.integers(1, 30))):
        shell.now += data.draw(st.sampled_from([0.0, 0.1, 3.0, 12.0]))
        aside = data.draw(
            st.sampled_from(
                [None, None, None, Abandon("told to"), CloseServer(5.0), NodeEnded(PRESENCE), OperationFailed("?")]
            )
        )
        match request:
            case _ if aside is not None:
                event: Event = aside
            case Load():
                event = data.draw(st.sampled_from([Loaded(None), Loaded(b"x"), Destroyed("?")]))
            case Read(keys):
                heartbeats = st.sampled_from(
                    [None, b"x", encode(NodeHeartbeat(1, 0, 1)), encode(NodeHeartbeat(9, 9, 9))]
                )
                event = HeartbeatsFetched([data.draw(heartbeats) for _ in keys])
            case _:
                entries = data.draw(_entries)
                event = Arrived([Posted(number, entry) for number, entry in enumerate(entries, 1)])
        given, before = shell.server, facts(shell.server)
        first = given.step(event, shell.now)[1]
        shell.handle(event)

        assert before == facts(given)
        assert first == shell.done
        assert not any(isinstance(action, ASKS) for action in shell.done[:-1])
        if isinstance(event, (Abandon, CloseServer, NodeEnded)):
            assert shell.done in ((), (Interrupt(),))
            continue
        request = shell.done[-1]
        assert isinstance(request, ASKS)
        if isinstance(request, ServerStopped):
            break


# Presence sockets.


def watched(shell: Shell) -> list[tuple[Presence, ...]]:
    return [action.presences for action in shell.done if isinstance(action, WatchNodes)]


def lost(shell: Shell) -> dict[str, str]:
    """Return the nodes that the round has lost, with the reasons."""
    assert shell.server.state.round is not None
    current = shell.server.state.round
    return {node: current.left[node] for node in current.lost}


def in_a_round() -> Shell:
    """A round of two nodes, of which the second has a presence socket."""
    rules = Rules(1, 2, heartbeat=HEARTBEAT)
    shell = Shell(server(rules=rules)).begin().send(Join("a", OFFER), Join("b", OFFER_WITH_PRESENCE))
    assert shell.server.state.round is not None
    assert {"a", "b"} == set(shell.server.state.round.entries)
    return shell


def test_sockets_are_watched_as_long_as_their_nodes_are_in_the_job() -> None:
    shell = Shell(server(rules=Rules(2, 3, heartbeat=HEARTBEAT))).begin()
    assert not watched(shell)
    shell.send(Join("b", OFFER_WITH_PRESENCE))
    assert [(PRESENCE,)] == watched(shell)
    shell.send(Join("c", OFFER))
    assert not watched(shell)
    shell.send(Leave("b", "signal 15"))

    assert [()] == watched(shell)


def test_a_socket_is_watched_at_an_address_of_its_own() -> None:
    shell = Shell(server(rules=Rules(2, 3, heartbeat=HEARTBEAT))).begin()
    shell.send(Join("b", evolve(OFFER_WITH_PRESENCE, addresses=("store",), presence_address=PRESENCE.address)))

    assert [(PRESENCE,)] == watched(shell)


def test_a_node_watches_itself_not() -> None:
    shell = Shell(server(rules=Rules(2, 3, heartbeat=HEARTBEAT), name="b")).begin().send(Join("b", OFFER_WITH_PRESENCE))

    assert not watched(shell)


def test_a_node_whose_processes_have_ended_is_lost_at_once() -> None:
    shell = in_a_round().handle(NodeEnded(PRESENCE))
    assert [Interrupt] == shell.kinds()
    shell.later(0.0).later(0.0)

    assert {"b": "all its processes have ended"} == lost(shell)


def test_leave_report_after_a_node_ended_counts_instead_of_a_loss() -> None:
    shell = in_a_round().handle(NodeEnded(PRESENCE))
    shell.later(0.0)
    assert not lost(shell)
    shell.send(Leave("b", "signal 15"))

    assert not lost(shell)
    assert shell.server.state.round is not None
    assert {"b": "signal 15"} == shell.server.state.round.left


def test_end_of_an_earlier_launcher_does_not_count_for_the_next_one() -> None:
    shell = in_a_round().handle(NodeEnded(evolve(PRESENCE, port=6999)))
    shell.later(0.0).later(0.0)

    assert not lost(shell)


def test_an_end_while_heartbeats_are_read_counts_after_the_next_messages() -> None:
    shell = in_a_round()
    shell.answers = False
    shell.later(HEARTBEAT * LOOK)
    assert Read is shell.kinds()[-1]
    shell.handle(NodeEnded(PRESENCE))
    assert [] == shell.kinds()
    shell.handle(HeartbeatsFetched([None] * len(shell.server._looks.reads)))
    assert not lost(shell)
    assert Receive(0.0) == shell.done[-1]
    shell.later(0.0)

    assert {"b": "all its processes have ended"} == lost(shell)
