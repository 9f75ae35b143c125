"""
`pool`: workers that serve many calls.

Rules of this file: after a failed call the next one gets new workers if necessary. One thread calls at
a time, and any thread may close the pool. No worker outlives the object of its pool.
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
from elasticlib.job import Job, Place, Results, uncaught_hook
from elasticlib.launch import title_of
from elasticlib.pools._pool_workers import CallAnswer, PoolWorkers
from elasticlib.rendezvous import host_name
from elasticlib.spec import LaunchConfig, is_for_pools
from elasticlib.workers import DeferredSignals, check_function, pack_call

Group: TypeAlias = Literal["shared", "fresh"] | None
_T = TypeVar("_T")
_END_LIMIT = 10.0
"""Seconds for the exit handlers of the workers when a pool is closed."""


class Pool:
    """
    Workers that `pool` has started: `run` calls a function on all of them, `map` calls it once for each item.

    Use it in a ``with`` block, or `close` it. A pool without references ends too. `job` gives the status,
    the stacks and the output of every rank.
    """

    def __init__(
        self, config: LaunchConfig, group: Group, start: Callable[[LaunchConfig, Group], PoolWorkers] = PoolWorkers
    ) -> None:
        self._config, self._group, self._start = config, group, start
        self._owner = os.getpid()
        self._calls = 0
        self._starts = 1
        """Number of times it has started workers."""
        self._is_closed = False
        self._busy = threading.Lock()
        self._caller: threading.Thread | None = None
        """Thread whose call it serves; None while idle."""

        # An interrupt must not leave workers without an object that ends them.
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
        """True after `close`: the pool serves no more calls."""
        return self._is_closed

    @property
    def job(self) -> Job:
        """Job of the present workers: `Job.status`, `Job.logs`, `Job.stacks`."""
        return self._workers.job

    # Calls.

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Results:
        """
        Call *function* on every worker with these arguments, and return {rank: its result}.

        It accepts the same functions and arguments as `elastic_launch`. A call has the program's present
        working directory, ``sys.path`` and environment. Changes of modules that a worker has imported stay
        for the next call. Globals of the caller's script or cell are the caller's again in each call. If
        you have edited a module that a worker has imported, new workers replace all of them before the
        call, with a warning.

        Raises `ChildFailedError`, from the first failing rank's own exception, if a rank raised or died.
        Ranks that do not end within a second are then stopped. Before the next call all workers are
        replaced, with a new process group; with ``group=None`` only if one did not end. Raises `PoolError`
        if the pool cannot be used. Ctrl-C ends the call in the same way.
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
                        late, died = workers.late_answers(failed)
                    if self._group is not None:
                        workers.must_be_replaced("a call has failed, and ranks may be at different collectives")
                    raise workers.error(title_of(function), [*answers, *late], died)

            values = {each.rank: each.value() for each in sorted(answers, key=lambda each: each.rank)}

            # Each replacement of the workers counts as a round.
            return Results(values, dict.fromkeys(values, Place(0, host_name(), self._starts - 1, 0)))

        return self.in_turn(call)

    def map(
        self, function: Callable[[Any], Any], items: Iterable[Any], *, return_exceptions: bool = False
    ) -> list[Any]:
        """
        Call *function* once for each of *items*, one item per worker at a time.

        Return the results in the order of *items*. The first failure raises `ChildFailedError`, which names
        the item. With *return_exceptions* the exception takes the place of the result, and all other items
        are done. If a worker dies, new workers replace all, and the items of the other workers start again.
        An item or a result that cannot be sent fails with a `PicklingError`. *function* must not use
        collectives, since the other ranks work on other items.
        """
        check_function(function)
        calls = _ItemCalls(self, function, list(items), main=self._config.main, return_exceptions=return_exceptions)
        return self.in_turn(calls.run)

    @contextlib.contextmanager
    def errors_named(self, function: Callable[..., Any], workers: PoolWorkers) -> Iterator[None]:
        """Raise errors of the workers' job within the block as errors of the call of *function*."""
        try:
            yield
        except SignalException:
            if self._is_closed:
                raise PoolError("the pool was closed during this call, so the call was stopped") from None
            raise
        except ChildFailedError as error:
            raise workers.error(title_of(function), (), error.failures) from error.__cause__

    def in_turn(self, call: Callable[[PoolWorkers], _T]) -> _T:
        """
        Give *call* exclusive use of the workers, and return its result.

        Users call `run` and `map`. Raises `PoolError` if the pool is closed, busy, or a forked copy.
        """
        # An interrupt must not leave the lock taken.
        with uncaught_hook(), DeferredSignals() as put_off:
            self._refuse_in_fork()
            if not self._busy.acquire(blocking=False):
                self._refuse_if_closed()
                raise PoolError(
                    f"the pool is busy with a call of the thread {getattr(self._caller, 'name', '')!r}: wait for that "
                    "call, or give each thread its own pool"
                )

            try:
                # Set before the check of `_is_closed`: `close` sets that first, then reads the caller.
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
                    # Stopped now and replaced by the next call: this caller does not wait for their
                    # end.
                    if not self._workers.is_fit():
                        self._workers.stop()
                    self._workers.show()
            finally:
                self._caller = None
                self._busy.release()

    def _refuse_in_fork(self) -> None:
        if os.getpid() != self._owner:
            raise PoolError(
                "this process is a fork of the program that created the pool: only that program can use the pool"
            )

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise PoolError("the pool was closed: create a new one with elasticlib.pool(...)")

    def replaced(self) -> PoolWorkers:
        """Replace the workers during a call, and return the new ones."""
        self._workers.stop()
        self._replace()
        self._workers.turn_here()
        return self._workers

    def _replace(self) -> None:
        # Until the old workers have ended, their GPUs are taken.
        self._workers.wait()
        # An interrupt must not lose the new workers before they have an owner.
        with DeferredSignals():
            self._finalizer.detach()
            self._workers = self._start(self._config, self._group)
            self._starts += 1
            self._watch_over(self._workers)
        # The thread that closes the pool waits for this one, and then ends the new workers.
        if self._is_closed:
            raise PoolError("this call did not run: the pool was closed while it replaced its workers")

    # The end of the pool.

    def close(self) -> None:
        """
        End the workers, with their exit handlers, and return when all their processes are gone.

        A call in another thread is ended, and raises `PoolError` there. If a signal handler closes the pool
        during a call of its own thread, that call ends after the handler has returned. Any thread may call
        it, also more than once.
        """
        # A forked child leaves the block of the pool too, but must not end its workers.
        if os.getpid() != self._owner:
            return

        self._is_closed = True
        caller = self._caller
        if caller is not None:
            self._workers.stop()
            # A signal handler cannot wait for the call that it interrupts.
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
            # The user does not want to wait for exit handlers.
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

    Every item is pending, running (on one worker) or done. Every worker is idle, runs an item, or must be
    replaced: its last call has leaked state, so it gets no further one.
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
        """Indices of running items, by rank."""
        self._idle: list[int] = []
        """Idle ranks; the last one gets the next item."""

    def run(self, workers: PoolWorkers) -> list[Any]:
        """Run all items and return their results. Called once, while the pool serves no other call."""
        self._use(workers)
        while self._pending or self._running:
            # The last item of each worker has leaked state.
            if not self._idle and not self._running:
                self._use(self._pool.replaced())
            self._send_to_idle_workers()
            if self._running:
                self._collect()
        return self._results

    def _use(self, workers: PoolWorkers) -> None:
        self._workers = workers
        # Reversed, so that rank 0 gets the first item.
        self._idle = [*range(len(workers))][::-1]

    def _send_to_idle_workers(self) -> None:
        while self._idle and self._pending:
            index = self._pending.popleft()
            try:
                self._workers.ask([self._idle[-1]], self._function, (self._items[index],), {}, by_all=False)
            except PicklingError as error:
                self._fail(index, error)
                # If the function itself cannot be sent, no item can: this raises the error.
                pack_call(self._function, (), {}, self._main)
            else:
                # Not before: a worker whose item could not be sent is still idle.
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
            # The item gets the worker's own exception, if that could be rebuilt here.
            self._results[index] = failure.__cause__ or failure
            return

        try:
            self._results[index] = answer.value()
        except PicklingError as error:
            self._fail(index, error)

    def _after_death(self, error: ChildFailedError) -> None:
        """Fail the items of workers that died, and requeue the items of the others, which were stopped with them."""
        if not self._return_exceptions:
            raise error

        died = {rank for rank, failure in error.failures.items() if not failure.secondary}
        guilty = died & self._running.keys()

        # No running item is the cause.
        if not guilty:
            raise error

        for rank in guilty:
            self._results[self._running.pop(rank)] = error
        # In front and in their order, since they began before those that are pending.
        self._pending.extendleft(sorted(self._running.values(), reverse=True))
        self._running, self._idle = {}, []

    def _fail(self, index: int, error: Exception, failed: Sequence[int] = ()) -> None:
        """Store *error* as the result of the item, or end all other calls and raise it."""
        if not self._return_exceptions:
            with self._pool.errors_named(self._function, self._workers):
                self._workers.late_answers(failed)
            raise error
        self._results[index] = error


