"""Interrupts of the program at each place where Python lets one in: nothing is left behind, and nothing is stuck."""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest

import elasticlib
from elasticlib import ChildFailedError, Job, LaunchConfig, Pool, elastic_launch, jobs, pool
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.sampled(0.15),
    # Python drops what is raised in a destructor.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

OWN = os.path.dirname(elasticlib.__file__)
LIMIT = 60.0
PLACES = 40
"""At how many places a test interrupts."""


class Interrupt:
    """
    A profiler that has an interrupt come at the *at*-th place within our own code; it counts them.

    A signal's handler runs as a function begins, and as a C function has returned, before anybody has what it returned.
    """

    def __init__(self, at: int = 0) -> None:
        self._at = at
        self.places = 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(OWN):
            self.places += 1
            if self.places == self._at:
                handler = signal.getsignal(signal.SIGINT)
                assert callable(handler)
                handler(signal.SIGINT, frame)

    def during(self, call: Callable[[], object]) -> BaseException | None:
        """Return the error that *call* raises for the interrupt, or None."""
        sys.setprofile(self)
        try:
            call()
        except KeyboardInterrupt as error:
            return error
        finally:
            sys.setprofile(None)
        return None


def places_of(call: Callable[[], object], most: int = PLACES) -> list[int]:
    """Some of the places in *call*, spread over it."""
    counted = Interrupt()
    counted.during(call)
    step = max(1, counted.places // most)
    return list(range(1, counted.places + 1, step))


def open_files() -> collections.Counter[str]:
    """Count the open files of this program by kind: memory, sockets, events."""
    gc.collect()
    found = collections.Counter[str]()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the folder's own
        found[target.partition(":[")[0] if target.startswith(("socket", "pipe", "anon")) else target] += 1
    return collections.Counter({name: count for name, count in found.items() if not name.endswith("stdout.log")})


def length(value: Any) -> int:
    return len(value)


def test_an_interrupted_call_leaves_nothing_open_and_the_pool_works_on() -> None:
    data = np.zeros(300_000)
    with pool(1, group=None, preload=()) as made:
        made.run(length, data)
        before = open_files()
        for at in places_of(lambda: made.run(length, data)):
            shown = Interrupt(at).during(lambda: made.run(length, data))

            assert made.run(length, data) == {0: 300_000}, at  # though a notebook keeps what it has shown
            del shown
            wait_until(lambda: open_files() <= before, LIMIT)  # a thread may be looking at a process just now
    wait_until(lambda: jobs() == [], LIMIT)


def test_an_interrupt_while_workers_are_replaced_leaves_none() -> None:
    def spoilt_call(made: Pool) -> None:
        with contextlib.suppress(ChildFailedError):
            made.run(os._exit, 1)
        made.run(length, "abc")

    with pool(1, group=None, preload=()) as made:
        spoilt_call(made)
        before = open_files()
        for at in places_of(lambda: spoilt_call(made), PLACES // 4):
            shown = Interrupt(at).during(lambda: spoilt_call(made))

            assert made.run(length, "abc") == {0: 3}, at
            del shown
            wait_until(lambda: len(jobs()) == 1 and open_files() <= before, LIMIT)


def test_an_interrupt_while_a_pool_is_made_leaves_no_workers() -> None:
    def make() -> None:
        pool(1, group=None, preload=()).close()

    make()
    before = open_files()
    for at in places_of(make):
        Interrupt(at).during(make)

        wait_until(lambda: jobs() == [] and open_files() <= before, LIMIT)


def test_interrupted_launch_leaves_no_job() -> None:
    launch = elastic_launch(LaunchConfig(nproc_per_node=1, preload=()), length)
    launch("abc")
    before = open_files()
    for at in places_of(lambda: launch("abc")):
        Interrupt(at).during(lambda: launch("abc"))

        assert jobs() == [], at
        assert open_files() <= before, at


def test_a_start_that_is_interrupted_leaves_no_job() -> None:
    config = LaunchConfig(nproc_per_node=1, preload=())
    launch = elastic_launch(config, time.sleep)
    launch.start(0).result()
    before = open_files()

    started: list[Job] = []

    def start() -> None:
        started.append(launch.start(3600))

    def stop() -> None:
        while started:
            started.pop().stop(0)

    for at in [*places_of(start), sys.maxsize]:
        stop()
        Interrupt(at).during(start)
        stop()

        wait_until(lambda: jobs() == [] and open_files() <= before, LIMIT)


def test_interrupted_stop_can_be_requested_again() -> None:
    launch = elastic_launch(LaunchConfig(nproc_per_node=1, preload=()), time.sleep)
    launch.start(0).result()
    before = open_files()
    for at in places_of(functools.partial(launch.start(3600).stop, 0), PLACES // 4):
        job = launch.start(3600)
        Interrupt(at).during(functools.partial(job.stop, 0))
        job.stop(0)

        assert job.done(), at
        del job
        wait_until(lambda: jobs() == [] and open_files() <= before, LIMIT)
