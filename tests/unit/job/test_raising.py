"""Errors that a launch raises for its workers: of both kinds if possible, short in notebooks."""

from __future__ import annotations

import copy
import gc
import json
import linecache
import pickle
import sys
import traceback
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from elasticlib.errors import ChildFailedError, Frame, ProcessFailure
from elasticlib.job._raising import combined_error
from elasticlib.notebook import trace_of
from elasticlib.notebook._worker_errors import entered, render_worker_error


class WithArgumentsError(Exception):
    def __init__(self, code: int, *, why: str) -> None:
        super().__init__(f"{code}: {why}")
        self.code = code


class StrictError(Exception):
    def __new__(cls, code: int) -> Any:
        return super().__new__(cls, code)


class FinalError(Exception):
    def __init_subclass__(cls) -> None:
        raise TypeError("no class may be below this one")


class SlottedError(Exception):
    __slots__ = ("code",)


class NamedError(Exception):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class NamedByClassError(Exception):
    name = "of the class"


class NamedByPropertyError(Exception):
    @property
    def name(self) -> str:
        return str(self.args[0])


class NamedBySlotError(Exception):
    __slots__ = ("code", "name")

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name, self.code = name, 7


class SilentError(ValueError):
    def __str__(self) -> str:
        raise RuntimeError("it has no text")


def failure(rank: int = 0, message: str = "ValueError: bad batch", **more: Any) -> ProcessFailure:
    facts: dict[str, Any] = {"exception_type": message.partition(":")[0], "message": message, "rank": rank, **more}
    return ProcessFailure(rank, 100 + rank, 1, "", timestamp=rank + 1, **facts)


def error(count: int = 1, **more: Any) -> ChildFailedError:
    return ChildFailedError("train", {rank: failure(rank, **more) for rank in range(count)})


BOTH = [
    ValueError("x"),
    KeyError("x"),
    OSError(2, "no", "file"),
    FileNotFoundError(2, "no", "file"),
    UnicodeDecodeError("utf-8", b"x", 0, 1, "no"),
    ImportError("x", name="m"),
    NameError("x", name="n"),
    RuntimeError(),
    MemoryError(),
    AssertionError("x"),
    WithArgumentsError(7, why="x"),
    StrictError(3),
    SlottedError("x"),
    SilentError("x"),
    NamedError("x"),
    NamedByClassError("x"),
    NamedByPropertyError("x"),
    NamedBySlotError("x"),
]


@pytest.mark.parametrize("cause", BOTH, ids=lambda cause: type(cause).__name__)
def test_combined_error_is_a_failed_launch_and_of_the_workers_type(cause: Exception) -> None:
    found = combined_error(error(), cause, "both")

    with pytest.raises(type(cause)):
        raise found
    assert isinstance(found, ChildFailedError)
    assert (type(found).__name__, type(found).__module__) == ("ChildFailedError", "elasticlib.errors")
    assert (found.name, list(found.failures), found.__cause__) == (getattr(cause, "name", "train"), [0], cause)
    assert str(found) == str(error())
    assert found.args == cause.args


@pytest.mark.parametrize(
    "cause",
    [
        FinalError("x"),
        SyntaxError("x"),
        StopIteration(1),
        KeyboardInterrupt(),
        SystemExit(3),
        *([ExceptionGroup("x", [ValueError()])] if sys.version_info >= (3, 11) else []),  # noqa: F821
        error(),
        None,
    ],
    ids=lambda cause: type(cause).__name__,
)
def test_error_is_only_a_failed_launch_if_types_cannot_be_combined(cause: BaseException | None) -> None:
    found = combined_error(error(), cause, "both")

    assert isinstance(found, ChildFailedError)
    assert cause is None or isinstance(cause, ChildFailedError) or not isinstance(found, type(cause))
    assert found.__cause__ is cause


