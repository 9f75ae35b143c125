"""Nodes that meet in a state which somebody's own back end holds: no coordinator's process, any node may go."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticlib.rendezvous.handlers._c10d_backend import C10dRendezvousBackend
from elasticlib.rendezvous.stores._state_document import decode_document
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.5)]

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).parent / "scripts" / "state_node.py"
LIMIT = 90.0
QUICK = {"last_call_timeout": 1, "keep_alive_interval": 1, "keep_alive_max_attempt": 4, "heartbeat_timeout": 4}
"""A silence of four seconds is the end of a node, half of that the end of a coordinator."""


class Nodes:
    """Processes with a handler each, and the store that holds their state in this one."""

    def __init__(self, least: int, most: int) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.nodes = str(least), str(most)
        self.processes: list[subprocess.Popen[str]] = []

    def start(self) -> int:
        self.processes.append(
            subprocess.Popen(
                [sys.executable, str(SCRIPT), str(self.store.port), *self.nodes, json.dumps(QUICK)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                bufsize=1,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )
        )
        return len(self.processes) - 1

    def order(self, node: int, *words: str) -> None:
        stream = self.processes[node].stdin
        assert stream is not None
        stream.write(" ".join(words) + "\n")

    def answer(self, node: int) -> Any:
        stream = self.processes[node].stdout
        assert stream is not None
        assert select.select([stream], [], [], LIMIT)[0], f"node {node} gave no answer within {LIMIT:g} s"
        return json.loads(stream.readline())

    def ask(self, node: int, *words: str) -> Any:
        self.order(node, *words)
        return self.answer(node)

    def meet(self, *nodes: int) -> list[Any]:
        for node in nodes:
            self.order(node, "next")
        return [self.answer(node) for node in nodes]

    def leader(self) -> int:
        """Which of them coordinates."""
        found = C10dRendezvousBackend(self.store, "job").get_state()
        assert found is not None
        token = decode_document(found[0]).items["/job/leader"].data.decode()
        pids = [process.pid for process in self.processes]
        return pids.index(int(token.partition("/")[2].partition("-")[0]))

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                stream.close()


@pytest.fixture
def started() -> Iterator[list[Nodes]]:
    started: list[Nodes] = []
    yield started
    for nodes in started:
        nodes.close()


def test_nodes_meet_again_and_again_with_fresh_keys_and_end_together(started: list[Nodes]) -> None:
    nodes = Nodes(2, 2)
    started.append(nodes)
    a, b = nodes.start(), nodes.start()

    ports = []
    for number in range(3):
        places = nodes.meet(a, b)
        stale = nodes.ask(b, "get", "key")
        nodes.ask(a, "set", "key", str(number))
        ports.append(places[0][2])

        assert [0, 1] == sorted(rank for rank, _, _ in places)
        assert places[0][1:] == places[1][1:]
        assert (None, str(number)) == (stale, nodes.ask(b, "get", "key"))
        nodes.order(a, "next")
        wait_until(lambda: nodes.ask(b, "num_nodes_waiting") > 0)
        nodes.order(b, "next")
        assert {0, 1} == {nodes.answer(a)[0], nodes.answer(b)[0]}
    assert 3 == len(set(ports))

    nodes.ask(b, "set_closed")
    wait_until(lambda: bool(nodes.ask(a, "is_closed")))
    assert [True, True] == [nodes.ask(node, "shutdown") for node in (a, b)]


def test_when_the_node_that_coordinates_is_killed_another_one_goes_on(started: list[Nodes]) -> None:
    nodes = Nodes(2, 3)
    started.append(nodes)
    three = [nodes.start() for _ in range(3)]
    sizes = [size for _, size, _ in nodes.meet(*three)]
    killed = nodes.leader()
    nodes.processes[killed].send_signal(signal.SIGKILL)

    left = [node for node in three if node != killed]
    for node in left:
        wait_until(lambda node=node: nodes.ask(node, "num_nodes_waiting") > 0)  # type: ignore[misc]
    again = nodes.meet(*left)

    assert [3, 3, 3] == sizes
    assert [(0, 2), (1, 2)] == sorted((rank, size) for rank, size, _ in again)
    assert nodes.leader() in left
