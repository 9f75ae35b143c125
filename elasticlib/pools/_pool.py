"""
`pool`: workers that are called again and again.

Rules of this file: a call that fails costs the next one a new crew at most; one thread calls at a time, and any may
close; nothing of a pool outlives its object.
"""

from __future__ import annotations

import collections
import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, TypeAlias, TypeVar

from attrs import evolve, fields
from typing_extensions import Self

from elasticlib._wording import counted
from elasticlib.errors import ChildFailedError, ConfigError, PicklingError, PoolError, SignalException
from elasticlib.job import Job, Place, Results
from elasticlib.launch import title_of
from elasticlib.pools._crew import Answer, PoolWorkers
from elasticlib.rendezvous import host_name
from elasticlib.spec import LaunchConfig
from elasticlib.workers import DeferredSignals, check_function, pack_call

Group: TypeAlias = Literal["shared", "fresh"] | None
_T = TypeVar("_T")
_END_LIMIT = 10.0
"""Seconds that the workers of a pool that is closed may take for their exit handlers."""


class Pool:
    """
    The workers that `pool` has started: `run` calls a function on all of them, `map` one for each of many items.

    Use it in a ``with`` block, or `close` it; a pool that nobody has any more ends too. `job` is what its workers are
    to others: status, stacks and output of every rank.
    """

    def __init__(
        self, config: LaunchConfig, group: Group, crew: Callable[[LaunchConfig, Group], PoolWorkers] = PoolWorkers
    ) -> None:
        self._config, self._group, self._new_crew = config, group, crew
        self._owner = os.getpid()
        self._calls = 0
        self._crews = 1
        self._is_closed = False
        self._busy = threading.Lock()
        self._caller: threading.Thread | None = None
        """The thread whose call it serves."""
        with DeferredSignals():
            self._crew = crew(config, group)
            self._count = len(self._crew)
            self._watch_over(self._crew)

    def _watch_over(self, crew: PoolWorkers) -> None:
        self._finalizer = weakref.finalize(self, crew.let_go)

    def __len__(self) -> int:
        """How many workers it has."""
        return self._count

    @property
    def closed(self) -> bool:
        """Whether it was closed: it serves no more calls."""
        return self._is_closed

    @property
    def job(self) -> Job:
        """Its present workers, as a job: `Job.status`, `Job.logs`, `Job.stacks`."""
        return self._crew.job

    # Calls.

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Results:
        """
        Have every worker call *function* with these arguments; {rank: what it returned}.

        All functions and arguments go that `elastic_launch` takes. A call finds the folder, ``sys.path`` and
        environment that the program has at that moment. What it leaves in modules that its worker has imported is there
        for the next one; globals of the caller's script or cell are the caller's again. Where a module of yours was
        edited that a worker has imported, new workers take their place before the call, which is logged.

        Raises `ChildFailedError`, from the first failing rank's own exception, when a rank raised or died: ranks that
        have not ended a second later are ended. The workers are replaced then before the next call, all of them, with a
        new process group; with ``group=None`` only where one has not ended. `PoolError` where the pool cannot be used.
        Ctrl-C ends the call in the same way.
        """
        check_function(function)

        def call(crew: PoolWorkers) -> Results:
            crew.ask(range(len(crew)), function, args, kwargs)
            answers: list[Answer] = []
            while len(answers) < len(crew):
                with self._told_of(function, crew):
                    answers += crew.answers()
                if failed := [each.rank for each in answers if each.failed()]:
                    with self._told_of(function, crew):
                        late, died = crew.abandoned(failed)
                    if self._group is not None:
                        crew.spoilt = crew.spoilt or "a call has failed, and ranks may be at different collectives"
                    raise crew.error(title_of(function), [*answers, *late], died)
            values = {each.rank: each.value() for each in sorted(answers, key=lambda each: each.rank)}
            return Results(values, dict.fromkeys(values, Place(0, host_name(), self._crews - 1, 0)))

        return self.in_turn(call)

    def map(
        self, function: Callable[[Any], Any], items: Iterable[Any], *, return_exceptions: bool = False
    ) -> list[Any]:
        """
        Call *function* once for each of *items*, each on one worker, and as many at once as there are workers.

        What it returned, in the order of *items*. Raises `ChildFailedError` at the first that fails, which names the
        item; with *return_exceptions* its exception stands in its place, and all others are done: where a worker dies,
        new ones take the place of all, and items that the others were at begin anew. An item or a result that cannot be
        sent fails with a `PicklingError`. No collective may be used in
        *function*: other ranks are at other items.
        """
        check_function(function)
        every = list(items)
        left = collections.deque(range(len(every)))
        results: list[Any] = [None] * len(every)

        def refuse(crew: PoolWorkers, index: int, error: PicklingError) -> None:
            """That item, or what came of it, cannot travel."""
            results[index] = error
            if not return_exceptions:
                with self._told_of(function, crew):
                    crew.abandoned()
                raise error

        def call(crew: PoolWorkers) -> list[Any]:
            free, at = list(range(len(crew)))[::-1], dict[int, int]()
            while left or at:
                if not free and not at:  # what the calls left in the workers makes them unfit for more
                    crew, free = self._replaced(), list(range(len(crew)))[::-1]
                while free and left:
                    index, rank = left.popleft(), free[-1]
                    try:
                        crew.ask([rank], function, (every[index],), {}, by_all=False)
                    except PicklingError as error:
                        refuse(crew, index, error)
                        # Nor can any other item be sent where the function cannot.
                        pack_call(function, (), {}, self._config.main)
                        continue
                    at[free.pop()] = index
                if not at:
                    continue
                try:
                    with self._told_of(function, crew):
                        answers = crew.answers()
                except ChildFailedError as error:
                    if not return_exceptions:
                        raise
                    lost = {rank for rank, failure in error.failures.items() if not failure.secondary} & at.keys()
                    if not lost:
                        raise
                    for rank in lost:
                        results[at.pop(rank)] = error
                    left.extendleft(sorted(at.values(), reverse=True))
                    at, free = {}, []
                    continue
                for answer in answers:
                    index = at.pop(answer.rank)
                    if not answer.dirt:
                        free.append(answer.rank)
                    if not answer.failed():
                        try:
                            results[index] = answer.value()
                        except PicklingError as error:
                            refuse(crew, index, error)
                        continue
                    failure = crew.error(f"{title_of(function)} (item {index})", [answer], item=index)
                    if not return_exceptions:
                        with self._told_of(function, crew):
                            crew.abandoned([answer.rank])
                        raise failure
                    results[index] = failure.__cause__ or failure
            return results

        return self.in_turn(call)

    @contextlib.contextmanager
    def _told_of(self, function: Callable[..., Any], crew: PoolWorkers) -> Iterator[None]:
        """Errors of the workers' job are of the call of *function*."""
        try:
            yield
        except SignalException:
            if self._is_closed:
                raise PoolError("the pool was closed while a call ran in it: that call was ended") from None
            raise
        except ChildFailedError as error:
            raise crew.error(title_of(function), (), error.failures) from error.__cause__

    def in_turn(self, call: Callable[[PoolWorkers], _T]) -> _T:
        """What *call* makes of the workers, which are its own for that time; `run` and `map` are what others use."""
        if os.getpid() != self._owner:
            raise PoolError("this process was forked from the pool's program: only that can call its workers")
        with DeferredSignals() as put_off:  # else an interrupt could leave the turn taken, with nobody to end it
            if not self._busy.acquire(blocking=False):
                self._refuse_if_closed()
                raise PoolError(
                    f"the pool serves a call of the thread {getattr(self._caller, 'name', '')!r}: one thread calls at "
                    "a time; wait for it, or give each thread a pool of its own"
                )
            try:
                self._caller = threading.current_thread()  # before the look at what `close` has set
                self._refuse_if_closed()
                self._crew.look_for_changes()
                if not self._crew.is_fit():
                    self._replace()
                self._crew.turn_here()
                try:
                    with put_off.lifted:
                        return call(self._crew)
                finally:
                    self._calls += 1
                    if not self._crew.is_fit():
                        self._crew.stop()
                    self._crew.show()
            finally:
                self._caller = None
                self._busy.release()

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise PoolError("the pool was closed: make a new one by elasticlib.pool(...)")

    def _replaced(self) -> PoolWorkers:
        """New workers, in the midst of a call."""
        self._crew.stop()
        self._replace()
        self._crew.turn_here()
        return self._crew

    def _replace(self) -> None:
        self._crew.wait()
        with DeferredSignals():
            self._finalizer.detach()
            self._crew = self._new_crew(self._config, self._group)
            self._crews += 1
            self._watch_over(self._crew)
        if self._is_closed:
            raise PoolError("the pool was closed while its workers were replaced, for a call that was not begun")

    # Its end.

    def close(self) -> None:
        """
        End the workers, with their exit handlers, and return when nothing is left of them.

        A call of another thread is ended, and raises `PoolError` there; one of this very thread, such as where a signal
        handler closes the pool, is ended once that goes on. It may come more than once, from any thread.
        """
        if os.getpid() != self._owner:
            return
        self._is_closed = True
        caller = self._caller
        if caller is not None:
            self._crew.stop()
            if caller is threading.current_thread():
                return
        with self._busy:
            self._end(politely=caller is None)

    def _end(self, *, politely: bool) -> None:
        if politely and self._crew.is_fit():
            self._crew.end(_END_LIMIT)
        else:
            self._crew.wait()
        self._finalizer.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            self._crew.stop()  # nobody wants to wait for exit handlers
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "busy" if self._busy.locked() else "idle"
        calls = counted(self._calls, "call")
        return f"<{type(self).__name__} of {self._count} workers, group={self._group!r}: {state}, {calls}>"


