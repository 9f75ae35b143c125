"""
Events of a launch's workers, and how a spawner's messages, with the files beside them, are read into events.

Rules of this file: each event says what happened, once; `_processes` acts on it. An end is reported
whatever became of its files. The caller closes the descriptors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from json import loads

from attrs import define, field, frozen

from elasticlib.processes import Message, content_of_files
from elasticlib.workers.child import _report
from elasticlib.workers.child._worker_progress import Progress

_LEFT = 3
"""Descriptors of what a worker leaves behind: report, crash stacks, and the end of stderr."""


@define
class Exit:
    """One worker's end."""

    local_rank: int
    pid: int
    exitcode: int
    """Exit status; ``-n`` for signal ``n``."""
    was_stopped: bool
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
class ProgramFailed:
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
class LastWorkerRuns:
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
class AllStopped:
    """All workers of a round are gone, but for `survivors` that even SIGKILL did not end (process ids)."""

    survivors: list[int] = field(factory=list)
    ended: dict[int, str] = field(factory=dict)
    """Commands of processes that workers had detached and that were killed now, by process id."""


@define
class RoundStoreEnded:
    """The process that hosts the workers' store of this round ended, or could not be started; the workers run on."""

    why: str
    pid: int
    """0 where there was none."""
    exitcode: int
    was_needed: bool = True
    """Whether a worker of this node still needed it; those of other nodes may need it longer."""


@define
class StacksRead:
    """What the threads of the workers do, by local rank, as it was asked for."""

    texts: dict[int, str]


@define
class CurrentLine:
    """Where the first worker is, as its fault handler writes it; empty, or in brackets, where that is not known."""

    stacks: str


@define
class SpawnerLost:
    """The spawner is gone, and with it every worker."""

    why: str
    cause: Exception | None = None


Event = (
    Exit
    | ProgramFailed
    | Lingers
    | LastWorkerRuns
    | Stuck
    | AllStopped
    | RoundStoreEnded
    | StacksRead
    | CurrentLine
    | SpawnerLost
)


@frozen
class WorkerNow:
    """One worker of the present or last round."""

    local_rank: int
    pid: int
    """0 before it was started."""
    exitcode: int | None
    """None while it runs."""
    was_stopped: bool
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
        code, was_stopped = (None, False) if end is None else (end.exitcode, end.was_stopped)
        return cls(local_rank, pid, code, was_stopped, progress, stdout, stderr)


# From messages to events.


def event_of_workers(message: Message, descriptors: Sequence[int]) -> Event:
    """Return the event of *message*. Raise `ValueError` where it is none of a worker's."""
    op = message["op"]
    read = _READERS.get(op) if isinstance(op, str) else None
    if read is None:
        raise ValueError(f"a spawner says {op!r}, which no launcher knows")
    return read(message, descriptors)


def _exit_of(message: Message, descriptors: Sequence[int]) -> Exit:
    rank, pid, code, was_stopped = (message[name] for name in ("local_rank", "pid", "exitcode", "told"))
    more = {name: message[name] for name in ("overdue", "late")}
    # No descriptor was free here to receive them.
    if len(descriptors) < _LEFT:
        return Exit(rank, pid, code, was_stopped, None, "", unread=True, **more)
    report, *texts = descriptors[:_LEFT]
    faults, tail = (_report.read_text(descriptor) for descriptor in texts)
    left = _report.read_report(report, *descriptors[_LEFT:])
    return Exit(rank, pid, code, was_stopped, left, faults, tail, **more)


def _failed_of(message: Message, descriptors: Sequence[int]) -> ProgramFailed:
    left = _report.read_report(*descriptors) if descriptors else None
    return ProgramFailed(Exit(message["local_rank"], message["pid"], message["exitcode"], False, left, ""))


def _lingers_of(message: Message, descriptors: Sequence[int]) -> Lingers:
    stacks = content_of_files(descriptors).decode()
    return Lingers(message["local_rank"], message["pid"], message["seconds"], message["ends"], stacks)


def _last_runs_of(message: Message, descriptors: Sequence[int]) -> LastWorkerRuns:
    stacks = content_of_files(descriptors).decode()
    return LastWorkerRuns(message["local_rank"], message["pid"], message["seconds"], message["left"], stacks)


def _stuck_of(message: Message, descriptors: Sequence[int]) -> Stuck:
    return Stuck(message["local_rank"], message["pid"], message["waited"])


def _stacks_of(message: Message, descriptors: Sequence[int]) -> StacksRead:
    return StacksRead(_texts_by_rank(descriptors))


def _place_of(message: Message, descriptors: Sequence[int]) -> CurrentLine:
    return CurrentLine(_texts_by_rank(descriptors).get(0, ""))


def _texts_by_rank(descriptors: Sequence[int]) -> dict[int, str]:
    found = loads(content_of_files(descriptors)) if descriptors else {}
    return {int(rank): text for rank, text in found.items()}


def _stopped_of(message: Message, descriptors: Sequence[int]) -> AllStopped:
    ended = {int(pid): command for pid, command in message["ended"].items()}
    return AllStopped(message["survivors"], ended)


_READERS: dict[str, Callable[[Message, Sequence[int]], Event]] = {
    "exited": _exit_of,
    "failed": _failed_of,
    "lingers": _lingers_of,
    "last_runs": _last_runs_of,
    "stuck": _stuck_of,
    "stacks": _stacks_of,
    "place": _place_of,
    "stopped": _stopped_of,
}
"""By a message's name, the function that makes its event of it and of the files that came with it."""
