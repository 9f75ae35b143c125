"""Workers that wait in native code while they should end, and workers that are about to end."""

from __future__ import annotations

import dataclasses
import itertools
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from elasticlib.processes import _reaper
from elasticlib.workers.spawner import _signal_table, _stuck
from elasticlib.workers.spawner._stuck import INTERVAL, STUCK, STUCK_WITH_HANDLERS, RoundStop, UnhandledSignal
from tests.waiting import wait_until

LIMIT = 30.0
WAITS = UnhandledSignal(cpu=1.0, sleeps=True, own_handler=False)
HANDLES = UnhandledSignal(cpu=1.0, sleeps=True, own_handler=True)


def killed(
    looks: Callable[[float], dict[int, UnhandledSignal | None]], until: float, *, restart_waits: bool = False
) -> list[tuple[float, int]]:
    """When which rank is to be killed, where each look finds what *looks* says; a killed one is gone."""
    stop, now, found = RoundStop(signal.SIGINT, 0.0, restart_waits), 0.0, list[tuple[float, int]]()
    while now < until:
        now = stop.next_look
        ended = {rank for _, rank in found}
        rank = stop.stuck({each: look for each, look in looks(now).items() if each not in ended}, now)
        if rank is not None:
            found.append((now, rank))
    return found


@pytest.mark.parametrize(("restart_waits", "ranks"), [(False, [2, 1]), (True, [2, 1, 0])])
def test_all_in_native_code_are_killed_one_by_one_from_the_last(restart_waits: bool, ranks: list[int]) -> None:
    """The end of the last one frees nobody, unless the next round waits for it."""
    ends = killed(lambda now: {0: WAITS, 1: WAITS, 2: WAITS}, 10.0, restart_waits=restart_waits)

    assert ranks == [rank for _, rank in ends]
    assert STUCK <= ends[0][0] < STUCK + INTERVAL
    assert all(later - earlier >= INTERVAL for (earlier, _), (later, _) in itertools.pairwise(ends))


def test_one_that_is_at_work_on_its_end_keeps_the_time_of_all() -> None:
    """Its work may free the others, so their waiting time begins when that work is done."""
    ends = killed(lambda now: {0: None, 1: WAITS, 2: WAITS} if now < 9.0 else {1: WAITS, 2: WAITS}, until=20.0)

    ((at, rank),) = ends
    assert (2, True) == (rank, 9.0 + STUCK - INTERVAL <= at)


def test_a_program_with_a_handler_of_its_own_has_more_time() -> None:
    ends = killed(lambda now: {0: HANDLES, 1: WAITS}, until=STUCK_WITH_HANDLERS + INTERVAL)

    assert STUCK_WITH_HANDLERS <= ends[0][0]


@pytest.mark.parametrize(
    "at_work",
    [
        lambda now: UnhandledSignal(now, sleeps=True, own_handler=False),
        lambda now: UnhandledSignal(1.0, sleeps=False, own_handler=False),
        lambda now: UnhandledSignal(1.0, sleeps=int(now) % 2 == 0, own_handler=False),
    ],
    ids=["uses the processor", "waits for a disk", "waits for a disk now and then"],
)
def test_native_code_that_is_at_work_is_left_alone(at_work: Callable[[float], UnhandledSignal]) -> None:
    assert [] == killed(lambda now: {0: WAITS, 1: at_work(now)}, until=20.0)


def test_a_wait_that_looks_about_now_and_then_is_a_wait() -> None:
    looks_about = killed(
        lambda now: dict.fromkeys((0, 1), dataclasses.replace(WAITS, cpu=1.0 + now / 100)), until=STUCK + INTERVAL
    )

    assert 1 == len(looks_about)


@pytest.mark.parametrize("restart_waits", [False, True])
@pytest.mark.parametrize(
    "writes",
    [
        lambda now: dataclasses.replace(WAITS, written=int(now * 100)),
        lambda now: dataclasses.replace(WAITS, own_file=True),
    ],
    ids=["its bytes grow", "has a file open"],
)
def test_one_that_writes_keeps_its_whole_time(writes: Callable[[float], UnhandledSignal], restart_waits: bool) -> None:
    assert [] == killed(lambda now: {0: writes(now)}, until=60.0, restart_waits=restart_waits)


