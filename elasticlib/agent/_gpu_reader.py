"""
The program that reads how much memory of the GPUs is in use; NVML tells it without a context on any of them.

It is a process of its own: a driver that hangs keeps whoever asks it. It is asked over its channel, answers each
request with one reading, and ends when nobody can ask any more. It needs ``nvidia-ml-py`` (NVIDIA's own bindings).
"""

from __future__ import annotations

import os
from typing import Any

from elasticlib._programs import CHANNEL_FD, wake_with_parent
from elasticlib._wire import Channel
from elasticlib.agent._gpu_release import visible
from elasticlib.workers._environment import DEVICES


def main() -> None:
    """Serve the launcher until its end of the channel is closed."""
    channel = Channel.adopt(CHANNEL_FD)
    wake_with_parent()
    nvml: Any = None
    while channel.receive() is not None:
        try:
            nvml = nvml or _initialised()
            answer: dict[str, Any] = {"used": _used(nvml, os.environ.get(DEVICES))}
        except Exception as error:  # whatever the bindings raise here costs this reading, and no more
            answer = {"why": f"{type(error).__name__}: {error}"}
        channel.send(answer)


def _initialised() -> Any:
    import pynvml  # type: ignore[import-not-found]

    pynvml.nvmlInit()
    return pynvml


def _used(nvml: Any, listed: str | None) -> dict[str, int]:
    """Bytes in use on each GPU that is visible, by its name; one that does not answer (it fell off the bus) is not."""
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    names = [str(nvml.nvmlDeviceGetUUID(each)) for each in handles] if listed is not None else [""] * len(handles)
    found = {}
    for index in visible(listed, names):
        try:
            found[f"GPU {index}"] = int(nvml.nvmlDeviceGetMemoryInfo(handles[index]).used)
        except nvml.NVMLError:
            continue
    return found
