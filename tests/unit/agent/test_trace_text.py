"""The text of a traceback, as it is told by threads of ours."""

from __future__ import annotations

import ast
import traceback
from typing import Any

import pytest

from elasticlib.agent._trace_text import trace_of


def chained() -> None:
    try:
        [1, 2][int("2")]
    except IndexError as error:
        raise ValueError("a cause") from error


def test_a_trace_is_pythons_without_its_markers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those need the line parsed, which CPython 3.11 cannot do in two threads at once."""
    with pytest.raises(ValueError) as caught:
        chained()
    error = caught.value
    pythons = "".join(traceback.format_exception(error))
    plain = [line for line in pythons.splitlines() if not line.strip() or set(line.strip()) - {"^", "~"}]

    def parsed(*_: Any, **__: Any) -> None:
        raise SystemError("AST constructor recursion depth mismatch")

    with monkeypatch.context() as patch:
        patch.setattr(ast, "parse", parsed)
        text = trace_of(error)
    assert text.splitlines() == plain


def test_parts_of_a_group_have_no_markers_either() -> None:
    group: Any = getattr(__import__("builtins"), "ExceptionGroup", None)
    if group is None:
        pytest.skip("this Python has no exception groups")

    def fails(number: int) -> float:
        return 1 / number + len(str(number))

    try:
        fails(0)
    except ZeroDivisionError as error:
        part = error
    text = trace_of(group("several", [part]))
    assert "ZeroDivisionError: division by zero" in text
    assert "^" not in text
    assert "~" not in text
