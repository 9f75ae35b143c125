"""
What a process takes over from its parent and can set for itself: read in the caller, set in its workers.

A worker's parent was started earlier, and the caller may have changed since: each setting is read at the launch
(`Surroundings.now`) and set in the worker before any of the user's code runs (`Surroundings.take_over`). What no
process can give itself belongs to the fork server instead (`_identity`), and so does what needs a privilege to be set
from where the fork server began (`Surroundings.can_follow`).

Rules of this file: what is read is what is set, side by side; what the kernel refuses stays as it is.
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

from elasticlib.processes._identity import kernel_says

if TYPE_CHECKING:
    from typing_extensions import Self

_LIMITS = sorted({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")})
_OWN_SHARE = (os.SCHED_OTHER, os.SCHED_BATCH)
"""Policies between which any process may choose, and from which it may go to ``SCHED_IDLE``."""
_UMASK = re.compile(r"^Umask:\s*(\d+)", re.MULTILINE)
_PR_GET_DUMPABLE, _PR_SET_DUMPABLE = 3, 4
_PR_SET_TIMERSLACK, _PR_GET_TIMERSLACK = 29, 30

_libc = ctypes.CDLL(None)


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
    return int(text, base) if text else otherwise  # a kernel without it


def _write_number(name: str, text: str) -> None:
    with contextlib.suppress(OSError), open(f"/proc/self/{name}", "w", encoding="ascii") as file:
        file.write(text)
