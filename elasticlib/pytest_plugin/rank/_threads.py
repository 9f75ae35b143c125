"""
Ranks as threads of one process, over torch's threaded process group.

Rules of this file: torch's group is private and of its own kind (no ``reduce``, no point-to-point, no timeouts): where
it is not there, the test is told so by name; nobody waits long for a rank once another one has stopped. What is of a
process, such as random numbers, the environment and captured output, is one for all these ranks. (source:
``torch.testing._internal``, which torch's own tests use in this way)
"""

from __future__ import annotations

import importlib
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

from elasticlib._clock import monotonic
from elasticlib.stacks import CALLERS, is_users
from elasticlib.testing.ranks._call import Outcome
from elasticlib.workers.child import _pooled

_ENDED = "Test termination event"
"""Torch's words for the end of a thread in a collective, once another one has failed."""
_MODULE = "torch.testing._internal.distributed.multi_threaded_pg"
_AFTER_FIRST = 1.0
"""Seconds that ranks have, once another one has failed or skipped, to end by themselves."""


def on_each(size: int, on_rank: Callable[[int], Outcome]) -> list[Outcome]:
    """What *on_rank* returns on each of *size* ranks, in a group of their own."""
    import torch

    dist: Any = importlib.import_module("torch.distributed")

    try:
        threaded: Any = importlib.import_module(_MODULE)
    except ImportError as error:
        raise RuntimeError(
            f"threads=True needs {_MODULE}, which this version of torch does not have: {error}"
        ) from error
    isolate: Any = torch._C._distributed_c10d._set_thread_isolation_mode  # type: ignore[attr-defined]
    isolate(True)
    threaded._install_threaded_pg()
    store = dist.HashStore()
    ended: queue.SimpleQueue[tuple[int, Outcome | BaseException]] = queue.SimpleQueue()
    may_begin = threading.Event()

    def run(rank: int) -> None:
        may_begin.wait()
        try:
            dist.init_process_group("threaded", rank=rank, world_size=size, store=store)
            try:
                outcome = on_rank(rank)
                if outcome.kind != "passed":  # others may wait for it in a collective
                    threaded.ProcessLocalGroup.exception_handle(RuntimeError(f"rank {rank} has ended early"))
            finally:
                dist.destroy_process_group()
            ended.put((rank, outcome))
        except BaseException as error:
            threaded.ProcessLocalGroup.exception_handle(error)
            ended.put((rank, error))

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)]
    try:
        for thread in threads:
            thread.start()
        # Where they hang, their stacks are told from others by this.
        _pooled.ask_caller({"wants": "threads", "threads": [thread.ident for thread in threads]})
        may_begin.set()
        return _collected(threads, ended)
    finally:
        threaded.ProcessLocalGroup.reset()
        threaded._uninstall_threaded_pg()
        isolate(False)


def _collected(
    threads: list[threading.Thread], ended: queue.SimpleQueue[tuple[int, Outcome | BaseException]]
) -> list[Outcome]:
    """What came of each thread; of those that do not end once another one has stopped, where they are."""
    found: dict[int, Outcome] = {}
    until: float | None = None
    while len(found) < len(threads):
        try:
            rank, outcome = ended.get(timeout=None if until is None else max(0.0, until - monotonic()))
        except queue.Empty:
            found |= {rank: _late(thread) for rank, thread in enumerate(threads) if rank not in found}
            break
        if isinstance(outcome, BaseException):
            raise outcome
        found[rank] = outcome
        if outcome.kind != "passed" and until is None:
            until = monotonic() + _AFTER_FIRST
    for rank, thread in enumerate(threads):
        if found[rank].kind != "late":
            thread.join()
    return [found[rank] for rank in range(len(threads))]


def _late(thread: threading.Thread) -> Outcome:
    frame = sys._current_frames().get(thread.ident or 0)
    frames = traceback.extract_stack(frame) if frame is not None else []
    own = next((each for each in reversed(frames) if is_users(each.filename)), None)
    where = "" if own is None else f": it was at {own.filename}:{own.lineno} in {own.name}"
    return Outcome("late", reason=f"did not end after that{where}")


def is_end(stop: SystemExit) -> bool:
    """Whether torch has ended a thread in a collective, since another rank had failed or skipped."""
    return _ENDED in str(stop.code)


CALLERS.add(__file__)
CALLERS.add(threading.__file__)
