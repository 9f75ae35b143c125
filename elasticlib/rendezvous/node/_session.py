"""
One node's session with its job: its requests to the store, and its use of the answers. Pure.

A connection has two threads, each with one operation at a time. One speaks (greeting, messages,
heartbeats), one watches for the next notice in this node's mailbox. A connection that was given up
is ignored. Requests on it that matter are repeated on the next one, which is possible since
messages have numbers.

Rules of this file: `Session.step` is a function of the session, an event and the time. It returns
the next session and the actions to do, and has no clock, no thread and no store. Threads
(`_client`) and the simulated cluster drive the same object. Times are this node's monotonic
seconds, and only differences count.
"""

from __future__ import annotations

import math

from attrs import define, evolve, field
from typing_extensions import Self, assert_never, assert_type

from elasticlib import errors
from elasticlib._times import soonest
from elasticlib._untrusted import Refusals
from elasticlib.rendezvous._membership import MembershipEvent
from elasticlib.rendezvous.node import _session_events as events, _session_liveness, _session_memory as memory
from elasticlib.rendezvous.node._identity import NodeIdentity, SuspectedGreeting, suspected_again
from elasticlib.rendezvous.node._node_outbox import NodeOutbox, Written
from elasticlib.rendezvous.node._own_heartbeats import OwnHeartbeats
from elasticlib.rendezvous.node._session_liveness import NO_HEARTBEAT, Limits, SessionLiveness, TimePassed
from elasticlib.rendezvous.node._session_memory import Mailbox, PendingOperation, PendingOperations, Task, Waiting
from elasticlib.rendezvous.protocol import _exchange as exchange, _messages as messages
from elasticlib.rendezvous.protocol._operations import Delete, Log, Operation, Post, Read, Take, Update, Wait, refuse
from elasticlib.rendezvous.protocol._progress import Seen
from elasticlib.rendezvous.protocol._timing import GRACE


