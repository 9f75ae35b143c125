"""A job on etcd among strangers: what they write, put back or delete makes no ranks, and nodes that go leave no key."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticlib.rendezvous._node_job import NodeJob
from elasticlib.rendezvous.stores._keys import Keys
from elasticlib.rendezvous.stores.etcd._backend import EtcdBackend
from elasticlib.rendezvous.stores.etcd._etcd_server import EtcdServer
from tests.etcd import running_etcd
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.2)]

LIMIT = 40.0
HEARTBEAT = 3.0
SCRIPT = Path(__file__).parents[1] / "scripts" / "node.py"
ROOT = SCRIPT.parent.parent.parent.parent
STRANGER = "10.6.6.6"


@pytest.fixture
def server() -> Iterator[EtcdServer]:
    with running_etcd() as server:
        yield server


def job(server: EtcdServer, node: str, token: str | None) -> NodeJob:
    return NodeJob(
        run_id="job", node=node, backend="etcd", endpoint=server.get_endpoint(), min_nodes=1, max_nodes=3,
        heartbeat=HEARTBEAT, last_call=0.5, reconnect_timeout=5.0, close_timeout=5.0, token=token,
    )  # fmt: skip


class Node:
    """A launcher with its sidecar (scripts/node.py), in a session of its own."""

    def __init__(self, part: NodeJob) -> None:
        self.name = part.node
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        # The token is part of no plain job, so that no command line shows it.
        facts = {**part.plain(), **({"token": part.token} if part.token else {})}
        self.popen = subprocess.Popen(
            [sys.executable, str(SCRIPT), json.dumps(facts)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )
        self.messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.all: list[dict[str, Any]] = []
        self.pids: set[int] = set()
        self.log = b""
        self._threads = [threading.Thread(target=self._read), threading.Thread(target=self._read_log)]
        for thread in self._threads:
            thread.start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        with self.popen.stdout as lines:
            for line in lines:
                message = json.loads(line)
                self.all.append(message)
                self.pids |= {message["process"], message.get("workers", message["process"])}
                self.messages.put(message)

    def _read_log(self) -> None:
        assert self.popen.stderr is not None
        with self.popen.stderr as lines:
            for line in lines:
                self.log += line

    def next_message(self, *wanted: str) -> dict[str, Any]:
        """Return the next message of these kinds."""
        deadline = time.monotonic() + LIMIT
        while True:
            message = self.messages.get(timeout=max(0.0, deadline - time.monotonic()))
            if message["what"] in wanted:
                return message

    def sits_with(self, size: int) -> dict[str, Any]:
        """Its first seat in a round of so many nodes."""
        while (assignment := self.next_message("seat"))["size"] != size:
            pass
        return assignment

    def kill(self) -> None:
        """As its machine's end: nobody says goodbye."""
        for pid in {self.popen.pid, *self.pids}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.popen.wait()

    def close(self) -> None:
        self.kill()
        for thread in self._threads:
            thread.join()
        self.kill()


Start = Callable[..., Node]


@pytest.fixture
def start(server: EtcdServer) -> Iterator[Start]:
    """Starts nodes of one job."""
    nodes: list[Node] = []

    def new(token: str | None = "secret") -> Node:
        nodes.append(Node(job(server, f"n{len(nodes)}/1-a", token)))
        return nodes[-1]

    yield new
    for node in nodes:
        node.close()


@pytest.fixture
def keys(server: EtcdServer) -> Keys:
    """A stranger's connection."""
    return EtcdBackend(job(server, "stranger", None)).connect(LIMIT)


PLACE = "/torchelastic/p2p/job_job"


def read(keys: Keys, name: str) -> bytes:
    (item,), _ = keys.read([f"{PLACE}/{name}"])
    return b"" if item is None else item.data


def leader_of(keys: Keys, nodes: list[Node]) -> Node:
    """Return the node that coordinates."""
    name = read(keys, "leader").decode().rpartition("/")[0]
    (leader,) = [node for node in nodes if node.name == name]
    return leader


def with_a_stranger(document: bytes) -> bytes:
    """The coordinator's document, with another node that waits for ranks: it would be the workers' master."""
    start = document.index(b"{")
    body = json.loads(document[start:])
    state = json.loads(body["state"])
    state["waiting"].append(["evil/1-a", 1, 1, "trainer", [STRANGER], 4000, None, True, ""])
    state["received"]["evil/1-a"] = 1
    body["state"] = json.dumps(state)
    return document[:start] + json.dumps(body).encode()


def test_with_a_token_a_document_that_a_stranger_edited_seats_nobody(start: Start, keys: Keys) -> None:
    nodes = [start(), start()]
    for node in nodes:
        node.sits_with(2)
    leader = leader_of(keys, nodes)
    (other,) = [node for node in nodes if node is not leader]
    leader.kill()
    keys.write({f"{PLACE}/state": with_a_stranger(read(keys, "state"))})

    end = other.next_message("final", "error", "seat")

    assert end["what"] != "seat", end
    assert other.popen.wait(LIMIT) in (0, 1)
    assert STRANGER not in json.dumps(other.all)
    wait_until(lambda: b"state in the store was signed with another token, or for another job" in other.log, LIMIT)


def test_restored_older_document_ends_the_job_with_a_clear_reason(start: Start, keys: Keys) -> None:
    nodes = [start(), start()]
    for node in nodes:
        node.sits_with(2)
    old = read(keys, "state")
    nodes.append(start())
    assignments = [node.sits_with(3) for node in nodes]
    leader = leader_of(keys, nodes)
    leader.kill()
    keys.write({f"{PLACE}/state": old})

    others = [node for node in nodes if node is not leader]
    ends = [node.next_message("final", "error", "seat") for node in others]

    assert not [end for end in ends if end["what"] == "seat"], (assignments, ends)
    reasons = " ".join(str(end) for end in ends) + " ".join(node.log.decode() for node in others)
    assert "the job's saved state was replaced by an older one" in reasons


def test_job_continues_when_a_stranger_deletes_the_leaders_key(start: Start, keys: Keys) -> None:
    first = start()
    first.sits_with(1)
    holder = read(keys, "leader")
    keys.delete([f"{PLACE}/leader"])
    wait_until(lambda: read(keys, "leader") not in (b"", holder), LIMIT)

    second = start()

    assert 2 == second.next_message("seat")["size"]
    assert 2 == first.sits_with(2)["size"]


def count(keys: Keys) -> int:
    """Return the number of keys of the job, without messages in transit."""
    return len(keys.entries(f"{PLACE}/keys", 0)[0])


def test_nodes_leave_no_key_behind_after_their_end(start: Start, keys: Keys) -> None:
    first = start()
    first.sits_with(1)
    wait_until(lambda: count(keys) <= 3, LIMIT)
    for is_killed in (False, True):
        other = start()
        other.sits_with(2)
        first.sits_with(2)
        if is_killed:
            os.kill(other.popen.pid, signal.SIGKILL)  # its sidecar says so
        else:
            other.kill()
        first.sits_with(1)

        # The greeting, the coordinator's heartbeat and this node's; what it reads is gone as soon as it has read it.
        wait_until(lambda: count(keys) <= 3, LIMIT)
