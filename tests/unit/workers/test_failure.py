"""From a worker's end to a failure: whose fault, what the signal means, which came first."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from elasticlib.errors import ChildFailedError, root_cause
from elasticlib.spec import LogsDest
from elasticlib.workers._failure import (
    _CRASHES,
    _NATIVE,
    explain_exit,
    failure_of,
    failures_of,
    has_failed,
    original_exception,
    stacks_of_user,
)
from elasticlib.workers._launch_events import Exit
from elasticlib.workers.child import _interpreter_end, _showing
from elasticlib.workers.child._report import Report, report_of_exception
from elasticlib.workers.child._result_pickles import pack_exception

ERROR = Report("error", b"", "ValueError", "ValueError: bad", "Traceback\nValueError: bad", 1234.5)
END = Exit(1, 77, 1, False, None, "", "")


def describe(end: Exit, *, error_file: str = "", stderr: str | None = None, kills: int = 0) -> Any:
    return failure_of(end, 5, error_file, stderr, kills, noticed=2000.25)


def recorded(folder: Path, stamp: float, written: float, message: str = "of a decorator") -> str:
    """Write an error file with a time of its own at another time, and return its path."""
    path = folder / "error.json"
    extra = {"py_callstack": "Traceback", "timestamp": str(int(stamp))}
    path.write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))
    os.utime(path, (written, written))
    return str(path)


# Whether it failed.


@pytest.mark.parametrize(
    ("exitcode", "was_stopped", "report", "expected"),
    [
        (0, False, None, False),
        *((code, False, None, True) for code in (1, 3, -signal.SIGKILL, -signal.SIGTERM)),
        *((code, True, None, False) for code in (1, 143, -signal.SIGTERM, -signal.SIGKILL)),
        (1, True, ERROR, True),
        *((-code, True, None, True) for code in sorted(_CRASHES)),
        (-signal.SIGTERM, True, Report("result", b""), False),
    ],
)
def test_a_worker_failed_by_a_bad_end_unless_we_stopped_it(
    exitcode: int, was_stopped: bool, report: Report | None, expected: bool
) -> None:
    """After the stop signal only an exception or a crash of its own is a failure."""
    assert expected == has_failed(evolve(END, exitcode=exitcode, was_stopped=was_stopped, report=report), "")


def test_an_error_file_of_a_worker_that_was_stopped_is_a_failure(tmp_path: Path) -> None:
    assert has_failed(evolve(END, was_stopped=True), recorded(tmp_path, 900, 900))


@pytest.mark.parametrize("content", ["", '{"message": {"mess', "[]", "{}", '{"message": null}'])
def test_stop_is_not_a_failure_if_its_error_file_has_no_message(content: str, tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    path.write_text(content)

    assert not has_failed(evolve(END, was_stopped=True), str(path))


# What is known of it.


def test_failure_from_a_report_has_type_message_traceback_and_time() -> None:
    failure = describe(evolve(END, report=ERROR))

    assert (failure.rank, failure.local_rank, failure.pid, failure.exitcode) == (5, 1, 77, 1)
    assert (failure.exception_type, failure.message) == ("ValueError", "ValueError: bad")
    assert (failure.traceback, failure.moment) == ("Traceback\nValueError: bad", 1234.5)
    assert not failure.secondary


def test_a_report_beats_the_error_file_which_beats_the_exit_status(tmp_path: Path) -> None:
    path = recorded(tmp_path, 900, 100)

    reported, unreported = (describe(end, error_file=path) for end in (evolve(END, report=ERROR), END))

    assert (reported.message, reported.moment) == ("ValueError: bad", 1234.5)
    assert (unreported.message, unreported.timestamp) == ("of a decorator", 900.0)


@pytest.mark.parametrize(("written", "expected"), [(900.75, 900.75), (901.5, 901.5), (2000.0, 900.0), (850.0, 900.0)])
def test_the_time_of_an_error_file_is_known_better_than_in_whole_seconds(
    written: float, expected: float, tmp_path: Path
) -> None:
    """A file of another time was copied, or moved, and tells nothing."""
    assert expected == describe(END, error_file=recorded(tmp_path, 900, written)).moment


def test_worker_that_recorded_its_error_before_a_stop_is_the_cause(tmp_path: Path) -> None:
    first = describe(evolve(END, was_stopped=True, exitcode=-15), error_file=recorded(tmp_path, 1999, 1999.5))
    ended_first = describe(END)

    assert (0, first) == root_cause({0: first, 1: ended_first})
    assert "" == first.hint


def test_a_worker_that_failed_because_it_was_stopped_is_not_the_root_cause(tmp_path: Path) -> None:
    """Its own stamp, in whole seconds, is before the other's end."""
    stopped = describe(evolve(END, was_stopped=True), error_file=recorded(tmp_path, 2000, 2000.5))
    ended_first = describe(END)

    assert (1, ended_first) == root_cause({0: stopped, 1: ended_first})


