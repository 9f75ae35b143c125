"""
One node's part in the election of its job's coordinator. Pure.

    connect --> look --taken--> await a change --> look ...
                 '--free--> seize --ours--> lead: renew, rest, renew, rest ... --over--> look ...

A term ends for its holder no later than for all other nodes, since the holder counts from when it
*sent* its last renewal. After any end of a term its holder stands again, as it may be the only
candidate.

Rules of this file: `Candidacy.step` is a function of the candidacy, an event and the time. It
returns the next candidacy and the actions to do. The actions of a step are done in their order; the
outcome of the last one is the next event. The first event is `Done`. A thread (`_election`) and the
simulated cluster drive the same object. Times are this node's monotonic seconds, and only
differences count.
"""

from __future__ import annotations

import copy
from typing import TypeAlias

from attrs import define, evolve, frozen
from typing_extensions import Self

from elasticlib.rendezvous.protocol._operations import Log
from elasticlib.rendezvous.stores._keys import KEEP, RenewedKey

SLICE = 20.0
"""Seconds after which a wait ends and looks again, so that the end of a server is noticed."""
PAUSE = 0.2
"""Seconds between two attempts to reach a store that is away."""
_RENEWALS = 3
"""Renewals of a hold within its time to live: one that is lost does not end the term."""

# Events.


@frozen
class Done:
    """There is a connection, or the pause is over, or another node may lead now."""


@frozen
class ConnectionBroke:
    """The connection failed or broke; the last action may have been done."""

    why: str


@frozen
class Found:
    """The result of a look: whether a node leads at this version."""

    version: int
    is_taken: bool


@frozen
class Acquired:
    """The result of an `Acquire`: this node holds the lease if there is a hold."""

    hold: RenewedKey | None


@frozen
class Elected:
    """This node coordinates."""


@frozen
class Declined:
    """This node does not coordinate, though it might: others shall."""

    why: str


@frozen
class Renewed:
    """The result of a renewal: whether the key was still ours."""

    is_ours: bool


@frozen
class Over:
    """The coordinator's part is over, before the term was; *last*: so is the job."""

    why: str
    last: bool = False


Event: TypeAlias = Done | ConnectionBroke | Found | Acquired | Elected | Declined | Renewed | Over

# Actions.


@frozen
class ConnectToStore:
    """Make a new connection within so many seconds. Answer: `Done` or `ConnectionBroke`."""

    limit: float


@frozen
class FindLeader:
    """
    Look whether a node leads. Answer: `Found`; for this and the next actions, or `ConnectionBroke`.
    """


@frozen
class Await:
    """Wait until that changes, for at most *seconds*. Answer: `Done`."""

    version: int
    seconds: float


@frozen
class Acquire:
    """Take the lease if it is free, for *ttl* seconds without a renewal. Answer: `Acquired`."""

    ttl: float


@frozen
class Lead:
    """Begin to coordinate. Answer: `Elected` or `Declined`."""

    hold: RenewedKey


@frozen
class Renew:
    """Renew the hold. Answer: `Renewed`."""

    hold: RenewedKey


@frozen
class Keep:
    """
    Extend the life of the job's keys beyond that of a single value.

    The only answer is `ConnectionBroke`; the actions after it are then skipped.
    """


@frozen
class Rest:
    """Wait, unless the coordinator's part ends. Answer: `Done` or `Over`; no connection is needed."""

    seconds: float


@frozen
class StepDown:
    """Stop to coordinate at once; *is_news*: the node does not know it yet. No answer."""

    why: str
    is_news: bool


@frozen
class ReleaseLeadership:
    """Give the lease up, if the store can be reached. No answer."""

    hold: RenewedKey


Connected: TypeAlias = FindLeader | Await | Acquire | Lead | Renew | Keep | ReleaseLeadership
"""Actions that need a connection."""
Action: TypeAlias = ConnectToStore | Rest | StepDown | Log | Connected


