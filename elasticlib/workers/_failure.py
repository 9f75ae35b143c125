"""
Failures and results of a round's workers: a `ProcessFailure` with the cause, or a return value,
for each end.

It also makes the records of workers that live or are being stopped.

Rules of this file:

* A report that the worker wrote beats its error file, which beats the exit status.
* Facts of a failure that cannot be read are left out, never raised.
* A worker that elasticlib stopped has failed only if it reported a failure itself, or crashed.
* Ranks are local ones unless *rank_base* is added.
* It waits for nothing.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import signal
from collections.abc import Mapping
from typing import Any

from elasticlib import records
from elasticlib._untrusted import exactly, parse, whole
from elasticlib.errors import Frame, PicklingError, ProcessFailure, read_error_file
from elasticlib.processes import FEW_DESCRIPTORS
from elasticlib.spec import LogsDest
from elasticlib.stacks import frame_of, is_heading, is_launcher, place_of
from elasticlib.workers._launch_events import (
    AllStopped,
    Event,
    Exit,
    LastWorkerRuns,
    Lingers,
    RoundStoreEnded,
    StacksRead,
    Stuck,
)
from elasticlib.workers.child import _result_pickles
from elasticlib.workers.child._report import Report

STORE, SPAWNER = "worker store", "spawner"
"""Names of helpers whose end is reported."""
_TAIL_BYTES = 8192
_MOST_LINES = 1_000_000
_MOST_LAST = 10
"""Lines of a log that a failure shows."""
_STAMP_IS_BEHIND = 2.0
"""Seconds: the time in an error file is in whole ones, so the file's own time shows the order."""
_CRASHES = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT})
_ENDED_FROM_OUTSIDE = "the signal came from outside, not from this launcher"
_CRASHED = "native code crashed: the stack shows the Python line that called it"
_NO_PROGRAM = "a shell's status for a program that was not found or cannot be executed"
_SIGNALS_MEAN: dict[int, str] = {
    **dict.fromkeys(_CRASHES, _CRASHED),
    signal.SIGABRT: "native code aborted: its last lines are on the worker's stderr",
    signal.SIGTERM: _ENDED_FROM_OUTSIDE,
    signal.SIGINT: _ENDED_FROM_OUTSIDE,
    signal.SIGHUP: _ENDED_FROM_OUTSIDE,
}
"""The most likely meaning of a signal that ended a worker, except SIGKILL."""
_STATUSES_MEAN = {
    120: "output that was still in a buffer could not be written: a full disk, or a reader that has closed",
    126: _NO_PROGRAM,
    127: _NO_PROGRAM,
}
"""The most likely meaning of an exit status: Python's own 120, and those of shells."""
_RANK_PREFIX = re.compile(r"^(\[rank\d+\]: )+")
"""Torch writes it before each line of a traceback, once for each ``init_process_group``."""
_CRASH = "Fatal Python error"
"""First words of the fault handler's text of a crash."""
_OVERDUE = "it did not end within {:g} s (exit_timeout) after that and was stopped"
_STILL_AT_WORK = "the program succeeded, but its threads, exit handlers or finalizers were still running"


def has_failed(end: Exit, error_file: str) -> bool:
    """Return True if a worker failed on its own, and was not just stopped by its launcher."""
    if end.exitcode == 0:
        return False
    if not end.was_stopped:
        return True
    # The launcher stopped it: its exit status says nothing, but a crash or a report of its own
    # does.
    has_crashed = -end.exitcode in _CRASHES
    return has_crashed or _error_of(end) is not None or _written(error_file) is not None


def _error_of(end: Exit) -> Report | None:
    """Return the worker's report of an exception; None if it wrote none."""
    report = end.report
    if report is None or report.kind != "error":
        return None
    return report


def failures_of(
    ends: Mapping[int, Exit], dest: LogsDest, kills: int, noticed: Mapping[int, float], rank_base: int
) -> dict[int, ProcessFailure]:
    """Return the failures of the workers that failed on their own, by global rank."""
    found = {}
    for local, end in sorted(ends.items()):
        error_file, rank = dest.error_files.get(local, ""), rank_base + local
        if has_failed(end, error_file):
            stderr = dest.stderrs.get(local)
            failure = failure_of(end, rank, error_file, stderr, kills, noticed[local])
            failure.log_files = _log_files(dest, local)
            failure.is_on_console = _is_on_console(end, dest)
            found[rank] = failure

    return found


def _log_files(dest: LogsDest, local_rank: int) -> tuple[str, ...]:
    """Return the log files of a worker; one file if both streams share it."""
    files = (dest.stdouts.get(local_rank), dest.stderrs.get(local_rank))
    return tuple(dict.fromkeys(path for path in files if path and path != os.devnull))


