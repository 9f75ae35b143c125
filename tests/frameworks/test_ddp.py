"""Plain DistributedDataParallel, started by each launcher."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.starts import Seen, Start, both, with_elastic_launch, with_elasticrun, with_torchrun

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.3)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[Seen]:
    return with_elastic_launch("ddp", tmp_path_factory.mktemp("ddp"))


def test_the_same_script_ends_with_the_same_weights_under_every_launcher(
    undisturbed: list[Seen], tmp_path: Path
) -> None:
    ours, torchs = with_elasticrun("ddp", tmp_path), with_torchrun("ddp", tmp_path)

    assert [(0, 2), (1, 2)] == [(seen["rank"], seen["world"]) for seen in ours]
    assert ours[0]["weights"] == ours[1]["weights"]
    assert ours[0]["losses"] == sorted(ours[0]["losses"], reverse=True)
    assert ours == torchs == undisturbed


@both
def test_a_worker_that_dies_once_costs_a_restart_and_nothing_else(
    start: Start, undisturbed: list[Seen], tmp_path: Path
) -> None:
    restarted = start("ddp", tmp_path, 3, restarts=1)

    assert [{**seen, "attempt": 1} for seen in undisturbed] == restarted
