"""Hypothesis: its engine in pytest's process, each example on all ranks."""

from __future__ import annotations

import pytest

from tests.pytest_plugin.conftest import Run

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.15)]

CODE = """
import os
import pytest, torch, torch.distributed as dist
from hypothesis import assume, event, example, given, note, settings, strategies as st, target

on_ranks = pytest.mark.elastic
numbers = st.integers(0, 100)

def total(x):
    tensor = torch.tensor([float(x)])
    dist.all_reduce(tensor)
    return tensor.item()

def small(x):
    assert x < 17

# The default deadline is left on where it is what is tested: a machine that others use must not fail the rest.
settings.register_profile("few", max_examples=8, deadline=None, database=None)
settings.load_profile("few")

@given(numbers)
@settings(deadline=2000)
def test_deadline_is_without_warm_up(elastic, x):
    elastic(total, x)

@given(numbers)
def test_fixture(elastic, x):
    assert elastic(total, x) == {0: 2.0 * x, 1: 2.0 * x}

@given(numbers)
@settings(max_examples=100)
def test_fixture_fails(elastic, x):
    elastic(small, x)

@on_ranks
@given(x=numbers)
def test_marked(x, rank, group, device, capsys, monkeypatch):
    print(x)
    assert capsys.readouterr().out == f"{x}\\n"
    monkeypatch.setenv("X", "1")
    assert total(x) == 2 * x and os.environ["RANK"] == str(rank)

@on_ranks
@given(x=numbers)
def test_other_fixtures_are_checked(x, rank, tmp_path):
    pass

@on_ranks
@given(x=numbers)
@settings(max_examples=100)
def test_marked_fails(rank, x):
    note(f"noted {x}")
    if rank == 1:
        assert x < 23

@on_ranks
@given(numbers)
def test_context(x):
    assume(x % 2)
    event("odd")
    target(float(x))
    assert x % 2

@on_ranks
@given(st.data())
def test_data(data):
    pass

@on_ranks
class TestMethods:
    @given(x=st.lists(st.integers()))
    def test_method(self, rank, x):
        assert isinstance(x, list) and rank in (0, 1)

@on_ranks
@example(3)
@given(numbers)
def test_example(x):
    assert x != 3

@pytest.mark.elastic(nproc=[1, 2])
@given(x=numbers)
def test_sizes(x, world_size):
    assert dist.get_world_size() == world_size

"""


def test_examples_run_on_all_ranks_and_the_falsifying_one_is_shown(run: Run) -> None:
    result = run(CODE, "-W", "error", plugins=("hypothesispytest",))

    result.assert_outcomes(passed=7, failed=5)
    result.stdout.fnmatch_lines(
        [
            "*_ test_fixture_fails _*",
            ">   @settings(max_examples=100)",
            "*_ ranks 0-1 of 2 _*",
            ">       assert x < 17",
            "E   *ailing test case: test_fixture_fails(",
            "E*x=17,",
            "*_ test_other_fixtures_are_checked _*",
            "*FailedHealthCheck*uses a function-scoped fixture 'tmp_path'*",
            "*_ test_marked_fails _*",
            "*_ rank 1 of 2 _*",
            "rank = 1, x = 23",
            "E   *ailing test case: test_marked_fails(",
            "E*x=23,",
            "noted 23",
            "*_ test_data _*",
            "*a DataObject, cannot be sent to the ranks: *; Hypothesis draws values in pytest*",
            "*_ test_example _*",
            "E   *ailing explicit *: test_example(",
            "E*x=3,",
        ]
    )