@pytest.mark.parametrize(
    ("exitcode", "report", "message"),
    [(-9, None, "SIGKILL"), (3, Report("result", b"payload", timestamp=1.0), "exit status 3")],
    ids=["no report", "a return value"],
)
def test_without_a_report_of_an_error_the_time_is_that_of_its_end(
    exitcode: int, report: Report | None, message: str
) -> None:
    failure = describe(evolve(END, exitcode=exitcode, report=report))

    assert (2000.25, True) == (failure.moment, message in failure.message)


def test_failed_worker_stopped_at_its_exit_has_no_hint_of_others() -> None:
    failure = describe(evolve(END, exitcode=-signal.SIGTERM, was_stopped=True, report=ERROR))

    assert failure.hint == ""


REQUESTED_STACKS = 'Current thread 0x1 (most recent call first):\n  File "/home/me/train.py", line 3 in work\n'


@pytest.mark.parametrize("exitcode", [-signal.SIGKILL, -signal.SIGTERM, 1])
def test_requested_stacks_are_not_the_traceback_of_a_later_end(exitcode: int) -> None:
    assert "" == describe(evolve(END, exitcode=exitcode, faults=REQUESTED_STACKS)).traceback


def test_stacks_requested_before_a_crash_are_left_out() -> None:
    crash = "Fatal Python error: Segmentation fault\n\n" + REQUESTED_STACKS.replace("line 3", "line 41")

    assert crash.strip() == describe(evolve(END, exitcode=-11, faults=REQUESTED_STACKS + crash)).traceback


def test_stacks_of_an_overdue_end_are_shown_once() -> None:
    stopped = describe(evolve(END, exitcode=-15, overdue=2.0, faults=REQUESTED_STACKS))
    raised = describe(evolve(END, report=ERROR, overdue=2.0, faults=REQUESTED_STACKS))
    unseen = describe(evolve(END, exitcode=-15, overdue=2.0))

    assert (REQUESTED_STACKS.strip(), True) == (stopped.traceback, stopped.hint.endswith("and was stopped"))
    assert (ERROR.traceback, True) == (
        raised.traceback,
        raised.hint.endswith(f"its threads then:\n{REQUESTED_STACKS.strip()}"),
    )
    assert ("", True) == (unseen.traceback, unseen.hint.endswith("its threads then:\n(could not be seen)"))


def test_last_lines_are_those_of_the_log_else_those_that_python_wrote(tmp_path: Path) -> None:
    path = tmp_path / "stderr.log"
    path.write_text("first\nlast words\n")
    end = evolve(END, tail="of Python\nalone\n")

    assert describe(end, stderr=str(path)).log_tail == ("first", "last words")
    assert describe(end).log_tail == ("of Python", "alone")


@pytest.mark.parametrize("prefix", ["", "[rank1]: ", "[rank1]: [rank1]: "], ids=["none", "one group", "two groups"])
def test_last_lines_do_not_repeat_the_traceback(prefix: str) -> None:
    failure = describe(evolve(END, report=ERROR, tail=f"epoch 3\n{prefix}Traceback\n{prefix}ValueError: bad\n"))

    assert failure.log_tail == ("epoch 3",)


# Which came first.


def test_a_lost_connection_that_was_noticed_first_does_not_beat_its_cause() -> None:
    lost = describe(evolve(END, report=report_of_exception(ConnectionResetError("by peer"), b"")))
    cause = describe(evolve(END, exitcode=-9))
    lost.timestamp = cause.timestamp - 1

    assert root_cause({0: lost, 1: cause}) == (1, cause)


def test_crash_during_a_stop_does_not_beat_the_cause() -> None:
    stopped = describe(evolve(END, exitcode=-signal.SIGABRT, was_stopped=True))
    cause = describe(evolve(END, report=report_of_exception(ValueError("bad"), b"")))

    assert stopped.secondary
    assert root_cause({0: stopped, 1: cause}) == (1, cause)


# What the end means.


@pytest.mark.parametrize("exitcode", [-9, 137])
def test_explanation_of_a_kill_states_whether_memory_ran_out(exitcode: int) -> None:
    assert "out-of-memory killer ended 2 process" in explain_exit(exitcode, 2)
    assert "counter did not move" in explain_exit(exitcode, 0)


@pytest.mark.parametrize(
    ("exitcode", "text"),
    [
        (-11, "native code crashed"),
        (139, "native code crashed"),
        (-6, "native code aborted"),
        (-15, "came from outside, not from this launcher"),
        (143, "came from outside, not from this launcher"),
        (126, "cannot be executed"),
        (127, "was not found"),
    ],
)
def test_an_end_is_explained(exitcode: int, text: str) -> None:
    assert text in explain_exit(exitcode, 0)


