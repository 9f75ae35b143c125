"""Every exception: whose fault it is, what it says, and that it crosses processes."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import pathlib
import pickle
import signal
import tempfile
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, strategies as st

import elasticlib.elastic.multiprocessing.errors
import elasticlib.errors
from elasticlib.agent import _outcome
from elasticlib.elastic.multiprocessing.errors import ErrorHandler
from elasticlib.errors import (
    ChildFailedError,
    ConfigError,
    ElasticError,
    InvalidTransitionError,
    LaunchInterrupted,
    PreemptedError,
    PreloadError,
    ProcessFailure,
    RendezvousError,
    SignalException,
    root_cause,
)
from elasticlib.rendezvous.protocol._messages import Failed, decode, encode
from elasticlib.workers import _failure
from elasticlib.workers._launch_events import Exit
from tests.unit.untrusted import spoiled, strange


def failure(local_rank: int = 0, exitcode: int = 1, **facts: object) -> ProcessFailure:
    made = ProcessFailure(local_rank, 100 + local_rank, exitcode, "", message="it broke", timestamp=1.0)
    for name, value in facts.items():
        setattr(made, name, value)
    return made


ARGUMENTS: dict[type[ElasticError], tuple[object, ...]] = {
    PreloadError: ("numpy", "it starts a thread"),
    InvalidTransitionError: ("the worker group of round 0", "INIT", "UNKNOWN", ("INIT: made",)),
    SignalException: ("stopped by SIGTERM", signal.SIGTERM),
    LaunchInterrupted: ("stopped by SIGINT", signal.SIGINT),
    PreemptedError: ("its workers have returned", signal.SIGTERM, {0: "a result"}),
    ChildFailedError: ("train.py", {0: failure(0), 3: failure(3, -9)}),
}
CLASSES = [
    each
    for _, each in inspect.getmembers(elasticlib.errors, inspect.isclass)
    if issubclass(each, Exception) and each.__module__ == "elasticlib.errors"
]


@pytest.mark.parametrize("each", CLASSES)
def test_every_exception_survives_pickling(each: type[ElasticError]) -> None:
    error = each(*ARGUMENTS.get(each, ("why",)))

    copy = pickle.loads(pickle.dumps(error))

    assert type(error) is type(copy)
    assert (str(error), vars(error)) == (str(copy), vars(copy))


@pytest.mark.parametrize("each", CLASSES)
def test_every_exception_has_one_base_and_states_when_it_is_raised(each: type[ElasticError]) -> None:
    assert issubclass(each, ElasticError)
    assert (each.__doc__ or "").strip().startswith(("Raised ", "Base class"))


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("ConfigError", ValueError),
        ("SpecError", AssertionError),
        ("LogDirError", NotADirectoryError),
        ("PicklingError", TypeError),
        ("StartError", RuntimeError),
        ("PreloadError", ValueError),
        ("RendezvousTimeoutError", TimeoutError),
        ("RendezvousConnectionError", ConnectionError),
        ("LaunchInterrupted", KeyboardInterrupt),
    ],
)
def test_an_exception_is_also_the_builtin_that_people_catch(name: str, builtin: type[BaseException]) -> None:
    assert issubclass(getattr(elasticlib.errors, name), builtin)


def test_a_signal_is_neither_the_calls_fault_nor_the_clusters() -> None:
    assert not issubclass(SignalException, (ConfigError, RendezvousError))


def written(tmp_path: pathlib.Path, content: object) -> str:
    path = tmp_path / "error.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_torchs_error_file_is_understood(tmp_path: pathlib.Path) -> None:
    """Row 094."""
    extra = {"py_callstack": "Traceback: here", "timestamp": "1700000000"}
    path = written(tmp_path, {"message": {"message": "ValueError: no", "extraInfo": extra}})

    read = ProcessFailure(1, 7, 1, path)

    assert ("ValueError: no", "Traceback: here", 1700000000) == (read.message, read.traceback, read.timestamp)
    assert path == read.error_file


def test_a_plain_message_in_the_error_file_is_understood(tmp_path: pathlib.Path) -> None:
    """Row 095."""
    path = written(tmp_path, {"message": "gone", "timestamp": 12})

    read = ProcessFailure(1, 7, 1, path)

    assert ("gone", 12) == (read.message, read.timestamp)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["message", "extraInfo", "timestamp"]), inner),
    max_leaves=6,
)


@given(content=json_values.map(json.dumps) | st.text() | st.sampled_from(['{"message": {"mess', "", "[]", "null"]))
def test_no_error_file_hides_the_failure(content: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Row 096: torch's agent dies of a truncated file."""
    path = tmp_path_factory.mktemp("failure") / "error.json"
    path.write_text(content, encoding="utf-8", errors="surrogatepass")

    read = ProcessFailure(1, 7, 3, str(path))

    assert (3, 7) == (read.exitcode, read.pid)
    assert "3 (pid: 7)" in str(ChildFailedError("train.py", {1: read}))


OF_TORCH = {"message": {"message": "E: x", "extraInfo": {"py_callstack": "T", "timestamp": "17"}, "errorCode": 1}}


