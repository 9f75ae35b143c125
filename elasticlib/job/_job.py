"""
A launch as an object: its state, its output, its stop and its results.

Rules of this file: any thread may call any method. A call that waits can be interrupted. A job ends
once, and its outcome stays. A job that still runs at the end of its program is stopped, with a
warning: no job may outlive its program, and the end of the program must not wait for the job's work.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import os
import shutil
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol, overload

from typing_extensions import Self

from elasticlib import records
from elasticlib._clock import monotonic
from elasticlib.errors import ConfigError, ElasticError, SignalException
from elasticlib.job import _register
from elasticlib.job._raising import set_uncaught_hook
from elasticlib.job._results import Place, Results
from elasticlib.job._status import JobCourse, JobStatus, RankStatus, Stacks, state_of
from elasticlib.logs import Follower, last_line, text_of
from elasticlib.notebook import current_cell, trace_of
from elasticlib.processes import start_thread, wait_for_change
from elasticlib.rendezvous import host_name
from elasticlib.stacks import number_ranges
from elasticlib.workers import DeferredSignals, HandledSignals, Inbox, StacksRequest, StopRequest, interruption

if TYPE_CHECKING:
    from elasticlib.agent import LocalElasticAgent
    from elasticlib.workers import WorkerNow

_log = logging.getLogger("elasticlib")
_STACKS_LIMIT = 5.0
"""Default seconds to wait for stacks."""
_LEAVING = 3
"""Number of signals with which a wait for a job ends before the job: the first two stop it."""
_NOTHING = contextlib.nullcontext()
_EXIT_LIMIT = 10.0
"""Seconds that the end of the program waits for a job, in addition to the job's own grace."""


class LaunchWork(Protocol):
    """A checked launch, which can run once."""

    title: str
    signums: tuple[signal.Signals, ...]
    grace: float
    quit_shows_stacks: bool
    """True if SIGQUIT shows the stacks of all workers; False if the user chose it as a stop signal."""
    outlives_program: bool
    """True if the workers go on after the end of this program: a batch system has them."""

    @property
    def folder(self) -> str:
        """Folder of the job's own output after success; empty if the caller owns it, or if it is gone."""

    def __call__(self, job: Job, /) -> dict[int, Any]:
        """Run the workers to their end, and return {global rank: result}."""

    def abandon(self) -> None:
        """Release the resources of a launch that will not run."""


class WorkersElsewhere(Protocol):
    """The workers of a job whose agents run on other machines; any thread may ask."""

    def course(self) -> JobCourse:
        """Return the state of the job by the reports of its nodes."""

    def ranks(self) -> tuple[RankStatus, ...]:
        """Return the status of the workers of all nodes, by rank."""

    def stacks(self, timeout: float) -> dict[int, str]:
        """Return the stacks of all workers, by rank. Raises `TimeoutError`."""

    def logs(self, rank: int) -> str:
        """Return the output of the worker of *rank*. Raises `ConfigError` or `TimeoutError`."""


