"""Rows of the likeness table about the interpreter: its flags, where it finds the script, which modules are whose."""

from __future__ import annotations

import importlib
import json
import os
import py_compile
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elasticlib import LaunchConfig, elastic_launch

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.2)]

SCRIPTS = Path(__file__).parents[1] / "scripts"
ROOT = Path(__file__).parents[3]
FACTS = str(SCRIPTS / "facts.py")
COMMAND = str(Path(sys.executable).with_name("elasticrun"))


def run(command: list[str], **options: Any) -> str:
    """Return the output of *command*, which must succeed, with the repository on its search path."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **options.pop("env", {})}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, **options)
    assert 0 == done.returncode, done.stderr
    return str(done.stdout)


def launch(count: int, *command: str, flags: tuple[str, ...] = (), **options: Any) -> str:
    """Return the output of *command* under a launcher whose interpreter has the *flags*."""
    return run([sys.executable, *flags, "-m", "elasticlib.run", "--nproc-per-node", str(count), *command], **options)


# The script's path.


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_script_beside_the_target_of_a_link_is_the_one_that_runs(method: str, tmp_path: Path) -> None:
    (tmp_path / "target" / "folder").mkdir(parents=True)
    (tmp_path / "link").symlink_to("target/folder")
    (tmp_path / "target" / "train.py").write_text("print('right', __file__)")
    (tmp_path / "train.py").write_text("print('another script')")

    plain = run([sys.executable, "link/../train.py"], cwd=tmp_path)
    output = launch(1, "--start-method", method, "link/../train.py", cwd=tmp_path)

    assert plain == output
    assert output.startswith("right")


def test_workers_import_the_program_that_was_started_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "target" / "folder").mkdir(parents=True)
    (tmp_path / "link").symlink_to("target/folder")
    program = """
from elasticlib import LaunchConfig, elastic_launch

def answer():
    return TEXT

if __name__ == "__main__":
    print(elastic_launch(LaunchConfig(nproc_per_node=1, main="import"), answer)())
"""
    (tmp_path / "target" / "train.py").write_text(f"TEXT = 'right'\n{program}")
    (tmp_path / "train.py").write_text(f"TEXT = 'another program'\n{program}")

    output = run([sys.executable, "link/../train.py"], cwd=tmp_path)

    assert "{0: 'right'}" in output


# Pytest, started by the launcher on each rank.


def test_pytest_on_ranks_takes_warnings_for_errors_and_passes(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_it():\n    assert 1 == 1\n")
    strict = ["-W", "error::pytest.PytestAssertRewriteWarning", "-p", "no:cacheprovider", "-p", "no:asyncio"]

    output = launch(2, "-m", "pytest", *strict, "test_it.py", cwd=tmp_path)

    assert 2 == output.count("1 passed")


# Flags.


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
@pytest.mark.parametrize(
    "flags",
    ["-O", "-P", "-s -B -b", "-X int_max_str_digits=5000 -W ignore::ImportWarning", "-X utf8", "-X mine=1"],
)
def test_flags_of_the_launchers_interpreter_are_the_workers_too(flags: str, method: str, tmp_path: Path) -> None:
    options = tuple(flags.split())
    if "-P" in options and sys.version_info < (3, 11):
        pytest.skip("Python 3.11 brought -P")
    plain = run([sys.executable, *options, "-u", FACTS], input="typed\n", cwd=tmp_path).splitlines()

    worker = launch(1, "--start-method", method, FACTS, flags=options, input="typed\n", cwd=tmp_path).splitlines()

    assert json.loads(plain[0]) == json.loads(worker[0])


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.11 brought PYTHONSAFEPATH")
@pytest.mark.parametrize("variable", ["PYTHONSAFEPATH", "PYTHONOPTIMIZE", "PYTHONDONTWRITEBYTECODE"])
def test_variables_of_the_interpreter_reach_the_workers(variable: str, tmp_path: Path) -> None:
    given = {variable: "1"}
    plain = run([sys.executable, "-u", FACTS], input="typed\n", cwd=tmp_path, env=given).splitlines()

    worker = launch(1, FACTS, input="typed\n", cwd=tmp_path, env=given).splitlines()

    assert json.loads(plain[0]) == json.loads(worker[0])


# Where the script is.


def without_streams(output: str) -> list[dict[str, Any]]:
    """Return the facts that each rank's script printed, but for those of the stream that its text came through."""
    # Unbuffered ranks write a line and its end apart, so two lines may share one.
    starts = [match.start() for match in re.finditer(re.escape('{"affinity"'), output)]
    printed = [json.JSONDecoder().raw_decode(output, start)[0] for start in starts]
    return [{name: value for name, value in facts.items() if name not in ("streams", "stdin")} for facts in printed]


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_each_rank_runs_the_whole_script_that_is_read_from_a_pipe(method: str, tmp_path: Path) -> None:
    text = Path(FACTS).read_text()
    [plain] = without_streams(run([sys.executable, "-u", "-", "--flag"], input=text, cwd=tmp_path))

    workers = launch(2, "--start-method", method, "-", "--flag", input=text, cwd=tmp_path)

    assert [plain] * 2 == without_streams(workers)