def _is_on_console(end: Exit, dest: LogsDest) -> bool:
    """Return True if the console shows the traceback that a worker wrote to its stderr."""
    # Without a log file, stderr is the console itself.
    is_tee_or_direct = end.local_rank in dest.tee_stderrs or end.local_rank not in dest.stderrs
    return is_tee_or_direct and end.report is not None and end.report.is_shown


def failure_of(
    end: Exit, rank: int, error_file: str, stderr: str | None, memory_kills: int, noticed: float
) -> ProcessFailure:
    """
    Return all facts about a worker that failed.

    *stderr* is its log file, if it has one. *memory_kills* counts the out-of-memory kills in this
    cgroup while it ran. *noticed* is the Unix time of its end, used if it did not report a time.
    """
    error = _error_of(end)
    tail = last_lines(_end_of(stderr) if stderr else end.tail)
    if error is not None:
        failure = _reported(end, rank, error_file, error)
        has_left_error = True
    else:
        written = _written(error_file)
        failure = _unreported(end, rank, error_file, written, noticed)
        has_left_error = written is not None

    raised = failure.traceback
    stacks = _stacks_of(end)
    failure.traceback = raised or stacks

    # The last lines stand below the traceback, and must not repeat it.
    known_lines = set(failure.traceback.splitlines())
    failure.log_tail = tuple(line for line in tail if _RANK_PREFIX.sub("", line) not in known_lines)
    if end.overdue is not None:
        are_shown = stacks and not raised
        failure.hint = _OVERDUE.format(end.overdue) + ("" if are_shown else _threads_then(stacks))
    elif not (end.was_stopped and has_left_error):
        failure.hint = explain_exit(end.exitcode, memory_kills)

    # Otherwise the launcher stopped it after its exception: the signal explains nothing.
    return failure


def _reported(end: Exit, rank: int, error_file: str, error: Report) -> ProcessFailure:
    """Return the failure that the *error* of a worker describes; it beats the error file."""
    return ProcessFailure(
        local_rank=end.local_rank,
        pid=end.pid,
        exitcode=end.exitcode,
        error_file=error_file,
        rank=rank,
        message=error.message,
        timestamp=error.timestamp,
        exception_type=error.exception_type,
        traceback=error.traceback,
        secondary=error.secondary,
        external=error.external,
        frames=_frames(error.frames),
    )


def _unreported(end: Exit, rank: int, error_file: str, written: float | None, noticed: float) -> ProcessFailure:
    """
    Return the failure of a worker without a report of an exception.

    *written* is the Unix time of its error file (None without one), *noticed* that of its
    process's end.
    """
    failure = ProcessFailure(end.local_rank, end.pid, end.exitcode, error_file, rank=rank)
    # A worker that the launcher stopped, and that wrote nothing, failed because another one had
    # failed.
    failure.secondary = end.was_stopped and written is None
    _set_time(failure, written, noticed)
    if end.overdue is not None and end.exitcode < 0:
        # The signal alone would look like a crash.
        failure.message = _STILL_AT_WORK
    return failure


def _set_time(failure: ProcessFailure, written: float | None, noticed: float) -> None:
    # Without an error file nothing else shows when it happened. torch's files have whole seconds:
    # the time of the file itself is more exact.
    if failure.error_file_data.get("message") == "<NONE>":
        failure.happened(noticed)
    elif written is not None and 0 <= written - failure.when() < _STAMP_IS_BEHIND:
        failure.happened(written)


def _threads_then(stacks: str) -> str:
    return f"; its threads then:\n{stacks or '(could not be seen)'}"


def _stacks_of(end: Exit) -> str:
    """Return the stacks that explain an *end*: those of a crash, or of an overdue worker."""
    if end.overdue is not None:
        return stacks_of_user(end.faults)
    if -end.exitcode not in _CRASHES:
        return ""
    # Stacks from an earlier request may stand before those of the crash.
    crash = end.faults.rfind(_CRASH)
    if crash < 0:
        return ""
    return stacks_of_user(end.faults[crash:])


def lost_all(count: int, rank_base: int, pids: Mapping[int, int], why: str) -> dict[int, ProcessFailure]:
    """Return the failures of *count* workers that ended with their spawner, by global rank."""
    return {rank_base + rank: _lost(rank, rank_base, pids, why) for rank in range(count)}


def _lost(rank: int, rank_base: int, pids: Mapping[int, int], why: str) -> ProcessFailure:
    """
    Return the failure of a worker that ended with its spawner; rank 0 stands for the spawner
    itself.
    """
    if rank == 0:
        return ProcessFailure(0, 0, -signal.SIGKILL, "", message=why, rank=rank_base, process=SPAWNER)
    message = f"the worker was killed with all others: {why}"
    pid = pids.get(rank, 0)
    return ProcessFailure(rank, pid, -signal.SIGKILL, "", message=message, rank=rank_base + rank, secondary=True)


