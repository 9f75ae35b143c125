"""
A launch as an object: what it is doing, what it said, how to stop it, what it returned.

Rules of this file: any thread may call any method; a call that waits can be interrupted. A job ends once, and what it
ended with stays. A job that still runs when its program ends is stopped, with a warning: nothing may outlive the
program, and nobody should have to wait for what nobody waits for.
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
from elasticlib.job._raising import show_uncaught
from elasticlib.job._results import Place, Results
from elasticlib.job._status import JobCourse, JobStatus, RankStatus, Stacks, state_of
from elasticlib.logs import Follower, last_line, text_of
from elasticlib.notebook import current_cell, trace_of
from elasticlib.processes import start_thread
from elasticlib.rendezvous import host_name
from elasticlib.stacks import number_ranges
from elasticlib.workers import DeferredSignals, HandledSignals, Inbox, StacksRequest, StopRequest, interruption

if TYPE_CHECKING:
    from elasticlib.agent import LocalElasticAgent
    from elasticlib.workers import WorkerNow

_log = logging.getLogger("elasticlib")
_STACKS_LIMIT = 5.0
"""Seconds that stacks are waited for, unless told otherwise."""
_NOTHING = contextlib.nullcontext()
_EXIT_LIMIT = 10.0
"""Seconds, beyond a job's own grace, that the end of the program waits for it."""


class LaunchWork(Protocol):
    """A launch that was checked, and can be carried out once."""

    title: str
    signums: tuple[signal.Signals, ...]
    grace: float
    quit_shows_stacks: bool
    """Whether SIGQUIT shows the stacks of all workers; not where its user asked for it to stop them."""

    @property
    def folder(self) -> str:
        """Where the job's own output is kept after its success; empty where it is the caller's or gone."""

    def __call__(self, job: Job, /) -> dict[int, Any]:
        """Run the workers to their end; their results."""

    def abandon(self) -> None:
        """It will not be carried out: let go of what it holds."""


