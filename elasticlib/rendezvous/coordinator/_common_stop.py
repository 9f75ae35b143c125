"""
The agreement of a round's nodes on the step at which their workers stop. Pure.

Rules of this file: the first request of a round counts. Every node that may still have workers is
asked for the calls that its workers have made, and the highest number is that of the common step:
no worker has passed it. A round that ends takes its agreement with it.
"""

from __future__ import annotations

from collections.abc import Iterator

from attrs import evolve

from elasticlib.rendezvous.coordinator._state import Agreement, Entry, JobState, Outcome, Round, Send
from elasticlib.rendezvous.protocol._messages import CallsCounted, StopAgreed, StopAsked, StopWanted


def ask(state: JobState, current: Round, wanted: StopWanted) -> Outcome:
    """Ask all nodes of the running round for the calls of their workers, because one of them must end."""
    if current.end is not None or current.stop is not None:
        return state, ()

    leaving = list(current.entries).index(wanted.node)
    place = current.assignments[leaving]
    asked = StopAsked(
        current.number, wanted.why, wanted.left, place.rank_base, current.entries[wanted.node].descriptor.slots
    )
    state = evolve(state, round=evolve(current, stop=Agreement()))
    return state, tuple(Send(entry.mailbox, entry.node, asked) for entry in _audience(current))


def count(state: JobState, current: Round, counted: CallsCounted) -> Outcome:
    """Note the calls of a node's workers."""
    stop = current.stop
    if stop is None or stop.call is not None:
        return state, ()
    stop = evolve(stop, calls={**stop.calls, counted.node: counted.calls})
    return evolve(state, round=evolve(current, stop=stop)), ()


def settle(state: JobState, current: Round) -> Outcome:
    """Send the common step once all nodes that may still have workers have reported their calls."""
    stop = current.stop
    if stop is None or stop.call is not None:
        return state, ()
    audience = list(_audience(current))
    if any(entry.node not in stop.calls for entry in audience):
        return state, ()

    call = max(stop.calls.values(), default=0)
    state = evolve(state, round=evolve(current, stop=evolve(stop, call=call)))
    agreed = StopAgreed(current.number, call)
    return state, tuple(Send(entry.mailbox, entry.node, agreed) for entry in audience)


def _audience(current: Round) -> Iterator[Entry]:
    """Yield the nodes whose workers may still run."""
    return (entry for entry in current.members() if current.may_run_on(entry.node))
