"""Results of tests whose body, fixtures or workers end in an unusual way, not reported as passed."""

from __future__ import annotations

import re

import pytest

from tests.pytest_plugin.conftest import Run

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.5)]

CONFTEST = """
import pytest
import work

patch = pytest.MonkeyPatch()
patch.setattr(work, "PATCHED", "by a conftest")

def pytest_collection_modifyitems(items):
    for item in items:
        if item.name == "test_late_marker":
            item.add_marker(pytest.mark.elastic(nproc=[2, 3]))
"""
CODE = """
import os, pickle, sys, threading, time, warnings
import pytest, torch, torch.distributed as dist
import work
from elasticlib.testing import ElasticTestCase

on_ranks = pytest.mark.elastic

def trains():
    try:
        raise ValueError("the failure")
    finally:
        dist.destroy_process_group()

@on_ranks
def test_destroys_and_fails(): trains()

def test_destroys_and_is_expected(elastic):
    with pytest.raises(ValueError, match="the failure"):
        elastic(trains)

@on_ranks
def test_destroys_and_passes(): dist.destroy_process_group()

@on_ranks
def test_cut_off_file(rank):
    if rank == 1:
        pickle.loads(b"")
    dist.all_reduce(torch.ones(1))

@on_ranks
def test_skips_beside_a_failure(rank):
    if rank == 0:
        pytest.skip("no need")
    pickle.loads(b"")

@pytest.fixture
def called(elastic):
    return elastic(dist.get_rank)

@on_ranks
def test_its_fixture_calls_ranks(called, rank):
    assert called == {0: 0, 1: 1} and dist.get_rank() == rank and "RANK" in os.environ

def test_asks_late(request):
    assert request.getfixturevalue("elastic")(dist.get_world_size) == {0: 2, 1: 2}

@on_ranks
def test_ends_early():
    sys.exit(0)
    assert False

@on_ranks
@pytest.mark.filterwarnings("error")
def test_fails_and_leaves_something():
    os.environ["LEFT"] = "1"
    assert 1 == 2

class ByName(UserWarning):
    def __init__(self, *, name):
        super().__init__(name)

@on_ranks
def test_a_warning_of_its_own(): warnings.warn(ByName(name="a name"))

class TestCase(ElasticTestCase):
    @classmethod
    def setUpClass(cls):
        cls.model, cls.lock = torch.nn.Linear(2, 1), threading.Lock()

    def test_model(self): self.assertEqual(self.model(torch.ones(2)).shape, torch.Size([1]))

    def test_file(self):
        with self.assertRaisesRegex(AttributeError, "the class attribute 'lock', a lock, .* create it in setUp"):
            self.lock

@pytest.fixture
def no_time(monkeypatch):
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)

@on_ranks(timeout=1)
def test_hangs_without_a_clock(no_time, rank):
    if rank == 0:
        time.sleep(1000)

def test_closes_the_pool(elastic):
    with elastic.pool as pool:
        assert pool.run(dist.get_rank) == {0: 0, 1: 1}

def test_late_marker(): pass

@on_ranks
def test_patched_by_a_conftest(): assert work.PATCHED == "by a conftest"

@on_ranks
def test_works(): dist.barrier()
"""
FAILED = {
    "test_destroys_and_fails": "ranks 0-1, line 10: ValueError: the failure",
    "test_cut_off_file": "rank 1, line 27: EOFError: Ran out of input",
    "test_skips_beside_a_failure": "rank 1, line 34: EOFError: Ran out of input",
    "test_ends_early": "ranks 0-1, line 49: SystemExit: 0",
    "test_fails_and_leaves_something": "ranks 0-1, line 56: AssertionError: assert 1 == 2",
    "test_hangs_without_a_clock": "rank 0, line 83: timeout of 1 s: rank 0 at test_it.py:83; rank 1 ended",
    "test_late_marker": "MarkError: elastic marker of test_it.py::test_late_marker: nproc=[2, 3] has several numbers",
}


def test_each_unusual_end_is_reported_as_such(
    run: Run, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    pytester.makeconftest(CONFTEST)
    code = CODE.strip("\n")
    result = run(code, "-rfEp", work="PATCHED = 'not'\n")

    text = result.stdout.str()
    reported = dict(re.findall(r"^(?:FAILED|ERROR) \S+::(\w+) - (?:\S+\._rank_options\.)?(.*)$", text, re.MULTILINE))
    assert FAILED.keys() == reported.keys(), text
    assert [] == [(name, reported[name]) for name, line in FAILED.items() if not reported[name].startswith(line)]
    result.assert_outcomes(failed=6, errors=1, passed=10, warnings=1)
    result.stdout.fnmatch_lines(["DirtyWorkerWarning: *test_fails_and_leaves_something: * LEFT = '1'*"])


SHARED = """
import pytest, torch, torch.distributed as dist

@pytest.mark.elastic(group="shared")
@pytest.mark.parametrize("number", range(2))
def test_even(number): dist.all_reduce(torch.ones(1))

@pytest.mark.elastic(group="shared")
def test_uneven(rank):
    if rank == 0:
        dist.all_reduce(torch.ones(1), async_op=True)

@pytest.mark.elastic(group="shared")
def test_sum(rank):
    total = torch.full((1,), float(rank + 1))
    dist.all_reduce(total)
    assert total == 3
"""


def test_ranks_left_at_different_collectives_are_replaced(run: Run) -> None:
    result = run(SHARED)

    result.assert_outcomes(passed=4, warnings=1)
    result.stdout.fnmatch_lines(
        ["*DirtyWorkerWarning: *test_uneven: rank 0 left the shared process group after 1 collective, and another*"]
    )


BEFORE = """
import os
from elasticlib.testing.ranks import _rank_session

def test_starts(elastic):
    elastic(os.getpid)
    _rank_session._PREPARE_LIMIT = 1.0
"""
SLOW_IMPORT = """
import os, time
import pytest

if "RANK" in os.environ:
    time.sleep(1000)

@pytest.mark.elastic
def test_it(): pass
"""


def test_modules_not_imported_in_time_by_ranks_are_reported_with_line(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_before=BEFORE)

    result = run(SLOW_IMPORT, "test_before.py", "test_it.py")

    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(
        ["E*TimeoutError: The ranks have not imported the tests' modules within 1 s. Their stacks:", "*test_it.py:5*"]
    )
