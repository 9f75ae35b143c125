"""
How this program starts programs of ours, and what becomes of the handles that it has of them.

Rules of this file: what is started gets a socket as descriptor 3 and a session of its own; a child that the
caller forks drops all handles, so that it can neither use nor keep alive what is not its own.
"""

from __future__ import annotations

import fcntl
import os
import signal
import stat
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from elasticlib._wire import Channel, wait_readable
from elasticlib.errors import StartError

CHANNEL_FD = 3
"""The descriptor on which a program of ours finds its channel."""

_ROOT = str(Path(__file__).parents[1])
# ``-c`` and not ``-m``: the folder that we happen to be in must not shadow modules of the same name.
BOOT = f"import sys; p = sys.path; p[:1] = [f for f in p[:1] if f]; {_ROOT!r} in p or p.append({_ROOT!r}); "
"""First words of a ``-c`` program that imports elasticlib."""

_links: weakref.WeakSet[Link] = weakref.WeakSet()


class Link(Channel):
    """A channel to a child of this process; a process that the caller forks closes it."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel._sock)
        _links.add(self)


def _drop_in_child() -> None:
    for link in list(_links):
        link.close()


os.register_at_fork(after_in_child=_drop_in_child)


def need_system() -> None:
    """Raises `StartError` where the machine lacks what every start of processes needs: ``/proc`` and ``/dev/null``."""
    if not os.path.exists("/proc/self/status"):
        raise StartError(
            "elasticlib needs /proc mounted, of this very PID namespace, and /proc/self/status is not there: "
            "mount it (mount -t proc proc /proc), or start the container with it"
        )
    try:
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        is_device = False
    else:
        is_device = stat.S_ISCHR(os.fstat(null).st_mode)
        os.close(null)
    if not is_device:
        raise StartError(
            f"elasticlib needs {os.devnull}, and there is no such device that can be read and written: "
            f"make it (mknod -m 666 {os.devnull} c 1 3), or start the container with /dev"
        )


def above_standard(descriptor: int) -> int:
    """A copy of *descriptor* with a number that no standard stream nor `CHANNEL_FD` has."""
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)


def spawn(command: Sequence[str], environment: Mapping[str, str], descriptor: int, stderr: int | None = None) -> int:
    """
    Start *command* in a session of its own, with *descriptor* as `CHANNEL_FD`; its pid, to be reaped.

    It reads nothing and says nothing, but to *stderr* where that is given. Raises `StartError`.
    """
    need_system()
    copies = [above_standard(descriptor), *(() if stderr is None else (above_standard(stderr),))]
    actions: list[tuple[Any, ...]] = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDWR, 0),
        (os.POSIX_SPAWN_DUP2, 0, 1),
        (os.POSIX_SPAWN_DUP2, 0 if stderr is None else copies[1], 2),
        (os.POSIX_SPAWN_DUP2, copies[0], CHANNEL_FD),
    ]
    try:
        return os.posix_spawn(command[0], list(command), environment, file_actions=actions, setsid=True)
    except OSError as error:
        raise StartError(f"cannot start {command[0]}: {error}") from error
    finally:
        for copy in copies:
            os.close(copy)


def wait_for_end(pid: int, limit: float) -> None:
    """Reap *pid*; SIGKILL it when it has not ended after *limit* seconds."""
    try:
        handle = os.pidfd_open(pid)
        try:
            if not wait_readable([handle], limit):
                os.kill(pid, signal.SIGKILL)
        finally:
            os.close(handle)
        os.waitpid(pid, 0)
    except (ChildProcessError, ProcessLookupError):
        pass  # the program reaps children that it did not start
