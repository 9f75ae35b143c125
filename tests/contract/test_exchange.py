"""Rules of every exchange; a backend passes by subclassing `ExchangeContract`."""

from __future__ import annotations

import abc
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from elasticlib.errors import RendezvousConnectionError
from elasticlib.rendezvous._node_job import NodeJob
from elasticlib.rendezvous.net._resolver import QUIET_LOOKUPS
from elasticlib.rendezvous.protocol._exchange import Exchange, Posted
from elasticlib.rendezvous.protocol._operations import Take, Update, perform
from elasticlib.rendezvous.stores._c10d import C10dBackend
from elasticlib.rendezvous.stores._memory_exchange import MemoryExchange

SOON = 0.02
LONG = 30.0


def texts(entries: list[Posted]) -> list[bytes]:
    return [entry.data for entry in entries]


def receive(exchange: Exchange, count: int) -> list[Posted]:
    """At least *count* entries, in as many portions as they come."""
    entries: list[Posted] = []
    while len(entries) < count and (portion := exchange.receive(LONG)):
        entries += portion
    return entries


class ExchangeContract(abc.ABC):
    @abc.abstractmethod
    def connect(self) -> Exchange:
        """A fresh, empty exchange."""

    @pytest.fixture
    def exchange(self) -> Iterator[Exchange]:
        exchange = self.connect()
        yield exchange
        exchange.close()

    # values

    @pytest.mark.parametrize("value", [b"?", b"x", bytes(range(256)), b"{}" * 500_000])
    def test_value_is_read_as_written(self, exchange: Exchange, value: bytes) -> None:
        exchange.write({"key": value})

        assert exchange.wait("key", LONG)
        assert [value] == exchange.read(["key"])

    def test_to_take_a_value_waits_for_it(self, exchange: Exchange) -> None:
        other = exchange.clone()
        with ThreadPoolExecutor() as pool:
            taken = pool.submit(perform, other, Take("key", LONG))
            exchange.write({"key": b"1"})
            assert b"1" == taken.result(LONG)

        assert [b"1"] == exchange.read(["key"])
        other.close()

    @pytest.mark.parametrize("value", [b"", b"\0\xff"])
    def test_taken_value_equals_the_written_bytes(self, exchange: Exchange, value: bytes) -> None:
        exchange.write({"key": value})

        assert value == exchange.take("key", LONG)

    def test_missing_key_is_not_taken_and_connection_continues(self, exchange: Exchange) -> None:
        assert [None, None] == [exchange.take("key", seconds) for seconds in (SOON, 0.0)]

        exchange.write({"key": b"1"})
        assert [b"1", b"1"] == [exchange.take("key", seconds) for seconds in (LONG, 0.1)]

    def test_an_update_reads_after_it_wrote(self, exchange: Exchange) -> None:
        exchange.write({"old": b"1"})

        assert [b"1", None, b"3"] == perform(exchange, Update({"new": b"3"}, ("old", "none", "new")))

    @pytest.mark.parametrize("keys", [(), ("key",)])
    def test_every_connection_reads_an_update_at_once(self, exchange: Exchange, keys: tuple[str, ...]) -> None:
        other = exchange.clone()
        for number in range(20):
            exchange.update({"key": str(number).encode()}, keys)
            assert [str(number).encode()] == other.read(["key"])
        other.close()

    def test_values_that_are_posted_with_an_entry_are_written_with_it(self, exchange: Exchange) -> None:
        other = exchange.clone()
        exchange.post(b"entry", {"one": b"1", "two": b""})

        assert [b"1", b""] == other.read(["one", "two"])
        assert [b"entry"] == [entry.data for entry in other.receive(LONG)]
        other.close()

    def test_the_last_value_counts(self, exchange: Exchange) -> None:
        exchange.write({"key": b"1"})
        exchange.write({"key": b"2"})

        assert [b"2"] == exchange.read(["key"])

    def test_a_key_that_was_never_written_is_none(self, exchange: Exchange) -> None:
        assert [None] == exchange.read(["key"])

    def test_reading_writes_nothing(self, exchange: Exchange) -> None:
        exchange.read(["key"])

        assert not exchange.wait("key", 0.0)

    def test_every_connection_reads_a_write_at_once(self, exchange: Exchange) -> None:
        other = exchange.clone()

        for number in range(100):
            exchange.write({"key": str(number).encode()})

            assert [str(number).encode()] == other.read(["key"])
        other.close()

    @pytest.mark.parametrize("count", [0, 1, 3, 10, 2500])
    def test_many_values_are_written_and_read_at_once(self, exchange: Exchange, count: int) -> None:
        values = {f"key/{number}": str(number).encode() for number in range(count)}

        exchange.write(values)

        assert list(values.values()) == exchange.read(list(values))

    @pytest.mark.parametrize("absent", [{0}, {9}, {3, 4}, set(range(10))])
    def test_each_key_is_read_for_itself(self, exchange: Exchange, absent: set[int]) -> None:
        exchange.write({f"key/{number}": b"x" for number in range(10) if number not in absent})

        values = exchange.read([f"key/{number}" for number in range(10)])

        assert [None if number in absent else b"x" for number in range(10)] == values

    def test_deleted_key_is_missing(self, exchange: Exchange) -> None:
        exchange.write({"key": b"1", "other": b"2"})
        exchange.delete(["key"])

        assert [None, b"2"] == exchange.read(["key", "other"])
        assert not exchange.wait("key", 0.0)

    def test_a_deleted_key_can_be_written_again(self, exchange: Exchange) -> None:
        exchange.write({"key": b"1"})
        exchange.delete(["key"])
        exchange.write({"key": b"2"})

        assert [b"2"] == exchange.read(["key"])

    def test_deleting_missing_keys_raises_no_error(self, exchange: Exchange) -> None:
        exchange.delete(["key", "other"])

        assert [None] == exchange.read(["key"])

    @pytest.mark.parametrize("key", ["box/node1/4711-0a1b2c3d/1/0", "a key", "schlüssel/ß", "a%2Fb", "x" * 500])
    def test_any_text_is_a_key(self, exchange: Exchange, key: str) -> None:
        exchange.write({key: b"1"})

        assert exchange.wait(key, LONG)
        assert [b"1"] == exchange.read([key])

    # waiting

    def test_a_wait_for_nothing_ends_in_time(self, exchange: Exchange) -> None:
        began = time.monotonic()

        assert not exchange.wait("key", SOON)
        assert SOON / 2 <= time.monotonic() - began < 1.0

    @pytest.mark.parametrize("timeout", [0.0, -1.0, 1e-6])
    def test_a_wait_without_time_is_a_look(self, exchange: Exchange, timeout: float) -> None:
        exchange.write({"key": b"1"})

        assert (True, False) == (exchange.wait("key", timeout), exchange.wait("other", timeout))

    @pytest.mark.parametrize("timeout", [None, LONG])
    def test_all_who_wait_are_woken_by_the_value(self, exchange: Exchange, timeout: float | None) -> None:
        clones = [exchange.clone() for _ in range(3)]
        with ThreadPoolExecutor(3) as pool:
            waiters = [pool.submit(clone.wait, "key", timeout) for clone in clones]
            exchange.write({"key": b"1"})

            assert [True] * 3 == [waiter.result(LONG) for waiter in waiters]

    def test_another_key_wakes_nobody(self, exchange: Exchange) -> None:
        clone = exchange.clone()
        with ThreadPoolExecutor(1) as pool:
            waiter = pool.submit(clone.wait, "key", SOON)
            exchange.write({"other": b"1"})

            assert not waiter.result(LONG)

    def test_waiter_sees_each_reply_however_short_the_race(self, exchange: Exchange) -> None:
        clone = exchange.clone()

        def answer() -> None:
            for number in range(300):
                assert clone.wait(f"ask/{number}", LONG)
                clone.write({f"reply/{number}": str(number).encode()})

        with ThreadPoolExecutor(1) as pool:
            answers = pool.submit(answer)
            for number in range(300):
                exchange.write({f"ask/{number}": b"1"})
                assert exchange.wait(f"reply/{number}", LONG)
                assert [str(number).encode()] == exchange.read([f"reply/{number}"])
            answers.result(LONG)

    # inbox

    def test_an_empty_inbox_gives_nothing_in_time(self, exchange: Exchange) -> None:
        began = time.monotonic()

        assert [] == list(exchange.receive(SOON))
        assert SOON / 2 <= time.monotonic() - began < 1.0

    def test_entries_are_received_in_the_order_of_posting(self, exchange: Exchange) -> None:
        for number in range(50):
            exchange.post(str(number).encode())

        entries = receive(exchange, 50)

        assert [str(number).encode() for number in range(50)] == texts(entries)
        assert sorted({entry.number for entry in entries}) == [entry.number for entry in entries]

    def test_posted_entry_is_received_without_waiting(self, exchange: Exchange) -> None:
        other = exchange.clone()
        other.post(b"1")

        assert [b"1"] == texts(list(exchange.receive(0.0)))
        other.close()

    def test_an_entry_is_received_once(self, exchange: Exchange) -> None:
        exchange.post(b"1")
        exchange.receive(LONG)
        exchange.post(b"2")

        assert [b"2"] == texts(list(exchange.receive(LONG)))
        assert [] == list(exchange.receive(0.0))

    def test_equal_entries_are_two(self, exchange: Exchange) -> None:
        exchange.post(b"1")
        exchange.post(b"1")

        assert [b"1", b"1"] == texts(receive(exchange, 2))

    def test_a_post_wakes_the_receiver(self, exchange: Exchange) -> None:
        clone = exchange.clone()
        with ThreadPoolExecutor(1) as pool:
            receiver = pool.submit(clone.receive, None)
            exchange.post(b"1")

            assert [b"1"] == texts(list(receiver.result(LONG)))

    def test_no_entry_is_lost_or_doubled_when_many_post_at_once(self, exchange: Exchange) -> None:
        start = Barrier(8)
        clones = [exchange.clone() for _ in range(8)]

        def post(poster: int) -> None:
            start.wait(LONG)
            for number in range(50):
                clones[poster].post(f"{poster} {number}".encode())

        with ThreadPoolExecutor(8) as pool:
            posters = [pool.submit(post, poster) for poster in range(8)]
            received = texts(receive(exchange, 400))
            for each in posters:
                each.result(LONG)

        for poster in range(8):
            mine = [text for text in received if text.startswith(b"%d " % poster)]
            assert [f"{poster} {number}".encode() for number in range(50)] == mine

    def test_entries_stay_for_the_next_coordinator_until_they_are_discarded(self, exchange: Exchange) -> None:
        for text in (b"1", b"2", b"3"):
            exchange.post(text)
        first = receive(exchange, 3)
        exchange.discard([first[0], first[2]])

        successor = exchange.clone()

        assert [b"2"] == texts(list(successor.receive(LONG)))
        successor.close()

    def test_discarding_entries_twice_raises_no_error(self, exchange: Exchange) -> None:
        exchange.post(b"1")
        entries = exchange.receive(LONG)

        exchange.discard(entries)
        exchange.discard(entries)

        assert [] == list(exchange.clone().receive(0.0))

    # connections

    def test_our_own_keys_are_not_foreign(self, exchange: Exchange) -> None:
        exchange.write({"key": b"1"})
        exchange.post(b"2")
        exchange.clear_foreign()

        assert [b"1"] == exchange.read(["key"])
        assert [b"2"] == texts(list(exchange.receive(LONG)))

    def test_a_clone_outlives_its_origin(self, exchange: Exchange) -> None:
        exchange.write({"key": b"1"})
        clone = exchange.clone()
        exchange.close()
        exchange.close()

        assert [b"1"] == clone.read(["key"])
        clone.close()


