"""The job's token: no worker finds it in its environment, however it was started, nor does what it was made from."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from elasticlib import DefaultLogsSpecs, LaunchConfig, elastic_launch
from elasticlib.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from elasticlib.workers import start_processes
from tests.process import duties

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.3)]

NAME, TOKEN = "ELASTICLIB_TOKEN", "s3cret-t0ken"
LOOKS = f"""
import ctypes, os, sys
seen = [name for name, value in os.environ.items() if "{TOKEN}" in value]
if ctypes.CDLL(None).getenv(b"{NAME}"):
    seen.append("getenv")
if "{TOKEN}" in open("/proc/self/environ", errors="replace").read():
    seen.append("/proc/self/environ")
open(sys.argv[1], "w").write(repr(seen))
"""


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, TOKEN)


def seen() -> list[str]:
    """Return the places where this worker finds the token, and its ancestors that started with it."""
    found = [name for name, value in os.environ.items() if TOKEN in value]
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    if libc.getenv(NAME.encode()):
        found.append("getenv")
    for name, pid in duties.chain().items():
        if TOKEN in Path(f"/proc/{pid}/environ").read_text(errors="replace"):
            found.append(name)
    return found


def environment_alone() -> list[str]:
    return [name for name, value in os.environ.items() if TOKEN in value]


@pytest.mark.parametrize(
    ("method", "look"),
    [("forkserver", seen), ("spawn", seen), ("fork", environment_alone)],
    ids=["forkserver", "spawn", "fork of the caller"],
)
def test_a_function_finds_no_token(method: str, look: Callable[[], list[str]]) -> None:
    """Nor do the processes above it, but for the caller itself."""
    config = LaunchConfig(nproc_per_node=1, preload=(), start_method=method)

    assert {0: []} == elastic_launch(config, look)()


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
@pytest.mark.parametrize("kind", ["script", "module", "program", "exec"])
def test_a_command_finds_no_token(kind: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "looks.py").write_text(LOOKS)
    monkeypatch.chdir(tmp_path)
    entry, args = {"module": ("looks", ()), "program": (sys.executable, ("looks.py",))}.get(kind, ("looks.py", ()))
    if kind == "exec":  # an interpreter that cannot be a fork server
        other = tmp_path / "python"
        other.write_text(f'#!/bin/sh\ncase "$*" in *elasticlib*) exit 1;; esac\nexec {sys.executable} "$@"\n')
        other.chmod(0o755)
        monkeypatch.setenv("PYTHON_EXEC", str(other))
        monkeypatch.setattr("warnings.warn", lambda *_, **__: None)
    config = LaunchConfig(
        nproc_per_node=1,
        **({} if kind in ("program", "exec") else {"preload": ()}),
        start_method="spawn" if method == "spawn" else "forkserver",
        module=kind == "module",
        no_python=kind == "program",
    )

    elastic_launch(config, entry)(*args, "found")

    assert "[]" == (tmp_path / "found").read_text()


@pytest.mark.parametrize("method", ["forkserver", "spawn", "fork"])
def test_start_processes_passes_the_token_only_to_ranks_that_set_it(method: str) -> None:
    context = start_processes(
        "w", environment_alone, {0: (), 1: ()}, {0: {}, 1: {NAME: TOKEN}}, DefaultLogsSpecs(), start_method=method
    )
    done = context.wait()

    assert done is not None
    assert {0: [], 1: [NAME]} == done.return_values


def test_a_program_of_a_subprocess_handler_gets_no_token_either(tmp_path: Path) -> None:
    (tmp_path / "looks.py").write_text(LOOKS)
    found = str(tmp_path / "found")
    handler = SubprocessHandler(sys.executable, (str(tmp_path / "looks.py"), found), {}, None, None, 0)

    assert 0 == handler.proc.wait(60)
    assert "[]" == Path(found).read_text()
