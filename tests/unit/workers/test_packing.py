"""Transfer of a call: by value if necessary, with ``__main__`` definitions, and complaints."""

from __future__ import annotations

import contextlib
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
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from elasticlib.errors import PicklingError
from elasticlib.workers import _packing
from elasticlib.workers._packing import Packed, pack_call
from elasticlib.workers.captures import _call_pickler
from elasticlib.workers.child._result_pickles import pack_result

LIMIT = 60.0
ROOT = Path(_packing.__file__).parents[2]
LOCK = threading.Lock()


@pytest.fixture(autouse=True)
def no_tracker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a resource tracker, which a test before may have started and which calls take along."""
    monkeypatch.setattr(resource_tracker._resource_tracker, "_fd", None)


def unpack(packed: Packed) -> tuple[Any, ...]:
    unpickler = pickle.Unpickler(io.BytesIO(packed.function))
    unpickler.load()  # what workers have from the caller's process
    call: tuple[Any, ...] = unpickler.load()
    return call


def definitions_beside(packed: Packed) -> tuple[Any, dict[str, Any]]:
    """The function and the definitions as a worker gets them: by one unpickler."""
    unpickler = pickle.Unpickler(io.BytesIO(packed.definitions + packed.function))
    unpickler.load()  # what workers have from the caller's process
    definitions = {}
    if packed.definitions:
        assert unpickler.load() is None  # from where the script is imported
        definitions = unpickler.load()
    return unpickler.load()[0], definitions


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
    function, args, kwargs = unpack(pack_call(double, (4,), {}))

    assert function(*args, **kwargs) == 8


def test_importable_function_is_sent_by_name_alone() -> None:
    packed = pack_call(double, (), {})

    assert (double, {}) == definitions_beside(packed)
    assert (packed.definitions, packed.names, packed.sources) == (b"", frozenset(), {})


def test_a_closure_travels_by_value() -> None:
    factor = 3

    def multiply(number: int) -> int:
        return factor * number

    assert unpack(pack_call(multiply, (), {}))[0](4) == 12


def test_definitions_from_main_are_named_and_sent_beside_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "class Point: pass\ndef helper(): return Point()\ndef train(): return helper()"
    train = main_function(source, "train", monkeypatch)

    packed = pack_call(train, (), {})

    function, definitions = definitions_beside(packed)
    assert packed.names == set(definitions) == {"Point", "helper", "train"}
    assert definitions["train"] is function


def test_a_name_of_main_that_was_redefined_is_not_a_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    former = main_function("def train(): return 1", "train", monkeypatch)
    main_function("def train(): return 2", "train", monkeypatch)

    packed = pack_call(former, (), {})

    assert packed.names == frozenset()
    assert unpack(packed)[0]() == 1


def test_code_keeps_its_file_name_whatever_cloudpickle_does() -> None:
    """Its 3.1.3 leaves the name out, and tracebacks were without source lines."""

    def outer() -> object:
        return lambda: None

    function, _, _ = unpack(pack_call(outer, (), {}))
    back = pickle.loads(pack_result(outer, frozenset()))

    assert {each.__code__.co_filename for each in (function, function(), back, back())} == {__file__}


def test_lines_of_a_cell_travel_for_its_tracebacks(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "def train():\n    raise ValueError\n"
    lines = source.splitlines(keepends=True)
    monkeypatch.setitem(linecache.cache, "<cell 7>", (len(source), None, lines, "<cell 7>"))
    train = main_function(source, "train", monkeypatch, filename="<cell 7>")

    assert pack_call(train, (), {}).sources == {"<cell 7>": lines}


def test_lines_of_a_file_stay_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "script.py"
    path.write_text("def train():\n    pass\n")
    train = main_function(path.read_text(), "train", monkeypatch, filename=str(path))
    linecache.getlines(str(path))

    assert pack_call(train, (), {}).sources == {}


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
    packed = pack_call(made_up.multiply, (), {})
    monkeypatch.delitem(sys.modules, "made_up_module")

    assert unpack(packed)[0](4) == 20


def test_a_module_is_sent_by_value_for_this_call_only(made_up: types.ModuleType) -> None:
    pack_call(made_up.multiply, (), {})

    assert "made_up_module" not in cloudpickle.list_registry_pickle_by_value()


def test_a_module_that_the_user_sends_by_value_stays_so(made_up: types.ModuleType) -> None:
    cloudpickle.register_pickle_by_value(made_up)
    try:
        pack_call(made_up.multiply, (), {})
        kept = "made_up_module" in cloudpickle.list_registry_pickle_by_value()
    finally:
        if "made_up_module" in cloudpickle.list_registry_pickle_by_value():
            cloudpickle.unregister_pickle_by_value(made_up)

    assert kept


def test_a_class_that_only_the_arguments_are_of_is_a_definition_too(monkeypatch: pytest.MonkeyPatch) -> None:
    train = main_function("def train(point): pass\nclass Point: pass\npoint = Point()", "train", monkeypatch)

    packed = pack_call(train, (sys.modules["__main__"].__dict__["point"],), {})

    assert packed.names == set(definitions_beside(packed)[1]) == {"Point", "train"}


def sizes(packed: Packed) -> dict[str, int]:
    """Bytes of what is sent, by name, without what is small."""
    found = {
        name: len(each) if isinstance(each, bytes) else os.fstat(each.fileno()).st_size
        for name, each in packed.memories().items()
    }
    return {name: size for name, size in found.items() if size >= 1 << 20}


@pytest.mark.parametrize("name", ["uses", "calls", "inner", "default"])
@pytest.mark.parametrize("kind", ["array", "bytes"])
def test_a_large_global_of_main_is_sent_once(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    numpy = pytest.importorskip("numpy")
    monkeypatch.setattr(sys.modules["__main__"], "data", None, raising=False)
    source = """
        data = None
        def uses(): return data
        def calls(): return uses()
        def inner(): return (lambda: data)()
        def default(x=data): return x
    """
    train = main_function(source, name, monkeypatch)
    data = numpy.zeros(1 << 21, numpy.uint8) if kind == "array" else bytes(1 << 21)
    train.__globals__["data"] = data
    train.__defaults__ = (data,) if name == "default" else None

    assert sum(sizes(pack_call(train, (), {})).values()) < 2.1 * (1 << 20)
    assert sum(sizes(pack_call(train, (data,), {})).values()) < 2.1 * (1 << 20)


def test_a_shared_tensor_that_is_a_global_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    train = main_function("data = None\ndef train(): return data", "train", monkeypatch)
    train.__globals__["data"] = torch.zeros(1 << 20).share_memory_()

    packed = pack_call(train, (), {})

    assert len(packed.function) + len(packed.definitions) < 1 << 20
    assert list(packed.memories_apart) == ["main shared 00000000"]


# What is complained of.


def captures(value: object) -> Callable[[], object]:
    def train() -> object:
        return value

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
        (captures(LOCK), (), {}, r"variable 'value' that captures.<locals>.train captures, a lock,"),
    ],
    ids=["argument", "keyword", "captured"],
)
def test_the_part_that_cannot_be_sent_is_named(
    function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object], part: str
) -> None:
    with pytest.raises(PicklingError, match=part):
        pack_call(function, args, kwargs)


def test_error_states_what_to_do_instead_and_keeps_the_cause() -> None:
    with pytest.raises(PicklingError, match="make it inside the function instead") as caught:
        pack_call(double, (LOCK,), {})
    assert isinstance(caught.value.__cause__, TypeError)


def test_a_variable_that_is_not_bound_yet_does_not_hide_the_complaint() -> None:
    def train() -> object:
        return LOCK, later

    with pytest.raises(PicklingError, match="global variable 'LOCK'"):
        pack_call(train, (), {})
    later = None


NAMES = """
import functools, threading

