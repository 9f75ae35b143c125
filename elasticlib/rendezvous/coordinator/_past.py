"""
Nodes that are gone: how long their names are remembered, and what guards those that are not. Pure.

A message that was handled is known by its node's name and its number, so that whoever writes it again changes nothing;
but a job may replace its nodes for ever, and cannot remember all of them. So each node says with its `Join` which
heartbeat of the coordinator it has seen. One of a node that nobody knows is new only if it has seen a later heartbeat
of the coordinator than those could who were forgotten.

Rules of this file: names are forgotten by generations. The nodes that are gone at one moment are the elders; when as
many others are gone, too, the elders are forgotten that were not heard again, and whatever they wrote was written
before the coordinator's heartbeat of that moment. A newcomer is wrongly taken for one of them only if as many come and
go between its reading of the coordinator's heartbeat and the reading of its message; it says it again, with a later
heartbeat of the coordinator.
"""

from __future__ import annotations

from attrs import evolve

from elasticlib.rendezvous.coordinator._state import Past, State
from elasticlib.rendezvous.protocol._messages import Join, Report

REMEMBERED = 4096
"""Nodes of the past whose messages are still told from new ones, about: two generations."""


def remembering(state: State, heartbeats: int) -> State:
    """
    Without the oldest of the nodes that are gone, where there are too many.

    *heartbeats* is the count of the last one that a node can have read; 0: there are none.
    """
    past, assigned = state.past, {} if state.round is None else state.round.entries
    # Mostly the numbers tell: this is asked at each join.
    if len(state.heard) <= len(past.elders) + REMEMBERED // 2 + len(state.waiting) + len(assigned):
        return state
    heard = {node: seq for node, seq in state.heard.items() if node not in past.elders}
    gone = frozenset(node for node in heard if node not in state.waiting and node not in assigned)
    horizon = past.heartbeats if past.elders else past.horizon
    return evolve(state, heard=heard, past=Past(gone, heartbeats, horizon))


def heard_of(state: State, node: str) -> State:
    """The node has said something: it is none of the elders."""
    past = state.past
    return evolve(state, past=evolve(past, elders=past.elders - {node})) if node in past.elders else state


def doubt(state: State, report: Report) -> str:
    """Why the report may be one of a node that was forgotten, for people; empty: it is none."""
    horizon = state.past.horizon
    if not isinstance(report, Join) or report.node in state.heard or not horizon or report.pulse > horizon:
        return ""
    return (
        f"node {report.node} is not known, and joins with coordinator heartbeat {report.pulse} as the last it read: "
        f"nodes up to heartbeat {horizon} were forgotten, and this may be an old message of theirs, written again"
    )
