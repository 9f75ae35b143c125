"""How a call travels: by value where it must, with the definitions of ``__main__``, and what is complained of."""

from __future__ import annotations

import gc
import io
import linecache
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from elasticlib.errors import PicklingError
from elasticlib.workers import _packing
from elasticlib.workers._packing import Packed, pack
from elasticlib.workers.child._results import pack_result

LIMIT = 60.0
ROOT = Path(_packing.__file__).parents[2]
LOCK = threading.Lock()


def unpack(packed: Packed) -> tuple[Any, ...]:
    call: tuple[Any, ...] = pickle.loads(packed.function)
    return call


def definitions_beside(packed: Packed) -> tuple[Any, dict[str, Any]]:
    """The function and the definitions as a worker gets them: by one unpickler."""
    unpickler = pickle.Unpickler(io.BytesIO(packed.function))
    call, definitions = unpickler.load(), unpickler.load()
    return call[0], definitions


def double(number: int) -> int:
    return 2 * number


def main_function(source: str, name: str, monkeypatch: pytest.MonkeyPatch, filename: str = "<cell 1>") -> Any:
    """The function *name* that *source* defines in ``__main__``, as a notebook's cell would."""
    main = sys.modules["__main__"]
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(textwrap.dedent(source), filename, "exec"), scope)
    for key, value in scope.items():
        if not key.startswith("__"):
            monkeypatch.setattr(main, key, value, raising=False)
    return scope[name]


def test_a_call_travels_with_its_arguments() -> None:
    function, args, kwargs = unpack(pack(double, (4,), {}))

    assert function(*args, **kwargs) == 8


def test_a_function_that_can_be_imported_stays_the_same() -> None:
    packed = pack(double, (), {})

    assert unpack(packed)[0] is double
    assert (packed.definitions, packed.names, packed.sources) == (b"", frozenset(), {})


def test_a_closure_travels_by_value() -> None:
    factor = 3

    def multiply(number: int) -> int:
        return factor * number

    assert unpack(pack(multiply, (), {}))[0](4) == 12


def test_what_is_sent_of_main_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    train = main_function(
        """
        class Point:
            pass

        def helper():
            return Point()

        def train():
            return helper()
        """,
        "train",
        monkeypatch,
    )

    packed = pack(train, (), {})

    assert packed.names == {"Point", "helper", "train"}
    assert set(pickle.loads(packed.definitions)) == {"Point", "helper", "train"}


def test_a_function_of_main_is_the_definition_that_travels_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    train = main_function("def train(): pass", "train", monkeypatch)

    function, definitions = definitions_beside(pack(train, (), {}))

    assert definitions["train"] is function


def test_nothing_travels_beside_a_function_that_can_be_imported() -> None:
    function, definitions = definitions_beside(pack(double, (), {}))

    assert function is double
    assert definitions == {}


def test_a_name_of_main_that_was_redefined_is_not_a_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    former = main_function("def train(): return 1", "train", monkeypatch)
    main_function("def train(): return 2", "train", monkeypatch)

    packed = pack(former, (), {})

    assert packed.names == frozenset()
    assert unpack(packed)[0]() == 1


def test_code_keeps_the_name_of_its_file_whatever_cloudpickle_does() -> None:
    """Its 3.1.3 leaves the name out, and tracebacks were without source lines."""

    def outer() -> object:
        return lambda: None

    function, _, _ = pickle.loads(pack(outer, (), {}).function)
    back = pickle.loads(pack_result(outer, frozenset()))

    assert {each.__code__.co_filename for each in (function, function(), back, back())} == {__file__}


