"""
The request to stop that a worker's program asks for, in memory that it shares with the launcher.

All ranks see the request at the same step, without a barrier in each. A call counts itself and reads
one number. After a request each rank waits once, in its next call, until the launcher has seen the
counts of all ranks: they stop at the highest one.

Rules of this file: a call without a request makes no system call. Numbers that the program may have
written over lead to a wrong step at most, and never to an error or to a wait without end.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass

from elasticlib._clock import sleep, wall_time

_HEAD = struct.Struct("@qqdqqq")
"""State, step at which all stop, deadline (Unix time), first rank, number of ranks, bytes of the reason."""
_LONGEST_REASON = 200
_ROW = struct.Struct("@qqq")
"""Of one worker: its calls, its calls when it saw the request, and 1 once it was given a `Stop`."""
_ROW_BYTES = 64
"""A cache line of its own, since each call writes there."""
_ROWS_AT = 256
_COUNT = struct.Struct("@q")
_NONE, _ASKED, _AGREED = 0, 1, 2
_TICK = 0.001
"""Seconds between two looks of a rank that waits for the others."""


@dataclass(frozen=True)
class Stop:
    """A request to stop, as `should_stop` returns it: save now, and return."""

    reason: str
    """Reason for people, such as ``signal 15 (SIGTERM)``."""
    deadline: float
    """Unix time at which workers that still run are killed."""
    ranks: tuple[int, ...]
    """Global ranks that must stop."""


def room(count: int) -> int:
    """Return the bytes that a `StopBoard` of *count* workers needs."""
    return _ROWS_AT + count * _ROW_BYTES


class StopBoard:
    """The launcher's side, in *memory* from *start* on, which is zero before a round begins."""

    def __init__(self, memory: memoryview, start: int, count: int) -> None:
        self._memory = memory
        self._start = start
        self._count = count

    def listeners(self) -> list[int]:
        """Return the local ranks whose programs have called `should_stop` in this round."""
        return [rank for rank in range(self._count) if self._row(rank)[0] > 0]

    def ask(self, reason: str, deadline: float, ranks: range) -> None:
        """Ask all workers to stop; *deadline* is a Unix time, *ranks* are global."""
        text = reason.encode()[:_LONGEST_REASON]
        place = self._start + _HEAD.size
        self._memory[place : place + len(text)] = text
        self._write(_NONE, 0, deadline, ranks, len(text))
        # The state comes last: workers that see it read the rest.
        _COUNT.pack_into(self._memory, self._start, _ASKED)

    def seen(self, local_ranks: Iterable[int]) -> dict[int, int]:
        """Return {local rank: its calls} of those among *local_ranks* that have seen the request."""
        found = {rank: self._row(rank)[1] for rank in local_ranks}
        return {rank: calls for rank, calls in found.items() if calls > 0}

    def agree(self, step: int) -> None:
        """Let each worker stop in its call number *step*, or at once if it has made more calls."""
        _COUNT.pack_into(self._memory, self._start + _COUNT.size, step)
        _COUNT.pack_into(self._memory, self._start, _AGREED)

    def given(self) -> list[int]:
        """Return the local ranks that were given a `Stop`."""
        return [rank for rank in range(self._count) if self._row(rank)[2] > 0]

    def _row(self, local_rank: int) -> tuple[int, int, int]:
        return _ROW.unpack_from(self._memory, self._start + _ROWS_AT + local_rank * _ROW_BYTES)

    def _write(self, state: int, step: int, deadline: float, ranks: range, length: int) -> None:
        _HEAD.pack_into(self._memory, self._start, state, step, deadline, ranks.start, len(ranks), length)


class _Listener:
    """One worker's side."""

    def __init__(self, memory: memoryview, start: int, local_rank: int) -> None:
        self._memory = memory
        self._start = start
        self._row = start + _ROWS_AT + local_rank * _ROW_BYTES
        self._calls = 0
        self._stop: Stop | None = None

    def called(self) -> Stop | None:
        self._calls = calls = self._calls + 1
        _COUNT.pack_into(self._memory, self._row, calls)
        if self._memory[self._start] == _NONE:
            return None
        return self._answer()

    def _answer(self) -> Stop | None:
        """Return the request once this call's number is the agreed one, or a later one."""
        if self._stop is None and self._is_time():
            self._stop = self._read()
            _COUNT.pack_into(self._memory, self._row + 2 * _COUNT.size, 1)
        return self._stop

    def _is_time(self) -> bool:
        """Wait until the ranks have agreed on a call; return True if it is this one, or an earlier one."""
        _COUNT.pack_into(self._memory, self._row + _COUNT.size, self._calls)
        while True:
            state, step, deadline, *_ = _HEAD.unpack_from(self._memory, self._start)
            if state == _AGREED:
                return bool(self._calls >= step)
            # The launcher decides before that; without it this worker would end anyway.
            if not wall_time() < deadline:
                return True
            sleep(_TICK)

    def _read(self) -> Stop:
        _, _, deadline, first, count, length = _HEAD.unpack_from(self._memory, self._start)
        place = self._start + _HEAD.size
        reason = bytes(self._memory[place : place + min(max(length, 0), _LONGEST_REASON)])
        return Stop(reason.decode(errors="replace"), deadline, tuple(range(first, first + min(count, 1 << 20))))


_listener: _Listener | None = None


def attach(memory: memoryview, start: int, local_rank: int) -> None:
    """Make `should_stop` read the launcher's board; called before any of the user's code."""
    global _listener
    _listener = _Listener(memory, start, local_rank)
    # Its calls are not those of the worker.
    os.register_at_fork(after_in_child=_detach)


def _detach() -> None:
    global _listener
    _listener = None


def should_stop() -> Stop | None:
    """
    Return a `Stop` if this worker's job must stop, else None; call it once in each step, on every rank.

    All ranks that call it get the `Stop` in the same call, counted from the start of the round. Save
    a checkpoint then, and return. A worker that has called it gets no SIGTERM before its deadline
    is near. The launch raises `PreemptedError`, and ``elasticrun`` exits with 75.

    A call takes less than a microsecond. At a request each rank waits in its next call until all
    ranks that have called before have called again. Outside a worker of elasticlib, and in processes
    that a worker starts, it returns None.
    """
    return None if _listener is None else _listener.called()
