"""`worker_main` without torch's server: what becomes of the function and of its exceptions."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from elasticlib.errors import ChildFailedError, ProcessFailure
from elasticlib.workers.child import _record
from elasticlib.workers.child._record import worker_main


class Server:
    """In the place of torch's server."""

    def __init__(self, path: str, calls: list[str]) -> None:
        self.calls = calls
        calls.append(f"serves {path}")

    def shutdown(self) -> None:
        self.calls.append("shut down")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(_record, "open_server", lambda path: Server(path, found))
    monkeypatch.delenv("TORCH_WORKER_SERVER_SOCKET", raising=False)
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    return found


def test_no_server_starts_without_a_socket(calls: list[str]) -> None:
    @worker_main()
    def main(value: int) -> int:
        return value + 1

    assert (3, []) == (main(2), calls)


def test_a_named_socket_is_served_while_the_function_runs(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_WORKER_SERVER_SOCKET", "/run/worker")

    with worker_main():
        calls.append("runs")

    assert ["serves /run/worker", "runs", "shut down"] == calls


@pytest.mark.parametrize("socket", [None, "/run/worker"])
def test_exception_is_written_to_the_error_file_and_reraised(
    socket: str | None, calls: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    if socket is not None:
        monkeypatch.setenv("TORCH_WORKER_SERVER_SOCKET", socket)

    @worker_main()
    def main() -> None:
        raise ValueError("a bad value")

    with pytest.raises(ValueError, match="a bad value"):
        main()

    message: dict[str, Any] = json.loads((tmp_path / "error.json").read_text())["message"]
    assert "ValueError: a bad value" in message["message"]
    assert 'raise ValueError("a bad value")' in message["extraInfo"]["py_callstack"]
    assert ("shut down" in calls) == (socket is not None)


def test_exit_writes_no_error_file(calls: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))

    with pytest.raises(SystemExit), worker_main():
        raise SystemExit(3)

    assert [] == list(tmp_path.iterdir())


def test_the_root_cause_of_a_launch_within_the_worker_is_passed_on(
    calls: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    failure = ProcessFailure(0, 7, 3, "", message="disk full", rank=0)

    with pytest.raises(ChildFailedError), worker_main():
        raise ChildFailedError("train.py", {0: failure})

    message = json.loads((tmp_path / "error.json").read_text())["message"]
    assert ("disk full", 3) == (message["message"], message["errorCode"])