def test_last_waiting_worker_is_not_killed_beside_one_that_writes() -> None:
    writes = dataclasses.replace(WAITS, own_file=True)

    assert [] == killed(lambda now: {0: writes, 1: WAITS}, until=60.0)
    assert [1] == [rank for _, rank in killed(lambda now: {0: writes, 1: WAITS}, 60.0, restart_waits=True)]
    assert [2] == [rank for _, rank in killed(lambda now: {0: writes, 1: WAITS, 2: WAITS}, 60.0)]


def test_bytes_that_grow_keep_the_time_of_all_but_where_a_restart_waits() -> None:
    """They may be a checkpoint for which the others wait; the next round does not wait for those."""

    def looks(now: float) -> dict[int, UnhandledSignal | None]:
        return {0: dataclasses.replace(WAITS, written=int(now * 100)), 1: WAITS, 2: WAITS}

    assert [] == killed(looks, until=60.0)
    assert [2, 1] == [rank for _, rank in killed(looks, 60.0, restart_waits=True)]


def test_one_that_wrote_before_the_stop_is_one_that_waits() -> None:
    assert [1] == [
        rank for _, rank in killed(lambda now: dict.fromkeys((0, 1), dataclasses.replace(WAITS, written=10**9)), 10.0)
    ]


def test_nobody_is_nobody() -> None:
    assert [] == killed(lambda now: {}, until=20.0)


# What can be seen of a real process.

NATIVE = """
import ctypes, signal, sys
mutex = ctypes.create_string_buffer(64)
lock = ctypes.CDLL(None).pthread_mutex_lock
{before}
print(flush=True)
lock(mutex)
lock(mutex)
"""
HANDLER = "signal.signal(signal.SIGINT, lambda *_: None)"
PYTHON = """
import signal
signal.signal(signal.SIGINT, lambda *_: {handler})
print(flush=True)
while True:
    signal.pause()
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a program of this interpreter, and waits until it is ready."""
    started: list[subprocess.Popen[str]] = []

    def new(code: str) -> subprocess.Popen[str]:
        started.append(subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True))
        process = started[-1]
        assert process.stdout is not None
        process.stdout.readline()
        return process

    yield new
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(("before", "own"), [("", False), (HANDLER, True)], ids=["no handler", "own handler"])
def test_a_process_in_native_code_is_seen_to_have_a_signal_before_it(start: Start, before: str, own: bool) -> None:
    process = start(NATIVE.format(before=before))
    wait_until(lambda: (_reaper.process_facts(process.pid) or [b""])[0] == b"S")
    first = _stuck.look(process.pid, signal.SIGINT)
    process.send_signal(signal.SIGINT)
    wait_until(lambda: _stuck.look(process.pid, signal.SIGINT))

    found = _stuck.look(process.pid, signal.SIGINT)

    assert first is None
    assert found is not None
    assert own == found.own_handler
    assert _stuck.look(process.pid, signal.SIGTERM) is None


@pytest.mark.parametrize("handler", ["print(flush=True)", "(print(flush=True), signal.pause())"], ids=["done", "at it"])
def test_process_whose_handler_was_called_is_not_deaf(start: Start, handler: str) -> None:
    process = start(PYTHON.format(handler=handler))
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    process.stdout.readline()

    assert _stuck.look(process.pid, signal.SIGINT) is None


def test_nothing_is_reported_of_a_process_that_cannot_be_inspected(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    with subprocess.Popen(["sleep", "60"]) as program:
        of_another_program = _stuck.look(program.pid, signal.SIGINT)
        program.kill()
    of_an_ended_process = _stuck.look(program.pid, signal.SIGINT)
    monkeypatch.setattr(_signal_table, "_layout", lambda: None)
    of_an_interpreter_of_another_layout = _stuck.look(start(PYTHON.format(handler="0")).pid, signal.SIGINT)

    assert None is of_another_program is of_an_ended_process is of_an_interpreter_of_another_layout
