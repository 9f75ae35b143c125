"""
The workers of a pool from their start to their end: asked, heard, and stopped as the job that they are.

Rules of this file: one thread at a time; whatever is waited for, the job's end is waited for too; who waits can be
interrupted, and what is received is put where it belongs before that. What the job sees as a failure is reported as the
job reports it; to the job a worker that ends with exit status 0 is a success, and its others go on.
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

from elasticlib._clock import monotonic, wall_time
from elasticlib.errors import (
    ChildFailedError,
    ConfigError,
    ProcessFailure,
    SignalException,
)
from elasticlib.job import Job, combined_error
from elasticlib.launch import CheckedLaunch
from elasticlib.logs import shorten_file
from elasticlib.notebook import trace_of
from elasticlib.pools._channels import Channels, OnAsk, OnTell
from elasticlib.preload import import_path
from elasticlib.processes import (
    CallerIdentity,
    Message,
    current_folder,
    descriptors_of_memories,
    identity_of_current_folder,
    path_of_current_folder,
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
    DISPLAYED_SUFFIX,
    Report,
    report_of_exception,
    serve_calls,
)

logger = logging.getLogger(__name__)

_AFTER_FAILURE = 1.0
"""Seconds that ranks have, once one has failed, to end by themselves: longer, and they wait for it in a collective."""
_SHOW_LIMIT = 1.0
"""Seconds that ``sys.stdout`` may take, after a call, for what the workers have written in it."""
_STOP_GRACE = 1.0
"""Seconds from SIGTERM to SIGKILL for workers that are not needed any more."""
_LOOK = 0.01
"""Seconds between two looks whether the job has seen an end that the kernel told."""


@frozen
class CallAnswer:
    """The outcome of a call on one rank."""

    rank: int
    report: Report
    leaks: str
    """Why the worker cannot serve another call; empty where it can."""

    def value(self) -> Any:
        """Return the value that the function returned. Raises `PicklingError`."""
        end = Exit(0, 0, 0, False, self.report, "")
        return return_values({0: end}, 1, self.rank)[self.rank]

    def failed(self) -> bool:
        """Return whether the function raised."""
        return self.report.kind != "result"


class _Caller:
    """The program that calls, and as much of it as its workers know."""

    def __init__(self, workers: int) -> None:
        self._identity = CallerIdentity.now()
        self._place = identity_of_current_folder()
        self._known = [without_secrets(os.environ)] * workers
        """By rank, the program's variables as the worker knows them."""

    def has_changed(self) -> bool:
        """Return whether workers have privileges, namespaces or a cgroup that the program has not any more."""
        return self._identity != CallerIdentity.now()

    def place(self) -> Message:
        """Return where a call is made: its search path and its folder."""
        identity = identity_of_current_folder()
        is_same_folder = identity == self._place
        return {
            "path": import_path(),
            "cwd": path_of_current_folder() if is_same_folder else current_folder(),
            "place": identity,
        }

    def variables_for(self, rank: int, variables: dict[str, str]) -> Any:
        """Return what of *variables* differs for that worker, which knows them from now on."""
        changed = changed_variables(self._known[rank], variables)
        self._known[rank] = variables
        return changed


@frozen
class _ImportedFiles:
    """The files of the user's project that workers have imported."""

    _times: dict[str, dict[int, int]] = field(factory=dict)
    """By file, its time at the import of each rank."""

    def add(self, rank: int, times: Mapping[str, int]) -> None:
        for file, time in times.items():
            self._times.setdefault(file, {})[rank] = time

    def edited(self) -> list[str]:
        """Return those that have changed since then."""
        return sorted(file for file, times in self._times.items() if _is_edited(file, times.values()))


def _is_edited(file: str, times: Collection[int]) -> bool:
    try:
        return {os.stat(file).st_mtime_ns} != {*times}
    except OSError:
        # An editor may be between two versions of the file.
        return False


