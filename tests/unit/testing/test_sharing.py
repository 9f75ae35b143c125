"""Which GPUs the processes of pytest-xdist have."""

from __future__ import annotations

from hypothesis import given, strategies as st

from elasticlib.testing.ranks._process_shares import ProcessShare, place, share


@given(st.integers(0, 16), st.integers(1, 8), st.integers(1, 8))
def test_processes_that_take_no_turns_never_have_the_same_gpu(gpus: int, nproc: int, processes: int) -> None:
    shares = [share(gpus, nproc, process, processes) for process in range(processes)]

    own = [gpu for each in shares if not each.takes_turns for gpu in each.gpus]
    assert len(set(own)) == len(own)
    assert {each.takes_turns for each in shares} in ({True}, {False})
    assert all(len(each.gpus) >= min(nproc, gpus) for each in shares)


def test_one_process_has_them_all_and_waits_for_nobody() -> None:
    assert ProcessShare((0, 1, 2, 3), False) == share(4, 2)


def test_each_process_has_its_own_gpus_if_there_are_enough() -> None:
    assert ProcessShare((2, 3), False) == share(4, 2, 1, 2)


def test_all_processes_take_turns_if_there_are_too_few_gpus() -> None:
    assert ProcessShare((0, 1), True) == share(2, 2, 1, 2)


def test_place_is_read_from_the_xdist_variables() -> None:
    assert (1, 4) == place({"PYTEST_XDIST_WORKER": "gw1", "PYTEST_XDIST_WORKER_COUNT": "4"})
    assert (0, 1) == place({})
    assert (0, 1) == place({"PYTEST_XDIST_WORKER": "master", "PYTEST_XDIST_WORKER_COUNT": "x"})
