"""
The agreement of a round's nodes on the call of `should_stop` in which all workers return. Pure.

Rules of this file: the first request of a round counts. Every node that may still have workers
reports how many calls they have made. The coordinator proposes a later call, and confirms it once
all nodes have reported that no worker had passed it when they all knew it; else it proposes another
one. A round that ends takes its agreement with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from attrs import evolve

from elasticlib.rendezvous.coordinator._state import Entry, JobState, Outcome, Round, Send, StopAgreement
from elasticlib.rendezvous.protocol._messages import (
    CallsCounted,
    StopAgreed,
    StopAsked,
    StopProposed,
    StopWanted,
)

_WAY_WITHIN_NODE, _WAY = 0.05, 0.3
"""Seconds until all workers know a proposal, on one node and on several; each further try doubles the distance."""
_MOST_DOUBLINGS = 20


def ask(state: JobState, current: Round, wanted: StopWanted) -> Outcome:
    """Ask all nodes of the running round for the calls of their workers, because one of them must end."""
    # A round that ends stops its workers anyway.
    if current.end is not None or current.stop is not None:
        return state, ()

    leaving = list(current.entries).index(wanted.node)
    place = current.assignments[leaving]
    notice = StopAsked(
        current.number, wanted.why, wanted.left, place.rank_base, current.entries[wanted.node].descriptor.slots
    )
    state = evolve(state, round=evolve(current, stop=StopAgreement()))
    return state, tuple(Send(entry.mailbox, entry.node, notice) for entry in _audience(current))


def count(state: JobState, current: Round, counted: CallsCounted) -> Outcome:
    """Note the calls of a node's workers."""
    stop = current.stop
    # Calls that were counted before the node knew this proposal do not show that no worker passed
    # it.
    if stop is None or stop.is_agreed or counted.proposed != stop.proposed:
        return state, ()
    calls = {**stop.calls, counted.node: counted.calls}
    stop = evolve(stop, calls=calls, rate=max(stop.rate, counted.rate))
    return evolve(state, round=evolve(current, stop=stop)), ()


def settle(state: JobState, current: Round) -> Outcome:
    """Propose or confirm the call once all nodes that may still have workers have reported theirs."""
    stop = current.stop
    if stop is None or stop.is_agreed:
        return state, ()
    audience = list(_audience(current))
    if any(entry.node not in stop.calls for entry in audience):
        return state, ()

    highest = max(stop.calls.values(), default=0)
    is_ahead_of_all = highest < stop.proposed
    notice: StopAgreed | StopProposed = StopAgreed(current.number)
    if is_ahead_of_all:
        stop = evolve(stop, is_agreed=True)
    else:
        stop, notice = _propose(stop, current, highest)

    state = evolve(state, round=evolve(current, stop=stop))
    return state, tuple(Send(entry.mailbox, entry.node, notice) for entry in audience)


def _propose(stop: StopAgreement, current: Round, highest: int) -> tuple[StopAgreement, StopProposed]:
    """Return the agreement with a call that is so far ahead that all nodes know it before a worker makes it."""
    # Workers go on while the proposal travels: a call that one of them has made by then is of no
    # use.
    way = _WAY if len(current.entries) > 1 else _WAY_WITHIN_NODE
    ahead = math.ceil(stop.rate * way) << min(stop.tries, _MOST_DOUBLINGS)
    call = highest + 1 + ahead
    return StopAgreement(proposed=call, rate=stop.rate, tries=stop.tries + 1), StopProposed(current.number, call)


def _audience(current: Round) -> Iterator[Entry]:
    """Yield the nodes whose workers may still run."""
    return (entry for entry in current.members() if current.may_run_on(entry.node))
