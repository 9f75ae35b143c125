"""
Rules of what a session accepts and reports.

Its agent receives each notice once, and people learn why the node still waits. A message is refused
unless this job's coordinator wrote it for this node. The first refusal of each kind logs a line for
people.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import Factory, define

from elasticlib.errors import RendezvousStateError
from elasticlib.rendezvous._membership import MembershipEvent
from elasticlib.rendezvous.node._session import Session
from elasticlib.rendezvous.protocol._exchange import key_place
from elasticlib.rendezvous.protocol._messages import (
    ContactLost,
    CoordinatorNotice,
    Final,
    GivenUp,
    RankAssignment,
    RoundEnd,
    StopAgreed,
    StopAsked,
    StopProposed,
    StoreGone,
    decode,
)
from elasticlib.rendezvous.protocol._progress import Seen
from tests.sim.checks.demand import Demand

WAITED = " has waited "
FOR_AGENTS = (RankAssignment, RoundEnd, StopAsked, StopProposed, StopAgreed, Final)
_REPORTED_AT = (5.0, 15.0, 30.0)
_REPORTED_EVERY = 60.0
"""Seconds of waiting after which people are told of it."""


@define(eq=False, repr=False)
class Refusals:
    """Messages that one node refused."""

    demand: Demand
    _known: set[str] = Factory(set)
    _due: list[str] = Factory(list)
    _may: list[str] = Factory(list)

    def refuses(self, kind: str) -> None:
        """It read what is none."""
        (self._may if kind in self._known else self._due).append(f"a {kind} was refused")
        self._known.add(kind)

    def is_cautioned(self, text: str) -> None:
        """The coordinator has a line for its people."""
        self._due.append(text)

    def says(self, text: str) -> None:
        """A line for people."""
        line = text if text in self._due else text.partition(":")[0]
        self.demand(line in (*self._due, *self._may), f"it says {text!r}, and refused nothing of that kind")
        (self._due if line in self._due else self._may).remove(line)

    def rests(self) -> None:
        """Nothing more is said in this step."""
        self.demand(not self._due, f"nobody is told that {self._due}")
        self._may.clear()


def notice_in(data: bytes, key: str, job: str, secret: bytes | None, seen: Seen) -> CoordinatorNotice:
    """Return the coordinator's notice in *data*; raise `RendezvousStateError` for anything else."""
    notice = decode(data, secret, key_place(job, seen.nonce, key))
    if not isinstance(notice, CoordinatorNotice) or (isinstance(notice, RankAssignment) and notice.round <= seen.round):
        raise RendezvousStateError("nothing that a coordinator says now")
    return notice


@define(eq=False, repr=False)
class Waiting:
    """Time that one node has waited for ranks, and the number of reports about it."""

    demand: Demand
    since: float | None = None
    _reported: int = 0
    _reported_at: float | None = None

    def begins(self, now: float) -> None:
        """A seat is asked for."""
        self.since, self._reported = now, 0

    def ends(self) -> None:
        """It has come, or none will."""
        self.since = None

    def says(self, text: str, why: str, now: float) -> None:
        """People are told, and why: what the coordinator says of it, or how long the search may take yet."""
        waited = self.since is not None and now >= self._due_at()
        self.demand(waited and text.endswith(why), f"it says {text!r} too early, or not {why!r}")
        self._reported, self._reported_at = self._reported + 1, now

    def rests(self, now: float) -> None:
        """Nothing more is told in this step."""
        late = self.since is not None and now >= self._due_at() and now != self._reported_at
        self.demand(not late, f"nobody is told that it has waited since {self.since}")

    def _due_at(self) -> float:
        more = self._reported - len(_REPORTED_AT)
        return (self.since or 0.0) + (
            _REPORTED_AT[self._reported] if more < 0 else _REPORTED_AT[-1] + _REPORTED_EVERY * (more + 1)
        )


def check_received(
    notice: CoordinatorNotice | None, received: Sequence[MembershipEvent], after: Session, fenced: bool, demand: Demand
) -> None:
    """The agent gets the *notice* that was read, or hears that ranks came too late, and nothing else."""
    losses = [event for event in received if isinstance(event, ContactLost)]
    late = isinstance(notice, RankAssignment) and fenced
    if late or isinstance(notice, GivenUp):
        demand(bool(losses), f"{notice} is read, and the agent is told {received}")
    due = [notice] if isinstance(notice, FOR_AGENTS) and not late else []
    found = [event for event in received if not isinstance(event, (ContactLost, StoreGone))]
    demand(found == due, f"the agent is told {found}, and should be told {due}")
    assignments = [event for event in after.unread if isinstance(event, RankAssignment)]
    demand(not losses or not assignments, f"contact is lost, and the agent gets {assignments}")
