"""
One node's contact with its job: whether it is lost, and what to do then. Pure.

    SEEKING --greeted--> LIVE --silence, or a broken connection--> SEEKING --greeted--> ...
       '--- no greeting in time, or the host is gone --> OVER

Self-fencing: the coordinator assigns the ranks of a node to others `heartbeat` seconds after it
last read a new heartbeat of the node. It reports which heartbeats it has read, and it read none
earlier than it was sent. So a node can stop its workers within `heartbeat` seconds after it *sent*
the last one that was read. Then they never run beside their successors. This holds whatever the
network does in between. It holds if somebody removes, keeps or repeats values in the store, and for
any clocks of other hosts.

Where any node may coordinate, the coordinator's heartbeat stands still until a takeover. The new
coordinator gives every node the whole time again. Meanwhile it is enough that the store has this
node's heartbeats. An attacker who removes these, and hides the coordinator's own for long, can make
workers run beside their successors for that time.

A machine that sleeps does not see that time has passed. So the coordinator's heartbeat counts time.
If it has grown by about `heartbeat` seconds between two looks of this node, the node may have been
given up. It stops its workers at once.

Rules of this file: `step` is a function of state, event and time. Times are this node's monotonic
seconds, and only differences count.
"""

from __future__ import annotations

import math
from typing import TypeAlias

from attrs import evolve, frozen
from typing_extensions import assert_never

from elasticlib._times import soonest
from elasticlib.rendezvous.protocol._messages import EPOCH_BITS
from elasticlib.rendezvous.protocol._timing import FENCE, GRACE, KILL, STALE, STILL, TICK

SLEPT = 16
"""
Growth of the coordinator's heartbeat between two looks by which this node may have been given up.

A node that is awake is fenced `FENCE` after the heartbeat that the first look showed as read: that
is 15 at most. A node that slept through its loss mostly sees more. Otherwise it gets a notice from
the coordinator that gave it up, and is fenced as its heartbeats are not read.
"""
ATTEMPT = 5.0
"""Seconds for one attempt to connect."""
RECONNECT = 0.25
"""Share of the heartbeat time for one attempt, after contact was lost."""
NO_HEARTBEAT = -1
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
_REFUSALS = 4
"""Refused connections in a row, after contact, that show the host's process is gone."""


@frozen
class Limits:
    """Time limits in seconds; all but `join_timeout` begin at the first contact."""

    join_timeout: float = 600.0
    """For finding the store, connecting and the coordinator's greeting together."""
    reconnect_timeout: float = 60.0
    heartbeat: float = 0.0
    """
    Seconds without a new heartbeat after which a node is lost; 0: no node is ever thought lost.
    """
    has_election: bool = False
    """
    True if another node may take over the coordination; its silence is then no reason to stop.
    """


@frozen
class Greeted:
    """Connected, and the coordinator's greeting was read."""

    heartbeat: float


@frozen
class Assigned:
    """This node has got ranks; the coordinator had read its message of *sent* before."""

    sent: float


@frozen
class Acknowledged:
    """The message that was sent at *sent* is in the store."""

    sent: float


@frozen
class HeartbeatRead:
    """
    The coordinator's heartbeat was read; the store had a heartbeat of this node that was sent at
    *sent*.
    """

    sent: float
    count: int
    """Count of the coordinator's heartbeat; `NO_HEARTBEAT` if none was found."""
    why_invalid: str = ""
    """The reason why none was found."""
    read: float | None = None
    """
    Time at which the last heartbeat that the coordinator has read of this node was sent; None if
    unknown.
    """


@frozen
class Broken:
    """An attempt to connect failed, or a connection broke. *gone*: nobody listens there any more."""

    why: str
    gone: bool = False


@frozen
class TimePassed:
    """Time has passed."""


Event: TypeAlias = Greeted | Assigned | Acknowledged | HeartbeatRead | Broken | TimePassed


@frozen
class ReplaceConnection:
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
    """True if the store's process is known to have ended."""


Action: TypeAlias = ReplaceConnection | Fence | GiveUp


