"""
A table of likeness: what a training sees in a worker is what it sees in a program of its own.

Its parts: what is drawn by chance (across ranks, restarts, launches and start methods), the state that imports leave
behind (attribute by attribute), and the end of a program. What differs is a row with its reason.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
import threading
import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from elasticlib import LaunchConfig, elastic_launch
from tests.process.scripts.draws import drawn

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.1)]

SCRIPTS = Path(__file__).parents[1] / "scripts"
ROOT = Path(__file__).parents[3]
RUN = [sys.executable, "-m", "elasticlib.run"]
METHODS = ["forkserver", "spawn", "fork", "no preload"]


QUIET = {"LOGLEVEL": "ERROR"}
"""For a test of what stands on stderr: on a busy machine a long import of torch is a warning."""


def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run *command* with the repository on its search path; it must succeed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **options.pop("env", {})}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, **options)
    assert 0 == done.returncode, done.stderr
    return done


def config(method: str, **fields: Any) -> LaunchConfig:
    """A launch of two workers by *method*."""
    return LaunchConfig(nproc_per_node=2, **vars_of(method), **fields)


def vars_of(method: str) -> dict[str, Any]:
    """The fields of a configuration that choose *method*."""
    return {"preload": ()} if method == "no preload" else {"start_method": method}


def equal_draws(draws: list[dict[str, str]]) -> dict[str, list[str]]:
    """The sources of which two processes drew the same."""
    return {source: values for source in draws[0] if len(set(values := [each[source] for each in draws])) < len(draws)}


# What is drawn by chance.


@pytest.mark.parametrize("method", METHODS)
def test_ranks_and_launches_draw_different_numbers(method: str) -> None:
    """Nobody chose a seed: dropout, shuffles and weights differ by rank and by launch, as under torchrun."""
    draws = [draw for _ in range(2) for draw in elastic_launch(config(method), drawn)().values()]

    assert 4 == len(draws)
    assert {} == equal_draws(draws)


@pytest.mark.parametrize("method", ["forkserver", "spawn", "no preload"])
def test_a_restart_draws_different_numbers(method: str, tmp_path: Path) -> None:
    """The round after a failure is no copy of the one before."""
    elastic_launch(config(method, max_restarts=1), SCRIPTS / "draws.py")(str(tmp_path))

    draws = [json.loads(each.read_text()) for each in tmp_path.glob("*.json")]
    assert len(draws) in (3, 4)  # a peer may be stopped before it has drawn
    assert {} == equal_draws(draws)


SEEDING = """
import random
import numpy
import torch
torch.manual_seed(3)
random.seed(3)
numpy.random.seed(3)
chosen = random.Random(3), numpy.random.default_rng(3)
by_chance = numpy.random.default_rng(), numpy.random.Generator(numpy.random.PCG64()), numpy.random.RandomState()
"""
DRAWING = """
import random
import numpy
import torch
torch.rand(5)
random.shuffle(list(range(1_000_000)))
numpy.random.rand()
"""


def drawn_with(module: str) -> dict[str, list[Any]]:
    """Return the random numbers of a program that imports *module* first."""
    import importlib

    made = importlib.import_module(module)
    import random

    import numpy
    import torch

    def first(generators: Any) -> list[float]:
        return [float(each.random_sample() if hasattr(each, "random_sample") else each.random()) for each in generators]

    return {
        "global": [torch.rand(1).item(), random.random(), float(numpy.random.rand())],
        "chosen": first(getattr(made, "chosen", ())),
        "by chance": first(getattr(made, "by_chance", ())),
    }


@pytest.mark.parametrize("preload", ["torch,{}", "{}"])
def test_a_seed_that_a_preloaded_module_chose_is_kept(
    preload: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a program of its own: seeded generators draw what they would there, the others something else."""
    (tmp_path / "seeding_module.py").write_text(SEEDING)
    monkeypatch.syspath_prepend(str(tmp_path))
    names = tuple(preload.format("seeding_module").split(","))
    source = "from tests.process.starting.test_fresh_program import drawn_with; import json, sys; "
    plain = run(
        [sys.executable, "-c", source + "print(json.dumps(drawn_with('seeding_module')))"],
        env={"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"},
        cwd=ROOT,
    )

    first, second = elastic_launch(config("forkserver", preload=names), drawn_with)("seeding_module").values()

    expected = json.loads(plain.stdout)
    for seen in (first, second):
        assert (expected["global"], expected["chosen"]) == (seen["global"], seen["chosen"])
    values = expected["by chance"] + first["by chance"] + second["by chance"]
    assert len(values) == len(set(values))


