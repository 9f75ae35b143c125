"""Launchers that are the first process of a container, without a home, and where no folder can be written."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest

from tests.process.launches import ROOT, Program, children, environment

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.5)]

UNSHARE = ("unshare", "--mount", "--pid", "--fork", "--mount-proc", "sh", "-c")
READ_ONLY = """
for d in / /tmp /var/tmp /root /dev/shm; do
    [ ! -d $d ] || { mount --bind $d $d && mount -o remount,ro,bind $d; } || exit 77
done
! touch $0/file 2> /dev/null && cd / && exec "$@"
"""
RUNS = "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"
HOMES = ("HOME", "TMPDIR", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR")
Start = Callable[..., Program]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts ``elasticrun`` as process 1, with two workers that run a script of the folder ``scripts``."""
    if os.geteuid() != 0:
        pytest.skip("only root may make namespaces")
    with ExitStack() as stack:

        def new(script: str, *options: str, **variables: str) -> Program:
            clean = {name: value for name, value in environment(**variables).items() if name not in HOMES}
            launcher = ("-m", "elasticlib.run", "--nproc-per-node", "2", *options)
            path = str(ROOT / "tests/process/scripts" / script)
            command = (*UNSHARE, READ_ONLY, "/tmp", sys.executable, *launcher, path)
            return stack.enter_context(closing(Program("-c", RUNS, *command, env=clean)))

        yield new


@pytest.mark.parametrize("preload", ["", "torch"])
def test_first_process_runs_a_job(start: Start, preload: str) -> None:
    status, output = start("steps.py", "--preload", preload, LAST="10").ends()

    assert (0, 2) == (status, output.count("is done")), output


def test_sigterm_lets_its_workers_save(start: Start) -> None:
    program = start("steps.py", "--preload", "")
    program.wait_for_line("works", 2)
    [first] = children(program.popen.pid)

    os.kill(first, signal.SIGTERM)
    status, output = program.ends()

    steps = dict(re.findall(r"rank (\d+) stops at (\d+)", output))
    assert (75, {"0", "1"}, 1) == (status, steps.keys(), len(set(steps.values()))), output


def test_first_process_reports_a_worker_that_was_killed(start: Start) -> None:
    program = start("steps.py", "--preload", "")
    inner = program.wait_for_line("rank 1 works as").split()[-1]
    [first] = children(program.popen.pid)

    subprocess.run(["nsenter", f"--target={first}", "--pid", "--mount", "kill", "-KILL", inner], check=True)
    status, output = program.ends()

    assert 1 == status, output
    assert "rank 1: ended by SIGKILL" in output, output