def _frames(text: str) -> tuple[Frame, ...]:
    """Return the frames that a worker wrote; none if it has overwritten them."""
    try:
        return tuple(_frame(*each) for each in parse(text.encode()))
    except (TypeError, ValueError):
        return ()


def _frame(file: object, line: object, function: object, variables: object) -> Frame:
    if not isinstance(variables, dict) or not all(isinstance(each, str) for each in variables.values()):
        raise ValueError("variables of a frame are text")
    return Frame(exactly(file, str), whole(line, 1, _MOST_LINES), exactly(function, str), variables)


def _written(error_file: str) -> float | None:
    """Return the Unix time at which a worker wrote its error file; None if it wrote none."""
    try:
        data = read_error_file(error_file)
        has_message = isinstance(data, dict) and data.get("message")
        return os.stat(error_file).st_mtime if has_message else None
    except (OSError, ValueError):
        return None


def record_of(event: Event, rank_base: int, are_all: bool, signum: int) -> records.Record | None:
    """
    Return the record of *event*; None for one without a record.

    *rank_base* is the first global rank of this node. *are_all*: the job has no workers
    elsewhere. *signum* is the signal with which the workers are being stopped.
    """
    match event:
        case Exit(rank, pid, exitcode, late=int(late)):
            return records.WorkerCrashedLate(rank, pid, exitcode, late)
        case Lingers():
            stacks = stacks_of_user(event.stacks)
            return records.WorkerLingers(event.local_rank, event.pid, event.seconds, event.ends, stacks)
        case LastWorkerRuns(rank, pid, seconds, left, stacks):
            place = _place_in(stacks_of_user(stacks))
            return records.LastRuns(rank_base + rank, pid, seconds, left, place, are_all)
        case StacksRead(texts):
            by_rank = {rank: stacks_of_user(text) for rank, text in texts.items()}
            return records.StacksReported(by_rank)
        case Stuck(rank, pid, waited):
            return records.WorkerStuck(rank_base + rank, pid, signum, waited)
        case AllStopped(survivors, ended):
            return _record_of_stop(survivors, ended)

    return None


def _place_in(stacks: str) -> str:
    """Return the place of the user's code, as a phrase; empty if it is not known."""
    if not stacks:
        return ""
    place = place_of(stacks)
    return f"at {place}" if place else _NATIVE


def _record_of_stop(survivors: list[int], ended: dict[int, str]) -> records.Record | None:
    """Return the record of a stop; None if no process was left and none was detached."""
    if survivors:
        return records.WorkersSurvived(tuple(survivors))
    if ended:
        return records.DetachedEnded(ended)
    return None


_CALL = "call_function"
"""
Function that calls the user's: frames below it belong to elasticlib, or to the caller that was
forked.
"""
_NATIVE = "in native code, such as the destructor of a local variable"
_AT_ITS_END = {
    "await_release": "has returned from the function, and waits for the other local ranks",
    "_join_threads": "waits for the threads of the program to end",
    "_flush_files": "flushes files that were left open",
    "_close_files": "flushes files that were left open",
    "_clear_modules": "clears the program's modules and runs finalizers",
    "_flush_streams": "flushes stdout and stderr",
    "finish": "runs exit handlers, or flushes files",
    _CALL: f"called the function, which is {_NATIVE}",
}
"""Activity of a worker at its end, by the name of elasticlib's function."""


def stacks_of_user(faults: str) -> str:
    """Return the fault handler's stacks without the frames below the user's first one."""
    stacks = _UserStacks()
    for line in [*faults.splitlines(), ""]:
        # The fault handler's last line of a crash, outside of any stack.
        is_footer = line.startswith("Extension modules:")
        if not is_footer:
            stacks.take(line)
    return "\n".join(stacks.lines).strip()


class _UserStacks:
    """
    The user's lines of the fault handler's stacks.

    Each line is a frame, the heading of a stack, or between two stacks. A stack with frames of
    elasticlib alone gets one line that says what elasticlib does there.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._action: str | None = None
        """Activity of elasticlib in this stack."""
        self._is_below_call = False
        """
        True below the frame that calls the user's function: no frame there belongs to the user.
        """

    def take(self, line: str) -> None:
        """Add *line* if it is the user's."""
        frame = frame_of(line)
        if frame is None:
            self._take_border(line)
        elif is_launcher(frame.file):
            self._action = self._action or _AT_ITS_END.get(frame.function)
            self._is_below_call = self._is_below_call or frame.function == _CALL
        elif not self._is_below_call:
            self.lines.append(line)

    def _take_border(self, line: str) -> None:
        """Add a *line* that is not a frame: a stack ends, or begins, here."""
        self._is_below_call = False
        has_no_frames = bool(self.lines) and is_heading(self.lines[-1])
        if not line.strip() and has_no_frames and self._action is not None:
            self.lines.append(f"  (elasticlib {self._action})")
        if is_heading(line):
            self._action = None
        self.lines.append(line)


