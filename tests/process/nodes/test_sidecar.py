"""The sidecar with a real store: it goes with its launcher, and sees workers end that nobody else can."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticlib import processes
from elasticlib.errors import ConfigError, RendezvousError
from elasticlib.processes._wire import wait_readable
from elasticlib.rendezvous._node_job import NodeJob
from elasticlib.rendezvous.sidecar._sidecar_client import SidecarClient

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.2)]

LIMIT = 30.0
HEARTBEAT = 3.0
HERE = Path(__file__).parents[1]


class Node:
    """A launcher with its sidecar and a process for its workers (scripts/node.py)."""

    def __init__(
        self, port: int, name: str, host: bool, sizes: tuple[int, int], path: str = "", stderr: Any = None,
        reconnect: float = 5.0,
    ) -> None:  # fmt: skip
        job = NodeJob(
            run_id="job",
            node=f"{name}/1-a",
            backend="c10d",
            endpoint=f"127.0.0.1:{port}",
            min_nodes=sizes[0],
            max_nodes=sizes[1],
            heartbeat=HEARTBEAT,
            is_host=host,
            last_call=0.5,
            reconnect_timeout=reconnect,
            close_timeout=5.0,
        )
        path = os.pathsep.join([path, str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")])
        self.popen = subprocess.Popen(
            [sys.executable, str(HERE / "scripts" / "node.py"), json.dumps(job.plain())],
            stdout=subprocess.PIPE,
            stderr=stderr,
            env={**os.environ, "PYTHONPATH": path},
        )
        self.messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.pids: set[int] = set()
        self.process = 0
        self.workers = 0
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        with self.popen.stdout as lines:
            for line in lines:
                self.messages.put(json.loads(line))

    def next_message(self, *wanted: str) -> dict[str, Any]:
        """Return the next message of these kinds."""
        deadline = time.monotonic() + LIMIT
        while True:
            message = self.messages.get(timeout=max(0.0, deadline - time.monotonic()))
            self.process = message["process"]
            self.workers = message.get("workers", self.workers)
            self.pids |= {self.process, self.workers} - {0}
            if message["what"] in wanted:
                return message

    def stop_process(self, signum: int) -> None:
        os.kill(self.process, signum)

    def close(self) -> None:
        self.popen.kill()
        self.popen.wait()
        self._reader.join()
        with contextlib.suppress(queue.Empty):
            while True:
                message = self.messages.get_nowait()
                self.pids |= {message["process"], message.get("workers", message["process"])}
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


Start = Callable[..., Node]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts nodes of one job; the first one hosts its store."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    nodes: list[Node] = []

    def new(*, least: int = 1, most: int = 2, **more: Any) -> Node:
        nodes.append(Node(port, f"n{len(nodes)}", not nodes, (least, most), **more))
        return nodes[-1]

    yield new
    for node in nodes:
        node.close()


def ends_within(pid: int, limit: float) -> bool:
    try:
        handle = processes.handle_of(pid)
    except ProcessLookupError:
        return True
    try:
        processes.wait_for_ends([handle], limit)
        return handle.has_ended()
    finally:
        handle.close()


def pair(start: Start, **more: Any) -> tuple[Node, Node]:
    """Two nodes that are seated together."""
    host, other = start(least=1, **more), start(least=1, **more)
    while host.next_message("seat")["size"] != 2:
        pass
    while other.next_message("seat")["size"] != 2:
        pass
    return host, other


def test_killed_launcher_leaves_no_workers_and_no_sidecar(start: Start) -> None:
    _, other = pair(start)

    other.popen.kill()

    assert ends_within(other.workers, 5.0)
    assert ends_within(other.process, 5.0)


def test_other_nodes_learn_of_a_killed_launcher_at_once_and_continue(start: Start) -> None:
    host, other = pair(start)

    began = time.monotonic()
    other.popen.kill()
    assignment = host.next_message("seat")

    assert assignment["size"] == 1
    assert assignment["at"] - began < HEARTBEAT


def test_other_nodes_name_the_stores_host_after_its_death(start: Start) -> None:
    host, other = pair(start)

    host.popen.kill()
    message = other.next_message("final", "error")

    assert "n0" in message["why"]


@pytest.mark.parametrize("hosts_store", [False, True])
def test_killed_sidecar_is_replaced_and_both_nodes_continue(start: Start, hosts_store: bool) -> None:
    """Its node asks for ranks again, under its name."""
    nodes = pair(start, reconnect=LIMIT)
    hit, other = reversed(nodes) if not hosts_store else nodes
    killed = hit.process

    os.kill(killed, signal.SIGKILL)

    assert f"the sidecar (pid {killed}) of this node" in hit.next_message("lost", "error")["why"]
    rounds = {node: next_round_of_both(node) for node in nodes}
    while rounds[hit] != rounds[other]:  # one of them was lost once more
        behind = min(rounds, key=rounds.__getitem__)
        rounds[behind] = next_round_of_both(behind)
    assert rounds[hit] > 0
    assert hit.process != killed


def next_round_of_both(node: Node) -> int:
    while (seat := node.next_message("seat", "error")).get("size") != 2:
        assert "seat" == seat["what"], seat  # where the new process comes late, the node was lost meanwhile
    return int(seat["round"])


def test_workers_of_a_stopped_launcher_die_before_their_successors(start: Start) -> None:
    host, other = pair(start)
    workers = other.workers

    os.kill(other.popen.pid, signal.SIGSTOP)
    assignment = host.next_message("seat")

    assert assignment["size"] == 1
    assert ends_within(workers, 0.0)


def test_a_launcher_that_wakes_up_asks_for_ranks_again(start: Start) -> None:
    host, other = pair(start)
    os.kill(other.popen.pid, signal.SIGSTOP)
    host.next_message("seat")

    os.kill(other.popen.pid, signal.SIGCONT)

    assert other.next_message("lost", "seat", "error")["what"] == "lost"
    assert other.next_message("seat", "error")["size"] == 2


def test_a_short_pause_of_a_launcher_costs_nothing(start: Start) -> None:
    host, other = pair(start)
    os.kill(other.popen.pid, signal.SIGSTOP)
    assert not ends_within(other.workers, 0.25 * HEARTBEAT)

    os.kill(other.popen.pid, signal.SIGCONT)

    assert not ends_within(other.workers, 1.5 * HEARTBEAT)
    assert host.messages.empty() and other.messages.empty()


def test_contact_is_lost_in_time_when_the_sidecar_stands_still(start: Start) -> None:
    host, other = pair(start)
    other.stop_process(signal.SIGSTOP)

    lost, assignment = other.next_message("lost"), host.next_message("seat")

    assert "does not answer" in lost["why"]
    assert lost["at"] < assignment["at"]
    assert ends_within(other.workers, 0.0)


def test_sidecar_survives_signals_that_scheduler_sends_every_process(start: Start) -> None:
    host, other = pair(start)

    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        other.stop_process(signum)

    assert not ends_within(other.process, 0.5)
    assert host.messages.empty() and other.messages.empty()


SLOW_TORCH = """
import ctypes, os, sys

