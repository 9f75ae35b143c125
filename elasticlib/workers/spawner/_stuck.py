"""
Workers that will not return to Python, as opposed to those that handle the signal that stops
them.

A rank that waits for its peers in a collective never returns to Python unless one of them ends, so
it never handles the signal. A worker that has noted the signal (`_signal_table`), and has begun
nothing since, is *deaf*.

Another worker that is still at work may free a deaf one. So none is *stuck* while one on this
machine is not deaf, uses the processor, or waits for a disk. The end of a worker must help
another one that waits, or a restart. A worker that writes, as its bytes or an open file show,
waits for no other and keeps its time.

Rules of this file: a worker that cannot be read is not stuck. It sends no signal.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from elasticlib.processes import process_facts
from elasticlib.workers.spawner import _kernel_facts, _signal_table
from elasticlib.workers.spawner._signal_table import Handler

INTERVAL = 0.25
"""Seconds between two looks."""
STUCK = 2.0
"""
Seconds for which all workers must have been deaf and idle, if the signal would raise
`KeyboardInterrupt`.
"""
STUCK_WITH_HANDLERS = 10.0
"""The same if the program has a handler of its own, such as one that saves a checkpoint."""
_PAUSE = 0.5
"""Seconds in which the end of one worker may free the others."""
_IDLE_SHARE = 0.05
"""Share of a processor that a waiting process may use."""
_TICK = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class UnhandledSignal:
    """A worker that has not begun to handle the signal."""

    cpu: float
    """Seconds of processor time that the process has used."""
    sleeps: bool
    """True if its main thread waits, but not for a disk."""
    own_handler: bool
    """True if the program has a handler of its own for the signal."""
    written: int = 0
    """Bytes that the process has written."""
    own_file: bool = False
    """True if it or a child of it has a file of its own open for writing."""


@dataclass(frozen=True)
class _IdleTime:
    """A deaf worker that is idle."""

    since: float
    cpu: float
    """Seconds of processor time that it had used by then."""


@dataclass(frozen=True)
class _Written:
    """The bytes that a worker has written."""

    count: int
    grew_at: float = -math.inf
    """Time of the look that found more of them; -inf: they did not grow."""


@dataclass
class RoundStop:
    """The workers of one round while *signum* stops them; *began* is the time of the signal."""

    signum: int
    began: float
    restart_waits: bool = False
    """True if the next round waits for all ends; otherwise the last worker keeps its whole time."""
    next_look: float = field(init=False)
    """Time for the next call of `stuck`."""
    _idle: dict[int, _IdleTime] = field(default_factory=dict)
    """Deaf workers by local rank; one that is not idle at a look begins again there."""
    _written: dict[int, _Written] = field(default_factory=dict)
    """By local rank."""
    _all_deaf_since: float = field(init=False)
    """Time of the last look that found a worker which was not deaf, or of the signal."""
    _ended_at: float = -math.inf
    """Time when `stuck` last returned a worker."""

    def __post_init__(self) -> None:
        self.next_look, self._all_deaf_since = self.began + INTERVAL, self.began

    def stuck(self, looks: Mapping[int, UnhandledSignal | None], now: float) -> int | None:
        """
        Return the local rank that must be killed now to help the others; None for none.

        *looks* holds a look at each living worker, None for one that is not deaf. The result is
        the last rank, because the first one often has data to save.
        """
        self.next_look = now + INTERVAL
        deaf = self._note(looks, now)
        if not deaf:
            return None

        # The end of a worker may have freed the others, which need a moment to return to Python.
        has_just_ended_one = now < self._ended_at + _PAUSE
        if has_just_ended_one or not self._all_had_their_time(deaf, now):
            return None

        # The end of a single one would free no other: the others write, and wait for no peer.
        waiting = [rank for rank, seen in deaf.items() if not self._writes(rank, seen, now)]
        least = 1 if self.restart_waits else 2
        if len(waiting) < least:
            return None

        self._ended_at = now
        return max(waiting)

    def _note(self, looks: Mapping[int, UnhandledSignal | None], now: float) -> Mapping[int, UnhandledSignal]:
        """Note what the workers do; return them if all are deaf, else none."""
        deaf: dict[int, UnhandledSignal] = {}
        for rank, seen in looks.items():
            if seen is None:
                # A worker at work may still free the others: their time begins again.
                self._idle.clear()
                self._all_deaf_since = now
                return {}
            deaf[rank] = seen
            self._note_deaf(rank, seen, now)
        return deaf

    def _note_deaf(self, rank: int, seen: UnhandledSignal, now: float) -> None:
        """Note since when a deaf worker is idle."""
        grows = self._note_written(rank, seen.written, now)
        idle = self._idle.setdefault(rank, _IdleTime(self._all_deaf_since, seen.cpu))

        # The kernel counts whole ticks, of two kinds: each of them may be a rounded part of one.
        allowed = 2 * _TICK + _IDLE_SHARE * (now - idle.since)
        works = not seen.sleeps or seen.cpu - idle.cpu > allowed

        # A writer may free the others when it is done; a waiting restart does not wait for that.
        saves = grows and not self.restart_waits
        if works or saves:
            self._idle[rank] = _IdleTime(now, seen.cpu)

    def _note_written(self, rank: int, count: int, now: float) -> bool:
        """Note the bytes that a worker has written; return True if they grew since the last look."""
        last = self._written.setdefault(rank, _Written(count))
        grows = count != last.count
        if grows:
            self._written[rank] = _Written(count, now)
        return grows

    def _all_had_their_time(self, deaf: Mapping[int, UnhandledSignal], now: float) -> bool:
        has_handlers = any(seen.own_handler for seen in deaf.values())
        limit = STUCK_WITH_HANDLERS if has_handlers else STUCK
        last_idle_since = max(self._idle[rank].since for rank in deaf)
        return now - last_idle_since >= limit

    def _writes(self, rank: int, seen: UnhandledSignal, now: float) -> bool:
        return seen.own_file or now - self._written[rank].grew_at < STUCK


def look(pid: int, signum: int) -> UnhandledSignal | None:
    """
    Look at *pid*, which was sent *signum*; None if it has begun to handle the signal, or cannot
    be read.
    """
    facts = process_facts(pid)
    if facts is None:
        return None

    handler = _signal_table.waiting_handler(pid, signum)
    if handler is None:
        return None

    # Fields 14 and 15 of proc(5): ticks of the processor in the program, and for it in the kernel.
    cpu = (int(facts[11]) + int(facts[12])) * _TICK

    # A checkpoint may be written by a child while the worker waits for its peers.
    family = [pid, *_kernel_facts.children(pid)]
    return UnhandledSignal(
        cpu=cpu,
        sleeps=facts[0] == b"S",
        own_handler=handler is Handler.OWN,
        written=_kernel_facts.written_bytes(pid),
        own_file=any(map(_kernel_facts.has_own_file, family)),
    )
