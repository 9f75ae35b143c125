"""
The rendezvous on etcd under the names of torch's first one, and a job's shared state there.

Rules of this file: it shares no wire protocol with torch's, whose nodes agree by rewriting keys.
Here one node coordinates, and another one takes over when it leaves. Programs see the same: their
callers meet in rounds, below the same prefix. The token of a state is its version on the server:
two writers are never mixed up.

(torch: ``torch.distributed.elastic.rendezvous.etcd_rendezvous`` and ``etcd_rendezvous_backend``)
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from attrs import evolve

from elasticlib.errors import ConfigError, RendezvousError
from elasticlib.rendezvous._names import node_name
from elasticlib.rendezvous._node_job import NodeJob
from elasticlib.rendezvous._rdzv_options import ETCD_PREFIX
from elasticlib.rendezvous.handlers._base import RendezvousParameters
from elasticlib.rendezvous.handlers._coordinated import CoordinatedHandler
from elasticlib.rendezvous.handlers._registry import create_handler, job_of
from elasticlib.rendezvous.net._endpoint import spell
from elasticlib.rendezvous.stores._keys import KEEP, component
from elasticlib.rendezvous.stores._state_keys import RendezvousBackend, Token
from elasticlib.rendezvous.stores.etcd._backend import EtcdBackend
from elasticlib.rendezvous.stores.etcd._v3 import V3Keys

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

    from elasticlib.rendezvous.handlers._etcd_store import EtcdStore

STATE_PREFIX = "/torch/elastic/rendezvous"
STORE_PREFIX = "/torch/elastic/store"
_CONNECT = 60.0
"""Default of ``read_timeout``: seconds to reach a server."""


class EtcdRendezvousRetryableFailure(RendezvousError):  # noqa: N818 - torch's name
    """Never raised here: with torch, a collision of nodes after which the rendezvous is tried again."""


class EtcdRendezvousRetryImmediately(RendezvousError):  # noqa: N818 - torch's name
    """Never raised here: the same, without a pause."""


class EtcdRendezvousHandler(CoordinatedHandler):
    """
    One node of the job of *rdzv_impl*, which peers reach at *local_addr*.

    Differs from torch's as described at `CoordinatedHandler`. A round's store is a TCPStore of its
    node of rank 0, which the workers may share, in place of etcd itself.
    """

    def __init__(self, rdzv_impl: EtcdRendezvous, local_addr: str | None) -> None:
        super().__init__(evolve(rdzv_impl.job, node=node_name(local_addr), local_addr=local_addr))

    @property
    def version(self) -> int:
        """Return the number of the last round; 0 before the first."""
        assignment = self._notes.assignment
        return 0 if assignment is None else assignment.round + 1


class EtcdRendezvous:
    """
    A job on etcd, and one place in it through `rendezvous_barrier`.

    *client* is ``host:port`` of the servers, with commas between several, or elasticlib's own
    client, such as that of `EtcdServer.get_client`. torch's takes a client of python-etcd, which is
    unmaintained. *timeout* and *last_call_timeout* are seconds. For TLS use `create_rdzv_handler`.
    Nothing is contacted before the first call that needs it. Raises `ConfigError` (a
    ``ValueError``) for values that cannot work.
    """

    job: NodeJob
    _place: EtcdRendezvousHandler | None = None

    def __init__(
        self,
        client: str | V3Keys,
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
        """Return the rendezvous of *params*, with all the options of backend ``etcd``."""
        made = cls.__new__(cls)
        made.job = create_handler(params).job
        return made

    def rendezvous_barrier(self) -> tuple[int, int, int]:
        """
        Wait for the next round; return its number, this node's rank in it and its size.

        Raises `RendezvousTimeoutError` when too few nodes came, `RendezvousClosedError` when the
        job is over.
        """
        handler = self._handler()
        info = handler.next_rendezvous()
        return handler.version, info.rank, info.world_size

    def set_closed(self) -> None:
        """End the job for all nodes."""
        self._handler().set_closed()

    def shutdown(self) -> bool:
        """
        End the job for all nodes and free the place that `rendezvous_barrier` took; return whether
        that worked.
        """
        place, self._place = self._place, None
        return True if place is None else place.shutdown()

    def setup_kv_store(self, rdzv_version: int) -> EtcdStore:
        """Return a store on etcd for round *rdzv_version*; it outlives its nodes by two hours."""
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
    Return the handler of *params* on etcd, with the options of backend ``etcd``; raises
    `ConfigError` for invalid ones.

    (torch: ``torch.distributed.elastic.rendezvous.etcd_rendezvous.create_rdzv_handler``)
    """
    return EtcdRendezvousHandler(EtcdRendezvous.of(params), params.local_addr)


