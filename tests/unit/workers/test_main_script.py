"""Facts about a script's import from its text, and the variables that a function reaches."""

from __future__ import annotations

import ast
import functools
import gc
import sys
import textwrap
import types
from pathlib import Path
from typing import Any

import pytest

from elasticlib.errors import ConfigError, PicklingError
from elasticlib.workers.captures import _main_script
from elasticlib.workers.captures._main_script import ImportableMain, ScriptText, facts_of, reached_globals
from elasticlib.workers.child.program import _main

SCRIPT = textwrap.dedent(
    """
    import os.path, torch.nn as nn
    from pkg import first, second as other
    CFG: dict = {}
    typed: int
    a, (b, *c) = 1, (2, 3)
    for i in range(2):
        with open("x") as handle:
            pass
    if a:
        branch = 1
    def train():
        inside = 1
        global counter
        counter = 1
    class Net:
        attribute = 1
    squares = [each for each in range(3)]
    if __name__ == "__main__":
        args = 1
        CFG = 2
        train()
    else:
        imported_only = 1
    """
)


def parsed(source: str) -> ScriptText:
    return facts_of(ast.parse(source))


def test_script_is_split_into_import_and_changes_of_its_program() -> None:
    text = parsed(SCRIPT)
    expected = "os nn first other CFG a b c i handle branch train Net squares imported_only"
    assert text.defined == set(expected.split())
    assert text.redefined == {"args", "CFG"}
    assert text.set_in_functions == {"counter"}
    assert text.is_whole


@pytest.mark.parametrize(
    ("use", "may_change"),
    [
        ("return CFG['lr'] + CFG.step + CFG['a']['b']", False),
        ("CFG['lr'] = 1", True),
        ("CFG['a']['b'] = 1", True),
        ("CFG.step += 1", True),
        ("del CFG['lr']", True),
        ("CFG.update(lr=1)", True),
        ("CFG['a'].append(1)", True),
        ("helper(CFG)", True),
        ("other = CFG", True),
        ("return values[CFG]", True),
    ],
)
def test_an_object_may_change_where_more_than_its_parts_are_read(use: str, may_change: bool) -> None:
    for text in (f"CFG = {{}}\ndef main(values):\n    {use}\n", f"CFG = {{}}\nmain = lambda values: 1\n{use}\n"):
        guarded = text.replace(f"\n{use}", f"\nif __name__ == '__main__':\n    {use}")
        if "return" in use and "def" not in text:
            continue
        assert may_change == parsed(guarded if "def" not in text else text).may_change_in_place("CFG")


def test_only_the_lines_behind_the_guard_are_guarded() -> None:
    text = parsed("x = 1\nif __name__ == '__main__':\n    a()\n    b(\n    1)\nelse:\n    c()\n")
    assert [line for line in range(1, 9) if text.is_guarded(line)] == [3, 4, 5]


@pytest.mark.parametrize(
    ("test", "is_guard"),
    [
        ("__name__ == '__main__'", True),
        ('"__main__" == __name__', True),
        ("__name__ == '__main__' and ready", True),
        ("__name__ == '__main__' or ready", False),
        ("__name__ != '__main__'", False),
        ("__name__ == '__mp_main__'", False),
        ("name == '__main__'", False),
    ],
)
def test_a_guard_is_a_test_that_an_import_fails(test: str, is_guard: bool) -> None:
    assert bool(parsed(f"if {test}:\n    pass\n").guards) is is_guard


@pytest.mark.parametrize("line", ["from pkg import *", "exec('x = 1')", "globals()['x'] = 1", "vars().update(x=1)"])
def test_no_name_is_surely_missing_if_any_name_may_be_defined(line: str) -> None:
    assert not parsed(line).surely_lacks("x")
    assert parsed("y = 1").surely_lacks("x")


def a_module(source: str) -> types.ModuleType:
    module = types.ModuleType("__main__")
    exec(compile(textwrap.dedent(source), "script.py", "exec"), module.__dict__)
    return module


def test_a_function_reaches_what_its_helpers_and_classes_use() -> None:
    module = a_module(
        """
        import functools, os
        by_helper = by_class = by_base = by_inner = by_wrapped = by_partial = by_instance = unused = 0
        def helper(): return by_helper
        class Base:
            def m(self): return by_base
        class Net(Base):
            @property
            def p(self): return by_class
        class Other:
            def m(self): return by_instance
        other = Other()
        def decorate(f):
            @functools.wraps(f)
            def call(): return f()
            return call
        @decorate
        def wrapped(): return by_wrapped
        part = functools.partial(lambda: by_partial)
        def train():
            def inner(): return by_inner
            return helper(), Net(), os.sep, other.m(), wrapped(), part(), inner()
        """
    )
    reached = reached_globals([module.train], module.__dict__)
    assert {name for name in reached if name.startswith("by_")} == {
        name for name in vars(module) if name.startswith("by_")
    }
    assert "unused" not in reached and "os" not in reached


def a_script(source: str, monkeypatch: pytest.MonkeyPatch) -> ImportableMain:
    """The script *source* as this process' ``__main__``, with all that it does behind its guard."""
    source = textwrap.dedent(source)
    module = a_module(source)
    monkeypatch.setitem(sys.modules, "__main__", module)
    return ImportableMain(_main.Origin(None, "script.py"), parsed(source), module)


