"""
Rules of a node's contact with its job: loss of contact, kills of workers, and new attempts.

The last sign of life of a node with ranks is its last heartbeat that the coordinator reports as
read. Before that, it is the last heartbeat or request to join that the node sent and that was
answered. The answer is a heartbeat of the coordinator that is not older than the previous one. The
same holds while the coordinator's heartbeat stands still, if another node may take over.

The agent gets the order to stop its workers `FENCE` after the last sign of life, and not before. At
`KILL` the workers are killed, or sooner if other nodes may already have their ranks. A node was
suspended if the time of the coordinator's heartbeat advances by the heartbeat time between two
reads. A node seeks lost contact at once, then repeatedly within a second each, for as long as the
limits allow.
"""

from __future__ import annotations

import math

from attrs import define

from elasticlib.errors import RendezvousConnectionError, RendezvousNotFoundError
from elasticlib.rendezvous.node._session_liveness import SLEPT, Limits
from elasticlib.rendezvous.protocol._messages import EPOCH_BITS, ContactLost
from elasticlib.rendezvous.protocol._timing import FENCE, GRACE, KILL, STALE, STILL, TICK
from tests.sim.checks.demand import SOON, Demand

SHORTEST_PAUSE, LONGEST_PAUSE = 0.05, 1.0
REFUSALS = 4
"""In a row, after which nobody is there any more."""
LOST, SLEEP = "contact with the job is lost: ", "its machine was probably suspended"


