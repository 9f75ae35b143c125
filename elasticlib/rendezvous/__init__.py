"""
How the nodes of a job find each other, agree on ranks, and end rounds together.

Rules of this house: `_coordinator` decides and is pure; `_host` runs it; a `Member` is one node's side;
they meet in an `Exchange` only. One node or many, the same code runs.
"""

from __future__ import annotations

import os
from types import TracebackType

from attrs import frozen
from typing_extensions import Self

from elasticlib.errors import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from elasticlib.rendezvous._coordinator import Rules
from elasticlib.rendezvous._exchange import Exchange
from elasticlib.rendezvous._host import Host
from elasticlib.rendezvous._member import Member
from elasticlib.rendezvous._messages import Descriptor, FailureNote, Final, Notice, RoundEnd, Seat
from elasticlib.rendezvous.memory import MemoryExchange


@frozen
class Rendezvous:
    """One launch's place in its job: speak through `member`, `close` it at the end."""

    run_id: str
    backend: str
    """Name by which reports call it."""
    member: Member
    _host: Host

    def close(self) -> None:
        """End all threads and free all descriptors; may be called twice."""
        self.member.close()
        self._host.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_local(run_id: str, rules: Rules, *, backend: str = "c10d", node: str | None = None) -> Rendezvous:
    """A rendezvous of this program with itself: coordinator and member in two threads, no socket."""
    exchange = MemoryExchange()
    host = Host(exchange, rules)
    host.start()
    return Rendezvous(run_id, backend, Member(exchange, node or os.uname().nodename), host)


__all__ = [
    "Descriptor",
    "Exchange",
    "FailureNote",
    "Final",
    "Host",
    "Member",
    "MemoryExchange",
    "Notice",
    "Rendezvous",
    "RendezvousClosedError",
    "RendezvousConnectionError",
    "RendezvousError",
    "RendezvousGracefulExitError",
    "RendezvousStateError",
    "RendezvousTimeoutError",
    "RoundEnd",
    "Rules",
    "Seat",
    "open_local",
]