@frozen
class SessionLiveness:
    """A node's knowledge of its contact."""

    limits: Limits
    began: float
    """Start of the search: the node's start, or the loss of contact."""
    met: bool = False
    """True if there was ever contact."""
    live: bool = False
    trying: bool = False
    """True while an attempt is running."""
    acknowledged: float = 0.0
    """
    Time of sending of the last message that the store acknowledged, while there was a coordinator.
    """
    read: float | None = None
    """
    Time of sending of the last heartbeat that the coordinator has read; None while this node has no
    ranks.
    """
    heartbeat_count: int = NO_HEARTBEAT
    count_since: float = 0.0
    """Time at which that count was first read."""
    quiet_since: float | None = None
    """
    Start of the time in which the store answers but the coordinator's heartbeat does not grow; None
    while it grows.
    """
    why_invalid: str = ""
    """The reason why the coordinator's last heartbeat does not count; empty if it does."""
    fenced: bool = False
    compares: bool = False
    """True if the coordinator's heartbeat was read since the present request to join."""
    doomed_at: float | None = None
    """Time at which workers of a node that slept must be killed."""
    trouble: str = "the first attempt is not over yet"
    refusals: int = 0
    pause: float = _FIRST_PAUSE
    try_at: float = 0.0
    over: bool = False


Outcome: TypeAlias = tuple[SessionLiveness, tuple[Action, ...]]


def begin(limits: Limits, now: float) -> Outcome:
    """Return the state of a node without any contact, and its first attempt to connect."""
    return evolve(SessionLiveness(limits, began=now, try_at=now), trying=True), (ReplaceConnection(),)


def step(contact: SessionLiveness, event: Event, now: float) -> Outcome:
    """Return the state after *event*, and the actions to do; *now* never goes back."""
    if contact.over:
        return contact, ()

    match event:
        case Greeted(heartbeat):
            contact = _greeted(contact, heartbeat, now)
        case Assigned(sent):
            contact = evolve(contact, read=sent)
        case Acknowledged(sent):
            contact = evolve(contact, acknowledged=max(sent, contact.acknowledged), why_invalid="")
            contact = _contact_is_back(contact, now)
        case HeartbeatRead():
            return _take_heartbeat(contact, event, now)
        case Broken(why, gone):
            contact = _broken(contact, why, gone, now)
        case TimePassed():
            pass
        case _:
            assert_never(event)

    return _settle(contact, now)


def _greeted(contact: SessionLiveness, heartbeat: float, now: float) -> SessionLiveness:
    # The first greeting is the first sign of life; later ones do not show that a message arrived.
    acknowledged = contact.acknowledged if contact.met else now
    return evolve(
        contact,
        limits=evolve(contact.limits, heartbeat=heartbeat),
        met=True,
        live=True,
        trying=False,
        refusals=0,
        pause=_FIRST_PAUSE,
        began=now,
        acknowledged=acknowledged,
    )


def _take_heartbeat(contact: SessionLiveness, event: HeartbeatRead, now: float) -> Outcome:
    """Judge the coordinator's heartbeat: it stands still, shows that this node slept, or is fine."""
    # Compared with the last heartbeat, before this one takes its place.
    slept = _slept(contact, event.count)
    contact = _with_count(contact, event, now)
    if now >= _silent_at(contact):
        quiet = now - (contact.quiet_since or now)
        why = f"the store answers, but no node has coordinated the job for {quiet:.3g} s"
        return evolve(contact, over=True), (GiveUp(why, True),)
    if slept and not contact.fenced:
        return _wake(contact, slept, now)
    return _settle(_contact_is_back(contact, now), now)


def observe(contact: SessionLiveness, event: Event, now: float) -> SessionLiveness:
    """Return the state after *event*; only the time left for workers still matters."""
    return _with_count(contact, event, now) if isinstance(event, HeartbeatRead) else contact


def rejoin(contact: SessionLiveness) -> SessionLiveness:
    """
    Return the state of a node that asks for ranks: no worker of it runs any more, and earlier times
    do not count.
    """
    known = contact.acknowledged if contact.read is None else max(contact.read, contact.acknowledged)
    return evolve(contact, compares=False, doomed_at=None, read=None, acknowledged=known)


