"""
What the workers of a round left behind: from an end to a `ProcessFailure` that says whose fault it is and what the
signal means, or to a result; and what is said of workers that live or are being stopped.

Rules of this file: a report that the worker wrote beats its error file, which beats the exit status; of a failure
what cannot be read is left out, never raised. Who was stopped by us has failed only where it says so itself. Ranks are
local ones but where *rank_base* is added; nothing is waited for.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
from collections.abc import Mapping
from typing import Any

from elasticlib import records
from elasticlib._untrusted import exactly, parse, whole
from elasticlib.errors import Frame, PicklingError, ProcessFailure, read_error_file
from elasticlib.processes import FEW_DESCRIPTORS
from elasticlib.spec import LogsDest
from elasticlib.stacks import frame_of, is_heading, is_launcher, place_of
from elasticlib.workers._launch_events import Event, Exit, LastRuns, Lingers, Stacks, Stopped, StoreGone, Stuck
from elasticlib.workers.child import _results

STORE, SPAWNER = "worker store", "spawner"
"""Processes of ours, whose end is reported by these names."""
_TAIL_BYTES = 8192
_MOST_LINES = 1_000_000
_STAMP_IS_BEHIND = 2.0
"""Seconds: an error file's own time is in whole ones, so the file's tells who came first."""
_CRASHES = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT})
_CRASH = "Fatal Python error"
"""With this the fault handler begins what it writes of a crash."""
_STILL_AT_WORK = "the program ended well, but its threads, exit handlers or finalizers were still at work"


def has_failed(end: Exit, error_file: str) -> bool:
    """Whether a worker failed by itself, and was not just stopped by us."""
    if end.exitcode == 0:
        return False
    raised = end.report is not None and end.report.kind == "error"
    return not end.told or raised or -end.exitcode in _CRASHES or _written(error_file) is not None


def failures_of(
    ends: Mapping[int, Exit], dest: LogsDest, kills: int, noticed: Mapping[int, float], rank_base: int
) -> dict[int, ProcessFailure]:
    """The failures of the workers that failed by themselves, by global rank."""
    found = {}
    for local, end in sorted(ends.items()):
        error_file, rank = dest.error_files.get(local, ""), rank_base + local
        if has_failed(end, error_file):
            failure = failure_of(end, rank, error_file, dest.stderrs.get(local), kills, noticed[local])
            files = (dest.stdouts.get(local), dest.stderrs.get(local))
            failure.log_files = tuple(dict.fromkeys(path for path in files if path and path != os.devnull))
            goes_on = local in dest.tee_stderrs or local not in dest.stderrs
            failure.is_on_console = goes_on and end.report is not None and end.report.is_shown
            found[rank] = failure
    return found


def failure_of(
    end: Exit, rank: int, error_file: str, stderr: str | None, memory_kills: int, noticed: float
) -> ProcessFailure:
    """
    All that is known about a worker that failed.

    *stderr* is its log file, if it has one; *memory_kills* counts the out-of-memory kills in our cgroup
    while it ran; *noticed* is the Unix time of its end, used where it did not say itself.
    """
    report = end.report if end.report is not None and end.report.kind == "error" else None
    written = _written(error_file) if report is None else None
    failure = ProcessFailure(
        local_rank=end.local_rank,
        pid=end.pid,
        exitcode=end.exitcode,
        error_file=error_file,
        rank=rank,
        message=report.message if report else "",
        timestamp=report.timestamp if report else 0.0,
        exception_type=report.exception_type if report else "",
        traceback=report.traceback if report else "",
        secondary=report.secondary if report else end.told and written is None,
        external=report.external if report else False,
        frames=_frames(report.frames) if report else (),
        log_tail=last_lines(_end_of(stderr) if stderr else end.tail),
    )
    if report is None and failure.error_file_data.get("message") == "<NONE>":
        failure.happened(noticed)
    elif written is not None and 0 <= written - failure.when() < _STAMP_IS_BEHIND:
        failure.happened(written)
    stacks = _stacks_of(end)
    raised = failure.traceback
    failure.traceback = raised or stacks
    if end.overdue is not None:
        if report is None and end.exitcode < 0:
            failure.message = _STILL_AT_WORK
        failure.hint = f"it did not end within {end.overdue:g} s (exit_timeout) after that and was stopped"
        if raised or not stacks:
            failure.hint += f"; its threads then:\n{stacks or '(could not be seen)'}"
    told = set(failure.traceback.splitlines())
    failure.log_tail = tuple(line for line in failure.log_tail if line not in told)
    if not failure.hint and not (
        end.told and (report or written is not None)
    ):  # stopped by us after it had raised: the signal explains nothing
        failure.hint = explain_exit(end.exitcode, memory_kills)
    return failure


def _stacks_of(end: Exit) -> str:
    """The stacks that explain an *end*: of a crash, or where it was overdue; others that were asked for do not."""
    if end.overdue is not None:
        return stacks_of_user(end.faults)
    crash = end.faults.rfind(_CRASH)
    return stacks_of_user(end.faults[crash:]) if crash >= 0 and -end.exitcode in _CRASHES else ""


def lost_all(count: int, rank_base: int, pids: Mapping[int, int], why: str) -> dict[int, ProcessFailure]:
    """The failures of *count* workers that ended with their spawner, by local rank plus *rank_base*."""
    return {rank_base + rank: _lost(rank, rank_base, pids, why) for rank in range(count)}


def _lost(rank: int, rank_base: int, pids: Mapping[int, int], why: str) -> ProcessFailure:
    """The failure of a worker that ended with the process which started it; the first one stands for that process."""
    if rank == 0:
        return ProcessFailure(0, 0, -signal.SIGKILL, "", message=why, rank=rank_base, process=SPAWNER)
    with_it = f"the worker was killed with all others: {why}"
    pid = pids.get(rank, 0)
    return ProcessFailure(rank, pid, -signal.SIGKILL, "", message=with_it, rank=rank_base + rank, secondary=True)


def _frames(text: str) -> tuple[Frame, ...]:
    """The frames that a worker wrote; none where it wrote over them."""
    try:
        return tuple(_frame(*each) for each in parse(text.encode()))
    except (TypeError, ValueError):
        return ()


def _frame(file: object, line: object, function: object, variables: object) -> Frame:
    if not isinstance(variables, dict) or not all(isinstance(each, str) for each in variables.values()):
        raise ValueError("variables of a frame are text")
    return Frame(exactly(file, str), whole(line, 1, _MOST_LINES), exactly(function, str), variables)


def _written(error_file: str) -> float | None:
    """The Unix time at which a worker wrote what failed into its error file; None when there is no word of it."""
    try:
        data = read_error_file(error_file)
        return os.stat(error_file).st_mtime if isinstance(data, dict) and data.get("message") else None
    except (OSError, ValueError):
        return None


def record_of(event: Event, rank_base: int, are_all: bool, signum: int) -> records.Record | None:
    """
    The record of *event*; None for one that says nothing to people by itself.

    The ranks of this node begin at *rank_base*, and *are_all* that the job has or not; *signum* is what its workers are
    being stopped with.
    """
    match event:
        case Exit(rank, pid, exitcode, late=int(late)):
            return records.WorkerCrashedLate(rank, pid, exitcode, late)
        case Lingers():
            stacks = stacks_of_user(event.stacks)
            return records.WorkerLingers(event.local_rank, event.pid, event.seconds, event.ends, stacks)
        case LastRuns(rank, pid, seconds, left, stacks):
            text = stacks_of_user(stacks)
            place = f"at {place}" if (place := place_of(text)) else _NATIVE if text else ""
            return records.LastRuns(rank_base + rank, pid, seconds, left, place, are_all)
        case Stacks(texts):
            return records.StacksTold({rank: stacks_of_user(text) for rank, text in texts.items()})
        case Stuck(rank, pid, waited):
            return records.WorkerStuck(rank_base + rank, pid, signum, waited)
        case Stopped(survivors) if survivors:
            return records.WorkersSurvived(tuple(survivors))
        case Stopped(ended=ended) if ended:
            return records.DetachedEnded(ended)
    return None


_CALL = "call_function"
"""Our function that calls the user's: what called it is ours, or the caller's that was forked."""
_NATIVE = "in native code, such as the destructor of a local variable"
_AT_ITS_END = {
    "await_release": "has called the function, which returned, and waits for those of the other local ranks",
    "_join_threads": "waits for the threads of the program to end",
    "_flush_files": "writes what files that were left open hold in their buffers",
    "_close_files": "writes what files that were left open hold in their buffers",
    "_clear_modules": "clears the modules of the program, which runs finalizers",
    "_flush_streams": "writes what stdout and stderr hold in their buffers",
    "finish": "runs exit handlers, or writes what is left",
    _CALL: f"called the function, which is {_NATIVE}",
}
"""What a worker does in a function of ours, at its end."""


def stacks_of_user(faults: str) -> str:
    """The fault handler's stacks without the frames below the user's first one; what we do where there is no other."""
    found: list[str] = []
    own: str | None = None
    is_below = False
    for line in [*faults.splitlines(), ""]:
        if line.startswith("Extension modules:"):  # the fault handler's last line of a crash
            continue
        frame = frame_of(line)
        if frame is not None and is_launcher(frame.file):
            own = own or _AT_ITS_END.get(frame.function)
            is_below = is_below or frame.function == _CALL
            continue
        is_below = is_below and frame is not None
        if is_below:
            continue
        if not line.strip() and found and is_heading(found[-1]) and own is not None:
            found.append(f"  (elasticlib {own})")
        if is_heading(line):
            own = None
        found.append(line)
    return "\n".join(found).strip()


def explain_exit(exitcode: int, memory_kills: int) -> str:
    """What a signal or an exit status most likely means; empty where there is nothing to add."""
    number = -exitcode if exitcode < 0 else exitcode - 128
    if number == signal.SIGKILL:
        if memory_kills > 0:
            return (
                f"the kernel's out-of-memory killer ended {memory_kills} process(es) of this cgroup meanwhile: "
                "most likely the worker needed more memory than the limit"
            )
        return (
            "the cgroup's out-of-memory counter did not move: killed from outside "
            "(kill -9, a scheduler, or the whole machine was out of memory)"
        )
    if number == signal.SIGABRT:
        return "native code aborted: its last lines are on the worker's stderr"
    if number in _CRASHES:
        return "native code crashed: the stack shows the Python line that called it"
    if number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        return "the worker was asked to end from outside, not by this launcher"
    if exitcode == 120:
        return "output that was still in a buffer could not be written: a full disk, or a reader that has closed"
    if exitcode in (126, 127):
        return "a shell's status for a program that was not found or may not be executed"
    return ""


def _end_of(path: str) -> str:
    """The end of a log file; empty when it cannot be read."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def last_lines(text: str, most: int = 10) -> tuple[str, ...]:
    """The last lines of *text*; of a line that was rewritten by carriage returns, its last state."""
    return tuple(
        line.rpartition("\r")[2] for line in text.replace("\r\n", "\n").rstrip("\n").split("\n")[-most:] if line
    )


