"""
The launching program, in the state that its child processes would inherit: its identity for the
kernel, and its settings.

Workers are forked from a process that was started earlier, and the caller may have changed since.

    CallerIdentity   no process can give itself this: where it differs, another fork server must be started
    Surroundings     a worker sets this for itself: read at the launch (`now`), set before any of the
                     user's code runs (`take_over`)
    Caller           both

A program may drop its privileges, enter a namespace or move to another cgroup between two
launches: that is identity. Some of the surroundings need a privilege to be set from the fork
server's own (`Surroundings.can_follow`).

Rules of this file:

* It reads the calling thread, because on Linux each thread has credentials of its own.
* A value that cannot be read is left out, on both sides of a comparison.
* Each value is read and set side by side. A value stays unchanged if the kernel refuses to set
  it.
* A look takes microseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import re
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
"""Argument with which `personality` returns the present value."""
_MOST = 65536
"""Bytes of a text, which the kernel returns in one read."""

_libc = ctypes.CDLL(None)


@dataclass(frozen=True)
class CallerIdentity:
    """
    Identity of the calling thread for the kernel.

    Two are equal if a child of one could be a child of the other.
    """

    credentials: tuple[str, ...]
    """User and group ids, groups, capabilities, no-new-privileges, filters of system calls."""
    namespaces: tuple[str, ...]
    root: tuple[int, int]
    """Device and inode of the root folder, which ``chroot`` changes."""
    cgroups: str
    """Cgroups; a worker in others would escape the caller's limits of memory and CPU."""
    label: str
    """Label of AppArmor or SELinux."""
    securebits: int
    personality: int

    @classmethod
    def now(cls) -> Self:
        """Return the identity of the calling thread."""
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
    # The system's own calls stand in for a /proc that is hidden, or not the kernel's.
    plain = f"{os.getresuid()} {os.getresgid()} {sorted(os.getgroups())}"
    return (plain, *(line for line in lines if line.partition(":")[0] in _STATUS))


def _namespace(name: str) -> str:
    try:
        return os.readlink(f"/proc/thread-self/ns/{name}")
    except OSError:
        # This kernel has no such namespace, or /proc is hidden.
        return ""


def kernel_says(path: str) -> str:
    """
    Return the text at *path* below ``/proc``; empty if it cannot be read.

    It takes a third of the time of `open`.
    """
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


