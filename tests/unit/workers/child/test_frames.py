"""The frames of an exception as text: no code of the user's runs for it, and nothing large is made."""

from __future__ import annotations

import json
import sys
from typing import Any, ClassVar

import pytest

from elasticlib.workers.child import _report


class Loud:
    def __repr__(self) -> str:
        raise AssertionError("no code of the user's may run")


def caught(**variables: Any) -> list[Any]:
    scope = dict(variables)
    try:
        exec(compile("raise ValueError", "user.py", "exec"), scope)
    except ValueError as error:
        found: list[Any] = json.loads(_report.frames_of(error.__traceback__))
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
def test_builtin_values_show_their_text_and_others_their_class(value: Any, text: str) -> None:
    assert shown(value) == text


def test_large_values_are_cut() -> None:
    assert len(shown("x" * 10**6)) < 300
    assert len(shown(list(range(10**6)))) < 300
    assert len(shown(10**4000)) < 300


class CallRecorder:
    """Records the calls of its methods."""

    calls: ClassVar[list[str]] = []

    def __lt__(self, other: object) -> bool:
        self.calls.append("<")
        return True

    def __eq__(self, other: object) -> bool:
        self.calls.append("==")
        return self is other

    def __hash__(self) -> int:
        self.calls.append("hash")
        return 7

    @property
    def __class__(self) -> Any:
        self.calls.append("class")
        return CallRecorder

    @__class__.setter
    def __class__(self, kind: type) -> None:
        raise AssertionError


@pytest.mark.parametrize("kind", [dict.fromkeys, set, frozenset, list], ids=["dict", "set", "frozenset", "list"])
def test_nobody_asks_what_is_in_a_container(kind: Any) -> None:
    value = kind([CallRecorder() for _ in range(9)])
    CallRecorder.calls.clear()

    assert f"<{__name__}.CallRecorder>" in shown(value)
    assert CallRecorder.calls == []


def test_of_a_large_container_only_what_is_shown_is_looked_at() -> None:
    numbers = dict.fromkeys(range(10**5, 0, -1))

    assert shown(numbers) == "{100000: None, 99999: None, 99998: None, 99997: None, ...}"  # none was sought or sorted
    assert len(shown({*numbers})) < 100
    assert shown(frozenset()) == "frozenset()"
    assert shown(set()) == "set()"
    assert shown({}) == "{}"
    assert shown({1: {2: {3: {4: 5}}}}) == "{1: {2: {3: {...}}}}"
    assert shown(frozenset([frozenset([1])])) == "frozenset({frozenset({1})})"


def test_of_a_number_without_end_there_is_the_size() -> None:
    assert shown(1 << 10**6) == "<int of 1000001 bits>"
    assert shown([1, 1 << 10**6]) == "[1, <int of 1000001 bits>]"
    assert shown(range(1 << 10**6)) == "range(0, <int of 1000001 bits>)"
    assert shown(range(1, 9, 2)) == "range(1, 9, 2)"


def test_a_tensor_has_its_shape() -> None:
    torch = pytest.importorskip("torch")

    assert shown(torch.zeros(3, 4)) == "<Tensor of shape (3, 4), torch.float32, cpu>"
    assert shown(torch.nn.Parameter(torch.zeros(2))) == "<Parameter of shape (2,), torch.float32, cpu>"
    assert shown(torch.float32) == "<torch.dtype>"


def test_an_array_has_its_shape() -> None:
    numpy = pytest.importorskip("numpy")

    assert shown(numpy.zeros((2, 3))) == "<numpy.ndarray of shape (2, 3), float64>"


def test_frames_are_in_order_with_file_line_and_function() -> None:
    def inner() -> None:
        raise KeyError

    try:
        inner()
    except KeyError as error:
        found = json.loads(_report.frames_of(error.__traceback__))

    assert [(frame[0], frame[2]) for frame in found] == [
        (__file__, "test_frames_are_in_order_with_file_line_and_function"),
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
        assert len(json.loads(_report.frames_of(error.__traceback__))) == 60
    assert len(caught(**{f"v{number}": number for number in range(999)})[-1][3]) <= 60


def test_frames_omit_variables_when_time_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter(range(0, 10**6, 1))
    monkeypatch.setattr(_report, "monotonic", lambda: float(next(times)))

    assert caught(value=1)[-1][3] == {}