def original_exception(end: Exit) -> BaseException | None:
    """The worker's own exception, or what comes nearest to it here; None when it raised none."""
    report = end.report
    if report is None or report.kind != "error":
        return None
    error = _results.unpack_exception(report.payload)
    if error is None and report.exception_type:
        text = report.message.removeprefix(report.exception_type).removeprefix(": ")
        error = _results.stand_in(report.exception_type, text)
    if error is not None:
        note = f"from the worker of local rank {end.local_rank}:\n{report.traceback}"
        with contextlib.suppress(Exception):  # a class may forbid it
            if hasattr(error, "add_note"):
                error.add_note(note)
            else:
                error.__cause__ = _WorkersTraceback(note)
    return error


class _WorkersTraceback(Exception):  # noqa: N818 - it is shown as the cause, where Python has no notes
    """Shows the traceback of a worker's exception above that (Python 3.10)."""


def blamed(ends: Mapping[int, Exit], count: int) -> int | None:
    """Of *count* workers the rank that stands for a lost store: the first that did not fail by another cause."""
    for rank in range(count):
        end = ends.get(rank)
        if end is None or not has_failed(end, "") or (end.report is not None and end.report.secondary):
            return rank
    return None


def lost_store(gone: StoreGone, rank: int, rank_base: int, kills: int, at: float) -> ProcessFailure:
    """The failure of the store that went away at the Unix time *at*, in the name of *rank*."""
    hint = explain_exit(gone.exitcode, kills) if gone.pid else ""
    failure = ProcessFailure(
        rank, gone.pid, gone.exitcode, "", message=gone.why, rank=rank_base + rank, hint=hint, process=STORE
    )
    failure.timestamp = at
    return failure


