"""
The rule for a node that has ended while others go on: it stays where its engine would end them. Pure.
"""

from __future__ import annotations

from elasticlib.rendezvous._node_job import NodeJob
from elasticlib.rendezvous.protocol._messages import Final

_OTHERS_GO_ON = frozenset({"closed", "refused", "left", "stopped"})
"""Kinds of an end that a node may read while workers of other nodes run or save."""


def must_stay(job: NodeJob, final: Final | None, *, hosts_store: bool) -> bool:
    """
    Return whether this node must stay until the host of the job's store has left.

    *final* is the end of the job for this node; None if it knows none. The host itself waits for
    the others before it leaves.
    """
    has_host = job.backend in ("c10d", "static") and job.store_type == "tcp"
    if not job.ends_together or not has_host or hosts_store:
        return False
    return final is None or (not final.succeeded and final.kind in _OTHERS_GO_ON)
