"""The decorator: what it writes, what it leaves alone, and that the exception goes on."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from elasticlib.errors import ChildFailedError, ProcessFailure
from elasticlib.workers.child._record import record, write_error_file


@pytest.fixture
def error_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    return path


@record
def works(number: int, *, factor: int = 2) -> int:
    """Multiplies."""
    return number * factor


@record
def ends(error: BaseException) -> None:
    raise error


def test_a_recorded_function_works_as_before(error_file: Path) -> None:
    assert works(3, factor=4) == 12
    assert not error_file.exists()


def test_recorded_function_keeps_its_name_and_docstring() -> None:
    assert (works.__name__, works.__doc__) == ("works", "Multiplies.")


def test_exception_is_written_and_reraised(error_file: Path) -> None:
    with pytest.raises(ValueError, match="a bad value"):
        ends(ValueError("a bad value"))

    message = json.loads(error_file.read_text())["message"]
    assert message["message"] == "ValueError: a bad value"
    assert "in ends\n    raise error\n" in message["extraInfo"]["py_callstack"]


@pytest.mark.parametrize("code", [None, 0])
def test_an_exit_that_is_a_success_is_a_return(error_file: Path, code: int | None) -> None:
    ends(SystemExit(code))

    assert not error_file.exists()


@pytest.mark.parametrize("error", [SystemExit(3), SystemExit("why"), KeyboardInterrupt()])
def test_an_exit_and_an_interrupt_are_not_recorded(error_file: Path, error: BaseException) -> None:
    with pytest.raises(type(error)) as caught:
        ends(error)

    assert caught.value is error
    assert not error_file.exists()


@pytest.mark.parametrize("value", [None, "", os.devnull])
def test_exception_is_only_reraised_without_an_error_file(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if value is None:
        monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    else:
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", value)

    with pytest.raises(ValueError, match="a bad value"):
        ends(ValueError("a bad value"))


def test_unwritable_error_file_is_reported_and_hides_no_exception(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "file" / "error.json"))

    with pytest.raises(ValueError, match="a bad value"):
        ends(ValueError("a bad value"))

    assert "the error file was not written" in capsys.readouterr().err


def failure(error_file: str = "", exitcode: int = 3) -> ProcessFailure:
    return ProcessFailure(1, 7, exitcode, error_file, message="ValueError: bad", timestamp=1234.5, rank=1)


def passed_on(error_file: Path, failed: ProcessFailure) -> Any:
    with pytest.raises(ChildFailedError):
        ends(ChildFailedError("train.py", {1: failed}))
    return json.loads(error_file.read_text())["message"]


def inner_file(folder: Path) -> str:
    inner = folder / "inner.json"
    inner.write_text(json.dumps({"message": {"message": "ValueError: inner", "extraInfo": {"timestamp": "9"}}}))
    return str(inner)


def test_a_launch_that_failed_is_recorded_as_its_root_cause(error_file: Path, tmp_path: Path) -> None:
    message = passed_on(error_file, failure(inner_file(tmp_path)))

    assert (message["message"], message["extraInfo"]["timestamp"]) == ("ValueError: inner", "9")
    assert message["errorCode"] == 3


def test_a_root_cause_without_an_error_file_leaves_none_here(error_file: Path) -> None:
    """As under torch: what stands there may be somebody else's."""
    with pytest.raises(ChildFailedError):
        ends(ChildFailedError("train.py", {1: failure()}))

    assert not error_file.exists()


def test_command_line_writes_what_is_known_without_an_error_file(error_file: Path) -> None:
    write_error_file(ChildFailedError("train.py", {1: failure()}))

    message = json.loads(error_file.read_text())["message"]
    assert (message["message"], message["extraInfo"]["timestamp"]) == ("ValueError: bad", "1234")
    assert message["errorCode"] == 3
