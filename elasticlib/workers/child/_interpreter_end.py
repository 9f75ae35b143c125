"""
The end of a worker's program: an interpreter's steps at its end, in a process that shares its
imports with others.

Threads are joined and exit handlers run. Then `__main__` and all modules that the program loaded,
or that `preload` names, are cleared in the interpreter's own order. So buffers of unclosed files
are written and finalizers run. Torch and its dependencies stay unchanged, because finalizing them
in eight workers takes half a second.

The process leaves by ``_exit``, a fresh interpreter too. In the interpreter's own end, a native
thread that returns to Python, as gloo's does to release a tensor, aborts the process.

Rules of this file:

* Nothing is lost with exit status 0. Nothing changes the status once it is final.
* Each step of the cleanup is guarded as a whole, and checks objects of the program only by their
  type.
* Daemon threads end first, by an exception as soon as they return to Python, where the
  interpreter would stop them.
* A process that was forked from the caller does not touch the caller's objects. Files opened
  since are closed; other finalizers do not run.
"""

from __future__ import annotations

import _io
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
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

from elasticlib._clock import monotonic
from elasticlib.stacks import CALLERS, users_part
from elasticlib.workers.child import _loaded
from elasticlib.workers.child._announcing import ProgramOutcome
from elasticlib.workers.child.program import _main

_LOCK_LIMIT = 1.0
"""Seconds to wait for a file's lock, as in the interpreter."""
_READERS_LIMIT = 1.0
"""Seconds for threads that read this process's own output to process its end."""
_READERS_LOOK = 2
"""Milliseconds between two looks at these threads."""

_MAIN = ("__main__", "__mp_main__")
_LEFT_ALONE = frozenset({"torch", "functorch", "torchgen", "numpy", "triton"})
"""Packages whose modules are never cleared: their objects hold nothing that can be lost."""
_NO_LAYER = -1
_exit = os._exit
_inherited: dict[str, int] = {}
"""Modules that existed before the program, by their names and identities."""
_MOST_MOVED = 50
"""Modules of the fork server in a row after which the search for later ones stops."""
_named: set[str] = set()
"""
Modules that `preload` names, with their imports: they end with each worker, like its own modules.
"""
_from_caller = False


def inherit(named: Iterable[str] = ()) -> None:
    """
    Note the modules that stay: all except the *named*.

    This is called in the fork server, or in a fresh worker before its program.
    """
    _named.update(named)
    # Not in forked workers: a look at an object changes its count, and so copies its page.
    for name, module in sys.modules.items():
        if name not in _named:
            _inherited[name] = id(module)


def begin_from_caller() -> None:
    """Note, in a process that was forked from the caller, that all objects belong to the caller."""
    global _from_caller
    _from_caller = True
    # Later objects can then be distinguished, and memory pages stay shared.
    gc.freeze()


def finish(status: int, announce: Callable[[ProgramOutcome, int], object]) -> NoReturn:
    """
    End a worker as an interpreter ends, with *status*: a number from 0 on, or ``-n`` for signal
    ``n``.

    *announce* reports two stages: only finalizers of the user's code are left to run, and the
    status is final.
    """
    # As in the interpreter, threads end before exit handlers run.
    _join_threads()
    _guarded(atexit._run_exitfuncs, atexit)
    announce(ProgramOutcome.CLOSING, status)
    status = flush_streams(status)
    _guarded(_let_go_of_signals)
    _guarded(_let_readers_finish)
    _guarded(_end_daemon_threads)
    if _named:
        # Named modules end with the worker: their files and finalizers must be found.
        gc.unfreeze()

    # Before finalizers run: one may hang, or crash the process.
    _guarded(_close_files if _from_caller else _flush_files)
    announce(ProgramOutcome.FINAL, status)
    if not _from_caller:
        _guarded(_clear_modules)
    flush_streams(status)
    _guarded(_flush_native_streams)
    if status < 0:
        # The interpreter ends by the signal itself, so that its parent sees it.
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)

    _exit(status & 0xFF)


