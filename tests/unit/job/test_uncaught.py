"""Python's output for an error of a launch that the program does not catch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import elasticlib.launch
from elasticlib.errors import ChildFailedError, InvalidTransitionError, LaunchInterrupted, ProcessFailure
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

    _raising.set_uncaught_hook()

    assert own == (sys.excepthook is before)


def test_other_errors_are_shown_as_python_shows_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    _raising.set_uncaught_hook()

    sys.excepthook(KeyError, KeyError("name"), None)

    assert "KeyError: 'name'\n" == capsys.readouterr().err


REFUSED = """
import elasticlib, threading
def train(lock): pass
class Model:
    def __reduce__(self):
        raise ValueError("cannot be copied")
def start(argument):
    elasticlib.elastic_launch(elasticlib.LaunchConfig(nproc_per_node=1), train)(argument)
if __name__ == "__main__":
    start({argument})
"""


@pytest.mark.parametrize(("argument", "cause"), [("threading.Lock()", ""), ("Model()", "in __reduce__")])
def test_uncaught_refusal_has_no_frames_of_the_launcher(argument: str, cause: str, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(REFUSED.format(argument=argument))

    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)

    lines = done.stderr.splitlines()
    assert done.returncode == 1
    assert lines[-1].startswith("elasticlib.errors.PicklingError: argument 0 of train")
    assert "in start" in done.stderr
    assert cause in done.stderr
    assert ("direct cause" in done.stderr) is bool(cause)
    assert [] == [line for line in lines if f"{os.sep}elasticlib{os.sep}" in line or "cloudpickle" in line]


@pytest.mark.parametrize(
    ("error", "is_shown_whole"),
    [(LaunchInterrupted("stopped", signal.SIGINT), False), (InvalidTransitionError("agent", "A", "B"), True)],
)
def test_frames_of_the_launcher_are_shown_only_of_a_bug(
    error: BaseException, is_shown_whole: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def calls() -> None:
        raise error

    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    _raising.set_uncaught_hook()
    try:
        exec(compile("calls()", elasticlib.launch.__file__, "exec"), {"calls": calls})
    except BaseException as found:
        sys.excepthook(type(found), found, found.__traceback__)

    text = capsys.readouterr().err
    assert "in calls" in text
    assert ("launch.py" in text) is is_shown_whole
