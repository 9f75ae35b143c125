"""Agents on machines of their own: who comes late, who takes over, and who is turned down."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.hosts._netns import Host, shifted
from tests.hosts._team import STORE_PORT, dynamic, etcd, met, team

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.2)]

Hosts = tuple[Host, ...]


def test_a_newcomer_is_in_at_once(hosts: Hosts, backend: str) -> None:
    """The quiet period is its default of 30 s, and passes nobody by: all who are known have come back."""
    with met(hosts, backend, "1:2") as job:
        agents = [job.start(host) for host in hosts[:2]]
        both = job.at_work(2)
        agents[1].kill()
        alone = job.at_work(1, after=both[0].round)
        agents.append(job.start(hosts[2]))
        joined = job.at_work(2, limit=20, after=alone[0].round)
        job.finish()

        assert {"m1", "m3"} == {line.host for line in joined.values()}
        assert [0, 0] == job.codes(agents[0], agents[2])
        assert ([], []) == (job.faults(), job.left())


def test_a_spare_takes_the_place_of_a_node_that_died(hosts: Hosts, backend: str) -> None:
    with met(hosts, backend, "2:2") as job:
        agents = [job.start(host) for host in hosts[:2]]
        before = job.at_work(2)
        spare = job.start(hosts[2])
        job.wait_for(lambda: spare.parts("rendezvous"), "the spare's rendezvous")
        agents[1].kill()
        after = job.at_work(2, limit=30, after=before[0].round)
        job.finish()

        assert {"m1", "m3"} == {line.host for line in after.values()}
        assert [0, 0] == job.codes(agents[0], spare)
        assert ([], []) == (job.faults(), job.left())


def test_all_nodes_of_a_job_on_etcd_can_be_replaced_one_after_the_other(hosts: Hosts) -> None:
    with met(hosts, "etcd", "2:3") as job:
        old = [job.start(host) for host in hosts[:3]]
        now = job.at_work(3)
        new = []
        for agent in old:
            new.append(job.start(agent.host))
            job.wait_for(lambda: new[-1].parts("rendezvous"), "the new agent's rendezvous")
            agent.process.send_signal(signal.SIGTERM)
            job.codes(agent, limit=30)
            now = job.at_work(3, limit=30, after=now[0].round)
        job.finish()

        assert [0, 0, 0] == job.codes(*new)
        assert {0} == {line.restarts for line in job.lines()}
        assert ([], []) == (job.faults(), job.left())


def _static(hosts: Hosts, nodes: int) -> list[str]:
    meeting = ["--rdzv-backend=static", f"--master-addr={hosts[0].address}", f"--master-port={STORE_PORT}"]
    return [f"--nnodes={nodes}", *meeting, "--rdzv-id=job", "--max-restarts=3"]


def test_nodes_with_fixed_places_restart_together_on_their_fixed_port(hosts: Hosts) -> None:
    with team(*_static(hosts, 2)) as job:
        for rank, host in enumerate(hosts[:2]):
            job.start(host, f"--node-rank={rank}")
        before = job.at_work(2)
        os.kill(before[1].pid, signal.SIGKILL)
        after = job.at_work(2, limit=30, after=before[0].round)
        job.finish()

        assert ["m1", "m2"] == [after[rank].host for rank in range(2)]
        assert {f"{hosts[0].address}-{STORE_PORT}-1-2"} == {line.round for line in after.values()}
        assert [0, 0] == job.codes()
        assert ([], []) == (job.faults(), job.left())


def test_a_place_that_is_taken_is_refused_and_both_nodes_are_named(hosts: Hosts) -> None:
    with team(*_static(hosts, 2)) as job:
        agents = [job.start(host, f"--node-rank={rank}") for rank, host in enumerate(hosts[:2])]
        job.at_work(2)
        second = job.start(hosts[2], "--node-rank=1")
        refused = job.codes(second, limit=30)
        job.finish()

        assert [1] == refused
        assert all(host.address in second.complaints for host in hosts[1:3])
        assert [0, 0] == job.codes(*agents)


@pytest.mark.parametrize("token", ["another", ""])
def test_a_node_with_another_token_or_none_is_turned_down(hosts: Hosts, token: str) -> None:
    with team(*dynamic("c10d", hosts[0], "2:3", last_call_timeout=1)) as job:
        agents = [job.start(host, variables={"ELASTICLIB_TOKEN": "the right one"}) for host in hosts[:2]]
        before = job.at_work(2)
        stranger = job.start(hosts[2], variables={"ELASTICLIB_TOKEN": token})
        refused = job.codes(stranger, limit=30)
        job.finish()

        assert [1] == refused
        assert "token" in stranger.complaints
        assert [0, 0] == job.codes(*agents)
        assert {before[0].round} == {line.round for line in job.lines()}


def test_a_job_with_another_id_stays_by_itself(hosts: Hosts) -> None:
    with team(*dynamic("c10d", hosts[0], "2:3", last_call_timeout=1)) as job:
        agents = [job.start(host) for host in hosts[:2]]
        before = job.at_work(2)
        stranger = job.start(hosts[2], "--rdzv-id=another", "--rdzv-conf=join_timeout=3")
        began = time.monotonic()
        refused = job.codes(stranger, limit=30)
        waited = time.monotonic() - began
        job.finish()

        assert [1] == refused
        assert waited < 20
        assert "another" in stranger.complaints
        assert [0, 0] == job.codes(*agents)
        assert {before[0].round} == {line.round for line in job.lines()}


def test_a_wall_clock_that_is_wrong_by_a_minute_changes_nothing(hosts: Hosts) -> None:
    with etcd(hosts[3]), team(*dynamic("etcd", hosts[3], "2:3", heartbeat_timeout=3), "--max-restarts=3") as job:
        agents = [job.start(hosts[0], variables=shifted(60, job.folder)), *(job.start(host) for host in hosts[1:3])]
        before = job.at_work(3)
        os.kill(before[1].pid, signal.SIGKILL)
        again = job.at_work(3, limit=30, after=before[0].round)
        agents[2].kill()
        fewer = job.at_work(2, limit=30, after=again[0].round)
        job.finish()

        assert {"m1", "m2"} == {line.host for line in fewer.values()}
        assert {1} == {line.restarts for line in fewer.values()}
        assert [0, 0] == job.codes(*agents[:2])
        assert ([], []) == (job.faults(), job.left())
