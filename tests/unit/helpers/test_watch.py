"""Helpers as real processes: what is seen of them, and what is done."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

from elasticlib import processes, records
from elasticlib.helpers import LOOK, Helper, HelperWatch
from elasticlib.helpers._liveness import SLEEPS
from elasticlib.helpers._watch import _state
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
        while _state(self.process.pid)[0] != SLEEPS:
            os.sched_yield()
        self.now = 0.0
        self.said: list[records.Record] = []
        self.asked: list[int] = []
        self.replaced: list[str] = []
        self.helper = Helper(
            "spawner", Process(self.process.pid, processes.handle_of(self.process.pid)), self.asked.append
        )
        self.watch = HelperWatch(self.said.append, lambda: self.now)

    def looks(self, count: int, workers: tuple[int, ...] = (), answers: bool = True) -> None:
        for _ in range(count):
            self.now += LOOK
            if answers:
                self.helper.answered = self.helper.asked
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
    assert [records.HelperWoken(f"the spawner process (pid {watched.process.pid})", 6.0)] == watched.said


def test_a_helper_that_does_not_answer_is_replaced_and_the_reason_names_it(watched: Watched) -> None:
    watched.looks(20, answers=False)

    why = f"the spawner process (pid {watched.process.pid}) did not answer for 30 s and was killed"
    assert [why] == watched.replaced
    assert [records.HelperReplaced(why)] == watched.said


def test_a_helper_that_answers_is_asked_at_each_look_and_nothing_is_done(watched: Watched) -> None:
    watched.looks(20)

    assert list(range(1, 21)) == watched.asked
    assert ([], []) == (watched.said, watched.replaced)


def test_a_helper_that_nobody_waits_for_is_not_replaced(watched: Watched) -> None:
    watched.helper.is_needed = False

    watched.looks(20, answers=False)

    assert [] == watched.replaced


def test_a_helper_that_was_stopped_with_a_worker_is_left_alone(watched: Watched) -> None:
    other = Watched()
    watched.stop()
    other.stop()
    try:
        watched.looks(20, workers=(other.process.pid,))
    finally:
        other.close()

    assert ([], []) == (watched.said, watched.replaced)


def test_a_helper_that_has_ended_is_not_looked_at(watched: Watched) -> None:
    watched.process.kill()
    watched.process.wait()

    watched.looks(20, answers=False)

    assert ([], [], []) == (watched.asked, watched.said, watched.replaced)
