"""
The ranks of a session: warm pools that run one test after the other.

Rules of this file: a test ends at its timeout, whatever its ranks do. Workers that cannot run
another test are replaced when the next test needs them. Nothing is left when the tests' own process
is interrupted.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, Protocol

from attrs import evolve

from elasticlib._clock import monotonic
from elasticlib.errors import ChildFailedError, PicklingError
from elasticlib.pools import Pool, PoolWorkers
from elasticlib.processes import Message, debugger_follows
from elasticlib.spec import LaunchConfig
from elasticlib.stacks import ranks_text
from elasticlib.testing.ranks import _blocked, _process_shares, _recorder
from elasticlib.testing.ranks._gpu_count import gpus
from elasticlib.testing.ranks._meeting import MEETING, Meeting
from elasticlib.testing.ranks._rank_call import RankCall, RankOutcome
from elasticlib.testing.ranks._rank_options import RankOptions
from elasticlib.testing.ranks._refusal import refusal
from elasticlib.testing.ranks._test_progress import TestProgress
from elasticlib.testing.ranks._test_report import TestReport

_AT_BREAKPOINTS = 86400.0
"""Timeout in seconds of tests whose ranks a debugger follows."""
_TITLE = "the surroundings of a test"
_STACKS_LIMIT = 0.9
"""Timeout in seconds for the ranks' stacks."""
_PREPARE_LIMIT = 120.0
"""Seconds that ranks may take to import the modules of tests."""


class SessionWork(Protocol):
    """Interface to the functions that workers run for the tests of a session."""

    @property
    def run(self) -> Callable[..., RankOutcome]:
        """Function to call on each rank with the `RankCall`, the test's function and arguments."""

    @property
    def look_at_failure(self) -> Callable[[], bool | None]:
        """Function to call on a rank to debug its failure."""

    def preparation(self, always: Sequence[ModuleType]) -> tuple[object, Callable[..., object], tuple[Any, ...]]:
        """
        Return a state, a function and its arguments.

        Each worker calls the function before its first test, and again when the state has changed.
        """


Terminal = Callable[[bool], Sequence[int]]
"""Give a debugger the terminal's stdin and stdout (True) and return them, or take them back (False)."""


class _Debugger:
    """The terminal of the tests, which the debugger of one rank at a time may have."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self.is_open = False

    def open(self) -> tuple[Message, tuple[int, ...]]:
        """Return the answer to a rank that wants the terminal, with the terminal's descriptors if it gets it."""
        descriptors = () if self.is_open else self._terminal(True)
        if not descriptors:
            return {"has": False}, ()
        self.is_open = True
        return {"has": True}, tuple(descriptors)

    def give_back(self) -> tuple[Message, tuple[int, ...]]:
        """Take the terminal back, and return the answer to the rank that gives it back."""
        self.is_open = False
        self._terminal(False)
        return {}, ()


