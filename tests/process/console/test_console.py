"""Console output of a job: errors once, stacks of hanging workers, a start and an end."""

from __future__ import annotations

import os
import pty
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.process.console.test_cli import environment
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.4)]

LIMIT = 50.0
FAILS = "import os\nif os.environ['RANK'] == '1':\n    raise ValueError('bad batch')\n"
IN_A_GROUP = f"import torch.distributed as dist\ndist.init_process_group('gloo')\n{FAILS}"
"""Torch's own hook puts "[rank1]: " before each line of the traceback."""
HANGS = (
    "import os, threading\n"
    "def wait_for_batch():\n    threading.Event().wait()\n"
    "def all_reduce():\n    threading.Event().wait()\n"
    "os.mknod('up' + os.environ['RANK'])\n"
    "wait_for_batch() if os.environ['RANK'] == '1' else all_reduce()\n"
)
PROGRAM = (
    "import os\n"
    "from elasticlib import LaunchConfig, elastic_launch\n"
    "def train():\n"
    "    if os.environ['RANK'] == '1':\n        raise ValueError('bad batch')\n"
    "if __name__ == '__main__':\n"
    "    elastic_launch(LaunchConfig(nproc_per_node=2, max_restarts=0), train)()\n"
)
IMPATIENT = "from elasticlib.agent import _local\n_local._LONG_SILENCE = 0.0\nfrom elasticlib.run import main\nmain()\n"
"""The command, which takes any silence for a long one."""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a Python program with arguments in a folder of its own."""
    started: list[subprocess.Popen[str]] = []

    def begin(*args: str, **files: str) -> subprocess.Popen[str]:
        for name, text in files.items():
            (tmp_path / f"{name}.py").write_text(text)
        started.append(
            subprocess.Popen(
                [sys.executable, *args],
                cwd=tmp_path,
                env=environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def hanging(tmp_path: Path, start: Callable[..., subprocess.Popen[str]]) -> Callable[..., subprocess.Popen[str]]:
    """Starts a command with a script whose two ranks hang at different places, and returns when they do."""

    def begin(*command: str, **files: str) -> subprocess.Popen[str]:
        process = start(*command, "script.py", script=HANGS, **files)
        wait_until(lambda: (tmp_path / "up0").exists() and (tmp_path / "up1").exists())
        return process

    return begin


RUN = ("-m", "elasticlib.run", "--nproc-per-node", "2")


@pytest.mark.parametrize("script", [FAILS, IN_A_GROUP], ids=["alone", "in a process group"])
@pytest.mark.parametrize("streams", [(), ("--tee", "3"), ("--redirects", "3")], ids=["console", "tee", "files"])
def test_an_error_of_a_script_is_shown_once(
    streams: tuple[str, ...], script: str, start: Callable[..., subprocess.Popen[str]]
) -> None:
    out, err = start(*RUN, *streams, "script.py", script=script).communicate(timeout=LIMIT)

    assert 1 == (out + err).count("raise ValueError('bad batch')")
    assert re.search(r"rank 1: ValueError: bad batch \(script\.py:[35]\)", err)


def test_error_of_a_function_is_shown_once_without_launcher_frames(
    start: Callable[..., subprocess.Popen[str]],
) -> None:
    process = start("program.py", program=PROGRAM)
    _, err = process.communicate(timeout=LIMIT)

    assert 1 == process.returncode
    assert 1 == err.count("raise ValueError('bad batch')")
    assert 1 == err.count("elastic_launch(LaunchConfig(")
    assert "elasticlib/" not in err
    assert "rank 1: ValueError: bad batch (program.py:5)" in err


def test_error_of_a_launch_within_a_worker_is_shown_once(
    start: Callable[..., subprocess.Popen[str]],
) -> None:
    program = PROGRAM.replace("=2)", "=2, max_restarts=0)")
    process = start("-m", "elasticlib.run", "--nproc-per-node", "1", "program.py", program=program)
    _, err = process.communicate(timeout=LIMIT)

    assert 1 == process.returncode
    assert 1 == err.count("raise ValueError('bad batch')")
    assert 1 == err.count("elastic_launch(LaunchConfig(")
    assert "elasticlib/" not in err


def test_a_hook_of_the_scripts_own_takes_nothing_from_the_report(start: Callable[..., subprocess.Popen[str]]) -> None:
    silent = f"import sys\nsys.excepthook = lambda *_: None\n{FAILS}"
    _, err = start(*RUN, "script.py", script=silent).communicate(timeout=LIMIT)

    assert 1 == err.count("raise ValueError('bad batch')")


def test_quit_shows_stacks_of_all_ranks_and_a_second_one_stops_the_job(
    hanging: Callable[..., subprocess.Popen[str]],
) -> None:
    process = hanging(*RUN)
    process.send_signal(signal.SIGQUIT)
    assert process.stderr is not None
    seen = ""
    while "in <module>" not in seen.partition("rank 1:")[2]:
        seen += process.stderr.readline()

    assert process.poll() is None
    assert "in all_reduce" in seen.partition("rank 1:")[0]
    assert "in wait_for_batch" in seen.partition("rank 1:")[2]
    process.send_signal(signal.SIGQUIT)
    _, err = process.communicate(timeout=LIMIT)
    assert 1 == process.returncode
    assert "got SIGQUIT: its workers were stopped" in err


def test_an_interrupt_of_a_silent_job_shows_where_its_ranks_are(
    hanging: Callable[..., subprocess.Popen[str]],
) -> None:
    process = hanging("command.py", "--nproc-per-node", "2", command=IMPATIENT)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=LIMIT)

    stacks, traces = err.split("Traceback", 1)
    assert "stacks of all ranks" in stacks
    assert "in wait_for_batch" in stacks
    assert 2 == traces.count("KeyboardInterrupt")
    assert 1 == process.returncode


def test_an_interrupt_of_a_job_that_speaks_shows_no_stacks(
    hanging: Callable[..., subprocess.Popen[str]],
) -> None:
    process = hanging(*RUN)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=LIMIT)

    assert "stacks of all ranks" not in err


def test_on_a_terminal_a_job_has_a_line_at_its_start_and_one_at_its_end(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('at work')")
    ours, terminal = pty.openpty()
    with subprocess.Popen(
        [sys.executable, *RUN, "script.py"],
        cwd=tmp_path,
        env=environment() | {"PYTHONUNBUFFERED": ""},
        stdout=terminal,
        stderr=terminal,
    ) as process:
        os.close(terminal)
        seen = b""
        while part := _read(ours):
            seen += part
    os.close(ours)

    assert 0 == process.returncode
    lines = seen.decode().replace("\r", "").splitlines()
    assert "elasticrun: script.py: 1 node x 2 ranks" in lines
    assert lines[-1].startswith("elasticrun: script.py: succeeded after ")
    assert 2 == lines.count("at work")


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # nobody has the other side open
        return b""


OWN_MASTER = """
import os, torch.distributed as dist, torch
def set_up():
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", {port!r}
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
"""


def test_program_with_its_own_address_gets_a_line_on_why_ranks_wait(
    start: Callable[..., subprocess.Popen[str]], unused_port: int
) -> None:
    process = start(*RUN, "script.py", script=OWN_MASTER.format(port=str(unused_port)) + "set_up()\n")
    assert process.stderr is not None
    line = next(line for line in process.stderr if line.startswith("elasticlib: "))

    assert f"elasticlib: the ranks wait for a store at localhost:{unused_port}, where no process listens" in line


def test_in_a_pool_such_a_program_works(start: Callable[..., subprocess.Popen[str]], unused_port: int) -> None:
    program = OWN_MASTER.format(port=str(unused_port)) + (
        "def total():\n    set_up()\n    mine = torch.ones(1)\n    dist.all_reduce(mine)\n    return mine.item()\n"
        "if __name__ == '__main__':\n"
        "    from elasticlib import pool\n"
        "    with pool(2, group=None) as workers:\n        print(workers.run(total))\n"
    )
    out, err = start("program.py", program=program).communicate(timeout=LIMIT)

    assert "{0: 2.0, 1: 2.0}" in out, err


@pytest.fixture
def unused_port() -> int:
    with socket.create_server(("localhost", 0)) as server:
        return int(server.getsockname()[1])
