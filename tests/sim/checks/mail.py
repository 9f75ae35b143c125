"""
What must hold for a coordinator's mail: checked at each of its steps in a simulated cluster.

Notices of a box are written in their order, each once; again only where a beat says that it was not read, long enough
after it was written, and then it is. Whoever took over now would know what is to be written, and nothing else.

Rules of this file: it sees what comes in and what goes out, as a store does; of what is written down it reads what a
successor would.
"""

from __future__ import annotations

import math
from typing import Any

from attrs import Factory, define

from elasticlib.errors import RendezvousStateError
from elasticlib.rendezvous.coordinator._handover import read_handover
from elasticlib.rendezvous.coordinator._server import Server
from elasticlib.rendezvous.coordinator._server_events import Action, Event, Heard, Save, Unsaved
from elasticlib.rendezvous.protocol._exchange import beat_key, box_key, key_place
from elasticlib.rendezvous.protocol._messages import NodeHeartbeat, decode
from elasticlib.rendezvous.protocol._operations import Read, Write
from elasticlib.rendezvous.protocol._timing import INTERVAL
from tests.sim.checks.demand import SOON, Demand

REMINDED = 2 * INTERVAL
"""Share of the heartbeat time after which what was not read is written again."""
LATE = 2.0
"""Seconds after which a node that is gone is forgotten, besides the heartbeat time."""
_LARGE = 50_000
"""Bytes of a document that takes too long to be read at each step."""
_BOX = "box/"


@define(eq=False, repr=False)
class MailChecks:
    """Of one coordinator, for its term."""

    demand: Demand
    _written: dict[str, float] = Factory(dict)
    """When each notice was written last, by key."""
    _told: dict[str, int] = Factory(dict)
    """How many notices each box was given."""
    _beats: dict[str, NodeHeartbeat] = Factory(dict)
    """The latest of each box."""
    _here: dict[str, float] = Factory(dict)
    """When each node was seen last among those who live, or are to read the end."""
    _asked: tuple[str, ...] = ()
    """Where beats are being read."""

    def stepped(
        self, event: Event | None, before: Server | None, server: Server, actions: tuple[Action, ...], now: float
    ) -> None:
        """The server has taken a step; *before* is None when it began."""
        before = before or server
        for node in {*before.logic.boxes(before.state), *_mail(before).unparted}:
            self._here[node] = now
        if isinstance(event, Heard):
            for key, data in zip(self._asked, event.found, strict=True):
                self._hear(key, data, before)
        if isinstance(event, Unsaved):  # what was to follow was not done
            for action in event.undone:
                for key in action.values if isinstance(action, Write) else ():
                    self._written.pop(key, None)
        for action in actions:
            match action:
                case Read(keys):
                    self._asked = keys
                case Write(values):
                    for key in values:
                        if key.startswith(_BOX):
                            self._writes(key, before, server, now)
                case Save(data):
                    self._leaves(data, server, now)
        if isinstance(event, Heard):
            self._has_reminded(server, now)
            self._forgets(before, server)
        self._keeps(server)

    def _hear(self, key: str, data: bytes | None, server: Server) -> None:
        try:
            beat = decode(data or b"", server.key, key_place(server.run_id, server.nonce, key))
        except RendezvousStateError:
            return
        known = self._beats.get(key)
        if not isinstance(beat, NodeHeartbeat):
            return
        if known is None or beat.count >= known.count:
            self._beats[key] = beat
        box = key.removeprefix("beat/")
        node = box.rpartition("/")[0]
        if server.logic.boxes(server.state).get(node) != box or _mail(server).box_of(node) != box:
            # It was given up: what it has not read counts as never written, and it is told anew.
            for index in range(self._read(box), self._told.get(box, 0)):
                self._written.pop(box_key(box, index), None)
            self._told[box] = self._read(box)

    def _read(self, box: str) -> int:
        beat = self._beats.get(beat_key(box))
        return 0 if beat is None else beat.read

    def _writes(self, key: str, before: Server, after: Server, now: float) -> None:
        box, _, number = key.removeprefix(_BOX).rpartition("/")
        node, index, last = box.rpartition("/")[0], int(number), self._written.get(key)
        if _mail(before).box_of(node) != box:  # nobody is known to read there: what was told there is forgotten
            read = _mail(after).box_of(node) == box or last is None
            self.demand(read, f"{key} is written again, and nobody reads there any more")
        elif last is not None:
            waited = now - last >= REMINDED * before.state.rules.heartbeat - SOON
            self.demand(waited, f"{key} is written again {now - last:.6f} s after it was written")
            self.demand(index >= self._read(box), f"{key} is written again though it was read")
            asked = before.logic.boxes(before.state).get(node, box)
            right = asked == box or before.state.final is not None
            self.demand(right, f"{key} is written again, and the node reads in {asked}")
            gone = now - self._here.get(node, now) - before.state.rules.heartbeat
            self.demand(gone <= LATE, f"{key} is written again to a node that has been gone for long")
        else:
            due = max(self._told.get(box, index), self._read(box))
            self.demand(index <= due, f"{key} is written, and notice {due} comes next")
        self._written[key], self._told[box] = now, max(self._told.get(box, 0), index + 1)

    def _has_reminded(self, server: Server, now: float) -> None:
        """What lives reads, or is reminded."""
        for node, box in server.logic.boxes(server.state).items():
            if beat_key(box) not in self._beats or _mail(server).box_of(node) != box:
                continue
            for index in range(self._read(box), self._told.get(box, 0)):
                last = self._written.get(box_key(box, index), now)
                late = now - last > REMINDED * server.state.rules.heartbeat + SOON
                self.demand(not late, f"notice {index} of {box} was not read for {now - last:.6f} s")

    def _keeps(self, server: Server) -> None:
        """Nothing of older boxes, nor of nodes that need no mail any more."""
        mail = _mail(server)
        boxes, unread = set(mail._boxes.values()), {box for box, notices in mail._unread.items() if notices}
        self.demand(set(mail._told) == boxes, f"it counts notices of {set(mail._told)}, and nodes read in {boxes}")
        self.demand(unread <= boxes, f"it keeps notices of {unread}, and nodes read in {boxes}")
        self.demand(mail.unparted <= set(mail._boxes), f"it waits for {mail.unparted}, who have no box")

    def _forgets(self, before: Server, after: Server) -> None:
        """Who is gone needs no mail: what is remembered does not grow with those who came and went."""
        state = after.state
        here = {*before.logic.boxes(before.state), *state.waiting, *(state.round.entries if state.round else ())}
        known = set(_mail(after)._boxes) - here - _mail(before).unparted - _mail(after).unparted
        self.demand(not known, f"it keeps mail of {known}, who are gone")

    def _leaves(self, data: bytes, server: Server, now: float) -> None:
        """What a successor would know of the mail."""
        if len(data) > _LARGE:
            return
        left = read_handover(data, server.run_id, server.key, now).mail
        mail = _mail(server).copy()
        mail.written(keep=True)
        mail.remind(now, -math.inf)
        for each in (left, mail):
            each._unread = {box: notices for box, notices in each._unread.items() if notices}
        self.demand(left == mail, f"its successor would know {left}, and it knows {mail}")


def _mail(server: Server) -> Any:
    return server._mail
