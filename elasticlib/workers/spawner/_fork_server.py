"""
The fork server: a process that did the imports once, from which every launch's spawner is forked.

It is a program of its own, in a session of its own, so it never holds the caller's threads, CUDA
context or ``__main__``. It imports the modules of ``preload``, refuses those that would not
survive a fork, and freezes its garbage so that children share the pages. Then it only forks: a
child for each request. Each request gets an answer, and the end of a child never ends it. It ends
with the launcher.

Rules of this file: it replaces no function of Python and adds no hook, so the imported modules
keep nothing of elasticlib. Workers see only the modules of an allowed import (`_allowed`), not
its other settings. All effects of a module that was named in ``preload`` stay in the worker, to
its end.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib
import os
import re
import resource
import selectors
import signal
import sys
import threading
import traceback
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from json import dumps, loads
from typing import Any, NoReturn

from elasticlib import processes
from elasticlib.preload import BY_VALUE, TORCH, is_allowed
from elasticlib.processes import (
    FORK_SERVER_FD,
    KEPT_FD,
    Channel,
    Message,
    adopt_orphans,
    close_each,
    descendants,
    kill_descendants,
    living_parent,
    out_of_removed_folder,
    outlive_parent,
    settle_signals,
    shared_imports,
    start_error,
    time_of_change,
)
from elasticlib.stacks import stack_text
from elasticlib.workers.child import _child, _interpreter_end, _own_modules, _randomness, _threads
from elasticlib.workers.spawner import _fork_worker as fork_worker, _kernel_facts, _spawner

RANK_VARIABLES = frozenset({"RANK", "LOCAL_RANK", "WORLD_SIZE"})
_DEVICE_FILES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/render", "/dev/accel", "/dev/davinci", "/dev/habanalabs")
STACK_AFTER, NATIVE_AFTER = 9.0, 9.8
"""Seconds after which an import writes where it is: itself, or, where no Python runs, by the fault handler."""
_NEVER = 1e6
_SHELLS_OWN = frozenset({"_", "SHLVL", "PWD", "OLDPWD"})
# The second form must not match `in os.environ.keys()`, whose use of the names is unknown.
_LOOKUP = re.compile(
    r"""(?:\bos\.environb?(?:\.(?:get|pop|setdefault)\s*\(|\s*\[)|\bos\.getenvb?\s*\()\s*b?(["'])(?P<name>\w+)\1"""
    r"""|(["'])(?P<sought>\w+)\3\s+(?:not\s+)?in\s+os\.environb?\b(?!\.)"""
)
_ANY_USE = re.compile(r"environ|getenv|exec|eval|__import__|importlib|runpy")


def main(at_start: Collection[str]) -> NoReturn:
    """
    Be the fork server; ``sys.argv[1]`` is JSON with the modules to ``preload`` and their search
    ``path``.

    *at_start* are the modules that the interpreter itself had imported.
    """
    _own_modules.note_start(at_start)
    parent = os.getppid()
    settings = loads(sys.argv.pop())
    if "base" in settings:
        sys.path[:] = settings["base"]
        fork_worker.start_all_fresh()
    elif hooks_run():
        _start_without_hooks(settings, parent)

    settle_signals()
    mine = {0, 1, 2, FORK_SERVER_FD, KEPT_FD}
    control = Channel.adopt(FORK_SERVER_FD)

    # Programs that workers execute must not inherit these two.
    os.set_inheritable(FORK_SERVER_FD, False)
    os.set_inheritable(KEPT_FD, False)
    _child.base_path[:] = sys.path

    # The reaper has the launcher's variables; a wrapper of the interpreter may have changed them
    # since.
    given, before = _first_environment(parent), dict(os.environ)

    # Before the imports: a package that is installed meanwhile counts as a change.
    folders = _times_of_change(_installed_folders())
    with shared_imports():
        sys.path[:] = [*settings["path"], *(folder for folder in sys.path if folder not in settings["path"])]
        with out_of_removed_folder():
            named = _preload(settings["preload"], settings["path"], control)
        sys.path[:] = _child.base_path
        # Modules hold the numbers of files that their imports have opened: workers keep these
        # files.
        keep = frozenset(number for _, number in open_files() if number not in mine)
        _interpreter_end.inherit(named)
        _threads.note_blas_libraries()

    adopt_orphans()
    wrapped = _differences(given, _first_environment("self"))

    # Python itself sets it if the locale is C.
    wrapped.pop("LC_CTYPE", None)
    read_at_start = _site_reads()
    ready = {
        "op": "ready",
        "names": sorted(read_at_start or ()),
        "named": bool(named),
        "files": {**folders, **_times_of_change(_files_of(named))},
        "intel_openmp": _is_mapped("libiomp", "libomp"),
        "whole": wrapped != {} or read_at_start is None,
        "left_out": settings.get("left_out", []),
    }
    changed = _differences(given or before, dict(os.environ))
    for name in RANK_VARIABLES:
        changed.pop(name, None)
    _RequestLoop(control, parent, keep, changed, processes.SharedSessions(KEPT_FD)).serve(ready)


def _start_without_hooks(settings: Mapping[str, Any], parent: int) -> NoReturn:
    """
    Become a fork server whose interpreter runs no start hooks and imports nothing ahead, on the
    same search path.

    A hook (``sitecustomize``, a ``.pth`` file) has started a thread or opened a socket here,
    which a fork would lack or share. Workers are then new interpreters, in which the hook does so
    again.
    """
    settings = {**settings, "preload": [], "left_out": settings["preload"], "base": sys.path}
    command = [sys.executable, "-S", *sys.orig_argv[1:-1], dumps(settings)]
    os.execve(sys.executable, command, _first_environment(parent) or dict(os.environ))


# The imports.


def _preload(modules: Sequence[str], extra_path: Sequence[str], control: Channel) -> list[str]:
    """
    Import *modules*, the allowed ones first.

    Return the names of all modules that the others have loaded.
    """
    # A launcher that is a worker itself has them: no rank belongs to its workers.
    for name in RANK_VARIABLES:
        os.environ.pop(name, None)
    folders = [each for each in extra_path if each not in _child.base_path]

    @functools.cache
    def is_hidden(top: str) -> bool:
        return bool(_own_modules.hidden_by(folders, {top}))

    def is_for_everybody(name: str) -> bool:
        return is_allowed(name) and not is_hidden(name.partition(".")[0])

    # The allowed modules come first: their settings are undone, which must not undo those of the
    # named ones.
    first = [name for name in modules if is_for_everybody(name)]
    with _randomness.noted():
        environment = dict(os.environ)
        for module in first:
            _import(module, control)
            if module == TORCH:
                _randomness.note_torch()
                with contextlib.suppress(ImportError):
                    # A module of this name in the project replaces it (`_own_modules`).
                    importlib.import_module(BY_VALUE)

        _take_back(environment)
        _child.disown_finalizers()
        before = set(sys.modules)
        for module in modules:
            if module not in first:
                _import(module, control)

    return [name for name in sys.modules if name not in before and not is_for_everybody(name)]


def _take_back(environment: Mapping[str, str]) -> None:
    """
    Undo the settings that torch's parts make for themselves, and make again when they need them.
    """
    if os.environ != environment:
        os.environ.clear()
        os.environ.update(environment)
    temporary: Any = sys.modules.get("tempfile")
    if temporary is not None:
        # Each worker must look for a folder itself: TMPDIR may differ.
        temporary.tempdir = None


def _import(module: str, control: Channel) -> None:
    stack = processes.anonymous_file("stack of an import")
    control.send({"op": "importing", "module": module}, (stack,))
    try:
        with _writing_its_place(stack):
            why = why_refused(module)
    except (Exception, SystemExit) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        why = f"its import fails with {type(error).__name__}: {error} ({last.filename}, line {last.lineno})"
    finally:
        os.close(stack)

    if why is not None:
        control.send({"op": "refused", "module": module, "why": why})
        os._exit(1)


@contextlib.contextmanager
def _writing_its_place(stack: int) -> Iterator[None]:
    """
    Write the stack of an import that takes longer than `STACK_AFTER` to *stack*, as the fault handler does.

    The import writes it itself, at a timer's signal. The fault handler's own timer reads the frames from another
    thread, without the interpreter's lock: where Python runs meanwhile, that ends the process with SIGSEGV. So it only
    stands by for native code, such as a library that is being loaded, in which the frames do not change.
    """

    def write(_: int, frame: types.FrameType | None) -> None:
        # Its thread goes on, as one of those that were there before the import.
        faulthandler.dump_traceback_later(_NEVER, file=stack)
        os.write(stack, stack_text(frame).encode(errors="backslashreplace"))

    handler = signal.signal(signal.SIGALRM, write)

    # A system call of the import goes on after the signal.
    signal.siginterrupt(signal.SIGALRM, False)
    signal.setitimer(signal.ITIMER_REAL, STACK_AFTER)
    faulthandler.dump_traceback_later(NATIVE_AFTER, file=stack)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        # A handler that the import has set is the worker's.
        if signal.getsignal(signal.SIGALRM) is write:
            signal.signal(signal.SIGALRM, handler)


# Effects of an import that a forked worker cannot use: in doubt an import has them.


def why_refused(module: str) -> str | None:
    """
    Import *module*; return the reason why a forked worker could not use it.

    None if it can.
    """
    threads, tasks = threading.active_count(), _tasks()
    with _absences() as sought:
        importlib.import_module(module)
    reads = RANK_VARIABLES & {os.fsdecode(name) for name in sought}
    if threading.active_count() > threads:
        names = ", ".join(thread.name for thread in threading.enumerate()[threads:])
        return f"its import starts a Python thread ({names}), which would be missing in the workers"

    if _has_new_native_threads(tasks):
        return "its import starts native threads, which would be missing in the workers"

    devices = {path for path, _ in open_files() if path.startswith(_DEVICE_FILES)}
    if devices:
        return f"its import opens an accelerator ({', '.join(sorted(devices))}), which cannot be used after a fork"
    if reads:
        return f"its import reads {', '.join(sorted(reads))}, which each worker has for itself"

    return None


def _has_new_native_threads(before: int) -> bool:
    """Return True if there are more threads than *before*, without those of OpenBLAS."""
    new = _tasks() - before
    if new <= 0:
        return False
    # OpenBLAS has a pool with a fork handler of its own that ends and restarts it.
    _threads.note_blas_libraries()
    of_openblas = sum(getter() - 1 for getter, _ in _threads.blas_libraries())
    return bool(_tasks() - before > of_openblas)


def hooks_run() -> bool:
    """
    Return True if the interpreter's start left threads or sockets, with which no worker can be
    forked.
    """
    own = {FORK_SERVER_FD, KEPT_FD}
    sockets = [path for path, number in open_files() if path.startswith("socket:") and number not in own]
    return _tasks() > 1 or len(sockets) > 0


class _NotedEnvironment(dict[bytes, bytes]):
    """
    The table behind ``os.environ``, which notes the names that were looked up and are not in it.
    """

    def __init__(self, content: dict[bytes, bytes]) -> None:
        super().__init__(content)
        self.sought: set[bytes] = set()

    def __missing__(self, name: bytes) -> bytes:
        self.sought.add(name)
        raise KeyError(name)


@contextlib.contextmanager
def _absences() -> Iterator[set[bytes]]:
    """
    Collect the absent variables that Python code looks up in the block; the fork server has no
    rank variables.

    Only the table with the values is replaced meanwhile. So an object that an import keeps, such
    as a method of ``os.environ``, stays Python's own.
    """
    plain = os.environ._data  # type: ignore[attr-defined]
    noting = _NotedEnvironment(plain)
    os.environ._data = os.environb._data = noting  # type: ignore[attr-defined]
    try:
        yield noting.sought
    finally:
        plain.clear()
        plain.update(noting)
        os.environ._data = os.environb._data = plain  # type: ignore[attr-defined]


def _tasks() -> int:
    return len(os.listdir("/proc/self/task"))


def open_files() -> list[tuple[str, int]]:
    """Return the paths of the files that this process has open, with their descriptors."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            found.append((os.readlink(f"/proc/self/fd/{number}"), int(number)))
        except OSError:
            # The descriptor of the listing itself is closed by now.
            continue
    return found


# What a later launch must have in common with this process.


def _installed_folders() -> list[str]:
    """Return the folders of installed packages, whose times of change show a new installation."""
    return [folder for folder in sys.path if os.path.basename(folder) in ("site-packages", "dist-packages")]


def _files_of(modules: Sequence[str]) -> list[str]:
    found = {getattr(sys.modules.get(name), "__file__", None) for name in modules}
    return sorted(each for each in found if isinstance(each, str))


def _times_of_change(paths: Sequence[str]) -> dict[str, int]:
    return {path: time_of_change(path) for path in paths}


def _first_environment(process: int | str) -> dict[str, str]:
    """Return the variables that a process was started with; empty if this user may not look."""
    try:
        with open(f"/proc/{process}/environ", "rb") as file:
            entries = [entry.split(b"=", 1) for entry in file.read().split(b"\0") if b"=" in entry]
    except OSError:
        return {}
    return {os.fsdecode(name): os.fsdecode(value) for name, value in entries}


def _differences(given: Mapping[str, str], found: Mapping[str, str]) -> dict[str, str | None]:
    """
    Return the changes by the interpreter, its wrapper or the imports: new values, None for
    removed variables.
    """
    names = [name for name in {**given, **found} if given.get(name) != found.get(name) and name not in _SHELLS_OWN]
    return {name: found.get(name) for name in names}


def _site_reads() -> set[str] | None:
    """
    Return the variables that Python's own start reads, before any of elasticlib's code; None if
    they are unknown.
    """
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


def names_in(source: str) -> set[str] | None:
    """
    Return the variables that Python code looks up, by its text; None if it may look up others.
    """
    lookups: list[Any] = list(_LOOKUP.finditer(source))
    rest = _LOOKUP.sub("", source)
    return None if _ANY_USE.search(rest) else {each["name"] or each["sought"] for each in lookups}


def _is_mapped(*libraries: str) -> bool:
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
        return any(os.path.basename(line.rstrip()).startswith(libraries) for line in file)


# The requests.


class _RequestLoop:
    """Forks a child for each request over *control*, until that or *parent* is gone."""

    def __init__(
        self,
        control: Channel,
        parent: int,
        keep: frozenset[int],
        changed: dict[str, str | None],
        outliving: processes.SharedSessions,
    ) -> None:
        self._control = control
        self._parent = parent
        self._keep = keep
        self._changed = changed
        self._selector = selectors.DefaultSelector()
        self._outliving = outliving
        """
        Detached processes of successful programs: they outlive the spawner, and an orderly end of
        the launcher.
        """
        self._watched: set[int] = set()
        """Children that are reaped at their end: those that were forked here, and detached ones."""

    def serve(self, ready: Message) -> NoReturn:
        """Send *ready* and serve requests until the end."""
        self._selector.register(self._control, selectors.EVENT_READ, self._handle_order)
        self._selector.register(living_parent(self._parent), selectors.EVENT_READ, self._end)
        outlive_parent()

        # A descriptor of each launch's spawner; workers get the caller's limit.
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        me = os.getpid()
        with processes.own_descriptors() as itself:
            self._control.send({**ready, "pid": me}, itself)
        while True:
            for key, _ in self._selector.select():
                key.data()

    def _leave(self) -> NoReturn:
        """Kill all: the launcher is gone."""
        kill_descendants()
        os._exit(0)

    def _end(self) -> NoReturn:
        """
        Kill all except the processes that outlive their launch: the launcher ends in order, or
        the reaper was lost.
        """
        kill_descendants(kept=self._outliving)
        os._exit(0)

    def _handle_order(self) -> None:
        received = self._control.receive(whole=False)
        if received is None:
            self._leave()
        message, descriptors = received
        if message["op"] == "end":
            self._end()
        elif message["op"] == "ping":
            self._control.send({"op": "pong", "number": message["number"]})
        elif message["op"] == "signal":
            # After a process has ended, another program may have its number.
            if message["pid"] in self._watched:
                os.kill(message["pid"], message["signal"])
        elif descriptors:
            # Without a free descriptor the other end is closed already, and its owner sees that.
            self._fork_for(message, descriptors)

    def _fork_for(self, message: Message, descriptors: list[int]) -> None:
        try:
            pid = os.fork()
        except OSError as error:
            # Running launches are not affected.
            _turn_down(descriptors, str(start_error("the spawner process", error)))
            return

        (descriptor,) = descriptors
        if pid == 0:
            self._let_go_of_all()
            if message["op"] in _QUESTIONS:
                _answer(message["op"], Channel.adopt(descriptor), self._changed)
            _spawner.be_spawner(
                descriptor, os.getppid(), self._outliving, self._keep, self._changed, guardian=self._parent
            )

        self._watch(pid, self._end_leftovers)
        if message["op"] in _QUESTIONS:
            os.close(descriptor)
        else:
            _spawner.report_forked(descriptor, pid)

    def _let_go_of_all(self) -> None:
        """Close the descriptors that belong to this loop alone, in a child."""
        own = [key.fd for key in self._selector.get_map().values()]
        self._selector.close()
        close_each(own)

    def _watch(self, pid: int, at_end: Callable[[], None]) -> None:
        """Reap the child *pid* at its end, then call *at_end*."""
        handle = processes.handle_of(pid)
        self._watched.add(pid)
        self._selector.register(handle, selectors.EVENT_READ, lambda: self._ended(pid, handle, at_end))

    def _ended(self, pid: int, handle: processes.Handle, at_end: Callable[[], None]) -> None:
        self._selector.unregister(handle)
        handle.close()
        os.waitpid(pid, 0)
        self._watched.remove(pid)
        self._watch_detached()
        at_end()

    def _watch_detached(self) -> None:
        """
        Watch the processes that outlive their launch and were left here by a child that ended,
        such as a shell's commands.

        Each is reaped at its end, because the program may check whether it still exists.
        """
        for pid in _kernel_facts.children(os.getpid()):
            if pid in self._outliving and pid not in self._watched:
                # Without a free descriptor it stays a zombie until this process ends.
                with contextlib.suppress(OSError):
                    self._watch(pid, self._drop_ended_sessions)

    def _end_leftovers(self) -> None:
        kill_descendants(self._watched, kept=self._outliving)

    def _drop_ended_sessions(self) -> None:
        self._outliving.drop_ended(pid for pid, _, _ in descendants(os.getpid()))


def _take_environment(given: Mapping[str, str], changed: Mapping[str, str | None]) -> None:
    """
    Set the variables of a launch, with the changes by the fork server's interpreter and imports.
    """
    wanted = {**given, **changed}
    os.environ.clear()
    os.environ.update({name: value for name, value in wanted.items() if value is not None})


def _turn_down(descriptors: list[int], why: str) -> None:
    for descriptor in descriptors:
        asker = Channel.adopt(descriptor)
        asker.send({"op": "broken", "why": why})
        asker.close()


def _answer(question: str, asker: Channel, changed: Mapping[str, str | None]) -> NoReturn:
    """Send torch's facts on this machine, from a child that ends with its device context."""
    what, find = _QUESTIONS[question]
    try:
        # The launcher gets a handle to end this process, should a driver hang.
        with processes.own_descriptors() as itself:
            was_sent = asker.send({"op": "asking"}, itself)
        received = asker.receive() if was_sent else None
        if received is None:
            # The asker is gone.
            os._exit(0)

        # The launch decides which devices are visible, not the one that this fork server was made
        # for.
        _take_environment(received[0]["env"], changed)
        # Torch's libraries cannot be loaded in a folder that was removed since the first launch.
        os.chdir("/")
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
    from elasticlib.numa import gpu_addresses_here

    return {"addresses": gpu_addresses_here()}


_QUESTIONS = {"count": ("count the accelerators", _count_devices), "gpus": ("list the GPUs", _list_gpus)}
