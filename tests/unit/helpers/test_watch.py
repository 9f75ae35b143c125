"""Helpers as real processes: what is seen of them, and what is done."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

from elasticlib import processes, records
from elasticlib.helpers import LOOK, Helper, HelperWatch
from elasticlib.helpers._helper_liveness import SLEEPS
from elasticlib.processes._programs import Process

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.3)]


class Watched:
    """A process that sleeps, under a watch whose clock the test moves."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(b"up\n")
        self.process.stdin.flush()
        self.process.stdout.readline()
        while (processes.process_facts(self.process.pid) or [b""])[0] != SLEEPS.encode():
            os.sched_yield()
        self.now = 0.0
        self.reported: list[records.Record] = []
        self.queries: list[int] = []
        self.replaced: list[str] = []
        self.helper = Helper(
            "spawner", Process(self.process.pid, processes.handle_of(self.process.pid)), self.queries.append
        )
        self.watch = HelperWatch(self.reported.append, lambda: self.now)

    def looks(self, count: int, workers: tuple[int, ...] = (), answers: bool = True) -> None:
        for _ in range(count):
            self.now += LOOK
            if answers:
                self.helper.answered = self.helper.questions
            self.watch.tend(lambda: [self.helper], workers, lambda helper, why: self.replaced.append(why))

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def close(self) -> None:
        self.helper.process.close()
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def watched() -> Iterator[Watched]:
    watched = Watched()
    yield watched
    watched.close()


def test_a_stopped_helper_is_continued_and_reported_with_its_name_and_pid(watched: Watched) -> None:
    watched.looks(2)
    watched.stop()

    watched.looks(4)

    os.waitid(os.P_PID, watched.process.pid, os.WCONTINUED)
    assert [records.HelperWoken(f"the spawner process (pid {watched.process.pid})", 6.0)] == watched.reported


@pytest.mark.parametrize("is_needed", [True, False])
def test_a_helper_that_does_not_answer_is_replaced_where_it_is_needed(is_needed: bool, watched: Watched) -> None:
    watched.helper.is_needed = is_needed

    watched.looks(20, answers=False)

    why = f"the spawner process (pid {watched.process.pid}) did not answer for 30 s and was killed"
    assert watched.replaced == ([why] if is_needed else [])
    assert watched.reported == ([records.HelperReplaced(why)] if is_needed else [])


def test_answering_helper_is_queried_at_each_look_and_left_alone(watched: Watched) -> None:
    watched.looks(20)

    assert list(range(1, 21)) == watched.queries
    assert ([], []) == (watched.reported, watched.replaced)


def test_a_helper_that_was_stopped_with_a_worker_is_left_alone(watched: Watched) -> None:
    other = Watched()
    watched.stop()
    other.stop()
    try:
        watched.looks(20, workers=(other.process.pid,))
    finally:
        other.close()

    assert ([], []) == (watched.reported, watched.replaced)


def test_a_helper_that_has_ended_is_not_looked_at(watched: Watched) -> None:
    watched.process.kill()
    watched.process.wait()

    watched.looks(20, answers=False)

    assert ([], [], []) == (watched.queries, watched.reported, watched.replaced)