@define(eq=False, repr=False)
class Candidacy:
    """A node's candidacy, over all its terms."""

    ttl: float
    """Seconds until a silent holder is replaced."""
    until: float = 0.0
    """End of the term, unless it is renewed."""
    stopped: bool = False
    """True if this node stands no more."""
    hold: RenewedKey | None = None
    """Our lease."""
    _is_leader: bool = False
    """True if this node was elected, and has not stepped down."""
    _connected: bool = False
    """True if there is a connection, or one was asked for."""
    _closing: bool = False
    _sent: float = 0.0
    """Time of sending of the request whose answer extends the term."""
    _kept: float | None = None

    def close(self) -> Self:
        """
        Return a candidacy that stands no more, and resigns if it leads; the caller must cut its
        present action short.
        """
        return evolve(self, closing=True)

    def step(self, event: Event, now: float) -> tuple[Self, tuple[Action, ...]]:
        """Return the candidacy after *event*, and the actions to do; *now* never goes back."""
        after, out = copy.copy(self), list[Action]()
        if not self.stopped:
            wanted = after._handle(event, now, out)
            after._go_on(now, out, wanted)
        return after, tuple(out)

    def _handle(self, event: Event, now: float, out: list[Action]) -> Action | None:
        """Return the action that *event* asks for next; None: the one that is due anyway."""
        match event:
            case ConnectionBroke(why):
                return self._wait_for_store(why, out)
            case Found(version, True):
                return Await(version, SLICE)
            case Found():
                # The term counts from here: other nodes count from the store's answer, which is
                # later.
                self._sent = now
                return Acquire(self.ttl)
            case Acquired(RenewedKey() as hold):
                self.hold = hold
                self.until = self._sent + hold.ttl
                return Lead(hold)
            case Elected() | Renewed(True) if self.hold is not None:
                return self._extend_term(self.hold, now, out)
            case Declined(why):
                out.append(Log("info", f"the election begins again: {why}"))
                self._leave(why, out)
                return Rest(PAUSE)
            case Renewed():
                self._leave("the store says that the lease is over", out)
            case Over(why, last):
                self._closing = self._closing or last
                self._leave(why, out)

        return None

    def _wait_for_store(self, why: str, out: list[Action]) -> Action:
        out.append(Log("info", f"the election waits for the store: {why}"))
        self._connected = False
        if self.hold is None:
            return Rest(PAUSE)
        # The lease runs out during the pause.
        return Rest(min(PAUSE, self.hold.ttl / 10))

    def _extend_term(self, hold: RenewedKey, now: float, out: list[Action]) -> Action:
        self.until = self._sent + hold.ttl
        # An answer that comes too late keeps nothing: the term ends with this step.
        if self._is_leader and now < self.until:
            self._keep_keys(now, out)
        self._is_leader = True
        return Rest(hold.ttl / _RENEWALS)

    def _keep_keys(self, now: float, out: list[Action]) -> None:
        """Extend the life of the job's keys, long before they would expire."""
        is_due = self._kept is None or now - self._kept > KEEP / 3
        if is_due:
            self._kept = now
            out.append(Keep())

    def _go_on(self, now: float, out: list[Action], wanted: Action | None) -> None:
        """Do the *wanted* action, or the one that is due; neither once the term is over."""
        if self._end_if_over(now, out):
            wanted = None
        if self._closing:
            self.stopped = True
            return

        if isinstance(wanted, Rest):
            # A pause is the only action that needs no connection.
            out.append(wanted)
            return

        if not self._connected:
            self._connected = True
            # A holder has no longer than the rest of its term to renew the lease.
            limit = self.ttl if self.hold is None else max(self.until - now, PAUSE)
            out.append(ConnectToStore(limit))
            return

        out.append(self._due(now) if wanted is None else wanted)

    def _end_if_over(self, now: float, out: list[Action]) -> bool:
        if self.hold is None:
            return False
        if self._closing:
            self._leave("it resigned", out)
            return True
        if now >= self.until:
            self._leave(f"the lease was not renewed for {self.hold.ttl:.3g} s", out)
            return True
        return False

    def _due(self, now: float) -> Action:
        if self.hold is None:
            return FindLeader()
        self._sent = now
        return Renew(self.hold)

    def _leave(self, why: str, out: list[Action]) -> None:
        hold, self.hold = self.hold, None
        if self._is_leader:
            self._is_leader = False
            # A node that closes knows it already.
            out.append(StepDown(why, not self._closing))
        if hold is not None and self._connected:
            out.append(ReleaseLeadership(hold))
