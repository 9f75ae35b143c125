"""The control socket of a launch: who gets an answer, and what a request does."""

from __future__ import annotations

import logging
import os
import resource
import signal
import socket
from collections.abc import Iterator
from contextlib import closing
from json import dumps

import pytest

from elasticlib.job import RunningLaunch, ask_to_stop, controlled, running_launches, wait_for_end
from elasticlib.job._control import _addresses, _connect
from elasticlib.workers import Inbox, StopRequest
from tests.waiting import wait_until

RUN_ID = f"job of {os.getpid()}"


@pytest.fixture
def inbox() -> Inbox:
    return Inbox()


def launch() -> RunningLaunch:
    (found,) = [each for each in running_launches()[0] if each.run_id == RUN_ID]
    return found


def is_running() -> bool:
    return RUN_ID in [each.run_id for each in running_launches()[0]]


@pytest.fixture
def present(inbox: Inbox) -> Iterator[RunningLaunch]:
    with controlled(RUN_ID, "train.py", inbox):
        yield launch()


def test_a_launch_describes_itself(present: RunningLaunch) -> None:
    assert (RUN_ID, "train.py", os.getpid()) == (present.run_id, present.title, present.pid)


def test_a_launch_that_has_ended_is_not_there(inbox: Inbox) -> None:
    with controlled(RUN_ID, "train.py", inbox):
        present = launch()

    assert not is_running()
    assert ask_to_stop(present, None, only_node=False) is None


@pytest.mark.parametrize(("grace", "only_node"), [(None, False), (2.5, True)])
def test_a_request_stops_the_job_or_this_node(
    present: RunningLaunch, inbox: Inbox, grace: float | None, only_node: bool
) -> None:
    connection = ask_to_stop(present, grace, only_node=only_node)

    assert connection is not None
    connection.close()
    (request,) = inbox.drain()
    assert isinstance(request, StopRequest)
    assert (grace, not only_node, False) == (request.grace, request.ends_job, request.is_notice)
    assert RUN_ID in request.why


def test_clients_that_send_nothing_delay_no_others(present: RunningLaunch, inbox: Inbox) -> None:
    with closing(_connect(present.address)), closing(_connect(present.address)) as idle:
        idle.sendall(b'{"do": "desc')
        connection = ask_to_stop(launch(), None, only_node=False)

    assert connection is not None and 1 == len(inbox.drain())
    connection.close()


def test_a_client_that_sends_nothing_is_disconnected(present: RunningLaunch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elasticlib.job._control._LIMIT", 0.01)
    with closing(_connect(present.address)) as idle:
        idle.settimeout(30)
        assert b"" == idle.recv(1)


def test_a_client_that_waits_for_the_end_is_not_disconnected(inbox: Inbox, monkeypatch: pytest.MonkeyPatch) -> None:
    with controlled(RUN_ID, "train.py", inbox):
        address = launch().address
        connection = ask_to_stop(launch(), None, only_node=False)
        assert connection is not None
        monkeypatch.setattr("elasticlib.job._control._LIMIT", 0.01)
        with closing(_connect(address)) as idle:
            idle.settimeout(30)
            assert b"" == idle.recv(1)
        connection.setblocking(False)
        with pytest.raises(BlockingIOError):
            connection.recv(1)
    wait_for_end(connection)


@pytest.fixture
def address(inbox: Inbox) -> Iterator[str]:
    """The socket of a launch to which nobody has connected yet."""
    with controlled(RUN_ID, "train.py", inbox):
        yield next(each for each in _addresses() if f"/{os.getpid()}-" in each)


def test_without_free_descriptors_clients_are_accepted_later(address: str, caplog: pytest.LogCaptureFixture) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with closing(socket.socket(socket.AF_UNIX)) as client, caplog.at_level(logging.DEBUG, "elasticlib"):
        client.settimeout(30)
        with open(os.devnull) as lowest:
            number = lowest.fileno()
        resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))
        try:
            client.connect(f"\0{address}")
            wait_until(lambda: "could not connect to the control socket" in caplog.text)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        client.sendall(b'{"do": "describe"}\n')

        assert RUN_ID.encode() in client.recv(4096)


def test_a_launch_that_does_not_answer_is_listed_by_its_process(inbox: Inbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elasticlib.job._control._LIMIT", 0.05)
    with closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind(f"\0elasticlib-control/{os.geteuid()}/4194305-ab")
        listener.listen(0)
        stopped = RunningLaunch("x", "x", 4194305, 0.0, f"elasticlib-control/{os.geteuid()}/4194305-ab")
        assert 4194305 in running_launches()[1]
        # The first client fills the queue, in which the second one finds no place.
        assert 4194305 in running_launches()[1]
        with pytest.raises(TimeoutError):
            ask_to_stop(stopped, None, only_node=False)

    assert 4194305 not in running_launches()[1]
    assert ask_to_stop(stopped, None, only_node=False) is None


@pytest.mark.parametrize("name", ["x", "-", "1-", "a-b", "99999999999-ab", "1-ab/2"])
def test_sockets_with_other_names_are_not_listed_as_launches(name: str) -> None:
    with closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind(f"\0elasticlib-control/{os.geteuid()}/{name}")
        listener.listen()

        assert not [each for each in _addresses() if each.endswith(f"/{name}")]


def test_a_client_learns_of_the_end(inbox: Inbox) -> None:
    with controlled(RUN_ID, "train.py", inbox):
        connection = ask_to_stop(launch(), None, only_node=False)

    assert connection is not None
    wait_for_end(connection)


def is_closed(connection: socket.socket) -> bool:
    try:
        return not connection.recv(100)
    except ConnectionResetError:
        return True  # bytes that it did not read were left


def test_a_client_learns_of_the_end_if_a_forked_child_lives_on(inbox: Inbox) -> None:
    with controlled(RUN_ID, "train.py", inbox):
        connection = ask_to_stop(launch(), None, only_node=False)
        assert connection is not None
        child = os.fork()
        if child == 0:
            signal.pause()
            os._exit(0)
    try:
        wait_for_end(connection)
        assert not is_running()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\n",
        b"x" * 10_000,
        b"[]\n",
        b'{"do": 3}\n',
        b'{"do": "stop", "grace": -1}\n',
        b'{"do": "stop", "grace": "soon"}\n',
        b'{"do": "stop", "grace": NaN}\n',
        b'{"stop": 1}\n',
        b"\xff\n",
        b"[" * 4000 + b"\n",
        dumps({"do": "describe", "more": 1}).encode(),
    ],
)
def test_other_bytes_are_dropped(present: RunningLaunch, inbox: Inbox, data: bytes) -> None:
    with closing(_connect(present.address)) as stranger:
        stranger.sendall(data)
        stranger.shutdown(socket.SHUT_WR)
        wait_until(lambda: is_closed(stranger))

    assert [] == inbox.drain()
    assert RUN_ID == launch().run_id
