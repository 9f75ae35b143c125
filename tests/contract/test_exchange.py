"""What every exchange must do; a back end passes by subclassing `ExchangeContract`."""

from __future__ import annotations

import abc
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from elasticlib.rendezvous._exchange import Exchange
from elasticlib.rendezvous.memory import MemoryExchange

SOON = 0.02
LONG = 30.0


class ExchangeContract(abc.ABC):
    @abc.abstractmethod
    def connect(self) -> Exchange:
        """A fresh, empty exchange."""

    @pytest.fixture
    def exchange(self) -> Exchange:
        return self.connect()

    def test_a_counter_starts_at_zero_and_returns_the_sum(self, exchange: Exchange) -> None:
        assert [2, 5, 5, 1] == [exchange.add("n", step) for step in (2, 3, 0, -4)]

    def test_counters_do_not_touch_each_other(self, exchange: Exchange) -> None:
        exchange.add("n", 7)

        assert 1 == exchange.add("m", 1)

    def test_no_two_callers_of_add_get_the_same_sum(self, exchange: Exchange) -> None:
        start = Barrier(8)

        def count() -> list[int]:
            start.wait(LONG)
            return [exchange.add("n", 1) for _ in range(100)]

        with ThreadPoolExecutor(8) as pool:
            futures = [pool.submit(count) for _ in range(8)]
            sums = [number for future in futures for number in future.result(LONG)]

        assert list(range(1, 801)) == sorted(sums)

    @pytest.mark.parametrize("value", [b"", b"x", bytes(range(256)), b"x" * 1_000_000])
    def test_a_value_comes_back_as_it_was(self, exchange: Exchange, value: bytes) -> None:
        exchange.set("key", value)

        assert exchange.wait("key", LONG)
        assert value == exchange.get("key")

    def test_the_last_value_counts(self, exchange: Exchange) -> None:
        exchange.set("key", b"1")
        exchange.set("key", b"2")

        assert b"2" == exchange.get("key")

    def test_a_key_that_was_never_written_is_none(self, exchange: Exchange) -> None:
        assert exchange.get("key") is None

    def test_a_deleted_key_is_gone(self, exchange: Exchange) -> None:
        exchange.set("key", b"1")
        exchange.delete("key")

        assert exchange.get("key") is None
        assert not exchange.wait("key", 0.0)

    def test_a_deleted_key_can_be_written_again(self, exchange: Exchange) -> None:
        exchange.set("key", b"1")
        exchange.delete("key")
        exchange.set("key", b"2")

        assert b"2" == exchange.get("key")

    def test_deleting_what_is_not_there_is_no_error(self, exchange: Exchange) -> None:
        exchange.delete("key")

        assert exchange.get("key") is None

    def test_a_wait_for_nothing_ends_in_time(self, exchange: Exchange) -> None:
        began = time.monotonic()

        assert not exchange.wait("key", SOON)
        assert SOON / 2 <= time.monotonic() - began < LONG

    @pytest.mark.parametrize("timeout", [None, LONG])
    def test_all_who_wait_are_woken_by_the_value(self, exchange: Exchange, timeout: float | None) -> None:
        with ThreadPoolExecutor(3) as pool:
            waiters = [pool.submit(exchange.wait, "key", timeout) for _ in range(3)]
            exchange.set("key", b"")

            assert [True] * 3 == [waiter.result(LONG) for waiter in waiters]

    def test_another_key_wakes_nobody(self, exchange: Exchange) -> None:
        with ThreadPoolExecutor(1) as pool:
            waiter = pool.submit(exchange.wait, "key", SOON)
            exchange.set("other", b"1")

            assert not waiter.result(LONG)

    def test_who_waits_for_a_reply_sees_it_however_short_the_race(self, exchange: Exchange) -> None:
        def answer() -> None:
            for number in range(300):
                assert exchange.wait(f"ask/{number}", LONG)
                exchange.set(f"reply/{number}", str(number).encode())

        with ThreadPoolExecutor(1) as pool:
            answers = pool.submit(answer)
            for number in range(300):
                exchange.set(f"ask/{number}", b"?")
                assert exchange.wait(f"reply/{number}", LONG)
                assert str(number).encode() == exchange.get(f"reply/{number}")
            answers.result(LONG)


class TestMemoryExchange(ExchangeContract):
    def connect(self) -> Exchange:
        return MemoryExchange()

    def test_who_gave_up_leaves_nothing_behind(self) -> None:
        exchange = MemoryExchange()
        exchange.wait("key", 0.0)

        assert not exchange._waiters
