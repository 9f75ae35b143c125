"""
Who this program is to the kernel: what its child processes get of it, and cannot take on by themselves.

A process that was started earlier, and from which others are forked, is fit for a caller only while both are the same
here: a program may drop its privileges, enter a namespace or move to another cgroup between two launches. What a child
can set for itself, such as its niceness, is no part of it (`_surroundings`).

Rules of this file: the calling thread is looked at, for on Linux each has credentials of its own; what cannot be read
is left out, on both sides of a comparison; a look takes microseconds.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self

_STATUS = frozenset(
    "Uid Gid Groups NoNewPrivs Seccomp Seccomp_filters CapInh CapPrm CapEff CapBnd CapAmb THP_enabled "
    "Speculation_Store_Bypass SpeculationIndirectBranch".split()
)
"""Lines of ``/proc/PID/status``: credentials, capabilities, filters of system calls, switches of ``prctl``."""
_NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "pid_for_children", "time_for_children", "user", "uts")
_PR_GET_SECUREBITS = 27
_PERSONALITY_NOW = 0xFFFFFFFF
"""The argument by which the present personality is asked for."""
_MOST = 65536
"""Bytes of a text; the kernel gives all of it at once."""

_libc = ctypes.CDLL(None)


@dataclass(frozen=True)
class CallerIdentity:
    """What the kernel knows the calling thread by; two are equal where a child of one could be a child of the other."""

    credentials: tuple[str, ...]
    """User and group ids, groups, capabilities, no-new-privileges, filters of system calls."""
    namespaces: tuple[str, ...]
    root: tuple[int, int]
    """Device and inode of the root folder, which ``chroot`` changes."""
    cgroups: str
    """A worker elsewhere would escape the caller's limits of memory and CPU."""
    label: str
    """That of AppArmor or SELinux."""
    securebits: int
    personality: int

    @classmethod
    def now(cls) -> Self:
        """That of the calling thread."""
        root = os.stat("/")
        return cls(
            credentials=_credentials(),
            namespaces=tuple(_namespace(name) for name in _NAMESPACES),
            root=(root.st_dev, root.st_ino),
            cgroups=kernel_says("thread-self/cgroup"),
            label=kernel_says("thread-self/attr/current"),
            securebits=_libc.prctl(_PR_GET_SECUREBITS, 0, 0, 0, 0),
            personality=_libc.personality(_PERSONALITY_NOW),
        )


def _credentials() -> tuple[str, ...]:
    lines = kernel_says("thread-self/status").splitlines()
    # The system's own calls stand for a /proc that is hidden, or whose lines are not the kernel's.
    plain = f"{os.getresuid()} {os.getresgid()} {sorted(os.getgroups())}"
    return (plain, *(line for line in lines if line.partition(":")[0] in _STATUS))


def _namespace(name: str) -> str:
    try:
        return os.readlink(f"/proc/thread-self/ns/{name}")
    except OSError:  # this kernel has none of the kind, or /proc is hidden
        return ""


def kernel_says(path: str) -> str:
    """The text at *path* below ``/proc``; empty where it cannot be read. It costs a third of what `open` does."""
    try:
        descriptor = os.open(f"/proc/{path}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return os.read(descriptor, _MOST).decode(errors="surrogateescape")
    except OSError:
        return ""
    finally:
        os.close(descriptor)