def test_lines_of_a_cell_travel_for_its_tracebacks(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "def train():\n    raise ValueError\n"
    lines = source.splitlines(keepends=True)
    monkeypatch.setitem(linecache.cache, "<cell 7>", (len(source), None, lines, "<cell 7>"))
    train = main_function(source, "train", monkeypatch, filename="<cell 7>")

    assert pack(train, (), {}).sources == {"<cell 7>": lines}


def test_lines_of_a_file_stay_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "script.py"
    path.write_text("def train():\n    pass\n")
    train = main_function(path.read_text(), "train", monkeypatch, filename=str(path))
    linecache.getlines(str(path))

    assert pack(train, (), {}).sources == {}


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module that is loaded, and that no worker could import."""
    module = types.ModuleType("made_up_module")
    exec("FACTOR = 5\ndef multiply(number):\n    return FACTOR * number\n", module.__dict__)
    monkeypatch.setitem(sys.modules, "made_up_module", module)
    return module


def test_a_function_of_a_module_that_no_worker_finds_travels_by_value(
    made_up: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = pack(made_up.multiply, (), {})
    monkeypatch.delitem(sys.modules, "made_up_module")

    assert unpack(packed)[0](4) == 20


def test_a_module_is_sent_by_value_for_this_call_only(made_up: types.ModuleType) -> None:
    pack(made_up.multiply, (), {})

    assert "made_up_module" not in cloudpickle.list_registry_pickle_by_value()


def test_a_module_that_the_user_sends_by_value_stays_so(made_up: types.ModuleType) -> None:
    cloudpickle.register_pickle_by_value(made_up)
    try:
        pack(made_up.multiply, (), {})
        kept = "made_up_module" in cloudpickle.list_registry_pickle_by_value()
    finally:
        if "made_up_module" in cloudpickle.list_registry_pickle_by_value():
            cloudpickle.unregister_pickle_by_value(made_up)

    assert kept


# What is complained of.


def captures(value: object) -> Callable[[], object]:
    def train() -> object:
        return value

    return train


def uses_a_global() -> Callable[[], object]:
    def train() -> object:
        return LOCK

    return train


class Locked:
    def __init__(self) -> None:
        self.lock = threading.Lock()

    def train(self) -> None: ...


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "part"),
    [
        (double, (1, LOCK), {}, "argument 1 of double, a lock,"),
        (double, (), {"lock": LOCK}, "argument lock= of double, a lock,"),
        (double, ([{"deep": LOCK}],), {}, "argument 0 of double, a list,"),
        (captures(LOCK), (), {}, r"variable 'value' that captures.<locals>.train captures, a lock,"),
        (uses_a_global(), (), {}, r"global variable 'LOCK' that uses_a_global.<locals>.train uses, a lock,"),
        (Locked().train, (), {}, "attribute 'lock' of the Locked that Locked.train is of, a lock,"),
    ],
    ids=["argument", "keyword", "inner", "captured", "global", "method"],
)
def test_the_part_that_cannot_be_sent_is_named(
    function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object], part: str
) -> None:
    with pytest.raises(PicklingError, match=part):
        pack(function, args, kwargs)


def test_a_complaint_says_what_to_do_instead_and_keeps_the_cause() -> None:
    with pytest.raises(PicklingError, match="make it inside the function instead") as caught:
        pack(double, (LOCK,), {})
    assert isinstance(caught.value.__cause__, TypeError)


def test_a_variable_that_is_not_bound_yet_does_not_hide_the_complaint() -> None:
    def train() -> object:
        return LOCK, later

    with pytest.raises(PicklingError, match="global variable 'LOCK'"):
        pack(train, (), {})
    later = None


# Between two programs, each with a ``__main__`` of its own.

BOTH_WAYS = """
import os, pickle, subprocess, sys
from elasticlib.workers import _packing

class Point:
    def __init__(self, x): self.x = x

class Trouble(Exception):
    pass

def train(point):
    import __main__
    same = type(point) is Point is __main__.Point and train is __main__.train
    return same, Point(point.x + 1), Point, Trouble("bad")

if __name__ == "__main__":
    packed = _packing.pack(train, (Point(1),), {})
    done = subprocess.run([sys.executable, "-c", sys.argv[1], *sorted(packed.names)], input=packed.function,
                          stdout=subprocess.PIPE, check=True)
    same, point, kind, trouble = pickle.loads(done.stdout)
    print(same, type(point) is Point, point.x, kind is Point, type(trouble) is Trouble)
"""

WORKER = """
import os, sys
from elasticlib.workers.child._start_spec import Handed, StartSpec
from elasticlib.workers.child import _child, _results
memory = os.memfd_create("function")
os.write(memory, sys.stdin.buffer.read())
handed = Handed(
    environment={}, streams=(), report=0, identity=(0, 0), faults=0, tail=0, notices=0, notices_identity=(0, 0),
    spawner=0, memories={"function": memory},
)
result = _child._loaded(StartSpec(), handed)()
os.write(1, _results.pack_result(result, sys.argv[1:]))
"""


@pytest.mark.slow
def test_classes_of_main_are_the_same_in_the_worker_and_on_the_way_back(tmp_path: Path) -> None:
    script = tmp_path / "both_ways.py"
    script.write_text(BOTH_WAYS)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    done = subprocess.run(
        [sys.executable, str(script), WORKER], env=environment, capture_output=True, text=True, timeout=LIMIT
    )

    assert (done.stdout.split(), done.stderr) == (["True", "True", "2", "True", "True"], "")


class Held:
    """What can be held weakly."""


def test_what_was_packed_is_let_go_of_at_once() -> None:
    held = Held()
    seen = weakref.ref(held)
    gc.disable()  # a large array would lie there until it comes
    try:
        pack(double, (held,), {})
        del held
        assert seen() is None
    finally:
        gc.enable()
