"""
The workers of a pool from their start to their end: their calls, answers, errors and stop.

Rules of this file: one thread uses the workers at a time. Every wait also ends with the job. A wait can
be interrupted, and a received message is stored before that. A failure that the job sees is reported
as the job reports it. For the job, a worker that ends with exit status 0 has succeeded, and the others
continue.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shutil
import threading
import traceback
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from attrs import field, frozen

from elasticlib import processes
from elasticlib._clock import monotonic, wall_time
from elasticlib.errors import ChildFailedError, ConfigError, ProcessFailure, SignalException
from elasticlib.job import Job, combined_error
from elasticlib.launch import CheckedLaunch
from elasticlib.logs import shorten_file
from elasticlib.notebook import trace_of
from elasticlib.preload import import_path
from elasticlib.processes import (
    CallerIdentity,
    Channel,
    Message,
    current_folder,
    descriptors_of_memories,
    identity_of_current_folder,
    path_of_current_folder,
    wait_readable,
)
from elasticlib.spec import LaunchConfig
from elasticlib.stacks import ranks_text
from elasticlib.workers import (
    DeferredSignals,
    Exit,
    changed_variables,
    failure_of,
    original_exception,
    pack_call,
    return_values,
    without_secrets,
)
from elasticlib.workers.child import (
    CALLS_MEMORY,
    DISPLAYED_SUFFIX,
    Report,
    read_report,
    report_of_exception,
    serve_calls,
)

logger = logging.getLogger(__name__)

_AFTER_FAILURE = 1.0
"""Seconds that the other ranks have to answer after a failure; later they most likely wait in a collective."""
# A stream that blocks, such as a paused terminal, must not keep a call from returning.
_SHOW_LIMIT = 1.0
"""Seconds that ``sys.stdout`` may take after a call for the output of the workers."""
_STOP_GRACE = 1.0
"""Seconds from SIGTERM to SIGKILL for workers that are no longer needed."""
_LOOK = 0.01
"""Polling interval in seconds for the job to notice an end that the kernel has reported."""


@frozen
class CallAnswer:
    """Outcome of a call on one rank."""

    rank: int
    report: Report
    leaks: str
    """Reason why the worker cannot serve another call; empty if it can."""

    def value(self) -> Any:
        """Return the value that the function returned. Raises `PicklingError` if it cannot be read."""
        end = Exit(0, 0, 0, False, self.report, "")
        return return_values({0: end}, 1, self.rank)[self.rank]

    def failed(self) -> bool:
        """Return True if the function raised."""
        return self.report.kind != "result"


class _Caller:
    """The calling program, and the part of its state that its workers know."""

    def __init__(self, workers: int) -> None:
        self._identity = CallerIdentity.now()
        self._place = identity_of_current_folder()
        self._known = [without_secrets(os.environ)] * workers
        """By rank, the environment variables of the program that the worker knows."""

    def has_changed(self) -> bool:
        """Return True if the program no longer has the privileges, namespaces or cgroup of its workers."""
        return self._identity != CallerIdentity.now()

    def place(self) -> Message:
        """Return the search path and the working directory of a call."""
        identity = identity_of_current_folder()
        # The workers were started in the pool's folder: only that one may have been removed.
        is_same_folder = identity == self._place
        return {
            "path": import_path(),
            "cwd": path_of_current_folder() if is_same_folder else current_folder(),
            "place": identity,
        }

    def variables_for(self, rank: int, variables: dict[str, str]) -> Any:
        """Return the changes from the worker's known variables to *variables*, and note them as known."""
        changed = changed_variables(self._known[rank], variables)
        self._known[rank] = variables
        return changed


@frozen
class _ImportedFiles:
    """Files of the user's project that workers have imported."""

    _times: dict[str, dict[int, int]] = field(factory=dict)
    """By file and rank, the file's modification time (ns) at the import."""

    def add(self, rank: int, times: Mapping[str, int]) -> None:
        for file, time in times.items():
            self._times.setdefault(file, {})[rank] = time

    def edited(self) -> list[str]:
        """Return the files that have changed since their import."""
        return sorted(file for file, times in self._times.items() if _is_edited(file, times.values()))


