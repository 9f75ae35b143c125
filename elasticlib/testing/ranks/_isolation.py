"""
Isolation of a test from the other tests of its worker: own random numbers, and a check for leaks.

Changes made by an import belong to the imported module, not to the test that happened to import it
first. So each import is excluded: the state is compared around it, and random generators continue
as if it had not run. A test draws the same numbers, and counts as clean or not, in any order of
tests.

Rules of this file: state that a library keeps for the life of a process is never a leak.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import random
import sys
import threading
from collections.abc import Callable, Container, Iterator
from typing import Any

from elasticlib._clock import monotonic, sleep
from elasticlib.testing.ranks import _process_state

_bootstrap: Any = importlib._bootstrap
"""Python's implementation of the import statement."""
_ENDING = 0.1
"""Seconds that objects such as unused threads have to end before they count as leaks."""


def settle() -> None:
    """Open a store once, because the first one leaves a libuv pipe for the life of the process."""
    dist: Any = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available():
        with contextlib.suppress(RuntimeError):
            dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)


@contextlib.contextmanager
def isolated(seed: int, *, checks: bool, has_own_group: bool) -> Iterator[Callable[[], tuple[str, ...]]]:
    """
    Run a test in the block, with generators seeded by *seed*.

    The yielded function, called after the block, describes what the test has left behind; it
    returns () without *checks*. Process groups that the test has made are destroyed. With
    *has_own_group* the test may also have destroyed the group that was made for it.
    """
    before = _process_state.look() if checks else {}
    groups = _process_state.groups()
    apart = _ImportEffects(before, seed)
    _seed_all(seed)
    # importlib holds this lock for each module that it loads, and no public hook shows the end.
    former = _bootstrap._ModuleLockManager
    _bootstrap._ModuleLockManager = _lock_with(former, apart.entered, apart.left)
    try:
        yield lambda: _changes(apart.before) if checks else ()
    finally:
        _bootstrap._ModuleLockManager = former
        _end_groups(groups)
        if checks and has_own_group:
            apart.before = _without_own_group(apart.before)


class _ImportEffects:
    """Changes that the imports of one test make to its worker's state."""

    def __init__(self, before: _process_state.State, seed: int) -> None:
        self.before = before
        """State at the start of the test, updated with the changes of imports since."""
        self._seed = seed
        self._mine = threading.local()

    def entered(self, name: str) -> None:
        """Record that the import of *name* starts, and the state before the outermost import."""
        stack = self._stack()
        # Only the outermost import counts: those within it are part of it.
        if stack:
            stack.append((name,))
        else:
            stack.append((name, _process_state.look() if self.before else {}, _generators()))

    def left(self, name: str) -> None:
        """Record that the import of *name* has ended or failed."""
        stack = self._stack()
        # An interrupt may have left a name on the stack.
        while stack:
            found, *earlier = stack.pop()
            is_outermost = not stack and earlier
            if is_outermost:
                self._take_over(*earlier)
            if found == name:
                return

    def _take_over(self, state: _process_state.State, generators: tuple[Any, Any, Any]) -> None:
        """Add the changes since *state* to `before`, and undo the import's random draws."""
        if self.before:
            self.before = _process_state.taken_over(self.before, state, _process_state.look())
        _restore(generators, self._seed)

    def _stack(self) -> list[tuple[Any, ...]]:
        try:
            return self._mine.stack  # type: ignore[no-any-return]
        except AttributeError:
            stack = self._mine.stack = []
            return stack


def _lock_with(plain: Any, entered: Callable[[str], object], left: Callable[[str], object]) -> type:
    """Return a subclass of *plain*, Python's lock of an import, that calls *entered* and *left* with each name."""

    class _ModuleLockManager(plain):  # type: ignore[misc]
        def __enter__(self) -> None:
            # Before the lock is taken: an exception here, such as an interrupt, leaves it free.
            entered(self._name)
            super().__enter__()

        def __exit__(self, *error: object) -> None:
            super().__exit__(*error)
            left(self._name)

    return _ModuleLockManager


def _end_groups(known: Container[tuple[int, str]]) -> None:
    """Destroy the process groups that the test has left: those that are not *known*."""
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available():
        return
    for group, name in list(dist.distributed_c10d._world.pg_names.items()):
        if (id(group), str(name)) not in known:
            # The test may have broken the group; the check for leaks reports those that remain.
            with contextlib.suppress(Exception):
                dist.destroy_process_group(group)


def _without_own_group(before: _process_state.State) -> _process_state.State:
    """Return *before* without the process groups that the test has destroyed itself."""
    there = _process_state.groups()
    known = {key: name for key, name in before.get("process groups", {}).items() if key in there}
    return {**before, "process groups": known} if "process groups" in before else before


def _changes(before: _process_state.State) -> tuple[str, ...]:
    """Describe the differences from *before*; wait up to `_ENDING` s for them to disappear."""
    if not _process_state.differences(before, _process_state.look()):
        return ()

    # A cycle may still hold what the test has dropped, such as an open file.
    gc.collect()
    until = monotonic() + _ENDING
    _join_new_threads(before["threads"], until)
    found = _process_state.differences(before, _process_state.look())
    while found and monotonic() < until:
        sleep(_ENDING / 10)
        found = _process_state.differences(before, _process_state.look())

    return found


def _join_new_threads(known: Container[threading.Thread], until: float) -> None:
    for thread in threading.enumerate():
        if thread not in known and thread is not threading.current_thread():
            thread.join(max(0.0, until - monotonic()))


# Random numbers.


def _numpy() -> Any:
    return getattr(sys.modules.get("numpy"), "random", None)


def _torch() -> Any:
    return getattr(sys.modules.get("torch"), "default_generator", None)


def _seed_all(value: int) -> None:
    random.seed(value)
    _seed_numpy(value)
    _seed_torch(value)


def _seed_numpy(value: int) -> None:
    if (numpy := _numpy()) is not None:
        numpy.seed(value % 2**32)


def _seed_torch(value: int) -> None:
    if (generator := _torch()) is not None:
        # Not torch.manual_seed, which imports torch._dynamo.
        generator.manual_seed(value)
        torch = sys.modules["torch"]
        if torch.cuda._is_compiled():
            torch.cuda.manual_seed_all(value)


def _generators() -> tuple[Any, Any, Any]:
    """Return the generator states of Python, numpy and torch; None for a package not imported."""
    numpy, torch = _numpy(), _torch()
    return (
        random.getstate(),
        None if numpy is None else numpy.get_state(),
        None if torch is None else torch.get_state(),
    )


def _restore(states: tuple[Any, Any, Any], seed: int) -> None:
    """Set the generators to *states*; seed those imported since with *seed*."""
    of_python, of_numpy, of_torch = states
    random.setstate(of_python)
    if of_numpy is None:
        _seed_numpy(seed)
    else:
        _numpy().set_state(of_numpy)

    if of_torch is None:
        _seed_torch(seed)
    else:
        _torch().set_state(of_torch)
