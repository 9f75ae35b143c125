"""What a test leaves to the next one is named, each kind of it; what goes, or is a library's, is not."""

from __future__ import annotations

import decimal
import gc
import io
import locale
import logging
import multiprocessing
import os
import resource
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from unittest import mock

import numpy
import pytest
import torch

from elasticlib.testing.ranks import _state

Dirt = Callable[[ExitStack], object]


def _thread(undo: ExitStack) -> None:
    over = threading.Event()
    thread = threading.Thread(target=over.wait, name="of a test")
    thread.start()
    undo.callback(thread.join)
    undo.callback(over.set)


def _variable(undo: ExitStack) -> None:
    patch = undo.enter_context(pytest.MonkeyPatch.context())
    patch.setenv("OF_A_TEST", "1")


def _removed_variable(undo: ExitStack) -> None:
    patch = undo.enter_context(pytest.MonkeyPatch.context())
    patch.delenv("PATH")


def _folder(undo: ExitStack) -> None:
    undo.callback(os.chdir, os.getcwd())
    os.chdir("/")


def _path(undo: ExitStack) -> None:
    sys.path.insert(0, "/of/a/test")
    undo.callback(sys.path.remove, "/of/a/test")


def _pipe(undo: ExitStack) -> None:
    for each in os.pipe():
        undo.callback(os.close, each)


def _handler(undo: ExitStack) -> None:
    undo.callback(signal.signal, signal.SIGUSR1, signal.signal(signal.SIGUSR1, signal.SIG_IGN))


def _root_logger(undo: ExitStack) -> None:
    handler = logging.NullHandler()
    logging.root.addHandler(handler)
    undo.callback(logging.root.removeHandler, handler)


def _logger(undo: ExitStack) -> None:
    logger = logging.getLogger("of.a.test")
    logger.setLevel(logging.ERROR)
    undo.callback(logger.setLevel, logging.NOTSET)


def _stdout(undo: ExitStack) -> None:
    undo.callback(setattr, sys, "stdout", sys.stdout)
    sys.stdout = io.StringIO()


def _dtype(undo: ExitStack) -> None:
    undo.callback(torch.set_default_dtype, torch.get_default_dtype())
    torch.set_default_dtype(torch.float64)


def _device(undo: ExitStack) -> None:
    undo.callback(torch.set_default_device, None)
    torch.set_default_device("meta")


def _deterministic(undo: ExitStack) -> None:
    undo.callback(torch.use_deterministic_algorithms, False)
    torch.use_deterministic_algorithms(True)


def _anomaly(undo: ExitStack) -> None:
    undo.callback(torch.autograd.set_detect_anomaly, False)
    torch.autograd.set_detect_anomaly(True)


def _threads(undo: ExitStack) -> None:
    undo.callback(torch.set_num_threads, torch.get_num_threads())
    torch.set_num_threads(torch.get_num_threads() + 1)


def _umask(undo: ExitStack) -> None:
    undo.callback(os.umask, os.umask(0o077))


