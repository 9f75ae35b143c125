"""A pod that Kubernetes replaces before anybody has noticed its loss; only its variables say which place it has."""

from __future__ import annotations

import pytest

from tests.benchmarks import tree
from tests.benchmarks.replaced_pod import variables
from tests.hosts._netns import Host
from tests.hosts._team import Team, team

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.34)]


def test_replacement_pod_gets_the_lost_pods_place_and_uses_no_restart(hosts: tuple[Host, ...]) -> None:
    first, lost, replacement, _ = hosts
    with team("--max-restarts=3", "--rdzv-conf=heartbeat_timeout=4") as job:
        agents = [job.start(host, variables=variables(pod, first)) for pod, host in enumerate((first, lost))]
        job.at_work(2)

        lost.lose()
        agents[1] = job.start(replacement, variables=variables(1, first))
        # Both rounds have the same name, as endpoint and restarts are the same.
        job.wait_for(lambda: len(up(job)) == 4, "both pods to work again")
        job.finish()

        assert {(0, "m1", 2, 0), (1, "m3", 2, 0)} == set(up(job)[2:])
        assert [0, 0] == job.codes(*agents)
        assert [] == job.left()


def test_a_container_that_restarts_in_its_pod_needs_no_heartbeat_time(hosts: tuple[Host, ...]) -> None:
    first, second, *_ = hosts
    with team("--max-restarts=3", "--rdzv-conf=heartbeat_timeout=120") as job:
        agents = [job.start(host, variables=variables(pod, first)) for pod, host in enumerate((first, second))]
        job.at_work(2)

        tree.kill(agents[1].family())
        agents[1] = job.start(second, variables=variables(1, first))
        job.wait_for(lambda: len(up(job)) == 4, "both pods to work again")
        job.finish()

        assert {(0, "m1", 2, 0), (1, "m2", 2, 0)} == set(up(job)[2:])
        assert "all its processes have ended" in agents[0].complaints
        assert [0, 0] == job.codes(*agents)
        assert [] == job.left()


def up(job: Team) -> list[tuple[int, str, int, int]]:
    """Return (rank, host, number of ranks, restarts) of each worker that has started."""
    return [(line.rank, line.host, line.world, line.restarts) for line in job.lines() if line.what == "up"]
