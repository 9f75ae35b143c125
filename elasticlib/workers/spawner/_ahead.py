"""
Imports done once for all workers, and whether a forked worker could live with what they left behind.

What is asked for by name (`why_refused`) is refused for what a fork breaks: threads, open accelerators, a rank that was
read. What nobody asked for (`import_ahead`, the modules that workers were seen to import) is held to more: afterwards
the process must be as if it had not been imported, but for what `Span` knows how to give to a worker later.

Rules of this file: in doubt a module is refused; nothing of the watch is left when the imports are done; who imports
for later uses does not take CPU time from workers that run.
"""

from __future__ import annotations

import builtins
import contextlib
import gc
import importlib
import importlib.util
import locale
import os
import random
import select
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from elasticlib.workers.child import _imports, _threads
from elasticlib.workers.child._imports import Import, Span
from elasticlib.workers.spawner._observer import Observer

RANK_VARIABLES = frozenset({"RANK", "LOCAL_RANK", "WORLD_SIZE"})
_DEVICE_FILES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/render", "/dev/accel", "/dev/davinci", "/dev/habanalabs")
_SHARE = 3
"""Of the time in which others wanted its CPU, a process that imports for later uses one part in so many more."""
_WAITED = 1_000_000
"""Nanoseconds in the kernel's queue that count as waiting for others."""


class SpoiltError(Exception):
    """An import left behind what a worker could not do with, or what it must do by itself."""

    def __init__(self, module: str, why: str, instead: Sequence[Import] = ()) -> None:
        super().__init__(f"{module}: {why}")
        self.module = module
        self.why = why
        self.instead = list(instead)
        """What it imports of other packages, which may do."""


def why_refused(module: str, observer: Observer | None = None) -> str | None:
    """Import *module* and say what it left behind that a forked worker could not do with, None if nothing."""
    threads, tasks = threading.active_count(), _tasks()
    observer = observer or Observer()
    with observer.observing():
        importlib.import_module(module)
    reads = RANK_VARIABLES & {*observer.names, *observer.defaults}
    if threading.active_count() > threads:
        names = ", ".join(thread.name for thread in threading.enumerate()[threads:])
        return f"its import starts a Python thread ({names}), which would be missing in the workers"
    if _tasks() > tasks:
        # OpenBLAS keeps a pool and a fork handler of its own that ends and restarts it.
        _threads.blas_libraries.cache_clear()
        if _tasks() - tasks > sum(getter() - 1 for getter, _ in _threads.blas_libraries()):
            return "its import starts native threads, which would be missing in the workers"
    devices = {path for path, _ in open_files() if path.startswith(_DEVICE_FILES)}
    if devices:
        return f"its import opens an accelerator ({', '.join(sorted(devices))}), which cannot be used after a fork"
    if reads:
        return f"its import reads {', '.join(sorted(reads))}, which each worker has for itself"
    return None


def _tasks() -> int:
    return len(os.listdir("/proc/self/task"))


