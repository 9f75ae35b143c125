"""Sessions that are kept: who is in them, and that a number is dropped with its last process."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest

from elasticlib.processes import Sessions, SharedSessions


@pytest.fixture
def other() -> Iterator[int]:
    """A process that leads a session of its own: in a container, the tests' own session may have no number."""
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as process:
        yield process.pid
        process.kill()


@pytest.fixture
def shell() -> Iterator[tuple[int, int]]:
    """A shell in a session of its own, and what it has started."""
    command = ["sh", "-c", "sleep 600 & echo $!; wait"]
    with subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        yield process.pid, child
        os.killpg(process.pid, 9)


@pytest.fixture
def shared() -> Iterator[SharedSessions]:
    shared = SharedSessions.new()
    yield shared
    os.close(shared.fileno())


def test_processes_of_a_kept_session_are_in_it(shell: tuple[int, int]) -> None:
    leader, child = shell

    sessions = Sessions([child])

    assert [leader in sessions, child in sessions, os.getpid() in sessions] == [True, True, False]
    assert leader not in Sessions()


def test_sessions_that_another_process_adds_are_known(
    shell: tuple[int, int], other: int, shared: SharedSessions
) -> None:
    if (pid := os.fork()) == 0:
        shared.replace(Sessions(), Sessions([shell[0]]))
        os._exit(0)
    os.waitpid(pid, 0)
    shared.replace(Sessions(), Sessions([other]))

    assert {shell[0], other} == shared.numbers()
    assert shell[1] in shared


def test_sessions_that_are_kept_no_more_are_dropped(shell: tuple[int, int], other: int, shared: SharedSessions) -> None:
    both, one = Sessions([shell[0], other]), Sessions([other])
    shared.replace(Sessions(), both)

    shared.replace(both, one)
    assert {other} == shared.numbers()
    shared.replace(one, Sessions())
    assert set() == shared.numbers()


def test_session_without_processes_is_dropped(shell: tuple[int, int], other: int, shared: SharedSessions) -> None:
    leader, child = shell
    shared.replace(Sessions(), Sessions([leader, other]))

    shared.drop_ended([child])
    assert {leader} == shared.numbers()
    shared.drop_ended([])
    shared.replace(Sessions(), Sessions([other]))

    assert {other} == shared.numbers()