def pool(nproc_per_node: int | str = "auto", *, group: Group = "shared", **settings: Any) -> Pool:
    """
    Start *nproc_per_node* workers (as in `LaunchConfig`) that stay, for calls that take milliseconds.

        with elasticlib.pool(4) as pool:
            losses = pool.run(train, 1e-3)        # {rank: result}
            scores = pool.map(evaluate, settings)  # one worker for each, results in order

    *group* is the process group of the workers, torch's default one:

    * ``"shared"``: one group for all calls; functions use collectives without ``init_process_group``
    * ``"fresh"``: a new group for each call
    * None: functions make and destroy their own group

    Backends are torch's defaults for the devices of this machine. (``torch.multiprocessing.Pool`` has no
    process group.)

    *settings* are fields of `LaunchConfig`, such as ``devices`` or ``start_method``. Fields for many nodes
    and restarts raise `ConfigError`, and so do invalid values.
    """
    if group not in ("shared", "fresh", None):
        raise ConfigError(
            f"group={group!r} must be 'shared' (one process group for all calls), 'fresh' (a new one for each call) "
            "or None (functions create their own)"
        )

    known = {each.name: each for each in fields(LaunchConfig)}
    for name in settings:
        if name not in known:
            raise TypeError(f"pool() got an unexpected keyword argument {name!r}: settings are fields of LaunchConfig")
        if not is_for_pools(known[name]):
            raise ConfigError(
                f"{name}={settings[name]!r} is not supported by pool(), which runs on one machine and "
                "replaces its workers when needed: leave it out"
            )

    # Without restarts: a pool replaces its workers before the next call.
    return Pool(evolve(LaunchConfig(nproc_per_node=nproc_per_node, **settings), max_restarts=0), group)
