"""
The interface between an agent and its rendezvous.

Rules of this file: the contract only. No call blocks; events arrive through `drain`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeAlias

from elasticlib._times import Term
from elasticlib.rendezvous.protocol._messages import Close, ContactLost, Final, Notice, StoreGone, WorkerReport

if TYPE_CHECKING:
    import socket

MembershipEvent: TypeAlias = Notice | ContactLost | StoreGone
"""An event for the agent."""
STAYS = "stays"
"""
Attribute of a log record: seconds for which the sender stays at most, though its part is over.
"""
PATIENCE = "patience"
"""Attribute of such a record: seconds for which the sender still stays after a request to end."""


class Membership(Protocol):
    """One node's place in its job. Reports may come from any thread; `close` it when done."""

    node: str

    def join(self, slots: int, role: str) -> None:
        """Ask for ranks in the next round, for *slots* workers. No worker of this node may run any more."""

    def post(self, report: WorkerReport | Close) -> None:
        """
        Report the state of the workers: `Failed` at once, `Stopped` when all are gone, or
        `Succeeded`.

        A `Leave` reports that this node leaves, with the round whose workers still run here;
        `Stopped` follows then.
        """

    def guard(self, handle: int) -> Term | None:
        """
        Pass a handle of the process whose death ends all workers. The caller keeps the handle.

        The process is killed if contact is lost. Return the term at whose end the caller must end
        the workers, or None if contact is never lost.
        """

    def listener(self) -> socket.socket | None:
        """
        Return the bound socket for the round's worker store, now the caller's own; for group rank
        0.
        """

    def fileno(self) -> int:
        """Return a descriptor that is readable when `drain` has something."""

    def poll_timeout(self) -> float | None:
        """
        Return the seconds until `drain` must be called even if nothing is readable; None: no limit.
        """

    def drain(self) -> list[MembershipEvent]:
        """
        Return the new events, oldest first, without blocking.

        Raises a `RendezvousError` when this node's part is over.
        """

    def close(self) -> None:
        """Close this membership; may be called twice."""


class Requests(Protocol):
    """Requests of a program, or of a signal, to a running job."""

    def hurry(self) -> int:
        """Return a descriptor that is readable while an urgent request is pending."""

    def drain(self) -> list[object]:
        """Return and remove the pending requests."""


class HandlerMembership(Membership, Protocol):
    """A membership with the additions that a handler needs."""

    @property
    def final(self) -> Final | None:
        """The end of this node's part in the job, once `drain` has returned it."""

    def post(self, report: WorkerReport | Close) -> None:
        """
        Post a report as any member does; a `Close` ends the job for all nodes, and `Final` answers.
        """

    def waiting(self) -> int:
        """
        Return the number of nodes that waited for ranks during a round, as of the last heartbeat.
        """
