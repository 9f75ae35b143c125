"""
What a timer is, and which of them run. PURE: requests in, what has expired out.

Rules of this file: a timer is known by its worker and its scope; a second one under the same name takes the first
one's place. Deadlines are whatever the requests say, in seconds.
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
    Begins the timer *scope_id* of a worker, or releases it when *expiration_time* is negative.

    *worker_id* is whatever client and server agree on, for those of this package a process id. *expiration_time*
    is in seconds since the epoch. (torch: ``torch.distributed.elastic.timer.TimerRequest``)
    """

    worker_id: Any
    scope_id: str
    expiration_time: float

    def __repr__(self) -> str:
        return f"{type(self).__name__}{astuple(self, recurse=False)!r}"


def is_deadline(value: object) -> bool:
    """Whether *value* is a number that can be compared with the time, such as no clock ever shows, too."""
    try:
        return isinstance(value, numbers.Real) and not math.isnan(value)
    except OverflowError:
        return False


R = TypeVar("R", bound=TimerRequest)


class TimerTable(Generic[R]):
    """The timers of a server, by worker and scope."""

    def __init__(self) -> None:
        self._timers: dict[tuple[Any, str], R] = {}

    def register(self, requests: Iterable[R]) -> None:
        """Begin timers, or end those whose requests have a negative deadline."""
        for request in requests:
            key = (request.worker_id, request.scope_id)
            if request.expiration_time < 0:
                self._timers.pop(key, None)
            else:
                self._timers[key] = request

    def clear(self, workers: Collection[Any]) -> None:
        self._timers = {key: timer for key, timer in self._timers.items() if key[0] not in workers}

    def expired(self, deadline: float) -> dict[Any, list[R]]:
        """By worker, the timers whose time is over at *deadline*, the earliest first."""
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
    """Seconds until a server must look at these *timers* again, at most *longest*."""
    # What is overdue was looked at just now, and could not be killed: not again at once, and again.
    waits = (timer.expiration_time - now if timer.expiration_time > now else _RETRY for timer in timers)
    return min(longest, min(waits, default=math.inf))


_RETRY = 1.0