def is_stale(contact: SessionLiveness, sent: float, now: float) -> bool:
    """
    Return whether this node may have been given up if none of its messages after *sent* was read.
    """
    return bool(contact.limits.heartbeat) and now >= sent + STALE * contact.limits.heartbeat


def wake_at(contact: SessionLiveness) -> float | None:
    """Return the time at which `step` needs a `TimePassed` at the latest."""
    if contact.over:
        return None
    times: list[float | None] = []
    if not contact.live:
        times.append(_deadline(contact))
    if not contact.live and not contact.trying:
        times.append(contact.try_at)
    times.append(_next_check(contact))
    return soonest(*times)


def _next_check(contact: SessionLiveness) -> float | None:
    """
    Return when the workers are fenced or the connection is given up; None: neither can happen.
    """
    if not contact.limits.heartbeat:
        # No node is ever thought lost: the workers may continue.
        return None
    if contact.met and not contact.fenced:
        return _fence_at(contact)
    return _search_again_at(contact) if contact.live else None


def attempt_of(contact: SessionLiveness) -> float:
    """Return the seconds for one attempt to connect: fewer after a loss of contact."""
    heartbeat = contact.limits.heartbeat
    return min(ATTEMPT, max(1.0, RECONNECT * heartbeat)) if heartbeat else ATTEMPT


def search(contact: SessionLiveness, now: float) -> str:
    """
    Return the obstacle of the search and the seconds left, for people; empty while there is
    contact.
    """
    return "" if contact.live else f"{contact.trouble}; {max(0.0, _deadline(contact) - now):.0f} s left"


def kill_at(contact: SessionLiveness) -> float | None:
    """Return the time at which workers that still run here must be killed; None: no limit."""
    if not contact.met or not contact.limits.heartbeat:
        return None
    return _killed_at(contact)


def _killed_at(contact: SessionLiveness) -> float:
    limit = _alive_at(contact) + KILL * contact.limits.heartbeat
    if contact.doomed_at is None:
        return limit
    return min(limit, contact.doomed_at)


def _alive_at(contact: SessionLiveness) -> float:
    """Return when the last sign of life that counts was sent."""
    if contact.read is None:
        return contact.acknowledged
    # While the coordination may change hands, it is enough that the store has the heartbeats.
    may_change = contact.limits.has_election and contact.quiet_since is not None
    if may_change:
        return max(contact.read, contact.acknowledged)
    return contact.read


def _with_count(contact: SessionLiveness, event: HeartbeatRead, now: float) -> SessionLiveness:
    """Note the contents of the coordinator's heartbeat, or that no valid one was found."""
    contact = evolve(contact, compares=True, why_invalid=event.why_invalid)
    if event.count != NO_HEARTBEAT:
        contact = _with_signs_of_life(contact, event)
    if event.count > contact.heartbeat_count:
        return evolve(contact, heartbeat_count=event.count, count_since=now, quiet_since=None)
    stands_still = now >= contact.count_since + STILL * contact.limits.heartbeat
    if stands_still and contact.quiet_since is None:
        return evolve(contact, quiet_since=now)
    return contact


def _with_signs_of_life(contact: SessionLiveness, event: HeartbeatRead) -> SessionLiveness:
    """Note which heartbeats of this node the store has, and which the coordinator has read."""
    if event.count < contact.heartbeat_count:
        # If somebody writes an older one again, or hides the present one, this node's heartbeats
        # may be hidden, too.
        return evolve(contact, why_invalid="the heartbeat of the job's coordinator is stale")
    contact = evolve(contact, acknowledged=max(event.sent, contact.acknowledged))
    if contact.read is None or event.read is None:
        return contact
    return evolve(contact, read=max(event.read, contact.read))


def _contact_is_back(contact: SessionLiveness, now: float) -> SessionLiveness:
    is_back = contact.live and now < _fence_at(contact)
    return evolve(contact, fenced=False) if is_back else contact


def _slept(contact: SessionLiveness, count: int) -> int:
    """
    Return how far the coordinator's time advanced while this node must have slept; 0: it did not
    sleep.
    """
    if not contact.compares or not contact.limits.heartbeat:
        return 0
    if count <= contact.heartbeat_count:
        # None was found, or an old one.
        return 0

    grown = count - contact.heartbeat_count
    is_new_coordinator = count >> EPOCH_BITS != contact.heartbeat_count >> EPOCH_BITS
    if is_new_coordinator:
        # It counts from 0, and gives every node a full heartbeat time.
        grown = count & ((1 << EPOCH_BITS) - 1)

    return grown if grown >= SLEPT else 0


