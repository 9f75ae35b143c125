"""Functions of every kind, from programs and notebooks, by every start method: they work, or are refused by name."""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

from elasticlib import LaunchConfig, PicklingError, elastic_launch, pool
from elasticlib.workers import _packing
from tests.process import duties

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.2)]

ROOT = Path(__file__).resolve().parents[3]
LIMIT = 120

WORKS: dict[str, tuple[str, str, str]] = {
    "lambda": ("fn = lambda x: x + 1", "1", "2"),
    "closure": ("def make(y):\n    def inner(x):\n        return x + y\n    return inner\nfn = make(1)", "1", "2"),
    "partial": ("def add(x, y):\n    return x + y\nfn = functools.partial(add, y=1)", "1", "2"),
    "method": (
        "class Model:\n    def __init__(self):\n        self.w = 1\n    def step(self, x):\n        return x + self.w\n"
        "fn = Model().step",
        "1",
        "2",
    ),
    "class method": (
        "class Made:\n    @classmethod\n    def step(cls, x):\n        return x + 1\nfn = Made.step",
        "1",
        "2",
    ),
    "static method": ("class Has:\n    @staticmethod\n    def step(x):\n        return x + 1\nfn = Has.step", "1", "2"),
    "callable object": ("class Adds:\n    def __call__(self, x):\n        return x + 1\nfn = Adds()", "1", "2"),
    "class": (
        "@dataclasses.dataclass\nclass fn:\n    x: int",
        "1",
        "fn(1)",
    ),
    "decorated": (
        "def twice(f):\n    @functools.wraps(f)\n    def inner(x):\n        return f(f(x))\n    return inner\n"
        "@twice\ndef fn(x):\n    return x + 1",
        "1",
        "3",
    ),
    "cached recursion": (
        "@functools.cache\ndef fn(n):\n    return n if n < 2 else fn(n - 1) + fn(n - 2)",
        "60",
        "1548008755920",
    ),
    "builtin": ("fn = abs", "-1", "1"),
    "local class": ("def fn(x):\n    class Local:\n        y = x + 1\n    return Local().y", "1", "2"),
    "dataclass": (
        "@dataclasses.dataclass\nclass Batch:\n    x: int\ndef fn(b):\n    return Batch(b.x + 1)",
        "Batch(1)",
        "Batch(2)",
    ),
    "enum": ("class Mode(enum.Enum):\n    A = 1\n    B = 2\ndef fn(m):\n    return Mode.B", "Mode.A", "Mode.B"),
    "named tuple": (
        "Point = collections.namedtuple('Point', 'x y')\ndef fn(p):\n    return Point(p.y, p.x)",
        "Point(1, 2)",
        "Point(2, 1)",
    ),
    "class redefined": (
        "class Thing:\n    v = 1\nold = Thing()\nclass Thing:\n    v = 2\ndef fn(t):\n    return t.v, Thing.v",
        "old",
        "(1, 2)",
    ),
    "two that call each other": (
        "def even(n):\n    return n == 0 or fn(n - 1)\ndef fn(n):\n    return n != 0 and even(n - 1)",
        "3",
        "True",
    ),
    "what other cells have": ("def fn(x):\n    return collections.Counter([x] * LIMIT)[x]", "1", "3"),
    "test for a notebook": (
        "def is_in_notebook():\n    try:\n        return bool(get_ipython())\n"
        "    except NameError:\n        return False\ndef fn(x):\n    return is_in_notebook()",
        "1",
        "False",
    ),
    "keyword arguments": ("def fn(x, *, y=2):\n    return x + y", "1, y=3", "4"),
}
"""By kind: what defines it, its arguments, and the result."""
REFUSED: dict[str, tuple[str, str, str]] = {
    "generator held": ("held = (i for i in range(3))\ndef fn():\n    return next(held)", "", "'held'.* a generator, "),
    "file captured": (
        "def make(file):\n    def inner():\n        file.flush()\n    return inner\nfn = make(open('/dev/null', 'w'))",
        "",
        "'file'.* a TextIOWrapper, ",
    ),
    "lock as an argument": ("def fn(x):\n    pass", "threading.Lock()", "argument 0 .* a lock, "),
    "lock of a helper": (
        "guard = threading.Lock()\ndef helper():\n    return guard\ndef fn():\n    return helper()",
        "",
        "global variable 'guard' that helper .*uses, a lock, .* with fn",
    ),
    "async def": ("async def fn():\n    pass", "", "only creates a coroutine"),
    "generator function": ("def fn():\n    yield 1", "", "only creates a coroutine or generator"),
    "a lock returned": ("def fn():\n    return threading.Lock()", "", "the return value, a _thread.lock"),
}
"""The ways on which a part is reached and named are those of tests/unit/workers/test_packing.py."""
FIRST = """
import collections, dataclasses, enum, functools, json, threading
from elasticlib import ChildFailedError, ConfigError, LaunchConfig, elastic_launch
LIMIT = 3
"""
CALL = """
try:
    config = LaunchConfig(nproc_per_node=1, max_restarts=0, preload=())
    got = elastic_launch(config, fn)({args})[0]
    print("RESULT", json.dumps([{name!r}, repr(got), {expected}]))
except (ConfigError, ChildFailedError) as error:
    print("RESULT", json.dumps([{name!r}, "refused", str(error)]))
"""


