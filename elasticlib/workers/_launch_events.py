"""
Events of a launch's workers, and the functions that read them from a spawner's messages and
files.

Rules of this file: each event describes one occurrence, once; `_processes` acts on it. An end is
reported even if its files are lost. The caller closes the descriptors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from json import loads

from attrs import define, field, frozen

from elasticlib.processes import Message, content_of_files
from elasticlib.workers.child import _report
from elasticlib.workers.child._worker_progress import Progress

_LEFT = 3
"""Number of descriptors that a worker leaves: report, crash stacks, and the end of stderr."""


@define
class Exit:
    """End of a worker."""

    local_rank: int
    pid: int
    exitcode: int
    """Exit status; ``-n`` for signal ``n``."""
    was_stopped: bool
    """True if it ended after the launcher had sent the stop signal."""
    report: _report.Report | None
    faults: str
    """Text of the fault handler: stacks of a crash, or those of the last request."""
    tail: str = ""
    """The end of Python's output to stderr."""
    overdue: float | None = None
    """Seconds that its process lived after the end of its program, so that it was stopped."""
    late: int | None = None
    """Exit status of its process, if that differs from an `exitcode` that was already final."""
    unread: bool = False
    """True if no descriptor was free for its files, so that a report may have been lost."""


@define
class ProgramFailed:
    """A worker's program failed, though its process has not ended yet."""

    end: Exit
    """The facts that are known by now."""


@define
class Lingers:
    """A worker's program is over, but its process did not end within its exit timeout."""

    local_rank: int
    pid: int
    seconds: float
    ends: bool
    """True if it is stopped for that."""
    stacks: str


@define
class LastWorkerRuns:
    """A worker continues although all others have finished well."""

    local_rank: int
    pid: int
    seconds: float
    """Seconds since the others finished."""
    left: float | None
    """Seconds until it is stopped, as its function has returned; None if it is not stopped."""
    stacks: str


@define
class Stuck:
    """
    A worker in native code did not end after a stop signal, and was killed so that the others can
    continue.
    """

    local_rank: int
    pid: int
    waited: float
    """Seconds since the stop signal."""


@define
class AllStopped:
    """
    All workers of a round are gone, except `survivors` that even SIGKILL did not end (process
    ids).
    """

    survivors: list[int] = field(factory=list)
    ended: dict[int, str] = field(factory=dict)
    """Commands of processes that workers had detached and that were killed now, by process id."""


@define
class RoundStoreEnded:
    """
    The process that hosts the workers' store of this round ended, or could not be started.

    The workers continue.
    """

    why: str
    pid: int
    """0 if no process was started."""
    exitcode: int
    was_needed: bool = True
    """True if a worker of this node still needed it; workers of other nodes may need it longer."""


@define
class StacksRead:
    """Stacks of the workers' threads, by local rank, after a request."""

    texts: dict[int, str]


@define
class CurrentLine:
    """
    Place of the first worker, as its fault handler writes it.

    Empty, or in brackets, if it is not known.
    """

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
    """True if it ended after a stop signal."""
    progress: Progress | None
    stdout: str
    """File of its redirected stream; empty without one."""
    stderr: str

    @classmethod
    def of(
        cls, local_rank: int, pid: int, end: Exit | None, progress: Progress | None, stdout: str, stderr: str
    ) -> WorkerNow:
        """Return the state of a worker; *end* is its end or failure, None if none was reported."""
        code, was_stopped = (None, False) if end is None else (end.exitcode, end.was_stopped)
        return cls(local_rank, pid, code, was_stopped, progress, stdout, stderr)


# From messages to events.


def event_of_workers(message: Message, descriptors: Sequence[int]) -> Event:
    """Return the event of *message*. Raise `ValueError` for any other message."""
    op = message["op"]
    read = _READERS.get(op) if isinstance(op, str) else None
    if read is None:
        raise ValueError(f"the spawner sent the unknown message {op!r}")
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
"""By a message's name, the function that makes its event from the message and its files."""
