"""
What an import leaves behind, and what it does outside of this process: looked for around each import ahead.

Rules of this file: in doubt something is left behind; an act that has an effect elsewhere is stopped before it has;
nothing of the watch is there when the block ends, also not where a module took it for Python's own.
"""

from __future__ import annotations

import builtins
import contextlib
import gc
import importlib
import io
import locale
import logging
import operator
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from elasticlib import processes
from elasticlib.workers.child import _held, _threads
from elasticlib.workers.spawner._observer import Observer

RANK_VARIABLES = frozenset({"RANK", "LOCAL_RANK", "WORLD_SIZE"})
_DEVICE_FILES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/render", "/dev/accel", "/dev/davinci", "/dev/habanalabs")


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


class State:
    """What all of a process has in common, and an import of a well-behaved module leaves alone."""

    def __init__(self) -> None:
        self._found = self._look()
        self._modules: dict[str, Any] = {}
        self._bindings: dict[str, dict[str, Any]] = {}
        self.grow()

    def grow(self) -> None:
        """Have modules that have come since belong to it: what changes them is a difference from here on."""
        new = {name: each for name, each in {**sys.modules, **_held.held()}.items() if name not in self._modules}
        self._modules.update(new)
        self._bindings.update((name, vars(each).copy()) for name, each in _plain_modules(new.items()))

    def differences(self, but: Collection[str] = ()) -> list[str]:
        """Names of what has changed since this was asked before, or came to it; modules *but* may be others by now."""
        found, modules = self._look(), {**sys.modules, **_held.held()}
        changed = [name for name, value in self._found.items() if name in found and found[name] != value]
        replaced = [name for name, each in self._modules.items() if modules.get(name) is not each]
        changed += [f"sys.modules[{name!r}]" for name in replaced if name not in but]
        known = self._bindings["builtins"]
        for name, before in self._bindings.items():
            now = vars(self._modules[name])
            if len(now) != len(before) or not all(map(operator.is_, now.values(), before.values())):
                patched = [each for each, old in before.items() if _is_patched(name, old, now.get(each, old))]
                changed += [f"{name}.{each}" for each in patched]
                self._bindings[name] = now.copy()
        changed += [f"builtins.{name}" for name in vars(builtins) if name not in known]
        for name in replaced:
            del self._modules[name]
            self._bindings.pop(name, None)
        self._found = found
        return changed

    @staticmethod
    def _look() -> dict[str, Any]:
        torch, numbers = _held.module("torch"), _held.module("numpy.random")
        found = {
            "the working folder": os.getcwd(),
            "the search path": list(sys.path),
            "the command line": list(sys.argv),
            "the importers": list(sys.path_hooks),
            "a signal's handler": [signal.getsignal(number) for number in signal.valid_signals()],
            "the hooks for errors": (sys.excepthook, threading.excepthook, sys.unraisablehook, sys.displayhook),
            "standard streams": (sys.stdin, sys.stdout, sys.stderr),
            "how warnings are shown": warnings.showwarning,
            "the logging of all": (logging.root.level, list(logging.root.handlers), logging.root.manager.disable),
            "the locale": locale.setlocale(locale.LC_ALL),
            "limits of the interpreter": (sys.getrecursionlimit(), sys.getswitchinterval(), gc.get_threshold()),
            "the time limit of sockets": socket.getdefaulttimeout(),
            "tracing": (sys.gettrace(), sys.getprofile()),
            "random numbers": random.getstate(),
            "open files": {(path, number) for path, number in open_files() if not path.startswith("/proc/")},
            "shared memory": _shared_memory(),
            "child processes": sorted(_children()),
        }
        if torch is not None and hasattr(torch, "default_generator"):
            found["torch's random numbers"] = torch.default_generator.get_state().tolist()
            found["torch's defaults"] = torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads()
        if numbers is not None:
            kind, keys, *rest = numbers.get_state()
            found["numpy's random numbers"] = kind, keys.tobytes(), *rest
        return found


def _plain_modules(modules: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, types.ModuleType]]:
    return ((name, each) for name, each in modules if isinstance(each, types.ModuleType))


