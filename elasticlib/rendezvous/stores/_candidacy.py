"""
One node's part in the election of its job's coordinator. Pure.

    connect --> look --taken--> await a change --> look ...
                 '--free--> seize --ours--> in office: renew, rest, renew, rest ... --over--> look ...

A term of office ends for its holder no later than for everybody else, since the holder counts from when it *sent* its
last renewal. Whatever ended a term, its holder stands again, as it may be the only one.

Rules of this file: `Candidacy.step` is a function of the candidacy, an event and the time: it returns the next one and
what is to be done. The actions of a step are done in their order; the last is the one whose outcome is the next event.
The first event is `Done`. A thread (`_election`) and the simulated cluster drive the same object. Times are this
node's monotonic seconds, and only differences count.
"""

from __future__ import annotations

import copy
from typing import TypeAlias

from attrs import define, evolve, frozen
from typing_extensions import Self

from elasticlib.rendezvous.protocol._operations import Log
from elasticlib.rendezvous.stores._keys import KEEP, Hold

SLICE = 20.0
"""Seconds after which a wait looks again by itself."""
PAUSE = 0.2
"""Seconds between two attempts to reach a store that is away."""
_RENEWALS = 3
"""How often a hold is renewed within its time to live."""

# Events: what happened.


@frozen
class Done:
    """There is a connection, or the pause is over, or who has the office may have changed."""


@frozen
class Broke:
    """There is none, or not any more; what was asked for may have been done."""

    why: str


@frozen
class Found:
    """Whether somebody has the office, as of that version."""

    version: int
    held: bool


@frozen
class Acquired:
    """The office is ours if there is a hold."""

    hold: Hold | None


@frozen
class Elected:
    """This node coordinates."""


@frozen
class Declined:
    """It does not, though it might: others shall."""

    why: str


@frozen
class Renewed:
    """Whether it was still ours."""

    held: bool


@frozen
class Over:
    """The coordinator's part is over, before the term was; *last*: so is the job."""

    why: str
    last: bool = False


Event: TypeAlias = Done | Broke | Found | Acquired | Elected | Declined | Renewed | Over

# Actions: what the shell must do.


@frozen
class Connect:
    """Make a new connection within so many seconds. Answer: `Done` or `Broke`."""

    limit: float


@frozen
class Look:
    """See whether somebody has the office. Answer: `Found`; as to all that follow, or `Broke`."""


@frozen
class Await:
    """Wait until that changes, *seconds* at most. Answer: `Done`."""

    version: int
    seconds: float


@frozen
class Acquire:
    """Take the office if nobody has it, for so many seconds without a renewal. Answer: `Acquired`."""

    ttl: float


@frozen
class Elect:
    """Begin to coordinate. Answer: `Elected` or `Declined`."""

    hold: Hold


@frozen
class Renew:
    """Hold on. Answer: `Renewed`."""

    hold: Hold


@frozen
class Keep:
    """Have the job's keys outlive what is written. No answer but `Broke`, in whose case what follows is not done."""


@frozen
class Rest:
    """Wait, unless the coordinator's part ends. Answer: `Done` or `Over`; no connection is needed."""

    seconds: float


@frozen
class VoteOut:
    """From now on this node coordinates no more; *told*: it is news to the node. No answer."""

    why: str
    told: bool


@frozen
class Release:
    """Leave the office to others, if that can be said. No answer."""

    hold: Hold


Action: TypeAlias = Connect | Look | Await | Acquire | Elect | Renew | Keep | Rest | VoteOut | Release | Log


@define(eq=False, repr=False)
class Candidacy:
    """A node that stands for election again and again."""

    ttl: float
    """Seconds until a silent holder is replaced."""
    until: float = 0.0
    """When the term ends, unless it is renewed."""
    stopped: bool = False
    """This node stands no more."""
    hold: Hold | None = None
    """The office is ours."""
    _in_office: bool = False
    """Elected, and not voted out."""
    _connected: bool = False
    """There is a connection, or one was asked for."""
    _closing: bool = False
    _sent: float = 0.0
    """When that was sent whose answer makes the term longer."""
    _kept: float | None = None

    def close(self) -> Self:
        """The one that stands no more, and resigns if in office; what is under way is to be cut short."""
        return evolve(self, closing=True)

    def step(self, event: Event, now: float) -> tuple[Self, tuple[Action, ...]]:
        """The candidacy after *event*, and what is to be done; *now* never goes back."""
        after, out = copy.copy(self), list[Action]()
        if not self.stopped:
            after._go_on(now, out, after._hear(event, now, out))
        return after, tuple(out)

    def _hear(self, event: Event, now: float, out: list[Action]) -> Action | None:
        """What it is to do next; None: what there is to do."""
        match event:
            case Broke(why):
                out.append(Log("info", f"the election waits for the store: {why}"))
                self._connected = False
                return Rest(PAUSE if self.hold is None else min(PAUSE, self.hold.ttl / 10))
            case Found(version, True):
                return Await(version, SLICE)
            case Found():
                self._sent = now
                return Acquire(self.ttl)
            case Acquired(Hold() as hold):
                self.hold, self.until = hold, self._sent + hold.ttl
                return Elect(hold)
            case Elected() | Renewed(True) if self.hold is not None:
                self.until = self._sent + self.hold.ttl
                if self._in_office and now < self.until and (self._kept is None or now - self._kept > KEEP / 3):
                    self._kept = now
                    out.append(Keep())
                self._in_office = True
                return Rest(self.hold.ttl / _RENEWALS)
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

    def _go_on(self, now: float, out: list[Action], then: Action | None) -> None:
        """Do that next, or what there is to do; unless the term is over."""
        if self.hold is not None and (self._closing or now >= self.until):
            lapsed = f"the lease was not renewed for {self.hold.ttl:.3g} s"
            self._leave("it resigned" if self._closing else lapsed, out)
            then = None
        if self._closing:
            self.stopped = True
        elif isinstance(then, Rest):
            out.append(then)
        elif not self._connected:
            self._connected = True
            out.append(Connect(self.ttl if self.hold is None else max(self.until - now, PAUSE)))
        elif then is not None:
            out.append(then)
        elif self.hold is not None:
            self._sent = now
            out.append(Renew(self.hold))
        else:
            out.append(Look())

    def _leave(self, why: str, out: list[Action]) -> None:
        """The term is over."""
        hold, self.hold = self.hold, None
        if self._in_office:
            self._in_office = False
            out.append(VoteOut(why, not self._closing))
        if hold is not None and self._connected:
            out.append(Release(hold))
