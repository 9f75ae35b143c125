"""Options of a test for its ranks."""

from __future__ import annotations

from typing import Any

import pytest

from elasticlib.testing.ranks._rank_options import MarkError, RankOptions, checked_options, sizes

WHERE = "elastic marker of test_x.py::test_it"


def test_options_stand_over_the_defaults() -> None:
    found = checked_options(WHERE, RankOptions(nproc=4, timeout=10.0), {"group": "shared", "timeout": 3})

    assert RankOptions(nproc=4, timeout=3, group="shared") == found


def test_a_back_end_of_gpus_means_that_device() -> None:
    assert "cuda" == checked_options(WHERE, RankOptions(), {"backend": "nccl"}).device
    assert "cuda" == checked_options(WHERE, RankOptions(), {"backend": "cpu:gloo,cuda:nccl"}).device


def test_back_ends_that_the_program_has_registered_are_known() -> None:
    assert "mine" == checked_options(WHERE, RankOptions(), {"backend": "mine"}, ["undefined", "gloo", "mine"]).backend


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nproc": 0}, "nproc=0 must be 1 or more ranks"),
        ({"nproc": True}, "nproc=True must be 1 or more ranks"),
        ({"nproc": "2"}, "nproc='2' must be 1 or more ranks"),
        ({"backend": "glo"}, "backend='glo' is unknown: the backends are gloo, nccl"),
        ({"backend": None}, "backend=None is unknown"),
        ({"group": "own"}, "group='own' must be 'fresh', 'shared' or None"),
        ({"timeout": 0}, "timeout=0 must be a number of seconds above 0"),
        ({"timeout": float("nan")}, "timeout=nan must be a number of seconds above 0"),
        ({"device": "gpu"}, "device='gpu' must be 'cpu' or 'cuda'"),
        ({"backend": "nccl", "device": "cpu"}, "device='cpu' cannot be used with backend='nccl'"),
        ({"threads": True}, "threads=True is unknown: options are nproc, backend, timeout"),
        ({"ranks": 2}, "ranks=2 is unknown: options are nproc, backend, timeout"),
    ],
)
def test_refusal_of_an_invalid_option_names_the_test_and_the_value(options: dict[str, Any], message: str) -> None:
    with pytest.raises(MarkError) as info:
        checked_options(WHERE, RankOptions(), options)

    assert str(info.value).startswith(f"{WHERE}: {message}")


def test_an_option_without_a_name_is_refused() -> None:
    with pytest.raises(MarkError, match="2 must be a keyword argument: write nproc=2"):
        checked_options(WHERE, RankOptions(), {}, args=[2])


def test_numbers_of_ranks_are_one_or_a_list() -> None:
    assert (2,) == sizes(WHERE, 2)
    assert (1, 2, 4) == sizes(WHERE, [1, 2, 4])


@pytest.mark.parametrize("value", [[], [1, 1], [0], ["1"], None, 1.5])
def test_numbers_that_cannot_be_are_refused(value: object) -> None:
    with pytest.raises(MarkError, match="nproc="):
        sizes(WHERE, value)
