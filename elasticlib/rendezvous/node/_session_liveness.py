"""
Whether one node still has contact with its job, and what to do when it has not. Pure.

    SEEKING --greeted--> LIVE --silence, or a broken connection--> SEEKING --greeted--> ...
       '--- no greeting in time, or the host is gone --> OVER

Self-fencing: the coordinator gives the ranks of a node away `heartbeat` seconds after it last saw the
node's heartbeat change. A heartbeat that the store acknowledged was seen no earlier than it was sent. So whoever
stops its workers within `heartbeat` seconds after it *sent* its last acknowledged heartbeat can never work
beside its successors, whatever the network does in between and whatever the clocks of others say.

A machine that sleeps does not see that time has passed. So the coordinator's heartbeat counts time: when it has
gone on by about `heartbeat` seconds between two heartbeats that were acknowledged one after the other, this node may
have been given up, and stops its workers at once.

A heartbeat counts only with one of the coordinator's that is readable and not older than the last. Where that is not
there, somebody removed it, maybe with this node's last heartbeat before it was read: that node stops sooner.

What this cannot see is a heartbeat that was removed unread, where nothing else looks wrong: when the link breaks in the
same moment, or somebody shows this node the coordinator's last heartbeat again and again. Its workers may then run for
a part of the heartbeat time beside those who got their ranks; where any node may coordinate, for as long as an election
takes, since the coordinator's heartbeat stands still then by itself.

Rules of this file: `step` is a function of state, event and time; times are this node's monotonic
seconds, and only differences count.
"""

from __future__ import annotations

import math
from typing import TypeAlias

from attrs import evolve, frozen
from typing_extensions import assert_never

from elasticlib.rendezvous.protocol._messages import EPOCH_BITS
from elasticlib.rendezvous.protocol._timing import FENCE, GRACE, IN_DOUBT, INTERVAL, KILL, TICK

SLEPT = 19
"""
Growth of the coordinator's heartbeat between two heartbeats which says that this node may have been given up.

That takes the whole heartbeat time, after which the coordinator's heartbeat is written at once: at least 20. A node
with two heartbeats less than `FENCE` apart has read the first heartbeat when it was at most an `INTERVAL` old: at most
18.
"""
ATTEMPT = 5.0
"""Seconds for one attempt to connect."""
NOTHING_HEARD = -1
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
_REFUSALS = 4
"""Refused connections in a row, after contact, that say: the host's process is gone."""


@frozen
class Limits:
    """Seconds; all but `join_timeout` begin to count once contact was there."""

    join_timeout: float = 600.0
    """For finding the store, connecting and the coordinator's greeting together."""
    reconnect_timeout: float = 60.0
    heartbeat: float = 0.0
    """0: nobody is ever thought lost."""
    elected: bool = False
    """Whether another node may take the coordination over; its silence is no reason to stop then."""


@frozen
class Greeted:
    """Connected, and the coordinator's greeting was read."""

    heartbeat: float


@frozen
class Acknowledged:
    """What was sent at *sent* is in the store; *heard* is the coordinator's count, where it was looked for."""

    sent: float
    heard: int | None = None
    """`NOTHING_HEARD` where none was found."""
    doubt: str = ""
    """Why none was."""


@frozen
class Unheard:
    """The store acknowledges this node's heartbeats, and the coordinator says that they do not come to it."""


@frozen
class Broken:
    """An attempt to connect failed, or a connection broke. *gone*: nobody listens there any more."""

    why: str
    gone: bool = False


@frozen
class Tick:
    """Time has passed."""


Event: TypeAlias = Greeted | Acknowledged | Unheard | Broken | Tick


@frozen
class Connect:
    """Give the present connection up, if there is one, and try a new one."""


@frozen
class Fence:
    """Stop the workers within *grace* seconds."""

    why: str
    grace: float


@frozen
class GiveUp:
    """This node's part is over. *closed*: the job's host is gone; else it was not found in time."""

    why: str
    closed: bool
    gone: bool = False
    """Whether the store's process is known to have ended."""


Action: TypeAlias = Connect | Fence | GiveUp


@frozen
class SessionLiveness:
    """All that a node knows about its contact."""

    limits: Limits
    began: float
    """When it began to seek: at its start, or when contact was lost."""
    met: bool = False
    """Whether there was contact ever."""
    live: bool = False
    trying: bool = False
    """Whether an attempt is on its way."""
    acknowledged: float = 0.0
    """When the last thing was sent that the store acknowledged."""
    heard: int = NOTHING_HEARD
    heard_at: float = 0.0
    quiet_since: float | None = None
    """Since when the store acknowledges heartbeats and the coordinator's stands still; None while it grows."""
    doubt: str = ""
    """Why the last heartbeats do not count, although the store acknowledged them."""
    fenced: bool = False
    compares: bool = False
    """Whether the coordinator's last heartbeat was read with a heartbeat of the present request to join."""
    doomed_at: float | None = None
    """When workers of a node that slept must be killed."""
    trouble: str = "the first attempt is not over yet"
    refusals: int = 0
    pause: float = _FIRST_PAUSE
    try_at: float = 0.0
    over: bool = False


