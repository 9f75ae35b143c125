"""torch's modules of agents, by their names."""

from __future__ import annotations

import importlib

import pytest

import elasticlib
from elasticlib.elastic.agent import server


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (
            "",
            "ElasticAgent RunResult SimpleElasticAgent Worker WorkerGroup WorkerSpec WorkerState "
            "TORCHELASTIC_ENABLE_FILE_TIMER TORCHELASTIC_TIMER_FILE",
        ),
        (
            ".api",
            "DEFAULT_ROLE ElasticAgent RunResult SimpleElasticAgent Worker WorkerGroup WorkerSpec WorkerState",
        ),
        (
            ".local_elastic_agent",
            "LocalElasticAgent TORCHELASTIC_ENABLE_FILE_TIMER TORCHELASTIC_HEALTH_CHECK_PORT TORCHELASTIC_TIMER_FILE "
            "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT",
        ),
        (".health_check_server", "HealthCheckServer create_healthcheck_server"),
    ],
)
def test_a_door_has_the_names_that_torchs_has(module: str, names: str) -> None:
    door = importlib.import_module(f"elasticlib.elastic.agent.server{module}")

    assert sorted(names.split()) == sorted(door.__all__)
    assert [] == [name for name in names.split() if name.startswith("TORCHELASTIC") and getattr(door, name) != name]


def test_what_is_behind_a_door_is_what_the_library_offers() -> None:
    names = ("ElasticAgent", "RunResult", "SimpleElasticAgent", "Worker", "WorkerGroup", "WorkerSpec", "WorkerState")

    assert [] == [name for name in names if getattr(server, name) is not getattr(elasticlib, name)]
