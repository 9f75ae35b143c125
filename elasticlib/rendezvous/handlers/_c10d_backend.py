"""
The shared state of a job in a torch store.

Rules of this file: each write has a unique mark, so that two writers of the same state can be
distinguished. The host of the store is found as for any job, see `c10d`.

(torch: ``torch.distributed.elastic.rendezvous.c10d_rendezvous_backend``)
"""

from __future__ import annotations

import base64
import contextlib
import tempfile
import uuid
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from elasticlib._clock import monotonic, sleep
from elasticlib.errors import ConfigError, RendezvousConnectionError, RendezvousStateError
from elasticlib.rendezvous._node_job import NodeJob
from elasticlib.rendezvous.handlers._base import RendezvousParameters
from elasticlib.rendezvous.handlers._registry import job_of
from elasticlib.rendezvous.protocol._exchange import RequestRefusedError
from elasticlib.rendezvous.stores._state_keys import RendezvousBackend, Token
from elasticlib.spec import DEFAULT_PORT as DEFAULT_PORT

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

_READ_TIMEOUT = 60.0
_LONGEST = 8 * 1024 * 1024
_AGAIN = 0.1
"""Seconds between two attempts to find the store."""
_ABSENT = b"?"
"""Expected value for an absent key: no key has it, and the store answers with it."""


class C10dRendezvousBackend(RendezvousBackend):
    """The state of job *run_id* in *store*, which must support ``compare_set``."""

    def __init__(self, store: Store, run_id: str) -> None:
        """Raises `ConfigError` (a ``ValueError``) for an invalid store, and an empty *run_id*."""
        if not callable(getattr(store, "compare_set", None)):
            raise ConfigError(f"store={store!r} has no method compare_set: give one of torch's stores")
        if not isinstance(run_id, str) or not run_id:
            raise ConfigError.of_setting("run_id", f"{run_id!r}: a job needs an id of at least one character")
        self._store = store
        self._key = f"elasticlib/state/{run_id}"

    @property
    def name(self) -> str:
        """``c10d``"""
        return "c10d"

    def get_state(self) -> tuple[bytes, Token] | None:
        """Return the state and its token; None if nothing was written yet."""
        return _read(self._look())

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """
        Write *state* over that of *token*, or as the first one.

        Return the state that is in the store then, its token, and whether it is *state*. Return
        None if there is no state.
        """
        # With a unique mark: the same state written twice is two states, so that its writers can be
        # distinguished.
        value = base64.b64encode(state) + b"." + uuid.uuid4().hex.encode()
        if len(value) > _LONGEST:
            why = f"a state of {len(state):,} bytes is too large: a store of torch takes {_LONGEST:,} bytes of base64"
            raise RequestRefusedError(why, True)

        expected = b"" if token is None else token
        if isinstance(expected, bytes):
            found = self._swap(expected, value)
        else:
            found = self._look()  # a token of another backend: nothing is written

        # The store also answers with the expected state if the key is absent.
        if token is not None and found == expected and self._look() == _ABSENT:
            return None

        current = _read(found)
        if current is None:
            return None

        return (*current, found == value)

    def _look(self) -> bytes:
        """Return the stored text, or `_ABSENT` if there is none."""
        return self._swap(_ABSENT, _ABSENT)

    def _swap(self, expected: bytes, value: bytes) -> bytes:
        try:
            # torch's compare_set takes text, and the stored bytes may be any.
            texts = (each.decode("ascii", "replace") for each in (expected, value))
            return bytes(self._store.compare_set(self._key, *texts))
        except (ValueError, RuntimeError, TimeoutError) as error:
            why = f"the store of the shared state failed: {error}".splitlines()[0]
            raise RendezvousConnectionError(why) from error


def create_backend(params: RendezvousParameters) -> tuple[C10dRendezvousBackend, Store]:
    """
    Return the shared state of ``params.run_id``, and the store that holds it: opened here, or
    connected to.

    It reads these options:

    * ``store_type``: ``tcp`` or ``file``. With ``file`` the endpoint is a path, or empty for a
      temporary file.
    * ``is_host``: without it, the process that has the endpoint's address opens the store.
    * ``read_timeout``: seconds for finding a TCP store, and for its own waits; 60.

    A server ends with the last reference to the store.

    Raises `ConfigError` (a ``ValueError``) for options that cannot work, and
    `RendezvousConnectionError` when the store is not found in time. (torch:
    ``torch.distributed.elastic.rendezvous.c10d_rendezvous_backend.create_backend``)
    """
    job = job_of(params, "c10d")
    if job.store_type == "file":
        store = _file_store(params.endpoint)  # with torch's own timeout, as torch has it
    else:
        limit = float(job.options.get("read_timeout", _READ_TIMEOUT))
        store = _tcp_store(job, limit)
        store.set_timeout(timedelta(seconds=limit))
    return C10dRendezvousBackend(store, params.run_id), store


def _tcp_store(job: NodeJob, limit: float) -> Any:
    from elasticlib.rendezvous.stores._c10d import C10dBackend

    deadline = monotonic() + limit
    with contextlib.closing(C10dBackend(job)) as backend:  # the server lives on with the store
        while True:
            try:
                if backend.serve(deadline):
                    return backend.server
                exchange = backend.dial(max(deadline - monotonic(), _AGAIN))
                return exchange.store  # type: ignore[attr-defined]
            except RendezvousConnectionError as error:
                if monotonic() >= deadline:
                    raise RendezvousConnectionError(f"{error}; given up after read_timeout={limit:g} s") from error
                sleep(_AGAIN)  # the time at which its host starts is unknown


def _file_store(endpoint: str) -> Any:
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    path = endpoint
    if not path:
        with tempfile.NamedTemporaryFile(prefix="elasticlib_", delete=False) as made:
            path = made.name

    try:
        return FileStore(path, -1)
    except (ValueError, RuntimeError) as error:
        raise RendezvousConnectionError(f"endpoint={path!r} cannot be used as the file of a store: {error}") from error


def _read(value: bytes) -> tuple[bytes, Token] | None:
    if value in (_ABSENT, b""):
        return None
    text, dot, _ = value.partition(b".")
    try:
        if not dot:
            raise ValueError("its mark is missing")
        return base64.b64decode(text, validate=True), value
    except ValueError as error:
        raise RendezvousStateError(
            f"the store holds {value[:80]!r} instead of the state of a rendezvous: {error}"
        ) from error
