"""Coordinator election on a real etcd server: one leader at a time, with the last saved state."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from elasticlib.errors import RendezvousConnectionError, RendezvousStateError
from elasticlib.rendezvous._node_job import NodeJob
from elasticlib.rendezvous.stores._election import Candidate, CompareAndSetExchange, LeadershipLost, StateLog
from elasticlib.rendezvous.stores._keys import Keys, RenewedKey
from elasticlib.rendezvous.stores.etcd._backend import EtcdBackend
from elasticlib.rendezvous.stores.etcd._etcd_server import EtcdServer

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.5)]

LONG = 30.0
TTL = 2.0


class Node:
    """A candidate, and what it was told."""

    def __init__(self, job: ElectionContract, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.won: queue.Queue[StateLog] = queue.Queue()
        self.lost: queue.Queue[str] = queue.Queue()
        self.silent = threading.Event()
        self.backend = job.backend
        connect = self.connect
        self.candidate = Candidate(connect, job.backend._root, name, TTL, self.won.put, self.lost.put, clock)
        self.candidate.start()
        job.nodes.append(self)

    def connect(self, timeout: float) -> Keys:
        keys: Keys = self.backend.connect(timeout)
        renew = keys.renew

        def silently(hold: RenewedKey) -> bool:
            return self.silent.is_set() or renew(hold)

        keys.renew = silently  # type: ignore[method-assign]
        return keys

    def win(self) -> StateLog:
        return self.won.get(timeout=LONG)


class ElectionContract:
    """Rules of an election for all stores; a backend passes with a fixture that sets `backend`."""

    backend: Any

    @pytest.fixture(autouse=True)
    def end(self) -> Iterator[None]:
        self.nodes: list[Node] = []
        yield
        for node in self.nodes:
            node.candidate.close()

    def exchange(self) -> CompareAndSetExchange:
        exchange: CompareAndSetExchange = self.backend.dial(LONG)
        return exchange

    def test_one_of_several_candidates_becomes_leader(self) -> None:
        nodes = [Node(self, name) for name in "abc"]
        winner = next(iter(_first(nodes)))
        others = [node for node in nodes if node is not winner]

        assert all(node.won.empty() for node in others)
        assert "it resigned" == _after_close(winner)
        assert len(list(_first(others))) == 1

    def test_leader_that_resigns_is_replaced_before_its_lease_ends(self) -> None:
        first = Node(self, "a")
        first.win()
        second = Node(self, "b")

        began = time.monotonic()
        first.candidate.close()
        second.win()

        assert time.monotonic() - began < TTL / 2
        assert first.lost.empty()

    def test_silent_leader_is_replaced_and_notified_of_its_loss(self) -> None:
        first = Node(self, "a")
        first.win()
        second = Node(self, "b")
        first.silent.set()
        # What this one is told by its own clock may come before or after: it believes to be renewed.
        second.win().load()

        first.silent.clear()
        assert first.lost.get(timeout=LONG)

    def test_a_holder_is_renewed_for_as_long_as_it_lives(self) -> None:
        first = Node(self, "a")
        state_log = first.win()
        state_log.load()
        second = Node(self, "b")

        with pytest.raises(queue.Empty):
            second.won.get(timeout=1.5 * TTL)
        state_log.save(b"{}")

    def test_a_vanished_key_ends_the_term_of_its_holder(self) -> None:
        node = Node(self, "a")
        state_log = node.win()
        state_log.load()
        self.exchange()._keys.delete([f"{self.backend._root}/leader"])

        assert node.lost.get(timeout=LONG)
        with pytest.raises(LeadershipLost):
            state_log.save(b"late")

    def test_a_node_that_is_alone_stands_again_when_its_key_vanished(self) -> None:
        node = Node(self, "a")
        state_log = node.win()
        state_log.load()
        state_log.save(b"1")
        self.exchange()._keys.delete([f"{self.backend._root}/leader"])

        assert b"1" == node.win().load()

    def test_a_holder_that_is_turned_down_while_it_writes_stands_again(self) -> None:
        node = Node(self, "a")
        state_log = node.win()
        state_log.load()
        exchange = state_log.exchange()
        self.exchange()._keys.delete([f"{self.backend._root}/leader"])

        with pytest.raises(LeadershipLost) as turned_down:
            exchange.write({"key": b"late"})
        state_log.lose(str(turned_down.value))

        assert node.lost.get(timeout=LONG)
        assert node.win()

    def test_a_successor_loads_what_was_saved_last(self) -> None:
        first = Node(self, "a")
        state_log = first.win()
        assert state_log.load() is None
        state_log.save(b"1")
        state_log.save(b"2")
        first.candidate.close()

        assert b"2" == Node(self, "b").win().load()

    @pytest.mark.parametrize("data", [b"{}" * 400_000, b"zlib:", bytes(range(256)) * 300])
    def test_any_state_is_loaded_as_saved(self, data: bytes) -> None:
        first = Node(self, "a")
        state_log = first.win()
        state_log.load()
        state_log.save(data)
        first.candidate.close()

        assert data == Node(self, "b").win().load()

    def test_a_holder_that_was_paused_past_its_lease_changes_nothing(self) -> None:
        paused = Node(self, "a", clock=lambda: 0.0)  # for it, no time has passed
        old = paused.win()
        old.load()
        old.save(b"old")
        exchange = old.exchange()
        exchange.write({"key": b"old"})
        paused.silent.set()
        new = Node(self, "b").win()
        assert b"old" == new.load()

        with pytest.raises(LeadershipLost):
            exchange.write({"key": b"late"})
        with pytest.raises(LeadershipLost):
            exchange.delete(["key"])
        with pytest.raises(LeadershipLost):
            old.save(b"late")
        with pytest.raises(LeadershipLost):
            old.purge()

        new.save(b"new")
        assert [b"old"] == self.exchange().read(["key"])

    def test_a_successor_that_saved_nothing_yet_is_a_successor(self) -> None:
        paused = Node(self, "a", clock=lambda: 0.0)
        old = paused.win()
        old.load()
        paused.silent.set()
        assert Node(self, "b").win().load() is None

        with pytest.raises(LeadershipLost):
            old.save(b"late")

    def test_lease_that_ended_by_the_own_clock_is_over(self) -> None:
        now = [0.0]
        node = Node(self, "a", clock=lambda: now[0])
        state_log = node.win()
        state_log.load()
        now[0] = 2 * TTL

        with pytest.raises(LeadershipLost, match=r"not renewed for 2 s"):
            state_log.save(b"late")

    def test_a_save_whose_answer_was_lost_is_settled(self) -> None:
        state_log = Node(self, "a").win()
        state_log.load()
        keys = state_log._keys  # type: ignore[attr-defined]
        swap = keys.swap

        def answer_lost(*args: object) -> int | None:
            swap(*args)
            raise RendezvousConnectionError("the connection broke")

        keys.swap = answer_lost
        state_log.save(b"1")
        state_log.save(b"2")

        assert [b"2"] == [item and item.data for item in self.exchange()._keys.read([state_log._state])[0]]  # type: ignore[attr-defined]

    def test_a_save_that_did_not_arrive_is_sent_again(self) -> None:
        state_log = Node(self, "a").win()
        state_log.load()

        def broken(*args: object) -> int | None:
            raise RendezvousConnectionError("the connection broke")

        state_log._keys.swap = broken  # type: ignore[attr-defined]
        state_log.save(b"1")

        assert [b"1"] == [item and item.data for item in self.exchange()._keys.read([state_log._state])[0]]  # type: ignore[attr-defined]

    def test_a_state_that_a_stranger_changed_is_a_clear_error(self) -> None:
        state_log = Node(self, "a").win()
        state_log.load()
        state_log.save(b"1")
        self.exchange()._keys.delete([state_log._state])  # type: ignore[attr-defined]

        with pytest.raises(RendezvousStateError, match="changed by another writer"):
            state_log.save(b"2")
        state_log.save(b"3")

    def test_a_state_that_a_stranger_deleted_is_a_clear_error_for_a_successor(self) -> None:
        first = Node(self, "a")
        state_log = first.win()
        state_log.load()
        state_log.save(b"1")
        state_log.exchange().write({"hello": b"{}"})
        self.exchange()._keys.delete([state_log._state])  # type: ignore[attr-defined]
        first.candidate.close()

        with pytest.raises(RendezvousStateError, match="deleted from the store"):
            Node(self, "b").win().load()

    @pytest.mark.parametrize("garbage", [b"zlib:", b"zlib:xxx", b"zlib:\x78\x9c"])
    def test_a_state_that_cannot_be_unpacked_is_a_clear_error(self, garbage: bytes) -> None:
        state_log = Node(self, "a").win()
        self.exchange()._keys.write({state_log._state: garbage})  # type: ignore[attr-defined]

        with pytest.raises(RendezvousStateError, match="damaged"):
            state_log.load()
        state_log.save(b"1")

    def test_purge_leaves_no_keys_and_makes_nobody_leader(self) -> None:
        node = Node(self, "a")
        state_log = node.win()
        state_log.load()
        state_log.save(b"1")
        exchange = state_log.exchange()
        exchange.write({"key": b"1"})
        exchange.post(b"1")
        state_log.purge()

        node.candidate._thread.join(LONG)
        root = self.backend._root
        keys = self.exchange()._keys
        items, _ = keys.read([f"{root}/leader", f"{root}/state", f"{root}/keys/key"])
        assert [None] * 3 == items
        assert [] == keys.entries(f"{root}/inbox", 0)[0]
        assert node.lost.empty()

    def test_a_candidate_whose_start_fails_leaves_the_place_to_others(self) -> None:
        def fail(state_log: StateLog) -> None:
            failed.set()
            raise RendezvousStateError("no")

        failed = threading.Event()
        bad = self.backend.candidate("bad", fail, lambda why: None, TTL)
        bad.start()
        assert failed.wait(LONG)

        assert Node(self, "good").win()
        bad.close()

    def test_closing_a_candidate_takes_no_time(self) -> None:
        Node(self, "a").win()
        waiting = Node(self, "b")
        began = time.monotonic()
        waiting.candidate.close()

        assert not waiting.candidate._thread.is_alive()
        assert time.monotonic() - began < 1.0


class TestElection(ElectionContract):
    @pytest.fixture(autouse=True)
    def job(self, etcd: EtcdServer) -> None:
        job = NodeJob(run_id=uuid.uuid4().hex, node="n", backend="etcd", endpoint=etcd.get_endpoint(), heartbeat=10.0)
        self.backend = EtcdBackend(job)


def _first(nodes: list[Node]) -> Iterator[Node]:
    """The one of them that is elected first."""
    deadline = time.monotonic() + LONG
    wake = threading.Event()
    while time.monotonic() < deadline:
        for node in nodes:
            if not node.won.empty():
                yield node
                return
        wake.wait(0.005)


def _after_close(node: Node) -> str:
    state_log = node.win()
    node.candidate.close()
    with pytest.raises(LeadershipLost) as caught:
        state_log.exchange()
    return str(caught.value).partition(": ")[2]


class Door:
    """A way to a server that can be shut, as one server of several can die."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.sock = socket.create_server(("127.0.0.1", 0))
        self.place = f"127.0.0.1:{self.sock.getsockname()[1]}"
        self.open: list[socket.socket] = []
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self.sock.accept()
                far = socket.create_connection(("127.0.0.1", self.port))
                self.open += [near, far]
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=self.carry, args=(one, other), daemon=True).start()

    def carry(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(65536):
                other.sendall(data)
        with contextlib.suppress(OSError):
            other.shutdown(socket.SHUT_RDWR)

    def shut(self) -> None:
        for sock in (self.sock, *self.open):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


def test_leader_continues_by_another_server_when_its_own_dies(etcd: EtcdServer) -> None:
    """Its lease goes on by the other server: a journal that stayed with the dead one would hold the office in vain."""
    first, second = Door(etcd.get_port()), Door(etcd.get_port())
    job = NodeJob(run_id=uuid.uuid4().hex, node="n", backend="etcd", endpoint=f"{first.place},{second.place}")
    won: queue.Queue[StateLog] = queue.Queue()
    candidate = EtcdBackend(job).candidate("n", won.put, lambda why: None, TTL)
    candidate.start()
    state_log = won.get(timeout=LONG)
    state_log.load()
    state_log.save(b"1")
    state_log.exchange().write({"key": b"1"})

    first.shut()
    exchange = state_log.exchange()
    loaded = state_log.load()
    exchange.write({"key": b"2"})

    assert b"1" == loaded
    candidate.close()
    second.shut()