@pytest.mark.parametrize("exitcode", [0, 1, 2, 121, 255, -10])
def test_exit_code_without_a_meaning_is_not_explained(exitcode: int) -> None:
    assert explain_exit(exitcode, 0) == ""


# The log's end.


def test_only_the_last_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "stderr.log"
    path.write_text("".join(f"line {number}\n" for number in range(100_000)))

    assert describe(END, stderr=str(path)).log_tail == tuple(f"line {number}" for number in range(99_990, 100_000))


def test_a_log_of_no_encoding_is_read() -> None:
    descriptor = os.memfd_create("log")
    os.write(descriptor, b"\xff\xfe bad\n")
    try:
        lines = describe(END, stderr=f"/proc/self/fd/{descriptor}").log_tail
    finally:
        os.close(descriptor)

    assert lines == ("\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER} bad",)


def test_a_log_that_is_not_there_has_no_lines(tmp_path: Path) -> None:
    assert describe(END, stderr=str(tmp_path / "gone")).log_tail == ()
    assert describe(END, stderr=os.devnull).log_tail == ()


# The worker's own exception.


def test_the_exception_of_the_worker_is_rebuilt() -> None:
    report = report_of_exception(ValueError("bad"), pack_exception(ValueError("bad"), ()))

    original = original_exception(evolve(END, report=report))

    assert repr(original) == "ValueError('bad')"
    assert original is not None
    assert f"from the worker of local rank 1:\n{report.traceback}" in noted(original)


def noted(error: BaseException) -> str:
    """Return the text that is shown beside *error*."""
    return "".join(error.__notes__) if sys.version_info >= (3, 11) else str(error.__cause__)


@pytest.mark.parametrize(
    "payload", [b"", b"no pickle at all", pickle.dumps("no exception"), b"cno_such_module\nTrouble\n."]
)
def test_lost_exception_has_its_type_text_and_traceback(payload: bytes) -> None:
    report = dataclasses.replace(ERROR, payload=payload)

    original = original_exception(evolve(END, report=report))

    assert isinstance(original, ValueError)
    assert ("ValueError", "bad") == (type(original).__name__, str(original))
    assert "Traceback\nValueError: bad" in noted(original)


def test_an_exception_of_an_unknown_class_keeps_its_name() -> None:
    report = dataclasses.replace(ERROR, exception_type="train.Stop", message="train.Stop: at 3")

    original = original_exception(evolve(END, report=report))

    assert "train.Stop: at 3\n" == traceback.format_exception_only(type(original), original)[0]


@pytest.mark.parametrize("report", [None, Report("result", pickle.dumps(ValueError("a value"))), Report("error", b"")])
def test_worker_that_raised_nothing_has_no_exception(report: Report | None) -> None:
    assert original_exception(evolve(END, report=report)) is None


def test_frames_of_the_caller_that_was_forked_are_left_out() -> None:
    head = "Current thread 0x1 (most recent call first):"
    call = f'  File "{_showing.__file__}", line 52 in {_showing.call_function.__name__}'
    user, caller = (f'  File "/home/me/train.py", line {line} in work' for line in (3, 70))

    working, returned = (
        stacks_of_user(f"{head}\n{user}\n{call}\n{caller}\n"),
        stacks_of_user(f"{head}\n{call}\n{caller}\n"),
    )

    assert [head, user] == working.splitlines()
    assert [head, f"  (elasticlib called the function, which is {_NATIVE})"] == returned.splitlines()


def test_stack_of_only_own_frames_states_what_the_ending_worker_does() -> None:
    """All its frames are left out, and one line stands for them."""
    own = f'  File "{_interpreter_end.__file__}", line 7 in '
    user = '  File "/home/me/train.py", line 3 in work'
    head, other = "Thread 0x1 (most recent call first):", "Current thread 0x2 (most recent call first):"

    text = stacks_of_user(f"{head}\n{user}\n\n{other}\n{own}_clear_modules\n{own}finish\n")

    assert [head, user, "", other, "  (elasticlib clears the program's modules and runs finalizers)"] == (
        text.splitlines()
    )


def test_report_of_a_bare_exit_status_names_the_log_files() -> None:
    dest = LogsDest(stdouts={1: "/logs/out"}, stderrs={1: "/logs/err"})

    bare = failures_of({1: END}, dest, 0, {1: 2000.0}, 4)
    raised = failures_of({1: evolve(END, report=ERROR)}, dest, 0, {1: 2000.0}, 4)

    assert "log files : /logs/out, /logs/err" in str(ChildFailedError("train", bare))
    assert "log files" not in str(ChildFailedError("train", raised))


def test_streams_sent_to_the_null_device_are_not_log_files() -> None:
    dest = LogsDest(stdouts={1: os.devnull})

    assert () == failures_of({1: END}, dest, 0, {1: 2000.0}, 4)[5].log_files
