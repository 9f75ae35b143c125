"""What asks the user of a notebook's worker raises, and says what to do instead."""

from __future__ import annotations

import builtins
import getpass
import pdb
import sys
from collections.abc import Callable

import pytest

from elasticlib.stacks import users_part
from elasticlib.workers.child.cells import _asking


@pytest.fixture(autouse=True)
def worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "breakpointhook", sys.breakpointhook)
    monkeypatch.setattr(builtins, "input", builtins.input)
    monkeypatch.setattr(getpass, "getpass", getpass.getpass)
    monkeypatch.delenv("PYTHONBREAKPOINT", raising=False)
    _asking.refuse_to_ask()


def stops() -> None:
    pdb.Pdb(nosigint=True).set_trace()
    print("after it")


@pytest.mark.parametrize(
    ("call", "beginning", "advice"),
    [
        (lambda: breakpoint(), r"breakpoint\(\) cannot stop in a rank of a launch from a notebook", "%debug"),
        (stops, "a debugger cannot stop in a rank", "%debug"),
        (lambda: input("name? "), r"input\(\) cannot ask in a rank", "give the answer to the function"),
        (lambda: getpass.getpass("key: "), r"getpass\(\) cannot ask in a rank", "give the answer to the function"),
    ],
    ids=["breakpoint", "pdb", "input", "getpass"],
)
def test_what_asks_raises_and_says_what_to_do(call: Callable[[], object], beginning: str, advice: str) -> None:
    trace = sys.gettrace()
    try:
        with pytest.raises(RuntimeError, match=f"^{beginning}.*{advice}"):
            call()
    finally:
        sys.settrace(trace)


def test_the_users_line_is_the_innermost() -> None:
    with pytest.raises(RuntimeError) as caught:
        breakpoint()

    trace = users_part(caught.value)
    assert trace is not None
    assert (trace.tb_frame.f_code.co_filename, trace.tb_next) == (__file__, None)


def test_a_debugger_that_the_variable_names_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONBREAKPOINT", "0")
    breakpoint()

    monkeypatch.setenv("PYTHONBREAKPOINT", "builtins.dict")
    assert breakpoint(port=5678) == {"port": 5678}  # type: ignore[func-returns-value]
