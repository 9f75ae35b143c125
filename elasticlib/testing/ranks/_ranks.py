"""
The ranks of a session's tests: pools that stay warm, and one test after the other on them.

Rules of this file: a test ends at its limit, whatever its ranks do; whoever cannot serve another one is replaced, by
the next test that needs it; where the tests' own process is interrupted, nothing is left.
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
from elasticlib.testing.ranks import _blocked, _collectives, _failed, _recorder, _sharing, _told
from elasticlib.testing.ranks._asked import Asked
from elasticlib.testing.ranks._call import Call, Outcome
from elasticlib.testing.ranks._gpus import gpus
from elasticlib.testing.ranks._meeting import MEETING, Meeting
from elasticlib.testing.ranks._progress import Progress
from elasticlib.testing.ranks._refusal import refusal

_AFTER_FIRST = 1.0
"""Seconds that ranks have, once another one has failed or skipped, to end by themselves."""
_AFTER_LOST = 10.0
"""The same, once one has lost its peer, whose death the launcher is about to tell."""
_AT_BREAKPOINTS = 86400.0
"""Seconds that a test may take where a debugger follows its ranks."""
_TITLE = "the surroundings of a test"
_STACKS_LIMIT = 0.9
"""Seconds that the ranks' stacks are waited for."""
_PREPARE_LIMIT = 120.0
"""Seconds that ranks may take to import the modules of tests."""


class Work(Protocol):
    """What workers do for the tests of a session."""

    @property
    def run(self) -> Callable[..., Outcome]:
        """Called on each rank with the `Call`, the test's function, its arguments and its named arguments."""

    @property
    def look_at_failure(self) -> Callable[[], bool | None]:
        """Called on the rank whose failure somebody wants to look at."""

    def preparation(self, always: Sequence[ModuleType]) -> tuple[object, Callable[..., object], tuple[Any, ...]]:
        """What each worker calls before the first test, and again where what stands in front is another value."""


