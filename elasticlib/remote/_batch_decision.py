"""
The end of a call on a batch system, from the outcomes of its nodes and the state of its job. Pure.

    outcomes of the last run of the job     job goes on                     job is over
    results of all ranks                    return them                     return them
    an error that would come again          raise it                        raise it
    failed workers                          raise, once all nodes ended     raise, the one with the cause first
    nodes were stopped or cut off           wait: it may be requeued        raise
    none                                    wait                            raise the job's state, after a while
"""

from __future__ import annotations

from collections.abc import Collection

from elasticlib.engines import AgentEnded, OutcomeKind, RaiseError, ReturnResults

_FAILURES = (OutcomeKind.ERROR, OutcomeKind.FAILED, OutcomeKind.CUT_OFF)
"""Kinds of outcomes that are errors, the most telling first."""


def decide(outcomes: Collection[AgentEnded], nodes: int, *, is_over: bool) -> RaiseError | ReturnResults | None:
    """
    Return how the call ends; None: not yet, or without a word of its nodes.

    *outcomes* are those of the job's last run, of *nodes* nodes.
    """
    if _has_all_results(outcomes):
        return ReturnResults()

    failed = [outcome for outcome in outcomes if outcome.kind in _FAILURES]
    if not failed:
        return None

    worst = min(failed, key=_meaning)
    ends_the_call = {
        OutcomeKind.ERROR: True,
        OutcomeKind.FAILED: is_over or len(outcomes) == nodes,
        OutcomeKind.CUT_OFF: is_over,
    }
    return RaiseError(worst.why, worst.place) if ends_the_call[worst.kind] else None


def _has_all_results(outcomes: Collection[AgentEnded]) -> bool:
    found, world = set[int](), 0
    for outcome in outcomes:
        found |= outcome.ranks
        world = max(world, outcome.world)
    return world > 0 and found >= set(range(world))


def _meaning(failed: AgentEnded) -> tuple[int, bool, int]:
    """Return a key by which the outcome whose error says most is the least."""
    return _FAILURES.index(failed.kind), not failed.has_cause, failed.place
