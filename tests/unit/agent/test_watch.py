"""Watch over workers: when it is on, its findings, its texts about failures, and its cleanup."""

from __future__ import annotations

import http.client
import logging
import os
import queue
import signal
import socket
import stat
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from elasticlib import records
from elasticlib.agent._health import HealthCheckServer
from elasticlib.agent._worker_watch import ENABLE, FILE, Sockets, Watch
from elasticlib.errors import ConfigError, ProcessFailure
from elasticlib.timer import FileTimerClient
from elasticlib.workers.child._serving import SERVER_VARIABLE
from elasticlib.workers.child._start_spec import StartSpec

LIMIT = 20.0
PORT = "TORCHELASTIC_HEALTH_CHECK_PORT"
ASLEEP = "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT"
Make = Callable[..., Watch]
RecordQueue = queue.SimpleQueue[records.Record]


class Worlds:
    """The time, and the states that processes are in."""

    def __init__(self) -> None:
        self.now = 100.0
        self.states: dict[int, str | None] = {}


@pytest.fixture
def reported() -> RecordQueue:
    return queue.SimpleQueue()


@pytest.fixture
def world() -> Worlds:
    return Worlds()


@pytest.fixture
def make(reported: RecordQueue, world: Worlds) -> Iterator[Make]:
    made = []

    def new(environment: dict[str, str] | None = None, **options: Any) -> Watch:
        watch = Watch(
            environment or {},
            "job",
            reported.put,
            read_state=lambda pid: world.states[pid],
            clock=lambda: world.now,
            **options,
        )
        made.append(watch)
        return watch

    yield new
    for watch in made:
        watch.close()


def failure(rank: int = 0, pid: int = 7, exitcode: int = -9, **facts: Any) -> ProcessFailure:
    return ProcessFailure(rank, pid, exitcode, "", message="it ended", rank=rank, **facts)


def test_watch_does_nothing_unless_requested(make: Make, reported: RecordQueue, world: Worlds) -> None:
    watch = make()
    watch.open()

    assert ({}, None, False) == (watch.start(), watch.poll_timeout(0.1), watch.look([7]))
    assert reported.empty()


# The watchdog.


@pytest.mark.parametrize("value", ["0", "true", ""])
def test_watchdog_is_turned_on_by_1_only_with_a_warning_otherwise(
    make: Make, reported: RecordQueue, value: str
) -> None:
    watch = make({ENABLE: value})
    watch.open()

    assert {} == watch.start()
    if value == "true":
        record = reported.get_nowait()
        assert logging.WARNING == record.level
        assert "TORCHELASTIC_ENABLE_FILE_TIMER='true'" in str(record) and "1 turns it on" in str(record)
    assert reported.empty()


def test_path_without_room_for_a_pipe_is_refused_by_its_variable(make: Make, tmp_path: Any) -> None:
    path = str(tmp_path / "no" / "timers")

    with pytest.raises(
        ConfigError, match=f"TORCHELASTIC_TIMER_FILE='{path}': a named pipe cannot be created there"
    ) as caught:
        make({ENABLE: "1", FILE: path}).open()

    assert "file_path" not in str(caught.value)


def test_the_pipe_is_read_from_before_there_are_workers(make: Make) -> None:
    watch = make({ENABLE: "1"})
    watch.open()
    server = watch._watchdog._server

    path = watch.start()[FILE]

    assert server is not None
    assert (server, path) == (watch._watchdog._server, server._file_path)


def test_watchdog_has_a_folder_of_its_own_that_is_removed_with_it(make: Make) -> None:
    watch = make({ENABLE: "1"})

    path = watch.start()[FILE]

    assert stat.S_ISFIFO(os.stat(path).st_mode)
    assert 0o700 == stat.S_IMODE(os.stat(os.path.dirname(path)).st_mode)
    assert {FILE: path} == watch.start(), "the next round's workers use the same"
    watch.close()
    assert not os.path.exists(os.path.dirname(path))


def test_the_users_own_path_is_used_and_only_the_pipe_removed(make: Make, tmp_path: Any) -> None:
    watch = make({ENABLE: "1", FILE: str(tmp_path / "mine")})

    assert {FILE: str(tmp_path / "mine")} == watch.start()
    watch.close()
    assert [] == os.listdir(tmp_path)