def test_a_preloaded_module_that_only_draws_has_chosen_no_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its numbers leave the generators unseeded."""
    (tmp_path / "drawing_module.py").write_text(DRAWING)
    monkeypatch.syspath_prepend(str(tmp_path))

    first, second = elastic_launch(config("forkserver", preload=("drawing_module",)), drawn_with)(
        "drawing_module"
    ).values()

    assert not set(first["global"]) & set(second["global"])


# The state that imports leave behind.

DIFFERENT = {
    "cuda.__": "of a namespace package: holds the search path, on which the script's folder is",
    "__mp_main__.": "this script itself: multiprocessing's other name of the main module",
    "elasticlib.": "a worker has more of it, and other things in it",
    "encodings._cache": "a cache of codecs",
    "filelock._api._INIT_PARAMETER_MODELS": "a cache of weak references: the fork server collects garbage",
    "inspect.": "a cache of sources: the launcher's own modules are among them",
    "linecache.": "a cache of sources",
    "logging._handlerList": "weak references in no order",
    "logging._startTime": "each program's own start",
    "multiprocessing.process._current_process": "holds each process' own key",
    "multiprocessing.util._afterfork_registry": "the main process registers itself",
    "os.environ": "a worker has more variables",
    "os.environb": "the same",
    "torch.jit._builtins._builtin_table": "by address, also of what is gone by then: some addresses come twice",
    "torch._native.flydsl_utils._environ": "the same, in torch 2.15",
    "posix.environ": "the same",
    "platform._sys_version_cache": "a cache",
    "random.": "the generators' states, which differ between any two programs",
    "numpy.random.": "the same",
    "re._cache": "a cache of patterns",
    "re._cache2": "the same",
    "sre_compile.": "the same",
    "sys.": "flags, paths and names of the command: held one by one in test_likeness.py",
    "tempfile.tempdir": "torch._dynamo looks for a folder at its import; each worker does so by itself",
    "threading._active": "each thread's own number",
    "threading._main_thread": "the same",
    "threading._dangling": "the same",
    "threading._shutdown_locks": "of Python 3.11 and older: made anew by each fork",
    "triton.language.extra.modules": "`sys.modules` by another name",
    "torch.cuda._queued_calls": "holds the stack of the import",
    "_warnings.": "counts changes; what an import warned of was shown by the fork server",
    "warnings.": "the same",
    "torch.utils._pytree.__warningregistry__": "the same",
    "ctypes.": "addresses of libraries",
    "_ctypes.": "the same",
}
"""By prefix, the attributes that differ between a program and a worker, or any two programs, with the reason."""


@pytest.mark.sampled(0.2)
@pytest.mark.parametrize("modules", ["torch", "torch,torch._dynamo", "torch,torch._inductor.compile_fx"])
def test_imports_leave_the_same_state_in_a_worker_as_in_a_program(modules: str) -> None:
    """Attribute by attribute of all modules, and no module less."""
    script = str(SCRIPTS / "state.py")
    threads = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}  # else texts made from sets differ by chance
    plain = [json.loads(run([sys.executable, "-u", script, modules], env=threads).stdout) for _ in range(2)]
    done = run([*RUN, "--nproc-per-node", "1", "--preload", modules, script, modules], env=threads)
    worker = json.loads(done.stdout)

    expected, again = (each["state"] for each in plain)
    any_two = {name for name in expected if expected[name] != again.get(name)}
    differing = {
        name: (expected[name][:300], worker["state"].get(name, "missing")[:300])
        for name in expected
        if name not in any_two and expected[name] != worker["state"].get(name) and not name.startswith(tuple(DIFFERENT))
    }
    assert {} == differing
    assert not set(plain[0]["modules"]) - set(worker["modules"])


def shared_with_peers() -> tuple[int, int, str, float]:
    """Return the values that all workers of one fork server share."""
    import logging
    import multiprocessing
    import time

    import torch

    main = sys.modules["__main__"] is sys.modules["__mp_main__"]
    name = multiprocessing.Process(target=print).name if main else "no __mp_main__"
    return hash("a text"), id(torch), name, time.time() - logging._startTime  # type: ignore[attr-defined]


def test_hash_secret_and_addresses_are_the_fork_servers() -> None:
    """A fork cannot change them: equal on all ranks, of one fork server, where `spawn` has its own for each."""
    forked = list(elastic_launch(config("forkserver"), shared_with_peers)().values())
    spawned = list(elastic_launch(config("spawn"), shared_with_peers)().values())

    assert forked[0][:2] == forked[1][:2]
    assert spawned[0][0] != spawned[1][0]
    for _, _, process, age in (*forked, *spawned):
        assert "Process-1" == process
        assert 0 <= age < 30


# The end of a program.

WRITERS = """
import bz2, csv, gzip, io, logging, logging.handlers, lzma, os, pickle, shelve, sys, tarfile, zipfile

