"""Programs that fork while another of their threads is at something: the child can do it, too."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator

import cloudpickle
import pytest

from elasticlib.events import _destinations
from elasticlib.rendezvous.handlers import _registry
from elasticlib.workers import _packing

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.2)]

LIMIT = 20


@contextlib.contextmanager
def held_by_another_thread(block: contextlib.AbstractContextManager[object]) -> Iterator[None]:
    there, done = threading.Event(), threading.Event()

    def hold() -> None:
        with block:
            there.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    there.wait()
    try:
        yield
    finally:
        done.set()
        thread.join()


def succeeds_in_a_fork(check: Callable[[], bool]) -> bool:
    """Return whether *check* holds in a fork of this process, which is killed if it hangs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads, which this is about
        pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(LIMIT)
        status = 1
        try:
            status = 0 if check() else 1
        finally:
            os._exit(status)
    return os.waitpid(pid, 0)[1] == 0


def test_a_function_can_be_packed() -> None:
    module = types.ModuleType("of_this_test")

    def can_pack() -> bool:
        left = cloudpickle.list_registry_pickle_by_value()
        with _packing._sent_by_value(module):
            return not left and module.__name__ in cloudpickle.list_registry_pickle_by_value()

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, module.__name__, module)
        with held_by_another_thread(_packing._sent_by_value(module)):
            assert succeeds_in_a_fork(can_pack)
        assert not cloudpickle.list_registry_pickle_by_value()


def test_events_can_go_elsewhere() -> None:
    def can_turn() -> bool:
        with _destinations._turn:
            return True

    with held_by_another_thread(_destinations._turn):
        assert succeeds_in_a_fork(can_turn)


def test_handlers_can_be_made() -> None:
    registry = _registry.rendezvous_handler_registry
    with held_by_another_thread(registry._lock):
        assert succeeds_in_a_fork(lambda: "c10d" in registry.names())
