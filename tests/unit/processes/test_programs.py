"""Handles of programs that this program started."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from elasticlib.errors import StartError
from elasticlib.processes._programs import (
    ChildProcess,
    Link,
    Process,
    above_standard_streams,
    closed_in_forks,
    flags_in,
    spawn,
)
from elasticlib.processes._wire import Channel

LIMIT = 30.0
ROOT = Path(__file__).parents[2]


def test_a_copy_stays_clear_of_the_standard_streams_and_is_not_inherited() -> None:
    copy = above_standard_streams(0)
    try:
        assert copy > 3
        assert not os.get_inheritable(copy)
    finally:
        os.close(copy)


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("python train.py -O", ""),
        ("python -O -u train.py", "-O"),
        ("python -OOPs train.py", "-O -O -P -s"),
        ("python -Wignore -X dev -m elasticlib.run -O", "-W ignore -X dev"),
        ("python -bbBW error -c pass -E", "-b -b -B -W error"),
        ("python --check-hash-based-pycs always -I train.py", "--check-hash-based-pycs always -I"),
        ("python -ixu -X importtime", "-X importtime"),
        ("python -E -", "-E"),
        ("python", ""),
        ("python -sP /usr/bin/elasticrun train.py", ""),
    ],
)
def test_flags_are_the_interpreters_own_options(command: str, flags: str) -> None:
    """Those in the first line of the installed command are for the launcher alone."""
    assert tuple(flags.split()) == flags_in(command.split())


def test_a_process_that_does_not_end_in_time_is_killed() -> None:
    sleep = shutil.which("sleep") or "sleep"
    pid = os.posix_spawn(sleep, ["sleep", "60"], {})

    ChildProcess(pid).wait(0.0)

    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_process_reaped_elsewhere_raises_no_error() -> None:
    pid = os.posix_spawn("/bin/true", ["true"], {})
    child = ChildProcess(pid)
    os.waitpid(pid, 0)

    child.wait(LIMIT)
    ChildProcess(pid).wait(LIMIT)


def test_a_stopped_process_is_woken_to_end() -> None:
    script = (
        "import os, signal; signal.signal(signal.SIGCONT, lambda *_: os._exit(7)); print(flush=True); signal.pause()"
    )
    reader, writer = os.pipe()
    actions = [(os.POSIX_SPAWN_DUP2, writer, 1)]
    pid = os.posix_spawn(sys.executable, [sys.executable, "-I", "-S", "-c", script], {}, file_actions=actions)
    os.close(writer)
    os.read(reader, 1)
    os.close(reader)
    child = ChildProcess(pid)
    child.send(signal.SIGSTOP)
    watched = os.pidfd_open(pid)

    child.wait(LIMIT)

    assert child.ends(0.0)
    with pytest.raises(ChildProcessError):
        os.waitid(os.P_PIDFD, watched, os.WEXITED | os.WNOHANG)
    os.close(watched)


def test_new_process_with_the_number_of_an_ended_one_gets_no_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing goes by number: a signal to one that is held, or was, is no kill of anybody."""
    monkeypatch.setattr(os, "kill", lambda pid, signum: pytest.fail(f"{pid} was signalled by its number"))
    pid = os.posix_spawn("/bin/true", ["true"], {})
    child = ChildProcess(pid)
    os.waitpid(pid, 0)

    child.send(signal.SIGKILL)
    ended = child.kill()
    child.close()
    child.send(signal.SIGKILL)

    assert ended
    assert Process(os.getpid()).kill(0.0)


def output_of(script: str) -> str:
    """Return the output of *script*, run as a separate program that writes no error."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout


def test_descriptors_are_closed_however_high_the_limit_is() -> None:
    """By what is open, and not by what could be: the limit has no part in it."""
    script = (
        "import os, resource, sys\n"
        "from elasticlib.processes import close_all_but\n"
        "_, most = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))\n"
        "low, kept, high = os.dup(0), os.dup2(0, 700), os.dup2(0, most - 1)\n"
        "calls = []\n"
        "plain = os.closerange\n"
        "os.closerange = lambda low, high: calls.extend(range(low, high)) or plain(low, high)\n"
        "close_all_but({0, 1, 2, kept})\n"
        "left = [n for n in (low, kept, most - 1) if os.path.exists(f'/proc/self/fd/{n}')]\n"
        "print(left, len(calls) < 400)\n"
    )

    assert output_of(script) == "[700] True\n"


def test_descriptors_are_closed_though_none_is_left_to_look_for_them() -> None:
    script = (
        "import os, resource\n"
        "from elasticlib.processes import close_all_but\n"
        "most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (600, most))\n"
        "try:\n"
        "    while True: os.dup(0)\n"
        "except OSError: close_all_but({0, 1, 2})\n"
        "print(len(os.listdir('/proc/self/fd')))\n"
    )

    assert output_of(script) == "4\n"


def test_a_forked_child_closes_what_is_its_parents_own() -> None:
    listener = closed_in_forks(socket.create_server(("127.0.0.1", 0)))
    address = listener.getsockname()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writer, b".")
        signal.pause()
    os.read(reader, 1)
    listener.close()
    try:
        socket.create_server(address).close()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reader)
        os.close(writer)


def test_an_end_is_waited_for_and_reaped_and_leaves_no_descriptor() -> None:
    before = os.listdir("/proc/self/fd")
    pid = os.posix_spawn("/bin/true", ["true"], {})
    child = ChildProcess(pid)

    child.wait(LIMIT)

    assert child.fileno() == -1
    assert os.listdir("/proc/self/fd") == before
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def test_a_program_gets_a_socket_and_a_session_and_no_streams() -> None:
    ours, theirs = Channel.pair()
    output = os.memfd_create("output")
    script = "import os; os.write(2, ' '.join(os.readlink(f'/proc/self/fd/{n}') for n in (0, 1, 3)).encode())"

    child = spawn([sys.executable, "-I", "-S", "-c", script], dict(os.environ), theirs.fileno(), output)
    session = os.getsid(child.pid)
    theirs.close()
    child.wait(LIMIT)

    os.lseek(output, 0, os.SEEK_SET)
    with os.fdopen(output, encoding="utf-8") as file:
        stdin, stdout, channel = file.read().split()
    ours.close()
    assert (stdin, stdout) == (os.devnull, os.devnull)
    assert channel.startswith("socket:")
    assert session == child.pid


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
