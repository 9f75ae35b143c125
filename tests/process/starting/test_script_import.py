"""A function of a guarded script finds in the workers what the script's import makes, and what its program has set."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.4)]

LIMIT = 120.0
HEAD = """
    import json, os, sys
    from elasticlib import LaunchConfig, elastic_launch
    def config(n=1, **more): return LaunchConfig(nproc_per_node=n, max_restarts=0, **more)
    def report(value): print("reported", json.dumps(value), flush=True)
"""


def run(
    folder: Path, source: str, *command: str, name: str = "train.py", env: dict[str, str] | None = None
) -> list[Any]:
    """Return the values that the program *source* reports, run as *command* or by its path."""
    path = folder / name
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(textwrap.dedent(HEAD) + textwrap.dedent(source))
    done = subprocess.run(
        command if command[:1] == ("sh",) else [sys.executable, *(command or [str(path)])],
        cwd=folder,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (done.stdout + done.stderr).splitlines()
    return [json.loads(line.removeprefix("reported ")) for line in lines if line.startswith("reported ")]


TOP_LEVEL = """
    import contextvars, decimal, functools, itertools, logging, threading
    import torch
    torch.set_default_dtype(torch.float64)
    decimal.getcontext().prec = 5
    logging.getLogger("mine").setLevel(7)
    json.mine = "patched"
    lock, local, event = threading.Lock(), threading.local(), threading.Event()
    variable = contextvars.ContextVar("variable", default=3)
    numbers = (each for each in range(3))
    counter = itertools.count()
    @torch.jit.script
    def scripted(x: torch.Tensor) -> torch.Tensor:
        return x + 1
    @functools.singledispatch
    def kind(x): return "other"
    @kind.register
    def _(x: int): return "int"
    class Point:
        count = 0
        lock = threading.Lock()
        def __init__(self, x): self.x = x
    def train():
        with lock, Point.lock:
            event.set()
        local.x = 1
        return [
            str(torch.get_default_dtype()), decimal.getcontext().prec, logging.getLogger("mine").level,
            json.mine, variable.get(), next(numbers), next(counter), float(scripted(torch.ones(1))),
            kind(1),
        ]
    expected = ["torch.float64", 5, 7, "patched", 3, 0, 0, 2.0, "int"]
