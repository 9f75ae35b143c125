"""What a test leaves to the next one is named, each kind of it; what goes, or is a library's, is not."""

from __future__ import annotations

import io
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack

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
