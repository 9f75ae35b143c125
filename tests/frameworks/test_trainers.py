"""Trainers on top: each sees the job that elasticlib started, and goes on from its own checkpoint after a restart."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen

from tests.frameworks.starts import LIMIT, Seen, Start, both, environment, needs, reports, script, with_elastic_launch

pytestmark = pytest.mark.slow


@frozen
class Trainer:
    """The job of one framework, and what its workers report."""

    job: str
    preload: tuple[str, ...]
    facts: dict[str, Any]
    """Facts that every worker reports besides its rank and the number of workers."""
    learns: float
    """The last loss is below this part of the first."""
    dies_at: int
    """The step at which rank 1 dies once."""
    resumed: dict[str, Any]
    """Facts that every worker reports of the checkpoint after that death."""
    from_step: int = 0
    """The first step whose loss is reported then."""

    def sees(self, rank: int) -> dict[str, Any]:
        return {"rank": rank, "local_rank": rank, "world": 2, **self.facts}


TRAINERS = {
    # The Trainer saves each fourth step.
    "transformers": Trainer(
        "with_transformers",
        ("torch", "transformers.trainer", "transformers.models.llama.modeling_llama"),
        {"mode": "distributed", "wrapped": "DistributedDataParallel", "steps": 8},
        learns=0.8,
        dies_at=5,
        resumed={"resumed": "checkpoint-4"},
    ),
    # Each epoch of two steps is saved. Lightning reads RANK when it is imported, so it cannot be preloaded itself:
    # this is the larger part of what it imports.
    "lightning": Trainer(
        "with_lightning",
        ("torch", "torch._dynamo"),
        {"environment": "TorchElasticEnvironment", "started": 0, "steps": 6},
        learns=0.5,
        dies_at=3,
        resumed={"resumed": True},
        from_step=2,
    ),
    # Model, optimizer and the place in the data are saved after step 3.
    "accelerate": Trainer(
        "with_accelerate",
        ("torch", "accelerate"),
        {"kind": "DistributedType.MULTI_CPU", "wrapped": "DistributedDataParallel"},
        learns=0.5,
        dies_at=4,
        resumed={"first": 3},
        from_step=3,
    ),
}
PARAMETERS = [
    pytest.param("transformers", marks=needs("transformers", "accelerate")),
    pytest.param("lightning", marks=needs("lightning")),
    pytest.param("accelerate", marks=needs("accelerate")),
]
LAUNCH = """
import sys
import torch.distributed
import elasticlib.run

sys.modules["torch.distributed.run"] = elasticlib.run  # what `accelerate launch` imports and calls
from accelerate.commands.launch import main

main()
"""


@pytest.fixture(scope="module")
def undisturbed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Trainer, list[Seen]]:
    """A trainer, and what its workers report where none of them dies."""
    trainer = TRAINERS[request.param]
    return trainer, with_elastic_launch(trainer.job, tmp_path_factory.mktemp(request.param), preload=trainer.preload)


@pytest.mark.sampled(0.6)
@pytest.mark.parametrize("undisturbed", PARAMETERS, indirect=True)
def test_a_trainer_sees_the_job_and_the_model_learns(undisturbed: tuple[Trainer, list[Seen]]) -> None:
    trainer, trained = undisturbed

    assert [trainer.sees(rank) for rank in (0, 1)] == [only(trainer.sees(0), seen) for seen in trained]
    assert trained[0]["losses"][-1] < trainer.learns * trained[0]["losses"][0]
    assert trained[0]["weights"] == trained[1]["weights"]


@pytest.mark.sampled(0.6)
@pytest.mark.parametrize("undisturbed", PARAMETERS, indirect=True)
@both
def test_trainer_continues_from_its_checkpoint_after_a_worker_dies(
    start: Start, undisturbed: tuple[Trainer, list[Seen]], tmp_path: Path
) -> None:
    trainer, trained = undisturbed

    restarted = start(trainer.job, tmp_path, trainer.dies_at, restarts=1, preload=trainer.preload)

    check_resumed(trainer, trained, restarted)
    assert trained[0]["losses"][trainer.from_step :] == restarted[0]["losses"]


def check_resumed(trainer: Trainer, trained: list[Seen], restarted: list[Seen]) -> None:
    expected = [{**trainer.sees(rank), "attempt": 1, **trainer.resumed} for rank in (0, 1)]
    assert expected == [only(expected[0], seen) for seen in restarted]
    assert trained[0]["weights"] == restarted[0]["weights"] == restarted[1]["weights"]


def only(names: Iterable[str], seen: Seen) -> Seen:
    return {name: seen[name] for name in names}


@pytest.mark.sampled(0.25)
@pytest.mark.parametrize("undisturbed", PARAMETERS[-1:], indirect=True)
def test_accelerates_own_command_runs_on_elasticlib(undisturbed: tuple[Trainer, list[Seen]], tmp_path: Path) -> None:
    """``accelerate launch`` reads its options with the parser that it finds, and hands the job over."""
    options = ["--multi_gpu", "--num_processes=2", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]
    options += ["--main_process_port=0", "--max_restarts=1", *script("with_accelerate", tmp_path, 4)]
    done = subprocess.run(
        [sys.executable, "-c", LAUNCH, *options], env=environment(), capture_output=True, text=True, timeout=LIMIT
    )

    assert 0 == done.returncode, done.stdout + done.stderr
    assert "rank 1 on node" in done.stderr, "elasticlib says so when a worker has died"
    check_resumed(*undisturbed, reports(tmp_path))
