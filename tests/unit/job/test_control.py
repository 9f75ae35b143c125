"""The control socket of a launch: who gets an answer, and what a request does."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import closing
from json import dumps

import pytest

from elasticlib.job import RunningLaunch, ask_to_stop, controlled, running_launches, wait_for_end
from elasticlib.job._control import _connect
from elasticlib.workers import Inbox, StopRequest
from tests.waiting import wait_until

RUN_ID = f"job of {os.getpid()}"


@pytest.fixture
def inbox() -> Inbox:
    return Inbox()


def launch() -> RunningLaunch:
    (found,) = [each for each in running_launches() if each.run_id == RUN_ID]
    return found


@pytest.fixture
def present(inbox: Inbox) -> Iterator[RunningLaunch]:
    with controlled(RUN_ID, "train.py", inbox):
        yield launch()


def test_a_launch_describes_itself(present: RunningLaunch) -> None:
    assert (RUN_ID, "train.py", os.getpid()) == (present.run_id, present.title, present.pid)


def test_a_launch_that_has_ended_is_not_there(inbox: Inbox) -> None:
    with controlled(RUN_ID, "train.py", inbox):
        present = launch()

    assert RUN_ID not in [each.run_id for each in running_launches()]
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
        assert RUN_ID not in [each.run_id for each in running_launches()]
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
