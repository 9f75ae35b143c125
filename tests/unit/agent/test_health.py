"""The health check: what it answers, and to what."""

from __future__ import annotations

import contextlib
import errno
import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import example, given, strategies as st

from elasticlib.agent import _health
from elasticlib.elastic.agent.server.health_check_server import HealthCheckServer, create_healthcheck_server
from elasticlib.errors import ConfigError, StartError

LIMIT = 20.0
Make = Callable[..., HealthCheckServer]


@pytest.fixture
def make() -> Iterator[Make]:
    with contextlib.ExitStack() as stack:

        def new(alive: Callable[[], int], port: int = 0, timeout: int = 60) -> HealthCheckServer:
            server = create_healthcheck_server(alive, port, timeout)
            stack.callback(server.stop)
            server.start()
            return server

        yield new


def ask(server: HealthCheckServer, method: str = "GET", path: str = "/", host: str = "127.0.0.1") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(host, server.port, timeout=LIMIT)
    connection.request(method, path)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, content


@pytest.mark.parametrize("path", ["/", "/healthz", "/any?thing=1"])
def test_agent_with_recent_progress_is_alive_for_any_requested_path(make: Make, path: str) -> None:
    now = int(time.time())

    status, content = ask(make(lambda: now), path=path)

    assert (200, {"alive": True, "last_progress": now, "timeout": 60}) == (status, json.loads(content))


def test_an_agent_without_recent_progress_is_not(make: Make) -> None:
    status, content = ask(make(lambda: int(time.time()) - 61))

    assert (503, False) == (status, json.loads(content)["alive"])


def test_callback_that_raises_does_not_count_as_alive(make: Make) -> None:
    def raises() -> int:
        raise KeyError("x")

    status, content = ask(make(raises))

    assert (503, "KeyError: 'x'") == (status, json.loads(content)["error"])


def test_head_is_answered_without_a_body_and_other_methods_are_refused(make: Make) -> None:
    server = make(lambda: int(time.time()))

    assert ((200, b""), 501) == (ask(server, "HEAD"), ask(server, "POST")[0])


def test_silent_client_does_not_delay_answers_to_other_clients(make: Make) -> None:
    server = make(lambda: int(time.time()))

    with socket.create_connection(("127.0.0.1", server.port)):
        assert 200 == ask(server)[0]


def test_a_port_in_use_is_an_os_error(make: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(OSError):
        make(lambda: 0, other.getsockname()[1])


@pytest.mark.parametrize("port", [-1, 65536, "8080", 1.5, True])
def test_invalid_port_is_refused(port: Any) -> None:
    with pytest.raises(ConfigError, match=r"port=.* must be a whole number from 0"):
        HealthCheckServer(lambda: 0, port, 60)


def test_after_the_stop_nobody_listens_and_the_server_may_be_started_again(make: Make) -> None:
    server = make(lambda: int(time.time()))
    server.stop()
    server.stop()
    with pytest.raises(ConnectionError):
        ask(server)

    server.start()

    assert 200 == ask(server)[0]


def test_the_callback_is_at_hand() -> None:
    def alive() -> int:
        return 3

    assert alive is HealthCheckServer(alive, 0, 1).alive_callback


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_without_a_free_descriptor_it_waits_before_it_accepts_again(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The one who asked stays in the queue, so the listener is readable all the time."""
    waits: list[tuple[list[Any], float | None]] = []

    class Full:
        def accept(self) -> Any:
            raise OSError(number, "too many open files")

        def fileno(self) -> int:
            return 3

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    listener: Any = Full()

    def wait(sources: list[Any], timeout: float | None) -> set[int]:
        waits.append((sources, timeout))
        return {7} if len(waits) > 1 else {3}  # the stop comes while it waits

    monkeypatch.setattr(_health, "wait_readable", wait)
    server = HealthCheckServer(lambda: 0, 0, 60)
    server._serve(listener, 7)

    (_, patient), (pause, length), *_ = waits
    assert (None, [7]) == (patient, pause)
    assert length is not None and 0.1 <= length <= 1


@pytest.fixture
def crowd() -> Iterator[list[socket.socket]]:
    """Connections that say nothing."""
    some: list[socket.socket] = []
    yield some
    for each in some:
        each.close()


def join(crowd: list[socket.socket], server: HealthCheckServer, count: int) -> None:
    for _ in range(count):
        crowd.append(socket.create_connection(("127.0.0.1", server.port), LIMIT))
        crowd[-1].sendall(b"GET / HT")


def test_silent_crowd_holds_few_descriptors_and_blocks_no_answer(make: Make, crowd: list[socket.socket]) -> None:
    server = make(lambda: int(time.time()))
    before = len(os.listdir("/proc/self/fd"))
    join(crowd, server, 100)

    assert 200 == ask(server)[0]
    # One more may be answered, or let in, just now.
    assert before + len(crowd) + _health._ROOM + 1 >= len(os.listdir("/proc/self/fd"))
    assert b"" == crowd[0].recv(1)  # who has taken longest makes room


def test_a_client_has_a_limit_for_its_whole_question_however_it_drips(
    make: Make, crowd: list[socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_health, "_REQUEST_LIMIT", 0.3)
    server, began = make(lambda: int(time.time())), time.monotonic()
    join(crowd, server, 1)
    crowd[0].settimeout(0.02)

    with pytest.raises(OSError):  # it is hung up on
        while time.monotonic() < began + LIMIT:
            crowd[0].sendall(b"x")
            with contextlib.suppress(TimeoutError):
                if not crowd[0].recv(1):
                    raise ConnectionError
    assert 0.2 < time.monotonic() - began < LIMIT / 2


def test_a_question_in_two_parts_is_answered_once_it_is_whole(make: Make, crowd: list[socket.socket]) -> None:
    join(crowd, make(lambda: int(time.time())), 1)

    crowd[0].sendall(b"TP/1.1\r\nHost: x\r\n\r\n")

    assert crowd[0].recv(65536).startswith(b"HTTP/1.0 200 OK\r\n")


def test_without_a_thread_it_does_not_start_or_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    server = HealthCheckServer(lambda: 0, 0, 60)

    with pytest.raises(StartError):
        server.start()
    with pytest.raises(ConnectionError):
        ask(server)


def test_a_callback_that_hangs_does_not_keep_the_server_from_being_stopped(
    make: Make, crowd: list[socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_health, "_TIMEOUT", 0.01)
    called, done = threading.Event(), threading.Event()

    def hangs() -> int:
        called.set()
        done.wait(LIMIT)
        return 0

    server = make(hangs)
    join(crowd, server, 1)
    crowd[0].sendall(b"TP/1.0\r\n\r\n")
    assert called.wait(LIMIT)

    server.stop()

    done.set()


@given(st.binary())
@example(b"\r\n\r\n")
@example(b"GET / HTTP/1.1\n\n")
@example(b"x" * 20000)
def test_any_request_bytes_get_one_answer_or_none_while_incomplete(request: bytes) -> None:
    answers = [_health._page(given, lambda: (200, {})) for given in (request, request + b"\r\n\r\n")]

    assert answers[1] is not None
    assert all(each is None or each.startswith(b"HTTP/1.0 ") for each in answers)
