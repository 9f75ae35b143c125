"""
A spawner's messages about workers, and the files that come with them: read into `_launch_events`.

Rules of this file: the caller closes the descriptors. An end is reported whatever became of its files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from json import loads

from elasticlib.processes import Message, content_of_files
from elasticlib.workers._launch_events import Event, Exit, Failed, LastRuns, Lingers, Place, Stacks, Stopped, Stuck
from elasticlib.workers.child import _report

_LEFT = 3
"""Descriptors of what a worker leaves behind: report, crash stacks, and the end of stderr."""


def event_of_workers(message: Message, descriptors: Sequence[int]) -> Event:
    """Return the event of *message*. Raise `ValueError` where it is none of a worker's."""
    op = message["op"]
    read = _READERS.get(op) if isinstance(op, str) else None
    if read is None:
        raise ValueError(f"a spawner says {op!r}, which no launcher knows")
    return read(message, descriptors)


def _exit_of(message: Message, descriptors: Sequence[int]) -> Exit:
    rank, pid, code, told = (message[name] for name in ("local_rank", "pid", "exitcode", "told"))
    more = {name: message[name] for name in ("overdue", "late")}
    if len(descriptors) < _LEFT:  # none was free here to receive them
        return Exit(rank, pid, code, told, None, "", unread=True, **more)
    report, *texts = descriptors[:_LEFT]
    faults, tail = (_report.read_text(descriptor) for descriptor in texts)
    left = _report.read_report(report, *descriptors[_LEFT:])
    return Exit(rank, pid, code, told, left, faults, tail, **more)


def _failed_of(message: Message, descriptors: Sequence[int]) -> Failed:
    left = _report.read_report(*descriptors) if descriptors else None
    return Failed(Exit(message["local_rank"], message["pid"], message["exitcode"], False, left, ""))


def _lingers_of(message: Message, descriptors: Sequence[int]) -> Lingers:
    stacks = content_of_files(descriptors).decode()
    return Lingers(
        message["local_rank"],
        message["pid"],
        message["seconds"],
        message["ends"],
        stacks,
    )


def _last_runs_of(message: Message, descriptors: Sequence[int]) -> LastRuns:
    stacks = content_of_files(descriptors).decode()
    return LastRuns(
        message["local_rank"],
        message["pid"],
        message["seconds"],
        message["left"],
        stacks,
    )


def _stuck_of(message: Message, descriptors: Sequence[int]) -> Stuck:
    return Stuck(message["local_rank"], message["pid"], message["waited"])


def _stacks_of(message: Message, descriptors: Sequence[int]) -> Stacks:
    return Stacks(_texts_by_rank(descriptors))


def _place_of(message: Message, descriptors: Sequence[int]) -> Place:
    return Place(_texts_by_rank(descriptors).get(0, ""))


def _texts_by_rank(descriptors: Sequence[int]) -> dict[int, str]:
    found = loads(content_of_files(descriptors)) if descriptors else {}
    return {int(rank): text for rank, text in found.items()}


def _stopped_of(message: Message, descriptors: Sequence[int]) -> Stopped:
    ended = {int(pid): command for pid, command in message["ended"].items()}
    return Stopped(message["survivors"], ended)


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