def test_classes_of_both_kinds_go_with_the_errors_that_are_of_them() -> None:
    def once() -> weakref.ref[type]:
        class OfACellError(Exception):
            pass

        first, second = (combined_error(error(), OfACellError("x"), "both") for _ in range(2))
        assert type(first) is type(second)
        return weakref.ref(OfACellError)

    kinds = [once() for _ in range(3)]
    gc.collect()  # a class is always part of a cycle

    assert [kind() for kind in kinds] == [None] * 3


def test_error_is_only_a_failed_launch_if_that_is_requested() -> None:
    found = combined_error(error(), ValueError("x"), "ChildFailedError")

    assert not isinstance(found, ValueError)
    assert isinstance(found.__cause__, ValueError)


def test_combined_error_keeps_attributes_of_the_workers_exception() -> None:
    found: Any = combined_error(error(), WithArgumentsError(7, why="x"), "both")
    assert found.code == 7

    found = combined_error(error(), FileNotFoundError(2, "no", "data.csv"), "both")
    assert (found.errno, found.filename) == (2, "data.csv")


def failed(function: Any) -> Exception:
    with pytest.raises(Exception) as caught:
        function()
    return caught.value


@pytest.mark.parametrize(
    "cause",
    [
        failed(lambda: __import__("flash_attention_of_nobody")),
        ImportError("x", name="m", path="p"),
        failed(b"\xff".decode),
        OSError(2, "no", "first", None, "second"),
        BlockingIOError(11, "no", 3),
        NamedError("x"),
        NamedBySlotError("x"),
        json.JSONDecodeError("no", "{", 1),
    ],
    ids=lambda cause: type(cause).__name__,
)
def test_combined_error_has_each_field_of_the_workers_exception(cause: Exception) -> None:
    found: Any = combined_error(error(), cause, "both")
    names = [name for name in dir(cause) if not name.startswith("_") and not callable(getattr(cause, name, len))]

    assert len(names) > 1
    for name in names:
        assert getattr(found, name) == getattr(cause, name), name


@pytest.mark.parametrize("again", [copy.copy, lambda value: pickle.loads(pickle.dumps(value))])
@pytest.mark.parametrize("cause", [None, WithArgumentsError(7, why="x"), ImportError("x", name="m")], ids=repr)
def test_a_copy_is_a_failed_launch(cause: Exception | None, again: Any) -> None:
    found = again(combined_error(error(), cause, "both"))

    assert (type(found), found.name) == (ChildFailedError, "train")
    assert str(found) == str(error())


# Its traceback in a notebook.

STACK = (
    Frame("/tmp/ipykernel_1/1.py", 9, "train", {"x": "1"}),
    Frame("/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", 1, "_call_impl"),
    Frame("/tmp/ipykernel_1/1.py", 5, "loss", {"batch": "<Tensor of shape (3,)>"}),
)


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = {"/tmp/ipykernel_1/1.py": ("Cell", "In[3]")}
    shell = SimpleNamespace(compile=SimpleNamespace(format_code_name=cells.get))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))  # type: ignore[arg-type]
    lines = [f"line {number}\n" for number in range(1, 20)]
    monkeypatch.setitem(linecache.cache, "/tmp/ipykernel_1/1.py", (1, None, lines, ""))


def test_the_frames_of_a_worker_can_be_entered() -> None:
    found = [(*where.f_code.co_filename.split("/")[-1:], line) for where, line in traceback.walk_tb(entered(STACK))]
    innermost = list(traceback.walk_tb(entered(STACK)))[-1][0]

    assert found == [("1.py", 9), ("module.py", 1), ("1.py", 5)]
    assert innermost.f_code.co_name == "loss"
    assert repr(innermost.f_locals["batch"]) == "<Tensor of shape (3,)>"
    assert "__builtins__" not in innermost.f_locals


def test_empty_frames_make_no_traceback() -> None:
    assert entered(()) is None


def test_a_program_keeps_the_traceback_that_an_error_has() -> None:
    try:
        raise error(frames=STACK)
    except ChildFailedError as caught:
        assert trace_of(caught, caught.__traceback__) is caught.__traceback__


