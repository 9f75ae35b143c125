"""A program that raised, returned or ended is known by then, although its process lives on."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from elasticlib import ChildFailedError, LaunchConfig, elastic_launch

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.2)]

ROOT = Path(__file__).parents[3]
STILL_AT_WORK = "the program succeeded, but its threads, exit handlers or finalizers were still running"
HOLDERS = ["thread", "atexit", "native", "thread pool"]


def keep_alive(how: str) -> None:
    """Keep this process alive beyond the end of its program."""
    match how:
        case "thread":
            threading.Thread(target=threading.Event().wait).start()
        case "atexit":
            atexit.register(threading.Event().wait)
        case "native":
            atexit.register(wait_holding_the_lock)
        case "thread pool":
            import concurrent.futures

            concurrent.futures.ThreadPoolExecutor(1).submit(threading.Event().wait)


def wait_holding_the_lock() -> None:
    """Sit in native code that keeps the interpreter's lock."""
    while True:
        ctypes.PyDLL(None).pause()  # comes back when a signal interrupts it


def raises_on_rank_one(how: str, folder: str) -> None:
    """Rank 1 raises while something keeps its process; rank 0 notes when it is stopped."""
    if os.environ["RANK"] == "1":
        keep_alive(how)
        while not Path(folder, "ready").exists():
            time.sleep(0.005)
        Path(folder, "raised").write_text(repr(time.time()))
        raise ValueError("bad batch")

    def stopped(*_: Any) -> None:
        Path(folder, "stopped").write_text(repr(time.time()))
        os._exit(0)

    signal.signal(signal.SIGTERM, stopped)
    Path(folder, "ready").touch()
    while True:
        signal.pause()


@pytest.mark.parametrize("method", ["forkserver", "spawn", "fork"])
@pytest.mark.parametrize("how", HOLDERS)
def test_worker_that_raised_but_lives_on_stops_its_peers_at_once(how: str, method: str, tmp_path: Path) -> None:
    """The report counts when it is written; stacks of what kept the process are in the error."""
    config = LaunchConfig(nproc_per_node=2, max_restarts=0, exit_timeout=1, start_method=method)  # type: ignore[arg-type]

    with pytest.raises(ChildFailedError) as caught:
        elastic_launch(config, raises_on_rank_one)(how, str(tmp_path))

    raised, stopped = (float((tmp_path / name).read_text()) for name in ("raised", "stopped"))
    assert stopped - raised < 10  # and not only when the process had ended; see tests/benchmarks for the figure
    failure = caught.value.failures[1]
    assert [1] == list(caught.value.failures)
    assert "ValueError: bad batch" in failure.message
    assert "did not end within 1 s (exit_timeout)" in failure.hint
    assert "hread 0x" in failure.hint and "File" in failure.hint
    assert isinstance(caught.value.__cause__, ValueError)


def test_peers_are_stopped_while_exit_handlers_still_run(tmp_path: Path) -> None:
    """The exit timeout is not waited for: the peers are gone long before the one that raised."""
    config = LaunchConfig(nproc_per_node=2, max_restarts=0, exit_timeout=5)

    with pytest.raises(ChildFailedError):
        elastic_launch(config, raises_on_rank_one)("atexit", str(tmp_path))

    raised, stopped = (float((tmp_path / name).read_text()) for name in ("raised", "stopped"))
    assert stopped - raised < 4


def raises_with_slow_handler(path: str) -> None:
    """Its exit handler takes its time to write."""

    def save() -> None:
        deadline = time.monotonic() + 1.5
        while time.monotonic() < deadline:
            time.sleep(0.05)
        Path(path).write_text("saved")

    atexit.register(save)
    raise ValueError("bad batch")


def test_exit_handlers_of_a_worker_that_raised_run_to_their_end(tmp_path: Path) -> None:
    """Its peers' stop does not reach it while it has time left."""
    with pytest.raises(ChildFailedError) as caught:
        elastic_launch(LaunchConfig(nproc_per_node=2, max_restarts=0), raises_with_slow_handler)(str(tmp_path / "out"))

    assert "saved" == (tmp_path / "out").read_text()
    assert {"ValueError: bad batch"} == {failure.message for failure in caught.value.failures.values()}
    assert {1} == {failure.exitcode for failure in caught.value.failures.values()}


