"""For how long workers have written nothing, by the times that the kernel keeps."""

from __future__ import annotations

import os
import pty
from pathlib import Path

import pytest

from elasticlib.agent._silence import seconds_of


@pytest.mark.parametrize(("began", "seconds"), [(0.0, 30.0), (980.0, 20.0), (2000.0, 0.0)])
def test_it_counts_from_the_last_byte_or_from_the_start(began: float, seconds: float, tmp_path: Path) -> None:
    older, newer = tmp_path / "older", tmp_path / "newer"
    for path, moment in ((older, 900.0), (newer, 970.0)):
        path.touch()
        os.utime(path, (0.0, moment))

    assert seconds == seconds_of(1000.0, began, [str(older), str(newer), str(tmp_path / "gone"), -1])


def test_bytes_that_go_through_a_pipe_are_seen() -> None:
    reading, writing = os.pipe()
    try:
        before = os.fstat(writing).st_mtime
        os.write(writing, b"line\n")

        assert 5.0 >= seconds_of(before + 5.0, 0.0, [writing])
    finally:
        os.close(reading)
        os.close(writing)


def test_the_time_of_a_terminal_may_be_behind_by_eight_seconds() -> None:
    ours, terminal = pty.openpty()
    try:
        written = os.fstat(terminal).st_mtime

        assert 20.0 == pytest.approx(seconds_of(written + 28.0, 0.0, [terminal]))
    finally:
        os.close(ours)
        os.close(terminal)
