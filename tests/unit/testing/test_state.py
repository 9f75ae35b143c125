"""State that a test leaves behind: each kind is named, unless it is undone or a library's."""

from __future__ import annotations

import decimal
import functools
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
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias
from unittest import mock

import numpy
import pytest
import torch

from elasticlib.testing.ranks import _process_state

Change: TypeAlias = Callable[[], AbstractContextManager[object]]
"""Changes the state of this process within the block."""


def chosen(choose: Callable[[Any], object], former: Callable[[], Any], value: Any) -> Change:
    """Return a change by a function that sets one value."""

    @contextmanager
    def change() -> Iterator[None]:
        before = former()
        choose(value)
        yield
        choose(before)

    return change


def attribute(owner: object, name: str, value: object) -> Change:
    return lambda: mock.patch.object(owner, name, value)


@contextmanager
def thread() -> Iterator[None]:
    over = threading.Event()
    running = threading.Thread(target=over.wait, name="of a test")
    running.start()
    yield
    over.set()
    running.join()


@contextmanager
def removed_variable() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PATH")
        yield


@contextmanager
def pipe() -> Iterator[None]:
    ends = os.pipe()
    yield
    for each in ends:
        os.close(each)


@contextmanager
def root_logger() -> Iterator[None]:
    handler = logging.NullHandler()
    logging.root.addHandler(handler)
    yield
    logging.root.removeHandler(handler)


@contextmanager
def signal_mask() -> Iterator[None]:
    former = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, former)


@contextmanager
def denormals() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormal numbers")
    yield
    torch.set_flush_denormal(False)


@contextmanager
def module_hook() -> Iterator[None]:
    hook = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    yield
    hook.remove()


@contextmanager
def warnings_filter() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", category=BytesWarning)
        yield


def start_method() -> AbstractContextManager[object]:
    former = multiprocessing.get_start_method(allow_none=True)
    return chosen(
        lambda method: multiprocessing.set_start_method(method, force=True),
        lambda: former,
        "spawn" if former != "spawn" else "fork",
    )()


def core_limit() -> AbstractContextManager[object]:
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    return chosen(
        lambda limit: resource.setrlimit(resource.RLIMIT_CORE, (limit, hard)),
        lambda: soft,
        1000 if soft != 1000 else 2000,
    )()


def character_type() -> AbstractContextManager[object]:
    former = locale.setlocale(locale.LC_CTYPE, None)
    other = "C" if former != "C" else "C.UTF-8"
    return chosen(lambda name: locale.setlocale(locale.LC_CTYPE, name), lambda: former, other)()


VARIABLE = functools.partial(mock.patch.dict, os.environ, OF_A_TEST="1")
PATH = attribute(sys, "path", ["/of/a/test", *sys.path])
LOGGER = chosen(logging.getLogger("of.a.test").setLevel, lambda: logging.NOTSET, logging.ERROR)

