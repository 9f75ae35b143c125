"""Requests of an exchange to torch's store, and those that it does not even try."""

from __future__ import annotations

from typing import Any

import pytest

from elasticlib.rendezvous.protocol._exchange import RequestRefusedError
from elasticlib.rendezvous.stores._torch_store import StoreExchange


class Kept:
    """A store that remembers what each request wrote."""

    def __init__(self) -> None:
        self.requests: list[list[int]] = []

    def multi_set(self, keys: list[str], values: list[bytes]) -> None:
        self.requests.append([len(value) for value in values])

    def check(self, keys: list[str]) -> bool:
        return True


def exchange(store: Any) -> StoreExchange:
    return StoreExchange(store, lambda: store, "job", "here")


def test_many_large_values_are_written_in_requests_that_stay_small() -> None:
    store = Kept()
    exchange(store).write({f"box/{number}": b"x" * 40_000 for number in range(1000)})

    assert sum(map(len, store.requests)) == 1000
    assert max(map(sum, store.requests)) <= 128 * 1024


@pytest.mark.parametrize("values", [{"a": b"x" * (8 * 1024 * 1024 + 1)}, {"a" * 8192: b"x"}])
def test_oversized_write_is_refused_with_its_size_and_not_sent(values: dict[str, bytes]) -> None:
    store = Kept()
    ours = exchange(store)

    with pytest.raises(RequestRefusedError, match=r"cannot store [0-9,]+ bytes at a.*8,388,608 bytes") as refused:
        ours.write({"small": b"x", **values})

    assert refused.value.too_large
    assert not store.requests
    ours.write({"small": b"x"})  # the connection goes on