class Job:
    """
    A launch that `elastic_launch(config, entrypoint).start(*args)` has begun.

    `result` waits for it and returns {global rank: result}; ``await job`` does so in an event loop. `status`, `logs`
    and `stacks` tell what it does meanwhile, `stop` ends it; as a context manager it is stopped at the block's end, if
    it still runs. All of it may come from any thread, and after the end. `jobs` lists those that run.

    Of a job of many nodes it is this node's part: its workers' results, status, output and stacks.
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
        """What reports call the work: the function's name, or the script's."""
        self.is_owned = is_owned
        """Whether it is part of another object, which starts and ends it as it needs: nobody waits for it."""
        self.is_listed = is_listed
        """Whether `jobs` has it; not where it is a tool's, which its user did not start."""
        self._listener = listener
        """It hears all that happens, beside the job itself."""
        self.cell = None if is_owned else current_cell()
        """The notebook's cell that started it."""
        self._work: LaunchWork | None = work
        self._signums, self._grace = work.signums, work.grace
        self._owner = os.getpid()
        self._inbox = Inbox(quit_shows_stacks=work.quit_shows_stacks)
        self._began, self._ended = monotonic(), 0.0
        self._course = JobCourse()
        self._agent: LocalElasticAgent | None = None
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._over = False
        self._value = Results()
        self._error: BaseException | None = None
        self._trace: TracebackType | None = None
        self._last: tuple[RankStatus, ...] = ()
        """How the workers were at the end."""
        self._files: dict[int, list[str]] = {}
        """By global rank, the files of its output so far; of rounds one after the other."""
        self._stacks: dict[int, str] | None = None
        self._shown_stacks = ""
        """The line above the stacks that the console is to show when they are told; empty where it is not."""
        self._done: list[Callable[[], None]] = []
        self._followers: weakref.WeakSet[Follower] = weakref.WeakSet()

    # How it begins and ends.

    def begin(self) -> Self:
        """Carry it out in a thread of its own. Raises `JobRunsError` where this cell's last run still does so."""
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
        # An interrupt: the caller will never have this object, so nobody else could stop the job.
        except BaseException:
            self.stop(wait=False)
            raise
        return self

    def run(self) -> Results:
        """Carry it out in the calling thread, and return what `result` does."""
        with DeferredSignals() as put_off:
            _register.RUNNING_JOBS.add(self)
            self._carry_out(put_off.lifted)
        return self._outcome()

    def _carry_out(self, lifted: contextlib.AbstractContextManager[None] = _NOTHING) -> None:
        """Work, with interrupts *lifted* so that they come then, and note how it ended, which no interrupt prevents."""
        work, self._work = self._work, None
        assert work is not None
        try:
            with lifted:
                self._value = _placed(work(self), self._course)
        except BaseException as error:
            self._error, self._trace = error, error.__traceback__
        finally:
            if self._error is None and work.folder:
                weakref.finalize(self, _remove_output, work.folder, self._owner)
            self._note_ranks()
            self._agent = None
            self._inbox.close()
            self._ended = monotonic()
            _register.RUNNING_JOBS.remove(self)
            with self._changed:
                self._over = True
                done, self._done = self._done, []
                self._changed.notify_all()
            self._wake_followers()
            for callback in done:
                # An interrupt of the program's was put off: what comes here is the callback's own.
                self._call(callback, BaseException)

    def attach(self, agent: LocalElasticAgent) -> None:
        """What carries it out by now."""
        self._agent = agent

    @property
    def started(self) -> bool:
        """Whether it runs beside its program, in a thread of its own."""
        return self._thread is not None

    @property
    def inbox(self) -> Inbox:
        """What is asked of whatever carries it out."""
        return self._inbox

    def sink(self, record: records.Record) -> None:
        """Take a record of the job's course."""
        with self._changed:
            self._course = self._course.after(record)
            self._keep_stacks(record)
            self._changed.notify_all()
        if self._listener is not None:
            self._listener(record)
        match record:
            case records.StacksTold():
                self._show_stacks(Stacks(self._stacks or {}))
            case records.RunEnded():
                # Now, since the workers' files may go after this record.
                self._note_ranks()
            case records.RoundStarted():
                self._note_files()
                self._wake_followers()

    def _keep_stacks(self, record: records.Record) -> None:
        match record:
            case records.StacksShown():
                self._shown_stacks = record.why
            case records.StacksTold():
                self._stacks = {self._rank(local): text for local, text in record.texts.items()}

    def _show_stacks(self, stacks: Stacks) -> None:
        """Show the *stacks* on the console, if somebody wanted that."""
        why, self._shown_stacks = self._shown_stacks, ""
        if why and sys.stderr is not None:
            where = "" if stacks else f" ({self._course.state})"
            # A closed console has no reader.
            with contextlib.suppress(OSError, ValueError):
                print(f"job {self.name!r}: {why}\n{stacks}{where}", file=sys.stderr, flush=True)

    def _rank(self, local_rank: int) -> int:
        ranks = self._course.ranks
        return ranks[local_rank] if local_rank < len(ranks) else local_rank

    def _note_files(self) -> None:
        agent = self._agent
        for each in [] if agent is None else agent.workers_now():
            if each.stdout:
                self._files.setdefault(self._rank(each.local_rank), []).append(each.stdout)

    def _note_ranks(self) -> None:
        if not self._last:
            self._last = self._ranks()

    def _wake_followers(self) -> None:
        with self._changed:
            followers = list(self._followers)
        for follower in followers:
            follower.wake()

    # What people ask.

    def done(self) -> bool:
        """Whether it has ended, however that was."""
        return self._over

    def when_done(self, callback: Callable[[], None]) -> None:
        """Have *callback* called at the end, by the job's thread, or now if that was; what it raises is logged."""
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
            _log.exception("%r: the callback %r, which when_done was given, failed", self, callback)

    def _forget(self, callback: Callable[[], None]) -> None:
        # The callback may have been called already.
        with self._changed, contextlib.suppress(ValueError):
            self._done.remove(callback)

    def result(self, timeout: float | None = None) -> Results:
        """
        Wait for the end and return {global rank: result}, as the call of `elastic_launch` does.

        Raises what that call would: `ChildFailedError` when workers failed, `SignalException` when the job was stopped.
        A handled signal (``LaunchConfig.signals_to_handle``) that comes while the main thread waits here stops the job,
        SIGINT (Ctrl-C) as `LaunchInterrupted`, a ``KeyboardInterrupt``; another SIGINT kills it. After *timeout*
        seconds it raises a `TimeoutError`, and the job goes on, unless such a signal came: then that is raised.
        """
        came = self._wait(timeout)
        if not self._over:
            for signum in came:
                raise interruption(signum, f"job {self.name!r} was waited for, which is being stopped")
            raise TimeoutError(f"{self.status().__str__().splitlines()[0]}; it goes on, and is to be waited for again")
        return self._outcome()

    def _wait(self, timeout: float | None) -> list[signal.Signals]:
        """Return the signals that came while it waited."""
        self._refuse_in_child()
        is_own_thread = threading.current_thread() is self._thread
        if is_own_thread and not self._over:
            raise ConfigError(f"job {self.name!r} cannot be waited for in its own thread, such as by a sink of records")
        with HandledSignals(self._signums, self._inbox, takes_notices=True) as handled, self._changed:
            self._changed.wait_for(self.done, timeout)
        if self._over and not is_own_thread:
            self._join_thread()
        return handled.came

    def _join_thread(self) -> None:
        """Wait for the thread of a job that is over: it has nothing left to do."""
        if self._thread is not None:
            self._thread.join()

    def _outcome(self) -> Results:
        late = [item for item in self._inbox.drain() if isinstance(item, int)]
        if self._error is not None:
            show_uncaught()
            raise self._error.with_traceback(trace_of(self._error, self._trace))
        for signum in late:
            # Too late for the launch: the signal is the program's again.
            signal.raise_signal(signum)
        return self._value

    def exception(self) -> BaseException | None:
        """What `result` would raise; None after success and while it runs."""
        return self._error

    def status(self) -> JobStatus:
        """How it is now, or was at its end; as text a table of its ranks on this machine."""
        course, over, error = self._course, self._over, self._error
        state, why = course.state, course.why
        if over:
            state = "succeeded" if error is None else "stopped" if isinstance(error, SignalException) else "failed"
            lines = "" if error is None else (str(error) or type(error).__name__).splitlines()
            why = lines[0] if lines else ""
        seconds = (self._ended if over else monotonic()) - self._began
        ranks = self._last if over else self._ranks()
        return JobStatus(self.name, state, why, seconds, course.restarts, course.round, course.nodes, ranks)

    def _ranks(self) -> tuple[RankStatus, ...]:
        agent, course = self._agent, self._course
        workers = [] if agent is None or not course.ranks else agent.workers_now()
        return tuple(_rank_status(each, self._rank(each.local_rank), course) for each in workers)

    @overload
    def logs(self, rank: int = 0, *, follow: Literal[False] = False) -> str: ...

    @overload
    def logs(self, rank: int = 0, *, follow: Literal[True]) -> Iterator[str]: ...

    def logs(self, rank: int = 0, *, follow: bool = False) -> str | Iterator[str]:
        """
        What the worker of global *rank* has written so far, in all rounds.

        With *follow* it is an iterator over its lines, from the first one on, which goes on until the job ends.

        It is stdout and stderr in their order, unless ``LaunchConfig.logs_specs`` says otherwise: then it is the file
        of stdout. Raises `ConfigError` for a rank that is not of this machine, or whose output is in no file.
        """
        if follow:
            return self._follow(rank)
        return "".join(map(text_of, self.files(rank)))

    def files(self, rank: int) -> list[str]:
        """Return the files with the output of the worker of global *rank*, of rounds in order; as `logs`."""
        ranks = self._course.ranks
        if ranks and rank not in ranks:
            raise ConfigError(f"rank {rank} is none of this machine's ranks, {number_ranges(ranks)}")
        files = list(self._files.get(rank, []))
        has_begun = self._course.state not in ("starting", "waiting for ranks")
        if has_begun and not files:
            raise ConfigError(
                f"the output of rank {rank} is in no file: leave logs_specs out, or give "
                "logs_specs=DefaultLogsSpecs(log_dir, redirects=Std.ALL)"
            )
        return [file for file in files if os.path.exists(file)]

    def _follow(self, rank: int) -> Iterator[str]:
        self._refuse_in_child()
        self.files(rank)
        follower = Follower(lambda: self._files.get(rank, []), self.done)
        with self._changed:
            self._followers.add(follower)
        return follower.lines()

    def stacks(self, timeout: float = _STACKS_LIMIT) -> Stacks:
        """
        Where the Python threads of all workers of this machine are: {global rank: text}, innermost frame first.

        Workers go on, and need not cooperate: one that waits in native code, or for the interpreter's lock, is seen
        too. In brackets stands why nothing can be seen of a worker. {} where none runs. Raises `TimeoutError` after
        *timeout* seconds without an answer, such as while workers are being started.
        """
        self._refuse_in_child()
        with self._changed:
            if self._over:
                return Stacks()
            self._stacks = None
            self._inbox.put(StacksRequest(), may_wait=True)
            if not self._changed.wait_for(lambda: self._stacks is not None or self._over, timeout):
                raise TimeoutError(
                    f"job {self.name!r} has not told its stacks in {timeout:g} s: it is {self._course.state}"
                )
            return Stacks(self._stacks or {})

    def stop(self, grace: float | None = None, *, wait: bool = True) -> None:
        """
        Stop the workers: SIGTERM, and SIGKILL after *grace* seconds (None: ``shutdown_timeout``).

        It returns when nothing is left of the job, or, without *wait*, at once; a job that has ended is left as it is.
        `result` raises `SignalException` then. A handled signal that comes while the main thread waits here is raised
        at the end; SIGINT (Ctrl-C) kills what is left, and is raised as `LaunchInterrupted`.
        Of a job of many nodes this node leaves, as after a signal.
        """
        if grace is not None and not grace >= 0:
            raise ConfigError(f"grace={grace!r} must be 0 or more seconds until SIGKILL")
        if self._is_let_go():
            return
        self._ask_to_stop(f"job {self.name!r} was stopped by Job.stop()", grace)
        if wait and threading.current_thread() is not self._thread:
            for signum in self._wait(None):
                raise interruption(signum, f"job {self.name!r} was being stopped: that was hurried")

    def ends_with_program(self) -> None:
        """The program is about to end: stop it, and wait for that."""
        self._ask_to_stop(f"job {self.name!r} was stopped by the end of its program", None)
        if self._thread is not None:
            self._thread.join(self._grace + _EXIT_LIMIT)

    def _ask_to_stop(self, why: str, grace: float | None) -> None:
        # An interrupt between the two would leave a request that nobody waits for.
        with DeferredSignals():
            if not self._over:
                self._inbox.put(StopRequest(why, grace))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # A forked child leaves the block as well.
        if os.getpid() == self._owner:
            self.stop()

    def _refuse_in_child(self) -> None:
        """Raises `ConfigError` in a forked child, where nobody will hear of the end of a job that ran."""
        if not self._over:
            _register.refuse_in_child(self.name, self._owner)

    def _is_let_go(self) -> bool:
        """Whether a forked child's copy of its owner lets go of it, where nothing is to be done; others are refused."""
        is_copy = self.is_owned and os.getpid() != self._owner
        if not is_copy:
            self._refuse_in_child()
        return is_copy

    def __await__(self) -> Generator[Any, None, Results]:
        """
        As `result`. A task that is cancelled while it awaits a job leaves it running; so does a notebook's stop button,
        which cancels the cell: ``with job: await job`` stops it then.
        """
        # Only here: a program that awaits has asyncio already.
        from elasticlib.job import _awaiting

        self._refuse_in_child()
        yield from _awaiting.end(self.name, self.when_done, self._forget)
        return self._outcome()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.status().headline().splitlines()[0]}>"


def _rank_status(worker: WorkerNow, rank: int, course: JobCourse) -> RankStatus:
    """How *worker*, which has global *rank* in a job of this *course*, is now."""
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
    """Results by rank, with where they come from."""
    place = Place(course.node, host_name(), course.round, course.restarts)
    return Results(values, dict.fromkeys(values, place))


def _remove_output(folder: str, owner: int) -> None:
    """Remove *folder*, unless this is a forked child of the process *owner*, which still has it."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
