"""Output for a stream that takes it late, or never."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from elasticlib.remote import _output_queue
from elasticlib.remote._output_queue import OutputQueue
from tests.waiting import wait_until


class Stream:
    """A stream that takes pieces while it is *open*."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.taken: list[bytes] = []

    def write(self, data: bytes) -> None:
        assert self.open.wait(60)
        self.taken.append(data)


@pytest.fixture
def stream() -> Stream:
    return Stream()


@pytest.fixture
def queue(stream: Stream) -> Iterator[OutputQueue]:
    made = OutputQueue(stream.write)
    made.begin()
    yield made
    stream.open.set()
    assert made.end(bool)


def test_pieces_are_written_in_their_order_and_then_reported(queue: OutputQueue, stream: Stream) -> None:
    reported: list[int] = []
    for number in range(5):
        queue.add(b"%d" % number, lambda number=number: reported.append(len(stream.taken)))  # type: ignore[misc]
    assert [] == reported
    stream.open.set()

    assert queue.end(bool)
    assert [b"0", b"1", b"2", b"3", b"4"] == stream.taken
    assert [1, 2, 3, 4, 5] == reported


def test_a_queue_is_long_while_the_stream_takes_nothing(queue: OutputQueue, stream: Stream) -> None:
    for _ in range(20):
        queue.add(b"x")
    assert queue.is_long

    stream.open.set()
    wait_until(lambda: not queue.is_long)


def test_in_a_hurry_all_pieces_are_reported_at_once_and_still_written(queue: OutputQueue, stream: Stream) -> None:
    reported: list[int] = []
    # The first one may be at the stream already.
    queue.add(b"0")
    queue.add(b"1", lambda: reported.append(1))
    queue.hurry()
    queue.add(b"2", lambda: reported.append(2))
    assert [1, 2] == reported
    stream.open.set()

    assert queue.end(bool)
    assert ([b"0", b"1", b"2"], [1, 2]) == (stream.taken, reported)


def test_in_a_hurry_no_more_is_kept_than_a_bound(queue: OutputQueue, stream: Stream) -> None:
    queue.hurry()
    for _ in range(3 * _output_queue._MOST_WAITING):
        queue.add(b"x")
    stream.open.set()

    assert queue.end(bool)
    assert len(stream.taken) <= _output_queue._MOST_WAITING + 1


def test_stream_does_not_block_a_caller_that_stops_waiting(queue: OutputQueue) -> None:
    queue.add(b"x")
    answers = iter([False, True])

    assert not queue.end(lambda: next(answers))
    assert [] == list(answers)


def test_a_queue_that_was_not_begun_ends_at_once(stream: Stream) -> None:
    assert OutputQueue(stream.write).end(bool)


def test_pieces_that_arrive_between_two_writes_are_joined(stream: Stream) -> None:
    queue = OutputQueue(stream.write, gather=60.0)
    stream.open.set()
    queue.begin()
    reported: list[str] = []
    queue.add(b"a")
    wait_until(lambda: stream.taken == [b"a"])
    for text in "bcd":
        queue.add(text.encode(), lambda text=text: reported.append(text))  # type: ignore[misc]

    assert queue.end(bool)
    assert [b"a", b"bcd"] == stream.taken
    assert ["b", "c", "d"] == reported