def explain_exit(exitcode: int, memory_kills: int) -> str:
    """Return the most likely meaning of a signal or an exit status; empty without one."""
    # A shell, or a program that forwards its child's end, exits with 128 and the signal's number.
    number = -exitcode if exitcode < 0 else exitcode - 128
    if number == signal.SIGKILL:
        return _explain_kill(memory_kills)
    return _SIGNALS_MEAN.get(number, "") or _STATUSES_MEAN.get(exitcode, "")


def _explain_kill(memory_kills: int) -> str:
    if memory_kills > 0:
        return (
            f"the kernel's out-of-memory killer ended {memory_kills} process(es) of this cgroup meanwhile: "
            "most likely the worker needed more memory than the limit"
        )
    return (
        "the cgroup's out-of-memory counter did not move: killed from outside "
        "(kill -9, a scheduler, or the whole machine was out of memory)"
    )


def _end_of(path: str) -> str:
    """Return the end of a log file; empty if it cannot be read."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def last_lines(text: str) -> tuple[str, ...]:
    """Return the last lines of *text*; of a line with carriage returns, its last state."""
    lines = text.replace("\r\n", "\n").rstrip("\n").split("\n")
    return tuple(line.rpartition("\r")[2] for line in lines[-_MOST_LAST:] if line)


def original_exception(end: Exit) -> BaseException | None:
    """Return the worker's own exception, or a stand-in for it; None if it raised none."""
    report = _error_of(end)
    if report is None:
        return None

    error = _result_pickles.unpack_exception(report.payload)

    # Its class cannot be imported here: a stand-in has the name and the text.
    if error is None and report.exception_type:
        text = report.message.removeprefix(report.exception_type).removeprefix(": ")
        error = _result_pickles.stand_in(report.exception_type, text)

    if error is not None:
        note = f"from the worker of local rank {end.local_rank}:\n{report.traceback}"
        # A class may forbid notes and attributes.
        with contextlib.suppress(Exception):
            _add_note(error, note)

    return error


def _add_note(error: BaseException, note: str) -> None:
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:  # Python 3.10
        error.__cause__ = _WorkersTraceback(note)


class _WorkersTraceback(Exception):  # noqa: N818 - it is shown as the cause, where Python has no notes
    """Shows the traceback of a worker's exception above it (Python 3.10)."""


def blamed(ends: Mapping[int, Exit], count: int) -> int | None:
    """Return the rank that stands for a lost store: the first without another cause."""
    for rank in range(count):
        end = ends.get(rank)
        if end is None or not has_failed(end, ""):
            return rank
        has_lost_connection = end.report is not None and end.report.secondary
        # It failed because the store was gone.
        if has_lost_connection:
            return rank
    return None


def lost_store(gone: RoundStoreEnded, rank: int, rank_base: int, kills: int, at: float) -> ProcessFailure:
    """Return the failure of the store that ended at the Unix time *at*, in the name of *rank*."""
    hint = explain_exit(gone.exitcode, kills) if gone.pid else ""
    failure = ProcessFailure(
        rank, gone.pid, gone.exitcode, "", message=gone.why, rank=rank_base + rank, hint=hint, process=STORE
    )
    failure.timestamp = at
    return failure


def cut_short(exits: Mapping[int, Exit], pids: Mapping[int, int], count: int) -> dict[int, ProcessFailure]:
    """Return the failures of workers that a stop ended early, or that were not seen to end."""
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
    """
    Return the workers' return values, by global rank; None from programs.

    Raise `PicklingError`.
    """
    return {rank_base + rank: _return_value(exits[rank], rank_base + rank) for rank in range(count)}


def _return_value(end: Exit, rank: int) -> Any:
    if end.unread:
        raise PicklingError(
            f"the return value of rank {rank} could not be received: this program has reached its limit of "
            f"open files: {FEW_DESCRIPTORS.removeprefix('; ')}"
        )

    if end.report is None or end.report.kind != "result":
        return None

    try:
        return pickle.loads(end.report.payload)
    except Exception as error:
        raise PicklingError(
            f"the return value of rank {rank} cannot be rebuilt here: {type(error).__name__}: {error}"
        ) from error
