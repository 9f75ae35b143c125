"""
The wait, between two rounds, for the GPU memory of workers that ended.

A killed process is gone before the driver has freed its memory. Workers that start at once may run
out of memory that no process uses.

Rules of this file: only a separate process (`main`) calls NVML. A driver that hangs blocks its
caller, and not even SIGKILL ends that, so a launcher with such a thread could not exit. The wait
happens in that process; the launcher sends a request and does not block. If the memory cannot be
read, that is logged once, and the workers start. Memory is in bytes by a GPU's name. Without an
NVIDIA driver or without ``nvidia-ml-py`` it costs nothing.
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
"""Device file of NVIDIA's driver."""
TOLERANCE = 512 * 2**20
"""Bytes in use that a GPU may have gained: less than one CUDA context of a worker."""
LIMIT = 30.0
"""Maximum wait in seconds: drivers need a few for a large GPU, and more only if they hang."""
LATE = 1.0
"""Additional seconds for an answer that is on its way."""
_PAUSE = 0.05
"""Seconds between two readings."""
_END_LIMIT = 0.5
_ENDED = "the program that reads it has exited"
_PROGRAM = BEGIN_CODE + "from elasticlib.agent._gpu_memory import main; main()"


class GpuMemory:
    """
    Memory of the GPUs that workers with *environment* see.

    After `open`, call `begin` before each start of workers, then `look` until it returns None. The
    first start does not wait: memory in use then does not belong to workers that ended.
    """

    def __init__(self, environment: Mapping[str, str], sink: records.Sink, *, clock: Clock = monotonic) -> None:
        self._environment = environment
        self._sink = sink
        self._clock = clock
        self._limit = LIMIT
        self._link: Link | None = None
        self._process: Process | None = None
        self._request = 0
        """Number of the last request; an answer to an interrupted, earlier one may still arrive."""
        self._before: dict[str, int] = {}
        """Bytes in use on each GPU before this job had any workers."""
        self._is_first = True
        self._began: float | None = None
        """Start of the current wait; None if there is none."""

    def open(self) -> None:
        """Start the process that reads the memory, if that is possible; request a first reading."""
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
        """Return a descriptor that becomes readable when `look` has news; -1 without a process."""
        return -1 if self._link is None else self._link.fileno()

    def begin(self) -> None:
        """Start a wait before workers start, except before the first ones."""
        answer = self._receive()
        if answer is not None and not self._before:
            self._before = answer["used"]
        is_first, self._is_first = self._is_first, False
        if is_first or not self._before or self._link is None:
            return
        self._began = self._clock()
        self._send()

    def look(self) -> float | None:
        """
        Return the maximum seconds until the next call; None when the workers may start.

        Call it earlier if `fileno` becomes readable.
        """
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
        """End the process, even in the middle of a reading."""
        self._drop()
        process, self._process = self._process, None
        if process is not None:
            process.wait(_END_LIMIT)

    def _limit_given(self) -> float:
        # The process that reads imports this module, and does not need this import.
        from elasticlib.agent._checks import as_seconds

        text = self._environment.get(TIMEOUT)
        if not text:
            return LIMIT

        seconds = as_seconds(text)
        if seconds is not None and seconds >= 0:
            return min(seconds, LONGEST_TIME)

        rule = "it must be a number of seconds, 0 for no wait"
        effect = f"restarts wait {LIMIT:g} s at most for the memory of workers that ended"
        self._sink(records.VariableIgnored(TIMEOUT, text, rule, effect))
        return LIMIT

    def _send(self) -> None:
        assert self._link is not None
        self._request += 1
        request = {"number": self._request, "before": self._before, "limit": self._limit}
        # A process that has exited may have given a reason: `_receive` finds both.
        self._link.send(request)

    def _receive(self) -> Message | None:
        """Return the answer to the last request if it has arrived; drop those to earlier ones."""
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
        # This memory belongs to another program: later rounds must not wait for it again.
        self._before |= used

    def _give_up(self, why: str) -> None:
        self._sink(records.GpuMemoryUnknown(why))
        self._drop()

    def _drop(self) -> None:
        """Kill the process; it has no state to lose."""
        link, self._link = self._link, None
        self._began = None
        if link is not None:
            link.close()
        if self._process is not None:
            self._process.send(signal.SIGKILL)


def _has_bindings() -> bool:
    try:
        return importlib.util.find_spec("pynvml") is not None
    except ValueError:  # the program has replaced the module in sys.modules
        return False


def used_beyond(before: Mapping[str, int], used: Mapping[str, int]) -> dict[str, int]:
    """
    Return the bytes that each GPU has gained since *before*, if they exceed `TOLERANCE`.

    A GPU that could not be read before, or cannot be read now, is left out.
    """
    more = {gpu: used[gpu] - before[gpu] for gpu in sorted(used.keys() & before.keys())}
    return {gpu: count for gpu, count in more.items() if count > TOLERANCE}


# In the process that reads the memory.


def main() -> None:
    """
    Answer the launcher's requests until it closes its end of the channel.

    The answer is the first reading with free memory, or the last one within the request's limit.
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
                    # The launcher has stopped waiting, or has sent its next request.
                    break
                used = _read(pynvml)
            channel.send({"number": request["number"], "used": used})
    except Exception as error:  # any error of the bindings ends only the readings
        channel.send({"why": f"{type(error).__name__}: {error}"})


def _read(nvml: Any) -> dict[str, int]:
    """Return the bytes in use on each visible GPU that answers; one may be off the bus."""
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
    Return the indices of the GPUs that CUDA_VISIBLE_DEVICES=*listed* shows; None shows all.

    *names* are the GPUs' UUIDs, by index. As in CUDA, an entry is a number or a prefix of a UUID;
    the first entry that is neither ends the list. A part of a GPU (MIG) counts as neither.
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
