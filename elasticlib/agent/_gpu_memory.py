"""
Waits, between two rounds, for the GPU memory of the workers that ended.

Rules of this file: it costs nothing where no NVIDIA driver or no ``nvidia-ml-py`` is; a wait is the agent's, with all
that may interrupt it: nothing here blocks. Whatever keeps the memory from being read is said once, and the workers
start without the wait.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import sys
from collections.abc import Mapping

from elasticlib import records
from elasticlib._clock import Clock, monotonic
from elasticlib._programs import BEGIN, Link, Process, search_path, spawn
from elasticlib._wire import Channel, wait_readable
from elasticlib.agent._checks import as_seconds
from elasticlib.agent._gpu_release import LIMIT, Release
from elasticlib.errors import StartError

TIMEOUT = "ELASTICLIB_GPU_MEMORY_TIMEOUT"
DRIVER = "/dev/nvidiactl"
"""What NVIDIA's driver makes."""
_END_LIMIT = 0.5
_ENDED = "the program that reads it has ended"
_PROGRAM = BEGIN + "from elasticlib.agent._gpu_reader import main; main()"


class GpuMemory:
    """
    The memory of the GPUs that workers with *environment* see.

    Once `open`, `begin` is called before each start of workers; then `look` until that says None. Nothing is waited for
    before the first start: what is in use then is not of workers that ended.
    """

    def __init__(self, environment: Mapping[str, str], sink: records.Sink, *, clock: Clock = monotonic) -> None:
        self._environment = environment
        self._sink = sink
        self._clock = clock
        self._link: Link | None = None
        self._process: Process | None = None
        self._asked = False
        """Whether a reading is under way."""
        self._before: dict[str, int] = {}
        """Bytes in use on each GPU before this job had any workers."""
        self._release: Release | None = None
        """The wait that is under way."""
        self._is_first = True
        self._next = 0.0
        """When the memory is to be read again."""
        self._limit = LIMIT

    def open(self) -> None:
        """Start the program that reads, where there is something to read, and have it look for the first time."""
        text = self._environment.get(TIMEOUT)
        if text:
            seconds = as_seconds(text)
            if seconds is None or seconds < 0:
                rule = "it must be a number of seconds, 0 for no wait"
                effect = f"the memory of workers that ended is waited for {LIMIT:g} s at most"
                self._sink(records.VariableIgnored(TIMEOUT, text, rule, effect))
            else:
                self._limit = seconds
        if not self._limit or not os.path.exists(DRIVER) or not _has_bindings():
            return
        ours, theirs = Channel.pair()
        with contextlib.closing(theirs):
            command = [sys.executable, "-c", _PROGRAM, search_path()]
            try:
                self._process = spawn(command, self._environment, theirs.fileno())
            except StartError as error:
                ours.close()
                self._sink(records.GpuMemoryUnknown(str(error)))
                return
        self._link = Link(ours)
        self._ask()

    def fileno(self) -> int:
        """Readable when there is something to `look` at; -1 when nothing is waited for."""
        return -1 if self._link is None else self._link.fileno()

    def begin(self) -> None:
        """Workers are about to start: the first ones, or others after those that ended."""
        self._hear()
        first, self._is_first = self._is_first, False
        if first or not self._before or self._link is None:
            return
        self._next = self._clock()
        self._release = Release(self._before, self._next, self._limit)

    def look(self) -> float | None:
        """Seconds until the next look, or until this becomes readable; None when the workers may start."""
        if self._release is None:
            return None
        used, now = self._hear(), self._clock()
        if used is not None and self._is_enough(used, now):
            self._release = None
        elif self._asked and not self._release.left(now):
            self._give_up(f"the driver has not answered for {self._release.waited(now):.0f} s")
        elif self._link is not None and not self._asked and now >= self._next:
            self._ask()
        if self._release is None or self._link is None:
            return None
        return self._release.left(now) if self._asked else self._next - now

    def _is_enough(self, used: dict[str, int], now: float) -> bool:
        assert self._release is not None
        held, waited = self._release.held(used), self._release.waited(now)
        if not held:
            self._sink(records.GpuMemoryFree(waited))
        elif not self._release.left(now):
            self._sink(records.GpuMemoryHeld(held, waited))
            # What nobody frees belongs to somebody else: the next round does not wait for it again.
            self._before |= used
        else:
            self._next = now + self._release.pause(now)
            return False
        return True

    def close(self) -> None:
        """End the program, whatever it is at."""
        self._drop()
        process, self._process = self._process, None
        if process is not None:
            process.wait(_END_LIMIT)

    def _drop(self) -> None:
        """Ask it no more; it has no state that its end could harm."""
        link, self._link = self._link, None
        self._release, self._asked = None, False
        if link is not None:
            link.close()
        if self._process is not None:
            self._process.send(signal.SIGKILL)

    def _ask(self) -> None:
        assert self._link is not None
        if self._link.send({"op": "read"}):
            self._asked = True
        else:
            self._give_up(_ENDED)

    def _hear(self) -> dict[str, int] | None:
        """The reading that has come, if one has; the first one is what GPUs held before this job."""
        if self._link is None or not wait_readable([self._link], 0):
            return None
        received = self._link.receive()
        if received is None or "why" in received[0]:
            self._give_up(_ENDED if received is None else received[0]["why"])
            return None
        self._asked = False
        used: dict[str, int] = received[0]["used"]
        self._before = self._before or used
        return used

    def _give_up(self, why: str) -> None:
        self._sink(records.GpuMemoryUnknown(why))
        self._drop()


def _has_bindings() -> bool:
    try:
        return importlib.util.find_spec("pynvml") is not None
    except ValueError:  # the program has put something of its own in their place
        return False