def pool(nproc_per_node: int | str = "auto", *, group: Group = "shared", **settings: Any) -> Pool:
    """
    Start *nproc_per_node* workers (as in `LaunchConfig`) that stay, for calls that take milliseconds.

        with elasticlib.pool(4) as pool:
            losses = pool.run(train, 1e-3)        # {rank: result}
            scores = pool.map(evaluate, settings)  # one worker for each, results in order

    With ``group="shared"`` the workers are in one process group, torch's default one, from call to call: functions use
    collectives, and leave ``init_process_group`` out. ``"fresh"`` makes a new one for each call; with None functions
    make, and destroy, their own. Backends are torch's default for the devices that are there.

    *settings* are fields of `LaunchConfig`, such as ``devices`` or ``start_method``; those of many nodes and of
    restarts have no meaning here and raise `ConfigError`, as does what a launch refuses. The process group takes the
    place that ``torch.multiprocessing.Pool`` leaves empty.
    """
    if group not in ("shared", "fresh", None):
        raise ConfigError(f"group={group!r} must be 'shared' (one for all calls), 'fresh' (one for each) or None")
    known = {each.name: each for each in fields(LaunchConfig)}
    for name in settings:
        if name not in known:
            raise TypeError(f"pool() got an unexpected keyword argument {name!r}: settings are fields of LaunchConfig")
        if not known[name].metadata.get("for pools", True):
            raise ConfigError(
                f"{name}={settings[name]!r} has no meaning for a pool, which is of one machine and replaces its "
                "workers by itself: leave it out"
            )
    return Pool(evolve(LaunchConfig(nproc_per_node=nproc_per_node, **settings), max_restarts=0), group)
