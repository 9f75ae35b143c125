"""
`pool`: workers that are called again and again.

Rules of this file: a call that fails costs the next one new workers at most; one thread calls at a time, and any may
close; nothing of a pool outlives its object.
"""

from __future__ import annotations

import collections
import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, TypeAlias, TypeVar

from attrs import evolve, fields
from typing_extensions import Self

from elasticlib._wording import counted
from elasticlib.errors import ChildFailedError, ConfigError, PicklingError, PoolError, SignalException
from elasticlib.job import Job, Place, Results
from elasticlib.launch import title_of
from elasticlib.pools._pool_workers import CallAnswer, PoolWorkers
from elasticlib.rendezvous import host_name
from elasticlib.spec import LaunchConfig, is_for_pools
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
        self, config: LaunchConfig, group: Group, start: Callable[[LaunchConfig, Group], PoolWorkers] = PoolWorkers
    ) -> None:
        self._config, self._group, self._start = config, group, start
        self._owner = os.getpid()
        self._calls = 0
        self._starts = 1
        """How many times it has started workers."""
        self._is_closed = False
        self._busy = threading.Lock()
        self._caller: threading.Thread | None = None
        """The thread whose call it serves."""
        with DeferredSignals():
            self._workers = start(config, group)
            self._count = len(self._workers)
            self._watch_over(self._workers)

    def _watch_over(self, workers: PoolWorkers) -> None:
        self._finalizer = weakref.finalize(self, workers.let_go)

    def __len__(self) -> int:
        """Return the number of workers."""
        return self._count

    @property
    def closed(self) -> bool:
        """Return whether it was closed: it serves no more calls."""
        return self._is_closed

    @property
    def job(self) -> Job:
        """Return its present workers as a job: `Job.status`, `Job.logs`, `Job.stacks`."""
        return self._workers.job

    # Calls.

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Results:
        """
        Call *function* on every worker with these arguments, and return {rank: its result}.

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

        def call(workers: PoolWorkers) -> Results:
            workers.ask(range(len(workers)), function, args, kwargs)
            answers: list[CallAnswer] = []
            while len(answers) < len(workers):
                with self.errors_named(function, workers):
                    answers += workers.answers()
                failed = [each.rank for each in answers if each.failed()]
                if failed:
                    with self.errors_named(function, workers):
                        late, died = workers.abandoned(failed)
                    if self._group is not None:
                        workers.must_be_replaced("a call has failed, and ranks may be at different collectives")
                    raise workers.error(title_of(function), [*answers, *late], died)
            values = {each.rank: each.value() for each in sorted(answers, key=lambda each: each.rank)}
            return Results(values, dict.fromkeys(values, Place(0, host_name(), self._starts - 1, 0)))

        return self.in_turn(call)

    def map(
        self, function: Callable[[Any], Any], items: Iterable[Any], *, return_exceptions: bool = False
    ) -> list[Any]:
        """
        Call *function* once for each of *items*, each on one worker, and as many at once as there are workers.

        Return the results in the order of *items*. Raises `ChildFailedError` at the first that fails, which names the
        item; with *return_exceptions* its exception stands in its place, and all others are done: where a worker dies,
        new ones take the place of all, and items that the others were at begin anew. An item or a result that cannot be
        sent fails with a `PicklingError`. No collective may be used in
        *function*: other ranks are at other items.
        """
        check_function(function)
        calls = _ItemCalls(self, function, list(items), main=self._config.main, return_exceptions=return_exceptions)
        return self.in_turn(calls.run)

    @contextlib.contextmanager
    def errors_named(self, function: Callable[..., Any], workers: PoolWorkers) -> Iterator[None]:
        """Raise errors of the workers' job in the block as those of the call of *function*."""
        try:
            yield
        except SignalException:
            if self._is_closed:
                raise PoolError("the pool was closed while a call ran in it: that call was ended") from None
            raise
        except ChildFailedError as error:
            raise workers.error(title_of(function), (), error.failures) from error.__cause__

    def in_turn(self, call: Callable[[PoolWorkers], _T]) -> _T:
        """Return the result of *call*, which has the workers for itself meanwhile; users call `run` and `map`."""
        if os.getpid() != self._owner:
            raise PoolError("this process was forked from the pool's program: only that can call its workers")
        # Else an interrupt could leave the turn taken, with nobody to end it.
        with DeferredSignals() as put_off:
            if not self._busy.acquire(blocking=False):
                self._refuse_if_closed()
                raise PoolError(
                    f"the pool serves a call of the thread {getattr(self._caller, 'name', '')!r}: one thread calls at "
                    "a time; wait for it, or give each thread a pool of its own"
                )
            try:
                # Set before the look at `_is_closed`: `close` sets that first, then looks for a caller.
                self._caller = threading.current_thread()
                self._refuse_if_closed()
                self._workers.look_for_changes()
                if not self._workers.is_fit():
                    self._replace()
                self._workers.turn_here()
                try:
                    with put_off.lifted:
                        return call(self._workers)
                finally:
                    self._calls += 1
                    if not self._workers.is_fit():
                        self._workers.stop()
                    self._workers.show()
            finally:
                self._caller = None
                self._busy.release()

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise PoolError("the pool was closed: make a new one by elasticlib.pool(...)")

    def replaced(self) -> PoolWorkers:
        """Replace the workers in the midst of a call, and return the new ones."""
        self._workers.stop()
        self._replace()
        self._workers.turn_here()
        return self._workers

    def _replace(self) -> None:
        self._workers.wait()
        with DeferredSignals():
            self._finalizer.detach()
            self._workers = self._start(self._config, self._group)
            self._starts += 1
            self._watch_over(self._workers)
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
            self._workers.stop()
            if caller is threading.current_thread():
                return
        with self._busy:
            self._end(politely=caller is None)

    def _end(self, *, politely: bool) -> None:
        if politely and self._workers.is_fit():
            self._workers.end(_END_LIMIT)
        else:
            self._workers.wait()
        self._finalizer.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            # Nobody wants to wait for exit handlers.
            self._workers.stop()
        self.close()

    def __repr__(self) -> str:
        state = "busy" if self._busy.locked() else "idle"
        if self._is_closed:
            state = "closed"
        calls = counted(self._calls, "call")
        return f"<{type(self).__name__} of {self._count} workers, group={self._group!r}: {state}, {calls}>"


