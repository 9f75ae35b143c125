"""FSDP2 and torch.distributed.checkpoint: what was saved by some workers is loaded by more or fewer."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.frameworks.starts import LIMIT, Seen, Start, both, environment, reports, script, with_elastic_launch
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

STEPS = 4


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[Seen]:
    return with_elastic_launch("fsdp", tmp_path_factory.mktemp("fsdp"), STEPS)


@pytest.mark.sampled(0.2)
def test_a_sharded_model_is_the_same_on_all_ranks_and_learns(undisturbed: list[Seen]) -> None:
    assert [2, 2] == [seen["world"] for seen in undisturbed]
    shard_rows = [seen["shards"] for seen in undisturbed]
    assert [[4, 4, 1, 1], [3, 3, 0, 0]] == shard_rows
    assert undisturbed[0]["weights"] == undisturbed[1]["weights"]
    assert undisturbed[0]["losses"] == sorted(undisturbed[0]["losses"], reverse=True)


@pytest.mark.sampled(0.2)
@both
def test_restart_continues_from_the_checkpoint(start: Start, undisturbed: list[Seen], tmp_path: Path) -> None:
    restarted = start("fsdp", tmp_path, STEPS, 3, restarts=1)

    assert [(1, 3)] * 2 == [(seen["attempt"], seen["first"]) for seen in restarted]
    assert undisturbed[0]["weights"] == restarted[0]["weights"] == restarted[1]["weights"]


@pytest.mark.sampled(0.2)
@both
def test_job_continues_with_more_and_with_fewer_workers(start: Start, undisturbed: list[Seen], tmp_path: Path) -> None:
    """Weights and the optimizer's moments are split anew: two workers, then three, then one."""
    two, three, one = (start("fsdp", tmp_path, until, workers=count) for until, count in ((2, 2), (3, 3), (STEPS, 1)))

    assert [(2, 0), (3, 2), (1, 3)] == [(seen[0]["world"], seen[0]["first"]) for seen in (two, three, one)]
    assert two[0]["weights"] == three[0]["loaded"] == three[2]["loaded"]
    assert three[0]["weights"] == one[0]["loaded"]
    assert undisturbed[0]["weights"] == pytest.approx(one[0]["weights"], rel=1e-4)
    losses = [*two[0]["losses"], *three[0]["losses"], *one[0]["losses"]]
    assert undisturbed[0]["losses"] == pytest.approx(losses, rel=1e-4)


@pytest.mark.sampled(0.2)
def test_other_nodes_continue_from_the_checkpoint_when_a_node_leaves(undisturbed: list[Seen], tmp_path: Path) -> None:
    """One elastic job of one to two nodes: at step 2 the second is told to stop, the first ends alone."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    options = ["--nnodes=1:2", "--wait-for=max", "--rdzv-id=job", "--rdzv-backend=c10d"]
    options += [f"--rdzv-endpoint=127.0.0.1:{port}", *script("fsdp", tmp_path, STEPS, -1, 2)]
    command = [sys.executable, "-m", "elasticlib.run", *options]
    nodes: list[subprocess.Popen[str]] = []
    try:
        for _ in range(2):
            nodes.append(subprocess.Popen(command, cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True))
            wait_until(lambda: listens(port))  # the first node has the store
        wait_until(lambda: len(list(tmp_path.glob("lingers*"))) == 2)

        nodes[1].send_signal(signal.SIGTERM)
        errors = [node.communicate(timeout=LIMIT)[1] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
            node.communicate()

    assert [0, 1] == [node.returncode for node in nodes], errors
    (seen,) = reports(tmp_path)
    assert (0, 1, 2) == (seen["rank"], seen["world"], seen["first"])
    assert undisturbed[0]["weights"] == pytest.approx(seen["weights"], rel=1e-4)


def listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0
