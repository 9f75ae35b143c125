"""The state of a process, as the kernel tells it."""

from __future__ import annotations

import builtins
import io
import os
from typing import Any

import pytest

from elasticlib.utils.process_state import is_uninterruptible_state, read_proc_state


def test_this_process_runs() -> None:
    assert "R" == read_proc_state(os.getpid())


def test_of_a_process_that_is_not_there_nothing_is_known() -> None:
    assert read_proc_state(2**22 + 1) is None


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"7 (python) D 1 7", "D"),
        (b"7 (a) b) (c) S 1 7", "S"),
        (b"7 (\xff\n D) Z 1 7", "Z"),
        (b"7 (python)", None),
        (b"", None),
    ],
)
def test_the_state_stands_after_the_last_bracket(
    content: bytes, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.open
    monkeypatch.setattr(
        builtins, "open", lambda path, *rest: io.BytesIO(content) if path == "/proc/7/stat" else real(path, *rest)
    )

    found: Any = read_proc_state(7)

    assert expected == found


@pytest.mark.parametrize(
    ("state", "expected"), [("D", True), ("D+", True), ("S", False), ("R", False), ("", False), (None, False)]
)
def test_only_d_is_uninterruptible(state: str | None, expected: bool) -> None:
    assert expected == is_uninterruptible_state(state)
