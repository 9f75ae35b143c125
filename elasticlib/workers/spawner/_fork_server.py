"""
The fork server: a process that did the imports once, from which every launch's spawner is forked.

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
from collections.abc import Mapping
from typing import NoReturn

from elasticlib._programs import not_started
from elasticlib._wire import Channel, Message
from elasticlib.workers import _reaper
from elasticlib.workers.child import _child, _ending, _randomness, _threads
from elasticlib.workers.spawner import _spawner
from elasticlib.workers.spawner._observer import Absences, Observer, names_in

_SHELLS_OWN = frozenset({"_", "SHLVL", "PWD", "OLDPWD"})
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
    # OpenBLAS keeps a pool and a fork handler of its own that ends and restarts it.
    _threads.blas_libraries.cache_clear()
    allowed = sum(getter() - 1 for getter, _ in _threads.blas_libraries())
    if _tasks() - tasks > allowed:
        return "its import starts native threads, which would be missing in the workers"
    devices = {path for path, _ in _open_files() if path.startswith(_DEVICE_FILES)}
    if devices:
        return f"its import opens an accelerator ({', '.join(sorted(devices))}), which cannot be used after a fork"
    if reads:
        return f"its import reads {', '.join(sorted(reads))}, which each worker has for itself"
    return None


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


def _preload(modules: list[str], observer: Observer, control: Channel) -> None:
    for module in modules:
        try:
            why = why_refused(module, observer)
        except (Exception, SystemExit) as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            why = f"its import fails with {type(error).__name__}: {error} ({last.filename}, line {last.lineno})"
        if why is not None:
            control.send({"op": "refused", "module": module, "why": why})
            os._exit(1)


def main() -> NoReturn:
    """Be the fork server; ``sys.argv[1]`` is JSON: the modules to ``preload`` and the ``path`` to find them on."""
    parent = os.getppid()
    _reaper.settle_signals()
    asked = json.loads(sys.argv.pop())
    mine = {0, 1, 2, _reaper.FORK_SERVER_FD}
    control = Channel.adopt(_reaper.FORK_SERVER_FD)
    os.set_inheritable(_reaper.FORK_SERVER_FD, False)
    _child.base_path[:] = sys.path
    sys.path[:] = [*asked["path"], *(folder for folder in sys.path if folder not in asked["path"])]
    observer = Observer()
    absences = Absences()
    with _randomness.observed(), absences.observing():
        _preload(asked["preload"], observer, control)
    sys.path[:] = _child.base_path
    keep = frozenset(number for _, number in _open_files() if number not in mine)
    _child.disown_finalizers()
    _ending.inherit()
    gc.collect()
    gc.freeze()
    _reaper.adopt_orphans()
    given = _first_environment(parent)
    wrapped = _differences(given, _first_environment("self"))
    wrapped.pop("LC_CTYPE", None)  # Python's own doing, where the locale is C
    at_start = _site_reads()
    ready = {
        "op": "ready",
        "names": sorted(observer.names | (at_start or set())),
        "defaults": observer.defaults,
        "found": sorted({name.partition(".")[0] for name in sys.modules}),
        "missing": sorted(absences.names),
        "intel_openmp": _is_mapped("libiomp", "libomp"),
        "whole": wrapped != {} or at_start is None,
    }
    changed = _differences(given, dict(os.environ)) if given else {}
    # Also what the launch that this process was started for had set by itself: another may lack it, or differ.
    changed |= {name: os.environ.get(name) for name in (*observer.written, *observer.defaults)}
    _serve(control, parent, keep, ready, changed)


def _first_environment(process: int | str) -> dict[str, str]:
    """The variables that a process was started with; empty where nobody may look."""
    try:
        with open(f"/proc/{process}/environ", "rb") as file:
            entries = [entry.split(b"=", 1) for entry in file.read().split(b"\0") if b"=" in entry]
    except OSError:
        return {}
    return {os.fsdecode(name): os.fsdecode(value) for name, value in entries}


def _differences(given: Mapping[str, str], found: Mapping[str, str]) -> dict[str, str | None]:
    """What the interpreter, its wrapper or the imports changed: new values, None for what was removed."""
    names = [name for name in {**given, **found} if given.get(name) != found.get(name) and name not in _SHELLS_OWN]
    return {name: found.get(name) for name in names}


def _site_reads() -> set[str] | None:
    """What Python's own start, which nobody could observe, looks up; None where that cannot be told."""
    found = {"HOME"} if getattr(sys.modules.get("site"), "ENABLE_USER_SITE", None) else set()
    for name in ("sitecustomize", "usercustomize"):
        path = getattr(sys.modules.get(name), "__file__", None)
        if path is None:
            continue
        try:
            with open(path, encoding="utf-8") as file:
                names = names_in(file.read())
        except (OSError, UnicodeError):
            return None
        if names is None:
            return None
        found |= names
    return found


