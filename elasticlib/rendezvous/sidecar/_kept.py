"""
The parts of a sidecar that a launcher keeps if it hosts the job's store, so that another one can
continue.

The listening socket of the endpoint stays open: nodes that look for the store wait, and are not
refused. The document names the nodes of the job, and its round.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

from attrs import define
from typing_extensions import Self

from elasticlib.processes import closed_in_forks
from elasticlib.rendezvous._node_job import NodeJob
from elasticlib.rendezvous.stores._kept_document import KeptDocument


@define(eq=False)
class Kept:
    """The kept parts; by default none: the job ends with the sidecar that hosts its store."""

    document: KeptDocument | None = None
    """The coordinator's document in the sidecar."""
    endpoint: socket.socket | None = None
    """The listening socket of the store, once a sidecar hosts it."""

    @classmethod
    def of(cls, job: NodeJob) -> Self:
        """
        Return the kept parts for *job*, before there is a sidecar.

        Its other nodes need heartbeats to notice what a new store forgot.
        """
        if job.backend.startswith("etcd"):
            # Any other node takes over: nothing needs to be kept.
            return cls()
        # Without heartbeats the others would continue, and never learn what their coordinator has
        # forgotten.
        is_noticed = job.max_nodes == 1 or job.heartbeat > 0
        if not is_noticed:
            return cls()
        return cls(KeptDocument())

    @classmethod
    def received(cls, descriptors: Sequence[int]) -> Self:
        """Return the kept parts in a sidecar, from the `descriptors` that its launcher sent."""
        if not descriptors:
            return cls()
        document, *rest = descriptors
        endpoint = socket.socket(fileno=rest[0]) if rest else None
        return cls(KeptDocument(document), endpoint)

    def descriptors(self) -> tuple[int, ...]:
        """Return the descriptors for a message to a sidecar."""
        given = [each.fileno() for each in (self.document, self.endpoint) if each is not None]
        return tuple(given)

    def keep(self, descriptors: Sequence[int]) -> bool:
        """Keep the endpoint's socket that a sidecar sent; return whether it sent one."""
        if not descriptors:
            return False
        self.forget_endpoint()
        # A worker that is forked from the launcher must not keep the port of the job's store.
        self.endpoint = closed_in_forks(socket.socket(fileno=descriptors[0]))
        return True

    def forget_endpoint(self) -> None:
        """
        Close the listening socket, so that other nodes are refused; no sidecar of this node will be
        replaced any more.
        """
        if self.endpoint is not None:
            self.endpoint.close()
            self.endpoint = None

    def close(self) -> None:
        """Close all of it; may be called twice."""
        self.forget_endpoint()
        if self.document is not None:
            self.document.close()