"""


def test_a_function_finds_what_the_script_makes_at_its_top_level(tmp_path: Path) -> None:
    source = (
        TOP_LEVEL
        + """
    if __name__ == "__main__":
        report(elastic_launch(config(2), train)()[1] == expected)
    """
    )
    assert run(tmp_path, source) == [True]


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_variables_that_the_program_set_are_laid_over_the_import(tmp_path: Path, method: str) -> None:
    source = f"""
    import argparse
    CFG, STEPS, UNTOUCHED = {{}}, 1, [1]
    SAME = UNTOUCHED
    class Late: pass
    def train():
        return CFG, STEPS, args.rate, UNTOUCHED is SAME, helper(), type(late) is Late, __name__
    def main():
        global STEPS
        STEPS = 3
        CFG["rate"] = 2
        report(elastic_launch(config(start_method={method!r}), train)()[0])
    if __name__ == "__main__":
        args = argparse.Namespace(rate=5)
        late = Late()
        def helper(): return STEPS + args.rate
        main()
    """
    assert run(tmp_path, source) == [[{"rate": 2}, 3, 5, True, 8, True, "__mp_main__"]]


@pytest.mark.parametrize("way", ["file", "module", "pdb", "runpy", "thread", "%run"])
def test_each_way_to_run_a_script_imports_it(tmp_path: Path, way: str) -> None:
    source = """
    import threading
    lock = threading.Lock()
    def train():
        with lock: return args
    def main():
        global args
        args = 4
        report(elastic_launch(config(), train)()[0])
    if __name__ == "__main__":
        if len(sys.argv) > 1:
            thread = threading.Thread(target=main)
            thread.start()
            thread.join()
        else:
            main()
    """
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text("")
    path = str(tmp_path / "pkg" / "train.py")
    command = {
        "file": (path,),
        "module": ("-m", "pkg.train"),
        "pdb": ("-m", "pdb", "-c", "continue", "-c", "quit", path),
        "runpy": ("-c", f"import runpy; runpy.run_path({path!r}, run_name='__main__')"),
        "thread": (path, "thread"),
        "%run": ("-m", "IPython", "-c", f"%run {path}"),
    }[way]
    env = {"PYTHONPATH": str(tmp_path)}
    assert run(tmp_path, source, *command, name="pkg/train.py", env=env) == [4]


@pytest.mark.parametrize("way", ["file", "module"])
def test_a_worker_finds_of_its_script_what_a_spawned_process_finds(tmp_path: Path, way: str) -> None:
    source = """
    import multiprocessing
    def facts():
        main, spec = sys.modules["__main__"], __spec__
        return [
            __name__, __file__, __package__, spec and spec.name, spec and spec.origin,
            main is sys.modules["__mp_main__"],
            main.facts is facts, facts.__module__, main.__dict__ is globals(), sys.argv, sys.path, os.getcwd(),
            multiprocessing.parent_process() is not None, sorted(name for name in globals() if name != "__cached__"),
        ]
    def put(queue): queue.put(facts())
    if __name__ == "__main__":
        queue = multiprocessing.get_context("spawn").SimpleQueue()
        process = multiprocessing.get_context("spawn").Process(target=put, args=(queue,))
        process.start()
        report(queue.get())
        process.join()
        report(elastic_launch(config(), facts)()[0])
    """
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text("")
    command = ("-m", "pkg.train") if way == "module" else (str(tmp_path / "pkg" / "train.py"),)
    spawned, launched = run(tmp_path, source, *command, name="pkg/train.py")
    # In a process of multiprocessing the script's functions have variables apart from those of the module.
    own, parent = 8, 12
    assert [spawned[own], launched[own]] == [False, True]
    assert [spawned[parent], launched[parent]] == [True, False]
    differ = [each for each in range(len(spawned)) if spawned[each] != launched[each]]
    assert differ == [own, parent], [(spawned[each], launched[each]) for each in differ]


def test_a_command_is_imported_by_the_workers_of_its_module(tmp_path: Path) -> None:
    source = """
    import threading
    lock = threading.Lock()
    def train():
        with lock: return os.environ["RANK"], sys.modules["__main__"].mark
    def main(): report(elastic_launch(config(), train)()[0])
    """
    (tmp_path / "start").write_text("from train import main\nmark = 5\nif __name__ == '__main__':\n    main()\n")
    assert run(tmp_path, source, "start") == [["0", 5]]


def test_a_launch_within_a_worker_imports_the_script_again(tmp_path: Path) -> None:
    source = """
    import threading
    lock = threading.Lock()
    def inner():
        with lock: return rate
    def outer():
        return elastic_launch(config(), inner)()[0]
    if __name__ == "__main__":
        rate = 6
        report(elastic_launch(config(), outer)()[0])
    """
    assert run(tmp_path, source) == [6]


def test_results_and_errors_are_of_the_programs_own_classes(tmp_path: Path) -> None:
    source = """
    import enum
    class Point:
        class Inner: pass
        def __init__(self, x): self.x = x
    class Colour(enum.Enum): RED = 1
    class Trouble(Exception): pass
    def train(point):
        assert type(point) is Point
        return Point(point.x + 1), Colour.RED, Point.Inner
    def fail(): raise Trouble("no")
    if __name__ == "__main__":
        point, colour, inner = elastic_launch(config(), train)(Point(1))[0]
        report([type(point) is Point, point.x, colour is Colour.RED, inner is Point.Inner])
        try: elastic_launch(config(), fail)()
        except Trouble as error: report(["Trouble: no" in str(error), type(error).__mro__.count(Trouble)])
    """
    assert run(tmp_path, source) == [[True, 2, True, True], [True, 1]]


def test_processes_that_a_worker_spawns_have_the_script_with_its_variables(tmp_path: Path) -> None:
    source = """
    import torch.multiprocessing as mp
    def child(queue): queue.put(rate)
    def train():
        context = mp.get_context("spawn")
        queue = context.SimpleQueue()
        process = context.Process(target=child, args=(queue,))
        process.start()
        process.join()
        return queue.get()
    if __name__ == "__main__":
        rate = 7
        report(elastic_launch(config(), train)()[0])
    """
    assert run(tmp_path, source) == [7]


def test_unsendable_object_of_an_unguarded_script_names_both_ways_out(tmp_path: Path) -> None:
    source = """
    import threading
    lock = threading.Lock()
    def train(): return lock
    try: elastic_launch(config(), train)()
    except TypeError as error: report(str(error))
    """
    (text,) = run(tmp_path, source)
    assert "global variable 'lock' that train uses, a lock, cannot be sent" in str(text)
    assert "put the launch under `if __name__ == '__main__':`" in str(text) and "make it inside the function" in str(
        text
    )


@pytest.mark.parametrize(
    ("guard", "choices", "names"),
    [
        ("__name__ == '__main__'", ["import", "value", None], ["__mp_main__", "__main__", "__mp_main__"]),
        ("True", [None], ["__main__"]),
    ],
    ids=["guarded", "unguarded"],
)
def test_guarded_script_is_imported_and_unguarded_one_is_sent_by_value(
    guard: str, choices: list[str | None], names: list[str], tmp_path: Path
) -> None:
    source = f"""
    rate = 8
    def train(): return rate, __name__
    if {guard}:
        report([elastic_launch(config(main=each), train)()[0] for each in {choices!r}])
    """
    assert run(tmp_path, source) == [[[8, name] for name in names]]


def test_a_launch_that_the_import_makes_is_an_error_and_no_second_job(tmp_path: Path) -> None:
    source = """
    def train(): return 1
    if os.environ.get("RANK") or __name__ == "__main__":
        try: report(elastic_launch(config(main="import"), train)()[0])
        except Exception as error:
            if os.environ.get("RANK"): raise
            report("while a worker imports it" in str(error))
    """
    assert run(tmp_path, source) == [True]


def test_object_made_under_guard_is_refused_and_failed_import_raises(tmp_path: Path) -> None:
    """The first is refused before the start; the second is told with its place."""
    source = """
    import threading
    def train(): return 1
    def locked(): return lock
    if __name__ != "__main__": raise ValueError("not here")
    if __name__ == "__main__":
        lock = threading.Lock()
        try: elastic_launch(config(), locked)()
        except TypeError as error: report(str(error))
        try: elastic_launch(config(), train)()
        except ValueError as error:
            report(["not here" in str(error), "train.py" in str(error), "_main.py" in str(error)])
    """
    refused, failed = run(tmp_path, source)
    assert "global variable 'lock' that locked uses, a lock, is defined under the script's `if __name__" in str(refused)
    assert failed == [True, True, False]


def test_pool_imports_the_script_once_and_calls_find_the_callers_data(tmp_path: Path) -> None:
    source = """
    import threading, elasticlib
    lock, local, cache, rate = threading.Lock(), threading.local(), {}, 1
    def work(key):
        with lock: cache[key] = rate
        local.calls = getattr(local, "calls", 0) + 1
        return dict(cache), local.calls
    if __name__ == "__main__":
        with elasticlib.pool(1, group=None) as pool:
            first = pool.run(work, "a")[0]
            rate = 2
            report([first, pool.run(work, "b")[0]])
    """
    assert run(tmp_path, source) == [[[{"a": 1}, 1], [{"b": 2}, 2]]]


def test_values_that_an_import_makes_of_its_process_differ_per_worker(tmp_path: Path) -> None:
    """A rank, a process id and random weights differ from the caller's, and nobody has changed them."""
    source = """
        import torch
        RANK, PID = int(os.environ.get("RANK", -1)), os.getpid()
        WEIGHT = torch.nn.Parameter(torch.randn(2))
        OPTIMIZER = torch.optim.SGD([WEIGHT], lr=1.0)
        FACTS = {"rank": RANK, "pid": PID}
        def train():
            before = WEIGHT.detach().clone()
            WEIGHT.sum().backward()
            OPTIMIZER.step()
            moved = not torch.equal(before, WEIGHT)
            return [RANK, FACTS["rank"], PID == os.getpid(), FACTS["pid"] == os.getpid(), moved]
        if __name__ == "__main__":
            report(elastic_launch(config(2), train)())
    """

    assert run(tmp_path, source) == [{"0": [0, 0, True, True, True], "1": [1, 1, True, True, True]}]