class TestMemoryExchange(ExchangeContract):
    def connect(self) -> Exchange:
        return MemoryExchange()

    def test_wait_that_timed_out_leaves_no_waiter_behind(self) -> None:
        exchange = MemoryExchange()
        exchange.wait("key", 0.001)

        assert not exchange._shelf.changed._waiters  # type: ignore[attr-defined]


class StoreContract(ExchangeContract):
    """Besides: connections to stores of torch, which break."""

    @pytest.fixture(autouse=True)
    def quiet(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        self._opened: list[C10dBackend] = []
        monkeypatch.setenv("RES_OPTIONS", QUIET_LOOKUPS)
        yield
        for backend in self._opened:
            backend.close()

    @abc.abstractmethod
    def job(self, run_id: str) -> NodeJob:
        """A job at this store."""

    def backend(self, run_id: str = "run") -> C10dBackend:
        backend = C10dBackend(self.job(run_id))
        self._opened.append(backend)
        return backend

    def connect(self) -> Exchange:
        backend = self.backend()
        backend.serve(time.monotonic() + LONG)
        return backend.dial(LONG)

    def test_a_closed_connection_is_a_clear_error(self, exchange: Exchange) -> None:
        exchange.close()

        with pytest.raises(RendezvousConnectionError, match=r"closed$"):
            exchange.read(["key"])


class TestTcpStoreExchange(StoreContract):
    def job(self, run_id: str) -> NodeJob:
        return NodeJob(run_id=run_id, node="n", backend="c10d", endpoint="localhost:0", max_nodes=2)


class TestTcpStoreExchangeWithoutLibuv(TestTcpStoreExchange):
    @pytest.fixture(autouse=True)
    def without_libuv(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import torch.distributed

        real = torch.distributed.TCPStore  # type: ignore[attr-defined]

        def make(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("is_master") and kwargs["use_libuv"]:
                raise RuntimeError("use_libuv was requested but PyTorch was built without libuv support")
            return real(*args, **kwargs)

        monkeypatch.setattr(torch.distributed, "TCPStore", make)


class TestFileStoreExchange(StoreContract):
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self.path = tmp_path / "store"

    def job(self, run_id: str) -> NodeJob:
        return NodeJob(run_id=run_id, node="n", backend="c10d", endpoint=str(self.path), max_nodes=2, store_type="file")
