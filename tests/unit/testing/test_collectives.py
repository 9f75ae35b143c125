"""At which collectives ranks are: what a flight recorder holds in short, and what is said of several ranks."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given

from elasticlib.testing.ranks import _collectives
from elasticlib.testing.ranks._collectives import At, Collective
from tests.unit.untrusted import strange, values

SUM = Collective(2, "all_reduce", "float32 [4]")


def entry(number: int, name: str = "gloo:all_reduce", **changes: Any) -> dict[str, Any]:
    return {
        "collective_seq_id": number,
        "profiling_name": name,
        "process_group": ["0", "default_pg"],
        "input_dtypes": ["Float"],
        "input_sizes": [[4, 1]],
        "is_p2p": False,
        "retired": True,
        "time_created_ns": 100,
        **changes,
    }


def summed(*entries: dict[str, Any]) -> Any:
    return _collectives.summary([json.dumps({"entries": entries})], 50, {"0": [0, 1]})


def at(last: int, *pending: Collective, members: tuple[int, ...] = (0, 1, 2), about: str = "default_pg") -> At:
    return At(last, pending, members, about)


def describe(*ranks: At | None) -> list[str]:
    return _collectives.describe({rank: {} if each is None else {"0": each} for rank, each in enumerate(ranks)})


def test_a_rank_reports_its_last_and_pending_collectives_by_group() -> None:
    (group,) = summed(entry(1), entry(2, retired=False))

    assert {"0": at(2, Collective(2, "all_reduce", "float32 [4, 1]"), members=(0, 1))} == _collectives.read([group])


def test_calls_before_the_test_and_between_two_ranks_are_left_out() -> None:
    assert [] == summed(entry(1, time_created_ns=49, retired=False), entry(1, "gloo:send", is_p2p=True, retired=False))


def test_collectives_without_tensors_have_their_name_alone() -> None:
    (group,) = summed(entry(3, "gloo:barrier", input_dtypes=[], input_sizes=[], retired=False))

    assert "barrier" == _collectives.read([group])["0"].pending[0].text()


def test_rank_with_no_or_empty_recorders_reports_nothing() -> None:
    assert [] == _collectives.summary([], 0, {}) == _collectives.summary([b"{}"], 0, {})


def test_different_collectives_are_reported_with_their_ranks() -> None:
    other = Collective(2, "broadcast", "float32 [1]")

    assert describe(at(2, SUM), at(2, other), at(2, SUM)) == [
        "Collective 2 of the default process group differs: all_reduce of float32 [4] on ranks 0, 2, broadcast of "
        "float32 [1] on rank 1."
    ]


def test_different_sizes_are_reported_where_they_must_be_the_same() -> None:
    larger = Collective(2, "all_reduce", "float32 [5]")
    scattered = Collective(2, "scatter", ""), Collective(2, "scatter", "float32 [4], float32 [4]")

    assert (
        "differs: all_reduce of float32 [4] on rank 0, all_reduce of float32 [5] on rank 1."
        in describe(at(2, SUM), at(2, larger))[0]
    )
    assert "differs" not in describe(at(2, scattered[0]), at(2, scattered[1]))[0]


def test_missing_rank_is_reported_with_how_much_it_has_called() -> None:
    assert describe(at(2, SUM), at(1), None) == [
        "In the default process group rank 0 waits in collective 2, all_reduce of float32 [4], which not "
        "all ranks have joined: rank 1 has called 1 so far, and rank 2 has called none so far."
    ]


def test_a_rank_that_is_ahead_waits_for_nobody_that_is_known() -> None:
    assert describe(at(2, SUM), at(5)) == [
        "In the default process group rank 0 waits in collective 2, all_reduce of float32 [4]."
    ]


def test_of_a_group_of_some_ranks_no_other_one_is_missed() -> None:
    assert describe(at(2, SUM, members=(0, 2), about="model"), None, None) == [
        "In the process group 0 (model) rank 0 waits in collective 2, all_reduce of float32 [4], which not "
        "all ranks have joined: rank 2 has called none so far."
    ]


def test_nothing_is_reported_if_no_rank_waits_in_a_collective() -> None:
    assert [] == describe(at(2), None) == describe()


@given(values | strange)
def test_any_report_of_a_rank_can_be_described(content: object) -> None:
    describe(*(_collectives.read(each).get("0") for each in (content, [content])))
