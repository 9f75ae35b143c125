"""A worker looks to user code like ``python -u script.py``, although it was forked from a fork server."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time
import zipapp
from pathlib import Path
from typing import Any

import pytest

from elasticlib import LaunchConfig, elastic_launch
from tests.process.launches import ROOT, environment, run_python

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.2)]

SCRIPTS = Path(__file__).parents[1] / "scripts"
RUN = ["-m", "elasticlib.run", "--nproc-per-node"]


def launch(count: int, *command: str, **options: Any) -> str:
    """The output of *command* under the launcher, which must succeed."""
    done = run_python(*RUN, str(count), *command, **options)
    assert 0 == done.returncode, done.stderr
    return done.stdout


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
@pytest.mark.parametrize("as_module", [False, True], ids=["script", "module"])
def test_a_worker_sees_of_itself_what_a_plain_program_sees(method: str, as_module: bool) -> None:
    """argv, search path, names, process, threads, signals, streams, descriptors: all as with ``python -u``."""
    name = ["-m", "tests.process.scripts.facts"] if as_module else [str(SCRIPTS / "facts.py")]
    arguments = ["--flag", "", "a b"]
    plain = run_python("-u", *name, *arguments, input="typed\n", cwd=ROOT).stdout.splitlines()

    worker = launch(1, "--start-method", method, *name, *arguments, input="typed\n", cwd=ROOT).splitlines()

    expected, seen = json.loads(plain[0]), json.loads(worker[0])
    assert expected == seen
    assert plain[1:] == worker[1:]


@pytest.mark.parametrize(("name", "method"), [("app", "forkserver"), ("app.pyz", "spawn"), ("app.pyz", "fork")])
def test_a_folder_or_archive_with_a_main_sees_what_it_sees_under_python(name: str, method: str, tmp_path: Path) -> None:
    """The path as typed in argv, and first on the search path; ``__main__`` from within it."""
    app = tmp_path / "app"
    app.mkdir()
    (app / "beside.py").touch()
    (app / "__main__.py").write_text((SCRIPTS / "facts.py").read_text() + "import beside\nprint(beside.__file__)\n")
    zipapp.create_archive(app, tmp_path / "app.pyz")
    arguments = [name, "--flag", "a b"]
    plain = run_python("-u", *arguments, input="typed\n", cwd=tmp_path).stdout.splitlines()

    worker = launch(1, "--start-method", method, *arguments, input="typed\n", cwd=tmp_path).splitlines()

    assert json.loads(plain[0]) == json.loads(worker[0])
    assert str(tmp_path / name / "beside.py") == plain[2]
    assert plain[1:] == worker[1:]


def test_thirty_habits_have_the_same_effect_in_each_run_and_restart() -> None:
    """Check that import habits of projects act as in a separate program, after any previous run."""
    habits, restarting = str(SCRIPTS / "habits.py"), ("1", "--max-restarts", "1")

    def seen(*command: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in run_python(*command, check=True).stdout.splitlines()]

    [plain] = seen("-u", habits)
    ways = [(habits,), (habits, "fails once"), ("--preload", "", habits)]
    runs = [run for way in ways for run in seen(*RUN, *restarting, *way)]

    assert 30 == len(plain)
    assert 4 == len(runs)
    for run in runs:
        assert {} == {name: (plain[name], run[name]) for name in plain if plain[name] != run[name]}


CHANGES_ITS_ENCODING = """
import sys
from elasticlib import DefaultLogsSpecs, LaunchConfig, Std, elastic_launch

def train():
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="ascii", errors="backslashreplace")
        print("na\N{LATIN SMALL LETTER I WITH DIAERESIS}ve", file=stream)
    return sys.stdout.seekable(), sys.stderr.seekable()