def test_objects_stay_the_same_within_and_beside_what_is_laid_over(tmp_path: Path) -> None:
    """Attributes of a dictionary of the user's count too; an object's own ``__getattr__`` is not called."""
    source = """
        import dataclasses
        MISSING = object()
        class Node: pass
        ROOT = Node()
        DEFAULTS, NODES, TAGS = {"x": MISSING, "y": 1}, [ROOT], []
        @dataclasses.dataclass
        class Context:
            node: object
            step: int = 0
        CONTEXT = Context(ROOT)
        class Registry:
            items, defaults, context = TAGS, DEFAULTS, CONTEXT
        class Config(dict):
            level = 1
        CFG, PLAIN = Config(a=1), Config(a=1)
        class Lazy:
            def __getattr__(self, name):
                raise RuntimeError(f"{name} is not ready")
            def __call__(self): return 3
        class Dot(dict):
            __getattr__ = dict.get
        LAZY, DOT = Lazy(), Dot(a=1)
        def main():
            TAGS.append("a")
            DEFAULTS["y"] = 2
            CONTEXT.step = 3
            NODES.append(1)
            CFG.debug = True
            DOT["b"] = 2
        def train():
            return [
                DEFAULTS["x"] is MISSING, NODES[0] is ROOT, CONTEXT.node is ROOT, NODES[1],
                Registry.items is TAGS, Registry.defaults is DEFAULTS, Registry.context is CONTEXT,
                TAGS, DEFAULTS["y"], CONTEXT.step,
                vars(CFG).get("debug", False), PLAIN.level, LAZY(), DOT.a,
            ]
        if __name__ == "__main__":
            main()
            report(elastic_launch(config(), train)()[0])
    """

    expected = [True, True, True, 1, True, True, True, ["a"], 2, 3, True, 1, 3, 1]
    assert run(tmp_path, source) == [expected]


