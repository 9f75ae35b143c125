"""Rows 170, 171, 187 to 190 and 196: timers and the watchdog, health check, uninterruptible sleep, debug server."""

from __future__ import annotations

import json
import os
import pathlib
import select
import signal
from typing import Any

import pytest

from tests.checklist._workers import QUICK, names, script
from tests.checklist.peers import Peer

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.1)]


def printed_json(peer: Peer, code: str, *args: str, **env: str) -> Any:
    """Run a program; return the JSON that it prints."""
    done = peer.python(code, *args, env=env)
    assert done.returncode == 0, done.err
    return json.loads(done.out)


# Rows 170 and 171: the agent's own health, and that of its workers.


@pytest.mark.row(170)
def test_health_check_server_holds_the_callback_and_starts_and_stops(peer: Peer) -> None:
    module = peer.module("agent.server.health_check_server")

    server = module.create_healthcheck_server(alive_callback=lambda: 12345, port=0, timeout=60)
    server.start()
    server.stop()

    assert 12345 == server.alive_callback()
    assert 7 == module.HealthCheckServer(lambda: 7, 0, 60).alive_callback()


@pytest.mark.row(170)
@pytest.mark.parametrize("port", ["not a port", "0"])
def test_job_continues_with_any_value_as_health_check_port(peer: Peer, port: str) -> None:
    done = peer.run(script(peer, "note('done')"), env={**QUICK, "TORCHELASTIC_HEALTH_CHECK_PORT": port})

    assert (0, ["done"]) == (done.returncode, names(peer, "done"))


SLEEPER = """
import json, os, sys
import {elastic}.utils.process_state as process_state

home = sys.modules[process_state.read_proc_state.__module__]
home.read_proc_state = lambda pid: "D"  # every process is stuck; nobody can be made so

from {elastic}.agent.server import WorkerSpec
from {elastic}.agent.server.local_elastic_agent import LocalElasticAgent
from {elastic}.multiprocessing import DefaultLogsSpecs
from {elastic}.rendezvous import RendezvousParameters
from {elastic}.rendezvous.registry import get_rendezvous_handler

handler = get_rendezvous_handler(RendezvousParameters("c10d", "localhost:0", "job", 1, 1, "localhost"))
spec = WorkerSpec("trainer", 1, handler, entrypoint="./worker", max_restarts=1, monitor_interval=0.02)
options = json.loads(sys.argv[1])
result = LocalElasticAgent(spec, DefaultLogsSpecs(log_dir="logs"), **options).run()
print(json.dumps(result.state.name))
"""
VARIABLE = "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT"


@pytest.mark.row(171)
@pytest.mark.parametrize(
    ("variable", "argument", "found"),
    [
        (None, None, False),
        ("0.2", None, True),
        ("nonsense", None, False),
        ("0", None, False),
        ("1000", 0.2, True),
        ("0.2", 0.0, False),
    ],
)
def test_argument_for_stuck_workers_beats_the_variable(
    peer: Peer, variable: str | None, argument: float | None, found: bool
) -> None:
    # A worker that nobody stops ends well; one that is to be stopped would run on.
    worker = pathlib.Path(peer.folder / "worker")
    worker.write_text(f"#!/bin/sh\necho >> ran\nexec sleep {100 if found else 1}\n")
    worker.chmod(0o755)
    options = {} if argument is None else {"uninterruptible_state_timeout": argument}

    state = printed_json(peer, SLEEPER, json.dumps(options), **({} if variable is None else {VARIABLE: variable}))

    assert found == (state != "SUCCEEDED")
    assert 1 == len((peer.folder / "ran").read_text().splitlines()), "a worker that is stuck is not restarted"


# Rows 187 to 189: timers.


@pytest.mark.row(187)
def test_a_timer_needs_a_client_and_is_released_however_its_block_ends(peer: Peer) -> None:
    code = """
import json, time
from {elastic} import timer

class Client(timer.TimerClient):
    def acquire(self, scope_id, expiration_time):
        events.append(["acquire", scope_id, 59 < expiration_time - time.time() <= 60])
    def release(self, scope_id):
        events.append(["release", scope_id])

events = []
try:
    with timer.expires(after=60, scope="no client"):
        events.append("entered")
except RuntimeError:
    events.append("refused")
timer.configure(Client())
with timer.expires(after=60, scope="ends well"):
    events.append("inside")
try:
    with timer.expires(after=60, scope="raises"):
        raise KeyError
except KeyError:
    events.append("raised")
print(json.dumps(events))
"""

    assert [
        "refused",
        ["acquire", "ends well", True],
        "inside",
        ["release", "ends well"],
        ["acquire", "raises", True],
        ["release", "raises"],
        "raised",
    ] == printed_json(peer, code)


@pytest.mark.row(188)
def test_a_server_with_a_queue_kills_the_worker_that_is_late_and_no_other(peer: Peer) -> None:
    code = """
import json, multiprocessing, signal
from {elastic} import timer

def late(queue):
    with timer.expires(after=0.1, client=timer.LocalTimerClient(queue)):
        signal.pause()

def early(queue, late_has_ended):
    with timer.expires(after=0.1, client=timer.LocalTimerClient(queue)):
        pass
    with timer.expires(after=1000, client=timer.LocalTimerClient(queue)):
        late_has_ended.wait()

context = multiprocessing.get_context("fork")
queue, late_has_ended = context.Queue(), context.Event()
workers = [context.Process(target=late, args=(queue,)), context.Process(target=early, args=(queue, late_has_ended))]
for worker in workers:
    worker.start()
server = timer.LocalTimerServer(queue, max_interval=0.05)
server.start()
workers[0].join()
late_has_ended.set()
workers[1].join()
server.stop()
print(json.dumps([worker.exitcode for worker in workers]))
"""

    assert [-signal.SIGKILL, 0] == printed_json(peer, code)