def cells(method: str) -> list[str]:
    found = [FIRST]
    for name, (define, args, expected) in WORKS.items():
        found.append(f"{define}\n{CALL.format(method=method, name=name, args=args, expected=f'got == ({expected})')}")
    for name, (define, args, _) in REFUSED.items():
        found.append(f"{define}\n{CALL.format(method=method, name=name, args=args, expected='None')}")
    return found


def results(output: str) -> dict[str, list[Any]]:
    lines = [json.loads(line.removeprefix("RESULT ")) for line in output.splitlines() if line.startswith("RESULT ")]
    return {name: rest for name, *rest in lines}


def check(found: dict[str, list[Any]], method: str) -> None:
    wrong = {name: found.get(name) for name in WORKS if found.get(name, [0, 0])[1] is not True}
    assert wrong == {}
    for name, (*_, pattern) in REFUSED.items():
        got, text = found[name]
        # Where nothing is sent, the child has all that its parent has.
        if method != "fork" or name in ("async def", "generator function", "a lock returned"):
            assert got == "refused", name
            assert re.search(pattern, text), (name, text)


@pytest.mark.parametrize("method", ["forkserver", "spawn", "fork"])
def test_a_programs_functions_work_or_are_refused_by_name(tmp_path: Path, method: str) -> None:
    (*parts,) = cells(method)
    body = parts[0] + "\ndef main():\n    pass\n" + "\n".join(parts[1:])
    (tmp_path / "program.py").write_text(body)
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )

    assert done.returncode == 0, done.stderr
    check(results(done.stdout), method)


@pytest.mark.parametrize("method", ["forkserver", "spawn", "fork"])
def test_a_notebooks_functions_work_or_are_refused_by_name(tmp_path: Path, method: str) -> None:
    notebook = new_notebook(cells=[new_code_cell(cell) for cell in cells(method)])  # type: ignore[no-untyped-call]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    env.pop("PYTEST_CURRENT_TEST", None)
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=LIMIT, kernel_name="python3", resources=resources).execute(env=env)
    output = "".join(o.text for cell in notebook.cells for o in cell.outputs if o.output_type == "stream")

    check(results(output), method)


# What is large.


def settings(workers: int = 2, **more: Any) -> LaunchConfig:
    return LaunchConfig(nproc_per_node=workers, max_restarts=0, **more)


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_function_may_write_to_a_large_argument_and_nobody_else_sees_it(method: Any) -> None:
    numpy, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")
    array, tensor = numpy.zeros(1 << 18), torch.zeros(1 << 18)

    def writes(array: Any, tensor: Any) -> tuple[float, float, float]:
        before = float(array.sum()), float(tensor.sum())
        array += int(os.environ["RANK"]) + 1
        tensor += int(os.environ["RANK"]) + 1
        return (*before, float(array[7] + tensor[7]))

    for _ in range(2):
        found = elastic_launch(settings(start_method=method), writes)(array, tensor)
        assert found == {0: (0.0, 0.0, 2.0), 1: (0.0, 0.0, 4.0)}
    assert float(array.sum()) == float(tensor.sum()) == 0.0


def test_a_model_of_hundreds_of_shared_tensors_can_be_sent() -> None:
    torch = pytest.importorskip("torch")
    shared = [torch.zeros(3).share_memory_() for _ in range(600)]

    def write(tensors: list[Any]) -> bool:
        for number, tensor in enumerate(tensors):
            tensor += number
        return all(each.is_shared() for each in tensors)

    assert elastic_launch(LaunchConfig(nproc_per_node=1, preload=()), write)(shared) == {0: True}
    with pool(1, group=None, preload=()) as made:
        assert made.run(write, shared) == {0: True}
    assert all(torch.equal(each, torch.full((3,), 2.0 * number)) for number, each in enumerate(shared))


