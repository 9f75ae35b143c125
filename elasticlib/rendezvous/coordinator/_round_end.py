"""
The end of a round, and of the job. Pure.

Rules of this file: nodes that left get no notices. A node that waits for ranks has stopped its
workers of the last round; it only gets the cause of that round's end, and the end of the job.
Failures use the job's restarts. Arrivals and leaves do not, and losses do when they repeat.
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import evolve

from elasticlib.rendezvous.coordinator._commands import final_for
from elasticlib.rendezvous.coordinator._rank_order import natural_key
from elasticlib.rendezvous.coordinator._state import MOST_NAMES, JobState, Outcome, Round, Send, host_of
from elasticlib.rendezvous.protocol._messages import Final, RoundEnd
from elasticlib.rendezvous.protocol._shortening import line

LOSSES_IN_A_ROW = 3
"""Rounds in a row that a host may be lost from, until that counts as a failure."""
REMEMBERED = 1024
"""Hosts whose losses are counted: the latest."""


def count_success(state: JobState, node: str, number: int) -> JobState:
    """Note that the workers of *node* succeeded in round *number*, if that is the present one."""
    current = state.round
    if current is None or current.number != number:
        return state
    if node not in current.entries:
        return state
    succeeded = current.succeeded | {node}
    stopped = current.stopped - {node}
    return evolve(state, round=evolve(current, succeeded=succeeded, stopped=stopped))


def end_round(state: JobState, current: Round, why: str, *, restart: bool) -> Outcome:
    """
    End the round with the reason *why*: send `RoundEnd` to its nodes, so that they stop their
    workers.
    """
    return stop_workers(state, current, RoundEnd(current.number, line(why), restart))


def stop_workers(state: JobState, current: Round, end: RoundEnd) -> Outcome:
    """End the round with *end*: send it to each node that may still have workers."""
    # A node that waits for ranks has stopped its workers already.
    audience = [entry for entry in current.members() if entry.node not in state.waiting]
    actions = tuple(Send(entry.mailbox, entry.node, end) for entry in audience)
    return evolve(state, round=evolve(current, end=end)), actions


def spend(state: JobState, current: Round, why: str, *, fatal: bool = False) -> tuple[JobState, RoundEnd]:
    """
    Return the end of the round by a failure: it uses a restart, or ends the job if none is left.
    """
    restart = may_restart(state, fatal=fatal)
    if restart:
        state = evolve(state, restarts=state.restarts + 1)
        cost = f"restart {state.restarts} of {state.rules.max_restarts}"
    else:
        cost = _why_no_restart(state, fatal=fatal)
    return state, RoundEnd(current.number, line(f"{why}; {cost}"), restart, failed=True)


def may_restart(state: JobState, *, fatal: bool) -> bool:
    """Return whether the job restarts after a failure, which is *fatal* or not."""
    return not fatal and state.restarts < state.rules.max_restarts


def _why_no_restart(state: JobState, *, fatal: bool) -> str:
    if fatal:
        return "a restart would fail again"
    allowed = state.rules.max_restarts
    if not allowed:
        return "no restarts are allowed"
    return f"all {allowed} restarts are used"


def finish(state: JobState, final: Final) -> Outcome:
    """End the job: send *final* to every node that is still there."""
    final = evolve(final, why=line(final.why), lost_hosts=() if final.succeeded else _lost_hosts(state))
    audience = dict(state.waiting)
    if state.round is not None:
        for entry in state.round.members():
            # A waiting node reads in its newer mailbox.
            audience.setdefault(entry.node, entry)
    actions = tuple(Send(entry.mailbox, entry.node, final_for(entry, final)) for entry in audience.values())
    return evolve(state, final=final), actions


def _lost_hosts(state: JobState) -> tuple[str, ...]:
    lost = set(state.losses)
    if state.round is not None:
        lost.update(map(host_of, state.round.lost))
    return tuple(sorted(lost, key=natural_key)[:MOST_NAMES])


def lose(state: JobState, current: Round, lost: Mapping[str, str]) -> tuple[JobState, RoundEnd]:
    """Return the end of the round for lost nodes, given with the reasons."""
    what = _name_losses(lost)

    # After a success of a worker the job makes progress: such a loss begins no row.
    if current.succeeded:
        return state, RoundEnd(current.number, line(what), restart=True)

    hosts = [host_of(node) for node in lost]
    host = max(hosts, key=lambda each: state.losses.get(each, 0))
    times = state.losses.get(host, 0) + 1
    if times < LOSSES_IN_A_ROW:
        return state, RoundEnd(current.number, line(what), restart=True)

    crashing = f"host {host} was lost in {times} rounds in a row before any worker succeeded"
    return spend(state, current, f"{what}; {crashing}")


def _name_losses(lost: Mapping[str, str]) -> str:
    first = list(lost.items())[:MOST_NAMES]
    text = "; ".join(f"node {node} is lost: {why}" for node, why in first)
    if len(lost) > MOST_NAMES:
        text += f"; and {len(lost) - MOST_NAMES} more nodes are lost"
    return text


def losses_after(losses: Mapping[str, int], current: Round) -> Mapping[str, int]:
    """Return, for each host, its rounds in a row that lost it, including *current*."""
    if current.succeeded:
        return {}

    # The usual case, without a walk through all nodes.
    if not losses and not current.lost:
        return losses

    after = dict(losses)

    # A host that was in the round and was not lost begins a new row.
    for node in current.entries:
        after.pop(host_of(node), None)
    lost_hosts = {host_of(node) for node in current.lost}

    # Sorted, as the order of a set differs between processes, and only the latest hosts are kept.
    for host in sorted(lost_hosts):
        after[host] = losses.get(host, 0) + 1
    latest = list(after.items())[-REMEMBERED:]
    return dict(latest)


def send_end(state: JobState, node: str, mailbox: str) -> tuple[Send, ...]:
    """Send the end of the job, if it has ended, to a *node* that waits at *mailbox*."""
    final = state.final
    if final is None:
        return ()
    if not _took_part(state, node):
        final = Final(False, f"the job had ended: {final.why}", kind="closed")
    return (Send(mailbox, node, final),)


def _took_part(state: JobState, node: str) -> bool:
    """Return whether the job's end is also the outcome of *node*, which did not arrive too late."""
    current = state.round
    if node in state.waiting:
        return True
    if current is None:
        return False
    # A node may leave once it has succeeded: the job's end is its outcome all the same.
    is_member = node in current.entries and node not in current.left
    return is_member or node in current.succeeded
