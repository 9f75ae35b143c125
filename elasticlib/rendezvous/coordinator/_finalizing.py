"""
The moment at which a round is finalized, and its nodes. Pure.

Rules of this file:

* No node gets ranks while a worker of an earlier round may run.
* A node whose heartbeats are missed gets no ranks: it may be lost before its workers have started.
* A node that is known to come back is waited for; otherwise the others would be stopped again when
  it comes.
* Once all remaining nodes are back, the round only waits for the minimum number of nodes. Spares
  wait without limit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set

from attrs import evolve

from elasticlib.rendezvous.coordinator._node_liveness import is_missed, last_count
from elasticlib.rendezvous.coordinator._places import next_free, pauses, ready, refused
from elasticlib.rendezvous.coordinator._rank_order import assign, order
from elasticlib.rendezvous.coordinator._replacements import without_replacements
from elasticlib.rendezvous.coordinator._round_end import finish, losses_after
from elasticlib.rendezvous.coordinator._state import (
    Action,
    ClearStore,
    Entry,
    JobState,
    Outcome,
    Round,
    Send,
    WakeAt,
    named,
)
from elasticlib.rendezvous.protocol._messages import Final, RankAssignment


def gather(state: JobState, now: float) -> Outcome:
    """Give ranks to the nodes that wait, if it is time; else say when it will be."""
    current = state.round
    if current is not None and current.has_workers:
        return state, ()

    if state.gathering_since is None:
        state = evolve(state, gathering_since=now)
    # A successor that may have read an old document waits until nodes at work have had the time to
    # object.
    if now < state.opens_at:
        return state, (WakeAt(state.opens_at),)

    available = _available(state, now)
    if len(available) < state.rules.min_nodes:
        return _wait_for_more(state, now)

    # Without the returning nodes the others would be stopped again at once.
    if _is_any_returning(state):
        return _wait_for_return(state, available, now)

    return _start_or_wait(state, available, now)


def _available(state: JobState, now: float) -> Mapping[str, Entry]:
    available = without_replacements(state, ready(state, now))
    is_short = len(available) < state.rules.min_nodes
    if is_short and now >= _deadline(state, now):
        # Better to use a pausing node than to end the job.
        return without_replacements(state, state.waiting)
    return available


def _wait_for_more(state: JobState, now: float) -> Outcome:
    """Wait for more nodes until the deadline, or end the job; called with too few nodes."""
    rules = state.rules

    # With join_timeout=0 returning nodes are waited for, but no replacements.
    if state.round is not None and rules.join_timeout == 0:
        possible = len(state.waiting) + len(returning(state)) + _expected(state)
        if possible < rules.min_nodes:
            left = {*state.waiting, *returning(state)}
            return _give_up(state, left, "are left", "; with join_timeout=0 no node is replaced")

    deadline = _deadline(state, now)
    if now < deadline:
        return state, (_wake(state, deadline, now),)

    return _give_up(state, state.waiting.keys(), f"joined in {rules.join_limit:g} s", "")


def _expected(state: JobState) -> int:
    """Return the number of nodes that an engine has started and that have never asked for ranks."""
    return max(0, len(state.rules.hosts) - len(state.received))


def _wait_for_return(state: JobState, available: Mapping[str, Entry], now: float) -> Outcome:
    """Wait until the deadline for nodes of the last round that have not asked for ranks yet."""
    deadline = _deadline(state, now)
    if now < deadline:
        return state, (WakeAt(deadline),)
    absent = named(returning(state))
    limit = f"{state.rules.join_limit:g} s"
    why = f"{len(available)} nodes have joined; {absent} did not return in {limit}"
    return finalize(state, why, available)


def _start_or_wait(state: JobState, available: Mapping[str, Entry], now: float) -> Outcome:
    """
    Finalize the round, unless it is the first one and may still grow; called with enough nodes.
    """
    current = state.round
    present = len(available)
    most = state.rules.max_nodes
    if present >= most:
        return finalize(state, f"all {most} nodes have joined", available)

    # After a restart no new node is waited for; if all of the last round are gone, it is like a
    # first round.
    if current is not None and len(current.left) < len(current.entries):
        why = f"all remaining nodes of round {current.number} have returned, {present} have joined"
        return finalize(state, why, available)

    due, why = _due(state, present, now)
    if now < due:
        return state, (_wake(state, due, now),)

    return finalize(state, why, available)


def _wake(state: JobState, due: float, now: float) -> WakeAt:
    free = next_free(state, now)
    if free is None:
        return WakeAt(due)
    return WakeAt(min(due, free))


def finalize(state: JobState, why: str, available: Mapping[str, Entry]) -> Outcome:
    """
    Give ranks to the *available* nodes: first to those with earlier ranks, then in the order of
    their arrival.
    """
    rules, current = state.rules, state.round
    reachable = [node for node, entry in available.items() if not is_missed(state, entry)]
    if len(reachable) < min(len(available), rules.max_nodes):
        # Each missing node will soon be heard or lost: a machine may stand still for a moment.
        return state, ()

    number = 0 if current is None else current.number + 1
    entries = _choose(state, reachable)
    assignments = _assign(state, entries, number, why)
    rest = {node: entry for node, entry in state.waiting.items() if node not in entries}
    if current is not None:
        state = evolve(state, losses=losses_after(state.losses, current))
    state = evolve(
        state,
        waiting=rest,
        pausing=state.pausing & rest.keys(),
        gathering_since=None,
        round=Round(number, entries, assignments),
    )
    actions: list[Action] = []

    # Keys of the last round's workers would mislead those of this one; none of them runs any more.
    if rules.shared_store and number > 0:
        actions.append(ClearStore())
    for entry, assignment in zip(entries.values(), assignments, strict=True):
        actions.append(Send(entry.mailbox, entry.node, assignment))
    return state, tuple(actions)


def _choose(state: JobState, reachable: Sequence[str]) -> Mapping[str, Entry]:
    current = state.round
    last = () if current is None else tuple(current.entries)
    stayed = set() if current is None else {entry.node for entry in current.members()}
    # Sorting is stable: among equal claims the first that asked comes first.
    by_claim = sorted(reachable, key=lambda node: node not in stayed)
    chosen = by_claim[: state.rules.max_nodes]
    descriptors = {node: state.waiting[node].descriptor for node in chosen}
    return {node: _with_ranks(state.waiting[node]) for node in order(descriptors, last)}


def _with_ranks(entry: Entry) -> Entry:
    is_marked = entry.free_at or entry.is_other or entry.is_replacement
    if not is_marked:
        return entry
    return evolve(entry, free_at=0.0, is_other=False, is_replacement=False)


def _assign(state: JobState, entries: Mapping[str, Entry], number: int, why: str) -> tuple[RankAssignment, ...]:
    descriptors = [entry.descriptor for entry in entries.values()]
    assignments = assign(descriptors, number, state.restarts, state.rules.max_restarts, why)
    cause = _cause_of_restart(state.round)
    return tuple(
        evolve(assignment, heartbeat_count=last_count(state, entry), cause=cause)
        for entry, assignment in zip(entries.values(), assignments, strict=True)
    )


def _cause_of_restart(last: Round | None) -> str:
    """Return the failure that ended the last round; empty if it ended without a failure."""
    if last is None or last.end is None:
        return ""
    has_failed = bool(last.causes or last.rejoined)
    return last.end.why if has_failed else ""


def status(state: JobState, now: float) -> str:
    """
    Describe for which nodes the job or a spare waits, and how long; empty if nothing is waited for.
    """
    current = state.round
    if state.final is not None:
        return ""
    if current is None:
        return _status_of_gathering(state, now)
    if current.end is None:
        return _status_of_spares(state, current, now)

    if current.has_workers:
        running = current.entries.keys() - current.stopped - current.succeeded
        return f"round {current.number} has ended; its workers are still stopping on {named(running)}"

    if not current.end.restart:
        return ""

    return _status_of_gathering(state, now)


def _status_of_gathering(state: JobState, now: float) -> str:
    rules = state.rules
    present = len(state.waiting)
    seconds_left = max(0.0, _deadline(state, now) - now)
    there = f"nodes have joined ({named(state.waiting)})"
    if pausing := pauses(state, now):
        there = f"{there}; {pausing}"
    if absent := _absent_hosts(state):
        there = f"{there}, and {absent} not yet: start the command there too, or give --engine none"
    if present < rules.min_nodes:
        return f"{present} of at least {rules.min_nodes} {there}; {seconds_left:.0f} s left"

    if _is_any_returning(state):
        absent = named(returning(state))
        return f"{present} {there}; {absent} will come back; {seconds_left:.0f} s left"

    due, _ = _due(state, present, now)
    start = f"they start in {max(0.0, due - now):.0f} s if no other node joins"
    return f"{present} of at most {rules.max_nodes} {there}; {start}"


def _absent_hosts(state: JobState) -> str:
    """Return the machines from which an engine's node is still to come; empty if none, or if they are unknown."""
    come = {entry.descriptor.index for entry in state.waiting.values()}
    absent = [host for index, host in enumerate(state.rules.hosts) if index not in come]
    return named(absent) if absent else ""