logs = DefaultLogsSpecs(sys.argv[2], Std.from_str(sys.argv[3]))
print(elastic_launch(LaunchConfig(nproc_per_node=1, start_method=sys.argv[1], logs_specs=logs), train)())
"""


@pytest.mark.parametrize("redirects", ["0", "3"], ids=["pipe", "file"])
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_a_function_may_change_the_encoding_of_its_output(method: str, redirects: str, tmp_path: Path) -> None:
    """Check output whose destination differs from that of the fork server and of the caller."""
    done = run_python("-c", CHANGES_ITS_ENCODING, method, str(tmp_path), redirects)

    is_file, line = redirects == "3", "na\\xefve\n"
    assert 0 == done.returncode, done.stderr
    assert f"{{0: ({is_file}, {is_file})}}" == done.stdout.splitlines()[-1]
    written = [file.read_text() for file in tmp_path.rglob("std*.log")] if is_file else [done.stdout, done.stderr]
    assert [True, True] == [text.startswith(line) for text in written]


def test_classes_of_a_script_can_be_pickled_to_its_very_end() -> None:
    """The script is ``__main__`` until threads have ended and exit handlers have run."""
    output = launch(2, str(SCRIPTS / "pickles_late.py"))

    assert ["body", "body", "exit handler", "exit handler", "thread", "thread"] == sorted(
        line.removeprefix("pickled in ") for line in output.splitlines()
    )


@pytest.mark.sampled(0.2)
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_objects_of_a_scripts_classes_travel_between_processes(method: str) -> None:
    """all_gather_object, and DataLoaders with forked and spawned workers."""
    output = launch(2, "--start-method", method, str(SCRIPTS / "gathers.py"), "fork", "spawn")

    assert [f"rank {rank} loaded by {how}" for rank in (0, 1) for how in ("fork", "spawn")] == sorted(
        output.splitlines()
    )


@pytest.mark.sampled(0.2)
def test_a_model_compiles_in_a_forked_worker() -> None:
    """Inductor starts processes and loads libraries of its own."""
    assert "compiled" in launch(1, str(SCRIPTS / "compiles.py"))


@pytest.mark.parametrize("preload", ["auto", ""])
def test_variables_set_by_a_script_before_importing_torch_take_effect(preload: str) -> None:
    """Torch is not imported for it by the fork server, where it reads one of these when it is loaded."""
    assert "threads 1 logs 10\n" == launch(1, "--preload", preload, str(SCRIPTS / "threads.py"))


def test_the_debugger_reads_the_launchers_terminal(tmp_path: Path) -> None:
    """``breakpoint()`` in a worker talks to the terminal: stdin is the launcher's own."""
    script = tmp_path / "debugged.py"
    script.write_text("value = 41\nbreakpoint()\nprint('value is', value)\n")
    master, slave = pty.openpty()
    terminal = dict.fromkeys(("stdin", "stdout", "stderr"), slave)
    command = [sys.executable, *RUN, "1", str(script)]
    with subprocess.Popen(command, env=environment(), start_new_session=True, **terminal) as launcher:
        os.close(slave)
        seen = read_until(master, "(Pdb) ")
        os.write(master, b"value += 1\nc\n")
        seen += read_until(master, "value is 42")
        status = launcher.wait(timeout=60)
    os.close(master)

    assert 0 == status
    assert "-> print('value is', value)" in seen


def read_until(descriptor: int, text: str) -> str:
    """Return the output of a terminal up to *text*."""
    seen, deadline = "", time.monotonic() + 60
    while text not in seen:
        assert select.select([descriptor], [], [], max(0, deadline - time.monotonic()))[0], seen
        seen += os.read(descriptor, 4096).decode()
    return seen


def threads_seen() -> tuple[int, str]:
    """Return the number of threads that torch uses here, and the value of `OMP_NUM_THREADS`."""
    import torch

    return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]


@pytest.mark.parametrize("method", ["forkserver", "spawn", "fork"])
def test_each_worker_gets_its_share_of_the_cpus(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sizes in one program: the second gets its own number although the fork server has read the first."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cpus = len(os.sched_getaffinity(0))

    seen = {
        count: elastic_launch(LaunchConfig(nproc_per_node=count, start_method=method), threads_seen)()  # type: ignore[arg-type]
        for count in (1, 2)
    }

    for count, results in seen.items():
        share = max(1, cpus // count)
        assert {rank: (share, str(share)) for rank in range(count)} == results


@pytest.mark.parametrize(
    ("method", "from_stdin"),
    [("forkserver", False), ("forkserver", True), ("spawn", True)],
    ids=["file", "cells", "spawned"],
)
def test_functions_and_classes_of_main_keep_their_identity(method: str, from_stdin: bool) -> None:
    """Arguments, results, exceptions, ``torch.save``, gathered objects and DataLoader workers of either kind."""
    source = SCRIPTS / "main_functions.py"
    name = "-" if from_stdin else str(source)

    done = run_python(name, method, input=source.read_text() if from_stdin else "")

    assert (0, "all well") == (done.returncode, done.stdout.splitlines()[-1:] and done.stdout.splitlines()[-1]), (
        done.stdout + done.stderr
    )
    assert 2 == done.stdout.count("exit handler pickled")
    assert 2 == done.stdout.count("thread pickled")
