"""Handles of processes promise the same with and without the kernel's own ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from elasticlib import processes
from elasticlib.processes._wire import Channel, wait_readable

LIMIT = 30.0
Start = Callable[[str], subprocess.Popen[str]]


@pytest.fixture(params=["", "refused"], ids=["pidfds", "no pidfds"], autouse=True)
def refusal(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(processes.pidfds, "_known", request.param)
    return str(request.param)


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts Python programs that say something; killed when the test is over."""
    started: list[subprocess.Popen[str]] = []

    def begin(code: str) -> subprocess.Popen[str]:
        # A session of its own, so that what a test leaves can be killed.
        program = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(program)
        return program

    yield begin
    for program in started:
        try:
            os.killpg(program.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        program.communicate()


WAITS = "import signal; print('ready', flush=True); signal.pause()"


def line_of(program: subprocess.Popen[str]) -> str:
    assert program.stdout is not None
    return program.stdout.readline().strip()


def test_childs_end_makes_its_handle_readable(start: Start) -> None:
    program = start(WAITS)
    line_of(program)
    handle = processes.handle_of(program.pid)

    before = bool(wait_readable([handle], 0)), handle.has_ended()
    handle.send(signal.SIGTERM)
    after = bool(wait_readable([handle], LIMIT)), handle.has_ended()

    handle.close()
    assert (before, after) == ((False, False), (True, True))
    assert program.wait(LIMIT) == -signal.SIGTERM


def test_child_that_was_reaped_cannot_be_signalled(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "kill", lambda *call: pytest.fail(f"{call}: by a number that may be another's"))
    program = start("")
    handle = processes.handle_of(program.pid)
    program.wait(LIMIT)

    with pytest.raises(ProcessLookupError):
        handle.send(signal.SIGKILL)

    assert handle.has_ended()
    handle.close()


def test_a_handle_reaps_a_child_once_it_has_ended() -> None:
    pid = os.posix_spawn("/bin/true", ["true"], {})
    handle = processes.handle_of(pid)
    wait_readable([handle], LIMIT)

    handle.reap()
    handle.reap()

    handle.close()
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def test_closed_handle_has_no_descriptor_and_closes_again() -> None:
    pid = os.posix_spawn("/bin/true", ["true"], {})
    handle = processes.handle_of(pid)
    handle.fileno()

    handle.close()
    handle.close()

    assert handle.fileno() == -1
    os.waitpid(pid, 0)


def test_handle_of_a_reaped_process_raises_process_lookup_error() -> None:
    pid = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(pid, 0)

    with pytest.raises(ProcessLookupError):
        processes.handle_of(pid)


GRANDPARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
print(child.wait(), flush=True)
"""


def test_only_the_process_gets_the_signal_even_if_not_a_child(start: Start) -> None:
    program = start(GRANDPARENT)
    handle = processes.handle_of(int(line_of(program)))

    before = handle.has_ended()
    handle.send(signal.SIGUSR1)

    assert line_of(program) == str(-signal.SIGUSR1)
    processes.wait_for_ends([handle], LIMIT)
    assert (before, handle.has_ended()) == (False, True)
    with pytest.raises(ProcessLookupError):
        handle.send(signal.SIGUSR1)
    handle.close()


def test_signal_that_does_not_exist_is_an_error(start: Start) -> None:
    program = start(GRANDPARENT)
    other = processes.handle_of(int(line_of(program)))

    with pytest.raises(OSError, match="Invalid argument"):
        other.send(4711)

    assert not other.has_ended()
    other.close()


def test_waiting_for_ends_returns_when_all_have_ended_or_the_time_is_over(start: Start) -> None:
    programs = [start(WAITS), start(WAITS)]
    handles = [processes.handle_of(program.pid) for program in programs]
    programs[0].kill()

    processes.wait_for_ends(handles, 0.05)
    one = [handle.has_ended() for handle in handles]
    programs[1].kill()
    processes.wait_for_ends(handles, LIMIT)
    both = [handle.has_ended() for handle in handles]

    for handle in handles:
        handle.close()
    assert (one, both) == ([True, False], [True, True])


HANDS_ITSELF_OVER = """
import os, signal, sys
from elasticlib import processes
from elasticlib.processes._wire import Channel
processes.pidfds._known = {refusal!r}
signal.signal(signal.SIGCONT, lambda *_: print("woken", flush=True))
with processes.own_descriptors() as itself:
    Channel.adopt({descriptor}).send({{}}, itself)
if {forks}:
    if os.fork() == 0:
        os.write(1, b"%d\\n" % os.getpid())
        signal.pause()
os.write(1, b"ready\\n")
while True:
    signal.pause()
"""


def handed_over(refusal: str, *, forks: bool = False) -> tuple[subprocess.Popen[str], processes.Handle]:
    ours, theirs = Channel.pair()
    code = HANDS_ITSELF_OVER.format(refusal=refusal, descriptor=theirs.fileno(), forks=forks)
    program = subprocess.Popen(
        [sys.executable, "-c", code],
        pass_fds=(theirs.fileno(),),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    theirs.close()
    received = ours.receive()
    assert received is not None
    ours.close()
    return program, processes.received_handle(received[1])


def test_process_that_handed_itself_over_is_woken_and_killed(refusal: str) -> None:
    program, handle = handed_over(refusal)
    first = line_of(program)
    os.kill(program.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, program.pid, os.WSTOPPED)

    handle.send(signal.SIGCONT)
    second = line_of(program)
    before = handle.has_ended()
    handle.send(signal.SIGKILL)
    ended = bool(wait_readable([handle], LIMIT))

    assert (first, second, before, ended) == ("ready", "woken", False, True)
    assert program.wait(LIMIT) == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        handle.send(signal.SIGKILL)
    handle.close()
    assert program.stdout is not None
    program.stdout.close()


def test_stopped_process_that_handed_itself_over_is_killed(refusal: str) -> None:
    program, handle = handed_over(refusal)
    line_of(program)
    os.kill(program.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, program.pid, os.WSTOPPED)

    handle.send(signal.SIGKILL)

    assert program.wait(LIMIT) == -signal.SIGKILL
    handle.close()
    assert program.stdout is not None
    program.stdout.close()


def test_letting_go_of_a_process_does_not_signal_it(refusal: str) -> None:
    program, handle = handed_over(refusal)
    line_of(program)

    handle.close()

    assert program.poll() is None
    program.kill()
    program.communicate()


def test_a_process_that_it_forked_does_not_hide_its_end(refusal: str) -> None:
    program, handle = handed_over(refusal, forks=True)
    printed = {line_of(program), line_of(program)} - {"ready"}

    program.kill()
    ended = bool(wait_readable([handle], LIMIT))

    os.kill(int(printed.pop()), signal.SIGKILL)
    program.communicate()
    handle.close()
    assert ended


WATCHES_ITS_PARENT = """
import os, subprocess, sys
inner = '''
import os
from elasticlib import processes
from elasticlib.processes import wake_with_parent
from elasticlib.processes._wire import wait_readable
processes.pidfds._known = {refusal!r}
parent = os.getppid()
wake_with_parent()
handle = processes.handle_of_parent(parent)
forked = os.fork() == 0
os.write(1, b"ready %d\\\\n" % bool(wait_readable([handle], 0)))
wait_readable([handle], 30)
os.write(1, b"gone %d\\\\n" % handle.has_ended())
'''
subprocess.Popen([sys.executable, "-c", inner])
sys.stdin.read()
"""


def test_parents_end_is_seen_by_its_child_and_by_what_that_forked(start: Start, refusal: str) -> None:
    program = start(WATCHES_ITS_PARENT.format(refusal=refusal))
    before = [line_of(program), line_of(program)]

    program.kill()
    after = [line_of(program), line_of(program)]

    assert before == ["ready 0"] * 2
    assert after == ["gone 1"] * 2


@pytest.mark.parametrize("refusal", [""], indirect=True)
def test_kernel_support_is_tested_by_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    here = processes.pidfds.ask()
    monkeypatch.setattr(signal, "pidfd_send_signal", refuse)

    assert (here, processes.pidfds.ask()) == ("", "pidfd_open, pidfd_send_signal: Operation not permitted")


@pytest.mark.parametrize("refusal", [""], indirect=True)
def test_lack_of_descriptors_does_not_count_as_missing_support(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(processes.pidfds, "_known", None)
    monkeypatch.setattr(os, "pidfd_open", refuse)
    why = processes.pidfds.why()
    monkeypatch.setattr(processes.pidfds, "_tried", lambda: None)

    assert (why, processes.pidfds.why(), processes.pidfds._known) == ("", "", "")
