"""Python's output for an error of a launch that the program does not catch."""

from __future__ import annotations

import sys
from typing import Any

import pytest

import elasticlib.launch
from elasticlib.errors import ChildFailedError, ProcessFailure
from elasticlib.job import _raising
from elasticlib.job._raising import combined_error

TRACE = 'Traceback (most recent call last):\n  File "train.py", line 5, in train\n    bug()\nValueError: bad batch'


def error(*, is_on_console: bool, ranks: int = 1) -> ChildFailedError:
    facts: dict[str, Any] = {"exception_type": "ValueError", "message": "ValueError: bad batch", "traceback": TRACE}
    failures = {
        rank: ProcessFailure(rank, 10, 1, "", rank=rank, is_on_console=is_on_console, **facts) for rank in range(ranks)
    }
    found = ChildFailedError("train", failures)
    found._elastic_ranks = 4
    return found


def shown(failed: ChildFailedError) -> str:
    cause = ValueError("bad batch")
    try:
        raise combined_error(failed, cause, "both") from cause
    except ChildFailedError as found:
        return "\n".join(_raising.uncaught_lines(found, found.__traceback__))


def test_a_traceback_that_the_worker_has_written_is_not_repeated() -> None:
    text = shown(error(is_on_console=True))

    assert "in train" not in text
    assert "ValueError: bad batch (train.py:5)" in text
    assert "direct cause" not in text
    assert text.startswith("Traceback (most recent call last):\n  File")


def test_a_traceback_that_went_elsewhere_is_shown_once() -> None:
    assert 1 == shown(error(is_on_console=False)).count('File "train.py", line 5, in train')


def test_ranks_without_a_failure_are_counted() -> None:
    assert "and 2 more of 4 ranks" in shown(error(is_on_console=True, ranks=2))
    assert "more of" not in shown(error(is_on_console=True))


def test_caught_error_holds_the_full_traceback() -> None:
    assert TRACE.splitlines()[1] in str(error(is_on_console=True))


def test_frames_of_the_launcher_are_left_out() -> None:
    def calls() -> None:
        raise error(is_on_console=True)

    code = compile("calls()", elasticlib.launch.__file__, "exec")
    try:
        exec(code, {"calls": calls})
    except ChildFailedError as found:
        text = "\n".join(_raising.uncaught_lines(found, found.__traceback__))

    assert "launch.py" not in text
    assert "in calls" in text


@pytest.mark.parametrize("own", [True, False])
def test_the_hook_of_a_program_stays(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def programs(*_: object) -> None:
        """Show nothing."""

    before = programs if own else sys.__excepthook__
    monkeypatch.setattr(sys, "excepthook", before)

    _raising.show_uncaught()

    assert own == (sys.excepthook is before)


def test_other_errors_are_shown_as_python_shows_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    _raising.show_uncaught()

    sys.excepthook(KeyError, KeyError("name"), None)

    assert "KeyError: 'name'\n" == capsys.readouterr().err
