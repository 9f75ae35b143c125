"""
What a launcher keeps of a sidecar that hosts the job's store, so that another one can go on in its place.

The listening socket of the endpoint stays open: nodes that look for the store wait, and are not refused. The document
says who is in the job, and in which round.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

from attrs import define
from typing_extensions import Self

from elasticlib.processes import closed_in_forks
from elasticlib.rendezvous._job import Job
from elasticlib.rendezvous.stores._kept_document import KeptDocument


@define(eq=False)
class Kept:
    """By default nothing: the job ends with the sidecar that hosts its store."""

    document: KeptDocument | None = None
    """What the coordinator in the sidecar writes down."""
    endpoint: socket.socket | None = None
    """The listening socket of the store, once a sidecar hosts it."""

    @classmethod
    def of(cls, job: Job) -> Self:
        """For *job*, before there is a sidecar. Its other nodes need heartbeats to notice what a new store forgot."""
        is_ours = not job.backend.startswith("etcd") and (job.max_nodes == 1 or job.heartbeat > 0)
        return cls(KeptDocument() if is_ours else None)

    @classmethod
    def received(cls, descriptors: Sequence[int]) -> Self:
        """In a sidecar, by the `descriptors` that its launcher sent."""
        if not descriptors:
            return cls()
        document, *endpoint = descriptors
        return cls(KeptDocument(document), socket.socket(fileno=endpoint[0]) if endpoint else None)

    def descriptors(self) -> tuple[int, ...]:
        """For a message to a sidecar."""
        return tuple(each.fileno() for each in (self.document, self.endpoint) if each is not None)

    def keep(self, descriptors: Sequence[int]) -> bool:
        """Keep the endpoint's socket that a sidecar sent; whether it sent one."""
        if descriptors:
            self.forget_endpoint()
            self.endpoint = closed_in_forks(socket.socket(fileno=descriptors[0]))
        return bool(descriptors)

    def forget_endpoint(self) -> None:
        """No sidecar of this node will be replaced any more: whoever looks for the store is refused."""
        if self.endpoint is not None:
            self.endpoint.close()
            self.endpoint = None

    def close(self) -> None:
        """Free all of it; may come twice."""
        self.forget_endpoint()
        if self.document is not None:
            self.document.close()
