"""Timers over a named pipe, with server and client in one process: the pipe, the lines, and what is refused."""

from __future__ import annotations

import json
import os
import pathlib
import queue
import select
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import example, given

from elasticlib.errors import ConfigError, TimerError, TimerServerError
from elasticlib.timer import FileTimerClient, FileTimerRequest, FileTimerServer, _fifo
from elasticlib.timer._timer_table import TimerTable, poll_timeout
from tests.unit.untrusted import spoiled, strange

LIMIT = 20.0
EventQueue = queue.SimpleQueue[tuple[str, FileTimerRequest | None]]
Make = Callable[..., FileTimerServer]


@pytest.fixture
def events() -> EventQueue:
    return queue.SimpleQueue()


@pytest.fixture
def path(tmp_path: pathlib.Path) -> str:
    return str(tmp_path / "timers")


@pytest.fixture
def make(path: str, events: EventQueue) -> Iterator[Make]:
    made = []

    def new(**options: Any) -> FileTimerServer:
        server = FileTimerServer(path, "job", log_event=lambda name, request: events.put((name, request)), **options)
        made.append(server)
        return server

    yield new
    for server in made:
        server.stop()


def next_event(events: EventQueue) -> tuple[str, FileTimerRequest | None]:
    return events.get(timeout=LIMIT)


def test_the_pipe_is_this_users_alone_and_takes_the_place_of_a_file(make: Make, path: str) -> None:
    pathlib.Path(path).write_text("old")

    make()

    mode = os.stat(path).st_mode
    assert (True, 0o600) == (stat.S_ISFIFO(mode), stat.S_IMODE(mode))


@pytest.mark.parametrize("bad", ["no/such/folder/timers", "", "nul\0"])
def test_a_path_where_no_pipe_can_be_made_is_refused(bad: str) -> None:
    with pytest.raises(ConfigError, match=r"file_path=.* cannot be created as a named pipe"):
        FileTimerServer(bad, "job")


@pytest.mark.parametrize("bad", [-1, float("nan"), float("inf"), "1", True])
def test_invalid_interval_is_refused(path: str, bad: Any) -> None:
    with pytest.raises(ConfigError, match=r"max_interval=.* must be a finite number of seconds, 0 or more"):
        FileTimerServer(path, "job", max_interval=bad)


def test_start_and_stop_are_reported_and_leave_no_pipe(make: Make, events: EventQueue, path: str) -> None:
    server = make()

    server.start()
    server.stop()
    server.stop()

    assert ["watchdog started", "watchdog stopped"] == [next_event(events)[0], next_event(events)[0]]
    assert events.empty()
    assert not os.path.lexists(path)


def test_a_server_that_sleeps_stops_at_once(make: Make) -> None:
    server = make(max_interval=60)
    server.start()
    begun = time.monotonic()

    server.stop()

    assert time.monotonic() - begun < 5


def test_second_start_has_no_effect_and_is_logged(
    make: Make, events: EventQueue, caplog: pytest.LogCaptureFixture
) -> None:
    server = make()
    server.start()

    server.start()

    assert "watchdog started" == next_event(events)[0]
    assert events.empty()
    assert "is already running: start() has no effect" in caplog.text


@pytest.mark.parametrize("early", [True, False], ids=["never started", "started"])
def test_a_server_that_was_stopped_can_be_started_again(make: Make, path: str, early: bool) -> None:
    server = make()
    if not early:
        server.start()
    server.stop()

    server.start()

    assert stat.S_ISFIFO(os.stat(path).st_mode)
    server.stop()
    assert not os.path.exists(path)


def test_an_expired_timer_without_a_signal_is_reported_and_kills_nobody(
    make: Make, events: EventQueue, path: str
) -> None:
    server = make(max_interval=60)
    server.start()

    FileTimerClient(path, signal=0).acquire("step", time.time() + 0.01)

    assert "watchdog started" == next_event(events)[0]
    name, request = next_event(events)
    assert request is not None
    assert ("timer expired", os.getpid(), "step", 0) == (name, request.worker_pid, request.scope_id, request.signal)


def test_a_timer_without_a_signal_takes_no_other_of_its_process_with_it(
    make: Make, events: EventQueue, path: str
) -> None:
    server = make()
    server.start()
    FileTimerClient(path, signal=signal.SIGKILL).acquire("runs", time.time() + 1000)

    FileTimerClient(path, signal=0).acquire("report", time.time())
    assert ["watchdog started", "timer expired"] == [next_event(events)[0], next_event(events)[0]]
    server.run_once()

    (left,) = server.get_expired_timers(time.time() + 2000)[os.getpid()]
    assert "runs" == left.scope_id
    assert events.empty()


def test_the_servers_own_process_is_never_killed(make: Make, events: EventQueue, path: str) -> None:
    server = make()
    server.start()

    FileTimerClient(path, signal=signal.SIGKILL).acquire("step", time.time())

    assert ["watchdog started", "timer expired"] == [next_event(events)[0], next_event(events)[0]]
    server.run_once()


