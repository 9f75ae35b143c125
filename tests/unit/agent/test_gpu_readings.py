"""When GPU memory counts as free, and which GPUs count."""

from __future__ import annotations

import pytest

from elasticlib.agent._gpu_memory import TOLERANCE, used_beyond, visible

MIB = 2**20


def test_memory_is_free_if_no_gpu_holds_more_than_the_tolerance() -> None:
    before = {"GPU 0": 10 * MIB, "GPU 1": 0}

    assert {} == used_beyond(before, {"GPU 0": 10 * MIB + TOLERANCE, "GPU 1": 0})
    assert {"GPU 0": TOLERANCE + 1} == used_beyond(before, {"GPU 0": 10 * MIB + TOLERANCE + 1, "GPU 1": TOLERANCE})


def test_a_gpu_that_cannot_be_read_now_or_before_is_not_waited_for() -> None:
    assert {} == used_beyond({"GPU 0": 0, "GPU 1": 0}, {"GPU 1": 0, "GPU 2": 2 * TOLERANCE})


def test_memory_freed_by_others_meanwhile_causes_no_wait() -> None:
    assert {} == used_beyond({"GPU 0": 8 * TOLERANCE}, {"GPU 0": 0})


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        (None, [0, 1, 2]),
        ("0,1,2", [0, 1, 2]),
        (" 2 , 0 ", [0, 2]),
        ("1,1", [1]),
        ("GPU-bb", [1]),
        ("GPU-cc,0", [0, 2]),
        ("", []),
        ("-1", []),
        ("1,-1,2", [1]),
        ("3,0", []),
        ("0,NoDevFiles,1", [0]),
        ("GPU-", []),  # it could be any
        ("MIG-aa,1", []),
        ("²,1", []),
        ("0,,1", [0]),
    ],
)
def test_visible_are_the_gpus_that_cuda_would_show(listed: str | None, expected: list[int]) -> None:
    """As its documentation has it: entries after one that cannot be are not seen."""
    assert expected == visible(listed, ["GPU-aa", "GPU-bb", "GPU-cc"])
