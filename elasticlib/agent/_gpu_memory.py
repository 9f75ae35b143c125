"""
Waits, between two rounds, for the GPU memory of the workers that ended.

A process that was killed is gone before its driver has freed its memory, so workers that start at once may run out of
memory that nobody uses.

Rules of this file: only a process of its own (`main`) calls NVML. A driver that hangs keeps its caller, which not even
SIGKILL ends, and a launcher with such a thread could not end. All of the wait happens there; the launcher sends a
request, and does not block. Whatever keeps the memory from being read is logged once, and the workers start.
Memory is in bytes by a GPU's name. It costs nothing where no NVIDIA driver or no ``nvidia-ml-py`` is.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from elasticlib import records
from elasticlib._clock import Clock, monotonic
from elasticlib._untrusted import LONGEST_TIME
from elasticlib.errors import StartError
from elasticlib.processes import (
    BEGIN_CODE,
    CHANNEL_FD,
    Channel,
    Link,
    Message,
    Process,
    search_path_argument,
    spawn,
    wait_readable,
    wake_with_parent,
)
from elasticlib.workers import CUDA_DEVICES_VARIABLE

TIMEOUT = "ELASTICLIB_GPU_MEMORY_TIMEOUT"
DRIVER = "/dev/nvidiactl"
"""What NVIDIA's driver makes."""
TOLERANCE = 512 * 2**20
"""Bytes that a GPU may hold beyond what it held before: less than one CUDA context of a worker."""
LIMIT = 30.0
"""Seconds of waiting: drivers take some for a large GPU, and longer only where they hang."""
LATE = 1.0
"""Seconds beyond the limit for an answer that is on its way."""
_PAUSE = 0.05
"""Seconds between two readings."""
_END_LIMIT = 0.5
_ENDED = "the program that reads it has ended"
_PROGRAM = BEGIN_CODE + "from elasticlib.agent._gpu_memory import main; main()"


class GpuMemory:
    """
    The memory of the GPUs that workers with *environment* see.

    Once `open`, `begin` is called before each start of workers; then `look` until it returns None. Nothing is waited
    for before the first start: memory in use then is not of workers that ended.
    """

    def __init__(self, environment: Mapping[str, str], sink: records.Sink, *, clock: Clock = monotonic) -> None:
        self._environment = environment
        self._sink = sink
        self._clock = clock
        self._limit = LIMIT
        self._link: Link | None = None
        self._process: Process | None = None
        self._request = 0
        """Number of the last request: a wait may be interrupted, and its answer still arrive."""
        self._before: dict[str, int] = {}
        """Bytes in use on each GPU before this job had any workers."""
        self._is_first = True
        self._began: float | None = None
        """When the wait that is under way began."""

    def open(self) -> None:
        """Start the program that reads, where there is something to read, and have it read once."""
        self._limit = self._limit_given()
        if not self._limit or not os.path.exists(DRIVER) or not _has_bindings():
            return
        ours, theirs = Channel.pair()
        with contextlib.closing(theirs):
            command = [sys.executable, "-c", _PROGRAM, search_path_argument()]
            try:
                self._process = spawn(command, self._environment, theirs.fileno())
            except StartError as error:
                ours.close()
                self._sink(records.GpuMemoryUnknown(str(error)))
                return
        self._link = Link(ours)
        self._send()

    def fileno(self) -> int:
        """Readable when there is something to `look` at; -1 when nothing is waited for."""
        return -1 if self._link is None else self._link.fileno()

    def begin(self) -> None:
        """Workers are about to start: the first ones, or others after those that ended."""
        answer = self._receive()
        if answer is not None and not self._before:
            self._before = answer["used"]
        is_first, self._is_first = self._is_first, False
        if is_first or not self._before or self._link is None:
            return
        self._began = self._clock()
        self._send()

    def look(self) -> float | None:
        """Seconds until the next look, or until this becomes readable; None when the workers may start."""
        if self._began is None:
            return None
        waited = self._clock() - self._began
        answer = self._receive()
        if answer is not None:
            self._began = None
            self._end_wait(answer, waited)
            return None
        if self._link is None:
            return None
        if waited >= self._limit + LATE:
            self._give_up(f"the driver has not answered for {self._limit:.0f} s")
            return None
        return self._limit + LATE - waited

    def close(self) -> None:
        """End the program, even in the middle of a reading."""
        self._drop()
        process, self._process = self._process, None
        if process is not None:
            process.wait(_END_LIMIT)

    def _limit_given(self) -> float:
        # The program that reads imports this module, and has no need of what this one imports.
        from elasticlib.agent._checks import as_seconds

        text = self._environment.get(TIMEOUT)
        if not text:
            return LIMIT
        seconds = as_seconds(text)
        if seconds is not None and seconds >= 0:
            return min(seconds, LONGEST_TIME)
        rule = "it must be a number of seconds, 0 for no wait"
        effect = f"the memory of workers that ended is waited for {LIMIT:g} s at most"
        self._sink(records.VariableIgnored(TIMEOUT, text, rule, effect))
        return LIMIT

    def _send(self) -> None:
        assert self._link is not None
        self._request += 1
        request = {"number": self._request, "before": self._before, "limit": self._limit}
        if not self._link.send(request):
            self._give_up(_ENDED)

    def _receive(self) -> Message | None:
        """Return the answer to the last request, if it is there; those to earlier ones are dropped."""
        while self._link is not None and wait_readable([self._link], 0):
            received = self._link.receive()
            if received is None:
                self._give_up(_ENDED)
            elif "why" in received[0]:
                self._give_up(received[0]["why"])
            elif received[0]["number"] == self._request:
                return received[0]
        return None

    def _end_wait(self, answer: Message, waited: float) -> None:
        used: dict[str, int] = answer["used"]
        excess = used_beyond(self._before, used)
        if not excess:
            self._sink(records.GpuMemoryFree(waited))
            return
        self._sink(records.GpuMemoryHeld(excess, waited))
        # Memory that nobody frees belongs to somebody else: no later round waits for it again.
        self._before |= used

    def _give_up(self, why: str) -> None:
        self._sink(records.GpuMemoryUnknown(why))
        self._drop()

    def _drop(self) -> None:
        """End the program; it has no state that its end could harm."""
        link, self._link = self._link, None
        self._began = None
        if link is not None:
            link.close()
        if self._process is not None:
            self._process.send(signal.SIGKILL)