@define(eq=False, repr=False)
class Contact:
    """Of one node."""

    limits: Limits
    demand: Demand
    since: float
    """When contact began, or was lost; at first, when the node began."""
    heartbeat: float = 0.0
    met: bool = False
    """True if contact has ever existed."""
    live: bool = False
    trying: bool = False
    fenced: bool = False
    """True if the agent was notified that contact is lost, and contact has not returned."""
    over: bool = False
    """True if no further attempts are made."""
    sign: float = 0.0
    """When the last sign of life went out that the store has."""
    credited: float | None = None
    """When the last one went out that the coordinator has read; None without ranks."""
    read: int = -1
    """The coordinator's count that was read."""
    suspended: bool = False
    """True if the last answer shows that this node was suspended."""
    _fenced_at: float = -math.inf
    _compares: bool = False
    """True if an answer was read since the last request to join."""
    _read_at: float = 0.0
    """When that count was read first."""
    _stands_since: float | None = None
    """Since when the coordinator's count does not grow."""
    _doomed_at: float = math.inf
    _broke_at: float = -math.inf
    """When the last attempt failed; -inf: the next one comes at once."""
    _refusals: int = 0
    _why: str = ""
    """Why the connection broke."""
    _rejection: str = ""
    """Why the coordinator's heartbeat does not count."""
    _wakes: bool = False
    """True if the agent must receive a notice that this node was suspended."""

    # What happens.

    def tries(self, now: float) -> None:
        """A connection is made."""
        self.demand(
            not self.over and not self.trying, "it seeks contact though it does so already, or its part is over"
        )
        if self.live:
            self.demand(self.is_useless(now), "it gives contact up that it has")
            self.live, self.since = False, now
        self.demand(now >= self._broke_at + SHORTEST_PAUSE - SOON, "it tries again without a pause")
        self.trying = True

    def breaks(self, now: float, why: str, refused: bool) -> None:
        """The connection could not be made, or broke."""
        self._broke_at = -math.inf if self.live else now
        self.since = now if self.live else self.since
        self.live = self.trying = False
        self._refusals, self._why = self._refusals + 1 if refused else 0, why

    def greeted(self, heartbeat: float, now: float) -> None:
        """The coordinator's greeting was read."""
        self.sign = self.sign if self.met else now
        self.heartbeat, self.since, self._refusals = heartbeat, now, 0
        self.met, self.live, self.trying, self._broke_at = True, True, False, -math.inf

    def joins(self) -> None:
        """Ranks are asked for: no worker runs here any more."""
        self.sign = self.sign if self.credited is None else max(self.sign, self.credited)
        self._compares, self._doomed_at, self.credited = False, math.inf, None

    def is_stale(self, sent: float | None, now: float) -> bool:
        """Return whether ranks with their last sign of life at *sent* may belong to other nodes now."""
        return bool(self.heartbeat) and (sent is None or now >= sent + STALE * self.heartbeat)

    def has_ranks(self, sent: float) -> None:
        """The agent gets ranks, and that was the last sign of life."""
        self.credited = sent

    def stored(self, sent: float, now: float) -> None:
        """A request to join that went out then is in the store."""
        self.sign, self._rejection = max(self.sign, sent), ""
        self._regains(now)

    def felt(self, sent: float, count: int | None, rejection: str, credited: float | None, now: float) -> None:
        """
        The coordinator's count; None where none is, and why.

        The store has a heartbeat that was *sent* then; that which the coordinator says it has read, at *credited*.
        """
        self.suspended = self._compares and bool(self.heartbeat) and self._grown(count) >= SLEPT
        self._wakes = self.suspended and not self.fenced
        self.noted(sent, count, rejection, credited, now)
        if not self.suspended or self.fenced:
            self._regains(now)

    def noted(self, sent: float, count: int | None, rejection: str, credited: float | None, now: float) -> None:
        """The same, of a node that seeks nothing any more, and whose workers may still run."""
        if count is not None and count >= self.read:
            self.sign, self._rejection = max(self.sign, sent), ""
            if self.credited is not None and credited is not None:
                self.credited = max(self.credited, credited)
        else:
            self._rejection = rejection or "an old one"
        self._compares = True
        if count is not None and count > self.read:
            self.read, self._read_at, self._stands_since = count, now, None
        elif self._stands_since is None and now >= self._read_at + STILL * self.heartbeat:
            self._stands_since = now

    def _grown(self, count: int | None) -> int:
        if count is None or count <= self.read:
            return 0
        same = count >> EPOCH_BITS == self.read >> EPOCH_BITS  # who takes over counts anew
        return count - self.read if same else count & ((1 << EPOCH_BITS) - 1)

    def _regains(self, now: float) -> None:
        if self.live and now < self.lost_at():
            self.fenced = False

    def reports_loss(self, loss: ContactLost, now: float) -> None:
        """The agent is told to stop its workers."""
        grace = GRACE * self.heartbeat
        if loss.why.startswith(LOST):
            grace = max(0.0, min(grace, self._killed_at() - TICK * self.heartbeat - now))
        self.demand(loss.grace == grace, f"workers are given {loss.grace:g} s to stop, and have {grace:g}")
        if loss.why.startswith(LOST):
            self.demand(self.met and not self.fenced, f"it counts as lost once more: {loss.why}")
            self.demand(now >= self.lost_at(), f"it counts as lost {self.lost_at() - now:.6f} s too early")
            why = self._rejection if self.live else self._why
            self.demand(why in loss.why, f"contact is lost as {why!r}, and it says {loss.why!r}")
            self.fenced, self._fenced_at = True, now
        elif SLEEP in loss.why:
            self.demand(self.suspended and not self.fenced, f"it was not suspended: {loss.why}")
            self._compares, self._wakes, self._doomed_at = False, False, now + (KILL - FENCE) * self.heartbeat

    # What must be.

    def lost_at(self) -> float:
        """When it counts as lost."""
        return self._alive_at() + FENCE * self.heartbeat

    def _alive_at(self) -> float:
        if self.credited is None:
            return self.sign
        changes = self.limits.has_election and self._stands_since is not None
        return max(self.credited, self.sign) if changes else self.credited

    def is_useless(self, now: float) -> bool:
        """Return whether existing contact is useless, so that a new connection may be better."""
        return self.fenced and (self._fenced_at == now or now >= self.since + FENCE * self.heartbeat)

    def may_try(self, now: float) -> bool:
        """Return whether a connection may be made."""
        return self.is_useless(now) if self.live else not self.trying

    def ends_at(self) -> float:
        """When the search is given up."""
        if self.live:
            return math.inf
        return self.since + (self.limits.reconnect_timeout if self.met else self.limits.join_timeout)

    def is_store_lost(self) -> bool:
        """Return whether the host of the job's store is lost."""
        return self.met and self._refusals >= REFUSALS and not self.limits.has_election

    def gives_up(self, error: Exception, now: float) -> None:
        """This node's part ends by that error."""
        stands = math.inf if self._stands_since is None else self._stands_since
        silent = now >= stands + self.heartbeat + self.limits.reconnect_timeout
        self.demand(self.is_store_lost() or silent or now >= self.ends_at(), f"it gives up before its time: {error}")
        right = RendezvousConnectionError if self.met else RendezvousNotFoundError
        self.demand(type(error) is right, f"it gives up by {error!r}")

    def rests(self, now: float) -> None:
        """Nothing more is done in this step, and its part goes on."""
        self.demand(not self._wakes, "it was suspended, and the agent is not told")
        self.demand(not self.is_store_lost(), "it seeks a store whose host is gone")
        self.demand(now < self.ends_at(), "it seeks contact for longer than it may")
        lost = self.met and bool(self.heartbeat) and now >= self.lost_at()
        self.demand(self.fenced or not lost, "contact is lost, and the agent is not told")
        idle = not self.live and not self.trying and now >= self._broke_at + LONGEST_PAUSE
        useless = self.live and self.is_useless(now)
        self.demand(not idle and not useless, "it is time to seek contact, and it does not")

    def _killed_at(self) -> float:
        return min(self._alive_at() + KILL * self.heartbeat, self._doomed_at)

    def kills(self, kill_at: float | None) -> None:
        """Workers that still run here are killed then."""
        at = self._killed_at() if self.met and self.heartbeat else None
        self.demand(kill_at == at, f"workers are killed at {kill_at}, and should be at {at}")
