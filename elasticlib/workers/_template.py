"""
The template: a process that did the imports once, from which every launch's foreman is forked.

It is a program of its own, in a session of its own, so it never holds the caller's threads, CUDA context
or ``__main__``. It imports what ``preload`` names, refuses what would not survive a fork, freezes its
garbage so that children share the pages, and then only forks. It ends with the launcher.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import selectors
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from elasticlib._programs import not_started
from elasticlib._wire import Channel
from elasticlib.workers import _child, _foreman, _guardian, _randomness, _threads

_SHELLS_OWN = frozenset({"_", "SHLVL", "PWD", "OLDPWD"})
RANK_VARIABLES = frozenset({"RANK", "LOCAL_RANK", "WORLD_SIZE"})
_DEVICE_FILES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/render", "/dev/accel", "/dev/davinci", "/dev/habanalabs")


def why_refused(module: str) -> str | None:
    """Import *module* and say what it left behind that a forked worker could not do with, None if nothing."""
    threads, tasks = threading.active_count(), _tasks()
    with _noted_reads() as reads:
        importlib.import_module(module)
    if threading.active_count() > threads:
        names = ", ".join(thread.name for thread in threading.enumerate()[threads:])
        return f"its import starts a Python thread ({names}), which would be missing in the workers"
    # OpenBLAS keeps a pool and a fork handler of its own that ends and restarts it.
    allowed = sum(getter() - 1 for getter, _ in _fresh_blas())
    if _tasks() - tasks > allowed:
        return "its import starts native threads, which would be missing in the workers"
    devices = {path for path, _ in _open_files() if path.startswith(_DEVICE_FILES)}
    if devices:
        return f"its import opens an accelerator ({', '.join(sorted(devices))}), which cannot be used after a fork"
    if reads:
        return f"its import reads {', '.join(sorted(reads))}, which each worker has for itself"
    return None


def _fresh_blas() -> list[Any]:
    _threads.blas_libraries.cache_clear()
    return _threads.blas_libraries()


def _tasks() -> int:
    return len(os.listdir("/proc/self/task"))


def _open_files() -> list[tuple[str, int]]:
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            found.append((os.readlink(f"/proc/self/fd/{number}"), int(number)))
        except OSError:
            continue  # the descriptor of the listing itself
    return found


@contextmanager
def _noted_reads() -> Iterator[set[str]]:
    """Collect which of the per-worker variables are looked up in ``os.environ``."""
    reads: set[str] = set()
    environ = type(os.environ)
    plain = environ.__getitem__

    def noted(self: Any, key: Any) -> Any:
        if key in RANK_VARIABLES:
            reads.add(key)
        return plain(self, key)

    environ.__getitem__ = noted  # type: ignore[method-assign]
    try:
        yield reads
    finally:
        environ.__getitem__ = plain  # type: ignore[method-assign]


def _preload(modules: list[str], control: Channel) -> None:
    for module in modules:
        try:
            why = why_refused(module)
        except (Exception, SystemExit) as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            why = f"its import fails with {type(error).__name__}: {error} ({last.filename}, line {last.lineno})"
        if why is not None:
            control.send({"op": "refused", "module": module, "why": why})
            os._exit(1)


def main() -> NoReturn:
    """Be the template; ``sys.argv[1]`` is JSON: the modules to ``preload`` and the ``path`` to find them on."""
    parent = os.getppid()
    _guardian.settle_signals()
    asked = json.loads(sys.argv.pop())
    mine = {0, 1, 2, _guardian.TEMPLATE_FD}
    control = Channel.adopt(_guardian.TEMPLATE_FD)
    os.set_inheritable(_guardian.TEMPLATE_FD, False)
    _child.base_path[:] = sys.path
    sys.path[:] = [*asked["path"], *(folder for folder in sys.path if folder not in asked["path"])]
    with _randomness.observed():
        _preload(asked["preload"], control)
    sys.path[:] = _child.base_path
    keep = frozenset(number for _, number in _open_files() if number not in mine)
    _child.disown_finalizers()
    gc.collect()
    gc.freeze()
    _guardian.adopt_orphans()
    _serve(control, parent, keep, _changed_variables(parent))


def _changed_variables(guardian: int) -> dict[str, str | None]:
    """What the interpreter's wrapper and the imports changed in the environment that the guardian got."""
    try:
        with open(f"/proc/{guardian}/environ", "rb") as file:
            given = dict(entry.split(b"=", 1) for entry in file.read().split(b"\0") if b"=" in entry)
    except OSError:
        return {}
    changed: dict[str, str | None] = {os.fsdecode(name): None for name in given if name not in os.environb}
    changed |= {
        os.fsdecode(name): os.fsdecode(value) for name, value in os.environb.items() if given.get(name) != value
    }
    return {name: value for name, value in changed.items() if name not in _SHELLS_OWN}


