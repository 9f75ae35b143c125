"""The frames of an exception as text: no code of the user's runs for it, and nothing large is made."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import pytest

from elasticlib.workers.child import _frames


class Loud:
    def __repr__(self) -> str:
        raise AssertionError("no code of the user's may run")


def caught(**variables: Any) -> list[Any]:
    scope = dict(variables)
    try:
        exec(compile("raise ValueError", "user.py", "exec"), scope)
    except ValueError as error:
        found: list[Any] = json.loads(_frames.of(error.__traceback__))
        return found
    raise AssertionError


def shown(value: Any) -> str:
    return str(caught(value=value)[-1][3]["value"])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3, "3"),
        (0.5, "0.5"),
        (None, "None"),
        ("x", "'x'"),
        ([1, "a"], "[1, 'a']"),
        ({"a": 1}, "{'a': 1}"),
        (range(3), "range(0, 3)"),
        (Loud(), f"<{Loud.__module__}.Loud>"),
        ([Loud()], f"[<{Loud.__module__}.Loud>]"),
        (Loud, f"<class {Loud.__module__}.Loud>"),
        (sys, "<builtins.module>"),
    ],
)
def test_what_is_pythons_own_has_its_text_and_the_rest_its_class(value: Any, text: str) -> None:
    assert shown(value) == text


def test_large_values_are_cut() -> None:
    assert len(shown("x" * 10**6)) < 300
    assert len(shown(list(range(10**6)))) < 300
    assert len(shown(10**4000)) < 300


def test_a_tensor_has_its_shape() -> None:
    torch = pytest.importorskip("torch")

    assert shown(torch.zeros(3, 4)) == "<Tensor of shape (3, 4), torch.float32, cpu>"
    assert shown(torch.nn.Parameter(torch.zeros(2))) == "<Parameter of shape (2,), torch.float32, cpu>"
    assert shown(torch.float32) == "<torch.dtype>"


def test_an_array_has_its_shape() -> None:
    numpy = pytest.importorskip("numpy")

    assert shown(numpy.zeros((2, 3))) == "<numpy.ndarray of shape (2, 3), float64>"


def test_frames_come_in_order_with_file_line_and_function() -> None:
    def inner() -> None:
        raise KeyError

    try:
        inner()
    except KeyError as error:
        found = json.loads(_frames.of(error.__traceback__))

    assert [(frame[0], frame[2]) for frame in found] == [
        (__file__, "test_frames_come_in_order_with_file_line_and_function"),
        (__file__, "inner"),
    ]


def test_a_deep_stack_and_many_variables_are_bounded() -> None:
    def deep(level: int) -> None:
        if level == 0:
            raise KeyError
        deep(level - 1)

    try:
        deep(500)
    except KeyError as error:
        assert len(json.loads(_frames.of(error.__traceback__))) == 60
    assert len(caught(**{f"v{number}": number for number in range(999)})[-1][3]) <= 60


def test_it_takes_little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter(range(0, 10**6, 1))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(times)))

    assert caught(value=1)[-1][3] == {}