def _is_patched(module: str, old: object, new: object) -> bool:
    """Whether somebody else put another function or class in the place of the module's own."""
    if new is old or not (callable(old) and callable(new)):
        return False
    package = module.partition(".")[0]
    code = getattr(new, "__code__", None)
    if code is None:
        return str(getattr(new, "__module__", "")).partition(".")[0] != package
    # By its file, since a wrapper has the name of what it wraps.
    home = os.path.dirname(getattr(_held.module(package), "__file__", None) or "")
    return not (home and code.co_filename.startswith(home))


def _shared_memory() -> list[str]:
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
        return [line for line in file if " rw-s " in line]


def _children() -> list[bytes]:
    with contextlib.suppress(OSError), open(f"/proc/self/task/{os.getpid()}/children", "rb") as file:
        return file.read().split()
    return []


class _ActError(Exception):
    """An import was about to do something that has an effect elsewhere."""


def _writes(path: Any, mode: Any = "r", *_: Any, **__: Any) -> bool:
    if isinstance(mode, int):
        writes = bool(mode & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC))
    else:
        writes = not set("wax+").isdisjoint(str(mode))
    return writes and not (isinstance(path, int) or os.fspath(path) == os.devnull)


_FILES = ("remove", "unlink", "rename", "replace", "rmdir", "symlink", "link", "truncate", "chmod")
_ACTS: tuple[tuple[Any, str, str, Callable[..., bool] | None], ...] = (
    *((os, name, "starts a process", None) for name in ("fork", "forkpty", "posix_spawn", "posix_spawnp", "system")),
    *((os, name, "starts a process", None) for name in ("execv", "execve")),
    (subprocess.Popen, "__init__", "starts a process", None),
    *((socket.socket, name, "uses the network", None) for name in ("connect", "connect_ex", "bind", "sendto")),
    *((socket, name, "uses the network", None) for name in ("getaddrinfo", "gethostbyname")),
    (tempfile, "mkdtemp", "makes a temporary folder", None),
    (tempfile, "_mkstemp_inner", "makes a temporary file", None),
    (gc, "disable", "turns the garbage collector off", None),
    *((owner, "open", "writes a file", _writes) for owner in (builtins, io, os)),
    *((os, name, "changes files", None) for name in _FILES),
)


@contextmanager
def acts_stopped(acts: list[str]) -> Iterator[None]:
    """Note in *acts* what imports would do that has an effect outside of this process, and keep it from happening."""
    with replaced(acts) as replace:
        for owner, name, act, when in _ACTS:
            replace(owner, name, _stopping(acts, act, when, getattr(owner, name)))
        yield


def _stopping(
    acts: list[str], act: str, when: Callable[..., bool] | None, plain: Callable[..., Any]
) -> Callable[..., Any]:
    def stopped(*args: Any, **kwargs: Any) -> Any:
        if when is None or when(*args, **kwargs):
            acts.append(act)
            raise _ActError(act)
        return plain(*args, **kwargs)

    return stopped


@contextmanager
def replaced(acts: list[str]) -> Iterator[Callable[[Any, str, Any], None]]:
    """
    Gives a function that puts something in the place of an attribute, until the end of the block.

    Modules that come in the block, and keep what they found there, get Python's own then. Where somebody has replaced
    ours, *acts* says so.
    """
    done: list[tuple[Any, str, Any, Any, Any]] = []
    before = set(sys.modules)

    def replace(owner: Any, name: str, new: Any) -> None:
        done.append((owner, name, vars(owner).get(name), getattr(owner, name), new))
        setattr(owner, name, new)

    try:
        yield replace
    finally:
        for owner, name, plain, _, new in reversed(done):
            if vars(owner).get(name) is not new:
                acts.append(f"replaces {name}")
            elif plain is None:
                delattr(owner, name)
            else:
                setattr(owner, name, plain)
        originals = {id(new): found for _, _, _, found, new in done}
        for _, module in _plain_modules([(n, m) for n, m in list(sys.modules.items()) if n not in before]):
            kept = [(name, originals[id(each)]) for name, each in vars(module).items() if id(each) in originals]
            for name, original in kept:
                setattr(module, name, original)


class Output:
    """Takes up what is written to the standard streams in the block."""

    def __enter__(self) -> Output:
        self._flush()
        self._memory = processes.anonymous_file("output of imports")
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