def _guarded(step: Callable[[], object], by: object = None) -> None:
    """Run a *step* of the end; show its failure, and continue."""
    try:
        step()
    except BaseException as error:
        _show_ignored(error, by or step)


def _join_threads() -> None:
    try:
        threading._shutdown()  # type: ignore[attr-defined]
    except AssertionError:
        # Forked by a thread that `threading` did not make: it has no main thread to end.
        for thread in threading.enumerate():
            if not thread.daemon and thread is not threading.current_thread():
                thread.join()
    except BaseException as error:
        _show_ignored(error, threading)


def _show_ignored(error: BaseException, by: object) -> None:
    """Show *error*, as the interpreter shows an exception that cannot be handled any more."""
    with contextlib.suppress(BaseException):
        # It may have no stream left to show it on.
        print(f"Exception ignored in: {by!r}", file=sys.stderr)
        traceback.print_exception(error.with_traceback(users_part(error)))


def _let_go_of_signals() -> None:
    """Reset signals that have handlers: one that raises now would cut the end short."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)


def flush_lines() -> None:
    """
    Write the text of stdout and stderr that has no line end yet.

    This comes before the end of the user's code is announced: afterwards the process may be killed
    while it waits for other ranks and threads. A failure is raised, as that of a ``print``.
    """
    # Not of a stream that the user's code put in place of these: it has a buffer of its own.
    for stream in (sys.__stdout__, sys.__stderr__):
        # The user's code may have closed or detached it.
        with contextlib.suppress(ValueError):
            if isinstance(stream, io.TextIOWrapper):
                stream.flush()


def flush_streams(status: int, *, shows: bool = True) -> int:
    """
    Flush stdout and stderr; return the exit status, which becomes 120 if output is lost.

    Without *shows* it does not show why: the end of the worker shows that, after the traceback.
    """
    for name in ("stdout", "stderr"):
        stream = vars(sys).get(name)
        try:
            _flush(stream)
        except BaseException as error:
            # The interpreter's status in that case.
            status = status or 120
            if shows and name == "stdout":
                _show_ignored(error, stream)

    return status


def _flush(stream: Any) -> None:
    if stream is None or getattr(stream, "closed", False):
        return
    stream.flush()


def _flush_native_streams() -> None:
    """
    Flush C's streams, as ``exit`` does; it takes their locks, which a thread may hold without
    end.
    """
    flush = threading.Thread(target=ctypes.CDLL(None).fflush, args=(None,), daemon=True)
    # Without other threads no lock can be held.
    if _has_one_thread():
        flush.run()
        return
    flush.start()
    flush.join(_LOCK_LIMIT)


def _has_one_thread() -> bool:
    try:
        return len(os.listdir("/proc/self/task")) == 1
    except OSError:
        # The program has no free descriptor, or has changed its root.
        return False


def _end_daemon_threads() -> None:
    """
    End each thread as soon as it returns to Python, without a message.

    The objects that it needs are about to be cleared. If it then calls ``os._exit``, that does
    not end the process: the interpreter would have stopped the thread before.
    """
    mine = threading.get_ident()
    threading.excepthook = lambda _: None

    def exit_of_main_thread_alone(status: int) -> NoReturn:
        if threading.get_ident() == mine:
            _exit(status)
        # Forever: the main thread ends the process.
        threading.Event().wait()
        raise AssertionError("nobody sets this event")

    os._exit = exit_of_main_thread_alone
    for thread in sys._current_frames():
        if thread != mine:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(SystemExit))


def _clear_modules() -> None:
    """Clear the modules that were loaded after the fork, as ``Py_FinalizeEx`` clears all."""
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, name):
            setattr(sys, name, None)

    # As in the interpreter: streams that replaced these are released here.
    sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__
    _main.forget()
    # While all is alive, as in the interpreter: objects are put in an order in which owners are
    # finalized before the objects that they use, such as a pool of processes before its pipes.
    gc.collect()
    own = _own_modules()
    found = [weakref.ref(each) for each in map(sys.modules.get, own) if _loaded.is_module(each)]
    for name in own:
        sys.modules[name] = None  # type: ignore[assignment]
    gc.collect()

    # Only modules with remaining references are left: the latest ones are cleared first.
    for reference in reversed(found):
        module = reference()
        if module is not None:
            _clear(_loaded.names_of_module(module))
        del module

    gc.collect()


def _own_modules() -> list[str]:
    """Return the names of the modules that the program loaded, in their order."""
    found = list[str]()
    met = 0

    # The latest ones are met first.
    for name in reversed(sys.modules):
        if type(name) is not str:
            continue
        if _inherited.get(name) == id(sys.modules[name]):
            met += 1
            # Named modules may stand anywhere among those of the fork server.
            if met == _MOST_MOVED and not _named:
                break
        elif _is_cleared(name):
            found.append(name)

    main = [name for name in _MAIN if name in sys.modules]
    return [*main, *reversed(found)]


def _is_cleared(name: str) -> bool:
    """
    Return True for a module of the program that is cleared in its turn; ``__main__`` comes first.
    """
    package = name.partition(".")[0]
    return name not in _MAIN and package not in _LEFT_ALONE


def _clear(names: dict[str, Any]) -> None:
    """
    Set the variables of a module to None: those with one underscore first, as the interpreter
    does.
    """
    for private in (True, False):
        for name in list(names):
            if type(name) is not str or name == "__builtins__":
                continue
            is_private = name[:1] == "_" and name[1:2] != "_"
            if is_private == private:
                names[name] = None


def _own_files(kinds: Callable[[type], bool]) -> Iterator[Any]:
    """
    Yield the files of these *kinds* that were opened since the program began.

    Text first, then files that wrap others, then the buffers below.
    """
    kept = {id(stream) for stream in (sys.__stdin__, sys.__stdout__, sys.__stderr__)}
    layers: list[list[Any]] = [[], [], []]
    for layer, file in _objects(kinds):
        if id(file) not in kept and _takes_data(file):
            layers[layer].append(file)
    for files in layers:
        yield from files


def _objects(kinds: Callable[[type], bool]) -> Iterator[tuple[int, Any]]:
    """Yield the objects of these *kinds* that may have data in a buffer, with their `_layer`."""
    known: dict[int, int] = {}
    for each in gc.get_objects():
        kind = type(each)
        # By identity: a metaclass may make classes that cannot be hashed.
        layer = known.get(id(kind))
        if layer is None:
            layer = known[id(kind)] = _layer(kind) if kinds(kind) else _NO_LAYER
        if layer != _NO_LAYER:
            yield layer, each


def _layer(kind: type) -> int:
    """
    Return the place of files of a *kind* in the order of writing; `_NO_LAYER` for those without a
    buffer.
    """
    if kind is io.FileIO or kind is io.BufferedReader:
        return _NO_LAYER
    if kind is io.TextIOWrapper:
        return 0
    is_lowest = _is_buffer(kind) or kind is io.BufferedRWPair
    return 2 if is_lowest else 1


def _is_file(kind: type) -> bool:
    # The base in C: `io.IOBase` is an abstract class, which asks all its subclasses and
    # registered classes.
    return issubclass(kind, _io._IOBase)


def _is_plain_file(kind: type) -> bool:
    return kind is io.TextIOWrapper or _is_buffer(kind)


def _is_buffer(kind: type) -> bool:
    return kind is io.BufferedWriter or kind is io.BufferedRandom


def _takes_data(file: Any) -> bool:
    try:
        # This call takes no lock: a thread in a read may hold it.
        return bool(file.writable())
    except BaseException:
        # It is closed, or was never initialized.
        return False


def _flush_files() -> None:
    _write(_own_files(_is_plain_file), "flush")


def _close_files() -> None:
    """Close all files except stdout and stderr, which are flushed."""
    kept = {id(stream) for stream in (sys.stdin, sys.stdout, sys.stderr)}
    for stream in (sys.__stdin__, sys.__stdout__, sys.__stderr__):
        kept.add(id(getattr(stream, "buffer", None)))
    files = list(_own_files(_is_file))
    _write([each for each in files if id(each) in kept], "flush")
    _write([each for each in files if id(each) not in kept], "close")


def _write(files: Iterable[Any], method: str) -> None:
    """
    Call this *method*, which flushes or closes, of all *files*; skip one whose lock another
    thread holds.
    """
    left = collections.deque(files)

    def work() -> None:
        while left:
            with contextlib.suppress(BaseException):
                getattr(left.popleft(), method)()

    # Without other threads no lock can be held.
    if len(sys._current_frames()) == 1:
        work()
    while left:
        worker = threading.Thread(target=work, daemon=True)
        worker.start()
        is_stuck = False
        while worker.is_alive() and not is_stuck:
            count = len(left)
            worker.join(_LOCK_LIMIT)
            # It keeps its current file, so that no finalizer will wait for the same.
            is_stuck = len(left) == count and _waits_for_a_lock(worker)


def _waits_for_a_lock(thread: threading.Thread) -> bool:
    try:
        with open(f"/proc/self/task/{thread.native_id}/wchan", encoding="ascii") as file:
            return file.read().startswith("futex")
    except OSError:
        return False


# Threads that read the output of this process itself.


def _let_readers_finish() -> None:
    """
    Give threads that read this process's own stdout or stderr time for its last lines.

    Return when the pipe is empty and all other threads wait again.
    """
    if len(sys._current_frames()) < 2:
        return

    pipes = [number for number in (1, 2) if _read_here(number)]
    if not pipes:
        return

    deadline = monotonic() + _READERS_LIMIT
    before: object = None
    while monotonic() < deadline:
        now = _idle_threads()
        # A thread may have read its line, and not yet begun to wait: two looks must agree.
        is_settled = now is not None and now == before
        if is_settled and not any(map(_unread, pipes)):
            return
        before = now
        select.poll().poll(_READERS_LOOK)


def _read_here(number: int) -> bool:
    """Return True if descriptor *number* is a pipe whose other end this process holds, too."""
    try:
        facts = os.fstat(number)
        if not stat.S_ISFIFO(facts.st_mode):
            return False
        for other in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):
                # The descriptor of the listing itself is closed by now.
                if _is_reading_end(other, facts):
                    return True
    except OSError:
        pass

    return False


def _is_reading_end(descriptor: int, pipe: os.stat_result) -> bool:
    if not os.path.samestat(pipe, os.fstat(descriptor)):
        return False
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    return flags & os.O_ACCMODE == os.O_RDONLY


def _unread(number: int) -> int:
    """Return the number of unread bytes in the pipe behind descriptor *number*."""
    count = array.array("i", [0])
    with contextlib.suppress(OSError):
        fcntl.ioctl(number, termios.FIONREAD, count)
    return count[0]


def _idle_threads() -> object:
    """Return the number of waits of each other thread so far; None while one of them runs."""
    found = {}
    mine = str(threading.get_native_id())
    for thread in os.listdir("/proc/self/task"):
        if thread == mine:
            continue
        with contextlib.suppress(OSError):
            # It has ended.
            facts = _status_of(thread)
            if facts["State"].startswith("R"):
                return None
            found[thread] = facts["voluntary_ctxt_switches"]

    return found


def _status_of(thread: str) -> dict[str, str]:
    with open(f"/proc/self/task/{thread}/status", encoding="ascii") as file:
        return dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)


CALLERS.add(__file__)