def try_to_send(value: Any, _: ImportableMain) -> None:
    if "lock" in str(type(value)) or (isinstance(value, (list, dict)) and "lock" in str(value)):
        raise TypeError("cannot pickle it")


def test_only_what_may_differ_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    script = a_script(
        """
        import threading
        lock = threading.Lock()
        log = object()
        CFG = {}
        def train():
            with lock: return CFG, args, log, model, other()
        def other(): return 1
        if __name__ == "__main__":
            args = 1
            model = object()
        """,
        monkeypatch,
    )
    found = _main_script.overlay_of(script, [script.module.train], try_to_send)
    assert found == {"CFG": {}, "args": 1, "model": script.module.model}


def test_value_the_import_lacks_that_cannot_be_sent_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    script = a_script(
        """
        import threading
        def train(): return guard
        if __name__ == "__main__":
            guard = threading.Lock()
        """,
        monkeypatch,
    )
    with pytest.raises(PicklingError, match="'guard' that train uses, a lock, is defined under"):
        _main_script.overlay_of(script, [script.module.train], try_to_send)


def test_values_that_cannot_be_sent_are_compared_by_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    source = """
        import threading
        CFG = {"rate": 1, "lock": threading.Lock()}
        def train(): return CFG
    """
    script = a_script(source, monkeypatch)
    there = a_module(source).__dict__
    sent = _main_script.overlay_of(script, [script.module.train], try_to_send)
    assert _main.lay_over(there, sent) == []
    script.module.CFG["rate"] = 2
    (warning,) = _main.lay_over(there, _main_script.overlay_of(script, [script.module.train], try_to_send))
    assert "'CFG'" in warning and "a dict" in warning
    assert there["CFG"]["rate"] == 1


def test_a_variable_that_may_be_missing_is_an_error_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    script = a_script(
        """
        import threading
        def begin():
            global guard
            guard = threading.Lock()
        def train(): return guard
        if __name__ == "__main__":
            begin()
        """,
        monkeypatch,
    )
    sent = _main_script.overlay_of(script, [script.module.train], try_to_send)
    with pytest.raises(NameError, match="'guard' does not exist in the workers"):
        _main.lay_over({}, sent)
    assert _main.lay_over({"guard": script.module.guard}, sent) == []


def test_a_call_finds_what_its_caller_has() -> None:
    own: dict[str, Any] = {}
    there: dict[str, Any] = {"cache": own, "rate": 1}
    _main.lay_over(there, {"cache": {}, "rate": 2})
    assert there["cache"] is own
    assert there["rate"] == 2
    own["x"] = 1
    _main.lay_over(there, {"cache": {}, "rate": 2})
    assert there["cache"] == {}


class Odd:
    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no")

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("own", "other", "are_same"),
    [
        (1, 1, True),
        (1, 1.0, False),
        (True, 1, False),
        (float("nan"), float("nan"), True),
        ([1, [2.0, {"a": None}]], [1, [2.0, {"a": None}]], True),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, False),
        (types.SimpleNamespace(a=[1]), types.SimpleNamespace(a=[1]), True),
        (types.SimpleNamespace(a=[1]), types.SimpleNamespace(a=[2]), False),
        (Odd(), Odd(), False),
        (Path("a"), Path("a"), True),
    ],
)
def test_only_what_is_equal_throughout_is_the_same(own: object, other: object, are_same: bool) -> None:
    assert _main.same(own, other) is are_same


def test_arrays_are_compared_as_a_whole() -> None:
    import torch

    assert _main.same(torch.ones(2), torch.ones(2))
    assert not _main.same(torch.ones(2), torch.ones(2, 2))
    assert not _main.same(torch.ones(2), torch.ones(2).double())
    assert not _main.same({"a": torch.ones(2)}, {"a": torch.zeros(2)})


def test_a_tensor_that_the_caller_shares_is_never_the_same() -> None:
    import torch

    assert not _main.same(torch.ones(2), torch.ones(2).share_memory_())


def test_values_that_contain_themselves_are_not_the_same() -> None:
    def ring() -> list[Any]:
        found: list[Any] = []
        found.append(found)
        return found

    assert not _main.same(ring(), ring())


@pytest.mark.parametrize("choice", [None, "import", "value"])
def test_a_program_without_a_script_is_not_imported(choice: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    if choice == "import":
        with pytest.raises(ConfigError, match="main='import': this program has no script"):
            _main_script.importable(choice)
    else:
        assert _main_script.importable(choice) is None


LAUNCHING = """
import weakref
class Model: pass
def launch():
    model = Model()
    assert importable(None) is not None
    return weakref.ref(model)
if __name__ == "__main__":
    reference = launch()
"""


def test_callers_variables_are_freed_when_their_functions_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(LAUNCHING)
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=str(tmp_path / "train.py"), importable=_main_script.importable)
    monkeypatch.setitem(sys.modules, "__main__", main)

    gc.disable()
    try:
        exec(compile(LAUNCHING, main.__dict__["__file__"], "exec"), main.__dict__)
    finally:
        gc.enable()

    assert main.__dict__["reference"]() is None


def test_plain_data_is_what_can_be_compared() -> None:
    plain = [1, "x", [], {}, Path("a"), types.SimpleNamespace(), None]
    others = [object(), len, functools.partial(len), int, types, lambda: 1]
    assert all(map(_main_script.is_plain, plain)) and not any(map(_main_script.is_plain, others))