def test_script_read_from_a_pipe_is_not_read_again(tmp_path: Path) -> None:
    source = """
        def train(): return [__name__]
        if __name__ == "__main__":
            report(elastic_launch(config(), train)()[0])
    """
    command = f"mkfifo pipe; cat train.py > pipe & exec {sys.executable} pipe"

    assert run(tmp_path, source, "sh", "-c", command) == [["__main__"]]


def test_pool_whose_import_failed_imports_the_script_again(tmp_path: Path) -> None:
    source = """
        if __name__ == "__mp_main__" and os.path.exists("broken"):
            raise RuntimeError("cannot import now")
        class Point: pass
        POINT = Point()
        def train(): return [__name__, isinstance(POINT, Point)]
        if __name__ == "__main__":
            from elasticlib import ChildFailedError, pool
            open("broken", "w").close()
            with pool(1, group=None) as workers:
                seen = []
                for _ in range(2):
                    try:
                        workers.run(train)
                    except ChildFailedError as error:
                        seen.append(str(error))
                os.remove("broken")
                seen.append(workers.run(train)[0])
                by_value = eval("lambda point: type(point).__name__")
                seen += [workers.run(by_value, Point())[0], workers.run(train)[0]]
                report(seen)
    """

    *errors, after, name, again = run(tmp_path, source)[0]  # type: ignore[misc]
    assert len(errors) == 2 and all("cannot import now" in error for error in errors)
    assert (after, name, again) == (["__mp_main__", True], "Point", ["__mp_main__", True])


def test_calls_of_a_pool_leave_no_descriptor_in_its_workers(tmp_path: Path) -> None:
    source = """
        import multiprocessing
        def files(): return len(os.listdir("/proc/self/fd"))
        def add(value): value.value += 1
        if __name__ == "__main__":
            from elasticlib import pool
            value = multiprocessing.get_context("spawn").Value("i", 0)
            with pool(1, group=None) as workers:
                workers.run(add, value)
                before = workers.run(files)[0]
                for _ in range(10):
                    workers.run(add, value)
                report([workers.run(files)[0] - before, value.value])
    """

    assert run(tmp_path, source) == [[0, 11]]
