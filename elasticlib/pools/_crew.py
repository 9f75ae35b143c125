"""
The workers of a pool from their start to their end: asked, heard, and stopped as the job that they are.

Rules of this file: one thread at a time; whatever is waited for, the job's end is waited for too; who waits can be
interrupted, and what is received is put where it belongs before that.
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

from attrs import frozen

from elasticlib import processes
from elasticlib._clock import monotonic, wall_time
from elasticlib.errors import (
    ChildFailedError,
    ConfigError,
    ProcessFailure,
    SignalException,
)
from elasticlib.job import Job, combined_error, trace_of
from elasticlib.launch import CheckedLaunch
from elasticlib.logs import shorten_file
from elasticlib.pools._death import death
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
"""Seconds that ranks have, once one has failed, to end by themselves: longer, and they wait for it in a collective."""
_SHOW_LIMIT = 1.0
"""Seconds that ``sys.stdout`` may take, after a call, for what the workers have written in it."""
_STOP_GRACE = 1.0
"""Seconds from SIGTERM to SIGKILL for workers that are not needed any more."""


@frozen
class Answer:
    """What a call has come to on one rank."""

    rank: int
    report: Report
    dirt: str
    """Why the worker cannot serve another call; empty where it can."""

    def value(self) -> Any:
        """What the function returned. Raises `PicklingError`."""
        end = Exit(0, 0, 0, False, self.report, "")
        return return_values({0: end}, 1, self.rank)[self.rank]

    def failed(self) -> bool:
        """Whether the function raised."""
        return self.report.kind != "result"


class PoolWorkers:
    """
    The workers of *config*, which *serve* calls and share a process group of the kind *group*.

    Raises what a launch does.

    Whoever makes one puts interrupts off until it has it.
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
        self._channels: list[Channel] = []
        theirs: list[Channel] = []
        self._ended = -1
        try:
            for _ in range(launch.workers):
                ours, end = Channel.pair()
                self._channels.append(ours)
                theirs.append(end)
            self._ended = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except OSError:  # no descriptor is left
            launch.abandon()
            for end in theirs:
                end.close()
            self._close()
            raise
        launch.hand({f"{CALLS_MEMORY}{rank}": end.fileno() for rank, end in enumerate(theirs)})
        for end in theirs:
            end.close()
        self._identity = CallerIdentity.now()
        self._place = identity_of_current_folder()
        self._raise_as = config.raise_as
        self._main = config.main
        self._group = group
        self._has_own_files = config.logs_specs is None
        """Whether nobody else chose where its output is kept."""
        self._variables = [without_secrets(os.environ)] * len(self._channels)
        """By rank, the program's own as the worker knows them."""
        self._asked = 0
        self._calls: dict[int, int] = {}
        """By rank, the number of the call that has not been answered."""
        self._processes: dict[int, processes.Handle] = {}
        """By rank, the worker. Copies of its end of the channel live on: that tells no death."""
        self._silent: set[int] = set()
        """Ranks from which nothing can come any more."""
        self._files: dict[str, dict[int, int]] = {}
        """Those of the user's project that workers have imported, each with its time then, by rank."""
        self.spoilt = ""
        """Why it can serve no more calls."""
        self.on_ask: Callable[[int, Message], tuple[Message, tuple[int, ...]]] = lambda *_: ({}, ())
        """What a rank gets that asks something in the midst of a call, with descriptors."""
        self.on_tell: Callable[[int, Message], None] = lambda *_: None
        """Hears what a rank says in the midst of a call."""
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
        elif folder:  # the program ends, and calls no finalizers any more
            shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # nobody listens any more
            os.eventfd_write(self._ended, 1)

    def __len__(self) -> int:
        return len(self._channels)

    def look_for_changes(self) -> None:
        """Be spoilt where a module that a worker imported was edited, or the workers have what the program gave up."""
        edited = [file for file, times in self._files.items() if _changed(file, times.values())]
        change = f"{', '.join(sorted(edited))} changed on disk since the pool's workers imported it" if edited else ""
        if self._identity != CallerIdentity.now():
            change = "this program changed its privileges, namespaces or cgroup since the pool's workers were started"
        if change and self.is_fit():
            self.spoilt = change
            logger.warning("%s: new ones take their place, and what calls had left in them is gone", change)

    # One call.

    def turn_here(self) -> None:
        """From now on, up to `show`, what the workers write is for this caller, however often it asks."""
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
        the crew's own, over torch's default).
        """
        packed = pack_call(function, args, kwargs, self._main)
        memories = packed.memories()
        variables = without_secrets(os.environ)
        message: Message = {
            "op": "call",
            "call": self._asked + 1,
            "by_all": by_all,
            "group": [self._group, None] if group is None else list(group),
            "sources": packed.sources,
            "shared": None if packed.names is None else sorted(packed.names),
            "path": import_path(),
            "cwd": path_of_current_folder() if identity_of_current_folder() == self._place else current_folder(),
            "place": identity_of_current_folder(),
        }
        with DeferredSignals():
            self._asked += 1
            descriptors = descriptors_of_memories(memories)
            message["memories"] = list(descriptors)
            try:
                for rank in ranks:
                    self._calls[rank] = self._asked
                    changed = changed_variables(self._variables[rank], variables)
                    self._variables[rank] = variables
                    self._channels[rank].send({**message, "variables": changed}, tuple(descriptors.values()))
            finally:
                for descriptor in descriptors.values():
                    os.close(descriptor)
                del packed, memories  # their destructors, too: Python has no place for an interrupt there

    def answers(self, limit: float | None = None) -> list[Answer]:
        """
        Wait until some of the ranks that were asked have answered; [] when *limit*, in seconds, is over.

        Raises what ended the job: `ChildFailedError` where a worker died, with whatever exit status.
        """
        waiting = {self._channels[rank].fileno(): rank for rank in self._calls if rank not in self._silent}
        workers = {self._processes[rank].fileno(): rank for rank in self._calls.keys() & self._processes.keys()}
        ready = wait_readable([*waiting, *workers, self._ended], limit)
        heard = ready & waiting.keys()
        found = []
        for descriptor in heard:
            with DeferredSignals() as put_off:
                found += self._answer(waiting[descriptor], put_off)
        if heard or not ready:
            return found
        gone = [*self._calls] if self._ended in ready else [workers[each] for each in ready]
        raise death(self.job, gone, lambda limit: wait_readable([self._ended], limit))

    def _answer(self, rank: int, put_off: DeferredSignals) -> list[Answer]:
        """What that rank has sent; [] where it is no answer to its call."""
        received = self._channels[rank].receive()
        if received is None:
            self._silent.add(rank)
            return []
        message, descriptors = received
        try:
            if message["op"] == "ready":
                self._processes[rank] = processes.received_handle(descriptors)
                descriptors = []
            if message["op"] == "ask":
                with put_off.lifted:
                    self._channels[rank].send(*self.on_ask(rank, message))
            if message["op"] == "tell":
                self.on_tell(rank, message)
            if message["op"] != "answer" or message["call"] != self._calls[rank]:
                return []
            report = read_report(*descriptors)
            del self._calls[rank]
            for file, time_then in message["files"].items():
                self._files.setdefault(file, {})[rank] = time_then
            self.spoilt = self.spoilt or (message["dirt"] and f"rank {rank}: {message['dirt']}")
            return [Answer(rank, report or _lost(), message["dirt"])]
        finally:
            for each in descriptors:
                os.close(each)

    def abandoned(self, failed: Collection[int] = ()) -> tuple[list[Answer], dict[int, ProcessFailure]]:
        """
        The answers that still come in a second, once the call has failed, and the workers that died meanwhile.

        *failed*: the ranks that have failed; none where it was not they.
        """
        found: list[Answer] = []
        died: dict[int, ProcessFailure] = {}
        until = monotonic() + _AFTER_FAILURE
        try:
            while self._calls and (left := until - monotonic()) > 0:
                found += self.answers(left)
        except ChildFailedError as error:
            died = error.failures
        if self._calls:
            causes = ranks_text(failed) if failed else "the call"
            self.spoilt = self.spoilt or f"{ranks_text(self._calls)} did not end after {causes} had failed"
        return found, died

    def error(
        self,
        title: str,
        answers: Sequence[Answer],
        died: Mapping[int, ProcessFailure] = MappingProxyType({}),
        item: int | None = None,
    ) -> ChildFailedError:
        """What the failures among *answers*, and of workers that *died*, raise; for *item* of a `Pool.map`."""
        pids = {each.rank: each.pid for each in self.job.status().ranks}
        failures = dict(died)
        causes: dict[int, BaseException | None] = {}
        for answer in answers:
            if answer.failed():
                end = Exit(answer.rank, pids.get(answer.rank, 0), 1, False, answer.report, "")
                failures[answer.rank] = failure_of(end, answer.rank, "", None, 0, wall_time())
                failures[answer.rank].hint = _hint(answer.report)
                causes[answer.rank] = original_exception(end)
        error = ChildFailedError(title, dict(sorted(failures.items())))
        cause = causes.get(error.get_first_failure()[0])
        found = combined_error(error, cause, self._raise_as)
        found._elastic_item = item
        return found.with_traceback(trace_of(found, None))

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
            with contextlib.suppress(ConfigError):  # they have not come so far
                for file in [file for rank in range(len(self)) for file in self.job.files(rank)]:
                    shorten_file(file)
                    shorten_file(file + DISPLAYED_SUFFIX)
        self._console.rest()

    # Its end.

    def is_fit(self) -> bool:
        """Whether it can serve another call."""
        if self.spoilt or self._calls or self.job.done():
            return False
        return not any(process.has_ended() for process in self._processes.values())

    def end(self, limit: float) -> None:
        """Have the workers end as programs do, with their exit handlers; they are stopped after *limit* seconds."""
        over = threading.Event()
        self.job.when_done(over.set)
        try:
            for channel in self._channels:
                channel.send({"op": "end"})
            over.wait(limit)  # not `Job.result`, which would take the program's signals for ones to the job
        finally:  # after an interrupt, too: nobody waits for exit handlers any more
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
            traceback.clear_frames(error.__traceback__)  # they have the job, which would stay, with its files
        for channel in self._channels:
            channel.close()
        while self._processes:
            self._processes.popitem()[1].close()
        ended, self._ended = self._ended, -1
        if ended >= 0:
            os.close(ended)


def _changed(file: str, times: Collection[int]) -> bool:
    try:
        return {os.stat(file).st_mtime_ns} != {*times}
    except OSError:
        return False  # it may be between two versions


def _lost() -> Report:
    """For an answer that somebody wrote over."""
    return report_of_exception(RuntimeError("the answer of this worker was written over, and cannot be read"), b"")


def _hint(report: Report) -> str:
    # Torch raises a ValueError here, as for anything else that is wrong with the call: only its text tells them apart.
    if "initialize the default process group twice" in report.message:
        return (
            "the pool has made the process group already: leave init_process_group out, or have none made, by "
            "pool(..., group=None)"
        )
    return ""
