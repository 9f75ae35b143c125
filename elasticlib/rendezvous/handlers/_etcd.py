"""
The rendezvous on etcd by the names of torch's first one: our own protocol behind the same classes.

Rules of this file: no wire protocol is shared with torch's, whose nodes agree by rewriting keys; here one node
coordinates, and another one takes over when it goes. What a program sees of it is the same: who calls meets, in
rounds, below the same prefix.

(torch: ``torch.distributed.elastic.rendezvous.etcd_rendezvous``)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve

from elasticlib.errors import ConfigError, RendezvousError
from elasticlib.rendezvous._job import Job
from elasticlib.rendezvous._names import node_name
from elasticlib.rendezvous.handlers._base import RendezvousParameters
from elasticlib.rendezvous.handlers._coordinated import CoordinatedHandler
from elasticlib.rendezvous.handlers._registry import create_handler
from elasticlib.rendezvous.net._endpoint import spell
from elasticlib.rendezvous.stores._keys import component
from elasticlib.rendezvous.stores.etcd._backend import EtcdBackend
from elasticlib.rendezvous.stores.etcd._v2 import V2Keys
from elasticlib.rendezvous.stores.etcd._v3 import V3Keys

if TYPE_CHECKING:
    from elasticlib.rendezvous.handlers._etcd_store import EtcdStore

_CONNECT = 60.0


class EtcdRendezvousRetryableFailure(RendezvousError):  # noqa: N818 - torch's name
    """Never raised here: with torch, a collision of nodes after which the rendezvous is tried again."""


class EtcdRendezvousRetryImmediately(RendezvousError):  # noqa: N818 - torch's name
    """Never raised here: the same, without a pause."""


class EtcdRendezvousHandler(CoordinatedHandler):
    """
    One node of the job of *rdzv_impl*, which peers reach at *local_addr*.

    Differs from torch's as `CoordinatedHandler` says; a round's store is a TCPStore of its node of rank 0, which the
    workers may share, in place of etcd itself.
    """

    def __init__(self, rdzv_impl: EtcdRendezvous, local_addr: str | None) -> None:
        super().__init__(evolve(rdzv_impl.job, node=node_name(local_addr), local_addr=local_addr))

    @property
    def version(self) -> int:
        """The number of the last round; 0 before the first."""
        assignment = self._assignment
        return 0 if assignment is None else assignment.round + 1


class EtcdRendezvous:
    """
    What a job on etcd goes by, and one place in it by `rendezvous_barrier`.

    *client* is ``host:port`` of the servers, with commas between several, or our own client, such as that of
    `EtcdServer.get_client`; torch's takes one of python-etcd, which nobody keeps up. *timeout* and
    *last_call_timeout* are seconds. For TLS use `create_rdzv_handler`. Nothing is contacted before the first call
    that needs it. Raises `ConfigError` (a ``ValueError``) for values that cannot work.
    """

    job: Job
    _place: EtcdRendezvousHandler | None = None

    def __init__(
        self,
        client: str | V2Keys | V3Keys,
        prefix: str,
        run_id: str,
        num_min_workers: int,
        num_max_workers: int,
        timeout: float,
        last_call_timeout: float,
    ) -> None:
        params = RendezvousParameters(
            "etcd",
            _endpoint(client),
            run_id,
            num_min_workers,
            num_max_workers,
            etcd_prefix=prefix or "/",
            timeout=timeout,
            last_call_timeout=last_call_timeout,
        )
        self.job = create_handler(params).job

    @classmethod
    def of(cls, params: RendezvousParameters) -> EtcdRendezvous:
        """That of *params*, with all the options of back end ``etcd``."""
        made = cls.__new__(cls)
        made.job = create_handler(params).job
        return made

    def rendezvous_barrier(self) -> tuple[int, int, int]:
        """
        Wait for the next round; its number, this node's rank in it and its size.

        Raises `RendezvousTimeoutError` when too few nodes came, `RendezvousClosedError` when the job is over.
        """
        handler = self._handler()
        info = handler.next_rendezvous()
        return handler.version, info.rank, info.world_size

    def set_closed(self) -> None:
        """End the job for all nodes."""
        self._handler().set_closed()

    def shutdown(self) -> bool:
        """End the job for all and free the place that `rendezvous_barrier` took; whether that worked."""
        place, self._place = self._place, None
        return True if place is None else place.shutdown()

    def setup_kv_store(self, rdzv_version: int) -> EtcdStore:
        """A store on etcd for the round of that number, which outlives its nodes by two hours."""
        from elasticlib.rendezvous.handlers._etcd_store import EtcdStore

        backend = EtcdBackend(self.job)
        keys = backend.connect(_CONNECT)
        return EtcdStore(
            keys, f"{backend.prefix}/run_{component(self.job.run_id)}/rdzv/v_{rdzv_version}/kv".lstrip("/")
        )

    def _handler(self) -> EtcdRendezvousHandler:
        if self._place is None:
            self._place = EtcdRendezvousHandler(self, self.job.local_addr)
        return self._place


def create_rdzv_handler(params: RendezvousParameters) -> EtcdRendezvousHandler:
    """
    The handler of *params* on etcd, with the options of back end ``etcd``; raises `ConfigError` as they break rules.

    (torch: ``torch.distributed.elastic.rendezvous.etcd_rendezvous.create_rdzv_handler``)
    """
    return EtcdRendezvousHandler(EtcdRendezvous.of(params), params.local_addr)


def _endpoint(client: str | V2Keys | V3Keys) -> str:
    if isinstance(client, str):
        return client
    if not isinstance(client, (V2Keys, V3Keys)):
        raise ConfigError(
            f"client={client!r:.80} is not a client of elasticlib: give host:port, or that of EtcdServer.get_client()"
        )
    if client.site.tls is not None:
        raise ConfigError(f"client={client.site.url}: with TLS use create_rdzv_handler, whose options name the files")
    return spell(client.site.host, client.site.port)
