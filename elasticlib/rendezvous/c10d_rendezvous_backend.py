"""
A job's shared state in a torch store.

Rules of this file: each write has a mark of its own, so that two writers of the same state are told apart.

(torch: ``torch.distributed.elastic.rendezvous.c10d_rendezvous_backend``)
"""

from __future__ import annotations

import base64
import binascii
import uuid
from typing import TYPE_CHECKING

from elasticlib.errors import RendezvousConnectionError, RendezvousStateError
from elasticlib.rendezvous._endpoint import DEFAULT_PORT
from elasticlib.rendezvous.dynamic_rendezvous import RendezvousBackend, Token

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

_ABSENT = b"?"
"""Expected of a key that is absent, it is stored nowhere and comes back."""


class C10dRendezvousBackend(RendezvousBackend):
    """The state of job *run_id* in *store*, which must be able to ``compare_set``."""

    def __init__(self, store: Store, run_id: str) -> None:
        if not run_id:
            raise ValueError(f"run_id={run_id!r}: a state belongs to a job with a name")
        self._store = store
        self._key = f"elasticlib/state/{run_id}"

    @property
    def name(self) -> str:
        """``c10d``"""
        return "c10d"

    def get_state(self) -> tuple[bytes, Token] | None:
        """The state and its token; None when there is none yet."""
        return _read(self._swap(_ABSENT, _ABSENT))

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """Write *state* over that of *token*, or the first state; what is there then, and whether that is this one."""
        value = base64.b64encode(state) + b"." + uuid.uuid4().hex.encode()
        expected = b"" if token is None else token
        found = self._swap(expected, value) if isinstance(expected, bytes) else self._swap(_ABSENT, _ABSENT)
        if found == expected and token is not None and self._swap(_ABSENT, _ABSENT) == _ABSENT:
            return None  # the state of the token was deleted
        current = _read(found)
        return None if current is None else (*current, found == value)

    def _swap(self, expected: bytes, value: bytes) -> bytes:
        try:
            texts = (each.decode("ascii", "replace") for each in (expected, value))
            return bytes(self._store.compare_set(self._key, *texts))
        except (ValueError, RuntimeError, TimeoutError) as error:
            why = f"the store of the shared state failed: {error}".splitlines()[0]
            raise RendezvousConnectionError(why) from error


def _read(value: bytes) -> tuple[bytes, Token] | None:
    if value in (_ABSENT, b""):
        return None
    text, dot, _ = value.partition(b".")
    try:
        if not dot:
            raise ValueError("its mark is missing")
        return base64.b64decode(text, validate=True), value
    except (ValueError, binascii.Error) as error:
        raise RendezvousStateError(f"the store holds {value[:80]!r}, which is no state: {error}") from error


__all__ = ["DEFAULT_PORT", "C10dRendezvousBackend"]
