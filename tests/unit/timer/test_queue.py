"""Timers over a queue, and the server of any kind, with workers that are no processes."""

from __future__ import annotations

import multiprocessing
import os
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from elasticlib.errors import ConfigError
from elasticlib.timer import (
    LocalTimerClient,
    LocalTimerServer,
    MultiprocessingRequestQueue,
    RequestQueue,
    TimerRequest,
    TimerServer,
)
from elasticlib.timer._timer_table import TimerTable

LIMIT = 20.0


class Server(TimerServer):
    """Reaps by telling so; *outcomes* are what its reaping comes to, one after the other."""

    def __init__(self, requests: RequestQueue, *outcomes: bool | Exception, max_interval: float = 60) -> None:
        super().__init__(requests, max_interval)
        self.ledger: TimerTable[TimerRequest] = TimerTable()
        self.outcomes = list(outcomes)
        self.reaped: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.cleared = threading.Event()

    def register_timers(self, timer_requests: list[TimerRequest]) -> None:
        self.ledger.register(timer_requests)

    def clear_timers(self, worker_ids: set[Any]) -> None:
        self.ledger.clear(worker_ids)
        if worker_ids:
            self.cleared.set()

    def get_expired_timers(self, deadline: float) -> dict[Any, list[TimerRequest]]:
        return self.ledger.expired(deadline)

    def _reap_worker(self, worker_id: Any) -> bool:
        self.reaped.put(worker_id)
        outcome = self.outcomes.pop(0) if self.outcomes else True
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


@pytest.fixture
def pipe() -> Iterator[Any]:
    made = multiprocessing.get_context("spawn").Queue()
    yield made
    made.close()
    made.join_thread()


def test_requests_leave_the_queue_as_they_entered(pipe: Any) -> None:
    requests = MultiprocessingRequestQueue(pipe)
    client = LocalTimerClient(pipe)

    client.acquire("a", 5.0)
    client.release("a")

    assert [TimerRequest(os.getpid(), "a", 5.0), TimerRequest(os.getpid(), "a", -1)] == requests.get(2, LIMIT)
    assert (0, []) == (requests.size(), requests.get(1, 0.01))


def test_get_takes_no_more_requests_than_requested(pipe: Any) -> None:
    client, requests = LocalTimerClient(pipe), MultiprocessingRequestQueue(pipe)
    for number in range(3):
        client.acquire(str(number), 5.0)

    assert ["0", "1"] == [request.scope_id for request in requests.get(2, LIMIT)]


def test_a_programs_own_kind_of_queue_will_do() -> None:
    requests = MultiprocessingRequestQueue(own := queue.Queue[TimerRequest]())
    own.put(TimerRequest(1, "a", 5.0))

    assert [TimerRequest(1, "a", 5.0)] == requests.get(2, 0.01)


def test_an_overdue_worker_is_reaped_in_spite_of_a_long_sleep(pipe: Any) -> None:
    server = Server(MultiprocessingRequestQueue(pipe), max_interval=60)
    server.start()

    pipe.put(TimerRequest("worker", "a", time.time() + 0.05))
    reaped = server.reaped.get(timeout=LIMIT)
    server.cleared.wait(LIMIT)
    server.stop()

    assert ("worker", set()) == (reaped, server.ledger.workers())


def test_invalid_request_does_not_affect_other_timers(pipe: Any, caplog: pytest.LogCaptureFixture) -> None:
    server = Server(MultiprocessingRequestQueue(pipe))
    for deadline in (10**400, "5", float("nan"), None):
        pipe.put(TimerRequest("other", "a", deadline))  # type: ignore[arg-type]
    pipe.put("no request")
    pipe.put(TimerRequest("worker", "a", 1.0))
    server.start()

    assert "worker" == server.reaped.get(timeout=LIMIT)
    server.cleared.wait(LIMIT)
    server.stop()
    assert "is not a timer request" in caplog.text
    assert "failed" not in caplog.text


def test_a_worker_that_could_not_be_reaped_is_tried_again(pipe: Any) -> None:
    server = Server(MultiprocessingRequestQueue(pipe), False, True, max_interval=0.01)
    server.start()

    pipe.put(TimerRequest("worker", "a", 1.0))

    assert ["worker", "worker"] == [server.reaped.get(timeout=LIMIT), server.reaped.get(timeout=LIMIT)]
    server.cleared.wait(LIMIT)
    server.stop()
    assert set() == server.ledger.workers()


def test_a_reaping_that_raises_counts_as_done(pipe: Any, caplog: pytest.LogCaptureFixture) -> None:
    server = Server(MultiprocessingRequestQueue(pipe), KeyError("x"), max_interval=0.01)
    server.start()

    pipe.put(TimerRequest("worker", "a", 1.0))
    server.cleared.wait(LIMIT)
    server.stop()

    assert set() == server.ledger.workers()
    assert "its timers are dropped" in caplog.text


def test_a_server_that_sleeps_stops_at_once(pipe: Any) -> None:
    server = LocalTimerServer(pipe, max_interval=60)
    server.start()
    begun = time.monotonic()

    server.stop()

    assert time.monotonic() - begun < 5


def test_a_server_that_was_stopped_can_be_started_again(pipe: Any) -> None:
    server = Server(MultiprocessingRequestQueue(pipe), max_interval=60)
    server.start()
    server.stop()

    server.start()
    pipe.put(TimerRequest("worker", "a", time.time() + 0.05))
    reaped = server.reaped.get(timeout=LIMIT)
    server.stop()

    assert "worker" == reaped


def test_after_a_new_start_a_server_sleeps_again(pipe: Any) -> None:
    """The wake-up for the earlier stop is used up."""
    requests = MultiprocessingRequestQueue(pipe)
    requests.interrupt()
    requests.get(1, LIMIT)
    begun = time.monotonic()

    requests.get(1, 0.05)

    assert time.monotonic() - begun >= 0.05


def test_second_start_has_no_effect_and_is_logged(pipe: Any, caplog: pytest.LogCaptureFixture) -> None:
    server = LocalTimerServer(pipe)
    server.start()
    first = server._thread

    server.start()

    assert first is server._thread
    assert "LocalTimerServer is already running" in caplog.text
    server.stop()


def test_an_interval_of_0_is_the_shortest_there_is(pipe: Any) -> None:
    server = LocalTimerServer(pipe, max_interval=0)
    server.start()

    server.stop()


@pytest.mark.parametrize("interval", [-1, float("inf"), "1", True])
def test_invalid_interval_is_refused(pipe: Any, interval: Any) -> None:
    with pytest.raises(ConfigError, match=r"max_interval=.* must be a finite number of seconds, 0 or more"):
        LocalTimerServer(pipe, max_interval=interval)


def test_the_servers_own_process_and_one_that_has_ended_count_as_reaped(pipe: Any) -> None:
    server = LocalTimerServer(pipe)
    server.register_timers([TimerRequest(os.getpid(), "a", 1.0), TimerRequest(2**22 + 1, "a", 1.0)])

    assert (True, True) == (server._reap_worker(os.getpid()), server._reap_worker(2**22 + 1))
