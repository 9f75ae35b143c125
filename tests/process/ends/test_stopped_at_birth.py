"""Processes of the chain that are stopped (SIGSTOP) right after their fork, before they could say who they are."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from elasticlib import LaunchConfig, elastic_launch

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.5)]

STOPS = """
import os, pathlib, signal
FORKS = pathlib.Path({folder!r})

def stop_once():
    (FORKS / str(os.getpid())).touch()
    if len(list(FORKS.iterdir())) == {number}:
        os.kill(os.getpid(), signal.SIGSTOP)

os.register_at_fork(after_in_child=stop_once)
"""


@pytest.fixture
def stops_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], str]:
    """Make a module, and return its name, whose importer's forks are counted; the one of that number stops itself."""

    def make(number: int) -> str:
        (tmp_path / "forks").mkdir()
        name = f"stops_at_fork_{os.getpid()}_{number}"
        (tmp_path / f"{name}.py").write_text(STOPS.format(folder=str(tmp_path / "forks"), number=number))
        monkeypatch.syspath_prepend(str(tmp_path))
        return name

    return make


def returns() -> str:
    return "done"


def test_a_spawner_that_is_stopped_before_it_begins_is_continued(
    stops_at: Callable[[int], str], caplog: pytest.LogCaptureFixture
) -> None:
    """The fork server, which answers all the while, has told of it."""
    config = LaunchConfig(nproc_per_node=1, preload=[stops_at(1)])

    assert {0: "done"} == elastic_launch(config, returns)()
    assert "the spawner process" in caplog.text and "the launcher continues it" in caplog.text


@pytest.mark.parametrize(("number", "who"), [(1, "reaper"), (2, "spawner")])
def test_forks_of_the_caller_stopped_at_their_start_are_continued(
    number: int, who: str, stops_at: Callable[[int], str], tmp_path: Path
) -> None:
    program = f"""
import {stops_at(number)}
from elasticlib import LaunchConfig, elastic_launch

print(elastic_launch(LaunchConfig(nproc_per_node=1, start_method="fork"), lambda: "done")())
"""
    path = tmp_path / "program.py"
    path.write_text(program)
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=60)

    assert "{0: 'done'}" in done.stdout, done.stderr
    assert f"the {who} process" in done.stderr and "the launcher continues it" in done.stderr