def _wake(contact: SessionLiveness, slept: int, now: float) -> Outcome:
    heartbeat = contact.limits.heartbeat
    passed = f"{slept * TICK * heartbeat:.3g} s"
    why = f"this node did nothing for {passed}: its machine was probably suspended, and other nodes may have its ranks"
    contact = evolve(contact, compares=False, doomed_at=now + (KILL - FENCE) * heartbeat)
    contact, actions = _settle(contact, now)
    return contact, (Fence(why, GRACE * heartbeat), *actions)


def _fence_at(contact: SessionLiveness) -> float:
    return _alive_at(contact) + FENCE * contact.limits.heartbeat


def _search_again_at(contact: SessionLiveness) -> float:
    """
    Return the time to search again after contact came back, if nothing was acknowledged since.
    """
    return contact.began + FENCE * contact.limits.heartbeat


def _silent_at(contact: SessionLiveness) -> float:
    """
    Return the time to give up a coordinator whose heartbeat stands still, though its store answers.
    """
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


def _why_lost(contact: SessionLiveness, now: float) -> str:
    silent = now - _alive_at(contact)
    if contact.why_invalid:
        return f"{contact.why_invalid} ({silent:.3g} s)"
    if contact.acknowledged > _alive_at(contact):
        return f"the job's coordinator has read none of this node's heartbeats in the store for {silent:.3g} s"
    return f"no answer for {silent:.3g} s"


def _settle(contact: SessionLiveness, now: float) -> Outcome:
    """Do the actions that are due: fence the workers, connect again, give up."""
    actions: tuple[Action, ...] = ()
    check = _next_check(contact)
    if check is not None and now >= check:
        contact, actions = _lose_contact(contact, now)
    if not contact.live:
        contact, more = _seek(contact, now)
        actions += more
    return contact, actions


def _lose_contact(contact: SessionLiveness, now: float) -> Outcome:
    """
    Fence the workers, unless that was done, and give up a connection that acknowledges nothing.
    """
    actions: tuple[Action, ...] = ()
    must_fence = contact.met and not contact.fenced
    if must_fence:
        contact, actions = _fence(contact, now)
    if contact.live:
        # A frozen store answers no call on the old connection, but perhaps on a new one.
        contact = evolve(contact, live=False, began=now, try_at=now)
    return contact, actions


def _fence(contact: SessionLiveness, now: float) -> Outcome:
    heartbeat = contact.limits.heartbeat
    why = _why_lost(contact, now) if contact.live else contact.trouble
    # The workers must have stopped before they are killed.
    left = _killed_at(contact) - TICK * heartbeat - now
    grace = max(0.0, min(GRACE * heartbeat, left))
    contact = evolve(contact, fenced=True, trouble=why)
    return contact, (Fence(f"contact with the job is lost: {why}", grace),)


def _seek(contact: SessionLiveness, now: float) -> Outcome:
    """Try to connect when it is time, until the job's host is gone or the deadline has passed."""
    if _is_host_gone(contact):
        why = f"the host of the job's store is gone: {contact.trouble}"
        return evolve(contact, over=True), (GiveUp(why, True, gone=True),)
    if now >= _deadline(contact):
        why = _why_given_up(contact, now)
        return evolve(contact, over=True), (GiveUp(why, contact.met),)
    if contact.trying or now < contact.try_at:
        return contact, ()
    return evolve(contact, trying=True), (ReplaceConnection(),)


def _is_host_gone(contact: SessionLiveness) -> bool:
    """
    Return whether nothing listens any more at the job's store, and no other node may replace its
    host.
    """
    if not contact.met or contact.limits.has_election:
        return False
    return contact.refusals >= _REFUSALS


def _why_given_up(contact: SessionLiveness, now: float) -> str:
    lost = "contact with the job was lost" if contact.met else "the job was not found"
    return f"{lost}; gave up after {now - contact.began:.3g} s: {contact.trouble}"
