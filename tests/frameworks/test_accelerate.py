"""Accelerate: its state is the job's, and what it saved outlives a worker's death."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.frameworks.starts import LIMIT, Seen, Start, both, environment, needs, reports, script, with_elastic_launch

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.25), needs("accelerate")]

PRELOAD = ("torch", "accelerate")
LAUNCH = """
import sys
import torch.distributed
import elasticlib.run

sys.modules["torch.distributed.run"] = elasticlib.run  # what `accelerate launch` imports and calls
from accelerate.commands.launch import main

main()
"""
PLACE = ("rank", "local_rank", "world", "kind", "wrapped")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[Seen]:
    return with_elastic_launch("with_accelerate", tmp_path_factory.mktemp("accelerate"), preload=PRELOAD)


def test_its_state_is_the_jobs_and_the_model_learns(undisturbed: list[Seen]) -> None:
    expected = [(rank, rank, 2, "DistributedType.MULTI_CPU", "DistributedDataParallel") for rank in (0, 1)]
    assert expected == [tuple(seen[name] for name in PLACE) for seen in undisturbed]
    assert undisturbed[0]["weights"] == undisturbed[1]["weights"]
    assert undisturbed[0]["losses"][-1] < 0.5 * undisturbed[0]["losses"][0]


@both
def test_a_worker_that_dies_once_goes_on_from_what_was_saved(
    start: Start, undisturbed: list[Seen], tmp_path: Path
) -> None:
    """Model, optimizer and the place in the data: saved after step 3, and the end is that of an undisturbed run."""
    restarted = start("with_accelerate", tmp_path, 4, restarts=1, preload=PRELOAD)

    assert [(1, 3)] * 2 == [(seen["attempt"], seen["first"]) for seen in restarted]
    assert undisturbed[0]["weights"] == restarted[0]["weights"] == restarted[1]["weights"]
    assert undisturbed[0]["losses"][3:] == restarted[0]["losses"]


def test_accelerates_own_command_runs_on_elasticlib(undisturbed: list[Seen], tmp_path: Path) -> None:
    """``accelerate launch`` reads its options with the parser that it finds, and hands the job over."""
    options = ["--multi_gpu", "--num_processes=2", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]
    options += ["--main_process_port=0", "--max_restarts=1", *script("with_accelerate", tmp_path, 4)]
    done = subprocess.run(
        [sys.executable, "-c", LAUNCH, *options], env=environment(), capture_output=True, text=True, timeout=LIMIT
    )

    assert 0 == done.returncode, done.stdout + done.stderr
    assert "rank 1 on node" in done.stderr, "elasticlib says so when a worker has died"
    restarted = reports(tmp_path)
    assert [(1, 3)] * 2 == [(seen["attempt"], seen["first"]) for seen in restarted]
    assert undisturbed[0]["weights"] == restarted[0]["weights"] == restarted[1]["weights"]
