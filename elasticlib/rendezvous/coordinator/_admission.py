"""
Why a node that asks for ranks may not take part in the job. Pure.

Rules of this file: all nodes of a job have the same terms, and those of one role the same work.
Where each node has a place of its own, it must be in range, and no other node's.
"""

from __future__ import annotations

from elasticlib.rendezvous.coordinator import _replacements
from elasticlib.rendezvous.coordinator._state import Entry, State, present
from elasticlib.rendezvous.protocol import _messages as messages


def refusal(state: State, report: messages.Join, entry: Entry) -> str | None:
    """Why the node that *report* speaks of, remembered as *entry*, is refused; None where it is not."""
    return _of_terms(state, report) or _of_work(state, report) or _of_place(state, entry)


def _of_terms(state: State, report: messages.Join) -> str | None:
    node, asked, ours = report.node, report.terms, state.rules.terms
    if asked is None or asked == ours:
        return None
    difference = f"node {node} asks for {_terms(asked)}, but this job runs with {_terms(ours)}"
    return f"{difference}: give all nodes the same numbers, or each job an id of its own (--rdzv-id)"


def _terms(terms: messages.Terms) -> str:
    return f"{terms.min_nodes} to {terms.max_nodes} nodes and {terms.max_restarts} restarts"


def _of_work(state: State, report: messages.Join) -> str | None:
    role, work = report.descriptor.role, report.descriptor.work
    peer = _peer_with_work(state, role)
    if peer is None or not work:
        return None
    if peer.descriptor.work == work:
        return None
    return (
        f"node {report.node} runs {work!r}, but node {peer.node} of this job runs {peer.descriptor.work!r} in the same "
        f"role {role!r}: if these are two jobs, give each an id of its own (--rdzv-id)"
    )


def _peer_with_work(state: State, role: str) -> Entry | None:
    """Return a node of the *role* whose work is known: one for all, as each was compared when it came."""
    for entry in present(state):
        if entry.descriptor.role == role and entry.descriptor.work:
            return entry
    return None


def _of_place(state: State, entry: Entry) -> str | None:
    rules, node, index = state.rules, entry.node, entry.descriptor.index
    if not rules.fixed_places:
        return None
    places = f"0 to {rules.max_nodes - 1}"
    if index is None:
        return f"node {node} has no node rank, and each node of this job needs one: give --node-rank, from {places}"
    if index >= rules.max_nodes:
        return f"node rank {index} of node {node} is out of range: {rules.max_nodes} nodes have the ranks {places}"
    other = _replacements.holder(state, entry)
    if other is None or _replacements.may_replace(state, entry, other):
        return None
    return _replacements.refusal(entry, other)
