"""The agent of an engine ends with its client, whatever its output does then."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticlib import LaunchConfig
from elasticlib.engines import FrameReader, Kind, frame
from elasticlib.remote._call import JobSettings, pack_call
from tests.benchmarks import tree
from tests.benchmarks.job import environment
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.5)]

LIMIT = 60.0


def floods(folder: str) -> None:
    """Write output without end, and note this process first."""
    with open(f"{folder}/new", "w") as file:
        file.write(str(os.getpid()))
    os.replace(f"{folder}/new", f"{folder}/up")
    while True:
        print("x" * 100)


def returns(folder: str) -> str:
    return folder


class Agent:
    """An agent with the pipes of its client."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-m", "elasticlib.remote._node"],
            cwd=folder,
            env=environment(folder, {"OMP_NUM_THREADS": "1"}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.input, self.output = self.process.stdin, self.process.stdout
        self._reader = FrameReader(greeted=True)

    def begin(self, function: object) -> None:
        config = LaunchConfig(nproc_per_node=1, max_restarts=0, shutdown_timeout=5, preload=())
        self.send(Kind.CALL, pack_call(config, function, [str(self.folder)], {}))  # type: ignore[arg-type]
        self.read(Kind.UP)
        settings = JobSettings("", is_host=True, run_id="job", token="0" * 32, min_nodes=1, max_nodes=1)
        self.send(Kind.BEGIN, settings.packed())

    def send(self, kind: Kind, data: bytes) -> None:
        self.input.write(frame(kind, data))
        self.input.flush()

    def read(self, kind: Kind) -> bytes:
        """Return the data of the next frame of this kind."""
        while True:
            data = os.read(self.output.fileno(), 2**16)
            assert data, "the agent has ended"
            for found, content in self._reader.feed(data):
                if found is kind:
                    return content


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    started = Agent(tmp_path)
    try:
        yield started
    finally:
        started.process.kill()
        started.process.wait()
        started.input.close()
        started.output.close()


def is_held(pid: int) -> bool:
    """Return whether the process is blocked in its output: it has written nothing for some time."""
    before = written(pid)
    time.sleep(0.3)
    return before == written(pid) > 0


def written(pid: int) -> int:
    """The bytes that the process has written so far (proc(5))."""
    facts = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    return int(facts["wchar"])


@pytest.mark.parametrize("client", ["is dead", "does not read"])
def test_agent_ends_after_its_client_is_lost_while_its_workers_write(agent: Agent, client: str) -> None:
    agent.begin(floods)
    up = agent.folder / "up"
    wait_until(up.exists, LIMIT)
    worker = int(up.read_text())
    wait_until(lambda: is_held(agent.process.pid), LIMIT)

    agent.input.close()
    if client == "is dead":
        agent.output.close()

    assert 0 == agent.process.wait(LIMIT)
    wait_until(lambda: not tree.command(worker), LIMIT)


def test_call_that_is_stopped_has_an_outcome_although_its_input_ends(agent: Agent) -> None:
    agent.begin(floods)
    wait_until((agent.folder / "up").exists, LIMIT)

    agent.send(Kind.STOP, b"5")
    agent.input.close()

    assert b"cut off" in agent.read(Kind.RESULT)
    assert 0 == agent.process.wait(LIMIT)


def test_agent_ends_after_its_outcome(agent: Agent) -> None:
    agent.begin(returns)

    assert b"succeeded" in agent.read(Kind.RESULT)
    assert 0 == agent.process.wait(LIMIT)
