"""Handles of programs that this program started."""

from __future__ import annotations

import os
import shutil
import sys

import pytest

from elasticlib._programs import Link, above_standard, spawn, wait_for_end
from elasticlib._wire import Channel
from elasticlib.errors import StartError

LIMIT = 30.0


def test_a_copy_stays_clear_of_the_standard_streams_and_is_not_inherited() -> None:
    copy = above_standard(0)
    try:
        assert copy > 3
        assert not os.get_inheritable(copy)
    finally:
        os.close(copy)


def test_an_end_is_waited_for_and_reaped() -> None:
    pid = os.posix_spawn("/bin/true", ["true"], {})

    wait_for_end(pid, 30.0)

    with pytest.raises(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def test_a_process_that_does_not_end_in_time_is_killed() -> None:
    sleep = shutil.which("sleep") or "sleep"
    pid = os.posix_spawn(sleep, ["sleep", "60"], {})

    wait_for_end(pid, 0.0)

    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_process_that_somebody_else_has_reaped_is_no_error() -> None:
    pid = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(pid, 0)

    wait_for_end(pid, 30.0)


def test_a_program_gets_a_socket_and_a_session_and_no_streams() -> None:
    ours, theirs = Channel.pair()
    said = os.memfd_create("said")
    script = "import os; os.write(2, ' '.join(os.readlink(f'/proc/self/fd/{n}') for n in (0, 1, 3)).encode())"

    pid = spawn([sys.executable, "-I", "-S", "-c", script], dict(os.environ), theirs.fileno(), said)
    session = os.getsid(pid)
    theirs.close()
    wait_for_end(pid, LIMIT)

    os.lseek(said, 0, os.SEEK_SET)
    with os.fdopen(said, encoding="utf-8") as file:
        stdin, stdout, channel = file.read().split()
    ours.close()
    assert (stdin, stdout) == (os.devnull, os.devnull)
    assert channel.startswith("socket:")
    assert session == pid


def test_a_program_that_is_not_there_is_named() -> None:
    with pytest.raises(StartError, match=r"cannot start /no/such/program: .*No such file"):
        spawn(["/no/such/program"], {}, 0)


def test_a_forked_child_holds_no_link() -> None:
    ours, theirs = Channel.pair()
    link = Link(ours)
    pid = os.fork()
    if pid == 0:
        os._exit(0 if link.fileno() == -1 else 1)

    _, status = os.waitpid(pid, 0)

    link.close()
    theirs.close()
    assert status == 0
