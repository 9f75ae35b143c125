"""Nodes that use a rendezvous handler by orders, each a program of its own."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from tests.checklist.peers import Peer, free_port

LOOPBACK = "127.0.0.1"
CODE = """
import json, sys
from {elastic}.rendezvous import RendezvousParameters
from {elastic}.rendezvous.registry import get_rendezvous_handler

backend, endpoint, run_id, least, most, local_addr, options = sys.argv[1:]
params = RendezvousParameters(backend, endpoint, run_id, int(least), int(most), local_addr, **json.loads(options))
handler = info = None
for line in sys.stdin:
    order, *arguments = line.split()
    try:
        if order == "open":
            handler = get_rendezvous_handler(params)
            answer = "open"
        elif order == "next":
            info = handler.next_rendezvous()
            where = info.bootstrap_store_info
            answer = [info.rank, info.world_size, where.master_addr, where.master_port]
        elif order == "set":
            info.store.set(*arguments)
            answer = "set"
        elif order == "has":
            answer = info.store.check(arguments)
        else:
            answer = getattr(handler, order)()
    except BaseException as error:
        answer = {"error": [kind.__name__ for kind in type(error).__mro__], "text": str(error)}
    print(json.dumps(answer), flush=True)
"""
TIMEOUT = 40.0


class Refused(Exception):  # noqa: N818 - what the node answered, not a fault of the test
    """A node's answer was an exception: its classes, by name, and its text."""

    def __init__(self, kinds: list[str], text: str) -> None:
        super().__init__(kinds, text)
        self.kinds = kinds
        self.text = text


class Node:
    """One program with one handler."""

    def __init__(self, peer: Peer, endpoint: str, nodes: str, variables: Mapping[str, str], **options: Any) -> None:
        least, _, most = nodes.partition(":")
        where = {"backend": "c10d", "run_id": "job", "local_addr": LOOPBACK}
        backend, run_id, local_addr = (options.pop(name, default) for name, default in where.items())
        arguments = (backend, endpoint, run_id, least, most or least, local_addr, json.dumps(options))
        self.process = peer.start_python(CODE, *arguments, env=variables)
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def send(self, order: str) -> None:
        """Give an order, whose answer is asked for later."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(f"{order}\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # the missing answer tells

    def answer(self, limit: float = TIMEOUT) -> Any:
        """The answer to the oldest order without one. Raises `Refused`, or `TimeoutError` when none comes."""
        try:
            line = self._answers.get(timeout=limit)
        except queue.Empty:
            raise TimeoutError("no answer") from None
        assert line, "the node's program ended"
        found = json.loads(line)
        if isinstance(found, dict):
            raise Refused(found["error"], found["text"])
        return found

    def request(self, order: str, limit: float = TIMEOUT) -> Any:
        """Give an order and wait for its answer."""
        self.send(order)
        return self.answer(limit)

    def has_answered(self) -> bool:
        """Return whether an answer is available."""
        return not self._answers.empty()


class Cluster:
    """Nodes of one endpoint."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.endpoint = f"{LOOPBACK}:{free_port()}"
        self.nodes: list[Node] = []

    def node(
        self, nodes: str, *, opened: bool = True, variables: Mapping[str, str] | None = None, **options: Any
    ) -> Node:
        """
        A node of a job of *nodes* nodes; the first one hosts the store.

        *options* are those of the rendezvous, or backend, run_id, local_addr, endpoint; ``is_host=None`` leaves it
        to the endpoint's address who hosts.
        """
        if options.get("backend", "c10d") == "c10d" and options.get("store_type") != "file":
            options.setdefault("is_host", "0" if self.nodes else "1")
            if options["is_host"] is None:
                del options["is_host"]
        made = Node(self.peer, options.pop("endpoint", self.endpoint), nodes, variables or {}, **options)
        self.nodes.append(made)
        if opened:
            assert made.request("open") == "open"
        return made

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for node in self.nodes:
            node.process.kill()


def meet(*nodes: Node) -> list[Any]:
    """Request the next round for all *nodes* together; return their answers."""
    for node in nodes:
        node.send("next")
    return [node.answer() for node in nodes]


def let_in(newcomer: Node, others: Sequence[Node], limit: float = 2 * TIMEOUT) -> list[Any]:
    """
    Return the last answers of *others* and of *newcomer*, which has already sent its request.

    As agents do, the others request a round again when they see a waiting node. They repeat this
    until the newcomer has its answer.
    """
    begun = time.monotonic()
    answers: list[Any] = []
    while not newcomer.has_answered():
        if time.monotonic() > begun + limit:
            raise TimeoutError("the newcomer was not let in")
        if any([node.request("num_nodes_waiting") for node in others]):
            for node in others:
                node.send("next")
            answers = [node.answer() for node in others]
        else:
            time.sleep(0.05)
    return [*answers, newcomer.answer()]


def seconds_until(node: Node, order: str, wanted: Any, limit: float) -> float | None:
    """Ask *order* again and again until the answer is *wanted*; how long that took, None when it never was."""
    begun = time.monotonic()
    while time.monotonic() - begun < limit:
        if node.request(order) == wanted:
            return time.monotonic() - begun
        time.sleep(0.05)
    return None
