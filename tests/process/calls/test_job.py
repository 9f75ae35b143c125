"""A launch as an object: watched, awaited, read and stopped from beside it, and nothing is left of it."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import ctypes
import functools
import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elasticlib import (
    ChildFailedError,
    ConfigError,
    DefaultLogsSpecs,
    Job,
    JobRunsError,
    LaunchConfig,
    LaunchInterrupted,
    SignalException,
    Std,
    elastic_launch,
    jobs,
    progress,
)
from elasticlib.job import _job
from elasticlib.notebook import Cell, current_cell
from elasticlib.workers import _machine
from tests.patching import replace_everywhere
from tests.signals import sent_by_another_thread
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.1)]

ROOT = Path(__file__).parents[3]
LIMIT = 60.0


def settings(workers: int = 2, **more: object) -> LaunchConfig:
    return LaunchConfig(nproc_per_node=workers, preload=(), **({"max_restarts": 0} | more))  # type: ignore[arg-type]


def rank() -> int:
    return int(os.environ["RANK"])


def counts(folder: Path) -> int:
    """Tells that it has come to step 5, and waits until it may end."""
    for step in range(6):
        progress(step, total=9, loss=1 / (step + 1))
        print(f"step {step} of rank {rank()}", flush=True)
    print(f"at work as {rank()}", file=sys.stderr, flush=True)
    (folder / f"at_work{rank()}").touch()
    wait_until((folder / "end").exists)
    return rank()


def waits_for_ever(folder: Path) -> None:
    (folder / f"at_work{rank()}").touch()
    threading.Event().wait()


def minds_no_signal(folder: Path) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    waits_for_ever(folder)


def keeps_the_lock(folder: Path) -> None:
    """Sits in native code that has not let go of the interpreter's lock."""
    (folder / f"at_work{rank()}").touch()
    ctypes.PyDLL(None).sleep(3600)


def raises(folder: Path) -> None:
    if rank() == 1:
        raise ValueError("no such batch")
    threading.Event().wait()


def fails_once(folder: Path) -> str:
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    print(f"attempt {attempt}", flush=True)
    if attempt == "0" and rank() == 0:
        raise RuntimeError("the first time")
    return attempt


def at_work(folder: Path, count: int = 2) -> None:
    wait_until(lambda: len(list(folder.glob("at_work*"))) == count)


@contextlib.contextmanager
def started(function: object, folder: Path, config: LaunchConfig | None = None) -> Iterator[Job]:
    """A job whose workers are at work; it is stopped afterwards."""
    job = elastic_launch(config or settings(), function).start(folder)  # type: ignore[arg-type]
    try:
        at_work(folder, int((config or settings()).nproc_per_node))
        yield job
    finally:
        job.stop(0.0)


@contextlib.contextmanager
def soon(signum: signal.Signals, again: Callable[[], object] | None = None) -> Iterator[None]:
    """Send this process *signum* once somebody handles it in place of Python, and, if that is given, *again*."""
    former = signal.getsignal(signum)

    def send() -> None:
        wait_until(lambda: signal.getsignal(signum) is not former)
        os.kill(os.getpid(), signum)
        if again is not None:
            wait_until(again)
            os.kill(os.getpid(), signum)

    thread = threading.Thread(target=send)
    thread.start()
    yield
    thread.join()


# Its course.


def test_a_job_runs_beside_its_program_and_has_the_results(tmp_path: Path) -> None:
    with started(counts, tmp_path) as job:
        assert not job.done()
        assert [job] == jobs()
        (tmp_path / "end").touch()

        assert {0: 0, 1: 1} == job.result(LIMIT)
        assert job.done()
        assert [] == jobs()
        assert {0: 0, 1: 1} == job.result()


def test_status_shows_state_step_metrics_and_last_line(tmp_path: Path) -> None:
    with started(counts, tmp_path) as job:
        status = job.status()

        assert (status.state, status.nodes, status.restarts, status.name) == ("running", 1, 0, "counts")
        assert [each.rank for each in status.ranks] == [0, 1]
        for each in status.ranks:
            assert (each.state, each.step, each.total, each.exitcode) == ("running", 5, 9, None)
            assert each.metrics == {"loss": pytest.approx(1 / 6)}
            assert f"at work as {each.rank}" == each.last_line
            assert each.pid > 0
        (tmp_path / "end").touch()
        job.result(LIMIT)

        status = job.status()
        assert ("succeeded", "") == (status.state, status.why)
        assert [("succeeded", 0, 5)] * 2 == [(each.state, each.exitcode, each.step) for each in status.ranks]
        assert "counts" in repr(job) and "succeeded" in repr(job)


