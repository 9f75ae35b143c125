"""The spawner's side of the process that hosts the workers' store: begun at a knock, watched, told of by name."""

from __future__ import annotations

import errno
import os
import re
import selectors
import signal
import socket
from collections.abc import Iterator

import pytest

from elasticlib.workers.spawner import _spawner
from elasticlib.workers.spawner._spawner import StoreHost

LIMIT = 30.0


class Room:
    """A store host with its selector, and its reports."""

    def __init__(self) -> None:
        self.reported: list[tuple[str, int, int]] = []
        self.selector = selectors.DefaultSelector()
        self.began: list[int] = []
        self.host = StoreHost(self.selector, (), self.began.append, lambda *facts: self.reported.append(facts))

    def turn(self) -> None:
        """One turn of the spawner's loop."""
        for key, _ in self.selector.select(LIMIT):
            key.data()


@pytest.fixture
def room() -> Iterator[Room]:
    room = Room()
    before = set(os.listdir("/proc/self/fd"))
    yield room
    room.host.end()
    assert before == set(os.listdir("/proc/self/fd"))
    room.selector.close()


def knocked() -> int:
    """A socket at which somebody knocks."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        socket.create_connection(listener.getsockname()).close()
        return listener.detach()


def sleeps(*_: object) -> None:
    signal.pause()


def test_end_of_the_store_process_is_reported_with_pid_and_signal(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_spawner, "_host_store", sleeps)
    room.host.await_knock(knocked())
    room.turn()
    pid = room.host._pid
    os.kill(pid, signal.SIGKILL)

    room.turn()

    assert room.reported == [
        (f"the process that hosts the workers' store (pid {pid}) was ended by SIGKILL", pid, -signal.SIGKILL)
    ]


def test_process_that_cannot_host_reports_why(room: Room) -> None:
    room.host.await_knock(os.eventfd(1, os.EFD_CLOEXEC))  # readable, and no socket
    room.turn()

    room.turn()

    ((why, pid, code),) = room.reported
    assert re.fullmatch(
        rf"the process that hosts the workers' store \(pid {pid}\) ended with status 1: OSError: .*socket.*", why
    )
    assert code == 1


def test_failed_fork_is_reported_with_what_helps(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    def fork() -> int:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(os, "fork", fork)
    room.host.await_knock(knocked())

    room.turn()

    ((why, pid, code),) = room.reported
    assert why.startswith("the process that hosts the workers' store cannot be started: ")
    assert "ulimit -u" in why and "pids.max" in why
    assert (pid, code) == (0, 1)


def test_end_of_a_round_is_not_reported_as_a_loss(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_spawner, "_host_store", sleeps)
    room.host.await_knock(knocked())
    room.turn()
    keys, pid = list(room.selector.get_map().values()), room.host._pid

    room.host.end()
    for key in keys:
        key.data()

    assert room.reported == []
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
