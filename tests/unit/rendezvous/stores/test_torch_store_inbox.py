"""Numbers without an entry, and counters that lie, in the inbox of a store of torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from attrs import Factory, define

from elasticlib.errors import RendezvousStateError
from elasticlib.rendezvous.stores._torch_store import LATE, LONGEST, MOST, SHORTEST, StoreExchange


@define(eq=False)
class Cells(StoreExchange):
    """A counter and entries, and a clock that moves while somebody waits."""

    last: int = 0
    entries: dict[int, bytes] = Factory(dict)
    now: float = 100.0
    waits: list[tuple[int, float | None]] = Factory(list)
    arrivals: dict[float, int] = Factory(dict)
    """Entries that are written at a time."""

    def put(self, number: int) -> None:
        self.last = max(self.last, number)
        self.entries[number] = b"%d" % number

    def count(self, folder: str) -> int:
        return self.last

    def read(self, keys: Sequence[str]) -> list[bytes | None]:
        return [self.entries.get(_number(key)) for key in keys]

    def wait(self, key: str, timeout: float | None) -> bool:
        assert timeout is not None, "would wait for ever"
        self.waits.append((_number(key), timeout))
        self.now += timeout
        for at in [at for at in self.arrivals if at <= self.now]:
            self.put(self.arrivals.pop(at))
        return _number(key) in self.entries


def inbox_of(**facts: Any) -> Cells:
    """An exchange whose store is such cells."""
    cells = Cells(None, _no_store, "job", "here", **facts)
    cells._clock = lambda: cells.now
    return cells


def _no_store() -> Any:
    raise AssertionError("there is no store to connect to")


def _number(key: str) -> int:
    folder, _, number = key.partition("/")
    assert "inbox" == folder
    return int(number)


def numbers(inbox: StoreExchange, timeout: float = 0.0) -> list[int]:
    return [entry.number for entry in inbox.receive(timeout)]


def test_late_entry_blocks_nothing_and_is_received_when_it_arrives() -> None:
    cells = inbox_of()
    cells.put(2)
    assert [2] == numbers(cells)
    cells.now += LATE / 2
    cells.put(1)
    cells.put(3)

    assert [1, 3] == numbers(cells)


def test_a_late_entry_ends_the_waiting() -> None:
    cells = inbox_of(arrivals={100.3: 1})
    cells.put(2)
    numbers(cells)

    assert [1] == numbers(cells, timeout=50.0)
    assert cells.now < 101


def test_looks_at_missing_entries_become_rare() -> None:
    cells = inbox_of()
    cells.put(2)
    numbers(cells)

    assert [] == numbers(cells, timeout=50.0)

    pauses = [timeout for _, timeout in cells.waits if timeout is not None]
    assert SHORTEST == pauses[0]
    assert LONGEST == max(pauses)
    assert len(pauses) < 70


def test_after_a_minute_a_missing_entry_is_forgotten() -> None:
    cells = inbox_of()
    cells.put(2)
    numbers(cells)
    cells.now += LATE + 1
    numbers(cells)
    cells.put(1)

    assert [] == numbers(cells)


def test_without_missing_entries_one_wait_lasts_to_the_end() -> None:
    cells = inbox_of()
    numbers(cells, timeout=50.0)

    assert [(1, 50.0)] == cells.waits


@pytest.mark.parametrize("lie", [2, 0, -1, 4 + MOST])
def test_a_counter_that_lies_is_a_clear_error(lie: int) -> None:
    cells = inbox_of()
    cells.put(3)
    numbers(cells)
    cells.last = lie

    with pytest.raises(RendezvousStateError, match=rf"counter was overwritten: it went from 3 to {lie}"):
        cells.receive(0.0)
