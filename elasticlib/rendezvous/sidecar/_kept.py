"""
The parts of a sidecar that a launcher keeps if it hosts the job's store, so that another one can
continue.

The listening socket of the endpoint stays open: nodes that look for the store wait, and are not
refused. The document names the nodes of the job, and its round. The presence socket shows that
processes of this node are left.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence

from attrs import define
from typing_extensions import Self

from elasticlib.processes import closed_in_forks
from elasticlib.rendezvous._node_job import NodeJob
from elasticlib.rendezvous.net._presence import presence_socket
from elasticlib.rendezvous.stores._kept_document import KeptDocument


@define(eq=False)
class Kept:
    """The kept parts; by default none: the job ends with the sidecar that hosts its store."""

    document: KeptDocument | None = None
    """The coordinator's document in the sidecar."""
    endpoint: socket.socket | None = None
    """The listening socket of the store, once a sidecar hosts it."""
    presence: socket.socket | None = None
    """See `net._presence`; forks of the launcher hold it, too."""

    @classmethod
    def of(cls, job: NodeJob) -> Self:
        """
        Return the kept parts for *job*, before there is a sidecar.

        Its other nodes need heartbeats to notice what a new store forgot.
        """
        kept = cls(presence=_presence_of(job))
        # Without heartbeats the others would continue, and never learn what their coordinator has
        # forgotten.
        is_noticed = job.max_nodes == 1 or job.heartbeat > 0
        # With etcd, any other node takes over.
        if is_noticed and not job.backend.startswith("etcd"):
            kept.document = KeptDocument()
        return kept

    @classmethod
    def received(cls, descriptors: Mapping[str, int]) -> Self:
        """Return the kept parts in a sidecar, from the `descriptors` that its launcher sent."""
        kept = cls()
        if "document" in descriptors:
            kept.document = KeptDocument(descriptors["document"])
        if "endpoint" in descriptors:
            kept.endpoint = socket.socket(fileno=descriptors["endpoint"])
        if "presence" in descriptors:
            kept.presence = socket.socket(fileno=descriptors["presence"])
        return kept

    def descriptors(self) -> dict[str, int]:
        """Return the descriptors of the parts by name, for a message to a sidecar."""
        parts = {"document": self.document, "endpoint": self.endpoint, "presence": self.presence}
        return {name: part.fileno() for name, part in parts.items() if part is not None}

    def presence_port(self) -> int:
        """Return the port of the presence socket; 0 if there is none."""
        return 0 if self.presence is None else int(self.presence.getsockname()[1])

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
        if self.presence is not None:
            self.presence.close()


def _presence_of(job: NodeJob) -> socket.socket | None:
    """Return a presence socket for this node of *job*, if there are others."""
    if job.max_nodes == 1:
        return None
    return presence_socket(job.local_addr, job.endpoint)