class Disk:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            sys.meta_path.remove(self)
            while not os.path.exists({loaded!r}):
                ctypes.PyDLL(None).usleep(100_000)  # the interpreter's lock is held, as while a library is loaded
        return None

sys.meta_path.insert(0, Disk())
"""
"""A ``sitecustomize``: torch comes from a disk that takes its time."""


def test_a_slow_import_of_torch_is_waited_for_and_named(start: Start, tmp_path: Path) -> None:
    loaded, log = tmp_path / "loaded", tmp_path / "log"
    (tmp_path / "sitecustomize.py").write_text(SLOW_TORCH.format(loaded=str(loaded)))
    start().next_message("seat")
    with log.open("w") as stderr:
        slow = start(path=str(tmp_path), stderr=stderr)
    deadline = time.monotonic() + LIMIT
    while "import torch" not in log.read_text() and "is not a store" not in log.read_text():
        assert time.monotonic() < deadline
        threading.Event().wait(0.05)
    loaded.touch()

    assert 2 == slow.next_message("seat", "lost", "error")["size"]
    assert "n1/1-a has waited 5 s for job 'job': `import torch` takes so long" in log.read_text()
    assert "is not a store" not in log.read_text()


def test_a_job_that_cannot_work_is_refused_as_over_there() -> None:
    member = SidecarClient(NodeJob(run_id="job", node="n/1-a", backend="c10d", endpoint="127.0.0.1:99999"))
    member.join(1, "trainer")
    try:
        with pytest.raises((ConfigError, RendezvousError), match="99999"):
            while True:
                assert wait_readable([member], LIMIT)
                member.drain()
    finally:
        member.close()


def test_a_member_that_parts_leaves_no_process(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    member = SidecarClient(NodeJob(run_id="job", node="n/1-a", backend="c10d", endpoint=endpoint))
    member.join(1, "trainer")
    assert wait_readable([member], LIMIT)

    began = time.monotonic()
    member.close()

    assert time.monotonic() - began < 5.0
    with pytest.raises(ProcessLookupError):
        os.kill(member._process.child.pid, 0)
