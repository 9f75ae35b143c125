"""One node from its first join to the outcome, through the doors of the package."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from elasticlib.rendezvous import (
    ContactLost,
    FailureNote,
    Final,
    Notice,
    RankAssignment,
    Rendezvous,
    RoundEnd,
    Rules,
    open_local,
)
from elasticlib.rendezvous._membership import MembershipEvent
from elasticlib.rendezvous.protocol._messages import Failed, Stopped, Succeeded

LIMIT = 30.0


@pytest.fixture
def rendezvous() -> Iterator[Rendezvous]:
    with open_local("job-1", Rules(max_restarts=1), node="here") as rendezvous:
        yield rendezvous


def notice(rendezvous: Rendezvous) -> Notice:
    taken: list[MembershipEvent] = []
    while not taken:
        assert select.select([rendezvous.member], [], [], LIMIT)[0], f"no notice within {LIMIT:g} s"
        taken = rendezvous.member.drain()
    (event,) = taken
    assert not isinstance(event, ContactLost)
    return event


def test_rendezvous_knows_its_run_id_backend_and_node(rendezvous: Rendezvous) -> None:
    assert ("job-1", "c10d", "here") == (rendezvous.run_id, rendezvous.backend, rendezvous.member.node)


def test_the_nodes_name_is_the_hosts_unless_given() -> None:
    with open_local("job-1", Rules(), backend="static") as rendezvous:
        assert (os.uname().nodename, "static") == (rendezvous.member.node, rendezvous.backend)


def test_a_node_that_succeeds_ends_the_job_well(rendezvous: Rendezvous) -> None:
    rendezvous.member.join(4, "trainer")
    assignment = notice(rendezvous)
    rendezvous.member.post(Succeeded(rendezvous.member.node, 0))

    assert isinstance(assignment, RankAssignment)
    assert (0, 0, 1, 0, 4, 0, 1) == (
        assignment.round,
        assignment.group_rank,
        assignment.group_world_size,
        assignment.rank_base,
        assignment.world_size,
        assignment.restart_count,
        assignment.max_restarts,
    )
    assert ("127.0.0.1",) == assignment.master_addresses
    listener = rendezvous.member.listener()
    assert listener is not None
    assert ("127.0.0.1", assignment.master_port) == listener.getsockname()
    listener.close()
    assert Final(True, "all 1 nodes succeeded in round 0", round=0) == notice(rendezvous)


def test_node_restarts_until_the_budget_is_used_up(rendezvous: Rendezvous) -> None:
    why = (FailureNote(3, 3, 100, 1, "ValueError: x"),)
    notices: list[Notice] = []
    for round in range(2):
        rendezvous.member.join(4, "trainer")
        notices.append(notice(rendezvous))
        rendezvous.member.post(Failed(rendezvous.member.node, round, why))
        notices.append(notice(rendezvous))
        rendezvous.member.post(Stopped(rendezvous.member.node, round, why))
    notices.append(notice(rendezvous))

    assert [RankAssignment, RoundEnd, RankAssignment, RoundEnd, Final] == [type(item) for item in notices]
    assert [True, False] == [item.restart for item in notices if isinstance(item, RoundEnd)]
    assert isinstance(notices[-1], Final)
    assert ("here", why[0]) == (notices[-1].root_node, notices[-1].root)


def test_many_launches_leave_no_thread_and_no_descriptor() -> None:
    threads, descriptors = threading.active_count(), sorted(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with open_local("job", Rules()) as rendezvous:
            rendezvous.member.join(4, "trainer")

    assert threads == threading.active_count()
    assert descriptors == sorted(os.listdir("/proc/self/fd"))


def test_closing_is_prompt_while_a_node_waits_for_others() -> None:
    rendezvous = open_local("job", Rules(2, 2))
    rendezvous.member.join(4, "trainer")
    began = time.monotonic()
    rendezvous.close()
    rendezvous.close()

    assert time.monotonic() - began < 5.0


@pytest.mark.slow
def test_importing_it_loads_neither_torch_nor_numpy() -> None:
    code = "import sys, elasticlib.rendezvous; print(sorted({'torch', 'numpy'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT, check=True)

    assert "[]" == done.stdout.strip()
