"""
A FileStore of torch as the exchange needs it, for the nodes of one machine: process ids are only
valid there.

Rules of this file: a store that cannot report changes is polled, with pauses that grow with the
time waited.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from attrs import define

from elasticlib._clock import Clock, monotonic, sleep
from elasticlib.errors import ConfigError
from elasticlib.utils import stat_words

SOONEST, LATEST = 0.001, 0.02
"""Bounds, in seconds, of the pause between two polls."""


def poll(is_so: Callable[[], bool], limit: float, clock: Clock = monotonic) -> bool:
    """Poll *is_so*, with growing pauses; return whether it was true within *limit* seconds."""
    deadline, pause = clock() + limit, SOONEST
    while not is_so():
        if (left := deadline - clock()) <= 0:
            return False
        sleep(min(pause, left))
        pause = min(2 * pause, LATEST)
    return True


@define(eq=False)
class PolledFileStore:
    """A FileStore that can wait for milliseconds, and notices when its file was removed."""

    path: str
    _store: Any
    _file: os.stat_result
    _patience: timedelta = timedelta(seconds=1)

    @classmethod
    def open(cls, path: str) -> PolledFileStore:
        """
        Return the store in the file at *path*, created if missing; raise `ConfigError` if that
        fails.
        """
        from torch.distributed import FileStore  # type: ignore[attr-defined]

        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644))
            file = os.stat(path)
        except OSError as error:
            why = os.strerror(error.errno or 0)
            raise ConfigError.of_setting(
                "rdzv_endpoint", f"{path!r} is not a file that this user can write: {why}"
            ) from error

        store = FileStore(path, -1)
        store.set_timeout(timedelta(seconds=1))
        return cls(path, store, file)

    def __getattr__(self, name: str) -> Any:
        if name not in ("set", "add", "check", "compare_set", "delete_key", "multi_get", "multi_set"):
            raise AttributeError(name)
        # torch opens the file by its path in each call: another file there is another store.
        if not os.path.samestat(os.stat(self.path), self._file):
            raise OSError(errno.ESTALE, "the file was replaced", self.path)
        return getattr(self._store, name)

    def list_keys(self) -> list[str]:
        """Return no keys: no worker uses this store."""
        return []

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time limit of `get`."""
        self._patience = timeout

    def get(self, key: str) -> bytes:
        """
        Return the value of *key*, and wait for it; raises torch's DistStoreError if it is not there
        in time.
        """
        self.wait([key], self._patience)
        value: bytes = self._store.get(key)
        return value

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Return once the keys exist; raises torch's DistStoreError if they do not in time."""
        from torch.distributed import DistStoreError

        if not poll(lambda: self.check(keys), timeout.total_seconds()):
            raise DistStoreError("wait timeout")


def sign() -> bytes:
    """Return a text by which `is_stale` detects whether this process lives."""
    return f"{_namespace()} {os.getpid()} {_born(os.getpid())}".encode()


def is_stale(signature: bytes) -> bool:
    """Return whether the process that signed is certainly gone."""
    try:
        namespace, pid, born, *_ = signature.decode().split()
        return namespace == _namespace() and _born(int(pid)) != born
    except ValueError:
        return False


def _namespace() -> str:
    return os.readlink("/proc/self/ns/pid")


def _born(pid: int) -> str:
    """Return the start time of a process, in clock ticks; empty if it is gone."""
    facts = stat_words(pid)
    # A zombie does nothing any more.
    is_gone = not facts or facts[0] in "ZX"
    return "" if is_gone else facts[19]
