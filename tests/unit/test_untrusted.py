"""Untrusted input: it is read without harm, and its refusals are logged at a limited rate."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from elasticlib import _untrusted
from elasticlib._untrusted import Refusals
from tests.unit.untrusted import strange, values

READERS = (_untrusted.whole, _untrusted.seconds, _untrusted.line, _untrusted.lines, _untrusted.name)


@given(strange)
def test_bytes_are_json_or_refused(data: bytes) -> None:
    try:
        _untrusted.parse(data)
    except ValueError as error:
        assert len(str(error)) < 200


@given(values | st.sampled_from([float("nan"), float("inf"), [[[]]]]), st.sampled_from(READERS))
def test_reader_accepts_its_own_output_unchanged(value: Any, read: Any) -> None:
    try:
        taken = read(value)
    except ValueError as error:
        assert len(str(error)) < 200
        return
    assert taken == read(taken)
    assert str(taken) == str(taken).encode().decode()


def test_a_value_nested_without_end_can_be_spoken_of() -> None:
    value: Any = []
    for _ in range(20_000):
        value = [value]
    try:
        assert _untrusted.shown(value)
    finally:
        while value:  # else its end is as deep as it is
            value = value[0]


@given(st.text(st.characters()))
def test_own_text_becomes_a_valid_name(text: str) -> None:
    assert _untrusted.name(_untrusted.as_name(text))


def refused(times: list[float], kind: str = "report") -> list[str | None]:
    refusals, lines = Refusals(most=2, span=60.0), []
    for now in times:
        refusals, line = refusals.refuse(kind, "why", now)
        lines.append(line)
    return lines


def test_first_refusals_are_logged_and_the_rest_are_counted() -> None:
    more = "why (2 more messages of this kind were rejected before)"

    assert ["why", "why", None, None, more, "why", None] == refused([0.0, 0.0, 1.0, 59.9, 60.0, 61.0, 62.0])


def test_occasional_refusals_are_all_logged() -> None:
    assert ["why"] * 4 == refused([0.0, 60.0, 120.0, 1000.0])


def test_many_refusals_of_one_kind_hide_none_of_another() -> None:
    refusals = Refusals(most=1)
    for _ in range(3):
        refusals, _ = refusals.refuse("report", "why", 0.0)

    assert "other" == refusals.refuse("beat", "other", 0.0)[1]


@pytest.mark.parametrize("count", [10, 1000])
def test_memory_of_refusals_does_not_grow(count: int) -> None:
    refusals = Refusals()
    for number in range(count):
        refusals, _ = refusals.refuse("report", str(number), float(number))

    assert 1 == len(refusals._spans)
