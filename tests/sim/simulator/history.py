"""
Records of the events in a simulated cluster, with their simulated seconds, and their observer.

Rules of this file: a record holds facts, and names nodes by their agents' names. No record holds
the reading of a clock, so two runs that differ only in their clocks have the same history.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

from attrs import frozen

from elasticlib.testing import Fault


@frozen
class Happened:
    """A fault of the plan."""

    at: float
    fault: Fault


@frozen
class Tampered:
    """An adversary did something to what lay in the store."""

    at: float
    what: str


@frozen
class AgentStarted:
    """An agent began to seek its job."""

    at: float
    node: str


@frozen
class TookOver:
    """A node began to coordinate."""

    at: float
    node: str


@frozen
class Finalized:
    """The coordinator made a round, its nodes in the order of their group ranks."""

    at: float
    round: int
    nodes: tuple[str, ...]
    restarts: int
    why: str
    cause: str = ""
    """Why the round before it ended, where its workers failed."""


@frozen
class Ended:
    """The coordinator ended a round."""

    at: float
    round: int
    why: str
    restart: bool


@frozen
class Started:
    """A node started its workers."""

    at: float
    node: str
    round: int
    group_rank: int
    ranks: tuple[int, ...]
    master: tuple[tuple[str, ...], int]


@frozen
class WorkersEnded:
    """No worker of a node's round runs any more."""

    at: float
    node: str
    round: int
    how: str
    """``succeeded``, ``returned`` (as asked), ``failed``, ``stopped``, ``killed`` or ``died``."""


@frozen
class Fenced:
    """A node was told that contact is lost."""

    at: float
    node: str
    why: str


@frozen
class AgentEnded:
    """An agent's part ended; nothing comes after it."""

    at: float
    node: str
    kind: str
    """``succeeded``; ``replaced``: its workers ended well, but the job did so in a later round without it; a kind of
    `Final`: ``failed``, ``timeout``, ``closed``, ``refused``, ``left``; or ``lost``: an error instead of an outcome,
    because the job was not found or contact did not come back."""
    why: str


Record: TypeAlias = (
    Happened | Tampered | AgentStarted | TookOver | Finalized | Ended | Started | WorkersEnded | Fenced | AgentEnded
)


class Observer(Protocol):
    """Sees each step of the pure objects in a simulated job; may raise `InvariantBroken`."""

    def stepped(self, node: str, event: Any, before: Any, after: Any, actions: tuple[Any, ...], now: float) -> None:
        """
        The session or the coordinator of that *node* took a step on *event*, when the node's clock showed *now*.

        *before* is None when it began. Without an *event*, what came for the agent was taken: *actions*.
        """
