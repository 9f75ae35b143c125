"""A test's body on every rank, and functions that a test calls on ranks."""

from __future__ import annotations

import pytest

from tests.pytest_plugin.conftest import Run

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.15)]

IMPORTS = """
import os
import pytest, torch, torch.distributed as dist
"""


def test_a_marked_test_runs_on_every_rank_in_a_group_of_each_size(run: Run) -> None:
    result = run(
        IMPORTS
        + """
@pytest.fixture
def offset():
    return os.getpid(), 10.0

@pytest.mark.elastic(nproc=[1, 2])
def test_sum(rank, world_size, device, group, offset, tmp_path):
    parent, value = offset
    assert os.getpid() != parent                    # fixtures are made once, in pytest's process
    assert device == torch.device("cpu") and group is dist.group.WORLD
    assert (dist.get_rank(), dist.get_world_size()) == (rank, world_size)
    total = torch.tensor([rank + value])
    dist.all_reduce(total)
    assert total.item() == sum(range(world_size)) + value * world_size
    (tmp_path / str(rank)).touch()
    dist.barrier()
    assert len(list(tmp_path.iterdir())) == world_size

class TestClass:
    @pytest.fixture(autouse=True)
    def begin(self):
        self.value = 3

    @pytest.mark.elastic
    @pytest.mark.parametrize("plus", [1, 2])
    def test_method(self, rank, plus):
        assert self.value + plus in (4, 5)

@pytest.mark.elastic(group=None)
def test_its_own_group():
    assert not dist.is_initialized()
    dist.init_process_group("gloo")
    dist.barrier()
    dist.destroy_process_group()

@pytest.mark.elastic
async def test_coroutine(rank):
    assert rank in (0, 1)
""",
        "-v",
    )

    result.assert_outcomes(passed=6)
    result.stdout.fnmatch_lines(["*test_sum?nproc=1? PASSED*", "*test_sum?nproc=2? PASSED*"])


def test_the_fixture_returns_what_each_rank_does_and_raises_what_it_raised(run: Run) -> None:
    result = run(
        IMPORTS
        + """
import socket

class Own(ValueError):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")

def mean(value):
    total = torch.tensor([value * dist.get_rank()])
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()

def fails(rank):
    if dist.get_rank() == rank:
        raise Own("one", "two")
    dist.barrier()

def test_results(elastic):
    assert elastic(mean, 2.0) == {0: 1.0, 1: 1.0}
    assert elastic(mean, 2.0, nproc=3).rank(0) == 2.0
    assert elastic(lambda: os.environ["WORLD_SIZE"], group=None) == {0: "2", 1: "2"}
    assert elastic.pool.run(mean, 4.0) == {0: 2.0, 1: 2.0}

def test_raises(elastic):
    with pytest.raises(ValueError, match="one and two") as info:
        elastic(fails, 1)
    assert info.value.failures.keys() >= {1}
    assert type(info.value.failures[1]).__name__ == "Own"
    assert any(isinstance(each, ValueError) for each in info.value.exceptions)
    assert elastic(mean, 2.0) == {0: 1.0, 1: 1.0}      # and the ranks serve the next call

def spawned(rank, port, plus):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    return mean(2.0) + plus

def test_spawn(elastic):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert elastic.spawn(spawned, 2, (port, 1)) == {0: 2.0, 1: 2.0}
    assert elastic.spawn(spawned, nprocs=2, args=(port, 2)) == {0: 3.0, 1: 3.0}
    with pytest.raises(ZeroDivisionError):
        elastic.spawn(lambda rank: 1 / (rank - 1), 2)
""",
        "-W",
        "error",
    )

    result.assert_outcomes(passed=3)