@given(spoiled(json.dumps(OF_TORCH).encode()) | strange)
def test_failure_is_reported_whatever_is_in_its_error_file(content: bytes) -> None:
    """Up to the note that goes to other nodes, and to the file of a launcher around this one."""
    with tempfile.TemporaryDirectory() as folder:
        path, other = os.path.join(folder, "error.json"), os.path.join(folder, "other.json")
        pathlib.Path(path).write_bytes(content)

        end = Exit(0, 7, 3, True, None, "", "")
        _failure.has_failed(end, path)
        failure = _failure.failure_of(end, 1, path, None, 0, 100.0)
        with mock.patch.dict(os.environ, TORCHELASTIC_ERROR_FILE=other):
            ErrorHandler().dump_failure(failure)

        assert (3, 7) == (failure.exitcode, failure.pid)
        assert "rank 1" in str(ChildFailedError("train.py", {1: failure}))
        (note,) = _outcome.notes([failure])
        assert decode(encode(Failed("a", 0, (note,))))
        assert json.loads(pathlib.Path(other).read_text()) is not None


def test_an_error_file_that_is_longer_than_any_is_left_alone(tmp_path: pathlib.Path) -> None:
    path = written(tmp_path, {"message": "x" * 2**24})

    assert "exit status 1" in ProcessFailure(1, 7, 1, path).message


def test_failure_without_an_error_file_states_how_the_worker_ended() -> None:
    """Rows 088 and 093."""
    read = ProcessFailure(0, 7, 3, "/nowhere/error.json")

    assert "<N/A>" == read.error_file
    assert "3" in read.message
    assert read.timestamp > 0


@pytest.mark.parametrize(
    ("exitcode", "name"), [(-9, "SIGKILL"), (-11, "SIGSEGV"), (-63, "SIG63"), (3, "<N/A>"), (0, "<N/A>")]
)
def test_a_signal_is_called_by_its_name(exitcode: int, name: str) -> None:
    """Row 089."""
    assert name == failure(exitcode=exitcode).signal_name()


def test_the_root_cause_is_the_earliest_failure_by_fractions_of_a_second() -> None:
    """Row 097."""
    failures = {0: failure(0, timestamp=5.9), 1: failure(1, timestamp=5.1), 2: failure(2, timestamp=5.2)}

    assert 1 == root_cause(failures)[0]


def test_a_lost_connection_never_beats_another_failure() -> None:
    failures = {0: failure(0, timestamp=1.0, secondary=True), 1: failure(1, timestamp=9.0)}

    assert 1 == ChildFailedError("train.py", failures).get_first_failure()[0]


def test_the_summary_holds_every_failure_and_the_root_cause() -> None:
    """Row 091."""
    first = failure(0, -9, timestamp=1.0, rank=4, hint="out of memory?", log_tail=("last words",))
    second = failure(1, 3, timestamp=2.0, rank=5, traceback="Traceback\nValueError: no")

    text = str(ChildFailedError("train.py", {4: first, 5: second}))

    head, root = text.split("Root Cause")
    assert "train.py FAILED" in head
    for fact in ("[1]:", "rank      : 5 (local_rank: 1)", "exitcode  : 3 (pid: 101)", "ValueError: no", "error_file"):
        assert fact in head
    for fact in ("[0]:", "rank      : 4 (local_rank: 0)", "-9 (pid: 100, SIGKILL)", "out of memory?", "last words"):
        assert fact in root


def test_summary_of_a_single_failure_lists_no_other() -> None:
    assert "<NO_OTHER_FAILURES>" in str(ChildFailedError("train.py", {0: failure()}))


def test_a_failed_job_without_failures_is_refused() -> None:
    """Row 101."""
    with pytest.raises(ConfigError, match="failures"):
        ChildFailedError("train.py", {})


def test_failure_text_names_the_host() -> None:
    text = str(ChildFailedError("train.py", {0: failure(0), 3: failure(3, host="node7", root=True)}))

    head, root = text.split("Root Cause")
    assert os.uname().nodename in head
    assert "host      : node7" in root


def test_agreed_root_cause_stands_whatever_the_clocks_show() -> None:
    failures = {0: failure(0, timestamp=1.0), 3: failure(3, timestamp=9.0, secondary=True, root=True)}

    assert root_cause(failures)[0] == 3


# The first line of a failure.

TRAIN = '  File "/home/me/train.py", line 54, in step\n    raise\n'
TORCH = '  File "/venv/lib/python3.11/site-packages/torch/nn/functional.py", line 7, in f\n'
BEGIN = "Traceback (most recent call last):\n"
NOTHING = "The worker ended with exit status 3 and left no exception"


