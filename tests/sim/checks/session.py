"""
Operations that a node's session may request, and must.

A thread does not rest while there is something to send or read. The agent receives each notice once.
A closed session ends. Nothing is due before the moment for which a session requests its wake-up.

The checks read only those fields of the session that others read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from attrs import define, field

from elasticlib.errors import RendezvousStateError
from elasticlib.rendezvous._membership import MembershipEvent
from elasticlib.rendezvous.node import _session_events as events
from elasticlib.rendezvous.node._identity import LOOK_AGAIN, SUSPECTED_FOR
from elasticlib.rendezvous.node._session import Session
from elasticlib.rendezvous.node._session_events import ConnectionThread
from elasticlib.rendezvous.node._session_memory import GREETING, SLICE, WAKE
from elasticlib.rendezvous.protocol import _messages as messages
from elasticlib.rendezvous.protocol._exchange import (
    ANNOUNCEMENT,
    CAUSE,
    COORDINATOR_HEARTBEAT,
    heartbeat_key,
    key_place,
    mailbox_name,
)
from elasticlib.rendezvous.protocol._operations import Delete, Log, Post, Read, Take, Update, Wait
from elasticlib.rendezvous.protocol._progress import Seen
from elasticlib.rendezvous.protocol._reading import greeting_of, heartbeat_of
from elasticlib.rendezvous.protocol._shortening import refers
from tests.sim.checks.connections import Connections
from tests.sim.checks.contact import LOST, Contact
from tests.sim.checks.demand import Demand
from tests.sim.checks.envelopes import Envelopes
from tests.sim.checks.heartbeats import Heartbeats
from tests.sim.checks.mailbox import Mailbox
from tests.sim.checks.reports import WAITED, Refusals, Waiting, check_received, notice_in
from tests.sim.checks.waking import Waking

_UNANSWERED = frozenset(6 * 2**times for times in range(20))
"""Heartbeats without ranks after which the request to join is said again."""


@define(eq=False, repr=False)
class SessionChecks:
    """Of one node's session, from its beginning."""

    demand: Demand
    announcement: messages.Announcement | None = None
    """The greeting that was read on the connection."""
    closed: bool = False
    has_left: bool = False
    final: bool = False
    seen: Seen = field(factory=Seen)
    """Progress of the job as far as the node knows it."""
    connections: Connections = field(init=False)
    envelopes: Envelopes = field(init=False)
    heartbeats: Heartbeats = field(init=False)
    mailbox: Mailbox = field(init=False)
    contact: Contact = field(init=False)
    waiting: Waiting = field(init=False)
    refusals: Refusals = field(init=False)
    waking: Waking = field(init=False)
    _job: str = ""
    _node: str = ""
    _key: bytes | None = None
    _posting: int = 0
    _awaits: str = ""
    """The key for whose notice the thread waits, and nobody has woken it."""
    _host: str = ""
    """The node that coordinates, as far as is known."""
    _listens: bool = False
    """True if the coordinator's heartbeat is read without one of the node being sent."""
    _ranks: messages.RankAssignment | None = None
    """Last assignment of ranks that was read."""
    _erred: bool = False
    """True if an error has ended the session's membership."""
    _left: bool = False
    """True if only this node's membership is over, while other nodes continue."""
    _unsure: bool = False
    """True if the ranks may belong to other nodes, so that the agent has not received them."""
    _too_late: bool = False
    """True if a notice followed such ranks: the agent must get a report that they were too late."""
    _ending: messages.Final | None = None
    """Final notice whose whole root cause is being read."""
    _key_of_end: str = ""
    _may_end: bool = False
    """True if the membership may end because nothing else helps."""
    _must_end: bool = False
    """True if the membership cannot continue."""
    _suspected_since: float | None = None
    _look_at: float = 0.0

    def begins(self, session: Session, actions: tuple[events.Action, ...], now: float) -> None:
        """The session has begun."""
        self._job, self._node, self._key = session.identity.run_id, session.identity.node, session.identity.key
        self.envelopes = Envelopes(self._job, self._node, self._key, session.terms, self.demand)
        self.connections, self.heartbeats, self.mailbox = (
            Connections(self.demand),
            Heartbeats(self.demand),
            Mailbox(self.demand),
        )
        self.refusals, self.waiting, self.waking = Refusals(self.demand), Waiting(self.demand), Waking(self.demand)
        self.contact = Contact(session.contact.limits, self.demand, now)
        for action in actions:
            self._act(action, now)
        self._rests(session, now)

    def stepped(
        self, event: events.Event, before: Session, after: Session, actions: tuple[events.Action, ...], now: float
    ) -> None:
        """The session has taken a step."""
        self.waking.stepped(now)
        received = [each for each in after.unread if not any(each is old for old in before.unread)]
        losses = [each for each in received if isinstance(each, messages.ContactLost)]
        early = [loss for loss in losses if loss.why.startswith(LOST) and now >= self.contact.lost_at()]
        for loss in early:
            self.contact.reports_loss(loss, now)
            self._unsure = False
        # What had to be done before the event was heard.
        first = [each for each in actions if isinstance(each, events.OpenConnection) and self.contact.may_try(now)]
        for connect in first:
            self._act(connect, now)
        notice = self._handle(event, after, now)
        for loss in losses:
            if loss not in early:
                self.contact.reports_loss(loss, now)
                self._unsure = False
        self.demand(bool(losses) or not self._too_late, "ranks came too late, and the agent is not told")
        self._too_late = False
        check_received(notice, received, after, self.contact.fenced, self.demand)
        leaves = after.left and not before.left and not isinstance(event, events.ConnectionLost)
        left = self.envelopes.is_left and (
            self.announcement is not None or (self.contact.trying and not self.connections.ended)
        )
        self.demand(not (leaves and left), "it parts, and could say what is left")
        self._ends(before, after, received, now)
        for action in actions[len(first) :]:
            self._act(action, now, after.status)
        self._rests(after, now)

    def taken(self, received: tuple[MembershipEvent, ...], after: Session) -> None:
        """Check that the agent took all its notices, and took no ranks after a loss of contact."""
        self.demand(not after.unread, f"the agent has taken {after.unread}, and would be told again")
        late = self.contact.fenced and any(isinstance(each, messages.RankAssignment) for each in received)
        self.demand(not late, f"contact is lost, and the agent takes {received}")

    def _ends(self, before: Session, after: Session, received: list[MembershipEvent], now: float) -> None:
        """The session's part may end now, or must."""
        self.demand(before.error in (None, after.error), "the error that ended its part is another one")
        self.demand(not self._must_end or after.error is not None, "its part is over, and goes on")
        if after.error is not None and before.error is None and not (self._must_end or self._may_end):
            self.contact.gives_up(after.error, now)
            for part in (self._node, repr(self._job), self._host if self.contact.met else before.status):
                self.demand(part in str(after.error), f"it gives up, and does not say {part!r}: {after.error}")
            hosts = self.contact.met and not self.contact.limits.has_election and self._host == self._node
            reported = any(isinstance(each, messages.StoreGone) for each in received)
            self.demand(
                reported == (self.contact.is_store_lost() or hosts),
                f"the agent is told {received} as its store is gone",
            )
        self._erred = after.error is not None
        self.contact.over = self.closed or self.final or self._erred
        if self.contact.over:
            self.waiting.ends()

    # What comes in.

    def _handle(self, event: events.Event, after: Session, now: float) -> messages.CoordinatorNotice | None:
        """The notice that the agent must be told now, if there is one."""
        if getattr(event, "connection", None) not in (None, self.connections.number):
            return None
        match event:
            case events.Connected():
                self.connections.there = True
            case events.ConnectionLost(why=why, gone=refused):
                if not self.has_left:
                    self._leaves()
                    self.contact.breaks(now, why, refused)
                    self.demand(not after.status, f"contact is lost, and it says {after.status!r}")
            case events.OperationDone(number=number, result=result):
                if (request := self.connections.answered(number)) is not None:
                    return self._answered(request.thread, request.operation, result, after, now)
            case events.Denied(number=number):
                if (request := self.connections.answered(number)) is not None:
                    is_envelope = isinstance(request.operation, Post)
                    self._may_end = is_envelope and self.envelopes.denied(self._posting, event.too_large)
                    self._must_end = not self._may_end
            case events.Refused():
                self._must_end = True
            case events.Seek():
                self.envelopes.wants()
                self.mailbox.opened(mailbox_name(self._node, self.envelopes.join_seq), self.seen.epoch > 0)
                self.contact.joins()
                self._unsure = False
                self.heartbeats.joins()
                self.waiting.begins(now)
                old = [each for each in after.unread if isinstance(each, (messages.RankAssignment, messages.RoundEnd))]
                self.demand(not old, f"it asks for ranks, and has {old} for its agent")
            case events.SendReport(report):
                self.envelopes.reports(report)
            case events.SuspendHeartbeats(suspended):
                self.heartbeats.suspended = suspended
                if not suspended:
                    self.heartbeats.at_once()
            case events.CloseSession():
                self.closed = True
        return None

    def _leaves(self) -> None:
        """The connection is none any more."""
        self.connections.breaks()
        self.announcement, self._suspected_since, self._look_at, self._awaits = None, None, 0.0, ""
        self.heartbeats.at_once()

    def _answered(
        self, thread: ConnectionThread, what: Any, result: Any, after: Session, now: float
    ) -> messages.CoordinatorNotice | None:
        match what:
            case Wait() if thread is ConnectionThread.SPEAK:
                self.demand(bool(result or after.status), "there is no greeting, and it does not say so")
                if result:
                    self.connections.follow[thread] = Read((ANNOUNCEMENT, COORDINATOR_HEARTBEAT))
            case Take(key):
                self._awaits = ""
                if result is not None:
                    return self._noticed(key, result, now)
            case events.Describe():
                self.envelopes.described(result, self.seen)
            case Post(_, values):
                if self._awaits in values:
                    self._awaits = ""
                self.envelopes.arrived(self._posting)
                if self._posting == self.envelopes.join_seq and not self.heartbeats.since_join:
                    self.heartbeats.at_once()
                    if not self.contact.over:
                        self.contact.stored(self.envelopes.requested_at or now, now)
            case Delete(keys):
                self.mailbox.deleted(tuple(keys))
            case Update(values, (key,)):
                self._listens = False
                self.heartbeats.stored_at = self.heartbeats.sent_at
                return self._felt(result[0], after, now)
            case Read((key,)) if key == COORDINATOR_HEARTBEAT:
                self._listens = True
                return self._felt(result[0], after, now)
            case Read((key, *_)) if key == ANNOUNCEMENT:
                self._is_greeted(result, after, now)
            case Read((key,)) if key == CAUSE:
                return self._ended(result[0], after, now)
        return None

    def _is_greeted(self, found: list[bytes | None], after: Session, now: float) -> None:
        announcement = greeting_of(found[0], self._job, self._key)
        if announcement is None:
            self.demand(bool(after.status), "there is no greeting of its job, and it does not say so")
            self._suspected_since = now if self._suspected_since is None else self._suspected_since
            self._look_at = now + LOOK_AGAIN
            self._must_end = now > self._suspected_since + SUSPECTED_FOR
        elif self.seen.nonce not in ("", announcement.nonce):
            self._must_end = True
        else:
            self.announcement, self._host = announcement, announcement.host
            self.demand(not after.status, f"the greeting is there, and it says {after.status!r}")
            self.seen = self.seen.after_greeting(
                announcement.nonce, heartbeat_of(found[1], self._job, announcement.nonce, self._key)[0]
            )
            if not self.contact.over:
                self.contact.greeted(announcement.heartbeat, now)
            self.heartbeats.heartbeat = self.contact.heartbeat

    def _felt(self, raw: bytes | None, after: Session, now: float) -> messages.CoordinatorNotice | None:
        credited = None
        heartbeat, rejection = heartbeat_of(raw, self._job, self.seen.nonce, self._key)
        if heartbeat is not None:
            shown = heartbeat.status if self.heartbeats.answered else ""
            same = (after.status, after.spares) == (shown, heartbeat.waiting)
            self.demand(same, f"it says {after.status!r} and {after.spares} spares, the coordinator {heartbeat}")
            self.heartbeats.answered += not self._listens
            if heartbeat.epoch > self.seen.epoch and not self.final:
                self.envelopes.repeats(self.seen)
            self.seen = self.seen.after_heartbeat(heartbeat)
            self._must_end = self._must_end or bool(heartbeat.over)
            if heartbeat.count >= self.contact.read:
                credited = self.heartbeats.credited(heartbeat.read, self._ranks)
        elif raw is not None:
            self.refusals.refuses("coordinator's heartbeat")
        if not (self._erred or self._must_end) and (self.final or not self.contact.over):
            feels = self.contact.noted if self.final else self.contact.felt
            feels(self.heartbeats.stored_at, None if heartbeat is None else heartbeat.count, rejection, credited, now)
        if not self._unsure or credited is None or self.contact.is_stale(credited, now):
            return None
        return self._gets_ranks(credited)

    def _gets_ranks(self, credited: float) -> messages.RankAssignment | None:
        self._unsure = False
        self.contact.has_ranks(credited)
        return self._ranks

    def _noticed(self, key: str, data: bytes, now: float) -> messages.CoordinatorNotice | None:
        try:
            notice = None if data == WAKE else notice_in(data, key, self._job, self._key, self.seen)
        except RendezvousStateError:
            self.refusals.refuses("notice")
            notice = None
        if isinstance(notice, messages.Final) and notice.root is not None and notice.root.cut:
            self._ending, self._key_of_end = notice, key
            self.connections.follow[ConnectionThread.WATCH] = Read((CAUSE,))
            return None
        return self._delivered(key, notice, now)

    def _ended(self, cause: bytes | None, after: Session, now: float) -> messages.CoordinatorNotice | None:
        """The end was read, with its whole root cause or the few lines of it that it came with."""
        final, brief = after.final, self._ending
        if final is not None and final != brief and refers(final) == brief:
            return self._delivered(self._key_of_end, final, now)
        if cause is not None:
            self.refusals.refuses("root cause")
        return self._delivered(self._key_of_end, brief, now)

    def _delivered(
        self, key: str, notice: messages.CoordinatorNotice | None, now: float
    ) -> messages.CoordinatorNotice | None:
        """The notice that is the next one; it is to be deleted now."""
        self.mailbox.has_taken(key, isinstance(notice, messages.RankAssignment))
        if notice is None or self._has_read_all() or key != self.mailbox.next_key:
            return None
        self.mailbox.read += 1
        self.seen = self.seen.after_notice(notice)
        if isinstance(notice, messages.Final):
            self.envelopes.ends()
            self.final, self._left = True, notice.kind == "left"
        elif isinstance(notice, messages.Caution):
            self.refusals.is_cautioned(notice.text)
        elif isinstance(notice, messages.Elaborate):
            self.envelopes.elaborates(notice.round)
        if isinstance(notice, (messages.RankAssignment, messages.Final)):
            self.waiting.ends()
        if isinstance(notice, messages.RankAssignment):
            self._ranks, self._unsure, self.heartbeats.has_ranks = notice, True, True
            sent = self.heartbeats.sent.get(notice.heartbeat_count, self.envelopes.requested_at)
            if sent is None or self.heartbeats.is_far(notice):
                sent = -math.inf
                self._too_late = self._unsure = bool(self.contact.heartbeat)
            return None if self.contact.is_stale(sent, now) else self._gets_ranks(sent)
        if isinstance(notice, (messages.RoundEnd, messages.Final)):
            self._too_late, self._unsure = self._unsure, False
        return notice

    def _has_read_all(self) -> bool:
        return self.closed or (self.final and self.mailbox.read > 0) or not self.mailbox.name

    # What goes out.

    def _act(self, action: events.Action, now: float, status: str = "") -> None:
        self.demand(not self.has_left, f"it has parted, and wants {action}")
        match action:
            case events.OpenConnection(number):
                self._leaves()
                self.connections.begins(number)
                self.contact.tries(now)
            case events.Ask():
                self._requests(action.thread, action.operation, self.connections.requests(action), now)
            case events.Disconnect(number):
                self.connections.ends(number)
                self._leaves()
                self.contact.trying = False
            case Log(text=text) if WAITED in text:
                self.waiting.says(text, status or ("" if self.contact.live else "s left"), now)
            case Log(text=text):
                self.refusals.says(text)

    def _requests(self, thread: ConnectionThread, what: Any, wanted: Any, now: float) -> None:
        greeted, speaks = self.announcement is not None, thread is ConnectionThread.SPEAK
        match what:
            case Wait(key, seconds) if key == ANNOUNCEMENT and speaks:
                self.demand(not greeted and now >= self._look_at, "the greeting is waited for in vain")
                self.demand(seconds == GREETING, f"the greeting is waited for {seconds} s")
            case Take(key, seconds) if not speaks and greeted and not self._has_read_all():
                self.mailbox.may_wait(key)
                self.demand(seconds == SLICE, f"a notice is waited for {seconds} s")
                self._awaits = key
            case events.Describe() if speaks and greeted:
                self.envelopes.describes()
            case Post(data, values) if speaks and greeted:
                self._posting = self.envelopes.post(data, self.seen.nonce, now)
                stale = {self._awaits: WAKE} if self._awaits and self._is_stale() else {}
                self.demand(values == stale, f"{values} is written with a message, and should be {stale}")
            case Update(values, ()) if speaks and greeted:
                self.demand(values == {self._awaits: WAKE} and self._is_stale(), f"{values} is written to wake nobody")
                self._awaits = ""
            case Update(values, (key,)) if speaks and greeted and key == COORDINATOR_HEARTBEAT:
                self._sends(values, now)
            case Read((key,)) if key == COORDINATOR_HEARTBEAT and speaks and greeted:
                self.heartbeats.listens(now)
            case Delete(keys) if not speaks and keys and (self._has_read_all() or self.mailbox.is_to_delete):
                self.mailbox.deletes(tuple(keys))
            case Read() if wanted is not None:
                pass
            case _:
                self.demand(False, f"{what} is asked of {thread}")

    def _sends(self, values: Mapping[str, bytes], now: float) -> None:
        [(key, data)] = values.items()
        self.demand(key == heartbeat_key(self.mailbox.name), f"a heartbeat is written to {key}")
        self.demand(self.envelopes.has_joined and not self.closed, "it sends heartbeats though it asks for no seat")
        node_heartbeat = messages.decode(data, self._key, key_place(self._job, self.seen.nonce, key))
        assert isinstance(node_heartbeat, messages.NodeHeartbeat)
        self.heartbeats.heartbeats(node_heartbeat, self.mailbox.read, self.envelopes.stored, now)
        if self.waiting.since is not None and self.heartbeats.since_join in _UNANSWERED:
            self.envelopes.repeats(self.seen)

    def _is_stale(self) -> bool:
        """Return whether the watching thread waits where no more notices arrive."""
        return self._has_read_all() or self._awaits != self.mailbox.next_key

    # What must have been done when a step is over.

    def _rests(self, session: Session, now: float) -> None:
        self.has_left = session.left
        if self.has_left:
            self.demand(self.closed and not self.connections.there, "it has parted, and keeps its connection")
            return
        self.connections.rests()
        if self.closed:
            tries = self.envelopes.is_left and (self.contact.trying or self.connections.ended)
            self.demand(
                self.announcement is not None or tries, "it is closed and can say nothing more, and does not part"
            )
        if self.connections.there and self.connections.is_free(ConnectionThread.SPEAK):
            self._speaks(now)
        if self.connections.there and self.connections.is_free(ConnectionThread.WATCH):
            self.demand(self.announcement is None or self._has_read_all(), f"nobody waits for {self.mailbox.next_key}")
            if self.announcement is not None:
                self.mailbox.rests()
        self.refusals.rests()
        self.demand(session.seen == self.seen, f"it has seen {self.seen}, and says {session.seen}")
        self.demand((session.final is not None) == self.final, f"it is told {session.final} as the end")
        if not self.final or self._left:
            self.contact.kills(session.kill_at())
        else:
            self.demand(session.kill_at() is None, "the job is over, and its workers are killed")
        if not self.contact.over:
            self.contact.rests(now)
        self.waiting.rests(now)
        self.waking.rests(session, now)

    def _speaks(self, now: float) -> None:
        if self.announcement is None:
            self.demand(now < self._look_at, "it has a connection, and does not seek the greeting")
            return
        self.demand(not self.envelopes.is_left, "a message is left, and not sent")
        self.demand(not self.closed, "it is closed, has nothing more to say, and does not part")
        self.demand(not (self._awaits and self._is_stale()), f"it waits for {self._awaits}, where nothing comes")
        if self.contact.heartbeat and self.envelopes.has_joined:
            self.heartbeats.rests(now)
