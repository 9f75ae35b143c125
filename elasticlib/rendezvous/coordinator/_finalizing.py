"""
When a round is finalized, and with whom. Pure.

Rules of this file: nobody gets ranks while a worker of an earlier round may run, nor whose heartbeats are missed: it
may be lost before its workers have started. Who is known to come back is waited for: without them the others would be
stopped again when they come. Once all who stayed are back, nothing is waited for but the least number of nodes. Spares
wait without limit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from attrs import evolve

from elasticlib.rendezvous.coordinator._ending import finish, losses_after
from elasticlib.rendezvous.coordinator._liveness import is_missed, last_count
from elasticlib.rendezvous.coordinator._places import next_free, pauses, ready, refused
from elasticlib.rendezvous.coordinator._ranks import assign, order
from elasticlib.rendezvous.coordinator._replacements import without_replacements
from elasticlib.rendezvous.coordinator._state import (
    Action,
    ClearStore,
    Entry,
    Outcome,
    Round,
    Send,
    State,
    WakeAt,
    named,
)
from elasticlib.rendezvous.protocol._messages import Final


def gather(state: State, now: float) -> Outcome:
    """Give ranks to those who wait, if it is time; else say when it will be."""
    rules, current = state.rules, state.round
    if current is not None and current.has_workers:
        return state, ()
    if state.gathering_since is None:
        state = evolve(state, gathering_since=now)
    if now < state.opens_at:
        return state, (WakeAt(state.opens_at),)
    deadline = _deadline(state, now)
    there = without_replacements(state, ready(state, now))
    if len(there) < rules.min_nodes and now >= deadline:
        there = without_replacements(state, state.waiting)
    present = len(there)
    if present < rules.min_nodes:
        replaces = rules.join_timeout != 0 or current is None
        if not replaces and len(state.waiting) + len(coming(state)) < rules.min_nodes:
            return _give_up(state, "are left", "; with join_timeout=0 no node is replaced")
        if now < deadline:
            return state, (_wake(state, deadline, now),)
        return _give_up(state, f"joined in {rules.join_limit:g} s", "")
    if _is_anyone_coming(state):
        if now < deadline:
            return state, (WakeAt(deadline),)
        absent = named(coming(state))
        return finalize(state, f"{present} nodes are there; {absent} did not return in {rules.join_limit:g} s", there)
    if present >= rules.max_nodes:
        return finalize(state, f"all {rules.max_nodes} nodes are there", there)
    if current is not None and len(current.left) < len(current.entries):
        why = f"all nodes that stayed after round {current.number} are back, {present} are there"
        return finalize(state, why, there)
    due, why = _due(state, present, deadline, now)
    return (state, (_wake(state, due, now),)) if now < due else finalize(state, why, there)


def _wake(state: State, due: float, now: float) -> WakeAt:
    """At *due*, or when a node that pauses is there."""
    free = next_free(state, now)
    return WakeAt(due if free is None else min(due, free))


def finalize(state: State, why: str, there: Mapping[str, Entry]) -> Outcome:
    """Give ranks to those who are *there* and heard: first to those who had some, then as they came."""
    rules, current = state.rules, state.round
    heard = {node: entry for node, entry in there.items() if not is_missed(state, entry)}
    if len(heard) < min(len(there), rules.max_nodes):
        return state, ()  # those who are missed are heard in a moment, or lost: a machine may stand still
    last = () if current is None else tuple(current.entries)
    stayed = frozenset() if current is None else current.entries.keys() - current.left.keys()
    by_claim = sorted(heard, key=lambda node: node not in stayed)  # stable
    chosen = {node: state.waiting[node].descriptor for node in by_claim[: rules.max_nodes]}
    nodes = order(chosen, last)
    number = current.number + 1 if current is not None else 0
    assignments = assign([chosen[node] for node in nodes], number, state.restarts, rules.max_restarts, why)
    entries = {node: _chosen(state.waiting[node]) for node in nodes}
    heard_last = (last_count(state, entry) for entry in entries.values())
    cause = ""
    if current is not None and current.end is not None and (current.causes or current.rejoined):
        cause = current.end.why
    assignments = tuple(
        evolve(each, heard=last, cause=cause) for each, last in zip(assignments, heard_last, strict=True)
    )
    rest = {node: entry for node, entry in state.waiting.items() if node not in entries}
    losses = state.losses if current is None else losses_after(state.losses, current)
    state = evolve(state, waiting=rest, losses=losses, gathering_since=None)
    state = evolve(state, round=Round(number, entries, assignments), pausing=state.pausing & rest.keys())
    first: tuple[Action, ...] = (ClearStore(),) if rules.shared_store and number > 0 else ()
    sends = zip(entries.values(), assignments, strict=True)
    return state, first + tuple(Send(entry.mailbox, entry.node, assignment) for entry, assignment in sends)


def _chosen(entry: Entry) -> Entry:
    is_plain = not (entry.free_at or entry.is_other or entry.is_replacement)
    return entry if is_plain else evolve(entry, free_at=0.0, is_other=False, is_replacement=False)


def status(state: State, now: float) -> str:
    """For whom the job waits and for how long, or what spares wait for; empty when nobody waits."""
    rules, current, present = state.rules, state.round, len(state.waiting)
    if state.final is not None or (current is not None and current.end is None and not present):
        return ""
    pausing = pauses(state, now)
    if current is not None and current.end is None:
        return pausing or _why_no_ranks(current, rules.max_nodes)
    if current is not None and current.has_workers:
        running = current.entries.keys() - current.stopped - current.succeeded
        return f"round {current.number} has ended; its workers still stop on {named(running)}"
    if current is not None and current.end is not None and not current.end.restart:
        return ""
    deadline = _deadline(state, now)
    there = f"nodes are there ({named(state.waiting)})" + (f"; {pausing}" if pausing else "")
    if present < rules.min_nodes:
        return f"{present} of at least {rules.min_nodes} {there}; {max(0.0, deadline - now):.0f} s left"
    if _is_anyone_coming(state):
        return f"{present} {there}; {named(coming(state))} will come back; {max(0.0, deadline - now):.0f} s left"
    left = max(0.0, _due(state, present, deadline, now)[0] - now)
    return f"{present} of at most {rules.max_nodes} {there}; they start in {left:.0f} s if no other node joins"


def _why_no_ranks(current: Round, most: int) -> str:
    if len(current.entries) < most:
        why = f"round {current.number} is about to succeed on {named(current.entries)}"
        return f"{why}; this node takes part in the next one, if there is one"
    why = f"round {current.number} runs with all {most} nodes that it may have ({named(current.entries)})"
    return f"{why}; this node is a spare: it takes the place of one that leaves"


def coming(state: State) -> frozenset[str]:
    """Nodes of the last round that are alive and have not asked for ranks yet."""
    current = state.round
    if current is None:
        return frozenset()
    return frozenset(node for node in current.entries if node not in current.left and node not in state.waiting)


def _is_anyone_coming(state: State) -> bool:
    current = state.round
    # Mostly the numbers tell: this is asked at each join, and must not cost a walk through all nodes then.
    many = current is not None and len(current.entries) - len(current.left) > len(state.waiting)
    return many or bool(coming(state))


def _deadline(state: State, now: float) -> float:
    return (now if state.gathering_since is None else state.gathering_since) + state.rules.join_limit


def _due(state: State, present: int, deadline: float, now: float) -> tuple[float, str]:
    """When enough nodes start without more of them, and why they do if that is now."""
    rules = state.rules
    match rules.wait_for:
        case "min":
            return -math.inf, f"{present} nodes are there, {rules.min_nodes} are enough"
        case "max":
            return deadline, f"{present} of {rules.max_nodes} nodes joined in {rules.join_limit:g} s"
    why = f"{present} nodes are there and no other joined for {now - state.last_join:.3g} s"
    return min(state.last_join + rules.last_call, deadline), why


def _give_up(state: State, how: str, note: str) -> Outcome:
    current, rules = state.round, state.rules
    why = f"{len(state.waiting)} of at least {rules.min_nodes} nodes {how} ({named(state.waiting)})"
    if current is not None:
        missing = current.entries.keys() - state.waiting.keys()
        if missing:
            why += f"; missing of round {current.number}: {named(missing, _gone(current))}"
    if without_ranks := refused(state):
        why += f"; no ranks are given any more to {without_ranks}"
    return finish(state, Final(False, why + note, kind="timeout"))


def _gone(current: Round) -> Mapping[str, str]:
    """The nodes that are gone, each with how and why, for people."""
    return {node: f"{'lost' if node in current.lost else 'left'}: {why}" for node, why in current.left.items()}
