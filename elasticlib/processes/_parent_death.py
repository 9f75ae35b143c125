"""
What the kernel does for this process when its parent, or a parent below it, ends.

Rules of this file: the standard library only, since the reaper imports it. Linux only (parent-death signal,
sub-reaper). The kernel sends that signal when the thread ends that forked this process, though its program goes on.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal

_SET_PARENT_DEATH_SIGNAL = 1
_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, argument: int) -> None:
    if _libc.prctl(option, argument, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), f"prctl({option}, {argument})")


def die_with_parent(parent: int) -> None:
    """Have the kernel SIGKILL this process when the thread that forked it ends; at once if *parent* has ended."""
    _prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the signal was armed
        os._exit(1)


def outlive_parent() -> None:
    """
    In place of `die_with_parent`: from here on this process watches its parent and clears up by itself.

    A stopped one could do neither, so the kernel wakes it when its parent, or just the thread that forked it, ends.
    """
    _prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGCONT)


def wake_with_parent() -> None:
    """Do as `outlive_parent`, in a process that clears nothing up; it works without the signal, too."""
    with contextlib.suppress(OSError):
        outlive_parent()


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, also of those in other sessions."""
    _prctl(_SET_CHILD_SUBREAPER, 1)