class Ranks:
    """All ranks of a session."""

    def __init__(self, work: SessionWork, terminal: Terminal) -> None:
        self._work = work
        self._pools: dict[tuple[int, str], Pool] = {}
        self._prepared: dict[PoolWorkers, object] = {}
        self._to_replace: dict[PoolWorkers, str] = {}
        """
        Workers to replace before the next test, with the reason.

        They stay until then, because the user may debug a failure in them.
        """
        self._debugger = _Debugger(terminal)
        self._meeting = Meeting()
        self.interrupted: list[str] = []
        """Places of the ranks when the tests were interrupted."""

    # The workers.

    def pool(self, wanted: RankOptions) -> Pool:
        """Return the pool for *wanted*; start it if necessary."""
        key = wanted.nproc, wanted.device
        # A test may have closed the pool.
        if key not in self._pools or self._pools[key].closed:
            devices = self._share(wanted).gpus if wanted.device == "cuda" else ()
            config = LaunchConfig(nproc_per_node=wanted.nproc, max_restarts=0, devices=devices)
            self._pools[key] = Pool(
                config, "shared", functools.partial(PoolWorkers, is_listed=False, serve=_recorder.pool)
            )
        return self._pools[key]

    def _share(self, wanted: RankOptions) -> _process_shares.ProcessShare:
        return _process_shares.share(gpus(), wanted.nproc, *_process_shares.place(os.environ))

    @contextlib.contextmanager
    def _turn(self, wanted: RankOptions) -> Iterator[None]:
        """Keep other processes of this session off the GPUs within the block."""
        if wanted.device == "cpu":
            yield
            return

        name = f"elasticlib-gpus-{os.environ.get('PYTEST_XDIST_TESTRUNUID', '')}"

        # The kernel also releases the lock when the process exits.
        with open(os.path.join(tempfile.gettempdir(), name), "w") as file:
            # Processes that use only their own share may run together, but not with one that
            # uses all GPUs.
            fcntl.flock(file, fcntl.LOCK_EX if self._share(wanted).takes_turns else fcntl.LOCK_SH)
            yield

    def warm(self, wanted: RankOptions, always: Sequence[ModuleType]) -> None:
        """Start and prepare the ranks for *wanted*."""
        # The next test begins, so these failures are not debugged any more.
        while self._to_replace:
            workers, reason = self._to_replace.popitem()
            workers.must_be_replaced(reason)
        self.pool(wanted).in_turn(lambda workers: self._prepare(workers, always))

    def _prepare(self, workers: PoolWorkers, always: Sequence[ModuleType]) -> None:
        """Let the workers import the modules that they will need. Raises `TimeoutError`."""
        state, prepare, args = self._work.preparation(always)
        if self._prepared.get(workers) == state:
            return

        # Workers that were replaced are forgotten.
        self._prepared = {each: former for each, former in self._prepared.items() if not each.job.done()}
        workers.ask(range(len(workers)), prepare, args, {}, by_all=False)
        with self._keeping_stacks_of_interrupted(workers):
            answers = _answers_within(_PREPARE_LIMIT, workers)
        if any(answer.failed() for answer in answers):
            raise workers.error(_TITLE, answers)

        if len(answers) < len(workers):
            where = "\n".join(_blocked.describe(self._stacks(workers)))
            workers.must_be_replaced("ranks did not import the tests' modules")
            raise TimeoutError(
                f"The ranks have not imported the tests' modules within {_PREPARE_LIMIT:g} s. Their stacks:\n{where}"
            )

        self._prepared[workers] = state

    @contextlib.contextmanager
    def _keeping_stacks_of_interrupted(self, workers: PoolWorkers) -> Iterator[None]:
        """Store the ranks' places in `interrupted` if an interrupt comes within the block."""
        try:
            yield
        except KeyboardInterrupt:
            # The interrupt must be raised even if the stacks are not available.
            with contextlib.suppress(Exception):
                self.interrupted = _blocked.describe(workers.job.stacks(_STACKS_LIMIT))
            workers.must_be_replaced("the tests were interrupted")
            raise

    def _stacks(self, workers: PoolWorkers) -> Mapping[int, str]:
        try:
            return workers.job.stacks(_STACKS_LIMIT)
        except TimeoutError as error:
            return dict.fromkeys(range(len(workers)), f"({error})")

    def close(self, *, hurry: bool) -> None:
        pools, self._pools = self._pools, {}
        # Stop all before waiting for each, so that they end at the same time.
        if hurry:
            for pool in pools.values():
                pool.job.stop(0, wait=False)
        for pool in pools.values():
            pool.close()

    # One test.

    def run(
        self,
        wanted: RankOptions,
        call: RankCall,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        always: Sequence[ModuleType],
    ) -> TestReport:
        """Run *function* on each rank. Raises `CannotTravelError`."""

        def run_on(workers: PoolWorkers) -> tuple[PoolWorkers, TestProgress, dict[int, str]]:
            self._prepare(workers, always)
            # A worker's file begins with the output of earlier tests.
            sizes = {rank: _size(file) for rank, file in _files(workers).items()}
            # A person at a breakpoint needs longer than any test.
            limit = _AT_BREAKPOINTS if debugger_follows() else wanted.timeout
            progress = TestProgress(len(workers), monotonic() + limit)
            self._ask(workers, progress, wanted, call, function, args, kwargs)
            try:
                with self._keeping_stacks_of_interrupted(workers):
                    self._wait(workers, progress, wanted)
            finally:
                self._debugger.is_open = False
                self._meeting.close()

            self._replace_if_needed(workers, progress, wanted, may_look=call.debug)
            output = {rank: _since(file, sizes.get(rank, 0)) for rank, file in _files(workers).items()}
            return workers, progress, output

        with self._turn(wanted):
            workers, progress, output = self.pool(wanted).in_turn(run_on)
        failed = progress.failed(functools.partial(self._look, workers))
        return TestReport(progress.outcomes, failed, output, progress.leaks(), call.seed)

    def _ask(
        self,
        workers: PoolWorkers,
        progress: TestProgress,
        wanted: RankOptions,
        call: RankCall,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        workers.listen(self._on_ask, progress.hear)
        group = (None, None) if wanted.group is None else (wanted.group, wanted.backend)
        own = evolve(call, until=progress.until, shares_group=wanted.group == "shared")
        try:
            workers.ask(range(len(workers)), self._work.run, (own, function, args, dict(kwargs)), {}, group=group)
        except PicklingError as error:
            raise refusal(call, function, args, kwargs, error) from error

    def _replace_if_needed(
        self, workers: PoolWorkers, progress: TestProgress, wanted: RankOptions, *, may_look: bool
    ) -> None:
        reason = "a test leaked state" if progress.leaks() else ""
        has_failed = bool(progress.reports)
        if has_failed and wanted.group == "shared":
            reason = "a test has failed in the shared group"
        # The user may debug the failure in these workers first.
        if reason and has_failed and may_look:
            self._to_replace[workers] = reason
        else:
            workers.must_be_replaced(reason)

    def _wait(self, workers: PoolWorkers, progress: TestProgress, wanted: RankOptions) -> None:
        """Wait until all ranks have ended or died, or are stopped at the timeout."""
        while not progress.is_complete():
            began = monotonic()
            was_debugged = self._debugger.is_open

            # No timeout applies while the user works in a debugger.
            left = None if was_debugged else max(0.0, progress.until - began)
            try:
                answers = workers.answers(left)
            except ChildFailedError as error:
                progress.add_deaths(error)
                return

            # Time in the debugger does not count for the test's timeout.
            if was_debugged or self._debugger.is_open:
                progress.pause(monotonic() - began)
            self._take(answers, workers, progress)
            if not answers and self._is_over(progress):
                self._give_up(workers, progress, wanted)
                return

    def _is_over(self, progress: TestProgress) -> bool:
        return not self._debugger.is_open and monotonic() >= progress.until

    def _take(self, answers: Sequence[Any], workers: PoolWorkers, progress: TestProgress) -> None:
        for answer in answers:
            # A failure of the test is an outcome: this is an error in the code around it.
            if answer.failed():
                raise workers.error(_TITLE, [answer])
            progress.add(answer.rank, answer.value(), monotonic())
        self._meeting.look(len(workers), progress.outcomes, is_over=progress.has_stopped())

    def _give_up(self, workers: PoolWorkers, progress: TestProgress, wanted: RankOptions) -> None:
        """Report the places of the ranks that have not ended in time, and stop them."""
        stacks = self._stacks(workers)
        late = {rank: stacks.get(rank, "(it has just ended)") for rank in progress.missing()}
        late |= dict.fromkeys(self._meeting.waiting & late.keys(), "(it has ended, and waits for the others)")
        workers.must_be_replaced(f"{ranks_text(late)} did not end")
        progress.add_late(late, wanted.timeout)

    def _look(self, workers: PoolWorkers, rank: int) -> bool | None:
        """Open a debugger for the failure of *rank*; see `RanksFailed.look`."""
        if workers.job.done():
            return None
        try:
            workers.ask([rank], self._work.look_at_failure, (), {}, by_all=False)
            return self._answer_of(rank, workers)
        except ChildFailedError:
            return None
        finally:
            self._debugger.is_open = False

    @staticmethod
    def _answer_of(rank: int, workers: PoolWorkers) -> bool | None:
        while True:
            for answer in workers.answers():
                if answer.rank == rank:
                    found: bool | None = answer.value()
                    return found

    def _on_ask(self, rank: int, message: Message) -> tuple[Message, tuple[int, ...]]:
        """Answer a rank's request for the terminal or for the barrier."""
        wants = str(message.get("wants"))
        if wants in MEETING:
            return self._meeting.arrive(rank, message)
        return self._debugger.give_back() if wants == "no terminal" else self._debugger.open()


def _answers_within(limit: float, workers: PoolWorkers) -> list[Any]:
    """Return the answers of all workers that arrive within *limit* seconds."""
    answers: list[Any] = []
    until = monotonic() + limit
    left = limit
    while len(answers) < len(workers) and left > 0:
        answers += workers.answers(left)
        left = until - monotonic()
    return answers


def _files(workers: PoolWorkers) -> dict[int, str]:
    """Return the path of each rank's output file; ranks without one are left out."""
    found = {}
    for rank in range(len(workers)):
        with contextlib.suppress(Exception):
            found[rank] = workers.job.files(rank)[-1]
    return found


def _size(file: str) -> int:
    try:
        return os.path.getsize(file)
    except OSError:
        return 0


def _since(file: str, offset: int) -> str:
    """Return the text after *offset*, at most its last 100,000 bytes; empty if it is unreadable."""
    most = 100_000
    try:
        with open(file, "rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(offset, size - most))
            return stream.read().decode("utf-8", "replace")
    except OSError:
        return ""


def value_of(outcome: RankOutcome) -> Any:
    return pickle.loads(outcome.value) if outcome.value else None
