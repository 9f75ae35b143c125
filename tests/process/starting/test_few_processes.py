"""A machine with room for few processes or open files: where that is used up, the launch ends with what helps."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.shims import built

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
MEND = "raise the limit of processes (ulimit -u, or the cgroup's pids.max)"
COMMAND = [sys.executable, "-m", "elasticlib.run", "--nproc-per-node", "2", "--preload", "", "--tee", "3"]
REMOTE = [*COMMAND, "--rdzv-backend", "c10d", "--rdzv-id", "few", "--rdzv-endpoint"]
FILES = "Too many open files"
CALLS = """
from elasticlib import LaunchConfig, StartError, elastic_launch
try:
    elastic_launch(LaunchConfig(nproc_per_node=2, {settings}), print)("at work")
except StartError as error:
    raise SystemExit(str(error))
"""
FUNCTION, FORKS = (CALLS.format(settings=each) for each in ("preload=''", "start_method='fork'"))
PROGRAMS = {
    "one-node": [*COMMAND, "--no-python", "true"],
    "spawn": [*COMMAND, "--start-method", "spawn", str(Path(__file__).parents[1] / "scripts" / "nothing.py")],
    "rendezvous-process": [*REMOTE, "127.0.0.1:{port}", "--no-python", "true"],
    "fork": [sys.executable, "-c", FORKS],
}


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return built("few_processes", tmp_path_factory.mktemp("shim"))


def needs_more(program: str, made: int, shim: dict[str, str], folder: Path) -> bool:
    """Return whether *program* exceeds *made* processes and threads. It must succeed or print advice."""
    left = folder / f"left{made}"
    left.write_bytes(made.to_bytes(4, sys.byteorder))
    environment = {**os.environ, **shim, "PYTHONPATH": str(ROOT), "FEW_PROCESSES": str(left)}

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [word.format(port=port) if "{port}" in word else word for word in PROGRAMS[program]]

    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)

    if int.from_bytes(left.read_bytes(), sys.byteorder, signed=True) >= 0:
        assert 0 == done.returncode, (made, done.stderr)
        return False
    assert "Traceback" not in done.stderr, (made, done.stderr)
    assert done.returncode == 0 or MEND in done.stderr, (made, done.stderr)
    return True


@pytest.mark.sampled(0.2)
@pytest.mark.parametrize("program", list(PROGRAMS))
@pytest.mark.parametrize("first", [0, 1])
def test_wherever_processes_run_out_the_launch_ends_with_what_helps(
    first: int, program: str, shim: dict[str, str], tmp_path: Path
) -> None:
    """No more than so many are made, until they suffice: with the other *first*, all numbers are tried."""
    made = first
    while needs_more(program, made, shim, tmp_path):
        made += 2

    assert made > 4


@pytest.mark.parametrize("limit", [12, 16, 20])
@pytest.mark.parametrize("command", [[*COMMAND, "--no-python", "true"], [sys.executable, "-c", FUNCTION]])
def test_launch_ends_with_one_sentence_when_few_files_may_be_open(command: list[str], limit: int) -> None:
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit)),
        capture_output=True,
        text=True,
        timeout=60,
    )

    [sentence] = [line for line in done.stderr.splitlines() if " log directory: " not in line]
    assert FILES in sentence
    assert "limit of open files (ulimit" in sentence
    assert done.returncode in (1, 2)  # 2: the log folder is met first
