"""Numbers without an entry, and counters that lie."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from attrs import Factory, define

from elasticlib.errors import RendezvousStateError
from elasticlib.rendezvous.stores._counted_inbox import LATE, LONGEST, MOST, SHORTEST, CountedInbox


@define
class Cells:
    """A counter and entries, and a clock that moves while somebody waits."""

    count: int = 0
    entries: dict[int, bytes] = Factory(dict)
    now: float = 100.0
    waits: list[tuple[int, float | None]] = Factory(list)
    arrivals: dict[float, int] = Factory(dict)
    """Entries that are written at a time."""

    def inbox(self) -> CountedInbox:
        return CountedInbox(lambda: self.count, self._fetch, self._wait, clock=lambda: self.now)

    def post(self, number: int) -> None:
        self.count = max(self.count, number)
        self.entries[number] = b"%d" % number

    def _fetch(self, numbers: Sequence[int]) -> list[bytes | None]:
        return [self.entries.get(number) for number in numbers]

    def _wait(self, number: int, timeout: float | None) -> bool:
        assert timeout is not None, "would wait for ever"
        self.waits.append((number, timeout))
        self.now += timeout
        for at in [at for at in self.arrivals if at <= self.now]:
            self.post(self.arrivals.pop(at))
        return number in self.entries


def numbers(inbox: CountedInbox, timeout: float = 0.0) -> list[int]:
    return [entry.number for entry in inbox.receive(timeout)]


def test_a_missing_entry_holds_up_nobody() -> None:
    cells = Cells()
    inbox = cells.inbox()
    cells.post(1)
    cells.post(3)

    assert [1, 3] == numbers(inbox)


def test_a_late_entry_is_received_when_it_comes() -> None:
    cells = Cells()
    inbox = cells.inbox()
    cells.post(2)
    numbers(inbox)
    cells.now += LATE / 2
    cells.post(1)
    cells.post(3)

    assert [1, 3] == numbers(inbox)


def test_a_late_entry_ends_the_waiting() -> None:
    cells = Cells(arrivals={100.3: 1})
    inbox = cells.inbox()
    cells.post(2)
    numbers(inbox)

    assert [1] == numbers(inbox, timeout=50.0)
    assert cells.now < 101


def test_looks_at_missing_entries_become_rare() -> None:
    cells = Cells()
    inbox = cells.inbox()
    cells.post(2)
    numbers(inbox)

    assert [] == numbers(inbox, timeout=50.0)

    pauses = [timeout for _, timeout in cells.waits if timeout is not None]
    assert SHORTEST == pauses[0]
    assert LONGEST == max(pauses)
    assert len(pauses) < 70


def test_after_a_minute_a_missing_entry_is_forgotten() -> None:
    cells = Cells()
    inbox = cells.inbox()
    cells.post(2)
    numbers(inbox)
    cells.now += LATE + 1
    numbers(inbox)
    cells.post(1)

    assert [] == numbers(inbox)


def test_without_missing_entries_one_wait_lasts_to_the_end() -> None:
    cells = Cells()
    numbers(cells.inbox(), timeout=50.0)

    assert [(1, 50.0)] == cells.waits


@pytest.mark.parametrize("lie", [2, 0, -1, 4 + MOST])
def test_a_counter_that_lies_is_a_clear_error(lie: int) -> None:
    cells = Cells()
    inbox = cells.inbox()
    cells.post(3)
    numbers(inbox)
    cells.count = lie

    with pytest.raises(RendezvousStateError, match=rf"counter was overwritten: it holds {lie} after 3"):
        inbox.receive(0.0)