@define(eq=False, repr=False)
class Session:
    """One node's knowledge of its job; `drain` returns the events for its agent."""

    identity: NodeIdentity
    contact: SessionLiveness
    terms: messages.Terms | None = None
    where: str = ""
    """The store's place, for people."""
    unread: tuple[MembershipEvent, ...] = ()
    """Events that the agent has not taken yet, oldest first."""
    final: messages.Final | None = None
    error: events.Permanent | None = None
    """The error that ended this node's part."""
    closed: bool = False
    left: bool = False
    """Closed, and everything that could be sent was sent."""
    spares: int = 0
    """Number of nodes that wait for ranks, from the coordinator's last heartbeat."""
    status: str = ""
    """Nodes for which the job waits, from the same heartbeat."""
    seen: Seen = field(factory=Seen)
    """The latest known state of the job."""
    _host: str = ""
    _outbox: NodeOutbox = field(factory=NodeOutbox)
    _mailbox: Mailbox = field(factory=Mailbox)
    _heartbeats: OwnHeartbeats = field(factory=OwnHeartbeats)
    _waiting: Waiting | None = None
    """This node's wait for ranks."""
    _ranks_unconfirmed: bool = False
    """True if other nodes may have the ranks that came for this one by now: its agent does not have them yet."""
    _connection: int = 0
    _connected: bool = False
    _greeted: bool = False
    _pending: PendingOperations = field(factory=PendingOperations)
    _suspected: SuspectedGreeting | None = None
    """The last greeting, if it seems to be another job's."""
    _ending: messages.Final | None = None
    """The end of the job, while its whole root cause is being read."""
    _refusals: Refusals = field(factory=Refusals)

    @classmethod
    def begin(
        cls, identity: NodeIdentity, limits: Limits, now: float, terms: messages.Terms | None = None, where: str = ""
    ) -> tuple[Session, tuple[events.Action, ...]]:
        """Return the session of a node without any contact, and its first actions."""
        contact, actions = _session_liveness.begin(limits, now)
        session = cls(identity, contact, terms, where, outbox=NodeOutbox(seq=identity.sent))
        out = list[events.Action]()
        session._carry_out(actions, now, out)
        return session, tuple(out)

    def step(self, event: events.Event, now: float) -> tuple[Self, tuple[events.Action, ...]]:
        """Return the session after *event*, and the actions to do; *now* never goes back."""
        after = memory.copied(self)
        out = list[events.Action]()
        # Events that came while this node stood still are judged by its present knowledge.
        after._observe_contact(TimePassed(), now, out)
        after._handle(event, now, out)
        after._begin_operations(now, out)
        after._log_wait(now, out)
        return after, tuple(out)

    def drain(self) -> tuple[Self, tuple[MembershipEvent, ...]]:
        """
        Return the session without its new events, and these, oldest first. Take a `step` before:
        time may have passed.
        """
        return evolve(self, unread=()), tuple(map(self._unless_too_late, self.unread))

    def wake_at(self) -> float | None:
        """Return the time at which the session needs a `Tick`; None: no need."""
        contact = None
        if not self._is_over():
            contact = _session_liveness.wake_at(self.contact)
        log_at = None if self._waiting is None else self._waiting.due_at()
        return soonest(contact, log_at)

    def _is_over(self) -> bool:
        """Return whether this node's part has ended, in any way."""
        return self.closed or self.error is not None or self.final is not None

    def speaks_at(self) -> float | None:
        """
        Return the time at which the speaking thread needs a `Tick`; None: not before the next event.
        """
        if not self._connected or self.left:
            return None
        if not self._pending.is_free(events.ConnectionThread.SPEAK):
            return None
        if not self._greeted:
            return None if self._suspected is None else self._suspected.look_at
        if not self._may_send_heartbeat():
            return None
        return self._heartbeats.due_at

    def kill_at(self) -> float | None:
        """
        Return the time at which workers that still run here must be killed; None: no limit yet.
        """
        ended = self.final is not None and self.final.kind != "left"  # a node that left may still stop them
        return None if ended else _session_liveness.kill_at(self.contact)

    # Events.

    def _handle(self, event: events.Event, now: float, out: list[events.Action]) -> None:
        if getattr(event, "connection", None) not in (None, self._connection):
            return  # of a connection that was given up

        match event:
            case events.Connected():
                self._connected = True
            case events.ConnectionLost():
                self._lose_connection(event, now, out)
            case events.OperationDone(_, number, result):
                self._pending, operation = self._pending.answered(number)
                if operation is not None:
                    self._handle_answer(operation, result, now, out)
            case events.Denied():
                self._take_refusal(event, out)
            case events.Refused(_, error):
                self._fail(error, out)
            case _:
                self._handle_request(event, now)

    def _handle_request(self, event: events.AgentEvent, now: float) -> None:
        match event:
            case events.Seek(slots, role):
                self._seek(events.Describe(slots, role), now)
            case events.SendReport(report):
                self._outbox = self._outbox.add(report)
            case events.SuspendHeartbeats(is_suspended):
                self._heartbeats = self._heartbeats.suspended(is_suspended, now)
            case events.CloseSession():
                self.closed = True
            case _:
                assert_type(event, TimePassed)

    def _lose_connection(self, event: events.ConnectionLost, now: float, out: list[events.Action]) -> None:
        if self.left:
            return
        self._disconnected()
        # Even if contact is not judged any more.
        self.contact = evolve(self.contact, trying=False)
        self.status = ""
        self._observe_contact(_session_liveness.Broken(event.why, event.gone), now, out)

    def _take_refusal(self, event: events.Denied, out: list[events.Action]) -> None:
        self._pending, operation = self._pending.answered(event.number)
        is_envelope = operation is not None and operation.task is Task.POST
        self._outbox, error = self._outbox.denied(event, is_envelope, self.identity.node)
        if error is not None:
            self._fail(error, out)

    def _seek(self, describe: events.Describe, now: float) -> None:
        self._outbox = self._outbox.add(describe)
        name = exchange.mailbox_name(self.identity.node, self._outbox.join_seq)
        self._mailbox = self._mailbox.opened(name, self.seen.epoch)
        # Events that the agent did not take are about ranks that this node does not want any more.
        self._drop_events(
            (messages.RankAssignment, messages.RoundEnd, messages.StopAsked, messages.StopProposed, messages.StopAgreed)
        )
        self._waiting = Waiting(now)
        self._ranks_unconfirmed = False
        self._heartbeats = self._heartbeats.joins()
        self.contact = _session_liveness.rejoin(self.contact)

    def _observe_contact(self, event: _session_liveness.Event, now: float, out: list[events.Action]) -> None:
        if self.error is not None:
            return
        if self.final is not None:
            # Workers may still run: only their time limit still matters.
            self.contact = _session_liveness.observe(self.contact, event, now)
        elif not self.closed:
            self.contact, actions = _session_liveness.step(self.contact, event, now)
            self._carry_out(actions, now, out)

    def _carry_out(self, actions: tuple[_session_liveness.Action, ...], now: float, out: list[events.Action]) -> None:
        for action in actions:
            match action:
                case _session_liveness.ReplaceConnection():
                    self._connect(out)
                case _session_liveness.Fence(why, grace):
                    self._stop(why, grace)
                case _session_liveness.GiveUp():
                    self._give_up(action)

    def _connect(self, out: list[events.Action]) -> None:
        self._disconnected()
        self._connection += 1
        out.append(events.OpenConnection(self._connection, _session_liveness.attempt_of(self.contact)))

    def _give_up(self, action: _session_liveness.GiveUp) -> None:
        """End this node's part with an error that names the place where the job was sought."""
        hosts_alone = self._host == self.identity.node and not self.contact.limits.has_election
        # No node coordinates the job any more: its store is gone, or its coordinator is this node,
        # which is cut off.
        has_no_coordinator = action.gone or (action.closed and hosts_alone)
        if has_no_coordinator:
            self.unread += (messages.StoreGone(action.why),)
        host = self._host if self.contact.met else ""
        place = memory.search(self.where, host, self.status)
        self.error = self.identity.gave_up(action.closed, f"{place}: {action.why}")

    def _stop(self, why: str, grace: float | None = None) -> None:
        """
        Report the loss of contact to the agent; ranks that it did not take yet are withdrawn.

        Other nodes may have this node's ranks by now.
        """
        if grace is None:
            grace = GRACE * self.contact.limits.heartbeat
        self._drop_events((messages.RankAssignment,))
        self.unread += (messages.ContactLost(why, grace),)
        self._ranks_unconfirmed = False

    def _drop_events(self, kinds: tuple[type[MembershipEvent], ...]) -> None:
        self.unread = tuple(each for each in self.unread if not isinstance(each, kinds))

    def _disconnected(self) -> None:
        self._connected = False
        self._greeted = False
        self._suspected = None
        self._pending = self._pending.cleared()
        self._mailbox = self._mailbox.awaits(None)
        # The next connection begins with a heartbeat.
        self._heartbeats = evolve(self._heartbeats, due_at=0.0)

    def _fail(self, error: events.Permanent, out: list[events.Action]) -> None:
        self.error = self.error or error
        if not self._greeted:
            out.append(events.Disconnect(self._connection))
            self._disconnected()

    # Answers.

    def _handle_answer(
        self, operation: PendingOperation, result: events.Answered, now: float, out: list[events.Action]
    ) -> None:
        match operation.task, result:
            case Task.FIND, _:
                self._end_search(result is True, now, out)
            case Task.GREET, [data, heartbeat]:
                self._read_greeting(data or b"", heartbeat, now, out)
            case Task.DESCRIBE, messages.Descriptor():
                join = self.identity.join(result, self.terms, self.seen)
                self._outbox = self._outbox.described(operation.seq, join)
            case Task.POST, _:
                self._message_stored(operation, now, out)
            # The coordinator's heartbeat, read after one of this node's or while these are paused.
            case ((Task.HEARTBEAT | Task.LISTEN), [heartbeat]):
                self._read_heartbeat(heartbeat, operation, now, out)
            case Task.TAKE, data:
                self._end_watch(operation.key, data, now, out)
            case Task.FORGET, _ if isinstance(operation.what, Delete):
                self._mailbox = self._mailbox.cleared(operation.what.keys)
            case Task.CAUSE, [cause] if self._ending is not None:
                self._end_with_cause(operation.key, self._ending, cause, now, out)

    def _end_watch(self, key: str, data: events.Answered, now: float, out: list[events.Action]) -> None:
        """Note that the wait for the next notice is over, with or without the notice."""
        self._mailbox = self._mailbox.awaits(None)
        if isinstance(data, bytes):
            self._read_notice(key, data, now, out)

    def _end_search(self, is_there: bool, now: float, out: list[events.Action]) -> None:
        """Read the greeting if there is one; else the speaking thread waits for it again."""
        if not is_there:
            self.status = "the store answers, but no node coordinates this job yet"
            return
        greeting = Read((exchange.ANNOUNCEMENT, exchange.COORDINATOR_HEARTBEAT))
        self._ask(Task.GREET, greeting, now, out)

    def _message_stored(self, operation: PendingOperation, now: float, out: list[events.Action]) -> None:
        """Note that the store has a message of this node."""
        self._outbox = self._outbox.done(operation.seq)
        self._mailbox = self._mailbox.woken(operation.key)
        is_first_sign = operation.seq == self._outbox.join_seq and not self._heartbeats.unanswered
        if is_first_sign:
            # A request to join counts as a heartbeat; the first of the new mailbox follows at once.
            self._heartbeats = evolve(self._heartbeats, due_at=now)
            self._observe_contact(_session_liveness.Acknowledged(operation.sent), now, out)

    def _read_greeting(self, data: bytes, heartbeat: bytes | None, now: float, out: list[events.Action]) -> None:
        try:
            announcement = self.identity.announcement(data)
        except errors.RendezvousClosedError as error:
            self._fail(error, out)
        except errors.RendezvousStateError as error:
            self.status = str(error)
            self._suspected = suspected_again(self._suspected, now)
            if self._suspected.is_over():
                self._fail(error, out)
        else:
            self.identity = evolve(self.identity, nonce=announcement.nonce)
            self.seen = self.seen.after_greeting(announcement.nonce, self.identity.coordinator_heartbeat(heartbeat)[0])
            self._host = announcement.host
            self._greeted = True
            self.status = ""
            self._observe_contact(_session_liveness.Greeted(announcement.heartbeat), now, out)

    def _read_heartbeat(
        self, raw: bytes | None, operation: PendingOperation, now: float, out: list[events.Action]
    ) -> None:
        """
        Take the coordinator's heartbeat, which was read after, or in place of, one of this node.
        """
        if operation.task is Task.HEARTBEAT:
            self._heartbeats = evolve(self._heartbeats, stored=operation.sent)
        heartbeat, why_invalid = self.identity.coordinator_heartbeat(raw)
        if heartbeat is None and raw is not None:
            self._refuse("coordinator's heartbeat", why_invalid, now, out)
        read = None
        count = NO_HEARTBEAT
        if heartbeat is not None:
            read = self._last_read_of_own(heartbeat, operation.task)
            count = heartbeat.count
            self._follow_coordinator(heartbeat, out)

        self._observe_contact(
            _session_liveness.HeartbeatRead(self._heartbeats.stored, count, why_invalid, read), now, out
        )
        self._deliver_ranks(read, now, out)

    def _last_read_of_own(self, heartbeat: messages.CoordinatorHeartbeat, task: Task) -> float | None:
        """
        Return when the last heartbeat of this node was sent that the coordinator reports as read.
        """
        # The first one read after a Join may be from a time in which no coordinator was running.
        self.status = heartbeat.status if self._heartbeats.answered else ""
        self.spares = heartbeat.waiting
        is_old = heartbeat.count < self.contact.heartbeat_count
        report = None if is_old else heartbeat.read
        self._heartbeats, read = self._heartbeats.hears(report, answered=task is Task.HEARTBEAT)
        return read

    def _follow_coordinator(self, heartbeat: messages.CoordinatorHeartbeat, out: list[events.Action]) -> None:
        """
        Send messages again that a new coordinator may not know, and end with a job that is over.
        """
        is_new_coordinator = heartbeat.epoch > self.seen.epoch
        if is_new_coordinator and self.final is None:
            # Without elections the store itself may have been lost with the old coordinator.
            all_late = not self.contact.limits.has_election
            self._outbox = self._outbox.again(self.seen, all_late=all_late)
        self.seen = self.seen.after_heartbeat(heartbeat)
        if heartbeat.over:
            ended = f"job {self.identity.run_id!r} has ended: {heartbeat.over}"
            self._fail(errors.RendezvousClosedError(ended), out)

    def _read_notice(self, key: str, data: bytes, now: float, out: list[events.Action]) -> None:
        notice = self._decoded(key, data, now, out)
        if isinstance(notice, messages.Final) and _is_cause_cut(notice):
            self._ending = notice
            self._ask(Task.CAUSE, Read((exchange.CAUSE,)), now, out, key=key)
        else:
            self._take_notice(key, notice, now, out)

    def _decoded(
        self, key: str, data: bytes, now: float, out: list[events.Action]
    ) -> messages.CoordinatorNotice | None:
        """Return the notice at *key*; None if the coordinator cannot have written it."""
        if data == memory.WAKE:
            return None
        try:
            return self.identity.notice(key, data, self.seen.round)
        except errors.RendezvousStateError as error:
            self._refuse("notice", error, now, out)
            return None

    def _end_with_cause(
        self, key: str, ending: messages.Final, cause: bytes | None, now: float, out: list[events.Action]
    ) -> None:
        """Deliver the end of the job with its whole root cause, if that was found."""
        whole = self.identity.whole(ending, cause)
        if cause is not None and whole is ending:
            self._refuse("root cause", "it is not the one that the job's outcome names", now, out)
        self._take_notice(key, whole, now, out)

    def _refuse(self, kind: str, why: object, now: float, out: list[events.Action]) -> None:
        self._refusals, actions = refuse(self._refusals, kind, why, now)
        out += actions

    def _take_notice(
        self, key: str, notice: messages.CoordinatorNotice | None, now: float, out: list[events.Action]
    ) -> None:
        if notice is not None and key == self._next_notice():  # an earlier mailbox is about a round that is over
            self._mailbox = self._mailbox.further()
            self._apply_notice(notice, now, out)
        self._mailbox = self._mailbox.taken(key, isinstance(notice, messages.RankAssignment))

    def _apply_notice(self, notice: messages.CoordinatorNotice, now: float, out: list[events.Action]) -> None:
        self.seen = self.seen.after_notice(notice)
        match notice:
            case messages.GivenUp(why):
                self._stop(f"the job counts this node as lost: {why}")
            case messages.Elaborate(number):
                self._outbox = self._outbox.elaborate(number, self.identity.node)
            case messages.Caution(text):
                out.append(Log("warning", text))
            case messages.RankAssignment():
                self._waiting = None
                self._ranks_unconfirmed = True
                self._heartbeats, read = self._heartbeats.assigned(notice, self._outbox.join_sent)
                self._deliver_ranks(read, now, out)
            case messages.StopAsked() | messages.StopProposed() | messages.StopAgreed():
                self.unread += (notice,)
            case messages.RoundEnd():
                self._withdraw_ranks(now, out)
                self.unread += (notice,)
            case messages.Final():
                self._withdraw_ranks(now, out)
                self.unread += (notice,)
                self._waiting = None
                self.final = notice
                self._outbox = self._outbox.add(messages.Acknowledgement(self.identity.node))
            case _:
                assert_never(notice)

    def _withdraw_ranks(self, now: float, out: list[events.Action]) -> None:
        """Replace ranks whose round has ended by a loss of contact, if the agent has not got them."""
        self._deliver_ranks(-math.inf, now, out)

    def _deliver_ranks(self, read: float | None, now: float, out: list[events.Action]) -> None:
        """
        Pass on the ranks once it is certain that no other node can have them: the coordinator
        *read* this node lately.
        """
        ranks = self._heartbeats.ranks
        if not self._ranks_unconfirmed or ranks is None or read is None:
            return
        if not _session_liveness.is_stale(self.contact, read, now):
            self._ranks_unconfirmed = False
            self._observe_contact(_session_liveness.Assigned(read), now, out)
            self.unread += (self._unless_too_late(ranks),)
        elif read == -math.inf:  # so they waited for an unknown time, or the round has ended
            self._stop("the ranks of this node arrived too late")

    def _unless_too_late(self, event: MembershipEvent) -> MembershipEvent:
        """
        Return *event*, or a `ContactLost` for an assignment of ranks that others may have by now.
        """
        if not isinstance(event, messages.RankAssignment) or self.final is not None or not self.contact.fenced:
            return event
        why = f"the ranks of round {event.round} arrived while contact was lost"
        return messages.ContactLost(why, GRACE * self.contact.limits.heartbeat)

    # Next requests.

    def _begin_operations(self, now: float, out: list[events.Action]) -> None:
        """Keep both threads busy, or leave once the rest cannot be sent to anyone."""
        if self.closed and self._cannot_send():
            self._leave(out)
        if not self._connected or self.left:
            return
        if self._pending.is_free(events.ConnectionThread.SPEAK):
            self._speak(now, out)
        if self._greeted and self._pending.is_free(events.ConnectionThread.WATCH):
            self._watch(now, out)

    def _cannot_send(self) -> bool:
        """
        Return whether nothing more can be sent: the job has no coordinator, and none is sought for the
        messages.
        """
        if self._greeted or self.left:
            return False
        has_messages = self._outbox.next is not None
        return not (self.contact.trying and has_messages)

    def _watch(self, now: float, out: list[events.Action]) -> None:
        """Delete notices that were read, if it is time for that; else wait for the next notice."""
        key = self._next_notice()
        if done := self._mailbox.deletable(key):
            self._ask(Task.FORGET, Delete(done), now, out)
        elif key is not None:
            self._mailbox = self._mailbox.awaits(key)
            self._ask(Task.TAKE, Take(key, memory.SLICE), now, out, key=key)

    def _speak(self, now: float, out: list[events.Action]) -> None:
        """Begin the most urgent operation: greeting, messages, the end of a wait, heartbeats."""
        if not self._greeted:
            self._seek_greeting(now, out)
        elif (envelope := self._outbox.next) is not None:
            self._send(envelope, now, out)
        elif (stale := self._mailbox.stale(self._next_notice())) is not None:
            self._mailbox = self._mailbox.awaits(None)
            self._ask(Task.WAKE, Update({stale: memory.WAKE}, ()), now, out)
        elif self.closed:
            self._leave(out)
        elif self._is_heartbeat_due(now):
            self._send_heartbeat(now, out)

    def _seek_greeting(self, now: float, out: list[events.Action]) -> None:
        # A suspected greeting is read again after a while: its coordinator renews it.
        is_due = self._suspected is None or now >= self._suspected.look_at
        if is_due:
            self._ask(Task.FIND, Wait(exchange.ANNOUNCEMENT, memory.GREETING), now, out)

    def _send(self, envelope: Written, now: float, out: list[events.Action]) -> None:
        seq, what = envelope.seq, envelope.what
        if isinstance(what, events.Describe):
            self._ask(Task.DESCRIBE, what, now, out, seq=seq)
            return

        self._outbox = self._outbox.sent(seq, now)
        sent = now

        # It counts from its first attempt, which may have arrived though no answer came.
        if seq == self._outbox.join_seq and self._outbox.join_sent is not None:
            sent = self._outbox.join_sent
        # The same request ends a wait for a notice of an older mailbox, if there is one.
        stale = self._mailbox.stale(self._next_notice())
        woken = {} if stale is None else {stale: memory.WAKE}
        post = Post(self.identity.envelope(seq, what), woken)
        self._ask(Task.POST, post, now, out, key=stale or "", seq=seq, sent=sent)

    def _may_send_heartbeat(self) -> bool:
        return self.contact.limits.heartbeat > 0 and self._outbox.has_joined and not self.closed

    def _is_heartbeat_due(self, now: float) -> bool:
        return self._may_send_heartbeat() and now >= self._heartbeats.due_at

    def _send_heartbeat(self, now: float, out: list[events.Action]) -> None:
        """Send a heartbeat, or only read the coordinator's while they are paused."""
        self._heartbeats, sends = self._heartbeats.turn(now, self.contact.limits.heartbeat)
        if not sends:
            self._ask(Task.LISTEN, Read(memory.POLLED_KEYS), now, out)
            return
        if self._waiting is not None and self._heartbeats.is_late():
            self._outbox = self._outbox.again(self.seen)
        heartbeat = messages.NodeHeartbeat(self._heartbeats.count, self._mailbox.read, self._outbox.stored)
        own = self.identity.heartbeat(self._mailbox.name, heartbeat)
        self._ask(Task.HEARTBEAT, Update(own, memory.POLLED_KEYS), now, out)

    def _next_notice(self) -> str | None:
        done = self.closed or (self.final is not None and self._mailbox.read > 0)
        return None if done else self._mailbox.next_key

    def _ask(
        self, task: Task, what: Operation | events.Describe, now: float, out: list[events.Action],
        *, key: str = "", seq: int = 0, sent: float | None = None,
    ) -> None:  # fmt: skip
        self._pending = self._pending.ask(task, now if sent is None else sent, key, seq, what)
        out.append(events.Ask(self._connection, task.thread, self._pending.count, what))

    def _leave(self, out: list[events.Action]) -> None:
        self.left = True
        out.append(events.Disconnect(self._connection))

    def _log_wait(self, now: float, out: list[events.Action]) -> None:
        """Log that nothing has come for long, and why; not after the end of this node's part."""
        if self._is_over():
            self._waiting = None
        if self._waiting is None or now < self._waiting.due_at():
            return
        why = self.status or _session_liveness.search(self.contact, now)
        self._waiting, text = self._waiting.log_line(self.identity.node, self.identity.run_id, why, now)
        out.append(Log("warning", text))


def _is_cause_cut(final: messages.Final) -> bool:
    """Return whether the *final* has only a few lines of the root cause."""
    return final.root is not None and final.root.cut
