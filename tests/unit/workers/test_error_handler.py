"""The handler behind `record`: what it writes, where, and what a subclass may change."""

from __future__ import annotations

import faulthandler
import functools
import json
import os
from pathlib import Path
from typing import Any

import pytest

import elasticlib
from elasticlib.elastic.multiprocessing import errors
from elasticlib.elastic.multiprocessing.errors import ErrorHandler, get_error_handler, record
from elasticlib.errors import ChildFailedError, ProcessFailure, SpecError
from elasticlib.workers.child import _report


@pytest.fixture
def error_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    return path


def inner(tmp_path: Path, content: Any) -> str:
    path = tmp_path / "inner.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


FOREIGN = {"message": {"message": "ValueError: inner", "extraInfo": {"timestamp": "9"}}, "more": 1}


def test_the_decorator_is_the_one_of_the_facade() -> None:
    assert errors.record is elasticlib.record
    assert errors.ChildFailedError is elasticlib.ChildFailedError


def test_a_later_exception_takes_the_place_of_an_earlier_one(error_file: Path) -> None:
    for text in ("first", "second"):
        get_error_handler().record_exception(ValueError(text))

    assert json.loads(error_file.read_text())["message"]["message"] == "ValueError: second"
    assert os.listdir(error_file.parent) == ["error.json"]


def test_a_code_is_put_into_a_message_with_parts() -> None:
    data: dict[str, Any] = {"message": {"message": "x"}}

    get_error_handler().override_error_code_in_rootcause_data("inner.json", data, 7)

    assert data == {"message": {"message": "x", "errorCode": 7}}


