"""Results: a dictionary by rank, as torch's, that also knows where its values come from."""

from __future__ import annotations

import copy
import json
import pickle

import pytest

from elasticlib import Place, Results


def results() -> Results:
    return Results({0: 0.5, 1: 0.25}, {0: Place(0, "a", 2, 1), 1: Place(1, "b", 2, 1)})


def test_they_are_a_dictionary() -> None:
    assert results() == {0: 0.5, 1: 0.25}
    assert json.dumps(results()) == '{"0": 0.5, "1": 0.25}'
    assert repr(results()) == "{0: 0.5, 1: 0.25}"


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_a_copy_knows_the_places_too(again: object) -> None:
    found = again(results())  # type: ignore[operator]

    assert (found, found.places) == (results(), results().places)


def test_result_of_a_rank_is_looked_up_by_number() -> None:
    assert results().rank(1) == 0.25
    with pytest.raises(KeyError, match=r"rank 2 has no result on this node \(results here: ranks 0-1\)"):
        results().rank(2)


def test_metrics_have_a_column_each() -> None:
    found = Results({0: {"loss": 0.123456789, "<b>": 1}, 1: {"loss": 0.5, "<b>": 2}})._repr_html_()

    assert "<th>rank</th><th>loss</th><th>&lt;b&gt;</th>" in found
    assert "<td>0.123457</td>" in found


@pytest.mark.parametrize("values", [{0: {"loss": 1}, 1: {"acc": 1}}, {0: {"loss": 1}, 1: None}, {0: {}}, {0: {1: 2}}])
def test_other_values_have_one_column(values: dict[int, object]) -> None:
    assert "<th>rank</th><th>result</th>" in Results(values)._repr_html_()


def test_hosts_are_shown_where_there_are_several() -> None:
    assert "<th>node</th><th>host</th>" in results()._repr_html_()
    assert "host" not in Results({0: 1}, {0: Place(0, "a", 0, 0)})._repr_html_()


def test_long_value_is_cut_and_unprintable_one_names_its_error() -> None:
    class Bad:
        def __repr__(self) -> str:
            raise ValueError

    found = Results({0: "x" * 999, 1: Bad(), 2: "<script>"} | dict.fromkeys(range(3, 99), 1))._repr_html_()

    assert "x" * 300 not in found
    assert "&lt;Bad, whose repr raises ValueError&gt;" in found
    assert "<script>" not in found
    assert "35 more ranks" in found
