"""
One node's whole share in a job's rendezvous: its member, and the parts of the job on this node.

Rules of this file: wiring only. Which node coordinates the job is the matter of
`_coordinator_role`.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from typing import Any

from elasticlib._clock import Clock, monotonic
from elasticlib._untrusted import LONGEST_TIME
from elasticlib.errors import RendezvousError
from elasticlib.rendezvous._membership import PATIENCE, STAYS
from elasticlib.rendezvous._node_job import NodeJob
from elasticlib.rendezvous.net._binding import loopback
from elasticlib.rendezvous.net._node_info import BoundNodeInfo, FixedNodeInfo
from elasticlib.rendezvous.net._presence import connected, wait_for_end
from elasticlib.rendezvous.node._client import NodeClient
from elasticlib.rendezvous.node._coordinator_role import CoordinatorRole, LeaderRole, StoreRole
from elasticlib.rendezvous.node._session_liveness import Limits
from elasticlib.rendezvous.node._staying import must_stay
from elasticlib.rendezvous.protocol._codec import key_of
from elasticlib.rendezvous.protocol._messages import Leave
from elasticlib.rendezvous.stores._kept_document import KeptDocument

_log = logging.getLogger("elasticlib")

_MOST_MESSAGES = 1_000_000_000
"""Messages of one node through one sidecar."""


def backend_of(job: NodeJob) -> Any:
    """
    Return the backend of *job*; nothing is contacted. Raises `ConfigError` for a job that cannot
    work.
    """
    if job.backend.startswith("etcd"):
        from elasticlib.rendezvous.stores.etcd._backend import EtcdBackend

        return EtcdBackend(job)
    from elasticlib.rendezvous.stores._c10d import C10dBackend

    return C10dBackend(job)


class NodeRuntime:
    """
    The node's share of *job*: `member` communicates for it from `start` on. `close` it when done.

    Raises `ConfigError` for a job that cannot work; nothing is connected before `start`.
    """

    member: NodeClient

    def __init__(
        self,
        job: NodeJob,
        clock: Clock = monotonic,
        backend: Any = None,
        *,
        document: KeptDocument | None = None,
        endpoint: socket.socket | None = None,
    ) -> None:
        """
        *backend* carries the job, such that any node may coordinate it; None: the backend that the
        job names.

        If this node hosts the store, its coordinator continues with the *document*. *endpoint* is
        the listening socket of the store that was here before.
        """
        self.job = job
        self._clock = clock
        self._witnessed = False
        """True if the other nodes know why this node leaves."""
        self._backend = backend_of(job) if backend is None else backend
        has_election = backend is not None or job.backend.startswith("etcd")
        self._role: CoordinatorRole
        if has_election:
            self._role = LeaderRole(job, self._backend, clock)
        else:
            self._role = StoreRole(job, self._backend, clock, document)

        if endpoint is not None:
            self._backend.listening = endpoint

    def prepare(self) -> None:
        """Import slow modules, in this thread and without a time limit; nothing is contacted."""
        self._role.prepare()

    def start(self) -> None:
        """Start to look for the job."""
        job = self.job
        self.member = NodeClient(
            self._role.dial,
            job.node,
            self._offer(),
            run_id=job.run_id,
            terms=job.terms,
            key=key_of(job.token) if job.token else None,
            limits=Limits(job.rules.join_limit, job.reconnect_timeout, 0.0, has_election=self._role.has_election),
            clock=self._clock,
            on_leave=self._left,
            where=f"{job.backend} at {job.endpoint}",
            after=job.after,
            sent=job.sidecars * _MOST_MESSAGES,
        )
        self._role.begin(self.member)

        # Only now: its threads call the role, which communicates through it.
        self.member.start()

    @property
    def hosts_store(self) -> bool:
        """True if the job ends with this node."""
        return self._role.hosts_store

    @property
    def endpoint(self) -> socket.socket | None:
        """
        The listening socket of the job's store, if it is here and its coordinator has a document.
        """
        return self._role.endpoint

    def witness(self, why: str, workers_gone: bool) -> None:
        """Send a `Leave` in place of the dead agent."""
        self._witnessed = True
        with contextlib.suppress(RendezvousError):
            self.member.post(Leave(self.job.node, why, None if workers_gone else self.member.round, lost=True))

    def close(self, linger: float) -> None:
        """
        Leave the job if that was not done, wait *linger* s for others to read the end, free all
        resources.

        It returns at most five seconds later than that: a thread that hangs in the store is left
        behind.
        """
        if not self._role.begin_close():
            return

        # Sent once: by a second message without workers, others could take the ranks of running
        # workers.
        if not self.member.is_over() and not self._witnessed:
            with contextlib.suppress(RendezvousError):
                self.member.post(Leave(self.job.node, "its agent ended without leaving the job", lost=True))

        self.member.close()
        self._role.close(linger)
        if not self._witnessed:
            # A launcher that has died, or left, waits for no other job.
            self._role.stay()

        self._backend.close()

    def stay(self, limit: float, *, until_end: bool) -> None:
        """
        Stay until the host of the job's store has left, if the engine would end the others else; call
        it after `close`.

        That takes *limit* s at most, unless this node must stay *until_end*.
        """
        job = self.job
        if not must_stay(job, self.member.final, hosts_store=self.hosts_store):
            return
        connection = connected(self._backend.host, int(self._backend.port))
        # The host has left already, or cannot be reached.
        if connection is None:
            return

        if until_end:
            text = (
                f"node {job.node} has ended, and stays until job {job.run_id!r} ends: its engine may end the other "
                "nodes soon after the first one; SIGTERM or Ctrl-C ends the wait"
            )
            _log.warning("%s", text, extra={STAYS: LONGEST_TIME, PATIENCE: limit})
        with connection:
            wait_for_end(connection, None if until_end else limit)

    def _offer(self) -> BoundNodeInfo | FixedNodeInfo:
        job = self.job
        if job.backend == "static":
            host, port = self._backend.host, self._backend.port
            is_first = job.node_rank == 0
            said = job.work, job.command, job.is_scheduled
            presence = job.presence_port, self._address
            return FixedNodeInfo(host, lambda: int(port), job.node_rank, lambda: is_first, *said, *presence)
        return BoundNodeInfo(
            self._address,
            index=job.node_rank,
            hosts=lambda: self.hosts_store,
            work=job.work,
            command=job.command,
            presence_port=job.presence_port,
        )

    def _address(self) -> str:
        if self.job.local_addr:
            return self.job.local_addr
        # If all workers are on this node, no other node may reach their store.
        return loopback() if self.job.max_nodes == 1 else self._backend.address() or loopback()

    def _left(self, leave: Leave) -> bool:
        """Return whether the job must end because this node leaves; end it then."""
        self._witnessed = True
        return self._role.abandon(leave)