class Cycle:
    def __init__(self, file):
        self.file, self.me = file, self

class Finalizer:
    def __init__(self, path):
        self.path, self.open = path, open
    def __del__(self):
        with self.open(self.path, "a") as file:
            file.write("finalized\\n")

class AtExit(io.StringIO):
    pass

def written(folder):
    text = open(f"{folder}/text", "w"); text.write("hello\\n")
    binary = open(f"{folder}/binary", "wb"); binary.write(b"hello\\n")
    both = open(f"{folder}/both", "w+"); both.write("hello\\n")
    rows = csv.writer(open(f"{folder}/rows.csv", "w")); rows.writerow([1, 2])
    packed = gzip.GzipFile(f"{folder}/packed.gz", "wb", mtime=0); packed.write(b"hello\\n")
    packed_text = gzip.open(f"{folder}/packed_text.gz", "wt"); packed_text.write("hello\\n")
    bz = bz2.open(f"{folder}/packed.bz2", "wb"); bz.write(b"hello\\n")
    xz = lzma.open(f"{folder}/packed.xz", "wt"); xz.write("hello\\n")
    archive = zipfile.ZipFile(f"{folder}/archive.zip", "w"); archive.writestr("name", "hello\\n")
    cycle = Cycle(open(f"{folder}/cycle", "w")); cycle.file.write("hello\\n")
    handler = logging.handlers.MemoryHandler(100, target=logging.FileHandler(f"{folder}/log"))
    handler.emit(logging.makeLogRecord({"msg": "hello", "levelno": 20}))
    shelf = shelve.open(f"{folder}/shelf", writeback=True); shelf["key"] = ["hello"]
    pickler = pickle.Pickler(open(f"{folder}/pickled", "wb")); pickler.dump("hello")
    return [text, binary, both, rows, packed, packed_text, bz, xz, archive, cycle, handler, shelf, pickler]
