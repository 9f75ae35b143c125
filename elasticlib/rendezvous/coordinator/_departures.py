"""
Nodes that leave the job: on their own request, refused, or silent for too long. Pure.

Rules of this file: a node that is gone gets no ranks, and a round that runs with it ends, unless
the node had succeeded in it. A node that leaves may still be stopping its workers; a lost node has
stopped them already.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from attrs import evolve

from elasticlib.rendezvous.coordinator import _node_liveness, _places, _replacements, _round_end
from elasticlib.rendezvous.coordinator._state import Action, Entry, JobState, Outcome, Round, Send, entry_of
from elasticlib.rendezvous.protocol._messages import Final, GivenUp, Leave

SILENT = "no heartbeat for {:g} s"
"""Reason for the loss of a node that sends no heartbeats."""


# Nodes that leave, or are refused.


def leave(state: JobState, report: Leave, now: float) -> Outcome:
    """Remove a node that leaves; the last one that does ends the job."""
    node = report.node
    entry = _entry_that_leaves(state, node)
    by_itself = not report.lost
    if entry is not None and by_itself and _disturbs(state.round, node):
        state = _places.left(state, entry, report.why, now)
    may_still_run = _is_in_its_round(state.round, report)
    state, actions = _remove(state, node, report.why, may_still_run=may_still_run, by_itself=by_itself)
    if entry is None:
        # It was out already, and waits for no answer.
        return state, actions

    final = Final(False, f"node {node} left: {report.why}", kind="left")
    goodbye = Send(entry.mailbox, node, final)
    if by_itself and _is_deserted(state, node):
        # The round's end has no receiver left.
        state, actions = _round_end.finish(state, final)

    return state, (goodbye, *actions)


def _entry_that_leaves(state: JobState, node: str) -> Entry | None:
    """Return the known entry of *node*; None if it is unknown or had left on its own request."""
    if node in state.waiting:
        return state.waiting[node]
    if state.round is None:
        return None

    current = state.round

    # A lost node may still report that it leaves.
    had_left = node in current.left and node not in current.lost
    if had_left:
        return None

    return current.entries.get(node)


def _is_in_its_round(current: Round | None, report: Leave) -> bool:
    """Return whether the node leaves the present round with workers that it has yet to stop."""
    # A node that names an older round has stopped the workers of that round, and has none of this
    # one.
    return current is not None and report.node in current.entries and report.round == current.number


def _disturbs(current: Round | None, node: str) -> bool:
    """Return whether other nodes lose time because this node leaves on its own request."""
    if current is None:
        return True
    # It costs nothing beside work that is almost done, nor if the node was lost already.
    if current.succeeded or node in current.lost:
        return False
    is_gathering = current.end is not None
    return is_gathering or node in current.entries


def _is_deserted(state: JobState, leaver: str) -> bool:
    """Return whether the job ends because *leaver* was the last node."""
    current = state.round
    if state.waiting:
        return False
    if current is None:
        return True

    is_anyone_left = len(current.left) != len(current.entries)
    if is_anyone_left:
        return False
    if current.end is not None:
        # A round that ends without a restart ends the job with its own reason.
        return current.end.restart

    # A running round needs neither spares nor members that have succeeded.
    return leaver in current.entries and leaver not in current.succeeded


def refuse(state: JobState, entry: Entry, why: str) -> Outcome:
    """Remove a node that may not take part in the job."""
    state, actions = _remove(state, entry.node, why)
    final = Final(False, why, kind="refused")
    return state, (Send(entry.mailbox, entry.node, final), *actions)


def _remove(state: JobState, node: str, why: str, *, may_still_run: bool = False, by_itself: bool = True) -> Outcome:
    if node in state.waiting:
        state = _without_waiting(state, (node,))
    current = state.round
    if current is None or node not in current.entries:
        return state, ()
    return _remove_member(state, current, node, why, may_still_run=may_still_run, by_itself=by_itself)


def _remove_member(
    state: JobState, current: Round, node: str, why: str, *, may_still_run: bool, by_itself: bool
) -> Outcome:
    is_unreported = not may_still_run and current.may_run_on(node)
    if is_unreported:
        # No node will report that its workers have stopped.
        current = evolve(current, stopped=current.stopped | {node})

    was_known = node in current.left
    if not was_known:
        current = _note_gone(current, {node: why}, are_lost=not by_itself)
    state = evolve(state, round=current)
    if was_known or node in current.succeeded:
        # The round ended before, or does not need this node any more.
        return state, ()
    if current.end is not None:
        return state, ()
    if by_itself:
        return _round_end.end_round(state, current, f"node {node} left: {why}", restart=True)

    return _end_for_losses(state, current, {node: why})


def _without_waiting(state: JobState, nodes: Iterable[str]) -> JobState:
    waiting = dict(state.waiting)
    for node in nodes:
        # A node with ranks does not wait.
        waiting.pop(node, None)
    return evolve(state, waiting=waiting)


def _note_gone(current: Round, gone: Mapping[str, str], *, are_lost: bool) -> Round:
    """Return the round without the nodes that are *gone*, each with the reason."""
    lost = current.lost.union(gone) if are_lost else current.lost
    return evolve(current, left={**current.left, **gone}, lost=lost)


def _end_for_losses(state: JobState, current: Round, lost: Mapping[str, str]) -> Outcome:
    state, end = _round_end.lose(state, current, lost)
    return _round_end.stop_workers(state, current, end)


# Nodes that are silent.


def note_heartbeats(state: JobState, counts: Mapping[str, int], now: float) -> Outcome:
    """
    Note the heartbeats that were read, and remove the nodes that have been silent for too long.
    """
    if state.final is not None or not state.rules.heartbeat:
        return state, ()
    before, notices = _give_up_those_heard_again(state, counts)
    state, silent = _node_liveness.look(before, counts, now)
    state, refusals = _refuse_replacements(before, state, now)
    state, actions = _lose(state, silent)
    return state, notices + refusals + actions


def _refuse_replacements(before: JobState, state: JobState, now: float) -> Outcome:
    actions: tuple[Action, ...] = ()
    for node, why in _replacements.rejected(before, state, now).items():
        state, more = refuse(state, state.waiting[node], why)
        actions += more
    return state, actions


def _give_up_those_heard_again(state: JobState, counts: Mapping[str, int]) -> Outcome:
    """Send `GivenUp` to nodes that were given up but send heartbeats again."""
    state, back = _node_liveness.heard_again(state, counts)
    notice = GivenUp(_silence(state))
    return state, tuple(Send(mailbox, node, notice) for node, mailbox in back)


def _lose(state: JobState, silent: Iterable[str]) -> Outcome:
    """Remove the *silent* nodes, and end the round if it needs one of them."""
    silent = [node for node in silent if _must_live(state, node)]
    if not silent:
        return state, ()

    why = _silence(state)
    entries = [entry_of(state, node) for node in silent]
    notices = _send_given_up(filter(None, entries), why)
    state = _without_waiting(_node_liveness.give_up(state, silent), silent)
    current = state.round
    if current is None:
        return state, notices

    state, actions = _lose_members(state, current, [node for node in silent if node in current.entries])
    return state, notices + actions


def _must_live(state: JobState, node: str) -> bool:
    """
    Return whether the job needs the node; a running round does not need a node that succeeded.
    """
    current = state.round
    if current is None or node in state.waiting:
        return True
    restarts = current.end is not None and current.end.restart
    if restarts:
        # The next round waits for it.
        return True
    return node not in current.succeeded


def _lose_members(state: JobState, current: Round, silent: Iterable[str]) -> Outcome:
    why = _silence(state)
    gone = {node: why for node in silent if node not in current.left}

    # A node without contact stops its workers before it is lost.
    current = evolve(current, stopped=current.stopped.union(silent) - current.succeeded)
    current = _note_gone(current, gone, are_lost=True)
    state = evolve(state, round=current)

    # A node that has succeeded ends no round.
    missed = {node: why for node in gone if node not in current.succeeded}
    if not missed or current.end is not None:
        return state, ()

    return _end_for_losses(state, current, missed)


def _send_given_up(entries: Iterable[Entry], why: str) -> tuple[Action, ...]:
    """
    Return a `GivenUp` notice for each entry, to be sent at once.

    The nodes may be alive while another process destroys their heartbeats; a later notice might
    never be triggered.
    """
    return tuple(Send(entry.mailbox, entry.node, GivenUp(why)) for entry in entries)


def _silence(state: JobState) -> str:
    return SILENT.format(state.rules.heartbeat)
