"""Lightning: its strategy finds that the workers are started, and starts none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.starts import Seen, Start, both, needs, with_elastic_launch

pytestmark = [pytest.mark.slow, needs("lightning")]

PRELOAD = ("torch", "torch._dynamo")
"""The larger part of what Lightning imports; it reads RANK when it is imported itself, so it cannot be preloaded."""
NAMES = ("rank", "local_rank", "world", "environment", "started", "steps")
PLACE = [(rank, rank, 2, "TorchElasticEnvironment", 0, 6) for rank in (0, 1)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[Seen]:
    return with_elastic_launch("with_lightning", tmp_path_factory.mktemp("lightning"), preload=PRELOAD)


@pytest.mark.sampled(0.2)
def test_the_trainer_sees_the_job_and_the_model_learns(undisturbed: list[Seen]) -> None:
    assert PLACE == [tuple(seen[name] for name in NAMES) for seen in undisturbed]
    assert undisturbed[0]["losses"][-1] < 0.5 * undisturbed[0]["losses"][0]
    assert undisturbed[0]["weights"] == undisturbed[1]["weights"]


@pytest.mark.sampled(0.2)
@both
def test_a_worker_that_dies_once_goes_on_from_lightnings_checkpoint(
    start: Start, undisturbed: list[Seen], tmp_path: Path
) -> None:
    """Each epoch of two steps is saved; rank 1 dies in the second."""
    restarted = start("with_lightning", tmp_path, 3, restarts=1, preload=PRELOAD)

    assert PLACE == [tuple(seen[name] for name in NAMES) for seen in restarted]
    assert [(1, True)] * 2 == [(seen["attempt"], seen["resumed"]) for seen in restarted]
    assert undisturbed[0]["weights"] == restarted[0]["weights"] == restarted[1]["weights"]
    assert undisturbed[0]["losses"][2:] == restarted[0]["losses"]