def test_a_released_timer_does_not_expire(make: Make, events: EventQueue, path: str) -> None:
    server = make()
    server.start()
    client = FileTimerClient(path, signal=0)

    client.acquire("a", time.time() + 1000)
    client.acquire("b", time.time() + 1000)
    client.release("a")
    server.run_once()

    assert ["b"] == [timer.scope_id for timer in server.get_expired_timers(time.time() + 2000)[os.getpid()]]


def test_requests_in_the_pipe_are_handled_before_run_once_returns(make: Make, events: EventQueue, path: str) -> None:
    server = make(max_interval=60)
    server.start()
    client = FileTimerClient(path, signal=0)
    for number in range(100):
        client.acquire(str(number), time.time() - 1)

    server.run_once()

    names = [next_event(events)[0] for _ in range(101)]
    assert ["watchdog started", *["timer expired"] * 100] == names
    assert not os.path.lexists(path)


@pytest.mark.parametrize(
    "line",
    [
        b"no json",
        b"[]",
        b'{"version": 1}',
        b"\xff\xfe",
        json.dumps({"version": 2, "pid": 5, "scope_id": "a", "expiration_time": 1, "signal": 9}).encode(),
        json.dumps({"version": 1, "pid": -1, "scope_id": "a", "expiration_time": 1, "signal": 9}).encode(),
        json.dumps({"version": 1, "pid": 1, "scope_id": "a", "expiration_time": 1, "signal": 9}).encode(),
        json.dumps({"version": 1, "pid": 2**40, "scope_id": "a", "expiration_time": 1, "signal": 9}).encode(),
        json.dumps({"version": 1, "pid": 5, "scope_id": 3, "expiration_time": 1, "signal": 9}).encode(),
        json.dumps({"version": 1, "pid": 5, "scope_id": "a", "expiration_time": float("nan"), "signal": 9}).encode(),
        json.dumps({"version": 1, "pid": 5, "scope_id": "a", "expiration_time": 10**400, "signal": 9}).encode(),
        json.dumps({"version": 1, "pid": 5, "scope_id": "a", "expiration_time": 1, "signal": 999}).encode(),
        b"[" * 30_000,
    ],
)
def test_invalid_request_line_does_not_affect_other_timers(
    make: Make, events: EventQueue, path: str, line: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    server = make()
    server.start()
    with open(path, "wb", buffering=0) as pipe:
        pipe.write(line + b"\n")
    FileTimerClient(path, signal=0).acquire("good", time.time() - 1)

    server.run_once()

    scope_ids = [request.scope_id for request in (next_event(events)[1], next_event(events)[1]) if request is not None]
    assert (["good"], True) == (scope_ids, events.empty())
    assert "which is not a request" in caplog.text


GOOD, KEPT = FileTimerRequest(12345, "a", 1.5, 9), FileTimerRequest(54321, "kept", 1.5, 9)


@given(spoiled(GOOD.to_json().encode()) | strange)
@example(b'{"version": 1, "pid": 5, "scope_id": "\\ud800\\u001b[2J", "expiration_time": Infinity, "signal": 9}')
def test_any_line_of_a_worker_is_a_valid_request_or_refused(line: bytes) -> None:
    try:
        request = _fifo._read_request(line)
    except ValueError as error:
        assert len(str(error)) < 200
        return
    ledger = TimerTable[FileTimerRequest]()
    ledger.register([KEPT, request])
    assert 0 <= poll_timeout(ledger, 2.0, 60.0) <= 60.0
    assert KEPT in ledger.expired(2.0)[54321]
    assert request == _fifo._read_request(request.to_json().encode())
    assert request.scope_id == request.scope_id.encode().decode()
    assert 1 < request.worker_pid < 2**31


def test_many_invalid_lines_are_logged_only_a_few_times(
    make: Make, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = make()
    server.start()
    with open(path, "wb", buffering=0) as pipe:
        pipe.write(b"x\n" * 1000)

    server.run_once()

    assert 5 == caplog.text.count("which is not a request")


def test_a_callback_that_raises_does_not_end_the_watch(path: str, caplog: pytest.LogCaptureFixture) -> None:
    def raises(name: str, request: object) -> None:
        raise OSError("no room")

    server = FileTimerServer(path, "job", log_event=raises)
    server.start()
    FileTimerClient(path, signal=0).acquire("a", time.time() - 1)
    server.run_once()

    assert {} == server.get_expired_timers(time.time())
    assert "log_event failed for 'timer expired'" in caplog.text


def test_timers_of_processes_that_have_ended_are_forgotten(make: Make) -> None:
    server = make()
    server.register_timers([FileTimerRequest(2**22 + 1, "a", 5.0), FileTimerRequest(os.getpid(), "b", 5.0)])

    server.clear_timers(set())

    assert {os.getpid()} == server.get_expired_timers(6.0).keys()


def test_progress_is_now_until_there_is_a_thread_and_then_its_own(make: Make, path: str) -> None:
    server = make()
    idle = server.get_last_progress_time()
    server._progress = 5.0  # as if it had been made long ago

    assert server.get_last_progress_time() >= idle
    server.start()
    assert idle <= server.get_last_progress_time() <= time.time()


# The client.


def test_a_request_is_one_json_line_as_torchs_servers_read_it(path: str) -> None:
    os.mkfifo(path)
    pipe = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    client = FileTimerClient(path, signal=signal.SIGTERM)

    client.acquire("step", 12.5)
    client.release("step")
    lines = [json.loads(line) for line in os.read(pipe, 65536).decode().splitlines()]
    os.close(pipe)

    common = {"version": 1, "pid": os.getpid(), "scope_id": "step"}
    assert [{**common, "expiration_time": 12.5, "signal": 15}, {**common, "expiration_time": -1, "signal": 0}] == lines


@pytest.mark.parametrize("there", ["nothing", "a file", "a pipe that nobody reads"])
def test_client_without_server_fails_soon_and_states_how_to_get_one(
    path: str, there: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_fifo, "_PAUSE", 0.0)
    if there == "a file":
        pathlib.Path(path).write_text("")
    elif there != "nothing":
        os.mkfifo(path)

    with pytest.raises(TimerServerError, match="TORCHELASTIC_ENABLE_FILE_TIMER=1") as caught:
        FileTimerClient(path).acquire("step", 1.0)

    assert isinstance(caught.value, BrokenPipeError)


def test_a_request_that_does_not_fit_into_the_pipe_at_once_is_refused(make: Make, path: str) -> None:
    make().start()

    with pytest.raises(TimerError, match=f"takes only {select.PIPE_BUF} at once: give the scope a shorter name"):
        FileTimerClient(path).acquire("x" * select.PIPE_BUF, 1.0)


# Processes that cannot be signalled, such as another user's.


@pytest.fixture
def pid() -> Iterator[int]:
    """A process that runs until the test is over."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:  # which ends with its input
        yield process.pid


def deaf(monkeypatch: pytest.MonkeyPatch, send: Callable[..., None]) -> None:
    """Replace each way to send a signal by *send*."""
    monkeypatch.setattr(signal, "pidfd_send_signal", send)
    monkeypatch.setattr(os, "kill", send)


def test_a_timer_is_reported_once_while_its_process_cannot_be_signalled(
    make: Make, events: EventQueue, pid: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("not yours")

    deaf(monkeypatch, refuse)
    caplog.set_level("INFO", "elasticlib")
    server = make()
    server._pipe = os.open(server._file_path, os.O_RDWR | os.O_NONBLOCK)
    first, second = FileTimerRequest(pid, "a", 5.0, 9), FileTimerRequest(pid, "b", 4.0, 9)

    server.register_timers([first])
    server._turn(to_the_end=False)
    server._turn(to_the_end=False)
    server.register_timers([second])  # another one is news
    server._turn(to_the_end=False)
    server._turn(to_the_end=False)

    assert [("timer expired", first), ("timer expired", second)] == [next_event(events), next_event(events)]
    assert events.empty()
    assert 1 == caplog.text.count("cannot be killed: not yours")
    assert 2 == caplog.text.count("timers expired")
    assert [second, first] == server.get_expired_timers(6.0)[pid], "it is tried again"


def test_a_process_that_can_be_signalled_at_last_is(
    make: Make, events: EventQueue, pid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = [PermissionError("not yours"), None]

    def send(*_: object) -> None:
        if (outcome := outcomes.pop(0)) is not None:
            raise outcome

    deaf(monkeypatch, send)
    server = make()
    server._pipe = os.open(server._file_path, os.O_RDWR | os.O_NONBLOCK)
    server.register_timers([FileTimerRequest(pid, "a", 5.0, 9)])

    server._turn(to_the_end=False)
    server._turn(to_the_end=False)

    assert ["timer expired", "kill worker process"] == [next_event(events)[0], next_event(events)[0]]
    assert {} == server.get_expired_timers(6.0)


@pytest.mark.parametrize(
    ("error", "running"), [(None, True), (PermissionError, True), (ProcessLookupError, False), (OverflowError, False)]
)
def test_process_counts_as_running_unless_kernel_reports_it_missing(
    error: type[Exception] | None, running: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by /proc, which may hide it from this user, or be missing."""

    def kill(pid: int, signum: int) -> None:
        assert (7, 0) == (pid, signum)
        if error is not None:
            raise error

    monkeypatch.setattr(os, "kill", kill)

    assert running is FileTimerServer.is_process_running(7)


def test_expired_timers_are_logged_with_their_job(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "elasticlib")

    _fifo.log_debug_info_for_expired_timers("night", {})
    _fifo.log_debug_info_for_expired_timers("night", {7: ["step"]})

    assert ["job night: timers expired: {7: ['step']}"] == [record.message for record in caplog.records]
