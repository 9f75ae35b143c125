"""Agents on machines of their own: what a loss of any kind does to the job."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

from tests.benchmarks import tree
from tests.hosts._netns import Host
from tests.hosts._team import met, stop, wake

pytestmark = [pytest.mark.slow, pytest.mark.sampled(0.2)]

Hosts = tuple[Host, ...]
QUICK: dict[str, Any] = {"heartbeat_timeout": 3, "last_call_timeout": 1}


def test_survivors_form_a_new_round_when_an_agent_is_killed(hosts: Hosts, backend: str) -> None:
    with met(hosts, backend, "2:3") as job:
        agents = [job.start(host) for host in hosts[:3]]
        before = job.at_work(3)
        began = time.monotonic()
        agents[2].kill()
        after = job.at_work(2, limit=30, after=before[0].round)
        print(f"{backend}: formed anew after {max(line.at for line in after.values()) - began:.3f} s")
        job.finish()

        assert {"m1", "m2"} == {line.host for line in after.values()}
        assert [0, 0] == job.codes(*agents[:2])
        assert ([], []) == (job.faults(), job.left())


def test_survivors_wait_for_no_heartbeat_timeout_if_processes_ended(hosts: Hosts, backend: str) -> None:
    with met(hosts, backend, "2:3", heartbeat_timeout=120) as job:
        agents = [job.start(hosts[0])]
        # It coordinates: in etcd the end of the coordinator's own node shows by its lease.
        job.wait_for(lambda: agents[0].parts("rendezvous"), "the first agent's rendezvous")
        agents += [job.start(host) for host in hosts[1:3]]
        before = job.at_work(3)
        began = time.monotonic()
        tree.kill(agents[2].family())
        after = job.at_work(2, limit=60, after=before[0].round)
        print(f"{backend}: formed anew after {max(line.at for line in after.values()) - began:.3f} s")
        job.finish()

        assert {"m1", "m2"} == {line.host for line in after.values()}
        assert "all its processes have ended" in agents[0].complaints
        assert [0, 0] == job.codes(*agents[:2])
        assert ([], []) == (job.faults(), job.left())


def test_all_workers_restart_together_when_one_is_killed(hosts: Hosts, backend: str) -> None:
    with met(hosts, backend, "3:3") as job:
        for host in hosts[:3]:
            job.start(host)
        before = job.at_work(3)
        began = time.monotonic()
        os.kill(before[1].pid, signal.SIGKILL)
        after = job.at_work(3, limit=30, after=before[0].round)
        stopped = [line for line in job.lines() if line.what == "told"]
        print(f"{backend}: peers told after {max(line.at for line in stopped) - began:.3f} s")
        job.finish()

        assert {before[0].pid, before[2].pid} == {line.pid for line in stopped}
        assert {1} == {line.restarts for line in after.values()}
        assert [0, 0, 0] == job.codes()
        assert ([], []) == (job.faults(), job.left())


@pytest.mark.parametrize("stubborn", [False, True], ids=["willing", "stubborn"])
def test_node_with_a_cut_link_stops_before_others_start_and_returns(hosts: Hosts, backend: str, stubborn: bool) -> None:
    with met(hosts, backend, "2:3", stubborn=stubborn, **QUICK) as job:
        agents = [job.start(host) for host in hosts[:3]]
        before = job.at_work(3)
        began = time.monotonic()
        hosts[2].cut()
        apart = job.at_work(2, limit=30, after=before[0].round)
        print(f"{backend}: formed anew after {max(line.at for line in apart.values()) - began:.3f} s")
        lost = next(line for line in before.values() if line.host == "m3")
        ended = not tree.command(lost.pid)
        hosts[2].heal()
        again = job.at_work(3, limit=30, after=apart[0].round)
        job.finish()

        assert ended
        assert {"m1", "m2", "m3"} == {line.host for line in again.values()}
        assert {0} == {line.restarts for line in again.values()}
        assert [0, 0, 0] == job.codes(*agents)
        assert ([], []) == (job.faults(), job.left())


@pytest.mark.parametrize("whole", [False, True], ids=["agent", "machine"])
def test_all_end_and_name_the_host_of_the_store_when_it_is_killed(hosts: Hosts, whole: bool) -> None:
    with met(hosts, "c10d", "2:3") as job:
        agents = [job.start(host) for host in hosts[:3]]
        job.at_work(3)
        if whole:
            tree.kill(agents[0].family())
        else:
            agents[0].kill()
        codes = job.codes(limit=30)

        assert [-signal.SIGKILL, 1, 1] == codes
        assert all("10.77.0.1" in agent.complaints for agent in agents[1:])
        assert ([], []) == (job.faults(), job.left())


def test_job_on_etcd_continues_when_its_first_machine_dies(hosts: Hosts) -> None:
    with met(hosts, "etcd", "2:3", **QUICK) as job:
        agents = [job.start(hosts[0])]
        job.wait_for(lambda: agents[0].parts("rendezvous"), "the first agent's rendezvous")
        agents += [job.start(host) for host in hosts[1:3]]
        before = job.at_work(3)
        tree.kill(agents[0].family())
        after = job.at_work(2, limit=30, after=before[0].round)
        job.finish()

        assert {"m2", "m3"} == {line.host for line in after.values()}
        assert [0, 0] == job.codes(*agents[1:])
        assert ([], []) == (job.faults(), job.left())


@pytest.mark.sampled(0.2)
def test_all_stop_and_name_the_host_of_the_store_when_it_is_frozen(hosts: Hosts) -> None:
    with met(hosts, "c10d", "2:3", reconnect_timeout=4, join_timeout=12, **QUICK) as job:
        agents = [job.start(host) for host in hosts[:3]]
        before = job.at_work(3)
        frozen = agents[0].family()
        stop(frozen)
        codes = job.codes(*agents[1:], limit=30)
        left = [line.pid for line in before.values() if line.host != "m1" and tree.command(line.pid)]
        wake(frozen)
        job.finish()
        job.codes(agents[0], limit=30)

        assert [1, 1] == codes
        assert [] == left
        assert all("10.77.0.1" in agent.complaints for agent in agents[1:])
        assert ([], []) == (job.faults(), job.left())


def test_coordinator_stopped_past_its_lease_changes_nothing_when_it_wakes(hosts: Hosts) -> None:
    with met(hosts, "etcd", "2:3", **QUICK) as job:
        agents = [job.start(hosts[0])]
        job.wait_for(lambda: agents[0].parts("rendezvous"), "the first agent's rendezvous")
        agents += [job.start(host) for host in hosts[1:3]]
        before = job.at_work(3)
        frozen = agents[0].family()
        stop(frozen)
        apart = job.at_work(2, limit=30, after=before[0].round)
        wake(frozen)
        again = job.at_work(3, limit=30, after=apart[0].round)
        job.finish()

        assert {"m2", "m3"} == {line.host for line in apart.values()}
        assert {"m1", "m2", "m3"} == {line.host for line in again.values()}
        assert [0, 0, 0] == job.codes()
        assert ([], []) == (job.faults(), job.left())
