"""
In a rank: what torch's flight recorder has of its collectives, told just before the test's limit.

A thread of its own tells it, for at that time the rank's main thread waits. Rules of this file: it is no thread of
Python's `threading`, whose count is the test's own matter; variables of the user's decide where there are any; a torch
without a recorder is told nothing of.
"""

from __future__ import annotations

import _thread
import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from typing import Any

from elasticlib._clock import monotonic, wall_time_ns
from elasticlib.stacks import CALLERS
from elasticlib.testing.ranks import _collectives
from elasticlib.workers.child import serve_calls, tell_caller

SAYS = "collectives"
"""What a rank has to say."""
_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_COLLECTIVES = "64"
"""How many of the last ones are recorded."""
_MOST_BEFORE = 0.1
"""Seconds before the limit at which it is told; of a short limit a tenth."""


def pool(group: str | None) -> None:
    """Serve calls of tests: as `_pooled.serve_calls` does."""
    with contextlib.suppress(ImportError):
        c10d: Any = importlib.import_module("torch._C._distributed_c10d")
        chosen = any(name in os.environ for name in _SIZES)
        if not chosen:
            os.environ[_SIZES[0]] = _COLLECTIVES
        try:
            # The first dump creates the recorders, with the size that the variable has at the moment.
            _dumps(c10d)
        finally:
            if not chosen:
                del os.environ[_SIZES[0]]
        _Teller(c10d).begin()
    serve_calls(group)


def _dumps(c10d: Any) -> list[bytes]:
    """What all recorders have, as JSON."""
    found = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        if (dump := getattr(c10d, name, None)) is not None:
            found.append(dump(True, False))
    return found


def _members() -> dict[str, list[int]]:
    """By the name of each process group its ranks."""
    world: Any = sys.modules["torch.distributed"].distributed_c10d._world
    return {str(name): sorted(world.pg_group_ranks.get(group, ())) for group, name in world.pg_names.copy().items()}


class _Teller:
    """The thread, and what it is to do."""

    def __init__(self, c10d: Any) -> None:
        self._c10d = c10d
        self._limit: float | None = None
        """When there is something to tell, on the monotonic clock."""
        self._wakes: float | None = None
        """When the thread looks next by itself."""
        self._begin = 0
        """When what may have to be told began, in nanoseconds of the wall clock."""
        self._rouse = _thread.allocate_lock()
        self._rouse.acquire()

    def begin(self) -> None:
        """Have there be the thread."""
        global _teller
        _teller = self
        _thread.start_new_thread(self._run, ())

    def arm(self, limit: float | None) -> None:
        """There is something to tell at *limit*; None: no more."""
        if limit is not None:
            self._begin = wall_time_ns()
        self._limit = limit
        # Only a thread that sleeps beyond the limit needs to be woken.
        if limit is not None and (self._wakes is None or self._wakes > limit) and self._rouse.locked():
            self._rouse.release()

    def summary(self) -> list[dict[str, Any]]:
        """See `_collectives.summary`."""
        return _collectives.summary(_dumps(self._c10d), self._begin, _members())

    def _run(self) -> None:
        while True:
            limit = self._limit
            now = monotonic()
            if limit is not None and limit <= now:
                self._limit = None
                # Nobody waits for this message.
                with contextlib.suppress(Exception):
                    tell_caller({"says": SAYS, "collectives": self.summary()})
                continue
            self._wakes = limit
            # `arm` has set a limit before it could see when this thread wakes: look again.
            if self._limit is not limit:
                continue
            self._rouse.acquire(timeout=-1 if limit is None else limit - now)


_teller: _Teller | None = None


@contextlib.contextmanager
def until(limit: float) -> Iterator[None]:
    """Have the caller told at which collectives this is, just before *limit*, of the monotonic clock, in the block."""
    if _teller is None or limit <= 0:
        yield
        return
    now = monotonic()
    _teller.arm(limit - min(_MOST_BEFORE, (limit - now) / 10))
    try:
        yield
    finally:
        _teller.arm(None)


CALLERS.add(__file__)
