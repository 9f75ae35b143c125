"""
The order of nodes, and their ranks. Pure.

Rules of this file: nodes with a fixed index come first, by it. The node that hosts the job's store
is next. Then come the nodes of the last round, in their old order, and newcomers in natural order
of their names. Ranks run without a gap in that order. Indexes count only where they differ: each
Job of a Kubernetes JobSet numbers its own pods from 0.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from elasticlib.rendezvous.protocol._messages import Descriptor, RankAssignment


def natural_key(name: str) -> tuple[Any, ...]:
    """Return a sort key for names in natural order: ``node2`` before ``node10``."""
    parts = re.split(r"([0-9]+)", name)
    digits = (part.lstrip("0") for part in parts[1::2])
    # Numbers are compared by length, then text: a name from the network may hold more digits than int() reads.
    numbers = [(len(number), number) for number in digits]
    return (parts[0], *(item for pair in zip(numbers, parts[2::2], strict=True) for item in pair), name)


def order(nodes: Mapping[str, Descriptor], last: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the nodes by group rank; *last* is the order of the round before."""
    places = {node: place for place, node in enumerate(last)}
    indexes = [its.index for its in nodes.values() if its.index is not None]
    are_distinct = len(set(indexes)) == len(indexes)

    def key(node: str) -> tuple[Any, ...]:
        index = nodes[node].index if are_distinct else None
        # False sorts before True, so the host of the store is next.
        fixed = (0, index) if index is not None else (1, not nodes[node].hosts)
        return (*fixed, places.get(node, len(places)), natural_key(node))

    return tuple(sorted(nodes, key=key))


def assign(
    descriptors: Sequence[Descriptor], round: int, restart_count: int, max_restarts: int, why: str
) -> tuple[RankAssignment, ...]:
    """Return the rank assignments of a round, for nodes given in the order of their group ranks."""
    world_size = sum(descriptor.slots for descriptor in descriptors)
    role_sizes: Counter[str] = Counter()
    for descriptor in descriptors:
        role_sizes[descriptor.role] += descriptor.slots
    assignments: list[RankAssignment] = []
    rank_base = 0
    role_bases: Counter[str] = Counter()
    for group_rank, descriptor in enumerate(descriptors):
        assignment = RankAssignment(
            round=round,
            group_rank=group_rank,
            group_world_size=len(descriptors),
            rank_base=rank_base,
            world_size=world_size,
            role_rank_base=role_bases[descriptor.role],
            role_world_size=role_sizes[descriptor.role],
            restart_count=restart_count,
            max_restarts=max_restarts,
            master_addresses=descriptors[0].addresses,
            master_port=descriptors[0].store_port,
            why=why,
        )
        assignments.append(assignment)
        rank_base += descriptor.slots
        role_bases[descriptor.role] += descriptor.slots

    return tuple(assignments)