Outcome: TypeAlias = tuple[SessionLiveness, tuple[Action, ...]]


def begin(limits: Limits, now: float) -> Outcome:
    """A node that knows nobody yet."""
    return evolve(SessionLiveness(limits, began=now, try_at=now), trying=True), (Connect(),)


def step(contact: SessionLiveness, event: Event, now: float) -> Outcome:
    """What *event* changes, and what to do about it; *now* never goes back."""
    if contact.over:
        return contact, ()
    match event:
        case Greeted(heartbeat):
            contact = evolve(
                contact,
                limits=evolve(contact.limits, heartbeat=heartbeat),
                met=True,
                live=True,
                trying=False,
                refusals=0,
                pause=_FIRST_PAUSE,
                began=now,
                heard_at=now,
                acknowledged=contact.acknowledged if contact.met else now,
            )
        case Acknowledged(sent, heard, doubt):
            # What an abandoned connection still acknowledges is as true as anything else.
            slept = _slept(contact, heard)
            # Whoever hides the coordinator's, or puts an older one there, does the same with heartbeats in the store.
            if heard is None or (heard != NOTHING_HEARD and heard >= contact.heard):
                contact = evolve(contact, acknowledged=max(sent, contact.acknowledged), doubt="")
            else:
                contact = evolve(contact, doubt=doubt or "the heartbeat of the job's coordinator is an old one")
            if heard is not None:
                contact = evolve(contact, compares=True)
            if heard is not None and heard > contact.heard:
                contact = evolve(contact, heard=heard, heard_at=now, quiet_since=None)
            elif heard is not None and contact.limits.heartbeat:
                # Judged by heartbeats alone: one that sent none for a while has seen nothing.
                contact = evolve(contact, quiet_since=now if contact.quiet_since is None else contact.quiet_since)
                if now >= _silent_at(contact):
                    quiet = now - (contact.quiet_since or now)
                    why = f"the store answers, but no node has coordinated the job for {quiet:.3g} s"
                    return evolve(contact, over=True), (GiveUp(why, True),)
            if slept and not contact.fenced:
                return _wake(contact, slept, now)
            if contact.live and now < _fence_at(contact):
                contact = evolve(contact, fenced=False)
        case Unheard():
            if not contact.fenced and contact.doomed_at is None:
                grace = GRACE * contact.limits.heartbeat
                why = "this node's heartbeats are removed from the store: other nodes take its ranks soon"
                return evolve(contact, doomed_at=now + grace), (Fence(why, grace),)
        case Broken(why, gone):
            contact = _broken(contact, why, gone, now)
        case Tick():
            pass
        case _:
            assert_never(event)
    return _settle(contact, now)


def rejoin(contact: SessionLiveness) -> SessionLiveness:
    """No worker of this node runs any more, and it asks for ranks: what was before does not matter."""
    return evolve(contact, compares=False, doomed_at=None)


def wake_at(contact: SessionLiveness) -> float | None:
    """When `step` wants a `Tick` at the latest."""
    if contact.over:
        return None
    times = [] if contact.live else [_deadline(contact)]
    if not contact.live and not contact.trying:
        times.append(contact.try_at)
    if contact.met and contact.limits.heartbeat and not contact.fenced:
        times.append(_fence_at(contact))
    elif contact.live and contact.limits.heartbeat:
        times.append(_doubt_at(contact))
    return min(times, default=None)


def attempt_of(contact: SessionLiveness) -> float:
    """Seconds for one attempt to connect: after a loss of contact there are fewer to lose."""
    heartbeat = contact.limits.heartbeat
    return min(ATTEMPT, max(1.0, INTERVAL * heartbeat)) if heartbeat else ATTEMPT


def search(contact: SessionLiveness, now: float) -> str:
    """What hinders the search and how long it may take yet, for people; empty while there is contact."""
    return "" if contact.live else f"{contact.trouble}; {max(0.0, _deadline(contact) - now):.0f} s left"


def kill_at(contact: SessionLiveness) -> float | None:
    """When workers that still run here must be killed, whoever else has been told."""
    if not contact.met or not contact.limits.heartbeat:
        return None
    return _killed_at(contact)


def _killed_at(contact: SessionLiveness) -> float:
    limit = contact.acknowledged + (IN_DOUBT + GRACE if _suspects(contact) else KILL) * contact.limits.heartbeat
    return limit if contact.doomed_at is None else min(limit, contact.doomed_at)


