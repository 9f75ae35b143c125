"""
Warm processes for torch's multi-process test classes and its ``spawn``.

    # conftest.py
    from elasticlib.testing import warm_torch_cases
    warm_torch_cases()

Torch's classes start a new interpreter for each rank of each test or class, and each interpreter
imports torch. Most of their time is spent there. ``torch.multiprocessing.spawn`` does the same for
each call, and torch's launcher calls it. Here Python's fork server starts the processes. It imports
once the torch modules that the tests' own process has imported. Everything else in these classes
and functions is unchanged: ``_run``, exit statuses, pipes, skips and deadlines.

Rules of this file: a forked process gets the current variables and streams of the tests' process,
as a new interpreter would. The fork server itself still has those of its start. No process outlives
the tests.
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
"""Packages whose modules behave the same in a forked process as if it had imported them."""
_BASES = "torch.testing._internal.common_distributed"
_SPAWN = "torch.multiprocessing.spawn"
"""Name of the module; ``torch.multiprocessing`` has its function under the same name."""
_CHECKS_WITHOUT_CUDA = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Variable that lets torch count GPUs without a CUDA context, which a forked process cannot use."""


def warm_torch_cases(*preload: str) -> None:
    """
    Start the processes of torch's multi-process test classes from a warm fork server.

    Call it in ``conftest.py``, before the tests run. It applies to ``MultiProcessTestCase`` and
    ``MultiProcContinuousTest`` of ``torch.testing._internal.common_distributed`` and to their
    subclasses, such as ``DistributedTestBase``, ``FSDPTest`` and ``DTensorTestBase``. It also
    applies to ``torch.multiprocessing.spawn`` and ``start_processes``, with which torch's launcher
    starts functions. The fork server imports *preload*, and the torch modules that are loaded when
    the first test starts.
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
    """Start of the fork server, at most once."""

    def __init__(self) -> None:
        self.preload: tuple[str, ...] = ()
        self.is_installed = False
        self._has_begun = False

    def begin(self, *, sets_start_method: bool = True) -> None:
        """Start the fork server unless it has been started."""
        # torch's test classes do this too: queues and locks must work in spawned processes.
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
    """``multiprocessing`` process that the fork server forks."""

    def __getstate__(self) -> dict[str, Any]:
        # First, because unpickling the other attributes imports the modules of tests.
        return {"_inherited": _Inherited(), **vars(self)}


class _WarmContext(SpawnContext):
    """Spawn context whose processes the fork server forks."""

    Process: ClassVar[Any] = WarmProcess


class _Multiprocessing(ModuleType):
    """Replacement for the ``multiprocessing`` module in torch's ``spawn``."""

    # `spawn` gets its context from the module, and offers no other place to change it.

    def __getattr__(self, name: str) -> Any:
        return getattr(multiprocessing, name)

    def get_context(self, method: str | None = None) -> Any:
        context = multiprocessing.get_context(method)
        if not isinstance(context, SpawnContext):
            return context
        _starts.begin(sets_start_method=False)
        return _WarmContext()


class _Inherited:
    """Variables, surroundings and streams that a new process inherits."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickling takes them from the current process; unpickling applies them to the new one.
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
    """Make this forked process look like a child of the tests' own process."""
    _end_with_tests()
    for number, stream in streams:
        descriptor = stream.detach()
        os.dup2(descriptor, number)
        os.close(descriptor)

    threads_before = os.environ.get(THREADS_VARIABLE)
    os.environ.clear()
    os.environ.update(variables)
    Surroundings.of(surroundings).take_over()

    # torch and the BLAS libraries read the variable only when they are imported.
    if os.environ.get(THREADS_VARIABLE) != threads_before:
        set_blas_threads(threads_per_worker(os.environ, len(os.sched_getaffinity(0)), workers=1))
    reseed_caller()
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available():
        # torch reads the variable only when it is imported.
        distributed.set_debug_level_from_env()


def _end_with_tests() -> None:
    """Ask the kernel to kill this process when the fork server exits, which exits with the tests' own process."""
    server: Any = getattr(forkserver, "_forkserver")  # noqa: B009 - no public name, and none that types know
    if (alive := getattr(server, "_forkserver_alive_fd", None)) is not None:
        # Each process inherits this descriptor, and the fork server stays while one keeps it open.
        os.close(alive)
        server._forkserver_alive_fd = None
    die_with_parent(os.getppid())