def test_a_pipe_that_another_launcher_reads_is_left_to_it(make: Make, tmp_path: Any) -> None:
    """A worker that launches itself has its launcher's variables."""
    environment = {ENABLE: "1", FILE: str(tmp_path / "outer")}
    make(environment).start()

    inner = make(environment).start()

    assert inner[FILE] != environment[FILE]
    assert os.path.exists(environment[FILE])


def test_a_failure_by_an_expired_timer_names_it(make: Make, reported: RecordQueue) -> None:
    watch = make({ENABLE: "1"})
    path = watch.start()[FILE]
    FileTimerClient(path, signal=signal.SIGKILL).acquire("all_reduce", time.time())  # of this process: it is spared
    first_two = [reported.get(timeout=LIMIT), reported.get(timeout=LIMIT)]

    (explained,) = watch.explained({3: failure(3, os.getpid())}, {3: os.getpid()}).values()

    assert ["watchdog started", "timer expired"] == [record.event for record in first_two]  # type: ignore[union-attr]
    assert f"timer 'all_reduce' expired: the watchdog sent SIGKILL to PID {os.getpid()}" == explained.message
    assert "did not leave the timer's block" in explained.hint


def test_worker_that_failed_by_itself_keeps_its_own_message(make: Make, reported: RecordQueue) -> None:
    watch = make({ENABLE: "1"})
    FileTimerClient(watch.start()[FILE]).acquire("all_reduce", time.time())
    reported.get(timeout=LIMIT), reported.get(timeout=LIMIT)

    raised = failure(0, os.getpid(), exception_type="ValueError")
    exited = failure(1, os.getpid(), 3)
    other = failure(2, os.getpid() + 1)
    found = watch.explained({0: raised, 1: exited, 2: other}, {0: 1, 1: 2, 2: 3})

    assert ["it ended"] * 3 == [each.message for each in found.values()]


# Uninterruptible sleep.


def test_a_worker_that_sleeps_too_long_is_past_help_and_named(make: Make, reported: RecordQueue, world: Worlds) -> None:
    watch = make({ASLEEP: "5"})
    watch.start()
    world.states = {7: "S", 8: "D"}

    looks = []
    for world.now in (100.0, 104.9, 105.0):
        looks.append(watch.look([7, 8]))
    found = watch.explained({}, {2: 7, 3: 8})

    assert [False, False, True] == looks
    assert records.WorkerAsleep(8, 5.0) == reported.get_nowait()
    assert reported.empty(), "it is said once"
    assert [3] == list(found)
    assert (True, 1, 8, "PID 8 was in uninterruptible sleep (state D) for 5 s") == (
        found[3].fatal,
        found[3].local_rank,
        found[3].pid,
        found[3].message,
    )


@pytest.mark.parametrize("text", ["5m", "nan", "5", "0", "-1", ""])
def test_sleep_limit_that_is_not_a_number_is_a_warning(make: Make, reported: RecordQueue, text: str) -> None:
    watch = make({ASLEEP: text})
    watch.open()

    if text in ("5m", "nan"):
        record = reported.get_nowait()
        assert (logging.WARNING, None) == (record.level, watch.poll_timeout(0.25))
        assert f"{ASLEEP}={text!r}" in str(record) and "must be a number of seconds" in str(record)
    assert reported.empty()


def test_argument_overrides_a_sleep_limit_that_is_not_a_number(make: Make, reported: RecordQueue) -> None:
    make({ASLEEP: "5m"}, uninterruptible_state_timeout=3.0).open()

    assert reported.empty()


def test_watch_checks_at_each_interval_only_if_requested(make: Make) -> None:
    assert 0.25 == make({ASLEEP: "5"}).poll_timeout(0.25)
    assert 0.25 == make(uninterruptible_state_timeout=5.0).poll_timeout(0.25)
    assert make({ASLEEP: "5"}, uninterruptible_state_timeout=0).poll_timeout(0.25) is None


def test_a_new_round_knows_nothing_of_the_last_ones_sleepers(make: Make, world: Worlds) -> None:
    watch = make({ASLEEP: "5"})
    world.states = {8: "D"}
    watch.start()
    watch.look([8])
    world.now += 5

    watch.start()

    assert (False, {}) == (watch.look([8]), watch.explained({}, {0: 8}))


# The health check.