lock = threading.Lock()
model = threading.Lock()
held = [lock]

def helper():
    return lock

def decorator(function):
    guard = threading.Lock()

    @functools.wraps(function)
    def wrapper():
        with guard:
            return function()

    return wrapper

class Guarded:
    guard = lock

class Guard:
    def __init__(self, guard):
        self.guard = guard

    def __call__(self):
        return 1

class Slotted:
    __slots__ = ("guard",)

    def __init__(self, guard):
        self.guard = guard

settings = {"model": [1, Guard(threading.Lock())]}
"""


@pytest.mark.parametrize(
    ("definition", "subject"),
    [
        ("train = lambda: (lambda: lock)()", "global variable 'lock' that <lambda> (Cell) uses, a lock,"),
        ("def train():\n    def inner():\n        return lock\n    return inner",
         "global variable 'lock' that train (Cell) uses, a lock,"),
        ("def train(a, guard=lock):\n    pass", "default of argument 'guard' of train (Cell), a lock,"),
        ("def train(*, guard=lock):\n    pass", "default of argument 'guard' of train (Cell), a lock,"),
        ("def train(x):\n    return x.model, held", "global variable 'held' that train (Cell) uses, a list,"),
        ("def train():\n    return helper()", "global variable 'lock' that helper (Cell) uses, a lock,"),
        ("def train():\n    return Guarded", "attribute 'guard' of the class Guarded, a lock,"),
        ("train = Guard(threading.Lock())", "attribute 'guard' of the called Guard (Cell) object, a lock,"),
        ("train = Guard(threading.Lock()).__call__",
         "attribute 'guard' of the Guard object whose method Guard.__call__ (Cell) is called, a lock,"),
        ("train = functools.partial(len, lock)", "bound argument 0 of len, a lock,"),
        ("train = functools.partial(functools.partial(len), obj=lock)", "bound argument obj= of len, a lock,"),
        ("@decorator\ndef train():\n    pass",
         "variable 'guard' that wrapper (Cell), which a decorator put around train, captures, a lock,"),
        ("@functools.lru_cache\ndef train():\n    return lock",
         "global variable 'lock' that train (Cell) uses, a lock,"),
        ("def train():\n    pass\ntrain.guard = lock", "attribute 'guard' of train (Cell), a lock,"),
        ("def train():\n    return settings", "global variable 'settings' that train (Cell) uses, a dict,"),
    ],
    ids=["lambda", "inner", "default", "keyword default", "attribute's name", "helper", "class",
         "callable", "method", "partial", "two partials", "wrapper", "cached", "attribute", "deep"],
)  # fmt: skip
def test_unsendable_value_is_named_wherever_the_function_has_it_from(
    definition: str, subject: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elasticlib.workers.captures._parts.cell_label", lambda file: file)
    train = main_function(f"{NAMES}\n{definition}", "train", monkeypatch, filename="Cell")

    with pytest.raises(PicklingError) as caught:
        pack_call(train, (), {})

    text = str(caught.value)
    assert text.startswith(f"{subject} cannot be sent to the workers")
    assert text.endswith("cannot pickle '_thread.lock' object; make it inside the function instead")


def test_helper_that_cannot_be_sent_is_named_with_the_way_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "def first():\n    return helper()\ndef train():\n    return first()"
    train = main_function(f"{NAMES}\n{source}", "train", monkeypatch)

    with pytest.raises(PicklingError, match=r"that helper uses, a lock, .* with train \(by way of first\): cannot"):
        pack_call(train, (), {})


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"a": [1, {"b": LOCK}]}, "['a'][1]['b']"),
        ({"a": Locked()}, "['a'].lock"),
        (Locked(), ".lock"),
        (LOCK, ""),
        ({1: {LOCK}}, "[1]"),
    ],
    ids=["containers", "object in one", "object", "itself", "set"],
)
def test_error_names_the_place_within_a_part(value: object, place: str) -> None:
    with pytest.raises(PicklingError) as caught:
        pack_call(double, (value,), {})

    at = f"at {place}, " if place else ""
    assert f"cannot be sent to the workers: {at}cannot pickle '_thread.lock' object; make it" in str(caught.value)


def nested(value: object, depth: int) -> object:
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("depth", [400, 100_000], ids=["pickled", "too deep"])
def test_value_nested_too_deep_is_named_by_its_variable(depth: int) -> None:
    deep = nested(LOCK, depth)

    with pytest.raises(PicklingError, match=r"^argument 1 of double, a list, cannot be sent"):
        pack_call(double, (nested(1, 400), deep), {})
    with pytest.raises(PicklingError, match=r"^variable 'value' that captures.<locals>.train captures, a list, cannot"):
        pack_call(captures(deep), (), {})


def test_a_long_cause_leaves_the_last_line_to_what_to_do() -> None:
    class Wordy:
        def __reduce__(self) -> str:
            raise ValueError("long\n" * 1000)

    with pytest.raises(PicklingError, match=r"\Aargument 0 of double, a .*Wordy, .*\.\.\.; make it inside") as caught:
        pack_call(double, (Wordy(),), {})

    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 500


def test_function_of_a_module_sent_by_value_is_named_by_its_helper(made_up: types.ModuleType) -> None:
    exec("import threading\nlock = threading.Lock()\ndef helper(): return lock", made_up.__dict__)
    exec("def train(): return helper()", made_up.__dict__)

    with pytest.raises(PicklingError, match="global variable 'lock' that helper uses"):
        pack_call(made_up.train, (), {})


# What is warned of.

LARGE = """
import functools, threading