def test_status_keeps_the_last_lines_after_their_files_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # a full one takes a minute to be looked through
    config = LaunchConfig(nproc_per_node=1, preload=(), logs_specs=DefaultLogsSpecs(redirects=Std.ALL))
    with elastic_launch(config, functools.partial(print, "all is well")).start() as job:
        job.result(LIMIT)
        for file in job.files(0):
            os.remove(file)

        assert job.logs() == ""
        assert [each.last_line for each in job.status().ranks] == ["all is well"]


def test_job_raises_same_failure_as_a_call_on_every_result_request(tmp_path: Path) -> None:
    job = elastic_launch(settings(), raises).start(tmp_path)

    for _ in range(2):
        with pytest.raises(ChildFailedError, match="no such batch") as caught:
            job.result(LIMIT)
        assert isinstance(caught.value.__cause__, ValueError)
        assert caught.value is job.exception()
    status = job.status()
    assert ("failed", True) == (status.state, "no such batch" in status.why)
    assert ["stopped", "failed"] == [each.state for each in status.ranks]
    assert "no such batch" in job.logs(1)


def test_a_time_out_leaves_the_job_running(tmp_path: Path) -> None:
    with started(counts, tmp_path) as job:
        with pytest.raises(TimeoutError, match="'counts': running"):
            job.result(0.01)
        (tmp_path / "end").touch()

        assert {0: 0, 1: 1} == job.result(LIMIT)


def test_restarts_are_counted_and_the_output_of_all_rounds_is_there(tmp_path: Path) -> None:
    job = elastic_launch(settings(max_restarts=1), fails_once).start(tmp_path)
    followed = list(job.logs(0, follow=True))
    results = job.result(LIMIT)

    assert {0: "1", 1: "1"} == results
    assert [(place.node, place.round, place.restarts) for place in results.places.values()] == [(0, 1, 1)] * 2
    assert (job.status().restarts, job.status().round) == (1, 1)
    for lines in (followed, job.logs(0).splitlines()):
        assert ["attempt 0", "attempt 1"] == [line for line in lines if line.startswith("attempt")]


