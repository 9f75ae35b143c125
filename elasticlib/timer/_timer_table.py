"""
The running timers of a server. PURE: requests in, expired timers out.

Rules of this file: a worker and a scope identify a timer. A second timer with the same identity
replaces the first. Deadlines are taken from the requests, in seconds.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Collection, Iterable, Iterator
from typing import Any, Generic, TypeVar

from attrs import astuple, define


@define(unsafe_hash=True, repr=False)
class TimerRequest:
    """
    Request to start or release the timer *scope_id* of a worker.

    *expiration_time* is in seconds since the epoch; a negative one releases the timer. Client and
    server agree on the meaning of *worker_id*; in this package it is a process id. (torch:
    ``torch.distributed.elastic.timer.TimerRequest``)
    """

    worker_id: Any
    scope_id: str
    expiration_time: float

    def __repr__(self) -> str:
        return f"{type(self).__name__}{astuple(self, recurse=False)!r}"


def is_deadline(value: object) -> bool:
    """Return whether *value* is a number that can be compared with the time, also infinity."""
    try:
        return isinstance(value, numbers.Real) and not math.isnan(value)
    # A whole number too large for a float cannot be compared with the time.
    except OverflowError:
        return False


R = TypeVar("R", bound=TimerRequest)


class TimerTable(Generic[R]):
    """Timers of a server, by worker and scope."""

    def __init__(self) -> None:
        self._timers: dict[tuple[Any, str], R] = {}

    def register(self, requests: Iterable[R]) -> None:
        """Start timers, or end those whose requests have a negative deadline."""
        for request in requests:
            key = (request.worker_id, request.scope_id)
            if request.expiration_time < 0:
                self._timers.pop(key, None)
            else:
                self._timers[key] = request

    def clear(self, workers: Collection[Any]) -> None:
        self._timers = {key: timer for key, timer in self._timers.items() if key[0] not in workers}

    def expired(self, deadline: float) -> dict[Any, list[R]]:
        """Return the timers that expire at *deadline* or earlier, by worker, earliest first."""
        found: dict[Any, list[R]] = {}
        for timer in sorted(self, key=lambda each: each.expiration_time):
            if timer.expiration_time <= deadline:
                found.setdefault(timer.worker_id, []).append(timer)
        return found

    def workers(self) -> set[Any]:
        return {worker for worker, _ in self._timers}

    def __iter__(self) -> Iterator[R]:
        return iter(list(self._timers.values()))


def poll_timeout(timers: Iterable[TimerRequest], now: float, longest: float) -> float:
    """Return the seconds until a server must check *timers* again, at most *longest*."""
    # A worker that is overdue was checked just now and could not be killed: retry after a pause.
    waits = (timer.expiration_time - now if timer.expiration_time > now else _RETRY for timer in timers)
    return min(longest, min(waits, default=math.inf))


_RETRY = 1.0