def _status_of_spares(state: JobState, current: Round, now: float) -> str:
    if not state.waiting:
        return ""
    return pauses(state, now) or _why_no_ranks(current, state.rules.max_nodes)


def _why_no_ranks(current: Round, most: int) -> str:
    if len(current.entries) < most:
        why = f"round {current.number} is about to succeed on {named(current.entries)}"
        return f"{why}; this node joins the next round, if one follows"
    why = f"round {current.number} runs with its maximum of {most} nodes ({named(current.entries)})"
    return f"{why}; this node is a spare: it replaces a node that leaves"


def returning(state: JobState) -> frozenset[str]:
    """Return the nodes of the last round that are alive and have not asked for ranks yet."""
    current = state.round
    if current is None:
        return frozenset()
    stayed = {entry.node for entry in current.members()}
    return frozenset(stayed - state.waiting.keys())


def _is_any_returning(state: JobState) -> bool:
    current = state.round
    if current is None:
        return False
    # Each join leads here: mostly the numbers are enough, without a walk through all nodes.
    stayed = len(current.entries) - len(current.left)
    return stayed > len(state.waiting) or bool(returning(state))


def _deadline(state: JobState, now: float) -> float:
    since = now if state.gathering_since is None else state.gathering_since
    return since + state.rules.join_limit