def test_arguments_that_a_call_refuses_are_refused_before_a_job_exists(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        elastic_launch(settings(), counts).start(threading.Lock())
    assert [] == jobs()


def test_job_runs_in_the_context_of_its_starter(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mark = contextvars.ContextVar("mark", default="none")
    seen = []

    class Sees(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "round 0 started" in record.getMessage():
                seen.append((mark.get(), threading.current_thread().name))

    handler = Sees()
    logging.getLogger("elasticlib").addHandler(handler)
    try:
        with caplog.at_level(logging.INFO, "elasticlib"):
            mark.set("mine")
            with started(waits_for_ever, tmp_path):
                pass
    finally:
        logging.getLogger("elasticlib").removeHandler(handler)

    assert [("mine", "elasticlib-job-waits_for_ever")] == seen


def test_jobs_run_side_by_side(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(started(counts, folder, settings(1))) for folder in folders]
        assert running == jobs()
        running[1].stop(0.0)
        assert [running[0], running[2]] == jobs()
        for folder in folders:
            (folder / "end").touch()

        assert [{0: 0}] * 2 == [running[0].result(LIMIT), running[2].result(LIMIT)]


def test_a_blocking_call_is_a_job_for_other_threads(tmp_path: Path) -> None:
    caught = list[BaseException]()

    def call() -> None:
        try:
            elastic_launch(settings(), waits_for_ever)(tmp_path)
        except SignalException as error:
            caught.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    at_work(tmp_path)
    (job,) = jobs()
    assert "running" == job.status().state
    job.stop(0.0)
    thread.join()

    assert ["Job.stop()" in str(error) for error in caught] == [True]


# Its output.


def output_of(rank: int) -> list[str]:
    return [*(f"step {step} of rank {rank}" for step in range(6)), f"at work as {rank}"]


def test_output_of_each_rank_is_kept_and_can_be_followed(tmp_path: Path) -> None:
    with started(counts, tmp_path) as job:
        following = job.logs(1, follow=True)
        first = [next(following) for _ in range(7)]
        during = job.logs(1).splitlines()
        (tmp_path / "end").touch()
        rest = list(following)
        job.result(LIMIT)

        assert output_of(1) == first == during == job.logs(1).splitlines()
        assert [] == rest


def test_rank_0_is_shown_and_no_other(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with started(counts, tmp_path) as job:
        (tmp_path / "end").touch()
        job.result(LIMIT)

    shown = capfd.readouterr()
    assert output_of(0) == shown.out.splitlines()
    assert "of rank 1" not in shown.err


def test_the_files_go_with_the_job_after_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    work = tmp_path / "work"
    work.mkdir()
    with started(counts, work) as job:
        (work / "end").touch()
        job.result(LIMIT)
    assert ["work"] != sorted(each.name for each in tmp_path.iterdir())

    del job
    assert ["work"] == [each.name for each in tmp_path.iterdir()]


def test_logs_specs_of_the_caller_decide_where_output_is_written(tmp_path: Path) -> None:
    config = settings(logs_specs=DefaultLogsSpecs(str(tmp_path / "logs"), redirects=Std.ALL))
    with started(counts, tmp_path, config) as job:
        assert 6 == len(job.logs(1).splitlines())  # of stdout alone
        (tmp_path / "end").touch()
        job.result(LIMIT)

    assert 2 == len(list((tmp_path / "logs").glob("*/attempt_0/*/stderr.log")))


def test_reading_output_that_is_in_no_file_raises_error_with_remedy(tmp_path: Path) -> None:
    with started(waits_for_ever, tmp_path, settings(logs_specs=DefaultLogsSpecs())) as job:
        with pytest.raises(ConfigError, match="leave logs_specs out"):
            job.logs(0)
        with pytest.raises(ConfigError, match=r"rank 7 is not on this node \(ranks here: 0-1\)"):
            job.logs(7)


# Where it is.


@pytest.mark.parametrize("method", ["forkserver", "spawn", "fork"])
def test_stacks_show_where_each_rank_is(method: str, tmp_path: Path) -> None:
    with started(waits_for_ever, tmp_path, settings(start_method=method)) as job:
        stacks = job.stacks(LIMIT)

        assert [0, 1] == sorted(stacks)
        assert all("in waits_for_ever" in text for text in stacks.values())
        assert "ranks 0-1:" in str(stacks)
    assert {} == job.stacks()


def test_a_worker_that_keeps_the_interpreters_lock_is_seen(tmp_path: Path) -> None:
    with started(keeps_the_lock, tmp_path, settings(1)) as job:
        assert "in keeps_the_lock" in job.stacks(LIMIT)[0]


def test_stacks_report_a_stopped_worker_and_do_not_delay_other_ranks(tmp_path: Path) -> None:
    with started(waits_for_ever, tmp_path) as job:
        os.kill(job.status().ranks[0].pid, signal.SIGSTOP)
        stacks = job.stacks(LIMIT)

        assert "is stopped" in stacks[0]
        assert "in waits_for_ever" in stacks[1]


def test_asking_for_stacks_again_and_again_disturbs_nobody(tmp_path: Path) -> None:
    with started(counts, tmp_path) as job:
        assert all(len(job.stacks(LIMIT)) == 2 for _ in range(20))
        (tmp_path / "end").touch()

        assert {0: 0, 1: 1} == job.result(LIMIT)


# Its end.


def test_a_stop_returns_when_nothing_is_left(tmp_path: Path) -> None:
    with started(waits_for_ever, tmp_path) as job:
        pids = [each.pid for each in job.status().ranks]
        job.stop()

        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
        assert "stopped" == job.status().state
        with pytest.raises(SignalException, match=r"was stopped by Job\.stop\(\)"):
            job.result()
        job.stop()


def test_a_grace_beats_the_shutdown_timeout(tmp_path: Path) -> None:
    with started(minds_no_signal, tmp_path, settings(shutdown_timeout=3600)) as job:
        job.stop(0.1)
        assert {-signal.SIGKILL} == {each.exitcode for each in job.status().ranks}


def test_a_second_stop_makes_the_grace_shorter(tmp_path: Path) -> None:
    with started(minds_no_signal, tmp_path) as job:
        job.stop(3600, wait=False)
        wait_until(lambda: job.status().state == "stopping")
        assert not job.done()
        job.stop(0.0)
        assert job.done()


def test_a_job_that_has_not_begun_can_be_stopped(tmp_path: Path) -> None:
    job = elastic_launch(settings(), waits_for_ever).start(tmp_path)
    job.stop()

    assert job.done() and "stopped" == job.status().state


def test_a_grace_that_is_none_is_refused(tmp_path: Path) -> None:
    with started(waits_for_ever, tmp_path) as job:
        for grace in (-1, float("nan")):
            with pytest.raises(ConfigError, match="grace"):
                job.stop(grace)


SIGNALS = pytest.mark.parametrize(
    ("signum", "kind"), [(signal.SIGINT, LaunchInterrupted), (signal.SIGTERM, SignalException)], ids=["int", "term"]
)


def test_the_end_of_a_block_stops_the_job(tmp_path: Path) -> None:
    with pytest.raises(KeyError), elastic_launch(settings(), waits_for_ever).start(tmp_path) as job:
        at_work(tmp_path)
        raise KeyError("of the block")

    assert "stopped" == job.status().state


@SIGNALS
def test_a_signal_while_the_main_thread_waits_stops_that_job(
    signum: signal.Signals, kind: type[SignalException], tmp_path: Path
) -> None:
    handlers = [signal.getsignal(each) for each in signal.valid_signals()]
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    with started(waits_for_ever, folders[0]) as waited, started(waits_for_ever, folders[1]) as other:
        with soon(signum), pytest.raises(SignalException) as caught:
            waited.result()

        assert kind is type(caught.value)
        assert handlers == [signal.getsignal(each) for each in signal.valid_signals()]
        assert [other] == jobs()


def test_a_second_interrupt_kills(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with started(minds_no_signal, tmp_path, settings(shutdown_timeout=3600)) as job:
        with soon(signal.SIGINT, lambda: "another Ctrl-C" in caplog.text), pytest.raises(LaunchInterrupted):
            job.result()

        assert {-signal.SIGKILL} == {each.exitcode for each in job.status().ranks}


def test_a_second_interrupt_that_another_thread_received_kills(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernel may choose any thread, or deliver a signal just before the main thread's wait begins."""

    def is_awaited() -> bool:
        return "another Ctrl-C" in caplog.text

    with started(minds_no_signal, tmp_path, settings(shutdown_timeout=3600)) as job:
        with soon(signal.SIGINT), sent_by_another_thread(signal.SIGINT, is_awaited):
            with pytest.raises(LaunchInterrupted):
                job.result()

        assert {-signal.SIGKILL} == {each.exitcode for each in job.status().ranks}


@SIGNALS
def test_signal_is_not_lost_if_the_time_ends_before_the_workers(
    signum: signal.Signals, kind: type[SignalException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    still = iter([signum])

    def raises_signals() -> bool:
        for each in still:
            signal.raise_signal(each)
        return False

    with started(minds_no_signal, tmp_path, settings(shutdown_timeout=3600)) as job:
        with monkeypatch.context() as patch:
            patch.setattr(job, "done", raises_signals)  # what the wait asks again and again
            with pytest.raises(SignalException, match="which is being stopped") as caught:
                job.result(0.01)

        assert (kind, signum) == (type(caught.value), caught.value.sigval)
        assert not job.done()


def test_a_job_can_be_awaited(tmp_path: Path) -> None:
    async def both() -> tuple[object, object]:
        with started(counts, tmp_path) as job:
            ticks = asyncio.create_task(asyncio.sleep(0))
            (tmp_path / "end").touch()
            result = await job
            await ticks
            return result, await job

    assert ({0: 0, 1: 1}, {0: 0, 1: 1}) == asyncio.run(both())


def test_a_failure_is_raised_where_it_is_awaited(tmp_path: Path) -> None:
    async def fail() -> None:
        await elastic_launch(settings(), raises).start(tmp_path)

    with pytest.raises(ChildFailedError, match="no such batch"):
        asyncio.run(fail())


def test_a_task_that_is_cancelled_leaves_the_job_running(tmp_path: Path) -> None:
    async def impatient(job: Job) -> None:
        async def wait() -> None:
            await job

        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(wait(), 0.01)

    with started(counts, tmp_path) as job:
        asyncio.run(impatient(job))
        assert not job.done()
        (tmp_path / "end").touch()

        assert {0: 0, 1: 1} == job.result(LIMIT)


def test_a_callback_that_raises_keeps_the_end_from_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    received = list[object]()

    def leaves() -> None:
        raise SystemExit("of a callback")

    async def wait(job: Job) -> object:
        job.when_done(leaves)
        job.when_done(lambda: received.append(os.environ["no variable"]))
        job.when_done(lambda: received.append(job.result()))
        task = asyncio.ensure_future(job)
        (tmp_path / "end").touch()
        return await asyncio.wait_for(task, LIMIT)

    with started(counts, tmp_path) as job:
        lines = job.logs(1, follow=True)
        following = threading.Thread(target=lambda: received.extend(list(lines)[-1:]), daemon=True)
        following.start()

        assert {0: 0, 1: 1} == asyncio.run(wait(job))
        following.join(LIMIT)
        assert not following.is_alive()
        job.result(LIMIT)  # its thread has called all of them
        job.when_done(lambda: received.append(os.environ["no variable"]))

    assert {"at work as 1", "{0: 0, 1: 1}"} == {str(each) for each in received}
    assert ["SystemExit", "KeyError", "KeyError"] == [
        each.exc_info[0].__name__ for each in caplog.records if each.exc_info and each.exc_info[0]
    ]
    assert "of when_done() failed" in caplog.text


def test_a_callback_may_ask_for_what_a_stopped_job_raises(tmp_path: Path) -> None:
    raised = list[BaseException | None]()

    def requests_result() -> None:
        try:
            job.result()
        except SignalException as error:
            raised.append(error)

    with started(waits_for_ever, tmp_path) as job:
        job.when_done(requests_result)
        job.stop(0)

    assert [job.exception()] == raised


def test_tasks_that_are_cancelled_leave_nothing_with_the_job(tmp_path: Path) -> None:
    async def wait(job: Job) -> None:
        await job

    async def give_up(job: Job) -> list[str]:
        notes = list[str]()
        for _ in range(3):
            task = asyncio.create_task(wait(job))
            await asyncio.sleep(0)
            assert [*job._done]
            task.cancel()
            with pytest.raises(asyncio.CancelledError) as caught:
                await task
            notes += getattr(caught.value, "__notes__", [])
        return notes

    with started(waits_for_ever, tmp_path) as job:
        notes = asyncio.run(give_up(job))

        assert [] == job._done
        assert all("does not stop job 'waits_for_ever'" in note for note in notes)


def test_signal_handlers_call_soon_wakes_a_loop_that_awaits_a_job(tmp_path: Path) -> None:
    """As a notebook's stop button does: its handler calls ``call_soon``, which wakes no loop that sleeps."""

    async def wait(job: Job) -> None:
        await job

    async def interrupted(job: Job) -> None:
        loop, task, cancelled = asyncio.get_running_loop(), asyncio.create_task(wait(job)), list[bool]()

        def interrupt() -> None:
            wait_until(lambda: job._done)
            os.kill(os.getpid(), signal.SIGUSR1)
            try:
                wait_until(task.done)
                cancelled.append(task.cancelled())
            finally:
                loop.call_soon_threadsafe(task.cancel)

        former = signal.signal(signal.SIGUSR1, lambda *_: loop.call_soon(task.cancel))
        thread = threading.Thread(target=interrupt)
        thread.start()
        await asyncio.wait({task})
        thread.join()
        signal.signal(signal.SIGUSR1, former)
        assert [True] == cancelled
        assert all(each.cancelled() for each in loop._scheduled)  # type: ignore[attr-defined]

    with started(waits_for_ever, tmp_path) as job:
        asyncio.run(interrupted(job))


def test_nobody_waits_for_a_job_in_its_own_thread(tmp_path: Path) -> None:
    with started(waits_for_ever, tmp_path) as job:
        found = list[BaseException]()

        def wait() -> None:
            try:
                job.result()
            except ConfigError as error:
                found.append(error)

        thread, job._thread = job._thread, threading.Thread(target=wait)
        job._thread.start()
        job._thread.join()
        job._thread = thread

        assert ["in its own thread" in str(error) for error in found] == [True]


# Beside a notebook, and a program that ends.


def test_a_cell_that_runs_again_while_its_job_runs_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_job, "current_cell", lambda: Cell("c1", 1))
    with started(waits_for_ever, tmp_path) as job:
        monkeypatch.setattr(_job, "current_cell", lambda: Cell("c1", 2))
        with pytest.raises(JobRunsError, match=r"<Job 'waits_for_ever': running .* was started by this cell"):
            elastic_launch(settings(), waits_for_ever).start(tmp_path)
        assert [job] == jobs()

        monkeypatch.setattr(_job, "current_cell", lambda: Cell("c2", 3))
        elastic_launch(settings(), waits_for_ever).start(tmp_path).stop()
    monkeypatch.setattr(_job, "current_cell", current_cell)


def test_one_run_of_a_cell_may_start_several_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_job, "current_cell", lambda: Cell("c1", 1))
    with started(waits_for_ever, tmp_path):
        elastic_launch(settings(), waits_for_ever).start(tmp_path).stop()


PROGRAM = """
import os, sys, threading
from pathlib import Path
from elasticlib import LaunchConfig, elastic_launch

def waits(folder):
    (Path(folder) / f"at_work{os.environ['RANK']}").write_text(str(os.getpid()))
    threading.Event().wait()

job = elastic_launch(LaunchConfig(nproc_per_node=2, preload=()), waits).start(sys.argv[1])
while len(list(Path(sys.argv[1]).glob("at_work*"))) < 2:
    pass
"""


def run(folder: Path, more: str = "") -> subprocess.CompletedProcess[str]:
    script = folder / "program.py"
    script.write_text(PROGRAM + textwrap.dedent(more))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script), str(folder)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False)


def nothing_runs(folder: Path) -> None:
    pids = [int(each.read_text()) for each in folder.glob("at_work*")]
    assert 2 == len(pids)
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


def test_program_that_ends_stops_its_jobs_and_reports_them(tmp_path: Path) -> None:
    done = run(tmp_path)

    assert 0 == done.returncode
    assert "was still running when its program ended" in done.stderr and "Traceback" not in done.stderr
    nothing_runs(tmp_path)


def test_nothing_outlives_a_program_that_is_killed(tmp_path: Path) -> None:
    done = run(tmp_path, "import signal; os.kill(os.getpid(), signal.SIGKILL)")

    assert -signal.SIGKILL == done.returncode
    nothing_runs(tmp_path)


def test_a_process_that_the_program_forks_has_no_jobs(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
        from elasticlib import jobs
        read, write = os.pipe()
        if os.fork() == 0:
            os.write(write, str(len(jobs())).encode())
            os._exit(0)
        os.wait()
        print(os.read(read, 9).decode(), len(jobs()), len(job.stacks()))
        job.stop()
        """,
    )

    assert ("0 1 2\n", "") == (done.stdout, done.stderr)


def test_a_forked_process_is_refused_what_it_would_wait_for_in_vain(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
        import asyncio
        from elasticlib import ConfigError

        async def awaits():
            await job

        def follows():
            return job.logs(0, follow=True)

        def adds_callback():
            job.when_done(print)

        child = os.fork()
        if child == 0:
            with job:
                for call in (job.result, job.stop, job.stacks, follows, adds_callback, lambda: asyncio.run(awaits())):
                    try:
                        call()
                    except ConfigError as error:
                        assert f"job 'waits' runs in process {os.getppid()}, and this process" in str(error)
                        print(call.__name__, flush=True)
            sys.exit(0)
        print(os.waitpid(child, 0)[1], len(job.stacks()), job.done())
        job.stop()
        """,
    )

    assert "result stop stacks follows adds_callback <lambda> 0 2 False" == " ".join(done.stdout.split()), done.stderr
    assert "Traceback" not in done.stderr


def test_the_end_of_a_forked_process_takes_nothing_from_the_program(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
        import elasticlib

        job.stop()
        talk = elastic_launch(LaunchConfig(nproc_per_node=1, preload=(), show=()), print).start("kept")
        talk.result()
        pool = elasticlib.pool(1, group=None, preload=())
        child = os.fork()
        if child == 0:
            with talk:
                print(talk.result(), talk.logs(0), end="", flush=True)
            sys.exit(0)
        print(os.waitpid(child, 0)[1], talk.logs(0), pool.run(abs, -3))
        pool.close()
        """,
    )

    assert "{0: None} kept 0 kept {0: 3}" == " ".join(done.stdout.split()), done.stderr
    assert "Traceback" not in done.stderr


def test_status_shows_progress_of_a_script_but_not_of_its_children(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, subprocess, sys
            from pathlib import Path
            from elasticlib import progress

            progress(3, total=4)
            if os.fork() == 0:
                progress(99)
                os._exit(0)
            os.wait()
            subprocess.run([sys.executable, "-c", "import elasticlib; elasticlib.progress(77)"], check=True)
            (Path(sys.argv[1]) / f"at_work{os.environ['RANK']}").touch()
            sys.stdin.read()
            while not (Path(sys.argv[1]) / "end").exists():
                pass
            """
        )
    )
    job = elastic_launch(settings(), str(script)).start(str(tmp_path))
    with job:
        at_work(tmp_path)
        assert [(3, 4), (3, 4)] == [(each.step, each.total) for each in job.status().ranks]
        (tmp_path / "end").touch()

        assert {0: None, 1: None} == job.result(LIMIT)


@pytest.mark.sampled(0.1)
def test_many_jobs_leave_no_thread_nor_descriptor(tmp_path: Path) -> None:
    def resources() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    (tmp_path / "end").touch()
    for _ in range(3):
        elastic_launch(settings(1), counts).start(tmp_path).result(LIMIT)

    def grows() -> bool:
        before = resources()
        for _ in range(10):
            elastic_launch(settings(1), counts).start(tmp_path).result(LIMIT)
        return before != resources()

    assert not all(grows() for _ in range(3))  # an idle fork server of another test may still open something once


def test_status_can_be_read_while_rounds_start_and_end(tmp_path: Path) -> None:
    job = elastic_launch(settings(max_restarts=1), fails_once).start(tmp_path)
    states = set()
    while not job.done():
        states.add(job.status().state)
        json.dumps(str(job.status()))
    job.result(LIMIT)

    assert states <= {"starting", "waiting for ranks", "running", "stopping", "succeeded"}


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    replace_everywhere(monkeypatch, _machine, "gpu_count", lambda: 8)


def sees(folder: Path) -> str:
    (folder / f"at_work{rank()}").touch()
    while not (folder / "end").exists():
        threading.Event().wait(0.01)
    return os.environ["CUDA_VISIBLE_DEVICES"]


@pytest.mark.usefixtures("four_gpus")
def test_jobs_at_once_never_get_the_same_gpu(tmp_path: Path) -> None:
    with elastic_launch(settings(devices=[1, 2]), sees).start(tmp_path) as job:
        at_work(tmp_path)
        with pytest.raises(JobRunsError, match=r"devices=\[2, 3\]: GPU 6 is taken by job 'sees'"):
            elastic_launch(settings(devices=[2, 3]), sees).start(tmp_path)
        with pytest.raises(JobRunsError, match="GPUs 5, 6 are taken by job 'sees'"):
            elastic_launch(settings(4), sees)(tmp_path)
        other = elastic_launch(settings(), sees).start(tmp_path)
        (tmp_path / "end").touch()

        assert {0: "5,6", 1: "5,6"} == job.result(LIMIT)
        assert {0: "4,7", 1: "4,7"} == other.result(LIMIT)
    assert {0: "4,5,6,7", 1: "4,5,6,7"} == elastic_launch(settings(), sees)(tmp_path)


@pytest.mark.usefixtures("four_gpus")
def test_a_worker_alone_with_a_device_has_one_of_its_job(tmp_path: Path) -> None:
    (tmp_path / "end").touch()

    found = elastic_launch(settings(devices=[3, 0], virtual_local_rank=True), sees)(tmp_path)

    assert {0: "7", 1: "4"} == found


@pytest.mark.usefixtures("four_gpus")
def test_a_job_without_gpus_runs_beside_those_that_have_all(tmp_path: Path) -> None:
    with elastic_launch(settings(), sees).start(tmp_path):
        at_work(tmp_path)
        (tmp_path / "end").touch()
        assert {0: "", 1: ""} == elastic_launch(settings(devices=()), sees)(tmp_path)


@pytest.mark.usefixtures("four_gpus")
def test_a_launch_that_is_refused_or_fails_keeps_no_gpu(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="lambda"):
        elastic_launch(settings(), lambda: None).start(threading.Lock(), lambda: None)
    with pytest.raises(ChildFailedError):
        elastic_launch(settings(), sees)(tmp_path / "is" / "none")
    (tmp_path / "end").touch()

    assert {0: "4,5,6,7"} == elastic_launch(settings(1), sees).start(tmp_path).result(LIMIT)