"""
SCRIPT_WRITERS = WRITERS + "kept = written(sys.argv[1])\nlast = Finalizer(sys.argv[1] + '/finalizer')\n"
NOT_IN_FORKS = {"archive.zip", "finalizer", "shelf.dat", "shelf.dir", "shelf.bak", "shelf", "shelf.db"}
"""
Written by finalizers that are no files' own. In a process that was forked from the caller these do not run: the objects
around them are the caller's too, whose end it is not. (Such children of multiprocessing lose the files as well.)
"""


def left_in(folder: Path, leave_out: Collection[str] = ()) -> dict[str, bytes]:
    """The contents of a folder by file name, unpacked where the packed form holds the time of writing."""
    found = {}
    for each in folder.iterdir():
        if each.name in leave_out:
            continue
        content = each.read_bytes()
        if each.suffix == ".gz":
            content = gzip.decompress(content)
        found[each.name] = content if each.suffix != ".zip" else zipfile.ZipFile(each).read("name")
    return found


kept: list[Any] = []
"""Objects that `write_and_hold` keeps after it returns."""


def write_when_the_main_thread_has_ended(path: str) -> None:
    """Work of a thread for which a program waits before it ends."""
    threading.main_thread().join()
    Path(path).write_text("written\n")


def write_and_hold(folder: str, finalize: bool, daemon: bool = False) -> None:
    """Write to files of all kinds that nobody closes, and keep them in a global variable."""
    namespace: dict[str, Any] = {}
    exec(WRITERS, namespace)
    kept.append(namespace)
    kept.append(namespace["written"](folder))
    threading.Thread(target=write_when_the_main_thread_has_ended, args=(f"{folder}/thread",)).start()
    if finalize:
        kept.append(namespace["Finalizer"](f"{folder}/finalizer"))
    if daemon:
        threading.Thread(target=threading.Event().wait, daemon=True).start()


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_unclosed_file_of_a_script_is_written_at_its_end(method: str, tmp_path: Path) -> None:
    """Text, csv, gzip, zip, logs ...: the same files with the same contents as under ``python``."""
    script, plain, worker = tmp_path / "writes.py", tmp_path / "plain", tmp_path / "worker"
    script.write_text(SCRIPT_WRITERS)
    plain.mkdir()
    worker.mkdir()
    run([sys.executable, "-u", str(script), str(plain)])

    run([*RUN, "--nproc-per-node", "1", "--start-method", method, str(script), str(worker)])

    assert left_in(plain) == left_in(worker)
    assert b"finalized\n" == left_in(worker)["finalizer"]


@pytest.mark.parametrize("method", METHODS)
def test_unclosed_file_of_a_function_is_written_at_its_end(method: str, tmp_path: Path) -> None:
    """The function keeps the files in a global variable; each way of starting writes them all the same."""
    plain, worker = tmp_path / "plain", tmp_path / "worker"
    plain.mkdir()
    worker.mkdir()
    source = "from tests.process.starting.test_fresh_program import write_and_hold; import sys; "
    run([sys.executable, "-c", source + "write_and_hold(sys.argv[1], True)", str(plain)], cwd=ROOT)

    elastic_launch(LaunchConfig(nproc_per_node=1, **vars_of(method)), write_and_hold)(str(worker), True)

    leave_out = NOT_IN_FORKS if method == "fork" else ()
    assert left_in(plain, leave_out) == left_in(worker, leave_out)


def test_files_are_written_also_beside_a_daemon_thread(tmp_path: Path) -> None:
    """It waits for ever, and keeps nothing from being written."""
    elastic_launch(LaunchConfig(nproc_per_node=1), write_and_hold)(str(tmp_path), True, daemon=True)

    found = left_in(tmp_path)
    assert (b"hello\n", b"hello\n", b"hello\n") == (found["text"], found["packed.gz"], found["archive.zip"])
    assert b"finalized\n" == found["finalizer"]


BUSY_DAEMON = """
import threading, time
import torch

table = {}

def work():
    while True:
        table[len(table)] = torch.ones(3).sum()
        time.sleep(0)

def wait():
    while True:
        time.sleep(0.001)
        table.get(1)

for target in (work, wait):
    threading.Thread(target=target, daemon=True).start()
