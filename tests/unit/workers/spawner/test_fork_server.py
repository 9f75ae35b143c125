"""An import of the fork server that takes long writes where it is, and is not ended by that."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from elasticlib.stacks import crash_frames
from elasticlib.workers.spawner import _fork_server

BUSY = """
import sys
from elasticlib.workers.spawner import _fork_server
_fork_server.STACK_AFTER, _fork_server.NATIVE_AFTER = 0.001, 5.0
files = [open("/dev/null", "w") for _ in range(1)]
for _ in range(300):
    with _fork_server._writing_its_place(files[0].fileno()):
        for _ in range(30):
            exec(compile("def deep(n):\\n    return 0 if n == 0 else deep(n - 1) + 1\\ndeep(60)", "module", "exec"), {})
print("imported")
"""
"""As an import of many modules: functions are made, called and freed."""


@pytest.fixture
def stack() -> int:
    return os.memfd_create("stack")


def text_of(stack: int) -> str:
    return os.pread(stack, 100_000, 0).decode()


def test_an_import_writes_where_its_python_is(stack: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_fork_server, "STACK_AFTER", 60.0)

    def imports_a_lot() -> None:
        with _fork_server._writing_its_place(stack):
            # The timer's signal, at a moment of the test's choice.
            signal.raise_signal(signal.SIGALRM)

    imports_a_lot()

    files = [Path(frame.file).name for frame in crash_frames(text_of(stack))]
    assert "imports_a_lot" in text_of(stack)
    assert ["test_fork_server.py"] == files[-1:]


def test_an_import_in_native_code_is_found_by_the_fault_handler(stack: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_fork_server, "STACK_AFTER", 60.0)
    monkeypatch.setattr(_fork_server, "NATIVE_AFTER", 0.05)

    with _fork_server._writing_its_place(stack):
        while "Timeout" not in text_of(stack):
            # The interpreter's lock is held, as while a library is loaded.
            ctypes.PyDLL(None).usleep(200_000)

    assert "test_fork_server.py" in text_of(stack)


@pytest.mark.parametrize("is_of_the_import", [False, True], ids=["as before", "set by the import"])
def test_timer_handler_is_removed_after_the_import(is_of_the_import: bool, stack: int) -> None:
    before = signal.getsignal(signal.SIGALRM)
    try:
        with _fork_server._writing_its_place(stack):
            if is_of_the_import:
                signal.signal(signal.SIGALRM, signal.SIG_IGN)

        assert signal.getsignal(signal.SIGALRM) == (signal.SIG_IGN if is_of_the_import else before)
        assert (0.0, 0.0) == signal.getitimer(signal.ITIMER_REAL)
        assert 1 == threading.active_count()
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.slow
def test_an_import_of_much_python_survives_the_look_at_its_place() -> None:
    ended = subprocess.run([sys.executable, "-c", BUSY], capture_output=True, text=True, check=False, timeout=120)

    assert (0, "imported\n") == (ended.returncode, ended.stdout), ended.stderr
