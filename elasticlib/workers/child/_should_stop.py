"""
The request to stop that a worker's program asks for, in memory that it shares with the launcher.

All ranks stop in the same call. No rank may wait for another one, which may wait for it in a
collective. So the launcher reads how many calls each rank has made, proposes a later one, and
confirms it once it has seen that no rank has passed it. Only a rank that arrives there before waits,
and notes that it does: one in the proposed call without the note may not have seen the proposal.

The launcher alone decides: a machine that is too slow to agree stops no rank at a call of its own.

Rules of this file: a call without a request makes no system call. Numbers that the program may have
written over lead to a wrong step at most, and never to an error or to a wait without end.
"""

from __future__ import annotations

import os
import signal
import struct
import threading
from dataclasses import dataclass

from elasticlib._clock import sleep, wall_time
from elasticlib.processes import has_default_action

_HEAD = struct.Struct("@qqdqqq")
"""State, call in which all stop, deadline (Unix time), first rank, number of ranks, bytes of the reason."""
_LONGEST_REASON = 200
_ROW = struct.Struct("@qqqq")
"""
Of one worker: its calls, 1 once it was given a `Stop`, 1 if it ignores SIGTERM because it asks, and
the call in which it waits for the confirmation.
"""
_ROW_BYTES = 64
"""A cache line of its own, since each call writes there."""
_ROWS_AT = 512
_ACTS_AT = _ROWS_AT - 8
"""Place of a number that is 1 once the launcher itself stops the workers."""
_SPARED_AT = _ROWS_AT - 16
"""Place of a number that is 1 if they have the time until their deadline even then."""
_COUNT = struct.Struct("@q")
_NONE, _PROPOSED, _CONFIRMED = 0, 1, 2
NOTICES = (signal.SIGUSR1, signal.SIGUSR2)
"""
Signals by which schedulers announce the end of a job: they end nothing, and are passed to the workers
that handle them.
"""
_TICK = 0.001
"""Seconds between two looks of a rank that waits for the confirmation."""
_GIVES_UP = 30.0
"""Seconds after the deadline, at which the launcher kills all workers, that a rank still waits for it."""