def _is_mapped(*libraries: str) -> bool:
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
        return any(os.path.basename(line.rstrip()).startswith(libraries) for line in file)


def _serve(
    control: Channel, parent: int, keep: frozenset[int], ready: Message, changed: dict[str, str | None]
) -> NoReturn:
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    watched = _reaper.watch(parent)
    selector.register(watched, selectors.EVENT_READ)
    _reaper.outlive_parent()
    # A descriptor of each launch's spawner; workers get the caller's limit.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    me = os.getpid()
    itself = os.pidfd_open(me)
    control.send({**ready, "pid": me}, (itself,))
    os.close(itself)
    spawners: dict[int, int] = {}  # pidfd -> pid
    while True:
        for key, _ in selector.select():
            if key.fd in spawners:
                selector.unregister(key.fd)
                os.close(key.fd)
                os.waitpid(spawners.pop(key.fd), 0)
                # Whoever is my child and no spawner was left behind by the one that ended.
                _reaper.sweep(spare=set(spawners.values()))
            elif key.fd == watched or (received := control.receive(whole=False)) is None:
                _reaper.sweep()
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
                    if message["op"] in _QUESTIONS:
                        _answer(message["op"], Channel.adopt(descriptor), changed)
                    _spawner.be_spawner(descriptor, me, keep, changed)
                for descriptor in descriptors:
                    os.close(descriptor)
                handle = os.pidfd_open(pid)
                spawners[handle] = pid
                selector.register(handle, selectors.EVENT_READ)


def _turn_down(descriptors: list[int], why: str) -> None:
    for descriptor in descriptors:
        asker = Channel.adopt(descriptor)
        asker.send({"op": "broken", "why": why})
        asker.close()


def _answer(question: str, asker: Channel, changed: Mapping[str, str | None]) -> NoReturn:
    """Tell what torch finds on this machine, in a child that is thrown away with its device context."""
    what, find = _QUESTIONS[question]
    try:
        # The launcher gets a handle to end this process by, should a driver hang.
        handle = os.pidfd_open(os.getpid())
        told = asker.send({"op": "asking"}, (handle,))
        os.close(handle)
        received = asker.receive() if told else None
        if received is None:
            os._exit(0)  # nobody waits any more
        # Which devices are visible is up to the launch, and not to the one that this fork server was made for.
        wanted = {**received[0]["env"], **changed}
        os.environ.clear()
        os.environ.update({name: value for name, value in wanted.items() if value is not None})
        asker.send(find())
    except BaseException as error:
        asker.send({"why": f"torch cannot {what}: {type(error).__name__}: {error}"})
    finally:
        os._exit(0)


def _count_devices() -> Message:
    import torch

    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    count = torch.accelerator.device_count() if kind is not None else 0
    return {"count": count, "kind": kind.type if kind is not None else ""}


def _list_gpus() -> Message:
    from elasticlib.numa import _gpus

    return {"addresses": _gpus.addresses_here()}


_QUESTIONS = {"count": ("count the accelerators", _count_devices), "gpus": ("list the GPUs", _list_gpus)}