def test_the_health_check_listens_on_the_port_of_the_environment(make: Make, reported: RecordQueue) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    watch = make({PORT: str(port)})
    watch.open()
    watch.open()

    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT)
    connection.request("GET", "/")
    assert 200 == connection.getresponse().status
    connection.close()
    watch.close()

    assert (
        records.HealthCheckReported(f"the health check listens on port {port}", listens=True) == reported.get_nowait()
    )
    with pytest.raises(ConnectionError):
        socket.create_connection(("127.0.0.1", port))


@pytest.mark.parametrize("text", ["", "http", "70000", "-1", "in use"])
def test_a_port_of_no_use_is_a_warning_and_no_more(make: Make, reported: RecordQueue, text: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        make({PORT: str(other.getsockname()[1]) if text == "in use" else text}).open()

    record = reported.get_nowait()
    assert isinstance(record, records.HealthCheckReported)
    assert (False, True) == (record.listens, record.what.endswith("; the health check is off"))


def test_a_server_of_the_callers_beats_the_port_and_is_stopped_in_the_end(make: Make, reported: RecordQueue) -> None:
    server = HealthCheckServer(lambda: int(time.time()), 0, 60)
    server.start()
    watch = make({PORT: "bad"}, health_check_server=server)
    watch.open()

    watch.close()

    assert reported.empty()
    with pytest.raises(ConnectionError):
        socket.create_connection(("127.0.0.1", server.port))


def test_callers_server_that_cannot_be_stopped_is_a_warning(make: Make, reported: RecordQueue) -> None:
    class Stubborn(HealthCheckServer):
        def stop(self) -> None:
            raise KeyError("x")

    watch = make(health_check_server=Stubborn(lambda: 0, 0, 60))

    watch.close()

    record = reported.get_nowait()
    assert (logging.WARNING, True) == (record.level, "could not be stopped: KeyError: 'x'" in str(record))


def test_an_agent_with_workers_is_as_alive_as_its_last_look_at_them(make: Make) -> None:
    watch = make()
    watch.start()
    idle = watch.alive_time()
    watch.look([])
    watch._turned = 50.0  # as if that had been long ago

    stuck = watch.alive_time()
    watch.rest()

    assert (50, True) == (stuck, 50 < idle <= watch.alive_time() <= time.time())


def test_an_agent_with_a_watchdog_that_hangs_is_not_alive(make: Make) -> None:
    watch = make({ENABLE: "1"})
    watch.start()
    watch.look([])
    server = watch._watchdog._server
    assert server is not None

    server._progress = 50.0

    assert 50 == watch.alive_time()


# Debug servers.


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    made = Sockets(wanted=True)
    yield made
    made.close()


def test_private_folder_of_sockets_is_removed_with_them(sockets: Sockets) -> None:
    folder = sockets.open()
    first, second = (sockets.serving(StartSpec(local_rank=rank)) for rank in (0, 1))

    assert folder is not None
    assert 0o700 == stat.S_IMODE(os.stat(folder).st_mode)
    assert [f"{folder}/0", f"{folder}/1"] == [first.server, second.server]
    sockets.close()
    assert not os.path.exists(folder)


def test_a_start_spec_names_the_socket_for_our_code_and_for_programs(sockets: Sockets) -> None:
    spec = StartSpec(local_rank=1, variables={"RANK": "1"})
    path = f"{sockets.open()}/1"

    served = sockets.serving(spec)

    assert {"server": path, "variables": {"RANK": "1", SERVER_VARIABLE: path}} == served.differences(spec)
    assert {"RANK": "1"} == spec.variables


def test_leftover_of_the_last_round_in_a_sockets_place_is_removed(sockets: Sockets) -> None:
    folder = str(sockets.open())
    open(f"{folder}/0", "w").close()

    sockets.serving(StartSpec(local_rank=0))

    assert [] == os.listdir(folder)


def test_a_long_temporary_folder_does_not_make_the_address_too_long(
    tmp_path: Any, sockets: Sockets, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("x" * 100)))
    os.mkdir(tmp_path / ("x" * 100))

    sockets.open()
    path = sockets.serving(StartSpec(local_rank=100_000)).server

    assert path is not None and len(path) < 108
    assert [] == os.listdir(tmp_path / ("x" * 100))


def test_sockets_create_no_folder_unless_requested() -> None:
    sockets, spec = Sockets(wanted=False), StartSpec(local_rank=0)

    assert (None, spec) == (sockets.open(), sockets.serving(spec))
