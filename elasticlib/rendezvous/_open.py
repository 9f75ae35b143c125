"""
Opens a launch's place in its job: alone in this program, or among other nodes.

Rules of this file: wiring only. `Rendezvous.close` closes all that is opened here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from attrs import frozen
from typing_extensions import Self

from elasticlib.errors import SignalException
from elasticlib.rendezvous._membership import Membership, Requests
from elasticlib.rendezvous._names import host_name
from elasticlib.rendezvous._node_job import NodeJob
from elasticlib.rendezvous.sidecar._sidecar_client import SidecarClient

if TYPE_CHECKING:
    from elasticlib.rendezvous.coordinator._state import Rules
    from elasticlib.rendezvous.node._coordinator_host import CoordinatorHost


@frozen
class Rendezvous:
    """One launch's place in its job: communicate through `member`, `close` it at the end."""

    run_id: str
    backend: str
    """Name of the backend in reports."""
    member: Membership
    _host: CoordinatorHost | None = None

    @property
    def alone(self) -> bool:
        """True if no other node can join."""
        return self._host is not None

    @property
    def descriptors(self) -> Mapping[str, int]:
        """Descriptors that each worker must hold, by name: with the last of them, the end of this node shows."""
        return self.member.descriptors if isinstance(self.member, SidecarClient) else {}

    def close(self) -> None:
        """End all threads and processes and free all descriptors; may be called twice."""
        self.member.close()
        if self._host is not None:
            self._host.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        # Who stops a launch waits for this node alone.
        is_stopped = isinstance(error, (SignalException, KeyboardInterrupt))
        if isinstance(self.member, SidecarClient):
            self.member.stays = not is_stopped
        self.close()


def open_local(
    run_id: str, rules: Rules, *, backend: str = "c10d", node: str | None = None, port: int = 0
) -> Rendezvous:
    """
    Return a rendezvous of this program with itself: coordinator and member in threads.

    The only socket is that of the workers' store, on loopback and *port* (0: any).
    """
    # Only here: a job of many nodes has these in its sidecar, and its launcher starts sooner without them.
    from elasticlib.rendezvous.net._node_info import BoundNodeInfo
    from elasticlib.rendezvous.node._client import NodeClient
    from elasticlib.rendezvous.node._coordinator_host import CoordinatorHost
    from elasticlib.rendezvous.stores._memory_exchange import MemoryExchange

    exchange = MemoryExchange()
    name = node or host_name()
    host = CoordinatorHost(exchange, rules, run_id=run_id, name=name)
    host.start()
    member = NodeClient(lambda timeout: exchange.clone(), name, BoundNodeInfo(port=port), run_id=run_id)
    try:
        return Rendezvous(run_id, backend, member.start(), host)
    except BaseException:
        host.abandon("its member cannot be started")
        raise


def open_remote(job: NodeJob, requests: Requests | None = None) -> Rendezvous:
    """
    Return a place in *job* among other nodes, kept by a separate process.

    One of the *requests* ends the wait of `Rendezvous.close` for other jobs that use this one's
    store.
    """
    member = SidecarClient(job)
    member.requests = requests
    return Rendezvous(job.run_id, job.backend, member)
