"""
Decisions about agents on a Ray cluster: notices of draining nodes, and the warning while no agent starts. Pure.

Rules of this file: what Ray says, and the time, are arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import define, field, frozen


@frozen
class DrainNotice:
    """The announced end of the node of the agent at *place*."""

    place: int
    agent: int
    why: str
    seconds: float | None
    """Seconds until the end; None if Ray says no time."""


@define
class DrainWatch:
    """The agents that have got a notice; each gets one."""

    _noticed: set[tuple[int, int]] = field(factory=set)

    def notices(
        self, nodes: Mapping[tuple[int, int], str], draining: Mapping[str, int], now: float
    ) -> list[DrainNotice]:
        """
        Return the new notices at the Unix time *now*.

        *nodes* has Ray's id of the node by place and number of the agent. *draining* has the times of the nodes' ends
        in milliseconds (0: unknown), by id.
        """
        due = [agent for agent, node in nodes.items() if node in draining and agent not in self._noticed]
        self._noticed.update(due)
        return [
            DrainNotice(place, number, _why(nodes[place, number]), _seconds_to(draining[nodes[place, number]], now))
            for place, number in due
        ]


def _why(node: str) -> str:
    return f"Ray drains the node {node[:12]}"


def _seconds_to(deadline: int, now: float) -> float | None:
    return max(0.0, deadline / 1000 - now) if deadline else None


def waiting_text(state: str, bundles: Sequence[Mapping[str, float]], free: Mapping[str, Any], seconds: float) -> str:
    """
    Return for what agents wait that have not started within *seconds*.

    *state* is that of the placement group, and *free* has the free resources of the whole cluster.
    """
    if state == "CREATED":
        return (
            f"Ray has placed the agents, and none of them has started after {seconds:g} s: the nodes may be busy, or "
            "still install a runtime environment (see `ray list actors`)"
        )
    resources = {name: count for name, count in free.items() if ":" not in name}
    return (
        f"Ray has not placed the agents after {seconds:g} s: each of the {len(bundles)} bundles {dict(bundles[0])} "
        f"needs a node of its own; free in the whole cluster: {resources}"
    )
