"""
The process group that the ranks of a pool use in its calls: ``shared`` by consecutive calls,
``fresh`` for each, or None for no group of the pool.

Rules of this file: all ranks make and leave a group together. A group is left when the next call
begins, and not at the end of its own: by then all ranks have made it, and none waits for another
there. So a rank that ended its call early does not seem lost to those in a collective.
"""

from __future__ import annotations

import _thread
import contextlib
import datetime
import functools
import importlib
import os
import sys
import threading
from typing import Any

from elasticlib.stacks import CALLERS

_ARRIVED, _ALL_ARRIVED = "ranks in the group", "all ranks in the group"
"""Keys of a group's store."""
_ARRIVAL_LIMIT = datetime.timedelta(seconds=10)
_STORE_LIMIT = datetime.timedelta(minutes=5)
"""Torch's own limit for a store."""


class CallGroup:
    """The process group of the calls: at most one at a time."""

    def __init__(self, kind: str | None) -> None:
        self._stores = _Stores()
        self._group: _PresentGroup | None = None
        self._ending = threading.Lock()
        """Held while a group is freed."""
        if kind == "shared":
            self._group = _PresentGroup(kind, None, self._stores.new())
        elif kind == "fresh":
            # Now, while no call waits for this import.
            importlib.import_module("torch.distributed")

    def begin(self, call: int, kind: str | None, backend: str | None, *, by_all: bool) -> None:
        """
        Prepare the group for the call with this number: one of this *kind*, over *backend*.

        None is torch's default. If not all ranks make it (*by_all*), the call has no group of its
        own, and the present one stays.
        """
        needs_another = by_all and (kind, backend) != self._present_kind()
        if self._is_fresh() or needs_another:
            self.leave()

        if by_all:
            self._stores.call = call
            self._provide(kind, backend)

    def _present_kind(self) -> tuple[str | None, str | None]:
        return (None, None) if self._group is None else (self._group.kind, self._group.backend)

    def _provide(self, kind: str | None, backend: str | None) -> None:
        if kind is None:
            self._stores.separate_groups_of_calls()
        elif self._group is None:
            self._group = _PresentGroup(kind, backend, self._stores.new())

    def end(self) -> str:
        """
        Return the reason why the next call cannot be served; empty if it can.

        Called after a call.
        """
        found = _present_group()
        if found is None and self._is_fresh():
            # A training script destroys its group at its end.
            return ""

        expected = None if self._group is None else self._group.handle
        if found is expected:
            return ""
        if found is None:
            return "it destroyed the pool's process group"
        return "it left a process group"

    def release(self) -> None:
        """Release a fresh group, once all ranks are in it: those in a collective fail there."""
        if self._is_fresh():
            self.leave()

    def _is_fresh(self) -> bool:
        return self._group is not None and self._group.kind == "fresh"

    def leave(self) -> None:
        """Release the pool's group, while all others do."""
        group = self._group
        if group is None:
            return

        group.await_all()
        self._group = None
        group.destroy()

        # The end of a group takes gloo's loop 10 ms, in which the next one can be made. Not a
        # thread of `threading`, because a call may count those.
        self._ending.acquire()
        _thread.start_new_thread(self._free, (group,))

        group.restore_excepthook()

    def _free(self, group: _PresentGroup) -> None:
        try:
            group.handle = None
        finally:
            self._ending.release()

    def finish(self) -> None:
        """Wait for the end of former groups: none may be in progress while the interpreter ends."""
        with self._ending:
            pass


class _PresentGroup:
    """One process group of the pool in this rank."""

    def __init__(self, kind: str, backend: str | None, store: Any) -> None:
        self.kind = kind
        self.backend = backend
        self._store = store
        self._excepthook = sys.excepthook
        """The hook before this group: torch wraps it again for each."""
        dist: Any = importlib.import_module("torch.distributed")
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
        self.handle: object = dist.group.WORLD
        """Torch's object; None once it is freed."""

        # The last rank lets the others close their connections: none still connects to another.
        if store.add(_ARRIVED, 1) == size:
            store.set(_ALL_ARRIVED, "")

    def await_all(self) -> None:
        """
        Wait until all ranks are in the group.

        A rank may have made it while another one still connects to it. Closed connections would
        then fail there, as the loss of a peer.
        """
        # If a rank died meanwhile, the launcher knows it already.
        with contextlib.suppress(Exception):
            self._store.wait([_ALL_ARRIVED], _ARRIVAL_LIMIT)

    def destroy(self) -> None:
        """Take the group from torch, unless the call has done that itself; `handle` keeps it alive."""
        self._store = None
        if _present_group() is self.handle:
            sys.modules["torch.distributed"].destroy_process_group()

    def restore_excepthook(self) -> None:
        """Remove torch's wrapper of ``sys.excepthook``, unless the call has set another one."""
        if getattr(sys.excepthook, "__module__", "").startswith("torch.distributed"):
            sys.excepthook = self._excepthook


class _Stores:
    """
    The launcher's store, in which each group has keys of its own.

    Keys of a former group are still there. So each group has a prefix, with the number of the
    call, which all ranks know. All groups use one connection, because each new one may ask a slow
    name server for its peer.
    """

    def __init__(self) -> None:
        self.call = 0
        """Number of the present call."""
        # A call may change the variable.
        self._port = os.environ.get("MASTER_PORT", "")
        self._connection: Any = None
        self._has_separated = False

    def new(self) -> Any:
        """Return the store for a group of the present call."""
        dist: Any = importlib.import_module("torch.distributed")
        if self._connection is None:
            self._connection = dist.TCPStore(os.environ["MASTER_ADDR"], int(self._port), is_master=False)
        # A call may have changed it.
        self._connection.set_timeout(_STORE_LIMIT)
        return dist.PrefixStore(self._prefix(), self._connection)

    def separate_groups_of_calls(self) -> None:
        """Separate the keys of groups that calls make for themselves, in the launcher's store."""
        # torch uses the launcher's store directly: it expects one group in the life of a process.
        rendezvous: Any = sys.modules.get("torch.distributed.rendezvous")
        make = getattr(rendezvous, "_create_c10d_store", None)
        if make is None or self._has_separated:
            return

        @functools.wraps(make)
        def make_apart(*args: Any, **kwargs: Any) -> Any:
            store = make(*args, **kwargs)
            return sys.modules["torch.distributed"].PrefixStore(self._prefix(), store)

        rendezvous._create_c10d_store = make_apart
        self._has_separated = True

    def _prefix(self) -> str:
        return f"pool/{self.call}"


def _present_group() -> object:
    """Return torch's group of all ranks; None without one."""
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available():
        return None
    return dist.group.WORLD if dist.is_initialized() else None


CALLERS.add(__file__)