def _is_edited(file: str, times: Collection[int]) -> bool:
    try:
        # Ranks may have imported different versions of the file.
        return {os.stat(file).st_mtime_ns} != {*times}
    except OSError:
        # An editor may be between two versions of the file.
        return False


class PoolWorkers:
    """
    Workers of *config*, which *serve* calls and share a process group of the kind *group*.

    Raises the errors of a launch. The caller must defer interrupts until it has the object.
    """

    def __init__(
        self,
        config: LaunchConfig,
        group: str | None,
        *,
        is_listed: bool = True,
        serve: Callable[[str | None], None] = serve_calls,
    ) -> None:
        launch = CheckedLaunch(config, serve, (group,), None, {}, True, "pool", follows_callers=True)
        self._console = launch.console
        self._channels = Channels(launch)
        self._caller = _Caller(len(self._channels))
        self._raise_as = config.raise_as
        self._main = config.main
        self._group = group
        self._has_own_files = config.logs_specs is None
        """True if the caller has not chosen the files of the output."""
        self._calls = 0
        self._files = _ImportedFiles()
        self._replace_reason = ""
        """Reason why the workers can serve no more calls; empty if they can."""
        self.job = Job(launch, is_owned=True, is_listed=is_listed)
        try:
            self.job.begin()
        except BaseException:
            self._close()
            raise

        self.job.when_done(functools.partial(self._job_is_done, launch))

    def _job_is_done(self, launch: CheckedLaunch) -> None:
        folder = launch.folder if isinstance(self.job.exception(), SignalException) else ""
        if folder and threading.main_thread().is_alive():
            weakref.finalize(self.job, shutil.rmtree, folder, ignore_errors=True)
        # At its end the program no longer calls finalizers.
        elif folder:
            shutil.rmtree(folder, ignore_errors=True)
        # OSError: the channels are closed already.
        with contextlib.suppress(OSError):
            self._channels.job_has_ended()

    def __len__(self) -> int:
        return len(self._channels)

    # Fitness for another call.

    def is_fit(self) -> bool:
        """Return True if the workers can serve another call."""
        if self._replace_reason or self._channels.owing or self.job.done():
            return False
        return not self._channels.has_lost_worker()

    def must_be_replaced(self, reason: str) -> None:
        """Mark the workers as unable to serve more calls; the first reason stays."""
        self._replace_reason = self._replace_reason or reason

    def look_for_changes(self) -> None:
        """Mark the workers for replacement if an imported module was edited, or the program's identity changed."""
        change = ""
        edited = self._files.edited()
        if edited:
            change = f"{', '.join(edited)} changed on disk since the pool's workers imported it"
        if self._caller.has_changed():
            change = "this program changed its privileges, namespaces or cgroup since the pool's workers were started"
        if change and self.is_fit():
            self.must_be_replaced(change)
            logger.warning("%s: new workers replace the old ones; the state of earlier calls is lost", change)

    # One call.

    def listen(self, on_ask: OnAsk, on_notice: OnNotice) -> None:
        """Call *on_ask* and *on_notice* for the messages of ranks during a call."""
        self._channels.on_ask, self._channels.on_notice = on_ask, on_notice

    def turn_here(self) -> None:
        """Send the workers' output to this caller until `show`, for any number of calls of `ask`."""
        if self._console is not None:
            self._console.turn_here()

    def ask(
        self,
        ranks: Collection[int],
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        by_all: bool = True,
        group: tuple[str | None, str | None] | None = None,
    ) -> None:
        """
        Send *ranks* a call of *function*. Raises `PicklingError` before any call is sent.

        *by_all*: the call is on all ranks, which may use collectives. *group* is the kind and the backend of
        their process group; None for the pool's own kind with torch's default backend.
        """
        packed = pack_call(function, args, kwargs, self._main)
        memories = packed.memories()
        variables = without_secrets(os.environ)
        message: Message = {
            "op": "call",
            "call": self._calls + 1,
            "by_all": by_all,
            "group": [self._group, None] if group is None else list(group),
            "sources": packed.sources,
            "shared": None if packed.names is None else sorted(packed.names),
            **self._caller.place(),
        }
        with DeferredSignals():
            self._calls += 1
            descriptors = descriptors_of_memories(memories)
            message["memories"] = list(descriptors)
            try:
                for rank in ranks:
                    changed = self._caller.variables_for(rank, variables)
                    own = {**message, "variables": changed}
                    self._channels.send_call(rank, self._calls, own, tuple(descriptors.values()))
            finally:
                for descriptor in descriptors.values():
                    os.close(descriptor)
                # While interrupts are deferred: Python cannot raise one out of a destructor.
                del packed, memories

    def answers(self, limit: float | None = None) -> list[CallAnswer]:
        """
        Wait until some of the called ranks have answered; return [] after *limit* seconds.

        Raises the error that ended the job: `ChildFailedError` if a worker died, with any exit status.
        """
        ranks, ended = self._channels.wait(limit)
        if ended is not None:
            raise _death_error(self.job, ended, self._channels.wait_for_end)

        found = []
        for rank in ranks:
            # An interrupt must not lose a message that was taken from a channel.
            with DeferredSignals() as put_off:
                received = self._channels.receive(rank, put_off)
                if received is not None:
                    found.append(self._answer(rank, *received))

        return found

    def _answer(self, rank: int, message: Message, report: Report | None) -> CallAnswer:
        self._files.add(rank, message["files"])
        leaks = message["leaks"]
        if leaks:
            self.must_be_replaced(f"rank {rank}: {leaks}")
        return CallAnswer(rank, report or _lost(), leaks)

    def late_answers(self, failed: Collection[int]) -> tuple[list[CallAnswer], dict[int, ProcessFailure]]:
        """
        Wait up to a second for the other answers to a failed call.

        Return the answers, and the failures of workers that died meanwhile. *failed* are the ranks that
        have failed; empty if the call failed for another reason.
        """
        found: list[CallAnswer] = []
        died: dict[int, ProcessFailure] = {}
        until = monotonic() + _AFTER_FAILURE
        left = _AFTER_FAILURE
        try:
            while self._channels.owing and left > 0:
                found += self.answers(left)
                left = until - monotonic()
        except ChildFailedError as error:
            died = error.failures

        if self._channels.owing:
            causes = ranks_text(failed) if failed else "the call"
            self.must_be_replaced(f"{ranks_text(self._channels.owing)} did not end after {causes} had failed")

        return found, died

    def error(
        self,
        title: str,
        answers: Sequence[CallAnswer],
        died: Mapping[int, ProcessFailure] = MappingProxyType({}),
        item: int | None = None,
    ) -> ChildFailedError:
        """Return the error for failed *answers* and workers that *died*; *item* is the index in a `Pool.map`."""
        reports = {answer.rank: answer.report for answer in answers if answer.failed()}
        return _call_error(self.job, title, reports, died, self._raise_as, item)

    def show(self) -> None:
        """
        Wait at the end of a call until the caller's ``sys.stdout`` has the output of the workers.

        Output files that have become too long are shortened.
        """
        if self._console is None:
            return
        if not self._console.catch_up(_SHOW_LIMIT):
            logger.warning("output of this call will appear late, because sys.stdout has blocked for %g s", _SHOW_LIMIT)
        elif self._has_own_files:
            self._shorten_files()
        self._console.rest()

    def _shorten_files(self) -> None:
        try:
            files = [file for rank in range(len(self)) for file in self.job.files(rank)]
        # ConfigError: the workers have not started yet.
        except ConfigError:
            return
        for file in files:
            shorten_file(file)
            shorten_file(file + DISPLAYED_SUFFIX)

    # The end of the workers.

    def end(self, limit: float) -> None:
        """End the workers with their exit handlers, and stop them after *limit* seconds."""
        over = threading.Event()
        self.job.when_done(over.set)
        try:
            self._channels.send_end()
            # Not `Job.result`, which would handle the program's signals as signals to the job.
            over.wait(limit)
        # Also after an interrupt: then exit handlers are not waited for.
        finally:
            self.wait()

    def stop(self) -> None:
        """Stop the workers, and return at once."""
        self.job.stop(_STOP_GRACE, wait=False)

    def let_go(self) -> None:
        """Stop workers of a pool without references, and return at once."""
        self.stop()
        self.job.when_done(self._close)

    def wait(self) -> None:
        """Stop the workers, and wait for their end."""
        try:
            self.job.stop(_STOP_GRACE)
        finally:
            self._close()

    def _close(self) -> None:
        if (error := self.job.exception()) is not None:
            # The frames refer to the job, and would keep it and its files.
            traceback.clear_frames(error.__traceback__)
        self._channels.close()