def _serve(control: Channel, parent: int, keep: frozenset[int], changed: dict[str, str | None]) -> NoReturn:
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    watched = _guardian.watch(parent)
    selector.register(watched, selectors.EVENT_READ)
    _guardian.outlive_parent()
    # A descriptor of each launch's foreman; workers get the caller's limit.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    me = os.getpid()
    itself = os.pidfd_open(me)
    control.send({"op": "ready", "pid": me}, (itself,))
    os.close(itself)
    foremen: dict[int, int] = {}  # pidfd -> pid
    while True:
        for key, _ in selector.select():
            if key.fd in foremen:
                selector.unregister(key.fd)
                os.close(key.fd)
                os.waitpid(foremen.pop(key.fd), 0)
                # Whoever is my child and no foreman was left behind by the one that ended.
                _guardian.sweep(spare=set(foremen.values()))
            elif key.fd == watched or (received := control.receive(whole=False)) is None:
                _guardian.sweep()
                os._exit(0)
            else:
                message, descriptors = received
                if not descriptors:
                    continue  # none was free, so the asker's end is closed, and it knows
                try:
                    pid = os.fork()
                except OSError as error:  # of no concern to the launches that run
                    _turn_down(descriptors, str(not_started("the process that starts the workers", error)))
                    continue
                if pid == 0:
                    handles = [key.fd for key in selector.get_map().values() if key.fd != control.fileno()]
                    selector.close()
                    for handle in handles:
                        os.close(handle)
                    control.close()
                    (descriptor,) = descriptors
                    if message["op"] == "count":
                        _count_devices(Channel.adopt(descriptor))
                    if message["op"] == "gpus":
                        _list_gpus(Channel.adopt(descriptor))
                    _foreman.be_foreman(descriptor, me, keep, changed)
                for descriptor in descriptors:
                    os.close(descriptor)
                handle = os.pidfd_open(pid)
                foremen[handle] = pid
                selector.register(handle, selectors.EVENT_READ)


def _turn_down(descriptors: list[int], why: str) -> None:
    for descriptor in descriptors:
        asker = Channel.adopt(descriptor)
        asker.send({"op": "broken", "why": why})
        asker.close()


def _count_devices(answer: Channel) -> NoReturn:
    """Tell how many accelerators there are, in a child that is thrown away with its device context."""
    try:
        import torch

        kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        count = torch.accelerator.device_count() if kind is not None else 0
        answer.send({"count": count, "kind": kind.type if kind is not None else ""})
    except BaseException:
        traceback.print_exc()  # kept with what the template says; the launcher sees the missing answer
    finally:
        os._exit(0)


def _list_gpus(answer: Channel) -> NoReturn:
    """Tell where the GPUs sit, in a child that is thrown away with its device context."""
    try:
        from elasticlib.numa import _gpus

        answer.send({"addresses": _gpus.addresses_here()})
    except BaseException as error:
        answer.send({"why": f"torch cannot list the GPUs: {type(error).__name__}: {error}"})
    finally:
        os._exit(0)
