"""Sets of real processes: that they start, end and are told of together, and that nothing is left of them."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elasticlib.elastic.multiprocessing.subprocess_handler import get_subprocess_handler
from elasticlib.errors import LaunchInterrupted, SignalException, StartError
from elasticlib.logs import DefaultLogsSpecs
from elasticlib.processes import Handle, handle_of, wait_for_ends
from elasticlib.workers import PContext, RunProcsResult, Std, SubprocessContext, _context, start_processes
from elasticlib.workers._fork_servers import fork_servers
from elasticlib.workers._launch import SpawnerClient
from elasticlib.workers._subprocess_handler import ProcessView
from elasticlib.workers.child._start_spec import StartSpec

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.2)]

Started = Callable[..., PContext]
LONG = 600
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    """Starts sets that are closed, at the latest, with the test."""
    sets: list[PContext] = []
    busy = {each: each.spawners for each in fork_servers._kept}

    def start(entrypoint: Any, *args: tuple[Any, ...], **options: Any) -> PContext:
        logs = options.pop("logs_specs", None) or DefaultLogsSpecs(str(tmp_path / "logs"))
        envs = options.pop("envs", {rank: {} for rank in range(len(args))})
        sets.append(start_processes("t", entrypoint, dict(enumerate(args)), envs, logs, **options))
        return sets[-1]

    yield start
    for each in sets:
        each.close()
    assert [] == [each for each in fork_servers._kept if each.spawners != busy.get(each, 0)]


def result_of(context: PContext) -> RunProcsResult:
    result = context.wait(60)
    assert result is not None
    return result


def runs_until(context: PContext, is_so: Callable[[], object]) -> None:
    """Wait for a condition, while the processes run."""
    while not is_so():
        assert context.wait(0.01) is None


def has_ended(pid: int) -> bool:
    return not os.path.exists(f"/proc/{pid}")


def ended(process: Handle) -> None:
    """Wait for the process to end."""
    wait_for_ends([process], 30)
    assert process.has_ended()
    process.close()


# Functions.


def product_and_name(left: int, right: int = 3) -> tuple[int, str]:
    return left * right, os.environ["WHO"]


@pytest.mark.parametrize("start_method", ["forkserver", "spawn", "fork"])
def test_each_process_has_its_own_arguments_and_variables(started: Started, start_method: str) -> None:
    envs = {0: {"WHO": "a"}, 1: {"WHO": "b"}}

    context = started(product_and_name, (1,), (2, 5), envs=envs, start_method=start_method)
    result = result_of(context)

    assert result.return_values == {0: (3, "a"), 1: (10, "b")}
    assert not result.is_failed()
    assert result is context.wait(0), "it stays"


def notes_a_wish_to_end(folder: Path) -> None:
    def note(signum: int, frame: object) -> None:
        (folder / "asked").write_text(signal.Signals(signum).name)
        sys.exit(0)

    signal.signal(signal.SIGTERM, note)
    (folder / "ready").touch()
    while True:
        signal.pause()


def waits_for_its_peer_and_fails(folder: Path) -> None:
    while not (folder / "ready").exists():
        time.sleep(0.005)
    raise KeyError("a bad key")


def by_rank(first: Callable[..., object], second: Callable[..., object], rank: int, *args: object) -> object:
    return (first, second)[rank](*args)


def test_one_failure_ends_all_and_is_the_only_one_reported(started: Started, tmp_path: Path) -> None:
    functions = (notes_a_wish_to_end, waits_for_its_peer_and_fails)
    context = started(by_rank, (*functions, 0, tmp_path), (*functions, 1, tmp_path))
    pids = context.pids()

    result = result_of(context)

    assert (tmp_path / "asked").read_text() == "SIGTERM"
    assert list(result.failures) == [1] and result.is_failed()
    failure = result.failures[1]
    assert (failure.exitcode, failure.pid, failure.message) == (1, pids[1], "KeyError: 'a bad key'")
    assert failure.error_file == context.error_files[1]
    assert result.return_values == {}
    assert all(map(has_ended, pids.values()))


# Programs.


def test_a_programs_arguments_become_text(started: Started) -> None:
    logs: Any = DefaultLogsSpecs(redirects=Std.OUT)
    context = started("echo", (1, [2, 3]), ("a b",), logs_specs=logs)

    result = result_of(context)

    assert result.return_values == {0: None, 1: None}
    assert [Path(result.stdouts[rank]).read_text() for rank in (0, 1)] == ["1 [2, 3]\n", "a b\n"]
    assert result.stderrs == {0: "", 1: ""}


def test_a_programs_exit_status_is_its_failure(started: Started) -> None:
    context = started("sh", ("-c", "exit $A"), ("-c", f"sleep {LONG}"), envs={0: {"A": "7"}, 1: {}})
    assert isinstance(context, SubprocessContext)
    handles = context.subprocess_handlers

    result = result_of(context)

    assert {rank: failure.exitcode for rank, failure in result.failures.items()} == {0: 7}
    assert [handles[rank].proc.poll() for rank in (0, 1)] == [7, -signal.SIGTERM]


def test_a_handle_of_one_process_signals_it_with_all_that_it_started(started: Started, tmp_path: Path) -> None:
    script = f"sleep {LONG} & echo $! > {tmp_path}/child.part; mv {tmp_path}/child.part {tmp_path}/child; wait"
    context = started("sh", ("-c", script))
    assert isinstance(context, SubprocessContext)
    handle: ProcessView = context.subprocess_handlers[0]
    runs_until(context, (tmp_path / "child").exists)

    handle.close(signal.SIGINT)

    assert result_of(context).failures[0].exitcode == -signal.SIGINT
    assert has_ended(int((tmp_path / "child").read_text()))


# Time-outs, ends and signals.


@pytest.mark.parametrize("entrypoint", [print, "true"])
def test_no_arguments_at_all_start_nothing_and_have_an_empty_result(started: Started, entrypoint: Any) -> None:
    context = started(entrypoint)

    assert ({}, RunProcsResult()) == (context.pids(), result_of(context))
    assert not result_of(context).is_failed()


def interrupted(path: str) -> None:
    Path(path).touch()
    signal.pause()


@pytest.mark.parametrize("method", ["forkserver", "spawn", "fork"])
def test_interrupted_function_fails_with_the_status_of_a_shell(started: Started, tmp_path: Path, method: str) -> None:
    context = started(interrupted, (str(tmp_path / "here"),), start_method=method)
    runs_until(context, (tmp_path / "here").exists)

    os.kill(context.pids()[0], signal.SIGINT)

    failure = result_of(context).failures[0]
    assert (130, "KeyboardInterrupt") == (failure.exitcode, failure.exception_type)


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """Named pipe whose reader waits until it is opened for writing."""
    os.mkfifo(tmp_path / "gate")
    return tmp_path / "gate"


def test_wait_returns_no_result_while_peers_of_a_failure_still_run(started: Started, gate: Path) -> None:
    ready = gate.with_name("ready")
    stubborn = f"trap '' TERM; : > {ready}; cat {gate}; exit 0"
    context = started("sh", ("-c", stubborn), ("-c", f"until [ -e {ready} ]; do sleep 0.01; done; exit 3"))
    runs_until(context, context.subprocess_handlers[1].proc.poll)  # type: ignore[attr-defined]

    before = context.wait(0)
    gate.write_bytes(b"")

    assert before is None
    assert list(result_of(context).failures) == [1]


def test_close_ends_all_and_a_later_wait_reports_the_stopped_processes(started: Started) -> None:
    context = started("sleep", (LONG,), (LONG,))
    pids = context.pids()

    context.close(signal.SIGINT)

    assert all(map(has_ended, pids.values()))
    failures = result_of(context).failures
    assert {rank: failure.exitcode for rank, failure in failures.items()} == {0: -signal.SIGINT, 1: -signal.SIGINT}
    context.close()


def test_process_that_ignores_sigterm_is_killed_after_the_timeout(started: Started, tmp_path: Path) -> None:
    context = started("sh", ("-c", f"trap '' TERM; touch {tmp_path}/ready; while :; do sleep 0.05; done"))
    runs_until(context, (tmp_path / "ready").exists)
    begun = time.monotonic()

    context.close(timeout=0.1)

    assert 0.1 <= time.monotonic() - begun < 4
    assert result_of(context).failures[0].exitcode == -signal.SIGKILL


def test_a_close_from_another_thread_ends_a_wait(started: Started) -> None:
    context = started("sleep", (LONG,))
    found: list[RunProcsResult | None] = []
    waiter = threading.Thread(target=lambda: found.append(context.wait()))
    waiter.start()

    context.close()
    waiter.join(30)

    assert found and found[0] is not None and found[0].is_failed()


def test_a_set_may_be_started_and_waited_for_in_any_thread(started: Started) -> None:
    found: list[Mapping[int, Any]] = []

    def run() -> None:
        found.append(result_of(started(product_and_name, (2,), envs={0: {"WHO": "thread"}})).return_values)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert found == [{0: (6, "thread")}] * 4


def own_handlers() -> dict[int, object]:
    return {signum: signal.getsignal(signum) for signum in signal.valid_signals()}


@pytest.mark.parametrize(("signum", "kind"), [(signal.SIGTERM, SignalException), (signal.SIGINT, LaunchInterrupted)])
def test_a_signal_ends_the_wait_and_leaves_the_processes_to_be_closed(
    started: Started, gate: Path, signum: signal.Signals, kind: type[SignalException]
) -> None:
    before = own_handlers()
    context = started("sh", ("-c", f"cat {gate}; kill -{signum.value} {os.getpid()}; exec sleep {LONG}"))

    with pytest.raises(kind) as caught:
        gate.write_bytes(b"")
        context.wait()
    alive = not has_ended(context.pids()[0])
    context.close(caught.value.sigval)

    assert alive
    assert caught.value.sigval is signum
    assert own_handlers() == before
    assert result_of(context).failures[0].exitcode == -signum


def test_signal_between_two_waits_is_raised_as_in_a_wait(started: Started) -> None:
    context = started("sleep", (LONG,))
    assert context.wait(0) is None

    with pytest.raises(SignalException) as caught:
        signal.raise_signal(signal.SIGHUP)

    assert caught.value.sigval is signal.SIGHUP
    assert context.wait(0) is None


def test_signals_are_the_programs_own_again_when_all_has_ended(started: Started, gate: Path) -> None:
    before = own_handlers()
    outer, inner = started("sleep", (LONG,)), started("cat", (gate,))
    while_they_ran = own_handlers()

    outer.close()  # its handlers are below those of the other
    gate.write_bytes(b"")
    result_of(inner)

    assert while_they_ran != before
    assert own_handlers() == before


def test_an_interrupt_in_a_stop_means_no_more_patience(started: Started, tmp_path: Path) -> None:
    script = f"trap 'kill -INT {os.getpid()}' TERM; touch {tmp_path}/ready; while :; do sleep 0.05; done"
    received: list[int] = []
    former = signal.signal(signal.SIGINT, lambda signum, frame: received.append(signum))
    try:
        context = started("sh", ("-c", script))
        runs_until(context, (tmp_path / "ready").exists)

        context.close(timeout=LONG)
    finally:
        signal.signal(signal.SIGINT, former)

    assert received == [signal.SIGINT]
    assert result_of(context).failures[0].exitcode == -signal.SIGKILL


def test_signals_to_handle_are_those_of_the_variable(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGUSR1")

    with pytest.raises(SignalException) as caught:
        started("sh", ("-c", f"kill -USR1 {os.getpid()}; exec sleep {LONG}")).wait()

    assert caught.value.sigval is signal.SIGUSR1


def test_processes_run_on_where_nobody_keeps_the_handle(started: Started, gate: Path, tmp_path: Path) -> None:
    args = {0: ("-c", f"cat {gate}; touch {tmp_path}/done")}
    (pid,) = start_processes("t", "sh", args, {0: {}}, DefaultLogsSpecs(os.devnull)).pids().values()
    gc.collect()

    gate.write_bytes(b"")
    handle = handle_of(pid)
    ended(handle)
    assert (tmp_path / "done").exists()
    for each in list(_context._running):
        each.close()


# Starts that fail.


@pytest.mark.parametrize("start_method", ["forkserver", "spawn", "fork"])
def test_a_start_that_fails_half_way_leaves_no_process(
    started: Started, start_method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second worker's log file cannot be opened; `nothing_is_left` looks for the first one."""
    whole = SpawnerClient.start

    def broken(self: SpawnerClient, number: int, workers: list[StartSpec], *rest: Any) -> dict[int, int]:
        second = replace(workers[1], stdout=str(tmp_path / "none" / "stdout.log"))
        return whole(self, number, [workers[0], second], *rest)

    monkeypatch.setattr(SpawnerClient, "start", broken)

    with pytest.raises(StartError, match="a worker could not be started"):
        started(time.sleep, (LONG,), (LONG,), start_method=start_method)


