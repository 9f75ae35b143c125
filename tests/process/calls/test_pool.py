"""A pool: workers that stay and answer calls, and that are replaced where a call has spoilt them."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import io
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

import elasticlib
from elasticlib import (
    ChildFailedError,
    ConfigError,
    JobRunsError,
    LaunchConfig,
    PicklingError,
    Pool,
    PoolError,
    jobs,
    pool,
)
from elasticlib.logs import _follow
from elasticlib.pools._pool_workers import PoolWorkers
from elasticlib.processes._wire import Channel, Message
from elasticlib.workers import _machine
from tests.patching import replace_everywhere
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.1)]

ROOT = Path(__file__).parents[3]
LIMIT = 60.0


@pytest.fixture
def two() -> Iterator[Pool]:
    with pool(2, group=None, preload=()) as made:
        yield made
    assert jobs() == []


@pytest.fixture
def grouped() -> Iterator[Pool]:
    with pool(3) as made:
        yield made


def rank() -> int:
    return int(os.environ["RANK"])


def pid() -> int:
    return os.getpid()


def scaled(value: int, *, by: int = 1) -> int:
    return rank() * value * by


def total(value: float = 1.0) -> float:
    import torch
    import torch.distributed as dist

    summed = torch.full((1,), value)
    dist.all_reduce(summed)
    return float(summed)


# Calls.


def test_a_call_returns_what_each_rank_returned(two: Pool) -> None:
    assert two.run(scaled, 3, by=2) == {0: 0, 1: 6}
    assert two.run(lambda: "x") == {0: "x", 1: "x"}
    assert len(two) == 2


def test_the_processes_stay_and_keep_what_a_call_left(two: Pool) -> None:
    def remember() -> int:
        found = vars(elasticlib).setdefault("_calls_of_this_test", [])
        found.append(1)
        return len(found)

    first = two.run(pid)
    two.run(remember)

    assert two.run(remember) == {0: 2, 1: 2}
    assert two.run(pid) == first


def test_map_shares_out_items_and_returns_results_in_order(two: Pool) -> None:
    def slow_first(item: int) -> tuple[int, int]:
        time.sleep(0.3 if item == 0 else 0)
        return item, os.getpid()

    found = two.map(slow_first, range(7))

    assert [item for item, _ in found] == list(range(7))
    assert [process for _, process in found].count(found[0][1]) == 1  # the other worker did all the others


@pytest.mark.parametrize("count", [0, 1])
def test_fewer_items_than_workers_leave_some_idle(two: Pool, count: int) -> None:
    assert two.map(str, iter(range(count))) == [str(item) for item in range(count)]


def test_a_call_finds_the_program_as_it_is_now(two: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def finds() -> tuple[str, str | None, str | None, bool]:
        return os.getcwd(), os.environ.get("OF_THIS_TEST"), os.environ.get("RANK"), "/of/this/test" in sys.path

    former = two.run(finds)[1]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OF_THIS_TEST", "1")
    monkeypatch.setenv("RANK", "7")
    monkeypatch.syspath_prepend("/of/this/test")
    changed = two.run(finds)[1]
    monkeypatch.undo()

    assert former == (os.getcwd(), None, "1", False)
    assert changed == (str(tmp_path), "1", "1", True)
    assert two.run(finds)[1] == former


def test_a_folder_that_was_removed_is_named(two: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    with pytest.raises(ConfigError, match=f"the working directory {folder} no longer exists: change to another one"):
        two.run(rank)
    monkeypatch.undo()

    assert two.run(rank) == {0: 0, 1: 1}


def test_large_arguments_and_results_travel(two: Pool) -> None:
    data = os.urandom(20_000_000)

    assert two.run(lambda value: value[::-1], data) == {0: data[::-1], 1: data[::-1]}


def test_output_of_a_worker_is_in_its_log(two: Pool) -> None:
    two.run(lambda: print(f"hello of rank {rank()}"))

    assert "hello of rank 1\n" in two.job.logs(1)


@pytest.mark.parametrize("start_method", ["spawn", "fork"])
def test_workers_of_every_start_method_serve(start_method: str) -> None:
    with pool(2, group=None, start_method=start_method) as made:
        assert made.run(scaled, 1) == {0: 0, 1: 1}
        assert made.map(abs, [-1, -2, -3]) == [1, 2, 3]


def test_a_pool_has_its_gpus_as_long_as_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    replace_everywhere(monkeypatch, _machine, "gpu_count", lambda: 8)
    with pool(2, group=None, preload=(), devices=[2, 3]) as made:
        assert made.run(lambda: os.environ["CUDA_VISIBLE_DEVICES"]) == {0: "6,7", 1: "6,7"}
        with pytest.raises(JobRunsError, match="taken by job 'pool'"):
            pool(1, devices=[3])
        with pytest.raises(ChildFailedError):
            made.run(lambda: os._exit(3))
        assert made.run(lambda: os.environ["CUDA_VISIBLE_DEVICES"]) == {0: "6,7", 1: "6,7"}


# The process group.


def test_the_group_is_there_from_call_to_call(grouped: Pool) -> None:
    first = grouped.run(pid)

    assert [grouped.run(total, value) for value in (1.0, 2.0)] == [
        dict.fromkeys(range(3), 3.0),
        dict.fromkeys(range(3), 6.0),
    ]
    assert grouped.run(pid) == first


def test_a_fresh_group_is_one_for_each_call() -> None:
    def leaves_it_broken() -> None:
        import torch
        import torch.distributed as dist

        if rank() == 0:
            dist.isend(torch.ones(1), 1)  # which nobody receives

    with pool(2, group="fresh") as made:
        processes = made.run(pid)
        made.run(leaves_it_broken)
        assert made.run(total) == {0: 2.0, 1: 2.0}
        assert made.run(pid) == processes


def test_functions_may_make_their_own_group_again_and_again() -> None:
    def trains() -> float:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        try:
            return total()
        finally:
            dist.destroy_process_group()

    with pool(2, group=None) as made:
        processes = made.run(pid)
        for _ in range(10):
            assert made.run(trains) == {0: 2.0, 1: 2.0}
        assert made.run(pid) == processes


def test_a_group_that_a_call_leaves_behind_costs_the_workers() -> None:
    def leaves() -> int:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        return os.getpid()

    with pool(2, group=None) as made:
        first = made.run(leaves)
        second = made.run(leaves)

    assert not set(first.values()) & set(second.values())


def test_group_destroyed_by_a_call_is_created_again(grouped: Pool) -> None:
    def destroys() -> None:
        import torch.distributed as dist

        dist.destroy_process_group()

    grouped.run(destroys)

    assert grouped.run(total) == dict.fromkeys(range(3), 3.0)


def test_a_second_group_is_refused_with_what_to_do(grouped: Pool) -> None:
    def makes() -> None:
        import torch.distributed as dist

        dist.init_process_group("gloo")

    with pytest.raises(ChildFailedError, match="leave init_process_group out"):
        grouped.run(makes)
    assert grouped.run(total) == dict.fromkeys(range(3), 3.0)


# Failures.


def fails(at: int) -> int:
    if rank() == at:
        raise ValueError(f"bad batch of rank {at}")
    return rank()


def test_failing_rank_is_named_and_the_pool_works_on(two: Pool) -> None:
    with pytest.raises(ChildFailedError, match="rank 1: ValueError: bad batch of rank 1") as caught:
        two.run(fails, 1)

    assert isinstance(caught.value.__cause__, ValueError)
    assert list(caught.value.failures) == [1]
    assert caught.value.name == "fails"
    frames = caught.value.failures[1].traceback
    assert "in fails" in frames
    assert "_pooled.py" not in frames


def test_without_a_group_a_failure_costs_no_worker(two: Pool) -> None:
    processes = two.run(pid)
    with pytest.raises(ChildFailedError):
        two.run(fails, 1)

    assert two.run(pid) == processes


def test_ranks_that_wait_for_a_failed_one_are_ended(grouped: Pool) -> None:
    def waits() -> None:
        if rank() == 1:
            raise KeyError("gone")
        total()

    with pytest.raises(ChildFailedError, match="rank 1: KeyError"):
        grouped.run(waits)

    assert grouped.run(total) == dict.fromkeys(range(3), 3.0)


@pytest.mark.parametrize("how", ["killed", "exit"])
def test_a_rank_that_dies_is_named_and_replaced(grouped: Pool, how: str) -> None:
    def dies() -> None:
        if rank() == 2:
            if how == "exit":
                os._exit(5)
            os.kill(os.getpid(), signal.SIGKILL)
        total()

    with pytest.raises(ChildFailedError) as caught:
        grouped.run(dies)

    cause, failure = caught.value.get_first_failure()  # others may say that they have lost it
    assert cause == 2
    assert caught.value.name == "dies"
    assert failure.exitcode == (5 if how == "exit" else -signal.SIGKILL)
    assert grouped.run(total) == dict.fromkeys(range(3), 3.0)


@pytest.mark.parametrize("leaving", [(1,), (0, 1)])
def test_a_rank_that_ends_with_success_in_the_midst_of_a_call_has_died(two: Pool, leaving: tuple[int, ...]) -> None:
    def leaves() -> None:
        if rank() in leaving:
            print("the last words", flush=True)
            os._exit(0)
        time.sleep(LIMIT)

    with pytest.raises(ChildFailedError, match="exited with status 0 during a call") as caught:
        two.run(leaves)

    assert caught.value.name == "leaves"
    assert set(caught.value.failures) <= set(leaving)
    failure = caught.value.get_first_failure()[1]
    assert (failure.exitcode, failure.log_tail) == (0, ("the last words",))
    assert two.run(scaled, 1) == {0: 0, 1: 1}


def ends_at_three(status: int, item: int) -> int:
    if item == 3:
        os._exit(status)
    return item * item


@pytest.mark.parametrize("status", [0, 9])
def test_a_rank_that_ends_at_an_item_fails_that_item_alone(two: Pool, status: int) -> None:
    call = functools.partial(ends_at_three, status)
    with pytest.raises(ChildFailedError, match="exited with status 0" if status == 0 else None):
        two.map(call, range(8))

    found = two.map(call, range(8), return_exceptions=True)

    assert isinstance(found[3], ChildFailedError)
    assert found[3].get_first_failure()[1].exitcode == status
    assert [each for each in found if not isinstance(each, ChildFailedError)] == [0, 1, 4, 16, 25, 36, 49]
    assert two.map(abs, [-1, 2]) == [1, 2]


def test_a_rank_that_ended_with_success_between_calls_costs_nobody_a_call(two: Pool, tmp_path: Path) -> None:
    def leaves_later(go: Path) -> int:
        def leave() -> None:
            while not go.exists():
                time.sleep(0.01)
            os._exit(0)

        if rank() == 1:
            threading.Thread(target=leave, daemon=True).start()
        return os.getpid()

    processes = two.run(leaves_later, tmp_path / "go")
    (tmp_path / "go").touch()
    wait_until(lambda: not Path(f"/proc/{processes[1]}").exists())

    assert set(two.run(pid).values()).isdisjoint(processes.values())


def test_a_rank_that_died_between_calls_costs_nobody_a_call(two: Pool) -> None:
    job, processes = two.job, two.run(pid)
    os.kill(processes[1], signal.SIGKILL)
    wait_until(job.done)

    again = two.run(pid)

    assert set(again) == {0, 1}
    assert processes[1] not in again.values()


def test_an_item_that_fails_is_named(two: Pool) -> None:
    def inverse(item: int) -> float:
        return 1 / item

    with pytest.raises(ChildFailedError, match="ZeroDivisionError") as caught:
        two.map(inverse, [1, 2, 0, 4])
    assert "item 2" in caught.value.name

    found = two.map(inverse, [1, 2, 0, 4], return_exceptions=True)
    assert [found[0], found[1], found[3]] == [1.0, 0.5, 0.25]
    assert isinstance(found[2], ZeroDivisionError)


@pytest.mark.parametrize("code", [None, 0, 3, "no"])
def test_sys_exit_ends_the_call_and_not_the_worker(two: Pool, code: object) -> None:
    processes = two.run(pid)
    if code in (None, 0):
        assert two.run(sys.exit, code) == {0: None, 1: None}
    else:
        with pytest.raises(ChildFailedError, match="SystemExit"):
            two.run(sys.exit, code)
    assert two.run(pid) == processes


def test_unpicklable_objects_are_refused_before_any_rank_receives_them(two: Pool) -> None:
    processes = two.run(pid)
    lock = threading.Lock()

    with pytest.raises(PicklingError, match="'lock'"):
        two.run(lambda: lock)
    with pytest.raises(PicklingError, match="argument 0"):
        two.map(repr, [lock])
    with pytest.raises(
        ChildFailedError, match="the return value, a _thread.lock, cannot be pickled".replace(".", r"\.")
    ):
        two.run(threading.Lock)

    with pytest.raises(PicklingError, match="'lock'"):  # it is no result of its items
        two.map(lambda item: (lock, item), range(3), return_exceptions=True)

    async def later() -> None: ...

    with pytest.raises(ConfigError, match="coroutine"):
        two.run(later)
    assert two.run(pid) == processes


def test_a_process_that_a_call_forks_answers_nobody(two: Pool) -> None:
    def forks() -> int:
        return os.getpid() if os.fork() else 7

    found = two.run(forks)

    assert found == two.run(pid)


# Its end.


def test_closed_pool_raises_pool_error_and_leaves_nothing() -> None:
    with pool(2, group=None, preload=()) as made:
        processes = made.run(pid)
    made.close()

    with pytest.raises(PoolError, match="closed"):
        made.run(pid)
    with pytest.raises(PoolError, match="closed"):
        made.map(abs, [1])
    assert not any(Path(f"/proc/{each}").exists() for each in processes.values())
    assert "closed" in repr(made)


def test_the_workers_end_as_programs_do(tmp_path: Path) -> None:
    def registers(path: Path) -> None:
        import atexit

        atexit.register((path / f"ended{rank()}").touch)

    with pool(2, group=None, preload=()) as made:
        made.run(registers, tmp_path)

    assert sorted(each.name for each in tmp_path.iterdir()) == ["ended0", "ended1"]


def stays(path: Path) -> None:
    (path / f"at_work{rank()}").touch()
    time.sleep(LIMIT)


def test_one_thread_calls_at_a_time_and_any_may_close(tmp_path: Path) -> None:
    made = pool(2, group=None, preload=())
    caught: list[BaseException] = []

    def calls() -> None:
        try:
            made.run(stays, tmp_path)
        except PoolError as error:
            caught.append(error)

    thread = threading.Thread(target=calls, name="of-the-first-call")
    thread.start()
    wait_until(lambda: len(list(tmp_path.iterdir())) == 2)

    with pytest.raises(PoolError, match="of-the-first-call"):
        made.run(pid)
    assert "busy" in repr(made)
    made.close()
    thread.join(LIMIT)

    assert len(caught) == 1
    assert "was closed during this call" in str(caught[0])


def test_an_interrupt_ends_the_call_and_the_pool_works_on(two: Pool, tmp_path: Path) -> None:
    def interrupts() -> None:
        wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
        signal.raise_signal(signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupts)
    thread.start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        two.run(stays, tmp_path)
        thread.join()
    thread.join()

    assert time.monotonic() - began < LIMIT
    assert two.run(scaled, 1) == {0: 0, 1: 1}


def test_a_pool_that_nobody_has_any_more_ends() -> None:
    made = pool(2, group=None, preload=())
    job = made.job
    del made
    gc.collect()

    wait_until(job.done)


def test_a_program_may_end_without_closing_its_pool(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        textwrap.dedent(
            """
            import os
            import elasticlib

            if __name__ == "__main__":
                pool = elasticlib.pool(2, group=None, preload=())
                print(*pool.run(os.getpid).values(), flush=True)
                try:
                    elasticlib.pool(2, preload=(), show=()).run(open, "/of/no/file")
                except FileNotFoundError:
                    pass
            """
        )
    )
    folder = tmp_path / "temporary"
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, cwd=ROOT, timeout=LIMIT, check=True,
        env={**os.environ, "TMPDIR": str(folder)},
    )  # fmt: skip

    assert done.stderr == ""
    assert [*folder.iterdir()] == []
    assert not any(Path(f"/proc/{each}").exists() for each in done.stdout.split())


def test_a_fork_of_the_program_cannot_use_the_pool(two: Pool) -> None:
    child = os.fork()
    if child == 0:
        try:
            two.run(pid)
        except PoolError:
            os._exit(17)
        os._exit(1)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17
    assert two.run(scaled, 1) == {0: 0, 1: 1}


def test_calls_leave_no_descriptor_thread_nor_memory(two: Pool) -> None:
    def here() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    def there() -> int:
        return len(os.listdir("/proc/self/fd"))

    two.run(there)
    before = here(), two.run(there)
    for _ in range(200):
        two.run(functools.partial(scaled, 1))

    assert (here(), two.run(there)) == before


def test_pools_leave_no_descriptor_nor_thread() -> None:
    def here() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    def once() -> None:
        with pool(2, group=None, preload=()) as made:
            made.run(pid)
            with pytest.raises(ChildFailedError):
                made.run(os._exit, 1)
            made.run(pid)

    once()
    before = here()
    for _ in range(2):
        once()

    # Garbage of earlier tests may have gone meanwhile.
    assert all(now <= then for now, then in zip(here(), before, strict=True)), (here(), before)


def test_a_second_close_returns_when_nothing_is_left_too(tmp_path: Path) -> None:
    made = pool(2, group=None, preload=())
    workers = made.run(pid).values()
    made.run(leaves_on_request, str(tmp_path))
    first = threading.Thread(target=made.close)
    first.start()
    wait_until((tmp_path / "leaving0").exists)
    second = threading.Thread(target=made.close)
    second.start()
    (tmp_path / "go").touch()
    second.join(LIMIT)

    assert not any(os.path.exists(f"/proc/{worker}") for worker in workers)
    assert (tmp_path / "left0").exists()  # their exit handlers were not hurried
    first.join(LIMIT)


def test_a_close_that_was_interrupted_is_done_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    made = pool(1, group=None, preload=())
    (worker,) = made.run(pid).values()

    def interrupted(crew: PoolWorkers, limit: float) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(PoolWorkers, "end", interrupted)
        made.close()
    made.close()

    assert not os.path.exists(f"/proc/{worker}")


def test_a_signal_handler_may_close_the_pool_whose_call_it_interrupts(tmp_path: Path) -> None:
    made = pool(1, group=None, preload=())
    former = signal.signal(signal.SIGUSR1, lambda *_: made.close())

    def send() -> None:
        wait_until((tmp_path / "there").exists)
        os.kill(os.getpid(), signal.SIGUSR1)

    def waits(path: Path) -> None:
        path.touch()
        time.sleep(3600)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        with pytest.raises(PoolError, match="closed during this call"):
            made.run(waits, tmp_path / "there")
    finally:
        signal.signal(signal.SIGUSR1, former)
        sender.join(LIMIT)
    made.close()
    assert jobs() == []


# Bad input.


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"group": "own"}, ConfigError, "group='own' must be 'shared'"),
        ({"max_restarts": 3}, ConfigError, "max_restarts=3 is not supported by pool"),
        ({"min_nodes": 2}, ConfigError, "min_nodes=2 is not supported by pool"),
        ({"rdzv_endpoint": "x"}, ConfigError, "rdzv_endpoint='x' is not supported by pool"),
        ({"nproc_per_node": 0}, ConfigError, "nproc_per_node=0"),
        ({"colour": "red"}, TypeError, "'colour'"),
    ],
)
def test_settings_without_meaning_for_a_pool_are_refused(
    settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        pool(**settings)


def test_a_pool_shows_itself_as_one_job(two: Pool) -> None:
    two.run(pid)

    assert [job.name for job in jobs()] == ["pool"]
    assert repr(two) == "<Pool of 2 workers, group=None: idle, 1 call>"
    assert len(two.job.status().ranks) == 2


def test_the_progress_of_a_call_is_not_that_of_the_next(two: Pool, tmp_path: Path) -> None:
    def steps() -> None:
        elasticlib.progress(9, total=10, loss=1.0)

    def reports_late() -> None:
        (tmp_path / f"there{rank()}").touch()
        while not (tmp_path / "go").exists():
            time.sleep(0.01)
        elasticlib.progress(1, loss=2.0)

    two.run(steps)
    former = [(each.step, each.total, each.metrics) for each in two.job.status().ranks]
    caller = threading.Thread(target=two.run, args=(reports_late,))
    caller.start()
    wait_until(lambda: all((tmp_path / f"there{each}").exists() for each in range(2)))
    during = [(each.step, each.total, each.metrics) for each in two.job.status().ranks]
    (tmp_path / "go").touch()
    caller.join(LIMIT)

    assert former == [(9, 10, {"loss": 1.0})] * 2
    assert during == [(None, None, {})] * 2
    assert [(each.step, each.total, each.metrics) for each in two.job.status().ranks] == [(1, None, {"loss": 2.0})] * 2


# What calls leave each other.


def joins_a_group() -> int:
    import datetime

    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=LIMIT))
    size = dist.get_world_size()
    dist.barrier()  # gloo tells a rank that still connects to one which has gone that its peer was lost
    dist.destroy_process_group()
    return size


def test_items_make_no_group_and_leave_the_next_call_its_own() -> None:
    with pool(2, group=None) as made:
        made.run(joins_a_group)
        made.map(scaled, [1, 2, 3])

        assert made.run(joins_a_group) == {0: 2, 1: 2}


def raises_at_odd(item: int) -> int:
    if item % 2:
        raise ValueError(item)
    return item


def test_a_fresh_group_is_none_of_single_items() -> None:
    with pool(2, group="fresh") as made:
        results = made.map(raises_at_odd, range(5), return_exceptions=True)

        assert [result if isinstance(result, int) else type(result.__cause__ or result) for result in results[::2]] == [
            0,
            2,
            4,
        ]
        assert all(isinstance(result, ValueError) for result in results[1::2])
        assert made.run(total) == {0: 2.0, 1: 2.0}


def test_interrupt_while_workers_start_leaves_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = elasticlib.Job.begin

    def interrupted(job: elasticlib.Job) -> elasticlib.Job:
        begin(job)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(elasticlib.Job, "begin", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pool(2, group=None, preload=())
    with pool(2, group=None, preload=()) as made:
        first = made.run(pid)
        assert all(made.run(pid) == first for _ in range(20))
        wait_until(lambda: len(jobs()) == 1, LIMIT)


def fills_both(left: Any, right: Any) -> tuple[list[float], list[float]]:
    import torch

    torch.add(torch.ones(2), 1, out=left)
    torch.add(torch.ones(2), 2, out=right)
    return left.tolist(), right.tolist()


def test_empty_tensors_are_not_one() -> None:
    import torch

    with pool(1, group=None) as made:
        assert made.run(fills_both, torch.empty(0), torch.empty(0)) == {0: ([2.0, 2.0], [3.0, 3.0])}


class Slotted:
    __slots__ = ("unset", "value")

    def __init__(self, value: int) -> None:
        self.value = value

    def method(self) -> int:
        return self.value


def test_methods_of_objects_with_slots_can_be_sent(two: Pool) -> None:
    assert two.run(Slotted(3).method) == {0: 3, 1: 3}


def test_search_path_may_contain_a_path_object(two: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])

    assert two.run(rank) == {0: 0, 1: 1}
    launch = elasticlib.elastic_launch(LaunchConfig(nproc_per_node=1, preload=()), lambda: "x")
    assert launch() == {0: "x"}


# Where the output goes.


def chatter(name: str, lines: int) -> None:
    for number in range(lines):
        print(name, number)
    print(name, "end", end="")


def test_all_that_a_call_writes_is_in_its_own_stream() -> None:
    streams = [io.StringIO() for _ in range(6)]
    with pool(2, group=None, preload=()) as made:
        for number, stream in enumerate(streams):
            with redirect_stdout(stream):
                made.run(chatter, f"call{number}", 500)
    for number, stream in enumerate(streams):
        lines = "".join(f"call{number} {line}\n" for line in range(500))
        assert stream.getvalue() == f"{lines}call{number} end"


def test_lines_without_end_of_several_ranks_are_in_their_own_call() -> None:
    first, second = io.StringIO(), io.StringIO()
    with pool(2, group=None, preload=(), show="all") as made:
        for stream in (first, second):
            with redirect_stdout(stream):
                made.run(chatter, "word", 1)
    expected = sorted(["[0] word 0", "[0] word end", "[1] word 0", "[1] word end"])
    assert sorted(first.getvalue().splitlines()) == sorted(second.getvalue().splitlines()) == expected


class Broken(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError("this stream takes nothing")


def test_a_stream_that_fails_silences_its_own_call_only(two: Pool, caplog: pytest.LogCaptureFixture) -> None:
    with redirect_stdout(Broken()):
        two.run(chatter, "lost", 3)
        two.run(chatter, "lost", 3)
    with redirect_stdout(io.StringIO()) as output:
        two.run(chatter, "written", 1)
    assert output.getvalue() == "written 0\nwritten end"
    assert 2 == sum("this stream takes nothing" in record.getMessage() for record in caplog.records)


class TouchingStream(io.StringIO):
    """Makes a file once something has come."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file

    def write(self, text: str) -> int:
        self.file.touch()
        return super().write(text)


