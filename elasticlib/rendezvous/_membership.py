"""
What an agent needs of a rendezvous, whoever provides it.

Rules of this file: the contract only. No call blocks; what happens comes through `drain`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeAlias

from elasticlib._times import Term
from elasticlib.rendezvous.protocol._messages import Close, ContactLost, Final, Notice, StoreGone, WorkerReport

if TYPE_CHECKING:
    import socket

Word: TypeAlias = Notice | ContactLost | StoreGone
"""What an agent is told."""
STAYS = "stays"
"""Attribute of a log record: seconds for which whoever says it stays from now on at most, though its part is over."""


class Membership(Protocol):
    """One node's place in its job. Reports may come from any thread; `close` it when done."""

    node: str

    def join(self, slots: int, role: str) -> None:
        """Ask for ranks in the next round, for *slots* workers. No worker of this node may run any more."""

    def post(self, report: WorkerReport) -> None:
        """
        Say how the workers are: `Failed` at once, `Stopped` when all are gone, `Succeeded`; or that this node goes,
        by a `Leave` with the round whose workers still run here (`Stopped` follows then).
        """

    def guard(self, handle: int) -> Term | None:
        """
        Give a handle, still the caller's, of the process whose death ends all workers: killed if contact is lost.

        Whoever can end the workers does so when the lease is over that is returned; None where contact is never lost.
        """

    def listener(self) -> socket.socket | None:
        """With group rank 0: the bound socket for the round's worker store, now the caller's own."""

    def fileno(self) -> int:
        """A descriptor that is readable when `drain` has something."""

    def poll_timeout(self) -> float | None:
        """Seconds until `drain` wants to be called whether or not anything is readable; None: not at all."""

    def drain(self) -> list[Word]:
        """What came, oldest first; never blocks. Raises a `RendezvousError` when this node's part is over."""

    def close(self) -> None:
        """End it; may come twice."""


class Requests(Protocol):
    """What a program asks of its job, or signals ask of the program."""

    def hurry(self) -> int:
        """A descriptor that is readable while one is there that may not wait."""

    def drain(self) -> list[object]:
        """Those that came, which are heeded with that."""


class Talk(Membership, Protocol):
    """What a handler needs besides."""

    final: Final | None
    """How this node's part in the job ended, once `drain` has told it."""

    def post(self, report: WorkerReport | Close) -> None:
        """As that of every member; a `Close` ends the job for everybody, and `Final` answers."""

    def waiting(self) -> int:
        """How many nodes wait for ranks while a round runs, as of the last heartbeat."""