def _slept(contact: SessionLiveness, heard: int | None) -> int:
    """By how much the coordinator's time has gone on more than this node's can have; 0: not so."""
    if heard is None or heard <= contact.heard or not contact.compares or not contact.limits.heartbeat:
        return 0  # one that is not there, or of the past: somebody put it there
    # A new coordinator counts anew, and gives every node a full heartbeat time.
    same = heard >> EPOCH_BITS == contact.heard >> EPOCH_BITS
    grown = heard - contact.heard if same else heard & ((1 << EPOCH_BITS) - 1)
    return grown if grown >= SLEPT else 0


def _wake(contact: SessionLiveness, slept: int, now: float) -> Outcome:
    heartbeat = contact.limits.heartbeat
    passed = f"{slept * TICK * heartbeat:.3g} s of the job's time"
    why = f"{passed} passed between two heartbeats of this node, as if it was suspended: other nodes may have its ranks"
    contact = evolve(contact, compares=False, doomed_at=now + (KILL - FENCE) * heartbeat)
    contact, actions = _settle(contact, now)
    return contact, (Fence(why, GRACE * heartbeat), *actions)


def _fence_at(contact: SessionLiveness) -> float:
    heartbeats = contact.acknowledged + (IN_DOUBT if _suspects(contact) else FENCE) * contact.limits.heartbeat
    # Two clocks of one interval each lie between two of the coordinator's that are seen: this limit is wider.
    return heartbeats if contact.limits.elected else min(heartbeats, contact.heard_at + contact.limits.heartbeat)


def _suspects(contact: SessionLiveness) -> bool:
    """Whether somebody may have removed this node's last heartbeat, too, before it was read."""
    # The process that has the store writes the coordinator's without a break.
    return bool(contact.doubt) and not contact.limits.elected


def _doubt_at(contact: SessionLiveness) -> float:
    """When contact that came back, and acknowledged nothing since, is sought anew."""
    return contact.began + FENCE * contact.limits.heartbeat


def _silent_at(contact: SessionLiveness) -> float:
    """When a coordinator whose heartbeat stands still, though its store answers, is given up."""
    quiet = math.inf if contact.quiet_since is None else contact.quiet_since
    return quiet + contact.limits.heartbeat + contact.limits.reconnect_timeout


def _deadline(contact: SessionLiveness) -> float:
    limits = contact.limits
    return contact.began + (limits.reconnect_timeout if contact.met else limits.join_timeout)


def _broken(contact: SessionLiveness, why: str, gone: bool, now: float) -> SessionLiveness:
    first = contact.live
    return evolve(
        contact,
        live=False,
        trying=False,
        began=now if first else contact.began,
        trouble=why,
        refusals=contact.refusals + 1 if gone else 0,
        # The first attempt after a loss comes at once: most often only this one connection broke.
        try_at=now if first else now + contact.pause,
        pause=_FIRST_PAUSE if first else min(2 * contact.pause, _LONGEST_PAUSE),
    )


def _settle(contact: SessionLiveness, now: float) -> Outcome:
    actions: list[Action] = []
    heartbeat = contact.limits.heartbeat
    if contact.met and heartbeat and not contact.fenced and now >= _fence_at(contact):
        silent = now - min(contact.acknowledged, contact.heard_at)
        live = f"{contact.doubt} ({silent:.3g} s)" if contact.doubt else f"no answer for {silent:.3g} s"
        why = live if contact.live else contact.trouble
        # Those who are told have to be done before the workers are killed.
        left = _killed_at(contact) - TICK * heartbeat - now
        actions.append(Fence(f"contact with the job is lost: {why}", max(0.0, min(GRACE * heartbeat, left))))
        contact = evolve(contact, fenced=True, trouble=why)
        if contact.live:  # a frozen store answers no call on the old connection, but perhaps on a new one
            contact = evolve(contact, live=False, began=now, try_at=now)
    elif contact.live and contact.fenced and heartbeat and now >= _doubt_at(contact):
        contact = evolve(contact, live=False, began=now, try_at=now)
    if not contact.live:
        sought = now - contact.began
        if contact.met and contact.refusals >= _REFUSALS and not contact.limits.elected:
            why = f"the host of the job's store is gone: {contact.trouble}"
            return evolve(contact, over=True), (*actions, GiveUp(why, True, gone=True))
        if now >= _deadline(contact):
            lost = "contact with the job was lost" if contact.met else "the job was not found"
            why = f"{lost}, and {sought:.3g} s of trying did not help: {contact.trouble}"
            return evolve(contact, over=True), (*actions, GiveUp(why, contact.met))
        if not contact.trying and now >= contact.try_at:
            contact = evolve(contact, trying=True)
            actions.append(Connect())
    return contact, tuple(actions)
