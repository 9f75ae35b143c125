"""
What a simulated node needs of the cluster around it, and who looks on.

Rules of this file: the contract only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from elasticlib.rendezvous.coordinator._state import Rules
from elasticlib.rendezvous.protocol._messages import Final, RankAssignment
from elasticlib.testing._history import Record
from elasticlib.testing._timeline import Timeline

if TYPE_CHECKING:
    from elasticlib.testing._group import Group
    from elasticlib.testing._node import Node


class Surroundings(Protocol):
    """What a node needs of its cluster."""

    timeline: Timeline
    rules: Rules
    work: float

    def note(self, record: Record) -> None:
        """Remember what happened."""

    def started(self, group: Group) -> None:
        """Workers run."""

    def assigned(self, node: Node, assignment: RankAssignment) -> None:
        """A node was given ranks."""

    def told(self, node: Node, final: Final) -> None:
        """A node was told how the job ended."""

    def ends(self, node: Node, own: int | None, succeeded: bool, final: Final) -> None:
        """An agent takes leave, with the results of its round *own*: as one that *succeeded*, or not."""

    def finished(self, node: Node) -> None:
        """An agent's part ended."""

    def part(self, node: Node, linger: float) -> None:
        """A sidecar is about to end: what of the job it hosts must end, too."""

    def leaves(self, node: Node, why: str) -> bool:
        """Whether the job ends because this node goes."""


class Observer(Protocol):
    """Sees each step of the pure objects in a simulated job; may raise `InvariantBroken`."""

    def stepped(self, node: str, event: Any, before: Any, after: Any, actions: tuple[Any, ...], now: float) -> None:
        """
        The session or the coordinator of that *node* took a step on *event*, when the node's clock showed *now*.

        *before* is None when it began. Without an *event*, what came for the agent was taken: *actions*.
        """
