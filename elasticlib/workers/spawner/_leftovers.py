"""
The check for effects of an import that a forked worker cannot use, after each import of the fork
server.

Rules of this file: in doubt an import has such effects. It replaces no function of Python, and
adds no hook.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from elasticlib.processes import FORK_SERVER_FD, KEPT_FD
from elasticlib.workers.child import _threads

RANK_VARIABLES = frozenset({"RANK", "LOCAL_RANK", "WORLD_SIZE"})
_DEVICE_FILES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/render", "/dev/accel", "/dev/davinci", "/dev/habanalabs")


def why_refused(module: str) -> str | None:
    """
    Import *module*; return the reason why a forked worker could not use it.

    None if it can.
    """
    threads, tasks = threading.active_count(), _tasks()
    with _absences() as sought:
        importlib.import_module(module)
    reads = RANK_VARIABLES & {os.fsdecode(name) for name in sought}
    if threading.active_count() > threads:
        names = ", ".join(thread.name for thread in threading.enumerate()[threads:])
        return f"its import starts a Python thread ({names}), which would be missing in the workers"

    if _has_new_native_threads(tasks):
        return "its import starts native threads, which would be missing in the workers"

    devices = {path for path, _ in open_files() if path.startswith(_DEVICE_FILES)}
    if devices:
        return f"its import opens an accelerator ({', '.join(sorted(devices))}), which cannot be used after a fork"
    if reads:
        return f"its import reads {', '.join(sorted(reads))}, which each worker has for itself"

    return None


def _has_new_native_threads(before: int) -> bool:
    """Return True if there are more threads than *before*, without those of OpenBLAS."""
    new = _tasks() - before
    if new <= 0:
        return False
    # OpenBLAS has a pool with a fork handler of its own that ends and restarts it.
    _threads.note_blas_libraries()
    of_openblas = sum(getter() - 1 for getter, _ in _threads.blas_libraries())
    return bool(_tasks() - before > of_openblas)


def hooks_run() -> bool:
    """
    Return True if the interpreter's start left threads or sockets, with which no worker can be
    forked.
    """
    own = {FORK_SERVER_FD, KEPT_FD}
    sockets = [path for path, number in open_files() if path.startswith("socket:") and number not in own]
    return _tasks() > 1 or len(sockets) > 0


class _NotedEnvironment(dict[bytes, bytes]):
    """
    The table behind ``os.environ``, which notes the names that were looked up and are not in it.
    """

    def __init__(self, content: dict[bytes, bytes]) -> None:
        super().__init__(content)
        self.sought: set[bytes] = set()

    def __missing__(self, name: bytes) -> bytes:
        self.sought.add(name)
        raise KeyError(name)


@contextmanager
def _absences() -> Iterator[set[bytes]]:
    """
    Collect the absent variables that Python code looks up in the block; the fork server has no
    rank variables.

    Only the table with the values is replaced meanwhile. So an object that an import keeps, such
    as a method of ``os.environ``, stays Python's own.
    """
    plain = os.environ._data  # type: ignore[attr-defined]
    noting = _NotedEnvironment(plain)
    os.environ._data = os.environb._data = noting  # type: ignore[attr-defined]
    try:
        yield noting.sought
    finally:
        plain.clear()
        plain.update(noting)
        os.environ._data = os.environb._data = plain  # type: ignore[attr-defined]


def _tasks() -> int:
    return len(os.listdir("/proc/self/task"))


def open_files() -> list[tuple[str, int]]:
    """Return the paths of the files that this process has open, with their descriptors."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            found.append((os.readlink(f"/proc/self/fd/{number}"), int(number)))
        except OSError:
            # The descriptor of the listing itself is closed by now.
            continue
    return found
