"""
Rules of a coordinator's mail, checked at each of its steps in a simulated cluster.

Notices of a mailbox are written in order, each once. A notice is written again if a heartbeat
reports it as unread long enough after it was written, and only then. A successor that takes over
now would know exactly which notices remain to be written.

Rules of this file: it sees inputs and outputs, as a store does. Of saved documents it reads what a
successor would read.
"""

from __future__ import annotations

import math
from typing import Any

from attrs import Factory, define

from elasticlib.errors import RendezvousStateError
from elasticlib.rendezvous.coordinator._handover import read_handover
from elasticlib.rendezvous.coordinator._server import Server
from elasticlib.rendezvous.coordinator._server_events import (
    Action,
    Arrived,
    Event,
    HeartbeatsFetched,
    OperationFailed,
    Save,
    Unsaved,
)
from elasticlib.rendezvous.protocol._exchange import heartbeat_key, key_place, mailbox_key, report_place
from elasticlib.rendezvous.protocol._messages import Acknowledgement, Envelope, Message, NodeHeartbeat, decode
from elasticlib.rendezvous.protocol._operations import Read, Write
from elasticlib.rendezvous.protocol._timing import INTERVAL
from tests.sim.checks.demand import SOON, Demand

REMINDED = 3 * INTERVAL
"""Share of the heartbeat time after which what was not read is written again."""
LATE = 2.0
"""Seconds after which a node that is gone is forgotten, besides the heartbeat time."""
_LARGE = 50_000
"""Bytes of a document that takes too long to be read at each step."""
_BOX = "box/"