NAMED = """
import sys
import torch
from elasticlib import LaunchConfig, elastic_launch

def write(named, mapped):
    named += 1
    mapped += 2
    return named.sum().item(), mapped.sum().item()

if __name__ == "__main__":
    torch.multiprocessing.set_sharing_strategy("file_system")
    named = torch.ones(5).share_memory_()
    handle = named.untyped_storage()._share_filename_cpu_()[1]
    mapped = torch.from_file(sys.argv[1], shared=True, size=4)
    print(elastic_launch(LaunchConfig(nproc_per_node=1, preload=()), write)(named, mapped))
    print(named.sum().item(), mapped.sum().item(), handle == named.untyped_storage()._share_filename_cpu_()[1])
    print(torch.from_file(sys.argv[1], size=4).sum().item())
"""


def test_memory_that_is_shared_by_name_or_file_stays_where_it_is(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(NAMED)
    command = [sys.executable, str(script), str(tmp_path / "mapped")]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT)

    assert done.stdout == "{0: (10.0, 8.0)}\n10.0 8.0 True\n8.0\n", done.stderr


def test_tensors_that_share_memory_share_it_in_the_worker_too() -> None:
    torch = pytest.importorskip("torch")
    whole = torch.zeros(1 << 18)

    def writes(whole: Any, part: Any, again: Any) -> tuple[float, int, bool]:
        part[0] = 7
        return float(whole[10]), len(part), again is whole

    assert elastic_launch(settings(), writes)(whole, whole[10:20], whole) == dict.fromkeys(range(2), (7.0, 10, True))


@pytest.mark.parametrize("size", [1, 1 << 18])
def test_a_shared_tensor_is_shared_with_the_program(size: int) -> None:
    torch = pytest.importorskip("torch")
    shared = torch.zeros(2, size).share_memory_()

    def writes(shared: Any) -> bool:
        shared[int(os.environ["RANK"])] += int(os.environ["RANK"]) + 1
        return bool(shared.is_shared())

    assert elastic_launch(settings(), writes)(shared) == {0: True, 1: True}
    assert shared[:, -1].tolist() == [1.0, 2.0]
    with pool(2, group=None) as made:
        made.run(writes, shared)
    assert shared[:, 0].tolist() == [2.0, 4.0]


def test_modules_parameters_and_kinds_of_tensors_travel() -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(600, 600)
    model.weight.requires_grad_(False)
    odd = [
        torch.zeros(0),
        torch.tensor(3),
        torch.arange(12).reshape(3, 4).t(),
        torch.zeros(3, dtype=torch.bfloat16),
        torch.zeros(3, dtype=torch.bool),
        torch.zeros(1 << 20, dtype=torch.uint8)[::2],
        torch.eye(3).to_sparse(),
        torch.zeros(2, dtype=torch.complex64).conj(),
    ]

    def compares(model: Any, odd: list[Any]) -> tuple[Any, ...]:
        facts = [
            (each.dtype, tuple(each.shape), each.to_dense().resolve_conj().tolist()[:1] if each.dim() else 0)
            for each in odd
        ]
        return float(model.weight.sum()), model.weight.requires_grad, model.bias.requires_grad, facts

    assert elastic_launch(settings(1), compares)(model, odd)[0] == compares(model, odd)