def _lost() -> Report:
    """Return the report for an answer that was overwritten."""
    return report_of_exception(RuntimeError("the answer of this worker was overwritten and cannot be read"), b"")


# The errors of calls.


def _call_error(
    job: Job,
    title: str,
    reports: Mapping[int, Report],
    died: Mapping[int, ProcessFailure],
    raise_as: str,
    item: int | None,
) -> ChildFailedError:
    """
    Return the error of a failed call.

    *reports* are from the ranks on which the function raised. *died* are the failures of workers that
    have ended. *item* is the index in a `Pool.map`.
    """
    pids = _pids(job)

    # A report of the worker itself replaces what its exit shows.
    failures = dict(died)
    causes: dict[int, BaseException | None] = {}
    for rank, report in reports.items():
        end = Exit(rank, pids.get(rank, 0), 1, False, report, "")
        failures[rank] = failure_of(end, rank, "", None, 0, wall_time())
        failures[rank].hint = _hint(report)
        causes[rank] = original_exception(end)

    error = ChildFailedError(title, dict(sorted(failures.items())))
    cause = causes.get(error.get_first_failure()[0])
    found = combined_error(error, cause, raise_as)
    found._elastic_item = item
    return found.with_traceback(trace_of(found, None))


def _pids(job: Job) -> dict[int, int]:
    return {each.rank: each.pid for each in job.status().ranks}