def writes_half_a_character(folder: Path, item: int) -> None:
    def wait_for(name: str) -> None:
        while not (folder / name).exists():
            time.sleep(0.01)

    if item == 0:
        os.write(1, b"a\xe2\x82")
        wait_for("2")
        os.write(1, b"\xac\n")
    elif item == 1:
        wait_for("written")
    else:
        (folder / f"{item}").touch()


def test_output_of_a_map_continues_while_other_items_start(two: Pool, tmp_path: Path) -> None:
    with redirect_stdout(TouchingStream(tmp_path / "written")) as output:
        two.map(functools.partial(writes_half_a_character, tmp_path), range(3))

    assert output.getvalue() == "a\N{EURO SIGN}\n"


def prints(count: int) -> None:
    for number in range(count):
        print(f"{number:07} {'x' * 1000}")


def test_the_files_of_a_pool_that_lives_long_do_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_follow, "MOST", 4 << 20)
    monkeypatch.setattr(_follow, "KEPT", 2 << 20)
    with pool(2, group=None, preload=()) as made, redirect_stdout(io.StringIO()) as output:
        followed = made.job.logs(1, follow=True)
        for _ in range(8):
            made.run(prints, 1500)
        texts = [made.job.logs(each) for each in range(2)]
        taken = sum(os.stat(file).st_blocks * 512 for files in made.job._workers.files.values() for file in files)
        made.run(print, "last")
        following = [next(followed) for _ in range(1500)]

    assert taken < 2 * (7 << 20)
    for text in texts:
        first, *lines, end = text.split("\n")
        assert re.fullmatch(r"\[\.\.\. \d+ MB of older output were dropped: .*\]", first)
        assert not end and len(lines) > 2000 and lines[-1].startswith("0001499 x")
        assert all(re.fullmatch(r"\d{7} x{1000}", line) for line in lines)
    assert output.getvalue() == "".join(f"{number:07} {'x' * 1000}\n" for number in range(1500)) * 8 + "last\n"
    assert following[0].startswith("[... ") and all(line[8:] == "x" * 1000 for line in following[1:])