# Output.


@contextlib.contextmanager
def console(tmp_path: Path) -> Iterator[Path]:
    with open(tmp_path / "console", "w") as file, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", file)
        yield tmp_path / "console"


def test_teed_lines_have_a_prefix_and_the_filtered_are_kept_twice(started: Started, tmp_path: Path) -> None:
    logs: Any = DefaultLogsSpecs(str(tmp_path / "logs"), tee=Std.OUT)
    with console(tmp_path) as shown:
        context = started(
            "echo",
            ("loss 1",),
            ("other",),
            logs_specs=logs,
            log_line_prefixes={1: "<one> "},
            duplicate_stdout_filters=["loss"],
        )
        result = result_of(context)

    assert sorted(shown.read_text().splitlines()) == ["<one> other", "[t0]:loss 1"]
    filtered = Path(result.stdouts[0]).parent.parent / "filtered_stdout.log"
    assert filtered.read_text() == "[t0]:loss 1\n"


def test_c_code_and_children_follow_a_redirected_stream(tmp_path: Path) -> None:
    code = (
        "import ctypes, os\n"
        "from elasticlib.logs._redirects import get_libc, redirect_stdout\n"
        "libc = get_libc()\n"
        "libc.printf(b'before\\n')\n"
        "with redirect_stdout('out'):\n"
        "    print('python')\n"
        "    libc.printf(b'c\\n')\n"
        "    os.system('echo child')\n"
        "libc.printf(b'after\\n')\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=True
    )

    assert done.stdout == "before\nafter\n"
    assert sorted((tmp_path / "out").read_text().splitlines()) == ["c", "child", "python"]


