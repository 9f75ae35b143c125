"""Stacks of workers that can report them, with a reason for those that cannot."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from elasticlib import processes
from elasticlib.stacks import threads_of
from elasticlib.workers.spawner import _stack_dump
from elasticlib.workers.spawner._stack_dump import LIMIT, StackDump

SIGNUM, OWN_SIGNUM = signal.SIGRTMAX - 1, signal.SIGRTMAX - 2
ANSWERS = f"""
import faulthandler, sys, threading
faulthandler.register({SIGNUM}, file=int(sys.argv[1]), all_threads=True)
faulthandler.register({OWN_SIGNUM}, file=int(sys.argv[1]), all_threads=False)
def sits_here():
    print("ready", flush=True)
    threading.Event().wait()
sits_here()
"""
BUSY = ANSWERS.replace(
    "sits_here()\n",
    """def is_busy():
    while True:
        exec(compile("def deep(n):\\n    return 0 if n == 0 else deep(n - 1) + 1\\ndeep(60)", "module", "exec"), {})
threading.Thread(target=is_busy, daemon=True).start()
sits_here()
""",
)
"""Another thread makes, calls and frees functions all the time."""
SILENT = "import sys, threading; print('ready', flush=True); threading.Event().wait()"
Start = Callable[[str], tuple[int, processes.Handle, int]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a program; its pid, handle, and the memory in which it may write."""
    programs, descriptors = list[subprocess.Popen[str]](), list[int]()

    def begin(code: str) -> tuple[int, processes.Handle, int]:
        memory = os.memfd_create("faults")
        program = subprocess.Popen(
            [sys.executable, "-c", code, str(memory)], pass_fds=(memory,), stdout=subprocess.PIPE, text=True
        )
        programs.append(program)
        handle = processes.handle_of(program.pid)
        descriptors.extend((memory, handle.fileno()))
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        return program.pid, handle, memory

    yield begin
    for program in programs:
        program.kill()
        program.communicate()
    for descriptor in descriptors:
        os.close(descriptor)


def finish_look(dump: StackDump) -> dict[int, str]:
    """Wait for the end of the look that has begun; return its result."""
    while True:
        assert dump.next_look is not None
        while time.monotonic() < dump.next_look:
            pass
        found = dump.look(time.monotonic())
        if found is not None:
            return found


def look(*workers: tuple[int, int, int]) -> dict[int, str]:
    dump = StackDump()
    dump.begin([(rank, *facts) for rank, facts in enumerate(workers)], time.monotonic())
    return finish_look(dump)


def test_worker_reports_where_it_is(start: Start) -> None:
    found = look(start(ANSWERS), start(ANSWERS))

    assert sorted(found) == [0, 1]
    assert all("in sits_here" in text for text in found.values())


def test_each_look_returns_only_its_own_stacks(start: Start) -> None:
    worker = start(ANSWERS)

    first, second = look(worker), look(worker)

    assert 1 == second.pop(0).count("most recent call first") == first.pop(0).count("most recent call first")
    assert 0 == os.fstat(worker[2]).st_size  # a crash's report begins with nothing


def test_a_worker_whose_other_threads_run_survives_a_look(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_stack_dump, "_UNTIL_QUIET", 0.0)
    worker = start(BUSY)

    found = [look(worker)[0] for _ in range(40)]

    assert not worker[1].has_ended()
    assert all("in sits_here" in text for text in found)
    assert all("other threads run" in text for text in found if "in is_busy" not in text)
    assert [("sits_here", True)] == [
        (thread.frames[-2].function, thread.is_current) for text in found[:1] for thread in threads_of(text)
    ]


def test_a_process_that_would_die_of_the_signal_is_not_sent_it(start: Start) -> None:
    silent, answering = start(SILENT), start(ANSWERS)

    found = look(silent, answering)

    assert "no Python code that could answer" in found[0]
    assert "in sits_here" in found[1]
    assert not silent[1].has_ended()


def test_stopped_process_is_reported_and_delays_nothing(start: Start) -> None:
    worker = start(ANSWERS)
    worker[1].send(signal.SIGSTOP)
    os.waitid(os.P_PID, worker[0], os.WSTOPPED)

    dump = StackDump()
    dump.begin([(0, *worker)], time.monotonic())

    assert dump.look(time.monotonic()) == {0: "(the process is stopped, by a signal or a debugger)"}


def test_a_worker_that_ends_meanwhile_is_not_looked_at_again(start: Start) -> None:
    dump, worker = StackDump(), start(SILENT)
    dump.begin([(3, *worker)], time.monotonic())
    dump.look(time.monotonic())
    dump.end(3)

    assert finish_look(dump) == {3: "(the process has ended)"}
    assert dump.next_look is None


def test_look_under_way_takes_more_workers_and_serves_all_requesters(start: Start) -> None:
    dump, first, second = StackDump(), start(ANSWERS), start(ANSWERS)
    dump.begin([(0, *first)], time.monotonic(), "place")
    dump.begin([(0, *first), (1, *second)], time.monotonic(), "stacks")

    assert [0, 1] == sorted(finish_look(dump))
    assert ["place", "stacks"] == dump.askers


def test_a_worker_that_joins_a_look_has_its_own_time_to_answer(start: Start) -> None:
    dump, silent, answering = StackDump(), start(SILENT), start(ANSWERS)
    joined = time.monotonic()
    dump.begin([(0, *silent)], joined - LIMIT, "place")
    dump.begin([(1, *answering)], joined, "stacks")

    assert dump.look(joined) is None
    assert "in sits_here" in finish_look(dump)[1]


def test_with_no_worker_there_is_nothing_to_wait_for() -> None:
    assert {} == look()