def test_a_pipe_with_a_name_is_read_once_for_all_ranks(tmp_path: Path) -> None:
    output = launch(3, "/dev/stdin", input="import os; print(__file__, os.environ['RANK'])", cwd=tmp_path)

    assert [f"/dev/stdin {rank}" for rank in range(3)] == sorted(output.splitlines())


@pytest.mark.parametrize("name", ["script.pyc", "script.bin"])
def test_a_compiled_script_sees_what_it_sees_under_python(name: str, tmp_path: Path) -> None:
    """Python knows it by its first bytes, whatever its name is."""
    py_compile.compile(FACTS, str(tmp_path / name))
    plain = run([sys.executable, "-u", name], input="typed\n", cwd=tmp_path).splitlines()

    worker = launch(1, name, input="typed\n", cwd=tmp_path).splitlines()

    assert json.loads(plain[0]) == json.loads(worker[0])


def test_a_compiled_script_is_given_as_text_too(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "script.py"
    source.write_text("print('compiled', __name__)\n")
    py_compile.compile(str(source), str(tmp_path / "script.pyc"))

    elastic_launch(LaunchConfig(nproc_per_node=1), str(tmp_path / "script.pyc"))()

    assert "compiled __main__\n" in capfd.readouterr().out


# Whose modules.

HIDING = ("attr", "attrs", "cloudpickle", "typing_extensions", "queue", "json", "filelock", "numpy", "sympy")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a folder with modules that have the names of others."""
    for name in HIDING:
        (tmp_path / f"{name}.py").write_text("MINE = True\n")
    return tmp_path


def hidden(names: tuple[str, ...]) -> list[str]:
    """Return those of *names* that are not the project's."""
    return [name for name in names if not hasattr(importlib.import_module(name), "MINE")]


IMPORTING = f"import importlib; print([n for n in {HIDING} if not hasattr(importlib.import_module(n), 'MINE')])"


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
@pytest.mark.parametrize("named", ["train.py", "-m train", "from elsewhere"])
def test_a_project_finds_its_own_modules(named: str, method: str, project: Path, tmp_path: Path) -> None:
    (project / "train.py").write_text(IMPORTING)
    command = [str(project / "train.py")] if named == "from elsewhere" else named.split()
    cwd = ROOT if named == "from elsewhere" else project
    # The launcher itself must not find them: it is no part of the project.
    output = run([COMMAND, "--nproc-per-node", "1", "--start-method", method, *command], cwd=cwd)

    assert "[]\n" == output


def test_an_error_of_such_a_project_is_reported(project: Path) -> None:
    """Its cloudpickle is not ours, and is not imported for the report."""
    (project / "cloudpickle.py").write_text("raise SystemExit('this is the project')\n")
    (project / "train.py").write_text("class Odd(Exception): pass\nraise Odd('of the project')\n")

    done = subprocess.run(
        [COMMAND, "--nproc-per-node", "1", "train.py"], cwd=project, capture_output=True, text=True, timeout=120
    )

    assert 1 == done.returncode
    assert "Odd: of the project" in done.stderr
    assert "this is the project" not in done.stderr


def test_a_function_finds_modules_of_its_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that this program has not imported otherwise itself."""
    for name in ("queue", "sympy"):
        (tmp_path / f"{name}.py").write_text("MINE = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    assert {0: []} == dict(elastic_launch(LaunchConfig(nproc_per_node=1), hidden)(("queue", "sympy")))


# Start hooks.

AGENT = """
import atexit, os, threading, time
beats = []
def beat():
    while True:
        beats.append(1)
        time.sleep(0.01)
threading.Thread(target=beat, daemon=True, name="agent").start()
me = os.getpid()
@atexit.register
def flush():
    if os.getpid() == me and "RANK" in os.environ:
        open(os.path.join(os.environ["AGENT_OUT"], "end-" + os.environ["RANK"]), "x").close()
"""
WATCHING = """
import sitecustomize, threading
seen = len(sitecustomize.beats)
while len(sitecustomize.beats) == seen:
    pass
print([thread.name for thread in threading.enumerate()], flush=True)
"""


@pytest.mark.parametrize("options", [(), ("--start-method=spawn",), ("--preload=torch",)], ids="".join)
def test_an_agent_of_the_interpreters_start_lives_in_each_worker(options: tuple[str, ...], tmp_path: Path) -> None:
    """Its thread runs, and its exit handler, which does nothing in a fork, has written; a preload is left out aloud."""
    for folder in ("agent", "out"):
        (tmp_path / folder).mkdir()
    (tmp_path / "agent" / "sitecustomize.py").write_text(AGENT)
    (tmp_path / "train.py").write_text(WATCHING)
    given = {"PYTHONPATH": f"{tmp_path / 'agent'}{os.pathsep}{ROOT}", "AGENT_OUT": str(tmp_path / "out")}
    command = [sys.executable, "-m", "elasticlib.run", "--nproc-per-node", "2", *options, "train.py"]

    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, **given}, capture_output=True, text=True, timeout=120
    )

    assert 0 == done.returncode, done.stderr
    assert ["['MainThread', 'agent']"] * 2 == done.stdout.splitlines()
    assert ["end-0", "end-1"] == sorted(os.listdir(tmp_path / "out"))
    assert ("preload='torch' is ignored" in done.stderr) == ("--preload=torch" in options)