def cut_short(exits: Mapping[int, Exit], pids: Mapping[int, int], count: int) -> dict[int, ProcessFailure]:
    """The workers that a stop ended before they were done, or that were not seen to end."""
    found = {}
    for rank in range(count):
        end, pid = exits.get(rank), pids.get(rank, 0)
        if end is None:
            why = f"process {pid} was not seen to end: it is in uninterruptible sleep, or was left running"
            found[rank] = ProcessFailure(rank, pid, -signal.SIGKILL, "", message=why, rank=rank)
        elif end.exitcode != 0:
            hint = "stopped by its launcher before it was done"
            found[rank] = ProcessFailure(rank, end.pid, end.exitcode, "", rank=rank, hint=hint)
    return found


def return_values(exits: Mapping[int, Exit], count: int, rank_base: int) -> dict[int, Any]:
    """What the workers returned, by global rank; None from programs. Raises `PicklingError`."""
    values: dict[int, Any] = {}
    for rank in range(count):
        report = exits[rank].report
        if exits[rank].unread:
            raise PicklingError(
                f"the return value of rank {rank_base + rank} could not be received: this program has as many files "
                f"open as it may: {FEW_DESCRIPTORS.removeprefix('; ')}"
            )
        values[rank_base + rank] = None
        if report is not None and report.kind == "result":
            try:
                values[rank_base + rank] = pickle.loads(report.payload)
            except Exception as error:
                raise PicklingError(
                    f"the return value of rank {rank_base + rank} cannot be rebuilt here: "
                    f"{type(error).__name__}: {error}"
                ) from error
    return values
