"""
What a launcher hears of its workers, and knows of each. Pure.

Rules of this file: each says what happened, once; what is done about it is `_processes`' business.
"""

from __future__ import annotations

from attrs import define, field, frozen

from elasticlib.workers.child import _report
from elasticlib.workers.child._progress import Progress


@define
class Exit:
    """One worker's end."""

    local_rank: int
    pid: int
    exitcode: int
    """Exit status; ``-n`` for signal ``n``."""
    told: bool
    """True when it ended after the launcher had sent the stop signal."""
    report: _report.Report | None
    faults: str
    """What the fault handler has written: stacks of a crash, or those that were asked for last."""
    tail: str = ""
    """The end of what Python wrote to stderr."""
    overdue: float | None = None
    """Seconds after the end of its program in which its process did not end, so that it was stopped."""
    late: int | None = None
    """How its process ended, where that was otherwise than by `exitcode`, when this was final already."""
    unread: bool = False
    """True where no descriptor was free for what it left, so that a report may have been lost."""


@define
class Failed:
    """A worker's program failed, though its process has not ended yet."""

    end: Exit
    """What is known of it by now."""


@define
class Lingers:
    """A worker's program is over, but its process did not end within its exit timeout."""

    local_rank: int
    pid: int
    seconds: float
    ends: bool
    """Whether it is stopped for that."""
    stacks: str


@define
class LastRuns:
    """A worker runs on, though all others have finished well."""

    local_rank: int
    pid: int
    seconds: float
    """Since the others have finished."""
    left: float | None
    """Seconds until it is stopped, as its function has returned; None: it is not."""
    stacks: str


@define
class Stuck:
    """A worker that sat in native code while it was to end, was killed so that the others go on."""

    local_rank: int
    pid: int
    waited: float
    """Seconds since the signal that was to stop it."""


@define
class Stopped:
    """All workers of a round are gone, but for `survivors` that even SIGKILL did not end (process ids)."""

    survivors: list[int] = field(factory=list)
    ended: dict[int, str] = field(factory=dict)
    """Commands of processes that workers had detached and that were killed now, by process id."""


@define
class StoreGone:
    """The process that hosts the workers' store of this round ended, or could not be started; the workers run on."""

    why: str
    pid: int
    """0 where there was none."""
    exitcode: int
    was_needed: bool = True
    """Whether a worker of this node still needed it; those of other nodes may need it longer."""


@define
class Stacks:
    """What the threads of the workers do, by local rank, as it was asked for."""

    texts: dict[int, str]


@define
class Place:
    """Where the first worker is, as its fault handler writes it; empty, or in brackets, where that is not known."""

    stacks: str


@define
class Lost:
    """The spawner is gone, and with it every worker."""

    why: str
    cause: Exception | None = None


Event = Exit | Failed | Lingers | LastRuns | Stuck | Stopped | StoreGone | Stacks | Place | Lost


@frozen
class WorkerNow:
    """One worker of the present or last round."""

    local_rank: int
    pid: int
    """0 before it was started."""
    exitcode: int | None
    """None while it runs."""
    was_told: bool
    """Whether it ended after it was told to."""
    progress: Progress | None
    stdout: str
    """File of its redirected stream; empty where there is none."""
    stderr: str

    @classmethod
    def of(
        cls, local_rank: int, pid: int, end: Exit | None, progress: Progress | None, stdout: str, stderr: str
    ) -> WorkerNow:
        """The state of a worker that *end* has been heard of, if it has ended or failed."""
        code, told = (None, False) if end is None else (end.exitcode, end.told)
        return cls(local_rank, pid, code, told, progress, stdout, stderr)
