"""A server that coordinates jobs outside their nodes: any node may die, and what becomes of jobs, ids and strangers."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest

from elasticlib.rendezvous._node_job import NodeJob
from elasticlib.rendezvous.serving._requests import MARK, NO_JOB
from elasticlib.rendezvous.stores._c10d import C10dBackend
from elasticlib.rendezvous.stores._torch_store import SERVES, StoreExchange
from tests.process.launches import Launch, Program, environment, free_port
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.3)]

WORK = """
import os, sys
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
sys.stdin.read()
print("done", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
"""
SERVES_IN_BLOCK = """
import sys
from elasticlib.rendezvous import serve
with serve(port=0, host="127.0.0.1") as endpoint:
    print(endpoint, flush=True)
    sys.stdin.read()
print("after", flush=True)
"""
Start = Callable[..., Launch]


class Server(Program):
    """``elasticrun serve``, once it serves."""

    def __init__(self, port: int, *options: str, **variables: str) -> None:
        command = ("-m", "elasticlib.run", "serve", "--port", str(port), *options)
        super().__init__(*command, env=environment(**variables))
        self.wait_for_line("elasticrun serve: at")

    def stop(self, signum: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        self.popen.send_signal(signum)
        return self.ends()


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


@pytest.fixture
def server(port: int, stack: ExitStack) -> Server:
    return stack.enter_context(closing(Server(port)))


@pytest.fixture
def start(port: int, stack: ExitStack) -> Start:
    """Starts nodes of jobs at the endpoint."""

    def new(run_id: str, nnodes: str, **conf: object) -> Launch:
        program = (sys.executable, "-c", WORK)
        conf = {"wait_for": "max", "heartbeat_timeout": 4, **conf}
        options = ("--nnodes", nnodes, "--nproc-per-node", "1")
        return stack.enter_context(closing(Launch(port, run_id, options, program, **conf)))

    return new


def stranger_at(port: int) -> StoreExchange:
    """A connection to the keys between nodes and server."""
    job = NodeJob(run_id=NO_JOB, node="x", backend="c10d", endpoint=f"127.0.0.1:{port}", is_host=False)
    exchange = C10dBackend(job).dial(10.0)
    assert isinstance(exchange, StoreExchange)
    return exchange


def at_rank(nodes: list[Launch], rank: int, size: int) -> Launch:
    [found] = [node for node in nodes if any(f"rank {rank} of {size}" == line for line in node.log)]
    return found


def at_work(nodes: list[Launch], size: int) -> None:
    for node in nodes:
        node.wait_for_line(f" of {size}")


def finish(nodes: list[Launch]) -> None:
    """Let all workers end well: each node succeeds, and no restart was used."""
    for node in nodes:
        node.finish()
    for node in nodes:
        status, output = node.ends()
        assert (0, 1) == (status, output.count("done 0")), output


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_any_node_may_be_killed_and_no_restart_is_used(rank: int, server: Server, start: Start) -> None:
    nodes = [start("job", "2:3") for _ in range(3)]
    at_work(nodes, 3)

    victim = at_rank(nodes, rank, 3)
    victim.popen.kill()

    left = [node for node in nodes if node is not victim]
    at_work(left, 2)
    finish(left)
    server.wait_for_line("job 'job' is over: all 2 nodes succeeded in round 1")


def test_job_continues_with_replacements_of_all_nodes(server: Server, start: Start) -> None:
    for node in (first := [start("job", "2:3") for _ in range(3)]):
        node.wait_for_line(" of 3")
    for node in first:
        node.popen.kill()

    nodes = [start("job", "2:3") for _ in range(3)]
    at_work(nodes, 3)

    finish(nodes)
    server.wait_for_line("job 'job' is over: all 3 nodes succeeded in round 1")


def test_node_whose_sidecar_is_killed_joins_its_job_again(server: Server, start: Start) -> None:
    nodes = [start("job", "2") for _ in range(2)]
    at_work(nodes, 2)

    os.kill(nodes[0].rendezvous_process(), signal.SIGKILL)

    for node in nodes:
        node.wait_for_line(" of 2", times=2)
    finish(nodes)


def test_job_that_is_over_leaves_a_free_id_and_no_keys(server: Server, start: Start, port: int) -> None:
    for times in (1, 2):
        nodes = [start("job", "2") for _ in range(2)]
        at_work(nodes, 2)
        finish(nodes)
        server.wait_for_line("job 'job' is over: all 2 nodes succeeded in round 0", times)

    store = stranger_at(port).store
    assert store is not None
    # Counters, and what a node looks for first.
    assert {f"elasticlib/{key}" for key in ("serves", "server", "/mark", "/guests", "/inbox")} == set(store.list_keys())


def test_two_jobs_at_once_stay_apart(server: Server, start: Start) -> None:
    one, other = [start("one", "2") for _ in range(2)], [start("other", "2") for _ in range(2)]
    at_work(one + other, 2)

    finish(one)
    assert [None, None] == [node.popen.poll() for node in other]
    finish(other)

    assert (0, 1) == (server.stop()[0], sum("job 'one' is over" in line for line in server.log))


def test_one_job_too_many_is_refused_with_the_reason(port: int, stack: ExitStack, start: Start) -> None:
    stack.enter_context(closing(Server(port, "--max-jobs", "1")))
    first = start("first", "1:2", wait_for="min")
    at_work([first], 1)

    status, output = start("second", "1:2").ends()

    assert (1, True) == (status, "it hosts 1 jobs already: start it with a larger --max-jobs" in output), output
    finish([first])


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_ends_the_server_well_and_its_jobs_with_the_reason(
    signum: signal.Signals, server: Server, start: Start
) -> None:
    nodes = [start("job", "2") for _ in range(2)]
    at_work(nodes, 2)

    status, output = server.stop(signum)

    assert (0, False) == (status, "Traceback" in output), output
    for node in nodes:
        status, output = node.ends()
        assert (1, True) == (status, f"which coordinated the job, ended: it got {signum.name}" in output), output


@pytest.mark.parametrize("restarts", [True, False])
def test_nodes_name_a_server_that_was_killed(
    restarts: bool, server: Server, start: Start, port: int, stack: ExitStack
) -> None:
    # So long that no launcher replaces its sidecar, which stands still while a server starts.
    nodes = [start("job", "2", heartbeat_timeout=60) for _ in range(2)]
    at_work(nodes, 2)
    sidecars = [node.rendezvous_process() for node in nodes]
    for pid in sidecars:
        os.kill(pid, signal.SIGSTOP)

    server.popen.kill()
    server.popen.wait()
    if restarts:
        stack.enter_context(closing(Server(port)))
    for pid in sidecars:
        os.kill(pid, signal.SIGCONT)

    why = "was started again, and has no data of this job" if restarts else "no process listens there"
    for node in nodes:
        status, output = node.ends()
        assert (1, True) == (status, why in output), output
        assert "of the server" in output and "which coordinated this job" in output, output


def test_nodes_with_another_token_are_refused(
    port: int, stack: ExitStack, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = stack.enter_context(closing(Server(port, ELASTICLIB_TOKEN="s3cr3t")))
    for token in ("other", ""):
        monkeypatch.setenv("ELASTICLIB_TOKEN", token)
        status, output = start("job", "1:2").ends()
        assert (1, True) == (status, "set ELASTICLIB_TOKEN to the same secret" in output), output

    monkeypatch.setenv("ELASTICLIB_TOKEN", "s3cr3t")
    nodes = [start("job", "2") for _ in range(2)]
    at_work(nodes, 2)

    finish(nodes)
    assert "s3cr3t" not in "".join(server.log)


def test_strangers_bytes_are_refused_and_jobs_go_on(server: Server, start: Start, port: int) -> None:
    first = [start("first", "2") for _ in range(2)]
    at_work(first, 2)
    stranger = stranger_at(port)
    assert stranger.store is not None

    for number in range(100):
        stranger.post(b"\xff" * number)
    stranger.post(b"[" * 100_000)
    stranger.write({MARK: b"\xff\x00"})
    stranger.store.set(SERVES, b"second")
    stranger.write({"inbox": b"many"})
    # Each request of a node has the server write its mark again, and read its inbox from the start.
    second = [start("second", "2") for _ in range(2)]
    at_work(second, 2)
    finish(first + second)

    status, output = server.stop()
    assert (0, False) == (status, "Traceback" in output), output
    assert output.count("\n") < 30, output


def test_server_of_a_program_ends_with_its_block(stack: ExitStack, start: Start) -> None:
    program = stack.enter_context(closing(Program("-c", SERVES_IN_BLOCK)))
    endpoint = program.wait_for_line("127.0.0.1:")
    node = stack.enter_context(closing(Launch(int(endpoint.rpartition(":")[2]), "job", wait_for="min").at_work()))

    assert program.popen.stdin is not None
    program.popen.stdin.close()

    assert (0, True) == (program.ends()[0], "after" in program.log)
    status, output = node.ends()
    assert (1, True) == (status, "which coordinated the job, ended: its program ended it" in output), output


def test_server_of_a_program_that_is_killed_ends_with_it(stack: ExitStack) -> None:
    program = stack.enter_context(closing(Program("-c", SERVES_IN_BLOCK)))
    port = int(program.wait_for_line("127.0.0.1:").rpartition(":")[2])

    program.popen.kill()

    def is_refused() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) != 0

    wait_until(is_refused)


def test_address_that_is_taken_is_refused_with_status_2(server: Server, port: int) -> None:
    command = [sys.executable, "-m", "elasticlib.run", "serve", "--port", str(port)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60)

    assert 2 == done.returncode
    assert f"--port={port}: another process already listens on" in done.stderr
