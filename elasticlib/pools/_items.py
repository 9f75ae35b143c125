"""
`Pool.map`: one call for each of many items, on as many workers as there are.

Rules of this file: a worker serves one item at a time, whose failure costs no other item its result.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

from elasticlib.errors import ChildFailedError, PicklingError
from elasticlib.launch import title_of
from elasticlib.pools._pool_workers import Answer, PoolWorkers
from elasticlib.workers import pack_call


class Owner(Protocol):
    """The pool, as its calls need it."""

    def errors_named(self, function: Callable[..., Any], workers: PoolWorkers) -> AbstractContextManager[None]:
        """Raise errors of the workers' job in the block as those of the call of *function*."""

    def replaced(self) -> PoolWorkers:
        """Replace the workers in the midst of a call, and return the new ones."""


class ItemCalls:
    """
    The calls of one `Pool.map`.

    Every item is pending, running (on one worker) or done. Every worker is idle, runs an item, or must be replaced: its
    last call left something behind, and it gets no further one.
    """

    def __init__(
        self,
        pool: Owner,
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

    def _take(self, answer: Answer) -> None:
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
        if not guilty:  # no item is to blame
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
