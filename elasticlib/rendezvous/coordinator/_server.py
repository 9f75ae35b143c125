"""
The coordinator's view of the store: its reads and writes, and their order. Pure.

    Load --> Save --> greeting --> Receive --> (Read heartbeats) --> Save, Write, greeting, Discard --> Receive --> ...

Decisions are in the state log, where there is one, before any node learns them: a successor sends
them again.

Rules of this file: no decision is made here (`_coordinator` does). `Server.step` is a function of
the server, an event and the time; it returns the next server and the actions to do. A thread
(`node._coordinator_host`) and the simulated cluster drive the same object. Times are this node's
monotonic seconds, and only differences count.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import Factory, define, evolve, field
from typing_extensions import Self, assert_never

from elasticlib._times import soonest
from elasticlib._wording import counted
from elasticlib.errors import RendezvousStateError
from elasticlib.rendezvous.coordinator import _coordinator, _server_events as events, _state
from elasticlib.rendezvous.coordinator._causes import in_brief
from elasticlib.rendezvous.coordinator._farewell import Farewell
from elasticlib.rendezvous.coordinator._garbage import Garbage
from elasticlib.rendezvous.coordinator._handover import ADVICE, Handover, read_handover, write_handover
from elasticlib.rendezvous.coordinator._incoming import HeartbeatLooks, Incoming
from elasticlib.rendezvous.coordinator._outbox import Outbox, referring
from elasticlib.rendezvous.coordinator._state import (
    ClearStore,
    Heartbeats,
    JobState,
    MessageReceived,
    Presence,
    Send,
    Tick,
    WakeAt,
)
from elasticlib.rendezvous.protocol import _exchange as exchange, _messages as messages
from elasticlib.rendezvous.protocol._operations import ClearForeign, Delete, Discard, Log, Read, Receive, Write
from elasticlib.rendezvous.protocol._progress import Seen

REFUSALS = 2
"""
Refusals of the document by the store after which the job ends; after the first, the document is
shortened.
"""
SET_BACK = "the job's saved state was replaced by an older one"
DESTROYED = "the job's saved state cannot be used"
ENDED = "all its processes have ended"
"""Reason for the loss of a node without any process."""


@define(eq=False, repr=False)
class Server:
    """The coordinator of one job, for one term of office."""

    run_id: str
    name: str
    """The node that coordinates."""
    key: bytes | None
    nonce: str
    """Identifies this beginning of the job; a successor keeps it."""
    state: JobState
    journaled: bool = False
    """True if another node may take over the coordination."""
    hint: str = ""
    """A possible reason why no other node comes, for error messages."""
    seen: Seen = field(factory=Seen)
    """Knowledge of this node about the job, as one of its members."""
    logic: Any = _coordinator
    """The decisions: a module or object with the coordinator's functions."""
    closes_after: float | None = None
    """
    Seconds that nodes have to read how the job ended, until this coordinator stops without a request;
    None: it waits for one.
    """
    stopped: bool = False
    refused: int = 0
    """Number of times that the store refused the document."""
    _epoch: int = 0
    _outbox: Outbox = field(factory=Outbox)
    _receives: bool = False
    _posted: tuple[exchange.Posted, ...] = ()
    """Received entries, which are discarded once their consequences are written."""
    _looks: HeartbeatLooks = field(factory=HeartbeatLooks)
    _greets: bool = False
    """True if it is time for the next heartbeat of this coordinator."""
    _wake_at: float | None = None
    _is_unsaved: bool = False
    _abandon: events.Abandon | None = None
    _watched: tuple[Presence, ...] = ()
    """Presence sockets that the shell watches."""
    _watched_of: tuple[object, object] = (None, None)
    """The waiting nodes and the round that they belong to: a thousand nodes are not listed at each turn."""
    _ended: tuple[Presence, ...] = ()
    """Sockets of nodes that have ended, and whose messages the next `Receive` returns at the latest."""
    _ended_meanwhile: tuple[Presence, ...] = ()
    """The same for nodes that ended during a `Receive`, which may have missed their last messages."""
    _leaver: str | None = None
    """The node whose leaving ends the job."""
    _farewell: Farewell = field(factory=Farewell)
    _garbage: Garbage = field(factory=Garbage)
    _leftover_keys: tuple[str, ...] = ()
    _incoming: Incoming = field(init=False, default=Factory(lambda it: Incoming(it.run_id, it.key), takes_self=True))
    _leave_by: float | None = None
    _over: str = ""
    """
    The reason for which the job ended, if the nodes that must learn it are not known any more.
    """
    _readers_until: float = 0.0

    def begin(self, now: float) -> tuple[Self, tuple[events.Action, ...]]:
        """Start to coordinate."""
        after, out = self._copy(), list[events.Action]()
        after._looks = HeartbeatLooks.begin(self.state.rules.heartbeat, now)
        if after.journaled:
            out.append(events.Load())
        else:
            after._open(now, out)
        return after, tuple(out)

    def step(self, event: events.Event, now: float) -> tuple[Self, tuple[events.Action, ...]]:
        """Return the server after *event*, and the actions in order; *now* never goes back."""
        after, out = self._copy(), list[events.Action]()
        if not self.stopped:
            after._handle(event, now, out)
        return after, tuple(out)

    def is_over(self) -> bool:
        """Return whether the job has ended."""
        return self.state.final is not None

    def _copy(self) -> Self:
        after = copy.copy(self)
        after._outbox, after._garbage = self._outbox.copy(), self._garbage.copy()
        after._incoming = self._incoming.copy()
        return after

    def _handle(self, event: events.Event, now: float, out: list[events.Action]) -> None:
        match event:
            case events.Loaded():
                self._take_over(event, now, out)
            case events.Destroyed(why):
                self._forget_all(why, now, out)
            case events.Arrived(entries):
                self._receives = False
                self._turn(entries, now, out)
            case events.HeartbeatsFetched(found):
                self._take_heartbeats(found, now, out)
                self._conclude(now, out)
            case events.Abandon():
                self._abandon = event
                self._interrupt(out)
            case events.NodeEnded(presence):
                self._note_end(presence, out)
            case events.CloseServer(linger):
                # The first request counts: later ones do not prolong the wait.
                if self._leave_by is None:
                    self._leave_by = now + linger
                    self._interrupt(out)
            case events.Unsaved(why, undone):
                self._save_less(why, undone, now, out)
            case events.OperationFailed(why):
                self._receives = False
                # The failure may have come before or after a write: write every unread notice again.
                self._outbox.remind(now, 0.0)
                self._follow(self.logic.abandon(self.state, why), now, out)
                self._conclude(now, out)
            case _:
                assert_never(event)

    def _note_end(self, presence: Presence, out: list[events.Action]) -> None:
        if self._receives:
            self._ended_meanwhile += (presence,)
            self._interrupt(out)
        else:
            self._ended += (presence,)

    def _interrupt(self, out: list[events.Action]) -> None:
        if self._receives:
            out.append(events.Interrupt())

    # Turns.

    def _open(self, now: float, out: list[events.Action]) -> None:
        self._step(Tick(), now, out)
        self._commit(now, out)
        self._greet(now, out)
        self._rest(now, out)

    def _turn(self, entries: Sequence[exchange.Posted], now: float, out: list[events.Action]) -> None:
        self._posted = tuple(entries)
        for entry in entries:
            self._read(entry, now, out)
        self._lose_ended(now, out)
        if self._abandon is not None:
            self._abandon_now(self._abandon, now, out)
        if self._leaver is not None:
            # Its later messages do not change that: it does not wait for the answer.
            self._outbox.forget(self._leaver)

        if self._wake_at is not None and now >= self._wake_at:
            self._step(Tick(), now, out)
        if self._looks.is_due(now):
            self._ask_for_heartbeats(out)
        else:
            self._conclude(now, out)

    def _abandon_now(self, request: events.Abandon, now: float, out: list[events.Action]) -> None:
        self._abandon = None
        if request.leaver:
            self._leaver = request.leaver
            if self.state.rules.ends_together:
                self._farewell = Farewell.begin(self.state, request.leaver, now)
        self._follow(self.logic.abandon(self.state, request.why, request.kind), now, out)

    def _lose_ended(self, now: float, out: list[events.Action]) -> None:
        """Remove the nodes that have ended, once their last messages are known."""
        ended, self._ended, self._ended_meanwhile = self._ended, self._ended_meanwhile, ()
        for presence in ended:
            # It may have left before, or its next launcher may have joined.
            if presence in self.logic.presences(self.state):
                number = self.state.received.get(presence.node, 0) + 1
                self._take(number, messages.Leave(presence.node, ENDED, lost=True), now, out)

    def _ask_for_heartbeats(self, out: list[events.Action]) -> None:
        # Nodes that were given up, too: one that sends heartbeats again must learn it.
        self._looks = self._looks.at(self._expected_mailboxes(), self.logic.given_up(self.state))
        out.append(Read(tuple(exchange.heartbeat_key(mailbox) for _, mailbox in self._looks.reads)))

    def _expected_mailboxes(self) -> Mapping[str, str]:
        """Return the nodes whose heartbeats are expected: those in the job, and those that must read its end."""
        return {**self.logic.mailboxes(self.state), **self._garbage.awaited(self._outbox)}

    def _conclude(self, now: float, out: list[events.Action]) -> None:
        self._commit(now, out)
        if self._looks.has_heartbeats and self._greets:
            self._greet(now, out)
        if self._posted:
            out.append(Discard(self._posted))
            self._posted = ()

        if self._leftover_keys:
            out.append(Delete(self._leftover_keys))
            self._leftover_keys = ()

        self._rest(now, out)

    def _rest(self, now: float, out: list[events.Action]) -> None:
        """Wait for the next event, or stop for good."""
        if self.is_over() and self._leave_by is None and self.closes_after is not None:
            self._leave_by = now + self.closes_after

        if self._may_stop(now):
            self._stop(out)
        else:
            self._watch_nodes(out)
            self._wait(now, out)

    def _wait(self, now: float, out: list[events.Action]) -> None:
        due = self._next_turn(now)
        self._receives = True
        out.append(Receive(None if due is None else max(0.0, due - now)))

    def _watch_nodes(self, out: list[events.Action]) -> None:
        """Watch the presence sockets of the nodes that are in the job now."""
        members = (self.state.waiting, self.state.round)
        if all(new is old for new, old in zip(members, self._watched_of, strict=True)):
            return
        self._watched_of = members
        # This node's own sidecar, which runs this coordinator, reports the end of the others here.
        others = tuple(each for each in self.logic.presences(self.state) if each.node != self.name)
        if others != self._watched:
            self._watched = others
            out.append(events.WatchNodes(others))

    def _may_stop(self, now: float) -> bool:
        """
        Return whether this coordinator must close, and no node has yet to read the end of the job.
        """
        if self._leave_by is None:
            return False
        if now >= self._leave_by:
            return True
        has_readers = bool(self._outbox.end_unread) or bool(self._farewell) or now < self._readers_until
        return not has_readers and self._abandon is None

    def _stop(self, out: list[events.Action]) -> None:
        if self.journaled and self.is_over():
            out.append(events.Purge())
        self.stopped = True
        out.append(events.ServerStopped())

    def _next_turn(self, now: float) -> float | None:
        """Return when the next turn begins at the latest; None: when a message comes."""
        if self._abandon is not None or self._ended:
            return now
        return soonest(self._wake_at, self._leave_by, self._looks.next_at())

    # Input.

    def _read(self, entry: exchange.Posted, now: float, out: list[events.Action]) -> None:
        # A node that tests the store posts an empty entry: all that counts is that it is discarded.
        if not entry.data:
            return

        envelope, log = self._incoming.envelope(entry.data, self.nonce, now)
        out += log
        if envelope is None:
            return

        if isinstance(envelope.report, messages.Join):
            self._note_join(envelope.seq, envelope.report, now, out)
        self._take(envelope.seq, envelope.report, now, out)

    def _note_join(self, seq: int, join: messages.Join, now: float, out: list[events.Action]) -> None:
        """Note the mailbox of a node that joins, so that the answer gets there."""
        mailbox = exchange.mailbox_name(join.node, seq)
        is_new = seq > self.state.received.get(join.node, 0)
        if is_new:
            self._check_memory(join, now, out)
            self._outbox.opened(join.node, mailbox)
            self._garbage.opened(join.node, mailbox)
            return

        # A known request, posted again: the node still waits, so its answer may be lost.
        if not self.is_over():
            self.state = self.logic.asks_again(self.state, join.node, mailbox, now)
            return

        # While the outbox knows a mailbox of the node, it writes the end of the job there until the node has read it.
        if not self._outbox.mailbox_of(join.node):
            self._send_forgotten_end(join.node, mailbox, now, out)

    def _check_memory(self, join: messages.Join, now: float, out: list[events.Action]) -> None:
        """End the job if the node has seen a later round than this memory: an old memory was put back."""
        last_round = -1 if self.state.round is None else self.state.round.number
        forgotten = Seen(self.nonce, join.epoch, join.round).beyond(self._epoch, last_round)
        if forgotten:
            self._set_back(f"node {join.node} has seen {forgotten}", now, out)

    def _send_forgotten_end(self, node: str, mailbox: str, now: float, out: list[events.Action]) -> None:
        """Send the end of the job to a node once the number of notices that it has read is known."""
        self._garbage.expect(self._outbox, node, mailbox)
        # A heartbeat reports that number, and `_note_heartbeat` then sends the end.
        if not self._looks.has_heartbeats:
            self._send_end(node, mailbox, now, out)

    def _send_end(self, node: str, mailbox: str, now: float, out: list[events.Action]) -> None:
        self._follow((self.state, self.logic.send_end(self.state, node, mailbox)), now, out)

    def _take(self, seq: int, report: messages.Report, now: float, out: list[events.Action]) -> None:
        """Act on a node's message number *seq*."""
        self._step(MessageReceived(seq, report), now, out)
        self._farewell = self._farewell.reported(report)

        # A node that leaves does not wait for the answer.
        if isinstance(report, (messages.Acknowledgement, messages.Leave)):
            self._outbox.forget(report.node)

    def _take_heartbeats(self, found: Sequence[bytes | None], now: float, out: list[events.Action]) -> None:
        """Act on the heartbeats that were read: *found* has the bytes, in the order of the mailboxes."""
        # Before the heartbeats are noted, as they end the wait for nodes that are back.
        expected = self._expected_mailboxes()
        timeout = self.state.rules.heartbeat
        self._note_heartbeats(found, expected, now, out)

        # Who is alive and who is lost.
        counts = self._incoming.counts([mailbox for _, mailbox in self._looks.reads])
        self._step(Heartbeats(counts), now, out)
        self._farewell = self._farewell.after_heartbeats(counts, now, timeout)
        self._garbage.give_up_silent(self._outbox, counts, now, timeout)

        # If a notice was not read for longer than a heartbeat takes, the store has lost it.
        self._outbox.remind(now, 3 * self._looks.interval)

        # Nobody reads the keys of nodes that are gone.
        self._leftover_keys = self._garbage.clear_up(self._outbox, set(expected), self.state, now)
        self._incoming.retain(set(expected))

        # The own heartbeat shows a node which of its heartbeats were read, and that time passed while it slept.
        self._greets = True
        self._looks = self._looks.done(now, timeout, self.logic.next_loss(self.state))

    def _note_heartbeats(
        self, found: Sequence[bytes | None], expected: Mapping[str, str], now: float, out: list[events.Action]
    ) -> None:
        for (node, mailbox), data in zip(self._looks.reads, found, strict=True):
            heartbeat, log = self._incoming.heartbeat(mailbox, data, self.nonce, now)
            out += log
            if heartbeat is None:
                continue
            if node in expected:
                self._note_heartbeat(node, mailbox, heartbeat, now, out)
            else:
                # A node that was given up: its `GivenUp` needs the number that it reads next.
                self._outbox.catch_up(node, mailbox, heartbeat.read)

    def _note_heartbeat(
        self, node: str, mailbox: str, heartbeat: messages.NodeHeartbeat, now: float, out: list[events.Action]
    ) -> None:
        """Act on the contents of a heartbeat, besides the fact that its node lives."""
        is_back = self._garbage.is_back(node, mailbox, heartbeat.count)
        if is_back:
            # It was thought gone, and has not read how its job ended.
            self._outbox.catch_up(node, mailbox, heartbeat.read)
            self._send_end(node, mailbox, now, out)

        self._outbox.note(mailbox, heartbeat.read)
        if heartbeat.read:
            self._garbage.has_read(node, mailbox)

        self._check_messages(node, heartbeat, now)
        self._check_notices(node, mailbox, heartbeat, now, out)

    def _check_messages(self, node: str, heartbeat: messages.NodeHeartbeat, now: float) -> None:
        """End the job if a message that the node saw in the store has not arrived."""
        received = self.state.received.get(node, 0)
        removed = self._incoming.removed(node, heartbeat.stored, received, now, self.state.rules.heartbeat)
        if removed is not None:
            why = f"message {removed} of node {node} was removed from the store unread"
            self._abandon = events.Abandon(f"{why}{ADVICE}")

    def _check_notices(
        self, node: str, mailbox: str, heartbeat: messages.NodeHeartbeat, now: float, out: list[events.Action]
    ) -> None:
        """End the job if the node has read more notices than this memory sent: an old memory was put back."""
        sent = self._outbox.next_index(mailbox)
        may_be_old = self.journaled and heartbeat.read > sent
        if not may_be_old or self._outbox.is_untracked(node, mailbox, self.state):
            return

        self._outbox.catch_up(node, mailbox, heartbeat.read)
        if self.state.final is not None:
            self._follow((self.state, (Send(mailbox, node, self.state.final),)), now, out)
        read = counted(heartbeat.read, "message")
        self._set_back(f"node {node} has read {read}, but the saved state has {sent}", now, out)

    # Output.

    def _step(self, event: _state.Event, now: float, out: list[events.Action]) -> None:
        self._wake_at = None
        self._follow(self.logic.step(self.state, event, now), now, out)

    def _follow(self, outcome: tuple[JobState, Sequence[_state.Action]], now: float, out: list[events.Action]) -> None:
        state, actions = outcome
        if self.journaled and not self._is_unsaved:
            # Signs of life alone make no difference.
            self._is_unsaved = state != self.state

        self.state = state
        for action in actions:
            match action:
                case Send():
                    self._send(action, now)
                case WakeAt(when=when):
                    self._wake_at = when
                case ClearStore():
                    # The actions keep their order: earlier notices before it, the next round's
                    # ranks after it, so that no key of the new workers is deleted.
                    self._commit(now, out)
                    out.append(ClearForeign())
                case _:
                    assert_never(action)

    def _send(self, action: Send, now: float) -> None:
        notice = action.notice
        if isinstance(notice, messages.Final):
            notice = self._explained(notice)
        count = self._outbox.add(action.mailbox, action.node, notice, now)
        self._garbage.opened(action.node, action.mailbox, count)

    def _explained(self, final: messages.Final) -> messages.Final:
        if final.kind != "timeout" or not self.hint:
            return final
        return evolve(final, why=f"{final.why}; {self.hint}")

    def _commit(self, now: float, out: list[events.Action]) -> None:
        """
        Save the state if it changed, then write the due notices: no node may get a notice that is
        not saved.
        """
        if self.refused:
            self.state = in_brief(self.state)
            self._outbox.shorten()

        due = self._outbox.due()
        must_save = self._is_unsaved or bool(due)
        if self.journaled and must_save:
            out.append(events.Save(self._document(now)))
        self._is_unsaved = False
        if due:
            out.append(self._write(referring(due)))
            self._outbox.written(keep=self._looks.has_heartbeats)

    def _write(self, values: Mapping[str, messages.Message]) -> Write:
        place = functools.partial(exchange.key_place, self.run_id, self.nonce)
        return Write(messages.sealed(values, self.key, place))

    def _greet(self, now: float, out: list[events.Action]) -> None:
        """
        Write the greeting and a heartbeat; repeated in case somebody removed or overwrote them.
        """
        rules, signed = self.state.rules, self.key is not None
        status, waiting = self.logic.status(self.state, now), len(self.state.waiting)
        status = f"{status}; {self.hint}" if status and self.hint else status
        read = self.logic.read(self.state) if self._looks.has_heartbeats else None

        # Above all counts of the epochs before.
        count = (self._epoch << messages.EPOCH_BITS) + self._looks.count(rules.heartbeat)
        heartbeat = messages.CoordinatorHeartbeat(self.nonce, count, status, waiting, self._over, read)
        announcement = messages.Announcement(self.run_id, self.nonce, self.name, rules.terms, rules.heartbeat, signed)
        out.append(self._write({exchange.ANNOUNCEMENT: announcement, exchange.COORDINATOR_HEARTBEAT: heartbeat}))
        self._greets = False

    # For the next coordinator.

    def _save_less(self, why: str, undone: Sequence[events.Action], now: float, out: list[events.Action]) -> None:
        """
        Keep less in the document that the store refused; if that does not help, end the job with
        the reason.
        """
        self.refused += 1
        if self.refused >= REFUSALS:
            self._follow(self.logic.abandon(self.state, f"the store refused the job's state: {why}"), now, out)
        # The present state replaces the refused one; the actions that follow a save come after it.
        self._is_unsaved = True
        self._commit(now, out)
        out += [action for action in undone if not isinstance(action, events.Save)]

    def _document(self, now: float) -> bytes:
        memory = Handover(self.nonce, self._epoch, self.state, self._outbox, self._garbage)
        return write_handover(memory, self.run_id, self.key, now)

    def _take_over(self, found: events.Loaded, now: float, out: list[events.Action]) -> None:
        # Without a document the job begins here, unless this node has seen it: then the document was
        # deleted, which `read_handover` refuses.
        if found.data is not None or self.seen.nonce:
            try:
                last = read_handover(found.data, self.run_id, self.key, now, is_private=found.is_private)
            except RendezvousStateError as error:
                self._forget_all(str(error), now, out)
                return

            self.nonce, self._epoch, self.state = last.nonce, last.epoch + 1, last.state
            self._outbox, self._garbage = last.outbox, last.garbage
            self._garbage.know(self.logic.mailboxes(self.state), self._outbox)
            if self.seen.nonce == last.nonce and (forgotten := self.seen.beyond(last.epoch, last.round)):
                # Above the epoch that nodes have seen, so that they accept the end.
                self._epoch = max(self._epoch, min(self.seen.epoch + 1, messages.LAST_EPOCH))
                self._set_back(f"node {self.name} has seen {forgotten}", now, out)

        self._save_and_open(now, out)

    def _set_back(self, why: str, now: float, out: list[events.Action]) -> None:
        """End the job: an old memory was put back, so decisions since then would be made again."""
        self._end(f"{SET_BACK}: {why}", now, out)

    def _forget_all(self, why: str, now: float, out: list[events.Action]) -> None:
        self.state, self.nonce = JobState(self.state.rules), self.seen.nonce or self.nonce
        self._epoch = min(self.seen.epoch + 1, messages.LAST_EPOCH)
        self._end(f"{DESTROYED}: {why}", now, out)
        self._save_and_open(now, out)

    def _end(self, why: str, now: float, out: list[events.Action]) -> None:
        """
        End the job for nodes that may be unknown here: the coordinator's heartbeat reports it to
        all.
        """
        why += ADVICE
        out.append(Log("error", f"job {self.run_id!r}: {why}"))
        self._over, self._readers_until, self._greets = why, now + self.state.rules.heartbeat, True
        self._follow(self.logic.abandon(self.state, why), now, out)

    def _save_and_open(self, now: float, out: list[events.Action]) -> None:
        """
        Save the state and start to receive; from now on no writes of a former holder are accepted.
        """
        if self._looks.has_heartbeats and self._epoch:
            out.append(events.Save(self._document(now)))
            # Heartbeats are read before anything is decided: live nodes may have seen more than
            # this memory has.
            self._ask_for_heartbeats(out)
        else:
            self._is_unsaved = True
            self._open(now, out)
