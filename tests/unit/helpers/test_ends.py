"""Ends of a helper, and whether it can be started again."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest

from elasticlib.errors import StartError
from elasticlib.helpers import fork_server_lost
from elasticlib.processes._programs import HelperLostError

PROCESS = SimpleNamespace(pid=7)


def reaper(exitcode: int | None) -> Any:
    """One that has ended with *exitcode*, or is not done yet (None)."""
    return SimpleNamespace(pid=3, ends=lambda _: exitcode is not None, exitcode=lambda: exitcode)


@pytest.mark.parametrize(
    ("exitcode", "process", "stderr"),
    [
        pytest.param(signal.SIGKILL, None, "", id="killed at its imports"),
        pytest.param(signal.SIGKILL, None, "a warning", id="killed after a warning"),
        pytest.param(None, None, "", id="killed at its imports, the reaper is slow"),
        pytest.param(None, PROCESS, "", id="killed later"),
        pytest.param(-signal.SIGKILL, PROCESS, "", id="the reaper was killed"),
    ],
)
def test_killed_helper_can_be_started_again(exitcode: int | None, process: Any, stderr: str) -> None:
    assert isinstance(fork_server_lost(reaper(exitcode), process, stderr), HelperLostError)


@pytest.mark.parametrize(
    ("exitcode", "stderr", "message"),
    [
        pytest.param(0, "ImportError: no torch", "unexpectedly: ImportError: no torch", id="its import failed"),
        pytest.param(signal.SIGSEGV, "", r"unexpectedly \(SIGSEGV\)", id="its import crashed"),
    ],
)
def test_helper_whose_import_failed_cannot_be_started_again(exitcode: int, stderr: str, message: str) -> None:
    error = fork_server_lost(reaper(exitcode), None, stderr)

    assert type(error) is StartError
    with pytest.raises(StartError, match=message):
        raise error
