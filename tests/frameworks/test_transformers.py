"""Transformers' Trainer, on a tiny model with random weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.starts import Seen, Start, both, needs, with_elastic_launch

pytestmark = [pytest.mark.slow, needs("transformers", "accelerate")]

PRELOAD = ("torch", "transformers.trainer", "transformers.models.llama.modeling_llama")
NAMES = ("rank", "local_rank", "world", "mode", "wrapped", "steps")
PLACE = [(rank, rank, 2, "distributed", "DistributedDataParallel", 8) for rank in (0, 1)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[Seen]:
    return with_elastic_launch("with_transformers", tmp_path_factory.mktemp("transformers"), preload=PRELOAD)


@pytest.mark.sampled(0.2)
def test_the_trainer_sees_the_job_and_the_model_learns(undisturbed: list[Seen]) -> None:
    assert PLACE == [tuple(seen[name] for name in NAMES) for seen in undisturbed]
    assert undisturbed[0]["losses"][-1] < 0.8 * undisturbed[0]["losses"][0]
    assert undisturbed[0]["weights"] == undisturbed[1]["weights"]


@pytest.mark.sampled(0.2)
@both
def test_a_worker_that_dies_once_goes_on_from_the_trainers_checkpoint(
    start: Start, undisturbed: list[Seen], tmp_path: Path
) -> None:
    """The Trainer saves each fourth step; rank 1 dies at the sixth."""
    restarted = start("with_transformers", tmp_path, 5, restarts=1, preload=PRELOAD)

    assert PLACE == [tuple(seen[name] for name in NAMES) for seen in restarted]
    assert [(1, "checkpoint-4")] * 2 == [(seen["attempt"], seen["resumed"]) for seen in restarted]
    assert undisturbed[0]["weights"] == restarted[0]["weights"] == restarted[1]["weights"]
    assert undisturbed[0]["losses"] == restarted[0]["losses"]
