"""The signals that a program handles, whether Python knows the handler or not."""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from elasticlib.processes import catches, has_default_action, ignores

SIGNUM = signal.SIGUSR2


@pytest.fixture(autouse=True)
def default() -> Iterator[None]:
    before = signal.signal(SIGNUM, signal.SIG_DFL)
    yield
    faulthandler.unregister(SIGNUM)
    signal.signal(SIGNUM, before)


@pytest.mark.parametrize(
    ("prepare", "found"),
    [
        (lambda: None, (False, False, True)),
        (lambda: signal.signal(SIGNUM, lambda *_: None), (True, False, False)),
        (lambda: signal.signal(SIGNUM, signal.SIG_IGN), (False, True, False)),
        (lambda: faulthandler.register(SIGNUM), (True, False, False)),
    ],
)
def test_handlers_of_python_and_of_c_count(prepare: Callable[[], Any], found: tuple[bool, bool, bool]) -> None:
    prepare()

    assert found == (catches(os.getpid(), SIGNUM), ignores(os.getpid(), SIGNUM), has_default_action(SIGNUM))


def test_ended_process_handles_no_signals() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)

    assert (False, False) == (catches(child, SIGNUM), ignores(child, SIGNUM))
