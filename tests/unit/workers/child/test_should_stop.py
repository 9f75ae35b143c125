"""`should_stop`: all ranks return in the same call, whatever they do meanwhile."""

from __future__ import annotations

import faulthandler
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from elasticlib.workers.child import _should_stop
from elasticlib.workers.child._should_stop import Stop, StopBoard, room, should_stop
from tests.waiting import wait_until

LATER = time.time() + 1000


class Ranks:
    """The memory of *count* workers, and their sides of it."""

    def __init__(self, count: int, start: int = 64) -> None:
        self.memory = memoryview(bytearray(start + room(count)))
        self.board = StopBoard(self.memory, start, count)
        self.sides = [_should_stop._Listener(self.memory, start, rank) for rank in range(count)]

    def call(self, rank: int, times: int = 1) -> Stop | None:
        found = None
        for _ in range(times):
            found = self.sides[rank].called()
        return found


def test_without_a_request_nobody_stops() -> None:
    ranks = Ranks(2)

    assert [None, None] == [ranks.call(0, 3), ranks.call(1)]
    assert [0, 1] == ranks.board.listeners()
    assert [] == ranks.board.given()


def test_rank_that_never_calls_does_not_listen() -> None:
    ranks = Ranks(3)
    ranks.call(1)

    assert [1] == ranks.board.listeners()


def test_all_return_in_the_confirmed_call() -> None:
    ranks = Ranks(2)
    ranks.call(0, 4)
    ranks.call(1, 3)
    ranks.board.ask("signal 15", LATER, range(8, 10))
    requested = ranks.call(1)
    ranks.board.propose(6)
    ranks.board.confirm()

    steps = [[ranks.call(rank) for _ in range(3)] for rank in range(2)]

    stop = Stop("signal 15", LATER, (8, 9))
    assert requested is None
    assert [[None, stop, stop], [None, stop, stop]] == steps
    assert [0, 1] == ranks.board.given()
    assert 7 == ranks.board.calls()


def test_before_the_proposed_call_nobody_waits() -> None:
    ranks = Ranks(1)
    ranks.board.ask("", LATER, range(1))
    ranks.board.propose(4)

    assert ranks.call(0, 3) is None


def waiting(ranks: Ranks) -> tuple[threading.Thread, list[Stop | None]]:
    """Let rank 0 make its first call in a thread; return that, and the list that gets the call's result."""
    found: list[Stop | None] = []
    thread = threading.Thread(target=lambda: found.append(ranks.call(0)))
    thread.start()
    wait_until(lambda: ranks.board.listeners() and ranks.board.calls(1) == 1, what="a rank that waits")
    return thread, found


def test_in_the_proposed_call_a_rank_waits_for_the_confirmation() -> None:
    ranks = Ranks(1)
    ranks.board.ask("", LATER, range(1))
    ranks.board.propose(1)
    thread, found = waiting(ranks)
    waits = not found
    ranks.board.confirm()
    thread.join(10)

    assert waits
    assert [True] == [stop is not None for stop in found]


def test_another_proposal_releases_it() -> None:
    ranks = Ranks(1)
    ranks.board.ask("", LATER, range(1))
    ranks.board.propose(1)
    thread, found = waiting(ranks)
    ranks.board.propose(2)
    thread.join(10)

    assert [None] == found


def test_a_rank_counts_as_past_the_proposed_call_until_it_waits_there() -> None:
    ranks = Ranks(1)
    ranks.board.ask("", LATER, range(1))
    ranks.board.propose(1)
    thread, found = waiting(ranks)
    ranks.board.confirm()
    thread.join(10)

    assert found[0] is not None
    assert (1, 1) == (ranks.board.calls(0), ranks.board.calls(1))

    late = Ranks(1)
    late.call(0)
    late.board.ask("", LATER, range(1))
    late.board.propose(1)
    assert (1, 2) == (late.board.calls(0), late.board.calls(1))


def test_no_rank_stops_in_an_unconfirmed_call_even_after_the_deadline() -> None:
    ranks = Ranks(1)
    ranks.board.ask("late", time.time() - 1, range(1))
    ranks.board.propose(1)
    thread, found = waiting(ranks)
    ranks.board.propose(2)
    thread.join(10)
    assert [None] == found

    ranks.board.ask("long ago", time.time() - 1000, range(1))
    ranks.board.propose(2)
    assert ranks.call(0) is None


@pytest.mark.parametrize("reason", ["ä" * 500, "the file \udcff has appeared"])
def test_any_reason_reaches_the_program_in_200_bytes(reason: str) -> None:
    ranks = Ranks(1)
    ranks.board.ask(reason, LATER, range(1))
    ranks.board.propose(1)
    ranks.board.confirm()

    stop = ranks.call(0)

    assert stop is not None and 0 < len(stop.reason.encode()) <= 203


@given(st.binary(max_size=400), st.integers(0, 300))
@settings(max_examples=200)
def test_memory_that_the_program_overwrote_never_raises(junk: bytes, place: int) -> None:
    ranks = Ranks(2, start=0)
    ranks.call(0)
    size = min(len(junk), len(ranks.memory) - place)
    ranks.memory[place : place + size] = junk[:size]
    # A worker may wait for the confirmation that these bytes promise: the launcher's deadline ends that.
    ranks.board.confirm()

    found = ranks.call(0)

    assert found is None or isinstance(found, Stop)
    assert isinstance(ranks.board.listeners(), list)
    assert isinstance(ranks.board.calls(), int)


@pytest.fixture
def by_default() -> Iterator[None]:
    """The first call finds no handler, and those that it sets end with the test."""
    signums = (signal.SIGTERM, *_should_stop.NOTICES)
    before = [signal.signal(signum, signal.SIG_DFL) for signum in signums]
    yield
    for signum, handler in zip(signums, before, strict=True):
        signal.signal(signum, handler)


@pytest.mark.usefixtures("by_default")
@pytest.mark.parametrize("signum", [signal.SIGTERM, *_should_stop.NOTICES])
def test_a_handler_of_c_code_stays(signum: signal.Signals, tmp_path: Path) -> None:
    ranks = Ranks(1)
    with (tmp_path / "stacks").open("w") as file:
        faulthandler.register(signum, file=file)
        ranks.call(0)
        signal.raise_signal(signum)
        faulthandler.unregister(signum)

    assert "most recent call first" in (tmp_path / "stacks").read_text()
    assert ([] if signum == signal.SIGTERM else [0]) == ranks.board.ignoring()


@pytest.fixture
def detached() -> Iterator[None]:
    before = _should_stop._listener
    yield
    _should_stop._listener = before


@pytest.mark.usefixtures("detached")
def test_should_stop_returns_none_outside_a_worker() -> None:
    _should_stop._listener = None

    assert should_stop() is None
