"""State that each pure test must restore, so that no test depends on an earlier one."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

ENDING = 10.0
"""Seconds that a test's threads may take to end once it is over; they were told to."""


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """Waits for the threads that the test began; fails it when one goes on."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + ENDING
    begun = set(threading.enumerate()) - before
    for thread in begun:
        thread.join(max(0.0, deadline - time.monotonic()))
    assert [] == sorted(thread.name for thread in begun if thread.is_alive())