def _has_bindings() -> bool:
    try:
        return importlib.util.find_spec("pynvml") is not None
    except ValueError:  # the program has put something of its own in their place
        return False


def used_beyond(before: Mapping[str, int], used: Mapping[str, int]) -> dict[str, int]:
    """
    Return the bytes that each GPU holds beyond what it held *before*, of those where that is too many.

    A GPU that could not be read before, or cannot be read now, is not among them.
    """
    more = {gpu: used[gpu] - before[gpu] for gpu in sorted(used.keys() & before.keys())}
    return {gpu: count for gpu, count in more.items() if count > TOLERANCE}


# In the process that reads.


def main() -> None:
    """
    Answer the launcher's requests until it closes its end of the channel.

    The answer is the first reading in which the memory is free, or the last one when the request's limit is over.
    """
    channel = Channel.adopt(CHANNEL_FD)
    wake_with_parent()
    try:
        import pynvml  # type: ignore[import-not-found]

        pynvml.nvmlInit()
        while (received := channel.receive()) is not None:
            request, _ = received
            ends = monotonic() + request["limit"]
            used = _read(pynvml)
            while used_beyond(request["before"], used) and monotonic() < ends:
                if wait_readable([channel], _PAUSE):
                    # The launcher gave up waiting, or waits for the answer to its next request.
                    break
                used = _read(pynvml)
            channel.send({"number": request["number"], "used": used})
    except Exception as error:  # whatever the bindings raise ends the readings, and nothing else
        channel.send({"why": f"{type(error).__name__}: {error}"})


def _read(nvml: Any) -> dict[str, int]:
    """Bytes in use on each visible GPU, without one that does not answer (it fell off the bus)."""
    listed = os.environ.get(CUDA_DEVICES_VARIABLE)
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    names = [""] * len(handles)
    if listed is not None:
        names = [str(nvml.nvmlDeviceGetUUID(handle)) for handle in handles]
    found = {}
    for index in visible(listed, names):
        with contextlib.suppress(nvml.NVMLError):
            found[f"GPU {index}"] = int(nvml.nvmlDeviceGetMemoryInfo(handles[index]).used)
    return found


def visible(listed: str | None, names: Sequence[str]) -> list[int]:
    """
    Return which of the GPUs *names* (UUIDs, by index) a CUDA_VISIBLE_DEVICES of *listed* shows; None shows all.

    As CUDA reads it: numbers, or beginnings of UUIDs, up to the first entry that is neither. A part of a GPU (MIG)
    counts as neither.
    """
    if listed is None:
        return list(range(len(names)))
    found: set[int] = set()
    for entry in listed.split(","):
        index = _index_of(entry.strip(), names)
        if index is None:
            break
        found.add(index)
    return sorted(found)


def _index_of(entry: str, names: Sequence[str]) -> int | None:
    is_number = entry.isascii() and entry.isdecimal()
    if is_number and int(entry) < len(names):
        return int(entry)
    if not entry:
        return None
    fitting = [index for index, name in enumerate(names) if name.startswith(entry)]
    return fitting[0] if len(fitting) == 1 else None