def test_restart_follows_when_the_process_that_raised_has_ended(tmp_path: Path) -> None:
    """It is a failure like any other: the next round is whole."""
    config = LaunchConfig(nproc_per_node=2, max_restarts=1, exit_timeout=1)

    assert {0: "1", 1: "1"} == elastic_launch(config, raises_in_first_attempt)()


def raises_in_first_attempt() -> str:
    """Raise and linger in the first attempt; return the attempt's number in the next."""
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    if attempt == "0":
        keep_alive("thread")
        raise ValueError("first attempt")
    return attempt


def returns_and_lingers(how: str) -> int:
    """Return while something keeps the process."""
    keep_alive(how)
    return 7


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
@pytest.mark.parametrize("how", HOLDERS)
def test_returned_function_fails_if_its_process_must_be_stopped(how: str, method: str) -> None:
    """Check that the report shows the stacks of threads or exit handlers whose work is lost."""
    config = LaunchConfig(nproc_per_node=2, max_restarts=0, exit_timeout=1, start_method=method)  # type: ignore[arg-type]

    with pytest.raises(ChildFailedError) as caught:
        elastic_launch(config, returns_and_lingers)(how)

    failure = next(iter(caught.value.failures.values()))
    assert STILL_AT_WORK == failure.message
    assert "did not end within 1 s (exit_timeout)" in failure.hint and "File" in failure.traceback


def returns_while_a_thread_works(path: str) -> int:
    """Return at once; a thread of its own goes on to write."""

    def save() -> None:
        time.sleep(1.0)  # stands for work
        Path(path).write_text("saved")

    threading.Thread(target=save).start()
    return 7


@pytest.mark.parametrize("method", ["forkserver", "spawn", "fork"])
def test_threads_of_a_function_that_returned_may_work_on(method: str, tmp_path: Path) -> None:
    config = LaunchConfig(nproc_per_node=1, start_method=method)  # type: ignore[arg-type]

    assert {0: 7} == elastic_launch(config, returns_while_a_thread_works)(str(tmp_path / "out"))
    assert "saved" == (tmp_path / "out").read_text()


LINGERS = """
import sys, threading, time
if sys.argv[1] != "well":
    threading.Thread(target=threading.Event().wait).start()
    sys.exit(3)
done = threading.Event()

def work():
    time.sleep(float(sys.argv[2]))
    print("work is done", flush=True)

threading.Thread(target=work).start()
"""


def elasticrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command's end, with what it printed."""
    return subprocess.run(
        [sys.executable, "-m", "elasticlib.run", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


@pytest.mark.parametrize(
    ("options", "arguments", "status", "output", "messages"),
    [
        (
            ["--exit-timeout", "0.5"],
            ["badly"],
            1,
            "",
            ["exitcode  : 3 (pid", "did not end within 0.5 s (exit_timeout)"],
        ),
        (["--exit-timeout", "0.5"], ["well", "50"], 1, "", ["and it is stopped", "lingers.py"]),
        ([], ["well", "1"], 0, "work is done\n", []),
    ],
    ids=["a status", "ended early", "by default"],
)
def test_threads_of_a_script_work_on_until_a_status_or_timeout(
    options: list[str], arguments: list[str], status: int, output: str, messages: list[str], tmp_path: Path
) -> None:
    """The status of the script is the failure's, not that of the signal; no warning comes before its time."""
    script = tmp_path / "lingers.py"
    script.write_text(LINGERS)

    done = elasticrun(*options, str(script), *arguments)

    assert (status, output) == (done.returncode, done.stdout)
    assert all(text in done.stderr for text in messages)
    assert bool(messages) == bool(done.stderr)


FINALIZERS = """
import signal
class Stuck:
    def __del__(self, wait=__import__("threading").Event().wait):
        wait()
stuck = Stuck()
"""


def test_a_finalizer_that_never_ends_holds_no_job(tmp_path: Path) -> None:
    """Threads and exit handlers are done: nothing of the user's is left to wait for."""
    script = tmp_path / "stuck.py"
    script.write_text(FINALIZERS)

    done = elasticrun("--exit-timeout", "0.5", "--nproc-per-node", "2", str(script))

    assert 0 == done.returncode
    assert 2 == done.stderr.count("and it is stopped")


def has_a_local_that_hangs() -> int:
    """Return; in rank 0 a local variable keeps the call from coming back, in native code, as a process group may."""
    _, writing = os.pipe()  # which nobody reads
    file = os.fdopen(writing, "wb", 1 << 20)
    if os.environ["RANK"] == "0":
        file.write(bytes(1 << 19))
    return 7


@pytest.mark.parametrize("method", ["forkserver", "fork"])
def test_last_rank_is_ended_if_a_local_variable_hangs_in_the_call(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With a line that says where it is: no frame of the function is left."""
    config = LaunchConfig(nproc_per_node=2, max_restarts=0, exit_timeout=0.5, start_method=method)  # type: ignore[arg-type]

    with pytest.raises(ChildFailedError) as caught:
        elastic_launch(config, has_a_local_that_hangs)()

    ((rank, failure),) = caught.value.failures.items()
    assert (0, STILL_AT_WORK) == (rank, failure.message)
    assert "did not end within 0.5 s (exit_timeout)" in failure.hint
    (line,) = [text for text in caplog.messages if "all ranks but 0" in text]
    assert line.endswith("is in native code, such as the destructor of a local variable: exit_timeout ends it in 0.5 s")


SAVES_LAST = """
import os, time
if os.environ["RANK"] == "0":
    time.sleep(1.5)  # stands for work
    print("saved")
"""


def saves_last() -> str:
    """In rank 0 save for longer than the exit timeout after the other one has ended."""
    if os.environ["RANK"] == "0":
        time.sleep(1.5)  # stands for work
    return "saved"


def test_the_last_rank_may_save_for_longer_than_the_exit_timeout(tmp_path: Path) -> None:
    """A function and a script, without a line before its time."""
    config = LaunchConfig(nproc_per_node=2, max_restarts=0, exit_timeout=0.5)
    assert {0: "saved", 1: "saved"} == elastic_launch(config, saves_last)()

    script = tmp_path / "saves.py"
    script.write_text(SAVES_LAST)

    done = elasticrun("--exit-timeout", "0.5", "--nproc-per-node", "2", str(script))

    assert (0, "saved\n", "") == (done.returncode, done.stdout, done.stderr)


def returns_before_the_other(folder: str, raises: bool) -> bool:
    """Rank 0 returns at once; whether its process had ended half a second later, when rank 1 raises or returns."""
    if os.environ["RANK"] == "0":
        atexit.register(Path(folder, "ended").touch)
        Path(folder, "returned").touch()
        return False
    while not Path(folder, "returned").exists():
        time.sleep(0.005)
    time.sleep(0.5)  # in which the process would end
    if raises:
        raise ValueError("bad batch")
    return Path(folder, "ended").exists()


@pytest.mark.parametrize("method", ["forkserver", "spawn", "fork"])
def test_functions_that_return_wait_for_those_of_the_other_ranks(method: str, tmp_path: Path) -> None:
    """Others may be about to connect to them; when one fails, exit handlers of the others run all the same."""
    config = LaunchConfig(nproc_per_node=2, max_restarts=0, exit_timeout=0.2, start_method=method)  # type: ignore[arg-type]

    assert {0: False, 1: False} == elastic_launch(config, returns_before_the_other)(str(tmp_path), False)
    assert (tmp_path / "ended").exists()

    for path in tmp_path.iterdir():
        path.unlink()
    with pytest.raises(ChildFailedError) as caught:
        elastic_launch(config, returns_before_the_other)(str(tmp_path), True)
    assert [1] == list(caught.value.failures) and (tmp_path / "ended").exists()


def forks_and_returns(raises: bool) -> int:
    """Fork a child that comes back from this function too."""
    pid = os.fork()
    if pid == 0:
        if raises:
            raise ValueError("in the child")
        return -1
    os.waitpid(pid, 0)
    return int(os.environ["RANK"])


@pytest.mark.parametrize("method", ["forkserver", "fork", "spawn"])
@pytest.mark.parametrize("raises", [False, True])
def test_a_process_that_the_function_forked_cannot_answer_for_it(
    raises: bool, method: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """It came back from the function as well: its result is dropped with a line that says so."""
    config = LaunchConfig(nproc_per_node=2, max_restarts=0, start_method=method)  # type: ignore[arg-type]

    assert {0: 0, 1: 1} == elastic_launch(config, forks_and_returns)(raises)
    assert 2 == capfd.readouterr().err.count("returned from the user's code")
