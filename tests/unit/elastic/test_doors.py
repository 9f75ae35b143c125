"""torch's modules, by their names, lead to what the library offers."""

from __future__ import annotations

import importlib

import pytest

AGENTS = "ElasticAgent RunResult SimpleElasticAgent Worker WorkerGroup WorkerSpec WorkerState"
FILE_TIMER = "TORCHELASTIC_ENABLE_FILE_TIMER TORCHELASTIC_TIMER_FILE"
LAUNCHES = "LaunchConfig elastic_launch launch_agent"
NAMES = {
    "elastic.agent.server": f"{AGENTS} {FILE_TIMER}",
    "elastic.agent.server.api": f"DEFAULT_ROLE {AGENTS}",
    "elastic.agent.server.local_elastic_agent": (
        f"LocalElasticAgent {FILE_TIMER} TORCHELASTIC_HEALTH_CHECK_PORT TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT"
    ),
    "elastic.agent.server.health_check_server": "HealthCheckServer create_healthcheck_server",
    "elastic.timer.api": "TimerRequest TimerClient RequestQueue TimerServer configure expires",
    "elastic.timer.local_timer": "LocalTimerClient MultiprocessingRequestQueue LocalTimerServer",
    "elastic.timer.file_based_local_timer": "FileTimerClient FileTimerRequest FileTimerServer",
    "launcher": LAUNCHES,
    "launcher.api": LAUNCHES,
}
"""Names in the ``__all__`` of torch's modules."""


@pytest.mark.parametrize("module", NAMES)
def test_a_module_has_the_names_of_torchs(module: str) -> None:
    door = importlib.import_module(f"elasticlib.{module}")
    names = NAMES[module].split()

    assert sorted(names) == sorted(door.__all__)
    assert [] == [name for name in names if name.startswith("TORCHELASTIC") and getattr(door, name) != name]


@pytest.mark.parametrize(
    ("module", "package", "names"),
    [
        ("elastic.agent.server", "", AGENTS),
        ("elastic.timer.api", ".timer", ""),
        ("elastic.timer.local_timer", ".timer", ""),
        ("elastic.timer.file_based_local_timer", ".timer", ""),
        ("elastic.events.api", ".events", ""),
        ("elastic.metrics.api", ".metrics", ""),
        ("launcher", "", ""),
        ("launcher.api", "", ""),
    ],
)
def test_a_module_leads_to_the_librarys_own_objects(module: str, package: str, names: str) -> None:
    """Of *names*, or of all that it lists."""
    door, ours = importlib.import_module(f"elasticlib.{module}"), importlib.import_module(f"elasticlib{package}")

    assert [] == [name for name in names.split() or door.__all__ if getattr(door, name) is not getattr(ours, name)]