@define(eq=False, repr=False)
class OutboxChecks:
    """Of one coordinator, for its term."""

    demand: Demand
    _written: dict[str, float] = Factory(dict)
    """When each notice was written last, by key."""
    _reported: dict[str, int] = Factory(dict)
    """Number of notices written to each mailbox."""
    _heartbeats: dict[str, NodeHeartbeat] = Factory(dict)
    """The latest of each mailbox."""
    _here: dict[str, float] = Factory(dict)
    """When each node was seen last among those who live, or are to read the end."""
    _requested: tuple[str, ...] = ()
    """Keys of the heartbeats that are being read."""
    _turned_at: float = 0.0
    """When messages came last: what follows from them is written once the heartbeats are read."""
    _delays: dict[str, float] = Factory(dict)
    """For how long that had each notice wait, by key."""

    def stepped(
        self, event: Event | None, before: Server | None, server: Server, actions: tuple[Action, ...], now: float
    ) -> None:
        """The server has taken a step; *before* is None when it began."""
        before = before or server
        for node in {*before.logic.mailboxes(before.state), *_outbox(before).end_unread}:
            self._here[node] = now
        self._turned_at = self._turned_at if isinstance(event, HeartbeatsFetched) else now
        if isinstance(event, HeartbeatsFetched):
            for key, data in zip(self._requested, event.found, strict=True):
                self._takes_heartbeat(key, data, before, now)
        if isinstance(event, Arrived):
            for entry in event.entries:
                self._acknowledges(entry.data, before)
        if isinstance(event, OperationFailed):  # how far it came with that is not known
            self._written.clear()
        if isinstance(event, Unsaved):  # what was to follow was not done
            for action in event.undone:
                for key in action.values if isinstance(action, Write) else ():
                    self._written.pop(key, None)
        for action in actions:
            match action:
                case Read(keys):
                    self._requested = keys
                case Write(values):
                    for key in values:
                        if key.startswith(_BOX):
                            self._writes(key, before, server, now)
                case Save(data):
                    self._leaves(data, server, now)
        if isinstance(event, HeartbeatsFetched):
            self._has_reminded(server, now)
            self._forgets(before, server)
        self._keeps(server)

    def _takes_heartbeat(self, key: str, data: bytes | None, server: Server, now: float) -> None:
        try:
            node_heartbeat = decode(data or b"", server.key, key_place(server.run_id, server.nonce, key))
        except RendezvousStateError:
            return
        known = self._heartbeats.get(key)
        if not isinstance(node_heartbeat, NodeHeartbeat):
            return
        if known is None or node_heartbeat.count >= known.count:
            self._heartbeats[key] = node_heartbeat
        mailbox = key.removeprefix("beat/")
        node = mailbox.rpartition("/")[0]
        outbox = _outbox(server)
        is_here = node in outbox.end_unread or server.logic.mailboxes(server.state).get(node) == mailbox
        is_back = server._garbage.copy().is_back(node, mailbox, self._heartbeats[key].count)
        if is_back or not is_here or outbox.mailbox_of(node) != mailbox:
            # It was given up: what it has not read counts as never written, and it is told anew.
            for index in range(self._read(mailbox), self._reported.get(mailbox, 0)):
                self._written.pop(mailbox_key(mailbox, index), None)
            self._reported[mailbox] = self._read(mailbox)
            self._here[node] = now

    def _acknowledges(self, data: bytes, server: Server) -> None:
        """Forget the notices of a node that acknowledges the end; a later notice counts as the first."""
        try:
            envelope = decode(data, server.key, lambda each: _place(each, server))
        except RendezvousStateError:
            return
        if isinstance(envelope, Envelope) and isinstance(envelope.report, Acknowledgement):
            mailbox = _outbox(server).mailbox_of(envelope.report.node)
            for index in range(self._reported.pop(mailbox, 0)):
                self._written.pop(mailbox_key(mailbox, index), None)

    def _read(self, mailbox: str) -> int:
        node_heartbeat = self._heartbeats.get(heartbeat_key(mailbox))
        return 0 if node_heartbeat is None else node_heartbeat.read

    def _writes(self, key: str, before: Server, after: Server, now: float) -> None:
        mailbox, _, number = key.removeprefix(_BOX).rpartition("/")
        node, index, last = mailbox.rpartition("/")[0], int(number), self._written.get(key)
        if (
            _outbox(before).mailbox_of(node) != mailbox
        ):  # nobody is known to read there: what was told there is forgotten
            read = _outbox(after).mailbox_of(node) == mailbox or last is None
            self.demand(read, f"{key} is written again, and nobody reads there any more")
        elif last is not None:
            waited = now - last >= REMINDED * before.state.rules.heartbeat - self._delays[key] - SOON
            self.demand(waited, f"{key} is written again {now - last:.6f} s after it was written")
            self.demand(index >= self._read(mailbox), f"{key} is written again though it was read")
            current = before.logic.mailboxes(before.state).get(node, mailbox)
            right = current == mailbox or before.state.final is not None
            self.demand(right, f"{key} is written again, and the node reads in {current}")
            absent = now - self._here.get(node, now) - before.state.rules.heartbeat
            self.demand(absent <= LATE, f"{key} is written again to a node that has been gone for long")
        else:
            due = max(self._reported.get(mailbox, index), self._read(mailbox))
            self.demand(index <= due, f"{key} is written, and notice {due} comes next")
        self._delays[key] = now - self._turned_at
        self._written[key], self._reported[mailbox] = now, max(self._reported.get(mailbox, 0), index + 1)

    def _has_reminded(self, server: Server, now: float) -> None:
        """Check that each live node reads its notices or is reminded."""
        for node, mailbox in server.logic.mailboxes(server.state).items():
            if heartbeat_key(mailbox) not in self._heartbeats or _outbox(server).mailbox_of(node) != mailbox:
                continue
            if node in server._garbage._silent:  # it is waited for, and sends no heartbeats
                continue
            for index in range(self._read(mailbox), self._reported.get(mailbox, 0)):
                last = self._written.get(mailbox_key(mailbox, index), now)
                late = now - last > REMINDED * server.state.rules.heartbeat + SOON
                self.demand(not late, f"notice {index} of {mailbox} was not read for {now - last:.6f} s")

    def _keeps(self, server: Server) -> None:
        """Nothing of older mailboxes, nor of nodes that need no mail any more."""
        outbox = _outbox(server)
        mailboxes, unread = (
            set(outbox._mailboxes.values()),
            {mailbox for mailbox, notices in outbox._unread.items() if notices},
        )
        self.demand(
            set(outbox._sent) == mailboxes, f"it counts notices of {set(outbox._sent)}, and nodes read in {mailboxes}"
        )
        self.demand(unread <= mailboxes, f"it keeps notices of {unread}, and nodes read in {mailboxes}")
        self.demand(outbox.end_unread <= set(outbox._mailboxes), f"it waits for {outbox.end_unread}, who have no box")

    def _forgets(self, before: Server, after: Server) -> None:
        """Check that the coordinator forgets nodes that have left, so that its memory does not grow."""
        state = after.state
        here = {*before.logic.mailboxes(before.state), *state.waiting, *(state.round.entries if state.round else ())}
        known = set(_outbox(after)._mailboxes) - here - _outbox(before).end_unread - _outbox(after).end_unread
        self.demand(not known, f"it keeps mail of {known}, who are gone")

    def _leaves(self, data: bytes, server: Server, now: float) -> None:
        """Check that a successor would know the outbox from the document."""
        if len(data) > _LARGE:
            return
        left = read_handover(data, server.run_id, server.key, now).outbox
        outbox = _outbox(server).copy()
        outbox.written(keep=True)
        outbox.remind(now, -math.inf)
        for each in (left, outbox):
            each._unread = {mailbox: notices for mailbox, notices in each._unread.items() if notices}
        self.demand(left == outbox, f"its successor would know {left}, and it knows {outbox}")


def _place(message: Message, server: Server) -> str:
    if not isinstance(message, Envelope):
        raise ValueError("no node posts that")
    return report_place(server.run_id, server.nonce, message.report.node, message.seq)


def _outbox(server: Server) -> Any:
    return server._outbox