class Ranks:
    """All ranks of a session."""

    def __init__(self, work: Work, terminal: Callable[[bool], Sequence[int]]) -> None:
        self._work = work
        self._pools: dict[tuple[int, str], Pool] = {}
        self._prepared: dict[PoolWorkers, object] = {}
        self._unfit: dict[PoolWorkers, str] = {}
        """Those that serve no other call, but stay until then: somebody may look at a failure there."""
        self._terminal = terminal
        """Gives the terminal's descriptors for stdin and stdout to a debugger (True), or takes them back (False)."""
        self._debugging: int | None = None
        self._meeting = Meeting()
        self.interrupted: list[str] = []
        """Where the ranks were when the tests were interrupted."""

    # Who there is.

    def pool(self, asked: Asked) -> Pool:
        """The pool of *asked*, started where there is none."""
        key = asked.nproc, asked.device
        if key not in self._pools or self._pools[key].closed:
            devices = self._share(asked).gpus if asked.device == "cuda" else ()
            config = LaunchConfig(nproc_per_node=asked.nproc, max_restarts=0, devices=devices)
            self._pools[key] = Pool(
                config, "shared", functools.partial(PoolWorkers, is_listed=False, serve=_recorder.pool)
            )
        return self._pools[key]

    def _share(self, asked: Asked) -> _sharing.Share:
        """The GPUs for *asked*."""
        return _sharing.share(gpus(), asked.nproc, *_sharing.place(os.environ))

    @contextlib.contextmanager
    def _turn(self, asked: Asked) -> Iterator[None]:
        """Within it no other process of this session uses the GPUs."""
        if asked.device == "cpu":
            yield
            return
        name = f"elasticlib-gpus-{os.environ.get('PYTEST_XDIST_TESTRUNUID', '')}"
        with open(os.path.join(tempfile.gettempdir(), name), "w") as file:  # its lock goes with the process, too
            # Those that use only their own share may be at work beside each other, but not beside one that uses all.
            fcntl.flock(file, fcntl.LOCK_EX if self._share(asked).takes_turns else fcntl.LOCK_SH)
            yield

    def warm(self, asked: Asked, always: Sequence[ModuleType]) -> None:
        """Have the ranks of *asked* ready for a call."""
        while self._unfit:
            crew, why = self._unfit.popitem()
            crew.spoilt = crew.spoilt or why
        self.pool(asked).in_turn(lambda crew: self._prepare(crew, always))

    def _prepare(self, crew: PoolWorkers, always: Sequence[ModuleType]) -> None:
        """Have the workers know the modules that they will need."""
        state, prepare, args = self._work.preparation(always)
        if self._prepared.get(crew) == state:
            return
        self._prepared = {each: former for each, former in self._prepared.items() if not each.job.done()}
        crew.ask(range(len(crew)), prepare, args, {}, by_all=False)
        answers: list[Any] = []
        until = monotonic() + _PREPARE_LIMIT
        with self._told_if_interrupted(crew):
            while len(answers) < len(crew) and (left := until - monotonic()) > 0:
                answers += crew.answers(left)
        for answer in answers:
            if answer.failed():
                raise crew.error(_TITLE, answers)
        if len(answers) < len(crew):
            where = "\n".join(_blocked.told(self._stacks(crew)))
            crew.spoilt = "ranks did not import the tests' modules"
            raise TimeoutError(
                f"The ranks have not imported the tests' modules in {_PREPARE_LIMIT:g} s. They are at:\n{where}"
            )
        self._prepared[crew] = state

    @contextlib.contextmanager
    def _told_if_interrupted(self, crew: PoolWorkers) -> Iterator[None]:
        """Where it is interrupted within the block, keep in `interrupted` at what the ranks are."""
        try:
            yield
        except KeyboardInterrupt:
            with contextlib.suppress(Exception):
                self.interrupted = _blocked.told(crew.job.stacks(_STACKS_LIMIT))
            crew.spoilt = "the tests were interrupted"
            raise

    def _stacks(self, crew: PoolWorkers) -> Mapping[int, str]:
        """By rank; in brackets why there are none."""
        try:
            return crew.job.stacks(_STACKS_LIMIT)
        except TimeoutError as error:
            return dict.fromkeys(range(len(crew)), f"({error})")

    def close(self, *, hurry: bool) -> None:
        """End all of them."""
        pools, self._pools = self._pools, {}
        for pool in pools.values() if hurry else ():
            pool.job.stop(0, wait=False)
        for pool in pools.values():
            pool.close()

    # One test.

    def run(
        self,
        asked: Asked,
        call: Call,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        always: Sequence[ModuleType],
    ) -> _told.Told:
        """*function* on each rank. Raises `CannotTravelError`."""

        def ask(crew: PoolWorkers) -> tuple[Progress, dict[int, str], dict[int, tuple[str, ...]], PoolWorkers]:
            self._prepare(crew, always)
            before = {rank: _size(file) for rank, file in _files(crew).items()}
            group = (None, None) if asked.group is None else (asked.group, asked.backend)
            progress = Progress(monotonic() + (_AT_BREAKPOINTS if debugger_follows() else asked.timeout))
            crew.on_ask, crew.on_tell = self._on_ask, progress.hear
            is_shared = asked.group == "shared"
            until = evolve(call, until=progress.until, shares_group=is_shared)
            try:
                crew.ask(range(len(crew)), self._work.run, (until, function, args, dict(kwargs)), {}, group=group)
            except PicklingError as error:
                raise refusal(call, function, args, kwargs, error) from error
            try:
                with self._told_if_interrupted(crew):
                    self._wait(crew, progress, asked)
            finally:
                self._debugging = None
                self._meeting.close()
            dirt = {rank: each.dirt for rank, each in progress.outcomes.items() if each.dirt}
            called = {rank: each.collectives for rank, each in progress.outcomes.items() if each.kind == "passed"}
            if len(called) == len(crew) and len({*called.values()}) > 1:
                dirt |= {rank: (*dirt.get(rank, ()), _told.left_after(count)) for rank, count in called.items()}
            unfit = "a test left something behind" if dirt else ""
            if progress.told and is_shared:
                unfit = "a test has failed in the shared group"
            if unfit and progress.told and call.debug:
                self._unfit[crew] = unfit
            else:
                crew.spoilt = crew.spoilt or unfit
            output = {rank: _since(file, before.get(rank, 0)) for rank, file in _files(crew).items()}
            return progress, output, dirt, crew

        with self._turn(asked):
            progress, output, dirt, crew = self.pool(asked).in_turn(ask)
        failed = None
        if progress.told and not progress.is_cut_short():
            notes = [*progress.notes, *progress.early()]
            look = functools.partial(self._look, crew)
            failed = _failed.failed(progress.told, asked.nproc, notes, look)
        return _told.Told(progress.outcomes, failed, output, dirt, call.seed)

    def _wait(self, crew: PoolWorkers, progress: Progress, asked: Asked) -> None:
        """Until all ranks have ended, or been given up."""
        while not progress.outcomes or len(progress.outcomes) < len(crew):
            began, is_debugged = monotonic(), self._debugging is not None
            try:
                left = None if self._debugging is not None else max(0.0, progress.until - began)
                answers = crew.answers(left)
            except ChildFailedError as error:
                self._note_deaths(crew, progress, error)
                return
            if is_debugged or self._debugging is not None:
                progress.collectives.clear()  # told too early
                progress.until += monotonic() - began  # who looks at a rank takes the time that it takes
            for answer in answers:
                self._note(crew, progress, answer)
            self._meeting.look(len(crew), progress.outcomes, is_over=progress.has_stopped())
            if not answers and self._debugging is None and monotonic() >= progress.until:
                self._give_up(crew, progress, asked)
                return

    def _note(self, crew: PoolWorkers, progress: Progress, answer: Any) -> None:
        if answer.failed():
            raise crew.error(_TITLE, [answer])
        outcome: Outcome = answer.value()
        progress.outcomes[answer.rank] = outcome
        failure = outcome.failure
        if failure is not None:
            progress.told[answer.rank] = _failed.unpacked(failure)
        if outcome.kind != "passed":
            is_lost = failure is not None and failure.is_secondary
            progress.until = min(progress.until, monotonic() + (_AFTER_LOST if is_lost else _AFTER_FIRST))

    def _note_deaths(self, crew: PoolWorkers, progress: Progress, error: ChildFailedError) -> None:
        """Workers have died."""
        for rank, each in error.failures.items():
            if each.secondary and rank != error.get_first_failure()[0]:
                continue
            progress.outcomes.pop(rank, None)
            text = "\n".join([each.summary(), *([each.traceback] if each.traceback else []), *each.log_tail])
            lost = RuntimeError(each.summary(with_place=False))
            progress.told[rank] = _failed.Told(each.summary(with_place=False), "", 0, text, lost)
        left = [rank for rank in range(len(crew)) if rank not in progress.outcomes and rank not in progress.told]
        if left:
            progress.notes.append(f"{ranks_text(left)}: ended, as a rank of the group was gone")

    def _give_up(self, crew: PoolWorkers, progress: Progress, asked: Asked) -> None:
        """The time is over: tell where the ranks are that have not ended."""
        stacks = self._stacks(crew)
        late = {
            rank: stacks.get(rank, "(it has just ended)") for rank in range(len(crew)) if rank not in progress.outcomes
        }
        late |= dict.fromkeys(self._meeting.waiting & late.keys(), "(it has ended, and waits for the others)")
        crew.spoilt = f"{ranks_text(late)} did not end"
        where = _blocked.told(late)
        if progress.has_stopped():
            progress.notes += ["did not end after that, and were ended:", *where]
            return
        ended = f"; {ranks_text(progress.outcomes)} ended" if progress.outcomes else ""
        message = f"timeout of {asked.timeout:g} s: {_blocked.in_short(late)}{ended}"
        lines = [f"The ranks have not ended within {asked.timeout:g} s{ended}. They were at:", "", *where]
        waiting = {rank: at for rank, at in progress.collectives.items() if rank in late}
        if collectives := _collectives.told(waiting):
            lines += ["", *collectives]
        for rank, text in late.items():
            own = _blocked.blocked(text).own()
            file, line = (own.file, own.line) if own is not None else ("", 0)
            progress.told[rank] = _failed.Told(message, file, line, "\n".join(lines), TimeoutError(message))
        first = progress.told[min(late)]
        # One failure, though they are at several places: told once.
        progress.told = {
            rank: _failed.Told(message, first.file, first.line, first.representation, each.error)
            for rank, each in progress.told.items()
        }

    def _look(self, crew: PoolWorkers, rank: int) -> bool | None:
        """Have somebody look at the failure of *rank*: as `RanksFailed.look`."""
        if crew.job.done():
            return None
        try:
            crew.ask([rank], self._work.look_at_failure, (), {}, by_all=False)
            while True:
                for answer in crew.answers():
                    if answer.rank == rank:
                        found: bool | None = answer.value()
                        return found
        except ChildFailedError:
            return None
        finally:
            self._debugging = None

    def _on_ask(self, rank: int, message: Message) -> tuple[Message, tuple[int, ...]]:
        """What a rank wants: of the terminal, or of the others."""
        if str(message.get("wants")) in MEETING:
            return self._meeting.come(rank, message)
        if message.get("wants") == "no terminal":
            self._debugging = None
            self._terminal(False)
            return {}, ()
        if self._debugging is not None or not (descriptors := self._terminal(True)):
            return {"has": False}, ()
        self._debugging = rank
        return {"has": True}, tuple(descriptors)


def _files(crew: PoolWorkers) -> dict[int, str]:
    """By rank, the file with what it writes."""
    found = {}
    for rank in range(len(crew)):
        with contextlib.suppress(Exception):
            found[rank] = crew.job.files(rank)[-1]
    return found


def _size(file: str) -> int:
    try:
        return os.path.getsize(file)
    except OSError:
        return 0


def _since(file: str, offset: int) -> str:
    """What was written after *offset*; of much the end."""
    most = 100_000
    try:
        with open(file, "rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(offset, size - most))
            return stream.read().decode("utf-8", "replace")
    except OSError:
        return ""


def value_of(outcome: Outcome) -> Any:
    """What the function returned."""
    return pickle.loads(outcome.value) if outcome.value else None