class PoolWorkers:
    """
    The workers of *config*, which *serve* calls and share a process group of the kind *group*.

    Raises what a launch does. Its caller puts interrupts off until it has the object.
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
        """Whether nobody else chose where its output is kept."""
        self._calls = 0
        self._files = _ImportedFiles()
        self._replace_reason = ""
        """Why it can serve no more calls."""
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
        # At its end the program calls no finalizers any more.
        elif folder:
            shutil.rmtree(folder, ignore_errors=True)
        # Nobody listens any more.
        with contextlib.suppress(OSError):
            self._channels.job_has_ended()

    def __len__(self) -> int:
        return len(self._channels)

    # Whether they can serve.

    def is_fit(self) -> bool:
        """Return whether they can serve another call."""
        if self._replace_reason or self._channels.owing or self.job.done():
            return False
        return not self._channels.has_lost_worker()

    def must_be_replaced(self, reason: str) -> None:
        """Let them serve no more calls; the first reason stays."""
        self._replace_reason = self._replace_reason or reason

    def look_for_changes(self) -> None:
        """Serve no more calls where a module that a worker imported was edited, or the program gave something up."""
        change = ""
        edited = self._files.edited()
        if edited:
            change = f"{', '.join(edited)} changed on disk since the pool's workers imported it"
        if self._caller.has_changed():
            change = "this program changed its privileges, namespaces or cgroup since the pool's workers were started"
        if change and self.is_fit():
            self.must_be_replaced(change)
            logger.warning("%s: new ones take their place, and what calls had left in them is gone", change)

    # One call.

    def listen(self, on_ask: OnAsk, on_tell: OnTell) -> None:
        """Call *on_ask* and *on_tell* for the messages of ranks in the midst of a call."""
        self._channels.on_ask, self._channels.on_tell = on_ask, on_tell

    def turn_here(self) -> None:
        """Send what the workers write to this caller, from now on, up to `show`, however often it asks."""
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
        Have *ranks* call *function*. Raises `PicklingError` before any of them hears of it.

        *by_all*: they are all of them, which may use collectives, in a process *group* of this kind and back end (None:
        the pool's own, over torch's default).
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
                # While interrupts are put off: Python has no place for one in a destructor.
                del packed, memories

    def answers(self, limit: float | None = None) -> list[CallAnswer]:
        """
        Wait until some of the ranks that were asked have answered; [] when *limit*, in seconds, is over.

        Raises what ended the job: `ChildFailedError` where a worker died, with whatever exit status.
        """
        ranks, ended = self._channels.wait(limit)
        if ended is not None:
            raise _death_error(self.job, ended, self._channels.wait_for_end)
        found = []
        for rank in ranks:
            with DeferredSignals() as put_off:
                received = self._channels.receive(rank, put_off)
                if received is not None:
                    found.append(self._answer(rank, *received))
        return found

    def _answer(self, rank: int, message: Message, report: Report | None) -> CallAnswer:
        self._files.add(rank, message["files"])
        leaks = message["dirt"]
        if leaks:
            self.must_be_replaced(f"rank {rank}: {leaks}")
        return CallAnswer(rank, report or _lost(), leaks)

    def abandoned(self, failed: Collection[int] = ()) -> tuple[list[CallAnswer], dict[int, ProcessFailure]]:
        """
        Return the answers that still arrive in a second, once the call has failed, and the workers that died meanwhile.

        *failed*: the ranks that have failed; none where it was not they.
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
        """Return the error for the failures among *answers* and for workers that *died*; of *item* of a `Pool.map`."""
        reports = {answer.rank: answer.report for answer in answers if answer.failed()}
        return _call_error(self.job, title, reports, died, self._raise_as, item)

    def show(self) -> None:
        """
        Wait until the caller has got what the workers have written, if it takes that: its call has ended.

        What has become long of it is shortened then.
        """
        if self._console is None:
            return
        if not self._console.catch_up(_SHOW_LIMIT):
            logger.warning("the output of this call comes late: sys.stdout has not taken it in %g s", _SHOW_LIMIT)
        elif self._has_own_files:
            self._shorten_files()
        self._console.rest()

    def _shorten_files(self) -> None:
        try:
            files = [file for rank in range(len(self)) for file in self.job.files(rank)]
        # The workers have not started yet.
        except ConfigError:
            return
        for file in files:
            shorten_file(file)
            shorten_file(file + DISPLAYED_SUFFIX)

    # Their end.

    def end(self, limit: float) -> None:
        """Have the workers end as programs do, with their exit handlers; they are stopped after *limit* seconds."""
        over = threading.Event()
        self.job.when_done(over.set)
        try:
            self._channels.send_end()
            # Not `Job.result`, which would take the program's signals for ones to the job.
            over.wait(limit)
        # After an interrupt, too: nobody waits for exit handlers any more.
        finally:
            self.wait()

    def stop(self) -> None:
        """Stop the workers, and return at once."""
        self.job.stop(_STOP_GRACE, wait=False)

    def let_go(self) -> None:
        """Stop the workers, which nobody has any more, and return at once."""
        self.stop()
        self.job.when_done(self._close)

    def wait(self) -> None:
        """Wait for the end of workers that were stopped."""
        try:
            self.job.stop(_STOP_GRACE)
        finally:
            self._close()

    def _close(self) -> None:
        if (error := self.job.exception()) is not None:
            # The frames refer to the job, which would stay with its files.
            traceback.clear_frames(error.__traceback__)
        self._channels.close()


def _lost() -> Report:
    """For an answer that somebody wrote over."""
    return report_of_exception(RuntimeError("the answer of this worker was written over, and cannot be read"), b"")


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
    Return the error of a call that failed.

    *reports* are those of the ranks on which the function raised, *died* the failures of workers that have ended;
    *item* is the item of a `Pool.map`.
    """
    pids = _pids(job)
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
    # Torch raises a ValueError here, as for anything else that is wrong with the call: only its text tells them apart.
    if "initialize the default process group twice" in report.message:
        return (
            "the pool has made the process group already: leave init_process_group out, or have none made, by "
            "pool(..., group=None)"
        )
    return ""


def _death_error(job: Job, ranks: Collection[int], wait: Callable[[float], object]) -> ChildFailedError:
    """
    Return the error for *ranks*, which have ended in the midst of a call and failed nothing but that.

    Raises what ends the job, where something does. *wait* waits for its end, for some seconds at most.
    """
    while not _has_seen_end(job, ranks):
        # The kernel reports an end before the job does.
        wait(_LOOK)
    pids = _pids(job)
    failures = {}
    for rank in sorted(ranks):
        end = Exit(rank, pids.get(rank, 0), 0, False, None, "")
        failures[rank] = failure_of(end, rank, "", _latest_output(job, rank), 0, wall_time())
        failures[rank].message = "ended with exit status 0 in the midst of a call"
    return ChildFailedError(job.name, failures)


def _has_seen_end(job: Job, ranks: Collection[int]) -> bool:
    """Return whether *job* knows that *ranks* have ended. Raises what ends it, where something does."""
    status = job.status()
    codes = {each.rank: each.exitcode for each in status.ranks}
    is_ending = job.done() or status.state == "stopping" or any(codes.values())
    if is_ending:
        job.result()
        return True
    return all(codes.get(rank) == 0 for rank in ranks)


def _latest_output(job: Job, rank: int) -> str | None:
    """Return the file with the latest output of that rank."""
    # The output may be in no file.
    with contextlib.suppress(ConfigError):
        return next(reversed(job.files(rank)), None)
    return None
