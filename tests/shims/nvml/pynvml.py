"""
NVML of a machine whose GPUs are in the JSON file ``NVML_STATE``: [[uuid, bytes in use, or null once it is lost]].

Bytes may be a list, by the number of the reading. Each one is a line ``read`` in the file ``NVML_LOG``, if that is set.
"""

from __future__ import annotations

import json
import os
import types
from typing import Any

_readings: list[int] = []


class NVMLError(Exception):
    """As the bindings raise it."""


def nvmlInit() -> None:  # noqa: N802
    if words := os.environ.get("NVML_BREAKS"):
        raise NVMLError(words)


def nvmlDeviceGetCount() -> int:  # noqa: N802
    _readings.append(len(_readings))
    if path := os.environ.get("NVML_LOG"):
        with open(path, "a", encoding="utf-8") as file:
            file.write("read\n")
    return len(_state())


def nvmlDeviceGetHandleByIndex(index: int) -> int:  # noqa: N802
    return index


def nvmlDeviceGetUUID(handle: int) -> str:  # noqa: N802
    return str(_state()[handle][0])


def nvmlDeviceGetMemoryInfo(handle: int) -> Any:  # noqa: N802
    used = _state()[handle][1]
    if used is None:
        raise NVMLError("GPU is lost")
    return types.SimpleNamespace(used=used[min(_readings[-1], len(used) - 1)] if isinstance(used, list) else used)


def _state() -> list[Any]:
    """Read the state; if the file is a named pipe without a writer, simulate a driver that hangs."""
    with open(os.environ["NVML_STATE"], encoding="utf-8") as file:
        return list(json.load(file))