class Job:
    """
    A launch that `elastic_launch(config, entrypoint).start(*args)` has started.

    `result` waits for it and returns {global rank: result}; ``await job`` does so in an event loop.
    `status`, `logs` and `stacks` report its state meanwhile, and `stop` ends it. As a context manager
    it is stopped at the block's end, if it still runs. All methods may be called from any thread, also
    after the end. `jobs` lists the running jobs.

    For a job of many nodes it covers this node: its workers' results, status, output and stacks. With an engine
    (``on=``) it covers all nodes; a job of a batch system has neither `logs` nor `stacks`.
    """

    def __init__(
        self,
        work: LaunchWork,
        *,
        is_owned: bool = False,
        is_listed: bool = True,
        listener: Callable[[records.Record], None] | None = None,
    ) -> None:
        self.name = work.title
        """Title of the work in reports: the name of the function or the script."""
        self.is_owned = is_owned
        """True if another object, such as a pool, starts and ends it: the user does not wait for it."""
        self.is_listed = is_listed
        """True if `jobs` lists it; False if a tool started it, and not the user."""
        self._listener = listener
        """Second receiver of all records, or None."""
        self.outlives_program = work.outlives_program
        """True if the end of the program does not stop it: a batch system has it."""
        self.cell = None if is_owned else current_cell()
        """Notebook cell that started it, or None."""
        self._work: LaunchWork | None = work
        self._signums, self._grace = work.signums, work.grace
        self._owner = os.getpid()
        self._inbox = Inbox(quit_shows_stacks=work.quit_shows_stacks)
        self._began, self._ended = monotonic(), 0.0
        self._workers = _Workers()
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._over = False
        self._value = Results()
        self._error: BaseException | None = None
        self._trace: TracebackType | None = None
        self._done: list[Callable[[], None]] = []
        self._followers: weakref.WeakSet[Follower] = weakref.WeakSet()

    # Start and end.

    def begin(self) -> Self:
        """Run the job in its own thread. Raises `JobRunsError` if the job of this cell's last run still runs."""
        run, name = contextvars.copy_context().run, f"elasticlib-job-{self.name}"
        self._thread = threading.Thread(target=run, args=(self._carry_out,), name=name, daemon=True)
        try:
            with DeferredSignals():
                _register.RUNNING_JOBS.add(self, refuse=True)
                start_thread(self._thread)
        except ElasticError:
            _register.RUNNING_JOBS.remove(self)
            work, self._work = self._work, None
            if work is not None:
                work.abandon()
            raise
        # An interrupt: the caller will not get this object, and so could not stop the job.
        except BaseException:
            self.stop(wait=False)
            raise

        return self

    def run(self) -> Results:
        """Run the job in the calling thread, and return or raise as `result` does."""
        with DeferredSignals() as put_off:
            _register.RUNNING_JOBS.add(self)
            self._carry_out(put_off.lifted)
        return self._outcome()

    def _carry_out(self, lifted: contextlib.AbstractContextManager[None] = _NOTHING) -> None:
        """Run the work and note its outcome; *lifted* allows interrupts during the work."""
        work, self._work = self._work, None
        assert work is not None

        # An interrupt may end the work, but must not keep its outcome from being noted.
        try:
            with lifted:
                self._value = _placed(work(self), self._workers.course)
        except BaseException as error:
            self._error, self._trace = error, error.__traceback__
        finally:
            # After a failure the output stays for the user.
            if self._error is None and work.folder:
                weakref.finalize(self, _remove_output, work.folder, self._owner)
            self._workers.note_end()
            self._workers.agent = None
            self._inbox.close()
            self._ended = monotonic()
            _register.RUNNING_JOBS.remove(self)
            with self._changed:
                self._over = True
                done, self._done = self._done, []
                self._changed.notify_all()

            self._wake_followers()
            for callback in done:
                # Interrupts of the program are deferred: an exception here is the callback's own.
                self._call(callback, BaseException)

    def attach(self, agent: LocalElasticAgent) -> None:
        """Remember the agent that runs this job."""
        self._workers.agent = agent

    def attach_elsewhere(self, workers: WorkersElsewhere) -> None:
        """Remember the workers of other machines that this job has."""
        self._workers.elsewhere = workers

    @property
    def started(self) -> bool:
        """True if it runs in the background, in its own thread."""
        return self._thread is not None

    @property
    def inbox(self) -> Inbox:
        """Requests to the agent that runs this job."""
        return self._inbox

    def sink(self, record: records.Record) -> None:
        """Receive a record of the job: update its state, its stacks and its files."""
        with self._changed:
            self._workers.take(record)
            self._changed.notify_all()

        if self._listener is not None:
            self._listener(record)
        match record:
            case records.StacksReported():
                self._show_stacks()
            case records.RunEnded():
                # Now, since the workers' files may be removed after this record.
                self._workers.note_end()
            case records.RoundStarted():
                self._workers.note_files()
                self._wake_followers()

    def note_engine(self, facts: Mapping[str, str]) -> None:
        """Note *facts* of a batch system about the job (`JobStatus.engine`)."""
        with self._changed:
            self._workers.engine = {**self._workers.engine, **facts}
            self._changed.notify_all()

    def is_handed_over(self, seconds: float) -> bool:
        """Return True once a batch system has the job; False if it ends before, or after some *seconds*."""
        with self._changed:
            wait_for_change(self._changed, lambda: bool(self._workers.engine) or self._over, seconds)
            return bool(self._workers.engine)

    def _show_stacks(self) -> None:
        """Print the stacks to stderr if they were requested for the console."""
        why = self._workers.take_heading()
        if why and sys.stderr is not None:
            stacks = Stacks(self._workers.stacks or {})
            where = "" if stacks else f" ({self._workers.course.state})"
            # The console may be closed.
            with contextlib.suppress(OSError, ValueError):
                print(f"job {self.name!r}: {why}\n{stacks}{where}", file=sys.stderr, flush=True)

    def _wake_followers(self) -> None:
        with self._changed:
            followers = list(self._followers)
        for follower in followers:
            follower.wake()

    # Questions and requests of users.

    def done(self) -> bool:
        """Return True if the job has ended, with any outcome."""
        return self._over

    def when_done(self, callback: Callable[[], None]) -> None:
        """
        Call *callback* at the end, from the job's thread, or now if the job has ended.

        An exception of the callback is logged.
        """
        if self._is_let_go():
            return
        with self._changed:
            if not self._over:
                self._done.append(callback)
                return
        self._call(callback, Exception)

    def _call(self, callback: Callable[[], None], what: type[BaseException]) -> None:
        try:
            callback()
        except what:
            _log.exception("%r: the callback %r of when_done() failed", self, callback)

    def _forget(self, callback: Callable[[], None]) -> None:
        # The callback may have been called already.
        with self._changed, contextlib.suppress(ValueError):
            self._done.remove(callback)

    def result(self, timeout: float | None = None) -> Results:
        """
        Wait for the end and return {global rank: result}, as the call of `elastic_launch` does.

        Raises what that call would raise: `ChildFailedError` if workers failed, `SignalException` if the
        job was stopped. While the main thread waits here, a handled signal
        (``LaunchConfig.signals_to_handle``) stops the job. SIGINT (Ctrl-C) then raises
        `LaunchInterrupted`, a ``KeyboardInterrupt``; another SIGINT kills the job, and a third one ends the wait.

        After *timeout* seconds it raises `TimeoutError`, and the job continues. If a handled signal
        arrived meanwhile, it raises that instead.
        """
        received = self._wait(timeout)
        if not self._over:
            for signum in received:
                raise interruption(signum, f"it waited for job {self.name!r}, which is being stopped")
            raise TimeoutError(f"{self.status().__str__().splitlines()[0]}; it is still running: call result() again")
        return self._outcome()

    def _wait(self, timeout: float | None) -> list[signal.Signals]:
        """Wait for the end, up to *timeout* seconds. Return the handled signals that arrived meanwhile."""
        self._refuse_in_child()
        is_own_thread = threading.current_thread() is self._thread
        if is_own_thread and not self._over:
            raise ConfigError(
                f"job {self.name!r} cannot be waited for in its own thread, in which record sinks run: "
                "wait in another thread"
            )
        with HandledSignals(self._signums, self._inbox, takes_notices=True) as handled:
            waits = f"it waited for job {self.name!r}, which is being stopped"
            # The job's thread may be in code of others, such as an engine that waits for machines.
            with handled.raised(waits, count=_LEAVING), self._changed:
                wait_for_change(self._changed, self.done, timeout)
        if self._over and not is_own_thread:
            self._join_thread()
        return handled.received

    def _join_thread(self) -> None:
        # The thread of a job that is over has nothing left to do.
        if self._thread is not None:
            self._thread.join()

    def _outcome(self) -> Results:
        late = [item for item in self._inbox.drain() if isinstance(item, int)]
        if self._error is not None:
            set_uncaught_hook()
            raise self._error.with_traceback(trace_of(self._error, self._trace))
        for signum in late:
            # Too late for the launch: pass the signal on to the program.
            signal.raise_signal(signum)
        return self._value

    def exception(self) -> BaseException | None:
        """Return the exception that `result` would raise; None after success and while it runs."""
        return self._error

    def status(self) -> JobStatus:
        """Return its present status, or its status at the end. Its text is a table of ranks."""
        workers, course = self._workers, self._workers.course_now()
        if self._over:
            (state, why), seconds, ranks = self._end(), self._ended - self._began, workers.last
        else:
            state, why, seconds, ranks = course.state, course.why, monotonic() - self._began, workers.ranks()
        engine = workers.engine
        return JobStatus(self.name, state, why, seconds, course.restarts, course.round, course.nodes, ranks, engine)

    def _end(self) -> tuple[str, str]:
        """Return how the job has ended, and why."""
        error = self._error
        if error is None:
            return "succeeded", ""
        # A table of all failures may follow the first line of an error.
        lines = (str(error) or type(error).__name__).splitlines()
        state = "stopped" if isinstance(error, SignalException) else "failed"
        return state, lines[0] if lines else ""

    @overload
    def logs(self, rank: int = 0, *, follow: Literal[False] = False) -> str: ...

    @overload
    def logs(self, rank: int = 0, *, follow: Literal[True]) -> Iterator[str]: ...

    def logs(self, rank: int = 0, *, follow: bool = False) -> str | Iterator[str]:
        """
        Return the output of the worker of global *rank* so far, of all rounds, as one str.

        With *follow* return an iterator of its lines, from the first one on, until the job ends.

        The output is stdout and stderr in their order. With ``LaunchConfig.logs_specs`` it is the file of
        stdout. Raises `ConfigError` if the rank is not on this machine, or has no output file. With an engine it
        asks the rank's machine; after the end it returns the last 256 KiB, less if there are more than 256 ranks.
        """
        elsewhere = self._workers.elsewhere
        if elsewhere is not None:
            if follow:
                raise ConfigError("follow=True needs workers on this machine: call logs() again, or read the console")
            return elsewhere.logs(rank)
        if follow:
            return self._follow(rank)
        return "".join(map(text_of, self.files(rank)))

    def files(self, rank: int) -> list[str]:
        """Return the output files of the worker of global *rank*, in the order of rounds. Raises as `logs`."""
        if self._workers.elsewhere is not None:
            raise ConfigError(f"the output files of rank {rank} are on its own machine: call logs({rank})")
        return self._workers.files_of(rank)

    def _follow(self, rank: int) -> Iterator[str]:
        self._refuse_in_child()
        self.files(rank)
        follower = Follower(lambda: self._workers.files.get(rank, []), self.done)
        with self._changed:
            self._followers.add(follower)
        return follower.lines()

    def stacks(self, timeout: float = _STACKS_LIMIT) -> Stacks:
        """
        Return the Python stacks of all workers of this machine: {global rank: text}, innermost frame first.

        Workers continue, and do not have to cooperate: a worker in native code, or one that waits for the
        interpreter's lock, is included. If a worker's stack cannot be read, its text is the reason in
        brackets. Returns {} if no worker runs. Raises `TimeoutError` after *timeout* seconds without an
        answer, such as while workers are being started, and `ConfigError` for a job of a batch system.
        """
        self._refuse_in_child()
        if self._workers.elsewhere is not None:
            return Stacks() if self._over else Stacks(self._workers.elsewhere.stacks(timeout))
        with self._changed:
            if self._over:
                return Stacks()
            # An answer to an earlier request must not count for this one.
            self._workers.stacks = None
            self._inbox.put(StacksRequest(), may_wait=True)
            if not wait_for_change(self._changed, lambda: self._workers.stacks is not None or self._over, timeout):
                raise TimeoutError(
                    f"job {self.name!r} did not return its stacks within {timeout:g} s "
                    f"(state: {self._workers.course.state})"
                )

            return Stacks(self._workers.stacks or {})

    def stop(self, grace: float | None = None, *, wait: bool = True) -> None:
        """
        Stop the workers: SIGTERM, and SIGKILL after *grace* seconds (None: ``shutdown_timeout``).

        It returns when all processes of the job are gone, or at once without *wait*. Afterwards `result`
        raises `SignalException`. A job that has ended stays unchanged.

        A handled signal that arrives while the main thread waits here is raised at the end. SIGINT
        (Ctrl-C) kills the remaining workers, and is raised as `LaunchInterrupted`. In a job of many nodes
        this node leaves the job, as after a signal.
        """
        if grace is not None and not grace >= 0:
            raise ConfigError(f"grace={grace!r} must be a number of seconds until SIGKILL, 0 or more")
        if self._is_let_go():
            return
        self.ask_to_stop(f"job {self.name!r} was stopped by Job.stop()", grace)
        # A sink of records may call this in the job's own thread, which cannot wait for its own end.
        if wait and threading.current_thread() is not self._thread:
            for signum in self._wait(None):
                raise interruption(signum, f"it stopped job {self.name!r}, which has ended")

    def ends_with_program(self) -> None:
        """Stop the job at the end of the program, and wait until it has stopped."""
        self.ask_to_stop(f"job {self.name!r} was stopped by the end of its program", None)
        if self._thread is not None:
            self._thread.join(self._grace + _EXIT_LIMIT)

    def ask_to_stop(self, why: str, grace: float | None) -> None:
        """Ask the running job to stop, for the reason *why*, as `stop` does; return at once."""
        # An interrupt between the check and the request would leave a request without a waiter.
        with DeferredSignals():
            if not self._over:
                self._inbox.put(StopRequest(why, grace))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # A forked child leaves the block as well, but must not stop the job.
        if os.getpid() == self._owner:
            self.stop()

    def _refuse_in_child(self) -> None:
        """Raise `ConfigError` in a forked child, which cannot learn of the end of a job that ran."""
        if not self._over:
            _register.refuse_in_child(self.name, self._owner)

    def _is_let_go(self) -> bool:
        """Return True in a forked child that has nothing to do with the job. Raises as `_refuse_in_child`."""
        # The object that owns the job, such as a pool, ends it in its own process.
        is_copy = self.is_owned and os.getpid() != self._owner
        if not is_copy:
            self._refuse_in_child()
        return is_copy

    def __await__(self) -> Generator[Any, None, Results]:
        """
        Wait for the end in an event loop, and return or raise as `result` does.

        A task that is cancelled while it awaits a job leaves the job running. So does a notebook's stop
        button, which cancels the cell. ``with job: await job`` stops the job in both cases.
        """
        # Imported here: a program that awaits has imported asyncio already.
        from elasticlib.job import _awaiting

        self._refuse_in_child()
        yield from _awaiting.end(self.name, self.when_done, self._forget)
        return self._outcome()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.status().headline().splitlines()[0]}>"