@dataclass(frozen=True)
class Stop:
    """A request to stop, as `should_stop` returns it: save now, and return."""

    reason: str
    """Reason for people, such as ``signal 15``."""
    deadline: float
    """Unix time at which workers that still run are killed."""
    ranks: tuple[int, ...]
    """Global ranks of the node that must end; of several nodes, the one that was asked first."""


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

    def calls(self, proposed: int = 0) -> int:
        """
        Return the most calls that a worker has made.

        After a proposal, one in the *proposed* call counts as past it until it waits there.
        """
        found = [0]
        for rank in range(self._count):
            calls, _, _, waits_in = self._row(rank)
            may_have_passed = calls == proposed != waits_in
            found.append(calls + may_have_passed)
        return max(found)

    def ask(self, reason: str, deadline: float, ranks: range) -> None:
        """Prepare the `Stop`; *deadline* is a Unix time, *ranks* are global."""
        # Names of files may not be valid UTF-8.
        text = reason.encode(errors="replace")[:_LONGEST_REASON]
        place = self._start + _HEAD.size
        self._memory[place : place + len(text)] = text
        _HEAD.pack_into(self._memory, self._start, _NONE, 0, deadline, ranks.start, len(ranks), len(text))

    def propose(self, call: int) -> None:
        """Let workers wait in this *call* of theirs."""
        _COUNT.pack_into(self._memory, self._start + _COUNT.size, call)
        # The state comes last: workers that see it read the rest.
        _COUNT.pack_into(self._memory, self._start, _PROPOSED)

    def confirm(self) -> None:
        """Let workers stop in the proposed call."""
        _COUNT.pack_into(self._memory, self._start, _CONFIRMED)

    def let_signals_act(self) -> None:
        """Let SIGTERM end workers that have called `should_stop`: the launcher sends it now."""
        if self._is_spared():
            return
        _COUNT.pack_into(self._memory, self._start + _ACTS_AT, 1)

    def spare(self) -> None:
        """Let workers that have called `should_stop` go on until SIGKILL, whatever signal comes before."""
        _COUNT.pack_into(self._memory, self._start + _SPARED_AT, 1)

    def _is_spared(self) -> bool:
        return self._memory[self._start + _SPARED_AT] != 0

    def given(self) -> list[int]:
        """Return the local ranks that were given a `Stop`."""
        return [rank for rank in range(self._count) if self._row(rank)[1] > 0]

    def ignoring(self) -> list[int]:
        """Return the local ranks that ignore SIGTERM because they called `should_stop`; none if they are spared."""
        if self._is_spared():
            return []
        return [rank for rank in range(self._count) if self._row(rank)[2] > 0]

    def _row(self, local_rank: int) -> tuple[int, int, int, int]:
        return _ROW.unpack_from(self._memory, self._start + _ROWS_AT + local_rank * _ROW_BYTES)


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
        if calls == 1 and _leave_signals_to_launcher():
            _COUNT.pack_into(self._memory, self._row + 2 * _COUNT.size, 1)
        _COUNT.pack_into(self._memory, self._row, calls)
        if self._memory[self._start] == _NONE:
            return None
        return self._answer()

    def do_signals_act(self) -> bool:
        """Return True once the launcher itself stops the workers."""
        return self._memory[self._start + _ACTS_AT] != 0

    def _answer(self) -> Stop | None:
        """Return the request once this call is the confirmed one, or a later one."""
        if self._stop is None and self._is_time():
            self._stop = self._read()
            _COUNT.pack_into(self._memory, self._row + _COUNT.size, 1)
        return self._stop

    def _is_time(self) -> bool:
        """Return True if all stop in this call; wait while that is only proposed."""
        while True:
            state, call, deadline, *_ = _HEAD.unpack_from(self._memory, self._start)
            if self._calls < call:
                return False
            if state == _CONFIRMED:
                return True
            if not wall_time() < deadline + _GIVES_UP:
                # Only memory that was written over: the launcher would have killed this worker.
                return False
            _COUNT.pack_into(self._memory, self._row + 3 * _COUNT.size, call)
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


def _leave_signals_to_launcher() -> bool:
    """
    Ignore the signals of schedulers, and SIGTERM until the launcher sends it, unless the program handles them.

    Return True if SIGTERM is ignored.

    Slurm sends a signal to every process of a step at once, which would end this worker before its next step.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    for signum in NOTICES:
        if has_default_action(signum):
            # Not SIG_IGN, which the programs that this one starts would inherit.
            signal.signal(signum, _ignore)

    is_ours = has_default_action(signal.SIGTERM)
    if is_ours:
        signal.signal(signal.SIGTERM, _handle_sigterm)
    return is_ours


def _ignore(signum: int, _: object) -> None:
    """Do nothing: the launcher gets the signal as well, and asks this worker to stop."""


def _handle_sigterm(signum: int, _: object) -> None:
    is_for_launcher = _listener is not None and not _listener.do_signals_act()
    if not is_for_launcher:
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)


def _detach() -> None:
    global _listener
    _listener = None


def should_stop() -> Stop | None:
    """
    Return a `Stop` if this worker's job must stop, else None; call it once in each step, on every rank.

    All ranks that call it get the `Stop` in the same call, counted from the start of the round. Save
    a checkpoint then, and return. A worker that has called it ignores SIGTERM and has time until the
    deadline, unless it handles that signal itself. The launch raises `PreemptedError`, and
    ``elasticrun`` exits with 75.

    A call takes less than a microsecond, and no rank waits for another. Outside a worker of
    elasticlib, and in processes that a worker starts, it returns None.
    """
    return None if _listener is None else _listener.called()
