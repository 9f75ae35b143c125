"""Callers of all kinds launch: with forks, threads, launches in workers; what they had before they have after."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import resource
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from elasticlib import ChildFailedError, LaunchConfig, elastic_launch
from elasticlib.processes import _reaper
from tests.process import duties
from tests.process.launches import run_python
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.2)]

METHODS = ["forkserver", "spawn", "fork"]
LIMIT = 20.0
"""Seconds that anything waited for may take."""


def config(workers: int = 1, **settings: Any) -> LaunchConfig:
    """A launch without restarts whose fork server imports nothing, so that it starts in milliseconds."""
    return LaunchConfig(nproc_per_node=workers, **{"max_restarts": 0, "preload": (), **settings})


FORKING_CALLER = """
import json, os, sys
from elasticlib import LaunchConfig, elastic_launch
from tests.process import duties

def chain():
    return elastic_launch(LaunchConfig(nproc_per_node=1, preload=()), duties.chain)()[0]

def report(who):
    os.write(1, (json.dumps([who, chain()]) + "\\n").encode())

report("parent")
child = os.fork()
report("child" if child == 0 else "parent beside")
if child:
    os.waitpid(child, 0)
    report("parent after")
    assert "torch" not in sys.modules and "numpy" not in sys.modules
"""


def test_a_forked_child_of_the_caller_launches_by_itself() -> None:
    """Neither end touches the other's fork server, and both are gone when their owners are."""
    done = run_python("-c", FORKING_CALLER)

    assert (0, "") == (done.returncode, done.stderr)
    found = dict(json.loads(line) for line in done.stdout.splitlines())
    assert found["child"]["fork server"] != found["parent"]["fork server"]
    assert {found["parent"]["fork server"]} == {found[f"parent {when}"]["fork server"] for when in ("beside", "after")}
    wait_until(lambda: not any(duties.lives(each[who]) for each in found.values() for who in ("fork server", "reaper")))


LAUNCH_WITHOUT_DESCRIPTORS = """
import os, pathlib, resource, sys, threading
from elasticlib import LaunchConfig, elastic_launch
from elasticlib.errors import PicklingError
from elasticlib.processes import _reaper
from tests.process import duties

begun, go = pathlib.Path(sys.argv[1], "begun"), pathlib.Path(sys.argv[1], "go")
kept = []

def open_all():
    duties.wait_until(begun.exists)
    os.mknod(go.with_name("ready"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    try:
        while True:
            kept.append(os.dup(0))
    except OSError:
        go.with_name("ready").rename(go)

thread = threading.Thread(target=open_all)
thread.start()
try:
    elastic_launch(LaunchConfig(nproc_per_node=2, preload=(), max_restarts=0), duties.waits_for)(begun, go)
except PicklingError as error:
    for number in kept:
        os.close(number)
    kept = error  # with all that its traceback holds, as a notebook does
    print(error)
thread.join()
duties.wait_until(lambda: len(_reaper.descendants(os.getpid())) == 2, seconds=5.0)
print([thread.name for thread in threading.enumerate()])
"""


def test_launch_without_descriptors_names_limit_and_leaves_nothing(tmp_path: Path) -> None:
    """Besides the reaper with the idle fork server."""
    done = run_python("-c", LAUNCH_WITHOUT_DESCRIPTORS, str(tmp_path))

    assert "" == done.stderr
    error, threads = done.stdout.splitlines()
    assert "could not be received: this program has reached its limit of open files: raise the limit" in error
    assert "['MainThread']" == threads


def test_launches_of_several_threads_run_side_by_side(tmp_path: Path) -> None:
    """Each waits for all others to run before it ends."""
    count = 6
    job = elastic_launch(config(), duties.meet)

    with ThreadPoolExecutor(count) as threads:
        results = list(threads.map(lambda mine: job(tmp_path, mine, count), range(count)))

    assert [{0: mine} for mine in range(count)] == results


@pytest.mark.parametrize("preload", [(), ("torch",)], ids=["bare", "torch"])
def test_a_worker_may_launch_workers_of_its_own(preload: tuple[str, ...]) -> None:
    """The inner workers have their own ranks, not those of the outer one, and do not keep torch from its import."""
    results = elastic_launch(config(2, run_id="outer"), duties.launches)(preload)

    inner = {0: ("0", "2", "inner"), 1: ("1", "2", "inner")}
    assert {0: inner, 1: inner} == results


def test_a_launch_from_another_thread_leaves_signal_handlers_alone(tmp_path: Path) -> None:
    def handlers() -> list[Any]:
        return [signal.getsignal(signum) for signum in signal.valid_signals()]

    before = handlers()
    with ThreadPoolExecutor(1) as thread:
        job = thread.submit(elastic_launch(config(), duties.waits_for), tmp_path / "begun", tmp_path / "go")
        wait_until((tmp_path / "begun").exists)
        during = handlers()
        (tmp_path / "go").touch()
        job.result(LIMIT)

    assert before == during == handlers()


def process_wide_state() -> dict[str, Any]:
    """Return the state that a library must not change in its caller."""
    umask = os.umask(0)
    os.umask(umask)
    return {
        "environment": dict(os.environ),
        "handlers": {signum: signal.getsignal(signum) for signum in signal.valid_signals()},
        "blocked": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "folder": os.getcwd(),
        "umask": umask,
        "path": list(sys.path),
        "argv": list(sys.argv),
        "streams": (sys.stdin, sys.stdout, sys.stderr),
        "affinity": os.sched_getaffinity(0),
        "limits": [resource.getrlimit(value) for name, value in vars(resource).items() if name.startswith("RLIMIT_")],
        "start method": multiprocessing.get_start_method(allow_none=True),
        "children": multiprocessing.active_children(),
        "wakeup": signal.set_wakeup_fd(-1),
        "threads": {thread.name for thread in threading.enumerate()},
    }


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("fails", [False, True], ids=["good", "bad"])
def test_a_launch_leaves_the_program_as_it_was(method: str, fails: bool) -> None:
    """Also when its workers fail; the start method of the caller stays unset."""
    before = process_wide_state()

    with pytest.raises(ChildFailedError) if fails else contextlib.nullcontext():
        elastic_launch(config(2, start_method=method), duties.fails if fails else duties.chain)()

    assert None is before["start method"]
    assert before == process_wide_state()


@pytest.mark.parametrize("method", METHODS)
def test_ten_launches_leak_no_descriptor_and_no_process(method: str) -> None:
    """Neither here nor in the fork server; a failed launch now and then leaks none either."""

    good, bad = (elastic_launch(config(start_method=method), duty) for duty in (duties.chain, duties.fails))
    fork_server = good()[0]["fork server"]
    pids = [os.getpid(), *([] if method == "fork" else [fork_server])]

    def resources() -> list[int]:
        """Descriptors of this process and the fork server, and processes below this one."""
        return [*(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids), len(_reaper.descendants(os.getpid()))]

    with pytest.raises(ChildFailedError):
        bad()
    wait_until(lambda: not _reaper.descendants(fork_server))
    before = resources()

    for index in range(10):
        with pytest.raises(ChildFailedError) if index % 5 == 4 else contextlib.nullcontext():
            (bad if index % 5 == 4 else good)()

    # The fork server reaps a spawner, and closes what it held of it, when the launch is already over.
    # What another test left behind in this process may go meanwhile: fewer are no leak.
    wait_until(lambda: all(now <= then for now, then in zip(resources(), before, strict=True)))
