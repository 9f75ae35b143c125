"""
Progress that a worker's program reports, in memory that the launcher reads on request.

Rules of this file: a report takes a few stores, however often the launcher reads it. Outside a
job it does nothing. The program may write anywhere in its memory, so a record that cannot be
parsed counts as no report.
"""

from __future__ import annotations

import errno
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from json import dumps
from typing import Any

from elasticlib import processes
from elasticlib._clock import monotonic
from elasticlib._untrusted import parse_shallow
from elasticlib.errors import ConfigError
from elasticlib.processes import mapped_bytes, room_for_file
from elasticlib.workers.child import _should_stop

_HEAD = struct.Struct("@qqdII")
"""
Step, total, time (monotonic seconds, 0: no report yet), number of metrics, bytes of their names.
"""
_VALUES = _HEAD.size
_MOST = 32
"""Number of metrics that are kept; more are left out."""
_NAMES = _VALUES + 8 * _MOST
_SLOT = 2048
"""Bytes for each worker."""
_ROOM = _SLOT - _NAMES
_PACK = [struct.Struct(f"@{count}d") for count in range(_MOST + 1)]


@dataclass(frozen=True)
class Progress:
    """Last report of a worker's `progress`."""

    step: int
    total: int | None
    """Number of planned steps; None if it was not reported."""
    metrics: Mapping[str, float]
    age: float
    """Seconds since the report."""


class Board:
    """
    The memory of the *count* workers of a spawner, which outlives their rounds; `close` once they
    have it.
    """

    _fd = -1

    def __init__(self, count: int) -> None:
        self._fd = processes.anonymous_file("progress")
        size = count * _SLOT + _should_stop.room(count)
        with room_for_file(size) as most:
            if most < size:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
            os.ftruncate(self._fd, size)
        self._memory = mapped_bytes(self._fd)
        self.stop = _should_stop.StopBoard(self._memory, count * _SLOT, count)

    def fileno(self) -> int:
        """Return the descriptor for the workers; -1 once closed."""
        return self._fd

    def clear(self) -> None:
        """Remove all reports, before a round begins."""
        self._memory[:] = bytes(len(self._memory))

    def read(self, local_rank: int) -> Progress | None:
        """Return the last report of the worker *local_rank*; None without one."""
        start = local_rank * _SLOT
        step, total, when, count, length = _HEAD.unpack_from(self._memory, start)
        if not 0 < when < math.inf:
            return None

        # The program may have written over these numbers.
        count, length = min(count, _MOST), min(length, _ROOM)
        values = _PACK[count].unpack_from(self._memory, start + _VALUES)
        try:
            names = parse_shallow(bytes(self._memory[start + _NAMES : start + _NAMES + length]).decode())
        except ValueError:
            names = []

        named = isinstance(names, list) and all(isinstance(name, str) for name in names)
        metrics = dict(zip(names, values, strict=False)) if named else {}
        return Progress(step, None if total < 0 else total, metrics, max(0.0, monotonic() - when))

    def close(self) -> None:
        """Close the descriptor; reports can still be read."""
        descriptor, self._fd = self._fd, -1
        if descriptor >= 0:
            os.close(descriptor)

    __del__ = close


def new_board(count: int) -> Board | None:
    """
    Return the board of *count* workers; None if the limit of a file's size leaves no room for it.
    """
    try:
        return Board(count)
    except OSError as error:
        if error.errno != errno.EFBIG:
            raise
        return None


class _Slot:
    """One worker's part of the board."""

    def __init__(self, memory: memoryview, local_rank: int) -> None:
        self._memory = memory
        self._start = local_rank * _SLOT
        self._names: tuple[str, ...] = ()
        self._length = 0

    def report(self, step: int, total: int | None, metrics: Mapping[str, Any]) -> None:
        names = tuple(metrics)
        if names != self._names:
            self._rename(names)
        count = len(self._names)
        try:
            if count:
                _PACK[count].pack_into(self._memory, self._start + _VALUES, *metrics.values())
            # The head comes last: it must not count values that are not written yet.
            planned = -1 if total is None else total
            _HEAD.pack_into(self._memory, self._start, step, planned, monotonic(), count, self._length)
        except (struct.error, TypeError) as error:
            shown = ", ".join(f"{name}={value!r}" for name, value in metrics.items())
            raise ConfigError(
                f"progress({step!r}, total={total!r}{', ' if shown else ''}{shown}): step and total must be whole "
                f"numbers, each metric a number ({error}); convert them, such as by int() or float()"
            ) from None

    def clear(self) -> None:
        self._names, self._length = (), 0
        _HEAD.pack_into(self._memory, self._start, 0, -1, 0.0, 0, 0)

    def _rename(self, names: tuple[str, ...]) -> None:
        text = dumps(names).encode()
        if len(names) > _MOST or len(text) > _ROOM:
            raise ConfigError(
                f"progress(...) has {len(names)} metrics: at most {_MOST} can be reported, and their names can have "
                f"{_ROOM} bytes in total; leave some out, or shorten their names"
            )

        # No former name may stand beside a value of the new ones.
        _HEAD.pack_into(self._memory, self._start, 0, -1, 0.0, 0, 0)
        self._memory[self._start + _NAMES : self._start + _NAMES + len(text)] = text
        self._names, self._length = names, len(text)


_slot: _Slot | None = None


def attach(descriptor: int | None, local_rank: int) -> None:
    """
    Make `progress` and `should_stop` use the launcher's board; called before any of the user's code.

    Closes the descriptor.
    """
    global _slot
    if descriptor is not None:
        memory = mapped_bytes(descriptor)
        os.close(descriptor)
        _slot = _Slot(memory, local_rank)
        count = (len(memory) - _should_stop.room(0)) // (_SLOT + _should_stop.room(1) - _should_stop.room(0))
        _should_stop.attach(memory, count * _SLOT, local_rank)
        # A process that the worker forks has progress of its own, which must not replace the
        # worker's.
        os.register_at_fork(after_in_child=_detach)


def clear() -> None:
    """Remove the report, because other work begins."""
    if _slot is not None:
        _slot.clear()


def _detach() -> None:
    global _slot
    _slot = None


def progress(step: int, /, total: int | None = None, **metrics: float) -> None:
    """
    Report that this worker has reached *step*, of *total*, with *metrics*: numbers by name.

    `Job.status` shows the report. A call takes about a microsecond and never waits. Outside a
    worker of elasticlib, and in processes that a worker starts, it does nothing, so it may stay
    in the code. Raises `ConfigError` in a worker for a value that is not a number. A metric in a
    GPU's tensor is waited for, as by ``float(loss)``.
    """
    if _slot is not None:
        _slot.report(step, total, metrics)