def test_a_failure_reads_like_pytests_own(run: Run) -> None:
    result = run(
        IMPORTS
        + """
@pytest.mark.elastic(nproc=4)
def test_diff(rank):
    print("rank", rank, "was here")
    values = [1, 2, 3]
    assert values == [1, 2, 5 if rank else 4]

def function():
    dist.barrier()
    assert {"a": 1} == {"a": dist.get_rank() + 1}

def test_called(elastic):
    elastic(function)
""",
    )

    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(
        [
            "*_ ranks 1-3 of 4 _*",
            ">       assert values == ?1, 2, 5 if rank else 4?",
            "E*At index 2 diff: 3 != 5",
            "*_ rank 0 of 4 _*",
            "E*At index 2 diff: 3 != 4",
            "test_it.py:*: AssertionError",
            "*Captured stdout call of rank 0 -*",
            "rank 0 was here",
            "*Captured output of rank 1*",
            "rank 1 was here",
            ">       elastic(function)",
            "E       elasticlib.testing.RanksFailed: 1 of 2 ranks failed",
            "*_ rank 1 of 2 _*",
            "E       AssertionError: assert {'a': 1} == {'a': 2}",
            "FAILED *test_diff - rank 0, line *: AssertionError: assert*",
            "FAILED *test_called - rank 1, line *: AssertionError: assert*",
        ],
        consecutive=False,
    )


def test_a_hang_ends_at_its_limit_with_every_ranks_place(run: Run) -> None:
    result = run(
        IMPORTS
        + """
import time

def sleeps():
    time.sleep(1000)

@pytest.mark.elastic(nproc=3, timeout=1)
def test_hang(rank):
    if rank == 1:
        sleeps()
    dist.all_reduce(torch.ones(1))

@pytest.mark.elastic(nproc=3, timeout=20)
def test_next():
    dist.all_reduce(torch.ones(1))
""",
    )

    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "The ranks have not ended within 1 s. They were at:",
            "ranks 0, 2: test_it.py:* in the collective all_reduce",
            "rank 1: test_it.py:*",
            "*test_it.py:* in sleeps",
            "*test_it.py:* in test_hang",
        ],
        consecutive=False,
    )


def test_fixtures_and_calls_that_ranks_cannot_have_are_refused_by_name(run: Run) -> None:
    result = run(
        IMPORTS
        + """
import threading

@pytest.fixture
def lock():
    return threading.Lock()

@pytest.fixture
def uses_rank(rank):
    return rank

@pytest.mark.elastic
def test_lock(lock):
    pass

@pytest.mark.elastic
def test_rank_in_a_fixture(uses_rank):
    pass

def test_no_mark(rank):
    pass

def test_bad_call(elastic):
    with pytest.raises(ValueError, match="nproc=0 must be 1 or more"):
        elastic(print, nproc=0)
""",
    )

    result.assert_outcomes(passed=1, failed=1, errors=2)
    result.stdout.fnmatch_lines(
        [
            "*uses the fixture 'rank', which exists only on ranks*",
            "*fixture 'rank' of *test_no_mark exists only on a rank: mark the test*",
            "*fixture or argument 'lock' of *test_lock, a lock, cannot be sent to the ranks: TypeError: cannot pickle*",
        ],
        consecutive=False,
    )


@pytest.mark.parametrize(
    ("marker", "message"),
    [
        ("nproc=0", "*nproc=0 must be 1 or more ranks*"),
        ("backend='glo'", "*backend='glo' is unknown: the backends are gloo, nccl*"),
        ("ranks=2", "*ranks=2 is unknown: options are nproc, backend*"),
    ],
)
def test_a_mark_that_cannot_be_is_an_error_of_the_collection(run: Run, marker: str, message: str) -> None:
    result = run(f"import pytest\n@pytest.mark.elastic({marker})\ndef test_it(): pass\n")

    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines([f"*elastic marker of test_it.py::test_it: {message}"])


def test_modes_that_fixtures_set_hold_in_the_ranks_for_the_test(run: Run) -> None:
    result = run(
        IMPORTS
        + """
@pytest.fixture
def double():
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    yield
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)

@pytest.mark.elastic
def test_double(double):
    assert torch.ones(1).dtype == torch.float64
    assert torch.are_deterministic_algorithms_enabled()

@pytest.mark.elastic
def test_single():
    assert torch.ones(1).dtype == torch.float32
    assert not torch.are_deterministic_algorithms_enabled()
""",
        "-W",
        "error",
    )

    result.assert_outcomes(passed=2)


def test_explanations_have_no_colours_where_the_report_has_none(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PY_COLORS", "1")  # the kernel of a notebook has FORCE_COLOR, of the same effect
    result = run("import pytest\n@pytest.mark.elastic\ndef test_it(): assert [1, 2] == [1, 3]\n", "--color=no")

    result.stdout.fnmatch_lines(["E*At index 1 diff: 2 != 3"])