# A set, since two names can mean one limit: RLIMIT_OFILE is RLIMIT_NOFILE.
_LIMITS = sorted({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")})
_OWN_SHARE = (os.SCHED_OTHER, os.SCHED_BATCH)
"""
Scheduling policies between which any process may choose, and from which it may change to
``SCHED_IDLE``.
"""
_UMASK = re.compile(r"^Umask:\s*(\d+)", re.MULTILINE)
_PR_GET_DUMPABLE, _PR_SET_DUMPABLE = 3, 4
_PR_SET_TIMERSLACK, _PR_GET_TIMERSLACK = 29, 30


@dataclass(frozen=True)
class Surroundings:
    """Settings that a child process of the caller would inherit."""

    umask: int = 0o022
    limits: Sequence[tuple[int, tuple[int, int]]] = ()
    """Number, soft and hard value of each resource limit."""
    nice: int = 0
    policy: int = os.SCHED_OTHER
    """Policy of the scheduler."""
    priority: int = 0
    """Priority under a real-time policy."""
    oom_score_adj: int = 0
    timer_slack: int = 50_000
    """Nanoseconds by which the kernel may delay a timer."""
    coredump_filter: int = 0x33
    """Bits for the parts of the memory that a core file holds."""
    is_dumpable: bool = True
    """True if core files are written, and other processes of the user may read the memory."""

    @classmethod
    def now(cls) -> Self:
        """Return the settings that a child of the calling thread would inherit."""
        policy, priority, nice = _scheduling()
        return cls(
            umask=_umask(),
            limits=[(number, resource.getrlimit(number)) for number in _LIMITS],
            nice=nice,
            policy=policy,
            priority=priority,
            oom_score_adj=_read_number("oom_score_adj", 10, cls().oom_score_adj),
            timer_slack=_libc.prctl(_PR_GET_TIMERSLACK, 0, 0, 0, 0),
            coredump_filter=_read_number("coredump_filter", 16, cls().coredump_filter),
            # 2 is the kernel's own value after a change of user: only root may read the memory.
            is_dumpable=_libc.prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0) == 1,
        )

    def plain(self) -> dict[str, Any]:
        """Return all settings as a mapping, for a channel."""
        return dict(vars(self))

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Self:
        """Return the object of a mapping that `plain` made."""
        return cls(**body)

    def can_follow(self, beginning: Self) -> bool:
        """
        Return True if a process with the settings *beginning* can change to these without
        privileges.
        """
        # Without a privilege a process can only become nicer, a likelier victim of the OOM
        # killer, and lower its hard limits.
        hard = {number: _value(most) for number, (_, most) in beginning.limits}
        return (
            self.nice >= beginning.nice
            and self.oom_score_adj >= beginning.oom_score_adj
            and all(_value(most) <= hard.get(number, math.inf) for number, (_, most) in self.limits)
            and self._may_be_scheduled_from(beginning)
        )

    def _may_be_scheduled_from(self, beginning: Self) -> bool:
        if (self.policy, self.priority) == (beginning.policy, beginning.priority):
            return True
        return beginning.policy in _OWN_SHARE and self.policy in (*_OWN_SHARE, os.SCHED_IDLE)

    def take_over(self) -> None:
        """Give this process these settings, except for `keep_memory_private`."""
        os.umask(self.umask)

        # First the settings that a limit may forbid afterwards.
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, self.policy, os.sched_param(self.priority))
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, self.nice)
        _write_number("oom_score_adj", str(self.oom_score_adj))
        _write_number("coredump_filter", hex(self.coredump_filter))
        _libc.prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(self.timer_slack), 0, 0, 0)
        for number, (soft, hard) in self.limits:
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(number, (soft, hard))

    def keep_memory_private(self) -> None:
        """
        Hide the memory of this process from others, if the caller's memory is hidden.

        Called once no process of elasticlib needs to read it any more, and after each ``exec``,
        which undoes it.
        """
        if not self.is_dumpable:
            _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def _scheduling() -> tuple[int, int, int]:
    """Return the policy, priority and niceness that a child of the calling thread gets."""
    policy, priority = os.sched_getscheduler(0), os.sched_getparam(0).sched_priority
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    # The flag keeps real-time policies and negative niceness from the children.
    if policy & os.SCHED_RESET_ON_FORK:
        policy &= ~os.SCHED_RESET_ON_FORK
        is_real_time = policy not in (*_OWN_SHARE, os.SCHED_IDLE)
        return (os.SCHED_OTHER, 0, 0) if is_real_time else (policy, priority, max(nice, 0))
    return policy, priority, nice


def _value(limit: int) -> float:
    return math.inf if limit == resource.RLIM_INFINITY else limit


def _umask() -> int:
    # Read from /proc: `os.umask` would change it for a moment, for all threads.
    found = _UMASK.search(kernel_says("thread-self/status"))
    return int(found[1], 8) if found else 0o022


def _read_number(name: str, base: int, otherwise: int) -> int:
    text = kernel_says(f"self/{name}")
    # A kernel without this file returns an empty text.
    return int(text, base) if text else otherwise


def _write_number(name: str, text: str) -> None:
    with contextlib.suppress(OSError), open(f"/proc/self/{name}", "wb") as file:
        file.write(text.encode())


@dataclass(frozen=True)
class Caller:
    """The calling thread at the start of a fork server, or at a launch."""

    identity: CallerIdentity
    surroundings: Surroundings

    @classmethod
    def now(cls) -> Self:
        """Return the present state of the calling thread."""
        return cls(CallerIdentity.now(), Surroundings.now())

    def can_serve(self, other: Self) -> bool:
        """
        Return True if a process that this caller has started can fork children like those of the
        *other* one.
        """
        return self.identity == other.identity and other.surroundings.can_follow(self.surroundings)
