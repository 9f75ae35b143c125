"""
The end of a worker's program: what an interpreter does at its end, in a process that shares its imports with others.

Threads are joined and exit handlers run; then `__main__` and all modules that were loaded after the fork, or that
`preload` names, are cleared in the interpreter's own order, so that what is buffered in an unclosed file gets written
and finalizers run. Torch and what came with it stay as they are: to finalize it in eight workers takes half a second.

Rules of this file: nothing is lost with exit status 0; daemon threads are ended first, by an exception as soon as they
come back to Python (the interpreter stops them there); in a process that was forked from the caller nothing is touched
that the caller made: of what was made since, files are closed, other finalizers do not run.
"""

from __future__ import annotations

import array
import atexit
import collections
import contextlib
import ctypes
import fcntl
import gc
import io
import os
import select
import signal
import stat
import sys
import termios
import threading
import time
import traceback
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

_LOCK_LIMIT = 1.0
"""Seconds that a file's lock is waited for, as in the interpreter."""
_READERS_LIMIT = 1.0
"""Seconds that threads which read this process' own output get to take in its end."""
_READERS_LOOK = 2
"""Milliseconds"""

_MAIN = ("__main__", "__mp_main__")
_exit = os._exit
_inherited: dict[str, int] = {}
"""The modules that the fork server imported, by their names and identities."""
_MOST_MOVED = 50
"""Modules of the fork server in a row after which no later ones are looked for."""
_named: set[str] = set()
"""Modules that came with those of `preload` that were asked for by name: they end with each worker, as its own do."""
_from_caller = False


def inherit(named: Iterable[str]) -> None:
    """In the fork server: note the modules that its workers share, all but those *named*."""
    _named.update(named)
    # Not in the workers: who looks at an object changes its count, and so copies its page.
    _inherited.update((name, id(module)) for name, module in sys.modules.items() if name not in _named)


def begin_from_caller() -> None:
    """In a process that was forked from the caller: note that all that is there is the caller's."""
    global _from_caller
    _from_caller = True
    gc.freeze()  # what is made from here on can be told apart, and pages stay shared


def finish(status: int, closing: Callable[[], object] = bool) -> NoReturn:
    """
    End a forked worker as an interpreter ends, with *status*: a number from 0 on, or ``-n`` for signal ``n``.

    *closing* is called when nothing of the user's is left to run but finalizers.
    """
    _join_threads()
    try:
        atexit._run_exitfuncs()
    except BaseException as error:
        _told(error, atexit)
    closing()
    status = _flush_streams(status)
    _let_go_of_signals()
    _let_readers_finish()
    _end_daemon_threads()
    if _named:
        gc.unfreeze()  # files and finalizers of these are found like any others
    if _from_caller:
        _close_files()
    else:
        _flush_files()  # first of all: a finalizer may hang, or crash the process
        _clear_modules()
    status = _flush_streams(status)
    _flush_native_streams()
    if status < 0:  # the interpreter ends by the signal itself, so that its parent can tell
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    _exit(status & 0xFF)


def _join_threads() -> None:
    try:
        threading._shutdown()  # type: ignore[attr-defined]
    except AssertionError:  # forked by a thread that `threading` did not make: it has no main thread to end
        for thread in threading.enumerate():
            if not thread.daemon and thread is not threading.current_thread():
                thread.join()
    except BaseException as error:
        _told(error, threading)


def _told(error: BaseException, by: object) -> None:
    """Say of *error*, as the interpreter does, that nobody was left to handle it."""
    print(f"Exception ignored in: {by!r}", file=sys.stderr)
    traceback.print_exception(error)


def _let_go_of_signals() -> None:
    """Have signals do what they do by themselves: a handler that raises now would cut the end short."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)


def leave(status: int) -> NoReturn:
    """End a worker that is a fresh interpreter, whose own end does all that has to be done."""
    if status >= 0:
        raise SystemExit(status)
    sys.excepthook = lambda *_: None  # it was told already
    raise KeyboardInterrupt


def _flush_streams(status: int) -> int:
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not getattr(stream, "closed", False):
                stream.flush()
        except BaseException as error:
            status = status or 120  # as the interpreter does when its output is lost
            if stream is sys.stdout:
                with contextlib.suppress(Exception):
                    _told(error, stream)
    return status


def _flush_native_streams() -> None:
    """What ``exit`` does to C's streams; but it takes their locks, and a thread may hold one for ever."""
    flush = threading.Thread(target=ctypes.CDLL(None).fflush, args=(None,), daemon=True)
    if len(os.listdir("/proc/self/task")) == 1:
        flush.run()
        return
    flush.start()
    flush.join(_LOCK_LIMIT)


def _end_daemon_threads() -> None:
    """
    Have each thread that comes back to Python end there, without a word: what it needs is about to be cleared.

    What it does about that is no end of the process: the interpreter would have stopped it before.
    """
    mine = threading.get_ident()
    threading.excepthook = lambda _: None

    def exit_of_main_thread_alone(status: int) -> NoReturn:
        if threading.get_ident() == mine:
            _exit(status)
        threading.Event().wait()  # for ever: nobody else ends it
        raise AssertionError("nobody sets this event")

    os._exit = exit_of_main_thread_alone
    for thread in sys._current_frames():
        if thread != mine:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(SystemExit))