def _hint(report: Report) -> str:
    # Torch raises a ValueError for all wrong arguments: only its text identifies this one.
    if "initialize the default process group twice" in report.message:
        return (
            "the pool has already created the process group: leave init_process_group out, or use pool(..., group=None)"
        )
    return ""


def _death_error(job: Job, ranks: Collection[int], wait: Callable[[float], object]) -> ChildFailedError:
    """
    Return the error for *ranks* that have ended during a call with exit status 0.

    Raises the error that ends the job, if one does. *wait* waits for the job's end, up to some seconds.
    """
    while not _has_seen_end(job, ranks):
        # The kernel reports an end before the job does.
        wait(_LOOK)

    pids = _pids(job)
    failures = {}
    for rank in sorted(ranks):
        end = Exit(rank, pids.get(rank, 0), 0, False, None, "")
        failures[rank] = failure_of(end, rank, "", _latest_output(job, rank), 0, wall_time())
        failures[rank].message = "exited with status 0 during a call"

    return ChildFailedError(job.name, failures)


def _has_seen_end(job: Job, ranks: Collection[int]) -> bool:
    """Return True if *job* knows that *ranks* have ended. Raises the error that ends the job, if one does."""
    status = job.status()
    codes = {each.rank: each.exitcode for each in status.ranks}
    is_ending = job.done() or status.state == "stopping" or any(codes.values())
    if is_ending:
        # The error of the job names the rank that failed first.
        job.result()
        return True
    return all(codes.get(rank) == 0 for rank in ranks)


def _latest_output(job: Job, rank: int) -> str | None:
    """Return the file with the latest output of *rank*; None without a file."""
    # ConfigError: the output is in no file.
    with contextlib.suppress(ConfigError):
        return next(reversed(job.files(rank)), None)
    return None


# Channels to the workers: they send calls, receive answers and detect ends. Every rank owes at most one answer.

OnAsk = Callable[[int, Message], tuple[Message, tuple[int, ...]]]
"""Return the answer, with descriptors, to a question that a rank sends during a call."""
OnNotice = Callable[[int, Message], None]
"""Receive each message that a rank sends during a call without expecting an answer."""