@pytest.mark.usefixtures("notebook")
def test_traceback_in_a_notebook_continues_in_the_worker() -> None:
    lines = [line for _, line in traceback.walk_tb(trace_of(error(frames=STACK), None))]

    assert lines == [9, 1, 5]
    assert trace_of(KeyError(), None) is None


@pytest.mark.usefixtures("notebook")
@pytest.mark.parametrize("count", [1, 2, 8, 1000])
def test_notebook_shows_few_lines_for_any_number_of_ranks(count: int) -> None:
    found = render_worker_error(combined_error(error(count, frames=STACK), ValueError("bad batch"), "both"))

    assert found[0].startswith("ValueError  ")
    assert found[1:7] == [
        "in the worker of rank 0:",
        "Cell In[3], line 9, in train",
        "----> 9 line 9",
        "    ... 1 frame of libraries",
        "Cell In[3], line 5, in loss",
        "----> 5 line 5",
    ]
    assert found[7] == "ValueError: bad batch"
    assert (
        found[8:]
        == {
            1: [],
            2: ["rank 1: the same"],
            8: ["ranks 1-7: the same"],
            1000: ["ranks 1-999: the same"],
        }[count]
    )


@pytest.mark.usefixtures("notebook")
def test_ranks_that_failed_otherwise_have_a_line_each_up_to_a_few() -> None:
    def shown(count: int) -> list[str]:
        failures = {rank: failure(rank, f"ValueError: bad batch {rank}") for rank in range(count)}
        return [line for line in render_worker_error(ChildFailedError("train", failures)) if "rank" in line][1:]

    assert shown(3) == ["rank 1: ValueError: bad batch 1", "rank 2: ValueError: bad batch 2"]
    assert len(shown(99)) == 4
    assert "error.failures" in shown(99)[-1]


@pytest.mark.usefixtures("notebook")
def test_ranks_that_lost_a_peer_are_named_if_nothing_else_failed() -> None:
    lost = [failure(rank, "RuntimeError: Connection closed", secondary=True) for rank in range(3)]
    bug = failure(3, "ValueError: bad batch")

    def others(*failures: ProcessFailure) -> list[str]:
        found = render_worker_error(ChildFailedError("train", {each.rank: each for each in failures}))
        return [line for line in found if line.startswith("rank")]

    assert [] == others(*lost, bug)
    assert ["ranks 1-2: the same"] == others(*lost)


@pytest.mark.usefixtures("notebook")
def test_a_deep_stack_shows_its_two_ends() -> None:
    deep = tuple(Frame("/tmp/ipykernel_1/1.py", number % 19 + 1, f"f{number}") for number in range(60))
    found = render_worker_error(error(frames=deep))

    assert len(found) <= 14
    assert "Cell In[3], line 1, in f0" in found
    assert f"Cell In[3], line {59 % 19 + 1}, in f59" in found
    assert "    ... 56 more frames: print(error) shows them" in found


@pytest.mark.usefixtures("notebook")
def test_crash_report_shows_the_lines_of_the_native_stack() -> None:
    stacks = (
        "Fatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n"
        '  File "/tmp/ipykernel_1/1.py", line 5 in loss\n  File "/tmp/ipykernel_1/1.py", line 9 in train\n'
    )
    crashed = ProcessFailure(1, 100, -11, "", rank=1, traceback=stacks, hint="native code crashed")
    found = render_worker_error(ChildFailedError("train", {1: crashed}))

    assert found[1:6] == [
        "in the worker of rank 1:",
        "Cell In[3], line 9, in train",
        "----> 9 line 9",
        "Cell In[3], line 5, in loss",
        "----> 5 line 5",
    ]
    assert found[6:] == ["ended by SIGSEGV", "native code crashed"]


def test_a_file_that_is_nowhere_is_named_without_its_line() -> None:
    assert "File /nowhere.py, line 3, in f" in render_worker_error(error(frames=(Frame("/nowhere.py", 3, "f"),)))


def test_ipython_asks_it_for_its_traceback() -> None:
    made: Any = combined_error(error(), None, "both")

    assert made._render_traceback_() == render_worker_error(made)