def _due(state: JobState, present: int, now: float) -> tuple[float, str]:
    """Return when a round with enough nodes starts, and the reason for that time."""
    rules = state.rules
    deadline = _deadline(state, now)
    match rules.wait_for:
        case "min":
            return -math.inf, f"{present} nodes have joined, {rules.min_nodes} are enough"
        case "max":
            return deadline, f"{present} of {rules.max_nodes} nodes joined in {rules.join_limit:g} s"
    why = f"{present} nodes have joined, and no other one for {now - state.last_join:.3g} s"
    return min(state.last_join + rules.last_call, deadline), why


def _give_up(state: JobState, present: Set[str], how: str, note: str) -> Outcome:
    """End the job: too few nodes are *present*."""
    current, rules = state.round, state.rules
    why = f"{len(present)} of at least {rules.min_nodes} nodes {how} ({named(present)})"
    missing = set() if current is None else current.entries.keys() - present
    if current is not None and missing:
        why += f"; missing of round {current.number}: {named(missing, _gone(current))}"
    if without_ranks := refused(state):
        why += f"; no more ranks for {without_ranks}"
    return finish(state, Final(False, why + note, kind="timeout"))


def _gone(current: Round) -> Mapping[str, str]:
    reasons = {}
    for node, why in current.left.items():
        how = "lost" if node in current.lost else "left"
        reasons[node] = f"{how}: {why}"
    return reasons
