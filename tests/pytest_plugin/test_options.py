"""Pytest's options, and other plugins beside this one."""

from __future__ import annotations

import os
import select
import sys
from xml.etree import ElementTree

import coverage
import pytest

from tests.pytest_plugin.conftest import Run

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.15)]

OPTIONS = """
import os, sys, time
import pytest, torch.distributed as dist

@pytest.fixture(autouse=True)
def warm(pytestconfig):
    # Their start is no part of a test's time, which begins with its fixtures.
    ranks = pytestconfig.pluginmanager.get_plugin("elasticlib-ranks").ranks
    assert [pool.job.status().state for pool in ranks._pools.values()] == ["running"]

@pytest.mark.elastic
def test_a(rank):
    print("live from", rank)
    print("err from", rank, file=sys.stderr)

@pytest.mark.elastic
def test_fails(rank):
    assert not rank

@pytest.mark.elastic
def test_c(rank):
    print("after the failure")
"""


def test_live_output_first_failure_and_last_failed(run: Run, pytester: pytest.Pytester) -> None:
    result = run(OPTIONS, "-x", "-s")

    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines_random(["*live from 0", "*stopping after 1 failures*"])
    assert "live from 1" not in result.stdout.str() and "after the failure" not in result.stdout.str()
    assert "err from 0" in result.stdout.str() + result.stderr.str()

    result = run(OPTIONS, "--lf", "--durations=0", "-vv", "--junitxml=it.xml")

    result.assert_outcomes(failed=1)
    assert next(ElementTree.parse(pytester.path / "it.xml").iter("testcase")).get("name") == "test_fails"
    result.stdout.fnmatch_lines(["*s call *test_fails"])


BESIDE = """
import os, time
import pytest, torch.distributed as dist
import work

@pytest.fixture(scope="session", autouse=True)
def write_pids():
    yield
    with open(f"workers-{os.environ.get('PYTEST_XDIST_WORKER', 'main')}", "w") as file:
        file.write(" ".join(map(str, sorted(seen))))

seen = set()

def pid():
    return os.getpid()

@pytest.fixture
def pids(elastic):
    seen.update(elastic(pid).values())

@pytest.mark.parametrize("number", range(2))
def test_branch(elastic, number, pids):
    assert elastic(work.branch) == {0: 0, 1: 1}

@pytest.mark.elastic
def test_loop(rank):
    assert work.loop(3) == 3

@pytest.mark.elastic
def test_fails_after_work(rank):
    print("said by", rank)
    assert work.failing(rank) == {"a": 1}

@pytest.mark.elastic
def test_helper_thread(rank):
    assert work.helper_thread() == [1]
"""
WORK = """
import os
import threading

def branch():
    if os.environ["RANK"] == "0":
        value = 0
    else:
        value = 1
    return value

def loop(number):
    total = 0
    for _ in range(number):
        total += 1
    return total

def failing(rank):
    found = {"a": rank + 1}
    return found

def helper_thread():
    found = []
    def run():
        found.append(1)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found

def never():
    return 1
"""
COVERED = "work.py *25 *1 *4 *0 *97% *31"


def _count_ended(pytester: pytest.Pytester) -> int:
    """Return the number of reported rank processes, and check that all of them have ended."""
    pids = [int(pid) for file in pytester.path.glob("workers-*") for pid in file.read_text().split()]
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
    return len(pids)


def test_xdist_has_the_same_reports_and_coverage_is_whole(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]")
    args = ("-n", "2", "--cov=work", "--cov-branch", "--cov-report=term-missing", "-p", "no:cacheprovider")

    result = run(BESIDE, *args, plugins=("xdist", "pytest_cov", "randomly"), work=WORK)

    result.assert_outcomes(passed=4, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*_ rank 1 of 2 _*",
            "E*assert {'a': 2} == {'a': 1}",
            "*Captured stdout call of rank 0 -*",
            "said by 0",
            "*Captured output of rank 1*",
            "said by 1",
            COVERED,
            "FAILED *test_fails_after_work - rank 1, line *: AssertionError: *",
        ]
    )
    assert _count_ended(pytester) in (2, 4)


