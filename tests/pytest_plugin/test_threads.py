"""Ranks that are threads of one process."""

from __future__ import annotations

import pytest

from tests.pytest_plugin.conftest import Run

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.15)]

IMPORTS = """
import os, threading, time
import pytest, torch, torch.distributed as dist

threads = pytest.mark.elastic(threads=True, nproc=2)
"""


def test_collectives_and_what_is_built_on_them_work_between_threads(run: Run) -> None:
    result = run(
        IMPORTS
        + """
@pytest.mark.elastic(threads=True, nproc=[2, 4])
def test_collectives(rank, world_size, device, group):
    assert threading.current_thread() is not threading.main_thread() and device.type == "cpu"
    assert (dist.get_rank(), dist.get_world_size()) == (rank, world_size) and group is dist.group.WORLD
    ranks = list(range(world_size))
    mine = torch.full((1,), float(rank))

    total = mine.clone()
    dist.all_reduce(total)
    assert total.item() == sum(ranks)
    largest = mine.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    assert largest.item() == world_size - 1
    everyone = [torch.zeros(1) for _ in ranks]
    dist.all_gather(everyone, mine)
    assert [each.item() for each in everyone] == ranks
    of_last = mine.clone()
    dist.broadcast(of_last, src=world_size - 1)
    assert of_last.item() == world_size - 1
    part = torch.zeros(1)
    dist.reduce_scatter(part, [torch.full((1,), float(each)) for each in ranks])
    assert part.item() == rank * world_size
    dist.scatter(part, [torch.full((1,), float(each)) for each in ranks] if rank == 0 else None, src=0)
    assert part.item() == rank
    received = [torch.zeros(1) for _ in ranks]
    dist.all_to_all(received, [mine] * world_size)
    assert [each.item() for each in received] == ranks
    objects = [None] * world_size
    dist.all_gather_object(objects, {"rank": rank})
    assert [each["rank"] for each in objects] == ranks
    dist.barrier()
    pair = dist.new_group([0, 1])
    if rank < 2:
        dist.all_reduce(mine, group=pair)
        assert mine.item() == 1

@threads
def test_data_parallel(rank):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    model(torch.full((1, 2), float(rank))).sum().backward()
    assert model.module.weight.grad.tolist() == [[0.5, 0.5]]

@threads
def test_all_ranks_are_in_one_process(rank):
    numbers = [None, None]
    dist.all_gather_object(numbers, os.getpid())
    assert len(set(numbers)) == 1

@threads
def test_output_is_that_of_all(rank, capsys):
    print("rank", rank)
    dist.barrier()
    if rank == 0:
        assert sorted(capsys.readouterr().out.split()) == ["0", "1", "rank", "rank"]
""",
    )

    result.assert_outcomes(passed=5)


def test_a_rank_that_stops_ends_the_others_which_are_told_in_a_line(run: Run) -> None:
    result = run(
        IMPORTS
        + """
@threads
def test_fails(rank):
    if rank == 1:
        raise ValueError("the root cause")
    dist.all_reduce(torch.ones(1))

@threads
def test_waits_elsewhere(rank):
    assert rank == 0
    time.sleep(1000)

@threads
def test_skips(rank):
    if rank == 1:
        pytest.skip("rank 1 has no data")
    dist.barrier()

@pytest.mark.elastic(threads=True, nproc=3, timeout=1)
def test_hangs(rank):
    if rank == 2:
        dist.barrier()
    elif rank == 1:
        time.sleep(1000)

@threads
def test_next(rank):
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2
""",
        "-rsf",
    )

    result.assert_outcomes(passed=1, failed=3, skipped=1)
    result.stdout.fnmatch_lines(
        [
            "rank 0: ended in a collective, as another rank had stopped",
            "*_ rank 1 of 2 *",
            "E *ValueError: the root cause",
            "rank 0: did not end after that: it was at *test_it.py:* in test_waits_elsewhere",
            "The ranks have not ended within 1 s; rank 0 ended. They were at:",
            "rank 1: test_it.py:*",
            "rank 2: test_it.py:* in the collective barrier",
            "SKIPPED*rank 1: rank 1 has no data",
            "FAILED *test_fails - rank 1, line *: ValueError: the root cause",
            "FAILED *test_hangs - *timeout of 1 s*",
        ],
        consecutive=False,
    )
    assert "DirtyWorkerWarning" not in result.stdout.str()


@pytest.mark.parametrize("option", ["backend='gloo'", "group='shared'", "device='cpu'", "nproc=65"])
def test_what_threads_cannot_have_is_refused(run: Run, option: str) -> None:
    result = run(f"import pytest\n@pytest.mark.elastic(threads=True, {option})\ndef test_it(): pass\n")

    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*elastic marker of test_it.py::test_it: *threads=True*"])
