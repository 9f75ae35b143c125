"""The process that hosts the workers' store ends: its end is noticed, told by its name, and costs a restart."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from elasticlib import ChildFailedError, LaunchConfig, elastic_launch
from tests.process import duties
from tests.process.launches import LIMIT, free_port

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.4)]

OUTLIVES = Path(__file__).parents[1] / "scripts" / "outlives_its_peer.py"
METHODS = ["forkserver", "fork"]
NAMED = r"the process that hosts the workers' store \(pid \d+\) was ended by SIGKILL"


def config(method: str, restarts: int) -> LaunchConfig:
    return LaunchConfig(nproc_per_node=2, max_restarts=restarts, start_method=method)  # type: ignore[arg-type]


@pytest.mark.parametrize("method", METHODS)
def test_a_store_that_dies_costs_one_restart(method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The next round has a store of its own, as always; when that dies, all workers have returned: it costs nothing."""
    results = elastic_launch(config(method, 1), duties.loses_the_store)(tmp_path, "waits")

    assert {0: "1", 1: "1"} == results
    assert re.search(rf"round 0 ended: {NAMED} on node .*; restart 1 of 1", caplog.text), caplog.text


@pytest.mark.parametrize("does", ["waits", "talks"])
@pytest.mark.parametrize("method", METHODS)
def test_dead_store_is_the_root_cause_whatever_its_workers_report(method: str, does: str, tmp_path: Path) -> None:
    """Workers that need it at that moment see a lost connection, others nothing at all."""
    begun = time.monotonic()

    with pytest.raises(ChildFailedError, match=f"^{NAMED}") as caught:
        elastic_launch(config(method, 0), duties.loses_the_store)(tmp_path, does)

    _, cause = caught.value.get_first_failure()
    killed = int((tmp_path / "store").read_text())
    assert (killed, -9) == (cause.pid, cause.exitcode)
    assert f"(pid {killed})" in cause.message
    assert "process   : worker store of elasticlib" in str(caught.value)
    assert cause.message in str(caught.value.__cause__)
    assert time.monotonic() - begun < 20, "nobody waited for a time-out"
    duties.wait_until(lambda: not os.path.exists(f"/proc/{killed}"))


def two_nodes(*arguments: str) -> str:
    """Run the script on two nodes, which must end well; what they wrote to stderr."""
    options = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    command = [sys.executable, "-m", "elasticlib.run", *options, "--max-restarts", "1", str(OUTLIVES), *arguments]

    nodes = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        outputs = [node.communicate(timeout=LIMIT) for node in nodes]
    finally:
        for node in nodes:
            node.kill()

    assert [0, 0] == [node.returncode for node in nodes], outputs
    assert ["", "all steps"] == sorted(out.strip() for out, _ in outputs)
    return "".join(err for _, err in outputs)


def test_node_that_is_done_keeps_the_store_for_other_nodes_workers() -> None:
    """As under torchrun, whose agents wait for each other with the store that they host."""
    assert "round 0 ended" not in two_nodes()


def test_store_that_dies_after_its_nodes_workers_costs_a_named_restart() -> None:
    """Workers of the other node see a lost connection."""
    stderr = two_nodes(str(int(signal.SIGKILL)))

    assert re.search(rf"round 0 ended: {NAMED} on node .*; restart 1 of 1", stderr), stderr


def test_store_stopped_after_its_nodes_workers_is_continued() -> None:
    """Workers of the other node would wait for it in silence."""
    stderr = two_nodes(str(int(signal.SIGSTOP)))

    assert re.search(r"the worker store process \(pid \d+\) was stopped .*: the launcher continues it", stderr), stderr
    assert "round 0 ended" not in stderr
