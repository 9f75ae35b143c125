"""
The program that launches, as its child processes would have it: who it is to the kernel, and how it is set up.

Workers are forked from a process that was started earlier, and the caller may have changed since.

    CallerIdentity   no process gives itself this: where it differs, another fork server must be started
    Surroundings     a worker sets this for itself: read at the launch (`now`), set before any of the user's code runs
                     (`take_over`)
    Caller           both

A program may drop its privileges, enter a namespace or move to another cgroup between two launches: that is identity.
Of the surroundings, some need a privilege to be set from where the fork server began (`Surroundings.can_follow`).

Rules of this file: the calling thread is looked at, for on Linux each has credentials of its own; what cannot be read
is left out, on both sides of a comparison; what is read is what is set, side by side; what the kernel refuses stays as
it is; a look takes microseconds.
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
    except OSError:
        # This kernel has no such namespace, or /proc is hidden.
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


_LIMITS = sorted({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")})
_OWN_SHARE = (os.SCHED_OTHER, os.SCHED_BATCH)
"""Policies between which any process may choose, and from which it may go to ``SCHED_IDLE``."""
_UMASK = re.compile(r"^Umask:\s*(\d+)", re.MULTILINE)
_PR_GET_DUMPABLE, _PR_SET_DUMPABLE = 3, 4
_PR_SET_TIMERSLACK, _PR_GET_TIMERSLACK = 29, 30


@dataclass(frozen=True)
class Surroundings:
    """What a child process of the caller would have."""

    umask: int = 0o022
    limits: Sequence[tuple[int, tuple[int, int]]] = ()
    """Number, soft and hard value of each resource limit."""
    nice: int = 0
    policy: int = os.SCHED_OTHER
    """Of the scheduler."""
    priority: int = 0
    """Of a real-time policy."""
    oom_score_adj: int = 0
    timer_slack: int = 50_000
    """Nanoseconds by which the kernel may be late."""
    coredump_filter: int = 0x33
    """Which parts of the memory are in a core file."""
    is_dumpable: bool = True
    """Whether core files are written, and other processes of the user may look into the memory."""

    @classmethod
    def now(cls) -> Self:
        """What a child of the calling thread would have."""
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
            is_dumpable=_libc.prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0) == 1,
        )

    def plain(self) -> dict[str, Any]:
        """All of it, for a channel."""
        return dict(vars(self))

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Self:
        """What `plain` made."""
        return cls(**body)

    def can_follow(self, beginning: Self) -> bool:
        """Whether a process that has what *beginning* says may come to have this, whatever its privileges are."""
        # Without a privilege a process can only become nicer, a likelier victim of the OOM killer,
        # and lower its hard limits.
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
        """Have this process as it is said here, but for `keep_memory_private`."""
        os.umask(self.umask)
        # First what a limit may forbid afterwards.
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
        """Once nothing of ours has to look into this process any more, and after each ``exec``, which undoes it."""
        if not self.is_dumpable:
            _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def _scheduling() -> tuple[int, int, int]:
    """Policy, priority and niceness that a child of the calling thread gets."""
    policy, priority = os.sched_getscheduler(0), os.sched_getparam(0).sched_priority
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    if policy & os.SCHED_RESET_ON_FORK:
        policy &= ~os.SCHED_RESET_ON_FORK
        is_real_time = policy not in (*_OWN_SHARE, os.SCHED_IDLE)
        return (os.SCHED_OTHER, 0, 0) if is_real_time else (policy, priority, max(nice, 0))
    return policy, priority, nice


def _value(limit: int) -> float:
    return math.inf if limit == resource.RLIM_INFINITY else limit


def _umask() -> int:
    found = _UMASK.search(kernel_says("thread-self/status"))
    return int(found[1], 8) if found else 0o022


def _read_number(name: str, base: int, otherwise: int) -> int:
    text = kernel_says(f"self/{name}")
    # A kernel without this file has no text of it.
    return int(text, base) if text else otherwise


def _write_number(name: str, text: str) -> None:
    with contextlib.suppress(OSError), open(f"/proc/self/{name}", "w", encoding="ascii") as file:
        file.write(text)


@dataclass(frozen=True)
class Caller:
    """The calling thread at one moment: when a fork server is started, or at a launch."""

    identity: CallerIdentity
    surroundings: Surroundings

    @classmethod
    def now(cls) -> Self:
        """The calling thread as it is."""
        return cls(CallerIdentity.now(), Surroundings.now())

    def can_serve(self, other: Self) -> bool:
        """Whether a process that this one has started may fork what is like a child of the *other* one."""
        return self.identity == other.identity and other.surroundings.can_follow(self.surroundings)