class _ItemCalls:
    """
    The calls of one `Pool.map`.

    Every item is pending, running (on one worker) or done. Every worker is idle, runs an item, or must be replaced: its
    last call left something behind, and it gets no further one.
    """

    def __init__(
        self,
        pool: Pool,
        function: Callable[[Any], Any],
        items: Sequence[Any],
        *,
        main: Literal["import", "value"] | None,
        return_exceptions: bool,
    ) -> None:
        self._pool, self._function, self._items = pool, function, items
        self._main = main
        self._return_exceptions = return_exceptions
        self._results: list[Any] = [None] * len(items)
        self._pending = collections.deque(range(len(items)))
        self._running: dict[int, int] = {}
        """Indices of items, by rank."""
        self._idle: list[int] = []
        """Ranks, that of the next call last."""

    def run(self, workers: PoolWorkers) -> list[Any]:
        """Return the results of all items; called once, while the pool serves no other call."""
        self._use(workers)
        while self._pending or self._running:
            if not self._idle and not self._running:
                self._use(self._pool.replaced())
            self._send_to_idle_workers()
            if self._running:
                self._collect()
        return self._results

    def _use(self, workers: PoolWorkers) -> None:
        self._workers = workers
        self._idle = [*range(len(workers))][::-1]

    def _send_to_idle_workers(self) -> None:
        while self._idle and self._pending:
            index = self._pending.popleft()
            try:
                self._workers.ask([self._idle[-1]], self._function, (self._items[index],), {}, by_all=False)
            except PicklingError as error:
                self._fail(index, error)
                # Nor can any other item be sent where the function cannot: raise that.
                pack_call(self._function, (), {}, self._main)
            else:
                self._running[self._idle.pop()] = index

    def _collect(self) -> None:
        try:
            with self._pool.errors_named(self._function, self._workers):
                answers = self._workers.answers()
        except ChildFailedError as error:
            self._after_death(error)
        else:
            for answer in answers:
                self._take(answer)

    def _take(self, answer: CallAnswer) -> None:
        index = self._running.pop(answer.rank)
        if not answer.leaks:
            self._idle.append(answer.rank)
        if answer.failed():
            title = f"{title_of(self._function)} (item {index})"
            failure = self._workers.error(title, [answer], item=index)
            self._fail(index, failure, [answer.rank])
            self._results[index] = failure.__cause__ or failure
            return
        try:
            self._results[index] = answer.value()
        except PicklingError as error:
            self._fail(index, error)

    def _after_death(self, error: ChildFailedError) -> None:
        """Give up the items of workers that died, and call again for those of others, which were stopped with them."""
        if not self._return_exceptions:
            raise error
        died = {rank for rank, failure in error.failures.items() if not failure.secondary}
        guilty = died & self._running.keys()
        # No item is to blame.
        if not guilty:
            raise error
        for rank in guilty:
            self._results[self._running.pop(rank)] = error
        self._pending.extendleft(sorted(self._running.values(), reverse=True))
        self._running, self._idle = {}, []

    def _fail(self, index: int, error: Exception, failed: Sequence[int] = ()) -> None:
        """Have *error* as the result of that item, or end the calls of all others and raise it."""
        if not self._return_exceptions:
            with self._pool.errors_named(self._function, self._workers):
                self._workers.abandoned(failed)
            raise error
        self._results[index] = error


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
        if not is_for_pools(known[name]):
            raise ConfigError(
                f"{name}={settings[name]!r} has no meaning for a pool, which is of one machine and replaces its "
                "workers by itself: leave it out"
            )
    return Pool(evolve(LaunchConfig(nproc_per_node=nproc_per_node, **settings), max_restarts=0), group)
