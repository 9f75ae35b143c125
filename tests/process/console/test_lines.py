"""Text of a worker reaches the console line by line, however a program prints it, and none of it is lost."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.process.launches import environment, run_python

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.4)]


@pytest.fixture(autouse=True)
def without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)


RUN = ("-m", "elasticlib.run", "--nproc-per-node")
PRINTS = 2000
PRINTER = """
import os, sys

for number in range(int(sys.argv[1])):
    print("rank", os.environ["RANK"], "of", 2, "line", number, "end")
    print("rank", os.environ["RANK"], "of", 2, "error", number, "end", file=sys.stderr)
"""
LINE = re.compile(r"rank [01] of 2 (line|error) \d+ end")
BARS = """
import os, sys

print("50%\\r", end="")
print("60%", end="\\r", file=sys.stderr)
print("70%", end="")
os._exit(0)
"""
STREAMS = """
import os, sys
from elasticlib import LaunchConfig, elastic_launch

def train():
    return [(stream.line_buffering, stream.write_through) for stream in (sys.stdout, sys.stderr)]

if __name__ == "__main__":
    print(elastic_launch(LaunchConfig(nproc_per_node=1, start_method=sys.argv[1]), train)())
"""


def run_into_one_pipe(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return run_python(
        *arguments,
        env=environment(**variables),
        capture_output=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def script(folder: Path, text: str) -> str:
    path = folder / "script.py"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_lines_of_two_ranks_in_one_pipe_are_whole(method: str, tmp_path: Path) -> None:
    done = run_into_one_pipe(*RUN, "2", "--start-method", method, script(tmp_path, PRINTER), str(PRINTS))

    lines = done.stdout.splitlines()
    assert 0 == done.returncode
    assert [] == [line for line in lines if not LINE.fullmatch(line)]
    assert 4 * PRINTS == len(set(lines))


def test_lines_of_two_ranks_on_a_terminal_are_whole(tmp_path: Path) -> None:
    master, slave = pty.openpty()
    command = [sys.executable, *RUN, "2", script(tmp_path, PRINTER), "300"]
    output = b""
    with subprocess.Popen(
        command, env=environment(), stdin=slave, stdout=slave, stderr=slave, start_new_session=True
    ) as launcher:
        os.close(slave)
        while data := read(master):
            output += data
        status = launcher.wait(timeout=60)
    os.close(master)

    assert 0 == status
    lines = [line for line in output.decode().splitlines() if not line.startswith("elasticrun: ")]
    assert [] == [line for line in lines if not LINE.fullmatch(line)]
    assert 1200 == len(lines)


def read(master: int) -> bytes:
    """Return the terminal's next output; empty if all its programs have ended."""
    try:
        return os.read(master, 65536)
    except OSError:
        return b""


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_streams_write_lines_unless_unbuffered_ones_are_requested(method: str, tmp_path: Path) -> None:
    name = script(tmp_path, STREAMS)

    lines = [run_python(name, method), run_python("-u", name, method)]

    assert ["{0: [(True, False), (True, False)]}\n", 2] == [lines[0].stdout, lines[1].stdout.count(", True)")]


def test_a_variable_asks_for_unbuffered_streams_too(tmp_path: Path) -> None:
    variables = environment(PYTHONUNBUFFERED="1")

    done = run_python(script(tmp_path, STREAMS), "forkserver", env=variables)

    assert "{0: [(False, True), (False, True)]}\n" == done.stdout


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("", 0),
        ("sys.exit(0)", 0),
        ("raise ValueError('bad batch')", 1),
        ("import threading; threading.Thread(target=lambda: time.sleep(0.2)).start()", 0),
    ],
    ids=["end", "exit", "error", "thread"],
)
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_line_without_an_end_appears_at_the_programs_end(method: str, end: str, status: int, tmp_path: Path) -> None:
    text = (
        f"import sys, time\nprint('dots', 'of stdout', end='')\nprint('dots of stderr', end='', file=sys.stderr)\n{end}"
    )

    done = run_python(*RUN, "1", "--start-method", method, script(tmp_path, text))

    assert status == done.returncode
    assert ("dots of stdout", "dots of stderr") == (done.stdout, done.stderr[:14])


def test_a_carriage_return_is_written_at_once(tmp_path: Path) -> None:
    """A bar of a program that never flushes."""
    done = run_python(*RUN, "1", script(tmp_path, BARS), text=False)

    assert (b"50%\r", b"60%\r") == (done.stdout, done.stderr)


WAITING = """
import os, pathlib, sys, time
from elasticlib import LaunchConfig, elastic_launch

def train():
    if os.environ["RANK"] == "0":
        print("returned", "early", end="")
        return
    time.sleep(0.5)
    raise ValueError("bad batch")

if __name__ == "__main__":
    elastic_launch(LaunchConfig(nproc_per_node=2, max_restarts=0), train)()
"""


def test_text_of_a_rank_that_is_stopped_after_its_return_appears(tmp_path: Path) -> None:
    done = run_python(script(tmp_path, WAITING))

    assert (1, "returned early") == (done.returncode, done.stdout)


def test_a_full_disk_fails_a_function_that_cannot_write_its_text(tmp_path: Path) -> None:
    with open("/dev/full", "wb") as full:
        done = run_python(
            script(tmp_path, WAITING),
            capture_output=False,
            stdout=full,
            stderr=subprocess.PIPE,
        )

    assert 1 == done.returncode
    assert "No space left on device" in done.stderr