def _endpoint(client: str | V3Keys) -> str:
    if isinstance(client, str):
        return client
    if not isinstance(client, V3Keys):
        raise ConfigError(
            f"client={client!r:.80} is not an etcd client of elasticlib: give host:port, or the result of "
            "EtcdServer.get_client()"
        )

    # A client does not know the files that it was made with, and the handler's own process needs
    # them.
    if client.site.tls is not None:
        raise ConfigError(
            f"client={client.site.url}: a client with TLS cannot be used here: call create_rdzv_handler, and name the "
            "TLS files in its options"
        )

    return spell(client.site.host, client.site.port)


class EtcdRendezvousBackend(RendezvousBackend):
    """
    The state of job *run_id* below *key_prefix*, in the etcd of *client*.

    The client is that of `create_backend` or `EtcdServer.get_client`. The state stays in etcd for
    *ttl* seconds (default: two hours) after the last write, or at least two thirds of the time.
    torch's takes a client of python-etcd, which is unmaintained; elasticlib's own client speaks
    etcd's v3 API.
    """

    def __init__(self, client: V3Keys, run_id: str, key_prefix: str | None = None, ttl: int | None = None) -> None:
        if not isinstance(run_id, str) or not run_id:
            raise ConfigError.of_setting("run_id", f"{run_id!r}: a job needs an id of at least one character")
        seconds = KEEP if ttl is None else ttl
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < math.inf:
            raise ConfigError(f"ttl={ttl!r} must be a number of seconds above 0; None for {KEEP}")
        self._client = client.lasting(seconds)
        prefix = (key_prefix or ETCD_PREFIX).strip("/")
        self._folder = f"/{prefix}/state_{component(run_id)}".replace("//", "/")
        self._path = f"{self._folder}/state"

    @property
    def name(self) -> str:
        """``etcd-v2``, the name in torch, though the state uses etcd's v3 API."""
        return "etcd-v2"

    def get_state(self) -> tuple[bytes, Token] | None:
        """Return the state and its token; None if nothing was written yet."""
        (item,), _ = self._client.read([self._path])
        return None if item is None else (item.data, item.version)

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """
        Write *state* over that of *token*, or as the first one.

        Return the state that is in etcd then, its token, and whether it is *state*. Return None if
        there is no state.
        """
        version = 0 if token is None else token
        # A first state has version 0, and a token of this backend is above 0.
        if type(version) is int and (version > 0) is (token is not None):
            self._client.keep(self._folder)
            written = self._client.swap(self._path, state, version)
            if written is not None:
                return state, written, True
        current = self.get_state()
        return None if current is None else (*current, False)


def create_backend(params: RendezvousParameters) -> tuple[EtcdRendezvousBackend, Store]:
    """
    Return the shared state of ``params.run_id`` on the etcd servers at the endpoint, and a store
    there for all else.

    It reads these options: ``protocol`` (``http`` or ``https``), ``ssl_cert``, ``ssl_cert_key``,
    ``ca_cert`` and ``read_timeout`` (seconds for one call, 60). Raises `ConfigError` (a
    ``ValueError``) for options that cannot work, and `RendezvousConnectionError` when no server
    answers.

    (torch: ``torch.distributed.elastic.rendezvous.etcd_rendezvous_backend.create_backend``)
    """
    from elasticlib.rendezvous.handlers._etcd_store import EtcdStore

    # Direct callers may pass any name: the endpoint belongs to etcd all the same.
    backend = params.backend if params.backend.startswith("etcd") else "etcd"
    job = job_of(params, backend)
    keys = EtcdBackend(job).connect(float(job.options.get("read_timeout", _CONNECT)))
    return EtcdRendezvousBackend(keys, params.run_id, STATE_PREFIX), EtcdStore(keys, STORE_PREFIX)