out = open(__file__ + ".out", "a")
out.write("text")
"""


def test_busy_daemon_threads_print_nothing_at_the_end(tmp_path: Path) -> None:
    """Their globals go away under their feet; as in an interpreter they end without a word."""
    script = tmp_path / "busy.py"
    script.write_text(BUSY_DAEMON)

    done = run([*RUN, "--nproc-per-node", "4", str(script)], env=QUIET)

    assert ("", "") == (done.stdout, done.stderr)
    assert "text" * 4 == (tmp_path / "busy.py.out").read_text()


def buffered_by_the_caller(path: str) -> None:
    """Write to a file of one's own; the caller's file has something in its buffer."""
    own = open(path, "w")
    own.write("the worker's\n")
    kept.append(own)


def test_forked_worker_does_not_write_the_callers_buffers(tmp_path: Path) -> None:
    """Check that buffered text of the caller is written once, by the caller."""
    with open(tmp_path / "caller", "w") as file:
        file.write("the caller's\n")
        kept.append(file)
        elastic_launch(LaunchConfig(nproc_per_node=2, start_method="fork"), buffered_by_the_caller)(
            str(tmp_path / "worker")
        )
    kept.clear()

    assert "the caller's\n" == (tmp_path / "caller").read_text()
    assert "the worker's\n" == (tmp_path / "worker").read_text()


ENDING = """
import atexit, sys, threading
import ending_beside

class Loud:
    def __init__(self, name):
        self.name = name
    def __del__(self):
        print("deleted", self.name, flush=True)

def function():
    pass

first, _private, second = Loud("first"), Loud("private"), Loud("second")
ending_beside.kept = Loud("of another module")
cycle = [Loud("in a cycle")]
cycle.append(cycle)
sys.stdout.loud = Loud("of a stream")
atexit.register(print, "exit handler", flush=True)
threading.Thread(target=lambda: (threading.main_thread().join(), print("thread", flush=True))).start()
last = open(sys.argv[1], "w")
last.write("text")
print("end of main part", flush=True)
"""


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
@pytest.mark.parametrize("ending", ["", "raise SystemExit(7)", "raise ValueError('at its end')"])
def test_a_program_ends_in_the_interpreters_order(method: str, ending: str, tmp_path: Path) -> None:
    """Threads, exit handlers, then finalizers: the same lines in the same order, and the same exit status."""
    (tmp_path / "ending_beside.py").write_text("def function(): pass\n")
    (tmp_path / "ends.py").write_text(ENDING + ending + "\n")
    command = [str(tmp_path / "ends.py"), str(tmp_path / "out")]
    plain = subprocess.run([sys.executable, "-u", *command], capture_output=True, text=True, timeout=60)
    assert "text" == (tmp_path / "out").read_text()
    (tmp_path / "out").unlink()

    worker = subprocess.run(
        [*RUN, "--nproc-per-node", "1", "--start-method", method, *command],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )

    assert plain.stdout.splitlines() == worker.stdout.splitlines()
    assert "text" == (tmp_path / "out").read_text()
    assert bool(plain.returncode) == bool(worker.returncode)
    assert ("exitcode  : 7" in worker.stderr) == (plain.returncode == 7)


READS_ITSELF = """
import os, sys, threading

def main(folder, lines):
    # A worker that hands its own output to a thread, as torchrunx and log shippers do.
    reader, writer = os.pipe()
    os.dup2(writer, 1)
    os.close(writer)
    taken = open(f"{folder}/{os.environ['RANK']}", "w", buffering=1)

    def read():
        with os.fdopen(reader) as file:
            for line in file:
                taken.write(line)

    threading.Thread(target=read, daemon=True).start()
    for number in range(lines):
        print("line", number)
