"""
Nodes that run the same work with other arguments. Pure.

A sweep starts one script many times, and jobs with the same id and endpoint are one job. The second
launch would wait as a spare of the first, end successfully, and have trained nothing. Arguments may
also differ by node on purpose.

Rules of this file: a newcomer is compared with the first node of its role whose command is known.
An unknown command equals every other. Only a node that never had ranks is refused its success.
"""

from __future__ import annotations

from attrs import evolve

from elasticlib.rendezvous.coordinator._state import Action, Entry, JobState, Send, present
from elasticlib.rendezvous.protocol._messages import Caution, Final

_OWN_ID = "give each job its own id (--rdzv-id)"


def refusal(state: JobState, entry: Entry) -> str | None:
    """Return why the newcomer *entry* may not be a spare of this job; None if it may."""
    # With several nodes arguments may differ on purpose: a caution is enough.
    if state.rules.max_nodes > 1:
        return None
    first = _first(state, entry)
    if first is None or not _differ(first, entry):
        return None
    return f"{_difference(first, entry)}, and this job has one node: {_OWN_ID}"


def compared(state: JobState, entry: Entry, *, had_ranks: bool) -> tuple[Entry, tuple[Action, ...]]:
    """Return the newcomer's entry to remember, and the cautions for people on both nodes."""
    first = _first(state, entry)
    if first is None or not _differ(first, entry):
        return entry, ()

    caution = Caution(f"{_difference(first, entry)}: if these are two jobs, {_OWN_ID}")
    warned = [entry]

    # Where each node has other arguments, the first node gets one caution, not one for each.
    is_only = not any(_differ(first, each) for each in present(state) if _is_of_role(each, entry))
    if is_only:
        warned.insert(0, state.waiting.get(first.node, first))
    cautions = [Send(each.mailbox, each.node, caution) for each in warned]
    return evolve(entry, is_other=not had_ranks), tuple(cautions)


def final_for(entry: Entry, final: Final) -> Final:
    """
    Return the job's end for the node of *entry*: a node whose own command never ran did not
    succeed.
    """
    # It never had ranks, and its own arguments were not run by any other node.
    ran_nothing = entry.is_other
    if not final.succeeded or not ran_nothing:
        return final
    why = f"{final.why}, without node {entry.node}, which has other arguments and ran nothing: {_OWN_ID}"
    return Final(False, why, kind="refused")


def _first(state: JobState, entry: Entry) -> Entry | None:
    if not entry.descriptor.command:
        return None
    # Nodes with ranks come first: they are the job.
    for each in present(state):
        if each.descriptor.command and _is_of_role(each, entry):
            return each
    return None


def _is_of_role(each: Entry, entry: Entry) -> bool:
    return each.descriptor.role == entry.descriptor.role and each.node != entry.node


def _differ(one: Entry, other: Entry) -> bool:
    here, there = one.descriptor.command, other.descriptor.command
    return bool(here and there) and here != there


def _difference(first: Entry, entry: Entry) -> str:
    ours, its = first.descriptor.command, entry.descriptor.command
    return f"node {entry.node} runs `{its}`, but node {first.node} of this job runs `{ours}`"