KINDS: dict[str, tuple[Change, str]] = {
    "thread": (thread, "left 1 thread (of a test)"),
    "variable": (VARIABLE, "changed the environment: OF_A_TEST = '1'"),
    "removed variable": (removed_variable, "changed the environment: PATH is gone"),
    "folder": (chosen(os.chdir, os.getcwd, "/"), "changed folder: "),
    "path": (PATH, "changed sys.path"),
    "file": (lambda: open(__file__), f"left 1 open descriptor ({__file__[:80]})"),
    "socket": (socket.socket, "left 1 open descriptor (socket:["),
    "pipe": (pipe, "left 2 open descriptors (pipe:["),
    "handler": (
        chosen(functools.partial(signal.signal, signal.SIGUSR1), lambda: signal.SIG_DFL, signal.SIG_IGN),
        "changed the handler of SIGUSR1",
    ),
    "root logger": (root_logger, "changed the root logger"),
    "logger": (LOGGER, "changed the logger of.a.test"),
    "stdout": (attribute(sys, "stdout", io.StringIO()), "replaced sys.stdout"),
    "dtype": (
        chosen(torch.set_default_dtype, torch.get_default_dtype, torch.float64),
        "changed torch's default dtype: torch.float32 is now torch.float64",
    ),
    "device": (
        chosen(torch.set_default_device, lambda: None, "meta"),
        "changed torch's default device: cpu is now meta",
    ),
    "gradients": (torch.no_grad, "changed torch's gradient mode: True is now False"),
    "deterministic": (
        chosen(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled, True),
        "changed torch's deterministic algorithms: (False, False) is now (True, False)",
    ),
    "anomaly": (
        chosen(torch.autograd.set_detect_anomaly, torch.is_anomaly_enabled, True),
        "changed torch's anomaly mode: False is now True",
    ),
    "threads": (
        chosen(torch.set_num_threads, torch.get_num_threads, torch.get_num_threads() + 1),
        "changed torch's number of threads: ",
    ),
    "umask": (chosen(os.umask, lambda: 0o022, 0o077), "changed umask: 0o22 is now 0o77"),
    "limit": (core_limit, "changed resource limits: RLIMIT_CORE from ("),
    "signal mask": (signal_mask, "changed blocked signals: [] is now ['SIGUSR2']"),
    "timer": (
        chosen(functools.partial(signal.setitimer, signal.ITIMER_REAL), lambda: 0, 1000),
        "changed running timers: [] is now ['ITIMER_REAL']",
    ),
    "affinity": (
        chosen(
            functools.partial(os.sched_setaffinity, 0),
            lambda: os.sched_getaffinity(0),
            [max(os.sched_getaffinity(0))],
        ),
        "changed CPU affinity: [",
    ),
    "numpy's errors": (
        lambda: numpy.errstate(over="raise"),
        "changed numpy's handling of errors: over from warn to raise",
    ),
    "numpy's output": (
        lambda: numpy.printoptions(precision=3),
        "changed numpy's print options: precision from 8 to 3",
    ),
    "denormals": (denormals, "changed flushing of denormal numbers: False is now True"),
    "hook of modules": (
        module_hook,
        "changed torch's hooks for all modules: _global_forward_hooks from 0 to 1",
    ),
    "start method": (start_method, "changed multiprocessing's start method: "),
    "decimal": (
        lambda: decimal.localcontext(decimal.Context(prec=5)),
        "changed decimal context: prec from 28 to 5",
    ),
    "method": (
        attribute(torch.nn.Linear, "forward", lambda self, value: value),
        "replaced torch.nn.modules.linear.Linear.forward",
    ),
    "mocked function": (
        lambda: mock.patch("torch.distributed.all_reduce"),
        "replaced torch.distributed.all_reduce",
    ),
    "locale": (character_type, "changed locale: "),
    "warnings filter": (warnings_filter, "changed the warnings filters"),
    "profile function": (
        chosen(sys.setprofile, sys.getprofile, lambda *_: None),
        "changed profile function: None is now <function ",
    ),
    "garbage collection": (
        chosen(lambda values: gc.set_threshold(*values), gc.get_threshold, (12345, 10, 10)),
        "changed garbage collection: (True, (",
    ),
    "recursion": (
        chosen(sys.setrecursionlimit, sys.getrecursionlimit, 1234),
        "changed recursion limit: ",
    ),
    "excepthook": (
        attribute(sys, "excepthook", lambda *_: None),
        "changed sys.excepthook: None is now <function ",
    ),
    "socket timeout": (
        chosen(socket.setdefaulttimeout, socket.getdefaulttimeout, 3),
        "changed socket's default timeout: None is now 3.0",
    ),
    "autocast": (lambda: torch.autocast("cpu"), "changed autocast: (False, False) is now "),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_named_and_forgotten_once_it_is_undone(kind: str) -> None:
    change, prefix = KINDS[kind]
    with change():
        pass  # what it imports is there from now on
    before = _process_state.look()

    with change():
        found = _process_state.differences(before, _process_state.look())
    after = _process_state.differences(before, _process_state.look())

    assert [each[: len(prefix)] for each in found] == [prefix]
    assert after == ()


def test_changes_made_by_an_import_are_not_attributed_to_the_test() -> None:
    before = _process_state.look()
    with VARIABLE(), pipe():
        earlier = _process_state.look()
        with PATH(), LOGGER():
            later = _process_state.look()
            found = _process_state.differences(_process_state.taken_over(before, earlier, later), _process_state.look())

    assert [each.partition(":")[0] for each in found] == ["changed the environment", "left 2 open descriptors (pipe"]


def test_torch_state_counts_from_the_moment_torch_is_loaded() -> None:
    with_torch = _process_state.look()
    without = {name: value for name, value in with_torch.items() if "torch" not in name and "auto" not in name}

    assert _process_state.differences(without, with_torch) == ()
    assert _process_state.taken_over(without, without, with_torch) == with_torch
