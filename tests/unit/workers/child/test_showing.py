"""Functions that run for a notebook: their call, their replaced keyboard, and their bars."""

from __future__ import annotations

import builtins
import faulthandler
import functools
import getpass
import io
import pdb
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from elasticlib.stacks import users_part
from elasticlib.workers.child import _showing
from elasticlib.workers.child._showing import call_function, has_returned


def works(dump: Callable[[], None]) -> None:
    dump()


def has_a_local(dump: Callable[[], None]) -> int:
    """Return; the destructor of a local variable is native code, which *dump* stands for."""
    local: Any = type("Local", (), {"__del__": staticmethod(dump)})()
    return id(local)


def has_a_local_of_python(dump: Callable[[], None]) -> int:
    local: Any = type("Local", (), {"__del__": lambda _: dump()})()
    return id(local)


@pytest.mark.skipif(sys.version_info[:3] == (3, 13, 0), reason="its faulthandler crashes at frames that are cleared")
@pytest.mark.parametrize(
    ("function", "over"),
    [(has_a_local, True), (has_a_local_of_python, False), (works, False), (None, False)],
    ids=["native destructor", "destructor", "at work", "compiled"],
)
def test_a_function_is_over_while_native_destructors_of_its_locals_run(
    function: Callable[..., object] | None, over: bool, tmp_path: Path
) -> None:
    """Not so while any frame of the program is left, nor where the function is compiled and has none."""
    with open(tmp_path / "stacks", "w+") as file:
        dump = functools.partial(faulthandler.dump_traceback, file)
        call_function(dump if function is None else functools.partial(function, dump))
        file.seek(0)
        stacks = file.read()

    assert "in call_function" in stacks
    assert over == has_returned(stacks)


# Without a keyboard.


@pytest.fixture
def no_keyboard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "breakpointhook", sys.breakpointhook)
    monkeypatch.setattr(builtins, "input", builtins.input)
    monkeypatch.setattr(getpass, "getpass", getpass.getpass)
    monkeypatch.delenv("PYTHONBREAKPOINT", raising=False)
    _showing.refuse_to_ask()


def stops() -> None:
    pdb.Pdb(nosigint=True).set_trace()
    print("after it")


@pytest.mark.usefixtures("no_keyboard")
@pytest.mark.parametrize(
    ("call", "beginning", "advice"),
    [
        (lambda: breakpoint(), r"breakpoint\(\) cannot stop here: a rank that a notebook launched", "%debug"),
        (stops, "a debugger cannot stop here: a rank", "%debug"),
        (lambda: input("name? "), r"input\(\) cannot ask here: a rank", "pass the answer to the function"),
        (lambda: getpass.getpass("key: "), r"getpass\(\) cannot ask here: a rank", "pass the answer to the function"),
    ],
    ids=["breakpoint", "pdb", "input", "getpass"],
)
def test_functions_that_need_input_raise_and_state_what_to_do(
    call: Callable[[], object], beginning: str, advice: str
) -> None:
    trace = sys.gettrace()
    try:
        with pytest.raises(RuntimeError, match=f"^{beginning}.*{advice}"):
            call()
    finally:
        sys.settrace(trace)


@pytest.mark.usefixtures("no_keyboard")
def test_the_users_line_is_the_innermost() -> None:
    with pytest.raises(RuntimeError) as caught:
        breakpoint()

    trace = users_part(caught.value)
    assert trace is not None
    assert (trace.tb_frame.f_code.co_filename, trace.tb_next) == (__file__, None)


@pytest.mark.usefixtures("no_keyboard")
def test_a_debugger_that_the_variable_names_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONBREAKPOINT", "0")
    breakpoint()

    monkeypatch.setenv("PYTHONBREAKPOINT", "builtins.dict")
    assert breakpoint(port=5678) == {"port": 5678}  # type: ignore[func-returns-value]


# Without widgets.


class TextBar:
    """As that of ``tqdm.std``, as far as it is asked here."""

    def __init__(self, iterable: Any, *, file: Any, ncols: int | None = None, colour: str | None = None) -> None:
        self.iterable, self.file, self.colour = iterable, file, colour

    def __iter__(self) -> Any:
        for each in self.iterable:
            self.display()
            yield each

    def display(self) -> None:
        self.file.write("text ")

    def close(self) -> None:
        self.file.write("closed")


class tqdm_notebook(TextBar):  # noqa: N801 - tqdm's name
    """As tqdm's own: it needs widgets for all that it does."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise ImportError("IProgress not found")

    def __iter__(self) -> Any:
        raise ImportError("IProgress not found")

    def display(self) -> None:
        raise ImportError("IProgress not found")

    close = display
    colour = property(lambda self: self.container)  # type: ignore[assignment]


def test_the_class_is_that_of_a_text_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = SimpleNamespace(tqdm_notebook=tqdm_notebook)
    monkeypatch.setitem(sys.modules, _showing.TEXT_BARS, module)
    _showing.use_text_bars()
    file = io.StringIO()
    bar = tqdm_notebook(range(2), file=file, display=False, ncols="100%", colour="green")
    items = list(bar)
    bar.close()

    assert items == [0, 1]
    assert file.getvalue() == "text text closed"
    assert bar.colour == "green"


def test_a_module_without_that_class_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, _showing.TEXT_BARS, ModuleType(_showing.TEXT_BARS))

    _showing.use_text_bars()
