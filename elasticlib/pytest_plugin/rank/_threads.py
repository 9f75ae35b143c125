"""
Ranks as threads of one process, over torch's threaded process group.

Rules of this file: torch's group is private and of its own kind (collectives of CPU tensors, no point-to-point, no
timeouts): where it is not there, the test is told so by name. What is of a process, such as random numbers, the
environment and captured output, is one for all these ranks. (source: ``torch.testing._internal``, which torch's own
tests use in this way)
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from typing import Any

from attrs import evolve

from elasticlib.testing.ranks._call import Outcome
from elasticlib.workers.child import _function

_ENDED = "Test termination event"
"""Torch's words for that."""
_MODULE = "torch.testing._internal.distributed.multi_threaded_pg"


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
    found: dict[int, Outcome] = {}
    broken: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=size, store=store)
            try:
                found[rank] = on_rank(rank)
                if found[rank].kind != "passed":  # others may wait for it in a collective
                    threaded.ProcessLocalGroup.exception_handle(RuntimeError(f"rank {rank} has ended early"))
            finally:
                dist.destroy_process_group()
        except BaseException as error:
            broken.append(error)
            threaded.ProcessLocalGroup.exception_handle(error)

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        threaded.ProcessLocalGroup.reset()
        threaded._uninstall_threaded_pg()
        isolate(False)
    if broken:
        raise broken[0]
    return [_told(found[rank]) for rank in range(size)]


def _told(outcome: Outcome) -> Outcome:
    """*outcome*, or, of a thread that torch ended in a collective since another rank had failed, that it was so."""
    failure = outcome.failure
    if failure is None or failure.kind != "SystemExit" or _ENDED not in failure.message:
        return outcome
    return evolve(outcome, failure=evolve(failure, is_secondary=True, message="ended in a collective"))


_function.OWN_FILES.add(__file__)
_function.OWN_FILES.add(threading.__file__)