data = bytearray(5_000)
model = bytearray(5_000)

def helper():
    return data

class Holds:
    data = bytearray(5_000)

    def run(self):
        return helper()

holds = Holds()
"""


@pytest.mark.parametrize(
    ("definition", "named"),
    [
        ("def train():\n    return data", {"global variable 'data' that train uses, a bytearray"}),
        ("def train():\n    return helper()", {"global variable 'data' that helper uses, a bytearray"}),
        ("def train():\n    return (lambda: data)()", {"global variable 'data' that train uses, a bytearray"}),
        ("def train(x=data):\n    pass", {"default of argument 'x' of train, a bytearray"}),
        ("def train(x):\n    return x.model, data", {"global variable 'data' that train uses, a bytearray"}),
        ("train = functools.partial(helper, data)",
         {"global variable 'data' that helper uses, a bytearray", "bound argument 0 of helper, a bytearray"}),
        ("def train():\n    return holds",
         {"attribute 'data' of the class Holds, a bytearray", "global variable 'data' that helper uses, a bytearray"}),
    ],
    ids=["global", "helper", "lambda", "default", "attribute's name", "partial", "class"],
)  # fmt: skip
def test_large_value_is_named_once_wherever_the_function_has_it_from(
    definition: str, named: set[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_packing, "_WORTH_A_WARNING", 5_000)
    monkeypatch.setattr(_packing, "_warned", set())
    train = main_function(f"{LARGE}\n{definition}", "train", monkeypatch)

    for _ in range(3):  # as `Pool.map` does, for each item
        pack_call(train, (bytearray(5_000),), {})

    assert sorted(record.message.partition(", has ")[0] for record in caplog.records) == sorted(named)


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
    packed = _packing.pack_call(train, (Point(1),), {}, "value")
    sent = pickle.dumps((packed.function, packed.definitions))
    done = subprocess.run([sys.executable, "-c", sys.argv[1], *sorted(packed.names)], input=sent,
                          stdout=subprocess.PIPE, check=True)
    same, point, kind, trouble = pickle.loads(done.stdout)
    print(same, type(point) is Point, point.x, kind is Point, type(trouble) is Trouble)
"""