def prints_and_fails() -> None:
    print("printed")
    raise ValueError


def test_replaced_workers_leave_output_only_where_they_died(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def folders() -> int:
        gc.collect()
        return sum(each.name.startswith("torchelastic") for each in tmp_path.iterdir())

    with pool(2) as made:
        for _ in range(3):
            with contextlib.suppress(ChildFailedError):
                made.run(prints_and_fails)
        assert "printed\n" in made.job.logs(1)  # until new ones take their place
        made.run(rank)
        stopped = folders()
        with contextlib.suppress(ChildFailedError):
            made.run(os._exit, 3)
        made.run(rank)
        died = folders()
    del made

    assert (stopped, died, folders()) == (1, 2, 1)


# Interrupts of its end.


def leaves_slowly(folder: str) -> None:
    def leave() -> None:
        Path(folder, f"leaving{rank()}").touch()
        time.sleep(60)

    atexit.register(leave)


def leaves_on_request(folder: str) -> None:
    def leave() -> None:
        Path(folder, f"leaving{rank()}").touch()
        while not Path(folder, "go").exists():
            time.sleep(0.01)
        Path(folder, f"left{rank()}").touch()

    atexit.register(leave)


def interrupt_once(is_time: Callable[[], bool], signum: int = signal.SIGINT) -> threading.Thread:
    def send() -> None:
        wait_until(is_time)
        os.kill(os.getpid(), signum)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


@pytest.mark.parametrize(("signum", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_while_a_pool_closes_is_the_programs_and_leaves_nothing(
    signum: signal.Signals, raised: type[BaseException], tmp_path: Path
) -> None:
    made = pool(2, group=None, preload=())
    workers = made.run(pid).values()
    made.run(leaves_slowly, str(tmp_path))

    def handle(*_: object) -> None:
        raise SystemExit(3)

    former = signal.signal(signal.SIGTERM, handle)
    sender = interrupt_once((tmp_path / "leaving0").exists, signum)
    try:
        with pytest.raises(raised):
            made.close()
    finally:
        signal.signal(signal.SIGTERM, former)
    sender.join()
    assert not any(Path(f"/proc/{each}").exists() for each in workers)
    assert jobs() == []


def test_interrupt_before_workers_are_stopped_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made = pool(2, group=None, preload=())
    workers = made.run(pid).values()
    send, sent = Channel.send, list[object]()

    def interrupted(channel: Channel, message: Message, descriptors: tuple[int, ...] = ()) -> bool:
        if message["op"] == "end" and not sent:
            sent.append(message)
            raise KeyboardInterrupt
        return send(channel, message, descriptors)

    monkeypatch.setattr(Channel, "send", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made.close()
    assert sent
    assert not any(Path(f"/proc/{each}").exists() for each in workers)


def test_an_interrupt_while_a_job_is_stopped_is_raised(tmp_path: Path) -> None:
    def stays(folder: str) -> None:
        signal.signal(signal.SIGTERM, lambda *_: Path(folder, "notified").touch())
        Path(folder, "ready").touch()
        while True:
            time.sleep(1)

    job = elasticlib.elastic_launch(LaunchConfig(nproc_per_node=1, preload=()), stays).start(str(tmp_path))
    wait_until((tmp_path / "ready").exists)
    sender = interrupt_once((tmp_path / "notified").exists)
    with pytest.raises(KeyboardInterrupt):
        job.stop(grace=60.0)
    sender.join()
    assert job.done()


def test_pool_closed_during_a_replacement_begins_no_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = pool(1, group=None, preload=())
    with pytest.raises(ChildFailedError):
        made.run(os._exit, 3)
    former, replaced, errors = PoolWorkers.__init__, threading.Event(), list[BaseException]()

    def begin(crew: PoolWorkers, *args: Any, **settings: Any) -> None:
        former(crew, *args, **settings)
        replaced.set()
        wait_until(lambda: "closed" in repr(made))

    def call() -> None:
        try:
            made.run(Path.touch, tmp_path / "called")
        except PoolError as error:
            errors.append(error)

    monkeypatch.setattr(PoolWorkers, "__init__", begin)
    caller = threading.Thread(target=call)
    caller.start()
    assert replaced.wait(LIMIT)
    made.close()
    caller.join(LIMIT)
    assert len(errors) == 1 and "closed while it replaced its workers" in str(errors[0])
    assert not (tmp_path / "called").exists()
    assert jobs() == []


# Modules that are edited.


OLD, NEW = "def value():\n    return 'old'\n", "def value():\n    return 'the new one'\n"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """A module of the user's, of another name in each test, as programs keep what they have imported."""
    path = tmp_path / f"edited_{request.node.name.removeprefix('test_')}.py"
    path.write_text(OLD)
    monkeypatch.syspath_prepend(tmp_path)
    return path


def test_a_module_that_is_edited_is_the_new_one_in_the_next_call(
    two: Pool, module: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def value_of(name: str) -> tuple[str, int]:
        return importlib.import_module(name).value(), os.getpid()

    first, again = two.run(value_of, module.stem), two.run(value_of, module.stem)
    module.write_text(NEW)
    edited, after = two.run(value_of, module.stem), two.run(value_of, module.stem)

    assert first == again
    assert {value for value, _ in first.values()} == {"old"}
    assert {value for value, _ in edited.values()} == {"the new one"}
    assert edited == after
    assert 1 == sum(f"{module.name} changed on disk since the pool" in each.getMessage() for each in caplog.records)


def imports_and_waits(name: str, folder: Path) -> tuple[str, int]:
    found = importlib.import_module(name).value()
    (folder / f"imported{rank()}").touch()
    while not (folder / "edited").exists():
        time.sleep(0.01)
    return found, os.getpid()


def test_module_edited_in_the_call_that_imports_it_is_new_in_the_next(two: Pool, module: Path, tmp_path: Path) -> None:
    def edit() -> None:
        wait_until(lambda: (tmp_path / "imported0").exists() and (tmp_path / "imported1").exists())
        module.write_text(NEW)
        (tmp_path / "edited").touch()

    editor = threading.Thread(target=edit)
    editor.start()
    during, after, again = (two.run(imports_and_waits, module.stem, tmp_path) for _ in range(3))
    editor.join(LIMIT)

    assert {value for value, _ in during.values()} == {"old"}
    assert {value for value, _ in after.values()} == {"the new one"}
    assert after == again


def test_module_that_one_rank_has_from_before_an_edit_is_new_in_the_next(
    two: Pool, module: Path, tmp_path: Path
) -> None:
    def edits(first: bool) -> str:
        if not first:
            return str(importlib.import_module(module.stem).value())
        if rank() == 1:  # the answer of rank 0 comes first
            while not (tmp_path / "edited").exists():
                time.sleep(0.01)
            return "late"
        found = importlib.import_module(module.stem).value()
        module.write_text(NEW)
        (tmp_path / "edited").touch()
        return str(found)

    first, second = two.run(edits, True), two.run(edits, False)

    assert first == {0: "old", 1: "late"}
    assert second == dict.fromkeys(range(2), "the new one")


def test_a_module_that_a_call_has_reloaded_costs_no_worker(two: Pool, module: Path, tmp_path: Path) -> None:
    def reloads() -> int:
        found = importlib.import_module(module.stem)
        if rank() == 0:
            module.write_text(NEW)
            (tmp_path / "edited").touch()
        while not (tmp_path / "edited").exists():
            time.sleep(0.01)
        importlib.reload(found)
        return os.getpid()

    assert two.run(reloads) == two.run(pid)


# Items whose workers die, or are not fit for more.


class NotRebuilt:
    """Can be pickled, and not be unpickled outside of a worker."""

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return int, ("no number",)


def not_rebuilt_at_three(item: int) -> object:
    return NotRebuilt() if item == 3 else item * item


def test_an_item_that_cannot_be_sent_costs_no_other_item_its_result(two: Pool) -> None:
    processes = two.run(pid)
    lock = threading.Lock()
    found = two.map(repr, [lock, 1, lock, 3, lock], return_exceptions=True)

    assert [found[1], found[3]] == ["1", "3"]
    assert all(isinstance(found[each], PicklingError) for each in (0, 2, 4))
    assert two.map(repr, [lock], return_exceptions=True)[0].__class__ is PicklingError
    with pytest.raises(PicklingError, match="argument 0"):
        two.map(repr, [1, 2, 3, lock, 5])
    assert two.run(pid) == processes


def test_a_result_that_cannot_be_rebuilt_costs_no_other_item_its_result(two: Pool) -> None:
    processes = two.run(pid)
    found = two.map(not_rebuilt_at_three, range(6), return_exceptions=True)

    assert isinstance(found[3], PicklingError)
    assert [*found[:3], *found[4:]] == [0, 1, 4, 16, 25]
    with pytest.raises(PicklingError, match="cannot be rebuilt here"):
        two.map(not_rebuilt_at_three, range(6))
    assert two.run(pid) == processes


def leaves_a_group(item: int) -> tuple[int, int]:
    import datetime

    import torch.distributed as dist

    assert not dist.is_initialized()
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=datetime.timedelta(seconds=20))
    return item, os.getpid()


class WithItemError(Exception):
    """Of a user's own, with a field that others have, too."""

    def __init__(self, item: str) -> None:
        super().__init__(item)
        self.item = item


def raises_with_item(number: int) -> None:
    raise WithItemError("mine")


def test_field_of_a_workers_exception_is_not_the_item_of_a_map() -> None:
    with elasticlib.pool(1, group=None) as pool:
        for call in (lambda: pool.run(raises_with_item, 1), lambda: pool.map(raises_with_item, [1])):
            with pytest.raises(WithItemError) as raised:
                call()
            assert "mine" == raised.value.item


def test_worker_that_an_item_left_unusable_gets_no_more_items(two: Pool) -> None:
    found = two.map(leaves_a_group, range(5))

    assert [item for item, _ in found] == list(range(5))
    assert len({process for _, process in found}) == 5
