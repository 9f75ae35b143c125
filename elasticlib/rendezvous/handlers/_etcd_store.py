"""
torch's `Store` over etcd, for code that was written against ``torch.distributed.elastic``'s.

Rules of this file: it imports torch, so only users of the class import it, through `etcd_store`.
elasticlib's own workers never use it: their store is a TCPStore.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence

from torch.distributed import Store  # type: ignore[attr-defined]

from elasticlib._clock import monotonic
from elasticlib.rendezvous.stores._keys import KeyFound, Keys, component

_TIMEOUT = datetime.timedelta(seconds=300)
_SLICE = 20.0


class EtcdStore(Store):
    """Keys and values below *prefix*. (torch: ``torch.distributed.elastic.rendezvous.etcd_store.EtcdStore``)"""

    timeout: datetime.timedelta
    """Time limit of `get` and `wait`; `set_timeout` changes it in torch's part of the store."""

    def __init__(self, etcd_client: Keys, etcd_store_prefix: str, timeout: datetime.timedelta | None = None) -> None:
        """*timeout*: time limit of `get` and `wait`."""
        super().__init__()
        self.client = etcd_client
        self.prefix = "/" + etcd_store_prefix.strip("/")
        self.set_timeout(_TIMEOUT if timeout is None else timeout)

    def set(self, key: str, value: str | bytes) -> None:
        """Write the value."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self.client.write({self._path(key): data})

    def get(self, key: str) -> bytes:
        """
        Return the value, and wait for it if it is missing; raises LookupError after the store's
        timeout.
        """
        (item,) = self._await([key], self.timeout)
        return item.data

    def add(self, key: str, num: int) -> int:
        """Add to a number that starts at 0; return the sum."""
        path = self._path(key)
        while True:
            (item,), _ = self.client.read([path])
            # Version 0 means that the key does not exist: the swap fails if another node creates it
            # first.
            version, total = 0, int(num)
            if item is not None:
                version, total = item.version, total + int(item.data)
            has_written = self.client.swap(path, str(total).encode(), version) is not None
            if has_written:  # else another node added to it in between
                return total

    def wait(self, keys: Sequence[str], override_timeout: datetime.timedelta | None = None) -> None:
        """Return once all keys exist; raises LookupError after the timeout."""
        self._await(keys, self.timeout if override_timeout is None else override_timeout)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys exist now."""
        items, _ = self.client.read([self._path(key) for key in keys])
        return None not in items

    def _path(self, key: str) -> str:
        return f"{self.prefix}/{component(key)}"

    def _await(self, keys: Sequence[str], limit: datetime.timedelta) -> list[KeyFound]:
        """Return all keys once they exist."""
        paths = [self._path(key) for key in keys]
        deadline = monotonic() + limit.total_seconds()
        while True:
            # The version of this read: a change that comes before the wait below is not missed.
            items, version = self.client.read(paths)
            found = [item for item in items if item is not None]
            if len(found) == len(items):
                return found
            left = deadline - monotonic()
            if left <= 0:
                missing = [repr(key) for key, item in zip(keys, items, strict=True) if item is None]
                names = ", ".join(missing[:5])
                raise LookupError(f"{names} did not appear within {limit.total_seconds():.3g} s")

            # One after the other: none of them is enough.
            first_missing = paths[items.index(None)]
            self.client.changed(first_missing, version, min(left, _SLICE))


EtcdStore.__module__ = "elasticlib.elastic.rendezvous.etcd_store"  # the name under which torch's users look for it
