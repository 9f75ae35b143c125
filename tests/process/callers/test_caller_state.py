"""A program that changed since it launched last: its workers are like children of what it is now."""

from __future__ import annotations

import functools
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.process.callers.caller_state import OF_THE_FORK_SERVER, SET_IN_THE_WORKER
from tests.process.launches import ROOT, run_python

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.3)]


def anybodys_interpreter() -> str:
    """Shell commands, for a mount namespace of their own, after which each user finds the interpreter."""
    base = Path(sys.base_prefix)
    closed = next((folder for folder in reversed(base.parents) if not folder.stat().st_mode & 0o001), None)
    if closed is None:
        return ""
    kept = shlex.quote(f"/mnt/{base.name}")
    return (
        "set -e; mount -t tmpfs tmpfs /mnt; "
        f"mkdir {kept}; mount --bind {shlex.quote(str(base))} {kept}; "
        f"mount -t tmpfs -o mode=755 tmpfs {shlex.quote(str(closed))}; "
        f"mkdir -p {shlex.quote(str(base))}; mount --bind {kept} {shlex.quote(str(base))}; "
    )


def run_as_root(code: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run a program with all privileges and mounts of its own; the test is skipped where that cannot be."""
    if os.geteuid() != 0:
        pytest.skip("only root has privileges to drop")
    command = ["unshare", "--mount", "sh", "-c", f'{anybodys_interpreter()} exec "$@"', "sh"]
    command += [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False)


@functools.cache
def rows(part: str, method: str) -> dict[str, dict[str, Any]]:
    """Run the program of `caller_state`; return its results by row."""
    code = f"from tests.process.callers.caller_state import main; main({part!r}, {method!r})"
    done = run_as_root(code) if part == "key" else run_python("-c", code)
    assert 0 == done.returncode, done.stderr
    return {row["row"]: row for row in map(json.loads, done.stdout.splitlines())}


def row_of(part: str, method: str, name: str) -> dict[str, Any]:
    row = rows(part, method)[name]
    if "skipped" in row:
        pytest.skip(f"not to be had here: {row['skipped']}")
    return row


@pytest.mark.parametrize("method", ["forkserver", "spawn", "fork"])
@pytest.mark.parametrize("name", SET_IN_THE_WORKER)
def test_worker_sets_what_the_caller_has_and_the_fork_server_stays(method: str, name: str) -> None:
    row = row_of("set", method, name)

    assert {} == row["differ"]
    assert row["same fork server"] or method == "fork"


@pytest.mark.parametrize("name", OF_THE_FORK_SERVER)
def test_new_fork_server_starts_for_state_that_a_worker_cannot_set(name: str) -> None:
    row = row_of("key", "forkserver", name)

    assert {} == row["differ"]
    assert not row["same fork server"]


def test_fork_server_of_a_former_user_is_ended_at_the_next_launch() -> None:
    """With its reaper: the program, which may not signal them, has only to close its socket."""
    assert not row_of("key", "forkserver", "user")["former lives"]


IN_A_POOL = """
import logging, os
from elasticlib import pool
from tests.process import duties
logging.basicConfig(format="%(message)s", level=logging.WARNING)
with pool(1, group=None, preload=()) as made:
    first = made.run(os.getuid)[0], made.run(duties.chain)[0]
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
    os.environ["HOME"] = "/tmp"
    second = made.run(os.getuid)[0], made.run(duties.chain)[0]
    assert second[1] == made.run(duties.chain)[0]
    print(first[0], second[0])
    duties.wait_until(lambda: not any(duties.lives(pid) for pid in first[1].values()))
"""


def test_pool_replaces_its_workers_once_privileges_were_dropped() -> None:
    done = run_as_root(IN_A_POOL)

    assert "0 65534\n" == done.stdout, done.stderr
    assert "this program changed its privileges" in done.stderr