def _limit(undo: ExitStack) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    undo.callback(resource.setrlimit, resource.RLIMIT_CORE, (soft, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (1000 if soft != 1000 else 2000, hard))


def _signal_mask(undo: ExitStack) -> None:
    former = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    undo.callback(signal.pthread_sigmask, signal.SIG_SETMASK, former)


def _timer(undo: ExitStack) -> None:
    signal.setitimer(signal.ITIMER_REAL, 1000)
    undo.callback(signal.setitimer, signal.ITIMER_REAL, 0)


def _affinity(undo: ExitStack) -> None:
    former = os.sched_getaffinity(0)
    undo.callback(os.sched_setaffinity, 0, former)
    os.sched_setaffinity(0, [max(former)])


def _numpy_errors(undo: ExitStack) -> None:
    former = numpy.seterr(over="raise")
    undo.callback(lambda: numpy.seterr(**former))


def _numpy_print(undo: ExitStack) -> None:
    former = numpy.get_printoptions()
    undo.callback(lambda: numpy.set_printoptions(**former))
    numpy.set_printoptions(precision=3)


def _denormals(undo: ExitStack) -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormal numbers")
    undo.callback(torch.set_flush_denormal, False)


def _module_hook(undo: ExitStack) -> None:
    undo.callback(torch.nn.modules.module.register_module_forward_hook(lambda *_: None).remove)


def _start_method(undo: ExitStack) -> None:
    former = multiprocessing.get_start_method(allow_none=True)
    undo.callback(multiprocessing.set_start_method, former, force=True)
    multiprocessing.set_start_method("spawn" if former != "spawn" else "fork", force=True)


def _decimal(undo: ExitStack) -> None:
    undo.callback(setattr, decimal.getcontext(), "prec", decimal.getcontext().prec)
    decimal.getcontext().prec = 5


def _method(undo: ExitStack) -> None:
    undo.callback(setattr, torch.nn.Linear, "forward", torch.nn.Linear.forward)
    torch.nn.Linear.forward = lambda self, value: value  # type: ignore[method-assign]


def _mocked(undo: ExitStack) -> None:
    undo.enter_context(mock.patch("torch.distributed.all_reduce"))


def _locale(undo: ExitStack) -> None:
    undo.callback(locale.setlocale, locale.LC_CTYPE, locale.setlocale(locale.LC_CTYPE, None))
    locale.setlocale(locale.LC_CTYPE, "C" if locale.setlocale(locale.LC_CTYPE, None) != "C" else "C.UTF-8")


def _filter(undo: ExitStack) -> None:
    undo.enter_context(warnings.catch_warnings())
    warnings.simplefilter("ignore", category=BytesWarning)


def _profile(undo: ExitStack) -> None:
    undo.callback(sys.setprofile, sys.getprofile())
    sys.setprofile(lambda *_: None)


def _garbage(undo: ExitStack) -> None:
    undo.callback(gc.set_threshold, *gc.get_threshold())
    gc.set_threshold(12345)


def _recursion(undo: ExitStack) -> None:
    undo.callback(sys.setrecursionlimit, sys.getrecursionlimit())
    sys.setrecursionlimit(sys.getrecursionlimit() + 1)


def _excepthook(undo: ExitStack) -> None:
    undo.callback(setattr, sys, "excepthook", sys.excepthook)
    sys.excepthook = lambda *_: None


def _sockets(undo: ExitStack) -> None:
    undo.callback(socket.setdefaulttimeout, socket.getdefaulttimeout())
    socket.setdefaulttimeout(3)


KINDS: dict[str, tuple[Dirt, str]] = {
    "thread": (_thread, "left 1 thread (of a test)"),
    "variable": (_variable, "changed the environment: OF_A_TEST = '1'"),
    "removed variable": (_removed_variable, "changed the environment: PATH is gone"),
    "folder": (_folder, "changed folder: "),
    "path": (_path, "changed sys.path"),
    "file": (lambda undo: undo.enter_context(open(__file__)), f"left 1 open descriptor ({__file__[:80]})"),
    "socket": (lambda undo: undo.enter_context(socket.socket()), "left 1 open descriptor (socket:["),
    "pipe": (_pipe, "left 2 open descriptors (pipe:["),
    "handler": (_handler, "changed the handler of SIGUSR1"),
    "root logger": (_root_logger, "changed the root logger"),
    "logger": (_logger, "changed the logger of.a.test"),
    "stdout": (_stdout, "replaced sys.stdout"),
    "dtype": (_dtype, "changed torch's default dtype: torch.float32 is now torch.float64"),
    "device": (_device, "changed torch's default device: cpu is now meta"),
    "gradients": (lambda undo: undo.enter_context(torch.no_grad()), "changed torch's gradient mode: True is now False"),
    "deterministic": (_deterministic, "changed torch's deterministic algorithms: (False, False) is now (True, False)"),
    "anomaly": (_anomaly, "changed torch's anomaly mode: False is now True"),
    "threads": (_threads, "changed torch's number of threads: "),
    "umask": (_umask, "changed umask: 0o22 is now 0o77"),
    "limit": (_limit, "changed resource limits: RLIMIT_CORE from ("),
    "signal mask": (_signal_mask, "changed blocked signals: [] is now ['SIGUSR2']"),
    "timer": (_timer, "changed running timers: [] is now ['ITIMER_REAL']"),
    "affinity": (_affinity, "changed CPU affinity: ["),
    "numpy's errors": (_numpy_errors, "changed numpy's handling of errors: over from warn to raise"),
    "numpy's output": (_numpy_print, "changed numpy's print options: precision from 8 to 3"),
    "denormals": (_denormals, "changed flushing of denormal numbers: False is now True"),
    "hook of modules": (_module_hook, "changed torch's hooks for all modules: _global_forward_hooks from 0 to 1"),
    "start method": (_start_method, "changed multiprocessing's start method: "),
    "decimal": (_decimal, "changed decimal context: prec from 28 to 5"),
    "method": (_method, "replaced torch.nn.modules.linear.Linear.forward"),
    "mocked function": (_mocked, "replaced torch.distributed.all_reduce"),
    "locale": (_locale, "changed locale: "),
    "warnings filter": (_filter, "changed the warnings filters"),
    "profile function": (_profile, "changed profile function: None is now <function "),
    "garbage collection": (_garbage, "changed garbage collection: (True, ("),
    "recursion": (_recursion, "changed recursion limit: "),
    "excepthook": (_excepthook, "changed sys.excepthook: None is now <function "),
    "socket timeout": (_sockets, "changed socket's default timeout: None is now 3.0"),
    "autocast": (lambda undo: undo.enter_context(torch.autocast("cpu")), "changed autocast: (False, False) is now "),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_named_and_forgotten_once_it_is_undone(kind: str) -> None:
    dirty, words = KINDS[kind]
    with ExitStack() as undo:
        dirty(undo)  # what it imports is there from now on
    before = _state.look()

    with ExitStack() as undo:
        dirty(undo)
        found = _state.differences(before, _state.look())
    after = _state.differences(before, _state.look())

    assert [each[: len(words)] for each in found] == [words]
    assert after == ()


def test_what_differs_around_an_import_is_not_the_tests() -> None:
    before = _state.look()
    with ExitStack() as undo:
        _variable(undo)
        _pipe(undo)
        earlier = _state.look()
        _path(undo)
        _logger(undo)
        later = _state.look()
        found = _state.differences(_state.taken_over(before, earlier, later), _state.look())

    assert [each.partition(":")[0] for each in found] == ["changed the environment", "left 2 open descriptors (pipe"]


def test_what_torch_tells_counts_from_where_torch_is_known() -> None:
    with_torch = _state.look()
    without = {name: value for name, value in with_torch.items() if "torch" not in name and "auto" not in name}

    assert _state.differences(without, with_torch) == ()
    assert _state.taken_over(without, without, with_torch) == with_torch