# One program by itself.


def test_a_program_by_itself_writes_to_its_files_and_sees_its_variables(tmp_path: Path) -> None:
    out, err = str(tmp_path / "out"), str(tmp_path / "err")

    handler = get_subprocess_handler("sh", ("-c", "echo $A $0; echo $A >&2; exit 4", 5), {"A": "x"}, out, err, 0)

    assert handler.proc.wait(30) == 4
    assert (Path(out).read_text(), Path(err).read_text()) == ("x 5\n", "x\n")
    handler.close()


@pytest.mark.parametrize("ends_first", [False, True])
def test_closing_a_program_ends_all_that_it_started(tmp_path: Path, ends_first: bool) -> None:
    script = f"sleep {LONG} & echo $!; " + ("exit 0" if ends_first else "wait")
    handler = get_subprocess_handler("sh", ("-c", script), {}, str(tmp_path / "out"), "", 0)
    if ends_first:
        handler.proc.wait(30)
    while not (line := (tmp_path / "out").read_text()).endswith("\n"):
        time.sleep(0.005)
    child = handle_of(int(line))

    handler.close()

    ended(child)
    assert handler.proc.wait(30) == (0 if ends_first else -signal.SIGTERM)


# The end of the launcher.


def test_processes_do_not_outlive_the_program_that_started_them(tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        "from elasticlib.logs import DefaultLogsSpecs\n"
        "from elasticlib.workers import start_processes\n"
        f"context = start_processes('t', 'sleep', {{0: ({LONG},)}}, {{0: {{}}}}, DefaultLogsSpecs(os.devnull))\n"
        "print(context.pids()[0], flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as launcher:
        assert launcher.stdout is not None
        worker = handle_of(int(launcher.stdout.readline()))
        launcher.kill()

    ended(worker)