class _Workers:
    """
    The workers of a job on this node, by the records of its agent.

    `course` has followed every record. `files` has the output of every round. `last` is the workers' status
    at the end of the run, when the agent no longer knows them.
    """

    def __init__(self) -> None:
        self.agent: LocalElasticAgent | None = None
        self.course = JobCourse()
        self.files: dict[int, list[str]] = {}
        """By global rank, the files of its output so far, in the order of rounds."""
        self.stacks: dict[int, str] | None = None
        """Answer to the last request for stacks, by global rank; None until it comes."""
        self.engine: Mapping[str, str] = {}
        """As `JobStatus.engine`."""
        self.last: tuple[RankStatus, ...] = ()
        self.elsewhere: WorkersElsewhere | None = None
        """The workers of other machines; None: all are on this one."""
        self._heading = ""
        """Heading of the stacks that the console will show when they arrive; empty for none."""

    def take(self, record: records.Record) -> None:
        self.course = self.course.after(record)
        match record:
            case records.StacksShown():
                self._heading = record.why
            case records.StacksReported():
                self.stacks = {self._rank(local): text for local, text in record.texts.items()}

    def course_now(self) -> JobCourse:
        """Return the state of the job."""
        return self.course if self.elsewhere is None else self.elsewhere.course()

    def take_heading(self) -> str:
        heading, self._heading = self._heading, ""
        return heading

    def note_files(self) -> None:
        for each in self._now():
            if each.stdout:
                self.files.setdefault(self._rank(each.local_rank), []).append(each.stdout)

    def note_end(self) -> None:
        # The first call counts: later the files with the last lines may be gone.
        if not self.last:
            self.last = self.ranks()

    def ranks(self) -> tuple[RankStatus, ...]:
        """Return the present status of the workers; () before they have ranks."""
        if self.elsewhere is not None:
            return self.elsewhere.ranks()
        course = self.course
        workers = self._now() if course.ranks else []
        return tuple(_rank_status(each, self._rank(each.local_rank), course) for each in workers)

    def files_of(self, rank: int) -> list[str]:
        """Return the output files of global *rank* that still exist. Raises `ConfigError`."""
        ranks = self.course.ranks
        if ranks and rank not in ranks:
            raise ConfigError(f"rank {rank} is not on this node (ranks here: {number_ranges(ranks)})")

        files = list(self.files.get(rank, []))
        has_begun = self.course.state not in ("starting", "waiting for ranks")
        if has_begun and not files:
            raise ConfigError(
                f"the output of rank {rank} is not in a file: leave logs_specs out, or give "
                "logs_specs=DefaultLogsSpecs(log_dir, redirects=Std.ALL)"
            )

        return [file for file in files if os.path.exists(file)]

    def _now(self) -> list[WorkerNow]:
        # Another thread removes the agent at the end.
        agent = self.agent
        return [] if agent is None else agent.workers_now()

    def _rank(self, local_rank: int) -> int:
        ranks = self.course.ranks
        return ranks[local_rank] if local_rank < len(ranks) else local_rank


def _rank_status(worker: WorkerNow, rank: int, course: JobCourse) -> RankStatus:
    """Return the present status of *worker*, which has global *rank*, in a job with this *course*."""
    progress = worker.progress
    return RankStatus(
        rank=rank,
        local_rank=worker.local_rank,
        node=course.node,
        host=host_name(),
        state=state_of(worker.pid, worker.exitcode, was_stopped=worker.was_stopped),
        pid=worker.pid,
        exitcode=worker.exitcode,
        restarts=course.restarts,
        step=None if progress is None else progress.step,
        total=None if progress is None else progress.total,
        metrics={} if progress is None else progress.metrics,
        age=None if progress is None else progress.age,
        last_line=last_line([worker.stdout, worker.stderr]),
    )


def _placed(values: Mapping[int, Any], course: JobCourse) -> Results:
    """Return results by rank, with the place of each worker."""
    if isinstance(values, Results):
        return values
    place = Place(course.node, host_name(), course.round, course.restarts)
    return Results(values, dict.fromkeys(values, place))


def _remove_output(folder: str, owner: int) -> None:
    """Remove *folder*, but not in a forked child of the process *owner*, which still uses it."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