@pytest.mark.row(189)
def test_a_client_writes_one_json_line_for_each_request_into_the_pipe(peer: Peer) -> None:
    path = str(peer.folder / "pipe")
    os.mkfifo(path)
    pipe = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    client = peer.module("timer").FileTimerClient(path, signal.SIGTERM)

    client.acquire("step", 12.5)
    client.release("step")
    text = os.read(pipe, 65536).decode()
    os.close(pipe)

    common = {"version": 1, "pid": os.getpid(), "scope_id": "step"}
    assert [{**common, "expiration_time": 12.5, "signal": 15}, {**common, "expiration_time": -1, "signal": 0}] == [
        json.loads(line) for line in text.splitlines()
    ]


@pytest.mark.row(189)
def test_a_server_makes_the_pipe_in_a_files_place_and_reads_such_lines(peer: Peer) -> None:
    path = peer.folder / "pipe"
    path.write_text("old")
    events: list[tuple[str, str | None]] = []
    server = peer.module("timer").FileTimerServer(
        str(path), "job", 0.05, log_event=lambda name, timer: events.append((name, timer and timer.scope_id))
    )
    server.start()

    # To open it in this way waits for a reader.
    with open(path, "w") as pipe:
        mine, other = os.getpid(), os.getppid()
        for pid, scope, at in ((other, "late", 1), (mine, "early", 1e12), (mine, "freed", 1e12), (mine, "freed", -1)):
            facts = {"version": 1, "pid": pid, "scope_id": scope, "expiration_time": at, "signal": 0}
            pipe.write(json.dumps(facts) + "\n")
    assert peer.wait_until(lambda: ("timer expired", "late") in events, 10)

    def left() -> dict[int, list[str]]:
        return {pid: [each.scope_id for each in timers] for pid, timers in server.get_expired_timers(2e12).items()}

    assert peer.wait_until(lambda: left() == {mine: ["early"]}, 10)
    server.stop()

    assert [("watchdog started", None), ("timer expired", "late"), ("watchdog stopped", None)] == sorted(
        events, key=lambda event: ["watchdog started", "timer expired", "watchdog stopped"].index(event[0])
    )
    assert not path.exists()


@pytest.mark.row(189)
def test_a_request_that_is_too_long_for_one_write_is_refused(peer: Peer) -> None:
    path = str(peer.folder / "pipe")
    os.mkfifo(path)
    pipe = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    client = peer.module("timer").FileTimerClient(path)

    with pytest.raises(RuntimeError):
        client.acquire("x" * select.PIPE_BUF, 1.0)

    assert b"" == os.read(pipe, 65536)
    os.close(pipe)


@pytest.mark.row(189)
def test_a_client_without_a_server_gets_a_broken_pipe(peer: Peer) -> None:
    path = str(peer.folder / "pipe")
    os.mkfifo(path)

    with pytest.raises(BrokenPipeError):
        peer.module("timer").FileTimerClient(path).acquire("step", 1.0)


# Row 190: the watchdog of the launcher.

STUCK = """
import {elastic}.timer as timer
timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
signal.alarm(20)
note(f"up{RANK}.{RESTART}")
wait_for(f"up0.{RESTART}", f"up1.{RESTART}")
with timer.expires(after=0.2 if (RANK, RESTART) == (1, 0) else 1000, scope="the step"):
    while RESTART == 0:
        signal.pause()
note(f"done{RANK}.{RESTART}")
"""


@pytest.mark.row(190, improvement=True)
def test_the_watchdog_kills_a_stuck_worker_and_the_group_starts_again(peer: Peer) -> None:
    env = {"TORCHELASTIC_ENABLE_FILE_TIMER": "1"}

    done = peer.run("--nproc-per-node=2", "--max-restarts=1", script(peer, STUCK), env=env)

    assert 0 == done.returncode, done.err
    assert ["done0.1", "done1.1"] == names(peer, "done*")


@pytest.mark.row(190, improvement=True)
def test_report_names_the_expired_timer_when_no_restart_is_left(peer: Peer) -> None:
    path = str(peer.folder / "timers")
    env = {"TORCHELASTIC_ENABLE_FILE_TIMER": "1", "TORCHELASTIC_TIMER_FILE": path}

    done = peer.run("--nproc-per-node=2", "--max-restarts=0", script(peer, STUCK), env=env)

    assert 1 == done.returncode, done.err
    assert "timer 'the step' expired" in done.err
    assert not os.path.exists(path)
    assert [] == names(peer, "done*")


# Row 196: the debug server.

SERVED = """
import http.client, json, os, socket
from {elastic}.control_plane import worker_main

class Connection(http.client.HTTPConnection):
    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(30)
        self.sock.connect("served")

def ping():
    try:
        connection = Connection("localhost")
        connection.request("POST", "/handler/ping")
        return connection.getresponse().read().decode()
    except OSError as error:
        return type(error).__name__

@worker_main()
def main():
    return ping()

print(json.dumps([main(), ping()]))
"""


@pytest.mark.row(196)
def test_worker_main_serves_the_named_socket_while_the_function_runs(peer: Peer) -> None:
    assert ["pong", "ConnectionRefusedError"] == printed_json(peer, SERVED, TORCH_WORKER_SERVER_SOCKET="served")


@pytest.mark.row(196)
def test_worker_main_without_a_socket_just_runs_the_function(peer: Peer) -> None:
    assert ["FileNotFoundError", "FileNotFoundError"] == printed_json(peer, SERVED)
