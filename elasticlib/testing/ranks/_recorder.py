"""
Reports of a rank's collectives just before the test's timeout, from torch's flight recorder.

A separate thread sends the report, because the rank's main thread waits at that time.

Rules of this file: the thread is not one of Python's `threading`, whose threads the test may count.
The user's environment variables take precedence. A torch without a recorder sends no report.
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
from elasticlib.workers.child import notify_caller, serve_calls

SAYS = "collectives"
"""Kind of the message that a rank sends."""
_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_COLLECTIVES = "64"
"""Number of recent collectives to record."""
_MOST_BEFORE = 0.1
"""Seconds before the limit at which the report is sent; at most a tenth of the limit."""


def pool(group: str | None) -> None:
    """Serve the calls of tests, as `_pooled.serve_calls` does, with a flight recorder."""
    with contextlib.suppress(ImportError):
        c10d: Any = importlib.import_module("torch._C._distributed_c10d")
        chosen = any(name in os.environ for name in _SIZES)
        if not chosen:
            os.environ[_SIZES[0]] = _COLLECTIVES
        try:
            # The first dump creates the recorders, with the size that the variable has now.
            _dumps(c10d)
        finally:
            if not chosen:
                del os.environ[_SIZES[0]]

        _Reporter(c10d).begin()

    serve_calls(group)


def _dumps(c10d: Any) -> list[bytes]:
    """Return the contents of all recorders as JSON."""
    found = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        if (dump := getattr(c10d, name, None)) is not None:
            found.append(dump(True, False))
    return found


def _members() -> dict[str, list[int]]:
    """Return the ranks of each process group, by its name."""
    world: Any = sys.modules["torch.distributed"].distributed_c10d._world
    return {str(name): sorted(world.pg_group_ranks.get(group, ())) for group, name in world.pg_names.copy().items()}


class _Reporter:
    """Thread that sends the report at a given time."""

    def __init__(self, c10d: Any) -> None:
        self._c10d = c10d
        self._limit: float | None = None
        """Time of the next report, on the monotonic clock."""
        self._wakes: float | None = None
        """Time at which the thread wakes up unless it is woken earlier."""
        self._begin = 0
        """Start of the period to report, in nanoseconds of the wall clock."""
        self._rouse = _thread.allocate_lock()

        # Taken from the start: the thread waits for it, and a release wakes the thread.
        self._rouse.acquire()

    def begin(self) -> None:
        global _reporter
        _reporter = self
        _thread.start_new_thread(self._run, ())

    def arm(self, limit: float | None) -> None:
        """Send a report at *limit*; None: send none."""
        if limit is None:
            self._limit = None
            return

        # The thread reads the beginning once it sees the limit.
        self._begin = wall_time_ns()
        self._limit = limit
        # Only a thread that sleeps beyond the limit needs to be woken.
        sleeps_longer = self._wakes is None or self._wakes > limit
        if sleeps_longer and self._rouse.locked():
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
                    notify_caller({"says": SAYS, "collectives": self.summary()})
                continue

            self._wakes = limit

            # `arm` has set a limit before it could see when this thread wakes: look again.
            if self._limit is not limit:
                continue
            self._rouse.acquire(timeout=-1 if limit is None else limit - now)


_reporter: _Reporter | None = None


@contextlib.contextmanager
def until(limit: float) -> Iterator[None]:
    """
    Send the caller this rank's collectives just before *limit*, if the block still runs then.

    *limit* is on the monotonic clock.
    """
    if _reporter is None or limit <= 0:
        yield
        return
    now = monotonic()
    _reporter.arm(limit - min(_MOST_BEFORE, (limit - now) / 10))
    try:
        yield
    finally:
        _reporter.arm(None)


CALLERS.add(__file__)
