"""Nothing that happens after a program has ended changes its status, or loses its result."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elasticlib import LaunchConfig, elastic_launch, pool
from tests.benchmarks import ends
from tests.process.scripts import strange_modules

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.3)]

ROOT = Path(__file__).parents[3]
SCRIPT = Path(strange_modules.__file__)


def elasticrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command's end, with what it printed."""
    return subprocess.run(
        [sys.executable, "-m", "elasticlib.run", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_script_with_objects_that_answer_nothing_ends_as_under_python(method: str, tmp_path: Path) -> None:
    """Such as those of cffi, mocks and lazy modules in ``sys.modules``: they are asked for nothing."""
    plain = subprocess.run([sys.executable, str(SCRIPT), str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert "data" == (tmp_path / "data").read_text()
    (tmp_path / "data").unlink()

    done = elasticrun("--nproc-per-node", "1", "--start-method", method, str(SCRIPT), str(tmp_path))

    assert (plain.returncode, plain.stdout, plain.stderr) == (done.returncode, done.stdout, done.stderr)
    assert "data" == (tmp_path / "data").read_text()


OWNER = """
import gc
class Part:
    is_closed = False
    def __del__(self):
        self.is_closed = True
class Owner:
    def __del__(self):
        print("closed" if self.part.is_closed else "open")
kept = [Owner()]
gc.collect(0)                # the part is in a younger generation
kept[0].part = Part()
"""


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_owners_are_finalized_before_their_parts_as_under_python(method: str, tmp_path: Path) -> None:
    """As a pool of processes that nobody closed, which sends through its pipes in the end."""
    (tmp_path / "owner.py").write_text(OWNER)
    plain = subprocess.run([sys.executable, str(tmp_path / "owner.py")], capture_output=True, text=True, timeout=60)

    done = elasticrun("--nproc-per-node", "1", "--start-method", method, str(tmp_path / "owner.py"))

    assert ("open\n", "") == (plain.stdout, plain.stderr)
    assert (plain.stdout, plain.stderr) == (done.stdout, done.stderr)


@pytest.mark.parametrize("method", ["forkserver", "spawn", "fork"])
def test_a_function_that_leaves_such_objects_has_its_result(
    method: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    elastic_launch(LaunchConfig(nproc_per_node=1, start_method=method), strange_modules.fill)(str(tmp_path))  # type: ignore[arg-type]

    assert ("", "") == capfd.readouterr()
    assert "data" == (tmp_path / "data").read_text()


def test_pool_continues_after_a_call_that_leaves_such_objects(tmp_path: Path) -> None:
    with pool(1, group=None, preload=()) as made:
        made.run(strange_modules.fill, str(tmp_path))

        assert [17] == list(made.run(int, "17").values())


def crash() -> None:
    """Die of a bad address."""
    ctypes.string_at(0)


class Dies:
    """Its end is the end of the process."""

    def __init__(self, how: Any, *args: Any) -> None:
        self._how, self._args = how, args

    def __del__(self) -> None:
        self._how(*self._args)


kept: list[Any] = []


def holds(how: str) -> str:
    """Return, and leave an object that ends the process when it is finalized."""
    ways = {"crash": (crash,), "signal": (os.kill, os.getpid(), signal.SIGKILL), "exit": (os._exit, 9)}
    kept.append(Dies(*ways[how]))
    return "the result"


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
@pytest.mark.parametrize("how", ["crash", "signal", "exit"])
def test_a_result_outlives_a_finalizer_that_ends_the_process(
    how: str, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With a warning that says how the process ended."""
    config = LaunchConfig(nproc_per_node=1, max_restarts=0, start_method=method)  # type: ignore[arg-type]

    assert {0: "the result"} == elastic_launch(config, holds)(how)
    (message,) = [record.getMessage() for record in caplog.records if "were finalized" in record.getMessage()]
    assert {"crash": "SIGSEGV", "signal": "SIGKILL", "exit": "exit status 9"}[how] in message


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
@pytest.mark.parametrize("kind", sorted(ends.KINDS))
def test_a_kind_of_end_is_reported_as_it_is(kind: str, method: str) -> None:
    """One round of the campaign: `python -m tests.benchmarks.ends` runs all of it."""
    assert [] == ends.run(kind, method, 1)
