"""
A job's shared state in etcd.

Rules of this file: the token is the version that the server gave the state, so two writers are never mixed up.

(torch: ``torch.distributed.elastic.rendezvous.etcd_rendezvous_backend``)
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from elasticlib.errors import ConfigError
from elasticlib.rendezvous._options import ETCD_PREFIX
from elasticlib.rendezvous.handlers._base import RendezvousParameters
from elasticlib.rendezvous.handlers._registry import job_of
from elasticlib.rendezvous.stores._keys import KEEP, component
from elasticlib.rendezvous.stores._state_keys import RendezvousBackend, Token
from elasticlib.rendezvous.stores.etcd._backend import EtcdBackend
from elasticlib.rendezvous.stores.etcd._v2 import V2Keys
from elasticlib.rendezvous.stores.etcd._v3 import V3Keys

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

STATE_PREFIX = "/torch/elastic/rendezvous"
STORE_PREFIX = "/torch/elastic/store"
_READ_TIMEOUT = 60.0


class EtcdRendezvousBackend(RendezvousBackend):
    """
    The state of job *run_id* below *key_prefix*, by *client*: that of `create_backend` or `EtcdServer.get_client`.

    It stays for *ttl* seconds (two hours) after it was last written, with etcd's v3 API for two thirds of that at
    least. torch's takes a client of python-etcd, which nobody keeps up; ours speaks both APIs of etcd by itself.
    """

    def __init__(
        self, client: V2Keys | V3Keys, run_id: str, key_prefix: str | None = None, ttl: int | None = None
    ) -> None:
        if not isinstance(run_id, str) or not run_id:
            raise ConfigError(f"run_id={run_id!r}: a state belongs to a job with a name")
        seconds = KEEP if ttl is None else ttl
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < math.inf:
            raise ConfigError(f"ttl={ttl!r} must be a number of seconds above 0; None for {KEEP}")
        self._client = client.lasting(seconds)
        prefix = (key_prefix or ETCD_PREFIX).strip("/")
        self._folder = f"/{prefix}/state_{component(run_id)}".replace("//", "/")
        self._path = f"{self._folder}/state"

    @property
    def name(self) -> str:
        """``etcd-v2``, as torch's is called, whichever API carries it."""
        return "etcd-v2"

    def get_state(self) -> tuple[bytes, Token] | None:
        """The state and its token; None when there is none yet."""
        (item,), _ = self._client.read([self._path])
        return None if item is None else (item.data, item.version)

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """Write *state* over that of *token*, or the first state; what is there then, and whether that is this one."""
        version = 0 if token is None else token
        if type(version) is int and (version > 0) is (token is not None):
            self._client.keep(self._folder)
            written = self._client.swap(self._path, state, version)
            if written is not None:
                return state, written, True
        current = self.get_state()
        return None if current is None else (*current, False)


def create_backend(params: RendezvousParameters) -> tuple[EtcdRendezvousBackend, Store]:
    """
    The shared state of ``params.run_id`` on the etcd servers at the endpoint, and a store there for all else.

    Of the options it reads ``protocol`` (``http`` or ``https``), ``ssl_cert``, ``ssl_cert_key``, ``ca_cert`` and
    ``read_timeout`` (seconds for one call, 60). With back end ``etcd-v2`` or ``etcd-v3`` that API is used, else v2
    where the server has it. Raises `ConfigError` (a ``ValueError``) for options that cannot work,
    `RendezvousConnectionError` when no server answers. (torch:
    ``torch.distributed.elastic.rendezvous.etcd_rendezvous_backend.create_backend``)
    """
    from elasticlib.rendezvous.handlers._etcd_store import EtcdStore

    backend = params.backend if params.backend.startswith("etcd") else "etcd"
    job = job_of(params, backend)
    keys = EtcdBackend(job).connect(float(job.options.get("read_timeout", _READ_TIMEOUT)))
    assert isinstance(keys, (V2Keys, V3Keys))
    return EtcdRendezvousBackend(keys, params.run_id, STATE_PREFIX), EtcdStore(keys, STORE_PREFIX)
