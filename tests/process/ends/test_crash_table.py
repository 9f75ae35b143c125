"""The crash table: how a worker ended, as function and script, and what the caller learns of it."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen

from elasticlib import ChildFailedError, LaunchConfig, ProcessFailure, elastic_launch
from tests.process.ends import crashes

pytestmark = [pytest.mark.slow, pytest.mark.sampled(1.0)]

WAYS = [
    ("function", "forkserver"),
    ("function", "spawn"),
    ("function", "fork"),
    ("script", "forkserver"),
    ("script", "spawn"),
]


@frozen
class Row:
    """Expected facts about rank 1 after a crash."""

    crash: Callable[[], Any]
    exitcode: int
    exception: str = ""
    message: str = ""
    trace: str = ""
    hint: str = ""


TABLE = [
    Row(crashes.raises, 1, "ValueError", "ValueError: a bad value", 'raise ValueError("a bad value")'),
    Row(crashes.raises_own_class, 1, "OddError", "1 and 2", "raise OddError(1, 2)"),
    Row(crashes.exits_with_status, 3, message="exit status 3"),
    Row(crashes.exits_with_text, 1, message="exit status 1"),
    Row(crashes.ends_at_once, 4, message="exit status 4"),
    Row(crashes.crashes, -11, message="SIGSEGV", trace="in crashes", hint="native code crashed"),
    Row(crashes.aborts, -6, message="SIGABRT", trace="in aborts", hint="abort"),
    Row(crashes.is_killed, -9, message="SIGKILL", hint="out-of-memory counter did not move"),
    Row(crashes.is_terminated, -15, message="SIGTERM", hint="from outside"),
    Row(crashes.interrupts_itself, -2, "KeyboardInterrupt", "KeyboardInterrupt", "in interrupts_itself"),
    Row(crashes.misses_a_module, 1, "ModuleNotFoundError", "no_such_module_at_all", "import no_such_module_at_all"),
    Row(crashes.fails_while_a_grandchild_holds_the_output, 1, "ValueError", "a bad value"),
]


def failed_launch(crash: Callable[..., Any], kind: str, method: str, *args: Any, **settings: Any) -> ChildFailedError:
    """Launch two workers of which rank 1 fails, and return what is raised."""
    config = LaunchConfig(nproc_per_node=2, max_restarts=0, start_method=method, **settings)  # type: ignore[arg-type]
    entry = crash if kind == "function" else Path(crashes.__file__)
    with pytest.raises(ChildFailedError) as caught:
        elastic_launch(config, entry)(*(args if kind == "function" else [crash.__name__]))
    return caught.value


def only_failure(error: ChildFailedError) -> ProcessFailure:
    """The failure of rank 1, which must be the only one."""
    assert [1] == list(error.failures)
    return error.failures[1]


@pytest.mark.parametrize(("kind", "method"), WAYS)
@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.crash.__name__)
def test_failure_of_a_worker_is_reported_in_full(row: Row, kind: str, method: str) -> None:
    """Rows 088, 089, 092, 114 of the checklist: type, message, line, status, signal; no decorator needed."""
    error = failed_launch(row.crash, kind, method)
    failure = only_failure(error)

    # An interrupt ends a script by the signal, as under python, and a function's process with the status of a shell.
    assert (130 if (kind, row.exitcode) == ("function", -2) else row.exitcode) == failure.exitcode
    assert failure.exception_type.endswith(row.exception)
    assert bool(row.exception) == bool(failure.exception_type)
    assert row.message in failure.message
    assert row.trace in failure.traceback
    assert row.hint in failure.hint
    # The stack of a forked worker begins in the launcher's own files, which say nothing to the user.
    assert not any(name in failure.traceback for name in ("_spawner", "_fork_server", "popen_fork", "Extension modul"))
    copy = pickle.loads(pickle.dumps(error))
    assert (error.failures, str(error)) == (copy.failures, str(copy))


@pytest.mark.parametrize(("kind", "method"), WAYS)
def test_the_last_lines_of_stderr_are_in_the_report(kind: str, method: str) -> None:
    """Also where the stream goes to the console: there is no exception that would say why."""
    error = failed_launch(crashes.exits_with_text, kind, method)

    assert ("the reason",) == only_failure(error).log_tail
    assert "the reason" in str(error)


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_worker_that_dies_before_its_first_line_is_reported_in_full(method: str) -> None:
    """An argument that cannot be rebuilt ends the worker before the function is called."""
    config = LaunchConfig(nproc_per_node=1, max_restarts=0, start_method=method)  # type: ignore[arg-type]

    with pytest.raises(ChildFailedError) as caught:
        elastic_launch(config, crashes.takes)(crashes.DiesBeforeTheFirstLine())

    assert "ValueError: a bad value" == caught.value.failures[0].message
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_syntax_error_of_a_script_is_reported_in_full(method: str, tmp_path: Path) -> None:
    """A syntax error is reported with its line, as the interpreter does."""
    script = tmp_path / "bad.py"
    script.write_text("x = 1\ndef broken(:\n")

    with pytest.raises(ChildFailedError) as caught:
        elastic_launch(LaunchConfig(nproc_per_node=1, max_restarts=0, start_method=method), script)()  # type: ignore[arg-type]

    failure = caught.value.failures[0]
    assert "SyntaxError" == failure.exception_type
    assert "line 2" in failure.traceback


@pytest.mark.parametrize(("kind", "method"), WAYS)
def test_a_worker_that_ignores_the_signal_is_killed_in_time(
    kind: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows 090, 107, 108: SIGKILL after the shutdown time-out, also when a peer failed; the peer alone is blamed."""
    monkeypatch.setenv("CRASH_READY", str(tmp_path / "ready"))

    error = failed_launch(crashes.fails_beside_one_that_ignores_the_signal, kind, method, shutdown_timeout=1)

    assert "ValueError" == only_failure(error).exception_type


@pytest.mark.parametrize("method", ["forkserver", "spawn", "fork"])
@pytest.mark.parametrize(
    ("crash", "kind", "arguments"),
    [(crashes.raises, "ValueError", ("a bad value",)), (crashes.raises_own_class, "OddError", ("1 and 2",))],
)
def test_the_error_is_raised_from_the_workers_own_exception(
    crash: Callable[..., Any], kind: str, arguments: tuple[str, ...], method: str
) -> None:
    """An exception with a constructor of its own is rebuilt without it: that takes other arguments than it passed."""
    cause = failed_launch(crash, "function", method).__cause__

    assert cause is not None
    assert (kind, arguments) == (type(cause).__name__, cause.args)