def _clear_modules() -> None:
    """What ``Py_FinalizeEx`` does to all modules, done to those that came after the fork."""
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, name):
            setattr(sys, name, None)
    sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__
    own = _own_modules()
    found = [weakref.ref(each) for each in map(sys.modules.get, own) if isinstance(each, types.ModuleType)]
    for name in own:
        sys.modules[name] = None  # type: ignore[assignment]
    gc.collect()
    for reference in reversed(found):
        module = reference()
        if module is not None:
            _clear(module.__dict__)
        del module
    gc.collect()


def _own_modules() -> list[str]:
    """Names of the modules that came after the fork, in their order; the last ones to come are the first to be met."""
    found, met = list[str](), 0
    for name in reversed(sys.modules):
        if _inherited.get(name) == id(sys.modules[name]):
            met += 1
            if met == _MOST_MOVED and not _named:
                break
        elif name not in _MAIN:
            found.append(name)
    return [*(name for name in _MAIN if name in sys.modules), *reversed(found)]


def _clear(names: dict[str, Any]) -> None:
    for private in (True, False):
        for name in list(names):
            is_private = name[:1] == "_" and name[1:2] != "_"
            if is_private == private and name != "__builtins__":
                names[name] = None


def _own_files() -> Iterator[Any]:
    """Files that were opened since the program began: text first, then what wraps others, then the buffers below."""
    kept = {id(stream) for stream in (sys.__stdin__, sys.__stdout__, sys.__stderr__)}
    layers: dict[int, list[Any]] = {0: [], 1: [], 2: []}
    known: dict[type, int] = {}
    for each in gc.get_objects():
        kind = type(each)
        layer = known.get(kind)
        if layer is None:
            layer = known[kind] = _layer(kind)
        if layer >= 0 and id(each) not in kept and _takes_data(each):
            layers[layer].append(each)
    for layer in sorted(layers):
        yield from layers[layer]


def _layer(kind: type) -> int:
    """The order in which files of a *kind* are written; -1 for what is none, or has nothing in a buffer."""
    if not issubclass(kind, io.IOBase) or kind in (io.FileIO, io.BufferedReader):
        return -1
    if kind is io.TextIOWrapper:
        return 0
    return 2 if kind in (io.BufferedWriter, io.BufferedRandom, io.BufferedRWPair) else 1


def _takes_data(file: Any) -> bool:
    try:
        return bool(file.writable())  # not of one whose lock a thread may hold that sits in its read
    except Exception:
        return False  # closed, or half made


def _flush_files() -> None:
    buffered = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
    _write([each.flush for each in _own_files() if type(each) in buffered])


def _close_files() -> None:
    kept = {id(stream) for stream in (sys.stdin, sys.stdout, sys.stderr)}
    kept |= {id(getattr(each, "buffer", None)) for each in (sys.__stdin__, sys.__stdout__, sys.__stderr__)}
    _write([each.flush if id(each) in kept else each.close for each in _own_files()])


def _write(files: Iterable[Callable[[], object]]) -> None:
    """Call all of these, which flush or close; past one whose lock another thread holds."""
    left = collections.deque(files)

    def work() -> None:
        while left:
            with contextlib.suppress(Exception):
                left.popleft()()

    if len(sys._current_frames()) == 1:
        work()
    while left:
        worker = threading.Thread(target=work, daemon=True)
        worker.start()
        stuck = False
        while worker.is_alive() and not stuck:
            count = len(left)
            worker.join(_LOCK_LIMIT)
            # It keeps what it is at, so that no finalizer will wait for the same.
            stuck = len(left) == count and _waits_for_a_lock(worker)


def _waits_for_a_lock(thread: threading.Thread) -> bool:
    try:
        with open(f"/proc/self/task/{thread.native_id}/wchan", encoding="ascii") as file:
            return file.read().startswith("futex")
    except OSError:
        return False


# Threads that read what this very process writes.


def _let_readers_finish() -> None:
    """
    Give threads that read this process' own stdout or stderr the time to take in its last lines.

    Until the pipe is empty and all other threads wait for something again.
    """
    if len(sys._current_frames()) < 2:
        return
    pipes = [number for number in (1, 2) if _read_here(number)]
    deadline = time.monotonic() + _READERS_LIMIT
    before: object = None
    while pipes and time.monotonic() < deadline:
        now = _idle_threads()
        if now is not None and now == before and not any(map(_unread, pipes)):
            return
        before = now
        select.poll().poll(_READERS_LOOK)


def _read_here(number: int) -> bool:
    """Whether descriptor *number* is a pipe whose other end this process holds too."""
    try:
        facts = os.fstat(number)
        if not stat.S_ISFIFO(facts.st_mode):
            return False
        for other in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):
                same = os.path.samestat(facts, os.fstat(other))
                if same and fcntl.fcntl(other, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
                    return True
    except OSError:
        pass
    return False


def _unread(number: int) -> int:
    count = array.array("i", [0])
    with contextlib.suppress(OSError):
        fcntl.ioctl(number, termios.FIONREAD, count)
    return count[0]


def _idle_threads() -> object:
    """How often each other thread has waited so far, if all of them wait now; None while one runs."""
    found = {}
    mine = str(threading.get_native_id())
    for thread in os.listdir("/proc/self/task"):
        if thread == mine:
            continue
        with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/status", encoding="ascii") as file:
            facts = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
            if facts["State"].startswith("R"):
                return None
            found[thread] = facts["voluntary_ctxt_switches"]
    return found