@pytest.mark.parametrize("data", [{}, {"message": "text"}])
def test_a_code_that_has_no_place_is_warned_of(data: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    before = dict(data)

    get_error_handler().override_error_code_in_rootcause_data("inner.json", data, 7)

    assert data == before
    assert "inner.json is not a dictionary, so the exit status 7 is not added" in caplog.text


def test_childs_error_file_becomes_this_process_own_with_its_code(tmp_path: Path, error_file: Path) -> None:
    get_error_handler().dump_error_file(inner(tmp_path, FOREIGN), -11)

    written = json.loads(error_file.read_text())
    assert written["message"]["errorCode"] == -11
    assert (written["message"]["message"], written["more"]) == ("ValueError: inner", 1)


def test_a_code_of_0_changes_nothing(tmp_path: Path, error_file: Path) -> None:
    get_error_handler().dump_error_file(inner(tmp_path, FOREIGN))

    assert json.loads(error_file.read_text()) == FOREIGN


def test_a_file_that_is_replaced_is_logged(tmp_path: Path, error_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    error_file.write_text("an earlier story")

    get_error_handler().dump_error_file(inner(tmp_path, FOREIGN))

    assert json.loads(error_file.read_text()) == FOREIGN
    assert "an earlier story" in caplog.text


@pytest.mark.parametrize(("content", "kind"), [(None, FileNotFoundError), ("{", ValueError)])
def test_a_childs_file_that_cannot_be_read_is_an_error_of_a_direct_call(
    tmp_path: Path, error_file: Path, content: str | None, kind: type[Exception]
) -> None:
    path = str(tmp_path / "missing") if content is None else inner(tmp_path, content)

    with pytest.raises(kind):
        get_error_handler().dump_error_file(path)
    assert not error_file.exists()


def test_a_broken_childs_file_is_replaced_by_what_is_known(tmp_path: Path, error_file: Path) -> None:
    failure = ProcessFailure(0, 7, -9, inner(tmp_path, "{"), timestamp=5.0)

    get_error_handler().dump_failure(failure)

    message = json.loads(error_file.read_text())["message"]
    assert message["errorCode"] == -9
    assert "SIGKILL" in message["message"]


class Telling(ErrorHandler):
    """Keeps what it is told, and by which name."""

    def __init__(self, error: Exception | None = None, path: str | None = None) -> None:
        self.seen: list[tuple[str, str | None]] = []
        self.error = error
        self.path = path

    def _get_error_file_path(self) -> str | None:
        return self.path

    def initialize(self) -> None:
        self.seen.append(("initialize", self._fn_name))

    def record_exception(self, e: BaseException) -> None:
        self.seen.append((f"record_exception {e}", self._fn_name))

    def record_success(self) -> None:
        self.seen.append(("record_success", self._fn_name))
        if self.error is not None:
            raise self.error


def test_custom_handler_chooses_where_a_childs_failure_is_written(tmp_path: Path) -> None:
    handler = Telling(path=str(tmp_path / "mine.json"))

    def fails() -> None:
        raise ChildFailedError("train.py", {0: ProcessFailure(0, 7, 3, inner(tmp_path, FOREIGN))})

    with pytest.raises(ChildFailedError):
        record(fails, handler)()

    assert json.loads((tmp_path / "mine.json").read_text())["message"]["errorCode"] == 3


def test_handler_gets_the_functions_name_and_records_success() -> None:
    handler = Telling()

    def works() -> int:
        return 7

    assert 7 == record(works, handler)()
    assert [("initialize", works.__qualname__), ("record_success", works.__qualname__)] == handler.seen


def test_a_handler_is_called_at_the_start_and_with_the_exception() -> None:
    handler = Telling()

    def fails() -> None:
        assert handler.seen == [("initialize", fails.__qualname__)]
        raise ValueError("bad")

    with pytest.raises(ValueError, match="bad"):
        record(fails, handler)()

    assert handler.seen[1:] == [("record_exception bad", fails.__qualname__)]


def test_a_call_without_a_name_is_recorded_without_one() -> None:
    handler = Telling()

    assert 8 == record(functools.partial(int, "8"), handler)()
    assert [("initialize", None), ("record_success", None)] == handler.seen


def test_a_handler_that_fails_at_success_makes_no_failure_of_the_function() -> None:
    handler = Telling(ValueError("no telemetry"))

    with pytest.raises(ValueError, match="no telemetry"):
        record(lambda: 1, handler)()

    assert ["initialize", "record_success"] == [name for name, _ in handler.seen]


def test_exit_with_status_0_records_no_success() -> None:
    handler = Telling()

    def leaves() -> None:
        raise SystemExit(0)

    assert record(leaves, handler)() is None  # type: ignore[func-returns-value]
    assert ["initialize"] == [name for name, _ in handler.seen]


def test_the_decorator_uses_the_handler_that_took_the_place_of_the_own_one(monkeypatch: pytest.MonkeyPatch) -> None:
    handler = Telling()
    monkeypatch.setattr("elasticlib.elastic.multiprocessing.errors.get_error_handler", lambda: handler)

    record(lambda: None)()

    assert 2 == len(handler.seen)


def test_in_a_worker_of_ours_the_stacks_of_crashes_stay_in_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_report, "has_the_stacks_of_crashes", True)
    monkeypatch.setattr(faulthandler, "enable", lambda **options: pytest.fail("it writes elsewhere from now on"))

    get_error_handler().initialize()


def test_elsewhere_the_fault_handler_is_turned_on_for_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is on already, as under pytest."""
    enabled: list[dict[str, object]] = []
    monkeypatch.setattr(faulthandler, "enable", lambda **options: enabled.append(options))

    get_error_handler().initialize()

    assert enabled == [{"all_threads": True}]


def test_a_fault_handler_that_cannot_be_enabled_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**options: object) -> None:
        raise OSError("stderr is closed")

    monkeypatch.setattr(faulthandler, "enable", refuse)
    monkeypatch.setattr(faulthandler, "is_enabled", lambda: False)

    with pytest.warns(UserWarning, match="stderr is closed"):
        get_error_handler().initialize()


@pytest.mark.parametrize("kind", [AssertionError, ValueError, SpecError])
def test_a_failed_job_without_a_failure_is_refused(kind: type[Exception]) -> None:
    with pytest.raises(kind):
        ChildFailedError("train.py", {})
