"""
Which failure ended a round, and whether that costs a restart. Pure.

A worker's sockets close before its death can be seen: the lost connections of its peers, on its node and on others,
are often reported first. So a round that fails ends at once, and its cause is decided when its workers are gone: by
then every node has told of its failures, or is known to be lost.

Rules of this file: nothing is spent before the cause is decided, and it is decided once. Workers that take their time
to stop hold nobody up: a failure that is more than a lost connection is the cause after `CAUSE_WAIT`. Connections alone
that were lost while a node left, was lost, or lost its sidecar, were cut by that node, which spends no restart.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from attrs import evolve

from elasticlib.rendezvous.coordinator._ending import (
    describe,
    lose,
    may_restart,
    root_cause,
    spend,
    stop_workers,
)
from elasticlib.rendezvous.coordinator._state import Outcome, Round, Send, State
from elasticlib.rendezvous.protocol._messages import RoundEnd
from elasticlib.rendezvous.protocol._shortening import line

CAUSE_WAIT = 1.0
"""Seconds in which nodes tell of failures that came before the one that ended the round."""


def end_for_failure(state: State, current: Round, reporter: str, now: float) -> Outcome:
    """End the running round, whose cause is yet to be decided, because workers of the node *reporter* failed."""
    root = root_cause(current.causes)
    why = line(f"workers of node {reporter} failed" if root is None else describe(root))
    restart = may_restart(state, fatal=is_fatal(current))
    current = evolve(current, cause_due=now + CAUSE_WAIT)
    return stop_workers(state, current, RoundEnd(current.number, why, restart, decided=False))


def decide(state: State, current: Round, end: RoundEnd, now: float, *, gone: bool) -> Outcome:
    """Decide on the cause once it is time, and tell it where neither ranks nor the job's end will say it soon."""
    is_late = current.cause_due is not None and now >= current.cause_due
    turns = False
    if not end.decided and (gone or (is_late and not _are_lost_connections(current))):
        state, decided = _decided(state, current, end.why)
        turns, end = decided.restart and not end.restart, decided
        current = evolve(current, end=end)
        state = evolve(state, round=current)
    if not end.decided or not (is_late or turns):
        return state, ()
    state = evolve(state, round=evolve(current, cause_due=None))
    there = (entry for entry in current.entries.values() if entry.node not in current.left)
    newest = (state.waiting.get(entry.node, entry) for entry in there)
    return state, tuple(Send(entry.mailbox, entry.node, end) for entry in newest)


def is_fatal(current: Round) -> bool:
    """Whether a restart would only meet one of the failures again."""
    return any(cause.note.fatal for cause in current.causes)


def _are_lost_connections(current: Round) -> bool:
    """Whether nothing but connections that peers have lost is known of the failure."""
    return all(cause.note.secondary and not cause.note.fatal for cause in current.causes)


def _decided(state: State, current: Round, reported: str) -> tuple[State, RoundEnd]:
    if current.causes and _are_lost_connections(current):
        if lost := _unfinished(current, current.lost):
            return lose(state, current, lost)
        if left := _unfinished(current, current.left.keys()):
            why = "; ".join(f"node {node} left: {reason}" for node, reason in left.items())
            return state, RoundEnd(current.number, line(why), restart=True)
        if current.rejoined:
            return state, RoundEnd(current.number, current.rejoined, restart=True)
    root = root_cause(current.causes)
    return spend(state, current, reported if root is None else describe(root), fatal=is_fatal(current))


def _unfinished(current: Round, nodes: Collection[str]) -> Mapping[str, str]:
    """Those of the *nodes* that have not succeeded, in the order of ranks, each with the reason why it is gone."""
    return {node: current.left[node] for node in current.entries if node in nodes and node not in current.succeeded}
