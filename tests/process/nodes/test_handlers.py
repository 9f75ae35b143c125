"""Handlers between real processes: ours over real stores, and both ours and torch's own given to our agents."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from elasticlib.rendezvous import RendezvousParameters, get_rendezvous_handler
from elasticlib.rendezvous.handlers import _round_store
from elasticlib.rendezvous.handlers._c10d_backend import C10dRendezvousBackend
from elasticlib.rendezvous.stores._state_document import decode_document
from tests.process.launches import free_port
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.1)]

ROOT = Path(__file__).parents[3]
SCRIPTS = Path(__file__).parents[1] / "scripts"
PACKAGES = ("elasticlib.elastic", "torch.distributed.elastic")
LIMIT = 90.0
"""Seconds that anything waited for may take."""


class Nodes:
    """Processes with a handler each, all of one job."""

    def __init__(self, *arguments: str, backend: str = "c10d") -> None:
        self.endpoint = f"127.0.0.1:{free_port()}"
        self.backend, self.arguments = backend, arguments
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, **options: Any) -> int:
        return self.spawn("handler_node.py", self.endpoint, self.backend, *self.arguments, json.dumps(options))

    def spawn(self, script: str, *arguments: str) -> int:
        self.processes.append(
            subprocess.Popen(
                [sys.executable, str(SCRIPTS / script), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                bufsize=1,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )
        )
        return len(self.processes) - 1

    def order(self, node: int, *arguments: str) -> None:
        stream = self.processes[node].stdin
        assert stream is not None
        stream.write(" ".join(arguments) + "\n")

    def answer(self, node: int) -> Any:
        stream = self.processes[node].stdout
        assert stream is not None
        assert select.select([stream], [], [], LIMIT)[0], f"node {node} gave no answer within {LIMIT:g} s"
        return json.loads(stream.readline())

    def request(self, node: int, *arguments: str) -> Any:
        self.order(node, *arguments)
        return self.answer(node)

    def meet(self, *nodes: int) -> list[Any]:
        for node in nodes:
            self.order(node, "next")
        return [self.answer(node) for node in nodes]

    def end(self, node: int) -> None:
        stream = self.processes[node].stdin
        assert stream is not None
        stream.close()

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                assert stream is not None
                stream.close()


@pytest.fixture
def started() -> Iterator[list[Nodes]]:
    started: list[Nodes] = []
    yield started
    for nodes in started:
        nodes.close()


def test_a_store_lasts_until_all_nodes_have_left_its_round(monkeypatch: pytest.MonkeyPatch) -> None:
    reach, is_late = _round_store.reach, threading.Event()

    def reach_late(*arguments: Any) -> Any:
        assert is_late.wait(LIMIT)
        return reach(*arguments)

    monkeypatch.setattr(_round_store, "reach", reach_late)
    parameters = RendezvousParameters("c10d", f"127.0.0.1:{free_port()}", "job", 2, 2, local_addr="127.0.0.1")
    with ThreadPoolExecutor() as pool, ExitStack() as stack:
        handlers = [get_rendezvous_handler(parameters) for _ in range(2)]
        for handler in handlers:
            stack.callback(handler.shutdown)
        # The results are ranks alone: a caller that keeps the store of a round keeps it open.
        first = {pool.submit(lambda handler=handler: handler.next_rendezvous().rank): handler for handler in handlers}
        wait_until(lambda: any(found.done() for found in first), LIMIT)
        (_, host), (late, other) = sorted(first.items(), key=lambda item: not item[0].done())

        again = pool.submit(lambda: host.next_rendezvous().rank)
        wait_until(lambda: other.num_nodes_waiting() == 1, LIMIT)
        is_late.set()
        assert late.result(LIMIT / 3) == 1
        assert sorted((other.next_rendezvous().rank, again.result(LIMIT))) == [0, 1]


def test_nodes_meet_over_a_real_store_again_and_again_with_fresh_keys(started: list[Nodes]) -> None:
    nodes = Nodes("2", "2")
    started.append(nodes)
    a, b = nodes.start(), nodes.start()

    ports = []
    for number in range(3):
        places = nodes.meet(a, b)
        stale = nodes.request(b, "get", "key")
        nodes.request(a, "set", "key", str(number))
        ports.append(places[0][2][1])

        assert [0, 1] == sorted(rank for rank, _, _ in places)
        assert places[0][1:] == places[1][1:]
        assert (None, str(number)) == (stale, nodes.request(b, "get", "key"))
    assert 3 == len(set(ports))


def test_a_killed_node_is_noticed_and_the_others_meet_without_it(started: list[Nodes]) -> None:
    nodes = Nodes("1", "2")
    started.append(nodes)
    options = {"last_call_timeout": 2, "heartbeat_timeout": 2}
    host = nodes.start(is_host=True, **options)
    other = nodes.start(is_host=False, **options)
    sizes = [size for _, size, _ in nodes.meet(host, other)]
    nodes.processes[other].send_signal(signal.SIGKILL)

    wait_until(lambda: nodes.request(host, "num_nodes_waiting") > 0)
    [alone] = nodes.meet(host)

    assert ([2, 2], 1) == (sizes, alone[1])


def test_silent_end_of_a_program_is_noticed_at_once(started: list[Nodes]) -> None:
    nodes = Nodes("1", "2")
    started.append(nodes)
    options = {"last_call_timeout": 2, "heartbeat_timeout": 10 * LIMIT}
    host, other = nodes.start(is_host=True, **options), nodes.start(is_host=False, **options)
    nodes.meet(host, other)

    nodes.end(other)
    wait_until(lambda: nodes.request(host, "num_nodes_waiting") > 0)

    assert 0 == nodes.processes[other].wait(LIMIT)


def test_a_program_that_lets_no_thread_run_for_a_while_is_not_missed(started: list[Nodes]) -> None:
    nodes = Nodes("2", "2")
    started.append(nodes)
    host, other = (nodes.start(is_host=each, heartbeat_timeout=4) for each in (True, False))
    nodes.meet(host, other)

    nodes.request(other, "hold", "3")

    assert [0, 0] == [nodes.request(node, "num_nodes_waiting") for node in (other, host)]


def test_waiting_prints_nothing_on_the_programs_stderr(started: list[Nodes]) -> None:
    nodes = Nodes("3", "3")
    started.append(nodes)
    host, other = nodes.start(is_host=True), nodes.start(is_host=False)
    for node in (host, other):
        nodes.order(node, "next")

    streams = [stream for node in (host, other) if (stream := nodes.processes[node].stderr)]
    readable = select.select(streams, [], [], 4.0)[0]
    third = nodes.meet(nodes.start(is_host=False))

    assert (2, []) == (len(streams), readable)
    assert {0, 1, 2} == {place[0] for place in (*third, nodes.answer(host), nodes.answer(other))}


def test_a_closed_job_is_closed_for_all_and_for_late_nodes(started: list[Nodes]) -> None:
    nodes = Nodes("2", "2")
    started.append(nodes)
    a, b = nodes.start(is_host=True), nodes.start(is_host=False)
    nodes.meet(a, b)

    nodes.request(b, "set_closed")
    wait_until(lambda: bool(nodes.request(a, "is_closed")))
    [late] = nodes.meet(nodes.start(is_host=False))

    assert "RendezvousClosedError" == late[0]
    assert [True, True] == [nodes.request(node, "shutdown") for node in (a, b)]


def test_static_nodes_have_given_ranks_and_a_port_without_old_keys(started: list[Nodes]) -> None:
    nodes = Nodes("2", "2", backend="static")
    started.append(nodes)
    second, first = nodes.start(rank=1), nodes.start(rank=0)

    places = nodes.meet(second, first)
    nodes.request(first, "set", "key", "old")
    again = nodes.meet(second, first)

    assert [1, 0] == [rank for rank, _, _ in places] == [rank for rank, _, _ in again]
    assert [nodes.endpoint] * 4 == [f"{host}:{port}" for _, _, (host, port) in (*places, *again)]
    assert nodes.request(second, "get", "key") is None
    assert [0, False] == [nodes.request(first, "num_nodes_waiting"), nodes.request(first, "is_closed")]


def agents(package: str, tmp_path: Path, restarts: int, failures: int) -> list[Any]:
    """The outcomes of two agents that met by the c10d handler of *package*, by group rank."""
    endpoint = f"127.0.0.1:{free_port()}"
    agent = [sys.executable, str(SCRIPTS / "foreign_agent.py"), package, endpoint, str(restarts)]
    command = [*agent, str(SCRIPTS / "foreign_worker.py"), str(tmp_path), str(failures)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    ]
    try:
        ends = [process.communicate(timeout=LIMIT) for process in running]
    finally:
        for process in running:
            process.kill()
            process.communicate()
    assert [0, 0] == [process.returncode for process in running], "\n".join(error for _, error in ends)
    return sorted((json.loads(out.splitlines()[-1]) for out, _ in ends), key=lambda outcome: int(outcome[1]))


@pytest.mark.parametrize("package", PACKAGES)
def test_agents_of_a_handler_restart_together_and_agree_on_the_end(package: str, tmp_path: Path) -> None:
    outcomes = agents(package, tmp_path, restarts=2, failures=1)

    notes = {path.name: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert [["SUCCEEDED", 0, {}], ["SUCCEEDED", 1, {}]] == outcomes
    assert {"0-0", "0-1", "1-0", "1-1"} == set(notes)
    assert [3] * 4 == [note["sum"] for note in notes.values()]
    for attempt in "01":
        assert notes[f"{attempt}-0"] == notes[f"{attempt}-1"]
    assert notes["0-0"]["MASTER_PORT"] != notes["1-0"]["MASTER_PORT"]


@pytest.mark.parametrize("package", PACKAGES)
def test_without_a_restart_left_both_agents_name_the_same_root_cause(package: str, tmp_path: Path) -> None:
    outcomes = agents(package, tmp_path, restarts=0, failures=1)

    assert ["FAILED", "FAILED"] == [state for state, _, _ in outcomes]
    assert ["attempt 0 was doomed"] * 2 == [failures["1"].split(": ")[-1] for _, _, failures in outcomes]


# Nodes that meet in a state which a program's own backend holds: any of them may coordinate, and any may go.

QUICK = {"last_call_timeout": 1, "keep_alive_interval": 1, "keep_alive_max_attempt": 4, "heartbeat_timeout": 4}
"""A silence of four seconds is the end of a node, half of that the end of a coordinator."""


class StateNodes(Nodes):
    """Processes with a handler each, and the store that holds their state in this one."""

    def __init__(self, least: int, most: int) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        super().__init__(str(least), str(most))
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def start(self, **options: Any) -> int:
        return self.spawn("state_node.py", str(self.store.port), *self.arguments, json.dumps(QUICK | options))

    def leader(self) -> int:
        """Which of them coordinates."""
        found = C10dRendezvousBackend(self.store, "job").get_state()
        assert found is not None
        token = decode_document(found[0]).items["/job/leader"].data.decode()
        pids = [process.pid for process in self.processes]
        return pids.index(int(token.partition("/")[2].partition("-")[0]))


@pytest.mark.sampled(0.5)
def test_nodes_of_a_shared_state_meet_again_and_again_and_end_together(started: list[Nodes]) -> None:
    nodes = StateNodes(2, 2)
    started.append(nodes)
    a, b = nodes.start(), nodes.start()

    ports = []
    for number in range(3):
        places = nodes.meet(a, b)
        stale = nodes.request(b, "get", "key")
        nodes.request(a, "set", "key", str(number))
        ports.append(places[0][2])

        assert [0, 1] == sorted(rank for rank, _, _ in places)
        assert places[0][1:] == places[1][1:]
        assert (None, str(number)) == (stale, nodes.request(b, "get", "key"))
        nodes.order(a, "next")
        wait_until(lambda: nodes.request(b, "num_nodes_waiting") > 0)
        nodes.order(b, "next")
        assert {0, 1} == {nodes.answer(a)[0], nodes.answer(b)[0]}
    assert 3 == len(set(ports))

    nodes.request(b, "set_closed")
    wait_until(lambda: bool(nodes.request(a, "is_closed")))
    assert [True, True] == [nodes.request(node, "shutdown") for node in (a, b)]


@pytest.mark.sampled(0.5)
def test_another_node_takes_over_when_the_leader_is_killed(started: list[Nodes]) -> None:
    nodes = StateNodes(2, 3)
    started.append(nodes)
    three = [nodes.start() for _ in range(3)]
    sizes = [size for _, size, _ in nodes.meet(*three)]
    killed = nodes.leader()
    nodes.processes[killed].send_signal(signal.SIGKILL)

    left = [node for node in three if node != killed]
    for node in left:
        wait_until(lambda node=node: nodes.request(node, "num_nodes_waiting") > 0)  # type: ignore[misc]
    again = nodes.meet(*left)

    assert [3, 3, 3] == sizes
    assert [(0, 2), (1, 2)] == sorted((rank, size) for rank, size, _ in again)
    assert nodes.leader() in left


PLUGIN = """
    import torch.distributed as dist
    from elasticlib.rendezvous import RendezvousInfo, RendezvousStoreInfo

    class Alone:
        use_agent_store = False

        def __init__(self, params):
            self.params, self.closed = params, False

        def get_backend(self):
            return "alone"

        def get_run_id(self):
            return self.params.run_id

        def next_rendezvous(self):
            store = dist.PrefixStore("round", dist.HashStore())
            return RendezvousInfo(store, 0, 1, RendezvousStoreInfo.build(0, store, "127.0.0.1"))

        def is_closed(self):
            return self.closed

        def set_closed(self):
            self.closed = True

        def num_nodes_waiting(self):
            return 0

        def shutdown(self):
            self.closed = True
            return True

    def creator():
        return Alone
"""


def test_launch_uses_a_plugins_handler_and_names_a_broken_one(tmp_path: Path) -> None:
    (tmp_path / "alone.py").write_text(textwrap.dedent(PLUGIN))
    info = tmp_path / "alone-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: alone\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[torchrun.handlers]\nalone = alone:creator\nbroken = alone:absent\n")
    script = tmp_path / "work.py"
    script.write_text(
        "import os\n"
        "facts = [os.environ[name] for name in ('TORCHELASTIC_RUN_ID', 'RANK', 'WORLD_SIZE')]\n"
        "os.write(1, (' '.join(facts) + '\\n').encode())\n"
    )
    options = ["--rdzv-backend", "alone", "--rdzv-endpoint", "nowhere:1", "--rdzv-id", "j1", "--nproc-per-node", "2"]

    done = subprocess.run(
        [sys.executable, "-m", "elasticlib.run", *options, "--preload", "", str(script)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )

    assert 0 == done.returncode, done.stderr
    assert ["j1 0 2", "j1 1 2"] == sorted(done.stdout.splitlines())
    assert 1 == done.stderr.count("rendezvous plug-in 'broken' (alone:absent) is ignored")
