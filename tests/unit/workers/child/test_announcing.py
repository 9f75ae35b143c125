"""Announcements of workers to their spawner, and their wait for release."""

from __future__ import annotations

import os
import struct
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from elasticlib.workers.child import _announcing
from elasticlib.workers.child._announcing import Notices, ProgramOutcome, announce, await_release
from elasticlib.workers.child._start_spec import Handed


@given(st.binary(max_size=200))
def test_bytes_that_are_not_an_announcement_are_ignored(data: bytes) -> None:
    for pid, outcome, status in Notices().take(data):
        assert isinstance(outcome, ProgramOutcome)
        assert struct.pack("!iBi", pid, outcome, status) in data


def handed_with(**facts: Any) -> Handed:
    """Return the data that the spawner handed to this process, as a worker, with *facts*."""
    nothing = Handed(
        environment={}, streams=(), report=-1, identity=(0, 0), faults=-1, tail=-1, notices=-1, notices_identity=(0, 0),
        release=-1, release_identity=(0, 0), spawner=os.getpid(), pid=os.getpid(),
    )  # fmt: skip
    return replace(nothing, **facts)


@pytest.mark.parametrize("change", [{}, {"pid": os.getpid() + 1}, {"release_identity": (1, 2)}, {"release": -1}])
def test_a_worker_is_released_by_a_byte_and_nobody_else_waits(change: dict[str, Any]) -> None:
    """Neither a process that it forked, nor a program that closed the descriptor."""
    reading, writing = os.pipe()
    status = os.fstat(reading)
    handed = handed_with(release=reading, release_identity=(status.st_dev, status.st_ino))
    if not change:
        os.write(writing, b".")

    await_release(replace(handed, **change))

    os.close(reading)
    os.close(writing)


def test_only_the_worker_itself_announces() -> None:
    """A process that it forked has what it was handed, too."""
    reading, writing = os.pipe()
    facts = os.fstat(writing)
    here = (facts.st_dev, facts.st_ino)
    handed = handed_with(notices=writing, notices_identity=here)
    announce(replace(handed, pid=os.getpid() + 1), ProgramOutcome.RAISED, 1)
    announce(replace(handed, pid=os.getpid()), ProgramOutcome.RETURNED, 0)

    assert [(os.getpid(), ProgramOutcome.RETURNED, 0)] == list(Notices().take(os.read(reading, 100)))
    os.close(reading)
    os.close(writing)


# Reports that come through the pipe.


@given(st.lists(st.integers(0, 70_000), max_size=3), st.lists(st.integers(1, 65_536), min_size=1, max_size=9))
def test_report_through_the_pipe_is_whole_however_it_is_read(sizes: list[int], reads: list[int]) -> None:
    """Beside announcements of others."""
    announced = []
    data = b""
    for pid, size in enumerate(sizes, 1):
        for begin in range(0, size, _announcing._PIECE):
            count = min(_announcing._PIECE, size - begin)
            data += _announcing._NOTICE.pack(pid, _announcing._POURED, count) + bytes([pid]) * count
            data += _announcing._NOTICE.pack(99, ProgramOutcome.ENDED, 0)
        data += _announcing._NOTICE.pack(pid, ProgramOutcome.RETURNED, 0)
    notices, place, turn = _announcing.Notices(), 0, 0
    while place < len(data):
        piece, turn = data[place : place + reads[turn % len(reads)]], turn + 1
        place += len(piece)
        announced += [pid for pid, _, _ in notices.take(piece) if pid != 99]

    assert list(range(1, len(sizes) + 1)) == announced
    assert [bytes([pid]) * size for pid, size in enumerate(sizes, 1)] == [notices.report_of(pid) for pid in announced]


def test_text_of_others_in_the_pipe_is_ignored() -> None:
    notices = _announcing.Notices()

    assert [] == list(notices.take(b"a line of the user's program\n"))
    assert [(7, ProgramOutcome.ENDED, 3)] == list(notices.take(_announcing._NOTICE.pack(7, ProgramOutcome.ENDED, 3)))