def test_coverage_run_measures_the_ranks(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]")
    pytester.makepyfile(work=WORK)
    pytester.path.joinpath(".coveragerc").write_text("[run]\nbranch = True\ninclude = work.py\n")
    run("", "--version")  # its environment
    pytester.makepyfile(test_it=BESIDE)

    result = pytester.run(
        sys.executable, "-m", "coverage", "run", "-m", "pytest", "-p", "elasticlib.testing.pytest_plugin"
    )
    report = pytester.run(sys.executable, "-m", "coverage", "report", "-m")

    result.assert_outcomes(passed=4, failed=1)
    report.stdout.fnmatch_lines([COVERED])


COROUTINES = """
import asyncio
import pytest, torch.distributed as dist

@pytest.mark.elastic
async def test_marked(rank):
    await asyncio.sleep(0)
    dist.barrier()

@pytest.mark.asyncio
@pytest.mark.elastic
async def test_marked_by_both(rank):
    await asyncio.sleep(0)
    assert rank == 0

async def coroutine():
    await asyncio.sleep(0)
    return dist.get_rank()

async def test_fixture(elastic):
    await asyncio.sleep(0)
    assert elastic(coroutine) == {0: 0, 1: 1}
"""


def test_coroutines_run_on_ranks_beside_pytest_asyncio(run: Run) -> None:
    result = run(COROUTINES, "-o", "asyncio_mode=auto", plugins=("asyncio",))

    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(
        ["*_ rank 1 of 2*", ">       assert rank == 0", "FAILED *test_marked_by_both - rank 1*"]
    )
    assert "base_events" not in result.stdout.str()


LATE = """
import os, time
import pytest, torch.distributed as dist

def write_pid(rank):
    with open(f"workers-{rank}", "w") as file:
        file.write(str(os.getpid()))

@pytest.mark.timeout(1)
@pytest.mark.elastic
def test_late(rank):
    write_pid(rank)
    if rank == 0:
        dist.barrier()
    time.sleep(1000)

@pytest.mark.elastic
def test_next(rank):
    assert dist.get_world_size() == 2
"""


@pytest.mark.parametrize("method", ["signal", "thread"])
def test_a_limit_of_pytest_timeout_leaves_no_rank(run: Run, pytester: pytest.Pytester, method: str) -> None:
    result = run(LATE, f"--timeout-method={method}", plugins=("timeout",))

    if method == "signal":
        result.assert_outcomes(passed=1, failed=1)
        result.stdout.fnmatch_lines(["*Failed: Timeout*"])
    else:  # which ends pytest's process by itself
        assert result.ret != 0
        (result.stdout.fnmatch_lines if "Timeout" in result.stdout.str() else result.stderr.fnmatch_lines)("*Timeout*")
    deadline_is_in_the_ranks = [int(file.read_text()) for file in pytester.path.glob("workers-*")]
    assert len(deadline_is_in_the_ranks) == 2
    for pid in deadline_is_in_the_ranks:
        _wait_for_end(pid)


def _wait_for_end(pid: int) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([descriptor], [], [], 30)[0], f"{pid} is left"
    finally:
        os.close(descriptor)


def test_coverage_knows_which_test_ran_a_line_in_a_rank(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]")

    result = run(BESIDE, "--cov=work", "--cov-context=test", plugins=("pytest_cov",), work=WORK)
    found = coverage.CoverageData(str(pytester.path / ".coverage"))
    found.read()

    result.assert_outcomes(passed=4, failed=1)
    (file,) = found.measured_files()
    of_loop = 1 + WORK.lstrip()[: WORK.lstrip().index("total += 1")].count("\n")
    assert ["test_it.py::test_loop|run"] == found.contexts_by_lineno(file)[of_loop]
