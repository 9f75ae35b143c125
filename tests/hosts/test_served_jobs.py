"""A server with as many jobs as it takes by default, on a machine whose name server never answers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

import pytest

from elasticlib.rendezvous import ServerSettings
from tests.hosts._netns import Dns, Host, machines, missing
from tests.process.launches import ROOT, environment
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.34)]

SCRIPT = ROOT / "tests/process/scripts/many_jobs.py"
COUNT = ServerSettings().max_jobs
MOST = 8
"""Descriptors for each job."""


def test_all_jobs_open_and_leave_no_descriptors() -> None:
    if why := missing():
        pytest.skip(why)
    # The tests' own setting would spare the server the look-ups.
    unset = {name: value for name, value in environment().items() if name != "RES_OPTIONS"}
    serve = (sys.executable, "-m", "elasticlib.run", "serve", "--host", "127.0.0.1")
    open_jobs = (sys.executable, str(SCRIPT), "127.0.0.1:29400", str(COUNT))
    with machines(1, Dns.SILENT) as (host,), started(host, serve, unset) as server:
        assert line_of(server).startswith("elasticrun serve: at ")
        idle = descriptors(server.pid)

        with started(host, open_jobs, environment()) as jobs:
            assert f"{COUNT} jobs are open\n" == line_of(jobs)
            busy = descriptors(server.pid)
            assert jobs.stdin is not None
            jobs.stdin.close()
            assert 0 == jobs.wait()

        wait_until(lambda: descriptors(server.pid) == idle, what=lambda: f"{descriptors(server.pid)} to be {idle}")
        server.terminate()
        assert 0 == server.wait()

    print(f"descriptors: {idle} idle, {busy} with {COUNT} jobs")
    assert COUNT <= busy - idle <= MOST * COUNT


def started(host: Host, command: Sequence[str], variables: Mapping[str, str]) -> subprocess.Popen[str]:
    """Start *command* on *host*, with pipes."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return host.popen(command, env=variables, text=True, **pipes)  # type: ignore[return-value]


def line_of(program: subprocess.Popen[str]) -> str:
    assert program.stdout is not None
    return program.stdout.readline()


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))
