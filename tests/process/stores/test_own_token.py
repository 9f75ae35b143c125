"""Loopback is everybody's: a job there is open to its own user, and to nobody else."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.process.launches import ROOT, Launch, free_port

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.geteuid() != 0, reason="another user needs root")]

NOBODY = "65534"
WORKER = ("/bin/sh", "-c", "echo at work; cat; echo done")


@pytest.fixture
def owner(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launch]:
    monkeypatch.delenv("ELASTICLIB_TOKEN", raising=False)
    launch = Launch(free_port(), "none", program=WORKER)
    yield launch
    launch.close()


def test_another_user_is_refused_and_runs_nothing(owner: Launch) -> None:
    owner.at_work()
    done = join_as_nobody(owner.port)

    assert 1 == done.returncode
    assert "token" in done.stderr and "each user has a token of their own on loopback" in done.stderr, done.stderr
    assert "" == done.stdout
    owner.finish()
    status, output = owner.ends()
    assert (0, 1) == (status, output.count("at work")), output


def join_as_nobody(port: int) -> subprocess.CompletedProcess[str]:
    """Run a node of the same job as another user. Its worker would report that it runs."""
    # This Python may lie where another user cannot get to: the capability lets this one read it, and no more.
    reads = ["--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search"]
    other = ["setpriv", "--reuid", NOBODY, "--regid", NOBODY, "--clear-groups", *reads]
    command = [sys.executable, "-m", "elasticlib.run", "--nnodes", "1:2", "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf", "wait_for=min,heartbeat_timeout=10"]
    command += ["--max-restarts", "0", "--no-python", *WORKER]
    return subprocess.run(
        [*other, *command],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_launches_of_one_user_meet_although_their_environments_differ(
    owner: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner.at_work()
    monkeypatch.setenv("HOME", "/nonexistent")
    monkeypatch.setenv("XDG_CACHE_HOME", "/nonexistent")
    other = Launch(owner.port, "none", program=WORKER)
    try:
        other.at_work()
        for node in (owner, other):
            node.finish()
        assert [0, 0] == [node.ends()[0] for node in (owner, other)]
    finally:
        other.close()
