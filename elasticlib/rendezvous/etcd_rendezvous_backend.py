"""
A job's shared state in etcd.

Rules of this file: the token is the version that the server gave the state, so two writers are never mixed up.

(torch: ``torch.distributed.elastic.rendezvous.etcd_rendezvous_backend``)
"""

from __future__ import annotations

from elasticlib.rendezvous._etcd_keys import Keys, component
from elasticlib.rendezvous.dynamic_rendezvous import RendezvousBackend, Token
from elasticlib.rendezvous.etcd import DEFAULT_PREFIX


class EtcdRendezvousBackend(RendezvousBackend):
    """
    The state of job *run_id* below *key_prefix*, by *client*, such as that of `EtcdServer.get_client`.

    It stays for two hours after it was last written.
    """

    def __init__(self, client: Keys, run_id: str, key_prefix: str | None = None) -> None:
        if not run_id:
            raise ValueError(f"run_id={run_id!r}: a state belongs to a job with a name")
        self._client = client
        self._folder = f"/{(key_prefix or DEFAULT_PREFIX).strip('/')}/state_{component(run_id)}".replace("//", "/")
        self._path = f"{self._folder}/state"

    @property
    def name(self) -> str:
        """``etcd``"""
        return "etcd"

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