class Channels:
    """Channels to the workers of *launch*, which gets the workers' ends."""

    def __init__(self, launch: CheckedLaunch) -> None:
        self._channels: list[Channel] = []
        self._ended = -1
        """Readable once the job has ended."""
        self.owing: dict[int, int] = {}
        """By rank, the number of the call that has not been answered."""
        self._processes: dict[int, processes.Handle] = {}
        """By rank, the worker's process. Its channel does not show its death, since copies of its end may stay open."""
        self._silent: set[int] = set()
        """Ranks whose channel is closed."""
        self.on_ask: OnAsk = lambda *_: ({}, ())
        self.on_notice: OnNotice = lambda *_: None
        self._open(launch)

    def _open(self, launch: CheckedLaunch) -> None:
        theirs: list[Channel] = []
        try:
            for _ in range(launch.workers):
                ours, end = Channel.pair()
                self._channels.append(ours)
                theirs.append(end)
            self._ended = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # No file descriptor is left.
        except OSError:
            launch.abandon()
            for channel in (*self._channels, *theirs):
                channel.close()
            raise

        launch.hand({f"{CALLS_MEMORY}{rank}": end.fileno() for rank, end in enumerate(theirs)})
        for end in theirs:
            end.close()

    def __len__(self) -> int:
        return len(self._channels)

    def job_has_ended(self) -> None:
        """Wake up the threads that wait. Raises `OSError` after `close`."""
        os.eventfd_write(self._ended, 1)

    def wait_for_end(self, limit: float) -> None:
        """Wait until the job has ended, for *limit* seconds at most."""
        wait_readable([self._ended], limit)

    def has_lost_worker(self) -> bool:
        """Return True if a worker has ended."""
        return any(process.has_ended() for process in self._processes.values())

    def send_call(self, rank: int, number: int, message: Message, descriptors: tuple[int, ...]) -> None:
        """Send a call to *rank*. The call is noted as unanswered before it is sent."""
        self.owing[rank] = number
        self._channels[rank].send(message, descriptors)

    def send_end(self) -> None:
        """Ask all workers to end."""
        for channel in self._channels:
            channel.send({"op": "end"})

    def wait(self, limit: float | None) -> tuple[list[int], list[int] | None]:
        """
        Wait up to *limit* seconds (None: without limit) for the ranks that owe an answer.

        Return the ranks that have sent a message, and None. If none has sent one, return [] and the ranks
        that have ended without an answer; ([], None) after the limit.
        """
        channels, workers = self._of_owing()
        ready = wait_readable([*channels, *workers, self._ended], limit)
        if not ready:
            return [], None

        # Messages come first: an answer is valid even if its worker has ended since.
        readable = [channels[each] for each in ready & channels.keys()]
        if readable:
            return readable, None

        # All workers end with the job, whatever their own handles show by now.
        if self._ended in ready:
            return [], [*self.owing]

        return [], [workers[each] for each in ready]

    def _of_owing(self) -> tuple[dict[int, int], dict[int, int]]:
        """Return the ranks that owe an answer, by the descriptors of their channels and of their processes."""
        channels = {self._channels[rank].fileno(): rank for rank in self.owing if rank not in self._silent}
        known = self.owing.keys() & self._processes.keys()
        return channels, {self._processes[rank].fileno(): rank for rank in known}

    def receive(self, rank: int, put_off: DeferredSignals) -> tuple[Message, Report | None] | None:
        """Handle one message of *rank*. Return the message and its report if it answers the rank's call, else None."""
        received = self._channels[rank].receive()
        if received is None:
            # A closed channel stays readable; the end of the worker shows in its process.
            self._silent.add(rank)
            return None

        message, descriptors = received
        try:
            match message["op"]:
                case "ready":
                    self._processes[rank] = processes.received_handle(descriptors)
                    # The handle owns the descriptors now.
                    descriptors = []
                case "ask":
                    # Interrupts are allowed here, since the answer may take long.
                    with put_off.lifted:
                        self._channels[rank].send(*self.on_ask(rank, message))
                case "notice":
                    self.on_notice(rank, message)
                case "answer" if message["call"] == self.owing[rank]:
                    report = read_report(*descriptors)
                    del self.owing[rank]
                    return message, report

            return None
        finally:
            for each in descriptors:
                os.close(each)

    def close(self) -> None:
        """Close the channels; may be called again."""
        for channel in self._channels:
            channel.close()
        while self._processes:
            self._processes.popitem()[1].close()
        ended, self._ended = self._ended, -1
        if ended >= 0:
            os.close(ended)