WORKER = """
import os, pickle, sys
from elasticlib.workers.child._start_spec import Handed, StartSpec
from elasticlib.workers.child import _child, _result_pickles
memories = {"function": os.memfd_create("function"), "definitions": os.memfd_create("definitions")}
for memory, content in zip(memories.values(), pickle.loads(sys.stdin.buffer.read())):
    os.write(memory, content)
handed = Handed(
    environment={}, streams=(), report=0, identity=(0, 0), faults=0, tail=0, notices=0, notices_identity=(0, 0),
    release=0, release_identity=(0, 0),
    spawner=0, memories=memories,
)
result = _child._loaded(StartSpec(), handed)()
os.write(1, _result_pickles.pack_result(result, sys.argv[1:]))
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


class Referable:
    """Object that can be weakly referenced."""


@pytest.mark.parametrize("others", [(), (LOCK,)], ids=["packed", "refused"])
def test_arguments_are_let_go_of_at_once(others: tuple[object, ...]) -> None:
    argument = Referable()
    seen = weakref.ref(argument)
    gc.disable()  # a large array would lie there until it comes
    try:
        with contextlib.suppress(PicklingError):
            pack_call(double, (argument, *others), {})
        del argument
        assert seen() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("elements", [10, 100_000, 1_000_000])
def test_cell_function_is_sent_with_a_global_tensor_of_any_size(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stays in the pickle's frames, beyond them, or goes apart."""
    source = f"""
    import torch
    data = torch.zeros({elements})
    def size():
        return data.numel()
    """
    function = main_function(source, "size", monkeypatch)

    packed = pack_call(function, (), {})

    assert "size" in packed.names
    assert bool(packed.memories_apart) is (4 * elements >= _call_pickler._LARGE)