"""


@pytest.mark.parametrize("method", ["forkserver", "fork"])
def test_daemon_thread_reading_own_output_gets_the_last_lines(method: str, tmp_path: Path) -> None:
    """All lines of all workers: the process lives until the pipe is empty and the thread waits again."""
    namespace: dict[str, Any] = {}
    exec(READS_ITSELF, namespace)

    elastic_launch(LaunchConfig(nproc_per_node=8, start_method=method), namespace["main"])(str(tmp_path), 500)  # type: ignore[arg-type]

    assert 8 == len(list(tmp_path.iterdir()))
    for each in tmp_path.iterdir():
        assert [f"line {number}" for number in range(500)] == each.read_text().splitlines()


ODD_ENDS = {
    "stdout is closed": "sys.stdout.close()",
    "stderr is closed": "sys.stderr.close()",
    "stdout is a closed file": "with open(folder + '/other', 'w') as sys.stdout:\n    print('there')",
    "the hook exits": "sys.excepthook = lambda *_: sys.exit(5)\nraise ValueError",
    "the hook raises": "def hook(*_):\n    raise RuntimeError\nsys.excepthook = hook\nraise ValueError",
    "the hook shows it": "sys.excepthook = lambda *_: print('shown')\nraise ValueError",
    "a handler asks for the error": "atexit.register(lambda: print(repr(sys.last_value)))\nraise ValueError(7)",
    "a handler raises": "atexit.register(lambda: 1 / 0)",
    "a huge status": "sys.exit(2**70)",
    "a negative status": "sys.exit(-1)",
    "a text": "sys.exit('no more data')",
    "an interrupt": "raise KeyboardInterrupt",
    "a signal's handler would raise": "signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))\nlast = Kills()",
}
ENDS_AFTER_ITS_STATUS = "a signal's handler would raise"
"""A finalizer that ends the process comes after the program's end: its status is known by then, and stands."""
ODD_HEAD = """
import atexit, os, signal, sys, threading, time
folder = sys.argv[1]
data = open(folder + "/data", "w")
data.write("data")
atexit.register(lambda: open(folder + "/handler", "w").write("handler"))

class Kills:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGTERM):
        kill(pid, number)

reading, writing = os.pipe()
full = open(writing, "w")
sticking = []

def sticks():
    sticking.append(1)
    full.write("x" * (1 << 20))
    full.flush()

"""


def status_in(summary: str) -> int:
    """The exit status that a launcher's report names; 0 where it reports no failure."""
    found = re.search(r"exitcode  : (-?\d+)", summary)
    return 0 if found is None else int(found.group(1))


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
@pytest.mark.parametrize("how", ODD_ENDS)
def test_an_odd_end_of_a_script_is_the_interpreters(how: str, method: str, tmp_path: Path) -> None:
    """Its output, its exit status, its exit handlers, and what its files held."""
    script, plain, worker = tmp_path / "ends.py", tmp_path / "plain", tmp_path / "worker"
    script.write_text(ODD_HEAD + ODD_ENDS[how] + "\n")
    plain.mkdir()
    worker.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-u", str(script), str(plain)]
    expected = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)

    command = [*RUN, "--nproc-per-node", "1", "--start-method", method, str(script), str(worker)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)

    assert expected.stdout == done.stdout
    assert (0 if how == ENDS_AFTER_ITS_STATUS else expected.returncode) == status_in(done.stderr)
    found = left_in(worker)  # an interpreter whose hook exits loses what is in buffers: nobody minds that we do not
    assert {name: content or found.get(name) for name, content in left_in(plain).items()} == found


def test_file_locked_by_a_daemon_thread_blocks_no_other_file(tmp_path: Path) -> None:
    """The thread sits in a write to a full pipe for ever."""
    script = tmp_path / "ends.py"
    script.write_text(
        ODD_HEAD + "threading.Thread(target=sticks, daemon=True).start()\nwhile not sticking: time.sleep(0)\n"
    )

    done = run([*RUN, "--nproc-per-node", "1", "--exit-timeout", "20", str(script), str(tmp_path)])

    assert ("", "data") == (done.stderr, (tmp_path / "data").read_text())


def test_daemon_thread_that_catches_its_end_does_not_end_the_process(tmp_path: Path) -> None:
    """The interpreter would have stopped it before it could."""
    script = tmp_path / "heartbeat.py"
    script.write_text(
        "import os, threading, time\nbeats = []\ndef beat():\n    try:\n        while True:\n"
        "            time.sleep(0.001)\n            beats.append(1)\n    except BaseException:\n        os._exit(9)\n"
        "threading.Thread(target=beat, daemon=True).start()\nwhile not beats: time.sleep(0.001)\n"
    )

    done = run([*RUN, "--nproc-per-node", "4", str(script)], env=QUIET)

    assert ("", "") == (done.stdout, done.stderr)
