"""
Several nodes of a job in one process, each with a member and connections of its own.

Usage: ``python -m tests.benchmarks.jobs.our_nodes ENDPOINT TOTAL FIRST COUNT [BACKEND [HEARTBEAT]]``: nodes FIRST to
FIRST + COUNT - 1 of TOTAL; with COUNT 0 the process coordinates, and hosts the store unless that is an etcd; with the
BACKEND ``served`` it hosts a server of jobs, and with ``file`` all share the FileStore at the path ENDPOINT. Each line
on stdin is a command, and a line on stdout answers it: ``connect``; ``form``: all ask for the first round; ``again
NODE``: a worker of node NODE fails, and all that are told so ask for the next round; ``write WORKERS LENGTH``: make
what so many workers of every node say as they fail, each a message and a traceback of that length; ``fail``: they all
fail at once, for good. The answer is JSON:
when the first asked, when the last was in (or knew how the job ended), all ranks (or numbers, before there are ranks
and after the end), and the fewest characters of the root cause that any node was told.
"""

import contextlib
import json
import random
import selectors
import sys
import time

import torch.distributed  # noqa: F401  (its import is no part of what is timed)
from attrs import evolve

from elasticlib.rendezvous import serve
from elasticlib.rendezvous._node_job import NodeJob
from elasticlib.rendezvous.net._node_info import BoundNodeInfo
from elasticlib.rendezvous.node._client import NodeClient
from elasticlib.rendezvous.node._coordinator_host import CoordinatorHost
from elasticlib.rendezvous.node._runtime import NodeRuntime, backend_of
from elasticlib.rendezvous.node._session_liveness import Limits
from elasticlib.rendezvous.protocol._messages import (
    ContactLost,
    Failed,
    FailureNote,
    Final,
    RankAssignment,
    RoundEnd,
    Stopped,
)
from elasticlib.rendezvous.stores._c10d import C10dBackend

_SWITCH = 0.1
"""Seconds that a thread may keep the interpreter: of hundreds that wait for it, each would wake up every 5 ms."""
_TICK = 0.2
_LOOK = 0.005
_FAILURE = FailureNote(rank=0, local_rank=0, pid=1, exitcode=1)


class Nodes:
    """All nodes of this process, driven by one thread as an agent drives its own."""

    def __init__(self, job: NodeJob, first: int, count: int) -> None:
        self._job = job
        self._numbers = range(first, first + count)
        self._members: dict[int, NodeClient] = {}
        self._selector = selectors.DefaultSelector()
        self._notes: dict[int, tuple[FailureNote, ...]] = {}
        self._stopped: dict[NodeClient, int] = {}
        """The last round whose end each has heard."""
        self.root = 0

    def connect(self) -> list[tuple[float, int]]:
        """Seek the job; when each was in contact with it, and its number."""
        for number in self._numbers:
            member = self._member(number)
            self._members[number] = member
            self._selector.register(member.fileno(), selectors.EVENT_READ, member)
        numbers = {member: number for number, member in self._members.items()}
        found: dict[int, float] = {}
        while len(found) < len(self._members):
            time.sleep(_LOOK)  # contact alone makes nothing readable
            for member, number in numbers.items():
                if number not in found and member._session.contact.met:
                    found[number] = time.monotonic()
        return [(at, number) for number, at in found.items()]

    def _member(self, number: int) -> NodeClient:
        """The part of one node, which is a host of nothing."""
        name = f"node{number}/1-{number:08x}"
        if self._job.backend in ("served", "static"):  # these need more of a node than its connection
            is_static = self._job.backend == "static"
            place = {"node_rank": number} if is_static else {"backend": "c10d"}
            runtime = NodeRuntime(evolve(self._job, node=name, is_host=False, **place))
            runtime.start()
            return runtime.member
        backend = backend_of(self._job)
        return NodeClient(
            backend.dial,
            name,
            BoundNodeInfo(),
            run_id=self._job.run_id,
            terms=self._job.terms,
            limits=Limits(),
        ).start()

    def form(self) -> list[tuple[float, int]]:
        """All ask for ranks; when each had it, and its rank."""
        for member in self._members.values():
            member.join(1, "default")
        return self._assigned()

    def again(self, node: int) -> list[tuple[float, int]]:
        """A worker of *node* fails, which may live in another process."""
        failed = self._members.get(node)
        if failed is not None:
            assert failed.round is not None
            failed.post(Failed(failed.node, failed.round, (_FAILURE,)))
        return self._assigned()

    def write(self, workers: int, length: int) -> None:
        """Prepare the failure notes of *workers* workers of each node."""
        self._notes = {number: _notes(number, workers, length) for number in self._numbers}

    def fail(self) -> list[tuple[float, int]]:
        """All these workers fail; when each node knew how the job ended, and its number."""
        numbers = {member: number for number, member in self._members.items()}
        for number, member in self._members.items():
            assert member.round is not None
            member.post(Failed(member.node, member.round, self._notes[number]))
        found: list[tuple[float, int]] = []
        lengths: list[int] = []
        while len(found) < len(self._members):
            for key, _ in self._selector.select(_TICK):
                number = numbers[key.data]
                for event in key.data.drain():
                    match event:
                        case RoundEnd():
                            key.data.post(Stopped(key.data.node, event.round, self._notes[number]))
                        case Final(root=FailureNote() as root):
                            found.append((time.monotonic(), number))
                            lengths.append(len(root.message) + len(root.traceback))
                        case _:
                            raise SystemExit(f"node {number} received {event!r:.500}")
        self.root = min(lengths, default=0)
        return found

    def close(self) -> None:
        """End all connections."""
        for member in self._members.values():
            member.close()

    def _assigned(self) -> list[tuple[float, int]]:
        found: list[tuple[float, int]] = []
        tick = time.monotonic() + _TICK
        while len(found) < len(self._members):
            ready = [key.data for key, _ in self._selector.select(_TICK)]
            if time.monotonic() >= tick:
                ready = [*ready, *(member for member in self._members.values() if member.poll_timeout() == 0.0)]
                tick = time.monotonic() + _TICK
            for member in ready:
                found += self._receive(member)
        return found

    def _receive(self, member: NodeClient) -> list[tuple[float, int]]:
        found: list[tuple[float, int]] = []
        for event in member.drain():
            match event:
                case RankAssignment():
                    found.append((time.monotonic(), event.group_rank))
                case RoundEnd():
                    if self._stopped.get(member) != event.round:  # else it is told again, with the cause
                        self._stopped[member] = event.round
                        member.post(Stopped(member.node, event.round, ()))
                        member.join(1, "default")
                case ContactLost():  # a thousand members share this process: some may get no turn for seconds
                    member.join(1, "default")
                case Final():
                    raise SystemExit(f"the job ended: {event.why}")
        return found