@pytest.mark.parametrize(
    ("facts", "line"),
    [
        ({"message": "ValueError: bad batch", "traceback": f"{BEGIN}{TRAIN}ValueError: bad batch"},
         "ValueError: bad batch (train.py:54)"),
        ({"message": "ValueError: bad batch\nof 7", "traceback": ""}, "ValueError: bad batch"),
        ({"message": "\n\nE: later", "traceback": ""}, "E: later"),
        ({"message": " ", "traceback": ""}, "no message"),
        ({"message": "E: in torch", "traceback": f"{BEGIN}{TRAIN}{TORCH}"}, "E: in torch (train.py:54)"),
        ({"message": "E: in torch alone", "traceback": BEGIN + TORCH}, "E: in torch alone (functional.py:7)"),
        ({"message": "E: second", "traceback": f"{BEGIN}{TORCH}KeyError\n\nDuring handling ...\n\n{BEGIN}{TRAIN}E"},
         "E: second (train.py:54)"),
        ({"message": "G: two", "traceback": f"  + Exception Group {BEGIN}  | {TRAIN}  | G: two\n  +-+---- 1 ----\n"
                                            f"    | {BEGIN}    | {TRAIN.replace('54', '7')}    | E: one\n"},
         "G: two (train.py:54)"),
        ({"message": "E: " + "x" * 1000, "traceback": ""}, "E: " + "x" * 294 + "..."),
        ({"message": NOTHING, "exitcode": 3}, "exit status 3"),
        ({"message": NOTHING, "exitcode": 3, "log_tail": ("first", "no data")}, "exit status 3: no data"),
        ({"message": NOTHING, "exitcode": 3, "hint": "a shell's status"}, "exit status 3: a shell's status"),
        ({"exitcode": -9, "message": "", "hint": "out of memory"}, "ended by SIGKILL: out of memory"),
        ({"exitcode": -11, "message": "", "hint": "native code crashed",
          "traceback": f"Fatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n"
                       f'  File "/venv/lib/python3.11/ctypes/__init__.py", line 5 in g\n{TRAIN}\n\nThread 0x2 ...'},
         "ended by SIGSEGV (train.py:54)"),
        ({"exitcode": -11, "message": "", "hint": "of several threads the one that crashed",
          "traceback": 'Fatal Python error: Segmentation fault\n\nThread 0x2 (most recent call first):\n'
                       '  File "/home/me/loader.py", line 3 in run\n\n'
                       f"Current thread 0x1 (most recent call first):\n{TRAIN}"},
         "ended by SIGSEGV (train.py:54)"),
        ({"exitcode": -64, "message": ""}, "ended by SIGRTMAX"),
    ],
)  # fmt: skip
def test_failure_summary_states_what_happened_and_where(facts: dict[str, Any], line: str) -> None:
    made = ProcessFailure(0, 100, **{"exitcode": 1, "error_file": "", "timestamp": 1.0, **facts})

    assert line == made.summary()


@given(text=st.text(), trace=st.text(), file=st.text(min_size=1))
def test_failure_summary_is_one_line_whatever_the_worker_wrote(text: str, trace: str, file: str) -> None:
    frame = f'  File "{file}", line 3'
    made = ProcessFailure(0, 100, 1, "", message=text, traceback=f"{BEGIN}{trace}\n{frame}\n{trace}", timestamp=1.0)

    assert 1 == len(made.summary().splitlines())


def test_the_error_begins_with_the_root_cause_before_torchs_table() -> None:
    error = ChildFailedError("train.py", {0: failure(0, timestamp=5.0), 3: failure(3, message="ValueError: bad batch")})

    first, _, table = str(error).partition("\n")

    assert "rank 3: ValueError: bad batch" == first == error.summary()
    assert f"\n{table}" == error.format_msg()


def test_a_failures_time_is_whole_seconds_and_its_fraction_is_kept() -> None:
    made = ProcessFailure(0, 1, 3, "", timestamp=1234.5)

    assert ("1234", 1234.5) == (str(made.timestamp), made.moment)
    assert ("1234", 1234.5) == (str(dataclasses.replace(made, rank=1).timestamp), dataclasses.replace(made).moment)


def test_a_time_that_was_set_later_is_the_one_that_counts() -> None:
    first, second = failure(0, timestamp=5.1), failure(1, timestamp=5.9)
    second.timestamp = 4

    assert 4 == second.when()
    assert (1, second) == root_cause({0: first, 1: second})
    assert 9 == dataclasses.replace(first, timestamp=9).moment


class Knows(ErrorHandler):
    """Knows more of what a signal did; or fails to."""

    def __init__(self, *, fails: bool = False) -> None:
        self.fails = fails

    def maybe_enrich_signal_failure_message(self, message: str, error_file: str) -> str:
        if self.fails:
            raise OSError("no logs")
        return f"{message}, beside {error_file}: page fault"


def test_summary_includes_what_the_error_handler_adds_to_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elasticlib.elastic.multiprocessing.errors, "get_error_handler", Knows)
    failures = {0: failure(0, -11), 1: failure(1, 3)}

    text = ChildFailedError("train.py", failures).format_msg()

    assert 1 == text.count("it broke, beside <N/A>: page fault")
    assert 2 == text.count("it broke")


def test_an_error_handler_that_fails_takes_nothing_from_the_summary(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(elasticlib.elastic.multiprocessing.errors, "get_error_handler", lambda: Knows(fails=True))

    text = ChildFailedError("train.py", {0: failure(0, -11)}).format_msg()

    assert "it broke" in text
    assert "no logs" in caplog.text
