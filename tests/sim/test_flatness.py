"""Nodes may come and go for ever: what they leave in the store and in the coordinator's memory does not grow."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import attrs
import pytest

from elasticlib.rendezvous.coordinator import _node_liveness, _places, _round_end
from elasticlib.testing import FaultPlan, Join, Kill, Leave
from tests.sim.simulator import Finalized, Rules, SimulatedCluster
from tests.sim.simulator.host import Host

RULES = Rules(1, 2, 3, last_call=0.0, heartbeat=1.0)
FULL = Rules(1, 1, 3, last_call=0.0, heartbeat=1.0)
"""Rules for one node: each further node is a spare, and changes no round."""
CYCLE = 5.0
"""Seconds in which one node comes, works and goes."""
pytestmark = pytest.mark.sampled(0.25)
BOTH = pytest.mark.parametrize("coordinator", ["fixed", "elected"])


def cycling_cluster(cycles: int, coordinator: str, rules: Rules = RULES) -> SimulatedCluster:
    """The first node stays; each other one has a machine of its own, and goes in one of four ways."""
    faults: list[Join | Kill | Leave] = []
    for number in range(1, cycles + 1):
        joined, left = number * CYCLE, number * CYCLE + 2.0
        faults.append(Join(number, at=joined))
        match number % 4:
            case 0:
                faults.append(Leave(number, at=left))
            case 1:
                faults.append(Kill(number, at=left))
            case 2:
                faults.append(Kill(number, at=left, what="agent"))
            case 3:
                faults.append(Kill(number, at=left, what="rendezvous"))
    return SimulatedCluster(rules, 1, FaultPlan(faults), coordinator, work=1e6)


def samples(cluster: SimulatedCluster, cycles: int, every: int) -> Iterator[SimulatedCluster]:
    """Again and again before another node comes."""
    for number in range(every, cycles + 1, every):
        yield cluster.run(until=(number + 1) * CYCLE - 0.01)


@pytest.mark.slow
@pytest.mark.sampled(0.2)
@BOTH
def test_keys_in_the_store_do_not_grow_with_a_thousand_rounds(coordinator: str) -> None:
    cycles = 500
    cluster = cycling_cluster(cycles, coordinator)

    counts = []
    for now in samples(cluster, cycles, 10):
        assert now.store is not None
        counts.append(len(now.store.values) + len(now.store.inbox))

    assert sum(isinstance(record, Finalized) for record in cluster.history) >= 2 * cycles
    assert max(counts[5:]) <= max(counts[:5])
    assert max(counts) <= 20


@BOTH
def test_the_keys_in_the_store_do_not_grow_with_the_rounds(coordinator: str) -> None:
    cluster = cycling_cluster(32, coordinator)

    counts = [len(now.store.values) + len(now.store.inbox) for now in samples(cluster, 32, 4) if now.store is not None]

    assert max(counts[4:]) <= max(counts[:4]) <= 20


def test_saved_state_of_the_coordinator_grows_only_by_names() -> None:
    cycles = 60
    cluster = cycling_cluster(cycles, "elected")

    mails, departed = [], []
    for now in samples(cluster, cycles, 10):
        assert now.store is not None
        body = json.loads(now.store.document.data)
        mails.append(len(json.dumps(body["mail"])))
        departed.append(len(body["gone"]))

    assert max(mails[3:]) <= max(mails[:3]) + 20  # longer numbers
    assert max(departed) <= 4


def test_keys_do_not_grow_when_each_node_coordinates_in_its_turn() -> None:
    cycles = 40
    faults: list[Join | Leave | Kill] = [Kill(0, at=2.0)]
    for number in range(1, cycles + 1):
        faults.append(Join(number, at=number * 15.0 - 14.5))
        faults.append(Kill(number, at=number * 15.0 + 2.0) if number % 2 else Leave(number, at=number * 15.0 + 2.0))
    rules = Rules(1, 3, 3, last_call=0.0, heartbeat=2.0)
    cluster = SimulatedCluster(rules, 1, FaultPlan(faults), "elected", work=1e6)

    counts = []
    for number in range(5, cycles, 5):
        cluster.run(until=number * 15.0 + 1.9)
        assert cluster.store is not None
        counts.append(len(cluster.store.values))

    assert max(counts[4:]) <= max(counts[:4])


def sizes(value: Any, path: str, found: Counter[str]) -> Counter[str]:
    """Add the number of entries of each collection in *value* to *found*; return *found*."""
    if attrs.has(type(value)):
        for each in attrs.fields(type(value)):
            sizes(getattr(value, each.name), f"{path}.{each.name}", found)
    elif isinstance(value, (Mapping, Sequence, Set)) and not isinstance(value, (str, bytes)):
        found[path] += len(value)
        for inner in value.values() if isinstance(value, Mapping) else value:
            sizes(inner, f"{path}[]", found)
    return found


@pytest.mark.sampled(0.5)
@BOTH
@pytest.mark.parametrize("rules", [RULES, FULL], ids=["rounds", "spares"])
def test_memory_of_coordinator_and_node_does_not_grow(
    rules: Rules, coordinator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that is remembered of the past has a bound, which is lower here."""
    for module in (_round_end, _node_liveness):
        monkeypatch.setattr(module, "REMEMBERED", 8)
    for bound in ("NAMES", "_PLACES"):
        monkeypatch.setattr(_places, bound, 8)
    cycles = 60
    cluster = cycling_cluster(cycles, coordinator, rules)

    seen = []
    for now in samples(cluster, cycles, 10):
        [host] = [each for each in now._hosts.values() if each.node.rendezvous.alive]
        server = host.server if isinstance(host, Host) else host.host.server
        session = now.machines[0].nodes[0].member.session
        seen.append(sizes(session, "session", sizes(server, "server", Counter())))

    assert {path for path, size in seen[-1].items() if size > max(each[path] for each in seen[1:-1])} == set()


def test_saved_state_does_not_grow_while_one_round_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_places, "NAMES", 8)
    cycles = 60
    cluster = cycling_cluster(cycles, "elected", FULL)

    documents = []
    for now in samples(cluster, cycles, 10):
        assert now.store is not None
        documents.append(len(now.store.document.data))

    assert 1 == sum(isinstance(record, Finalized) for record in cluster.history)
    assert max(documents[1:]) <= documents[0] + 60  # longer numbers