def _notes(number: int, workers: int, length: int) -> tuple[FailureNote, ...]:
    """Return notes of a failure without a restart, with random texts that no store can make small."""
    chance = random.Random(number)

    def text() -> str:
        return chance.randbytes(length // 2).hex()

    ranks = enumerate(range(number * workers, (number + 1) * workers))
    return tuple(FailureNote(rank, local, 1, 1, text(), "ValueError", text(), fatal=True) for local, rank in ranks)


def main() -> None:
    """Do what stdin says until it ends."""
    sys.setswitchinterval(_SWITCH)
    endpoint, total, first, count = sys.argv[1], *map(int, sys.argv[2:5])
    backend_name, heartbeat = [*sys.argv[5:], *("c10d", "10")[len(sys.argv) - 5 :]]
    is_host = count == 0
    job = NodeJob(
        run_id="forming",
        node=f"host/1-{first:08x}",
        backend="c10d" if backend_name == "file" else backend_name,
        store_type="file" if backend_name == "file" else "tcp",
        endpoint=endpoint,
        min_nodes=total,
        max_nodes=total,
        node_rank=0 if backend_name == "static" else None,
        is_host=is_host if backend_name in ("c10d", "static") else None,
        heartbeat=float(heartbeat),
    )
    with contextlib.ExitStack() as stack:
        kept = _coordinate(job, stack) if is_host else None
        _answer(Nodes(job, first, count))
        del kept


def _coordinate(job: NodeJob, stack: contextlib.ExitStack) -> object:
    """Coordinate *job*, and host what its nodes need; return what ends when nobody refers to it."""
    if job.backend == "served":
        host, _, port = job.endpoint.rpartition(":")
        return stack.enter_context(serve(int(port), host))
    if job.backend == "etcd":
        runtime = NodeRuntime(job)
        runtime.start()
        stack.callback(runtime.close, 0.0)
        return runtime

    backend = C10dBackend(job)
    backend.serve(time.monotonic() + 60)
    coordinator = CoordinatorHost(backend.dial(10.0), job.rules, run_id=job.run_id, name=job.node)
    coordinator.start()
    return backend, coordinator


def _answer(nodes: Nodes) -> None:
    """Do what stdin says until it ends."""
    for line in sys.stdin:
        began = time.monotonic()
        found: list[tuple[float, int]] = []
        match line.split():
            case ["connect"]:
                found = nodes.connect()
            case ["form"]:
                found = nodes.form()
            case ["again", node]:
                found = nodes.again(int(node))
            case ["write", workers, length]:
                nodes.write(int(workers), int(length))
            case ["fail"]:
                found = nodes.fail()
        answer = {
            "began": began,
            "done": max((at for at, _ in found), default=0.0),
            "ranks": [r for _, r in found],
            "root": nodes.root,
        }
        print(json.dumps(answer), flush=True)
    nodes.close()


if __name__ == "__main__":
    main()