def test_an_argument_is_what_it_was_at_the_call(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    array = numpy.zeros(1 << 18)

    def waits(array: Any, path: Path) -> float:
        while not path.exists():
            pass
        return float(array.sum())

    job = elastic_launch(settings(1), waits).start(array, tmp_path / "changed")
    array += 1
    (tmp_path / "changed").touch()

    assert job.result(LIMIT) == {0: 0.0}


def test_a_restart_finds_the_argument_as_it_was(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")

    def fails_once(array: Any) -> float:
        found = float(array.sum())
        array += 1
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            raise ValueError
        return found

    assert elastic_launch(LaunchConfig(nproc_per_node=1, max_restarts=1), fails_once)(numpy.zeros(1 << 18)) == {0: 0.0}


def test_large_captures_are_named_with_their_size(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_packing, "_warned", set())
    numpy = pytest.importorskip("numpy")
    data = numpy.zeros(13_000_000)

    def uses() -> int:
        return len(data)

    assert elastic_launch(settings(1), uses)() == {0: 13_000_000}
    assert [record.message for record in caplog.records if "104 MB" in record.message and "'data'" in record.message]
    caplog.clear()
    assert elastic_launch(settings(1), len)(data) == {0: 13_000_000}
    assert "MB" not in caplog.text


GLOBALS = """
import json, multiprocessing, os
import numpy, torch
from elasticlib import LaunchConfig, elastic_launch, pool

large, other, blob = numpy.zeros(1 << 18), numpy.ones(1 << 18), bytes(range(256)) * (1 << 12)
shared = torch.zeros(8).share_memory_()
more = torch.zeros(8).share_memory_()

class Holder:
    def sum(self):
        return float(large.sum() + other.sum() + len(blob))

def spawned(index, holder, queue):
    large[0] += 1                                         # its own
    shared[index] += 1                                    # everybody's
    queue.put((holder.sum(), shared.is_shared()))

def by_spawn(index, argument, argument_shared):
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    process = context.Process(target=spawned, args=(index, Holder(), queue))
    process.start()
    found = queue.get()
    process.join()
    argument_shared[index] += argument.sum()
    return [*map(float, (*found, large.sum(), argument.sum()))]

def opened():
    return len(large), len(shared), len(os.listdir("/proc/self/fd"))

def writes(index):
    large[:] += index
    shared[index] += 1
    return float(large[0])

if __name__ == "__main__":
    # By value: workers that import the script make tensors of their own, as under torch's spawn.
    config = LaunchConfig(nproc_per_node=1, max_restarts=0, preload=(), main="value")
    print("RESULT", json.dumps(["launch", elastic_launch(config, by_spawn)(0, numpy.ones(1 << 18), more)[0]]))
    with pool(1, group=None, preload=(), main="value") as made:
        large += 1
        made.run(writes, 1)
        made.run(len, numpy.ones(1 << 18))                # which has no definitions
        print("RESULT", json.dumps(["pool", made.run(by_spawn, 2, numpy.ones(1 << 18), more)[0]]))
        print("RESULT", json.dumps(["opened", len({made.run(opened)[0] for _ in range(4)})]))
        print("RESULT", json.dumps(["map", made.map(writes, [4, 5])]))
    print("RESULT", json.dumps(["shared", shared.tolist()]))
    print("RESULT", json.dumps(["more", more.tolist()]))
"""


def test_large_and_shared_globals_are_like_arguments_in_workers(tmp_path: Path) -> None:
    """A copy of its own of what is large, and one memory of what is shared."""
    pytest.importorskip("numpy")
    pytest.importorskip("torch")
    (tmp_path / "program.py").write_text(GLOBALS)
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    size = float(1 << 18)
    of_all = size + (256 << 12)
    assert results(done.stdout) == {
        "launch": [[of_all + 1, 1.0, 0.0, size]],
        "pool": [[of_all + size + 1, 1.0, size, size]],
        "opened": [1],
        "map": [[5.0, 6.0]],
        "shared": [[1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0]],
        "more": [[size, 0.0, size, 0.0, 0.0, 0.0, 0.0, 0.0]],
    }


def test_launches_with_large_arguments_leave_no_descriptor() -> None:
    numpy = pytest.importorskip("numpy")
    array = numpy.zeros(1 << 18)
    elastic_launch(settings(1), len)(array)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        elastic_launch(settings(1), len)(array)
        with pytest.raises(PicklingError):
            elastic_launch(settings(1), len)(array, sys._getframe())

    # An idle fork server of another test may end meanwhile, and a thread look at a process just now.
    duties.wait_until(lambda: gc.collect() >= 0 and len(os.listdir("/proc/self/fd")) <= before)


# What was edited.


def test_workers_import_an_edited_module_and_log_shows_each_edit_once(tmp_path: Path) -> None:
    program = """
        import logging, os, sys
        logging.basicConfig(stream=sys.stdout, format="%(message)s")
        import project
        from elasticlib import LaunchConfig, elastic_launch

        def edit(version):
            with open(project.__file__, "w") as file:
                file.write(f"def version():\\n    return {version}\\n")
            os.utime(project.__file__, (version, version))

        def launch():
            return elastic_launch(LaunchConfig(nproc_per_node=1), project.version)()[0]

        edit(1000)
        print("RESULT", launch(), launch())
        edit(2000)
        print("RESULT", launch(), launch(), project.version())
        import importlib
        edit(3000)
        importlib.reload(project)
        print("RESULT", launch(), project.version())
    """
    (tmp_path / "project.py").write_text("def version():\n    return 0\n")
    (tmp_path / "program.py").write_text(textwrap.dedent(program))
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT, check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": ""},
    )  # fmt: skip

    lines = done.stdout.splitlines()
    assert [line for line in lines if "RESULT" in line] == [
        "RESULT 1000 1000",
        "RESULT 2000 2000 0",
        "RESULT 3000 3000",
    ]
    warned = [index for index, line in enumerate(lines) if "changed on disk" in line]
    assert [lines[index] for index in warned] == 2 * [
        "project changed on disk since this program imported it: the workers use the new code, and this program "
        "still uses the old code; call importlib.reload(...) to update the program"
    ]
    results = [index for index, line in enumerate(lines) if "RESULT" in line]
    assert warned[0] < results[0] < warned[1] < results[1]  # also what was edited before the first launch
