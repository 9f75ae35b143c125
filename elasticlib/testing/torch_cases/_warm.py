"""
Suites on torch's multi-process test classes and its ``spawn``, with processes forked from one that has imported torch.

    # conftest.py
    from elasticlib.testing import warm_torch_cases
    warm_torch_cases()

Torch's classes start a new interpreter for each rank of each test, or of each class, and each of them imports torch:
that is nearly all of their time. ``torch.multiprocessing.spawn`` does so for each call, and torch's launcher calls it.
Here the processes come from Python's fork server instead, which imports once what the tests' own process has imported
of torch. Whatever else these classes and functions do is theirs: ``_run``, exit statuses, pipes, skips and deadlines.

Rules of this file: a process has what a new interpreter would have at that moment, such as variables and streams, for
the fork server has those of its own beginning; it does not outlive the tests.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from json import dumps
from multiprocessing import forkserver, reduction, set_forkserver_preload, set_start_method
from multiprocessing.context import ForkServerProcess, SpawnContext
from types import ModuleType
from typing import Any, ClassVar
from unittest import mock

from elasticlib.processes import Surroundings, die_with_parent, without_garbage_collection
from elasticlib.testing.torch_cases import _torch_imports
from elasticlib.workers import THREADS_VARIABLE, threads_per_worker
from elasticlib.workers.child import reseed_caller, set_blas_threads

_OF_TORCH = ("torch", "functorch", "torchgen", "numpy")
"""Packages whose modules no process can tell from those of an import of its own."""
_BASES = "torch.testing._internal.common_distributed"
_SPAWN = "torch.multiprocessing.spawn"
"""The module; the attribute of that name of ``torch.multiprocessing`` is its function."""
_CHECKS_WITHOUT_CUDA = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""With it torch counts GPUs without a CUDA context, which no forked process could use."""


def warm_torch_cases(*preload: str) -> None:
    """
    From now on have the processes of torch's multi-process test classes come from a fork server that stays warm.

    Call it in ``conftest.py``, before the tests run. It is for ``MultiProcessTestCase`` and ``MultiProcContinuousTest``
    of ``torch.testing._internal.common_distributed`` and all that derive from these, such as ``DistributedTestBase``,
    ``FSDPTest`` and ``DTensorTestBase``; and for ``torch.multiprocessing.spawn`` and ``start_processes``, by which
    torch's own launcher starts functions. The fork server imports the modules of torch that the first test finds
    imported, and *preload*.
    """
    bases = _import_bases()
    _starts.preload = tuple(dict.fromkeys([*_starts.preload, *preload]))
    if _starts.is_installed:
        return
    _starts.is_installed = True
    bases.MultiProcessTestCase._spawn_processes = _spawn_for_test
    if (continuous := getattr(bases, "MultiProcContinuousTest", None)) is not None:
        plain = continuous._spawn_processes.__func__

        def spawn_for_class(cls: Any, world_size: int) -> None:
            _starts.begin()
            with mock.patch("torch.multiprocessing.Process", WarmProcess):
                plain(cls, world_size)

        continuous._spawn_processes = classmethod(spawn_for_class)
    spawn: Any = importlib.import_module(_SPAWN)
    spawn.multiprocessing = _Multiprocessing(multiprocessing.__name__)


def _import_bases() -> Any:
    with without_garbage_collection():
        return importlib.import_module(_BASES)


def _spawn_for_test(case: Any) -> None:
    _starts.begin()
    case._start_processes(WarmProcess)


class _Starts:
    """The fork server's beginning."""

    def __init__(self) -> None:
        self.preload: tuple[str, ...] = ()
        self.is_installed = False
        self._has_begun = False

    def begin(self, *, sets_start_method: bool = True) -> None:
        """Have the fork server started, where it is not."""
        # torch's test classes do so, for queues and locks must suit spawned processes.
        if sets_start_method:
            with contextlib.suppress(RuntimeError):
                set_start_method("spawn")
        if self._has_begun:
            return
        self._has_begun = True
        wanted = [*(name for name in list(sys.modules) if name.partition(".")[0] in _OF_TORCH), *self.preload]
        variables = {_torch_imports.VARIABLE: dumps(wanted), _CHECKS_WITHOUT_CUDA: "1"}
        set_forkserver_preload([_torch_imports.__name__, __name__, "__main__"])
        with mock.patch.dict(os.environ, variables):
            forkserver.ensure_running()


_starts = _Starts()


class WarmProcess(ForkServerProcess):
    """A process of ``multiprocessing`` that is forked from the fork server."""

    def __getstate__(self) -> dict[str, Any]:
        # In front, for what comes after it imports the modules of tests.
        return {"_inherited": _Inherited(), **vars(self)}


class _WarmContext(SpawnContext):
    """The context for spawned processes, whose processes are forked from the fork server."""

    Process: ClassVar[Any] = WarmProcess


class _Multiprocessing(ModuleType):
    """``multiprocessing`` for torch's ``spawn``, which asks it for a context and has no other seam."""

    def __getattr__(self, name: str) -> Any:
        return getattr(multiprocessing, name)

    def get_context(self, method: str | None = None) -> Any:
        context = multiprocessing.get_context(method)
        if not isinstance(context, SpawnContext):
            return context
        _starts.begin(sets_start_method=False)
        return _WarmContext()


class _Inherited:
    """Pickled, it is what the calling process hands on; unpickled in another process, that one has it."""

    def __reduce__(self) -> tuple[Any, ...]:
        streams = [(number, reduction.DupFd(number)) for number in (1, 2) if _is_open(number)]
        return _take_over, (dict(os.environ), Surroundings.now().plain(), streams)


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _take_over(
    variables: Mapping[str, str], surroundings: Mapping[str, Any], streams: Sequence[tuple[int, Any]]
) -> None:
    """In a process that was forked from the fork server: become one of the tests' own process."""
    _end_with_tests()
    for number, stream in streams:
        descriptor = stream.detach()
        os.dup2(descriptor, number)
        os.close(descriptor)
    threads_before = os.environ.get(THREADS_VARIABLE)
    os.environ.clear()
    os.environ.update(variables)
    Surroundings.of(surroundings).take_over()
    # torch and the BLAS libraries read the variable at their import only.
    if os.environ.get(THREADS_VARIABLE) != threads_before:
        set_blas_threads(threads_per_worker(os.environ, len(os.sched_getaffinity(0)), workers=1))
    reseed_caller()
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available():
        # torch reads the variable at its import only.
        distributed.set_debug_level_from_env()


def _end_with_tests() -> None:
    """Have the kernel kill this process at the end of the fork server, which ends with the tests' own process."""
    server: Any = getattr(forkserver, "_forkserver")  # noqa: B009 - no public name, and none that types know
    if (alive := getattr(server, "_forkserver_alive_fd", None)) is not None:
        # Each process is given this, and as long as one has it the fork server stays.
        os.close(alive)
        server._forkserver_alive_fd = None
    die_with_parent(os.getppid())
