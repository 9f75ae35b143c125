"""
What a spawner's messages say of the workers, with what they carry in files: read into `_launch_events`.

Rules of this file: the descriptors stay the caller's; an end is told whatever became of the files that came with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from json import loads

from elasticlib.processes import Message, content_of_files
from elasticlib.workers._launch_events import Event, Exit, Failed, LastRuns, Lingers, Place, Stacks, Stopped, Stuck
from elasticlib.workers.child import _report

_LEFT = 3
"""Descriptors of what a worker leaves behind: report, crash stacks, and the end of stderr."""


def event_of_workers(message: Message, descriptors: Sequence[int]) -> Event:
    """The event that *message* tells of; raises `ValueError` where it is none of a worker's."""
    match message["op"]:
        case "exited":
            return _exit_of(message, descriptors)
        case "failed":
            left = _report.read_report(*descriptors) if descriptors else None
            return Failed(Exit(message["local_rank"], message["pid"], message["exitcode"], False, left, ""))
        case "lingers":
            stacks = content_of_files(descriptors).decode()
            return Lingers(message["local_rank"], message["pid"], message["seconds"], message["ends"], stacks)
        case "last_runs":
            stacks = content_of_files(descriptors).decode()
            return LastRuns(message["local_rank"], message["pid"], message["seconds"], message["left"], stacks)
        case "stuck":
            return Stuck(message["local_rank"], message["pid"], message["waited"])
        case "stacks" | "place" as asker:
            found = loads(content_of_files(descriptors)) if descriptors else {}
            by_rank = {int(rank): text for rank, text in found.items()}
            return Stacks(by_rank) if asker == "stacks" else Place(by_rank.get(0, ""))
        case "stopped":
            ended = {int(pid): command for pid, command in message["ended"].items()}
            return Stopped(message["survivors"], ended)
        case other:
            raise ValueError(f"a spawner says {other!r}, which no launcher knows")


def _exit_of(message: Message, descriptors: Sequence[int]) -> Exit:
    rank, pid, code, told = (message[name] for name in ("local_rank", "pid", "exitcode", "told"))
    more = {name: message[name] for name in ("overdue", "late")}
    if len(descriptors) < _LEFT:  # none was free here to receive them
        return Exit(rank, pid, code, told, None, "", unread=True, **more)
    report, *texts = descriptors[:_LEFT]
    faults, tail = (_report.read_text(descriptor) for descriptor in texts)
    left = _report.read_report(report, *descriptors[_LEFT:])
    return Exit(rank, pid, code, told, left, faults, tail, **more)