def open_files() -> list[tuple[str, int]]:
    """What this process has open, with the numbers of the descriptors."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            found.append((os.readlink(f"/proc/self/fd/{number}"), int(number)))
        except OSError:
            continue  # the descriptor of the listing itself
    return found


def hold_torch() -> None:
    """
    Hold torch back, which was imported ahead, so that a worker that imports it can be told from one that does not.

    Of its many modules the uppermost ones are enough for that.
    """
    found = {name: each for name, each in sys.modules.items() if name.startswith("torch.") and name.count(".") == 1}
    origin = _imports.origin_of(sys.modules.get("torch"))
    if origin is not None:
        modules = {"torch": sys.modules["torch"], **found}
        _imports.hold([Span(Import("torch", origin), modules)], {"torch": set(found)})


def import_ahead(
    wanted: Sequence[Import], own: Collection[str], paced: bool, trying: Callable[[str], object] = bool
) -> list[str]:
    """
    Import what workers were seen to import, in their order, and hold it back; the names.

    *own* are variables that each worker has for itself. Where *paced*, others come first. *trying* gets each
    name before. Raises `SpoiltError`: this process is not fit to be forked then.
    """
    found, needs = list[Span](), dict[str, set[str]]()
    temporary = tempfile.tempdir
    with _Output() as output, _needs_noted(needs), _pacing() if paced else contextlib.nullcontext():
        for each in wanted:
            if _imports.loaded(each.name):
                continue
            before = set(sys.modules)
            trying(each.name)
            try:
                found.append(_import(each, own, output))
            except SpoiltError as error:
                error.instead = _of_other_packages(each, [name for name in sys.modules if name not in before], needs)
                raise
    tempfile.tempdir = temporary  # each worker looks for a folder by itself
    _settle(found)
    held = {name for span in found for name in span.modules}
    _imports.hold(found, {name: some & held for name, some in needs.items() if name in held})
    return [span.root.name for span in found]


def _of_other_packages(wanted: Import, new: Sequence[str], needs: Mapping[str, set[str]]) -> list[Import]:
    """What the package of *wanted* has imported of others, of the modules that are *new*."""
    package, installed = wanted.name.partition(".")[0], _imports.Installed()
    asked = {name for importer, some in needs.items() if importer.partition(".")[0] == package for name in some}
    found = [name for name in new if name in asked and name.partition(".")[0] != package]
    origins = {name: _imports.origin_of(sys.modules.get(name)) for name in found}
    return [
        Import(name, origin, wanted.changed, wanted.cost)
        for name, origin in origins.items()
        if origin in installed and origin
    ]


@contextmanager
def _needs_noted(needs: dict[str, set[str]]) -> Iterator[None]:
    """Note in *needs* what the import of each module imports, also what is there already."""
    plain, by_name = builtins.__import__, importlib.import_module

    def note(importer: object, name: str, items: Sequence[str]) -> None:
        spec = getattr(sys.modules.get(str(importer)), "__spec__", None)
        if not getattr(spec, "_initializing", False):
            return  # a function imports it, when it is called
        some = needs.setdefault(str(importer), set())
        some.add(name)
        if "*" in items:
            items = getattr(sys.modules.get(name), "__all__", ())
        some.update(f"{name}.{item}" for item in items)

    def noted_import(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        found = plain(name, globals, locals, fromlist, level)
        if globals is not None:
            whole = name
            if level:
                package = globals.get("__package__") or globals["__name__"].rpartition(".")[0]
                whole = importlib.util.resolve_name("." * level + name, package)
            note(globals.get("__name__"), whole, fromlist or ())
        return found

    def noted_by_name(name: str, package: str | None = None) -> Any:
        found = by_name(name, package)
        whole = importlib.util.resolve_name(name, package) if name.startswith(".") else name
        note(sys._getframe(1).f_globals.get("__name__"), whole, ())
        return found

    builtins.__import__, importlib.import_module = noted_import, noted_by_name
    try:
        yield
    finally:
        builtins.__import__, importlib.import_module = plain, by_name


def _import(wanted: Import, own: Collection[str], output: _Output) -> Span:
    observer, before, modules = Observer(), _State(), set(sys.modules)
    variables, filters, finders = dict(os.environ), list(warnings.filters), list(sys.meta_path)
    acts: list[str] = []
    try:
        with _acts_noted(acts):
            why = why_refused(wanted.name, observer)
    except (Exception, SystemExit) as error:
        raise SpoiltError(wanted.name, f"its import fails with {type(error).__name__}: {error}") from error
    if why is None and _imports.origin_of(sys.modules.get(wanted.name)) != wanted.origin:
        why = f"it is found elsewhere than in the worker, where it was {wanted.origin}"
    if why is None and acts:
        why = f"its import {' and '.join(dict.fromkeys(acts))}"
    if why is None and output.written():
        why = "its import writes to the console"
    reads = {*observer.names, *observer.defaults}
    if why is None and (changed := sorted(reads & (wanted.changed | {*own}))):
        why = f"its import reads {', '.join(changed)}, which the program sets, or which each worker has for itself"
    if why is None and (different := before.differences()):
        why = f"its import changes {', '.join(different)}"
    if why is not None:
        raise SpoiltError(wanted.name, why)
    new = {name: module for name, module in list(sys.modules.items()) if name not in modules}
    now = dict(os.environ)
    written = {name: (variables.get(name), now.get(name)) for name in {*variables, *now}}
    parents = {}
    for name, module in new.items():
        parent, _, child = name.rpartition(".")
        if parent in modules and vars(sys.modules[parent]).get(child) is module:
            parents[name] = sys.modules[parent]
    return Span(
        wanted,
        new,
        {name: variables.get(name) for name in reads},
        {name: pair for name, pair in written.items() if pair[0] != pair[1]},
        [each for each in warnings.filters if each not in filters],
        [each for each in sys.meta_path if each not in finders],
        parents,
    )


def _settle(found: Sequence[Span]) -> None:
    """Take back what workers get when they import: filters of warnings, finders."""
    filters = [each for span in found for each in span.filters]
    warnings.filters[:] = [each for each in warnings.filters if each not in filters]  # type: ignore[index]
    warnings._filters_mutated()  # type: ignore[attr-defined]
    finders = [each for span in found for each in span.finders]
    sys.meta_path[:] = [each for each in sys.meta_path if each not in finders]


class _State:
    """What all of a process has in common, and an import of a well-behaved module leaves alone."""

    def __init__(self) -> None:
        self._found = self._look()

    def differences(self) -> list[str]:
        """Names of what has changed since."""
        now = self._look()
        return [name for name, value in self._found.items() if name in now and now[name] != value]

    @staticmethod
    def _look() -> dict[str, Any]:
        torch, numbers = _imports.module("torch"), _imports.module("numpy.random")
        found = {
            "the working folder": os.getcwd(),
            "the search path": list(sys.path),
            "the command line": list(sys.argv),
            "the importers": list(sys.path_hooks),
            "a signal's handler": [signal.getsignal(number) for number in signal.valid_signals()],
            "the hooks for errors": (sys.excepthook, threading.excepthook, sys.unraisablehook, sys.displayhook),
            "standard streams": (sys.stdin, sys.stdout, sys.stderr),
            "how warnings are shown": warnings.showwarning,
            "the locale": locale.setlocale(locale.LC_ALL),
            "limits of the interpreter": (sys.getrecursionlimit(), sys.getswitchinterval(), gc.get_threshold()),
            "the time limit of sockets": socket.getdefaulttimeout(),
            "tracing": (sys.gettrace(), sys.getprofile()),
            "random numbers": random.getstate(),
            "open files": {(path, number) for path, number in open_files() if not path.startswith("/proc/")},
            "child processes": sorted(_children()),
        }
        if torch is not None and hasattr(torch, "default_generator"):
            found["torch's random numbers"] = torch.default_generator.get_state().tolist()
            found["torch's defaults"] = torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads()
        if numbers is not None:
            kind, keys, *rest = numbers.get_state()
            found["numpy's random numbers"] = kind, keys.tobytes(), *rest
        return found


def _children() -> list[bytes]:
    with contextlib.suppress(OSError), open(f"/proc/self/task/{os.getpid()}/children", "rb") as file:
        return file.read().split()
    return []


_ACTS: tuple[tuple[Any, str, str], ...] = (
    *((os, name, "starts a process") for name in ("fork", "forkpty", "posix_spawn", "posix_spawnp", "system")),
    *((socket.socket, name, "uses the network") for name in ("connect", "connect_ex", "bind", "sendto")),
    *((socket, name, "uses the network") for name in ("getaddrinfo", "gethostbyname")),
    (tempfile, "mkdtemp", "makes a temporary folder"),
    (gc, "disable", "turns the garbage collector off"),
    (tempfile, "_mkstemp_inner", "makes a temporary file"),
)


@contextmanager
def _acts_noted(acts: list[str]) -> Iterator[None]:
    """Note in *acts* what imports do that has an effect outside of this process."""
    import subprocess

    def noting(plain: Callable[..., Any], act: str) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            acts.append(act)
            return plain(*args, **kwargs)

        return noted

    restored = []
    for owner, name, act in (*_ACTS, (subprocess.Popen, "__init__", "starts a process")):
        plain = vars(owner).get(name)
        own = getattr(owner, name)
        replacement = noting(own, act)
        setattr(owner, name, replacement)
        restored.append((owner, name, plain, replacement))
    try:
        yield
    finally:
        for owner, name, plain, replacement in restored:
            if vars(owner).get(name) is not replacement:
                acts.append(f"replaces {name}")
            elif plain is None:
                delattr(owner, name)
            else:
                setattr(owner, name, plain)


class _Output:
    """Takes up what is written to the standard streams in the block."""

    def __enter__(self) -> _Output:
        self._flush()
        self._memory = os.memfd_create("output of imports")
        self._saved = [os.dup(number) for number in (1, 2)]
        for number in (1, 2):
            os.dup2(self._memory, number)
        return self

    def __exit__(self, *_: object) -> None:
        self._flush()
        for number, saved in zip((1, 2), self._saved, strict=True):
            os.dup2(saved, number)
            os.close(saved)
        os.close(self._memory)

    def written(self) -> bool:
        """Whether there was anything."""
        self._flush()
        return os.fstat(self._memory).st_size > 0

    @staticmethod
    def _flush() -> None:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()


@contextmanager
def _pacing() -> Iterator[None]:
    """Leave the CPUs to others in the block, as far as they want them: a nice value could not be taken back."""
    plain = _imports.bootstrap._ModuleLockManager
    ran, waited = _schedule()

    def pause(_: str) -> None:
        nonlocal ran, waited
        ran_now, waited_now = _schedule()
        if waited_now - waited > _WAITED:
            select.poll().poll(_SHARE * (ran_now - ran) / 1e6)
            ran, waited = _schedule()
        elif ran_now - ran > 100 * _WAITED:
            ran, waited = ran_now, waited_now

    _imports.bootstrap._ModuleLockManager = _imports.lock_with(plain, pause, lambda _: None)
    try:
        yield
    finally:
        _imports.bootstrap._ModuleLockManager = plain


def _schedule() -> tuple[int, int]:
    """Nanoseconds in which this process ran, and in which it waited for a CPU."""
    try:
        with open("/proc/self/schedstat", "rb") as file:
            ran, waited, _ = map(int, file.read().split())
    except (OSError, ValueError):
        return time.process_time_ns(), 0
    return ran, waited
